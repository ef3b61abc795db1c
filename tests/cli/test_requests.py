"""Cancel, hold, release, requeue, pause: each is the `mv` or `rm` that the documentation shows."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from calling import Command, asked, put_job
from cli.records import begin, metadir_of, places
from spool.client.requests import ChangeKind, Requests
from spool.core.model import StopKind
from spool.formats import run_records
from spool.store.disk import Disk
from spool.store.spool import Spool


def running(root: Path, name: str) -> Path:
    """Put a job into `running/` with its newest run, and return the metadir."""
    put_job(root, name, place="running")
    return metadir_of(root, name)


@pytest.mark.parametrize(
    ("verb", "source", "target"),
    [
        ("hold", "queued", "held"),
        ("hold", "running", "held"),
        ("release", "held", "queued"),
        ("requeue", "running", "queued"),
        ("requeue", "done", "queued"),
        ("cancel", "queued", "done"),
        ("cancel", "held", "done"),
    ],
)
def test_a_request_moves_the_file_and_nothing_else(
    spool: Command, spool_root: Path, verb: str, source: str, target: str
) -> None:
    """Each request is one move: the same file, byte for byte and inode for inode, in another directory."""
    text = '# mine\ncommand = "true"\n'
    before = put_job(spool_root, "a", text, source).stat()
    said = spool(verb, "a")
    assert said.code == 0, said.err
    assert places(spool_root, "a") == [target]
    after = spool_root / target / "a.toml"
    assert (after.stat().st_ino, after.read_text()) == (before.st_ino, text)


def test_cancelling_a_running_job_records_who_and_takes_its_file(spool: Command, spool_root: Path) -> None:
    """The newest run gets a `stop` record with the reason, and the file in running/ goes."""
    metadir = running(spool_root, "a")
    assert spool("cancel", "a", "--reason", "wrong\ndata").code == 0
    stop = run_records.parse_stop((metadir / "stop").read_bytes())
    assert stop is not None
    assert (stop.kind, stop.reason) == (StopKind.CANCEL, "wrong data")
    assert places(spool_root, "a") == []


def test_cancelling_leaves_an_earlier_order_as_it_is(spool: Command, spool_root: Path) -> None:
    """A run that is being stopped already keeps its record, and loses its file all the same."""
    metadir = running(spool_root, "a")
    (metadir / "stop").write_text("timeout dispatcher 1\n")
    assert spool("cancel", "a").code == 0
    assert (metadir / "stop").read_text() == "timeout dispatcher 1\n"
    assert places(spool_root, "a") == []


def test_cancel_takes_the_place_of_an_older_record(spool: Command, spool_root: Path) -> None:
    """A cancelled job's file replaces that of an earlier one of its name in done/."""
    put_job(spool_root, "a", "old", "done")
    put_job(spool_root, "a", "new", "queued")
    assert spool("cancel", "a").code == 0
    assert (spool_root / "done" / "a.toml").read_text() == "new"


def test_a_bad_name_does_not_stop_the_others_and_the_worst_code_counts(spool: Command, spool_root: Path) -> None:
    """The command goes on after a job that is not there or is in the wrong place."""
    for name in ("a", "c"):
        put_job(spool_root, name)
    put_job(spool_root, "b", place="done")
    said = spool("hold", "a", "nosuch", "b", "c")
    assert (said.code, said.out) == (3, "a held\nc held\n")
    assert ("nosuch" in said.err, "requeue b" in said.err) == (True, True)


def test_globs_mean_the_jobs_that_the_verb_is_for(spool: Command, spool_root: Path) -> None:
    """`sweep_*` takes those in the places that the verb moves from, in natural order; one that matches none is told."""
    for name in ("sweep_10", "sweep_2", "other"):
        put_job(spool_root, name)
    put_job(spool_root, "sweep_1", place="done")
    assert [line.split()[0] for line in spool("cancel", "sweep_*").out.splitlines()] == ["sweep_2", "sweep_10"]
    assert spool("cancel", "nothing*").code == 3


