"""The gate of a shared machine: what is asked of the arbiter, and what starts by its answers."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from crash.world import Session, World, world_at
from faulty import FaultyDisk, PowerCut
from spool.core import layout
from spool.core.gpus import as_if_alone
from spool.core.layout import QUEUED
from spool.core.model import SECOND_NS, Core, Gpu, Grant, Machine, Pool
from spool.core.scheduler import Start
from spool.dispatcher.wakeup import boot_clock
from spool.extras.machine import SharedMachine, asking, protocol, served_in
from spool.extras.machine.asking import UnusedLease
from spool.extras.machine.protocol import (
    VERSION,
    Ask,
    Claim,
    Drop,
    EndLease,
    Granted,
    Hello,
    LeaseRequest,
    Refused,
    Units,
    Unknown,
    Use,
    Wait,
    Welcome,
)
from spool.formats import run_records
from spool.formats.config import Config
from spool.formats.state import SharedView
from spool.machine.host import shared_directory
from spool.state.world import on_shared

T = TypeVar("T")
WHY = "cpus: needs 1, 0 free (2 leases of bob hold 2)"
FOREVER_NS = 1 << 62  # some 146 years after boot


class Line(socket.socket):
    """The end of a connection that a dispatcher has: whatever it says is answered before it goes on."""

    def send(self, data: bytes, flags: int = 0) -> int:  # type: ignore[override]
        """Send, and let the arbiter answer."""
        sent = super().send(data, flags)
        self.arbiter.hear()
        return sent


class FakeArbiter:
    """An arbiter that answers at once and as told, and keeps the rules of leases."""

    def __init__(self) -> None:
        self.cpus = 4
        self.serves = True
        self.grants = True
        self.counts = True  # claims
        self.begin_before = [FOREVER_NS]  # of each lease; the last is that of all others
        self.refuses = ""
        self.on_use: Callable[[int], None] = lambda _: None
        self.datagrams: list[list[protocol.Order]] = []
        self.held: set[int] = set()
        self._named: set[int] = set()
        self._next = 1000
        self.peer: socket.socket | None = None

    @property
    def heard(self) -> list[protocol.Order]:
        """Everything that was said to it."""
        return [order for datagram in self.datagrams for order in datagram]

    def of(self, kind: type[T]) -> list[T]:
        """Return what was said to it of one kind."""
        return [order for order in self.heard if isinstance(order, kind)]

    def connected(self, path: str) -> Line:
        """Take the place of the function that connects to an arbiter."""
        if not self.serves:
            raise ConnectionRefusedError
        self.hang_up()
        self.peer, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.peer.setblocking(False)
        line = Line(fileno=theirs.detach())
        line.setblocking(False)
        line.arbiter = self
        return line

    def hang_up(self) -> None:
        """End the connection."""
        if self.peer is not None:
            self.peer.close()
        self.peer, self._named = None, set()

    def say(self, *replies: protocol.Reply) -> None:
        """Say something to the dispatcher unasked."""
        protocol.send(self.peer, list(replies))

    def grant(self, ask: Ask | Claim, before_ns: int = FOREVER_NS) -> Granted:
        """Return a new lease for an ask."""
        self._next += 1
        self.held.add(self._next)
        return Granted(ask.number, self._next, before_ns)

    def hear(self) -> None:
        """Answer what was said."""
        with contextlib.suppress(BlockingIOError):
            while self.peer is not None and (data := self.peer.recv(protocol.MOST_BYTES)):
                orders = protocol.read(protocol.ORDERS, data)
                self.datagrams.append(orders)
                self.say(*[reply for order in orders for reply in self._answer(order)])

    def _answer(self, order: protocol.Order) -> Iterator[protocol.Reply]:
        match order:
            case Hello() if self.refuses:
                yield Refused(self.refuses)
            case Hello():
                self.held &= self._named
                yield Welcome(self.cpus, 1 << 30, (("licence", 2, (5, 6)),))
            case Claim() if self.counts:
                yield self.grant(order)
            case Claim():
                yield Wait(order.number, "it is beyond the quota")
            case Ask() if self.grants:
                before = self.begin_before
                yield self.grant(order, before.pop(0) if len(before) > 1 else before[0])
            case Ask():
                yield Wait(order.number, WHY)
            case Use():
                self._named.add(order.lease)
                if order.lease not in self.held:
                    yield Unknown(order.lease)
                self.on_use(order.lease)
            case EndLease():
                self.held.discard(order.lease)


@pytest.fixture
def arbiter(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeArbiter]:
    """Give an arbiter that serves, to which every dispatcher connects."""
    made = FakeArbiter()
    monkeypatch.setattr(asking, "_connected", made.connected)
    yield made
    made.hang_up()


@pytest.fixture
def session(tmp_path: Path, arbiter: FakeArbiter, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """Give a dispatcher whose machine that arbiter shares out."""
    monkeypatch.setattr(asking, "_BEGUN_NS", 1000 * SECOND_NS)
    monkeypatch.setattr(asking, "_FIRST_PAUSE_NS", 0)
    monkeypatch.setattr(asking, "_LONGEST_PAUSE_NS", 0)
    monkeypatch.setattr(asking, "AHEAD", 0)
    with shared_world(tmp_path / "spool", monkeypatch) as world:
        made = Session(world)
        yield made
        made.end()


@contextlib.contextmanager
def shared_world(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Give a world whose machine is shared."""
    for limit in ("_ANSWER_NS", "_WELCOME_NS"):  # what is there is read, also by a dispatcher that has no time left
        monkeypatch.setattr(asking, limit, 0)
    with world_at(root, monkeypatch) as world:
        world.cpus = 60
        world.next_pids = iter(range(3_000_000, 4_000_000))
        (world.root / layout.CONFIG).write_text('machine = "/nowhere"\n')
        yield world


