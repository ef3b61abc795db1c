"""Time limits and memory limits: when a run is warned, and when it is stopped for being over one.

Enforced from the grant and the evidence, so it is the same for adopted runs and right after a restart.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from spool.core.model import SECOND_NS, Stop, StopKind
from spool.core.units import format_duration, show_size
from spool.dispatcher.confinement import Confinement, Thing
from spool.dispatcher.terminator import Terminator, processes_of, wanted
from spool.dispatcher.timers import Pace
from spool.machine import identity
from spool.machine.processes import Census, pss_bytes, rss_bytes
from spool.state.table import Live, Table

log = logging.getLogger(__name__)

MEMORY_EVERY_NS = SECOND_NS
_SHARE = 50  # and it may cost one part in so many of a processor
_AGAIN_NS = SECOND_NS // 4  # after an error


@dataclass(frozen=True, slots=True, order=True)
class _Moment:
    at_ns: int  # on the clock since boot
    key: tuple[str, int]
    warning: bool


class Limits:
    """Watches the limits of live runs. *order* orders a run to be stopped."""

    def __init__(
        self, table: Table, stopper: Terminator, order: Callable[[Live, Stop], None], confinement: Confinement
    ) -> None:
        self._confinement = confinement
        self._table = table
        self._stopper = stopper
        self._order = order
        self._moments: list[_Moment] = []
        self._with_memory: set[tuple[str, int]] = set()
        self._census = Census()
        self._pace = Pace(_SHARE)
        self._memory_at_ns = 0

    def add(self, live: Live) -> None:
        """Watch a run that has been started or adopted."""
        limit = live.spec.time_limit_ns
        if limit is not None:
            end = live.started_boot_ns + limit
            heapq.heappush(self._moments, _Moment(end, live.key, False))
            signal = live.spec.signal
            if signal is not None:
                # Later than that when it was adopted is better than never.
                heapq.heappush(self._moments, _Moment(end - signal.before_ns, live.key, True))
        if live.grant.memory_bytes is not None:
            self._with_memory.add(live.key)
            if live.adopted:  # what is of it was seen as a stranger's
                self._census.ask_again()
            elif live.pid is not None:  # it was a shell of nobody's
                self._census.ask_again(live.pid)

    def next_due_ns(self) -> int | None:
        """Return how long until :meth:`check` has something to do."""
        waits = []
        if self._moments:
            waits.append(self._moments[0].at_ns - time.clock_gettime_ns(time.CLOCK_BOOTTIME))
        if self._with_memory:
            waits.append(self._memory_at_ns - time.monotonic_ns())
        return max(0, min(waits)) if waits else None

    def check(self) -> None:
        """Warn and stop what is over a limit."""
        now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        while self._moments and self._moments[0].at_ns <= now:
            moment = heapq.heappop(self._moments)
            live = self._table.live.get(moment.key)
            if live is None or not live.holds_room or live.stop is not None:
                continue
            with self._confinement.of(Thing.of_run(live.key), "limit") as piece:
                self._enforce(live, warning=moment.warning)
            if piece.failed:
                heapq.heappush(self._moments, replace(moment, at_ns=now + _AGAIN_NS))
        if self._with_memory and time.monotonic_ns() >= self._memory_at_ns:
            with self._confinement.service("watch", "the memory of runs"), self._pace:
                self._check_memory()
            self._memory_at_ns = time.monotonic_ns() + max(MEMORY_EVERY_NS, self._pace.pause_ns)

    def _enforce(self, live: Live, *, warning: bool) -> None:
        """Warn a run of its time limit, or stop it."""
        signal = live.spec.signal
        if warning and signal is not None:
            log.info("job %s: %s before its time limit", live.name, signal.name)
            self._stopper.warn(live, signal.name)
        elif not warning:
            limit = live.spec.time_limit_ns or 0
            self._order(live, Stop(StopKind.TIMEOUT, "spool", time.time_ns(), f"limit {format_duration(limit)}"))

    def _check_memory(self) -> None:
        """Stop what is over its memory limit: what seems to be is looked at again, closely."""
        runs = {key: live for key in self._with_memory if (live := self._table.live.get(key)) and live.holds_room}
        runs = {key: live for key, live in runs.items() if not _is_counted(live)}
        self._with_memory = set(runs)
        found = self._census.look(lambda: (wanted(live, self._stopper.spool_dir) for live in runs.values()))
        over = []
        for key, live in runs.items():
            members, limit = found.get(key, {}), live.grant.memory_bytes
            # Resident sizes count shared pages once for each process: cheap, and never too low.
            used = rss_bytes(members)
            if used <= (live.peak_memory_bytes or 0) and (limit is None or used <= limit):
                continue
            own = [pid for pid, process in members.items() if identity.start_ticks(pid) == process.start_ticks]
            used = rss_bytes(own)
            if limit is not None and used > limit:
                used = pss_bytes(own)
            if limit is not None and used > limit:
                over.append(live)
            else:
                _take_peak(live, used)
        for live, processes in processes_of(over, self._stopper.spool_dir).items():
            self._compare(live, pss_bytes(process.pid for process in processes))

    def _compare(self, live: Live, used: int) -> None:
        limit = live.grant.memory_bytes
        _take_peak(live, used)
        if limit is not None and used > limit and live.stop is None:
            words = f"used {show_size(used)} of {show_size(limit)}"
            self._order(live, Stop(StopKind.MEMORY, "spool", time.time_ns(), words))


def _take_peak(live: Live, used: int) -> None:
    if used:  # else nobody is left to be asked
        live.peak_memory_bytes = max(live.peak_memory_bytes or 0, used)


def _is_counted(live: Live) -> bool:
    """Whether the kernel counts what a run has in memory, and ends it by itself when that is too much."""
    return live.group is not None and live.group.peak_memory_bytes() is not None
