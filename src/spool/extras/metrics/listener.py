"""Metrics for Prometheus, in a file that node_exporter's textfile collector reads (docs/EVENTS.md)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from spool.core import layout
from spool.core.events import Event, EventName
from spool.core.layout import Layout
from spool.core.model import ALIVE, SECOND_NS, Jid
from spool.extras.metrics.sums import COUNTED, RunUsage, Sums
from spool.formats.config import Config
from spool.formats.state import StateView, parse_state
from spool.listeners import MESSAGES, Listener
from spool.machine import processes
from spool.machine.processes import Sought
from spool.store.disk import Disk
from spool.store.reading import read_bytes
from spool.store.spool import Spool

log = logging.getLogger(__name__)

EVERY_S = 15.0
NOT_INSTALLED = "metrics need prometheus_client; pip install 'spool-scheduler[metrics]'"
_MODE = 0o644  # readable by the user of node_exporter
_MOST_BYTES = 1 << 30
_ALIVE_NS = 60 * SECOND_NS  # without a sign of life for this long, the dispatcher counts as gone


class Metrics(Listener):
    """Rewrites the file, at most every 15 seconds. *config* returns the configuration in force."""

    name = "metrics"

    def __init__(self, root: str, config: Callable[[], Config]) -> None:
        self._root = root
        self._config = config
        self._sums = Sums()
        self._disk = Disk(os.path.join(root, layout.STAGING))
        self._use = UsageMeter(root)
        self._next = time.monotonic()
        self._complaint = ""

    def wants(self, name: EventName) -> bool:
        """Whether events of that kind are counted."""
        return name in COUNTED

    def hear(self, event: Event, done: Callable[[], None]) -> None:
        """Count the event."""
        self._sums.take(event)
        done()

    def tick(self) -> float | None:
        """Write the file if it is due."""
        left = self._next - time.monotonic()
        if left > 0:
            return left
        self._write()
        self._next = time.monotonic() + EVERY_S
        return EVERY_S

    def close(self) -> None:
        """Write the file a last time: as far as this process knows, no dispatcher is running any more."""
        self._write(up=False)

    def _write(self, *, up: bool = True) -> None:
        stated = self._config().part("metrics")
        if stated is None:
            return
        path = os.path.expanduser(stated)
        try:
            from spool.extras.metrics.prometheus import Numbers, render
        except ImportError:
            self._complain(NOT_INSTALLED)
            return
        view, heartbeat_ns = self._look()
        alive = up and heartbeat_ns is not None and time.time_ns() - heartbeat_ns < _ALIVE_NS
        text = render(
            Numbers(
                spool_dir=self._root,
                sums=self._sums,
                up=alive,
                heartbeat_s=heartbeat_ns / SECOND_NS if heartbeat_ns is not None else None,
                view=view,
                use=self._use.look(view) if view is not None else RunUsage(),
                messages=MESSAGES.read(),
            )
        )
        try:
            self._disk.put_beside(path, text, _MODE)
        except OSError as error:
            self._complain(f"cannot write the metrics: {path}: {error.strerror or error}")
            return
        self._complaint = ""

    def _look(self) -> tuple[StateView | None, int | None]:
        path = Layout(self._root).at(layout.STATE)
        try:
            heartbeat_ns = os.stat(path).st_mtime_ns
        except OSError:
            return None, None
        data = read_bytes(path, _MOST_BYTES)
        return parse_state(data) if data else None, heartbeat_ns

    def _complain(self, words: str) -> None:
        if words != self._complaint:
            log.error("%s", words)
        self._complaint = words


class UsageMeter:
    """Measures the total resource use of a spool's runs."""

    def __init__(self, root: str) -> None:
        self._spool = Spool(root)
        self._cpu_ns: dict[tuple[str, int], int] = {}
        self._at_ns: int | None = None

    def look(self, view: StateView) -> RunUsage:
        """Return the use of the runs that are alive according to *view*."""
        now = time.monotonic_ns()
        used_bytes, busy_ns = 0, 0
        seen: dict[tuple[str, int], int] = {}
        for name, job in view.jobs.items():
            if job.state not in ALIVE or job.run is None or job.array:
                continue
            key, jid = (name, job.run), self._spool.jid(name, job.run)
            found = processes.family(Sought(*key, self._spool.root, jid if isinstance(jid, Jid) else None)).values()
            used_bytes += processes.rss_bytes(found)
            seen[key] = processes.cpu_time_ns(found)
            # The CPU time of an ended process is lost, unless its parent has waited for it.
            if self._at_ns is not None:
                busy_ns += max(0, seen[key] - self._cpu_ns.get(key, 0))
        since_ns = now - self._at_ns if self._at_ns is not None else 0
        self._cpu_ns, self._at_ns = seen, now
        return RunUsage(used_bytes, busy_ns / since_ns if since_ns > SECOND_NS // 100 else 0.0)
