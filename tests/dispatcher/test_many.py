"""What is looked at for each of many runs, how closely, and what is not looked at."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from crash.world import Session, history
from spool.core import layout
from spool.core.layout import RUNNING
from spool.core.model import Gpu, Grant, Machine, Result, Spec, Stop, StopKind
from spool.dispatcher import monitor, scanner, wakeup
from spool.dispatcher.confinement import Confinement, Thing
from spool.dispatcher.context import Context
from spool.dispatcher.loop import Dispatcher
from spool.dispatcher.monitor import LimitEnforcer
from spool.dispatcher.status import StatusWriter
from spool.dispatcher.wakeup import Timer, Timers
from spool.executors import Executors, local
from spool.executors.local import LocalProcesses
from spool.formats.state import JobView, parse_state, render_state
from spool.state.run import FIRST_ATTEMPT, ActiveRun, QueueTime
from spool.state.table import SchedulerState
from spool.store.spool import Spool


def test_what_has_not_changed_is_rarely_written_again(session: Session) -> None:
    """A look that finds nothing new leaves `state.json` as it is, until that is old for what it costs."""
    session.users.submit("long", "hang")
    session.settle()
    now = session.now
    path = session.world.root / layout.STATE
    now.status.write = partial(StatusWriter.write, now.status)  # type: ignore[method-assign]

    def look() -> bool:
        before = path.stat().st_ino if path.exists() else None
        now.watcher.lost, now.status._next_ns = True, 0
        now.turn()
        return path.stat().st_ino != before

    look()
    now.status._refresh_ns = 1 << 62
    assert not look()
    (session.world.root / layout.PAUSED).touch()
    assert look()
    now.status._refresh_ns = 0
    assert look()


def test_a_run_that_was_starting_is_looked_at_again(session: Session) -> None:
    """No event tells that a wrapper has spoken; once it has, nobody asks the disk."""
    session.users.submit("long", "hang")
    session.turns(1)
    now = session.now
    (live,) = now.state.live.values()
    jid = session.world.root / "jobs" / "long" / "1" / layout.JID
    text = jid.read_bytes()
    jid.unlink()  # it has not spoken yet
    live.launched(session.world.engine.no_child(*live.key, None))
    now.status._spoken.clear()
    write = partial(StatusWriter.write, now.status, None, None, paused=False)
    write(force=True)
    now.status._next_ns, now.status._refresh_ns = 0, 1 << 62
    assert state_of(session) == "starting"
    jid.write_bytes(text)
    now.status.refresh()
    write()
    assert state_of(session) == "running"
    jid.unlink()
    write(force=True)
    assert state_of(session) == "running"
    jid.write_bytes(text)


def state_of(session: Session) -> str:
    """Return what `state.json` says of the one job."""
    found = parse_state((session.world.root / layout.STATE).read_bytes())
    return str(found.jobs["long"].state)


def test_what_submissions_read_of_the_machine_is_written_when_it_changes(session: Session) -> None:
    """The line has the GPUs as NVML said last, also while it is not asked, and is written again for nothing else."""
    session.turns(1)
    now = session.now
    root = session.world.root
    cards = tuple(Gpu(f"GPU-{index}", index, "A100", 80 << 30, 80 << 30) for index in range(2))
    written = set[int]()
    for machine, asked_at_ns in (
        (Machine(4, 8 << 30), None),
        (Machine(4, 8 << 30, gpus=cards), 1),
        (Machine(4, 8 << 30), None),
    ):
        now.status._world.gpus_at_ns = asked_at_ns
        StatusWriter.write(now.status, None, machine, paused=False, force=True)
        written.add((root / layout.MACHINE).stat().st_ino)
    assert (root / layout.MACHINE).read_text().split()[1:] == ["4", str(8 << 30), "2"]
    assert len(written) == 2
    (root / layout.MACHINE).unlink()
    (root / layout.MACHINE).mkdir()
    for cpus in (5, 5):
        StatusWriter.write(now.status, None, Machine(cpus, 8 << 30), paused=False, force=True)
    view = parse_state((root / layout.STATE).read_bytes())
    assert layout.MACHINE in str(view.problems)
    (root / layout.MACHINE).rmdir()
    StatusWriter.write(now.status, None, Machine(5, 8 << 30), paused=False, force=True)
    assert (root / layout.MACHINE).read_text().split()[1:] == ["5", str(8 << 30), "2"]


def test_a_missing_file_is_missed_once(session: Session) -> None:
    """A run whose file was taken away is remembered until that is settled, and no other run is looked at."""
    for name in ("gone", "stays"):
        session.users.submit(name, "hang")
    session.turns(2)
    now = session.now
    session.users.path(RUNNING, "gone").unlink()
    session.turns(1)
    assert [live.name for live in now.filemoves._missing.values()] == ["gone"]
    session.settle()
    assert now.filemoves._missing == {}


def test_a_look_at_the_files_of_all_runs_counts_for_when_the_next_is_due(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks take a thousandth of a processor, what they find of each run included."""
    session.settle()
    now, used_ns = session.now, [0]
    clocks = SimpleNamespace(thread_time_ns=lambda: used_ns[0], monotonic_ns=lambda: 0)
    monkeypatch.setattr(wakeup, "time", clocks)
    monkeypatch.setattr(now.filemoves, "see", lambda: used_ns.append(used_ns.pop() + 20_000_000))
    now.watcher.lost, begun_ns = True, time.monotonic_ns()
    now.observer.listen()
    now.observer.look()
    due_ns = now.observer._timer.at_ns or 0
    assert due_ns - begun_ns > 15_000_000_000
    now.observer.listen()
    now.observer.look()
    assert (now.observer._timer.at_ns or 0) == due_ns  # another pass is no look


