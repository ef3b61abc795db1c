"""Helper processes that may hang or die, and threads that carry out their work.

A helper does anything that could stop its parent: foreign code, or calls into a driver that hangs. The parent never
blocks on it: output that the child cannot take yet is buffered here, a descriptor can be polled for input, and an
abandoned child is killed and left until the kernel releases it.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

from spool.core.model import SECOND_NS

_PAUSE_NS, _LONGEST_PAUSE_NS = SECOND_NS // 10, 30 * SECOND_NS  # before a restart
_WELL_NS = 60 * SECOND_NS  # a child that has lived this long was healthy
_MOMENT_S = 0.1  # for a dead process to be gone
_LEAVING_S = 1.0  # for one that has closed its end to be gone, on a machine with much else to do
_LAST_WORDS_S = 0.2


def import_path() -> str:
    """Return the PYTHONPATH of a child that must find the modules of this process, however this one found them.

    The standard library is first, and nothing relative is in it: another user who may write to the current directory
    would give the child its `json`.
    """
    library = os.path.dirname(os.__file__)
    standard = [path for path in sys.path if path in (library, f"{library}/lib-dynload")]
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return os.pathsep.join(dict.fromkeys((*standard, *filter(os.path.isabs, sys.path), home)))


class ChildProcess:
    """At most one child `python -m MODULE ARGUMENTS` at a time. The socket is its standard input.

    *environment* is called at each start. With *answers_on_stdout* the socket is also its standard output, and its
    stderr is dropped. *clock* is monotonic.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Callable[[], Mapping[str, str]],
        *,
        answers_on_stdout: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._arguments = arguments
        self._environment = environment
        self._answers_on_stdout = answers_on_stdout
        self._clock = clock
        self._ready = select.epoll()
        self._watched = True
        self._process: subprocess.Popen[bytes] | None = None
        self._given_up: list[subprocess.Popen[bytes]] = []  # not gone yet
        self._channel: socket.socket | None = None
        self._end: int | None = None  # readable when the process has ended
        self._in = b""
        self._out = b""
        self._born_ns = 0
        self._deaths = 0  # in a row
        self.start_due_ns = 0
        """When a restart is allowed after a death: the pauses grow."""

    @property
    def pid(self) -> int | None:
        """The child's pid, None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the child exists and has not ended. Call it before :meth:`read`, to lose no output."""
        return self._process is not None and self._process.poll() is None

    @property
    def has_hung_up(self) -> bool:
        """Whether the other end is closed, and nothing is left to read."""
        if self._channel is None:
            return True
        try:
            return not self._channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    @property
    def backlog(self) -> int:
        """The number of bytes that the child could not take yet."""
        return len(self._out)

    def fileno(self) -> int:
        """Return a descriptor that is readable when :meth:`read` has something to do; it never changes."""
        return self._ready.fileno()

    def wait(self, timeout_s: float) -> bool:
        """Wait until that descriptor is readable; return whether it is."""
        return bool(self._ready.poll(timeout_s))

    def watch(self, watched: bool = True) -> None:
        """Include the child in that descriptor, or leave it out while its output does not matter."""
        if watched and not self._watched:
            self._register()
        elif self._watched and not watched:
            self._unregister()
        self._watched = watched

    def start(self, first: bytes = b"") -> None:
        """Start a child; there must be none. Raises OSError if that fails, which counts as a death.

        *first* is there before the child: it cannot find itself idle, however late this process continues.
        """
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                try:
                    ours.sendall(first)
                    self._process = self._spawn(theirs.fileno())
                except OSError:
                    ours.close()
                    raise
        except OSError:
            self._count_death(lived_ns=0)
            raise
        self._born_ns = self._clock()
        ours.setblocking(False)
        self._channel = ours
        # Shows its end even if its own children hold the socket open. A kernel without pidfds lacks that.
        with suppress(OSError):
            self._end = os.pidfd_open(self._process.pid)
        self._in = self._out = b""
        if self._watched:
            self._register()

    def _spawn(self, fd: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", *self._arguments],
            stdin=fd,
            stdout=fd if self._answers_on_stdout else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if self._answers_on_stdout else None,
            start_new_session=True,  # without Ctrl-C at our terminal
            cwd="/",
            env=self._environment(),
        )

    def send(self, line: bytes) -> None:
        """Send a line to the child, if there is one, as soon as it can take it."""
        if self._channel is not None:
            self._out += line
            self._write()

    def read(self) -> list[bytes]:
        """Return the lines from the child, and send it buffered output."""
        if self._channel is None:
            return []
        with suppress(OSError):  # no more for now, or for ever
            while data := self._channel.recv(1 << 18):
                self._in += data
        self._write()
        *lines, self._in = self._in.split(b"\n")
        return lines

    def exit_code(self) -> int | None:
        """Return the exit code of a child that has hung up, negative for a signal; None if it lives on for a moment."""
        return None if self._process is None else _exit_code(self._process, _LEAVING_S)

    def give_up(self, *, kill: bool = False) -> None:
        """Abandon the child, if any, which counts as a death."""
        process, self._process = self._process, None
        if process is None:
            return
        if kill:
            process.kill()
        self._hang_up()
        self._count_death(self._clock() - self._born_ns)
        self._given_up.append(process)  # it may live for a moment, or for long inside a driver

    def lingers(self, wait_s: float = 0.0) -> bool:
        """Whether an abandoned child still lives, after *wait_s* at most."""
        self._given_up = [process for process in self._given_up if _exit_code(process, wait_s) is None]
        return bool(self._given_up)

    def close(self) -> None:
        """Hang up on the child, after sending it the buffered output; it is left to itself."""
        if self._channel is not None:
            if self._out:
                with suppress(OSError):
                    self._channel.settimeout(_LAST_WORDS_S)
                    self._channel.sendall(self._out)
            self._hang_up()
        self._ready.close()
        _left[:] = [each for each in (*_left, *self._given_up, self._process) if each and each.poll() is None]

    def join(self, timeout_s: float = _MOMENT_S) -> None:
        """Wait until all children are gone, at most *timeout_s* for each."""
        for process in filter(None, (*self._given_up, self._process)):
            _exit_code(process, timeout_s)

    def _hang_up(self) -> None:
        if self._watched:
            self._unregister()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._end is not None:
            os.close(self._end)
            self._end = None

    def _register(self) -> None:
        if self._channel is not None:
            self._ready.register(self._channel, select.EPOLLIN | (select.EPOLLOUT if self._out else 0))
        if self._end is not None:
            self._ready.register(self._end, select.EPOLLIN)

    def _unregister(self) -> None:
        if self._channel is not None:
            self._ready.unregister(self._channel)
        if self._end is not None:
            self._ready.unregister(self._end)

    def _write(self) -> None:
        assert self._channel is not None
        try:
            while self._out:
                self._out = self._out[self._channel.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError:  # it is gone, as the next read will show
            self._out = b""
        if self._watched:
            self._ready.modify(self._channel, select.EPOLLIN | (select.EPOLLOUT if self._out else 0))

    def _count_death(self, lived_ns: int) -> None:
        self._deaths = 1 if lived_ns > _WELL_NS else self._deaths + 1
        self.start_due_ns = self._clock() + min(_PAUSE_NS << min(self._deaths - 1, 20), _LONGEST_PAUSE_NS)


_left: list[subprocess.Popen[bytes]] = []
"""Children of what is closed that were not gone then: the next close reaps them."""


def _exit_code(process: subprocess.Popen[bytes], wait_s: float) -> int | None:
    try:
        return process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return None


class Workers:
    """Threads that carry out work, *most* at once. Without a thread to spare it is done by the caller itself."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._there = 0
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def put(self, action: Callable[..., object], *about: object) -> None:
        """Carry out *action* in a thread, after what was put before."""
        self._work.put(partial(action, *about))
        if self._there < self._most:
            try:
                threading.Thread(target=self._go_on, daemon=True).start()
                self._there += 1
            except RuntimeError:
                if not self._there:
                    self._work.get()()

    def _go_on(self) -> None:
        while True:
            with suppress(Exception):
                self._work.get()()
