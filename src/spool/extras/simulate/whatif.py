"""Simulation of a trace or the spool's own history on an imaginary machine, under several policies."""

from __future__ import annotations

import errno
import gzip
import io
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from spool.client.submit import is_spool
from spool.core.errors import InvalidFile, InvalidValue, SpoolError, UsageError, cannot
from spool.core.model import Gpu, Machine, Policy, Problem, Request, Result, Spec
from spool.core.reasons import count_of
from spool.core.resources import could_run
from spool.core.units import parse_size, show_size
from spool.extras.simulate.simulation import (
    Curve,
    Figures,
    Outcome,
    SimulatedJob,
    SimulatedPolicy,
    WaitSummary,
    curve,
    figures,
    grouped,
    longest_waits,
    simulate,
    span,
)
from spool.extras.simulate.traces import UNKNOWN_USER, UniqueNames, Workload, parse
from spool.formats.config import Config
from spool.formats.run_records import parse_history_line
from spool.machine.host import Host
from spool.store.reading import read_whole
from spool.store.spool import Spool

_GZIP = b"\x1f\x8b"
_MOST_BYTES = 512 << 20
_GIB = 1 << 30
NO_LIMIT_BYTES = 1 << 60
_LEAST_GPU_BYTES = 80 * _GIB
_NAMELESS = "imagined"
_GPUS = re.compile(r"([0-9]{1,5})(?:x([^:]+)(?::(.+))?)?")
_UNSAID = Spec("true")
_SEED = 0  # so that the same users state a limit in every run
_TELL_EVERY = 100  # jobs between two calls of `told`
_LONGEST_WAITS = 5


class Scenario(Struct, frozen=True):
    """Changes of a workload before its simulation.

    `limits` is the share of users who state a time limit; `load` the work of the jobs as a share of the machine.
    """

    count_memory: bool = False
    limits: float = 1.0
    load: float | None = None  # None: unchanged
    preemptible: float = 0.0  # the share of the jobs that may be preempted


class PolicyResult(Struct, frozen=True):
    """One policy's schedule of a workload. `seconds` is the duration of the simulation.

    Users are in the order of their share of the machine, sizes from small to large, and jobs by their waits.
    """

    policy: SimulatedPolicy
    figures: Figures
    sizes: Mapping[str, WaitSummary]
    users: Mapping[str, WaitSummary]
    preemptible: Mapping[str, WaitSummary]  # those jobs, and the others; empty without any
    longest_waits: tuple[Outcome, ...]
    seconds: float
    outcomes: tuple[Outcome, ...]


class SimulationSetup(Struct, frozen=True):
    """The jobs that fit a machine, and the number of those left out because they do not.

    A load is the work of the jobs, processors times run time, as a share of the machine's capacity from the first
    submission to the last; that of GPUs if it is larger. None if all jobs arrive at once.
    """

    workload: Workload
    machine: Machine
    coming: tuple[SimulatedJob, ...]
    never_fit: int
    load: float | None
    load_of_source: float | None

    @property
    def limits_stated(self) -> int:
        """The number of jobs with a time limit."""
        return sum(each.spec.time_limit_ns is not None for each in self.coming)

    @property
    def first_at_ns(self) -> int:
        """When the first job is submitted."""
        return min(each.submit_at_ns for each in self.coming)


