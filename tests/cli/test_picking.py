"""Which jobs `cancel hold release requeue` are for: filters, the last job, what failed, and what failed with it."""

from __future__ import annotations

import os
import subprocess
import time
import tomllib
from pathlib import Path

import pytest

from calling import Command, put_job, spawned
from cli.records import end, expand, places, queued
from spool.core.model import Grant, Request, Result, State
from spool.store.ownership import this_user
from support import printed_on

NOW = 1_900_000_000_000_000_000


def ended(root: Path, name: str, outcome: State, reason: str = "", text: str = "", *, ran: bool = True) -> None:
    """Write down that a job has ended."""
    put_job(root, name, f'command = "true"\n{text}', place="done")
    began_ns = NOW if ran else None
    end(root, Result(name, 1, 1, outcome, reason, NOW, began_ns, NOW + 1, user=this_user()))


def sweep(root: Path, tasks: int = 2) -> Path:
    """Have an array that failed, of which the first task finished, and the second failed."""
    for name, outcome in (("sweep_0", State.FINISHED), ("sweep_1", State.FAILED), ("sweep", State.FAILED)):
        ended(root, name, outcome)
    return expand(root, "sweep", tasks, "", place=None)


@pytest.mark.parametrize(
    ("verb", "source", "target"),
    [("cancel", "queued", "done"), ("hold", "queued", "held"), ("release", "held", "queued")],
)
@pytest.mark.parametrize("option", [("--project", "p"), ("--project=p", "--tag=t")])
def test_a_verb_takes_the_jobs_that_its_options_pick(
    spool: Command, spool_root: Path, verb: str, source: str, target: str, option: tuple[str, ...]
) -> None:
    """Each verb finds the jobs of a project or tag, in the places that it is for, and no others."""
    put_job(spool_root, "a_2", 'command = "true"\nproject = "p"\ntags = ["t", "u"]\n', source)
    put_job(spool_root, "a_10", 'command = "true"\nproject = "p"\ntags = ["t"]\n', source)
    put_job(spool_root, "other", 'command = "true"\n', source)
    said = spool(verb, *option)
    assert (said.code, [line.split()[0] for line in said.out.splitlines()]) == (0, ["a_2", "a_10"]), said.err
    assert places(spool_root, "a_2", "a_10", "other") == [target, target, source]


def test_a_user_and_a_state_pick_too_and_names_narrow(spool: Command, spool_root: Path) -> None:
    """`--user`, `--state` and globs are all to be true of a job."""
    for name in ("a", "b"):
        put_job(spool_root, name)
    put_job(spool_root, "c", place="held")
    assert spool("cancel", "--user", "nobody-here").code == 0
    assert spool("cancel", "--user", this_user(), "--state", "queued", "[bc]").out == "b cancelled\n"
    assert places(spool_root, "a", "b", "c") == ["queued", "done", "held"]
    said = spool("cancel", "--state", "held", "nosuch")
    assert (said.code, "nosuch" in said.err) == (3, True)


def test_nothing_named_and_nothing_picked_is_an_error(spool: Command, spool_root: Path) -> None:
    """A verb without a name or an option that picks does nothing, and says what it needs."""
    put_job(spool_root, "a")
    for words in (("cancel",), ("cancel", "--dry-run"), ("requeue", "--cascade")):
        said = spool(*words)
        assert (said.code, "--project" in said.err) == (2, True)
    for option in ("--user", "--project", "--tag", "--state"):  # an unset variable of a script
        for words in ((), ("a",), ("*",)):
            assert spool("cancel", option, "", *words).code == 2
    assert (
        spool("cancel", "-t", "PD,R", "--dry-run").out == spool("cancel", "--state", "queued,running", "--dry-run").out
    )
    assert "unknown state 'quued'" in spool("cancel", "--state", "quued").err
    assert places(spool_root, "a") == ["queued"]


