"""A shared machine in imagined time: what several spools lose because each plans as if the machine were its own.

Every user of a trace has a spool, whose plan comes from `decide` as it would alone on the machine. What it would start
is asked of a `LeaseLedger`, as dispatchers ask the arbiter, and starts once it is granted. The same jobs in one spool
are the measure.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import count

from msgspec.structs import replace

from spool.core.forecast import Playback
from spool.core.model import Machine, Policy, Result, Running, State, Waiting
from spool.core.priority import Past
from spool.core.resources import Runs
from spool.core.runtimes import stem
from spool.core.scheduler import Plan, Start, View
from spool.extras.machine.asking import AHEAD
from spool.extras.machine.ledger import Lease, LeaseLedger
from spool.extras.machine.protocol import MOST_ASKS, Holder, LeaseRequest
from spool.extras.simulate.simulation import Outcome, SimulatedJob, figures, simulate
from spool.extras.simulate.workload import of_file
from spoolbench.scenario import prepared


class ImaginedSpool:
    """The spool of one user, and what its dispatcher has asked for."""

    def __init__(self, uid: int, user: str, machine: Machine, policy: Policy, ahead: int) -> None:
        self._ahead = ahead
        self._line: list[Waiting] = []
        past = Past(policy)
        self.holder = Holder(uid, user, "spool")
        self.playback = Playback(View(machine, running=Runs(run_times=past.run_times), past=past), policy)
        self.asks: dict[int, LeaseRequest] = {}
        self.leases: dict[str, Lease] = {}  # of its runs
        self.plan: Plan | None = None
        self.is_due = False  # something has happened since the plan
        self._numbers = count(1)

    def renew(self, now_ns: int, ledger: LeaseLedger) -> None:
        """Plan, ask for what would start and for what is next in line, and withdraw the rest."""
        self.is_due = False
        plan = self.plan = self.playback.decide(now_ns)
        in_line = plan.in_line(max(self._ahead - len(plan.starts), 0))
        self._line = [self.playback.queue[start.name] for start in plan.starts] + list(in_line)
        need = Counter(map(request_of, self._line))
        for number, request in list(self.asks.items()):
            if need[request] > 0:
                need[request] -= 1
            else:
                del self.asks[number]
                if (lease := ledger.withdrawable(self.holder, number)) is not None:
                    ledger.end(lease, now_ns)
        for request, missing in need.items():
            for _ in range(min(missing, MOST_ASKS - len(self.asks))):
                number = next(self._numbers)
                self.asks[number] = request
                ledger.ask(self.holder, number, request, now_ns)

    def start(self, granted: Sequence[Lease], now_ns: int) -> list[Running]:
        """Start what the leases are for, the first in line first, and return the runs."""
        assert self.plan is not None
        free: dict[LeaseRequest, list[Lease]] = {}
        for lease in granted:
            free.setdefault(self.asks.pop(lease.ask), []).append(lease)
        starts = []
        for job in self._line:
            if leases := free.get(request_of(job)):
                lease = self.leases[job.name] = leases.pop(0)
                starts.append(Start(job.name, lease.grant))
        assert not any(free.values()), "a lease answers no job"
        begun = self.playback.perform(replace(self.plan, starts=tuple(starts)), now_ns)
        self.is_due = True
        return [run for _, run in begun]


class SharedMachine:
    """Spools that share a machine through a ledger. Iterate over `run` for the outcomes."""

    def __init__(self, coming: Iterable[SimulatedJob], machine: Machine, policy: Policy, *, ahead: int = AHEAD) -> None:
        self._coming = sorted(coming, key=lambda each: (each.submit_at_ns, each.name), reverse=True)
        self._jobs = {each.name: each for each in self._coming}
        self._machine = machine
        self._ledger = LeaseLedger(policy, (), 1)
        self._spools: dict[str, ImaginedSpool] = {}
        for uid, user in enumerate(sorted({each.user for each in self._coming}), 1000):
            self._spools[user] = ImaginedSpool(uid, user, machine, policy, ahead)

    def run(self) -> Iterator[Outcome]:
        """Simulate until nothing more can happen."""
        spools, ledger = self._spools, self._ledger
        now_ns: int | None = self._coming[-1].submit_at_ns
        while now_ns is not None:
            for spool in spools.values():
                yield from self._over(spool, now_ns)
            while self._coming and self._coming[-1].submit_at_ns <= now_ns:
                new = self._coming.pop()
                spool = spools[new.user]
                spool.playback.queue.put(
                    Waiting(new.name, new.spec, new.user, new.submit_at_ns, clock_at_ns=new.submit_at_ns)
                )
                spool.is_due = True
            next_at_ns = self._settle(now_ns)
            times = [self._coming[-1].submit_at_ns] if self._coming else []
            times += [next_at_ns] if next_at_ns is not None else []
            for spool in spools.values():
                if spool.plan is not None and (at := spool.playback.next_at_ns(spool.plan, now_ns)) is not None:
                    times.append(at)
            now_ns = min(times, default=None)
            for spool in spools.values():
                if now_ns is not None and spool.plan is not None and spool.plan.next_at_ns is not None:
                    spool.is_due |= spool.plan.next_at_ns <= now_ns
        assert not any(spool.playback.queue for spool in spools.values()), "a job never started"
        assert not ledger.leases, "a lease is left"

    def _settle(self, now_ns: int) -> int | None:
        """Let the spools plan and the ledger decide until nothing changes; return when the decision may change."""
        ledger = self._ledger
        while True:
            for spool in self._spools.values():
                if spool.is_due:
                    spool.renew(now_ns, ledger)
            starts = ledger.decide(self._machine, now_ns)
            if not starts:
                return ledger.next_at_ns
            granted: dict[str, list[Lease]] = {}
            for lease, grant in starts:
                lease.grant, lease.at_ns = grant, now_ns
                ledger.grant(lease)
                granted.setdefault(lease.holder.user, []).append(lease)
            for user, leases in granted.items():
                for run in self._spools[user].start(leases, now_ns):
                    self._spools[user].playback.ends_at(run, now_ns + self._lasts_ns(run.name))

    def _lasts_ns(self, name: str) -> int:
        job = self._jobs[name]
        limit_ns = job.spec.time_limit_ns
        return job.duration_ns if limit_ns is None else min(job.duration_ns, limit_ns)

    def _over(self, spool: ImaginedSpool, now_ns: int) -> Iterator[Outcome]:
        for at_ns, run in spool.playback.take_ended(now_ns):
            spool.is_due = True
            job = self._jobs[run.name]
            request, state = run.spec.request, State.FINISHED
            times = job.submit_at_ns, run.started_at_ns, at_ns
            spool.playback.past.learn(
                job.user, Result(run.name, 1, 1, state, "", *times, request=request, grant=run.grant)
            )
            spool.playback.conclude(run.name, state)
            self._ledger.end(spool.leases.pop(run.name), now_ns)
            yield Outcome(job, run.started_at_ns, at_ns, state, run.grant)


def request_of(job: Waiting) -> LeaseRequest:
    """Return what the dispatcher of *job* asks for."""
    request = job.spec.request
    return LeaseRequest(
        cpus=request.cpus,
        memory_bytes=request.memory_bytes or 0,
        gpus=request.gpus,
        gpu_memory_bytes=request.gpu_memory_bytes or 0,
        resources=request.resources,
        limit_ns=job.spec.time_limit_ns or 0,
        like=_like(job.name),
    )


@cache
def _like(name: str) -> str:
    return hashlib.sha256(stem(name).encode()).hexdigest()[:16]


def main(arguments: list[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/sharing",
        description="Simulate traces that name users twice: all jobs in one spool, and each user's in one of their "
        "own on a shared machine. Prints the mean bounded slowdowns and their ratio.",
    )
    parser.add_argument("traces", nargs="+", metavar="FILE", help="an SWF file that names its processors, also .gz")
    parser.add_argument("--jobs", type=int, default=8000, metavar="N", help="of each trace the first N")
    parser.add_argument("--ahead", type=int, default=AHEAD, metavar="N", help="how many jobs in line are asked for")
    options = parser.parse_args(arguments)
    for path in options.traces:
        workload = of_file(path)
        workload = replace(workload, coming=workload.coming[: options.jobs])
        machine = Machine(workload.cpus or 1, 1 << 60)
        for load in (None, 0.85):
            for limits in (1.0, 0.5, 0.0):
                coming, loaded = prepared(workload, machine, limits, load)
                runs = simulate(coming, machine, Policy())
                turns = SharedMachine(coming, machine, Policy(), ahead=options.ahead).run()
                one, many = (figures(list(each), machine.cpus).mean_bounded_slowdown or 1.0 for each in (runs, turns))
                users = len({each.user for each in coming})
                what = f"{path}: {len(coming)} jobs of {users} users, load {100 * (loaded or 0):.0f} %"
                print(f"{what}, limits {limits:g}: {one:.2f}, {many:.2f}, ratio {many / one:.3f}", flush=True)
    return 0
