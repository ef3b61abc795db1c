"""What if: the jobs of a trace or of our own history on an imagined machine, under one policy and another."""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from spool.core import layout
from spool.core.errors import InvalidFile, InvalidJob, Problem, SpoolError, cannot
from spool.core.measures import Curve, Figures, curve, figures, span
from spool.core.model import Gpu, Machine, Policy, Request, Result, Spec
from spool.core.resources import could_run
from spool.core.simulation import Coming, Discipline, Outcome, simulate
from spool.formats import ends, jobfile, swf
from spool.store.spool import Spool

_GZIP = b"\x1f\x8b"
_GIB = 1 << 30
_LEAST_GPU_BYTES = 80 * _GIB


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs to imagine. `cpus` is the machine that they ran on, where that is known."""

    source: str
    coming: tuple[Coming, ...]
    cpus: int | None = None
    incomplete: int = 0  # lines that say nothing which could be run again
    guessed_limits: int = 0  # jobs of our own history whose file is gone, and their limit with it


@dataclass(frozen=True, slots=True)
class Study:
    """One policy's schedule of a workload. `seconds` is what simulating it took."""

    policy: Discipline
    figures: Figures
    seconds: float
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Imagined:
    """The jobs that fit a machine, and how many do not and are left out."""

    workload: Workload
    machine: Machine
    coming: tuple[Coming, ...]
    never_fit: int


def of_trace(path: str) -> Workload:
    """Return the jobs of a file in the Standard Workload Format, compressed by gzip or not. Raises SpoolError."""
    try:
        with open(path, "rb") as file:
            data = file.read()
        if data.startswith(_GZIP):
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SpoolError(cannot("read", "the trace", why, where=path)) from None
    trace = swf.parse(data, f"the trace {path}")
    return Workload(path, trace.coming, trace.cpus, trace.incomplete)


def of_history(spool: Spool) -> Workload:
    """Return every run of the spool's own history that was started and ended, as a job of its own.

    It comes when it was submitted; a retry or a requeue when the run before had ended. What it asked for is in the
    history; its time limit and its priority are in its metadir, and where that is gone there is no limit.
    """
    coming: list[Coming] = []
    again: dict[str, int] = {}  # job -> when its next run could begin
    incomplete = guessed = 0
    for line in reversed(list(spool.history())):
        try:
            result = ends.parse_history_line(line)
        except SpoolError:
            incomplete += 1
            continue
        since = again.pop(result.job, None)
        if result.again is not None:
            later = result.again_at_ns if result.again_at_ns is not None else result.ended_at_ns
            again[result.job] = later or 0
        began, ended = result.started_at_ns, result.ended_at_ns
        if began is None or ended is None or ended < began:
            incomplete += 1
            continue
        submitted = min(since or result.submitted_at_ns or began, began)
        spec = _spec_of(spool, result)
        guessed += spec is None
        coming.append(_coming(result, spec, len(coming), submitted, ended - began))
    if not coming:
        why = "no run of it has both begun and ended"
        raise InvalidFile("the history", [Problem(None, None, why)])
    return Workload("the history", tuple(coming), None, incomplete, guessed)


def _spec_of(spool: Spool, result: Result) -> Spec | None:
    """Return what the run's own copy of the job file says, None if it is gone."""
    text = spool.record(result.job, result.run, layout.SPEC_COPY)
    try:
        return jobfile.parse(text, name=result.job) if text is not None else None
    except InvalidJob:
        return None


def _coming(result: Result, spec: Spec | None, place: int, submitted: int, duration: int) -> Coming:
    said = spec if spec is not None else Spec("true")
    return Coming(
        name=f"{place + 1:07}",
        spec=Spec(
            "true",
            request=replace(result.request, gpu_type=None),  # the imagined GPUs have no names
            time_limit_ns=said.time_limit_ns,
            priority=said.priority,
            group=result.group,
            group_limit=said.group_limit if result.group is not None else None,
            project=result.project,
        ),
        submit_at_ns=submitted,
        duration_ns=duration,
        user=result.user or "user",
    )


def gpus_like(number: int, coming: Iterable[Coming]) -> tuple[Gpu, ...]:
    """Return so many imagined GPUs, each with memory for whatever one of the jobs asks for."""
    asked = (each.spec.request.gpu_memory_bytes or 0 for each in coming)
    size = max(_LEAST_GPU_BYTES, max(asked, default=0))
    return tuple(Gpu(f"GPU-{index}", index, "imagined", size, size) for index in range(number))


def imagine(workload: Workload, machine: Machine, policy: Policy, *, count_memory: bool) -> Imagined:
    """Put a workload before a machine: jobs that could never run there are left out and counted."""
    fits: dict[Request, bool] = {}
    coming = []
    for each in workload.coming:
        request = each.spec.request
        if not count_memory and request.memory_bytes is not None:
            request = replace(request, memory_bytes=None)
            each = replace(each, spec=replace(each.spec, request=request))
        if request not in fits:
            fits[request] = could_run(request, machine, policy)
        if fits[request]:
            coming.append(each)
    return Imagined(workload, machine, tuple(coming), len(workload.coming) - len(coming))


def studies(imagined: Imagined, policy: Policy, disciplines: Iterable[Discipline]) -> Iterator[Study]:
    """Yield the schedule of each policy as it is ready."""
    machine = imagined.machine
    for discipline in disciplines:
        begun = time.perf_counter()
        outcomes = tuple(simulate(imagined.coming, machine, policy, discipline))
        seconds = time.perf_counter() - begun
        yield Study(discipline, figures(outcomes, machine.cpus, len(machine.gpus)), seconds, outcomes)


def curves(studied: Iterable[Study], machine: Machine, points: int) -> dict[Discipline, Curve]:
    """Return the curve of each schedule, all on one scale of time."""
    listed = list(studied)
    end = max((span(each.outcomes)[1] for each in listed), default=0)
    return {each.policy: curve(each.outcomes, machine.cpus, points, end) for each in listed}