@pytest.mark.parametrize(
    ("verb", "source", "target", "more"),
    [("release", "held", "queued", ()), ("hold", "queued", "held", ())]
    + [("requeue", "done", "queued", more) for more in ((), ("--set", "priority=3"))],
)
def test_nothing_is_ever_replaced_by_a_move(
    spool: Command, spool_root: Path, verb: str, source: str, target: str, more: tuple[str, ...]
) -> None:
    """Where another job of that name is in the way, the request is refused and both files stay."""
    texts = {place: f'# {place}\ncommand = "true"\n' for place in (source, target)}
    for place, text in texts.items():
        put_job(spool_root, "a", text, place)
    assert spool(verb, "a", *more).code == 1
    assert {place: (spool_root / place / "a.toml").read_text() for place in texts} == texts


def test_pause_and_resume_are_a_file(spool: Command, spool_root: Path) -> None:
    """`pause` makes the file `paused`, `resume` removes it, and doing it twice is no error."""
    assert spool("pause", "--reason", "lunch").code == 0
    assert "lunch" in (spool_root / "paused").read_text()
    assert spool("pause").code == 0
    assert "lunch" in (spool_root / "paused").read_text()
    assert spool("resume").code == 0
    assert not (spool_root / "paused").exists()
    assert spool("resume").code == 0


class _Racing(Disk):
    """A disk on which a dispatcher does something just before each rename and link."""

    def __init__(self, staging: str, before: object) -> None:
        super().__init__(staging)
        self.before = before

    def rename(self, old: str, new: str) -> None:
        """Let the other one go first, once."""
        before, self.before = self.before, None
        if callable(before):
            before()
        super().rename(old, new)


@pytest.mark.parametrize(("claim", "left"), [(os.rename, []), (os.link, ["done"])], ids=["whole", "half"])
def test_a_job_that_starts_while_it_is_cancelled_is_stopped(
    spool_root: Path, claim: Callable[[Path, Path], None], left: list[str]
) -> None:
    """Lost the race for the file in queued/, cancel ends the run that was started of it.

    Between the two halves of the dispatcher's move the file has two names; cancel takes both away.
    """
    queued = put_job(spool_root, "a")

    def dispatcher() -> None:
        (spool_root / "jobs" / "a" / "1").mkdir(parents=True)
        claim(queued, spool_root / "running" / "a.toml")

    requests = Requests(Spool(str(spool_root)), "me", _Racing(str(spool_root / ".tmp"), dispatcher))
    assert [change.kind for change in requests.cancel("a")] == [ChangeKind.STOPPING]
    assert places(spool_root, "a") == left
    assert (spool_root / "jobs" / "a" / "1" / "stop").exists()


def test_a_path_is_taken_for_the_job_that_it_is(spool: Command, spool_root: Path) -> None:
    """`queued/a.toml`, as a shell completes it, means job a."""
    put_job(spool_root, "a")
    assert spool("hold", f"{spool_root}/queued/a.toml").out == "a held\n"


def test_a_spool_that_is_not_there_is_told_in_one_line(spool: Command, tmp_path: Path) -> None:
    """A command that needs a spool and finds none says so, with code 5, and makes none."""
    said = spool("--spool", tmp_path / "nowhere", "cancel", "a")
    assert (said.code, said.err.count("\n")) == (5, 0)
    assert not (tmp_path / "nowhere").exists()


def test_an_array_in_progress_is_held_as_a_whole_and_not_requeued(spool: Command, spool_root: Path) -> None:
    """Holding an array moves its file and stops nothing; running it again has to wait for its end."""
    metadir = running(spool_root, "a")
    (metadir / "array.toml").write_text('job = "a"\nrun = 1\ntasks = 3\n')
    assert spool("requeue", "a").code != 0
    assert spool("hold", "a").out == "a held\n"
    assert places(spool_root, "a") == ["held"]
    assert spool("release", "a").out == "a released\n"
    assert places(spool_root, "a") == ["queued"]


