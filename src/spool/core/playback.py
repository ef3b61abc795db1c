"""A spool that goes on in imagined time: the same `decide`, and runs that end when the caller says.

The simulator feeds it the jobs of a trace; the forecast gives it the spool as it is. Nothing outside it changes: it
works on a queue, runs and a past of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from itertools import count

from msgspec.structs import replace

from spool.core.backfill import as_run
from spool.core.gpus import left_by
from spool.core.model import Policy, Running, State, Waiting
from spool.core.priority import Past
from spool.core.queue import WaitingQueue
from spool.core.runs import Runs
from spool.core.scheduler import Plan, View, decide


class Outcomes(Mapping[str, State]):
    """How jobs have ended: in imagination, or else as *known* says. Only `get` is asked for by the rules."""

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


class Playback:
    """A spool in imagined time. Turn by turn: `take_ended`, `decide`, `perform`, and on to `next_at_ns`."""

    def __init__(self, view: View, policy: Policy) -> None:
        """Go on from *view*, whose queue, runs and past belong to the playback from now on."""
        self.queue: WaitingQueue = view.queue
        self.running: Runs = view.running
        self.past: Past = view.past
        self.outcomes = Outcomes(view.ended)
        self.view = replace(view, ended=self.outcomes)
        self._policy = policy
        self._ends: list[tuple[int, str, int, Running]] = []
        self._number = count()

    @classmethod
    def of_copy(cls, view: View, policy: Policy) -> Playback:
        """Go on from a copy of *view*, which stays as it is."""
        queue = WaitingQueue(view.queue.values())
        return cls(replace(view, queue=queue, running=view.running.copy(), past=view.past.copy()), policy)

    def ends_at(self, run: Running, at_ns: int) -> None:
        """Let *run* end then. One that nothing is said about goes on for ever."""
        heappush(self._ends, (at_ns, run.name, next(self._number), run))

    def take_ended(self, now_ns: int) -> Iterator[tuple[int, Running]]:
        """Yield each run that has ended by then, and when; it has left its room. `conclude` says how it ended."""
        while self._ends and self._ends[0][0] <= now_ns:
            at_ns, _, _, run = heappop(self._ends)
            self.running.remove(run.name)
            self.past.end(run.user, run.spec.project, run.grant, at_ns)
            self._leave_machine(run)
            yield at_ns, run

    def conclude(self, name: str, outcome: State) -> None:
        """Let those that depend on a job know how it has ended."""
        self.outcomes.imagined[name] = outcome

    def decide(self, now_ns: int) -> Plan:
        """Return what to do then."""
        return decide(self.view, now_ns, self._policy)

    def perform(self, plan: Plan, now_ns: int) -> list[tuple[Waiting, Running]]:
        """End and start what *plan* says; return each job that starts, and its run, whose end `ends_at` is to say."""
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
        """Return when something happens next: *plan* was performed at *now_ns*. None: nothing ever does."""
        times = [now_ns] if plan.endings else []  # others may depend on what has just ended
        times += [max(self._ends[0][0], now_ns)] if self._ends else []
        times += [] if plan.next_at_ns is None else [plan.next_at_ns]
        return min(times, default=None)

    def _enter_machine(self, run: Running) -> None:
        """Count what the kernel still calls free, and has been granted."""
        machine = self.view.machine
        if machine.memory_available_bytes is not None and run.grant.memory_bytes and run.elsewhere is None:
            left = machine.memory_available_bytes - run.grant.memory_bytes
            self.view = replace(self.view, machine=replace(machine, memory_available_bytes=left))

    def _leave_machine(self, run: Running) -> None:
        """Forget what was measured while *run* was there: later it says nothing of what the kernel could give."""
        machine = self.view.machine
        if run.elsewhere is not None:
            return
        gpus = machine.gpus
        if run.grant.gpu_uuids and gpus:
            gpus = tuple(left_by(gpu, run) if gpu.uuid in run.grant.gpu_uuids else gpu for gpu in gpus)
        if gpus is not machine.gpus or machine.memory_available_bytes is not None:
            self.view = replace(self.view, machine=replace(machine, gpus=gpus, memory_available_bytes=None))
