"""Whatever is asked for, used, given back or lost: the leases never exceed the machine, and each ask has an answer."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from extras.machine.talk import (
    BOB,
    GIB,
    HOUR_NS,
    IS_ROOT,
    MACHINE,
    SECOND_NS,
    Clock,
    Driven,
    Speaker,
    journal_of,
    several_users,
)
from spool.core import resources as pools
from spool.core.model import Gpu, Grant, Machine, Policy, Pool
from spool.extras.machine import arbiter as server
from spool.extras.machine import protocol
from spool.extras.machine.ledger import Lease, LeaseLedger
from spool.extras.machine.protocol import Drop, EndLease, Holder, LeaseRequest, Use

CPUS, MEMORY, LICENCES = 4, 4 << 30, 2  # as in MACHINE

requests = st.builds(
    LeaseRequest,
    cpus=st.integers(0, 5),
    memory_bytes=st.sampled_from([0, GIB, 3 * GIB, 5 * GIB]),
    resources=st.sampled_from([(), (("licence", 1),), (("licence", 2),), (("unknown", 1),)]),
    limit_ns=st.sampled_from([0, 60 * SECOND_NS, HOUR_NS]),
    like=st.sampled_from(["", "a", "b"]),
)


def fits(demands: Iterable[LeaseRequest]) -> bool:
    """Whether the machine has all of this at once."""
    demands = list(demands)
    pools: Counter[str] = Counter()
    for demand in demands:
        pools.update(dict(demand.resources))
    return (
        sum(demand.cpus for demand in demands) <= CPUS
        and sum(demand.memory_bytes for demand in demands) <= MEMORY
        and pools["licence"] <= LICENCES
        and not pools["unknown"]
    )


class Dispatcher:
    """A dispatcher by the rules: what it has asked for, what it was granted, and what it uses."""

    def __init__(self, name: str, uid: int | None) -> None:
        self.name = name
        self.uid = uid
        self.speaker: Speaker | None = None
        self.asked: dict[int, LeaseRequest] = {}
        self.used: dict[int, LeaseRequest] = {}

    def granted(self) -> dict[int, LeaseRequest]:
        """Return the leases that this connection has heard of and that were not begun or ended."""
        found = {}
        for each in self.speaker.all(protocol.Granted):
            if each.number in self.asked:
                found[each.lease] = self.asked[each.number]
        return found

    def forget(self, lease: int) -> None:
        """Forget the ask that a lease has answered."""
        for each in self.speaker.all(protocol.Granted):
            if each.lease == lease:
                self.asked.pop(each.number, None)


class Shared(RuleBasedStateMachine):
    """Three dispatchers by the rules and an arbiter, with everything that can happen to them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="spool-ledger-", dir="/tmp"))
        self.base.chmod(0o755)
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(server, "_AWAY_NS", 1 << 62)  # whose dispatcher is gone for a while is no rule's to see
        self.patches.setattr(server, "_TELL_EVERY_S", 0.05)
        self.clock = Clock(1_800_000_000 * SECOND_NS)
        (self.base / "run").mkdir()
        self.machine = Driven(self.base / "run", MACHINE, clock=self.clock)
        self.dispatchers = [Dispatcher("a", None), Dispatcher("b", None), Dispatcher("b", BOB)]

    def teardown(self) -> None:
        """Let every dispatcher leave for good: no lease is left, and all of the machine can be had."""
        try:
            for dispatcher in self.dispatchers:
                if dispatcher.speaker is None:
                    self._connect(dispatcher)
            for dispatcher in self.dispatchers[:2]:
                self._over(dispatcher, list(dispatcher.used))
            self.machine.settle()
            last = self.dispatchers[2]
            last.speaker.say(*[Use(lease, (1 << 22) - 1, 1) for lease in last.used])
            for dispatcher in self.dispatchers:
                dispatcher.speaker.close()
            self.machine.settle()
            self.patches.setattr(server, "_AWAY_NS", 0)
            self.patches.setattr(server, "_LOOK_EVERY_S", 0.001)
            # What else the users run, such as the tests beside this one, is no process of these dispatchers.
            self.patches.setattr(server.identity, "processes_of", lambda uids: {uid: [] for uid in uids})
            self.machine.until(lambda: journal_of(self.base / "run") == {})
            heir = self.machine.dispatcher("heir")
            number = heir.ask(CPUS, memory_bytes=MEMORY // 8, resources=(("licence", LICENCES),))
            self.machine.until(lambda: heir.grant(number) is not None)
        finally:
            for speaker in self.machine.speakers:
                speaker.close()
            self.machine.arbiter.close()
            self.patches.undo()
            shutil.rmtree(self.base)

    def _connect(self, dispatcher: Dispatcher) -> None:
        dispatcher.asked.clear()
        dispatcher.speaker = self.machine.speaker(dispatcher.uid)
        dispatcher.speaker.hello(dispatcher.name, *map(Use, dispatcher.used))
        self.machine.until(lambda: bool(dispatcher.speaker and dispatcher.speaker.all(protocol.Welcome)))
        assert not dispatcher.speaker.all(protocol.Unknown)  # a lease in use was not lost

    def _over(self, dispatcher: Dispatcher, leases: list[int]) -> None:
        if leases:
            dispatcher.speaker.say(*map(EndLease, leases))
        for lease in leases:
            del dispatcher.used[lease]

    @initialize()
    def connect_all(self) -> None:
        """Let all of them say hello."""
        for dispatcher in self.dispatchers:
            self._connect(dispatcher)

    def _one(self, index: int) -> tuple[Dispatcher, Speaker]:
        dispatcher = self.dispatchers[index]
        if dispatcher.speaker is None:
            self._connect(dispatcher)
        assert dispatcher.speaker is not None
        return dispatcher, dispatcher.speaker

    @rule(index=st.integers(0, 2), demands=st.lists(requests, min_size=1, max_size=6))
    def ask(self, index: int, demands: list[LeaseRequest]) -> None:
        """Ask for leases: each is granted, or has a reason to wait, when the arbiter has been there."""
        dispatcher, speaker = self._one(index)
        numbers = []
        for demand in demands:
            speaker._number += 1
            numbers.append(speaker._number)
            dispatcher.asked[speaker._number] = demand
        speaker.say(*[protocol.Ask(number, dispatcher.asked[number]) for number in numbers])
        self.machine.settle()
        assert all(speaker.grant(number) is not None or speaker.why(number) for number in numbers)

    @rule(index=st.integers(0, 2), most=st.integers(1, 4))
    def begin(self, index: int, most: int) -> None:
        """Begin to use leases; what is in use at once is never more than there is."""
        dispatcher, speaker = self._one(index)
        for lease, demand in list(dispatcher.granted().items())[:most]:
            speaker.say(Use(lease))
            dispatcher.forget(lease)
            dispatcher.used[lease] = demand

    @rule(index=st.integers(0, 2), most=st.integers(1, 4), again=st.booleans())
    def end(self, index: int, most: int, again: bool) -> None:
        """End leases in use, once or twice."""
        dispatcher, speaker = self._one(index)
        leases = list(dispatcher.used)[:most]
        self._over(dispatcher, leases)
        if again and leases:
            speaker.say(*map(EndLease, leases))

    @rule(index=st.integers(0, 2), most=st.integers(1, 4))
    def drop(self, index: int, most: int) -> None:
        """Withdraw asks, whether or not they were answered."""
        dispatcher, speaker = self._one(index)
        for number in list(dispatcher.asked)[:most]:
            speaker.say(Drop(number))
            del dispatcher.asked[number]

    @rule(index=st.integers(0, 2), turned=st.booleans())
    def disconnect(self, index: int, turned: bool) -> None:
        """Kill a dispatcher; it comes back when it has something to do."""
        dispatcher = self.dispatchers[index]
        if dispatcher.speaker is not None:
            dispatcher.speaker.close()
            dispatcher.speaker = None
        if turned:
            self.machine.settle()

    @rule(index=st.integers(0, 2))
    def connect_again(self, index: int) -> None:
        """Say hello on a second connection while the first is open."""
        self._connect(self.dispatchers[index])

    @rule(index=st.integers(0, 2))
    def hello_without_end(self, index: int) -> None:
        """Name everything and never say hello: it changes nothing."""
        speaker = self.machine.speaker(self.dispatchers[index].uid)
        speaker.say(*map(Use, journal_of(self.base / "run")))
        self.machine.settle()
        speaker.close()

    @rule(heard=st.booleans())
    def restart(self, heard: bool) -> None:
        """Kill the arbiter, with or without what was said to it last, and have another."""
        if heard:
            self.machine.settle()
        lost = [(each, each.speaker) for each in self.dispatchers if each.speaker is not None]
        self.machine.restart()
        for dispatcher, speaker in lost:
            speaker.close()
            dispatcher.speaker = None

    @rule(step_ns=st.sampled_from([SECOND_NS, 100 * SECOND_NS, 5 * HOUR_NS, -HOUR_NS, 1000 * HOUR_NS]))
    def set_clock(self, step_ns: int) -> None:
        """Let time pass, or set the wall clock back."""
        self.clock.now_ns += step_ns

    @precondition(lambda self: self.machine is not None)
    @invariant()
    def nothing_is_given_out_twice(self) -> None:
        """Assert that what is in use fits, and is on the disk of the arbiter, all of which fits too."""
        assert fits(demand for each in self.dispatchers for demand in each.used.values())
        kept = journal_of(self.base / "run")
        assert fits(line.demand for line in kept.values())
        assert {lease for each in self.dispatchers for lease in each.used} <= kept.keys()


TestShared = several_users(Shared.TestCase)


class Alone(Shared):
    """The same with one user."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatchers = [Dispatcher(name, None) for name in "abc"]


if not IS_ROOT:  # else the three users of the other one do all that this does
    TestAlone = Alone.TestCase


# The ledger by itself, with GPUs.

CARDS = tuple(Gpu(f"GPU-{n}", n, "H100", 80 * GIB, 80 * GIB) for n in range(3))
FULL = Machine(8, 16 * GIB, gpus=CARDS, resources=(Pool("licence", 2), Pool("port", 2, (7, 9))))

everything = st.builds(
    LeaseRequest,
    cpus=st.integers(0, 9),
    memory_bytes=st.integers(0, 20 * GIB),
    gpus=st.integers(0, 4),
    gpu_memory_bytes=st.sampled_from([0, GIB, 30 * GIB, 50 * GIB, 90 * GIB]),
    gpu_type=st.sampled_from(["", "H100", "A100", "*", "[", '"']),
    resources=st.lists(
        st.tuples(st.sampled_from(["licence", "port", "", "x y"]), st.integers(0, 3)),
        max_size=4,
        unique_by=lambda e: e[0],
    ).map(tuple),
    limit_ns=st.one_of(st.just(0), st.integers(1, (1 << 63) - 1)),
    like=st.sampled_from(["", "0", "f" * 16]),
    gpu_min_memory_bytes=st.sampled_from([0, 40 * GIB, 81 * GIB]),
    other_gpu_types=st.sampled_from([(), ("H100",), ("A100", "*")]),
)
holders = st.sampled_from([Holder(uid, name, spool) for uid, name in ((1, "a"), (2, "b")) for spool in "xy"])


def check(leases: Iterable[Lease]) -> None:
    """Assert that FULL has all of these at once."""
    leases = list(leases)
    whole: Counter[str] = Counter()
    shared: Counter[str] = Counter()
    ports: list[int] = []
    for lease in leases:
        grant, demand = lease.grant, lease.demand
        assert (grant.cpus, grant.memory_bytes or 0) == (demand.cpus, demand.memory_bytes)
        assert len(grant.gpu_uuids) == demand.gpus
        for uuid in grant.gpu_uuids:
            if grant.gpu_memory_bytes is None:
                whole[uuid] += 1
            else:
                shared[uuid] += grant.gpu_memory_bytes
        ports += [index for name, indices in grant.resource_indices if name == "port" for index in indices]
    assert sum(lease.grant.cpus for lease in leases) <= FULL.cpus
    assert sum(lease.grant.memory_bytes or 0 for lease in leases) <= FULL.memory_bytes
    assert sum(dict(lease.grant.resources).get("licence", 0) for lease in leases) <= 2
    assert len(set(ports)) == len(ports) == sum(dict(lease.grant.resources).get("port", 0) for lease in leases)
    assert all(count == 1 for count in whole.values())
    assert not whole.keys() & shared.keys()
    assert all(count <= 80 * GIB for count in shared.values())


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("ask"), holders, st.integers(0, 20), everything),
            st.tuples(st.just("end"), st.integers(0, 20)),
            st.tuples(st.just("drop"), holders, st.integers(0, 20)),
            st.tuples(st.just("leave"), holders),
            st.tuples(st.just("time"), st.integers(-HOUR_NS, 100 * HOUR_NS)),
            st.tuples(st.just("distrust")),
        ),
        max_size=40,
    ),
    order=st.sampled_from(["slowdown", "arrival"]),
)
def test_any_request_is_decided(steps: list[tuple[object, ...]], order: str) -> None:
    """For every request that can be said there is a lease that fits, or a reason; nothing raises."""
    ledger = LeaseLedger(Policy(order=order), (), 1)
    now_ns = 1_800_000_000 * SECOND_NS
    for step in steps:
        match step:
            case ("ask", Holder() as holder, int(number), LeaseRequest() as demand):
                ledger.ask(holder, number, demand, now_ns)
            case ("end", int(index)) if index < len(ledger.leases):
                ledger.end(list(ledger.leases.values())[index], now_ns)
            case ("drop", Holder() as holder, int(number)):
                if (lease := ledger.withdrawable(holder, number)) is not None:
                    ledger.end(lease, now_ns)
            case ("leave", Holder() as holder):
                for lease in ledger.of(holder):
                    ledger.end(lease, now_ns)
            case ("time", int(step_ns)):
                now_ns += step_ns
            case ("distrust",):
                ledger.distrust_overstayers(now_ns)
        for ask, grant in ledger.decide(FULL, now_ns):
            ask.grant, ask.at_ns = grant, now_ns
            ledger.grant(ask)
        check(ledger.leases.values())
        assert all(map(ledger.why, ledger.asks.values()))
    for lease in [*ledger.leases.values(), *ledger.asks.values()]:
        ledger.end(lease, now_ns)
    assert not ledger.decide(FULL, now_ns)
    assert ledger.leases == ledger.asks == ledger._of == ledger._by_ask == {}
    assert not +ledger._held
    assert not ledger.open_asks


def test_memory_does_not_grow_with_the_past() -> None:
    """After many leases of jobs that are all different, the ledger knows no more than after some."""
    ledger = LeaseLedger(Policy(), (), 1)
    holder = Holder(1, "a", "x")
    sizes = []
    for number in range(16_000):
        now_ns = number * SECOND_NS
        ask = ledger.ask(holder, number, LeaseRequest(1, like=f"{number:016x}"), now_ns)
        ask.grant, ask.at_ns = Grant(cpus=1), now_ns
        ledger.grant(ask)
        ledger.end(ask, now_ns + SECOND_NS)
        if number % 4_000 == 3_999:
            sizes.append(len(ledger._past.passed[pools.CPUS]) + sum(map(len, ledger._past.run_times._alike.values())))
    assert max(sizes) < 14_000
