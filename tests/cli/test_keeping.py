"""Housekeeping: `gc` and `doctor`, and the demonstration."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

import pytest

from calling import Command, asked, put_job
from spool.core import layout
from spool.core.errors import SpoolError
from spool.core.model import Result, State
from spool.formats import ends
from spool.store.collecting import Keep, plan_removal, remove
from spool.store.locked import LockedSpool
from spool.store.spool import Spool
from spool.testing.faults import FaultyDisk, cut_off, every_cut
from support import make_spool

DAY_NS = 86_400_000_000_000


def ended(root: Path, name: str, run: int, days_ago: float, *, size: int = 0, again: str | None = None) -> Path:
    """Put an ended run into the spool."""
    put_job(root, name, place="done")
    metadir = root / "jobs" / name / str(run)
    metadir.mkdir(parents=True)
    at = time.time_ns() - int(days_ago * DAY_NS)
    result = Result(name, run, 1, State.FINISHED, "exit code 0", ended_at_ns=at, again=again)
    (metadir / "result.toml").write_bytes(ends.render_result(result))
    (metadir / "log").write_bytes(b"x" * size)
    return metadir


def runs(root: Path, name: str) -> list[int]:
    """Return which runs of a job are there."""
    return Spool(str(root)).runs(name)


def test_gc_removes_what_is_old_and_its_record(spool: Command, spool_root: Path) -> None:
    """Runs past their age go; the record in done/ goes with a job's last run; the rest stays."""
    ended(spool_root, "old", 1, 40)
    ended(spool_root, "mixed", 1, 40)
    ended(spool_root, "mixed", 2, 1)
    said = spool("gc", "--older-than", "30d")
    assert said.code == 0
    assert (runs(spool_root, "old"), runs(spool_root, "mixed")) == ([], [2])
    assert sorted(os.listdir(spool_root / "done")) == ["mixed.toml"]
    assert "2 runs" in said.out


def test_gc_dry_run_removes_nothing(spool: Command, spool_root: Path) -> None:
    """`--dry-run` names what would go, and it stays."""
    metadir = ended(spool_root, "old", 1, 40)
    assert str(metadir) in spool("gc", "--older-than", "30d", "--dry-run").out
    assert metadir.exists()
    assert asked(spool, "gc", "--older-than", "30d", "--dry-run")["jobs"] == ["old"]


def test_gc_keeps_the_newest_runs_and_the_size(spool: Command, spool_root: Path) -> None:
    """`--keep-runs` keeps so many of each job; `--max-size` removes the oldest of all first."""
    for run in (1, 2, 3):
        ended(spool_root, "a", run, 10 - run, size=1 << 20)
    spool("gc", "--keep-runs", 2)
    assert runs(spool_root, "a") == [2, 3]
    ended(spool_root, "b", 1, 20, size=1 << 20)
    spool("gc", "--max-size", "2200K")
    assert (runs(spool_root, "a"), runs(spool_root, "b")) == ([2, 3], [])


def test_gc_needs_no_staging_directory(spool: Command, spool_root: Path) -> None:
    """Where it is missing, it is made."""
    ended(spool_root, "old", 1, 40)
    (spool_root / ".tmp").rmdir()
    assert spool("gc", "--older-than", "30d").code == 0
    assert runs(spool_root, "old") == []
    assert (spool_root / ".tmp").stat().st_mode & 0o777 == 0o700


def test_gc_without_a_reason_removes_nothing(spool: Command, spool_root: Path) -> None:
    """Nothing is removed that neither an option nor the configuration calls old."""
    ended(spool_root, "a", 1, 1000)
    assert spool("gc").code == 2
    (spool_root / "config.toml").write_text('autostart = false\n[gc]\nmax_age = "30d"\n')
    assert spool("gc").code == 0
    assert runs(spool_root, "a") == []


