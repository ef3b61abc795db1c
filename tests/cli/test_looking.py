"""What `ls`, `show`, `why` and `check` say of a spool."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from calling import Command, asked, put_job
from cli.records import begin, end, serve, view
from spool.core import layout
from spool.core.model import SECOND_NS as S
from spool.core.model import Grant, Result, State
from spool.formats import journal
from spool.formats.state import JobView
from spool.query.jobs import JobLister
from spool.store.ownership import this_user
from spool.store.spool import Spool
from support import ROOT, printed_on


def ended(root: Path, name: str, outcome: State, at_ns: int, *, run: int = 1, code: int | None = None) -> None:
    """Put an ended job with its records and its line of history into the spool."""
    put_job(root, name, place="done")
    end(root, Result(name, run, 1, outcome, f"exit code {code}", 1, at_ns - 2 * S, at_ns, exit_code=code, user="me"))


def running(root: Path, name: str) -> None:
    """Put a job with two CPUs into running/ whose wrapper is this very process."""
    begin(root, name, 'command = "true"\ncpus = 2\n', Grant(cpus=2))


def names(said: str) -> list[str]:
    """Return the first column of a table."""
    return [line.split()[0] for line in said.splitlines()[1:]]


def test_ls_shows_what_runs_what_waits_and_what_ended_lately(spool: Command, spool_root: Path) -> None:
    """Without a dispatcher the files alone are shown."""
    now = time.time_ns()
    ended(spool_root, "old", State.FAILED, now - 60_000_000_000, code=3)
    running(spool_root, "runs")
    put_job(spool_root, "low", 'command = "true"\npriority = 5\n')
    put_job(spool_root, "high", 'command = "true"\npriority = 50\nmemory = "2G"\n')
    put_job(spool_root, "parked", place="held")
    said = spool("ls")
    assert names(said.out) == ["old", "runs", "high", "low", "parked"]
    assert [line.split()[1] for line in said.out.splitlines()[1:]] == ["failed", "running", "queued", "queued", "held"]
    assert "2G" in said.out


def test_ls_shows_ten_ended_jobs_unless_all_are_asked_for(spool: Command, spool_root: Path) -> None:
    """The newest ten of the last day; -a shows every one, also those that the history does not know."""
    now = time.time_ns()
    for at in range(12):
        ended(spool_root, f"job_{at}", State.FINISHED, now - (12 - at) * 1_000_000_000, code=0)
    put_job(spool_root, "byhand", place="done")
    assert names(spool("ls").out) == [*(f"job_{at}" for at in range(3, 12)), "byhand"]
    assert set(names(spool("ls", "-a").out)) == {"byhand", *(f"job_{at}" for at in range(12))}
    assert names(spool("ls", "job_1*", "--sort", "name").out) == ["job_1", "job_10", "job_11"]


def test_ls_filters_and_sorts(spool: Command, spool_root: Path) -> None:
    """State, project, tag and user each leave only what fits; --quiet prints names; an unknown name is an error."""
    put_job(spool_root, "a", 'command = "true"\nproject = "x"\ntags = ["t"]\n')
    put_job(spool_root, "b", 'command = "true"\n')
    put_job(spool_root, "c", 'command = "true"\nproject = "x"\n', "held")
    assert spool("ls", "-q", "--project", "x").out == "a\nc\n"
    assert spool("ls", "-q", "--tag", "t").out == "a\n"
    assert spool("ls", "-q", "-s", "held").out == "c\n"
    assert spool("ls", "-q", "-u", "nobody-at-all").out == ""
    assert spool("ls", "-s", "nonsense").code == 2
    assert (spool("ls", "nosuch").code, spool("ls", "nosuch*").code) == (3, 0)


def test_ls_prints_json_even_if_there_is_nothing(spool: Command, spool_root: Path) -> None:
    """The JSON of an empty spool is JSON, and that of a full one has its jobs."""
    assert asked(spool, "ls")["jobs"] == []
    put_job(spool_root, "a")
    found = asked(spool, "ls")
    assert (found["version"], found["dispatcher"]) == (1, False)
    [row] = found["jobs"]
    assert (row["name"], row["state"], row["priority"], row["memory_bytes"]) == ("a", "queued", 10, None)


def test_ls_believes_the_files_before_the_dispatcher(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reasons come from state.json while a dispatcher lives; an entry that the files contradict is passed over."""
    put_job(spool_root, "waits")
    put_job(spool_root, "moved", place="held")
    put_job(spool_root, "new")
    jobs = {
        "waits": JobView(state="queued", reason="cpus: needs 4, 1 free", cpus=4, user="me"),
        "moved": JobView(state="queued", reason="wrong"),
        "gone": JobView(state="running"),
    }
    serve(monkeypatch, spool_root, jobs)
    rows = {row.name: row for row in JobLister(Spool(str(spool_root))).listing().rows}
    assert set(rows) == {"waits", "moved", "new"}
    assert (rows["waits"].reason, rows["waits"].cpus) == ("cpus: needs 4, 1 free", 4)
    assert (rows["moved"].state, rows["moved"].reason) == (State.HELD, "held")
    assert asked(spool, "why", "waits")["last_said"] == "cpus: needs 4, 1 free"
    old = time.time() - 120
    os.utime(spool_root / "state.json", (old, old))
    assert "no heartbeat" in spool("ls").err


