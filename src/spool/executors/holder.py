"""The program of a run whose command belongs into a terminal: it asks for that terminal, and starts the command there.

Run as a script, by path, with only the standard library: `holder.py NAME KEPT COMMAND...`. NAME is the abstract socket
of the `spool run --here` that waits for the run (unix(7)): it has no file, so none is left behind, and its owner is
whom the kernel names. KEPT names variables, with commas between them, that the run has whatever the terminal has.
Both sides speak in packets: a letter, and what belongs to it.

* The holder begins with the run, as `JOB/RUN`, and its own output, the log.
* The other side answers with the terms as JSON, the command's environment in a memory file, and descriptors: those that
  the command gets unchanged, and both ends of a pseudo-terminal for those that were a terminal. It then reads and
  writes that itself, and draws on the real one.
* From there: `SIGNAL n` and `CONTINUE`, and back `BEGUN` (the terminal is the command's, and so is what is typed),
  `STOPPED` (by Ctrl-Z) and `EXITED n`.

Once the other side is gone, so is the terminal: the command receives HUP, and KILL `GRACE_S` later. With *nohup* it
goes on, and the log has what it prints.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import termios
import threading
import time
from contextlib import suppress

SIGNAL, CONTINUE, BEGUN, STOPPED, EXITED = b"s", b"c", b"b", b"z", b"x"
"""The packets; the first and the last are followed by a number, as one byte."""

GRACE_S = 10.0
"""The time between HUP and KILL once the terminal is gone."""

PROGRAM = (sys.executable, "-I", "-S", "-B", __file__)
"""The command of the holder, before its arguments."""

LONGEST = 4096
"""The most bytes of a packet."""

_PATIENCE_S = 60.0  # for the other side, which may be stopped
_BLOCK = 1 << 16
_GONE = 129  # 128 + SIGHUP
_JOB_CONTROL = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_WAITED_FOR = {signal.SIGCHLD, signal.SIGTTOU, *_FORWARDED}
_UCRED = struct.Struct("3i")  # pid, uid, gid


def is_ours(connection: socket.socket) -> bool:
    """Whether the other side of a Unix socket is a process of this user: others can connect, or take a name."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return bool(_UCRED.unpack(told)[1] == os.geteuid())


def address(name: str) -> bytes:
    """Return the address of the abstract socket *name*."""
    return b"\0" + name.encode()


