"""What the shell completes: the names of jobs."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

_MOST = 500  # more is of no use to anybody


def complete_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a job; where a verb is for jobs of certain places only, of those."""
    from spool.client.submit import default_root
    from spool.core.layout import PLACES
    from spool.store.spool import Forbearing

    places = _PLACES.get(ctx.info_name or "", PLACES)
    head, comma, start = incomplete.rpartition(",")
    spool = Forbearing(ctx.find_root().params.get("root") or default_root())
    names = sorted({name for place in places for name in spool.names(place) if name.startswith(start)})
    return [CompletionItem(f"{head}{comma}{name}") for name in names[:_MOST]]


_PLACES = {
    "cancel": ("queued", "held", "running"),
    "hold": ("queued", "running"),
    "release": ("held",),
    "requeue": ("running", "done"),
    "edit": ("queued", "held"),
    "attach": ("running",),
    "why": ("queued", "held"),
}
