"""Who is told to end, and when."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import Struct, field

from spool.core.model import Jid, StopKind, WarningSignal
from spool.dispatcher import terminator
from spool.dispatcher.wakeup import Timer
from spool.executors import local
from spool.executors.local import LocalProcesses
from spool.machine import identity, processes
from spool.machine.identity import Stat
from spool.machine.processes import Found, Process, Sent

WRAPPER, ONE, TWO, THREE = (Process(pid, pid) for pid in (7, 71, 72, 73))


class Seen(Struct):
    """What a look finds: processes besides the wrapper, those of them that stand still, and the wrapper's state."""

    others: set[Process]
    still: set[Process] = field(default_factory=set)
    wrapper: str = "S"  # "": it was killed
    certain: bool = True  # then the search


class _Live:
    """As much of a run as a stop looks at."""

    key = ("x", 1)
    spec = SimpleNamespace(kill_grace_ns=3_600_000_000_000, signal=None)
    stop_kind: StopKind | None = None
    is_outlived = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch, look: Callable[[], Seen], group: Any = None) -> None:
        """Make a run of this machine; *look* tells which processes it has."""
        self.engine = LocalProcesses(outlasted=lambda job, run, *, exited: False)
        self.handle = self.engine.no_child(*self.key, Jid(*WRAPPER, "boot", "pid:[1]", "here"), group)
        self.seen = Seen(set())

        def wrapper() -> Stat | None:
            self.seen = look()
            return stat_of(WRAPPER, self.seen.wrapper) if self.seen.wrapper else None

        def found() -> dict[Process, Stat]:
            return {each: stat_of(each, "T" if each in self.seen.still else "S") for each in sorted(self.seen.others)}

        monkeypatch.setattr(self.handle, "wrapper", wrapper)
        monkeypatch.setattr(processes, "descendants", lambda run, wrapper, halt: found())
        monkeypatch.setattr(
            processes, "search", lambda runs: Found(dict.fromkeys([_Live.key], found()), self.seen.certain)
        )