def running(session: Session, number: int, monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    """Have so many jobs run, all written down; looks take two of their files in turn."""
    monkeypatch.setattr(scanner, "_IN_TURN", 2)
    monkeypatch.setattr(scanner, "_COARSE_NS", -1)
    session.world.cpus = number
    for each in range(number):
        session.users.submit(f"job{each}", "hang")
    session.settle()
    session.turns(number)
    return session.now


def calls_of(action: Callable[[], object]) -> Counter[str]:
    """Return how often each function of ours, and each system call by name, was called."""
    calls = Counter[str]()

    def count(frame: FrameType, event: str, what: Any) -> None:
        if event == "call" and "spool" in frame.f_code.co_filename:
            calls[frame.f_code.co_name] += 1
        elif event == "c_call" and getattr(what, "__module__", "") == "posix":
            calls[what.__name__] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(before)
    return calls


def test_a_look_does_not_look_at_every_run(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a look at everything does, and what it asks the kernel, does not grow with what runs."""
    now = running(session, 50, monkeypatch)
    calls = calls_of(now.observer.look_at_everything)
    assert calls["lstat"] <= 10
    assert sum(calls.values()) < 100


def test_state_json_says_of_a_run_what_it_says_at_first(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of its job, a stop, and trouble show at once."""
    now = running(session, 3, monkeypatch)

    def told() -> dict[str, JobView]:
        found = parse_state(render_state(now.status.view(None, None, paused=False)))
        return found.jobs

    first, live = told(), now.state.job("job1").live
    assert told() == first
    assert first["job1"].state == "running"
    live.edited(replace(live.spec, time_limit_ns=7))
    assert told() == first | {"job1": structs.replace(first["job1"], time_limit_ns=7)}
    live.stop_ordered(Stop(StopKind.CANCEL, "alice", 0))
    assert told()["job1"].state == "stopping"
    now.confinement.failed(Thing.of_job("job2"), "file", OSError(5, "odd"))
    assert "odd" in told()["job2"].problem


def test_what_becomes_of_a_runs_file_is_seen_without_events(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is replaced or gone at the next look; what is written into it once its turn has come."""
    now = running(session, 10, monkeypatch)
    lives = {live.name: live for live in now.state.live.values()}
    path = session.users.path(RUNNING, "job3")
    staged = session.world.root / ".tmp" / "user.edit"
    staged.write_text('command = "hang"\ntime_limit = "5h"\n')
    os.rename(staged, path)
    session.turns(1)
    assert lives["job3"].spec.time_limit_ns == 5 * 3600 * 10**9
    path.write_text('command = "hang"\ntime_limit = "6h"\n')
    os.utime(path, ns=(0, time.time_ns() + 10**9))
    session.turns(5)
    assert lives["job3"].spec.time_limit_ns == 6 * 3600 * 10**9
    session.users.path(RUNNING, "job4").unlink()
    session.turns(1)
    assert lives["job4"].stop is not None


def test_a_change_in_the_moment_of_the_one_before_is_seen(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a directory may be the same after it: only after a while is it believed."""
    now = running(session, 10, monkeypatch)
    monkeypatch.setattr(scanner, "_COARSE_NS", 1 << 62)
    directory, live = session.world.root / RUNNING, now.state.job("job4").live
    (directory / "stray.txt").touch()
    before = directory.stat().st_mtime_ns
    session.turns(1)
    session.users.path(RUNNING, "job4").unlink()
    os.utime(directory, ns=(before, before))
    session.turns(1)
    assert live.stop is not None


class Memory:
    """A run with a limit of 100 bytes, and what the machine says of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rss, self.pss = 0, 0
        self.stops = list[StopKind]()
        grant = Grant(cpus=1, memory_bytes=100)
        known = "alice", QueueTime(0), FIRST_ATTEMPT, 0, 0, 0, "process"
        self.live = ActiveRun("one", 1, Spec(command="true"), grant, *known)
        table = SchedulerState()
        table.add_run(table.job("one"), self.live)
        monkeypatch.setattr(local, "rss_bytes", lambda found: self.rss)
        monkeypatch.setattr(local, "pss_bytes", lambda found: self.pss)
        engine = LocalProcesses()
        self.live.launched(engine.child("one", 1, os.getpid()))
        self.timers = Timers()
        confinement, executors = Confinement("/nowhere", Timer()), Executors(engine)
        known = {"state": table, "confinement": confinement, "timers": self.timers, "executors": executors}
        context: Any = SimpleNamespace(**dict.fromkeys(Context.__struct_fields__) | known)
        self.limits = LimitEnforcer(context, self._order)
        self.limits.add(self.live)

    def _order(self, live: ActiveRun, stop: Stop) -> None:
        self.stops.append(stop.kind)

    def check(self, rss: int, pss: int | None = None) -> None:
        """Look once."""
        self.rss, self.pss = rss, rss if pss is None else pss
        self.limits._memory_at_ns = 0
        self.limits.check()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Give that run."""
    return Memory(monkeypatch)


def test_a_run_is_stopped_for_what_it_really_uses(watched: Memory) -> None:
    """Its peak is the largest sum that was seen; shared memory counts once where the limit is in doubt."""
    for rss in (50, 60, 40):
        watched.check(rss)
    assert (watched.live.usage.peak_memory_bytes, watched.stops) == (60, [])
    watched.check(150, pss=90)  # much of it is shared
    assert (watched.live.usage.peak_memory_bytes, watched.stops) == (90, [])
    watched.check(150, pss=120)
    assert (watched.live.usage.peak_memory_bytes, watched.stops) == (120, [StopKind.MEMORY])


def test_where_the_kernel_counts_nobody_else_does(watched: Memory) -> None:
    """A control group holds its run to its limit, and knows its peak, once it has one."""
    group: Any = SimpleNamespace(peak_memory_bytes=lambda: None)
    watched.live.launched(LocalProcesses().child("one", 1, os.getpid(), group))
    watched.check(50)
    assert watched.timers.due_in_ns() is not None
    group.peak_memory_bytes = lambda: 50
    watched.check(90)
    assert (watched.live.usage.peak_memory_bytes, watched.timers.due_in_ns()) == (50, None)


def test_memory_is_watched_less_often_where_that_takes_long(watched: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a fiftieth of a processor at most; else it is looked at each second."""
    used = iter((0, 10_000_000, 10_000_000, 110_000_000))
    clocks = SimpleNamespace(thread_time_ns=lambda: next(used), monotonic_ns=lambda: 0)
    monkeypatch.setattr(wakeup, "time", clocks)
    monkeypatch.setattr(monitor, "boot_clock", lambda: 0)
    waits = []
    for _ in range(2):
        watched.check(50)
        waits.append(round((watched.timers.due_in_ns() or 0) / 1e9))
    assert waits == [1, 5]


def test_children_are_reaped_again_when_that_is_due(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no child has told of its end, and no pass has another reason: a zombie may be left."""
    session.settle()
    now = session.now
    reaped, due_ns = list[int](), time.monotonic_ns() + (1 << 60)
    monkeypatch.setattr(LocalProcesses, "due_ns", lambda _: due_ns)
    monkeypatch.setattr(LocalProcesses, "reap", lambda _: iter(reaped.append(1) or ()))
    now.wakeup.children_ended()
    now.supervisor.collect()
    assert reaped == []
    assert now.supervisor._timer.at_ns <= due_ns
    due_ns = time.monotonic_ns()
    now.supervisor.collect()
    assert reaped == [1]


def test_the_history_is_read_once_for_adopted_runs_that_end(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at all for those that this dispatcher has met alive: nobody else can have written down their end."""
    session.world.cpus = 20
    for number in range(12):
        session.users.submit(f"job{number}", "hang")
    session.settle()
    reads: list[int | None] = []
    accounts_since = Spool.accounts_since

    def reading(spool: Spool, since_ns: int | None) -> Iterator[Result]:
        reads.append(since_ns)
        return accounts_since(spool, since_ns)

    def reads_of(*numbers: int, down: bool = False) -> int:
        if down:
            session.end()  # it is killed
        for number in numbers:
            session.world.exit(*session.world.pids(f"job{number}", 1), 0)
        reads.clear()
        session.settle()
        return len(reads)

    monkeypatch.setattr(Spool, "accounts_since", reading)
    reads_of(0)
    assert reads_of(1, down=True) == reads_of(2, 3, 4, 5, 6, down=True)
    assert reads_of(7, 8, 9, 10, 11) == 0
    assert sorted(result.job for result in history(session.world.root)) == sorted(
        f"job{number}" for number in range(12)
    )
