"""Jobs of known memory, replayed under fixed requests and under `memory = "auto"`.

The jobs are generated, because the public traces do not have the memory that was used, or those of a spool's history.
The planner and the sizes are spool's own; only the machine and the time are imagined. A run that is granted less than
its peak is killed when it gets there, and runs again with more.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from spool.core.errors import SpoolError
from spool.core.forecast import Playback
from spool.core.model import SECOND_NS, Grant, Machine, Policy, Request, Result, Retry, Running, Spec, State, Waiting
from spool.core.priority import Past
from spool.core.resources import Runs
from spool.core.runtimes import stem
from spool.core.scheduler import View
from spool.core.sizes import Most, Sizes, sized
from spool.formats.run_records import parse_history_line

CPUS, MEMORY_BYTES = 64, 256 << 30
KINDS, JOBS = 60, 5_000
GIB = 1 << 30
LOAD = 0.9  # of what is scarcer, if each job had exactly the memory that it uses

# How the peaks of one kind of job vary, and the share of the kinds that vary so.
SHAPES: dict[str, tuple[float, Callable[[Random, int], float]]] = {
    "the same": (0.40, lambda random, number: random.gauss(1, 0.01)),
    "nearly": (0.30, lambda random, number: random.gauss(1, 0.06)),
    "by its input": (0.15, lambda random, number: random.lognormvariate(0, 0.4)),
    "two sizes": (0.08, lambda random, number: 2.5 if random.random() < 0.15 else 1.0),
    "growing": (0.07, lambda random, number: (1 + number * 0.004) * random.gauss(1, 0.03)),
}


class Job(Struct, frozen=True):
    """A job, what it will use, and when a run that may not have it is killed, as a part of its run time."""

    name: str
    submit_at_ns: int
    duration_ns: int
    cpus: int
    peak_bytes: int
    killed_at: float


class Totals(Struct):
    """What became of all jobs. Memory is in bytes times nanoseconds."""

    runs: int = 0
    killed: int = 0
    granted: int = 0
    used: int = 0  # by runs that were not killed
    lost_ns: int = 0  # run time of killed runs
    waited_ns: int = 0  # from the submission to the end, less the run time that was needed
    needed_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0


def generated(seed: int, count: int = JOBS) -> list[Job]:
    """Return jobs of KINDS kinds: a few kinds have most jobs, medians are from 50 MiB to 48 GiB."""
    random = Random(seed)
    kinds = []
    for number in range(KINDS):
        median = min(max(random.lognormvariate(0.5, 1.2), 0.05), 48) * GIB
        shape = random.choices(list(SHAPES), [share for share, _ in SHAPES.values()])[0]
        runs_s, cpus = random.lognormvariate(6.5, 1), random.choice((1, 1, 1, 2, 4, 8))
        kinds.append((f"kind{chr(97 + number // 26)}{chr(97 + number % 26)}", median, SHAPES[shape][1], runs_s, cpus))
    found, seen = list[Job](), [0] * KINDS
    for _ in range(count):
        kind = min(int(random.paretovariate(0.7)) - 1, KINDS - 1)
        name, median, vary, runs_s, cpus = kinds[kind]
        seen[kind] += 1
        peak = min(max(int(median * vary(random, seen[kind])), 20 << 20), MEMORY_BYTES // 2)
        duration_ns = int(runs_s * random.lognormvariate(0, 0.5) * SECOND_NS)
        found.append(Job(f"{name}_{seen[kind]}", 0, duration_ns, cpus, peak, random.uniform(0.05, 1)))
    work = max(
        sum(job.cpus * job.duration_ns for job in found) / CPUS,
        sum(job.peak_bytes * job.duration_ns for job in found) / MEMORY_BYTES,
    )
    times = sorted(random.uniform(0, work / LOAD) for _ in found)
    return [replace(job, submit_at_ns=int(at_ns)) for job, at_ns in zip(found, times, strict=True)]


def of_history(path: str) -> list[Job]:
    """Return the finished runs of a spool's `history.jsonl` whose peaks are known."""
    found, random = [], Random(1)
    for line in Path(path).read_bytes().splitlines():
        try:
            run = parse_history_line(line)
        except SpoolError:
            continue
        began, ended, at_ns = run.started_at_ns, run.ended_at_ns, run.submitted_at_ns
        if run.outcome is State.FINISHED and run.peak_memory_bytes and began and ended and at_ns:
            name = f"{run.job}_{run.run}"
            cpus = min(max(run.grant.cpus, 1), CPUS)
            peak = min(run.peak_memory_bytes, MEMORY_BYTES)
            found.append(Job(name, at_ns, max(ended - began, 1), cpus, peak, random.uniform(0.05, 1)))
    return found


Asks = Callable[[Job], Spec]
"""What the file of a job says."""


