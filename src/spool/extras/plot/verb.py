"""`spool plot`: a picture of runs over time."""

from __future__ import annotations

import os
import shutil
import time

import click

from spool.cli import render
from spool.cli.group import Verb, moment_of, viewed
from spool.cli.render import tell
from spool.core.accounting import By, RunFilter
from spool.core.errors import SpoolError, UsageError, cannot
from spool.core.reasons import count_of
from spool.extras.plot.pictures import MARGIN, NARROWEST, document, lines
from spool.query.timeline import GROUPINGS, Frame, timeline

_FILE_COLUMNS, _FILE_CPU_ROWS, _CPU_ROWS = 1000, 32, 8


@click.command(cls=Verb)
@click.option("-o", "--output", metavar="FILE", help="Write an .svg file.")
@click.option("--since", metavar="TIME", help='Start: "7d" (ago), 0:00, friday, a date. Default: a day ago.')
@click.option("--until", metavar="TIME", help="End. Default: now.")
@click.option("-u", "--user", metavar="USER", help="Only this user's runs.")
@click.option("-p", "--project", metavar="NAME", help="Only runs in this project.")
@click.option(
    "--by",
    type=click.Choice([each.value for each in GROUPINGS]),
    help="What the colours stand for. Default: user, or state.",
)
@click.pass_obj
def command(
    root: str,
    output: str | None,
    since: str | None,
    until: str | None,
    user: str | None,
    project: str | None,
    by: str | None,
) -> int:
    """Plot what ran when and where, in the terminal or to a file.

    The picture has a row for each GPU and each CPU with its runs, and says how much was in use. CPU rows stand for
    particular CPUs only with `cpu_pinning`. Without --since it shows the last day, from its first run on.

      spool plot
      spool plot --since 7d --by project -o week.svg
    """
    now_ns = time.time_ns()
    width = max(shutil.get_terminal_size((80, 24)).columns, NARROWEST)
    size = (width - MARGIN, _CPU_ROWS)
    if output is not None:
        size = _FILE_COLUMNS, _FILE_CPU_ROWS
        if os.path.splitext(output)[1].lower() != ".svg":
            remedy = "a browser shows it; `rsvg-convert` makes a .png of it"
            raise UsageError(cannot("plot", output, "the file must be an .svg", remedy=remedy))
    wanted = RunFilter(moment_of("--since", since, now_ns), moment_of("--until", until, now_ns), user, project)
    found = timeline(viewed(root), wanted, Frame(*size, By(by) if by is not None else None), now_ns)
    if not found.runs:
        what = "nothing ran in this period" if wanted.anyone else "no run in this period matches"
        tell(f"{what}; look further back, as with --since 7d")
    elif output is not None:
        try:
            with open(output, "w", encoding="utf-8") as file:
                file.write(document(found))
        except OSError as error:
            raise SpoolError(cannot("plot", output, error.strerror or str(error))) from None
        tell(f"drew {output}")
    else:
        for line in lines(found, width):
            render.say(drawn=line)
    if found.unreadable:
        tell(f"{count_of(found.unreadable, 'line')} of the history could not be read")
    for problem in found.problems:
        tell(problem)
    return 0
