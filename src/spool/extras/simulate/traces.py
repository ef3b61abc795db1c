"""Workload traces, text to jobs of the future: the Standard Workload Format, and CSV, which has GPUs and names too.

Chapin et al. 1999, "Benchmarks and Standards for the Evaluation of Parallel Job Schedulers"; version 2.2 of the format.
A file has lines of `;` with facts about the machine, and lines of 18 numbers, one a job; -1 is unknown. In a CSV a
header line names the columns, in any order; `submit` and `run_time` are required. docs/SCHEDULING.md, clause 11,
describes each column.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches

from msgspec import Struct, field

from spool.core.errors import InvalidFile, InvalidValue
from spool.core.model import SECOND_NS, Problem, Request, Spec
from spool.core.units import parse_duration, parse_size
from spool.extras.simulate.simulation import SimulatedJob
from spool.formats.timestamps import parse_instant

_COLUMNS = (
    "submit", "run_time", "cpus", "gpus", "gpu_type", "gpu_min_memory", "memory", "time_limit", "user", "name",
)  # fmt: skip
_REQUIRED = _COLUMNS[:2]
_NUMBERS = 18
# Columns of a job's line, from 0.
_JOB, _SUBMIT, _RUN_TIME, _PROCESSORS, _MEMORY = 0, 1, 3, 4, 6
_WANTED_PROCESSORS, _WANTED_TIME, _WANTED_MEMORY, _STATUS, _USER = 7, 8, 9, 10, 11
_READ = 12  # columns after these are not used
_PARTIAL = frozenset({2, 3, 4})  # part of a job that also has a line of status 0 or 1
_KIB = 1024
_MISSING = ["-1"] * _NUMBERS

_LARGEST = 1 << 50  # number in a trace; products of two of them in ns or bytes stay reasonable
_MOST_PROBLEMS = 5  # this many wrong lines show that the file is not a trace
UNKNOWN_USER = "user"
"""The user of a job whose user is unknown."""

_LABEL = re.compile(r";\s*([A-Za-z][A-Za-z ]*?)\s*:\s*(.*)")


class Trace(Struct, frozen=True):
    """The jobs of a trace, in the order of the file, and the known facts about their machine.

    `incomplete` counts the lines that cannot be simulated: without a run time or processors (jobs that were cancelled
    while they waited), and partial executions of a job that has a line of its own. `counts_cpus` is False if no line
    can say how many processors a job wants.
    """

    coming: tuple[SimulatedJob, ...]
    cpus: int | None = None
    incomplete: int = 0
    warnings: tuple[str, ...] = ()
    counts_cpus: bool = True


class _OddLines(Struct):
    """Counts lines with more or fewer columns than the format has: missing ones are unknown, extra ones ignored."""

    columns: int
    count: int = 0
    first: int = 0

    def see(self, number: int) -> None:
        """Count the line of that number."""
        self.count += 1
        self.first = self.first or number

    def warnings(self) -> tuple[str, ...]:
        """Return one warning for all of them."""
        if not self.count:
            return ()
        lines = "1 line has" if self.count == 1 else f"{self.count} lines have"
        return (
            f"{lines} more or fewer than {self.columns} columns, line {self.first} first; "
            "missing columns count as unknown, extra ones are ignored",
        )


class _Specs(Struct):
    """Shares one spec among all jobs with the same request: few shapes save time and memory."""

    _known: dict[tuple[object, ...], Spec] = field(default_factory=dict)

    def exact(self, spec: Spec, run_time_s: int) -> Spec:
        """Return *spec* with that run time as its limit."""
        return self.of(spec.request, max(run_time_s, 1) * SECOND_NS)

    def of(self, request: Request, time_limit_ns: int | None) -> Spec:
        """Return the spec with that request."""
        key = (request, time_limit_ns)
        spec = self._known.get(key)
        if spec is None:
            spec = self._known[key] = Spec(command="true", request=request, time_limit_ns=time_limit_ns)
        return spec


class UniqueNames:
    """Makes job names unique: the second `train` becomes `train_2`, and a job without a name is named by its place."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
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


def parse(text: str, what: str) -> Trace:
    """Return the trace *text*; *what* names it in errors. Raises InvalidFile, with the lines that are wrong.

    It is a CSV if its first line names at least one of the columns.
    """
    names = _names(text.partition("\n")[0])
    return _of_csv(text, what) if any(name in _COLUMNS for name in names) else _of_numbers(text, what)


