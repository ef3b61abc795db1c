"""`spool demo`: a demo with real jobs in a temporary spool."""

from __future__ import annotations

import shutil
import sys
import tempfile

import click

from spool.cli import render
from spool.cli.charts import charts
from spool.cli.group import Verb
from spool.cli.telling import tell
from spool.client.demonstration import DemoEvent, Demonstration, went_well
from spool.core.model import SECOND_NS, Result, State

_NEXT = (
    ("submit -- sleep 30", "your first job; the spool and the dispatcher are made for you"),
    ("ls", "the jobs; `spool why`, `spool log` and `spool cancel` take a name"),
    ("submit --help", "CPUs, memory, GPUs, time limits, arrays, dependencies"),
)


@click.command(cls=Verb)
@click.option("--keep", is_flag=True, help="Keep the spool and its results, and print where they are.")
@click.option("-q", "--quiet", is_flag=True, help="Print only the final chart.")
def command(keep: bool, quiet: bool) -> int:
    """Run a demo with real jobs in a temporary spool.

    Thirteen jobs: one makes data; others count, pack and sum it; four estimate pi; one fails and is retried; one never
    ends and hits its time limit, so the job that depends on it is cancelled. It takes a few seconds and leaves nothing
    behind.
    """
    directory = tempfile.mkdtemp(prefix="spool-demo-")
    demonstration = Demonstration(directory)
    try:
        names = demonstration.begin()
        if not quiet:
            render.say(f"{len(names)} jobs in {demonstration.root}/queued")
            render.say()
        for happened in demonstration.happenings():
            if not quiet:
                render.say(_line(happened, demonstration.begun_at_ns), at_once=True)
        if demonstration.failed is not None:
            for line in ("the dispatcher failed:", *demonstration.failed.splitlines()):
                tell(line)
            return 1
        results = demonstration.results()
        _picture(demonstration, names, results)
        if not quiet:
            render.say()
            for name in names:
                if line := demonstration.last_line(name):
                    render.say(f"{name:8}  {line}")
            render.say()
            program = "spool" if shutil.which("spool") is not None else sys.argv[0]  # `.venv/bin/spool demo`
            render.pairs((f"{program} {words}", why) for words, why in _NEXT)
        return 0 if went_well(results) else 1
    finally:
        demonstration.end()
        if keep:
            render.say()
            render.say(f"kept: {directory}; look at it with `spool --spool {demonstration.root} ls`")
        else:
            shutil.rmtree(directory, ignore_errors=True)


def _line(happened: DemoEvent, begun_at_ns: int) -> str:
    seconds = max(0, happened.at_ns - begun_at_ns) / SECOND_NS
    result = happened.result
    if result is None:
        return f"{seconds:5.1f}s  {happened.name:8} starts"
    words = result.outcome.value
    if result.outcome is not State.FINISHED:
        words += f": {result.reason}"
    elif result.started_at_ns is not None and result.ended_at_ns is not None:
        words += f" after {(result.ended_at_ns - result.started_at_ns) / SECOND_NS:.2f}s"
    return f"{seconds:5.1f}s  {happened.name:8} {words}"


def _picture(demonstration: Demonstration, names: list[str], results: list[Result]) -> None:
    runs: dict[str, list[Result]] = {name: [] for name in names}
    for result in results:
        runs.setdefault(result.job, []).append(result)
    begin_ns = min((result.submitted_at_ns for result in results if result.submitted_at_ns), default=0)
    end_ns = max((result.ended_at_ns for result in results if result.ended_at_ns), default=begin_ns)
    if (drawing := charts()) is None:
        return
    render.say()
    for line in drawing.gantt(runs, begin_ns, end_ns, min(120, shutil.get_terminal_size().columns)):
        render.say(drawn=line)
