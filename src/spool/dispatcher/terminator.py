"""Terminate runs: TERM to the whole process tree, the grace, KILL, until no process is left.

The wrapper is spared while something else is left, so that it can write the exit code down; not for ever, since it may
have something in its way. A run whose command has ended and left processes behind goes the same way: its resources are
free when all are gone.

Nothing of this needs another process, or a descriptor that is not put by: a machine that has neither left is the very
one on which a run has to be ended.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from spool.core.model import SECOND_NS, Jid
from spool.machine import identity, processes
from spool.machine.processes import Process, Wanted, send
from spool.state.table import Live

log = logging.getLogger(__name__)

_FIRST_LOOK_NS = 10_000_000
_LONGEST_LOOK_NS = 250_000_000
_WRAPPER_GRACE_NS = 2 * SECOND_NS  # after everything else is gone or killed, for the epilog and the exit code


@dataclass(slots=True, eq=False)
class _Stopping:
    live: Live
    kill_at_ns: int  # monotonic
    look_at_ns: int = 0
    pause_ns: int = _FIRST_LOOK_NS
    told: set[Process] = field(default_factory=set)  # these have had TERM
    told_at_ticks: int = 0  # when the first of them had, as processes count their starts
    killing_since_ns: int | None = None  # the grace is over
    alone_since_ns: int | None = None  # the wrapper is all that is left since then


class Terminator:
    """The runs that are being ended. Call :meth:`tick` when it is due."""

    def __init__(self, spool_dir: str) -> None:
        self.spool_dir = spool_dir
        self._runs: dict[tuple[str, int], _Stopping] = {}
        self._blind = False  # said so, and nothing was seen since

    def add(self, live: Live, since_ns: int | None = None) -> None:
        """Begin to end *live*. *since_ns*, on the wall clock, is when it was ordered: the grace runs from there."""
        if live.key in self._runs:
            return
        elapsed = max(0, time.time_ns() - since_ns) if since_ns is not None else 0
        kill_at = time.monotonic_ns() + max(0, live.spec.kill_grace_ns - elapsed)
        self._runs[live.key] = _Stopping(live, kill_at)

    def hurry(self, live: Live) -> None:
        """Look at *live* at the next tick: its wrapper has ended, which may have been the last of it."""
        self.add(live)
        stopping = self._runs[live.key]
        stopping.look_at_ns, stopping.pause_ns = 0, _FIRST_LOOK_NS

    def forget(self, live: Live) -> None:
        """Let go of a run that is over."""
        self._runs.pop(live.key, None)

    def __contains__(self, live: Live) -> bool:
        return live.key in self._runs

    def warn(self, live: Live, name: str) -> None:
        """Send the warning signal to what the job runs; not to the shell of a command that is waiting for it."""
        members = processes_of([live], self.spool_dir)[live]
        wrapper = _wrapper_pid(live)
        spared = {wrapper}
        if isinstance(live.spec.command, str):
            parents = {process.pid: _parent(process) for process in members}
            waited_for = set(parents.values())
            spared |= {pid for pid, parent in parents.items() if parent == wrapper and pid in waited_for}
        send([process for process in members if process.pid not in spared], signal.Signals[f"SIG{name}"])

    def next_due_ns(self) -> int | None:
        """Return when :meth:`tick` has something to do, on the monotonic clock."""
        return min((stopping.look_at_ns for stopping in self._runs.values()), default=None)

    def tick(self) -> list[Live]:
        """Go on with every run that is due; return those of which no process is left."""
        now = time.monotonic_ns()
        due = [stopping for stopping in self._runs.values() if stopping.look_at_ns <= now]
        if not due:
            return []
        try:
            members = processes_of([stopping.live for stopping in due], self.spool_dir, self._known(due))
        except OSError as error:
            self._look_later(due, now, error)
            return []
        self._blind = False
        gone = []
        for stopping in due:
            left = members[stopping.live]
            if not left:
                gone.append(stopping.live)
                continue
            self._press(stopping, left, now)
            stopping.look_at_ns = now + stopping.pause_ns
            stopping.pause_ns = min(2 * stopping.pause_ns, _LONGEST_LOOK_NS)
        return gone

    def _look_later(self, due: list[_Stopping], now: int, error: OSError) -> None:
        """Wait for a machine that has too little left to say which processes there are."""
        if not self._blind:
            log.error("cannot see which processes are to be ended: %s; trying again", error.strerror)
        self._blind = True
        for stopping in due:
            stopping.look_at_ns = now + _LONGEST_LOOK_NS

    @staticmethod
    def _known(due: list[_Stopping]) -> dict[tuple[str, int], frozenset[Process]]:
        return {stopping.live.key: frozenset(stopping.told) for stopping in due}

    def _press(self, stopping: _Stopping, left: set[Process], now: int) -> None:
        wrapper = _wrapper_pid(stopping.live)
        others = {process for process in left if process.pid != wrapper}
        if others:
            stopping.alone_since_ns = None
            if now >= stopping.kill_at_ns:
                if stopping.killing_since_ns is None:
                    stopping.killing_since_ns = now
                # A wrapper that has another child whenever one was killed would go on for ever.
                spared = now < stopping.killing_since_ns + _WRAPPER_GRACE_NS
                send(others if spared else left, signal.SIGKILL)
            elif news := self._untold(stopping, others, left):
                stopping.told_at_ticks = stopping.told_at_ticks or identity.ticks_now()
                send(news, signal.SIGTERM)
                stopping.told |= news
            return
        if stopping.alone_since_ns is None:
            stopping.alone_since_ns = now
            if not left <= stopping.told:  # between two of its children: no later one is to be started
                send(left, signal.SIGTERM)
                stopping.told |= left
        elif now >= max(stopping.kill_at_ns, stopping.alone_since_ns + _WRAPPER_GRACE_NS):
            send(left, signal.SIGKILL)

    def _untold(self, stopping: _Stopping, others: set[Process], left: set[Process]) -> set[Process]:
        """Return who is to have TERM now: everybody once, and later those who began before that and were not seen.

        What a job starts to clean up after itself, and the epilog, is not told to end before the grace is over. But
        between the look and the signal a shell may have begun its next command, and waits for that before its trap.
        """
        if not stopping.told:
            return others
        pids = {process.pid for process in left}
        return {
            process
            for process in others - stopping.told
            if process.start_ticks < stopping.told_at_ticks or _parent(process) not in pids
        }


def _wrapper_pid(live: Live) -> int | None:
    return live.jid.pid if live.jid is not None else live.pid


def _parent(process: Process) -> int | None:
    stat = identity.read_stat(process.pid)
    return stat.parent if stat is not None else None


def processes_of(
    runs: Iterable[Live], spool_dir: str, known: Mapping[tuple[str, int], frozenset[Process]] = MappingProxyType({})
) -> dict[Live, set[Process]]:
    """Return the processes of each run: its session, its descendants and what carries its marks."""
    runs = list(runs)
    found = processes.scan(wanted(live, spool_dir, known.get(live.key, frozenset())) for live in runs)
    return {live: set(found[live.key]) for live in runs}


def wanted(live: Live, spool_dir: str, known: frozenset[Process] = frozenset()) -> Wanted:
    """Return what the processes of *live* are known by."""
    return Wanted(live.name, live.run, spool_dir, _identity(live), known)


def _identity(live: Live) -> Jid | None:
    """Return who the wrapper is or was; of our own child that is known before it has written its jid."""
    if live.jid is None and live.pid is not None:
        gone = Jid(live.pid, 0, identity.boot_id(), identity.pid_namespace(), identity.host())
        live.jid = identity.of_process(live.pid) if live.exit_status is None else None
        return live.jid or gone
    return live.jid
