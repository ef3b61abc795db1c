"""The leases and the asks of all users, and what follows from them: who gets a lease now, and why the others wait.

For `core.scheduler.decide`, an ask is a waiting job, a lease is a run, and the user is that of the connection. No rule
is added to it: a fair share, a quota or a reservation counts here across the spools of all users.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from spool.core.backfill import Holding
from spool.core.model import (
    SECOND_NS,
    Grant,
    Machine,
    Policy,
    Pool,
    Reservation,
    Result,
    Running,
    Spec,
    State,
    Waiting,
)
from spool.core.pinning import cpus_in
from spool.core.priority import Past
from spool.core.queue import WaitingQueue
from spool.core.quotas import Quotas, QuotaUse
from spool.core.reasons import Reason
from spool.core.runs import Runs
from spool.core.scheduler import Plan, View, decide
from spool.core.units import show_size
from spool.extras.machine.protocol import MOST_ASKS, MOST_LEASES, Claim, LeaseRequest

K = TypeVar("K")
L = TypeVar("L")
V = TypeVar("V")

_OVERSTAY_NS = 60 * SECOND_NS  # beyond its limit and the grace of a job: its dispatcher does not enforce the limit
_OVERSTAY_PART = 10  # or a tenth of the limit, whichever is longer
_LEAST_USED = 1e-3  # GPU seconds; less is nothing to remember
_REGAINED_BY = 3  # leases in a row that kept their limits: the limits of their user count again

_HELD = re.compile(r" \([0-9]+ runs? holds? [^)]*\)$")
_NAME = re.compile(r"([^\s/]+)/[0-9a-f]*/[0-9]+")


class Holder(Struct, frozen=True):
    """A spool of a user: what asks and holds leases. *spool* is what its dispatcher calls it."""

    uid: int
    user: str
    spool: str


class OpenAsk(Struct, eq=False):
    """A start that waits for a lease."""

    holder: Holder
    number: int  # of its dispatcher
    serial: int
    demand: LeaseRequest
    at_ns: int  # when it came: its place in the queue
    told: str = ""  # the reason that its dispatcher has heard
    queued: bool = False  # else its user has too many

    @property
    def name(self) -> str:
        """Return its name for `decide`."""
        return _name(self.holder, self.demand, self.serial)

    def lease(self, grant: Grant, now_ns: int, since_boot_ns: int) -> Lease:
        """Return a lease that answers it."""
        return Lease(self.holder, self.serial, self.demand, grant, self.at_ns, now_ns, since_boot_ns, self.number)


class Lease(Struct, eq=False):
    """A part of the machine that a spool has for one run. *number* is unique over restarts."""

    holder: Holder
    number: int
    demand: LeaseRequest
    grant: Grant
    asked_at_ns: int
    at_ns: int
    since_boot_ns: int = 0  # `at_ns` on a clock that cannot be set
    ask: int = -1  # the number of the ask that it answers, -1 once that can no longer be withdrawn
    begun: bool = False  # it is in use: its dispatcher has said so, or may have
    pid: int = 0  # of the wrapper that uses it; 0: unknown
    ticks: int = 0
    claimed: bool = False  # its run began without it, so that how long it is held teaches nothing

    @property
    def name(self) -> str:
        """Return its name for `decide`."""
        return _name(self.holder, self.demand, self.number)


class UserLine(Struct, array_like=True, frozen=True, tag="user"):
    """The past of a user, for fair share and for guesses of run times."""

    user: str
    used: float  # up to `at_ns`, decayed, by the leases of then too; in GPU seconds, CPUs with their weight
    at_ns: int
    ran_ns: tuple[int, ...] = ()  # how long the last leases were held
    kept: int | None = None  # leases in a row that kept their limits, of a user whose limits do not count


class LeaseLedger:
    """Every lease and every ask. *first* is the lowest number for a lease."""

    def __init__(self, policy: Policy, reservations: tuple[Reservation, ...], first: int) -> None:
        self.policy = policy
        self.leases: dict[int, Lease] = {}
        self.version = 0  # changes with every lease and ask
        self._reservations = reservations
        self._of: dict[Holder, dict[int, Lease]] = {}
        self._answering: dict[tuple[Holder, int], Lease] = {}  # by the number of the ask
        self._asks: dict[Holder, dict[int, OpenAsk]] = {}
        self._by_name: dict[str, OpenAsk] = {}
        self._held: Counter[int] = Counter()  # leases by user
        self._queued: Counter[int] = Counter()  # asks in the queue by user
        self._later: dict[int, dict[str, OpenAsk]] = {}  # the other asks, by user
        self._queue = WaitingQueue()
        self._past = Past(policy, self._arrivals)
        self._runs = Runs(run_times=self._past.run_times)
        self._holding = Holding()
        self._serial = first
        self._unchecked: list[Lease] = []  # with GPUs that were claimed before it was known which there are
        self.squatters: dict[str, frozenset[str]] = {}  # users with processes on GPUs that they have no lease of
        self._recalled_ns = 0  # the past has the use of leases until then
        self._kept: dict[str, int] = {}  # of users whose limits do not count: leases in a row that kept theirs

    # Leases.

    def put(self, lease: Lease) -> None:
        """Add a lease."""
        self.leases[lease.number] = self._of.setdefault(lease.holder, {})[lease.number] = lease
        if lease.ask >= 0:
            self._answering[lease.holder, lease.ask] = lease
        self._held[lease.holder.uid] += 1
        self.number_after(lease.number)
        self._past.begin(lease.holder.user, None, lease.grant, max(lease.at_ns, self._recalled_ns))
        self._run(lease)
        if lease.claimed and lease.grant.gpu_uuids:
            self._unchecked.append(lease)
        self.version += 1

    def claim(self, holder: Holder, claim: Claim, machine: Machine, now_ns: int) -> Lease | None:
        """Count a run that began without a lease, as far as the machine and its user's quota go; None: not at all.

        So the room that it has is not granted again, and a claim that is a lie takes no more than leases could.
        """
        limits = Quotas(self.policy).limits("user", holder.user)
        use = self._runs.counts.users.get(holder.user, QuotaUse())
        if _part(1, use.jobs, limits.max_running_jobs) < 1 or self._held[holder.uid] >= MOST_LEASES:
            return None
        uuids = tuple(dict.fromkeys(claim.gpu_uuids))
        uuids = uuids[: _part(len(uuids), use.gpus, limits.max_running_gpus)]
        resources, indices = _pools_of(claim, machine.resources)
        demand = replace(
            claim.demand,
            cpus=_part(claim.demand.cpus, use.cpus, machine.cpus, limits.max_running_cpus),
            memory_bytes=_part(
                claim.demand.memory_bytes, use.memory_bytes, machine.memory_bytes, limits.max_running_memory_bytes
            ),
            gpus=len(uuids),
            resources=resources,
        )
        grant = Grant(
            cpus=demand.cpus,
            memory_bytes=demand.memory_bytes or None,
            gpu_uuids=uuids,
            gpu_memory_bytes=(demand.gpu_memory_bytes or None) if uuids else None,
            resources=resources,
            resource_indices=indices,
            cpu_list=claim.cpu_list if len(cpus_in(claim.cpu_list)) == demand.cpus else "",
        )
        lease = Lease(holder, self._serial, demand, grant, now_ns, now_ns, begun=True, claimed=True)
        lease.pid, lease.ticks = claim.pid, claim.ticks
        self.put(lease)
        return lease

    def _check_claims(self, machine: Machine, now_ns: int) -> None:
        """Forget the GPUs of claims that the machine does not have, once it is known which it has."""
        if machine.gpu_problem is not None:
            return
        known = {gpu.uuid for gpu in machine.gpus}
        for lease in self._unchecked:
            uuids = tuple(uuid for uuid in lease.grant.gpu_uuids if uuid in known)
            if uuids != lease.grant.gpu_uuids and lease.number in self.leases:
                self._past.end(lease.holder.user, None, lease.grant, now_ns)
                lease.demand = replace(lease.demand, gpus=len(uuids))
                lease.grant = replace(lease.grant, gpu_uuids=uuids)
                self._past.begin(lease.holder.user, None, lease.grant, now_ns)
                self._run(lease)
        self._unchecked.clear()

    @property
    def next_number(self) -> int:
        """The lowest number that no lease has had."""
        return self._serial

    def number_after(self, number: int) -> None:
        """Give no lease a number up to *number* any more."""
        self._serial = max(self._serial, number + 1)

    def end(self, number: int, now_ns: int) -> Lease | None:
        """Remove a lease and learn from it; None if there is none."""
        lease = self.leases.pop(number, None)
        if lease is None:
            return None
        holder = lease.holder
        _discard(self._of, holder, number)
        if self._answering.get((holder, lease.ask)) is lease:
            del self._answering[holder, lease.ask]
        self._held[holder.uid] -= 1
        self._runs.remove(lease.name)
        self._past.end(holder.user, None, lease.grant, now_ns)
        self._learn(lease, now_ns)
        self._admit(holder.uid)
        self.version += 1
        return lease

    def remember(self, lease: Lease, until_ns: int) -> None:
        """Count a lease that was over before this arbiter began."""
        self._past.begin(lease.holder.user, None, lease.grant, lease.at_ns)
        self._past.end(lease.holder.user, None, lease.grant, max(until_ns, lease.at_ns))
        self._learn(lease, until_ns)

    def recall(self, line: UserLine, now_ns: int) -> None:
        """Count the past of a user that another arbiter has left, before its leases are put."""
        at_ns = min(line.at_ns, now_ns)  # the clock may have been set back
        self._recalled_ns = max(self._recalled_ns, at_ns)
        self._past.shares.recall(line.user, line.used, at_ns)
        for ran_ns in line.ran_ns:
            self._past.run_times.recall(line.user, ran_ns)
        if line.kept is not None:
            self._kept[line.user] = line.kept

    def past(self, now_ns: int) -> list[UserLine]:
        """Return the past of each user, which does not depend on what the others do."""
        used, lasts = self._past.shares.used(now_ns), self._past.run_times.lasts_of
        users = {user for user, amount in used.items() if amount >= _LEAST_USED} | self._kept.keys()
        return [
            UserLine(user, used.get(user, 0.0), now_ns, lasts(user), self._kept.get(user)) for user in sorted(users)
        ]

    def _learn(self, lease: Lease, until_ns: int) -> None:
        """Use how long a lease was held, for guesses, and for those that it has passed by."""
        if lease.claimed:
            return
        times = lease.asked_at_ns, lease.at_ns, max(lease.at_ns, until_ns)
        request, outcome = lease.demand.request(), State.FINISHED
        self._past.learn(
            lease.holder.user, Result(lease.name, 1, 1, outcome, "", *times, request=request, grant=lease.grant)
        )
        user, limit_ns = lease.holder.user, lease.demand.limit_ns
        if limit_ns and until_ns - lease.at_ns > _longest_ns(limit_ns):
            self._distrust(user)
        elif limit_ns and user in self._kept:
            self._kept[user] += 1
            if self._kept[user] >= _REGAINED_BY:
                del self._kept[user]
                self._judge_again(user)

    def distrust_overstayers(self, now_ns: int) -> None:
        """Let the limits of a user no longer count if a lease of that user is held beyond its own."""
        for lease in self.leases.values():
            limit_ns = lease.demand.limit_ns
            if limit_ns and now_ns - lease.at_ns > _longest_ns(limit_ns):
                self._distrust(lease.holder.user)

    def of(self, holder: Holder) -> list[Lease]:
        """Return the leases of a spool."""
        return list(self._of.get(holder, {}).values())

    def answering(self, holder: Holder, number: int) -> Lease | None:
        """Return the lease that was granted for an ask, None if there is none."""
        return self._answering.get((holder, number))

    def _distrust(self, user: str) -> None:
        known = self._kept.get(user)
        self._kept[user] = 0
        if known is None:
            self._judge_again(user)

    def _arrivals(self) -> list[int]:
        """Return when all that waits or is held was asked for."""
        asked = [lease.asked_at_ns for lease in self.leases.values()]
        return asked + [ask.at_ns for ask in self._by_name.values()]

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

    # Asks.

    @property
    def asks(self) -> Iterator[OpenAsk]:
        """The open asks, in the order in which they came."""
        return iter(self._by_name.values())

    @property
    def asks_for_gpus(self) -> bool:
        """Whether an open ask wants GPUs."""
        return bool(self._queue.gpu_requests)

    def is_open(self, ask: OpenAsk) -> bool:
        """Whether an ask still waits."""
        return ask.name in self._by_name

    def asks_of(self, holder: Holder) -> int:
        """Return how many asks of a spool are open."""
        return len(self._asks.get(holder, ()))

    def ask(self, holder: Holder, number: int, demand: LeaseRequest, now_ns: int) -> OpenAsk | None:
        """Add an ask and return it; one with a number that is open already is ignored."""
        if number in self._asks.get(holder, ()):
            return None
        ask = OpenAsk(holder, number, self._serial, demand, now_ns)
        self._serial += 1
        self._asks.setdefault(holder, {})[number] = self._by_name[ask.name] = ask
        self._later.setdefault(holder.uid, {})[ask.name] = ask
        self._admit(holder.uid)
        self.version += 1
        return ask

    def drop(self, holder: Holder, number: int) -> bool:
        """Withdraw an ask; return whether it was open."""
        ask = self._asks.get(holder, {}).get(number)
        if ask is None:
            return False
        _discard(self._asks, holder, number)
        del self._by_name[ask.name]
        if ask.queued:
            self._queued[holder.uid] -= 1
            self._queue.remove(ask.name)
            self._admit(holder.uid)
        else:
            _discard(self._later, holder.uid, ask.name)
        self.version += 1
        return True

    def drop_all(self, holder: Holder) -> None:
        """Withdraw every ask of a spool."""
        for number in list(self._asks.get(holder, ())):
            self.drop(holder, number)

    def _admit(self, uid: int) -> None:
        """Let asks of a user take part in decisions, as many as one user may have there."""
        while (
            self._later.get(uid) and self._queued[uid] < MOST_ASKS and self._queued[uid] + self._held[uid] < MOST_LEASES
        ):
            ask = next(iter(self._later[uid].values()))
            _discard(self._later, uid, ask.name)
            ask.queued = True
            self._queued[uid] += 1
            user = ask.holder.user
            self._queue.put(Waiting(ask.name, self._spec(user, ask.demand), user, ask.at_ns, clock_at_ns=ask.at_ns))
        for counts in (self._queued, self._held):
            if not counts[uid]:
                del counts[uid]

    # Decisions.

    def decide(self, machine: Machine, now_ns: int) -> Decision:
        """Return who gets a lease of *machine* now; `grant` carries that out."""
        if self._unchecked:
            self._check_claims(machine, now_ns)
        view = View(
            machine, self._queue, running=self._runs, reservations=self._reservations, past=self._past,
            holding=self._holding,
        )  # fmt: skip
        plan = decide(view, now_ns, self.policy)
        self._holding = plan.holding
        return Decision(plan, self._by_name, self.leases)

    def grant(self, ask: OpenAsk, lease: Lease) -> None:
        """Replace an ask by the lease that answers it."""
        self.put(lease)
        self.drop(ask.holder, ask.number)

    def _run(self, lease: Lease) -> None:
        spec = self._spec(lease.holder.user, lease.demand)
        self._runs.put(
            Running(lease.name, 1, lease.holder.user, spec, lease.grant, lease.at_ns, arrived_at_ns=lease.asked_at_ns)
        )

    def _spec(self, user: str, demand: LeaseRequest) -> Spec:
        limit_ns = demand.limit_ns if demand.limit_ns and user not in self._kept else None
        return Spec("", request=demand.request(), time_limit_ns=limit_ns)

    def _judge_again(self, user: str) -> None:
        """Give every ask and lease of a user the expected time that follows now from its limit."""
        for lease in self.leases.values():
            if lease.holder.user == user:
                self._run(lease)
        for ask in self._by_name.values():
            if ask.queued and ask.holder.user == user:
                self._queue.put(replace(self._queue[ask.name], spec=self._spec(user, ask.demand)))
        self.version += 1


class Decision:
    """The plan for the whole machine, in words that name no lease."""

    def __init__(self, plan: Plan, asks: Mapping[str, OpenAsk], leases: Mapping[int, Lease]) -> None:
        self.starts = [(asks[start.name], start.grant) for start in plan.starts]
        self.next_at_ns = plan.next_at_ns
        self._plan = plan
        self._leases = leases
        self._holders: dict[str, str] = {}  # by the code of a reason

    def why(self, ask: OpenAsk) -> str:
        """Return why an ask waits; "" if nothing prevents it."""
        if not ask.queued:
            return f"{ask.holder.user} has asked for much already: other starts come first"
        reason = self._plan.reason(ask.name)
        return "" if reason is None else self._words(reason)

    def _words(self, reason: Reason) -> str:
        text = reason.text
        if reason.code in ("cpus", "memory"):
            holders = self._holders.get(reason.code)
            if holders is None:
                holders = self._holders[reason.code] = holders_of(self._leases.values(), reason.code)
            text = _HELD.sub(f" ({holders})" if holders else "", text)
        return _NAME.sub(r"\1", text).replace("outside spool", "without a lease")


def holders_of(leases: Iterable[Lease], code: str) -> str:
    """Return which users hold the CPUs or the memory, in words: "2 leases of bob hold 2, 1 of carol holds 1"."""
    counts: dict[str, int] = {}
    sums: dict[str, int] = {}
    for lease in leases:
        amount = lease.grant.cpus if code == "cpus" else lease.grant.memory_bytes or 0
        if amount:
            counts[lease.holder.user] = counts.get(lease.holder.user, 0) + 1
            sums[lease.holder.user] = sums.get(lease.holder.user, 0) + amount
    words: list[str] = []
    for user, held in sorted(sums.items(), key=lambda each: (-each[1], each[0])):
        many = counts[user] > 1
        what = "" if words else " leases" if many else " lease"
        size = str(held) if code == "cpus" else show_size(held)
        words.append(f"{counts[user]}{what} of {user} {'hold' if many else 'holds'} {size}")
    return ", ".join(words)


def _part(wanted: int, used: int, *limits: int | None) -> int:
    """Return how much of *wanted* the limits leave beside what is *used*."""
    return max(min([wanted, *(limit - used for limit in limits if limit is not None)]), 0)


def _pools_of(
    claim: Claim, pools: Iterable[Pool]
) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, tuple[int, ...]], ...]]:
    """Return which of the machine's named resources a claim has, and their indices."""
    counts, indices = [], []
    wanted, named = dict(claim.demand.resources), dict(claim.pool_indices)
    for pool in pools:
        count = min(wanted.get(pool.name, 0), pool.total)
        if pool.indices:
            units = tuple(sorted(set(named.get(pool.name, ())) & set(pool.indices)))[:count]
            count = len(units)
            indices += [(pool.name, units)] if units else []
        counts += [(pool.name, count)] if count else []
    return tuple(counts), tuple(indices)


def _name(holder: Holder, demand: LeaseRequest, number: int) -> str:
    """Return a name that is similar, as run times are, to those of the user's leases for similar jobs."""
    return f"{holder.user}/{demand.like}/{number}"


def _discard(of: dict[K, dict[L, V]], key: K, name: L) -> None:
    """Remove an entry of an entry, and that with its last one."""
    del of[key][name]
    if not of[key]:
        del of[key]


def _longest_ns(limit_ns: int) -> int:
    return limit_ns + max(_OVERSTAY_NS, limit_ns // _OVERSTAY_PART)