SECOND = 'command = "second"\ncpus = 1\n'


@pytest.fixture
def twins(spool_root: Path) -> Path:
    """Have `dup` run, as far as the files tell, and a second file of its name wait."""
    begin(spool_root, "dup", 'command = "first"\n')
    return put_job(spool_root, "dup", SECOND)


def test_both_files_of_a_name_are_seen(spool: Command, twins: Path) -> None:
    """Ls has a row for each, info counts both, show has both files, and why tells which of them waits."""
    rows = asked(spool, "ls", "dup")["jobs"]
    assert [(row["name"], row["place"]) for row in rows] == [("dup", "running"), ("dup", "queued")]
    assert "running" in rows[1]["reason"]
    assert spool("ls").out.count("\ndup ") == 2
    assert spool("ls", "-q").out == "dup\n"  # a name for each job that a command is for
    assert sum(asked(spool, "info")["states"].values()) == 2
    shown = asked(spool, "show", "dup")
    assert (shown["row"]["place"], shown["file"]) == ("running", 'command = "first"\n')
    [other] = shown["others"]
    assert (other["row"]["state"], other["file"], other["path"]) == ("queued", SECOND, str(twins))
    text = spool("show", "dup").out
    assert "first" in text
    assert str(twins) in text
    assert "second" in text
    assert "queued/dup.toml" in spool("why", "dup").out


def test_a_held_file_beside_a_waiting_one_is_seen(spool: Command, spool_root: Path) -> None:
    """Of two files dropped by hand into queued/ and held/ both are listed, and why names the one that it tells of."""
    put_job(spool_root, "dup", SECOND)
    put_job(spool_root, "dup", 'command = "first"\n', "held")
    assert [row["state"] for row in asked(spool, "ls")["jobs"]] == ["queued", "held"]
    assert asked(spool, "show", "dup")["others"][0]["row"]["state"] == "held"
    assert "held/" in spool("why", "dup").out


def test_cancel_names_each_that_it_cancels(spool: Command, spool_root: Path, twins: Path) -> None:
    """A name with a run and a file that waits: the run is stopped, the file cancelled, and both are said."""
    said = spool("cancel", "dup", "--dry-run")
    assert re.findall(r"\w+ \(\w+/\)", said.out) == ["dup (running/)", "dup (queued/)"]
    said = spool("cancel", "dup")
    assert re.findall(r"\w+ \(\w+/\)", said.out) == ["dup (running/)", "dup (queued/)"]
    assert not twins.exists()
    assert (spool_root / "jobs" / "dup" / "1" / "stop").exists()


def test_a_request_names_the_file_that_it_is_for(spool: Command, spool_root: Path, twins: Path) -> None:
    """Hold, edit and release mean the one that waits, say so, and leave the run alone; requeue refuses the name."""
    beside = "; the one in running/ is unchanged\n"
    assert spool("edit", "dup", "--priority", "3").out == f"dup (queued/) changed{beside}"
    assert spool("hold", "dup").out == f"dup (queued/) held{beside}"
    assert spool("release", "dup").out == f"dup (held/) released{beside}"
    assert spool("requeue", "dup").code == 1
    assert twins.exists()


@pytest.mark.parametrize("words", [("submit", "-n", "dup", "--", "true"), ("submit", "-n", "dup", "--cpus=1", "true")])
def test_a_name_that_runs_is_not_submitted_by_mistake(
    spool: Command, spool_root: Path, twins: Path, words: tuple[str, ...]
) -> None:
    """Both ways to submit refuse it and name a name that is free; --replace has the job wait for the run's end."""
    twins.unlink()
    put_job(spool_root, "dup-2", place="done")
    said = spool(*words)
    assert (said.code, said.out, "--name dup-3 " in said.err) == (1, "", True)
    assert not twins.exists()
    assert spool("submit", "--replace", *words[1:]).code == 0
    assert twins.exists()