def _of_numbers(text: str, what: str) -> Trace:
    """Return a trace in the Standard Workload Format.

    A job requests the requested processors and memory; if one is unknown, the amount that it used. Memory is per
    processor. An unknown requested time means no limit. If a trace has no requested times at all (synthetic ones do
    not), the run times replace them, as is usual in comparisons of schedulers.
    """
    header: dict[str, str] = {}
    jobs: list[tuple[int, int, int, int, Spec]] = []  # number, submission, run time, user
    problems: list[Problem] = []
    odd = _OddLines(_NUMBERS)
    specs = _Specs()
    incomplete = 0
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words:
            continue
        if words[0].startswith(";"):
            label = _LABEL.match(line.strip())
            if label is not None:
                header.setdefault(label[1], label[2].strip())
            continue
        if len(words) != _NUMBERS:
            odd.see(number)
            words += _MISSING
        fields = _fields(words[:_READ])
        if isinstance(fields, str):
            problems.append(Problem(None, number, f"line {number}: {fields}"))
            if len(problems) == _MOST_PROBLEMS:
                break
            continue
        submit, run_time = fields[_SUBMIT], fields[_RUN_TIME]
        spec = _spec(fields, specs)
        if spec is None or run_time < 0 or submit < 0:
            incomplete += 1
        else:
            jobs.append((fields[_JOB], submit, run_time, fields[_USER], spec))
    _require_jobs(what, problems, len(jobs), odd)
    warnings = odd.warnings()
    if all(spec.time_limit_ns is None for *_, spec in jobs):
        jobs = [(job, at, ran, user, specs.exact(spec, ran)) for job, at, ran, user, spec in jobs]
        warnings = (
            *warnings,
            "no job states a requested time; the run times serve as limits, more exact than real ones",
        )
    return Trace(_comings(jobs), _cpus(header), incomplete, warnings)


def _require_jobs(what: str, problems: Sequence[Problem], jobs: int, odd: _OddLines) -> None:
    """Raise InvalidFile if lines were wrong, or if there is no job."""
    if problems:
        raise InvalidFile(what, problems)
    if not jobs:
        raise InvalidFile(what, [Problem(None, None, "; ".join(("it has no job that ran", *odd.warnings())))])


def _fields(words: Sequence[str]) -> list[int] | str:
    """Return the numbers of a line, or an error message."""
    try:
        fields = list(map(int, words))
    except ValueError:
        try:
            fields = [int(float(word)) for word in words]  # some archives write fractions of seconds
        except (ValueError, OverflowError):
            return "contains something that is not a number"
    if max(fields) > _LARGEST or min(fields) < -_LARGEST:
        return "contains a number that is too large"
    return fields


def _spec(fields: Sequence[int], specs: _Specs) -> Spec | None:
    """Return the spec of a line; None if it is part of a job, or has no processors."""
    cpus = fields[_WANTED_PROCESSORS]
    if cpus <= 0:  # zero or less cannot be requested
        cpus = fields[_PROCESSORS]
    if cpus <= 0 or fields[_STATUS] in _PARTIAL:
        return None
    memory = fields[_WANTED_MEMORY] if fields[_WANTED_MEMORY] > 0 else fields[_MEMORY]
    limit = fields[_WANTED_TIME]
    request = Request(cpus, memory * _KIB * cpus if memory > 0 else None)
    return specs.of(request, limit * SECOND_NS if limit > 0 else None)


def _comings(jobs: Sequence[tuple[int, int, int, int, Spec]]) -> tuple[SimulatedJob, ...]:
    """Return the jobs, with names that sort in file order: by number where the numbers ascend, else by place."""
    numbers = [job[0] for job in jobs]
    if any(number <= before for number, before in zip(numbers, [0, *numbers], strict=False)):
        numbers = list(range(1, len(jobs) + 1))
    width = max(7, len(str(numbers[-1])))
    users = {user: f"user{user}" if user >= 0 else UNKNOWN_USER for user in {job[3] for job in jobs}}
    return tuple(
        SimulatedJob(f"{number:0{width}}", spec, submit * SECOND_NS, run_time * SECOND_NS, users[user])
        for number, (_, submit, run_time, user, spec) in zip(numbers, jobs, strict=True)
    )


