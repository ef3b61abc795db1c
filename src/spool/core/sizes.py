"""What a job's next run should request, by what runs have used: sizes that spool works out, and advice for job files.

`memory = "auto"` requests what similar runs have used: the 95th percentile of their last peaks and a margin, or a first
guess. Similar runs have the same user and name (without the numbers at its end) and request the same but for memory.
After a run that was killed for too little, its job requests more: `retry.memory_factor` times, or twice where spool has
worked out the size. All that is derived from the records of runs, so a new dispatcher requests the same.

The advice is for the next job file: peak memory plus 20%, as many CPUs as were busy, and 1.5 times the run time, each
rounded up to a number that a person would write.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from spool.core.gpuuse import energy_mj, mean_part, peak_memory_bytes, unused
from spool.core.layout import engine_of
from spool.core.model import SECOND_NS, Grant, Request, Result, Sized, Spec, State, Waiting
from spool.core.runtimes import TEACHES, stem
from spool.core.units import nearest_rank, show_duration, show_size

LEAST_BYTES = 256 << 20
"""The least that is worked out: a peak that short is easily missed."""

_MIB, _GIB = 1 << 20, 1 << 30
_STEPS = ((_GIB, 64 * _MIB), (4 * _GIB, 256 * _MIB), (16 * _GIB, 512 * _MIB), (64 * _GIB, _GIB), (math.inf, 4 * _GIB))
_LASTS = 30  # peaks remembered of each kind
_PERCENTILE = 95  # of up to 19 peaks that is the highest
_MARGIN = 5  # a fifth is added
_TWICE = 2.0  # after a run that was killed for too little of what spool had worked out
_KINDS = 5_000  # kinds remembered; beyond that, the kind whose last run is the oldest is forgotten


def rounded_size(size_bytes: int) -> int:
    """Return the next larger size that a person would write: "192M", "1.5G", "20G"."""
    return _round_up(size_bytes, _STEPS)


def _round_up(number: int, steps: Iterable[tuple[float, int]]) -> int:
    """Return the next multiple, at least one, of the first of *steps* whose bound is not below *number*."""
    step = next(step for most, step in steps if number <= most)
    return max(-(-number // step), 1) * step


def _with_margin(peak: int) -> int:
    return rounded_size(peak + peak // _MARGIN)


class Most(NamedTuple):
    """What a job can have at most; None: unknown, or it is for another machine."""

    memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None  # on each of the GPUs that it asks for


class _Peaks:
    """The last peaks of one kind, and the sizes that they make."""

    __slots__ = ("enough", "gpu_peaks", "gpu_size", "killed", "peaks", "size")

    def __init__(self) -> None:
        self.peaks: deque[int] = deque(maxlen=_LASTS)
        self.gpu_peaks: deque[int] = deque(maxlen=_LASTS)
        self.killed = 0  # the largest grant that was too little, until a run has shown how much is enough
        self.enough = 0  # … and what is requested until then
        self.size: int | None = None
        self.gpu_size: int | None = None

    def sizes(self) -> tuple[int | None, int | None]:
        high = (_high(peaks) if peaks else None for peaks in (self.peaks, self.gpu_peaks))
        size, gpu_size = (None if peak is None else max(LEAST_BYTES, _with_margin(peak)) for peak in high)
        return max(size or 0, self.enough) if self.killed else size, gpu_size


def _after_kill(granted: int, peak: int | None) -> int:
    """Return what to request after a run that was killed for too little of what spool worked out."""
    return max(int(granted * _TWICE), LEAST_BYTES, _with_margin(peak or 0))


def _high(peaks: deque[int]) -> int:
    return nearest_rank(sorted(peaks), _PERCENTILE) or 0


class Sizes:
    """The learnt sizes. The owner adds each ended run once, in order."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str, Request], _Peaks] = {}

    def add(self, user: str, result: Result) -> bool:
        """Add the peaks of a run; return whether jobs like it request another size now."""
        peak, granted = result.peak_memory_bytes, result.grant.memory_bytes
        killed = result.outcome is State.OUT_OF_MEMORY and granted is not None
        gpu_peak = peak_memory_bytes(result.gpu_use)
        if granted is None:
            peak = None  # without a limit only the largest process is measured
        if not killed and (result.outcome not in TEACHES or (peak is None and gpu_peak is None)):
            return False
        key = (user, stem(result.job), _but_memory(result.request))
        kind = self._kinds.pop(key, None) or _Peaks()
        self._kinds[key] = kind
        if len(self._kinds) > _KINDS:
            del self._kinds[next(iter(self._kinds))]
        if killed:
            kind.killed = max(kind.killed, granted or 0)
            kind.enough = max(kind.enough, _after_kill(granted or 0, peak))
        else:
            if peak is not None:
                kind.peaks.append(peak)
                if peak > kind.killed or len(kind.peaks) == _LASTS:  # engines may see the largest process only
                    kind.killed = kind.enough = 0
            if gpu_peak is not None:
                kind.gpu_peaks.append(gpu_peak)
        before = kind.size, kind.gpu_size
        kind.size, kind.gpu_size = kind.sizes()
        return before != (kind.size, kind.gpu_size)

    def of(self, user: str, name: str, request: Request) -> _Peaks | None:
        """Return what is known of runs like that job's."""
        return self._kinds.get((user, stem(name), _but_memory(request)))


