"""The runs that hold grants, with the sums that every pass needs.

The sums are updated with each run, so that the cost of a pass depends on the changes only. A property test compares
them with sums computed from scratch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from heapq import merge

from msgspec.structs import replace

from spool.core.model import Running, Spec
from spool.core.queue import Ordered
from spool.core.quotas import Counts, Lowest, count
from spool.core.runtimes import Expected, RunTimes


class Runs(Mapping[str, Running]):
    """The runs by the names of their jobs. `put` and `remove` update every sum; everything else only reads.

    `elsewhere` additionally holds the runs of each other machine.
    """

    def __init__(self, runs: Iterable[Running] = (), run_times: RunTimes | None = None) -> None:
        self.run_times = run_times or RunTimes()
        self.counts = Counts()
        self.group_limits = Lowest()
        self.array_limits = Lowest()
        self.with_gpus: dict[str, Running] = {}
        self.elsewhere: dict[str, Runs] = {}
        self._runs: dict[str, Running] = {}
        self._expected: dict[str, Expected] = {}  # as of the begin of the run, or of its recovery
        self._ends: dict[str, int] = {}
        self._in_order: Ordered[tuple[int, str]] = Ordered()
        self.preemptible: set[str] = set()  # the jobs whose runs may be preempted, now or later
        self._stopping: set[str] = set()
        self._suspended: set[str] = set()
        self.pending: dict[str, int] = {}  # on an engine: the jobs and arrays that wait for room, and their runs
        self.blocked = 0  # on an engine: the runs that wait for something else
        for run in runs:
            self.put(run)

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __contains__(self, name: object) -> bool:
        return name in self._runs

    def __getitem__(self, name: str) -> Running:
        return self._runs[name]

    def put(self, run: Running) -> None:
        """Add *run*, replacing another of its name."""
        name = run.name
        before = self._runs.get(name)
        if before == run:
            return
        expected = None
        if before is not None:
            if (before.run, before.started_at_ns, before.spec) == (run.run, run.started_at_ns, run.spec):
                expected = self._expected[name]
            self._discount(before)
        self._runs[name] = run
        self._count(run, expected or self.run_times.of_run(run))

    def remove(self, name: str) -> None:
        """Remove the run of that job; an unknown name is ignored."""
        run = self._runs.pop(name, None)
        if run is not None:
            self._discount(run)

    def copy(self) -> Runs:
        """Return an independent copy, with the expected run times."""
        other = Runs(run_times=self.run_times)
        for name, run in self._runs.items():
            other._runs[name] = run
            other._count(run, self._expected[name])
        return other

    @contextmanager
    def without(self, name: str) -> Iterator[None]:
        """Exclude the run of that job inside `with`."""
        everything, expected = self._runs, self._expected[name]
        run = everything[name]
        self._runs = {other: everything[other] for other in everything if other != name}
        self._discount(run)
        try:
            yield
        finally:
            self._runs = everything
            self._count(run, expected)

    def _count(self, run: Running, expected: Expected) -> None:
        name = run.name
        self._count_sums(run, 1)
        if run.elsewhere is not None:
            there = self.elsewhere.setdefault(run.elsewhere, Runs(run_times=self.run_times))
            there.put(replace(run, elsewhere=None))
        elif run.grant.gpu_uuids:
            self.with_gpus[name] = run
        self._expected[name] = expected
        end_ns = self._ends[name] = run.counts_from_ns + expected.ns
        self._in_order.add((end_ns, name))
        if run.spec.preemptible and run.elsewhere is None:
            self.preemptible.add(name)
        if run.stopping:
            self._stopping.add(name)
        elif run.suspended:
            self._suspended.add(name)

    def _count_sums(self, run: Running, sign: int) -> None:
        spec, task = run.spec, run.spec.task
        self.counts.add(run, sign)
        if spec.group is not None:
            self.group_limits.count(spec.group, spec.group_limit, sign)
        if task is not None:
            self.array_limits.count(task.array, task.max_running, sign)
        if run.blocked and run.submitted:
            self.blocked += sign
        elif run.submitted:
            count(self.pending, pending_unit(run.name, spec), sign)

    def _discount(self, run: Running) -> None:
        name = run.name
        self._count_sums(run, -1)
        if run.elsewhere is not None:
            self.elsewhere[run.elsewhere].remove(name)
        else:
            self.with_gpus.pop(name, None)
        del self._expected[name]
        self._in_order.discard((self._ends.pop(name), name))
        self._stopping.discard(name)
        self.preemptible.discard(name)
        self._suspended.discard(name)

    @property
    def suspended(self) -> Set[str]:
        """The jobs whose runs are suspended and not being stopped; for reading only."""
        return self._suspended

    def learn_from(self, run_times: RunTimes) -> None:
        """Estimate every run time anew, from now on by *run_times*."""
        self.run_times = run_times
        for there in self.elsewhere.values():
            there.learn_from(run_times)
        runs = list(self._runs.values())
        for run in runs:
            self.remove(run.name)
        for run in runs:
            self.put(run)

    def ends(self, now_ns: int) -> Iterator[tuple[int, str]]:
        """Yield when each run is expected to have ended, earliest first. The cost depends on how many are consumed.

        A run that is being stopped has ended once its grace is over, which counts from the order, or from the end of
        the command whose processes go on. Such an instant, and that of a limit, may have passed: the run is about to
        end. A guess that has passed is replaced by another, which depends only on the instant and the past. A suspended
        run keeps the time that was left then, as if it resumed now.
        """
        entries = self._in_order.entries
        elsewhere = {name: self._stopped_by_ns(name, now_ns) for name in self._stopping}
        elsewhere |= {name: self._if_continued_ns(name, now_ns) for name in self._suspended}
        for _, name in entries[: bisect_left(entries, (now_ns + 1,))]:
            if self._expected[name].is_guess and name not in elsewhere:
                elsewhere[name] = self._overrun_until_ns(name, now_ns)
        if not elsewhere:
            return iter(entries)
        moved = sorted((end_ns, name) for name, end_ns in elsewhere.items())
        return merge((each for each in entries if each[1] not in elsewhere), moved)

    def _stopped_by_ns(self, name: str, now_ns: int) -> int:
        run = self._runs[name]
        if run.stop_at_ns is not None:
            return min(run.stop_at_ns, now_ns) + run.spec.kill_grace_ns
        graced_ns = now_ns + run.spec.kill_grace_ns
        return graced_ns if self._expected[name].is_guess else min(self._ends[name], graced_ns)

    def _overrun_until_ns(self, name: str, now_ns: int) -> int:
        run = self._runs[name]
        return run.counts_from_ns + self.run_times.overrun(run, self._expected[name].ns, now_ns - run.counts_from_ns)

    def _if_continued_ns(self, name: str, now_ns: int) -> int:
        since_ns, end_ns = self._runs[name].suspension.since_ns or now_ns, self._ends[name]
        if end_ns <= since_ns and self._expected[name].is_guess:
            end_ns = self._overrun_until_ns(name, since_ns)
        return now_ns + max(0, end_ns - since_ns)


def pending_unit(name: str, spec: Spec) -> str:
    """Return what counts as one among the jobs that wait on an engine: a job, or a whole array."""
    return spec.task.array if spec.task is not None else name
