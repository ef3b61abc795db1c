"""The memory that a job's next run requests, where its file leaves that to spool or the last run had too little.

`memory = "auto"` requests what similar runs have used: the 95th percentile of their last peaks and a margin, or a first
guess. Similar runs have the same user and name (without the numbers at its end) and request the same but for memory.
After a run that was killed for too little, its job requests more: `retry.memory_factor` times, or twice where spool has
worked out the size. All that is derived from the records of runs, so a new dispatcher requests the same.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace

from spool.core.gpuuse import peak_memory_bytes
from spool.core.model import Request, Result, Sized, Spec, State, Waiting
from spool.core.runtimes import TEACHES, stem
from spool.core.units import show_size

LEAST_BYTES = 256 << 20
"""The least that is worked out: a peak that short is easily missed."""

_MIB, _GIB = 1 << 20, 1 << 30
_STEPS = ((_GIB, 64 * _MIB), (4 * _GIB, 256 * _MIB), (16 * _GIB, 512 * _MIB), (64 * _GIB, _GIB))
_LARGEST_STEP = 4 * _GIB
_LASTS = 30  # peaks remembered of each kind
_PERCENTILE = 95  # of up to 19 peaks that is the highest
_MARGIN = 5  # a fifth is added
_TWICE = 2.0  # after a run that was killed for too little of what spool had worked out
_KINDS = 5_000  # kinds remembered; beyond that, the kind whose last run is the oldest is forgotten


def rounded_size(size_bytes: int) -> int:
    """Return the next larger size that a person would write: "192M", "1.5G", "20G"."""
    return round_up(size_bytes, next((step for below, step in _STEPS if size_bytes <= below), _LARGEST_STEP))


def round_up(number: int, step: int) -> int:
    """Return the next multiple of *step*, at least one."""
    return max(-(-number // step), 1) * step


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
        size, gpu_size = (_and_margin(_high(peaks)) if peaks else None for peaks in (self.peaks, self.gpu_peaks))
        return max(size or 0, self.enough) if self.killed else size, gpu_size


def _and_margin(peak: int) -> int:
    return max(LEAST_BYTES, rounded_size(peak + peak // _MARGIN))


def _after_kill(granted: int, peak: int | None) -> int:
    """Return what to request after a run that was killed for too little of what spool worked out."""
    return max(int(granted * _TWICE), _and_margin(peak or 0))


def _high(peaks: deque[int]) -> int:
    """Return the percentile, by nearest rank."""
    return sorted(peaks)[-(-len(peaks) * _PERCENTILE // 100) - 1]


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
            base, words = kind.size, _basis(kind)
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


def _basis(kind: _Peaks) -> str:
    if kind.killed and kind.size == kind.enough:
        return "after a run like it that ran out of memory"
    return _above(kind.peaks)


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
