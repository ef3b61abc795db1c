"""The wrapper in a terminal of its own: a session of a tmux server that serves only this spool.

The job reads from the terminal, so a user can attach and type. It writes to its outputs as under any executor; a viewer
beside it (`first_program.py`) copies them to the terminal. So the log is the job's output, byte for byte, without
prompt, echo or carriage returns, and a job never waits for a terminal that does not read.

Every tmux command has a time limit: a server that hangs delays a pass once, for `LIMIT_S` and a second, and is then
reported until it answers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import redirect_stdout, suppress

from msgspec.structs import replace

from spool.core import layout
from spool.core.errors import SpoolError, StartRefused, cannot
from spool.core.layout import SERVICE
from spool.core.model import Jid
from spool.core.units import cpus_in
from spool.executors.base import Executor, Launch, refused, sounds_refused
from spool.executors.local import LocalProcesses, LocalRun
from spool.executors.process import FIRST_PROGRAM, ProcessExecutor
from spool.formats.wrapper import Surroundings, outputs_of
from spool.machine import identity
from spool.machine.host import umask

# libtmux asks stdout for its encoding when it is imported, and a dispatcher that was started with `>&-` has none.
with open(os.devnull, "w") as nothing, redirect_stdout(sys.stdout or nothing):
    _missing = sys.__stdout__ is None
    if _missing:
        sys.__stdout__ = nothing  # type: ignore[misc]
    from libtmux import Server
    from libtmux.exc import TmuxCommandNotFound

    if _missing:
        sys.__stdout__ = None  # type: ignore[misc]

OLDEST = (3, 2)
"""The oldest supported tmux: that of the oldest systems with spool's Python."""

LIMIT_S = 3.0
"""The time limit of a tmux command in seconds. It takes a few milliseconds."""

_SLOW_S = 0.25
_PROBE_S = 1.0
_CONFIGURATION = os.path.join(os.path.dirname(__file__), "tmux.conf")
_SIZE = ("-x", "160", "-y", "48")  # until a user attaches
_LEFT = re.compile("server exited|lost server")
_LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})

_ELSEWHERE = "/tmp"  # noqa: S108  # for a directory whose owner is checked
_LONGEST_SOCKET = 107  # bytes: sun_path of unix(7), less its NUL