@pytest.mark.parametrize(
    ("verb", "source", "words"),
    [
        ("cancel", "queued", "would be cancelled"),
        ("cancel", "running", "would be stopped"),
        ("hold", "queued", "would be held"),
        ("hold", "running", "would be stopped and held"),
        ("release", "held", "would be released"),
        ("requeue", "done", "would be queued again"),
        ("requeue", "running", "would be stopped and queued again"),
    ],
)
def test_every_dry_run_changes_nothing(spool: Command, spool_root: Path, verb: str, source: str, words: str) -> None:
    """`--dry-run` says what would be done to each job, and every file stays, for each of the verbs."""
    put_job(spool_root, "a", place=source)
    assert spool(verb, "--dry-run", "a").out == f"a {words}\n"
    if verb == "requeue":
        assert spool(verb, "--dry-run", "a", "--set", "priority=3").out == f"a {words}\n"
    assert places(spool_root, "a") == [source]
    assert (spool_root / source / "a.toml").read_text() == 'command = "true"\n'


def test_the_last_job_is_the_one_this_user_submitted_last(spool: Command, spool_root: Path) -> None:
    """`@` is the newest submission, whatever its name, and every verb for one job takes it; `-1` says so."""
    for name in ("z", "b", "a"):
        put_job(spool_root, name)
        at = spool_root / "queued" / f"{name}.toml"
        os.utime(at)
    newest = max("zba", key=lambda name: (spool_root / "queued" / f"{name}.toml").stat().st_ctime_ns)
    assert spool("show", "@").out.startswith(f"job {newest}: ")
    assert "`@`" in spool("cancel", "-1").err
    assert spool("cancel", "--reason", "-1", "@").out == f"{newest} cancelled\n"


def test_requeue_failed_takes_what_failed_and_of_an_array_its_tasks(spool: Command, spool_root: Path) -> None:
    """What failed, was lost or broke a limit comes back; what finished or was cancelled stays; no array runs twice."""
    unwell = {"bad": State.FAILED, "slow": State.TIMEOUT, "gone": State.LOST, "big": State.OUT_OF_MEMORY}
    well = {"good": State.FINISHED, "off": State.CANCELLED}
    for name, outcome in {**unwell, **well, "late": State.UNSCHEDULABLE}.items():
        ended(spool_root, name, outcome)
    sweep(spool_root)
    said = spool("requeue", "--failed", "--yes")
    assert said.code == 0, said.err
    assert places(spool_root, "bad", "slow", "gone", "big", "late", "sweep_1") == ["queued"] * 6
    assert places(spool_root, "good", "off", "sweep_0", "sweep") == ["done"] * 4


@pytest.mark.parametrize("name", ["sweep", "swee?", "sweep*"])
@pytest.mark.parametrize("place", ["done", "running"])
def test_requeue_failed_of_a_named_array_takes_its_failed_tasks(
    spool: Command, spool_root: Path, name: str, place: str
) -> None:
    """What has finished does not run again, and no job whose name only looks like a task's does."""
    metadir = sweep(spool_root)
    ended(spool_root, "sweep_x", State.FAILED)
    if place == "running":
        (metadir / "result.toml").unlink()
        (spool_root / "done" / "sweep.toml").rename(spool_root / "running" / "sweep.toml")
    said = spool("requeue", "--failed", name, "--dry-run")
    also = ["sweep_x"] if name == "sweep*" else []
    assert [line.split()[0] for line in said.out.splitlines()] == ["sweep_1", *also], said.err
    assert (spool("requeue", "--failed", name).code, places(spool_root, "sweep_1")) == (0, ["queued"])
    assert places(spool_root, "sweep_0", "sweep") == ["done", place]


def test_a_task_that_is_requeued_with_its_array_runs_once(spool: Command, spool_root: Path) -> None:
    """It runs as a task of that; what only has a task's name is another job."""
    sweep(spool_root)
    ended(spool_root, "sweep_x", State.FAILED)
    assert spool("requeue", "sweep_1", "sweep", "sweep_x").out == "sweep queued again\nsweep_x queued again\n"
    assert places(spool_root, "sweep", "sweep_x", "sweep_1") == ["queued", "queued", "done"]
    said = spool("requeue", "sweep_1", "sweep")
    assert (said.code, said.out) == (1, "sweep_1 queued again\n")  # without it, since the array waits already


