"""Housekeeping: `gc` and `doctor`, and the demonstration."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from calling import Command, asked, put_job
from cli.records import end
from faulty import FaultyDisk, cut_off, every_cut
from plugins.fake_nvml import FakeNvml
from spool.cli.demo import Demonstration
from spool.cli.group import VERBS
from spool.client.gc import plan_removal, remove_planned
from spool.core import layout
from spool.core.errors import SpoolError
from spool.core.model import SECOND_NS, Result, State
from spool.formats.config import RetentionPolicy
from spool.store.locked_spool import LockedSpool
from spool.store.spool import Spool
from support import make_spool

DAY_NS = 86_400_000_000_000


def ended(root: Path, name: str, run: int, days_ago: float, *, size: int = 0, again: str | None = None) -> Path:
    """Put an ended run into the spool."""
    put_job(root, name, place="done")
    at_ns = time.time_ns() - int(days_ago * DAY_NS)
    result = Result(name, run, 1, State.FINISHED, "exit code 0", ended_at_ns=at_ns, again=again)
    metadir = end(root, result, told=False)
    (metadir / "log").write_bytes(b"x" * size)
    return metadir


def runs(root: Path, name: str) -> list[int]:
    """Return which runs of a job are there."""
    return Spool(str(root)).runs(name)


def test_gc_removes_what_is_old_and_its_record(spool: Command, spool_root: Path) -> None:
    """Runs past their age go; the record in done/ goes with a job's last run; the rest stays, and all in a dry run."""
    ended(spool_root, "old", 1, 40)
    ended(spool_root, "mixed", 1, 40)
    ended(spool_root, "mixed", 2, 1)
    assert asked(spool, "gc", "--older-than", "30d", "--dry-run")["jobs"] == ["old"]
    assert (runs(spool_root, "old"), runs(spool_root, "mixed")) == ([1], [1, 2])
    (spool_root / ".tmp").rmdir()  # where it is missing, it is made
    said = spool("gc", "--older-than", "30d")
    assert (spool_root / ".tmp").stat().st_mode & 0o777 == 0o700
    assert said.code == 0
    assert (runs(spool_root, "old"), runs(spool_root, "mixed")) == ([], [2])
    assert sorted(os.listdir(spool_root / "done")) == ["mixed.toml"]
    assert "2 runs" in said.out


def test_dependencies_are_judged_by_the_history_once_gc_has_removed_records(spool: Command, spool_root: Path) -> None:
    """Jobs, an array and its tasks still count as they ended, for the commands and for the next dispatcher."""
    for name, command in (("good", "true"), ("bad", "false")):
        assert spool("submit", "--name", name, "--", command).code == 0
    assert spool("submit", "--name", "many", "--array", "0-1", "--", "true").code == 0
    spool("dispatch", "--until-idle")
    assert spool("gc", "--older-than", "1ms").code == 0
    assert Spool(str(spool_root)).names("done") == []
    for needed in ("good", "bad", "many", "many_1", "never"):
        spool("submit", "--name", f"after-{needed}", "--depends-on", needed, "--", "true")
    plan = asked(spool, "plan")
    assert [job["name"] for job in plan["waits"] if job["code"] == "dependency"] == ["after-never"]
    assert [job["name"] for job in plan["ends"]] == ["after-bad"]
    said = spool("check", *spool_root.glob("queued/*.toml"))
    assert [line for line in said.err.splitlines() if "does not exist" in line and "never" not in line] == []
    spool("dispatch", "--until-idle")
    ends = {name: Spool(str(spool_root)).newest_result(f"after-{name}") for name in ("good", "many", "many_1", "bad")}
    outcomes = {name: end.outcome.value for name, end in ends.items() if end is not None}
    assert outcomes == {"good": "finished", "many": "finished", "many_1": "finished", "bad": "cancelled"}
    assert Spool(str(spool_root)).places("after-never") == ["queued"]


def test_gc_clears_what_a_killed_collector_left(spool: Command, spool_root: Path) -> None:
    """A run that was moved aside is removed by the next collection."""
    (spool_root / ".tmp" / "4242.gc.old.1" / "sub").mkdir(parents=True)
    assert spool("gc", "--older-than", "30d").code == 0
    assert os.listdir(spool_root / ".tmp") == ["gc.lock"]


