"""The plain way: the wrapper is a child of the dispatcher, in its own session.

If the compiled wrapper is available, it runs as a server, and makes a child of this process for each run. Otherwise the
wrapper is a shell.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache

from spool.core.errors import SpoolError, StartRefused, cannot
from spool.executors import compiled
from spool.executors.base import Executor, Launch, refused
from spool.executors.local import LocalProcesses, LocalRun
from spool.formats.wrapper import TOLD, Surroundings
from spool.machine import identity
from spool.machine.host import pin, pinned

SHELL = "/bin/sh"
FIRST_PROGRAM = [sys.executable, "-I", "-S", "-B", f"{os.path.dirname(os.path.abspath(__file__))}/first_program.py"]

_ANSWER = struct.Struct("i")  # a pid, or -errno
_UNCATCHABLE = {signal.SIGKILL, signal.SIGSTOP}
_SERVER_FD = 3  # of the server: it receives requests there
_ANSWERS_WITHIN_S = 2
_ROOM = 1024  # for the path of a script, and for the marks of a run, which its wrapper shows
_NULL_DEVICE = [
    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
]

Spawn = Callable[[list[str], Mapping[int, int], Mapping[str, str]], int]
"""Start a command, with descriptors (the child's number: this process's) and an environment; return the pid."""


class ProcessExecutor(Executor):
    """Start the program that executes `run.sh`, in its own session, with the defined environment.

    It inherits nothing of the dispatcher. Every signal has its default effect in it again, and none is blocked: a
    dispatcher that was started in the background has SIGINT ignored (under nohup SIGHUP too), and its jobs would ignore
    them for ever.
    """

    name = "process"
    engine: LocalProcesses

    def __init__(self, engine: LocalProcesses | None = None) -> None:
        """Start runs that *engine* manages; without one, only for callers that start nothing."""
        self.engine = engine or LocalProcesses()
        self._server: WrapperServer | None = None
        self._catchable = [s for s in signal.valid_signals() if s not in _UNCATCHABLE]

    def unavailable(self) -> str | None:
        """Return why no wrapper can be started: there is no shell, or no /proc to prove identities."""
        if not os.access(SHELL, os.X_OK):
            return f"{SHELL} does not exist"
        try:
            identity.boot_id()
            identity.pid_namespace()
        except OSError as error:
            return f"/proc cannot be read: {error.strerror}"
        return None

    def surroundings(self) -> Surroundings:
        """Return what the wrapper's text needs to know on this machine."""
        program, reset = reset_of_ignored_signals()
        return Surroundings(
            boot_id=identity.boot_id(),
            pid_namespace=identity.pid_namespace(),
            host=identity.host(),
            env_program=program,
            reset=reset,
            become=self.program() or "",
            open_files=identity.limit_for_jobs(),
        )

    def start(self, launch: Launch) -> LocalRun:
        """Start the wrapper; it is a child of this process and must be reaped.

        Raises StartRefused if the machine has no room for another process, or cannot pin it to its CPUs.
        """
        program = self.program()
        if program is None:
            self._dismiss_server()
        elif (served := self._start_by_server(program, launch)) is not None:
            return served
        identity_fd = None
        try:
            identity_fd = os.memfd_create("identity")
            words = [*FIRST_PROGRAM, "-", launch.script, TOLD]
            pid = self._spawn(words, {0: identity_fd}, launch.inherited(), launch.cpus)
            # While the shell starts. If the shell is faster, it finds nothing and looks for itself.
            with contextlib.suppress(OSError):
                os.pwrite(identity_fd, f"{pid} {identity.start_ticks(pid) or ''}\n".encode(), 0)
        except OSError as error:
            raise _not_started(launch, SHELL, error) from error
        finally:
            if identity_fd is not None:
                os.close(identity_fd)
        return self.engine.child(launch.job, launch.run, pid, launch.group)

    def close(self) -> None:
        """End the server."""
        self._dismiss_server()

    def program(self) -> str | None:
        """Return the path of the compiled wrapper, None without one."""
        return compiled.find().path

    def _start_by_server(self, program: str, launch: Launch) -> LocalRun | None:
        """Start the wrapper; None: a shell must do it, because this run, or this server, is unusual.

        Raises StartRefused.
        """
        inherited = (f"{key}={value}" for key, value in launch.inherited().items())
        request = os.fsencode("\0".join((os.fspath(launch.script), *inherited, "")))
        for _ in range(2):  # a server that was killed, and then a new one
            if self._server is not None and self._server.program != program:
                self._dismiss_server()
            if self._server is None:
                try:
                    self._server = WrapperServer(self._spawn, program)
                except OSError:  # the start of a shell reports the problem
                    return None
            try:
                pid = self._server.start(request, launch.cpus)
            except BrokenPipeError:
                self._dismiss_server()
                continue
            except TimeoutError:
                self._dismiss_server()
                return self.engine.no_child(launch.job, launch.run, None, launch.group)
            except OSError as error:
                if refused(error):
                    raise _not_started(launch, program, error) from error
                return None  # too long for it; or a sandbox or an emulator lacks children of the parent
            run = self.engine.child(launch.job, launch.run, pid, launch.group)
            run.was_lean = True
            return run
        return None

    def _dismiss_server(self) -> None:
        if self._server is not None:
            self._server.dismiss()
            self._server = None

    def _spawn(self, words: list[str], files: Mapping[int, int], environment: Mapping[str, str], cpus: str = "") -> int:
        actions = [*((os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in files.items()), *_NULL_DEVICE]
        if 0 not in files:
            actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))

        def spawn() -> int:
            return os.posix_spawn(
                words[0],
                words,
                environment,
                file_actions=actions,
                setsid=True,
                setsigmask=[],
                setsigdef=self._catchable,
            )

        if not cpus:
            return spawn()
        try:
            with pinned(cpus):  # from its first moment: it inherits that of this thread
                return spawn()
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise _not_pinned(cpus, error) from error
            raise