def test_cascade_brings_back_what_was_cancelled_because_of_it(spool: Command, spool_root: Path) -> None:
    """Dependents come back, and theirs, after what they need; what a person cancelled, or another failure, does not."""
    because = {"reason": "dependency: a ended as failed", "ran": False}
    ended(spool_root, "a", State.FAILED)
    ended(spool_root, "other", State.FAILED)
    ended(spool_root, "c", State.CANCELLED, text='depends_on = ["b"]\n', **because)  # type: ignore[arg-type]
    ended(spool_root, "b", State.CANCELLED, text='depends_on = ["a"]\n', **because)  # type: ignore[arg-type]
    ended(spool_root, "mine", State.CANCELLED, "cancelled by me before it started", 'depends_on = ["a"]\n', ran=False)
    ended(spool_root, "d", State.CANCELLED, text='depends_on = ["other"]\n', **because)  # type: ignore[arg-type]
    assert spool("requeue", "a", "--cascade", "--dry-run").out.count("\n") == 3
    assert [line[0] for line in spool("requeue", "a", "--cascade").out.splitlines()] == ["a", "b", "c"]
    assert places(spool_root, "mine", "d", "other") == ["done"] * 3


def test_cascade_knows_the_tasks_of_an_array(spool: Command, spool_root: Path) -> None:
    """Who needs the array comes back with a task of it; who needs another task does not."""
    sweep(spool_root, 3)
    for name, need in (("all", "sweep"), ("one", "sweep_1"), ("two", "sweep_2")):
        because, text = "dependency: sweep_1 ended as failed", f'depends_on = ["{need}"]\n'
        ended(spool_root, name, State.CANCELLED, because, text, ran=False)
    assert spool("requeue", "sweep_1", "--cascade").code == 0
    assert places(spool_root, "all", "one", "two", "sweep") == ["queued", "queued", "done", "done"]


def test_with_changes_the_keys_of_what_is_requeued(spool: Command, spool_root: Path) -> None:
    """`--set` edits the file on its way, comments and all else stay, and a run that goes on is stopped to that end."""
    put_job(spool_root, "a", '# mine\ncommand = "true"\npriority = 1\n', "done")
    said = spool("requeue", "a", "--set", "priority=50", "--set", "env=A=1", "--set", "time-limit=2h")
    assert said.code == 0, said.err
    text = (spool_root / "queued" / "a.toml").read_text()
    assert text.startswith('# mine\ncommand = "true"\npriority = 50\ntime_limit = "2h"\n')
    assert places(spool_root, "a") == ["queued"]
    put_job(spool_root, "r", place="running")
    metadir = spool_root / "jobs" / "r" / "1"
    metadir.mkdir(parents=True)
    assert spool("requeue", "r", "--set", "cpus=2").code == 0
    assert (metadir / "stop").read_text().startswith("requeue ")
    assert places(spool_root, "r") == ["queued"]


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ('["printf", "%s", "a b"]', ["printf", "%s", "a b"]),
        ("[ -e x ] && echo y", "[ -e x ] && echo y"),
        ('["a"', '["a"'),
    ],
)
def test_a_command_given_as_a_list_is_one(spool: Command, spool_root: Path, text: str, command: object) -> None:
    """As in a job file; any other text is one for the shell, which can begin with a bracket too."""
    put_job(spool_root, "a", place="done")
    assert spool("requeue", "a", "--set", f"command={text}").code == 0
    assert tomllib.loads((spool_root / "queued" / "a.toml").read_text())["command"] == command


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--gpus", "0"), "--gpus is an argument of job.sh"),
        (("x", "--mem=1G", "--time", "2h"), "--mem, --time are arguments of job.sh"),
        (("--lr", "0.1", "-n", "4"), ""),
    ],
)
def test_options_after_the_script_are_named(
    spool: Command, spool_root: Path, words: tuple[str, ...], told: str
) -> None:
    """They are the script's arguments, and one line says so of those that spool would have understood."""
    Path("job.sh").write_text("#!/bin/sh\ntrue\n")
    said = spool("submit", "-n", "a", "job.sh", *words)
    assert (said.code, said.err.count("\n")) == (0, 0)
    assert told in said.err
    assert bool(said.err) == bool(told)
    assert queued(spool_root, "a")["command"][1:] == list(words)


