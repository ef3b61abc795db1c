"""Workload traces, text to jobs of the future: the Standard Workload Format, and CSV, which has GPUs and names too.

Chapin et al. 1999, "Benchmarks and Standards for the Evaluation of Parallel Job Schedulers"; version 2.2 of the format.
A file has lines of `;` with facts about the machine, and lines of 18 numbers, one a job; -1 is unknown. In a CSV a
header line names the columns, in any order; `submit` and `run_time` are required. docs/SCHEDULING.md, clause 11,
describes each column.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar

from msgspec import Struct

from spool.core.errors import InvalidFile, InvalidValue
from spool.core.model import SECOND_NS, Problem, Request, Spec
from spool.core.units import parse_duration, parse_size
from spool.extras.simulate.simulation import SimulatedJob
from spool.formats.wire import parse_instant

_NUMBERS = 18
# Columns of a job's line of numbers, from 0.
_JOB, _SUBMIT, _RUN_TIME, _PROCESSORS, _MEMORY = 0, 1, 3, 4, 6
_WANTED_PROCESSORS, _WANTED_TIME, _WANTED_MEMORY, _STATUS, _USER = 7, 8, 9, 10, 11
_READ = 12  # columns after these are not used
_PARTIAL = frozenset({2, 3, 4})  # part of a job that also has a line of status 0 or 1
_KIB = 1024

_LARGEST = 1 << 50  # number in a trace; products of two of them in ns or bytes stay reasonable
_MOST_PROBLEMS = 5  # this many wrong lines show that the file is not a trace
UNKNOWN_USER = "user"
"""The user of a job whose user is unknown."""

_LABEL = re.compile(r"\s*;\s*([A-Za-z][A-Za-z ]*?)\s*:\s*(.*)")
_Job = TypeVar("_Job")


class Workload(Struct, frozen=True):
    """Jobs to simulate, in the order of their source, and the known facts about their machine.

    `incomplete` counts the lines that cannot be simulated: without a run time or processors (jobs that were cancelled
    while they waited), and partial executions of a job that has a line of its own.
    """

    source: str
    coming: tuple[SimulatedJob, ...]
    cpus: int | None = None
    incomplete: int = 0
    warnings: tuple[str, ...] = ()
    counts_cpus: bool = True  # False: no line can say how many processors a job wants
    guessed_limits: int = 0  # jobs of the history whose file is gone, and with it their limit
    is_history: bool = False


class UniqueNames:
    """Makes job names unique: the second `train` becomes `train_2`, and a job without a name is named by its place."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()
        self._place = 0

    def of(self, name: str) -> str:
        """Return the unique name of the next job, whose name in the trace is *name*, or ""."""
        self._place += 1
        name = name or f"{self._place:07}"
        found = name
        while found in self._count:
            self._count[name] += 1
            found = f"{name}_{self._count[name]}"
        self._count[found] = 1
        return found


def parse(text: str, path: str) -> Workload:
    """Return the jobs of the trace *text*. Raises InvalidFile, with the lines that are wrong.

    It is a CSV if its first line names at least one of the columns.
    """
    try:
        first = next(csv.reader([text.partition("\n")[0].lstrip("\ufeff")]), [])
    except csv.Error:
        first = []
    names = [name.strip().lower() for name in first]
    return _of_csv(text, names, path) if any(name in _READERS for name in names) else _of_numbers(text, path)


@cache
def _spec(request: Request, time_limit_ns: int | None) -> Spec:
    """Return the one spec of all jobs with that request: few shapes save time and memory."""
    return Spec(command="true", request=request, time_limit_ns=time_limit_ns)


