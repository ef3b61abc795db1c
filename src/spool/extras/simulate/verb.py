"""The command `spool simulate`, what it prints and what it draws."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import click
from msgspec.structs import replace

from spool.cli import publicjson, render
from spool.cli.charts import TICKS, CurvePanel, charts
from spool.cli.common import json_option, opened, value_of
from spool.cli.group import Verb
from spool.cli.telling import tell
from spool.client.submit import is_spool
from spool.core.errors import UsageError, cannot
from spool.core.model import SECOND_NS, Machine
from spool.core.reasons import count_of
from spool.core.units import parse_size
from spool.extras.simulate.simulation import Curve, Outcome, SimulatedPolicy, WaitSummary, distribution
from spool.extras.simulate.whatif import (
    NO_LIMIT_BYTES,
    PolicyResult,
    Scenario,
    SimulationSetup,
    curves,
    imagined_gpus,
    imagined_machine,
    of_file,
    of_history,
    prepare,
    simulate_policy,
)
from spool.formats.config import Config
from spool.store.edited import Settings
from spool.store.spool import Spool

_PLOT_POINTS = 400
_UNITS = (("days", 86_400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_SHARES = [(at / 4, f"{25 * at}%") for at in range(5)]
_MARGIN = 14  # columns before a curve on the terminal
_FEW = 5  # users, without --all-users
_SPARED = ("longest wait", "CPU", "95% wait", "median wait")  # columns left out on a narrow terminal, the last first
_Told = tuple[str, Callable[[WaitSummary], str]]
_WAITS: tuple[_Told, ...] = (
    ("mean wait", lambda each: render.duration(each.mean_wait_ns)),
    ("median wait", lambda each: render.duration(each.median_wait_ns)),
    ("95% wait", lambda each: render.duration(each.wait_95_ns)),
    ("99% wait", lambda each: render.duration(each.wait_99_ns)),
    ("longest wait", lambda each: render.duration(each.longest_wait_ns)),
    ("slowdown", lambda each: render.ratio(each.mean_bounded_slowdown)),
    ("CPU", lambda each: render.percent(each.utilisation)),
    ("GPU", lambda each: render.percent(each.gpu_utilisation)),
)
# One row each, because side by side they are wider than a terminal.
_FIGURES: tuple[tuple[str, Callable[[PolicyResult], str]], ...] = (
    ("longest queue", lambda each: str(each.figures.max_queue)),
    ("mean queue", lambda each: render.ratio(each.figures.mean_queue)),
    ("makespan", lambda each: render.duration(each.figures.makespan_ns)),
    ("took", lambda each: render.duration(int(each.seconds * SECOND_NS))),
)


@click.command(cls=Verb)
@click.argument("trace", required=False, type=click.Path())
@click.option("--history", is_flag=True, help="Use the runs of this spool's own history instead of a trace.")
@click.option(
    "--cpus", type=click.IntRange(1), metavar="N", help="CPUs. Default: those of the trace, or of this machine."
)
@click.option("--memory", metavar="SIZE", help="Memory. Default for a trace: not counted.")
@click.option("--gpus", default="0", metavar="N", help="GPUs, such as 8, or 4x4090:24G,2xH100:80G. Default: none.")
@click.option("--policy", default="fifo,easy,spool", show_default=True, metavar="NAME,...", help="Policies to compare.")
@click.option(
    "--limits", type=click.FloatRange(0, 1), metavar="SHARE", help="Only this share of users states time limits."
)
@click.option("--no-limits", is_flag=True, help="No job states a time limit.")
@click.option(
    "--scale-load",
    type=click.FloatRange(0, min_open=True),
    metavar="PERCENT",
    help="Compress or stretch the arrivals to this load of the machine.",
)
@click.option(
    "--preemptible",
    type=click.FloatRange(0, 1),
    default=0.0,
    metavar="SHARE",
    help="This share of the jobs may be preempted by the policy spool.",
)
@click.option("--all-users", is_flag=True, help=f"List all users, not only the {_FEW} heaviest.")
@click.option("--plot", metavar="FILE", help="Draw the result as an .svg.")
@json_option
@click.pass_obj
def command(root: str, /, trace: str | None, history: bool, plot: str | None, as_json: bool, **asked: Any) -> int:
    """Simulate a workload on an imaginary machine and compare policies.

    TRACE is a file in the Standard Workload Format (.swf, .swf.gz), as in the Parallel Workloads Archive, a CSV with a
    header (submit, run_time, cpus, gpus, gpu_type, gpu_min_memory, memory, time_limit, user, name), or the
    history.jsonl of a spool. The real planner decides, with the configuration of the spool; nothing is started. The
    policies:

      fifo         first come, first served, no overtaking
      skip         like fifo, but a job that fits may overtake
      easy         like fifo, with backfilling that does not delay the first
      sjf          shortest job first, with the same backfilling
      multifactor  by fair share and age as in Slurm, with the same backfilling
      lxf          largest expansion factor first: the longest wait for its size
      spool        as this spool is configured

    SLOWDOWN is the mean bounded slowdown: (wait + run time) / run time, counting run times below 10s as 10s. CPU is
    the share of CPUs in use from the first submission to the last end. 99% WAIT is the wait that 99 of 100 jobs did
    not exceed.

      spool simulate lublin_256.swf --cpus 128 --policy easy,spool
      spool simulate kth.swf.gz --no-limits --scale-load 85
      spool simulate --history --gpus 8 --plot week.svg
    """
    disciplines = _disciplines(asked["policy"])
    if history == (trace is not None):
        raise UsageError("cannot simulate: give either a trace or --history")
    if asked["no_limits"] and asked["limits"] is not None:
        raise UsageError("cannot simulate: --no-limits and --limits cannot be combined; give one of them")
    drawing = charts()
    if plot is not None and drawing is None:
        raise UsageError(cannot("plot", plot, "this installation is without what draws; leave --plot out"))
    drawn = drawing.checked(plot) if plot is not None and drawing is not None else None
    spool = opened(root) if history else Spool(root) if is_spool(root) else None
    config = Settings(spool.root).config if spool is not None else Config()
    memory_bytes = value_of("--memory", asked["memory"], parse_size) if asked["memory"] is not None else None
    workload = of_file(trace) if trace is not None else of_history(opened(root))
    for warning in workload.warnings:
        tell(warning)
    given = value_of("--gpus", asked["gpus"], lambda text: imagined_gpus(text, workload.coming))
    machine = imagined_machine(workload, asked["cpus"], memory_bytes, given)
    share = 0.0 if asked["no_limits"] else 1.0 if asked["limits"] is None else asked["limits"]
    load = asked["scale_load"] and asked["scale_load"] / 100
    scenario = Scenario(workload.is_history or memory_bytes is not None, share, load, asked["preemptible"])
    # gpu.use of the real machine does not apply to imaginary GPUs.
    rules = replace(config.policy, gpu_use=None)
    setup = prepare(workload, replace(machine, resources=config.resources), rules, scenario)
    if not setup.coming:
        raise UsageError(cannot("simulate", workload.source, f"none of its jobs fits {_in_words(setup.machine)}"))
    done = []
    for each in disciplines:
        with nullcontext() if as_json else render.progress(f"simulating {each.value}") as told:
            done.append(simulate_policy(setup, rules, each, told))
    if as_json:
        _print_json(setup, done)
    else:
        _print(setup, done, all_users=asked["all_users"])
    if drawn is not None and drawing is not None:
        title = f"{count_of(len(setup.coming), 'job')} of {workload.source.rpartition('/')[2]}, {_in_words(machine)}"
        colours = {each.policy.value: list(SimulatedPolicy).index(each.policy) for each in done}
        panels = [_of_waits(done), *_over_time(curves(done, setup.machine, _PLOT_POINTS))]
        drawing.curves(drawn, title, colours, panels)
        tell(f"drew {drawn}")
    return 0


def _levels(
    found: Mapping[SimulatedPolicy, Curve],
) -> Iterator[tuple[str, bool, Mapping[SimulatedPolicy, Sequence[float]]]]:
    """Yield what is drawn over time: what it is, whether it is a share of the machine, and the levels by policy."""
    yield "processors in use", True, {policy: each.utilisation for policy, each in found.items()}
    if any(each.gpu_utilisation is not None for each in found.values()):
        yield "GPUs in use", True, {policy: each.gpu_utilisation or () for policy, each in found.items()}
    yield "jobs that wait", False, {policy: each.queue for policy, each in found.items()}


def _over_time(found: Mapping[SimulatedPolicy, Curve]) -> Iterator[CurvePanel]:
    length = max((each.step_ns * len(each.queue) for each in found.values()), default=0) / SECOND_NS
    unit, factor = next((each for each in _UNITS if length >= 2 * each[1]), _UNITS[-1])
    end = length / factor or 1
    apart = next((each for each in _STEPS if end / each <= 10), _STEPS[-1])
    across = [(at * apart / end, str(at * apart)) for at in range(int(end / apart) + 1)]
    for what, is_share, levels in _levels(found):
        highest = 1.0 if is_share else max(map(max, levels.values())) or 1.0
        lines = {}
        for policy, values in levels.items():
            step = found[policy].step_ns / SECOND_NS / length if length else 0.0
            ends = ((at * step, value / highest, (at + 1) * step) for at, value in enumerate(values))
            lines[policy.value] = [point for left, high, right in ends for point in ((left, high), (right, high))]
        up = _SHARES if is_share else [(0.0, "0"), (1.0, f"{highest:.0f}")]
        yield CurvePanel(f"{what}, {unit} since the first submission", across, up, lines)


def _of_waits(done: Sequence[PolicyResult]) -> CurvePanel:
    """Return the share of jobs that waited at most a given time; a wait below a second counts as zero."""
    waits = {each.policy: distribution(each.outcomes, _PLOT_POINTS) for each in done}
    longest = max((points[-1][0] for points in waits.values() if points), default=0) / SECOND_NS
    end = math.log10(max(longest, 10.0))
    lines = {}
    for policy, points in waits.items():
        level = max((part for wait, part in points if wait <= SECOND_NS), default=0.0)
        line = [(0.0, level)]
        for wait, part in points:
            if wait > SECOND_NS:
                at = math.log10(wait / SECOND_NS) / end
                line += [(at, level), (at, part)]
                level = part
        lines[policy.value] = [*line, (1.0, level)]
    ticks = [(math.log10(at) / end, word) for at, word in TICKS if at <= 10**end]
    return CurvePanel("share of jobs that waited at most", ticks, _SHARES, lines)


def _disciplines(text: str) -> list[SimulatedPolicy]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    known = {each.value: each for each in SimulatedPolicy}
    for word in words:
        if word not in known:
            raise UsageError(cannot("simulate", f"policy {word!r}", f"the policies are {', '.join(known)}"))
    if not words:
        raise UsageError(f"cannot simulate: --policy is empty; the policies are {', '.join(known)}")
    return list(dict.fromkeys(known[word] for word in words))


def _in_words(machine: Machine) -> str:
    parts = [count_of(machine.cpus, "CPU")]
    if machine.memory_bytes < NO_LIMIT_BYTES:
        parts.append(render.size(machine.memory_bytes) + " of memory")
    if machine.gpus:
        kinds = Counter(gpu.name for gpu in machine.gpus)
        types = f" ({', '.join(f'{number} {name}' for name, number in kinds.items())})" if len(kinds) > 1 else ""
        parts.append(count_of(len(machine.gpus), "GPU") + types)
    return ", ".join(parts)


def _print(setup: SimulationSetup, done: Sequence[PolicyResult], *, all_users: bool) -> None:
    workload = setup.workload
    left = [
        f"{setup.never_fit} never fit" if setup.never_fit else "",
        f"{workload.incomplete} did not run" if workload.incomplete else "",
    ]
    left_out = f" (left out: {', '.join(filter(None, left))})" if any(left) else ""
    render.say(f"{workload.source}: {count_of(len(setup.coming), 'job')} on {_in_words(setup.machine)}{left_out}")
    load = render.percent(setup.load) or "none, as all jobs arrive at once"
    changed = "" if setup.load == setup.load_of_source else f" (unscaled: {render.percent(setup.load_of_source)})"
    render.say(f"time limits: {setup.limits_stated} of {len(setup.coming)} jobs state one; load: {load}{changed}")
    if workload.guessed_limits:
        tell(f"of {workload.guessed_limits} runs the job file is gone; they are taken to have had no time limit")
    render.say()
    waits = [each for each in _WAITS if each[0] != "GPU" or setup.machine.gpus]
    columns = [render.Column("POLICY"), *(render.Column(each.policy, right=True) for each in done)]
    rows = [["jobs", *(str(each.figures.jobs) for each in done)]]
    rows += [[name, *(text(each.figures) for each in done)] for name, text in waits]
    rows += [[name, *(text(each) for each in done)] for name, text in _FIGURES]
    render.table(columns, rows)
    for each in done:
        if each.figures.preemptions:
            times = count_of(each.figures.preemptions, "preemption")
            render.say(f"{each.policy}: {times}, {render.percent(each.figures.repeated)} of the work done again")
        if each.figures.left:
            render.say(f"{each.policy}: {count_of(each.figures.left, 'job')} never started")
    render.say()
    _picture(setup.machine, done)
    _groups("SIZE", {each.policy: each.sizes for each in done}, done[0].sizes, waits)
    if done[0].preemptible:
        _groups("PREEMPTIBLE", {each.policy: each.preemptible for each in done}, done[0].preemptible, waits)
    names = list(done[0].users)
    shown = names if all_users else names[:_FEW]
    _groups("USER", {each.policy: each.users for each in done}, shown, waits)
    if len(shown) < len(names):
        render.say(f"{len(names) - len(shown)} more users: --all-users")
    _print_longest(setup.first_at_ns, done)


def _groups(
    title: str,
    found: Mapping[SimulatedPolicy, Mapping[str, WaitSummary]],
    names: Iterable[str],
    told: Sequence[_Told],
) -> None:
    """Print a table with a row for each group under each policy, with as many figures as fit the terminal."""
    columns = [render.Column(title, cut="middle"), render.Column("JOBS", right=True), render.Column("POLICY")]
    for name, _ in told:
        drop = _SPARED.index(name) + 1 if name in _SPARED else 0
        columns.append(render.Column(name.removesuffix(" wait").upper(), right=True, drop=drop))
    rows = []
    for name in names:
        for at, (policy, groups) in enumerate(found.items()):
            first = [name, str(groups[name].jobs)] if at == 0 else ["", ""]
            rows.append([*first, policy.value, *(text(groups[name]) for _, text in told)])
    render.say()
    render.table(columns, rows)


def _print_longest(first_at_ns: int, done: Sequence[PolicyResult]) -> None:
    columns = [
        render.Column("LONGEST WAITS"),
        render.Column("WAIT", right=True),
        render.Column("JOB", cut="middle"),
        render.Column("USER", cut="middle"),
        render.Column("ASKED FOR"),
        render.Column("SUBMITTED AFTER", right=True),
    ]
    rows = []
    for each in done:
        for at, wait in enumerate(each.longest_waits):
            job, request = wait.job, wait.job.spec.request
            asked = count_of(request.cpus, "CPU") + (f", {count_of(request.gpus, 'GPU')}" if request.gpus else "")
            submitted = render.duration(job.submit_at_ns - first_at_ns)
            policy = each.policy.value if at == 0 else ""
            rows.append([policy, render.duration(wait.waited_ns or 0), job.name, job.user, asked, submitted])
    if rows:
        render.say()
        render.table(columns, rows)


def _picture(machine: Machine, done: Sequence[PolicyResult]) -> None:
    """Print utilisation and queue over time, a row for each policy, all on one time scale.

    Each queue is scaled to its own maximum, printed before it: under one policy it may be a hundred times longer.
    """
    drawing = charts()
    if drawing is None:
        return
    width = max(20, min(shutil.get_terminal_size((80, 24)).columns, 120) - _MARGIN)
    found = curves(done, machine, width)
    for what, is_share, levels in _levels(found):
        render.say(what)
        for policy, values in levels.items():
            highest = 1.0 if is_share else max(values, default=0.0)
            top = f"{'100%':>6}" if is_share else f"{highest:6.0f}"
            render.say(f"{policy.value:6}{top}  {drawing.curve(values, highest)}".rstrip())
    length = max((each.step_ns * len(each.queue) for each in found.values()), default=0)
    render.say(f"{'':{_MARGIN}}0{render.duration(length):>{width - 1}}")


def _print_json(setup: SimulationSetup, done: Sequence[PolicyResult]) -> None:
    workload, machine = setup.workload, setup.machine
    memory = machine.memory_bytes if machine.memory_bytes < NO_LIMIT_BYTES else None

    def listed(word: str, groups: Mapping[str, WaitSummary]) -> list[dict[str, object]]:
        return [{word: name, **publicjson.plain(figures)} for name, figures in groups.items()]

    def longest(wait: Outcome) -> dict[str, object]:
        job, request = wait.job, wait.job.spec.request
        return {
            "name": job.name,
            "user": job.user,
            "cpus": request.cpus,
            "gpus": request.gpus,
            "submitted_after_ns": job.submit_at_ns - setup.first_at_ns,
            "wait_ns": wait.waited_ns or 0,
        }

    render.as_json(
        {
            "version": 1,
            "source": workload.source,
            "jobs": len(setup.coming),
            "never_fit": setup.never_fit,
            "incomplete": workload.incomplete,
            "limits_stated": setup.limits_stated,
            "load": setup.load,
            "load_of_source": setup.load_of_source,
            "machine": {"cpus": machine.cpus, "memory_bytes": memory, "gpus": len(machine.gpus)},
            "policies": [
                {
                    "policy": each.policy,
                    **publicjson.plain(each.figures),
                    "seconds": round(each.seconds, 3),
                    "sizes": listed("size", each.sizes),
                    "preemptible": listed("group", each.preemptible),
                    "users": listed("user", each.users),
                    "longest_waits": [longest(one) for one in each.longest_waits],
                }
                for each in done
            ],
        }
    )