def of_file(path: str) -> Workload:
    """Return the jobs of a trace (SWF or CSV) or of a spool's history, gzipped or not. Raises SpoolError.

    The first line determines the kind of file. The limits of a history are in the metadirs beside it.
    """
    try:
        data = read_whole(path, _MOST_BYTES)
        if data.startswith(_GZIP):
            with gzip.open(io.BytesIO(data)) as packed:
                data = packed.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {_MOST_BYTES >> 20} MiB unpacked", path)
    except (OSError, EOFError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SpoolError(cannot("read", "the trace", why, where=path)) from None
    if data.lstrip().startswith(b"{"):
        root = os.path.dirname(os.path.abspath(path))
        lines = [line for line in data.split(b"\n") if line.strip()]
        return _of_history(path, lines, Spool(root) if is_spool(root) else None)
    return parse(data.decode("utf-8", "replace").removeprefix("\ufeff"), path)


def of_history(spool: Spool) -> Workload:
    """Return every run of the spool's own history that started and ended, as a job of its own."""
    return _of_history("the history", reversed(list(spool.history())), spool)


def _of_history(source: str, lines: Iterable[bytes], spool: Spool | None) -> Workload:
    """Return the runs in those lines, oldest first.

    A run arrives at its submission; a retry or a requeue at the end of the previous run. The request is in the history;
    time limit and priority are in the metadir, without which there is no limit.
    """
    coming: list[SimulatedJob] = []
    again: dict[str, int] = {}  # job -> the earliest begin of its next run
    specs: dict[Spec, Spec] = {}
    names = UniqueNames()
    incomplete = guessed = 0
    for line in lines:
        try:
            result = parse_history_line(line)
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
        said = spool.spec(result.job, result.run) if spool is not None else None
        guessed += said is None
        spec = _wanted(result, said if said is not None else _UNSAID)
        spec = specs.setdefault(spec, spec)
        coming.append(SimulatedJob(names.of(result.job), spec, submitted, ended - began, result.user or UNKNOWN_USER))
    if not coming:
        why = "no run in it has both started and ended"
        raise InvalidFile(source if source == "the history" else f"the history {source}", [Problem(None, None, why)])
    return Workload(source, tuple(coming), incomplete=incomplete, guessed_limits=guessed, is_history=True)


def _wanted(result: Result, said: Spec) -> Spec:
    """Return the spec of a run, from its history and what its job file *said*; sizes that spool chose, as granted."""
    request, grant = result.request, result.grant
    if request.memory_auto:
        request = replace(request, memory_bytes=grant.memory_bytes, memory_auto=False)
    if request.gpu_memory_auto:
        request = replace(request, gpu_memory_bytes=grant.gpu_memory_bytes, gpu_memory_auto=False)
    return Spec(
        "true",
        request=request,
        time_limit_ns=said.time_limit_ns,
        priority=said.priority,
        group=result.group,
        group_limit=said.group_limit if result.group is not None else None,
        project=result.project,
    )


def imagined_gpus(text: str, coming: Iterable[SimulatedJob]) -> tuple[Gpu, ...]:
    """Return the GPUs that *text* names, "8" or "4x4090:24G,2xH100:80G". Raises InvalidValue.

    Without a size, each has enough memory for any of the jobs.
    """
    requests = [each.spec.request for each in coming]
    asked = (max(request.gpu_memory_bytes or 0, request.gpu_min_memory_bytes or 0) for request in requests)
    enough = max(_LEAST_GPU_BYTES, max(asked, default=0))
    gpus: list[Gpu] = []
    for part in text.split(","):
        found = _GPUS.fullmatch(part.strip())
        if found is None:
            raise InvalidValue(f"{part.strip()!r} is neither a number nor a number of one type, as in 4x4090:24G")
        number, name, memory = found.groups()
        size = enough if memory is None else parse_size(memory)
        indices = range(len(gpus), len(gpus) + int(number))
        gpus += [Gpu(f"GPU-{index}", index, name or _NAMELESS, size, size) for index in indices]
    return tuple(gpus)


def imagined_machine(
    workload: Workload, cpus: int | None, memory_bytes: int | None, gpus: tuple[Gpu, ...] = ()
) -> Machine:
    """Return a machine of that size; None means this machine's for our own history, else the trace's.

    Raises UsageError if the trace does not have the processors of its machine.
    """
    if workload.is_history:
        host = Host()
        memory = memory_bytes if memory_bytes is not None else Config().memory_of(host.memory().total_bytes)
        return Machine(cpus or host.cpus(), memory, gpus=gpus)
    found = cpus or workload.cpus
    if found is None and not workload.counts_cpus and all(each.spec.request.gpus for each in workload.coming):
        found = len(gpus) or None  # one for each GPU, so that no job waits for a processor
    if found is None:
        give = "--cpus" if workload.counts_cpus else "--cpus, or --gpus if every job asks for some"
        raise UsageError(f"cannot simulate: the trace does not say how many processors its machine has; specify {give}")
    return Machine(found, memory_bytes if memory_bytes is not None else NO_LIMIT_BYTES, gpus=gpus)


def prepare(workload: Workload, machine: Machine, policy: Policy, scenario: Scenario) -> SimulationSetup:
    """Fit a workload to a machine: jobs that could never run there are left out and counted. Raises UsageError."""
    coming = workload.coming
    if not scenario.count_memory:
        coming = _respecified(coming, lambda spec: replace(spec, request=replace(spec.request, memory_bytes=None)))
    if all(gpu.name == _NAMELESS for gpu in machine.gpus):
        coming = _respecified(coming, lambda spec: replace(spec, request=replace(spec.request, gpu_types=())))
    shapes = {id(each.spec): each.spec.request for each in coming}
    fits = {shape: could_run(request, machine, policy) for shape, request in shapes.items()}
    fitting = [each for each in coming if fits[id(each.spec)]]
    load = load_of_source = load_of(fitting, machine)
    if scenario.load is not None and fitting:
        if not load:
            raise UsageError(
                "cannot simulate: --scale-load needs jobs that arrive at different times and run for some time"
            )
        first, factor = min(each.submit_at_ns for each in fitting), load / scenario.load
        stretched = (first + round((each.submit_at_ns - first) * factor) for each in fitting)
        fitting = [replace(each, submit_at_ns=at_ns) for each, at_ns in zip(fitting, stretched, strict=True)]
        load = load_of(fitting, machine)
    kept = allowing_preemption(stating_limits(fitting, scenario.limits), scenario.preemptible)
    return SimulationSetup(workload, machine, kept, len(workload.coming) - len(kept), load, load_of_source)


def _respecified(coming: Iterable[SimulatedJob], change: Callable[[Spec], Spec]) -> tuple[SimulatedJob, ...]:
    """Return the jobs with their specs changed; equal specs are shared."""
    known: dict[int, Spec] = {}  # by id, because hashing a spec takes longer than reading a job
    equal: dict[Spec, Spec] = {}
    changed = []
    for each in coming:
        spec = known.get(id(each.spec))
        if spec is None:
            spec = change(each.spec)
            spec = equal.setdefault(spec, each.spec if spec == each.spec else spec)
            known[id(each.spec)] = spec
        if spec is not each.spec:
            each = replace(each, spec=spec)
        changed.append(each)
    return tuple(changed)


def load_of(coming: Sequence[SimulatedJob], machine: Machine) -> float | None:
    """Return the load of jobs on a machine: of its processors, or of its GPUs if that is larger."""
    submitted = [each.submit_at_ns for each in coming]
    span_ns = max(submitted, default=0) - min(submitted, default=0)
    if not span_ns:
        return None
    work = sum(each.spec.request.cpus * each.duration_ns for each in coming)
    load = work / (machine.cpus * span_ns)
    if not machine.gpus:
        return load
    gpu_work = sum(each.spec.request.gpus * each.duration_ns for each in coming)
    return max(load, gpu_work / (len(machine.gpus) * span_ns))


def stating_limits(coming: Sequence[SimulatedJob], share: float) -> tuple[SimulatedJob, ...]:
    """Return the jobs with time limits for only that share of the users: always the same users.

    If all jobs are one user's, or a job's user is unknown, each job is drawn separately.
    """
    if share >= 1:
        return tuple(coming)
    draw = Random(_SEED)  # noqa: S311  (nobody's secret)
    users = sorted({each.user for each in coming} - {UNKNOWN_USER})
    if len(users) == 1:
        users = []
    draw.shuffle(users)
    stating = {user: at < int(share * len(users) + 0.5) for at, user in enumerate(users)}
    silent = _respecified(coming, lambda spec: replace(spec, time_limit_ns=None))
    return tuple(
        each if (stating[each.user] if each.user in stating else draw.random() < share) else without
        for each, without in zip(coming, silent, strict=True)
    )


def allowing_preemption(coming: Sequence[SimulatedJob], share: float) -> tuple[SimulatedJob, ...]:
    """Return the jobs, that share of them preemptible: always the same ones."""
    draw = Random(_SEED)  # noqa: S311  (nobody's secret)
    allowing = _respecified(coming, lambda spec: replace(spec, preemptible=True)) if share else coming
    return tuple(other if draw.random() < share else each for each, other in zip(coming, allowing, strict=True))


def simulate_policy(
    setup: SimulationSetup,
    policy: Policy,
    discipline: SimulatedPolicy,
    told: Callable[[int, int], None] | None = None,
) -> PolicyResult:
    """Return the schedule of one policy. *told* is called now and then with the number of finished jobs."""
    begun = time.perf_counter()
    outcomes: list[Outcome] = []
    for outcome in simulate(setup.coming, setup.machine, policy, discipline):
        outcomes.append(outcome)
        if told is not None and len(outcomes) % _TELL_EVERY == 0:
            told(len(outcomes), len(setup.coming))
    seconds = time.perf_counter() - begun
    cpus, gpus = setup.machine.cpus, len(setup.machine.gpus)
    sizes = grouped(outcomes, lambda each: _size(each.job.spec.request), cpus, gpus)
    users = grouped(outcomes, lambda each: each.job.user, cpus, gpus)
    kinds = grouped(outcomes, lambda each: "preemptible" if each.job.spec.preemptible else "others", cpus, gpus)

    def part(user: str) -> float:
        return max(users[user].utilisation or 0.0, users[user].gpu_utilisation or 0.0)

    return PolicyResult(
        discipline,
        figures(outcomes, cpus, gpus),
        sizes={_size_in_words(*size): found for size, found in sorted(sizes.items())},
        users={user: users[user] for user in sorted(users, key=lambda user: (-part(user), user))},
        preemptible=dict(sorted(kinds.items())) if len(kinds) > 1 else {},
        longest_waits=tuple(longest_waits(outcomes, _LONGEST_WAITS)),
        seconds=seconds,
        outcomes=tuple(outcomes),
    )


def _size(request: Request) -> tuple[bool, int, str]:
    """Return the size class of a request: whether it is by GPUs, its largest request, and the kind of GPU."""
    if not request.gpus:
        return False, 1 << -(-(max(request.cpus, 1) - 1).bit_length() // 2) * 2, ""
    least = request.gpu_min_memory_bytes
    kind = (" or ".join(request.gpu_types), "" if least is None else f"of {show_size(least)}")
    return True, 1 << (request.gpus - 1).bit_length(), " ".join(filter(None, kind))


def _size_in_words(of_gpus: bool, most: int, gpu_kind: str) -> str:
    least = most // (2 if of_gpus else 4) + 1
    unit = "GPU" if of_gpus else "CPU"
    number = f"{least}-{most} {unit}s" if least < most else count_of(most, unit)
    return f"{number}, {gpu_kind}" if gpu_kind else number


def curves(studied: Sequence[PolicyResult], machine: Machine, points: int) -> dict[SimulatedPolicy, Curve]:
    """Return the curve of each schedule, all on one time scale."""
    end = max((span(each.outcomes)[1] for each in studied), default=0)
    gpus = len(machine.gpus)
    return {each.policy: curve(each.outcomes, machine.cpus, points, end, gpus) for each in studied}
