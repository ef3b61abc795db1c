"""What is simulated: the jobs of a trace, or of this spool's own history, and the machine to run them on.

A trace is in the Standard Workload Format (Chapin et al. 1999, "Benchmarks and Standards for the Evaluation of Parallel
Job Schedulers"; version 2.2), or a CSV, which has GPUs too. docs/SCHEDULING.md, clause 11, describes both.
"""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from spool.core.errors import InvalidFile, InvalidValue, SpoolError, UsageError, cannot
from spool.core.model import SECOND_NS, Gpu, Machine, Policy, Problem, Request, Result, Spec
from spool.core.resources import could_run
from spool.core.units import parse_size
from spool.extras.simulate.simulation import SimulatedJob
from spool.formats.config import Config
from spool.formats.run_records import parse_history_line
from spool.machine.host import Host
from spool.store.reading import read_whole
from spool.store.spool import Spool

_KIB, _GIB = 1 << 10, 1 << 30
_MOST_BYTES = 512 << 20
NO_LIMIT_BYTES = 1 << 60
"""The memory of a machine whose memory does not count."""
_LEAST_GPU_BYTES = 80 * _GIB
_NAMELESS = "imagined"
_GPUS = re.compile(r"([0-9]{1,5})(?:x([^:]+)(?::(.+))?)?")
_LARGEST = 1 << 50  # number in a trace; products of two of them in ns or bytes stay reasonable
_MOST_PROBLEMS = 5  # this many wrong lines show that the file is not a trace
UNKNOWN_USER = "user"
"""The user of a job whose user is unknown."""

# The columns that are used of a line in the Standard Workload Format, from 0.
_SUBMIT, _RUN_TIME, _PROCESSORS, _MEMORY = 1, 3, 4, 6
_WANTED_PROCESSORS, _WANTED_TIME, _WANTED_MEMORY, _STATUS, _USER = 7, 8, 9, 10, 11
_COLUMNS = 18
_PARTIAL = frozenset({2, 3, 4})  # part of a job that also has a line of status 0 or 1
_PROCESSORS_LINE = re.compile(r"\s*;\s*(MaxProcs|MaxNodes)\s*:\s*([0-9]{1,12})")

_NUMBERS = ("submit", "run_time", "cpus", "gpus", "gpu_min_memory", "memory", "time_limit")
_CSV = (*_NUMBERS, "gpu_type", "user", "name")
"""The columns of a CSV."""
Row = TypeVar("Row")


class Workload(Struct, frozen=True):
    """Jobs to simulate, in the order of their source, and the processors of their machine, if known.

    `incomplete` counts what cannot be simulated: jobs without a run time or processors, because they were cancelled
    while they waited, and partial executions of a job that has a line of its own.
    """

    source: str
    coming: tuple[SimulatedJob, ...]
    cpus: int | None = None
    incomplete: int = 0
    warnings: tuple[str, ...] = ()
    is_history: bool = False


def of_file(path: str) -> Workload:
    """Return the jobs of a trace; a file named .gz is unpacked. Raises SpoolError."""
    try:
        data = read_whole(path, _MOST_BYTES)
        if path.endswith(".gz"):
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SpoolError(cannot("read", "the trace", why, where=path)) from None
    return parse(data.decode("utf-8", "replace").removeprefix("\ufeff"), path)


def parse(text: str, path: str) -> Workload:
    """Return the jobs of the trace *text*: a CSV if its first line names the column `submit`.

    Raises InvalidFile, with the lines that are wrong.
    """
    names = [name.strip().lower() for name in text.partition("\n")[0].split(",")]
    if "submit" not in names:
        return _of_numbers(text, path)
    if "run_time" not in names:
        raise InvalidFile(f"the trace {path}", [Problem(None, 1, "line 1: has no column run_time")])
    strange = ", ".join(name for name in names if name not in _CSV)
    warnings = (f"columns that mean nothing here are ignored: {strange}",) if strange else ()
    coming, incomplete = _jobs(path, _csv_lines(text, names, path), _of_row)
    return Workload(path, coming, None, incomplete, warnings)