def test_many_jobs_are_listed_without_reading_their_files(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a dispatcher lives no job file is opened for the list."""
    count = 300
    for at in range(count):
        (spool_root / "queued" / f"j{at}.toml").touch()
    job = JobView(state="queued", reason="cpus", cpus=1)
    serve(monkeypatch, spool_root, {f"j{at}": job for at in range(count)}, at_ns=1)

    def refuse(*words: object) -> bytes:
        raise AssertionError("a job file was read")

    monkeypatch.setattr(Spool, "job_text", refuse)
    assert len(JobLister(Spool(str(spool_root))).listing().rows) == count


def test_a_terminal_gets_a_table_and_a_pipe_plain_text(spool_root: Path) -> None:
    """Colours and lines are for terminals; in a pipe there is text that awk can read."""
    put_job(spool_root, "a", place="held")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "spool", "ls"]
    piped = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    assert b"\x1b" not in piped
    master, slave = pty.openpty()
    with subprocess.Popen(command, env=environment, stdout=slave, stderr=subprocess.DEVNULL):
        os.close(slave)
        drawn = printed_on(master)
    assert b"\x1b[" in drawn
    assert b"held" in drawn


def test_show_tells_everything_of_a_job(spool: Command, spool_root: Path) -> None:
    """The file, where it is, each run with its outcome, and where the output of the newest is."""
    ended(spool_root, "a", State.FAILED, time.time_ns(), code=3)
    os.rename(spool_root / "done" / "a.toml", spool_root / "queued" / "a.toml")
    running(spool_root, "b")
    assert f"{spool_root}/jobs/a/1/log" in spool("show", "a").out
    assert "2 CPUs" in spool("show", "b").out
    found = asked(spool, "show", "a")
    assert found["places"] == ["queued"]
    assert [(run["run"], run["state"], run["exit_code"]) for run in found["runs"]] == [(1, "failed", 3)]
    assert spool("show", "nosuch").code == 3
    assert spool("show", "a", "--run", 2).code == 3


def test_show_says_of_an_array_how_many_tasks_it_has(spool: Command, spool_root: Path) -> None:
    """Before the dispatcher has expanded it, held or not."""
    for name, place in (("waits", "queued"), ("parked", "held")):
        put_job(spool_root, name, 'command = "true"\narray = "0-6"\n', place)
        assert re.search("^tasks +7, none issued yet$", spool("show", name).out, re.MULTILINE)


def test_show_begins_with_the_state_and_ends_with_the_file(spool: Command, spool_root: Path) -> None:
    """State and reason, the run, its last ten lines if it failed, the job; a long file never hides them."""
    ended(spool_root, "a", State.FAILED, time.time_ns(), code=3)
    (spool_root / "jobs" / "a" / "1" / "log").write_text("".join(f"line {at}\n" for at in range(20)))
    first, *rest = spool("show", "a").out.splitlines()
    assert "failed" in first
    assert rest.index("run 1:") < rest.index("  line 10") < rest.index("  line 19") < rest.index("the file:")
    assert "  line 9" not in rest
    assert rest[-1] == '  command = "true"'
    ended(spool_root, "b", State.FINISHED, time.time_ns(), code=0)
    (spool_root / "jobs" / "b" / "1" / "log").write_text("quiet\n")
    assert "quiet" not in spool("show", "b").out
    assert asked(spool, "show", "a")["last_lines"][-1] == "line 19"


def test_why_of_a_failed_job_is_its_end_and_its_last_lines(spool: Command, spool_root: Path) -> None:
    """The outcome and the exit code, then what it wrote last; its error output if that is in a file of its own."""
    ended(spool_root, "a", State.FAILED, time.time_ns(), code=1)
    metadir = spool_root / "jobs" / "a" / "1"
    (metadir / "log").write_bytes(b"epoch 1\r\n 5%|#  |\r 9%|## |\rKeyError: \x1b[31m'lr'\n\n")
    assert spool("why", "a").out.splitlines()[-2:] == ["  epoch 1", "  KeyError: \\u001b[31m'lr'"]
    found = asked(spool, "why", "a")
    assert (found["outcome"], found["reasons"]) == ("failed", [{"code": "failed", "text": "exit code 1"}])
    (metadir / "log").unlink()
    os.mkfifo(metadir / "log")
    assert spool("why", "a").out.count("\n") == 1


def test_why_of_a_failed_array_has_the_last_lines_of_a_failed_task(spool: Command, spool_root: Path) -> None:
    """The counts alone would not say what went wrong."""
    for name, outcome in (("s_0", State.FINISHED), ("s_1", State.FAILED), ("s_2", State.FAILED), ("s", State.FAILED)):
        ended(spool_root, name, outcome, time.time_ns(), code=1)
    (spool_root / "jobs" / "s" / "1" / "array.toml").write_text('job = "s"\nrun = 1\ntasks = 3\n')
    (spool_root / "jobs" / "s_1" / "1" / "log").write_text("KeyError: lr\n")
    assert spool("why", "s").out.splitlines()[-1] == "  KeyError: lr"
    assert asked(spool, "why", "s")["last_lines_of"] == "s_1"


def test_a_file_that_is_open_in_an_editor_has_no_error(spool: Command, spool_root: Path) -> None:
    """It waits until it is closed, and there is nothing to mend; the same while it cannot be read."""
    put_job(spool_root, "a", "comand = 1\n")
    assert [reason["code"] for reason in asked(spool, "why", "a")["reasons"]] == ["invalid"]
    (spool_root / "queued" / ".a.toml.swp").touch()
    (reason,) = asked(spool, "why", "a")["reasons"]
    assert reason["code"] == "unread"
    assert "edit a" not in spool("why", "a").out


def test_what_never_fits_is_ahead_of_nobody(spool: Command, spool_root: Path) -> None:
    """It stands in no other job's way."""
    for at, (name, cpus) in enumerate((("huge", 100000), ("huger", 100000), ("a", 0), ("b", 0)), 1):
        os.utime(put_job(spool_root, name, f'command = "true"\ncpus = {cpus}\n'), (at, at))
    assert [asked(spool, "why", name)["ahead"] for name in ("a", "b")] == [0, 1]
    assert asked(spool, "why", "b")["behind"] == "a"


def test_why_of_a_running_job_says_what_it_does(spool: Command, spool_root: Path) -> None:
    """Its command, since when, and what is left of its time limit; for a program as values."""
    running(spool_root, "r")
    assert asked(spool, "why", "r")["left_ns"] is None
    text = 'command = "sleep 9"\ntime_limit = "2h"\n'
    for path in ("running/r.toml", "jobs/r/1/job.toml"):
        (spool_root / path).write_text(text)
    found = asked(spool, "why", "r")
    assert (found["run"], found["command"], found["time_limit_ns"]) == (1, "sleep 9", 7200 * 10**9)
    assert 0 < found["left_ns"] <= 7200 * 10**9
    assert found["started_at"] is not None


def test_each_view_knows_a_run_that_is_starting(spool: Command, spool_root: Path) -> None:
    """`ls`, `show`, `why` and `info`: one that was claimed and has no run yet, and one whose wrapper has not spoken."""
    put_job(spool_root, "claimed", place="running")
    running(spool_root, "silent")
    (spool_root / "jobs" / "silent" / "1" / "jid").unlink()
    assert [row["state"] for row in asked(spool, "ls")["jobs"]] == ["starting", "starting"]
    for name in ("claimed", "silent"):
        assert asked(spool, "show", name)["row"]["state"] == "starting"
        assert asked(spool, "why", name)["doing"] == "it is starting"
    assert asked(spool, "info")["states"] == {"starting": 2}


def test_why_takes_several_names(spool: Command, spool_root: Path) -> None:
    """Each is answered, also after one that nobody knows, whose error is the exit code."""
    for name in ("a", "b"):
        put_job(spool_root, name, place="held")
    said = spool("why", "a", "nosuch", "b")
    assert [line for line in said.out.splitlines() if ": held" in line] == ["a: held", "b: held"]
    assert (said.code, "nosuch" in said.err) == (3, True)
    assert [each["name"] for each in asked(spool, "why", "a", "b")["jobs"]] == ["a", "b"]


def test_info_counts_each_job_that_ended_once_as_ls_lists_it(spool: Command, spool_root: Path) -> None:
    """Neither a run after which its job goes on counts, nor an earlier end of one that was requeued or waits again."""
    now = time.time_ns()
    for name, run, outcome, again in (
        ("retried", 1, State.FAILED, "retry"),
        ("retried", 2, State.FINISHED, None),
        ("requeued", 1, State.FAILED, None),
        ("requeued", 2, State.FINISHED, None),
        ("failed", 1, State.FAILED, None),
        ("waits", 1, State.FAILED, None),
    ):
        end(spool_root, Result(name, run, 1, outcome, "", 1, 2, now, 0, user="me", again=again))
        put_job(spool_root, name, place="queued" if name == "waits" else "done")
    listed = Counter(row["state"] for row in asked(spool, "ls", "--all")["jobs"])
    assert asked(spool, "info")["ended"] == {"finished": 2, "failed": 1} == listed - Counter(["queued"])


@pytest.mark.parametrize(("line", "paused", "code"), [('executor = "tmux"', False, "executor"), ("", True, "paused")])
def test_why_promises_no_time_where_somebody_has_to_do_something(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch, line: str, paused: bool, code: str
) -> None:
    """An executor that is not there, or a pause, ends when somebody ends it; `plan` starts nothing either."""
    monkeypatch.setenv("PATH", str(spool_root))  # this machine may have it
    put_job(spool_root, "a", f'command = "true"\n{line}\n')
    if paused:
        (spool_root / "paused").touch()
    found = asked(spool, "why", "a")
    assert ([reason["code"] for reason in found["reasons"]], found["start_at"]) == ([code], None)
    assert "nothing starts now" in spool("plan").out


def test_why_of_a_job_that_may_start_says_so(spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is in the way, that is the answer, and a start only with a dispatcher; an end of one that ended."""
    put_job(spool_root, "a", 'command = "true"\ncpus = 0\n')
    put_job(spool_root, "d", place="done")
    assert spool("why", "d").out == f"d: cancelled by {this_user()} before it started\n"
    assert spool("why", "nosuch").code == 3
    serve(monkeypatch, spool_root, {"a": JobView(state="queued")})
    assert spool("why", "a").out.startswith("a: nothing blocks it; it starts in the dispatcher's next pass\n")


def test_a_run_that_was_begun_and_cancelled_without_a_dispatcher_is_seen(spool: Command, spool_root: Path) -> None:
    """The last view has the job waiting, the journal its start; its file is gone, and what it asked for is told."""
    view(spool_root, {"a": JobView(state="queued")})
    running(spool_root, "a")
    (spool_root / layout.JOURNAL).write_bytes(journal.render([journal.Started("a", 1, "", 1, 1, 1)]))
    (spool_root / "jobs" / "a" / "1" / "jid").unlink()
    assert spool("cancel", "a").code == 0
    [row] = json.loads(spool("ls", "--json").out)["jobs"]
    assert (row["name"], row["cpus"], row["reason"]) == ("a", 2, f"cancel by {this_user()}")


def test_a_name_whose_start_was_taken_back_is_not_proposed_for_itself(spool: Command, spool_root: Path) -> None:
    """Its directory is left, with a run that never was."""
    (spool_root / "jobs" / "train").mkdir(parents=True)
    assert "did you mean" not in spool("show", "train").err
    assert " train?" in spool("show", "trains").err


def test_why_and_plan_know_who_was_cancelled_without_a_dispatcher(spool: Command, spool_root: Path) -> None:
    """A job that depends on it ends, or starts, as it does with the next dispatcher."""
    put_job(spool_root, "gone", place="done")
    put_job(spool_root, "ends", 'command = "true"\ndepends_on = ["gone"]\n')
    put_job(spool_root, "starts", 'command = "true"\ncpus = 0\ndepends_on = { ended = ["gone"] }\n')
    planned = asked(spool, "plan")
    assert [planned[key][0]["name"] for key in ("ends", "starts")] == ["ends", "starts"]
    assert "records it as cancelled" in spool("why", "ends").out


def test_check_names_line_and_key_as_json(spool: Command, tmp_path: Path) -> None:
    """Of each problem of each file."""
    bad = put_job(tmp_path, "bad", 'command = "true"\ncpu = 1\nmemory = 5\n', ".")
    found = json.loads(spool("check", "--json", bad).out)["files"][0]
    assert (found["valid"], [each["line"] for each in found["problems"]]) == (False, [2, 3])


@pytest.mark.parametrize("kind", ["fifo", "directory", "nonsense"])
def test_wait_reads_the_history_where_a_result_cannot_be_read(spool: Command, spool_root: Path, kind: str) -> None:
    """The end that every list shows is the end that is waited for, with its exit code."""
    ended(spool_root, "a", State.FAILED, time.time_ns(), code=7)
    result = spool_root / "jobs" / "a" / "1" / "result.toml"
    result.unlink()
    {"fifo": os.mkfifo, "directory": os.mkdir, "nonsense": lambda path: path.write_text("nonsense")}[kind](result)
    assert spool("wait", "a").code == 7


def test_why_of_a_held_job_promises_no_time(spool: Command, spool_root: Path) -> None:
    """It says what lets it start; with what else is in its way, and also where a hook has held it."""
    put_job(spool_root, "free", 'command = "true"\ncpus = 0\n', "held")
    put_job(spool_root, "large", 'command = "true"\ncpus = 100000\n', "held")
    vetoed = put_job(spool_root, "vetoed", 'command = "true"\ncpus = 0\n', "held")
    Path(f"{vetoed}.reason").write_text("hook submitting: not on a Friday\n")
    os.utime(f"{vetoed}.reason", (time.time() + 5, time.time() + 5))
    for name in ("free", "large", "vetoed"):
        said = spool("why", name).out
        assert f"`spool release {name}`" in said
        assert "start: now" not in said
        assert asked(spool, "why", name)["start_at"] is None
    assert "never fits" in spool("why", "large").out