def _not_pinned(cpus: str, error: OSError) -> StartRefused:
    return StartRefused(f"CPUs {cpus} cannot be given to it: {error.strerror}")


def _not_started(launch: Launch, program: str, error: OSError) -> SpoolError:
    if refused(error):
        return StartRefused(f"{program} was not started: {error.strerror}")
    return SpoolError(cannot("start", f"job {launch.job}", error.strerror or str(error), where=program))


def reset_of_ignored_signals() -> tuple[str, str | None]:
    """Return the path of env, and its option that resets SIGINT and SIGQUIT to their default effect.

    GNU coreutils has it since 8.31; without it (busybox), jobs under a shell other than bash cannot be interrupted by
    these two.
    """
    try:
        return _env_that_resets()
    except OSError:  # it is tried again for the next job: a shortage on the machine says nothing about it
        return _env(), None


@cache
def _env_that_resets() -> tuple[str, str | None]:
    """Try it once in the life of a dispatcher. The effect of an option is found by running it, not by a version."""
    program, option, null = _env(), "--default-signal=INT,QUIT", subprocess.DEVNULL
    words = [program, option, "--", "true"]
    works = subprocess.run(words, stdin=null, stdout=null, stderr=null, check=False).returncode == 0
    return program, option if works else None


def _env() -> str:
    return shutil.which("env") or "/usr/bin/env"


class WrapperServer:
    """The compiled wrapper as a server: it makes a child of this process for each run, and leaves with this process.

    Then no start waits for a program to be executed. The child is the wrapper, and inherits nothing of the server.
    """

    def __init__(self, spawn: Spawn, program: str) -> None:
        """Start the server. Raises OSError."""
        self.program = program
        self._cpus: str | None = ""  # that it is pinned to; None: unknown
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            patience = struct.pack("ll", _ANSWERS_WITHIN_S, 0)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, option, patience)
            words = [program, "serve", str(_SERVER_FD), " " * _ROOM]
            self.pid = spawn(words, {_SERVER_FD: theirs.fileno()}, {"ROOM": " " * _ROOM})
        except OSError:
            self._socket.close()
            raise
        finally:
            theirs.close()

    def start(self, request: bytes, cpus: str = "") -> int:
        """Return the pid of the wrapper that was started for *request*, pinned to *cpus* unless that is "".

        Raises StartRefused if it cannot be pinned; BrokenPipeError if the server is gone and has started nothing;
        TimeoutError if it is unknown whether it has, and then it never will; OSError of the kind for which nothing was
        started.
        """
        if cpus != self._cpus:
            self._pin(cpus)
        try:
            self._socket.send(request)
            try:
                answer = self._socket.recv(_ANSWER.size)
            except BlockingIOError:  # it is stopped
                self._end()
                answer = self._socket.recv(_ANSWER.size)
        except (ConnectionResetError, BlockingIOError) as error:  # it is gone, and has not taken the request
            raise BrokenPipeError from error
        if len(answer) != _ANSWER.size:
            raise TimeoutError
        (pid,) = _ANSWER.unpack(answer)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return int(pid)

    def _pin(self, cpus: str) -> None:
        """Let the server run on *cpus* alone; "": wherever this process may. Its children inherit that."""
        if not self._is_there():
            raise BrokenPipeError
        try:
            if cpus:
                pin(self.pid, cpus)
            else:
                os.sched_setaffinity(self.pid, os.sched_getaffinity(0))
        except ProcessLookupError:
            raise BrokenPipeError from None
        except OSError as error:
            self._cpus = None  # unknown
            raise _not_pinned(cpus, error) from error
        self._cpus = cpus

    def dismiss(self) -> None:
        """End the server."""
        self._end()
        self._socket.close()

    def _is_there(self) -> bool:
        """Whether the server holds its end of the socket; if not, its pid may belong to another process by now."""
        other_end = select.poll()
        other_end.register(self._socket, 0)
        return not other_end.poll(0)

    def _end(self) -> None:
        if self._is_there():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
