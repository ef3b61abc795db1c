"""Every transition is told at least once, wherever the dispatcher is killed; a repeat has the id of the first."""

from __future__ import annotations

import errno
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crash.cuts import Alike
from crash.events import events, nobody_reads, repeated, want_everything
from crash.scripts import play
from crash.world import Session, World, check, ends_of, history, world_at
from faulty import FaultyDisk
from spool import listeners
from spool.core import layout
from spool.core.layout import HELD as HELD_PLACE
from spool.core.layout import RUNNING
from spool.core.model import Answer, EventName
from spool.dispatcher import launcher, observer
from spool.dispatcher.events import ConditionKind, OngoingCondition, conditions
from spool.formats.events import Reply
from spool.listeners import HookFiles
from spool.store.spool import Spool

# How often each file of the script is submitted to queued/, held, and released, whatever is cut off.
QUEUED = dict.fromkeys(("after", "gone", "huge", "killed", "never", "stopped", "tired", "tried", "twice", "wrong"), 1)
QUEUED |= {"plain": 2, "long": 2, "denied": 1, "refused": 1}
HELD = {"parked": 1, "stopped": 1}


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no process that tells the listeners."""
    nobody_reads(monkeypatch)


def _hook(monkeypatch: pytest.MonkeyPatch, *events: str) -> None:
    """Have a hook for these events; a file that is missing is missed at once, and a wrapper has time to speak."""
    monkeypatch.setattr(listeners, "find_hooks", lambda _: HookFiles(dict.fromkeys(events, ("/hook",))))
    monkeypatch.setattr(observer, "MISSING_NS", 0)
    monkeypatch.setattr(launcher, "SILENT_NS", 30_000_000_000)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have somebody listen who wants to hear of everything."""
    want_everything(monkeypatch)


def _check(world: World) -> None:
    told = events(world)
    ids = {event.id: event for event in told}
    for event in told:
        again = ids[event.id]
        assert (event.name, event.job, event.run) == (again.name, again.job, again.run), event.id
    names = Counter((event.name, event.job, event.run) for event in ids.values())
    for result in history(world.root):
        name = EventName.RETRYING if result.again is not None else EventName(result.outcome)
        assert names[name, result.job, result.run] == 1, f"{name} of {result.job} {result.run} was not told once"
        found = next(event for event in told if (event.name, event.job, event.run) == (name, result.job, result.run))
        assert (found.result.outcome, found.result.again) == (result.outcome, result.again)
    for job, run in world.begun:
        for name in (EventName.SUBMITTED, EventName.STARTED):
            assert names[name, job, run] == 1, f"{name} of {job} {run} was not told"
    jobs = Counter((event.name, event.job) for event in ids.values())
    assert {job: count for (name, job), count in jobs.items() if name == EventName.QUEUED} == QUEUED
    assert {job: count for (name, job), count in jobs.items() if name == EventName.HELD} == HELD
    assert {job: count for (name, job), count in jobs.items() if name == EventName.RELEASED} == HELD
    assert {job for (name, job) in jobs if name == EventName.CANCELLING} == {"long"}
    check(world)
    began, left = jobs[EventName.DISPATCHER_STARTED, None], jobs[EventName.DISPATCHER_STOPPED, None]
    assert left >= began - 1, "a dispatcher that was killed was not missed"


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
def test_a_cut_before_any_change_leaves_nothing_untold(alike: Alike, *, torn: bool) -> None:
    """Killed before any change of the disk, the next dispatcher tells what is not on record."""
    alike.cut(play, _check, torn=torn)


@pytest.mark.usefixtures("heard")
def test_a_second_cut_during_the_recovery_leaves_nothing_untold(alike: Alike) -> None:
    """A dispatcher that is killed while it tells what another could not leaves it to the third."""
    alike.cut_again(play, _check, 270)


