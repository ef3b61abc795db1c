"""What all runs of a spool together use now, for the metrics: memory and CPUs, by one walk over /proc."""

from __future__ import annotations

import time
from dataclasses import dataclass

from spool.core.model import SECOND_NS, Jid, State
from spool.formats.state import StateView
from spool.machine import processes
from spool.machine.processes import Wanted
from spool.store.spool import Spool

_ALIVE = (State.STARTING, State.RUNNING, State.STOPPING)


@dataclass(frozen=True, slots=True)
class RunUsage:
    """Of all runs together."""

    memory_bytes: int = 0
    cpus: float = 0.0  # kept busy, on average since the last look


class UsageMeter:
    """Looks at the processes of all runs when asked to."""

    def __init__(self, root: str) -> None:
        self._spool = Spool(root)
        self._cpu_ns: dict[tuple[str, int], int] = {}
        self._at_ns: int | None = None

    def look(self, view: StateView) -> RunUsage:
        """Return what the runs that *view* says are alive use."""
        wanted = []
        for name, job in view.jobs.items():
            if job.state in _ALIVE and job.run is not None and not job.array:
                jid = self._spool.jid(name, job.run)
                wanted.append(Wanted(name, job.run, self._spool.root, jid if isinstance(jid, Jid) else None))
        now = time.monotonic_ns()
        used_bytes, busy_ns = 0, 0
        seen: dict[tuple[str, int], int] = {}
        for key, members in processes.scan(wanted).items():
            pids = [process.pid for process in members]
            used_bytes += processes.rss_bytes(pids)
            seen[key] = processes.cpu_time_ns(pids)
            # What ends takes its time along, unless its parent has waited for it.
            if self._at_ns is not None:
                busy_ns += max(0, seen[key] - self._cpu_ns.get(key, 0))
        since_ns = now - self._at_ns if self._at_ns is not None else 0
        self._cpu_ns, self._at_ns = seen, now
        return RunUsage(used_bytes, busy_ns / since_ns if since_ns > SECOND_NS // 100 else 0.0)
