"""A job is taken away in the moment in which a kill leaves its dispatcher's work half done: it ends once, as itself."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from crash.cuts import Alike
from crash.world import Session, World, check, history
from faulty import FaultyDisk
from spool.client import gc
from spool.client.requests import Requests
from spool.core.errors import SpoolError
from spool.core.layout import DONE, HELD, PLACES, QUEUED, RUNNING
from spool.core.model import State
from spool.formats.config import RetentionPolicy
from spool.store.spool import Spool

JOB = "taken"
KEYS = ('project = "vision"', 'tags = ["paper"]', 'group = "night"', "cpus = 2", 'memory = "64M"', "requeue = false")

Deed = Callable[[World, Session], bool]
"""Takes the job away, wherever its file is; returns whether there was one."""


def _place(session: Session) -> str | None:
    """Return where the file of the job is, before it is in `done/`."""
    return next((place for place in (RUNNING, QUEUED, HELD) if session.users.path(place, JOB).exists()), None)


def _rm(_: World, session: Session) -> bool:
    place = _place(session)
    if place is not None:
        session.users.path(place, JOB).unlink()
    return place is not None


def _to_done(_: World, session: Session) -> bool:
    place = _place(session)
    return place is not None and session.users.move(JOB, place, DONE)


def _to_held(_: World, session: Session) -> bool:
    place = _place(session)
    return place is not None and (place == HELD or session.users.move(JOB, place, HELD))


def _cancel(world: World, _: Session) -> bool:
    try:
        Requests(Spool(str(world.root)), "somebody").cancel(JOB)
    except SpoolError:
        return False
    return True


DEEDS: dict[str, Deed] = {"rm": _rm, "mv done": _to_done, "mv held": _to_held, "cancel": _cancel}


def _runs(session: Session, command: str = "hang") -> None:
    session.users.submit(JOB, command, *KEYS)
    session.settle()


def _is_suspended(session: Session) -> None:
    _runs(session)
    if session.users.path(RUNNING, JOB).exists():
        session.users.suspend(JOB)
    session.settle()


def _waits(session: Session) -> None:
    session.users.submit("other", "hang", "cpus = 2")
    session.settle()
    _runs(session)
    for pid in session.world.pids("other"):
        session.world.exit(pid, 0)
    session.settle()


LIVES: dict[str, Callable[[Session], None]] = {
    "ends": lambda session: _runs(session, "ok"),
    "runs": _runs,
    "is suspended": _is_suspended,
    "waits": _waits,
}


def _finish(session: Session) -> None:
    """Let all that still waits, is held or runs come to its end."""
    for _ in range(3):
        session.settle()
        session.users.go_on(JOB)
        session.users.move(JOB, HELD, QUEUED)
        session.settle()
        for pid in list(session.world.alive):
            session.world.exit(pid, 0)
    session.end()
    session.settle()
    session.end()


def _assert_told_as_it_was(world: World, place: str | None, deed: str, *, over: bool) -> None:
    check(world)
    spool = Spool(str(world.root))
    lines = [line for line in history(world.root) if line.job == JOB]
    withdrawn = deed == "rm" and place in (QUEUED, HELD)
    ends = [line for line in lines if line.again is None and (line.outcome is State.FINISHED or deed != "mv held")]
    again = deed == "mv held" and over  # a run had ended by itself: its file, held and released, is run again
    assert len(ends) == 1 + again or (withdrawn and not ends), [(r.run, r.outcome, r.reason) for r in lines]
    assert withdrawn or spool.places(JOB) == [DONE], spool.places(JOB)
    for line in lines:
        assert line.project == "vision", f"project of run {line.run}: {line.project}"
        assert (line.tags, line.group) == (("paper",), "night")
        assert (line.request.cpus, line.request.memory_bytes) == (2, 64 << 20)
        assert line.ended_at_ns <= time.time_ns()
        assert line.started_at_ns is None or line.started_at_ns <= line.ended_at_ns
        assert (line.started_at_ns is not None) == ((JOB, line.run) in world.begun)
        recorded = spool.result(JOB, line.run)
        assert (recorded.outcome, recorded.ended_at_ns) == (line.outcome, line.ended_at_ns)
    assert sum(name == JOB for name, _ in world.begun) <= len(lines)


def _assert_collected_for_good(world: World, session: Session) -> None:
    """Collect what has ended: no line of the history goes, and nothing comes back."""
    before, spool = history(world.root), Spool(str(world.root))
    keep = RetentionPolicy(max_age_ns=0)
    gc.remove_planned(spool, gc.plan_removal(spool, keep, time.time_ns() + 1))
    assert not any(spool.places(JOB))
    session.settle()
    session.end()
    assert history(world.root) == before
    assert not any(spool.names(place) for place in PLACES if place != DONE)
    assert not spool.runs(JOB)


def _play(world: World, life: str, deed: str, disk: FaultyDisk) -> None:
    """Play *life*, cut off where *disk* is; take the job away there, and let all come to its end."""
    session = Session(world, iter([disk]))
    taken: list[tuple[str | None, bool]] = []

    def take() -> None:
        if not taken:
            place, spool = _place(session), Spool(str(world.root))
            over = place == RUNNING and any(spool.exit(JOB, run) is not None for run in spool.runs(JOB))
            taken.append((place if DEEDS[deed](world, session) else None, over))

    session.after_cut = take
    try:
        LIVES[life](session)
        if not taken:
            session.end()
            take()
        _finish(session)
        place, over = taken[0]
        _assert_told_as_it_was(world, place, deed, over=over)
        _assert_collected_for_good(world, session)
    finally:
        session.end()


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("life", LIVES)
def test_a_job_that_is_taken_away_after_any_cut_ends_once_and_as_itself(alike: Alike, life: str, deed: str) -> None:
    """Whatever a kill has left half done when a job is cancelled, deleted or held, it has one end, with its request."""

    def played(world: World, number: int | None) -> FaultyDisk:
        disk = FaultyDisk(world.staging, cut_at=number)
        _play(world, life, deed, disk)
        return disk

    alike(played)
