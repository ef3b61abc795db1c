"""The dispatcher as a process: `spool dispatch`."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress

from spool.core.errors import LockHeld
from spool.core.layout import QUEUED
from spool.core.model import SECOND_NS
from spool.dispatcher.loop import Dispatcher
from spool.store.disk import disk_is_full
from spool.store.locked import LockedSpool

log = logging.getLogger(__name__)

_WAIT_FOR_ROOM_S = 0.5
_TELLING_S = 30.0

_Version = tuple[str, int, int]  # of a job file: the job, the inode, the time of the last change


def serve(
    root: str,
    *,
    once: bool = False,
    until_idle: bool = False,
    idle_exit_ns: int | None = None,
    lock_wait_s: float = 1.0,
) -> int:
    """Be the dispatcher of the spool at *root* until told to leave; return the exit code.

    *once*: one pass, and what follows from it at once. *until_idle*: leave when nothing waits or runs.
    *idle_exit_ns*: leave when there was nothing to do for so long. Raises LockHeld if another dispatcher lives,
    but with *once* that is no error: it does what is to be done.
    """
    left_over: set[_Version] = set()
    while True:
        try:
            spool = LockedSpool(root, wait_s=lock_wait_s)
        except LockHeld:
            if once:
                return 0
            raise
        dispatcher = None
        try:
            dispatcher = Dispatcher(spool)
            logging.getLogger("spool").setLevel(dispatcher.settings.config.log_level.upper())
            logging.getLogger("spool").addHandler(dispatcher.report.counts)
            dispatcher.open()
            log.info("dispatcher serves %s", spool.root)
            _run(dispatcher, once=once, until_idle=until_idle, idle_exit_ns=idle_exit_ns)
            told = dispatcher.wakes.leaving
            waiting = [(job.name, job.queued) for job in dispatcher.table.jobs.values() if job.queued is not None]
            known: set[_Version] = {(name, file.inode, file.mtime_ns) for name, file in waiting}
        finally:
            if dispatcher is not None:
                dispatcher.close()
                logging.getLogger("spool").removeHandler(dispatcher.report.counts)
            spool.release()
        if once or until_idle:
            dispatcher.telling.listening.join(
                _TELLING_S
            )  # so that what was to be told has been, where that is possible
        # What was submitted, released or mended between the last look and the release of the lock has seen a dispatcher
        # live. What a second dispatcher does not take either is no job, but a link or a directory of such a name.
        before, left_over = left_over, set() if told or once else _queued(spool) - known
        if not left_over - before:
            log.info("dispatcher leaves; what runs goes on")
            return 0


def _queued(spool: LockedSpool) -> set[_Version]:
    """Return which files have the name of a job and lie in `queued/`."""
    found = set()
    for name in spool.names(QUEUED):
        with suppress(OSError):
            status = os.lstat(spool.layout.job_file(QUEUED, name))
            found.add((name, status.st_ino, status.st_mtime_ns))
    return found


def _run(dispatcher: Dispatcher, *, once: bool, until_idle: bool, idle_exit_ns: int | None) -> None:
    full = False
    while not dispatcher.wakes.leaving:
        try:
            began_ns = time.perf_counter_ns()
            more = dispatcher.turn()
            dispatcher.report.counts.passed(time.perf_counter_ns() - began_ns)
        except OSError as error:
            if once or not disk_is_full(error):
                raise
            if not full:
                log.error("the disk is full: nothing starts, what ends is filed when there is room")
            full = True
            time.sleep(_WAIT_FOR_ROOM_S)
            continue
        full = False
        if more:
            dispatcher.sleep(0)
            continue
        if (once and not dispatcher.asking) or (until_idle and (dispatcher.idle or dispatcher.stuck)):
            return
        limit = None
        if idle_exit_ns is not None:
            limit = dispatcher.busy_at_ns + idle_exit_ns - time.monotonic_ns()
            if dispatcher.idle and limit <= 0:
                return
            limit = max(limit, SECOND_NS)
        dispatcher.sleep(limit)
