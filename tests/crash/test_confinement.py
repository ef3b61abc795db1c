"""Every operation on the files of one job fails in every way: it costs that job alone, and only for as long.

The matrix: each operation that the dispatcher makes on a path of one job (array, reservation), each error, once and
lasting, by the same dispatcher and by one that begins while the error lasts.
"""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from crash.cuts import chosen, noting
from crash.events import nobody_reads
from crash.world import Session, World, check, ends_of, world_at
from faulty import FaultyDisk, PathFaults
from spool.client.requests import ChangeKind, Requests
from spool.core import layout
from spool.core.layout import HELD, QUEUED
from spool.core.model import SECOND_NS
from spool.dispatcher import arrays, confinement, loop, observer, scanner
from spool.dispatcher.loop import Dispatcher
from spool.store import lock
from spool.store.disk import SpoolTrouble
from spool.store.spool import Spool

ERRORS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EMFILE),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.EEXIST),
)
SEED = int(os.environ.get("MATRIX_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
# That nothing is there is no error but what was asked: of a file, and of the runs of a job, which `gc` removes.
_ANSWERS = {("lstat", ""), ("listdir", f"{layout.JOBS}/")}
ONLY = os.environ.get("MATRIX_ONLY", "")  # a part of what a failure names, to try those cells alone
_LASTING = 1 << 30


@dataclass(frozen=True)
class Scene:
    """What happens to the job `x`, or the array or reservation of that name: `begin` before the fault, then `act`."""

    begin: Callable[[Session], object]
    act: Callable[[Session], object]


def _running(*lines: str) -> Callable[[Session], None]:
    def begin(session: Session) -> None:
        session.users.submit("x", "hang until 2", *lines)
        session.settle()
        assert session.world.pids("x")

    return begin


def _time_is_over(session: Session) -> None:
    for live in session.now.state.live.values():
        live.started_boot_ns = -(10**15)
        session.now.limits.add(live)


def _another_dispatcher(session: Session) -> None:
    session.end()
    session.world.exit(session.world.pids("x")[0], 0)


def _mend(session: Session) -> None:
    session.users.submit("x", "ok", "nonsense = 1")
    session.turns(3)
    session.users.submit("x", "ok")


def _reserve(session: Session) -> None:
    path = session.world.root / "reservations" / "x.toml"
    path.write_text("nonsense = 1\n")
    session.turns(3)
    path.unlink()


def _end_tasks(session: Session) -> None:
    for pid in list(session.world.alive):
        session.world.exit(pid, 0)


SCENES = {
    "runs twice": Scene(lambda s: None, lambda s: s.users.submit("x", "fail until 2", "retry = { max = 1 }")),
    "is cancelled": Scene(_running(), lambda s: s.users.cancel("x")),
    "is deleted": Scene(_running(), lambda s: s.users.path("running", "x").unlink()),
    "is over its limit": Scene(_running('time_limit = "1h"'), _time_is_over),
    "is killed": Scene(_running(), lambda s: s.world.kill("x")),
    "is adopted": Scene(_running(), _another_dispatcher),
    "is released": Scene(lambda s: s.users.submit("x", "ok", place=HELD), lambda s: s.users.move("x", HELD, QUEUED)),
    "is mended": Scene(lambda s: None, _mend),
    "is waited for": Scene(
        lambda s: (s.users.submit("x", "ok"), s.settle()), lambda s: s.users.submit("after", "ok", "depends_on = ['x']")
    ),
    "depends in vain": Scene(
        lambda s: (s.users.submit("bad", "fail"), s.settle()),
        lambda s: s.users.submit("x", "ok", "depends_on = ['bad']"),
    ),
    "an array is held": Scene(
        lambda s: (s.users.submit("x", "hang until 2 # {index}", 'array = "0-1"'), s.turns(4)),
        lambda s: (s.users.move("x", "running", HELD), s.turns(2), s.users.move("x", HELD, "running"), _end_tasks(s)),
    ),
    "is an array": Scene(lambda s: None, lambda s: s.users.submit("x", "ok # {index}", 'array = "0-1"')),
    "is a reservation": Scene(lambda s: None, _reserve),
}


@contextmanager
def _stage(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Session, PathFaults]]:
    """Give a session whose dispatchers meet the faults, and its users do not."""
    nobody_reads(monkeypatch)
    monkeypatch.setattr(observer, "MISSING_NS", 0)
    monkeypatch.setattr(scanner, "RECHECK_NS", 0)
    monkeypatch.setattr(arrays, "_TRY_AGAIN_NS", 0)
    with world_at(root, monkeypatch) as world, PathFaults(_concerns(world)) as faults:
        faults.active = False
        world.cpus = 4
        session = Session(world)
        session.survives_errors = True
        turn = session.one_turn

        def faulty_turn() -> bool:
            faults.active = True
            try:
                return turn()
            finally:
                faults.active = False

        session.one_turn = faulty_turn  # type: ignore[method-assign]
        try:
            yield session, faults
        finally:
            faults.heal()
            session.end()


def _concerns(world: World) -> Callable[[str], bool]:
    places = tuple(f"{world.root}/{place}/x." for place in ("queued", "held", "running", "done", "reservations"))
    return lambda path: path.startswith((*places, f"{world.root}/jobs/x/")) or path == f"{world.root}/jobs/x"


def _play(scene: Scene, session: Session, faults: PathFaults) -> None:
    scene.begin(session)
    session.turns(3)
    faults.met.clear()
    faults.begin()
    scene.act(session)
    session.turns(8)


def _cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scene: Scene) -> tuple[list[tuple[str, str]], object]:
    """Return the operations of a scene on a sound disk, without the root of the spool, and what it comes to."""
    with _stage(tmp_path / "whole", monkeypatch) as (session, faults):
        _play(scene, session, faults)
        session.users.submit("later", "ok")
        session.settle()
        session.end()
        session.settle()
        session.sweep()
        check(session.world)
        root = f"{session.world.root}/"
        return sorted({(name, path.removeprefix(root)) for name, path in faults.met}), ends_of(session.world)