def policies(jobs: Sequence[Job]) -> Iterator[tuple[str, Asks]]:
    """Yield ways to request memory."""
    first: dict[str, int] = {}
    most: dict[str, int] = {}
    for job in jobs:
        first.setdefault(stem(job.name), job.peak_bytes)
        most[stem(job.name)] = max(most.get(stem(job.name), 0), job.peak_bytes)
    factor = Retry(max=20, on=frozenset({"out_of_memory"}), memory_factor=2.0)
    yield "16G for each job", lambda job: _fixed(job, 16 * GIB, factor)
    yield "4G for each job", lambda job: _fixed(job, 4 * GIB, factor)
    yield "twice what the first of its kind used", lambda job: _fixed(job, 2 * first[stem(job.name)], factor)
    yield "what the first of its kind used, and 20%", lambda job: _fixed(job, first[stem(job.name)] * 6 // 5, factor)
    yield "the most that its kind will ever use", lambda job: _fixed(job, most[stem(job.name)], factor)
    yield (
        '`memory = "auto"`',
        lambda job: Spec(
            "true", request=Request(job.cpus, 4 * GIB, memory_auto=True), retry=replace(factor, memory_factor=None)
        ),
    )


def _fixed(job: Job, size: int, retry: Retry) -> Spec:
    return Spec("true", request=Request(job.cpus, min(size, MEMORY_BYTES)), retry=retry)


class Replay:
    """One schedule."""

    def __init__(self, jobs: Iterable[Job], asks: Asks) -> None:
        self._coming = sorted(jobs, key=lambda job: job.submit_at_ns, reverse=True)
        self._jobs = {job.name: job for job in self._coming}
        self._asks = asks
        policy = Policy(fair_share=False)
        past = Past(policy)
        past.sizes = Sizes()
        view = View(Machine(CPUS, MEMORY_BYTES), running=Runs(run_times=past.run_times), past=past)
        self._spool = Playback(view, policy)
        self._last: dict[str, Result] = {}
        self.totals = Totals(first_ns=self._coming[-1].submit_at_ns)

    def run(self) -> Totals:
        """Return what became of the jobs."""
        spool, now_ns = self._spool, self.totals.first_ns
        while True:
            for at_ns, run in spool.take_ended(now_ns):
                self._ended(run, at_ns)
            while self._coming and self._coming[-1].submit_at_ns <= now_ns:
                self._put(self._coming.pop())
            plan = spool.decide(now_ns)
            for job, run in spool.perform(plan, now_ns):
                what = self._jobs[job.name]
                enough = (run.grant.memory_bytes or 0) >= what.peak_bytes
                spool.ends_at(run, now_ns + int(what.duration_ns * (1 if enough else what.killed_at)))
            times = [self._coming[-1].submit_at_ns] if self._coming else []
            if (next_ns := spool.next_at_ns(plan, now_ns)) is not None:
                times.append(next_ns)
            if not times:
                assert not spool.queue
                return self.totals
            now_ns = min(times)

    def _put(self, job: Job) -> None:
        spec = self._asks(job)
        waiting = Waiting(job.name, spec, "user", job.submit_at_ns, clock_at_ns=job.submit_at_ns)
        size = sized(waiting, self._last.get(job.name), self._spool.past.sizes, Most(MEMORY_BYTES))
        self._spool.queue.put(replace(waiting, sized=size))

    def _ended(self, run: Running, at_ns: int) -> None:
        job, totals, granted = self._jobs[run.name], self.totals, run.grant.memory_bytes or 0
        killed, ran_ns = granted < job.peak_bytes, at_ns - run.started_at_ns
        totals.runs += 1
        totals.granted += granted * ran_ns
        result = Result(
            run.name,
            1,
            1,
            State.OUT_OF_MEMORY if killed else State.FINISHED,
            "",
            job.submit_at_ns,
            run.started_at_ns,
            at_ns,
            peak_memory_bytes=min(granted, job.peak_bytes),
            request=run.spec.request,
            grant=Grant(job.cpus, granted),
            again="retry" if killed else None,
        )
        if self._spool.past.learn("user", result):
            for name in [name for name in self._spool.queue if stem(name) == stem(run.name)]:
                self._put(self._jobs[name])
        if killed:
            totals.killed += 1
            totals.lost_ns += ran_ns
            self._last[run.name] = result
            self._put(job)
            return
        self._spool.conclude(run.name, State.FINISHED)
        totals.used += job.peak_bytes * ran_ns
        totals.needed_ns += ran_ns
        totals.waited_ns += at_ns - job.submit_at_ns - job.duration_ns
        totals.last_ns = max(totals.last_ns, at_ns)


def row(name: str, totals: Totals, jobs: int) -> str:
    """Return a row of the table."""
    cells = (
        name,
        f"{100 * totals.killed / totals.runs:.1f} %",
        f"{100 * (1 - totals.used / totals.granted):.0f} %",
        f"{100 * totals.lost_ns / (totals.needed_ns + totals.lost_ns):.1f} %",
        f"{(totals.last_ns - totals.first_ns) / 3600e9:.1f} h",
        f"{totals.waited_ns / jobs / 60e9:.1f} min",
    )
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks/memory", description=__doc__)
    parser.add_argument("history", nargs="?", help="a history.jsonl whose runs have peaks; else jobs are generated")
    parser.add_argument("--seed", type=int, default=1, help="of the generated jobs")
    parser.add_argument("--jobs", type=int, default=JOBS, help="how many are generated")
    given = parser.parse_args(argv)
    jobs = generated(given.seed, given.jobs) if given.history is None else of_history(given.history)
    if not jobs:
        parser.error(f"{given.history} has no finished run with a known peak")
    print("| request | runs killed | memory wasted | run time lost | makespan | mean wait |\n|---|---|---|---|---|---|")
    for name, asks in policies(jobs):
        print(row(name, Replay(jobs, asks).run(), len(jobs)), flush=True)
    return 0
