"""Old runs go by themselves where `[gc]` of the configuration has a limit: `spool gc`, every hour, beside the loop."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time

from spool.core.model import SECOND_NS
from spool.dispatcher.context import Component, Context
from spool.formats.config import RetentionPolicy
from spool.machine.child_process import import_path

log = logging.getLogger(__name__)

_EVERY_NS = 3600 * SECOND_NS


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
        self._timer.set(None if limits == RetentionPolicy() else time.monotonic_ns() + _EVERY_NS)
        if limits == RetentionPolicy():
            return
        arguments = (sys.executable, "-P", "-m", "spool", "--spool", self._spool.root, "gc")
        environment = {**os.environ, "PYTHONPATH": import_path()}
        try:
            self._removal = subprocess.Popen(
                arguments, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            log.warning("cannot remove old runs: %s; trying again in an hour", error.strerror or error)
