"""What a dispatcher on a shared machine says to the arbiter: a start needs a lease (FORMAT 17).

The plan is made as if the machine were this spool's alone. A lease is for a demand, not for a job. What the plan would
start is asked for; a granted start happens in the same pass if the answer comes at once, and the others stay in the
plan, where they keep their room. A run has its lease on the disk before the arbiter hears that it begins.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from spool.core.model import SECOND_NS, Grant, Jid, Pool, Request
from spool.core.runtimes import stem
from spool.core.scheduler import Plan, Start
from spool.dispatcher.leases import Leases
from spool.dispatcher.wakeup import Timer, Wakeup, boot_clock
from spool.extras.machine import SharedMachine, protocol, served_in
from spool.extras.machine.protocol import LeaseRequest, Units
from spool.formats.state import SharedView
from spool.formats.wire import one_line
from spool.state.run import ActiveRun
from spool.state.table import SchedulerState
from spool.store.edited import Settings
from spool.store.locked_spool import LockedSpool
from spool.store.ownership import name_of

log = logging.getLogger(__name__)

T = TypeVar("T")

SILENT = "the arbiter has not answered"
_NO_START = "no job can start on this shared machine: %s"

_MS = SECOND_NS // 1000
AHEAD = 32
"""The number of asks that are kept open while enough jobs wait for room.