@lru_cache(maxsize=1024)
def _but_memory(request: Request) -> Request:
    return replace(request, memory_bytes=None, gpu_memory_bytes=None, memory_auto=False, gpu_memory_auto=False)


def sized(job: Waiting, last: Result | None, sizes: Sizes | None, most: Most) -> Sized | None:
    """Return what the next run of *job* requests; None: what its file states.

    *last* is the newest result of its name.
    """
    stated = job.spec.request
    kind = None if sizes is None else sizes.of(job.user, job.name, stated)
    memory, words = _memory(job.spec, kind, _same(last, stated))
    if words and memory is not None and most.memory_bytes is not None and memory > most.memory_bytes:
        memory, words = most.memory_bytes, f"all that it can have: {words}"
    gpu_memory, gpu_words = stated.gpu_memory_bytes, ""
    if stated.gpu_memory_auto:
        gpu_memory, gpu_words = _gpu_memory(stated, kind, most)
    why = [f"memory {show_size(memory)}, {words}"] if words and memory is not None else []
    why += [f"GPU memory {gpu_words}"] if gpu_words else []
    if not why:
        return None
    return Sized(_with(stated, memory, gpu_memory), "; ".join(why), learnt=kind is not None and kind.size is not None)


@lru_cache(maxsize=1024)
def _with(stated: Request, memory: int | None, gpu_memory: int | None) -> Request:
    return replace(stated, memory_bytes=memory, gpu_memory_bytes=gpu_memory)


def _same(last: Result | None, stated: Request) -> Result | None:
    """Return *last* if its file stated the same memory; a size that was edited since counts at once."""
    if last is None or last.grant.memory_bytes is None or last.started_at_ns is None:
        return None
    then = last.request.memory_bytes, last.request.memory_auto
    return last if then == (stated.memory_bytes, stated.memory_auto) else None


def _memory(spec: Spec, kind: _Peaks | None, last: Result | None) -> tuple[int | None, str]:
    """Return the memory that a job requests and the reason; "" if that is what its file states."""
    stated = spec.request
    base, words = stated.memory_bytes, ""
    if stated.memory_auto:
        words = "a first guess: no run like it has ended yet"
        if kind is not None and kind.size is not None:
            after_kill = kind.killed and kind.size == kind.enough
            base, words = kind.size, "after a run like it that ran out of memory" if after_kill else _above(kind.peaks)
    factor = spec.retry.memory_factor
    granted = last.grant.memory_bytes if last is not None else None
    if last is None or granted is None or base is None or not (factor or stated.memory_auto):
        return base, words
    if last.outcome is State.OUT_OF_MEMORY:
        more = int(granted * factor) if factor else _after_kill(granted, last.peak_memory_bytes)
        if more >= base:
            return more, f"after the {show_size(granted)} with which run {last.run} ran out of memory"
    elif granted > base and (last.again is not None or not stated.memory_auto):
        return granted, f"as run {last.run}, after one that ran out of memory"
    return base, words