@pytest.mark.parametrize("place", ["queued", "held", "running"])
def test_gc_never_touches_a_job_that_goes_on(spool: Command, spool_root: Path, place: str) -> None:
    """A job with a file outside of done/ keeps every run, however old."""
    ended(spool_root, "a", 1, 1000)
    put_job(spool_root, "a", place=place)
    spool("gc", "--older-than", "1d")
    assert runs(spool_root, "a") == [1]


def test_gc_keeps_what_has_not_ended_or_is_depended_on(spool: Command, spool_root: Path) -> None:
    """A run without a result, one that is to be tried again, and a dependency of a waiting job stay."""
    put_job(spool_root, "unknown", place="done")
    (spool_root / "jobs" / "unknown" / "1").mkdir(parents=True)
    ended(spool_root, "again", 1, 1000, again="retry")
    ended(spool_root, "needed", 1, 1000)
    ended(spool_root, "sweep_3", 1, 1000)
    put_job(spool_root, "waits", 'command = "true"\ndepends_on = ["needed", "sweep"]\n', "held")
    spool("gc", "--older-than", "1d")
    assert [runs(spool_root, name) for name in ("unknown", "again", "needed", "sweep_3")] == [[1], [1], [1], [1]]


def test_no_run_number_is_used_twice_after_gc(spool: Command, spool_root: Path) -> None:
    """A dispatcher that lives while gc works, and one that comes later, number on from what was removed."""
    locked = LockedSpool(str(spool_root))
    try:
        for run in (1, 2, 3):
            ended(spool_root, "a", run, 1000)
        spool("gc", "--older-than", "1d")
        assert not (spool_root / "jobs" / "a").exists()
        assert locked.next_run("a") == 4
        assert locked.next_run("b") == 1
        (spool_root / "jobs" / "a").rmdir()
    finally:
        locked.release()
    again = LockedSpool(str(spool_root))
    try:
        assert again.next_run("a") == 4
    finally:
        again.release()


def test_a_gc_that_is_cut_off_leaves_nothing_for_ever(tmp_path: Path) -> None:
    """Killed before any change, it leaves each run whole or none of it; the next dispatcher removes the rest."""

    def scenario(cut_at: int) -> FaultyDisk:
        root = make_spool(tmp_path / str(cut_at))
        metadirs = [ended(root, name, 1, 1000) for name in ("a", "v2.long-name")]
        for metadir in metadirs:
            (metadir / "kept" / "by the job").mkdir(parents=True)
        spool, disk = Spool(str(root)), FaultyDisk(str(root / ".tmp"), cut_at=cut_at)
        removal = plan_removal(spool, Keep(max_age_ns=DAY_NS), time.time_ns())
        cut_off(lambda: remove(spool, removal, disk))
        locked = LockedSpool(str(root))
        locked.sweep_staging()
        locked.release()
        assert os.listdir(root / ".tmp") == ["gc.lock"], disk.recorded
        for metadir in metadirs:
            assert not metadir.exists() or {"result.toml", "log", "kept"} <= set(os.listdir(metadir))
        return disk

    renames = [disk.names().count("rename") for disk in every_cut(scenario)]
    assert renames[-1] == 3  # the numbers, and both metadirs


def test_what_changed_after_the_plan_is_left_alone(spool_root: Path) -> None:
    """A job that is queued again between the look and the removal keeps its runs and its file."""
    root = Spool(str(spool_root))
    ended(spool_root, "a", 1, 1000)
    removal = plan_removal(root, Keep(max_age_ns=DAY_NS), time.time_ns())
    assert [old.name for old in removal.runs] == ["a"]
    os.rename(spool_root / "done" / "a.toml", spool_root / "queued" / "a.toml")
    gone = remove(root, removal)
    assert (gone.runs, gone.jobs) == ((), ())
    assert runs(spool_root, "a") == [1]


