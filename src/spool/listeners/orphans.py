"""Processes that hooks leave behind: ended by the mark of their hook, and reaped.

They come to the process of the listeners, which is their nearest subreaper.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from spool.core.model import Jid
from spool.machine import identity, processes
from spool.machine.processes import Process, Wanted, send

_WALKS = 40
_PAUSE_S = 0.005
_PATIENCE_S = 5.0

_mutex = threading.Lock()
_ours: dict[int, str] = {}  # the hooks that run now: pid -> mark


def begun(pid: int, mark: str) -> None:
    """Take note of a hook that runs, whose end somebody waits for."""
    with _mutex:
        _ours[pid] = mark


def ended(pid: int) -> None:
    """Take note that nobody waits for it any more."""
    with _mutex:
        _ours.pop(pid, None)


def end_tree(root: str, mark: str, jid: Jid | None) -> int:
    """Kill what a hook has started, and the hook itself if it lives; return how many processes that were.

    *jid* is who it is or was, where that is known.
    """
    killed: set[Process] = set()
    for _ in range(_WALKS):
        wanted = Wanted(mark, 0, root, jid, frozenset(killed))
        left = processes.scan([wanted])[wanted.key]
        if not left:
            break
        killed |= send(left, signal.SIGKILL).signalled
        time.sleep(_PAUSE_S)
    return len(killed)


class OrphanReaper:
    """Looks after the orphans of this process."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._dead: dict[int, float] = {}  # children that have ended, and since when that is known

    def end_strangers(self) -> None:
        """Kill the hooks that an earlier process of the same spool left when it was killed."""
        mine = f"{os.getpid()}."
        for pid, mark in processes.hooks_of(self._root):
            if not mark.startswith(mine):
                end_tree(self._root, mark, identity.of_process(pid))

    def end_all(self) -> None:
        """Kill the hooks that still run."""
        with _mutex:
            running = list(_ours.items())
        for pid, mark in running:
            end_tree(self._root, mark, identity.of_process(pid))

    def reap(self) -> None:
        """Take away the orphans that ended a while ago: of one that has just ended, a plugin may be the parent."""
        now = time.monotonic()
        dead = {
            pid
            for pid in processes.children_of_self() or ()
            if (stat := identity.read_stat(pid)) is not None and stat.dead
        }
        self._dead = {pid: self._dead.get(pid, now) for pid in dead}
        with _mutex:
            processes.reap(pid for pid, since in self._dead.items() if pid not in _ours and now - since > _PATIENCE_S)
