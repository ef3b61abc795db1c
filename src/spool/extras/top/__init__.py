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


@click.command(cls=Verb)
@click.pass_obj
def command(root: str) -> int:
    """Watch the queue, runs with their output, GPUs and ended jobs, and manage them.

    Use keys or the mouse; `?` lists the keys. The screen updates itself and costs almost nothing when idle, so it can
    stay open, over ssh too. TEXTUAL_THEME in the environment chooses other colours, such as textual-light.

      spool top
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
    return Top(spool.root).run() or 0
