"""Workload traces in the Standard Workload Format of the Parallel Workloads Archive: text to jobs of the future.

Chapin et al. 1999, "Benchmarks and Standards for the Evaluation of Parallel Job Schedulers"; version 2.2 of the
format. A file is lines of `;` with what is known of the machine, and lines of 18 numbers, one a job; -1 is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spool.core.errors import InvalidFile, Problem
from spool.core.model import SECOND_NS, Request, Spec
from spool.core.simulation import Coming

COLUMNS = 18
# Columns of a job's line, from 0.
_JOB, _SUBMIT, _RUN_TIME, _PROCESSORS, _MEMORY = 0, 1, 3, 4, 6
_WANTED_PROCESSORS, _WANTED_TIME, _WANTED_MEMORY, _STATUS, _USER = 7, 8, 9, 10, 11
_PARTIAL = frozenset({2, 3, 4})  # a stretch of a job whose line of status 0 or 1 has the whole
_KIB = 1024
_LARGEST = 1 << 50  # no number of a trace is larger; so no product of two of them in ns or bytes surprises anybody

_LABEL = re.compile(r";\s*([A-Za-z][A-Za-z ]*?)\s*:\s*(.*)")


@dataclass(frozen=True, slots=True)
class Trace:
    """The jobs of a trace, in the order of the file, and what its header says of the machine.

    `incomplete` counts the lines that say nothing that can be run again: no run time or no processors (jobs that were
    cancelled while they waited), and partial executions of a job that has a line of its own.
    """

    coming: tuple[Coming, ...]
    header: Mapping[str, str]
    incomplete: int = 0

    @property
    def cpus(self) -> int | None:
        """The processors of the machine, or its nodes where the header has only these; None if it has neither."""
        for label in ("MaxProcs", "MaxNodes"):
            number = re.match(r"[0-9]{1,12}", self.header.get(label, ""))
            if number is not None and int(number.group()) > 0:
                return int(number.group())
        return None


def parse(data: bytes, what: str) -> Trace:
    """Return the trace *data*; *what* names it in errors. Raises InvalidFile, with the lines that are wrong.

    A job asks for the requested processors, memory and time; where one of them is unknown, for those it used. Its
    memory is stated for each processor. A run time or a request is in whole seconds.
    """
    header: dict[str, str] = {}
    coming: list[Coming] = []
    problems: list[Problem] = []
    incomplete = 0
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        text = line.strip()
        if not text:
            continue
        if text.startswith(";"):
            label = _LABEL.match(text)
            if label is not None:
                header.setdefault(label[1], label[2].strip())
            continue
        fields = _fields(text)
        if isinstance(fields, str):
            problems.append(Problem(None, number, f"line {number}: {fields}"))
            if len(problems) == 5:
                break
            continue
        job = _coming(fields, len(coming))
        if job is None:
            incomplete += 1
        else:
            coming.append(job)
    if problems:
        raise InvalidFile(what, problems)
    if not coming:
        raise InvalidFile(what, [Problem(None, None, "it has no job that ran")])
    return Trace(tuple(coming), header, incomplete)


def _fields(text: str) -> list[int] | str:
    """Return the numbers of a line, or what is wrong with it."""
    words = text.split()
    if len(words) != COLUMNS:
        return f"has {len(words)} columns; a line of the Standard Workload Format has {COLUMNS}"
    try:
        fields = [int(word) if word.lstrip("-").isdigit() else int(float(word)) for word in words]
    except (ValueError, OverflowError):
        return "has something in it that is no number"
    if any(not -_LARGEST <= field <= _LARGEST for field in fields):
        return "has a number in it that is too large"
    return fields


def _coming(fields: Sequence[int], place: int) -> Coming | None:
    run_time = fields[_RUN_TIME]
    cpus = _known(fields[_WANTED_PROCESSORS]) or _known(fields[_PROCESSORS])
    if fields[_STATUS] in _PARTIAL or run_time < 0 or cpus is None or fields[_SUBMIT] < 0:
        return None
    memory = _known(fields[_WANTED_MEMORY]) or _known(fields[_MEMORY])
    user = fields[_USER]
    spec = Spec(
        command="true",
        request=Request(cpus=cpus, memory_bytes=None if memory is None else memory * _KIB * cpus),
        time_limit_ns=(_known(fields[_WANTED_TIME]) or max(run_time, 1)) * SECOND_NS,
    )
    return Coming(
        name=f"{place + 1:07}",  # sorts as the file does; numbers of jobs are not always unique
        spec=spec,
        submit_at_ns=fields[_SUBMIT] * SECOND_NS,
        duration_ns=run_time * SECOND_NS,
        user=f"user{user}" if user >= 0 else "user",
    )


def _known(number: int) -> int | None:
    """Return a positive number; -1 is unknown, and nothing asks for 0 processors, seconds or bytes."""
    return number if number > 0 else None
