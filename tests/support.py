"""What many tests need: waiting for a condition, making a spool, finding the processes that a test left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from spool.core import layout

PATIENCE_S = 120.0
"""How long anything may take that a test waits for: no claim about speed, it only ends a test that would never end.

So it is long enough for a machine with twenty processes to a processor. `pytest --timeout` is longer still.
"""
T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent


def wait_for(condition: Callable[[], T], timeout: float = PATIENCE_S, what: str = "") -> T:
    """Return the first true value of *condition*, asked again and again; fail after pauses of *timeout* seconds in all.

    Only the pauses count, as long as they were meant to be: a machine that stood still for half a minute is no reason
    to fail.
    """
    pause, left = 0.001, timeout
    while True:
        value = condition()
        if value:
            return value
        if left <= 0:
            raise AssertionError(f"waited {timeout} s in vain for {what or getattr(condition, '__name__', condition)}")
        time.sleep(pause)
        left -= pause
        pause = min(pause * 1.5, 0.05)


def make_spool(root: Path) -> Path:
    """Make an empty spool at *root* by hand, as docs/FORMAT.md describes it, and return its path."""
    root.mkdir(mode=0o700, parents=True)
    for name in layout.DIRECTORIES:
        (root / name).mkdir(mode=0o700)
    return root


def processes() -> set[int]:
    """Return the ids of all processes."""
    return {int(name) for name in os.listdir("/proc") if name.isdecimal()}


def left_behind(candidates: Iterable[int], mark: bytes) -> dict[int, str]:
    """Return which of *candidates* still run and are a test's: children of ours, or with *mark* in their environment.

    The value is the command line, for people. Children that have ended and wait to be reaped are reaped here.
    """
    found = {}
    for pid in candidates:
        parent, state = _parent_and_state(pid)
        if parent is None:
            continue
        if state in "ZX":
            if parent == os.getpid():
                _reap(pid)
            continue
        if parent == os.getpid() or mark in _read(pid, "environ"):
            found[pid] = _read(pid, "cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip() or "(no name)"
    return found


def end(pids: Iterable[int], mark: bytes) -> None:
    """End those of *pids* that are a test's, each by its id, and no process that took the id of one since."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if left_behind([pid], mark):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(handle)


def _parent_and_state(pid: int) -> tuple[int | None, str]:
    text = _read(pid, "stat")
    if not text:
        return None, ""
    fields = text[text.rindex(b")") + 2 :].split()
    return int(fields[1]), fields[0].decode()


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it is gone, or not ours to look at
        return b""


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def in_child(deed: Callable[[], object]) -> int:
    """Have a fork of this process do *deed*, and return its exit code, -n after signal n.

    Whatever becomes of it, it never goes on with the tests: what it raises is printed and gives 99.
    """
    child = os.fork()
    if child == 0:
        code = 99
        try:
            deed()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