def _of_numbers(text: str, path: str) -> Workload:
    """Return a trace in the Standard Workload Format.

    A job requests the requested processors and memory; if one is unknown, the amount that it used. Memory is per
    processor. An unknown requested time means no limit. If a trace has no requested times at all (synthetic ones do
    not), the run times replace them, as is usual in comparisons of schedulers.
    """
    lines = list(enumerate(text.splitlines(), 1))
    header: dict[str, str] = {}
    for _, line in lines:
        if ";" in line and (label := _LABEL.match(line)) is not None:
            header.setdefault(label[1], label[2].strip())
    machine = [re.match("[0-9]{1,12}", header.get(label, "")) for label in ("MaxProcs", "MaxNodes")]
    cpus = next((int(number[0]) for number in machine if number is not None and int(number[0])), None)
    rows = ((number, line.split()) for number, line in lines if not line.lstrip().startswith(";"))
    jobs, incomplete, warnings = _jobs_of(path, rows, _NUMBERS, "-1", _of_line)
    if all(spec.time_limit_ns is None for *_, spec in jobs):
        exact = "no job states a requested time; the run times serve as limits, more exact than real ones"
        limits = (_spec(spec.request, max(ran, 1) * SECOND_NS) for _, _, ran, _, spec in jobs)
        jobs = [(*job[:4], limit) for job, limit in zip(jobs, limits, strict=True)]
        warnings = (*warnings, exact)
    # Names sort in file order: by number where the numbers ascend, else by place.
    numbers = [job[0] for job in jobs]
    if any(number <= before for number, before in zip(numbers, [0, *numbers], strict=False)):
        numbers = list(range(1, len(jobs) + 1))
    width = max(7, len(str(numbers[-1])))
    coming = (
        SimulatedJob(f"{number:0{width}}", spec, submit * SECOND_NS, ran * SECOND_NS, user)
        for number, (_, submit, ran, user, spec) in zip(numbers, jobs, strict=True)
    )
    return Workload(path, tuple(coming), cpus, incomplete, warnings)


def _of_line(words: Sequence[str]) -> tuple[int, int, int, str, Spec] | None:
    """Return number, submission, run time, user and spec of a job; None without a run time, or for part of a job."""
    try:
        fields = list(map(int, words[:_READ]))
    except ValueError:
        try:
            fields = [int(float(word)) for word in words[:_READ]]  # some archives write fractions of seconds
        except (ValueError, OverflowError):
            raise InvalidValue("contains something that is not a number") from None
    if max(fields) > _LARGEST or min(fields) < -_LARGEST:
        raise InvalidValue("contains a number that is too large")
    cpus = fields[_WANTED_PROCESSORS] if fields[_WANTED_PROCESSORS] > 0 else fields[_PROCESSORS]
    submit, run_time, limit, user = fields[_SUBMIT], fields[_RUN_TIME], fields[_WANTED_TIME], fields[_USER]
    if cpus <= 0 or fields[_STATUS] in _PARTIAL or run_time < 0 or submit < 0:
        return None
    memory = fields[_WANTED_MEMORY] if fields[_WANTED_MEMORY] > 0 else fields[_MEMORY]
    request = Request(cpus, memory * _KIB * cpus if memory > 0 else None)
    spec = _spec(request, limit * SECOND_NS if limit > 0 else None)
    return fields[_JOB], submit, run_time, f"user{user}" if user >= 0 else UNKNOWN_USER, spec


def _of_csv(text: str, names: Sequence[str], path: str) -> Workload:
    """Return a trace with columns.

    An empty or negative field is unknown. A job without a run time is skipped; by default a job has no limit and
    requests one processor, no GPU and no memory.
    """
    for name in _READERS:
        if names.count(name) > 1:
            raise _invalid(path, f"names the column {name} twice", 1)
        if name in ("submit", "run_time") and name not in names:
            why = f"has no column {name}; the header names the columns: {','.join(_READERS)}"
            raise _invalid(path, why, 1)
    strange = [name for name in names if name not in _READERS]
    meant = get_close_matches(strange[0], _READERS, 1) if strange else []
    asked = f" (did you mean {meant[0]}?)" if meant else ""
    ignored = [f"columns that mean nothing here are ignored: {', '.join(strange)}{asked}"] if strange else []
    columns = [(name, at) for at, name in enumerate(names) if name in _READERS]
    unique = UniqueNames()

    def job_of(row: Sequence[str]) -> SimulatedJob | None:
        known = {name: value for name, at in columns if (value := _value(name, row[at].strip())) is not None}
        if "submit" not in known or "run_time" not in known:
            return None
        request = Request(
            known.get("cpus", 1),
            known.get("memory") or None,
            known.get("gpus", 0),
            gpu_types=tuple(filter(None, map(str.strip, known.get("gpu_type", "").split("|")))),
            gpu_min_memory_bytes=known.get("gpu_min_memory") or None,
        )
        spec = _spec(request, known.get("time_limit") or None)
        name = unique.of(known.get("name", ""))
        return SimulatedJob(name, spec, known["submit"], known["run_time"], known.get("user", UNKNOWN_USER))

    def rows() -> Iterator[tuple[int, list[str]]]:
        found = csv.reader(text.splitlines())
        try:
            next(found, None)
            for row in found:
                yield found.line_num, row if any(row) else []
        except csv.Error as error:
            raise _invalid(path, str(error), found.line_num) from None

    jobs, incomplete, warnings = _jobs_of(path, rows(), len(names), "", job_of)
    return Workload(path, tuple(jobs), None, incomplete, (*ignored, *warnings), counts_cpus="cpus" in names)