def stat_of(process: Process, state: str) -> Stat:
    """Return what the kernel says of a child of the wrapper."""
    return Stat(process.pid, state, WRAPPER.pid, WRAPPER.pid, 0, 0, 0, 0, 1, process.start_ticks, 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give the time that a stop sees, to be set."""
    now = [1]
    for module in (terminator, local):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic_ns=lambda: now[0], time_ns=lambda: now[0]))
    return now


def test_a_wrapper_that_always_has_a_child_is_killed_too(monkeypatch: pytest.MonkeyPatch, clock: list[int]) -> None:
    """It is spared after the grace for as long as an epilog may take, and not for ever."""
    children = iter(range(100, 10_000))
    live: Any = _Live(monkeypatch, lambda: Seen({Process(next(children), 2)}))
    told: list[tuple[set[int], int]] = []

    def send(processes: Iterable[Process], number: int) -> Sent:
        if pids := {process.pid for process in processes}:
            told.append((pids, number))
        return Sent()

    monkeypatch.setattr(local, "send", send)
    timer = Timer()
    stopper = terminator.Terminator(timer)
    stopper.add(live)
    stopper.tick()
    for after in (3_600_000_000_001, 3_601_000_000_001, 3_601_500_000_000, 3_602_000_000_001):
        clock[0] = after
        stopper.tick()
    sent = [number for _, number in told]
    first_kill = sent.index(signal.SIGKILL)
    assert sent[0] == signal.SIGTERM
    assert set(sent[1:first_kill]) == {signal.SIGSTOP}  # none of them ever stands still
    assert sent[first_kill:] == [signal.SIGKILL] * 3
    assert [7 in pids for pids, _ in told] == [*[False] * (len(told) - 1), True]


def test_a_machine_that_shows_no_processes_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, clock: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be seen is not gone: the run goes on being stopped, and it is said once."""
    seen: list[Seen | OSError] = [OSError(12, "Cannot allocate memory")] * 3 + [Seen(set(), wrapper="")]

    def look() -> Seen:
        found = seen.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    live: Any = _Live(monkeypatch, look)
    timer = Timer()
    stopper = terminator.Terminator(timer)
    stopper.add(live)
    gone = []
    while seen:
        gone.append(stopper.tick())
        clock[0] = timer.at_ns or clock[0]
    assert gone == [[], [], [], [live]]
    assert ["Cannot allocate memory" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(("ordered_ns", "warned", "term_ns"), [(0, 1, 60), (-20, 1, 40), (-60, 0, 0)])
def test_a_run_that_is_preempted_is_warned_before_it_is_told_to_end(
    monkeypatch: pytest.MonkeyPatch, clock: list[int], ordered_ns: int, warned: int, term_ns: int
) -> None:
    """It gets its signal at once, TERM when the time of that is over, and KILL after the grace; also after a crash."""
    live: Any = _Live(monkeypatch, lambda: Seen({Process(8, 1)}))
    live.stop_kind, clock[0] = StopKind.PREEMPT, 1000
    live.spec = SimpleNamespace(kill_grace_ns=30, signal=WarningSignal("USR1", 60), signal_to=None)
    warnings: list[str] = []
    monkeypatch.setattr(local.LocalRun, "signal", lambda _, name, to: warnings.append(name))
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(local, "send", lambda those, number: ([*those] and told.append((clock[0], number))) or Sent())
    timer = Timer()
    stopper = terminator.Terminator(timer)
    stopper.add(live, 1000 + ordered_ns)
    assert warnings == ["USR1"] * warned
    clock[0] = 1000 + max(term_ns - 1, 0)
    stopper.tick()
    assert told == ([] if term_ns else [(1000, signal.SIGTERM)])
    clock[0] = 1000 + term_ns
    stopper.tick()
    assert told == [(1000 + term_ns, signal.SIGTERM)]


class Freezing:
    """A run with its grace over, what looks at it find, and what is sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: Seen, group: Any = None) -> None:
        self.sent: list[tuple[int, set[int]]] = []
        found = iter(looks)
        live = _Live(monkeypatch, lambda: next(found), group)
        self.run, self.engine = live.handle, live.engine
        monkeypatch.setattr(local, "send", self._send)

    def _send(self, processes: Iterable[Process], number: int) -> Sent:
        if pids := {process.pid for process in processes}:
            self.sent.append((number, pids))
        return Sent()

    def tick(self, *, kill: bool = True) -> bool:
        """Go on ending it; return whether it is gone."""
        return list(self.engine.terminate({self.run: kill})) == [self.run]


@pytest.mark.parametrize("before", [True, False])
def test_what_a_shell_began_before_it_was_told_is_told_too(monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    """A shell waits for its command before it runs its trap; but what began after TERM tidies up, and is let."""
    now = Freezing(monkeypatch, Seen({ONE}), Seen({ONE, TWO}))
    monkeypatch.setattr(identity, "ticks_now", lambda: TWO.start_ticks + before)
    assert [now.tick(kill=False) for _ in range(2)] == [False, False]
    assert now.sent == [(signal.SIGTERM, {ONE.pid})] + [(signal.SIGTERM, {TWO.pid})] * before


def test_all_stands_still_before_any_of_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has forked before it stood still is found and stopped too, and KILL comes when nothing can fork.

    The wrapper is neither stopped nor killed: it has the exit code to write.
    """
    now = Freezing(
        monkeypatch,
        Seen({ONE}),
        Seen({ONE, TWO}, still={ONE}),
        Seen({ONE, TWO}, still={ONE, TWO}),
        Seen({ONE, TWO, THREE}, still={ONE, TWO}),
        Seen({ONE, TWO, THREE}, still={ONE, TWO, THREE}),
        Seen({ONE, TWO, THREE}, still={ONE, TWO, THREE}),
    )
    assert not now.tick()
    assert now.sent == [
        (signal.SIGSTOP, {ONE.pid}),
        (signal.SIGSTOP, {TWO.pid}),
        (signal.SIGSTOP, {THREE.pid}),
        (signal.SIGKILL, {ONE.pid, TWO.pid, THREE.pid}),
    ]


def test_what_a_killed_wrapper_left_is_not_gone_before_a_search_is_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that finds nothing while processes come and go is followed by another, and people are told why."""
    killed, unsure = Seen(set(), wrapper=""), Seen(set(), wrapper="", certain=False)
    now = Freezing(monkeypatch, unsure, Seen({TWO}, wrapper=""), unsure, killed)
    assert not now.tick(kill=False)
    assert "wrapper was killed" in now.run.resists
    assert not now.tick(kill=False)
    assert not now.tick(kill=False)
    assert now.tick(kill=False)
    assert (now.run.resists, now.sent) == ("", [(signal.SIGTERM, {TWO.pid})])


def test_what_is_found_alive_is_never_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes: only a search that finds nothing ends after a while."""
    monkeypatch.setattr(local, "SEARCH_NS", 0)
    left = Seen({TWO}, wrapper="", certain=False)
    now = Freezing(monkeypatch, left, left, left, Seen(set(), wrapper="", certain=False))
    assert [now.tick(kill=False) for _ in range(4)] == [False, False, False, True]
    assert now.run.doubtful


def test_a_process_that_spool_may_not_end_keeps_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never counts as gone, and people are told which process it is."""
    now = Freezing(monkeypatch, *[Seen({ONE}, still={ONE})] * 3)
    monkeypatch.setattr(local, "send", lambda processes, number: Sent(refused=frozenset(processes)))
    assert not now.tick()
    assert now.run.resists.endswith(f" {ONE.pid}")


def test_a_wrapper_that_was_stopped_goes_on_to_write_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stopped it: with its command's end it has the exit code to write, and no grace is waited for."""
    now = Freezing(monkeypatch, Seen({ONE}, still={ONE}, wrapper="T"), Seen(set(), wrapper="T"))
    now.tick(kill=False)
    assert now.sent == [(signal.SIGTERM, {ONE.pid}), (signal.SIGCONT, {ONE.pid}), (signal.SIGCONT, {WRAPPER.pid})]
    now.sent.clear()
    now.tick(kill=False)
    assert now.sent == [(signal.SIGTERM, {WRAPPER.pid}), (signal.SIGCONT, {WRAPPER.pid})]


class Group:
    """A control group that freezes at the second look, and says what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.left = True

    def pids(self) -> frozenset[int]:
        """Return its processes."""
        return frozenset({WRAPPER.pid, ONE.pid})

    def populated(self) -> bool:
        """Say whether any is left."""
        return self.left

    def freeze(self, *, on: bool) -> bool:
        """Freeze it, or let it go on."""
        self.asked.append("freeze" if on else "thaw")
        return True

    def frozen(self) -> bool:
        """Say whether it stands still."""
        return self.asked.count("freeze") > self.asked.count("thaw")

    def kill(self) -> bool:
        """Kill all of it."""
        self.asked.append("kill")
        return True


def test_a_control_group_freezes_a_run_at_once_and_says_whether_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No signal is needed for that, the wrapper goes on after it, and as long as anybody is in it nothing is over."""
    group = Group()
    killed = Seen(set(), wrapper="")
    now = Freezing(monkeypatch, Seen({ONE}), Seen({ONE}), killed, killed, group=group)
    assert not now.tick()
    assert now.sent == [(signal.SIGKILL, {ONE.pid})]
    assert group.asked == ["freeze", "thaw"]
    assert now.run.sought().grouped == {WRAPPER.pid, ONE.pid}
    assert not now.tick()
    group.left = False
    assert now.tick()
