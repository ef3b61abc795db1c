"""The executables in `hooks/` of the spool: told of events, asked before a start and before a cancel."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from spool.core.events import Event, EventName
from spool.formats.config import Config
from spool.formats.events import variables
from spool.formats.facts import facts, render_facts
from spool.listeners.base import Answer, Begin
from spool.listeners.discovery import CAN_BE_REFUSED, find_hooks
from spool.listeners.hookrun import Ran, run_hook

log = logging.getLogger(__name__)


class Hooks:
    """Runs the hooks of each event, one after the other. They are looked for each time, so a change counts at once."""

    name = "hooks"

    def __init__(self, root: str, config: Callable[[], Config]) -> None:
        self._root = root
        self._config = config

    def wants(self, name: EventName) -> bool:
        """Whether there are hooks for that kind of event, and nothing is asked by it."""
        return name not in CAN_BE_REFUSED and name in find_hooks(self._root).paths

    def asks(self, name: EventName) -> bool:
        """Whether the hooks are asked about that kind of event."""
        return name in CAN_BE_REFUSED

    def hear(self, event: Event, done: Callable[[], None]) -> None:
        """Run the hooks of *event*; whatever they do, it is done."""
        for path in find_hooks(self._root).paths.get(event.name, ()):
            self._run(path, event, self._config().hook_time_limit_ns)
        done()

    def ask(self, event: Event, begin: Begin) -> Answer:
        """Run the hooks of *event* until one ends with a code that is not 0; what it said is why."""
        for path in find_hooks(self._root).paths.get(event.name, ()):
            limit_ns = self._config().hook_time_limit_ns
            begin(limit_ns)
            ran = self._run(path, event, limit_ns)
            if ran.problem is not None:
                said = ran.output.strip()
                return Answer(no=f"hook {event.name}: {_brief(said) or ran.problem}")
        return Answer()

    def tick(self) -> float | None:
        """Do nothing: there is nothing that is due by itself."""
        return None

    def close(self) -> None:
        """Leave: nothing is open."""

    def _run(self, path: str, event: Event, limit_ns: int) -> Ran:
        shown = os.path.relpath(path, self._root)
        given = render_facts(facts(event))
        ran = run_hook(path, given, variables(event), self._root, limit_ns)
        for line in ran.output.splitlines():
            if line.strip():
                log.info("%s: %s", shown, _printable(line))
        about = event.job or event.reservation or event.gpu or "the dispatcher"
        if ran.problem is not None:
            level = logging.INFO if event.name in CAN_BE_REFUSED else logging.WARNING
            log.log(level, "%s for %s: %s", shown, about, ran.problem)
        if ran.left:
            log.warning("%s for %s: %d processes that it left behind were ended", shown, about, ran.left)
        return ran


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() or character == "\t" else "?" for character in text)


def _brief(text: str) -> str:
    """Return the last line that says anything: what a program says when it gives up."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _printable(lines[-1])[:300] if lines else ""
