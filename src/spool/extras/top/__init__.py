"""`spool top`: a live screen of the queue, the runs and the machine. Here is its command."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import click

from spool.cli.group import Verb, opened
from spool.core.errors import SpoolError, cannot
from spool.executors import by_name

_SWITCH_S = 0.0005  # a thread that reads ten thousand jobs may delay a key by this
_THEMES = ("dark", "light", "ansi")


@click.command(cls=Verb)
@click.option(
    "--theme", type=click.Choice(_THEMES), help="Colour theme; ansi uses the terminal's colours. Default: dark."
)
@click.pass_obj
def command(root: str, theme: str | None) -> int:
    """Watch the queue, runs with their output, GPUs and ended jobs, and manage them.

    Use keys or the mouse; `?` lists the keys. The screen updates itself and costs almost nothing when idle, so it can
    stay open, over ssh too.

      spool top
      spool top --theme light
    """
    spool = opened(root)
    what = ("show", "the screen")
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        raise SpoolError(cannot(*what, "this is not a terminal", remedy="`spool ls` prints the list"))
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        why = "the terminal cannot move its cursor (TERM=dumb)"
        raise SpoolError(cannot(*what, why, remedy="`spool ls --watch` works there"))
    try:
        from spool.extras.top.app import Top
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "textual":
            raise
        remedy = "`pip install 'spool-scheduler[top]'`, or `pipx inject spool-scheduler textual`"
        raise SpoolError(cannot(*what, "textual is not installed", remedy=remedy)) from None
    with suppress(ImportError):
        by_name("tmux")  # libtmux inspects stdout at import, and the screen replaces stdout
    sys.setswitchinterval(_SWITCH_S)
    return Top(spool.root, theme or _usual_theme()).run() or 0


def _usual_theme() -> str:
    """Return the theme for the terminal's background, if COLORFGBG tells it: 0;15 is black on white."""
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return "light" if background in ("7", "15") else "dark"