def test_two_collectors_do_not_meet(spool_root: Path) -> None:
    """A second gc leaves at once."""
    root = Spool(str(spool_root))
    with (spool_root / ".tmp" / "gc.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SpoolError, match="another"):
            remove(root, plan_removal(root, Keep(max_age_ns=1), time.time_ns()))


def levels(said: str) -> dict[str, str]:
    """Return the worst level of each check."""
    found: dict[str, str] = {}
    for check in json.loads(said)["checks"]:
        if found.get(check["check"]) != "fail":
            found[check["check"]] = check["level"]
    return found


def test_doctor_finds_a_fresh_spool_well(spool: Command, spool_root: Path) -> None:
    """Of a spool just made nothing about the spool itself is wrong."""
    found = levels(spool("doctor", "--json").out)
    about_spool = (
        "directories",
        "mode",
        "file system",
        "moves",
        "staging",
        "configuration",
        "job files",
        "runs",
        "clock",
    )
    assert {found[check] for check in about_spool} == {"ok"}


def test_doctor_finds_what_is_wrong(spool: Command, spool_root: Path) -> None:
    """Open modes, a broken configuration, bad job files, runs without a result: each is told with what to do."""
    os.chmod(spool_root / "queued", 0o777)
    (spool_root / "config.toml").write_text("autostart = false\ncpuz = 1\n")
    (put_job(spool_root, "bad", "x", "queued").parent / "bad.toml.error").write_text("- wrong\n")
    put_job(spool_root, "norun", place="running")
    said = spool("doctor", "--json")
    assert said.code == 1
    found = levels(said.out)
    assert (found["mode"], found["configuration"], found["job files"], found["runs"]) == (
        "fail",
        "fail",
        "warn",
        "warn",
    )
    text = spool("doctor", "-q").out
    assert "chmod 700" in text
    assert "ok " not in text


@pytest.mark.parametrize("name", layout.DIRECTORIES)
def test_doctor_finds_a_directory_that_is_missing(spool: Command, spool_root: Path, name: str) -> None:
    """Whichever it is, that is the one thing that must be mended, the rest is looked at, and `--fix` makes it."""
    (spool_root / name).rmdir()
    found = spool("doctor", "--json")
    assert [check["text"] for check in json.loads(found.out)["checks"] if check["level"] == "fail"] == [
        f"{spool_root}: {name} is missing"
    ]
    assert not (spool_root / name).exists()
    assert name == "queued" or {"mode", "file system", "configuration", "job files", "runs"} <= levels(found.out).keys()
    assert spool("doctor", "--fix").code == 0
    assert (spool_root / name).is_dir()


def test_doctor_mends_what_is_safe_to_mend(spool: Command, spool_root: Path) -> None:
    """`--fix` sets modes, makes directories, removes stale staging files and orphaned complaints."""
    os.chmod(spool_root / "queued", 0o777)
    (spool_root / "reservations").rmdir()
    stale = spool_root / ".tmp" / "999999999.1"
    stale.touch()
    os.utime(stale, (1, 1))
    (spool_root / "queued" / "gone.toml.error").write_text("- wrong\n")
    assert spool("doctor", "--fix").code == 0
    assert (spool_root / "queued").stat().st_mode & 0o777 == 0o700
    assert (spool_root / "reservations").is_dir()
    assert not stale.exists()
    assert os.listdir(spool_root / "queued") == []


def test_doctor_of_nothing_says_so(spool: Command, tmp_path: Path) -> None:
    """Where there is no spool that is the finding, and none is made."""
    said = spool("--spool", tmp_path / "nowhere", "doctor")
    assert said.code == 1
    assert "spool init" in said.out
    assert not (tmp_path / "nowhere").exists()


def test_the_demonstration_does_what_it_promises(
    spool: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every job ends as it should, the picture has a row for each, and nothing is left behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = spool("demo")
    assert said.code == 0, said.out + said.err
    rows = ("data", "pi_4", "endless", "publish", "report")
    assert all(any(line.startswith(f"{name} ") for line in said.out.splitlines()) for name in rows)
    assert "finished (run 2)" in said.out
    assert "pi is about 3.14" in said.out
    assert not list(tmp_path.glob("spool-demo-*"))
