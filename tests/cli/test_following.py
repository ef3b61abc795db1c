"""Waiting for jobs and reading their output: `wait`, `log`, `run`."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import pytest

from calling import Command, put_job, spawned, start
from cli.records import end, metadir_of
from spool.client import waiting
from spool.client.output import Tail
from spool.client.waiting import End, Waiter
from spool.core.model import Result, State
from spool.formats.wrapper import Assignments, Surroundings
from spool.formats.wrapper import render as render_wrapper
from spool.store.spool import Spool
from support import PATIENCE_S, wait_for


def ended(
    root: Path, name: str, run: int, outcome: State, *, code: int | None = None, again: str | None = None
) -> Path:
    """Write the record of an ended run; return its directory."""
    result = Result(name, run, 1, outcome, str(outcome), exit_code=code, ended_at_ns=1, again=again)
    return end(root, result, told=False)


@pytest.mark.parametrize(
    ("outcome", "code", "expected"),
    [
        (State.FINISHED, 0, 0),
        (State.FAILED, 7, 7),
        (State.FAILED, None, 1),
        (State.TIMEOUT, 143, 124),
        (State.LOST, None, 125),
        (State.CANCELLED, 143, 130),
        (State.OUT_OF_MEMORY, 137, 137),
        (State.UNSCHEDULABLE, None, 75),
    ],
)
def test_wait_exits_as_the_job_did(
    spool: Command, spool_root: Path, outcome: State, code: int | None, expected: int
) -> None:
    """Each outcome has its exit code; a failed job's is its own."""
    put_job(spool_root, "a", place="done")
    ended(spool_root, "a", 1, outcome, code=code)
    assert spool("wait", "a").code == expected


def test_a_job_that_is_seen_between_its_result_and_the_move_of_its_file_has_ended_as_it_did(spool_root: Path) -> None:
    """The run of a file in `running/` is the newest one, also once its result is there: it is not an older end."""
    file = put_job(spool_root, "a", place="running")
    ended(spool_root, "a", 1, State.FINISHED, code=0)
    waiter = Waiter(Spool(str(spool_root)), ("a",))
    assert waiter.poll() == []
    file.rename(spool_root / "done" / "a.toml")
    assert waiter.poll() == [End("a", State.FINISHED, 0, "finished", 1)]


