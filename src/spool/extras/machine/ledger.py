"""The leases of all users, asked for and granted, and what follows: who gets one now, and why the others wait.

For `core.scheduler.decide`, a lease that is asked for is a waiting job, a granted one is a run, and the user is that of
the connection. No rule is added to it: a fair share, a quota or a reservation counts here across the spools of all
users.

`leases.jsonl` has every lease before its dispatcher hears of it, so that an arbiter that is killed at any moment comes
back with all of them. It lies where a reboot empties it, and names its boot for the case that it does not: after a
reboot no run is left, and so no lease. `usage.jsonl` outlives a reboot, for fair share and for guesses of run times. It
has a line for each user, so that nothing that others do can displace it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

from msgspec import Struct, json
from msgspec.structs import replace

from spool.core.errors import LockHeld, cannot
from spool.core.model import SECOND_NS, Grant, Machine, Policy, Pool, Reservation, Result, Running, Spec, State, Waiting
from spool.core.priority import Past
from spool.core.queue import WaitingQueue
from spool.core.quotas import Quotas, QuotaUse
from spool.core.resources import Runs
from spool.core.scheduler import Plan, View, decide
from spool.core.units import show_size
from spool.extras.machine.protocol import MOST_LEASES, Claim, Holder, LeaseRequest, Units
from spool.formats.wire import decoded, json_line
from spool.store.disk import Disk, open_log, read_file

_OVERSTAY_NS = 60 * SECOND_NS  # beyond its limit and the grace of a job: its dispatcher does not enforce the limit
_OVERSTAY_PART = 10  # or a tenth of the limit, whichever is longer
_LEAST_USED = 1e-3  # GPU seconds; less is nothing to remember

_HELD = re.compile(r" \([0-9]+ runs? holds? [^)]*\)$")
_NAME = re.compile(r"([^\s/]+)/[0-9a-f]*/[0-9]+")


class Lease(Struct, eq=False):
    """A part of the machine for one run of a spool: asked for, then granted, then in use.

    *number* is unique over restarts. Only the ledger changes what says how far it is.
    """

    holder: Holder
    number: int
    demand: LeaseRequest
    asked_at_ns: int  # its place in the queue
    ask: int = -1  # by which its dispatcher knows it until it is in use; -1: none that can be withdrawn
    told: str = ""  # the reason for which it waits, as its dispatcher has heard
    granted: bool = False
    grant: Grant = Grant()
    at_ns: int = 0  # when it was granted
    since_boot_ns: int = 0  # `at_ns` on a clock that cannot be set
    begun: bool = False  # it is in use: its dispatcher has said so, or may have
    pid: int = 0  # of the wrapper that uses it; 0: unknown
    ticks: int = 0
    claimed: bool = False  # its run began without it, so that how long it is held teaches nothing

    @property
    def name(self) -> str:
        """Return its name for `decide`, similar, as run times are, to those of the user's leases for similar jobs."""
        return f"{self.holder.user}/{self.demand.like}/{self.number}"


class UserLine(Struct, array_like=True, frozen=True, tag="user"):
    """The past of a user, for fair share and for guesses of run times."""

    user: str
    used: float  # up to `at_ns`, decayed, by the leases of then too; in GPU seconds, CPUs with their weight
    at_ns: int
    ran_ns: tuple[int, ...] = ()  # how long the last leases were held
    kept: int | None = None  # 0: the limits of the user do not count


