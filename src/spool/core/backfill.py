"""Nothing starves: when a job that does not fit could start, and what may start before it without delaying it.

EASY backfilling (Lifka 1995; Mu'alem and Feitelson 2001) with a threshold: one job at a time is protected, the first
in the order that does not fit, has waited for `starvation_after`, and is passed over. Then the others start only if
they have ended by the time it could start, or leave it all that it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from spool.core.estimates import expected_end_ns
from spool.core.gpus import NEW_RUN
from spool.core.model import Grant, Running, Waiting
from spool.core.reasons import Reason
from spool.core.resources import Room
from spool.core.units import show_duration
from spool.core.waits import opens_at_ns, waited_ns

FULL = frozenset({"memory", "cpus", "gpus", "reserved"})
"""The reasons of a job for which there is no room now: holding others back helps it, and nothing else."""

BUSY = FULL | {"group", "array", "quota"}
"""All reasons that go when runs end."""


def passed_over_ns(job: Waiting, now_ns: int) -> int:
    """Return for how long *job* could have been passed over: since it was queued, or since its instant has come."""
    waited = waited_ns(job, now_ns)
    opens = opens_at_ns(job)
    return waited if opens is None else min(waited, max(now_ns - opens, 0))


@dataclass(frozen=True, slots=True)
class Expectation:
    """When a job could start at the earliest if every limit holds, and which runs must have ended by then."""

    at_ns: int
    must_end: tuple[str, ...] = ()


def earliest(job: Waiting, room: Room) -> tuple[int, Room] | None:
    """Return when *job* could start if what runs ends as expected, and the room that there will be then.

    None if it could not start even after everything has ended (it never fits, or somebody outside spool is in the
    way). Other waiting jobs are not thought of.
    """
    now_ns = room.now_ns
    ends = sorted((expected_end_ns(run, now_ns), run.name) for run in room.runs.values())
    times = {end for end, _ in ends}
    opens = opens_at_ns(job)
    not_before = now_ns if opens is None else max(opens, now_ns)
    for each in room.reservations:
        times.update(at for at in (each.start_at_ns, each.end_at_ns) if at > now_ns)
    times.add(not_before)
    then = room.at(now_ns, room.runs.values())
    then.available_bytes = room.available_bytes
    next_end = 0
    waits_for_gpus = False  # then nothing but the end of a run with GPUs can change the answer
    for at_ns in sorted(times):
        while next_end < len(ends) and ends[next_end][0] <= at_ns:
            over = then.runs[ends[next_end][1]]
            then.release(over)
            then.available_bytes = None  # from the first end on, nobody knows what the kernel could give
            waits_for_gpus = waits_for_gpus and not over.grant.gpu_uuids
            next_end += 1
        then.now_ns = at_ns
        if at_ns >= not_before and not waits_for_gpus and not then.lacks(job.spec.request):
            reason = next(then.noes(job), None)
            if reason is None:
                return at_ns, then
            waits_for_gpus = reason.code == "gpus"
    return None


def expect(job: Waiting, room: Room) -> Expectation | None:
    """Return when *job* could start, and which of the runs that have ended by then it cannot start beside."""
    found = earliest(job, room)
    if found is None:
        return None
    at_ns, then = found
    must_end = []
    over = [run for name, run in room.runs.items() if name not in then.runs]
    for run in sorted(over, key=lambda run: expected_end_ns(run, room.now_ns), reverse=True):
        then.claim(run)
        if not then.fits(job):
            then.release(run)
            must_end.append(run.name)
    return Expectation(at_ns, tuple(reversed(must_end)))


class Halt:
    """The end of the walk under a strict order: nobody overtakes the job that does not fit."""

    def __init__(self, job: Waiting, now_ns: int) -> None:
        self.job = job
        self.at_ns = None
        self._now_ns = now_ns

    def grant(self, job: Waiting, room: Room) -> Grant | None:
        """Return None: nothing more starts."""

    def started(self, run: Running) -> None:
        """Be told of a start, which does not happen."""

    def why_not(self, job: Waiting, room: Room) -> Reason | None:
        """Return that *job* waits for its turn."""
        return None if job.name == self.job.name else _left_for(self.job, self._now_ns)


class Protection:
    """The room that is left for one job: the machine as it will be when that job can start."""

    def __init__(self, job: Waiting, at_ns: int, then: Room, now_ns: int) -> None:
        self.job = job
        self.at_ns = at_ns
        self._then = then
        self._now_ns = now_ns

    def grant(self, job: Waiting, room: Room) -> Grant | None:
        """Return a grant for *job*, which fits *room*, that does not delay the protected job; None if there is none."""
        in_time = self._ends_by_then(job)
        if not in_time and self._takes_the_room(job):
            return None
        grant = room.grant(job)
        if in_time or self._leaves_room(job, grant):
            return grant
        if not grant.gpu_uuids:
            return None
        # Other GPUs may do: first those that the protected job could not use anyway.
        wanted = frozenset(card.gpu.uuid for card in self._then.cards.open_to(self.job.spec.request))
        grant = room.grant(job, avoid=wanted)
        return grant if self._leaves_room(job, grant) else None

    def started(self, run: Running) -> None:
        """Count a run that starts now and will still be there then."""
        if not self._ends_by_then_run(run):
            self._then.claim(run)

    def why_not(self, job: Waiting, room: Room) -> Reason | None:
        """Return that *job*, which fits *room*, is held back for the protected one, or None if it is not."""
        if job.name == self.job.name or job.spec.priority > self.job.spec.priority:
            return None
        if self.grant(job, room) is not None:
            return None
        return _left_for(self.job, self._now_ns)

    def _ends_by_then(self, job: Waiting) -> bool:
        limit = job.spec.time_limit_ns
        return limit is not None and self._now_ns + limit <= self.at_ns

    def _ends_by_then_run(self, run: Running) -> bool:
        limit = run.spec.time_limit_ns
        return limit is not None and run.started_at_ns + limit <= self.at_ns

    def _takes_the_room(self, job: Waiting) -> bool:
        """Tell quickly whether the sums of processors and memory leave the protected job no room beside *job*."""
        then, own, other = self._then, self.job.spec.request, job.spec.request
        cpus, memory = own.cpus, own.memory_bytes
        return bool(
            (cpus and then.cpus + other.cpus + cpus > then.machine.cpus)
            or (memory and then.memory_bytes + (other.memory_bytes or 0) + memory > then.machine.memory_bytes)
        )

    def _leaves_room(self, job: Waiting, grant: Grant) -> bool:
        run = as_run(job, grant, self._now_ns)
        self._then.claim(run)
        try:
            return self._then.fits(self.job)
        finally:
            self._then.release(run)


def _left_for(job: Waiting, now_ns: int) -> Reason:
    return Reason("left", f"left for {job.name} (waiting {show_duration(waited_ns(job, now_ns))})")


def as_run(job: Waiting, grant: Grant, now_ns: int) -> Running:
    """Return the run that *job* becomes if it starts now with that grant."""
    return Running(job.name, NEW_RUN, job.user, job.spec, grant, now_ns, job.attempt)