def test_a_job_that_runs_and_ends_while_it_is_first_looked_at_has_ended_as_it_did(
    spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine its whole life may pass between two reads: its end is never that of an older run."""
    file = put_job(spool_root, "a")
    places = Spool.places

    def life_after(spool: Spool, name: str) -> list[str]:
        found = places(spool, name)
        if found == ["queued"]:
            ended(spool_root, "a", 1, State.FINISHED, code=0)
            file.rename(spool_root / "done" / "a.toml")
        return found

    monkeypatch.setattr(waiting, "GRACE_NS", 0)
    waiter = Waiter(Spool(str(spool_root)), ("a",))
    monkeypatch.setattr(Spool, "places", life_after)
    assert [waiter.poll(), waiter.poll()] == [[], [End("a", State.FINISHED, 0, "finished", 1)]]


def test_a_job_that_is_being_stopped_has_not_ended(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an older record of its name lies in `done/`: what counts is the run that was ordered to stop."""
    monkeypatch.setattr(waiting, "GRACE_NS", 0)
    put_job(spool_root, "a", place="done")
    ended(spool_root, "a", 1, State.FINISHED, code=0)
    (metadir_of(spool_root, "a", 2) / "stop").write_text("requeue root 1\n")
    waiter = Waiter(Spool(str(spool_root)), ("a",))
    assert [waiter.poll(), waiter.poll()] == [[], []]


def test_wait_takes_the_first_bad_code_of_several(spool: Command, spool_root: Path) -> None:
    """Of several jobs the first named that did not finish gives the code, and all are waited for."""
    for name, code in (("a", 0), ("b", 5), ("c", 6)):
        put_job(spool_root, name, place="done")
        ended(spool_root, name, 1, State.FAILED if code else State.FINISHED, code=code)
    assert spool("wait", "a", "b", "c").code == 5
    assert spool("wait", "c", "b").code == 6
    assert spool("wait", "a", "nosuch").code == 3
    put_job(spool_root, "d")
    assert spool("wait", "--any", "d", "a").code == 0


def test_wait_for_all_is_for_every_job_that_waits_or_runs(spool: Command, spool_root: Path) -> None:
    """Without names it stands for all of these, for none that is held or has ended; where there are none it is over."""
    ended(spool_root, "old", 1, State.FAILED, code=9)
    put_job(spool_root, "old", place="done")
    put_job(spool_root, "parked", place="held")
    assert spool("wait", "--all").code == 0
    put_job(spool_root, "b2", place="running")
    put_job(spool_root, "b10")
    said = spool("wait", "--all", "--timeout", "50ms")
    assert said.code == 124
    assert "b2, b10" in said.err
    assert "--all" in spool("wait").err


def test_wait_says_once_of_each_job_that_it_is_held(spool: Command, spool_root: Path) -> None:
    """Who has held a job is not on record, but what lets it start; a job that only has an older record is not held."""
    for place in ("held", "done"):
        put_job(spool_root, "parked", place=place)
    put_job(spool_root, "waits")
    said = spool("wait", "parked", "waits", "--timeout", "200ms")
    assert said.code == 124
    assert said.err.count("spool release parked") == 1


@pytest.fixture
def needs_leave(spool_root: Path) -> Path:
    """Have a hook that lets nothing start until there is the file whose path is returned."""
    leave, hook = spool_root / "leave", spool_root / "hooks" / "submitting"
    hook.parent.mkdir(mode=0o700, exist_ok=True)
    hook.write_text(f"#!/bin/sh\n[ -e {leave} ] || {{ echo no way; exit 1; }}\n")
    hook.chmod(0o755)
    return leave


def test_who_waits_for_a_job_that_a_hook_holds_is_told_and_waits_on(
    needs_leave: Path, dispatcher: object, spool: Command
) -> None:
    """The reason and the remedy are said once; when the job is released the command goes on with it."""
    process = start("run", "--name", "a", "-c", "exit 7")
    assert process.stderr is not None
    while "no way; `spool release a`" not in (line := process.stderr.readline()):
        assert line
    needs_leave.touch()
    assert spool("release", "a").code == 0
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 7
    assert "is held" not in err


def test_a_job_that_will_be_tried_again_has_not_ended(spool_root: Path) -> None:
    """A run that says `again` is not the end, nor is an older record in done/ while the job waits again."""
    root = Spool(str(spool_root))
    put_job(spool_root, "a")
    put_job(spool_root, "a", place="done")
    ended(spool_root, "a", 1, State.FAILED, code=1, again="retry")
    waiter = Waiter(root, ("a",))
    assert waiter.poll() == []
    os.rename(spool_root / "queued" / "a.toml", spool_root / "done" / "a.toml")
    ended(spool_root, "a", 2, State.FINISHED, code=0)
    assert waiter.poll() == [End("a", State.FINISHED, 0, "finished", 2)]


def test_a_job_cancelled_while_it_waits_is_not_taken_for_its_earlier_run(
    spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was seen waiting and then lies in done/ without a new run did not end as the run before it did."""
    monkeypatch.setattr(waiting, "GRACE_NS", 0)
    root = Spool(str(spool_root))
    ended(spool_root, "a", 1, State.FINISHED, code=0)
    put_job(spool_root, "a")
    waiter = Waiter(root, ("a",))
    assert waiter.poll() == []
    os.rename(spool_root / "queued" / "a.toml", spool_root / "done" / "a.toml")
    assert [end.outcome for end in wait_for(waiter.poll)] == [State.CANCELLED]


def test_while_a_cancelled_run_is_stopped_its_job_has_not_ended(spool_root: Path) -> None:
    """Between `rm running/a.toml` and the record of the end there is no file, and the wait goes on."""
    root = Spool(str(spool_root))
    put_job(spool_root, "a", place="running")
    (spool_root / "jobs" / "a" / "1").mkdir(parents=True)
    waiter = Waiter(root, ("a",))
    assert waiter.poll() == []
    (spool_root / "running" / "a.toml").unlink()
    assert waiter.poll() == []
    put_job(spool_root, "a", place="done")
    end(spool_root, Result("a", 1, 1, State.CANCELLED, "cancelled by me", ended_at_ns=1), told=False)
    assert waiter.poll() == [End("a", State.CANCELLED, None, "cancelled by me", 1)]


@pytest.mark.parametrize("text", ["", "a\n", "a\nb\nc\n", "a\nb\nc", "\n\n\n", "x" * 100_000 + "\nlast\n", "one long"])
def test_the_last_lines_are_those_that_tail_shows(tmp_path: Path, text: str) -> None:
    """`-n` counts lines as tail(1) does, an unfinished last one too."""
    path = tmp_path / "log"
    path.write_text(text)
    for lines in (0, 1, 2, 3, 10):
        tail = Tail(str(path))
        tail.skip_to_last(lines)
        shown = b"".join(iter(tail.read, b"")).decode()
        assert shown == "".join(text.splitlines(keepends=True)[-lines:] if lines else []), lines


def test_a_file_that_is_cut_short_or_replaced_is_read_on(tmp_path: Path) -> None:
    """A log that its program truncates or rotates is followed, each byte once."""
    path = tmp_path / "log"
    path.write_text("one\n")
    tail = Tail(str(path))
    assert tail.read() == b"one\n"
    path.write_text("2\n")
    assert tail.read() == b"2\n"
    os.rename(path, tmp_path / "log.1")
    with (tmp_path / "log.1").open("a") as old:
        old.write("late\n")
    path.write_text("new\n")
    assert tail.read() == b"late\n"
    assert tail.read() == b"new\n"
    assert tail.read() == b""


def wrapped(root: Path, name: str, old: str, stdout: str | None = None, stderr: str | None = None) -> Path:
    """Write an ended run whose wrapper was made for the metadir *old*."""
    metadir = ended(root, name, 1, State.FINISHED, code=0)
    outputs = {"stdout": stdout, "stderr": stderr}
    assignments = Assignments(metadir=old, command="true", surroundings=Surroundings("-", "host"), **outputs)
    (metadir / "run.sh").write_bytes(render_wrapper(assignments))
    put_job(root, name, place="done")
    return metadir


def test_a_spool_that_was_moved_has_its_logs_with_it(spool: Command, spool_root: Path, tmp_path: Path) -> None:
    """After a `mv` of the spool, log, log -f, show and tails read the metadir, not the path in run.sh."""
    metadir = wrapped(spool_root, "a", "/home/old/.spool/jobs/a/1")
    (metadir / "log").write_text("here\n")
    assert spool("log", "a").out == "here\n"
    assert spool("log", "-f", "a").out == "here\n"
    assert spool("log", "--path", "a").out == f"{metadir}/log\n"
    assert f"{metadir}/log" in spool("show", "a").out
    own = tmp_path / "own"
    own.write_text("mine\n")
    wrapped(spool_root, "b", "/home/old/.spool/jobs/b/1", str(own))
    assert spool("log", "b").out == "mine\n"


def test_the_last_lines_have_the_last_state_of_a_progress_bar(spool: Command, spool_root: Path) -> None:
    """Where no terminal draws it; other line ends stay, the whole log is as it was written, and never its own end."""
    bars = b"".join(b" %d%%|## |\r" % at for at in range(50_000))
    text = b"begin\n" + bars + b"100%|###|\nend\r\n 1%\r 2%"
    log = wrapped(spool_root, "a", str(spool_root / "jobs" / "a" / "1")) / "log"
    log.write_bytes(text)
    done = spawned("log", "a", "-n", "3", "--run", "1", text=False)
    assert bytes(done.stdout) == b"100%|###|\nend\r\n 2%"  # type: ignore[call-overload]
    assert bytes(spawned("log", "a", text=False).stdout) == text  # type: ignore[call-overload]
    with log.open("a") as itself:
        assert {spawned("log", *words, stdout=itself).returncode for words in (["a"], ["-f", "a"])} == {1}
    assert log.read_bytes() == text


def test_run_keeps_the_two_outputs_apart(dispatcher: object, spool_root: Path) -> None:
    """`spool run` is the command itself: its output, its error output, its exit code; with those of each task, too."""
    process = start("run", "-q", "-n", "apart", "-c", "echo out; echo warning >&2; exit 7")
    assert process.communicate(timeout=PATIENCE_S) == ("out\n", "warning\n")
    assert process.returncode == 7
    metadir = spool_root / "jobs" / "apart" / "1"
    assert (metadir / "log").read_text() == "out\n"
    assert (metadir / "stderr").read_text() == "warning\n"
    process = start("run", "-q", "-n", "many", "--array", "0-1", "-c", "echo out; echo warning >&2")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (out.count("out\n"), out.count("warning")) == (2, 0)
    assert err.count("warning\n") == 2


def test_run_writes_one_log_where_both_outputs_are_one(dispatcher: object, spool_root: Path) -> None:
    """On a terminal, or with 2>&1, the lines keep their order: stdout and stderr of the job are one file."""
    words = ("run", "-q", "-n", "one", "-c", "echo a; echo b >&2; echo c")
    said = spawned(*words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert said.stdout == "a\nb\nc\n"
    assert not (spool_root / "jobs" / "one" / "1" / "stderr").exists()


def test_run_says_that_its_input_is_not_read(dispatcher: object, tmp_path: Path) -> None:
    """A pipe or a file with data on stdin is told of in a line; an empty one is not."""
    reading, writing = os.pipe()
    os.write(writing, b"data\n")
    os.close(writing)
    process = start("run", "-c", "cat", stdin=reading)
    os.close(reading)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "")
    assert err.count("stdin") == 1
    (tmp_path / "empty").write_text("")
    with (tmp_path / "empty").open() as empty:
        assert "stdin" not in start("run", "-c", "cat", stdin=empty.fileno()).communicate(timeout=PATIENCE_S)[1]


def test_an_interrupt_cancels_the_job_that_run_stands_for(dispatcher: object, spool_root: Path) -> None:
    """Ctrl-C at `spool run` cancels the job and exits with 130 once it has ended."""
    process = start("run", "--name", "a", "-c", "echo ready; exec sleep 300")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "cancelled" in err
    wait_for((spool_root / "done" / "a.toml").exists)


def test_log_follows_a_job_through_its_retries(dispatcher: object, spool: Command, spool_root: Path) -> None:
    """`log -f` begins before the job does and shows every run until the last."""
    flag = spool_root.parent / "go"
    command = f"until [ -e {flag} ]; do sleep 0.02; done; echo try $SPOOL_ATTEMPT; [ $SPOOL_ATTEMPT = 3 ]"
    held = put_job(spool_root, "a", f'command = "{command}"\nretry = {{max = 3}}\n', "held")
    process = start("log", "-f", "a")
    os.rename(held, spool_root / "queued" / "a.toml")
    assert process.stderr is not None
    assert "run 1" in process.stderr.readline()
    flag.touch()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert out == "try 1\ntry 2\ntry 3\n"
    assert "run 3" in err
    assert spool("wait", "a").code == 0


def test_log_follows_several_jobs_and_names_each_line(dispatcher: object, spool: Command, spool_root: Path) -> None:
    """Every whole line comes after its job's name, also the last one without an end; each bad end is told."""
    flag = spool_root.parent / "go"
    wait = f"until [ -e {flag} ]; do sleep 0.02; done"
    put_job(spool_root, "one", f'command = "printf begun; {wait}; echo .; printf last"\n')
    put_job(spool_root, "two", f'command = "echo ready; {wait}; exit 3"\n')
    process = start("log", "-f", "one", "tw*")
    assert process.stdout is not None
    assert process.stdout.readline() == "two: ready\n"
    flag.touch()
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (out, process.returncode) == ("one: begun.\none: last\n", 0)
    assert "job two: failed" in err
    assert spool("log", "one", "two").out == "==> one <==\nbegun.\nlast\n\n==> two <==\nready\n"


def test_the_last_line_of_a_run_that_is_tried_again_stands_alone(dispatcher: object, spool_root: Path) -> None:
    """A line without an end is not joined with the first of the next run, beside other jobs too."""
    flag = spool_root.parent / "go"
    runs = f"echo run $SPOOL_ATTEMPT; printf end; until [ -e {flag} ]; do sleep 0.02; done; exit 1"
    put_job(spool_root, "again", f'command = "{runs}"\n[retry]\nmax = 1\ndelay = "0s"\n')
    put_job(spool_root, "other", 'command = "true"\n')
    process = start("log", "-f", "again", "other")
    assert process.stdout is not None
    assert process.stdout.readline() == "again: run 1\n"
    flag.touch()
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert out == "again: end\nagain: run 2\nagain: end\n"


def test_a_glob_that_names_an_array_and_its_tasks_shows_each_output_once(
    dispatcher: object, spool: Command, spool_root: Path
) -> None:
    """An array's output is that of its tasks; a job whose name only looks like one's is another job."""
    put_job(spool_root, "c", 'command = "printf c{index}"\narray = "0-1"\n')
    put_job(spool_root, "c_x", 'command = "echo x"\n')
    assert spool("wait", "c", "c_x").code == 0
    of_c = "==> c_0 <==\nc0\n==> c_1 <==\nc1\n"
    assert spool("log", "c*").out == f"==> c <==\n{of_c}\n==> c_x <==\nx\n"
    assert spool("log", "c").out == of_c
    assert [Path(line).parts[-3] for line in spool("log", "--path", "c*").out.splitlines()] == ["c_0", "c_1", "c_x"]
    assert sorted(spool("log", "-f", "c*").out.splitlines()) == ["c_0: c0", "c_1: c1", "c_x: x"]


def test_a_job_without_output_keeps_back_none_of_the_others(spool: Command, spool_root: Path) -> None:
    """It is told of on stderr, and the exit code is its own."""
    put_job(spool_root, "held", 'command = "true"\n', place="held")
    (wrapped(spool_root, "a", str(spool_root / "jobs" / "a" / "1")) / "log").write_text("out\n")
    said = spool("log", "held", "a")
    assert (said.out.lstrip(), said.code) == ("==> a <==\nout\n", 1)
    assert "job held" in said.err


def test_submit_wait_is_submit_and_wait(dispatcher: object, spool_root: Path) -> None:
    """`submit --wait` prints the name and exits as the job did."""
    process: subprocess.Popen[str] = start("submit", "--wait", "--name", "a", "-c", "exit 9")
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert (out, process.returncode) == ("a\n", 9)


_SILENT = (60, "", "running")  # for how many seconds, what it has said, where its file is


@pytest.mark.parametrize("found", [_SILENT, (-3600, "", "running"), (60, "a", "running"), (60, "", "done")])
def test_a_person_is_told_why_a_job_may_have_no_output_yet(spool_root: Path, found: tuple[int, str, str]) -> None:
    """Only on a terminal, only of a run that has been silent for a while: Python holds its output back in a file."""
    age, text, place = found
    put_job(spool_root, "a", place=place)
    log = metadir_of(spool_root, "a", 1) / "log"
    log.write_text(text)
    os.utime(log, (time.time() - age,) * 2)
    ours, theirs = pty.openpty()
    for stderr, told in ((theirs, found == _SILENT), (subprocess.DEVNULL, False)):
        assert spawned("log", "a", stdout=subprocess.PIPE, stderr=stderr).stdout == text
        os.write(theirs, b"end\n")
        said = b""
        while not said.endswith(b"end\r\n"):
            said += os.read(ours, 1024)
        assert (b"python -u" in said) is told
    os.close(ours)
    os.close(theirs)