class LeaseLedger:
    """Every lease: `asks` has those that wait, in the order in which they came, and `leases` the others, by number.

    *first* is the lowest number for a lease.
    """

    def __init__(self, policy: Policy, reservations: tuple[Reservation, ...], first: int) -> None:
        self.leases: dict[int, Lease] = {}
        self.asks: dict[int, Lease] = {}
        self.open_asks: Counter[Holder] = Counter()  # by spool
        self.version = 0  # changes with every lease
        self.squatters: dict[str, frozenset[str]] = {}  # users with processes on GPUs that they have no lease of
        self.next_number = first  # no lease has had it, or a higher one
        self.next_at_ns: int | None = None  # when the last decision changes by itself
        self._policy = policy
        self._reservations = reservations
        self._of: dict[Holder, dict[int, Lease]] = {}
        self._by_ask: dict[tuple[Holder, int], Lease] = {}  # those that can be withdrawn
        self._held: Counter[int] = Counter()  # granted leases by user
        self._queue = WaitingQueue()
        self._past = Past(policy)
        self._runs = Runs(run_times=self._past.run_times)
        self._plan: Plan | None = None
        self._holders: dict[str, str] = {}  # who has the CPUs or the memory, in words, since the last decision
        self._recalled_ns = 0  # the past has the use of leases until then
        self._distrusted: set[str] = set()  # the users whose limits do not count

    # One lease.

    def of(self, holder: Holder) -> list[Lease]:
        """Return the leases of a spool."""
        return list(self._of.get(holder, {}).values())

    def withdrawable(self, holder: Holder, ask: int) -> Lease | None:
        """Return the lease that was asked for by that number, if it is not in use."""
        lease = self._by_ask.get((holder, ask))
        return None if lease is None or lease.begun else lease

    def ask(self, holder: Holder, number: int, demand: LeaseRequest, now_ns: int) -> Lease | None:
        """Add an ask and return it; one with a number that is open already is ignored."""
        before = self._by_ask.get((holder, number))
        if before is not None and not before.granted:
            return None
        lease = Lease(holder, self.next_number, demand, now_ns, number)
        self.next_number += 1
        self._add(lease)
        self.asks[lease.number] = lease
        self.open_asks[holder] += 1
        self._queue.put(Waiting(lease.name, self._spec(lease), holder.user, now_ns, clock_at_ns=now_ns))
        return lease

    def grant(self, lease: Lease) -> None:
        """Let an ask be granted, by what is recorded in it."""
        self._leave_queue(lease)
        self.put(lease)

    def put(self, lease: Lease) -> None:
        """Add a lease that is granted."""
        self._add(lease)
        lease.granted = True
        self.leases[lease.number] = lease
        self._held[lease.holder.uid] += 1
        self.next_number = max(self.next_number, lease.number + 1)
        self._past.begin(lease.holder.user, None, lease.grant, max(lease.at_ns, self._recalled_ns))
        self._run(lease)

    def use(self, lease: Lease, pid: int = 0, ticks: int = 0) -> bool:
        """Record that a lease is in use, and by which wrapper; return whether that is news of the wrapper."""
        lease.begun = True
        if not pid or (pid, ticks) == (lease.pid, lease.ticks):
            return False
        lease.pid, lease.ticks = pid, ticks
        return True

    def end(self, lease: Lease, now_ns: int) -> None:
        """Remove a lease, and learn from it if it was granted."""
        holder = lease.holder
        del self._of[holder][lease.number]
        if not self._of[holder]:
            del self._of[holder]
        if self._by_ask.get((holder, lease.ask)) is lease:
            del self._by_ask[holder, lease.ask]
        if lease.granted:
            del self.leases[lease.number]
            self._held[holder.uid] -= 1
            self._runs.remove(lease.name)
            self._past.end(holder.user, None, lease.grant, now_ns)
            self._learn(lease, now_ns)
        else:
            self._leave_queue(lease)
        self.version += 1

    def _add(self, lease: Lease) -> None:
        self._of.setdefault(lease.holder, {})[lease.number] = lease
        if lease.ask >= 0:
            self._by_ask[lease.holder, lease.ask] = lease
        self.version += 1

    def _leave_queue(self, lease: Lease) -> None:
        del self.asks[lease.number]
        self._queue.remove(lease.name)
        self.open_asks[lease.holder] -= 1
        if not self.open_asks[lease.holder]:
            del self.open_asks[lease.holder]

    def _run(self, lease: Lease) -> None:
        user, arrived_ns = lease.holder.user, lease.asked_at_ns
        run = Running(lease.name, 1, user, self._spec(lease), lease.grant, lease.at_ns, arrived_at_ns=arrived_ns)
        self._runs.put(run)

    def _spec(self, lease: Lease) -> Spec:
        demand = lease.demand
        limit_ns = demand.limit_ns if demand.limit_ns and lease.holder.user not in self._distrusted else None
        return Spec("", request=demand.request(), time_limit_ns=limit_ns)

    # Runs that began without a lease.

    def claim(self, holder: Holder, claim: Claim, machine: Machine, now_ns: int) -> Lease | None:
        """Count a run that began without a lease, as far as the machine and its user's quota go; None: not at all.

        So the room that it has is not granted again, and a claim that is a lie takes no more than leases could.
        """
        limits, wanted = Quotas(self._policy).limits("user", holder.user), claim.demand
        use = self._runs.counts.users.get(holder.user, QuotaUse())
        if _part(1, use.jobs, limits.max_running_jobs) < 1 or self._held[holder.uid] >= MOST_LEASES:
            return None
        uuids = tuple(dict.fromkeys(claim.units.gpu_uuids))
        uuids = uuids[: _part(len(uuids), use.gpus, limits.max_running_gpus)]
        resources, indices = _pools_of(claim, machine.resources)
        most_bytes = machine.memory_bytes, limits.max_running_memory_bytes
        demand = replace(
            wanted,
            cpus=_part(wanted.cpus, use.cpus, machine.cpus, limits.max_running_cpus),
            memory_bytes=_part(wanted.memory_bytes, use.memory_bytes, *most_bytes),
            gpus=len(uuids),
            resources=resources,
        )
        lease = Lease(holder, self.next_number, demand, now_ns, at_ns=now_ns, begun=True, claimed=True)
        lease.grant = Units(uuids, (), indices).granted(demand)
        lease.pid, lease.ticks = claim.pid, claim.ticks
        self.put(lease)
        return lease

    # The past.

    def recall(self, line: UserLine, now_ns: int) -> None:
        """Count the past of a user that another arbiter has left, before its leases are put."""
        at_ns = min(line.at_ns, now_ns)  # the clock may have been set back
        self._recalled_ns = max(self._recalled_ns, at_ns)
        self._past.shares.recall(line.user, line.used, at_ns)
        for ran_ns in line.ran_ns:
            self._past.run_times.recall(line.user, ran_ns)
        if line.kept is not None:
            self._distrusted.add(line.user)

    def past(self, now_ns: int) -> list[UserLine]:
        """Return the past of each user, which does not depend on what the others do."""
        used, lasts = self._past.shares.used(now_ns), self._past.run_times.lasts_of
        users = {user for user, amount in used.items() if amount >= _LEAST_USED} | self._distrusted
        kept = dict.fromkeys(self._distrusted, 0)
        return [UserLine(user, used.get(user, 0.0), now_ns, lasts(user), kept.get(user)) for user in sorted(users)]

    def _learn(self, lease: Lease, until_ns: int) -> None:
        """Use how long a lease was held, for guesses, and for those that it has passed by."""
        if lease.claimed:
            return
        user, request = lease.holder.user, lease.demand.request()
        times = lease.asked_at_ns, lease.at_ns, max(lease.at_ns, until_ns)
        result = Result(lease.name, 1, 1, State.FINISHED, "", *times, request=request, grant=lease.grant)
        self._past.learn(user, result)
        if lease.demand.limit_ns:
            self._judge(user, trusted=not _overstays(lease, until_ns))

    def distrust_overstayers(self, now_ns: int) -> None:
        """Let the limits of a user no longer count if a lease of that user is held beyond its own."""
        for lease in self.leases.values():
            if _overstays(lease, now_ns):
                self._judge(lease.holder.user, trusted=False)

    def _judge(self, user: str, *, trusted: bool) -> None:
        """Let the limits of a user count or not; each lease has the expected time that follows from its limit."""
        if trusted == (user not in self._distrusted):
            return
        self._distrusted ^= {user}
        for lease in self.leases.values():
            if lease.holder.user == user:
                self._run(lease)
        for lease in self.asks.values():
            if lease.holder.user == user:
                self._queue.put(replace(self._queue[lease.name], spec=self._spec(lease)))
        self.version += 1

    def squat(self, squatters: dict[str, frozenset[str]], now_ns: int) -> None:
        """Count for quotas and fair share the GPUs on which users have processes without a lease."""
        for user in squatters.keys() | self.squatters.keys():
            before, number = len(self.squatters.get(user, ())), len(squatters.get(user, ()))
            if before == number:
                continue
            self.version += 1
            self._runs.remove(name := f"{user}//")
            if before:
                self._past.end(user, None, Grant(gpus_elsewhere=before), now_ns)
            if number:
                grant = Grant(gpus_elsewhere=number)
                self._past.begin(user, None, grant, now_ns)
                self._runs.put(Running(name, 1, user, Spec(""), grant, now_ns))
        self.squatters = squatters

    # Decisions.

    @property
    def asks_for_gpus(self) -> bool:
        """Whether an open ask wants GPUs."""
        return any(request.gpus for request in self._queue.requests_here())

    def decide(self, machine: Machine, now_ns: int) -> list[tuple[Lease, Grant]]:
        """Return which asks get which part of *machine* now; `grant` carries that out."""
        view = View(machine, self._queue, running=self._runs, reservations=self._reservations, past=self._past)
        if self._plan is not None:
            view = replace(view, holding=self._plan.holding)
        self._plan = plan = decide(view, now_ns, self._policy)
        self.next_at_ns = plan.next_at_ns
        self._holders.clear()
        starts, held = [], self._held.copy()
        for start in plan.starts:
            lease = self.asks[int(start.name.rpartition("/")[2])]
            held[lease.holder.uid] += 1
            if held[lease.holder.uid] <= MOST_LEASES:
                starts.append((lease, start.grant))
        return starts

    def why(self, lease: Lease) -> str:
        """Return why an ask waits by the last decision, in words that name no lease; "" if nothing prevents it."""
        if self._held[lease.holder.uid] >= MOST_LEASES:
            return f"{lease.holder.user} has {MOST_LEASES} leases already"
        reason = self._plan.reason(lease.name) if self._plan is not None else None
        if reason is None:
            return ""
        text, code = reason.text, reason.code
        if code in ("cpus", "memory"):
            if code not in self._holders:
                self._holders[code] = _holders_of(self.leases.values(), code)
            text = _HELD.sub(f" ({self._holders[code]})" if self._holders[code] else "", text)
        return _NAME.sub(r"\1", text).replace("outside spool", "without a lease")