def _jobs_of(
    path: str,
    rows: Iterable[tuple[int, list[str]]],
    columns: int,
    unknown: str,
    job_of: Callable[[Sequence[str]], _Job | None],
) -> tuple[list[_Job], int, tuple[str, ...]]:
    """Return the jobs in the numbered rows that are not empty, how many rows are none, and warnings.

    Raises InvalidFile, with what was wrong in the first rows that *job_of* could not read.
    """
    jobs: list[_Job] = []
    problems: list[Problem] = []
    odd: list[int] = []
    incomplete = 0
    for number, row in rows:
        if not row:
            continue
        if len(row) != columns:
            odd.append(number)
            row += [unknown] * columns
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
            jobs.append(job)
    if problems:
        raise InvalidFile(f"the trace {path}", problems)
    lines = "1 line has" if len(odd) == 1 else f"{len(odd)} lines have"
    more = f"{lines} more or fewer than {columns} columns, line {odd[0]} first; " if odd else ""
    warnings = (f"{more}missing columns count as unknown, extra ones are ignored",) if odd else ()
    if not jobs:
        raise _invalid(path, "; ".join(("it has no job that ran", *warnings)))
    return jobs, incomplete, warnings


def _invalid(path: str, why: str, line: int | None = None) -> InvalidFile:
    return InvalidFile(f"the trace {path}", [Problem(None, line, why if line is None else f"line {line}: {why}")])


def _value(column: str, cell: str) -> Any:
    """Return the value of a cell, None if it is unknown (empty or negative). Raises InvalidValue."""
    if not cell:
        return None
    try:
        value = _READERS[column](cell)
    except (ValueError, OverflowError) as error:
        why = str(error) if isinstance(error, InvalidValue) else f"{cell[:40]!r} is not a number"
        raise InvalidValue(f"{column}: {why}") from None
    return value if isinstance(value, str) or value >= 0 else None


def _number(cell: str) -> int:
    """Return a number, its fraction cut off."""
    number = int(cell) if cell.isdecimal() else int(float(cell))
    if abs(number) > _LARGEST:
        raise InvalidValue(f"{cell[:40]} is too large")
    return number


def _plain(cell: str) -> bool:
    """Whether a cell is a bare number, without a unit or a colon."""
    return cell[-1].isdecimal() and ":" not in cell


def _duration(cell: str) -> int:
    """Return a number of seconds, or a duration as in job files, in ns."""
    if not _plain(cell):
        return parse_duration(cell)
    if cell.isdecimal():
        return _number(cell) * SECOND_NS
    return _number(str(float(cell) * 1000)) * (SECOND_NS // 1000)


def _instant(cell: str) -> int:
    """Return a number of seconds since any epoch, or a date and time as in job files, in ns."""
    if _plain(cell):
        return _duration(cell)
    instant = parse_instant(cell)
    if instant is None:
        raise InvalidValue(f"{cell[:40]!r} is neither a number of seconds nor a time as in 2026-01-31T14:00:00Z")
    return instant


def _size(cell: str) -> int:
    """Return a number of bytes, or a size as in job files."""
    return _number(cell) if _plain(cell) else parse_size(cell)


_READERS: dict[str, Callable[[str], Any]] = {
    "submit": _instant,
    "run_time": _duration,
    "cpus": _number,
    "gpus": _number,
    "gpu_type": str,
    "gpu_min_memory": _size,
    "memory": _size,
    "time_limit": _duration,
    "user": str,
    "name": str,
}
"""The columns of a CSV, and what reads their cells."""
