"""What lies in `hooks/` and is not run, and which hooks may say no: for `spool doctor`."""

from __future__ import annotations

from collections.abc import Iterator

from spool.dispatcher.doctor import Finding, Level, good
from spool.listeners.hookfiles import find_hooks


def examine_hooks(root: str) -> Iterator[Finding]:
    """Check the hooks of the spool at *root*. Nothing, if there are none."""
    hooks = find_hooks(root)
    for problem in hooks.problems:
        yield Finding("hooks", Level.WARN, problem, "docs/HOOKS.md says what is run")
    if hooks.paths and not hooks.problems:
        yield good("hooks", f"they are run for {', '.join(sorted(hooks.paths))}")