def _csv_lines(text: str, names: Sequence[str], path: str) -> Iterator[tuple[int, Mapping[Any, Any]]]:
    rows = csv.DictReader(text.splitlines(), names)
    try:
        next(rows)
        for row in rows:
            yield rows.line_num, row
    except csv.Error as error:
        line = rows.reader.line_num
        raise InvalidFile(f"the trace {path}", [Problem(None, line, f"line {line}: {error}")]) from None


def _of_row(row: Mapping[Any, Any]) -> SimulatedJob | None:
    """Return the job of a line with columns; None without a submission or a run time.

    An empty or negative field is unknown. By default a job has no limit, and requests one processor and no memory.
    """
    if None in row or None in row.values():
        raise InvalidValue("has more or fewer columns than the first line")
    cells = {name: cell.strip() for name, cell in row.items() if cell.strip()}
    numbers = {name: _number(cells[name], name) for name in _NUMBERS if name in cells}
    known = {name: number for name, number in numbers.items() if number >= 0}
    if "submit" not in known or "run_time" not in known:
        return None
    request = Request(
        int(known.get("cpus", 1)),
        int(known.get("memory", 0)) or None,
        int(known.get("gpus", 0)),
        gpu_types=tuple(filter(None, map(str.strip, cells.get("gpu_type", "").split("|")))),
        gpu_min_memory_bytes=int(known.get("gpu_min_memory", 0)) or None,
    )
    spec = _spec(request, _ns(known.get("time_limit", 0)) or None)
    user = cells.get("user", UNKNOWN_USER)
    return SimulatedJob(cells.get("name", ""), spec, _ns(known["submit"]), _ns(known["run_time"]), user)


def _of_numbers(text: str, path: str) -> Workload:
    """Return a trace in the Standard Workload Format.

    If it has no requested times at all (synthetic ones do not), the run times replace them, as is usual in comparisons
    of schedulers.
    """
    lines = list(enumerate(text.splitlines(), 1))
    machine = [found.groups() for _, line in lines if (found := _PROCESSORS_LINE.match(line)) is not None]
    cpus = next((int(number) for _, number in sorted(machine, key=lambda each: each[0], reverse=True)), None)
    rows = ((number, line.split()) for number, line in lines if line.strip() and not line.lstrip().startswith(";"))
    coming, incomplete = _jobs(path, rows, _of_line)
    if any(each.spec.time_limit_ns is not None for each in coming):
        return Workload(path, coming, cpus, incomplete)
    limits = (_spec(each.spec.request, max(each.duration_ns, SECOND_NS)) for each in coming)
    coming = tuple(replace(each, spec=limit) for each, limit in zip(coming, limits, strict=True))
    exact = "no job states a requested time; the run times serve as limits, more exact than real ones"
    return Workload(path, coming, cpus, incomplete, (exact,))


def _of_line(words: Sequence[str]) -> SimulatedJob | None:
    """Return the job of a line of numbers, -1 being unknown; None without a run time, or for part of a job.

    It requests the requested processors and memory; if one is unknown, the amount that it used. Memory is per
    processor. An unknown requested time means no limit.
    """
    if len(words) < _COLUMNS:
        raise InvalidValue(f"has fewer than {_COLUMNS} columns")
    fields = [int(_number(word)) for word in words[: _USER + 1]]
    cpus = fields[_WANTED_PROCESSORS] if fields[_WANTED_PROCESSORS] > 0 else fields[_PROCESSORS]
    submit, run_time, limit, user = fields[_SUBMIT], fields[_RUN_TIME], fields[_WANTED_TIME], fields[_USER]
    if cpus <= 0 or fields[_STATUS] in _PARTIAL or run_time < 0 or submit < 0:
        return None
    memory = fields[_WANTED_MEMORY] if fields[_WANTED_MEMORY] > 0 else fields[_MEMORY]
    request = Request(cpus, memory * _KIB * cpus if memory > 0 else None)
    spec = _spec(request, limit * SECOND_NS if limit > 0 else None)
    owner = f"user{user}" if user >= 0 else UNKNOWN_USER
    return SimulatedJob("", spec, submit * SECOND_NS, run_time * SECOND_NS, owner)


