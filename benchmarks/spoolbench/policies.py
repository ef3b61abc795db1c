"""What policies are worth over many traces: each with all, half and none of the users stating time limits."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from spool.core.errors import SpoolError
from spool.core.model import SECOND_NS, Machine, Policy
from spool.core.units import show_duration
from spool.extras.simulate.simulation import Figures, SimulatedPolicy, figures, simulate
from spool.extras.simulate.workload import Workload, imagined_gpus, of_file
from spoolbench import box
from spoolbench.scenario import prepared

SUFFIXES = (".swf", ".swf.gz", ".csv", ".csv.gz")
LIMITS = {"all": 1.0, "half": 0.5, "none": 0.0}  # the part of the users who state a limit
METRICS = ("slowdown", "mean wait", "99% wait", "longest wait")
_ENDLESS_BYTES = 1 << 60


@dataclass(frozen=True)
class Trace:
    """A file and the machine that it is simulated on."""

    path: str
    name: str
    cpus: int | None
    gpus: int


@dataclass(frozen=True, order=True)
class Run:
    """One schedule. *load* is a percentage, 0 for the trace's own."""

    trace: str
    load: float
    limits: str
    policy: str

    def base(self, stating: bool) -> Run:
        """Return what it is compared with: EASY for the same jobs, all limits stated where the trace has some."""
        return Run(self.trace, self.load, "all" if stating else "none", SimulatedPolicy.EASY.value)


@dataclass(frozen=True)
class Found:
    """What came of it. The values are those of METRICS: a ratio, then seconds."""

    values: tuple[float, ...]
    jobs: int
    left: int
    load: float | None


