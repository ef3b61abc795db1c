"""Workload traces in the Standard Workload Format of the Parallel Workloads Archive: text to jobs of the future.

Chapin et al. 1999, "Benchmarks and Standards for the Evaluation of Parallel Job Schedulers"; version 2.2 of the format.
A file has lines of `;` with facts about the machine, and lines of 18 numbers, one a job; -1 is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from spool.core.errors import InvalidFile
from spool.core.model import SECOND_NS, Problem, Request, Spec
from spool.core.simulation import SimulatedJob

COLUMNS = 18
# Columns of a job's line, from 0.
_JOB, _SUBMIT, _RUN_TIME, _PROCESSORS, _MEMORY = 0, 1, 3, 4, 6
_WANTED_PROCESSORS, _WANTED_TIME, _WANTED_MEMORY, _STATUS, _USER = 7, 8, 9, 10, 11
_READ = 12  # columns after these are not used
_PARTIAL = frozenset({2, 3, 4})  # part of a job that also has a line of status 0 or 1
_KIB = 1024
_MISSING = ["-1"] * COLUMNS

LARGEST = 1 << 50
"""The largest number in a trace; products of two of them in ns or bytes stay reasonable."""

UNKNOWN_USER = "user"
"""The user of a job whose user is unknown."""

MOST_PROBLEMS = 5
"""This many wrong lines show that the file is not a trace."""

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


class OddLines(Struct):
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


class Specs(Struct):
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

    A job requests the requested processors and memory; if one is unknown, the amount that it used. Memory is per
    processor. An unknown requested time means no limit. If a trace has no requested times at all (synthetic ones do
    not), the run times replace them, as is usual in comparisons of schedulers.
    """
    header: dict[str, str] = {}
    jobs: list[tuple[int, int, int, int, Spec]] = []  # number, submission, run time, user
    problems: list[Problem] = []
    odd = OddLines(COLUMNS)
    specs = Specs()
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
        if len(words) != COLUMNS:
            odd.see(number)
            words += _MISSING
        fields = _fields(words[:_READ])
        if isinstance(fields, str):
            problems.append(Problem(None, number, f"line {number}: {fields}"))
            if len(problems) == MOST_PROBLEMS:
                break
            continue
        submit, run_time = fields[_SUBMIT], fields[_RUN_TIME]
        spec = _spec(fields, specs)
        if spec is None or run_time < 0 or submit < 0:
            incomplete += 1
        else:
            jobs.append((fields[_JOB], submit, run_time, fields[_USER], spec))
    require_jobs(what, problems, len(jobs), odd)
    warnings = odd.warnings()
    if all(spec.time_limit_ns is None for *_, spec in jobs):
        jobs = [(job, at, ran, user, specs.exact(spec, ran)) for job, at, ran, user, spec in jobs]
        warnings = (
            *warnings,
            "no job states a requested time; the run times serve as limits, more exact than real ones",
        )
    return Trace(_comings(jobs), _cpus(header), incomplete, warnings)


def require_jobs(what: str, problems: Sequence[Problem], jobs: int, odd: OddLines) -> None:
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
    if max(fields) > LARGEST or min(fields) < -LARGEST:
        return "contains a number that is too large"
    return fields


def _spec(fields: Sequence[int], specs: Specs) -> Spec | None:
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
