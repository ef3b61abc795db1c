"""Requested and used resources of a run, and advice for the next request.

The advice is for the next job file: peak memory plus 20%, as many CPUs as were busy, and 1.5 times the run time, each
rounded up to a number that a person would write.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from spool.core.accounting import nearest_rank
from spool.core.gpuuse import energy_mj, mean_part, peak_memory_bytes, unused
from spool.core.layout import engine_of
from spool.core.model import SECOND_NS, Grant, Result, State
from spool.core.sizes import round_up, rounded_size
from spool.core.units import show_duration, show_size

_MINUTE_NS, _HOUR_NS = 60 * SECOND_NS, 3600 * SECOND_NS
_ENOUGH_NS = 10 * SECOND_NS  # a shorter run says little about its CPUs: most of it is startup and shutdown
_TIME_STEPS_NS = (
    (10 * _MINUTE_NS, _MINUTE_NS),
    (2 * _HOUR_NS, 5 * _MINUTE_NS),
    (12 * _HOUR_NS, 30 * _MINUTE_NS),
    (72 * _HOUR_NS, _HOUR_NS),
)
_LONGEST_STEP_NS = 6 * _HOUR_NS


class MeasuredRun(Struct, frozen=True):
    """One run: its record, with its use of resources so far if it goes on, and what its record does not say."""

    record: Result
    time_limit_ns: int | None = None
    run_time_ns: int | None = None  # so far, if it is still running
    started: bool = True
    measured_by: str = ""  # the title of the engine that ran it on another machine, and alone measures it

    @property
    def state(self) -> State:
        """Its outcome; its state, while it goes on."""
        return self.record.outcome

    @property
    def ended(self) -> bool:
        """Whether the usage is final."""
        return self.state.ended

    @property
    def grant(self) -> Grant:
        """What it was granted."""
        return self.record.grant

    @property
    def engine(self) -> str | None:
        """The engine that ran and measured it on another machine, if any."""
        return engine_of(self.record.executor)


class Advice(Struct, frozen=True):
    """What to request next time; None if the run does not tell. `notes` give the reasons and caveats."""

    cpus: int | None = None
    memory_bytes: int | None = None
    time_limit_ns: int | None = None
    gpu_memory_bytes: int | None = None  # per GPU, if the run requested GPU memory
    notes: tuple[str, ...] = ()


_AMOUNTS = ("cpus", "memory_bytes", "time_limit_ns", "gpu_memory_bytes")


class Efficiency(Struct, frozen=True):
    """Usage as a fraction of the grant: None if either is unknown or nothing was granted."""

    cpus_used: float | None  # CPUs that were busy on average
    cpu_efficiency: float | None  # above 1: it used more than its grant
    memory_efficiency: float | None
    time_limit_used: float | None
    gpu_hours: float | None
    gpu_efficiency: float | None  # share of the time in which its GPUs computed
    energy_mj: int | None  # of its GPUs, as far as it is known
    advice: Advice


class Spread(Struct, frozen=True):
    """The range of one figure over many tasks. All None if it is unknown for every task."""

    known: int
    median: int | None
    most: int | None


class Summary(Struct, frozen=True):
    """The tasks of an array together, by the newest run of each. The advice fits the neediest task."""

    tasks: int
    states: dict[str, int]
    cpus: Spread
    memory_bytes: Spread
    time_limit_ns: int | None
    run_time_ns: Spread
    cpu_time_ns: Spread
    peak_memory_bytes: Spread
    cpus_used: float | None
    cpu_efficiency: float | None
    gpu_hours: float
    gpu_efficiency: float | None
    energy_mj: int | None
    advice: Advice


def efficiency(run: MeasuredRun) -> Efficiency:
    """Compare the grant of *run* with its usage."""
    wall_ns, used, grant = run.run_time_ns, run.record, run.grant
    busy = None if used.cpu_time_ns is None or not wall_ns else used.cpu_time_ns / wall_ns
    return Efficiency(
        cpus_used=busy,
        cpu_efficiency=busy / grant.cpus if busy is not None and grant.cpus else None,
        memory_efficiency=_part(used.peak_memory_bytes, grant.memory_bytes),
        time_limit_used=_part(wall_ns, run.time_limit_ns),
        gpu_hours=None if wall_ns is None else grant.gpu_count * wall_ns / _HOUR_NS,
        gpu_efficiency=mean_part(used.gpu_use),
        energy_mj=energy_mj(used.gpu_use),
        advice=_advice(run, busy),
    )


def _part(used: int | None, given: int | None) -> float | None:
    return used / given if used is not None and given else None


def _advice(run: MeasuredRun, busy: float | None) -> Advice:
    if not run.ended:
        return Advice(notes=("it has not ended yet: try again afterwards",))
    if not run.started:
        return Advice(notes=("it never started",))
    if run.state not in (State.FINISHED, State.TIMEOUT, State.OUT_OF_MEMORY):
        return Advice(notes=(f"did not run to the end ({run.state}), so the needs are unknown",))
    by = f": only {run.measured_by} measures it" if run.measured_by else ""
    memory_bytes, on_memory = _memory(run, by)
    time_limit_ns, on_time = _time_limit(run)
    cpus, on_cpus = _cpus(run, busy, by)
    unknown = "its run time is unknown" if run.run_time_ns is None else ""
    shared = run.grant.gpu_memory_bytes is not None and run.state is State.FINISHED
    gpu_peak = peak_memory_bytes(run.record.gpu_use) if shared else None
    return Advice(
        cpus=cpus,
        memory_bytes=memory_bytes,
        time_limit_ns=time_limit_ns,
        gpu_memory_bytes=rounded_size(gpu_peak + gpu_peak // 5) if gpu_peak else None,
        notes=tuple(filter(None, (unknown, on_memory, on_time, on_cpus, _on_idle_gpus(run)))),
    )


def _memory(run: MeasuredRun, by: str) -> tuple[int | None, str]:
    """Return how much memory to ask for, and a note; *by* says who alone measures it."""
    peak, given = run.record.peak_memory_bytes, run.grant.memory_bytes
    if run.state is State.OUT_OF_MEMORY:
        least = max(peak or 0, given or 0)
        needs = f"needs more than {show_size(least)}" if least else "how much it needs is unknown"
        memory, note = _twice(peak, given, show_size)
        return memory, f"it ran out of memory, and {needs}: {note}"
    if peak is None:
        why = by or "; without `memory`, small peaks (tens of MiB) are not recorded"
        return None, f"its peak memory is unknown{why}"
    if run.state is State.TIMEOUT:
        return None, ""
    of_one = "the memory is that of the largest process only; set `memory` to measure all of them"
    return rounded_size(peak + peak // 5) if peak else None, "" if given is not None else of_one


def _time_limit(run: MeasuredRun) -> tuple[int | None, str]:
    ran_ns = run.run_time_ns or 0
    if run.state is State.OUT_OF_MEMORY:
        return None, ""
    if run.state is State.TIMEOUT:
        limit_ns, note = _twice(run.time_limit_ns or ran_ns, run.time_limit_ns, show_duration)  # a stop takes a moment
        return limit_ns, f"it ran out of time, and how much it needs is unknown: {note}"
    return rounded_time(ran_ns + ran_ns // 2) if ran_ns else None, ""


def _cpus(run: MeasuredRun, busy: float | None, by: str) -> tuple[int | None, str]:
    if run.record.cpu_time_ns is None:
        return None, f"its CPU time is unknown{by}"
    if busy is None or (run.run_time_ns or 0) < _ENOUGH_NS:
        return None, "ran too briefly to show how many CPUs are needed"
    return max(1, math.ceil(busy - 0.1)) if run.grant.cpus else None, ""


def _on_idle_gpus(run: MeasuredRun) -> str:
    count = run.grant.gpu_count
    if not (idle := unused(run.record.gpu_use)):
        return ""
    return f"{'its GPU' if count == 1 else f'{idle} of its {count} GPUs'} {'was' if idle == 1 else 'were'} never busy"


def _twice(used: int | None, given: int | None, show: Callable[[int], str]) -> tuple[int | None, str]:
    """Return twice the amount that was too little, and that in words: the same number in both.

    A stated limit is doubled exactly, because the result is a number that a person would write.
    """
    most = max(used or 0, given or 0)
    if not most:
        return None, "state more than it was given"
    if most == given:
        return 2 * most, f"try twice the {show(most)} that it was given"
    return rounded_size(2 * most), f"try about twice the {show(most)} that it used before that was noticed"


def rounded_time(duration_ns: int) -> int:
    """Return the next longer time that a person would write: "4m", "1h30m", "14h"."""
    return round_up(
        duration_ns, next((step for below, step in _TIME_STEPS_NS if duration_ns <= below), _LONGEST_STEP_NS)
    )


def summary(runs: Sequence[MeasuredRun], waiting: int = 0) -> Summary:
    """Summarise an array: the newest run of each task that has one; *waiting* tasks have none yet."""
    compared = [efficiency(run) for run in runs]
    ended = [run for run in runs if run.ended]
    final = [each.advice for run, each in zip(runs, compared, strict=True) if run.ended]
    states = Counter(run.state for run in runs) + Counter({State.QUEUED: waiting})
    uses = [use for run in runs for use in run.record.gpu_use]
    timed = [run for run in runs if run.record.cpu_time_ns is not None and run.run_time_ns]
    busy_ns, wall_ns = _sum(run.record.cpu_time_ns for run in timed), _sum(run.run_time_ns for run in timed)
    return Summary(
        tasks=len(runs) + waiting,
        states={state.value: states[state] for state in State if state in states},
        cpus=_spread(run.grant.cpus or None for run in runs),
        memory_bytes=_spread(run.grant.memory_bytes for run in runs),
        time_limit_ns=_spread(run.time_limit_ns for run in runs).most,
        run_time_ns=_spread(run.run_time_ns for run in ended),
        cpu_time_ns=_spread(run.record.cpu_time_ns for run in ended),
        peak_memory_bytes=_spread(run.record.peak_memory_bytes for run in ended),
        cpus_used=_part(busy_ns, wall_ns),
        cpu_efficiency=_part(busy_ns, _sum(run.grant.cpus * (run.run_time_ns or 0) for run in timed)),
        gpu_hours=sum(each.gpu_hours or 0.0 for each in compared),
        gpu_efficiency=mean_part(uses),
        energy_mj=energy_mj(uses),
        advice=_for_the_neediest(final, len(runs)),
    )


def _for_the_neediest(advice: Sequence[Advice], tasks: int) -> Advice:
    """Return the most that the *advice* for any of that many tasks says, and each note with the number of its tasks."""
    notes = Counter(note for each in advice for note in each.notes).most_common()
    most = {name: _spread(getattr(each, name) for each in advice).most for name in _AMOUNTS}
    return Advice(**most, notes=tuple(f"{count} of {tasks}: {note}" for note, count in notes))


def _spread(values: Iterable[int | None]) -> Spread:
    known = sorted(value for value in values if value is not None)
    return Spread(len(known), nearest_rank(known, 50), known[-1] if known else None)


def _sum(values: Iterable[int | None]) -> int:
    return sum(value or 0 for value in values)