class TmuxExecutor(Executor):
    """Start wrappers in sessions of a tmux server of the spool's own."""

    name = "tmux"
    engine: LocalProcesses

    def __init__(self, engine: LocalProcesses | None = None) -> None:
        """Start runs that *engine* manages."""
        self.engine = engine or LocalProcesses()
        self._process = ProcessExecutor(self.engine)
        self._version: tuple[tuple[str, int, int], str | None] | None = None  # a program, and its problem
        self._placeless: str | None = None  # a spool whose server cannot have a socket
        self._slow_s = 0.0  # total duration of the last starts if each was slow
        self._hung: tuple[str, subprocess.Popen[bytes] | None] | None = None  # its socket, and the probing process

    def unavailable(self) -> str | None:
        """Return why no session can be started: tmux is missing, too old, or does not answer."""
        if (problem := self._process.unavailable()) is not None:
            return problem
        program = shutil.which("tmux")
        if program is None:
            return "tmux is not installed"
        try:
            status = os.stat(program)
        except OSError as error:
            return f"{program}: {error.strerror}"
        key = program, status.st_ino, status.st_mtime_ns
        try:
            if self._version is None or self._version[0] != key:
                self._version = key, _problem_of_version()
            return self._version[1] or self._problem_of_place() or self._problem_of_server()
        except OSError as error:  # a shortage, which says nothing about tmux
            return f"tmux cannot be run: {_words(error)}"

    def surroundings(self) -> Surroundings:
        """Return what the wrapper's text needs to know: its stdin is the terminal, its outputs are the job's."""
        return replace(self._process.surroundings(), stdin=None, terminal="own")

    def start(self, launch: Launch) -> LocalRun | None:
        """Start the wrapper as the first process of a session; a session kept from an earlier run is closed.

        None: tmux was not asked, because it does not answer or has been removed. The job must wait, not fail. Raises
        SpoolError if tmux refuses, StartRefused if it refuses for want of a process or the like.
        """
        try:
            server = server_of(launch.spool_dir)
        except SpoolError:  # the place of its socket is taken, and may become free
            self._placeless = launch.spool_dir
            return None
        if self._hung is not None:
            return None  # the many starts of one pass must not wait one after the other
        told = f"{launch.metadir}/{layout.LAUNCH}"
        session = session_of(launch.job, launch.run)
        words = ["-d", "-P", "-F", "#{pane_pid} #{pid}", "-s", session, *_SIZE, "-c", "/"]
        words += [*FIRST_PROGRAM, told, str(launch.script)]
        if launch.keep:
            words += [";", "set-option", "-w", "-t", f"={session}:", "remain-on-exit", "on"]
        if launch.run > 1:
            words += [";", "kill-session", "-t", f"={session_of(launch.job, launch.run - 1)}"]
        begun = time.monotonic()
        try:
            answer = self._asked(server, words, told, launch)
        except TimeoutError:
            self._hung = str(server.socket_path), None
            return self.engine.no_child(launch.job, launch.run, None, launch.group)
        except TmuxCommandNotFound:  # removed a moment ago
            _take_back(told)
            return None
        except OSError as error:
            _take_back(told)
            if refused(error):
                raise StartRefused(f"tmux was not started: {_words(error)}") from error
            raise SpoolError(cannot("start", f"job {launch.job}", _words(error), where="tmux")) from error
        took_s = time.monotonic() - begun
        self._slow_s = self._slow_s + took_s if took_s > _SLOW_S else 0.0
        if self._slow_s > LIMIT_S:  # it answers, but all starts of a pass together would take as long as a hang
            self._hung, self._slow_s = (str(server.socket_path), None), 0.0
        # The last of the commands may fail after the first succeeded: there was no earlier session.
        pids = answer.stdout.partition("\n")[0].split()
        if len(pids) != 2:
            _take_back(told)
            why = "; ".join(filter(None, answer.stderr.splitlines())) or f"it ended with {answer.returncode}"
            if sounds_refused(why):
                raise StartRefused(f"tmux has no room for another session: {why}")
            raise SpoolError(cannot("start", f"job {launch.job}", why, where="tmux"))
        jid = _identity(int(pids[0]), int(pids[1]))
        return self.engine.no_child(launch.job, launch.run, jid, launch.group)

    def _asked(self, server: Server, words: list[str], told: str, launch: Launch) -> subprocess.CompletedProcess[str]:
        """Request the session, again if the server was just about to leave: its last session ended at this moment."""
        inheritance = {**_inheritance(launch), "program": self._process.program() or ""}
        until = time.monotonic() + LIMIT_S
        while True:
            _write(told, inheritance)
            answer = _ask(server, "new-session", *words)
            if answer.stdout or not _LEFT.search(answer.stderr) or time.monotonic() > until:
                return answer
            time.sleep(0.005)

    def attach(self, spool_dir: str, job: str, run: int, *, read_only: bool) -> tuple[str, ...]:
        """Return the command that attaches to the run's session. Raises SpoolError if there is none."""
        what = f"job {job}"
        program, server = shutil.which("tmux"), server_of(spool_dir)
        if program is None:
            raise SpoolError(cannot("attach to", what, "tmux is not installed"))
        target = f"={session_of(job, run)}"
        try:
            found = _ask(server, "has-session", "-t", target)
        except (OSError, TmuxCommandNotFound) as error:
            raise SpoolError(cannot("attach to", what, _words(error), where="tmux")) from error
        if found.returncode != 0:
            remedy = f"`spool log {job}` shows its output"
            raise SpoolError(cannot("attach to", what, f"run {run} has no session", remedy=remedy))
        # Within another tmux, tmux refuses to attach unless $TMUX is unset.
        words = ("env", "-u", "TMUX", program, "-S", str(server.socket_path), "attach-session")
        return (*words, *(("-r",) if read_only else ()), "-t", target)

    def forget(self, spool_dir: str, runs: Iterable[tuple[str, int]]) -> None:
        """Close the sessions kept from *runs*."""
        with suppress(OSError, SpoolError, TmuxCommandNotFound):
            server = server_of(spool_dir)
            if not os.path.exists(str(server.socket_path)):
                return
            standing = set(_ask(server, "list-sessions", "-F", "#{session_name}").stdout.splitlines())
            for session in standing & {session_of(job, run) for job, run in runs}:
                _ask(server, "kill-session", "-t", f"={session}")

    def _problem_of_place(self) -> str | None:
        """Return why the server's socket cannot be placed; None once it can, or if no start has had that problem."""
        if self._placeless is None:
            return None
        try:
            socket_of(self._placeless)
        except SpoolError as error:
            return str(error)
        self._placeless = None
        return None

    def _problem_of_server(self) -> str | None:
        """Return that the server hangs, while it does; the first answer is waited for, since it may only be slow."""
        if self._hung is None:
            return None
        socket, asked = self._hung
        if asked is None:
            words = [shutil.which("tmux") or "tmux", "-S", socket, "list-sessions"]
            null = subprocess.DEVNULL
            asked = subprocess.Popen(words, env=_environment(), stdin=null, stdout=null, stderr=null)
            self._hung = socket, asked
            with suppress(subprocess.TimeoutExpired):
                asked.wait(_PROBE_S)
        if asked.poll() is None:
            return f"tmux does not answer on {socket}"
        self._hung = None
        return None