def _holders_of(leases: Iterable[Lease], code: str) -> str:
    """Return which users hold the CPUs or the memory, in words: "2 leases of bob hold 2, 1 of carol holds 1"."""
    held: dict[str, list[int]] = {}
    for lease in leases:
        if amount := lease.grant.cpus if code == "cpus" else lease.grant.memory_bytes:
            held.setdefault(lease.holder.user, []).append(amount)
    words: list[str] = []
    for user, amounts in sorted(held.items(), key=lambda each: (-sum(each[1]), each[0])):
        many, total = len(amounts) > 1, sum(amounts)
        what = "" if words else " leases" if many else " lease"
        size = str(total) if code == "cpus" else show_size(total)
        words.append(f"{len(amounts)}{what} of {user} {'hold' if many else 'holds'} {size}")
    return ", ".join(words)


def _part(wanted: int, used: int, *limits: int | None) -> int:
    """Return how much of *wanted* the limits leave beside what is *used*."""
    return max(min([wanted, *(limit - used for limit in limits if limit is not None)]), 0)


def _pools_of(
    claim: Claim, pools: Iterable[Pool]
) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, tuple[int, ...]], ...]]:
    """Return which of the machine's named resources a claim has, and their indices."""
    counts, indices = [], []
    wanted, named = dict(claim.demand.resources), dict(claim.units.pool_indices)
    for pool in pools:
        count = min(wanted.get(pool.name, 0), pool.total)
        if pool.indices:
            units = tuple(sorted(set(named.get(pool.name, ())) & set(pool.indices)))[:count]
            count = len(units)
            indices += [(pool.name, units)] if units else []
        counts += [(pool.name, count)] if count else []
    return tuple(counts), tuple(indices)