def received(connection: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """Return a packet and the descriptors that came with it, *most* at most, which no command inherits."""
    told, fds, _, _ = socket.recv_fds(connection, LONGEST, most)
    for fd in fds:
        os.set_inheritable(fd, False)
    return told, list(fds)


def main(name: str, kept: str, words: list[str]) -> int:
    """Run *words* in the terminal behind the socket *name*, and return the exit code of the run."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_PATIENCE_S)
    try:
        connection.connect(address(name))
        if not is_ours(connection):
            raise ConnectionRefusedError
        run = f"{os.environ['SPOOL_JOB']}/{os.environ['SPOOL_RUN']}"
        socket.send_fds(connection, [run.encode()], [1])
        told, fds = received(connection, 6)
        if not told:
            raise ConnectionResetError
    except OSError as error:
        why = "does not answer" if isinstance(error, TimeoutError) else "is gone"
        os.write(2, f"spool: the terminal of this job {why}; it was that of a `spool run --here`\n".encode())
        return _GONE
    connection.settimeout(None)
    own = _appended(f"{os.environ['SPOOL_METADIR']}/env") | {*kept.split(",")}
    return _Held(connection, json.loads(told), fds, own).run(words)


def _appended(path: str) -> set[str]:
    """Return the names of the variables that a prolog has appended to `$SPOOL_ENV`, which the wrapper has exported."""
    try:
        with open(path, errors="replace") as file:
            return {line.partition("=")[0] for line in file}
    except OSError:
        return set()


class _Held:
    """A command in its terminal, seen from the process that waits for it."""

    def __init__(self, connection: socket.socket, terms: dict[str, object], fds: list[int], own: set[str]) -> None:
        self._connection: socket.socket | None = connection
        self._nohup = bool(terms["nohup"])
        self._umask = int(str(terms["umask"]))
        with open(fds.pop(0), "rb") as file:
            file.seek(0)
            theirs = {name: value for name, value in json.load(file).items() if name not in own}
            self._environment = {**os.environ, **theirs}
        direct = terms["direct"]
        assert isinstance(direct, list)
        self._direct = {number: fds.pop(0) for number in direct}
        self._master: int | None = fds[0] if fds else None
        self._slave: int | None = fds[1] if fds else None
        self._wrapper = os.getppid()
        self._child = 0
        self._code: int | None = None
        self._kill_at: float | None = None  # on the monotonic clock, once the terminal is gone

    def run(self, words: list[str]) -> int:
        """Start the command, wait for its end, and return its exit code."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
        if self._slave is not None:
            os.setsid()
            fcntl.ioctl(self._slave, termios.TIOCSCTTY, 0)
        self._child = os.fork()
        if self._child == 0:
            self._become(words)
        with suppress(OSError):  # the child does so too, and may be first
            os.setpgid(self._child, self._child)
        for fd in (*self._direct.values(), *(() if self._slave is None else (self._slave,))):
            os.close(fd)
        arrived, told = os.pipe()
        threading.Thread(target=_hear, args=(told,), daemon=True).start()
        while self._code is None:
            self._step(arrived)
        if self._connection is not None:
            self._report(EXITED + bytes([self._code]))
        else:
            while self._drain():
                pass
        return self._code

    def _become(self, words: list[str]) -> None:
        """Turn this process into the command."""
        try:
            os.setpgid(0, 0)
            if self._slave is not None:
                os.tcsetpgrp(self._slave, os.getpid())
            errors = os.dup(2)
            for number in range(3):
                fd = self._direct.get(number, self._slave)
                if fd is not None:
                    os.dup2(fd, number)
            os.umask(self._umask)
            for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # Python has made other use of them
                signal.signal(number, signal.SIG_DFL)
            self._report(BEGUN)  # a Ctrl-C from now on waits until it is not blocked
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            try:
                os.execvpe(words[0], words, self._environment)  # noqa: S606  # that is what this is for
            except OSError as error:
                for fd in {2, errors}:
                    os.write(fd, f"spool: cannot execute {words[0]}: {error.strerror}\n".encode())
                os._exit(127 if isinstance(error, FileNotFoundError) else 126)
        finally:
            os._exit(126)

    def _step(self, arrived: int) -> None:
        """Wait for the next of what can happen, and deal with it."""
        poll = select.poll()
        poll.register(arrived, select.POLLIN)
        if self._connection is not None:
            poll.register(self._connection, select.POLLIN)
        elif self._master is not None:
            poll.register(self._master, select.POLLIN)
        left = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
        ready = {fd for fd, _ in poll.poll(None if left is None else int(left * 1000) + 1)}
        if self._connection is not None and self._connection.fileno() in ready:
            self._listen(self._connection)
        elif self._master is not None and self._master in ready and not self._drain():
            self._master = None
        if arrived in ready:
            number, sender = struct.unpack("2i", os.read(arrived, 8))
            if number == signal.SIGCHLD:
                self._look()
            elif number in _FORWARDED and sender == self._wrapper:
                self._signal(number)  # others signal each process of the run, and so the command as well
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._signal(signal.SIGKILL)
            self._kill_at = time.monotonic() + GRACE_S

    def _listen(self, connection: socket.socket) -> None:
        """Do what the other side says; it is gone if it says nothing."""
        try:
            told = connection.recv(LONGEST)
        except OSError:
            told = b""
        if told[:1] == SIGNAL:
            self._signal(told[1])
        elif told[:1] == CONTINUE:
            self._signal(signal.SIGCONT)
        elif not told:
            self._connection = None
            connection.close()
            if not self._nohup:
                self._signal(signal.SIGHUP)
                self._signal(signal.SIGCONT)
                self._kill_at = time.monotonic() + GRACE_S

    def _look(self) -> None:
        """Record the end of the command, and report that it was stopped."""
        pid, status = os.waitpid(self._child, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            return
        if not os.WIFSTOPPED(status):
            code = os.waitstatus_to_exitcode(status)
            self._code = 128 - code if code < 0 else code
        elif os.WSTOPSIG(status) in _JOB_CONTROL:  # not as `spool suspend` stops it
            self._report(STOPPED)

    def _report(self, packet: bytes) -> None:
        """Tell the other side, if it is still there."""
        if self._connection is not None:
            with suppress(OSError):
                self._connection.send(packet)

    def _signal(self, number: int) -> None:
        """Signal the command, and whatever else is in the foreground of its terminal."""
        groups = {self._child}
        if self._master is not None and number in (signal.SIGHUP, signal.SIGKILL):
            with suppress(OSError):
                groups.add(os.tcgetpgrp(self._master))
        for group in groups - {0}:
            with suppress(OSError):
                os.killpg(group, number)

    def _drain(self) -> bool:
        """Move something that the terminal was to show to the log; return whether there was something."""
        if self._master is None:
            return False
        os.set_blocking(self._master, False)
        try:
            data = os.read(self._master, _BLOCK)
        except OSError:  # nothing now, or no process has the terminal any more
            return False
        with suppress(OSError):  # a full disk
            os.write(1, data)
        return bool(data)


def _hear(told: int) -> None:
    """Write each signal that arrives, and the process that has sent it, to the pipe *told*."""
    while True:
        found = signal.sigwaitinfo(_WAITED_FOR)
        os.write(told, struct.pack("2i", found.si_signo, found.si_pid))


if __name__ == "__main__":
    os._exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