A job that is asked for only once the plan has room for it has not waited at all in the eyes of the arbiter. With 16
the mean slowdown over traces is up to 1.15 of one spool's, with 32 it is not above it; with 64 a user with many long
jobs takes more than a fair share from others.
"""

_LINE_PART = 20  # the next in line are looked for again after this many times as long as that takes
_ANSWER_NS = 2 * _MS  # what a pass waits for the answers to its asks
_WELCOME_NS = 100 * _MS  # what a dispatcher that begins waits for the first answer
_LATE_NS = SECOND_NS  # an answer that takes longer is late
_SILENT_NS = 5 * SECOND_NS  # an arbiter that takes longer does not answer: the next hello shows when it is back
_FIRST_PAUSE_NS, _LONGEST_PAUSE_NS = 100 * _MS, SECOND_NS  # before another connection is tried
_UNSENT_NS = 10 * _MS  # before the rest is sent to an arbiter that does not read
_BEGUN_NS = 50 * _MS  # after a launch: which wrapper has the lease; a short run has ended by then
_MOST_NUMBER = 1 << 53
_MOST_AT_ONCE = 256  # datagrams that are read before the rest of a pass
_MOST_UNSENT = 20_000  # messages; an arbiter that causes more, and does not read, is left


class UnusedLease(Struct, frozen=True):
    """An unused lease, with what it grants."""

    demand: LeaseRequest
    granted: protocol.Granted

    def applied_to(self, start: Start) -> Start:
        """Return *start* with this lease, and with the units that it grants."""
        units, indices = self.granted.units, dict(start.grant.resource_indices)
        grant = replace(
            start.grant,
            gpu_uuids=units.gpu_uuids,
            gpu_indices=units.gpu_indices,
            resource_indices=tuple(sorted((indices | dict(units.pool_indices)).items())),
        )
        return replace(start, grant=grant, lease=self.granted.lease)


class SentAsk(Struct):
    """What the arbiter was asked for, and its answer so far."""

    demand: LeaseRequest
    asked_ns: int  # monotonic
    reason: str = ""  # why it must wait; "": there is no answer


class ArbiterLeases(Leases):
    """The leases of this spool's runs, and the connection to the arbiter that grants them."""

    asks = True

    def __init__(
        self, spool: LockedSpool, settings: Settings, state: SchedulerState, timer: Timer, wakeup: Wakeup
    ) -> None:
        """Look at nothing yet."""
        super().__init__(settings, state)
        self._spool = spool
        self._name = hashlib.sha256(spool.root.encode(errors="surrogateescape")).hexdigest()[:32]
        self._wakeup = wakeup
        self._timer = timer
        self._shared: SharedMachine | None = None
        self._sock: socket.socket | None = None
        self._poll = select.poll()
        self._connected_ns = 0  # monotonic
        self._next_ns = 0  # monotonic: when another connection may be tried
        self._pause_ns = _FIRST_PAUSE_NS
        self._number = 0  # of the last ask, over all connections
        self._out: list[protocol.Order] = []
        self._asks: dict[int, SentAsk] = {}
        self._leases: dict[int, UnusedLease] = {}  # granted, and used by no run yet
        self._untold: dict[tuple[str, int], ActiveRun] = {}  # runs whose wrappers, or claims, the arbiter does not know
        self._tell_ns = 0  # monotonic: when these are told
        self._claimed: dict[int, ActiveRun] = {}  # by the number of the claim, until it is answered
        self._unknown: set[int] = set()  # leases that the arbiter does not know, as just heard
        self._waiting: dict[str, LeaseRequest] = {}  # starts of the plan without a lease
        self._words_changed = False
        self._line: list[str] = []  # the next in line, as of a moment ago
        self._line_until_ns = 0  # monotonic

    # Life.

    def look(self, directory: str) -> None:
        """Find out who may be asked in *directory*: at first, and when that may have changed."""
        found = served_in(directory, self._settings.config.machine_owner)
        if found == self._shared:
            return
        self._disconnect()
        self._shared, self._next_ns, self._pause_ns = found, 0, _FIRST_PAUSE_NS
        self._state.changed()
        log.info("this machine is shared; its arbiter is in %s", directory)
        self.view = SharedView(
            directory=directory, problem=SILENT, problem_since_ns=time.time_ns(), remedy=found.remedy
        )
        self._connect()
        self._await(_WELCOME_NS, lambda: not self._answers)
        if self.view.problem == SILENT:
            log.warning(_NO_START, SILENT)
        self._set_timer()

    def close(self) -> None:
        """Leave. Runs go on, and keep their leases; unused leases are given back."""
        if self._sock is not None:
            self._end_over()
            self._out += [protocol.EndLease(lease) for lease in self._leases]
            self._tell_runs()
            self._flush()
        self._disconnect()

    @property
    def has_work(self) -> bool:
        """Whether there is something to say, to the arbiter or about it."""
        return bool(self._out or self._words_changed or self._state.over or self._unanswered_since_ns())

    def work(self) -> bool:
        """Send every message that waits, and stay connected; return whether the reasons of jobs have changed."""
        self._end_over()
        if (asked_ns := self._unanswered_since_ns()) and time.monotonic_ns() - asked_ns >= _SILENT_NS:
            self._lost()
        self._connect()
        if self._untold and self._answers and time.monotonic_ns() >= self._tell_ns:
            self._tell_runs()
        self._flush()
        self._set_timer()
        changed, self._words_changed = self._words_changed, False
        return changed

    @property
    def asking(self) -> bool:
        """Whether an answer is missing that should come at once."""
        if self._sock is None:
            return False
        since_ns = self._unanswered_since_ns() if self._answers else self._connected_ns
        return since_ns > time.monotonic_ns() - _LATE_NS

    # What a pass asks.

    @property
    def holds_more(self) -> bool:
        """Whether there are asks, or unused leases."""
        return bool(self._asks or self._leases)

    def startable(self, starts: Sequence[Start], plan: Plan | None = None) -> list[Start]:
        """Return those of *starts*, all of *plan*, that need no lease or have one; ask for the others.

        Each has the units that its lease grants. What is next in line behind them is asked for too, so that its wait
        counts; at most one such job starts in a pass (`jumped`), as the plan says nothing about two. What was asked or
        granted for anything else is given back.
        """
        self.news = self.jumped = False
        self._end_over()
        wanted = {start.name: demand for start in starts if (demand := self._demand_of(start.name)) is not None}
        in_line = self._next_in_line(plan, wanted) if plan is not None else {}
        if self._answers:
            gave_back = bool(wanted) and any(isinstance(order, protocol.EndLease) for order in self._out)
            fresh = self._settle(wanted, in_line)
            if self._flush() and (fresh or gave_back):
                self._await(_ANSWER_NS, lambda: self._misses(fresh) if fresh else gave_back and not self.news)
        free: dict[LeaseRequest, list[UnusedLease]] = {}
        for lease in reversed(self._leases.values()):
            free.setdefault(lease.demand, []).append(lease)
        ready, waiting = [], {}
        for start in starts:
            demand = wanted.get(start.name)
            if demand is None:
                ready.append(start)
            elif free.get(demand):
                ready.append(free[demand].pop().applied_to(start))
            else:
                waiting[start.name] = demand
        lucky = next((name for name, demand in in_line.items() if free.get(demand)), None)
        if lucky is not None:
            demand = in_line[lucky]
            ready.append(free[demand].pop().applied_to(Start(lucky, Units().granted(demand))))
            self.jumped = True
        self._words_changed |= waiting != self._waiting
        self._waiting = waiting
        self.news = False
        return ready

    def line_up(self, plan: Plan | None) -> None:
        """Ask for what is next in line behind the starts of *plan*, while there is nothing else to do."""
        begun_ns = time.monotonic_ns()
        if plan is None or not self._answers or begun_ns < self._line_until_ns:
            return
        self._line = [job.name for job in plan.in_line(AHEAD)]
        now_ns = time.monotonic_ns()
        self._line_until_ns = now_ns + _LINE_PART * (now_ns - begun_ns)
        spare = Counter(ask.demand for ask in self._asks.values())
        spare.subtract(self._waiting.values())
        for demand in self._next_in_line(plan, self._waiting).values():
            spare[demand] -= 1
            if spare[demand] < 0:
                self._ask(demand)
        self._flush()

    def reason(self, name: str) -> str:
        """Return why the start of the job *name* waits for a lease; "" if it does not."""
        demand = self._waiting.get(name)
        if demand is None:
            return ""
        for ask in self._asks.values():
            if ask.demand == demand and ask.reason:
                return f"machine: {ask.reason}"
        return "machine: the arbiter is asked for a lease"

    # What becomes of the leases.

    def begin(self, lives: Iterable[ActiveRun]) -> set[tuple[str, int]]:
        """Tell the arbiter that *lives*, whose leases are on the disk, begin now; return those that must not."""
        runs = {live.key: lease for live in lives if (lease := live.lease) is not None}
        if not runs:
            return set()
        self._out += [protocol.Use(lease) for lease in runs.values() if lease in self._leases]
        if not self._flush():
            return set(runs)
        now_ns = boot_clock()  # after it was said: the arbiter hears it before it lets the lease lapse
        return {
            key
            for key, lease in runs.items()
            if lease not in self._leases or now_ns >= self._leases[lease].granted.begin_before_ns
        }

    def used(self, live: ActiveRun) -> None:
        """Record that a lease belongs to a run from now on: it is over with it."""
        if live.lease is None:
            return
        self._leases.pop(live.lease, None)
        if live.handle is not None:
            self._tell_later(live)

    def _end_over(self) -> None:
        """Give back the leases of the runs that have left their room."""
        for lease in self._state.take_over():
            if self._sock is not None:  # else the next hello does not name it
                self._out.append(protocol.EndLease(lease))

    def _tell_later(self, live: ActiveRun) -> None:
        at_ns = time.monotonic_ns() + _BEGUN_NS
        self._tell_ns = min(self._tell_ns, at_ns) if self._untold else at_ns
        self._untold[live.key] = live
        self._timer.advance(self._tell_ns)

    def _tell_runs(self) -> None:
        """Say which wrappers use leases, which proves their use if no dispatcher is left; claim leases for the others.

        A run whose wrapper is not known yet is told later.
        """
        for key, live in list(self._untold.items()):
            jid = self._jid_of(live) if live.holds_room else None
            if jid is not None and live.lease is not None:
                self._out.append(protocol.Use(live.lease, jid.pid, jid.start_ticks))
            elif jid is not None:
                grant, self._number = live.grant, self._number + 1
                demand = self._demand(live.name, grant, len(grant.gpu_uuids), live.spec.time_limit_ns)
                units = replace(Units.of(grant), pool_indices=self._of_arbiter(grant.resource_indices))
                claim = protocol.Claim(self._number, demand, units, jid.pid, jid.start_ticks)
                self._claimed[self._number] = live
                self._out.append(claim)
            if jid is not None or not live.holds_room:
                del self._untold[key]
        self._tell_ns = time.monotonic_ns() + _LONGEST_PAUSE_NS

    def _jid_of(self, live: ActiveRun) -> Jid | None:
        """Return the identity of its wrapper, None while that is unknown."""
        handle = live.handle
        if handle is not None and handle.jid is None:
            with contextlib.suppress(OSError):
                jid = self._spool.jid(live.name, live.run)
                if isinstance(jid, Jid):
                    handle.identified(jid)  # which takes none of another process
        return handle.jid if handle is not None else None

    def _demand_of(self, name: str) -> LeaseRequest | None:
        """Return what the start of a job needs of the machine; None: nothing, it runs elsewhere or is gone."""
        job = self._state.queue.get(name)
        if job is None or job.elsewhere is not None:
            return None
        return self._demand(name, job.request, job.request.gpus, job.spec.time_limit_ns)

    def _demand(self, name: str, needs: Request | Grant, gpus: int, limit_ns: int | None) -> LeaseRequest:
        kinds = needs if gpus and isinstance(needs, Request) else Request()
        return LeaseRequest(
            cpus=needs.cpus,
            memory_bytes=needs.memory_bytes or 0,
            gpus=gpus,
            gpu_memory_bytes=(needs.gpu_memory_bytes or 0) if gpus else 0,
            gpu_type=next(iter(kinds.gpu_types), ""),
            resources=self._of_arbiter(needs.resources),
            limit_ns=min(limit_ns or 0, _MOST_NUMBER),
            like=_like(name),
            gpu_min_memory_bytes=kinds.gpu_min_memory_bytes or 0,
            other_gpu_types=kinds.gpu_types[1:],
        )

    def _of_arbiter(self, resources: tuple[tuple[str, T], ...]) -> tuple[tuple[str, T], ...]:
        """Return those of *resources* that are the machine's, not this spool's own."""
        pools = {pool.name for pool in self.view.resources} if self.view is not None else set()
        return tuple(each for each in resources if each[0] in pools)

    def _next_in_line(self, plan: Plan, wanted: Collection[str]) -> dict[str, LeaseRequest]:
        """Return the jobs that wait for room behind those *wanted*, until AHEAD asks are open."""
        found: dict[str, LeaseRequest] = {}
        for name in self._line:
            if len(wanted) + len(found) >= AHEAD:
                break
            if name in wanted or not plan.waits_for_room(name):
                continue
            demand = self._demand_of(name)
            if demand is not None and demand.resources == self._state.queue[name].request.resources:
                found[name] = demand
        return found

    def _settle(self, wanted: Mapping[str, LeaseRequest], in_line: Mapping[str, LeaseRequest]) -> list[int]:
        """Match leases and asks with what is *wanted* and *in_line*, and give back the rest.

        Return the numbers of the new asks for what is wanted.
        """
        need = Counter([*wanted.values(), *in_line.values()])
        now_ns = boot_clock()
        for number, lease in list(self._leases.items()):
            if now_ns < lease.granted.begin_before_ns and need[lease.demand] > 0:
                need[lease.demand] -= 1
            else:
                del self._leases[number]
                self._out.append(protocol.EndLease(number))
        for number, ask in list(self._asks.items()):
            if need[ask.demand] > 0:
                need[ask.demand] -= 1
            else:
                del self._asks[number]
                self._out.append(protocol.Drop(number))
        fresh = []
        for place, demand in enumerate([*wanted.values(), *in_line.values()]):
            if need[demand] > 0 and len(self._asks) < protocol.MOST_ASKS:
                need[demand] -= 1
                self._ask(demand)
                if place < len(wanted):
                    fresh.append(self._number)
        return fresh

    def _ask(self, demand: LeaseRequest) -> None:
        self._number += 1
        self._asks[self._number] = SentAsk(demand, time.monotonic_ns())
        self._out.append(protocol.Ask(self._number, demand))

    def _unanswered_since_ns(self) -> int:
        """Return when the oldest ask without an answer was made, monotonic; 0 if there is none."""
        return next((ask.asked_ns for ask in self._asks.values() if not ask.reason), 0)

    def _misses(self, numbers: Collection[int]) -> bool:
        """Whether one of these asks has no answer yet."""
        return any(number in self._asks and not self._asks[number].reason for number in numbers)

    # The connection.

    @property
    def _answers(self) -> bool:
        """Whether the arbiter has answered the hello of this connection."""
        return self._sock is not None and self.view is not None and not self.view.problem

    def _connect(self) -> None:
        """Connect, if that is due, and say what this spool has."""
        now_ns = time.monotonic_ns()
        if self._shared is None or self._sock is not None or now_ns < self._next_ns:
            return
        self._next_ns = now_ns + self._pause_ns
        self._pause_ns = min(2 * self._pause_ns, _LONGEST_PAUSE_NS)
        try:
            sock = _connected(self._shared.socket)
        except OSError:
            self._fail(SILENT)
            return
        _, uid = protocol.peer_of(sock)
        if uid not in self._shared.servers:
            sock.close()
            why = f"{self._shared.socket} is served by {name_of(uid)}, who is not trusted with that"
            self._fail(why, f'`machine_owner = "{name_of(uid)}"` in config.toml would trust them')
            return
        self._sock, self._connected_ns = sock, now_ns
        self._poll.register(sock, select.POLLIN)
        self._wakeup.watch_files(sock.fileno(), self.read)
        self._hello()

    def _hello(self) -> None:
        """Name every lease of a live run, by the wrapper that uses it. What is not known yet is told later."""
        self._state.take_over()
        self._untold.clear()
        for live in self._state.live.values():
            if not live.holds_room or live.elsewhere is not None:
                continue
            jid = self._jid_of(live)
            if live.lease is not None:
                process = (jid.pid, jid.start_ticks) if jid is not None else ()
                self._out.append(protocol.Use(live.lease, *process))
            if jid is None or live.lease is None:
                self._tell_later(live)
        self._out.append(protocol.Hello(protocol.VERSION, self._name))
        self._flush()

    def _disconnect(self) -> None:
        """Forget the connection with all that was said on it: the next hello says what still is."""
        self._out.clear()
        self._asks.clear()
        self._leases.clear()
        self._claimed.clear()
        self._words_changed |= bool(self._waiting)
        self._waiting = {}
        sock, self._sock = self._sock, None
        if sock is not None:
            self._wakeup.unwatch_files(sock.fileno())
            self._poll.unregister(sock)
            sock.close()

    def _lost(self, problem: str = SILENT, remedy: str | None = None) -> None:
        """Leave a connection that is of no use any more."""
        if self._sock is not None:
            self._disconnect()
            self._next_ns = time.monotonic_ns() + self._pause_ns
            self._timer.advance(self._next_ns)
            self._fail(problem, remedy)

    def _fail(self, problem: str, remedy: str | None = None) -> None:
        """Set why nothing is granted. Only silence counts the time."""
        view, found = self.view, self._shared
        if view is not None and found is not None and problem != view.problem:
            since_ns = time.time_ns() if problem == SILENT else None
            remedy = found.remedy if remedy is None else remedy
            self.view = replace(view, problem=problem, problem_since_ns=since_ns, remedy=remedy)
            log.warning(_NO_START, problem)
            self._state.changed()

    def _set_timer(self) -> None:
        times = []
        if self._sock is None:
            times.append(self._next_ns)
        if self._untold and self._answers:
            times.append(self._tell_ns)
        if asked_ns := self._unanswered_since_ns():
            times.append(asked_ns + _SILENT_NS)
        if self._out and self._sock is not None:
            times.append(time.monotonic_ns() + _UNSENT_NS)
        self._timer.set(min(times, default=None))

    def _flush(self) -> bool:
        """Send every message that waits, in one datagram if they fit; return whether the arbiter has all of them."""
        if self._sock is None:
            return False
        try:
            protocol.send(self._sock, self._out)
        except BlockingIOError:
            return False
        except OSError:
            self.read()  # its last words
            self._lost()
            return False
        return True

    def _await(self, limit_ns: int, missing: Callable[[], bool]) -> None:
        """Read answers while some are *missing*, at most for that time, and those that are there in any case."""
        until_ns, left_ns = time.monotonic_ns() + limit_ns, 1
        while self._sock is not None and missing() and left_ns:
            left_ns = max(0, until_ns - time.monotonic_ns())
            if self._poll.poll(left_ns / _MS):
                self.read()

    def read(self) -> None:
        """Read the replies of the arbiter, as many as a pass can take. Never raises."""
        for _ in range(_MOST_AT_ONCE):
            if self._sock is None:
                return
            try:
                datagram = self._sock.recv(protocol.MOST_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:  # it has closed, unread; its last words come first
                continue
            except OSError:
                datagram = b""
            if not datagram:
                self._lost()
                return
            try:
                replies = protocol.read(protocol.REPLIES, datagram)
            except protocol.NotAMessage:
                self._lost("the arbiter is of another version", "restart the older of the two")
                return
            for reply in replies:
                self._hear(reply)
        if self._unknown:
            for live in self._state.live.values():
                if live.lease in self._unknown:
                    live.leased(None)
                    self._tell_later(live)
            self._unknown.clear()
            self._tell_runs()  # which claims them

    def _hear(self, reply: protocol.Reply) -> None:
        match reply:
            case protocol.Welcome():
                self._welcome(reply)
            case protocol.Unknown():
                self._unknown.add(reply.lease)
            case protocol.Granted() if reply.number in self._claimed:
                live = self._claimed.pop(reply.number)
                if live.holds_room and live.key in self._state.live:
                    live.leased(reply.lease)
                else:
                    self._out.append(protocol.EndLease(reply.lease))
            case protocol.Granted():
                self._granted(reply)
            case protocol.Wait() if reply.number in self._claimed:
                live = self._claimed.pop(reply.number)
                log.warning("job %s run %d goes on without a lease: %s", *live.key, one_line(reply.reason))
            case protocol.Wait():
                if (ask := self._asks.get(reply.number)) is not None:
                    said = one_line(reply.reason) or "it is not this user's turn"
                    self._words_changed |= ask.reason != said
                    ask.reason = said
            case protocol.Refused():
                self._lost(f"the arbiter refuses: {one_line(reply.reason)}", "")

    def _granted(self, granted: protocol.Granted) -> None:
        ask = self._asks.pop(granted.number, None)
        if ask is None:  # it was dropped meanwhile
            self._out.append(protocol.EndLease(granted.lease))
            if len(self._out) > _MOST_UNSENT:
                self._lost("the arbiter does not read", "")
            return
        known = {*self._leases, *(live.lease for live in self._state.live.values())}
        if self.view is None or granted.lease in known or not granted.units.meet(ask.demand, self.view.resources):
            self._lost("the arbiter has granted something else than it was asked for", "")
            return
        self._leases[granted.lease] = UnusedLease(ask.demand, granted)
        self.news = True

    def _welcome(self, welcome: protocol.Welcome) -> None:
        if self.view is None:
            return
        if self.view.problem != SILENT or self.view.cpus is not None:
            log.info("the arbiter answers")
        self._pause_ns = _FIRST_PAUSE_NS
        resources = tuple(Pool(*pool) for pool in welcome.pools)
        self.view = SharedView(
            directory=self.view.directory, cpus=welcome.cpus, memory_bytes=welcome.memory_bytes, resources=resources
        )
        self._tell_runs()
        self._state.changed()


def _connected(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


@lru_cache(maxsize=4096)
def _like(name: str) -> str:
    """Return a short text that is equal for jobs which last about as long, and names none of them."""
    return hashlib.sha256(stem(name).encode(errors="surrogateescape")).hexdigest()[:16]