def _jobs(
    path: str, rows: Iterable[tuple[int, Row]], job_of: Callable[[Row], SimulatedJob | None]
) -> tuple[tuple[SimulatedJob, ...], int]:
    """Return the jobs in the numbered rows, and how many rows are none.

    Raises InvalidFile, with what was wrong in the first rows that *job_of* could not read.
    """
    jobs: list[SimulatedJob] = []
    problems: list[Problem] = []
    incomplete = 0
    for number, row in rows:
        try:
            job = job_of(row)
        except InvalidValue as error:
            problems.append(Problem(None, number, f"line {number}: {error}"))
            if len(problems) == _MOST_PROBLEMS:
                break
            continue
        if job is None:
            incomplete += 1
        else:
            jobs.append(replace(job, name=_unique(job.name, len(jobs))))
    if not jobs and not problems:
        problems.append(Problem(None, None, "it has no job that ran"))
    if problems:
        raise InvalidFile(f"the trace {path}", problems)
    return tuple(jobs), incomplete


def _unique(name: str, place: int) -> str:
    """Return a name that no other job has; what is learned by similar names is not changed by the number."""
    return f"{name}.{place:07}" if name else f"{place:07}"


@cache
def _spec(request: Request, time_limit_ns: int | None) -> Spec:
    """Return the one spec of all jobs with that request: few shapes save time and memory."""
    return Spec(command="true", request=request, time_limit_ns=time_limit_ns)


def _number(cell: str, column: str = "") -> float:
    where = f"{column}: " if column else ""
    try:
        number = float(cell)
    except ValueError:
        raise InvalidValue(f"{where}{cell[:40]!r} is not a number") from None
    if not abs(number) < _LARGEST:
        raise InvalidValue(f"{where}{cell[:40]} is out of range")
    return number


def _ns(seconds: float) -> int:
    return round(seconds * SECOND_NS)


def of_history(spool: Spool) -> Workload:
    """Return every run of the spool's own history that started and ended, oldest first, as a job of its own.

    A run arrives at its submission; a retry or a requeue at the end of the previous run. The request is in the history;
    what else its job file said is in the metadir, without which there is no limit. Raises InvalidFile.
    """
    coming: list[SimulatedJob] = []
    again: dict[str, int] = {}  # job -> the earliest begin of its next run
    specs: dict[Spec, Spec] = {}
    incomplete = guessed = 0
    for line in reversed(list(spool.history())):
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
        said = spool.spec(result.job, result.run)
        guessed += said is None
        spec = _wanted(result, said or Spec("true"))
        name, submitted = _unique(result.job, len(coming)), min(since or result.submitted_at_ns or began, began)
        user = result.user or UNKNOWN_USER
        coming.append(SimulatedJob(name, specs.setdefault(spec, spec), submitted, ended - began, user))
    if not coming:
        raise InvalidFile("the history", [Problem(None, None, "no run in it has both started and ended")])
    unsaid = f"of {guessed} runs the job file is gone; they are taken to have had no time limit"
    warnings = (unsaid,) if guessed else ()
    return Workload("the history", tuple(coming), incomplete=incomplete, warnings=warnings, is_history=True)


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
        preemptible=said.preemptible,
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
    if found is None:
        raise UsageError("cannot simulate: the trace does not say how many processors its machine has; specify --cpus")
    return Machine(found, memory_bytes if memory_bytes is not None else NO_LIMIT_BYTES, gpus=gpus)


def fitting(workload: Workload, machine: Machine, policy: Policy) -> tuple[SimulatedJob, ...]:
    """Return the jobs that could ever run on *machine*, without what does not count there.

    Memory does not count where it has no limit, nor a type of GPU where none has a name.
    """
    untyped = all(gpu.name == _NAMELESS for gpu in machine.gpus)
    ample = machine.memory_bytes >= NO_LIMIT_BYTES
    known: dict[int, Spec | None] = {}  # by id, because hashing a spec takes longer than reading a job
    equal: dict[Spec, Spec] = {}
    for spec in {id(each.spec): each.spec for each in workload.coming}.values():
        request = spec.request
        request = replace(
            request,
            memory_bytes=None if ample else request.memory_bytes,
            gpu_types=() if untyped else request.gpu_types,
        )
        changed = replace(spec, request=request)
        known[id(spec)] = equal.setdefault(changed, changed) if could_run(request, machine, policy) else None
    fits = ((each, known[id(each.spec)]) for each in workload.coming)
    return tuple(replace(each, spec=spec) for each, spec in fits if spec is not None)