def test_gc_keeps_the_newest_runs_and_the_size(spool: Command, spool_root: Path) -> None:
    """`--keep-runs` keeps so many of each job; `--max-size` removes the oldest of all first."""
    for run in (1, 2, 3):
        ended(spool_root, "a", run, 10 - run, size=1 << 20)
    spool("gc", "--keep-runs", 2)
    assert runs(spool_root, "a") == [2, 3]
    ended(spool_root, "b", 1, 20, size=1 << 20)
    spool("gc", "--max-size", "2200K")
    assert (runs(spool_root, "a"), runs(spool_root, "b")) == ([2, 3], [])


def refuse(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Have the disk fail to give *path*."""
    sound = os.open

    def fails(name: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if name == str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        return sound(name, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", fails)


def test_gc_stops_where_the_numbers_of_removed_runs_cannot_be_read(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of numbers is never written anew without what it held: no number is given twice."""
    ended(spool_root, "first", 7, 40)
    spool("gc", "--older-than", "30d")
    numbers = spool_root / layout.LAST_RUNS
    before = numbers.read_bytes()
    ended(spool_root, "second", 1, 40)
    with monkeypatch.context() as patch:
        refuse(patch, numbers)
        said = spool("gc", "--older-than", "30d")
    assert (said.code, numbers.read_bytes(), runs(spool_root, "second")) == (5, before, [1])
    assert "Input/output error" in said.err
    assert spool("gc", "--older-than", "30d").code == 0
    assert json.loads(numbers.read_bytes()) == {"first": 7, "second": 1}


def test_gc_keeps_everything_while_a_waiting_job_cannot_be_read(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that cannot be read may depend on any other, so that none goes, with runs or without."""
    ended(spool_root, "old", 1, 40)
    never_ran = put_job(spool_root, "cancelled", place="done")
    put_job(spool_root, "waits", 'command = "true"\ndepends_on = ["old"]\n')
    refuse(monkeypatch, spool_root / "queued" / "waits.toml")
    keep = RetentionPolicy(max_age_ns=0, max_runs=0, max_size_bytes=0)
    removal = plan_removal(Spool(str(spool_root)), keep, time.time_ns() + DAY_NS)
    assert (removal.runs, removal.jobs) == ((), ())
    assert [problem for problem in removal.problems if "waits" in problem]
    assert never_ran.exists()


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
        removal = plan_removal(spool, RetentionPolicy(max_age_ns=DAY_NS), time.time_ns())
        cut_off(lambda: remove_planned(spool, removal, disk))
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
    removal = plan_removal(root, RetentionPolicy(max_age_ns=DAY_NS), time.time_ns())
    assert [old.name for old in removal.runs] == ["a"]
    os.rename(spool_root / "done" / "a.toml", spool_root / "queued" / "a.toml")
    gone = remove_planned(root, removal)
    assert (gone.runs, gone.jobs) == ((), ())
    assert runs(spool_root, "a") == [1]


def test_two_collectors_do_not_meet(spool_root: Path) -> None:
    """A second gc leaves at once."""
    root = Spool(str(spool_root))
    with (spool_root / ".tmp" / "gc.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SpoolError, match="another"):
            remove_planned(root, plan_removal(root, RetentionPolicy(max_age_ns=1), time.time_ns()))


def outside(tmp_path: Path) -> Path:
    """Make a directory outside of the spool that looks like a job's."""
    path = tmp_path / "outside"
    ended(make_spool(tmp_path / "elsewhere"), "x", 1, 1000)
    os.rename(tmp_path / "elsewhere" / "jobs" / "x", path)
    (path / "1" / "precious").touch()
    return path


def test_gc_does_not_follow_a_job_that_is_a_link(spool: Command, spool_root: Path, tmp_path: Path) -> None:
    """With `jobs/NAME` a link to a directory outside nothing of that goes; it is told, and all else is removed."""
    ended(spool_root, "old", 1, 1000)
    put_job(spool_root, "x", place="done")
    precious = outside(tmp_path) / "1" / "precious"
    (spool_root / "jobs" / "x").symlink_to(tmp_path / "outside")
    said = spool("gc", "--older-than", "1d")
    assert precious.exists()
    assert said.code == 1
    assert len([line for line in said.err.splitlines() if f"{spool_root}/jobs/x: " in line]) == 1
    assert runs(spool_root, "old") == []
    assert (spool_root / "done" / "x.toml").exists()


def test_gc_removes_a_metadir_that_is_a_link_and_nothing_behind_it(
    spool: Command, spool_root: Path, tmp_path: Path
) -> None:
    """With `jobs/NAME/RUN` a link to a directory outside the link goes, as with `rm -r`, and the directory stays."""
    put_job(spool_root, "x", place="done")
    precious = outside(tmp_path) / "1" / "precious"
    (spool_root / "jobs" / "x").mkdir()
    (spool_root / "jobs" / "x" / "1").symlink_to(tmp_path / "outside" / "1")
    assert spool("gc", "--older-than", "1d").code == 0
    assert precious.exists()
    assert not (spool_root / "jobs" / "x").exists()


@pytest.mark.parametrize("name", ["jobs", "done", ".tmp"])
def test_gc_does_not_work_in_a_spool_whose_directory_is_a_link(
    spool: Command, spool_root: Path, tmp_path: Path, name: str
) -> None:
    """Where one of its own directories leads elsewhere it removes nothing, and says which."""
    ended(spool_root, "old", 1, 1000)
    os.rename(spool_root / name, tmp_path / "moved")
    (spool_root / name).symlink_to(tmp_path / "moved")
    said = spool("gc", "--older-than", "1d")
    assert said.code == 5
    assert f"{spool_root}/{name}: it is a link" in said.err
    assert runs(spool_root, "old") == [1]


def test_gc_goes_on_after_what_cannot_be_removed(spool_root: Path) -> None:
    """Each change that fails costs its own run or record, which is told; the next gc removes what was left."""

    def scenario(fail_at: int) -> tuple[FaultyDisk, tuple[str, ...]]:
        for name in ("a", "b", "c"):
            ended(spool_root, name, 1, 1000)
        disk, root = FaultyDisk(str(spool_root / ".tmp"), fail_at=fail_at, error=errno.EIO), Spool(str(spool_root))
        gone = remove_planned(root, plan_removal(root, RetentionPolicy(max_age_ns=DAY_NS), time.time_ns()), disk)
        assert sum(runs(spool_root, name) == [] for name in ("a", "b", "c")) >= 2
        assert len(gone.problems) <= 1
        again = remove_planned(root, plan_removal(root, RetentionPolicy(max_age_ns=DAY_NS), time.time_ns()))
        assert again.problems == ()
        assert os.listdir(spool_root / ".tmp") == ["gc.lock"]
        for record in os.listdir(spool_root / "done"):  # it has an age of its own, which begins anew
            assert f"done/{record}" in "".join(gone.problems)
            os.unlink(spool_root / "done" / record)
        return disk, gone.problems

    told = []
    for fail_at in itertools.count(5):  # before, the numbers of the runs are written down, without which nothing goes
        disk, problems = scenario(fail_at)
        told += problems
        if disk.count < fail_at:
            break
    assert len(told) >= 9


def test_the_newest_run_of_a_job_goes_only_with_all_others(spool_root: Path) -> None:
    """While another run of it cannot go, the newest stays: it says what became of the job, and its number is taken."""
    root = Spool(str(spool_root))
    (spool_root / "jobs" / "x" / "1").mkdir(parents=True)  # no result: it may live
    ended(spool_root, "x", 2, 1000)
    ended(spool_root, "x", 3, 1000)
    removal = plan_removal(root, RetentionPolicy(max_age_ns=DAY_NS), time.time_ns())
    assert ([old.run for old in removal.runs], removal.jobs) == ([2], ())


def test_gc_asks_of_each_run_a_fixed_number_of_questions(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the removal of a run costs does not grow with the number of runs: a job's are listed once or twice."""
    counted: list[str] = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path=".": counted.append(str(path)) or listdir(path))

    def listings(number: int) -> int:
        for run in range(1, number + 1):
            ended(spool_root, "x", run, 1000)
        counted.clear()
        root = Spool(str(spool_root))
        gone = remove_planned(root, plan_removal(root, RetentionPolicy(max_age_ns=DAY_NS), time.time_ns()))
        assert len(gone.runs) == number
        return len(counted)

    assert listings(40) == listings(4)


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
    about_spool = "directories, mode, file system, moves, configuration, job files, runs, clock"
    assert {found[check] for check in about_spool.split(", ")} == {"ok"}


def test_doctor_sees_the_gpus_that_every_command_sees(spool: Command, four: FakeNvml) -> None:
    """Where `gpus` shows four, doctor names four; it asks NVML, and no file of the driver."""
    said = {check["check"]: check for check in json.loads(spool("doctor", "--json").out)["checks"]}["GPUs"]
    assert (said["level"], "4: " in str(said)) == ("ok", True)
    four.error("nvmlInitWithFlags", 999)
    assert levels(spool("doctor", "--json").out)["GPUs"] == "fail"


def test_doctor_finds_what_is_wrong(spool: Command, spool_root: Path) -> None:
    """Open modes, a broken configuration, bad job files, runs without a result: each is told with what to do.

    `--fix` sets the modes.
    """
    os.chmod(spool_root / "queued", 0o777)
    (spool_root / "config.toml").write_text("autostart = false\ncpuz = 1\n")
    (put_job(spool_root, "bad", "x", "queued").parent / "bad.toml.error").write_text("- wrong\n")
    put_job(spool_root, "norun", place="running")
    said = spool("doctor", "--json")
    assert said.code == 1
    found = levels(said.out)
    wrong = [found[check] for check in ("mode", "configuration", "job files", "runs")]
    assert wrong == ["fail", "fail", "warn", "warn"]
    text = spool("doctor", "-q").out
    assert "chmod 700" in text
    assert "ok " not in text
    spool("doctor", "--fix")
    assert (spool_root / "queued").stat().st_mode & 0o777 == 0o700


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


def test_doctor_of_nothing_says_so(spool: Command, tmp_path: Path) -> None:
    """Where there is no spool yet that is the finding, the machine is looked at, and no spool is made."""
    said = spool("--spool", tmp_path / "nowhere", "doctor")
    assert (said.code, "`spool submit`" in said.out, "GPUs: " in said.out) == (0, True, True)
    assert not (tmp_path / "nowhere").exists()


def test_the_demo_does_what_it_promises(spool: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job ends as it should, and nothing is left behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["/opt/.venv/bin/spool", "demo"])
    which = shutil.which  # the program of a fresh checkout is on no PATH
    monkeypatch.setattr("shutil.which", lambda name, *words: None if name == "spool" else which(name, *words))
    said = spool("demo")
    assert "\n/opt/.venv/bin/spool submit " in said.out
    assert said.code == 0, said.out + said.err
    ends = {"data": "finished", "pi_4": "finished", "endless": "timeout", "publish": "cancelled", "report": "finished"}
    assert all(f"s  {name:8} {end}" in said.out for name, end in ends.items())
    assert "answered at attempt 2" in said.out
    assert "pi is about 3.14" in said.out
    assert not list(tmp_path.glob("spool-demo-*"))
    if "plot" in VERBS:  # it ends with a picture that has a row for each job, with how that ended
        rows = said.out.splitlines()
        assert all(any(row.startswith(f"{name} ") for row in rows) for name in ends)
        assert any("finished (run 2)" in row for row in rows)


def test_the_clock_of_the_demo_does_not_go_back() -> None:
    """A run whose end is noticed late is told with the time of the one before it."""
    study = object.__new__(Demonstration)
    study._begun_at_ns = 0
    study.dispatcher = SimpleNamespace(poll=lambda: 0)  # type: ignore[assignment]
    ends = (("a", 1), ("b", 3), ("c", 2), ("d", 4))
    results = [Result(name, 1, 1, State.CANCELLED, "x", ended_at_ns=at * SECOND_NS) for name, at in ends]
    study.results = lambda: results  # type: ignore[method-assign]
    assert [line.split()[:2] for line in study.told()] == [["1.0s", "a"], ["3.0s", "b"], ["3.0s", "c"], ["4.0s", "d"]]
