"""The steps of a pass that the loop does not need: those of capabilities, and the removal of old runs.

Each is made once the configuration asks for it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

from spool.core.model import SECOND_NS
from spool.core.scheduler import Start
from spool.dispatcher.context import Component, Context
from spool.dispatcher.wakeup import Wakeup
from spool.formats.capabilities import capabilities, loaded
from spool.formats.config import RetentionPolicy
from spool.machine.commands import import_path
from spool.state.run import ActiveRun

log = logging.getLogger(__name__)

_GC_EVERY_NS = 3600 * SECOND_NS


class Steps(Protocol):
    """What a capability does in a pass of the dispatcher. Nothing here may wait, nor hold up a start for good."""

    @property
    def waiting(self) -> bool:
        """Whether an answer is still missing."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is an answer; it never changes."""

    def ready(self, starts: Sequence[Start]) -> list[Start]:
        """Return the starts that may go on now; the others keep their place in the plan, and come again.

        The reason of a job that waits begins with the name of the capability and a colon.
        """

    def put(self, live: ActiveRun) -> None:
        """Add to the records of a claimed run, before its launch. Raises nothing."""

    def work(self) -> bool:
        """Record the answers; return whether there were any."""

    def close(self) -> None:
        """Release everything."""


class ContributedSteps(Component):
    """The steps of all capabilities that have some."""

    def __init__(self, context: Context, wakeup: Wakeup) -> None:
        super().__init__(context)
        self._wakeup = wakeup
        self._made: dict[str, Steps] = {}  # by the capability

    @property
    def waiting(self) -> bool:
        """Whether an answer is still missing."""
        return any(steps.waiting for steps in self._made.values())

    def ready(self, starts: list[Start]) -> list[Start]:
        """Return the starts that may go on now."""
        for one in capabilities():
            if starts and one.steps and loaded(one.wanted)(self._settings.config):
                steps = self._made.get(one.name) or self._make(one.name, one.steps)
                starts = steps.ready(starts) if steps is not None else starts
        return starts

    def _make(self, name: str, target: str) -> Steps | None:
        try:
            steps: Any = loaded(target)(self._context)
        except (ImportError, OSError) as error:  # it holds up no start
            log.warning("cannot load %s: %s", name, error)
            return None
        self._wakeup.watch_files(steps.fileno(), lambda: None)  # each pass takes in the answers
        self._made[name] = steps
        return self._made[name]

    def put(self, live: ActiveRun) -> None:
        """Add to the records of a claimed run, before its launch."""
        for steps in self._made.values():
            steps.put(live)

    def work(self) -> bool:
        """Record the answers; return whether there were any."""
        answered = [steps.work() for steps in self._made.values()]  # each, whatever the others have
        return any(answered)

    def close(self) -> None:
        """Release everything."""
        for steps in self._made.values():
            steps.close()


class Retention(Component):
    """Removes the runs beyond the limits: as soon as a limit is set or changed, then every hour.

    A removal can take minutes, so that a process of its own does it. What it cannot remove is told on the standard
    error of the dispatcher. It goes on if the dispatcher leaves.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._timer = context.timers.timer("old runs")
        self._limits = RetentionPolicy()  # of the last removal
        self._removal: subprocess.Popen[bytes] | None = None

    @property
    def has_work(self) -> bool:
        """Whether a removal is going on, or the limits are new."""
        return self._removal is not None or self._settings.config.gc != self._limits

    def work(self) -> None:
        """Begin a removal if one is due and none is going on."""
        if self._removal is not None and self._removal.poll() is None:
            return
        self._removal, limits = None, self._settings.config.gc
        if limits == self._limits and (self._timer.at_ns is None or self._timer.at_ns > time.monotonic_ns()):
            return
        self._limits = limits
        if limits == RetentionPolicy():
            self._timer.set(None)
            return
        self._timer.set(time.monotonic_ns() + _GC_EVERY_NS)
        arguments = (sys.executable, "-P", "-m", "spool", "--spool", self._spool.root, "gc")
        environment = {**os.environ, "PYTHONPATH": import_path()}
        try:
            self._removal = subprocess.Popen(
                arguments, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            log.warning("cannot remove old runs: %s; trying again in an hour", error.strerror or error)