def _rests(session: Session, now: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that with the pauses of real life nothing more is done until the first of them is over."""
    with monkeypatch.context() as real:
        real.setattr(confinement, "LONGEST_PAUSE_NS", 60 * SECOND_NS)
        for trouble in now.confinement._troubles.values():
            trouble.pause_ns = 60 * SECOND_NS
        session.one_turn()
        session.looks_at_everything = False
        # Not the first: what the watcher tells of the turn before may come late.
        assert not all(session.one_turn() for _ in range(20)), "it does not come to rest"
        session.looks_at_everything = True
        assert now.due_in_ns() != 0, "it spins"
        for trouble in now.confinement._troubles.values():
            trouble.pause_ns = trouble.again_at_ns = 0


def _answers(name: str, path: str, error: int) -> bool:
    """Whether that error is an answer."""
    return error == errno.ENOENT and any(name == call and path.startswith(below) for call, below in _ANSWERS)


def _later_runs(session: Session, about: str) -> None:
    """Assert that a job that is dropped now starts and ends as if nothing was wrong with the other."""
    session.users.submit("later", "ok")
    session.turns(6)
    assert ends_of(session.world).outcomes.get("later") == ("finished 1.0",), f"{about}: the next job waits"


@pytest.mark.timeout(1800)  # with every cell
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
@pytest.mark.parametrize("way", ["once", "lasting", "anew"])
def test_an_error_costs_the_thing_that_it_belongs_to_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scene: Scene, thin: int, way: str
) -> None:
    """The dispatcher lives, the next job ends in its time, and without the error the first ends as it would have."""
    cells, expected = _cells(tmp_path, monkeypatch, scene)
    matrix = [(name, path, error) for name, path in cells for error in ERRORS if not _answers(name, path, error)]
    matrix = [cell for cell in matrix if ONLY in f"{cell[0]} {cell[1]} {errno.errorcode[cell[2]]}"]
    thin *= 0 if ONLY else 1 if way == "once" else 2 if way == "lasting" else 3
    matrix = chosen(matrix, lambda cell: cell[:2], thin, random.Random(SEED))
    failures: list[str] = []
    for number, (name, path, error) in enumerate(matrix):
        about = f"{name} {path} {errno.errorcode[error]}"
        with noting(failures, about), _stage(tmp_path / f"{way}.{number}", monkeypatch) as (session, faults):
            times = 1 if way == "once" else _LASTING
            faults.choose(name, f"{session.world.root}/{path}", error, times=times)
            _play(scene, session, faults)
            if way == "anew":
                session.end()
                session.turns(4)
            _later_runs(session, about)
            now = session.now
            if way != "once":
                met = faults.raised
                _rests(session, now, monkeypatch)
                complaint = session.users.path(QUEUED, "x").with_suffix(".toml.error")
                told = now.confinement.problems() or complaint.exists()
                assert told or faults.raised == met, "nobody is told"
            faults.heal()
            session.settle()
            session.end()
            session.settle()
            session.sweep()
            check(session.world)
            assert ends_of(session.world) == expected
    assert not failures, f"seed {SEED}: {len(failures)} of {len(matrix)}:\n" + "\n".join(failures)


def _make(kind: str, path: Path) -> None:
    """Put something that is no record in the place of one."""
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "socket":
        directory = os.open(path.parent, os.O_RDONLY)  # the path may be too long for a socket
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{directory}/{path.name}")
        os.close(directory)
    else:
        path.write_bytes(b"\xff\x00 \x1b[31m" * 1000)


KINDS = ("directory", "fifo", "link", "loop", "socket", "nonsense")
RECORDS = ("jid", "rc", "stop", "status", "result.toml", "grant.toml", "job.toml", "kept", "error", "run.sh", "log")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("anew", [False, True], ids=["the_same", "anew"])
def test_what_is_no_record_costs_the_run_that_it_belongs_to_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, *, anew: bool
) -> None:
    """Whatever lies in the place of a record, the next job runs; without it the run ends, and did not run twice."""
    failures: list[str] = []
    for record in RECORDS:
        with noting(failures, f"{record} is a {kind}"), _stage(tmp_path / record, monkeypatch) as (session, _):
            _running("requeue = false")(session)
            path = Path(session.world.root, "jobs", "x", "1", record)
            before = path.read_bytes() if path.exists() else None
            path.unlink(missing_ok=True)
            _make(kind, path)
            if anew:
                session.end()
            session.turns(3)
            with suppress(FileExistsError):
                for pid in session.world.pids("x"):
                    session.world.exit(pid, 0)
            session.turns(4)
            _later_runs(session, record)
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
            if before is not None:
                path.write_bytes(before)
            session.settle()
            assert len(ends_of(session.world).outcomes.get("x", ())) == 1, ends_of(session.world)
            session.sweep()
    assert not failures, "\n".join(failures)


_NEEDS_ROOM = frozenset({"create", "fill", "append", "mkdir"})  # names in a directory that has room for them need none


# A full disk: what concerns the spool as a whole.


@pytest.fixture
def disk(world: World, session: Session, monkeypatch: pytest.MonkeyPatch) -> FaultyDisk:
    """Give the first dispatcher of the session a disk that is full from the moment at which `fail_at` says so."""
    nobody_reads(monkeypatch)
    made = FaultyDisk(world.staging, error=errno.ENOSPC, only=_NEEDS_ROOM, fail_for=_LASTING)
    session.disks = iter([made])
    session.survives_errors = True
    return made


def _fill(disk: FaultyDisk) -> None:
    disk.fail_at = disk.count + 1


def test_a_limit_on_a_full_disk_is_told_as_one_although_the_dispatcher_dies(session: Session, disk: FaultyDisk) -> None:
    """The record of a stop takes room that was kept for it, so the next dispatcher knows why the run has ended."""
    session.users.submit("x", "hang", 'time_limit = "1h"')
    session.settle()
    _fill(disk)
    _time_is_over(session)
    session.turns(3)
    assert not session.world.pids("x")
    session.end()
    session.settle()
    assert ends_of(session.world).outcomes == {"x": ("timeout 1.0",)}


def test_a_full_disk_is_told_once_however_many_jobs_wait(session: Session, disk: FaultyDisk) -> None:
    """Where no start can be prepared none is tried after the first, and no job has a reason of its own."""
    session.turns(1)
    disk.only = frozenset({"create", "mkdir"})  # the inodes are used up
    _fill(disk)
    for number in range(20):
        session.users.submit(f"job{number}", "ok")
    session.turns(3)
    assert not session.now.state.told_blocked
    assert len([error for error in session.errors if "run." in str(error.filename)]) <= 3
    disk.fail_at = None
    session.end()
    session.settle()
    assert len(ends_of(session.world).outcomes) == 20


def test_a_dispatcher_that_begins_on_a_full_disk_waits_for_room(session: Session, disk: FaultyDisk) -> None:
    """It lives, says so, starts nothing, and goes on by itself once there is room."""
    disk.fail_at = 1
    session.users.submit("x", "ok")
    session.turns(6)
    assert os.strerror(errno.ENOSPC) in session.now.confinement.held_up()
    assert session.users.path(QUEUED, "x").exists()
    disk.fail_at = None
    session.settle()
    assert session.dispatchers == 1
    assert not session.now.confinement.problems()
    assert ends_of(session.world).outcomes == {"x": ("finished 1.0",)}


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_cannot_be_locked_anew_is_told_once_and_tried_after_growing_pauses(
    session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None]
) -> None:
    """With a directory or a FIFO in the place of `.lock` jobs go on, the trouble is told, and mended when it can be."""
    monkeypatch.setattr(lock, "_BEING_DELETED_S", 0.0)
    monkeypatch.setattr(loop, "_LOCK_EVERY_NS", 0)
    now_ns = [SECOND_NS]
    session.survives_errors = True
    session.settle()
    monkeypatch.setattr(session.now.confinement, "_clock", lambda: now_ns[0])
    monkeypatch.setattr(confinement, "FIRST_PAUSE_NS", SECOND_NS // 20)
    monkeypatch.setattr(confinement, "LONGEST_PAUSE_NS", 5 * SECOND_NS)
    path = session.world.root / layout.LOCK
    path.unlink()
    make(path)
    session.users.submit("x", "ok")
    tries: list[str] = []
    real = lock._locked_file
    monkeypatch.setattr(lock, "_locked_file", lambda path, deadline: tries.append(path) or real(path, deadline))
    session.turns(20)
    text = "cannot lock the spool again: .lock: it is not a regular file; move what is in the way somewhere else"
    assert [text in problem for problem in session.now.confinement.problems()] == [True]
    assert [text in message for message in caplog.messages].count(True) == 1
    assert len(tries) == 1
    path.rmdir() if path.is_dir() else path.unlink()
    now_ns[0] += SECOND_NS
    session.settle()
    assert not session.now.confinement.problems()
    assert path.is_file()
    assert ends_of(session.world).outcomes == {"x": ("finished 1.0",)}


def test_listeners_that_cannot_be_started_are_told_of_once_for_as_long_as_that_lasts(
    session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is among the problems and once in the log, and jobs go on."""
    session.survives_errors = True
    session.settle()
    trouble = PermissionError(errno.EACCES, "Permission denied", "/usr/bin/python")
    monkeypatch.setattr(session.now.events.client, "trouble", trouble)
    session.users.submit("x", "ok")
    session.turns(6)
    text = "cannot start the process of the listeners: /usr/bin/python: Permission denied"
    assert [text in problem for problem in session.now.confinement.problems()] == [True]
    assert [text in message for message in caplog.messages].count(True) == 1
    assert ends_of(session.world).outcomes == {"x": ("finished 1.0",)}
    session.now.events.client.trouble = None
    session.turns(1)
    assert not session.now.confinement.problems()


@pytest.mark.usefixtures("disk")
def test_a_cancel_on_a_full_disk_is_a_deletion(session: Session) -> None:
    """`spool cancel` does what `rm running/x.toml` does, though it cannot record who did it."""
    session.users.submit("x", "hang")
    session.settle()
    full = FaultyDisk(session.world.staging, fail_at=1, error=errno.ENOSPC)
    full.fail_for = 1  # the record; to delete takes no room
    changes = Requests(Spool(str(session.world.root)), "somebody", full).cancel("x")
    assert [change.kind for change in changes] == [ChangeKind.STOPPING]
    session.settle()
    assert ends_of(session.world).outcomes == {"x": ("cancelled 1.0",)}


@pytest.mark.usefixtures("disk")
def test_nothing_starts_while_the_journal_cannot_be_synced(session: Session) -> None:
    """A background sync that fails is told as a trouble of the journal, and is over with the next that succeeds."""
    session.settle()
    session.now.logs.problem = SpoolTrouble(errno.EIO, os.strerror(errno.EIO), f"{session.world.root}/.journal")
    session.turns(1)
    assert ": .journal: " in session.now.confinement.held_up()
    session.users.submit("x", "ok")
    session.turns(2)
    assert session.users.path(QUEUED, "x").exists()
    session.now.logs.sync()
    session.settle()
    assert not session.now.confinement.problems()
    assert ends_of(session.world).outcomes == {"x": ("finished 1.0",)}


def test_nothing_starts_while_the_history_cannot_be_written(
    session: Session, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has ended waits for the history, what waits says so, and both go on once it can be written."""
    session.users.submit("x", "hang")
    session.settle()
    original = disk.append

    def append(fd: int, data: bytes) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("history.jsonl"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        original(fd, data)

    monkeypatch.setattr(disk, "append", append)
    session.world.exit(session.world.pids("x")[0], 0)
    session.turns(3)
    session.users.submit("later", "ok")
    session.turns(4)
    assert "history.jsonl: " in session.now.confinement.held_up()
    assert session.users.path(QUEUED, "later").exists()
    view = session.now.status.view(session.now.planner.plan, session.now.planner.machine, paused=False)
    assert "history.jsonl: " in view.jobs["later"].reason
    assert "history.jsonl: " in view.machine.refusal
    monkeypatch.setattr(disk, "append", original)
    session.settle()
    session.sweep()
    check(session.world)
    assert ends_of(session.world).outcomes == {"x": ("finished 1.0",), "later": ("finished 1.0",)}


def test_a_run_that_cannot_be_filed_keeps_no_dispatcher_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--until-idle` waits for what runs, and not for what only users can mend."""
    with _stage(tmp_path / "spool", monkeypatch) as (session, faults):
        _running()(session)
        faults.choose("rename", f"{session.world.root}/jobs/x/1/result.toml", errno.EACCES, times=_LASTING)
        faults.begin()
        found = [session.now.stuck]
        session.world.exit(session.world.pids("x")[0], 0)
        session.turns(3)
        found.append(session.now.stuck)
        assert found == [False, True]