def _overstays(lease: Lease, now_ns: int) -> bool:
    limit_ns = lease.demand.limit_ns
    return bool(limit_ns) and now_ns - lease.at_ns > limit_ns + max(_OVERSTAY_NS, limit_ns // _OVERSTAY_PART)


log = logging.getLogger(__name__)

LEASES, USAGE, LOCK = "leases.jsonl", "usage.jsonl", ".lock"
_MOST_BYTES = 256 << 20  # of a journal; a line has some 200, at most 2,000
_COMPACT_AFTER = 20_000  # lines
_AGAIN_S = 10.0  # what a killed arbiter forgets of the past; and until leases are compacted again after an error


# One JSON array a line, its word first.


class Boot(Struct, array_like=True, frozen=True, tag="boot"):
    """The first line: leases of another boot are over."""

    boot_id: str
    next_lease: int = 0  # every lease before this line has a lower number


class LeaseLine(Struct, array_like=True, frozen=True, tag="grant"):
    """A lease was granted. It is on the disk before the dispatcher hears of it."""

    lease: int
    uid: int
    user: str
    spool: str
    demand: LeaseRequest
    gpu_uuids: tuple[str, ...]
    gpu_indices: tuple[int, ...]
    pool_indices: tuple[tuple[str, tuple[int, ...]], ...]
    asked_at_ns: int
    at_ns: int
    since_boot_ns: int  # `at_ns` on a clock that cannot be set
    claimed: bool = False  # its run began without a lease


class BeganLine(Struct, array_like=True, frozen=True, tag="began"):
    """Which wrapper uses a lease."""

    lease: int
    pid: int
    ticks: int


class EndLine(Struct, array_like=True, frozen=True, tag="end"):
    """A lease is over."""

    lease: int


Line = Boot | LeaseLine | BeganLine | EndLine | UserLine

parse_line = partial(decoded, json.Decoder[Line](Line))
"""Return what a line says; None if it cannot be one, as a line that a crash cut off."""


class LeaseJournal:
    """The two files of one arbiter. Whatever cannot be written raises OSError, and is not granted then."""

    def __init__(self, directory: str, state_directory: str, boot_id: str) -> None:
        self._leases = os.path.join(directory, LEASES)
        self._usage = os.path.join(state_directory, USAGE)
        self._directory = directory
        self._boot_id = boot_id
        self._disk = Disk(directory, hidden=True)
        self._past_disk = Disk(state_directory, hidden=True)
        self._fd = -1
        self._lines = 0
        self._not_before = 0.0  # monotonic: when the leases may be compacted again
        self._save_at = 0.0  # monotonic: when the past is saved again
        self._saved = -1  # the version of the ledger whose past was saved last
        self._locked = -1

    def open(self, ledger: LeaseLedger, now_ns: int) -> None:
        """Read both files into *ledger*, and begin new ones. Raises LockHeld if another arbiter writes them."""
        self._lock()
        for line in map(parse_line, (read_file(self._usage, _MOST_BYTES) or b"").splitlines()):
            if isinstance(line, UserLine):
                ledger.recall(line, now_ns)
        self._read_leases(ledger)
        self._save(ledger, now_ns)
        self._compact(ledger)

    def close(self, ledger: LeaseLedger, now_ns: int) -> None:
        """Save the past, if the files are open, and close them."""
        if self._fd >= 0:
            self._try_to_save(ledger, now_ns)
        for fd in (self._fd, self._locked):
            if fd >= 0:
                os.close(fd)
        self._fd = self._locked = -1

    def granted(self, leases: list[Lease]) -> None:
        """Record leases; they may be told once this returns."""
        self._append(list(_lines(leases)))

    def note(self, line: BeganLine | EndLine, lease: Lease) -> None:
        """Record what a lease has come to. Never raises: its dispatcher says it again to an arbiter that begins."""
        try:
            self._append([json_line(line)])
        except OSError as error:
            log.error("cannot record what became of a lease of %s: %s", lease.holder.user, error)

    def tidy(self, ledger: LeaseLedger, now_ns: int) -> None:
        """Save the past now and then, and begin a new journal if the old one is long, or lost. Never raises."""
        now = time.monotonic()
        if now >= self._save_at:
            self._save_at = now + _AGAIN_S
            self._try_to_save(ledger, now_ns)
        if now < self._not_before:
            return
        try:
            if self._fd < 0 or self._lines > _COMPACT_AFTER + 4 * len(ledger.leases):
                self._compact(ledger)
        except OSError as error:
            log.error("cannot begin a new journal: %s", error)
            self._not_before = now + _AGAIN_S

    def _lock(self) -> None:
        lock = os.path.join(self._directory, LOCK)
        self._locked = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            why = "another arbiter serves there"
            raise LockHeld(cannot("serve in", "directory", why, where=self._directory)) from None

    def _append(self, lines: list[bytes]) -> None:
        self._disk.append(self._fd, b"".join(lines))
        self._lines += len(lines)

    def _read_leases(self, ledger: LeaseLedger) -> None:
        text = read_file(self._leases, _MOST_BYTES) or b""
        first, *lines = [parse_line(line) for line in text.splitlines()] or [None]
        if isinstance(first, Boot):
            ledger.next_number = max(ledger.next_number, first.next_lease)
        if not isinstance(first, Boot) or first.boot_id != self._boot_id:
            if text:
                log.info("%s is of another boot, or cannot be read: no lease is left", self._leases)
            return
        left: dict[int, Lease] = {}
        for line in lines:
            match line:
                case LeaseLine():
                    left[line.lease] = _lease(line)
                    ledger.next_number = max(ledger.next_number, line.lease + 1)  # if the clock was set back since
                case BeganLine() if line.lease in left:
                    left[line.lease].pid, left[line.lease].ticks = line.pid, line.ticks
                case EndLine():
                    left.pop(line.lease, None)
        for lease in left.values():
            ledger.put(lease)

    def _try_to_save(self, ledger: LeaseLedger, now_ns: int) -> None:
        if self._saved == ledger.version and not ledger.leases:
            return
        try:
            self._save(ledger, now_ns)
        except OSError as error:  # the past is worth less than the present
            log.error("cannot write %s: %s; what is used now is not remembered", self._usage, error)

    def _save(self, ledger: LeaseLedger, now_ns: int) -> None:
        self._past_disk.put(self._usage, b"".join(map(json_line, ledger.past(now_ns))), mode=0o640)
        self._saved = ledger.version

    def _compact(self, ledger: LeaseLedger) -> None:
        """Begin a new journal that has the leases of now alone."""
        data = [json_line(Boot(self._boot_id, ledger.next_number)), *_lines(ledger.leases.values())]
        self._disk.put(self._leases, b"".join(data))
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1  # it has lost its name: unless the next step succeeds, nothing can be granted
        self._fd, self._lines = open_log(self._leases), len(data)


def _lines(leases: Iterable[Lease]) -> Iterator[bytes]:
    for lease in leases:
        units, times = Units.of(lease.grant), (lease.asked_at_ns, lease.at_ns, lease.since_boot_ns)
        of_units = units.gpu_uuids, units.gpu_indices, units.pool_indices
        holder = lease.holder.uid, lease.holder.user, lease.holder.spool
        yield json_line(LeaseLine(lease.number, *holder, lease.demand, *of_units, *times, lease.claimed))
        if lease.pid:
            yield json_line(BeganLine(lease.number, lease.pid, lease.ticks))


def _lease(line: LeaseLine) -> Lease:
    lease = Lease(Holder(line.uid, line.user, line.spool), line.lease, line.demand, line.asked_at_ns)
    units = Units(line.gpu_uuids, line.gpu_indices, line.pool_indices)
    lease.grant, lease.claimed = units.granted(line.demand), line.claimed
    lease.at_ns, lease.since_boot_ns = line.at_ns, line.since_boot_ns
    lease.begun = True  # its dispatcher may have said so to an arbiter that is gone
    return lease
