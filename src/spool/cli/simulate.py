"""`spool simulate`: what a policy would make of a trace, or of this spool's own history, on an imagined machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import click

from spool.cli import blocks, plotting, render
from spool.cli.common import json_option, opened
from spool.cli.group import tell
from spool.cli.verb import Verb
from spool.core.errors import UsageError, cannot
from spool.core.model import SECOND_NS, Machine, Policy
from spool.core.reasons import count_of
from spool.core.simulation import Discipline
from spool.core.units import parse_size
from spool.dispatcher.imagine import Imagined, Study, curves, gpus_like, imagine, of_history, of_trace, studies
from spool.dispatcher.settings import Settings
from spool.machine.host import Host, less_reserve
from spool.store.spool import Spool
from spool.store.submitting import is_spool

_PLOT_POINTS = 400
_MARGIN = 14  # columns before a curve on the terminal
_NO_LIMIT_BYTES = 1 << 60
# A row for each, for side by side they are wider than a terminal.
_FIGURES: tuple[tuple[str, Callable[[Study], str]], ...] = (
    ("jobs", lambda each: str(each.figures.jobs)),
    ("mean wait", lambda each: render.duration(each.figures.mean_wait_ns)),
    ("median wait", lambda each: render.duration(each.figures.median_wait_ns)),
    ("95 % wait", lambda each: render.duration(each.figures.wait_95_ns)),
    ("slowdown", lambda each: render.ratio(each.figures.mean_bounded_slowdown)),
    ("CPU", lambda each: render.percent(each.figures.utilisation)),
    ("GPU", lambda each: render.percent(each.figures.gpu_utilisation)),
    ("longest queue", lambda each: str(each.figures.max_queue)),
    ("mean queue", lambda each: render.ratio(each.figures.mean_queue)),
    ("makespan", lambda each: render.duration(each.figures.makespan_ns)),
    ("took", lambda each: render.duration(int(each.seconds * SECOND_NS))),
)


@dataclass(frozen=True, slots=True)
class _Size:
    """The imagined machine, as the options say it. None is what was not said."""

    cpus: int | None
    memory: str | None
    gpus: int


@click.command(cls=Verb)
@click.argument("trace", required=False, type=click.Path())
@click.option("--history", is_flag=True, help="Take the runs of this spool's own history instead of a trace.")
@click.option(
    "--cpus", type=click.IntRange(1), metavar="N", help="Processors. Default: the trace's, or this machine's."
)
@click.option("--memory", metavar="SIZE", help="Memory. Default for a trace: it is not counted.")
@click.option("--gpus", type=click.IntRange(0), default=0, metavar="N", help="GPUs. Default: none.")
@click.option("--policy", default="fifo,easy,spool", show_default=True, metavar="NAME,...", help="What to compare.")
@click.option("--plot", metavar="FILE", help="Draw it into a .png or .svg; needs matplotlib.")
@json_option
@click.pass_obj
def command(
    root: str,
    trace: str | None,
    history: bool,
    cpus: int | None,
    memory: str | None,
    gpus: int,
    policy: str,
    plot: str | None,
    as_json: bool,
) -> int:
    """Simulate a workload on an imagined machine, and compare policies.

    TRACE is a file in the Standard Workload Format (.swf, .swf.gz), as the Parallel Workloads Archive has them. It is
    the real planner that decides, with the configuration of the spool; nothing is started. The policies:

      fifo   first come, first served, nobody overtakes
      easy   as fifo, but who does not delay the first may overtake (backfilling)
      spool  as this spool is configured

    The slowdown is the mean bounded one: (wait + run time) / run time, no run time taken for shorter than 10 s. CPU is
    the part of the processors that was in use from the first submission to the last end.

      spool simulate lublin_256.swf --cpus 128 --policy easy,spool
      spool simulate --history --gpus 8 --plot week.svg
    """
    disciplines = _disciplines(policy)
    if history == (trace is not None):
        raise UsageError("cannot simulate: give a trace, or --history, one of the two")
    figure = plotting.ready(plot) if plot is not None else None
    spool = opened(root) if history else Spool(root) if is_spool(root) else None
    rules = Settings(spool).config.policy if spool is not None else Policy()
    workload = of_trace(trace) if trace is not None else of_history(opened(root))
    size = _Size(cpus, memory, gpus)
    machine = replace(_machine(size, workload.cpus, history=history), gpus=gpus_like(gpus, workload.coming))
    rules = replace(rules, gpu_use=None)  # which of the real GPUs may be given says nothing of imagined ones
    imagined = imagine(workload, machine, rules, count_memory=history or memory is not None)
    if not imagined.coming:
        raise UsageError(cannot("simulate", workload.source, f"none of its jobs fits {_in_words(machine)}"))
    done = list(studies(imagined, rules, disciplines))
    if as_json:
        _print_json(imagined, done)
    else:
        _print(imagined, done)
    if figure is not None and plot is not None:
        title = f"{count_of(len(imagined.coming), 'job')} of {workload.source.rpartition('/')[2]}, {_in_words(machine)}"
        plotting.draw(figure, plot, curves(done, machine, _PLOT_POINTS), title)
        tell(f"drew {plot}")
    return 0


def _disciplines(text: str) -> list[Discipline]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    known = {each.value: each for each in Discipline}
    for word in words:
        if word not in known:
            raise UsageError(cannot("simulate", f"policy {word!r}", f"there are {', '.join(known)}"))
    if not words:
        raise UsageError(f"cannot simulate: --policy names none; there are {', '.join(known)}")
    return list(dict.fromkeys(known[word] for word in words))


def _machine(size: _Size, trace_cpus: int | None, *, history: bool) -> Machine:
    if history:
        host = Host()
        memory = parse_size(size.memory) if size.memory is not None else less_reserve(host.memory().total_bytes)
        return Machine(size.cpus or host.cpus(), memory)
    cpus = size.cpus or trace_cpus
    if cpus is None:
        raise UsageError("cannot simulate: the trace does not say how many processors its machine has; give --cpus")
    return Machine(cpus, parse_size(size.memory) if size.memory is not None else _NO_LIMIT_BYTES)


def _in_words(machine: Machine) -> str:
    parts = [count_of(machine.cpus, "CPU")]
    if machine.memory_bytes < _NO_LIMIT_BYTES:
        parts.append(render.size(machine.memory_bytes) + " of memory")
    if machine.gpus:
        parts.append(count_of(len(machine.gpus), "GPU"))
    return ", ".join(parts)


def _print(imagined: Imagined, done: Sequence[Study]) -> None:
    workload = imagined.workload
    left = [
        f"{imagined.never_fit} never fit" if imagined.never_fit else "",
        f"{workload.incomplete} did not run" if workload.incomplete else "",
    ]
    left_out = f" (left out: {', '.join(filter(None, left))})" if any(left) else ""
    render.say(f"{workload.source}: {count_of(len(imagined.coming), 'job')} on {_in_words(imagined.machine)}{left_out}")
    if workload.guessed_limits:
        tell(f"of {workload.guessed_limits} runs the job file is gone; they are taken to have had no time limit")
    render.say()
    figures = [figure for figure in _FIGURES if figure[0] != "GPU" or imagined.machine.gpus]
    columns = [render.Column("POLICY"), *(render.Column(each.policy, right=True) for each in done)]
    render.table(columns, [[name, *(text(each) for each in done)] for name, text in figures])
    for each in done:
        if each.figures.left:
            render.say(f"{each.policy}: {count_of(each.figures.left, 'job')} never started")
    render.say()
    _picture(imagined.machine, done)


def _picture(machine: Machine, done: Sequence[Study]) -> None:
    """Print utilisation and queue over time, a row for each policy, all on one scale of time.

    A queue is drawn up to its own highest, which stands before it: under one policy it may be a hundred times longer.
    """
    width = max(20, min(shutil.get_terminal_size((80, 24)).columns, 120) - _MARGIN)
    found = curves(done, machine, width)
    render.say("processors in use")
    for policy, each in found.items():
        render.say(f"{policy.value:6}{'100%':>6}  {blocks.curve(each.utilisation, 1.0)}".rstrip())
    render.say("jobs that wait")
    for policy, each in found.items():
        highest = max(each.queue, default=0.0)
        render.say(f"{policy.value:6}{highest:6.0f}  {blocks.curve(each.queue, highest)}".rstrip())
    length = max((each.step_ns * len(each.queue) for each in found.values()), default=0)
    render.say(f"{'':{_MARGIN}}0{render.duration(length):>{width - 1}}")


def _print_json(imagined: Imagined, done: Sequence[Study]) -> None:
    workload, machine = imagined.workload, imagined.machine
    memory = machine.memory_bytes if machine.memory_bytes < _NO_LIMIT_BYTES else None
    render.as_json(
        {
            "version": 1,
            "source": workload.source,
            "jobs": len(imagined.coming),
            "never_fit": imagined.never_fit,
            "incomplete": workload.incomplete,
            "machine": {"cpus": machine.cpus, "memory_bytes": memory, "gpus": len(machine.gpus)},
            "policies": [
                {"policy": each.policy, **render.plain(each.figures), "seconds": round(each.seconds, 3)}
                for each in done
            ],
        }
    )
