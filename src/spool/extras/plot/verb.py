"""`spool plot`: a picture of runs over time, resource use, and waits."""

from __future__ import annotations

import shutil
import sys
import time

import click

from spool.cli import publicjson, render
from spool.cli.common import json_option, moment_of, viewed
from spool.cli.group import Verb
from spool.cli.telling import tell
from spool.core.accounting import By, RunFilter
from spool.core.errors import UsageError
from spool.core.reasons import count_of
from spool.extras.plot.pictures import FILE_SIZE, PANELS, TerminalPicture, checked, document
from spool.extras.plot.svg import save
from spool.formats.wire import render_instant
from spool.query.timeline import GROUPINGS, Frame, timeline

JSON_SIZE = (240, 64)
"""The columns and the CPU rows of the JSON values, whatever the terminal is."""

_PROMPT = 2  # lines of the terminal that a picture leaves to the command and the prompt after it


def _panels(ctx: click.Context, parameter: click.Parameter, text: str | None) -> tuple[str, ...]:
    """Return the panels that --show names, in the order of the picture."""
    words = {word.strip().lower() for word in (text or "").split(",") if word.strip()}
    for word in sorted(words - {*PANELS}):
        raise click.UsageError(f"unknown panel {word!r}; the panels are {', '.join(PANELS)}")
    if text is not None and not words:
        raise click.UsageError(f"--show is empty; the panels are {', '.join(PANELS)}")
    return tuple(panel for panel in PANELS if text is None or panel in words)


@click.command(cls=Verb)
@click.option("-o", "--output", metavar="FILE", help="Write an .svg file.")
@click.option("--since", metavar="TIME", help='Start: "7d" (ago), 0:00, friday, a date. Default: a day ago.')
@click.option("--until", metavar="TIME", help="End. Default: now.")
@click.option("-u", "--user", metavar="USER", help="Only this user's runs.")
@click.option("-p", "--project", metavar="NAME", help="Only runs in this project.")
@click.option("--tag", metavar="TAG", help="Only runs of jobs with this tag.")
@click.option(
    "--by",
    type=click.Choice([each.value for each in GROUPINGS]),
    help="What the colours stand for. Default: user, or state.",
)
@click.option(
    "--show", "panels", metavar="PANEL,...", callback=_panels, help=f"Only these panels: {', '.join(PANELS)}."
)
@click.option("--dark", is_flag=True, help="Use a dark background for the file.")
@json_option
@click.pass_obj
def command(
    root: str,
    output: str | None,
    since: str | None,
    until: str | None,
    user: str | None,
    project: str | None,
    tag: str | None,
    by: str | None,
    panels: tuple[str, ...],
    dark: bool,
    as_json: bool,
) -> int:
    """Plot what ran when and where, in the terminal or to a file.

    The picture has a row for each GPU and each CPU with its runs, and shows how much was in use, how long runs waited
    before they started, and how much memory they requested and used. CPU rows stand for particular
    CPUs only with `cpu_pinning`. Without
    --since it shows the last day, from its first run on. On a terminal it is as high as that, and names the panels that
    have no room; --show draws them.

      spool plot
      spool plot --since 7d --by project -o week.svg
      spool plot --user alice --show gpus,waits
    """
    now_ns = time.time_ns()
    if output is not None and as_json:
        raise UsageError("cannot plot runs: --output and --json cannot be combined; give one of them")
    if dark and output is None:
        raise UsageError("cannot plot runs: --dark is for files; also give --output FILE")
    if output is not None:
        checked(output)
    terminal = shutil.get_terminal_size((80, 24))
    fits = sys.stdout.isatty() and len(panels) == len(PANELS)
    screen = TerminalPicture(terminal.columns, terminal.lines - _PROMPT if fits else None)
    wanted = RunFilter(moment_of("--since", since, now_ns), moment_of("--until", until, now_ns), user, project, tag)
    size = FILE_SIZE if output is not None else JSON_SIZE if as_json else (screen.columns, screen.cpu_rows)
    found = timeline(viewed(root), wanted, Frame(*size, By(by) if by is not None else None), now_ns)
    if as_json:
        values = publicjson.plain(found)
        del values["at_ns"]
        render.as_json({"version": 1, "at": render_instant(found.at_ns), **values})
    elif not found.runs:
        what = "nothing ran in this period" if wanted.anyone else "no run in this period matches"
        tell(f"{what}; look further back, as with --since 7d")
    elif output is not None:
        save(output, document(found, panels, dark=dark))
        tell(f"drew {output}")
    else:
        for line in screen.lines(found, panels):
            render.say(drawn=line)
    if found.unreadable:
        tell(f"{count_of(found.unreadable, 'line')} of the history could not be read")
    for problem in found.problems:
        tell(problem)
    return 0
