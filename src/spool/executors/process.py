"""The plain way: the wrapper is a child of the dispatcher, in a session of its own.

Where there is the compiled wrapper, it runs as a server, and makes a child of this process for each run. Elsewhere, and
for what is run before and after a command, the wrapper is a shell. That takes about as long to come up as all that it
does before its command, so the next job's is started while there is nothing else to do.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Iterable, Mapping
from functools import cache

from spool.core.errors import SpoolError, StartRefused, cannot
from spool.executors import compiled
from spool.executors.base import Launch, refused
from spool.executors.local import LocalProcesses, LocalRun
from spool.formats.config import Config
from spool.formats.wrapper import READY, TEXT_FD, TOLD, Surroundings, has_texts
from spool.machine import descriptors, identity
from spool.machine.children import SpawnThread
from spool.machine.host import login_environment

SHELL = "/bin/sh"

_ANSWER = struct.Struct("i")  # a pid, or -errno
_UNCATCHABLE = {signal.SIGKILL, signal.SIGSTOP}
_SERVER_FD = 3  # of the server: where it hears of runs
_ANSWERS_WITHIN_S = 2
_ROOM = 1024  # for the path of a script, and for the marks of a run, which its wrapper shows
_NULL_DEVICE = [
    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
]

# The text is in a file without a name: that of the run is nowhere yet when this may be read. (Not all have /dev/fd.)
_BECOME = f"read -r spool_told && . /proc/self/fd/{TEXT_FD}"

Spawn = Callable[[list[str], Mapping[int, int], Mapping[str, str]], int]
"""Start these words, with descriptors (the child's number: ours) and an environment; return the pid."""


class ProcessExecutor:
    """Start what carries out `run.sh`, in a session of its own, with the defined environment.

    Nothing of the dispatcher's goes along.
    Every signal has its default effect in it again, and none is blocked: a dispatcher that was started in the
    background has SIGINT ignored (under nohup SIGHUP too), and its jobs would ignore them for ever.
    """

    name = "process"

    def __init__(self, engine: LocalProcesses | None = None, config: Callable[[], Config] = Config) -> None:
        """Start what *engine* is to look after; by itself for one who starts nothing."""
        self.engine = engine or LocalProcesses()
        self._config = config
        self._server: WrapperServer | None = None
        self._catchable = [s for s in signal.valid_signals() if s not in _UNCATCHABLE]
        self._prespawned: PrespawnedShell | None = None
        self._nursery = SpawnThread()

    def unavailable(self) -> str | None:
        """Return why no wrapper can be started: there is no shell, or no /proc to prove by who it is."""
        if not os.access(SHELL, os.X_OK):
            return f"{SHELL} does not exist"
        try:
            identity.boot_id()
            identity.pid_namespace()
        except OSError as error:
            return f"/proc cannot be read: {error.strerror}"
        return None

    def surroundings(self) -> Surroundings:
        """Return what the wrapper's text has to say on this machine."""
        program, reset = reset_of_ignored_signals()
        return Surroundings(
            boot_id=identity.boot_id(),
            pid_namespace=identity.pid_namespace(),
            host=identity.host(),
            env_program=program,
            reset=reset,
            become=self._program() or "",
            open_files=descriptors.limit_for_jobs(),
        )

    def start(self, launch: Launch) -> LocalRun:
        """Start the wrapper; it is a child of this process and has to be reaped.

        Raises StartRefused if the machine has no room for another process.
        """
        program = self._program()
        if launch.environment is None and (program is None or has_texts(launch.text)):
            shell, self._prespawned = self._prespawned, None
            if shell is not None and shell.become(launch.text):
                return self.engine.child(launch.job, launch.run, shell.pid, launch.group)
        if program is not None and (served := self._start_by_server(program, launch)) is not None:
            return served
        identity_fd = None
        try:
            identity_fd = os.memfd_create("identity")
            pid = self._spawn([SHELL, launch.script, TOLD], {0: identity_fd}, launch.inherited())
            # While the shell comes up. If it is faster, it finds nothing and looks for itself.
            with contextlib.suppress(OSError):
                os.pwrite(identity_fd, f"{pid} {identity.start_ticks(pid) or ''}\n".encode(), 0)
        except OSError as error:
            raise _not_started(launch, SHELL, error) from error
        finally:
            if identity_fd is not None:
                os.close(identity_fd)
        return self.engine.child(launch.job, launch.run, pid, launch.group)

    def get_ready(self, text: bytes | None = None) -> int | None:
        """Have the server, or a shell, wait for the next job; return its pid.

        The shell has read *text* then, and no other. What was ended by somebody is made good by the next start: it
        might be ended again as soon as it is there.
        """
        program = self._program()
        if program is None:
            self._dismiss_server()
        elif self._has_server(program) and not (text is not None and has_texts(text)):
            self._dismiss_prespawned()
            return self._server.pid if self._server is not None and not self._server.gone else None
        shell = self._prespawned
        if shell is not None and not shell.gone and not shell.reads(text):
            self._dismiss_prespawned()
        if self._prespawned is None:
            with contextlib.suppress(OSError):  # the next start will say what is wrong
                self._prespawned = PrespawnedShell(self._spawn, login_environment())
                self._prespawned.reads(text)
        return self._prespawned.pid if self._prespawned is not None and not self._prespawned.gone else None

    def close(self) -> None:
        """End what waits."""
        self._dismiss_server()
        self._dismiss_prespawned()
        self._nursery.close()

    def _program(self) -> str | None:
        return compiled.find(self._config().wrapper).path

    def _has_server(self, program: str) -> bool:
        """Have a server of *program*, and say whether there is one: one that somebody has ended is there for now."""
        if self._server is not None and self._server.program != program:
            self._dismiss_server()
        if self._server is None:
            with contextlib.suppress(OSError):  # the next start will say what is wrong
                self._server = WrapperServer(self._spawn, program)
        return self._server is not None

    def _start_by_server(self, program: str, launch: Launch) -> LocalRun | None:
        """Start the wrapper; None: a shell has to, because this run, or this server, is not as others are.

        Raises StartRefused.
        """
        request = os.fsencode("\0".join((os.fspath(launch.script), *_pairs(launch.inherited()), "")))
        for _ in range(2):  # a server that somebody has ended, and then a new one
            if not self._has_server(program) or self._server is None:
                return None
            try:
                pid = self._server.start(request)
            except BrokenPipeError:
                self._dismiss_server()
                continue
            except TimeoutError:
                self._dismiss_server()
                return self.engine.no_child(launch.job, launch.run, None, launch.group)
            except OSError as error:
                if refused(error):
                    raise _not_started(launch, program, error) from error
                return None  # too long for it; or a sandbox or an emulator knows no child of a parent
            run = self.engine.child(launch.job, launch.run, pid, launch.group)
            run.began_lean()
            return run
        return None

    def _dismiss_server(self) -> None:
        if self._server is not None:
            self._server.dismiss()
            self._server = None

    def _dismiss_prespawned(self) -> None:
        if self._prespawned is not None:
            self._prespawned.dismiss()
            self._prespawned = None

    def attach(self, spool_dir: str, job: str, run: int, *, read_only: bool) -> tuple[str, ...]:
        """Raise SpoolError: nothing here has a terminal."""
        why, remedy = f"run {run} has no terminal: it runs as a plain process", f"`spool log -f {job}` shows its output"
        raise SpoolError(cannot("attach to", f"job {job}", why, remedy=remedy))

    def forget(self, spool_dir: str, runs: Iterable[tuple[str, int]]) -> None:
        """Do nothing: nothing is kept."""

    def _spawn(self, words: list[str], files: Mapping[int, int], environment: Mapping[str, str]) -> int:
        actions = [*((os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in files.items()), *_NULL_DEVICE]
        if 0 not in files:
            actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
        return self._nursery.start(
            lambda: os.posix_spawn(
                words[0],
                words,
                environment,
                file_actions=actions,
                setsid=True,
                setsigmask=[],
                setsigdef=self._catchable,
            )
        )


def _pairs(environment: Mapping[str, str]) -> Iterable[str]:
    return (f"{key}={value}" for key, value in environment.items())


def _not_started(launch: Launch, program: str, error: OSError) -> SpoolError:
    """Return the error to raise where *program* could not be started."""
    if refused(error):
        return StartRefused(f"{program} was not started: {error.strerror}")
    return SpoolError(cannot("start", f"job {launch.job}", error.strerror or str(error), where=program))


def reset_of_ignored_signals() -> tuple[str, str | None]:
    """Return the path of env, and the option by which it gives SIGINT and SIGQUIT their default effect again.

    GNU coreutils has it since 8.31; where there is none (busybox), jobs under a shell other than bash cannot be
    interrupted by these two.
    """
    try:
        return _env_that_resets()
    except OSError:  # it is asked again for the next job: a machine without room says nothing about it
        return _env(), None


@cache
def _env_that_resets() -> tuple[str, str | None]:
    """Ask once in the life of a dispatcher. What an option does is found out by running it, not by a version."""
    program, option, null = _env(), "--default-signal=INT,QUIT", subprocess.DEVNULL
    words = [program, option, "--", "true"]
    works = subprocess.run(words, stdin=null, stdout=null, stderr=null, check=False).returncode == 0
    return program, option if works else None


def _env() -> str:
    return shutil.which("env") or "/usr/bin/env"


class WrapperServer:
    """The compiled wrapper as a server: it makes a child of this process for each run, and leaves with this process.

    Nobody waits for a program to be executed then. The child is the wrapper, which has nothing of the server's.
    """

    def __init__(self, spawn: Spawn, program: str) -> None:
        """Start it. Raises OSError."""
        self.program = program
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

    def start(self, request: bytes) -> int:
        """Return the pid of the wrapper that was started as *request* says.

        Raises BrokenPipeError if the server is gone and has started nothing; TimeoutError if it cannot be told whether
        it has, and then it never will; OSError of the kind for which nothing was started.
        """
        try:
            self._socket.send(request)
            try:
                answer = self._socket.recv(_ANSWER.size)
            except BlockingIOError:  # it stands still
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

    @property
    def gone(self) -> bool:
        """Whether somebody has ended it; its pid may be another's by now."""
        other_end = select.poll()
        other_end.register(self._socket, 0)
        return bool(other_end.poll(0))

    def dismiss(self) -> None:
        """End it."""
        self._end()
        self._socket.close()

    def _end(self) -> None:
        if not self.gone:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)


class PrespawnedShell:
    """A shell that is up and waits to be told which wrapper to be: a child of this process, which leaves with it.

    Where the next job is known already it reads the wrapper's text as well, and waits where the wrapper would find out
    who it is. It has no mark of any run until it becomes one's wrapper.
    """

    def __init__(self, spawn: Spawn, environment: Mapping[str, str]) -> None:
        """Start it. Raises OSError."""
        self._text: bytes | None = None  # what it has read
        theirs, self._pipe = os.pipe2(os.O_CLOEXEC)
        self._file = -1
        try:
            self._file = os.memfd_create("wrapper")
            self.pid = spawn([SHELL, "-c", _BECOME, "sh", READY], {0: theirs, TEXT_FD: self._file}, environment)
        except OSError:
            self._close()
            raise
        finally:
            os.close(theirs)
        self._ticks: int | None = None  # it looks for itself then
        with contextlib.suppress(OSError):
            self._ticks = identity.start_ticks(self.pid)

    def reads(self, text: bytes | None) -> bool:
        """Have it read the wrapper *text*, unless it has read one; return whether it has read that, and no other."""
        if self._text is None and text is not None and self._write(text) and self._tell("\n"):
            self._text = text
        return self._text == text

    def become(self, text: bytes) -> bool:
        """Have it be the wrapper *text*. False: it is gone, or has read another; nothing was started."""
        if not self.reads(text) or not self._tell(f"{self.pid} {self._ticks or ''}\n"):
            self.dismiss()
            return False
        self._close()
        os.sched_yield()  # a pipe wakes its reader on this processor, though another may be idle
        return True

    def _write(self, text: bytes) -> bool:
        try:
            os.ftruncate(self._file, 0)
            return os.pwrite(self._file, text, 0) == len(text)
        except OSError:  # no memory for it
            return False

    def _tell(self, line: str) -> bool:
        try:
            os.write(self._pipe, line.encode())
        except BrokenPipeError:
            return False
        return True

    @property
    def gone(self) -> bool:
        """Whether somebody has ended it; its pid may be another's by now."""
        other_end = select.poll()
        other_end.register(self._pipe, 0)  # an error is reported all the same: nobody holds it
        return bool(other_end.poll(0))

    def dismiss(self) -> None:
        """End it."""
        if not self.gone:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        self._close()

    def _close(self) -> None:
        os.close(self._pipe)
        if self._file >= 0:
            os.close(self._file)
