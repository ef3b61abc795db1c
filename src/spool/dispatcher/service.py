"""The dispatcher as a process: `spool dispatch`."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module, invalidate_caches
from typing import TypeVar

from spool.client.submit import make_spool
from spool.core.errors import ExitCode, LockHeld
from spool.core.layout import QUEUED
from spool.core.model import SECOND_NS
from spool.dispatcher.loop import Dispatcher
from spool.formats import capabilities
from spool.store.disk import remedy_for
from spool.store.locked_spool import LockedSpool

log = logging.getLogger(__name__)

PRELOADED = (
    # ours
    "spool.executors.process",
    "spool.formats.jobfile",
    "spool.state.past",
    # third-party
    "filelock",
    "psutil",
    "tomli",
    "tomli_w",
    # of the standard library
    "ctypes",
    "difflib",
    "encodings.ascii",
    "encodings.latin_1",
    "importlib.resources",
    "inspect",
    "linecache",
    "reprlib",
    "traceback",
    "zoneinfo",
)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0  # while the spool cannot be used
_TELLING_S = 45.0  # a hook may take 30

Made = TypeVar("Made")
_Version = tuple[str, int, int]  # version of a job file: the job, the inode, the time of the last change


def serve(root: str, *, once: bool = False, until_idle: bool = False, idle_exit_ns: int | None = None) -> int:
    """Run the dispatcher of the spool at *root* until told to leave; return the exit code.

    *once*: one pass, and what follows from it at once. *until_idle*: leave when no job waits or runs; the code tells
    whether a job failed. *idle_exit_ns*: leave after this time without work. Raises LockHeld if another dispatcher is
    running; with *once* that is not an error, because the other one does the work.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # they stay pending until a dispatcher handles them
    try:
        return _serve(root, once, until_idle, idle_exit_ns)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(root: str, once: bool, until_idle: bool, idle_exit_ns: int | None) -> int:
    left_over: set[_Version] = set()
    failures = 0
    # A dispatcher started in the background leaves: the next submission starts another one.
    stays = not once and idle_exit_ns is None
    while True:
        try:
            spool = _made(partial(LockedSpool, root), root, patient=lambda: stays and os.path.isdir(root))
        except LockHeld:
            if once:
                return 0
            raise
        if spool is None:
            return 0
        dispatcher = None
        try:
            dispatcher = _made(partial(_open, spool, anew=not once), spool.root, patient=lambda: not once)
            if dispatcher is None:
                return 0
            log.info("dispatcher serves %s", spool.root)
            _run(dispatcher, once=once, until_idle=until_idle, idle_exit_ns=idle_exit_ns)
            held_up = dispatcher.confinement.held_up()
            told = dispatcher.wakeup.leaving
            failures += dispatcher.outcomes.failures
            waiting = [(job.name, job.queued) for job in dispatcher.state.jobs.values() if job.queued is not None]
            known: set[_Version] = {(name, file.inode, file.mtime_ns) for name, file in waiting}
        finally:
            if dispatcher is not None:
                dispatcher.close()
                logging.getLogger("spool").removeHandler(dispatcher.status.logged)
            spool.release()
        if once or until_idle:
            dispatcher.events.client.child.join(_TELLING_S)  # so that notifications are sent, if possible
        # A job that was submitted, released or fixed between the last look and the release of the lock has seen a
        # running dispatcher. Files that a second dispatcher does not take either are links or directories with names of
        # jobs.
        if once and held_up:
            return ExitCode.SPOOL_UNUSABLE
        before, left_over = left_over, set() if told or once else _queued(spool) - known
        if not left_over - before:
            log.info("the dispatcher exits; active runs continue")
            return ExitCode.JOBS_FAILED if until_idle and failures else ExitCode.DONE


def _made(make: Callable[[], Made], root: str, *, patient: Callable[[], bool]) -> Made | None:
    """Return what *make* returns, tried again after a pause as long as the spool cannot be used and this is *patient*.

    None if told to leave meanwhile.
    """
    said, pause_s = "", _PAUSE_S
    while True:
        try:
            return make()
        except (OSError, ImportError) as error:
            if not patient():
                raise
            said = _say(said, root, error)
        signalled = signal.sigtimedwait(_SIGNALS, pause_s)
        if signalled is not None and signalled.si_signo != signal.SIGHUP:
            return None
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def preload() -> None:
    """Import everything that a pass may need, so that no import fails during one. Raises ImportError.

    An import reads files, and a file system may refuse that for a while. Executors that few jobs use are loaded on
    demand (`spool.executors`).
    """
    try:
        for name in PRELOADED:
            import_module(name)
    except ImportError:
        invalidate_caches()
        raise


def _open(spool: LockedSpool, *, anew: bool) -> Dispatcher:
    """Return a dispatcher for *spool*, whose missing directories are created *anew*."""
    dispatcher = None
    spool.keep()
    try:
        preload()
        capabilities.search()  # no word is missed of those of a package that only listens, or has steps of a pass
        if anew:
            make_spool(spool.root)
        dispatcher = Dispatcher(spool)
        logging.getLogger("spool").addHandler(dispatcher.status.logged)
        dispatcher.open()
    except BaseException:
        if dispatcher is not None:
            dispatcher.close()
            logging.getLogger("spool").removeHandler(dispatcher.status.logged)
            if dispatcher.wakeup.leaving:
                signal.raise_signal(signal.SIGTERM)  # it is blocked again, and ends the next pause
        raise
    return dispatcher


def _say(said: str, root: str, error: OSError | ImportError) -> str:
    """Log once why the spool cannot be served now."""
    if isinstance(error, ImportError):
        why, remedy = str(error), "make the installation of spool readable"
    else:
        why, remedy = f"{error.filename or root}: {error.strerror or error}", remedy_for(error)
    if why != said:
        text = "cannot serve %s: %s; %s; nothing starts until this is fixed; then the dispatcher continues by itself"
        log.error(text, root, why, remedy)
    return why


def _queued(spool: LockedSpool) -> set[_Version]:
    """Return the versions of the files in `queued/` with names of jobs."""
    found = set()
    for name in spool.names(QUEUED):
        with suppress(OSError):
            status = os.lstat(spool.layout.job_file(QUEUED, name))
            found.add((name, status.st_ino, status.st_mtime_ns))
    return found


def _run(dispatcher: Dispatcher, *, once: bool, until_idle: bool, idle_exit_ns: int | None) -> None:
    said = ""
    while not dispatcher.wakeup.leaving:
        try:
            more = dispatcher.turn()
        except OSError as error:  # outside all boundaries of a pass: leaving would not help
            dispatcher.spool.keep()
            if once:
                raise
            said = _say(said, dispatcher.spool.root, error)
            time.sleep(_PAUSE_S)
            continue
        said = ""
        if more:
            dispatcher.sleep(0)
            continue
        at_work = dispatcher.asking or dispatcher.terminator.searching
        if (once and not at_work) or (until_idle and (dispatcher.idle or dispatcher.stuck)):
            return
        limit = None
        if idle_exit_ns is not None:
            limit = dispatcher.busy_at_ns + idle_exit_ns - time.monotonic_ns()
            if dispatcher.idle and limit <= 0:
                return
            limit = max(limit, SECOND_NS)
        dispatcher.sleep(limit)
