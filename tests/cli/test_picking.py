"""Which jobs `cancel hold release requeue` are for: filters, the last job, what failed, and what failed with it."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from calling import Command, put_job
from cli.records import end, expand
from spool.core.model import Result, State
from spool.formats.run_records import parse_result
from spool.store.ownership import this_user
from support import wait_for

NOW = 1_900_000_000_000_000_000


def places(root: Path, *names: str) -> list[str]:
    """Return the directory in which each job has its file."""
    return [
        "+".join(at for at in ("queued", "held", "running", "done") if (root / at / f"{name}.toml").exists())
        for name in names
    ]


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


def test_with_never_replaces_another_job(spool: Command, spool_root: Path) -> None:
    """Where a job of the name waits, a requeue with other keys is refused, and both files stay."""
    put_job(spool_root, "a", '# old\ncommand = "true"\n', "done")
    put_job(spool_root, "a", '# new\ncommand = "true"\n')
    assert spool("requeue", "a", "--set", "priority=3").code == 1
    assert (spool_root / "queued" / "a.toml").read_text().startswith("# new")
    assert (spool_root / "done" / "a.toml").read_text().startswith("# old")


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


def test_a_running_job_is_requeued_with_other_keys(dispatcher: object, spool: Command, spool_root: Path) -> None:
    """Its run is stopped and counts as requeued, and the next one has the new keys."""
    put_job(spool_root, "a", 'command = "sleep 600"\n')
    metadir = spool_root / "jobs" / "a"
    wait_for(lambda: (metadir / "1" / "rc").exists() or (metadir / "1" / "jid").exists())
    assert spool("requeue", "a", "--set", "command=echo $X", "--set", "env=X=new").code == 0
    wait_for(lambda: (metadir / "2" / "result.toml").exists() and places(spool_root, "a") == ["done"])
    assert (metadir / "2" / "log").read_text() == "new\n"
    first = parse_result((metadir / "1" / "result.toml").read_bytes())
    assert (first.outcome, first.again) == (State.CANCELLED, "requeue")
