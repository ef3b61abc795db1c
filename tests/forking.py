"""Dispatchers and commands as forks of a process that has imported them: all of them but the start of Python.

To start Python and import a dispatcher takes longer than most tests of one; a fork takes nothing. `REAL_STARTS=1` in
the environment starts each of them by itself, as do the calls that ask for what a fork cannot have: words before the
command, a Python path or a locale of its own, or more variables than there is room for.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import pkgutil
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile

SOURCE = str(Path(__file__).resolve().parent.parent / "src")
_ROOM = 100_000  # for the environment, as the kernel shows it of a process
_AT_START = ("PYTHON", "LC_", "LANG", "LD_PRELOAD", "MALLOC_", "GLIBC_")  # variables that count when Python starts
_LIMITS = {number for name, number in vars(resource).items() if name.startswith("RLIMIT_")}
# Where other tests start and end processes all the time no search for what a killed wrapper has left is certain; each
# would then go on for ten seconds.
SEARCHES_SHORTLY = {"spool.executors.local.SEARCH_NS": 2 * 10**9}


def program_with(changes: Mapping[str, object]) -> tuple[str, str]:
    """Return what Python is given to be `spool` with other values of these names, where it is no fork."""
    named = [(*target.rpartition("."), value) for target, value in changes.items()]
    change = f"[setattr(resolve_name(owner), name, value) for owner, _, name, value in {named!r}]"
    start = "runpy.run_module('spool', run_name='__main__')"
    return "-c", f"import runpy; from pkgutil import resolve_name; {change}; {start}"


def _counts(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: environment[key] for key in environment if key.startswith(_AT_START)}


_OWN = _counts(os.environ) | {"PYTHONPATH": SOURCE}
_IS_REAL = "REAL_STARTS" in os.environ


class Forked:
    """A process that was forked, with what `subprocess.Popen` has for it."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """Return the exit code, or None."""
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code and return it."""
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it lives."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send TERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send KILL."""
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = int(os.read(self._status, 16))
            os.close(self._status)
        return self.returncode


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a fork can have that environment."""
    size = sum(len(os.fsencode(f"{key}={value}")) + 1 for key, value in environment.items())
    return not _IS_REAL and size < _ROOM and _counts(environment) == _OWN


def fork(words: Sequence[str], environment: Mapping[str, str], streams: Sequence[int], cwd: str | None = None, *,
         changes: Mapping[str, object] = SEARCHES_SHORTLY) -> Forked:  # fmt: skip
    """Run `spool WORDS`, with the three *streams*, and with other values of the names in *changes*."""
    about = {
        "words": list(words), "environment": dict(environment), "cwd": cwd or os.getcwd(), "changes": dict(changes),
        "umask": _umask(), "limits": {number: resource.getrlimit(number) for number in _LIMITS},
    }  # fmt: skip
    ours, theirs = os.pipe()
    told = os.memfd_create("about")
    try:
        os.write(told, json.dumps(about).encode())
        socket.send_fds(parent(), [b"fork"], [told, *streams, theirs])
    finally:
        os.close(told)
        os.close(theirs)
    return Forked(int(os.read(ours, 16)), ours)


def answered(words: Sequence[str], environment: Mapping[str, str], *, cwd: str | os.PathLike[str] | None = None,
             data: str = "", timeout: float) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a command to its end, and return what it printed."""
    with TemporaryFile("w+") as read, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        read.write(data)
        read.seek(0)
        process = fork(words, environment, [each.fileno() for each in (read, out, err)], cwd and os.fspath(cwd))
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(list(words), code, out.read(), err.read())


def _umask() -> int:
    os.umask(umask := os.umask(0))
    return umask


@cache
def parent() -> socket.socket:
    """Start the process whose forks these are, and return the socket by which it is asked."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONPATH": SOURCE, "ROOM": "x" * _ROOM}
    with theirs:
        words = [sys.executable, "-P", __file__, str(theirs.fileno())]
        process = subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# The process itself.


def _import() -> None:
    import spool

    for module in pkgutil.walk_packages(spool.__path__, "spool."):
        if "__main__" not in module.name and not module.name.startswith("spool.testing"):
            with suppress(ImportError):
                import_module(module.name)


def _serve(asked: socket.socket) -> dict[str, object] | None:
    """Fork on request until nobody asks any more; return, in a fork, what it was asked for."""
    alive: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(asked, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in alive:
                pid, status = alive.pop(ready)
                poll.unregister(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError):
                    os.write(status, b"%16d" % code)
                os.close(status)
                continue
            data, fds, *_ = socket.recv_fds(asked, 16, 5)
            if not data:
                return None
            told, *streams, status = fds
            pid = os.fork()
            if pid == 0:
                about: dict[str, object] = json.loads(os.pread(told, 1 << 24, 0))
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                asked.detach()
                os.closerange(3, 4096)
                return about
            os.write(status, b"%16d" % pid)  # as wide as each is read: both may be there already
            pidfd = os.pidfd_open(pid)
            alive[pidfd] = pid, status
            poll.register(pidfd, select.POLLIN)
            for fd in (told, *streams):
                os.close(fd)


def _become(environment: Mapping[str, str]) -> None:
    """Have that environment, also for who reads it in `/proc`."""
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    text = b"".join(os.fsencode(f"{key}={value}") + b"\0" for key, value in environment.items())
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _main() -> None:
    asked = socket.socket(fileno=int(sys.argv[1]))
    _import()
    about = _serve(asked)
    if about is None:
        return
    _become(about["environment"])  # type: ignore[arg-type]
    os.chdir(about["cwd"])  # type: ignore[arg-type]
    os.umask(about["umask"])  # type: ignore[arg-type]
    for number, limits in about["limits"].items():  # type: ignore[attr-defined]
        resource.setrlimit(int(number), tuple(limits))
    from spool.cli.main import main

    for target, value in about["changes"].items():  # type: ignore[attr-defined]
        owner, _, name = target.rpartition(".")
        setattr(pkgutil.resolve_name(owner), name, value)
    sys.argv = ["spool", *about["words"]]  # type: ignore[misc]
    main()


if __name__ == "__main__":
    _main()