def _cpus(header: Mapping[str, str]) -> int | None:
    """Return the processors of the machine, or its nodes if the header has only these; None if it has neither."""
    for label in ("MaxProcs", "MaxNodes"):
        number = re.match(r"[0-9]{1,12}", header.get(label, ""))
        if number is not None and int(number.group()) > 0:
            return int(number.group())
    return None


def _of_csv(text: str, what: str) -> Trace:
    """Return a trace with columns.

    An empty or negative field is unknown. A job without a run time is skipped; by default a job has no limit and
    requests one processor, no GPU and no memory.
    """
    lines = text.splitlines()
    names = _names(lines[0]) if lines else []
    warnings = _judge(names, what)
    places = [names.index(name) if name in names else None for name in _COLUMNS]
    specs, unique = _Specs(), UniqueNames()
    odd = _OddLines(len(names))
    coming: list[SimulatedJob] = []
    problems: list[Problem] = []
    incomplete = 0
    for number, row in _rows(lines, what):
        if len(row) != len(names):
            odd.see(number)
            row += [""] * len(names)
        cells = ["" if place is None else row[place].strip() for place in places]
        try:
            job = _coming(cells, specs, unique)
        except InvalidValue as error:
            problems.append(Problem(None, number, f"line {number}: {error}"))
            if len(problems) == _MOST_PROBLEMS:
                break
            continue
        if job is None:
            incomplete += 1
        else:
            coming.append(job)
    _require_jobs(what, problems, len(coming), odd)
    return Trace(tuple(coming), None, incomplete, (*warnings, *odd.warnings()), counts_cpus="cpus" in names)


def _names(line: str) -> list[str]:
    try:
        return [name.strip().lower() for name in next(csv.reader([line.lstrip("\ufeff")]), [])]
    except csv.Error:
        return []


def _rows(lines: Sequence[str], what: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows after the header that are not empty, each with the number of its line."""
    rows = csv.reader(lines)
    try:
        next(rows, None)
        for row in rows:
            if any(row):
                yield rows.line_num, row
    except csv.Error as error:
        raise InvalidFile(what, [Problem(None, rows.line_num, f"line {rows.line_num}: {error}")]) from None


def _judge(names: Sequence[str], what: str) -> tuple[str, ...]:
    """Return a warning about unknown columns. Raises InvalidFile if a column is missing or there twice."""
    for name in _REQUIRED:
        if name not in names:
            why = f"line 1: has no column {name}; the header names the columns: {','.join(_COLUMNS)}"
            raise InvalidFile(what, [Problem(None, 1, why)])
    for name in _COLUMNS:
        if names.count(name) > 1:
            raise InvalidFile(what, [Problem(None, 1, f"line 1: names the column {name} twice")])
    strange = [name for name in names if name not in _COLUMNS]
    if not strange:
        return ()
    meant = get_close_matches(strange[0], _COLUMNS, 1)
    asked = f" (did you mean {meant[0]}?)" if meant else ""
    return (f"columns that mean nothing here are ignored: {', '.join(strange)}{asked}",)


def _coming(cells: Sequence[str], specs: _Specs, unique: UniqueNames) -> SimulatedJob | None:
    """Return the job of a line, None if it never ran. Raises InvalidValue."""
    submit, run_time, cpus, gpus, gpu_type, least, memory, limit, user, name = cells
    submit_at = _read("submit", submit, _instant)
    ran = _read("run_time", run_time, _duration)
    if submit_at is None or ran is None:
        return None
    wanted = _read("cpus", cpus, _number)
    request = Request(
        1 if wanted is None else wanted,
        _read("memory", memory, _size) or None,
        _read("gpus", gpus, _number) or 0,
        gpu_types=tuple(filter(None, map(str.strip, gpu_type.split("|")))),
        gpu_min_memory_bytes=_read("gpu_min_memory", least, _size) or None,
    )
    spec = specs.of(request, _read("time_limit", limit, _duration) or None)
    return SimulatedJob(unique.of(name), spec, submit_at, ran, user or UNKNOWN_USER)


def _read(column: str, cell: str, parse: Callable[[str], int]) -> int | None:
    """Return the value of a cell, None if it is unknown (empty or negative)."""
    if not cell:
        return None
    try:
        value = parse(cell)
    except (ValueError, OverflowError) as error:
        why = str(error) if isinstance(error, InvalidValue) else f"{cell[:40]!r} is not a number"
        raise InvalidValue(f"{column}: {why}") from None
    return value if value >= 0 else None


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