def hears(session: Session) -> None:
    """Have the dispatcher take in what was said to it."""
    session.now.sleep(0)


@pytest.fixture
def ahead(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:  # a session asks for nothing ahead
    """Let a dispatcher keep two asks open for what is next in line, and look for it at any time."""
    monkeypatch.setattr(asking, "AHEAD", 2)
    monkeypatch.setattr(asking, "_LINE_PART", 0)


def submits(session: Session, *names: str, keys: Sequence[str] = (), command: str = "hang") -> None:
    """Have jobs submitted, and the dispatcher do all that it can."""
    for name in names:
        session.users.submit(name, command, *keys)
    session.settle()


def leaves(session: Session, name: str) -> None:
    """Have the run of a job end, and the dispatcher do all that it can."""
    session.world.exit(session.world.pids(name)[0], 0)
    session.settle()


def reloads(session: Session) -> None:
    """Have the dispatcher, or another one if there is none, read its configuration."""
    if session.now is not None:
        session.now.wakeup.reload = True
    session.settle()


def lease_of(session: Session, name: str, run: int = 1) -> int | None:
    """Return the lease in the records of a run."""
    text = (session.world.root / "jobs" / name / str(run) / layout.GRANT).read_bytes()
    return run_records.parse_grant(text).lease


def says(session: Session, name: str) -> str:
    """Return the reason of a job in `state.json`."""
    view = session.now.status.view(session.now.planner.plan, session.now.planner.machine, paused=False)
    return view.jobs[name].reason


def test_a_start_has_its_lease_in_the_same_pass(session: Session, arbiter: FakeArbiter) -> None:
    """The dispatcher asks, is granted, records the lease, says that it begins, and launches."""
    session.turns(1)
    session.users.submit("a", "hang")
    session.turns(1)
    assert session.world.pids("a")
    lease = lease_of(session, "a")
    asked = LeaseRequest(1, like=asking._like("a"))
    assert arbiter.heard == [Hello(VERSION, session.now.gate.leases._name), Ask(1, asked), Use(lease)]


def test_a_lease_is_on_the_disk_before_it_begins(session: Session, arbiter: FakeArbiter) -> None:
    """When the arbiter hears of the begin, a dispatcher that comes next would name that lease."""
    recorded: list[bool] = []

    def is_recorded(lease: int) -> None:
        texts = [path.read_text() for path in (session.world.root / "jobs").glob("*/1/grant.toml")]
        recorded.append(any(f"lease = {lease}\n" in text for text in texts))

    arbiter.on_use = is_recorded
    submits(session, *"abc")
    assert recorded == [True] * 3


def test_a_start_without_a_lease_waits_and_says_why(session: Session, arbiter: FakeArbiter) -> None:
    """The reason of the arbiter is the job's; a grant that comes late starts it without another plan."""
    arbiter.grants = False
    submits(session, "a")
    assert not session.world.begun
    assert says(session, "a") == f"machine: {WHY}"
    now = session.now
    plan = now.planner.plan
    arbiter.say(Wait(1, "memory: needs 1\x1b[2J GiB"))
    hears(session)
    assert now.gate.leases.work()
    assert "\x1b" not in says(session, "a")
    [ask] = arbiter.of(Ask)
    arbiter.say(arbiter.grant(ask))
    hears(session)
    assert now.planner.is_old
    session.looks_at_everything = False
    session.turns(1)
    assert now.planner.plan is plan
    session.settle()
    assert session.world.begun == [("a", 1)]
    assert now.gate.leases.reason("a") == ""


def test_a_grant_that_crosses_a_drop_starts_nothing(session: Session, arbiter: FakeArbiter) -> None:
    """The number of the ask tells: the lease is given back, and the next job asks for its own."""
    arbiter.grants = False
    submits(session, "a")
    session.users.path(QUEUED, "a").unlink()
    session.settle()
    assert arbiter.of(Drop)
    [ask] = arbiter.of(Ask)
    crossed = arbiter.grant(ask)
    arbiter.say(crossed)
    hears(session)
    submits(session, "b")
    assert EndLease(crossed.lease) in arbiter.heard
    assert not session.world.begun
    assert [each.number for each in arbiter.of(Ask)] == [1, 2]
    assert not arbiter.held


def test_equal_demands_are_interchangeable(session: Session, arbiter: FakeArbiter) -> None:
    """A job that takes the place of another in the plan has its ask; another demand has an ask of its own."""
    arbiter.grants = False
    submits(session, "a1")
    session.users.path(QUEUED, "a1").rename(session.users.path(QUEUED, "a2"))  # seen at once, as one change
    session.settle()
    submits(session, "a3", keys=["cpus = 2"])
    assert [ask.demand.cpus for ask in arbiter.of(Ask)] == [1, 2]
    assert not arbiter.of(Drop)


def test_the_end_of_a_run_and_the_next_ask_are_one_datagram(session: Session, arbiter: FakeArbiter) -> None:
    """So the arbiter can give the room to the next start in the same pass."""
    arbiter.cpus = 1
    submits(session, "a")
    submits(session, "b")
    lease = lease_of(session, "a")
    leaves(session, "a")
    [together] = [datagram for datagram in arbiter.datagrams if EndLease(lease or 0) in datagram]
    assert [type(order) for order in together] == [EndLease, Ask]
    assert session.world.pids("b")
    assert len(arbiter.held) == 1


@pytest.mark.usefixtures("ahead")
def test_what_is_next_in_line_is_asked_for_before_its_turn(session: Session, arbiter: FakeArbiter) -> None:
    """So its wait counts for the arbiter; whatever is granted starts, and what is gone is withdrawn."""
    arbiter.cpus = 1
    submits(session, "a")
    arbiter.grants = False
    for name in ("b", "c", "d"):
        session.users.submit(name, "hang")
    submits(session, "late", keys=["cpus = 1\npriority = 1"])
    assert len(arbiter.of(Ask)) == 3
    assert says(session, "b").startswith("cpus: needs 1, 0 free")
    assert len(session.world.begun) == 1
    ask = arbiter.of(Ask)[1]
    arbiter.say(arbiter.grant(ask))
    hears(session)
    session.settle()
    assert session.world.begun == [("a", 1), ("b", 1)]
    assert len(arbiter.of(Ask)) == 4
    for name in ("c", "d"):
        session.users.path(QUEUED, name).unlink()
    session.settle()
    assert len(arbiter.of(Drop)) == 2
    assert len(arbiter.held) == 2


@pytest.mark.usefixtures("ahead")
def test_a_lower_priority_is_not_next_in_line(session: Session, arbiter: FakeArbiter) -> None:
    """The arbiter knows no priority: it could give the room to the less urgent job."""
    arbiter.cpus = 2
    submits(session, "a", keys=["cpus = 2"])
    arbiter.grants = False
    session.users.submit("urgent", "hang", "cpus = 2\npriority = 200")
    submits(session, "b", keys=["cpus = 1"])
    session.settle()
    assert [ask.demand.cpus for ask in arbiter.of(Ask)] == [2, 2]


@pytest.mark.parametrize("short", [True, False])
def test_the_wrapper_of_a_run_is_told_late(
    session: Session, arbiter: FakeArbiter, monkeypatch: pytest.MonkeyPatch, *, short: bool
) -> None:
    """A run that is over by then costs no message for it."""
    if not short:
        monkeypatch.setattr(asking, "_BEGUN_NS", 0)
    submits(session, "a", command="ok" if short else "hang")
    if short:
        assert arbiter.of(EndLease)
        assert [use.pid for use in arbiter.of(Use)] == [0]
    else:
        assert arbiter.of(Use)[1] == Use(lease_of(session, "a") or 0, session.world.pids("a")[0], 1)


def test_a_hello_names_what_runs(session: Session, arbiter: FakeArbiter) -> None:
    """After a loss of the connection, and by the next dispatcher, from the records; unused leases are not named."""
    submits(session, "a")
    lease, pid = lease_of(session, "a"), session.world.pids("a")[0]
    arbiter.hang_up()
    hears(session)
    session.settle()
    assert len(arbiter.of(Hello)) == 2
    session.end()
    session.settle()
    assert len(arbiter.of(Hello)) == 3
    assert arbiter.of(Use)[1:] == [Use(lease, pid, 1)] * 2
    session.world.exit(pid, 0)
    session.settle()
    assert not arbiter.held


def test_a_run_whose_lease_is_unknown_goes_on(session: Session, arbiter: FakeArbiter) -> None:
    """It holds its room here, is claimed, and ends nothing at an arbiter that does not count it."""
    submits(session, "a")
    arbiter.counts = False
    arbiter.hang_up()
    arbiter.held.clear()
    for _ in range(3):
        hears(session)
        session.turns(1)
    assert arbiter.of(Claim)
    session.settle()
    assert [live.lease for live in session.now.state.live.values()] == [None]
    [claim] = arbiter.of(Claim)
    assert claim.pid == session.world.pids("a")[0]
    leaves(session, "a")
    assert not arbiter.of(EndLease)


@pytest.mark.parametrize("returns", [False, True])
def test_a_run_from_before_sharing_is_claimed(session: Session, arbiter: FakeArbiter, returns: bool) -> None:
    """A dispatcher that joins claims its runs, and gives their leases back with their ends."""
    config = session.world.root / layout.CONFIG
    shared_text = config.read_text()
    config.write_text('machine = "off"\n')
    session.users.submit("a", "hang", "cpus = 3")
    reloads(session)
    assert session.world.pids("a")
    told = len(arbiter.heard)
    config.write_text(shared_text)
    if returns:
        session.end()
    reloads(session)
    hears(session)
    [live] = session.now.state.live.values()
    assert arbiter.held == {live.lease}
    [_, claim] = arbiter.heard[told:]
    assert (claim.demand.cpus, claim.pid) == (3, session.world.pids("a")[0])
    leaves(session, "a")
    assert not arbiter.held


WRONG = {
    "a GPU": {"gpu_uuids": ("GPU-0",), "gpu_indices": (0,)},
    "a licence too many": {"pool_indices": (("licence", (5, 6)),)},
    "a licence twice": {"pool_indices": (("licence", (5, 5)),)},
    "another licence": {"pool_indices": (("licence", (7,)),)},
    "no licence": {"pool_indices": ()},
    "another resource": {"pool_indices": (("licence", (5,)), ("tpu", (1,)))},
    "a lease in use": {"lease": 77},
}


@pytest.mark.parametrize("more", [{}, *WRONG.values()], ids=["what was asked for", *WRONG])
def test_a_grant_of_something_else_is_not_believed(
    session: Session, arbiter: FakeArbiter, more: dict[str, Any]
) -> None:
    """A dispatcher starts nothing by a grant of more or other than it asked for, and says why."""
    arbiter.grants = False
    session.users.submit("a", "hang", "[resources]", "licence = 1")
    session.settle()
    [ask], leases = arbiter.of(Ask), session.now.gate.leases
    if "lease" in more:
        leases._leases[77] = UnusedLease(LeaseRequest(9), Granted(9, 77, FOREVER_NS))
    given = {"pool_indices": (("licence", (5,)),), **more}
    lease = given.pop("lease", 1001)
    arbiter.held.add(lease)
    arbiter.say(Granted(ask.number, lease, FOREVER_NS, Units(**given)))
    hears(session)
    if more:
        assert (leases._sock, bool(leases.view.problem)) == (None, True)
        assert not session.world.begun
    else:
        session.settle()
        assert session.world.begun == [("a", 1)]


def test_a_flood_of_answers_ends_no_pass(session: Session, arbiter: FakeArbiter) -> None:
    """An arbiter that says without end what nobody has asked for is left once the dispatcher cannot answer it."""
    session.settle()
    grants = [Granted(1 << 40, 1 << 40, FOREVER_NS)] * protocol.MOST_MESSAGES
    while session.now.gate.leases._sock is not None:
        arbiter.say(*grants)
        session.now.gate.leases.read()
    assert len(session.now.gate.leases._out) < 1 << 16


def test_a_lease_that_comes_too_late_launches_nothing(session: Session, arbiter: FakeArbiter) -> None:
    """Whoever was stopped for so long gives it back, and the job starts under another one."""
    arbiter.begin_before = [boot_clock() - 1, FOREVER_NS]
    submits(session, "a")
    assert session.world.begun == [("a", 2)]
    assert EndLease(lease_of(session, "a", 1) or 0) in arbiter.heard
    assert arbiter.held == {lease_of(session, "a", 2)}


def test_a_start_that_was_taken_back_gives_its_lease_back(session: Session, arbiter: FakeArbiter) -> None:
    """The machine refused a process for it."""
    session.users.submit("a", "denied until 9")
    session.turns(8)
    assert not arbiter.held
    assert not session.world.begun


def test_a_refusal_is_the_reason(session: Session, arbiter: FakeArbiter) -> None:
    """The arbiter does not serve this user."""
    arbiter.refuses = "mallory is not one of the users\x1b]0;of this machine"
    submits(session, "a")
    assert re.match("machine: .* mallory ", str(session.now.planner.plan.reason("a")))
    assert "\x1b" not in str(session.now.planner.plan.reason("a"))
    assert not session.now.stuck
    assert not session.world.begun


def test_a_socket_of_another_account_is_refused(
    session: Session, arbiter: FakeArbiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is said to it."""
    monkeypatch.setattr(asking, "served_in", lambda directory, _: SharedMachine(directory, frozenset({4_000_000})))
    submits(session, "a")
    assert session.now.planner.plan.reason("a").code == "machine"
    assert not arbiter.heard
    assert not session.world.begun


def test_garbage_from_the_arbiter_ends_no_pass(session: Session, arbiter: FakeArbiter) -> None:
    """The connection is given up, and the next one works."""
    session.settle()
    arbiter.peer.send(b'["grant",')
    hears(session)
    session.turns(1)
    hears(session)
    submits(session, "a")
    assert session.world.begun == [("a", 1)]
    assert len(arbiter.of(Hello)) == 2


def test_who_leaves_keeps_the_leases_of_its_runs_alone(session: Session, arbiter: FakeArbiter) -> None:
    """A lease that no run uses is given back."""
    submits(session, "a")
    arbiter.grants = False
    submits(session, "b")
    ask = arbiter.of(Ask)[-1]
    unused = arbiter.grant(ask)
    arbiter.say(unused)
    hears(session)
    session.now.gate.leases.close()
    assert EndLease(unused.lease) in arbiter.heard
    assert arbiter.held == {lease_of(session, "a")}


def test_a_machine_that_is_shared_no_more_needs_no_lease(session: Session, arbiter: FakeArbiter) -> None:
    """The configuration changes, and what waits starts."""
    arbiter.grants = False
    submits(session, "a")
    (session.world.root / layout.CONFIG).write_text('machine = "off"\n')
    session.now.wakeup.reload = True
    session.settle()
    assert session.world.begun == [("a", 1)]
    assert lease_of(session, "a") is None


@pytest.mark.parametrize("cut", ["before a change of the disk", "before a datagram", "after a datagram"])
def test_no_cut_loses_a_run_or_leaves_a_lease(
    tmp_path: Path, arbiter: FakeArbiter, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """A dispatcher that dies there, at any of them: each job runs once, and no lease is left."""
    flush, by_disk = asking.ArbiterLeases._flush, "disk" in cut
    cut_at = said = 0

    def cuts(self: asking.ArbiterLeases) -> bool:
        nonlocal said
        speaks = bool(self._out)
        said += speaks
        if speaks and "before" in cut and said == cut_at:
            raise PowerCut
        sent = flush(self)
        if speaks and said == cut_at:
            raise PowerCut
        return sent

    if not by_disk:
        monkeypatch.setattr(asking, "_BEGUN_NS", 0)
        monkeypatch.setattr(asking.ArbiterLeases, "_flush", cuts)
    for cut_at in range(1, 60):
        said = 0
        with shared_world(tmp_path / f"spool{cut_at}", monkeypatch) as world:
            session = Session(world, iter([FaultyDisk(world.staging, cut_at=cut_at)] if by_disk else []))
            for name in ("a", "b"):
                submits(session, name, command="ok")
            assert sorted(name for name, _ in world.begun) == ["a", "b"]
            if by_disk:
                session.now.gate.leases.work()
            assert not arbiter.held
            session.end()
        if not session.cuts:
            assert cut_at > 6
            return
    raise AssertionError("it was cut at every one, and has still more of them")


# --- values ---------------------------------------------------------------------------------------------------


def test_the_units_of_a_lease_replace_those_of_the_plan() -> None:
    """The GPUs, and the indices of the machine's pools; the indices of the spool's own pools stay."""
    grant = Grant(1, gpu_uuids=("GPU-1",), gpu_indices=(0,), resource_indices=(("tpu", (0,)), ("mine", (7,))))
    granted = Granted(1, 9, 0, Units(("GPU-2",), (4,), (("tpu", (3,)),)))
    start = UnusedLease(LeaseRequest(1), granted).applied_to(Start("a", grant))
    expected = Grant(1, gpu_uuids=("GPU-2",), gpu_indices=(4,), resource_indices=(("mine", (7,)), ("tpu", (3,))))
    assert start == Start("a", expected, 9)


def test_the_totals_of_the_arbiter_count_as_far_as_the_configuration_lets_them() -> None:
    """CPUs, memory and pools; the other users' processes are left to the arbiter."""
    gpu = Gpu("GPU-1", 0, "H100", memory_total_bytes=80, memory_free_bytes=3)
    machine = Machine(2, 10, 1, (gpu,), resources=(Pool("licence", 1), Pool("own", 3)), cores=(Core((0, 1)),))
    view = SharedView(directory="d", cpus=8, memory_bytes=99, resources=(Pool("licence", 4), Pool("tpu", 2, (0, 1))))
    seen = on_shared(machine, Config(memory_bytes=50), view)
    assert (seen.cpus, seen.memory_bytes, seen.no_leases, seen.cores) == (8, 50, None, ())
    assert seen.resources == (Pool("licence", 1), Pool("own", 3), Pool("tpu", 2, (0, 1)))
    alone = as_if_alone(seen)
    assert (alone.gpus[0].memory_free_bytes, alone.memory_available_bytes) == (80, None)


def test_a_machine_is_shared_if_its_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the configuration says otherwise; a file that cannot be looked at is there."""
    file = tmp_path / "etc" / "machine.toml"
    monkeypatch.setattr("spool.machine.host.MACHINE_FILE", str(file))
    assert shared_directory("auto") is None
    file.parent.mkdir()
    file.touch()
    found = served_in(shared_directory("auto") or "", None)
    assert found.socket == "/run/spool/socket"
    assert found.servers >= {0, os.geteuid()}
    assert shared_directory("off") is None
    assert shared_directory("~/lab/") == os.path.expanduser("~/lab")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.setattr("spool.machine.host.MACHINE_FILE", str(tmp_path / "loop" / "machine.toml"))
    assert shared_directory("auto") is not None