def _above(peaks: deque[int]) -> str:
    runs, peak = "the last run" if len(peaks) == 1 else f"the last {len(peaks)} runs", _high(peaks)
    margin = f"{100 // _MARGIN}% above" if peak + peak // _MARGIN > LEAST_BYTES else "the minimum, above"
    return f"{margin} the {show_size(peak)} that {runs} like it used at most" + (
        "" if len(peaks) * (100 - _PERCENTILE) < 100 else f", but for the highest {100 - _PERCENTILE}%"
    )


def _gpu_memory(stated: Request, kind: _Peaks | None, most: Most) -> tuple[int | None, str]:
    """Return the memory that a job requests on each GPU, None for whole GPUs, and the reason."""
    size, first = kind.gpu_size if kind is not None else None, stated.gpu_memory_bytes
    if kind is not None and size is not None:
        words = f"{show_size(size)}, {_above(kind.gpu_peaks)}"
    elif first is not None:
        size, words = first, f"{show_size(first)}, a first guess: no run like it has shown its use"
    else:
        return None, "of whole GPUs, a first guess: no run like it has shown its use"
    if most.gpu_memory_bytes is not None and size > most.gpu_memory_bytes:
        return None, f"of whole GPUs, for lack of larger ones: {words}"
    return size, words


def may_grow(spec: Spec, result: Result, most: Most) -> Spec:
    """Return *spec* so that a run which was killed for too little of what spool worked out is followed by a larger one.

    That is no fault of the job, so it needs no `retry`. After a run that had all the memory there is, `retry` decides,
    as it does for a job that is not requeued.
    """
    granted = result.grant.memory_bytes
    if not (spec.request.memory_auto and spec.requeue) or result.outcome is not State.OUT_OF_MEMORY or granted is None:
        return spec
    if most.memory_bytes is not None and granted >= most.memory_bytes:
        return spec
    retry = spec.retry
    return replace(
        spec, retry=replace(retry, on=retry.on | {State.OUT_OF_MEMORY.value}, max=max(retry.max, result.attempt))
    )


_MINUTE_NS, _HOUR_NS = 60 * SECOND_NS, 3600 * SECOND_NS
_ENOUGH_NS = 10 * SECOND_NS  # a shorter run says little about its CPUs: most of it is startup and shutdown
_TIME_STEPS_NS = (
    (10 * _MINUTE_NS, _MINUTE_NS),
    (2 * _HOUR_NS, 5 * _MINUTE_NS),
    (12 * _HOUR_NS, 30 * _MINUTE_NS),
    (72 * _HOUR_NS, _HOUR_NS),
    (math.inf, 6 * _HOUR_NS),
)


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
    memory_bytes, on_memory = _memory_advice(run, by)
    time_limit_ns, on_time = _time_limit(run)
    cpus, on_cpus = _cpus(run, busy, by)
    unknown = "its run time is unknown" if run.run_time_ns is None else ""
    shared = run.grant.gpu_memory_bytes is not None and run.state is State.FINISHED
    gpu_peak = peak_memory_bytes(run.record.gpu_use) if shared else None
    return Advice(
        cpus=cpus,
        memory_bytes=memory_bytes,
        time_limit_ns=time_limit_ns,
        gpu_memory_bytes=_with_margin(gpu_peak) if gpu_peak else None,
        notes=tuple(filter(None, (unknown, on_memory, on_time, on_cpus, _on_idle_gpus(run)))),
    )


def _memory_advice(run: MeasuredRun, by: str) -> tuple[int | None, str]:
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
    return _with_margin(peak) if peak else None, "" if given is not None else of_one


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
    return _round_up(duration_ns, _TIME_STEPS_NS)


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