def server_of(spool_dir: str) -> Server:
    """Return the tmux server of a spool, whether it runs or not. Raises SpoolError if it cannot have a socket."""
    return Server(socket_path=socket_of(spool_dir), config_file=_CONFIGURATION)


def _ask(server: Server, *words: str) -> subprocess.CompletedProcess[str]:
    """Return the server's answer to a command. Raises TimeoutError, OSError, TmuxCommandNotFound.

    libtmux's own `cmd` has no time limit, and passes this process's environment and directory to a server that it
    starts.
    """
    return _run("-S", str(server.socket_path), "-f", str(server.config_file), *words)


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("tmux")
    if program is None:
        raise TmuxCommandNotFound
    try:
        return subprocess.run(
            [program, *words],
            cwd="/",  # the directory of a server that it starts
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="backslashreplace",
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"it did not answer for {LIMIT_S:g}s") from None


def _problem_of_version() -> str | None:
    try:
        said = _run("-V").stdout.partition("\n")[0]
    except (OSError, TmuxCommandNotFound) as error:
        if isinstance(error, OSError) and refused(error):
            raise
        return f"tmux cannot be run: {_words(error)}"
    version = re.search(r"(\d+)\.(\d+)", said)
    if version is None or (int(version[1]), int(version[2])) >= OLDEST:
        return None  # "tmux master" has no number
    return f"{said} is too old: {'.'.join(map(str, OLDEST))} is needed"


def _environment() -> dict[str, str]:
    """Return the environment of the server and its clients: that of a process that belongs to no run."""
    found = {key: value for key, value in os.environ.items() if not key.startswith(("SPOOL_", "spool_", "TMUX"))}
    return found | {SERVICE: "1"}


def _inheritance(launch: Launch) -> dict[str, object]:
    """Return what the wrapper must inherit from this process, and would otherwise inherit from the server."""
    with open(launch.script, "rb") as script:
        outputs = outputs_of(script.read(), os.path.dirname(launch.script))
    return {
        "environment": launch.inherited(),
        "umask": umask(),
        "limits": {number: _limits(number) for number in _LIMITS},
        "cpus": cpus_in(launch.cpus),
        "outputs": [path for path in (outputs.stdout, outputs.stderr) if path] if outputs is not None else [],
    }


def _limits(number: int) -> tuple[int, int]:
    soft, hard = resource.getrlimit(number)
    given = identity.limit_for_jobs() if number == resource.RLIMIT_NOFILE else None
    return soft if given is None else given, hard


def _write(path: str, told: dict[str, object]) -> None:
    """Write a file that only its reader may see: an environment may have secrets."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="ascii") as file:
        json.dump(told, file)


def _take_back(path: str) -> None:
    """Remove a file that will not be read."""
    with suppress(OSError):
        os.unlink(path)


def _identity(pid: int, server: int) -> Jid | None:
    """Return the identity of *pid*; None if it is not the process that *server* started, which has ended already."""
    try:
        found = identity.of_process(pid)
        now = identity.read_stat(pid) if found is not None else None
    except OSError:  # the jid file will name it
        return None
    return found if now is not None and now.parent == server else None


def _words(error: Exception) -> str:
    if isinstance(error, TmuxCommandNotFound):
        return "tmux is not installed"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def socket_of(spool_dir: str) -> str:
    """Return the path of the server's socket: in the spool, or elsewhere if the spool's real path is too long for one.

    Elsewhere is not in the directory of a login, which goes with that. Raises SpoolError if others can use it too.
    """
    root = os.path.realpath(spool_dir)  # a spool has one server, regardless of the path used
    path = layout.Layout(root).at(layout.TERMINALS)
    if len(os.fsencode(path)) <= _LONGEST_SOCKET:
        return path
    place = f"{_ELSEWHERE}/spool-{os.getuid()}"
    with suppress(OSError):  # an existing entry, and whether it is suitable, is checked next
        os.mkdir(place, 0o700)
    if why := _why_not_private(place):
        text = f"the spool's path is too long for a socket, and this directory {why}"
        raise SpoolError(cannot("use", "tmux", text, where=place))
    return f"{place}/{hashlib.sha256(os.fsencode(root)).hexdigest()[:24]}"


def _why_not_private(directory: str) -> str:
    """Return why others may be able to use *directory*, "" if only this user can."""
    try:
        status = os.lstat(directory)
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    return "" if ours else "is not accessible only to you; remove it, or have its owner remove it"


def session_of(job: str, run: int) -> str:
    """Return the name of a run's session: unique to the run, and unchanged by tmux.

    tmux makes `_` of dots and colons. A job's name has no `~` and no `+`, so `train.v2` can be `train~v2`.
    """
    return re.sub(r"[^A-Za-z0-9_-]", lambda found: "~" if found[0] == "." else f"+{ord(found[0]):x}+", job) + f"/{run}"
