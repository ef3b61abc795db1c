"""Workload traces as CSV, with columns that the Standard Workload Format lacks: GPUs and names.

A header line names the columns, in any order; `submit` and `run_time` are required. docs/SCHEDULING.md, clause 11,
describes each column.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches

from spool.core.errors import InvalidFile, InvalidValue
from spool.core.model import SECOND_NS, Problem, Request
from spool.core.simulation import SimulatedJob
from spool.core.units import parse_duration, parse_size
from spool.formats.swf import (
    LARGEST,
    MOST_PROBLEMS,
    UNKNOWN_USER,
    OddLines,
    Specs,
    Trace,
    UniqueNames,
    require_jobs,
)
from spool.formats.timestamps import parse_instant

COLUMNS = (
    "submit", "run_time", "cpus", "gpus", "gpu_type", "gpu_min_memory", "memory", "time_limit", "user", "name",
)  # fmt: skip
REQUIRED = COLUMNS[:2]


def is_header(line: str) -> bool:
    """Whether that first line of a file is the header of such a trace, which names at least one of the columns."""
    return any(name in COLUMNS for name in _names(line))


def parse(text: str, what: str) -> Trace:
    """Return the trace *text*; *what* names it in errors. Raises InvalidFile, with the lines that are wrong.

    An empty or negative field is unknown. A job without a run time is skipped; by default a job has no limit and
    requests one processor, no GPU and no memory.
    """
    lines = text.splitlines()
    names = _names(lines[0]) if lines else []
    warnings = _judge(names, what)
    places = [names.index(name) if name in names else None for name in COLUMNS]
    specs, unique = Specs(), UniqueNames()
    odd = OddLines(len(names))
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
            if len(problems) == MOST_PROBLEMS:
                break
            continue
        if job is None:
            incomplete += 1
        else:
            coming.append(job)
    require_jobs(what, problems, len(coming), odd)
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
    for name in REQUIRED:
        if name not in names:
            why = f"line 1: has no column {name}; the header names the columns: {','.join(COLUMNS)}"
            raise InvalidFile(what, [Problem(None, 1, why)])
    for name in COLUMNS:
        if names.count(name) > 1:
            raise InvalidFile(what, [Problem(None, 1, f"line 1: names the column {name} twice")])
    strange = [name for name in names if name not in COLUMNS]
    if not strange:
        return ()
    meant = get_close_matches(strange[0], COLUMNS, 1)
    asked = f" (did you mean {meant[0]}?)" if meant else ""
    return (f"columns that mean nothing here are ignored: {', '.join(strange)}{asked}",)


def _coming(cells: Sequence[str], specs: Specs, unique: UniqueNames) -> SimulatedJob | None:
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
    if abs(number) > LARGEST:
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
