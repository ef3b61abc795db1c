"""A run is stopped for a short job while its dispatcher is cut off: nothing is lost, and nothing counts twice."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.cuts import Alike
from crash.world import Ends, Session, World, check, ends_of, world_at
from faulty import FaultyDisk
from spool.core import forecast
from spool.core.layout import DONE, QUEUED, RUNNING
from spool.core.model import Stop, StopKind
from spool.dispatcher import launcher, recovery, terminator
from spool.store.disk import Disk
from spool.store.spool import Spool

LONG = 'cpus = 2\npreemptible = true\ntime_limit = "1d"'
SHORT = 'cpus = 2\ntime_limit = "1h"'
EXPECTED = Ends(
    places={"long": ("done",), "short": ("done",)},
    starts={"long": 2, "short": 1},
    outcomes={"long": ("preempted 1.0 requeue", "finished 1.0"), "short": ("finished 1.0",)},
)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for runs to stop in each pass, and wait for no wrapper that was never launched."""
    monkeypatch.setattr(forecast, "AFTER_NS", 0)  # a run may be stopped as soon as it has begun
    monkeypatch.setattr(terminator, "_LOOK_EVERY_NS", 0)
    monkeypatch.setattr(terminator, "_SOON_NS", 0)
    monkeypatch.setattr(terminator, "_LOOK_SHARE", 0)
    monkeypatch.setattr(launcher, "SILENT_NS", 0)
    monkeypatch.setattr(recovery, "SILENT_NS", 0)
    # The processes of this world began at no time of this machine.
    monkeypatch.setattr(recovery, "_started_boot_ns", lambda *_: time.clock_gettime_ns(time.CLOCK_BOOTTIME))


def play(world: World, disks: Iterator[Disk]) -> Session:
    """Let a long job run and a short one come; leave without a dispatcher."""
    session = Session(world, disks)
    try:
        session.users.submit("long", "hang until 2", LONG)
        session.settle()
        session.users.submit("short", "ok", SHORT)
        session.settle()
        session.end()
        session.settle()
    finally:
        session.end()
    return session


def judge(world: World) -> None:
    """Assert that the short job ran in between, and that the long one was preempted once, uncounted."""
    check(world)
    assert ends_of(world) == EXPECTED
    assert [name for name, _ in world.begun] == ["long", "short", "long"]


@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
def test_a_cut_before_any_change_of_a_preemption_alters_nothing(alike: Alike, *, torn: bool) -> None:
    """Killed before the order, its record, the result, the history or the move, it comes to the same end."""
    alike.cut(play, judge, torn=torn)


def test_a_full_disk_alters_nothing_either(alike: Alike) -> None:
    """Whichever change there is no room for, the run is stopped once and its job goes on, if not at its place."""

    def played(world: World, number: int | None) -> FaultyDisk:
        disk = FaultyDisk(world.staging, fail_at=number, error=errno.ENOSPC)
        play(world, iter([disk]))
        check(world)
        assert ends_of(world) == EXPECTED
        return disk

    alike(played)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """Give a session in which the long job runs."""
    with world_at(tmp_path / "spool", monkeypatch) as world:
        made = Session(world)
        made.users.submit("long", "hang until 2", LONG)
        made.settle()
        yield made
        made.end()


def stopping(session: Session) -> Stop:
    """Let the short job come, go on until the long one is ordered to stop, and return that order."""
    session.users.submit("short", "ok", SHORT)
    for _ in range(20):
        session.turns(1)
        if (stop := Spool(str(session.world.root)).stop("long", 1)) is not None:
            return stop
    raise AssertionError("it was not ordered to stop")


def test_a_job_that_is_cancelled_while_it_is_preempted_stays_cancelled(session: Session) -> None:
    """Its file is in `done/`, so it does not run again.

    The order names the job that gets the room: it is all that the next dispatcher needs to know.
    """
    stop = stopping(session)
    assert (stop.kind, stop.by, stop.reason) == (StopKind.PREEMPT, "spool", "short")
    if session.users.path(RUNNING, "long").exists():
        session.users.move("long", RUNNING, DONE)
    else:
        session.users.move("long", QUEUED, DONE)
    session.settle()
    check(session.world)
    assert ends_of(session.world).starts == {"long": 1, "short": 1}


@pytest.mark.parametrize("same", [True, False], ids=["the_same", "another"])
@pytest.mark.parametrize("hours", [1, 0])
def test_the_hour_counts_across_dispatchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int, *, same: bool
) -> None:
    """The next run of the job is spared, also by a dispatcher that finds it running: the run before it says so."""
    with world_at(tmp_path / "spool", monkeypatch) as world:
        monkeypatch.setattr(forecast, "EVERY_NS", hours * 3600 * 10**9)
        session = Session(world)
        session.users.submit("long", "hang until 3", LONG)
        session.settle()
        session.users.submit("short", "ok", SHORT)
        session.settle()
        if not same:
            session.end()
        session.users.submit("later", "ok", SHORT)
        session.settle()
        assert ends_of(world).starts == {"long": 2, "short": 1} | ({"long": 3, "later": 1} if not hours else {})
        session.end()