def _on_a_full_disk(world: World, number: int | None, *, survives: bool, fail_for: int = 1) -> FaultyDisk:
    disk = FaultyDisk(world.staging, fail_at=number, fail_for=fail_for, error=errno.ENOSPC)
    session = play(world, iter([disk]), survives=survives)
    _check(world)
    if session.dispatchers == 1:
        assert not repeated(world)
    return disk


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("survives", [False, True], ids=["another", "the_same"])
def test_a_full_disk_leaves_nothing_untold(alike: Alike, *, survives: bool) -> None:
    """What could not be written for want of room is told when there is room, by the same dispatcher or the next."""
    opening = range(1, 9)  # the listeners get their places
    alike(partial(_on_a_full_disk, survives=survives), also=opening)


@pytest.mark.usefixtures("heard")
def test_what_cannot_be_written_down_for_a_while_is_told_once(alike: Alike) -> None:
    """However often the dispatcher tries to do the paperwork of an end, the listeners hear of it once."""
    on_events = partial(_on_a_full_disk, survives=True, fail_for=20)
    alike(on_events, among=lambda done: done.paths[0].endswith(f"/{layout.EVENTS}"))


def test_a_run_that_goes_on_is_told_once_a_minute_and_only_to_who_wants_it(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a hook for it each run is told of when the minute is over, once; without one nothing is written."""
    hooks = HookFiles()
    monkeypatch.setattr(listeners, "find_hooks", lambda _: hooks)
    monkeypatch.setattr(launcher, "SILENT_NS", 30_000_000_000)
    session.users.submit("long", "hang")
    session.turns(4)
    assert not (session.world.root / layout.EVENTS).exists()
    hooks = HookFiles({"polling": ("/hook",)})
    session.turns(4)
    assert events(session.world) == []
    for _ in range(2):
        session.now.monitor._poll_at_ns = 0
        session.turns(4)
    assert [(event.name, event.job, event.run) for event in events(session.world)] == [("polling", "long", 1)] * 2


def test_a_job_may_be_called_like_anything_that_is_told_of(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs named `dispatcher`, `reservation`, `gpu`: a kill makes no reservation end, and one dispatcher be missed."""
    heard = (EventName.STARTED, EventName.DISPATCHER_STOPPED, EventName.RESERVATION_STARTED, EventName.GPU_FREE)
    _hook(monkeypatch, *heard)
    session.world.cpus = 3
    for name in ("dispatcher", "reservation", "gpu"):
        session.users.submit(name, "hang")
    session.turns(6)
    session.end()
    session.turns(6)
    told = [(event.name, event.job) for event in events(session.world)]
    assert Counter(told) == {
        (EventName.STARTED, "dispatcher"): 1,
        (EventName.STARTED, "reservation"): 1,
        (EventName.STARTED, "gpu"): 1,
        (EventName.DISPATCHER_STOPPED, None): 1,
    }
    for pid in list(session.world.alive):
        session.world.exit(pid, 0)
    session.turns(6)
    assert len(session.now.monitor.worth_remembering()) == 1  # of the dispatcher, and of no run that is over
    session.now.monitor.leaves()
    session.now.journal.commit()
    assert [event.job for event in events(session.world)][len(told) :] == [None]
    assert len({event.id for event in events(session.world)}) == len(told) + 1


@given(
    st.from_regex(rf"\A{layout.NAME_PATTERN}\Z"),
    st.sampled_from(ConditionKind),
    st.integers(),
    st.sampled_from(EventName),
)
def test_what_lasts_is_read_as_it_was_written_and_is_never_a_runs(
    name: str, kind: ConditionKind, since_ns: int, event: EventName
) -> None:
    """The journal gives back of each kind what it was given, whatever else stands there; ids have no slash."""
    written = [OngoingCondition(kind, named, since_ns) for named in (name, "", f"MIG-GPU-1:{name}")]
    keys = [*(each.key for each in written), f"{name}:1:{event}", f"{kind}:1:{event}", "/", "/gpu:", f"/{kind}:x"]
    assert conditions(keys, kind) == written
    assert [found for other in ConditionKind if other is not kind for found in conditions(keys, other)] == []
    assert not any("/" in each.id for each in written)


@pytest.fixture
def asking(session: Session, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Give a session in which a hook is asked about the cancel of a run."""
    _hook(monkeypatch, "cancelling")
    session.users.submit("long", "hang", 'time_limit = "1h"')
    session.turns(4)
    session.users.path(RUNNING, "long").unlink()
    session.turns(4)
    assert session.now.asking
    return session


def test_who_waits_for_an_answer_sleeps(asking: Session) -> None:
    """While a cancel is asked about nothing is due, the run goes on, and the question is asked once."""
    now = asking.now
    assert now.filemoves._timer.at_ns is None
    assert len(now.events.client._reviews) == 1
    assert asking.world.pids("long")
    now.events.replies.append(Reply(1, Answer(no="not yet")))
    asking.turns(4)
    assert not now.asking
    assert now.filemoves._timer.at_ns is None
    assert asking.users.path(RUNNING, "long").exists()
    assert asking.world.pids("long")


def test_a_run_that_ends_while_its_cancel_is_asked_about_ends_as_it_did(asking: Session) -> None:
    """Nobody has stopped it: exit code 0 is finished, and what depends on it runs; the answer comes too late."""
    asking.users.submit("after", "ok", 'depends_on = ["long"]')
    asking.world.exit(*asking.world.pids("long"), 0)
    asking.turns(6)
    asking.now.events.replies.append(Reply(1, Answer(no="not yet")))
    asking.settle()
    assert ends_of(asking.world).outcomes == {"long": ("finished 1.0",), "after": ("finished 1.0",)}
    spool = Spool(str(asking.world.root))
    assert [spool.record("long", 1, record) for record in (layout.STOP, layout.KEPT)] == [None, None]


def test_a_time_limit_asks_nobody_also_while_a_cancel_is_asked_about(asking: Session) -> None:
    """The run is stopped for its limit, and a no to the cancel comes too late to change that."""
    now = asking.now
    (live,) = now.state.live.values()
    now.terminator.tick = list  # it tidies up
    live.started_boot_ns, live.unregistered_until_ns = -(10**15), 0
    now.limits.add(live)
    asking.turns(2)
    now.events.replies.append(Reply(1, Answer(no="not yet")))
    asking.turns(2)
    assert asking.world.pids("long")
    del now.terminator.tick
    asking.settle()
    assert ends_of(asking.world).outcomes == {"long": ("timeout 1.0",)}
    assert Spool(str(asking.world.root)).record("long", 1, layout.KEPT) is None


@pytest.mark.parametrize("name", ["submitting", "cancelling"])
def test_no_answer_is_lost_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What an answer leads to is done once there is room, and so is what those behind it lead to."""
    _hook(monkeypatch, name)
    with world_at(tmp_path / "world", monkeypatch) as world:
        disk = FaultyDisk(world.staging)
        session = Session(world, iter([disk]))
        session.survives_errors = True
        try:
            for job in ("a", "b"):
                session.users.submit(job, "hang")
            session.turns(4)
            if name == "cancelling":
                for job in ("a", "b"):
                    session.users.path(RUNNING, job).unlink()
                session.turns(4)
            now = session.now
            asked = sorted(now.events.client._reviews)
            assert len(asked) == 2
            for number in asked:
                now.events.replies.append(Reply(number, Answer(no="not yet")))
            disk.fail_at, disk.error = disk.count + 1, errno.ENOSPC
            session.turns(6)
            assert len(session.errors) == 1
            assert list(now.state.told_blocked) == (["a"] if name == "submitting" else [])  # it kept nobody waiting
            assert not now.asking
            place = HELD_PLACE if name == "submitting" else RUNNING
            assert all(session.users.path(place, job).exists() for job in ("a", "b"))
        finally:
            session.end()