def main(arguments: list[str]) -> int:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    if options.box is not None:
        for line in box.markdown(options.box):
            print(line, flush=True)
        return 0
    try:
        traces = list(_traces(options.directory, dict(options.machines)))
        stating = {each.name: _states_limits(each) for each in traces}
    except (SpoolError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    if not traces:
        print(f"there is no {', '.join(SUFFIXES)} in {options.directory}", file=sys.stderr)
        return 1
    by_name = {each.name: each for each in traces}
    wanted = [
        Run(name, load, limits, policy)
        for name in by_name
        for load in options.loads
        for limits in (options.limits if stating[name] else ["none"])
        for policy in options.policies
    ]
    bases = {run: run.base(stating[run.trace]) for run in wanted}
    todo = list(dict.fromkeys([*bases.values(), *wanted]))
    found: dict[Run, Found] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        pending = {pool.submit(_simulate, by_name[run.trace], run): run for run in todo}
        for done in as_completed(pending):
            run = pending[done]
            found[run] = done.result()
            print(f"{len(found)}/{len(todo)} {run.trace} {run.limits} {run.policy}", file=sys.stderr, flush=True)
    print("\n".join(markdown(bases, found)))
    return 0


def _traces(directory: str, machines: dict[str, tuple[int, int]]) -> Iterator[Trace]:
    for path in sorted(Path(directory).iterdir()):
        suffix = next((each for each in SUFFIXES if path.name.endswith(each)), None)
        if suffix is not None:
            name = path.name.removesuffix(suffix)
            cpus, gpus = machines.pop(name, (None, 0))
            yield Trace(str(path), name, cpus, gpus)
    if machines:
        raise SpoolError(f"there is no trace {', '.join(machines)} in {directory}")


@cache
def _read(path: str) -> Workload:
    return of_file(path)


def _states_limits(trace: Trace) -> bool:
    """Whether any job of the trace states a limit. Raises SpoolError if the trace or its machine is unknown."""
    _machine(trace)
    return any(each.spec.time_limit_ns is not None for each in _read(trace.path).coming)


def _machine(trace: Trace) -> Machine:
    workload = _read(trace.path)
    cpus = trace.cpus or workload.cpus
    if cpus is None:
        raise SpoolError(f"{trace.name}: the number of processors is unknown; specify {trace.name}=CPUS")
    return Machine(cpus, _ENDLESS_BYTES, gpus=imagined_gpus(str(trace.gpus), workload.coming))


def _simulate(trace: Trace, run: Run) -> Found:
    machine = _machine(trace)
    coming, load = prepared(_read(trace.path), machine, LIMITS[run.limits], run.load / 100 or None)
    outcomes = list(simulate(coming, machine, Policy(), SimulatedPolicy(run.policy)))
    told = figures(outcomes, machine.cpus, len(machine.gpus))
    return Found(_values(told), told.jobs, told.left, load)


def _values(told: Figures) -> tuple[float, ...]:
    waits = (told.mean_wait_ns, told.wait_99_ns, told.longest_wait_ns)
    return (told.mean_bounded_slowdown or 1.0, *((wait or 0) / SECOND_NS for wait in waits))


def markdown(bases: Mapping[Run, Run], found: Mapping[Run, Found]) -> Iterator[str]:
    """Yield the lines of the table: the figures, in brackets their ratios to EASY with limits, and geometric means."""
    yield f"| trace | load | limits | policy | {' | '.join(METRICS)} |"
    yield f"|---|---|---|---|{'---|' * len(METRICS)}"
    ratios: dict[tuple[bool, float, str, str], list[tuple[float, ...]]] = {}
    for run, base_run in bases.items():
        one, base = found[run], found[base_run]
        compared = tuple(_ratio(ours, theirs) for ours, theirs in zip(one.values, base.values, strict=True))
        ratios.setdefault((base_run.limits != "all", run.load, run.limits, run.policy), []).append(compared)
        cells = [f"{_shown(at, value)} ({compared[at]:.2f})" for at, value in enumerate(one.values)]
        never = f", {one.left} never started" if one.left else ""
        title = f"{run.trace} ({one.jobs:,} jobs{never})"
        load = "-" if one.load is None else f"{100 * one.load:.0f} %"
        yield f"| {title} | {load} | {run.limits} | {run.policy} | {' | '.join(cells)} |"
    for (bare, load, limits, policy), listed in sorted(ratios.items(), key=lambda each: each[0][0]):
        means = [math.exp(sum(map(math.log, column)) / len(column)) for column in zip(*listed, strict=True)]
        own = f"{load:g} %" if load else "own"
        cells = [f"**{mean:.2f}**" for mean in means]
        which = f"{len(listed)} without limits" if bare else f"{len(listed)}"
        yield f"| geometric mean of {which} | {own} | {limits} | {policy} | {' | '.join(cells)} |"


def _ratio(ours: float, theirs: float) -> float:
    """Return how much longer we wait; a wait of less than a second counts as one, so that none is nothing."""
    return max(ours, 1.0) / max(theirs, 1.0)


def _shown(at: int, value: float) -> str:
    return f"{value:.1f}" if at == 0 else show_duration(int(value * SECOND_NS))


def _size(text: str) -> tuple[str, tuple[int, int]]:
    name, _, sizes = text.rpartition("=")
    try:
        cpus, _, gpus = sizes.partition(",")
        found = int(cpus), int(gpus or 0)
    except ValueError:
        found = 0, 0
    if not name or found[0] < 1 or found[1] < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=CPUS or NAME=CPUS,GPUS")
    return name, found


def _load(text: str) -> float:
    if text == "own":
        return 0.0
    try:
        load = float(text)
    except ValueError:
        load = 0.0
    if not 0 < load < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a percentage nor own")
    return load


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/policies",
        description="Simulate every trace of a directory under several policies, and print a Markdown table. In "
        "brackets stands each figure's ratio to EASY backfilling with all limits stated, at the same load: below 1 "
        "is better. Of a trace that states no limits there is but one kind of run.",
    )
    parser.add_argument("directory", nargs="?", default=".", help=f"where the traces lie: {', '.join(SUFFIXES)}")
    parser.add_argument(
        "machines",
        nargs="*",
        type=_size,
        metavar="NAME=CPUS[,GPUS]",
        help="the machine of a trace, by the file's name without its suffix; default: what the header says",
    )
    policies = [each.value for each in SimulatedPolicy]
    parser.add_argument("--policies", nargs="+", choices=policies, default=["easy", "spool"], metavar="NAME")
    parser.add_argument("--limits", nargs="+", choices=list(LIMITS), default=list(LIMITS), help="who states limits")
    parser.add_argument(
        "--loads", nargs="+", type=_load, default=[0.0, 85.0], metavar="PERCENT", help='"own" is the trace\'s own'
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="simulate N at once")
    parser.add_argument(
        "--box",
        type=int,
        metavar="SEED",
        help="instead of traces, simulate a generated box of eight GPUs with four users: as it is, with a flood of "
        "10,000 short jobs, and with a user who feeds the learned run times with dummies",
    )
    return parser
