"""The plain way: the wrapper is a child of the dispatcher, in a session of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache

from spool.core.errors import SpoolError, StartRefused, cannot
from spool.executors.base import Launch, Started, own_environment, refused
from spool.executors.spare import Spare
from spool.formats.wrapper import TOLD, Surroundings
from spool.machine import descriptors, identity
from spool.machine.children import Nursery

SHELL = "/bin/sh"

_UNCATCHABLE = {signal.SIGKILL, signal.SIGSTOP}
_NULL_DEVICE = [
    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
]


class ProcessExecutor:
    """Start `/bin/sh run.sh` in a session of its own, with nothing of the dispatcher's but its environment.

    Every signal has its default effect in it again, and none is blocked: a dispatcher that was started in the
    background has SIGINT ignored (under nohup SIGHUP too), and its jobs would ignore them for ever.
    """

    name = "process"

    def __init__(self) -> None:
        self._catchable = [s for s in signal.valid_signals() if s not in _UNCATCHABLE]
        self._spare: Spare | None = None
        self._nursery = Nursery()

    def unavailable(self) -> str | None:
        """Return why no wrapper can be started: there is no shell, or no /proc to prove by who it is."""
        if not os.access(SHELL, os.X_OK):
            return f"{SHELL} is not there"
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
            open_files=descriptors.limit_for_jobs(),
        )

    def start(self, launch: Launch) -> Started:
        """Start the wrapper; it is a child of this process and has to be reaped.

        Raises StartRefused if the machine has no room for another process.
        """
        if launch.environment is None:
            spare, self._spare = self._spare, None
            if spare is not None and spare.become(launch.text):
                return Started(spare.pid)
        identity_fd = None
        try:
            identity_fd = os.memfd_create("identity")
            pid = self._spawn([launch.script, TOLD], {0: identity_fd}, launch.inherited())
            # While the shell comes up. If it is faster, it finds nothing and looks for itself.
            with contextlib.suppress(OSError):
                os.pwrite(identity_fd, f"{pid} {identity.start_ticks(pid) or ''}\n".encode(), 0)
        except OSError as error:
            if refused(error):
                raise StartRefused(f"{SHELL} was not started: {error.strerror}") from error
            raise SpoolError(cannot("start", f"job {launch.job}", error.strerror or str(error), where=SHELL)) from error
        finally:
            if identity_fd is not None:
                os.close(identity_fd)
        return Started(pid)

    def get_ready(self, text: bytes | None = None) -> int | None:
        """Have a shell wait for the next job; return its pid.

        It has read *text* then, and no other. One that was ended by somebody is made good by the next start: it might
        be ended again as soon as it is there.
        """
        spare = self._spare
        if spare is not None and not spare.gone and not spare.reads(text):
            self._dismiss_spare()
        if self._spare is None:
            with contextlib.suppress(OSError):  # the next start will say what is wrong
                self._spare = Spare(self._spawn, own_environment())
                self._spare.reads(text)
        return self._spare.pid if self._spare is not None and not self._spare.gone else None

    def close(self) -> None:
        """End the shell that waits."""
        self._dismiss_spare()
        self._nursery.close()

    def _dismiss_spare(self) -> None:
        if self._spare is not None:
            self._spare.dismiss()
            self._spare = None

    def attach(self, spool_dir: str, job: str, run: int, *, read_only: bool) -> tuple[str, ...]:
        """Raise SpoolError: nothing here has a terminal."""
        why, remedy = f"run {run} has no terminal: it runs as a plain process", f"`spool log -f {job}` shows its output"
        raise SpoolError(cannot("attach to", f"job {job}", why, remedy=remedy))

    def forget(self, spool_dir: str, runs: Iterable[tuple[str, int]]) -> None:
        """Do nothing: nothing is kept."""

    def _spawn(self, arguments: list[str], files: Mapping[int, int], environment: Mapping[str, str]) -> int:
        actions = [*((os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in files.items()), *_NULL_DEVICE]
        return self._nursery.start(
            lambda: os.posix_spawn(
                SHELL,
                [SHELL, *arguments],
                environment,
                file_actions=actions,
                setsid=True,
                setsigmask=[],
                setsigdef=self._catchable,
            )
        )


def reset_of_ignored_signals() -> tuple[str, str | None]:
    """Return the path of env, and the option by which it gives SIGINT and SIGQUIT their default effect again.

    GNU coreutils has it since 8.31; where there is none (busybox), jobs under a shell other than bash cannot be
    interrupted by these two. What an option does is found out by running it, not by a version.
    """
    program = shutil.which("env") or "/usr/bin/env"
    option = "--default-signal=INT,QUIT"
    try:
        return program, option if _works(program, option) else None
    except OSError:  # it is asked again for the next job: a machine without room says nothing about it
        return program, None


@cache
def _works(program: str, option: str) -> bool:
    words, null = [program, option, "--", "true"], subprocess.DEVNULL
    return subprocess.run(words, stdin=null, stdout=null, stderr=null, check=False).returncode == 0
