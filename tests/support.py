"""What many tests need: waiting for a condition, making a spool, finding the processes that a test left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import traceback
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from spool.formats.capabilities import capabilities
from spool.testing.served import PATIENCE_S, make_spool, wait_for

__all__ = ["PATIENCE_S", "make_spool", "wait_for"]

ROOT = Path(__file__).resolve().parent.parent


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


def as_user(uid: int) -> list[str]:
    """Return what runs a command as a user; another one takes setpriv."""
    return [] if uid == os.getuid() else ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]


def printed_on(terminal: int) -> bytes:
    """Return all that is printed on a pseudo-terminal until no process has it any more, and close our end."""
    printed = b""
    with contextlib.suppress(OSError):  # its other ends are closed
        while data := os.read(terminal, 1 << 16):
            printed += data
    os.close(terminal)
    return printed


def free_ports(number: int) -> list[int]:
    """Return ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def zone_file(rule: str) -> bytes:
    """Return the file of a time zone (RFC 8536) without a past, whose clocks follow the POSIX *rule*."""
    one = b"TZif2" + bytes(15) + struct.pack(">6l", 0, 0, 0, 0, 1, 4) + struct.pack(">lBB", 0, 0, 0) + b"UTC\0"
    return one + one + b"\n" + rule.encode() + b"\n"


def is_whole() -> bool:
    """Whether every capability that comes with spool is there, so that what is shipped can be judged."""
    table = getattr(import_module("spool.extras"), "TABLE", ())
    return bool(table) and len(table) == len(capabilities())


WHOLE = pytest.mark.skipif(not is_whole(), reason="a folder of src/spool/extras is deleted")
"""For a claim about what is shipped as a whole, such as a page that lists all keys."""


def optional(module: str) -> Any:
    """Return a module of an extra, None where its folder was deleted."""
    try:
        return import_module(module)
    except ModuleNotFoundError:
        return None
