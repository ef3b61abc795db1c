"""The children of this process: each end is told once, and where there are many, nobody looks at all of them for it."""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import pytest

from spool.executors.local import LocalProcesses
from spool.machine import children
from spool.machine.children import Children

MANY = 4
SECOND_NS = 1_000_000_000

_NOW = os.WNOHANG | os.WUNTRACED


class Family:
    """Children, as runs are, and whoever waits for them."""

    def __init__(self) -> None:
        self.now_ns = 100 * SECOND_NS
        self.children = Children(clock=lambda: self.now_ns)
        self.alive: set[int] = set()
        self.looks: list[tuple[int, int]] = []  # what the kernel was asked for

    def start(self, *words: str, named: bool = True) -> int:
        """Start a child; *named*: a run waits for its end."""
        words = words or ("sleep", "1000")
        pid = os.posix_spawnp(words[0], words, dict(os.environ))
        self.alive.add(pid)
        if named:
            self.children.added(pid)
        return pid

    def end(self, *pids: int) -> None:
        """Kill these and wait until they have ended, and not been reaped."""
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def reap(self) -> dict[int, int]:
        """Reap; return with what each has ended."""
        self.looks.clear()
        found = {pid: (status, usage) for pid, status, usage in self.children.reap()}
        self.alive -= found.keys()
        assert all(usage.ru_maxrss > 0 for _, usage in found.values())
        return {pid: status for pid, (status, _) in found.items()}

    def looked_at_all(self) -> bool:
        """Whether the last call asked for any child."""
        return (-1, _NOW) in self.looks

    def close(self) -> None:
        """End all."""
        for pid in self.alive:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.children.close()


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[Family]:
    """Give a family in which some are many."""
    monkeypatch.setattr(children, "_MANY", MANY)
    made, wait4 = Family(), os.wait4

    def looking(pid: int, options: int) -> tuple[int, int, resource.struct_rusage]:
        made.looks.append((pid, options))
        return wait4(pid, options)

    monkeypatch.setattr(os, "wait4", looking)
    yield made
    made.close()


@pytest.fixture
def many(family: Family) -> Family:
    """Give a family with many children, all of which were looked at a moment ago."""
    for _ in range(MANY + 2):
        family.start()
    assert family.reap() == {}
    assert family.children.due_ns is None
    return family


def descriptors() -> int:
    """Return how many descriptors are open."""
    return len(os.listdir("/proc/self/fd"))


def test_few_are_looked_at_together_and_have_no_descriptor(family: Family) -> None:
    """The kernel is asked for any child until there is none that has ended."""
    before = descriptors()
    pids = [family.start() for _ in range(MANY - 1)]
    family.end(pids[0])
    assert family.reap() == {pids[0]: signal.SIGKILL}
    assert family.looks == [(-1, _NOW)] * 2
    assert descriptors() == before


@pytest.mark.parametrize("beside", [MANY, 3 * MANY])
def test_the_end_of_one_asks_for_no_other_however_many_there_are(family: Family, beside: int) -> None:
    """It is new, and never has a descriptor."""
    for _ in range(beside):
        family.start()
    family.reap()
    before = descriptors()
    for _ in range(3):
        short = family.start("true")
        os.waitid(os.P_PID, short, os.WEXITED | os.WNOWAIT)
        assert family.reap() == {short: 0}
        assert family.looks == [(short, _NOW)]
        assert descriptors() == before


def test_one_that_has_lived_for_long_is_known_by_its_descriptor(many: Family) -> None:
    """It is told at once, with what it has used, and its descriptor goes with it."""
    before = descriptors()
    pid = next(iter(many.alive))
    many.end(pid)
    assert many.reap() == {pid: signal.SIGKILL}
    assert not many.looked_at_all()
    assert descriptors() == before - 1


def test_all_that_end_together_are_told_each_once(many: Family) -> None:
    """More than the kernel would tell at once by itself, new and old, in one call."""
    pids = {*many.alive, many.start(), many.start("true")}
    many.end(*pids)
    assert many.reap().keys() == pids
    assert many.reap() == {}


def test_many_that_have_all_ended_before_anybody_looked_are_told(family: Family) -> None:
    """None of them has a descriptor, and none needs one any more; then others come."""
    for _ in range(2):
        pids = [family.start("true") for _ in range(MANY + 2)]
        family.end(*pids)
        assert family.reap().keys() == set(pids)
        assert family.reap() == {}


