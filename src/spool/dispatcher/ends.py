"""Which runs are over: told by the ends of processes, and by a poll where nothing tells."""

from __future__ import annotations

import time

from spool.core.lifecycle import Liveness
from spool.core.model import SECOND_NS
from spool.dispatcher.conclude import Concluder
from spool.dispatcher.confinement import Confinement, Thing
from spool.dispatcher.terminator import Terminator
from spool.dispatcher.wakeup import Wakeup
from spool.machine.cgroups import RunGroup
from spool.state.table import Live, Table
from spool.store.spool import Prober

POLL_NS = SECOND_NS  # where no event tells of an end, or of a change of the files


_FIND_OUT = "find out the end of"


class Ends:
    """Finds the runs of which nothing is left."""

    def __init__(
        self,
        table: Table,
        concluder: Concluder,
        stopper: Terminator,
        wakes: Wakeup,
        prober: Prober,
        confinement: Confinement,
    ) -> None:
        self.confinement = confinement
        self.table = table
        self.concluder = concluder
        self.stopper = stopper
        self.wakes = wakes
        self.prober = prober
        self._suspects: set[tuple[str, int]] = set()  # runs whose end there is reason to look for
        self._polled: dict[tuple[str, int], Live] = {}  # runs of whose end no event tells
        self._ended: list[Live] = []  # found, and nobody was told of them
        self._poll_at_ns = 0

    def watch(self, live: Live) -> None:
        """Find the end of a run from now on; call it once events tell of that, or cannot."""
        if _unwatched(live):
            self._polled[live.key] = live

    def suspect(self, live: Live) -> None:
        """Have the next call of :meth:`collect` look at the evidence of *live*."""
        self._suspects.add(live.key)

    def next_due_ns(self) -> int | None:
        """Return when the next poll is due, on the monotonic clock; None if every end raises an event."""
        return self._poll_at_ns if self._polled else None

    def collect(self) -> list[Live]:
        """Return the runs that are over, and it is known how. The room of a run is free once no process is left."""
        now = time.monotonic_ns()
        self._suspects |= {live.key for live in self.wakes.reap()}
        self._suspects |= self.wakes.ended_runs()
        if now >= self._poll_at_ns:
            self._suspects |= self._polled.keys()
            self._poll_at_ns = now + POLL_NS
        gone: list[Live] = []
        with self.confinement.service("look at", "the processes of runs that are stopped"):
            gone = self.stopper.tick()
        for live in gone:
            live.remains, live.cleared = False, True
            self.stopper.forget(live)
            self._free(live)
            self._suspects.add(live.key)
        for key in list(self._suspects):
            if self.confinement.pauses(Thing.of_run(key), _FIND_OUT):
                continue
            with self.confinement.of(Thing.of_run(key), _FIND_OUT) as piece:
                self._look_at(key)
            if not piece.failed:  # else it is looked at again
                self._suspects.discard(key)
        ended, self._ended = self._ended, []
        return ended

    def _look_at(self, key: tuple[str, int]) -> None:
        run = self.table.live.get(key)
        if run is None or run.proof is not None or run.unread:
            if run is None or run.proof is not None:
                self._polled.pop(key, None)
            return
        if self._over(run):
            self._ended.append(run)
            self.wakes.forget(run)
            self.stopper.forget(run)
            self._free(run)
        elif _unwatched(run):
            self.wakes.watch_run(run)  # its jid may be known by now
        if not _unwatched(run):
            self._polled.pop(key, None)

    def _free(self, live: Live) -> None:
        """Nothing of the run is left: what it was granted can be given to the next."""
        live.gone = True
        self.table.recount(live)

    def _over(self, live: Live) -> bool:
        """Whether nothing of the run is left; what outlived its wrapper is told to end."""
        gone = live.failure is None and not live.cleared and self._wrapper_gone(live)
        nameless = live.adopted and live.jid is None and not live.cleared and live not in self.stopper
        if nameless and self.wakes.left_behind(live):
            return False  # somebody has removed what says who its wrapper is: it lives while anything of it does
        if gone:
            if live in self.stopper or self.wakes.left_behind(live):
                if not live.remains:
                    live.remains = True
                    self.table.recount(live)  # when it ends is known better now
                self.stopper.hurry(live)
                return False
            live.cleared = True
            self._free(live)
        if live.cleared and live.group is not None:
            self._close_group(live, live.group)
        return self.concluder.conclude(live)

    def _close_group(self, live: Live, group: RunGroup) -> None:
        """Ask the control group what the run used, and whether the kernel ended it for its memory."""
        live.oom_killed = bool(group.oom_kills())
        peak, cpu_time_ns = group.peak_memory_bytes(), group.cpu_time_ns()
        live.peak_memory_bytes = peak if peak is not None else live.peak_memory_bytes
        live.cpu_time_ns = cpu_time_ns if cpu_time_ns is not None else live.cpu_time_ns
        group.remove()
        live.group = None

    def _wrapper_gone(self, live: Live) -> bool:
        if live.pid is not None:
            return live.exit_status is not None
        if live.jid is None:
            live.jid = self.concluder.jid(live)
        if live.jid is None:  # it never said who it is: whoever carries the run's mark may be it
            return time.monotonic_ns() >= live.silent_until_ns
        return self.prober.liveness(live.jid) is Liveness.GONE


def _unwatched(live: Live) -> bool:
    """Whether no event tells of the end of a run: its wrapper is neither our child nor watched by a pidfd."""
    return live.proof is None and live.pidfd is None and live.pid is None
