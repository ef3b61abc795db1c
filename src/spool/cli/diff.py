"""`spool diff`: what differs between two runs."""

from __future__ import annotations

import click

from spool.cli import publicjson, render
from spool.cli.common import json_option, one_job, opened
from spool.cli.group import JobArgument, Verb
from spool.query.differences import Comparison, compare
from spool.store.spool import Spool

_SHORT = 48  # cells of a value on a line of its own kind; a longer one is cut
_BEFORE = 16  # … and begins so far before the first difference


@click.command(cls=Verb)
@click.argument("one", cls=JobArgument, metavar="NAME[/RUN]")
@click.argument("other", cls=JobArgument, metavar="NAME[/RUN]")
@json_option
@click.pass_obj
def command(root: str, one: str, other: str, as_json: bool) -> int:
    """Show what differs between two runs.

    Compares their job files, parameters, code (with `[capture]` in the configuration), packages, environment, machine
    and GPUs, and their outcomes. Without RUN it is the newest run. The exit code is 0 whether or not anything differs.

      spool diff train/1 train/4
      spool diff sweep_3 sweep_7
      spool diff train/1 train/2 --json

    By hand: diff -r jobs/train/1 jobs/train/4
    """
    spool = opened(root)
    found = compare(spool, run_named(spool, one), run_named(spool, other))
    if as_json:
        render.as_json({"version": 1, **publicjson.plain(found)})
    else:
        _print(found)
    return 0


def run_named(spool: Spool, text: str) -> tuple[str, int | None]:
    """Return the job and the run that `JOB/RUN` names; the run is None for a job alone. Raises NoSuchJob."""
    head, slash, run = text.rpartition("/")
    if slash and head and run.isascii() and run.isdigit() and len(run) < 10:
        return one_job(spool, head), int(run)
    return one_job(spool, text), None


def _print(found: Comparison) -> None:
    if not found.differences:
        render.say(f"{found.one} and {found.other} do not differ")
    section = ""
    rows: list[list[str]] = []

    def flush() -> None:
        if rows:
            columns = (render.Column(section.upper()), render.Column(found.one), render.Column(found.other))
            render.table(columns, rows)
            render.say()
            rows.clear()

    for each in found.differences:
        if each.section != section:
            flush()
            section = each.section
        rows.append([each.key, *_short(each.one, each.other)])
    flush()
    for note in found.notes:
        render.prose(note)


def _short(one: str | None, other: str | None) -> tuple[str, str]:
    """Return two values as cells; of longer ones the part in which they differ."""
    lines = [" ".join(value.split()) if value is not None else "-" for value in (one, other)]
    common = 0
    if max(map(len, lines)) > _SHORT:
        differ = (at for at, (left, right) in enumerate(zip(*lines, strict=False)) if left != right)
        common = next(differ, min(map(len, lines)) if lines[0] != lines[1] else 0)
    begin = common - _BEFORE if common > _SHORT - _BEFORE else 0
    first, second = (_cut(line, begin) for line in lines)
    return first, second


def _cut(line: str, begin: int) -> str:
    line = f"…{line[begin + 1 :]}" if begin else line
    return line if len(line) <= _SHORT else f"{line[: _SHORT - 1]}…"