def test_one_that_ends_just_before_it_has_a_descriptor_is_told(many: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other SIGCHLD comes for it, so the same call has to tell."""
    pid, pidfd_open = many.start(), os.pidfd_open

    def too_late(of: int, flags: int = 0) -> int:
        many.end(of)
        return pidfd_open(of, flags)

    monkeypatch.setattr(os, "pidfd_open", too_late)
    assert many.reap() == {pid: signal.SIGKILL}
    assert not many.looked_at_all()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSYS])
def test_without_descriptors_all_are_looked_at(many: Family, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """None is kept from others who need them; all ends are told, and after a while it is tried again."""
    pidfd_open, refused = os.pidfd_open, list[int]()

    def refuse(of: int, flags: int = 0) -> int:
        if error:
            refused.append(of)
            raise OSError(error, os.strerror(error))
        return pidfd_open(of, flags)

    with_one_each = descriptors()
    monkeypatch.setattr(os, "pidfd_open", refuse)
    old, new = next(iter(many.alive)), many.start()
    many.end(old, new)
    assert many.reap().keys() == {old, new}
    many.start()
    assert many.reap() == {}
    assert (len(refused), many.looked_at_all()) == (1, True)
    assert many.children.due_ns is None
    assert descriptors() == with_one_each - (MANY + 2) - 1  # and what they were registered in
    error = 0
    many.now_ns += 60 * SECOND_NS
    many.reap()
    assert descriptors() == with_one_each


def test_a_registration_that_fails_leaves_no_descriptor_open(many: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel limits what the epolls of a user may hold."""
    before = descriptors()

    def refuse(fd: int, events: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    many.children.close()
    of_none = SimpleNamespace(register=refuse, close=lambda: None)
    monkeypatch.setattr(select, "epoll", lambda: of_none)
    pid = many.start()
    many.end(pid)
    many.start()
    assert many.reap() == {pid: signal.SIGKILL}
    assert descriptors() == before - (MANY + 2) - 1


def test_half_of_all_descriptors_are_for_others(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the children need more than half, none has one."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2 * MANY, 2 * MANY))
    pids = [family.start() for _ in range(MANY)]
    before = descriptors()
    family.reap()
    assert descriptors() == before + MANY + 1
    family.start()
    family.end(pids[0], pids[1])
    assert family.reap().keys() == {pids[0], pids[1]}
    family.start()
    family.start()
    family.reap()
    assert descriptors() == before


def test_where_there_are_few_again_the_descriptors_are_given_back(many: Family) -> None:
    """Not at the first that ends: a spool at the edge would open and close them over and over."""
    pids = sorted(many.alive)
    before = descriptors() - len(pids) - 1
    many.end(*pids[:3])
    many.reap()
    assert descriptors() > before
    many.end(*pids[3:5])
    many.reap()
    many.reap()
    assert descriptors() == before
    many.end(pids[5])
    assert many.reap() == {pids[5]: signal.SIGKILL}


@pytest.mark.parametrize("comes_back", [False, True])
def test_one_that_somebody_else_has_reaped_is_forgotten(many: Family, comes_back: bool) -> None:
    """It is not asked for over and over; its descriptor tells of no other process that has its pid."""
    before = descriptors()
    pid = next(iter(many.alive))
    many.end(pid)
    os.waitpid(pid, 0)
    many.alive.discard(pid)
    if comes_back:
        many.children.added(pid)
        assert descriptors() == before - 1
    for _ in range(2):
        assert many.reap() == {}
    assert pid not in {which for which, _ in many.looks}
    assert descriptors() == before - 1
    other = many.start("true")
    os.waitid(os.P_PID, other, os.WEXITED | os.WNOWAIT)
    assert many.reap() == {other: 0}


def test_a_child_of_which_nobody_spoke_is_taken_away_within_a_second(many: Family) -> None:
    """What waits to be a run may be ended by somebody: no zombie stays, and nobody looks at all more often."""
    stranger = many.start(named=False)
    many.end(stranger)
    assert many.reap() == {}
    assert many.children.due_ns == many.now_ns + SECOND_NS
    many.now_ns += SECOND_NS
    assert many.reap() == {stranger: signal.SIGKILL}
    assert many.children.due_ns is None


def test_the_runs_of_many_are_told_with_their_exit_status(family: Family) -> None:
    """And the descriptors go with the engine."""
    before = descriptors()
    engine = LocalProcesses("/spool")
    try:
        runs = [engine.child(f"job{number}", 1, family.start(named=False)) for number in range(MANY + 2)]
        assert list(engine.reap()) == []
        family.end(runs[0].pid or 0)
        family.alive.discard(runs[0].pid or 0)
        assert [(run, run.exit_status) for run in engine.reap()] == [(runs[0], signal.SIGKILL)]
    finally:
        engine.close()
    assert descriptors() == before


def test_reaping_gives_way_where_children_end_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that end faster than they are reaped do not hold up the caller: the rest is due at once."""
    ended = count(1000)
    now = count(step=10_000_000)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    monkeypatch.setattr(os, "wait4", lambda which, options: (next(ended), 0, usage))
    reaper = Children(clock=lambda: next(now))
    first = [pid for pid, _, _ in reaper.reap()]
    assert first
    assert reaper.due_ns < next(now)
    assert next(iter(reaper.reap()))[0] == first[-1] + 1