def test_functions_are_passed_on_by_name_and_with_all(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by sbatch: `--export ALL`, and `BASH_FUNC_name%%`."""
    monkeypatch.setenv("BASH_FUNC_hello%%", "() {  echo hi\n}")
    for number, words in enumerate(("ALL", "BASH_FUNC_hello%%", "BASH_FUNC_*")):
        said = spool("submit", "-n", f"a{number}", "--export", words, "--", "true")
        assert (said.code, said.err) == (0, "")
        assert queued(spool_root, f"a{number}")["env"]["BASH_FUNC_hello%%"] == "() {  echo hi\n}"


def test_lines_are_the_tasks_of_an_array(spool: Command, spool_root: Path) -> None:
    """`--lines` makes one array; blank lines and comments are skipped, and each line is the parameter of its task."""
    Path("cmds.txt").write_text("# sweep\ntrain --lr 0.1 > a.log\n\n  train --lr {index} | tee 'b c'  \r\n   # no\n")
    said = spool("submit", "--lines", "cmds.txt", "--cpus", "2", "--set", "max_running=1")
    assert (said.code, said.err) == (0, "")
    keys = queued(spool_root, said.out.strip())
    assert said.out.startswith("cmds-")
    assert (keys["command"], keys["cpus"], keys["max_running"]) == ("{line}", 2, 1)
    assert keys["rows"] == [{"line": "train --lr 0.1 > a.log"}, {"line": "train --lr {index} | tee 'b c'"}]
    done = spawned("submit", "--lines", "-", "--name", "both", input="true\nfalse\n")
    assert (done.returncode, done.stdout) == (0, "both\n")
    assert queued(spool_root, "both")["rows"] == [{"line": "true"}, {"line": "false"}]


def test_cancel_all_takes_all(spool: Command, spool_root: Path) -> None:
    """Waiting and held jobs end, jobs in done/ stay; nothing else can be selected beside it."""
    put_job(spool_root, "a")
    put_job(spool_root, "b", place="held")
    put_job(spool_root, "c", place="done")
    assert spool("cancel", "--all", "a").code == 2
    assert spool("cancel", "--all", "--tag", "x").code == 2
    said = spool("cancel", "--all", "--dry-run")
    assert (said.code, len(said.out.splitlines())) == (0, 2)
    assert spool("cancel", "--all").code == 0
    assert sorted(os.listdir(spool_root / "done")) == ["a.toml", "b.toml", "c.toml"]
    assert "nothing to do" in spool("cancel", "--all").out


def failed(root: Path, name: str, ago_s: int) -> None:
    """Make a job that failed that long ago."""
    put_job(root, name, place="done")
    at = time.time_ns() - ago_s * 10**9
    end(root, Result(name, 1, 1, State.FAILED, "exit code 3", at, at, at, 3, request=Request(), grant=Grant(1)))


def test_requeue_takes_what_failed_since(spool: Command, spool_root: Path) -> None:
    """`--since 1h` leaves out what failed before; it needs --failed."""
    failed(spool_root, "old", 86400)
    failed(spool_root, "new", 60)
    failed(spool_root, "newer", 10)
    assert spool("requeue", "--since", "1h").code == 2
    assert spool("requeue", "--failed", "--since", "soon").code == 2
    assert spool("requeue", "--failed", "--since", "1h").code == 0
    assert sorted(os.listdir(spool_root / "queued")) == ["new.toml", "newer.toml"]


def test_more_than_what_failed_last_is_asked_for(spool: Command, spool_root: Path) -> None:
    """In a pipe it is refused with the jobs and the options; what is named, or one job, needs no question."""
    failed(spool_root, "a", 60)
    failed(spool_root, "b", 86400)
    said = spool("requeue", "--failed")
    assert (said.code, os.listdir(spool_root / "queued")) == (2, [])
    assert "a, b" in said.err
    assert spool("requeue", "--failed", "--dry-run").code == 0
    assert spool("requeue", "--failed", "b*").code == 0
    assert spool("requeue", "--failed").code == 0
    assert sorted(os.listdir(spool_root / "queued")) == ["a.toml", "b.toml"]


@pytest.mark.parametrize(("words", "answer", "code"), [((), "n", 1), ((), "y", 0), (("--yes",), "", 0)])
def test_a_terminal_is_asked(spool: Command, spool_root: Path, words: tuple[str, ...], answer: str, code: int) -> None:
    """`y` takes them all, anything else none; --yes is no question."""
    failed(spool_root, "a", 60)
    failed(spool_root, "b", 86400)
    ours, theirs = os.openpty()
    os.write(ours, f"{answer}\n".encode())
    process = spawned("requeue", "--failed", *words, stdin=theirs, stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    assert process.returncode == code
    assert (b"Run 2 failed jobs again: a, b?" in printed_on(ours)) == (not words)
    assert len(os.listdir(spool_root / "queued")) == (0 if code else 2)
