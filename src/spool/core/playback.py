"""A spool in simulated time: the same `decide`, and runs that end when the caller says.

The simulator feeds it the jobs of a trace; the forecast gives it the spool as it is. It changes nothing outside: it
owns its queue, runs and past.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import count

from msgspec.structs import replace

from spool.core.backfill import as_run
from spool.core.gpus import left_by
from spool.core.model import Machine, Policy, Running, State, Waiting
from spool.core.priority import Past
from spool.core.queue import WaitingQueue
from spool.core.runs import Runs
from spool.core.scheduler import Plan, View, decide


class Outcomes(Mapping[str, State]):
    """The outcomes of jobs: simulated ones first, then those of *known*. The rules only call `get`."""

    def __init__(self, known: Mapping[str, State]) -> None:
        self._known = known
        self.imagined: dict[str, State] = {}

    def __getitem__(self, name: str) -> State:
        state = self.imagined.get(name)
        return self._known[name] if state is None else state

    def __iter__(self) -> Iterator[str]:
        return iter(self.imagined)

    def __len__(self) -> int:
        return len(self.imagined)


def machine_left_by(machine: Machine, run: Running) -> Machine:
    """Return *machine* as it will look without *run*: what the kernel could give then is unknown."""
    gpus = machine.gpus
    if run.elsewhere is not None:
        return machine
    if run.grant.gpu_uuids and gpus:
        gpus = tuple(left_by(gpu, run) if gpu.uuid in run.grant.gpu_uuids else gpu for gpu in gpus)
    if gpus is machine.gpus and machine.memory_available_bytes is None:
        return machine
    return replace(machine, gpus=gpus, memory_available_bytes=None)


class Playback:
    """A spool in simulated time. Turn by turn: `take_ended`, `decide`, `perform`, and on to `next_at_ns`."""

    def __init__(self, view: View, policy: Policy) -> None:
        """Continue from *view*, whose queue, runs and past belong to the playback from now on."""
        self.queue: WaitingQueue = view.queue
        self.running: Runs = view.running
        self.past: Past = view.past
        self.outcomes = Outcomes(view.ended)
        self.view = replace(view, ended=self.outcomes)
        self._policy = policy
        self._ends: list[tuple[int, str, int, Running]] = []
        self._number = count()
        self.past.asked_by(self._arrivals)

    def _arrivals(self) -> Iterator[int]:
        """Yield the arrivals of the jobs that other work can have passed."""
        yield from (job.arrived_at_ns for job in self.queue.values())
        yield from (run.arrived_at_ns for run in self.running.values() if run.arrived_at_ns is not None)

    @classmethod
    def of_copy(cls, view: View, policy: Policy) -> Playback:
        """Continue from a copy of *view*, which stays unchanged."""
        queue = WaitingQueue(view.queue.values())
        return cls(replace(view, queue=queue, running=view.running.copy(), past=view.past.copy()), policy)

    def ends_at(self, run: Running, at_ns: int) -> None:
        """Let *run* end at *at_ns*. A run without an end goes on for ever."""
        heappush(self._ends, (at_ns, run.name, next(self._number), run))

    def take_ended(self, now_ns: int) -> Iterator[tuple[int, Running]]:
        """Yield each run that has ended by then, and when; its room is free again. Report its outcome by `conclude`."""
        while self._ends and self._ends[0][0] <= now_ns:
            at_ns, _, _, run = heappop(self._ends)
            self.running.remove(run.name)
            self.past.end(run.user, run.spec.project, run.grant, at_ns)
            self._leave_machine(run)
            yield at_ns, run

    def preempt(self, run: Running, winner: str, now_ns: int) -> None:
        """End *run* without an outcome; its job waits again at its place, behind the job *winner*."""
        self._ends = [entry for entry in self._ends if entry[3].name != run.name]
        heapify(self._ends)
        self.running.remove(run.name)
        self.past.end(run.user, run.spec.project, run.grant, now_ns)
        self._leave_machine(run)
        arrived_at_ns = run.arrived_at_ns or run.started_at_ns
        again = Waiting(run.name, run.spec, run.user, arrived_at_ns, clock_at_ns=now_ns, sized=run.sized)
        self.queue.put(replace(again, yields_to=winner, preempted_at_ns=now_ns))

    def conclude(self, name: str, outcome: State) -> None:
        """Record the outcome of a job, for the jobs that depend on it."""
        self.outcomes.imagined[name] = outcome

    def decide(self, now_ns: int) -> Plan:
        """Return the plan for that instant."""
        return decide(self.view, now_ns, self._policy)

    def perform(self, plan: Plan, now_ns: int) -> list[tuple[Waiting, Running]]:
        """End and start jobs by *plan*; return each job that starts, and its run, whose end is set by `ends_at`."""
        self.view = replace(self.view, holding=plan.holding)
        for ending in plan.endings:
            self.queue.remove(ending.name)
            self.conclude(ending.name, ending.outcome)
        if plan.endings and self.view.held:
            ended = {ending.name for ending in plan.endings}
            held = {name: job for name, job in self.view.held.items() if name not in ended}
            self.view = replace(self.view, held=held)
        begun = []
        for start in plan.starts:
            job = self.queue[start.name]
            run = as_run(job, start.grant, now_ns)
            self.queue.remove(start.name)
            self.running.put(run)
            self.past.begin(run.user, run.spec.project, run.grant, now_ns)
            self._enter_machine(run)
            begun.append((job, run))
        return begun

    def next_at_ns(self, plan: Plan, now_ns: int) -> int | None:
        """Return when something happens next, after *plan* was performed at *now_ns*. None: nothing ever does."""
        times = [now_ns] if plan.endings else []  # other jobs may depend on what has just ended
        times += [max(self._ends[0][0], now_ns)] if self._ends else []
        times += [] if plan.next_at_ns is None else [plan.next_at_ns]
        return min(times, default=None)

    def _enter_machine(self, run: Running) -> None:
        """Subtract memory that was granted and that the kernel still calls free."""
        machine = self.view.machine
        if machine.memory_available_bytes is not None and run.grant.memory_bytes and run.elsewhere is None:
            left = machine.memory_available_bytes - run.grant.memory_bytes
            self.view = replace(self.view, machine=replace(machine, memory_available_bytes=left))

    def _leave_machine(self, run: Running) -> None:
        machine = machine_left_by(self.view.machine, run)
        if machine is not self.view.machine:
            self.view = replace(self.view, machine=machine)
