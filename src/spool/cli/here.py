"""`spool run --here`: run a job's command in this terminal.

The job is one like any other, whose command is started by a holder (`executors/holder.py`). This process waits for the
holder on a socket, hands it the descriptors of the terminal, and is the terminal's side of a pseudo-terminal until the
command ends. If stdin is no terminal, the command gets the very descriptors, and nothing is copied.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import select
import signal
import socket
import termios
import time
import tty
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from spool.cli import render
from spool.cli.common import own
from spool.cli.submission import Asked, draft_of, publish, tell_doubts
from spool.cli.telling import made, tell
from spool.cli.wait import PATIENCE_NS, POLL_S, HoldNotices, code_of, told
from spool.client import autostart, submit
from spool.client.draft import Draft
from spool.client.requests import Requests
from spool.client.waiting import Awaited, End
from spool.core import layout
from spool.core.errors import SpoolError, UsageError, cannot
from spool.core.layout import RUNNING
from spool.core.lifecycle import Verdict
from spool.core.model import SECOND_NS, Grant, State
from spool.core.names import LOCAL_EXECUTORS, engine_title
from spool.core.units import format_duration, show_duration
from spool.executors import holder
from spool.formats import jobfile, wrapper
from spool.machine.host import umask
from spool.machine.marks import MachineProber
from spool.query.last_view import last_view
from spool.query.rows import in_words
from spool.store.glance import config_if, defaults_of
from spool.store.ownership import this_user
from spool.store.spool import Spool

_TURN_S = 0.1  # between two looks at a job that waits
_LOOK_NS = SECOND_NS  # between two at its reason
_IDLE_NS = 2 * SECOND_NS  # between two at how long its GPUs have been idle
_ANSWER_S = 10.0  # for a holder to say whose it is
_TURN_MS = 500  # between two looks at what no event tells
_LAST_S = 1.0  # for what is printed after the end
_BLOCK = 1 << 16
_WARNED_NS = 300 * SECOND_NS  # how long before they are taken back
_FORWARDED = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_AWAITED = {*_FORWARDED, signal.SIGHUP}
_OF_THE_JOB = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "_", "OLDPWD"})
_ONE_RUN = {
    "retry": "retries", "requeue": "a requeue", "preemptible": "preemption", "array": "an array",
    "matrix": "an array", "rows": "an array",
}  # fmt: skip
_ELSEWHERE = {
    "slurm": "`srun --pty COMMAND` runs it in this terminal, and `salloc` opens a shell",
    "sge": "`qrsh COMMAND` runs it in this terminal, and `qlogin` opens a shell",
}


class Manner(Struct, frozen=True):
    """How a command runs here. `nohup`: it goes on without the terminal."""

    nohup: bool
    quiet: bool
    strict: bool
    replace: bool


def run_here(root: str, asked: Asked, manner: Manner) -> int:
    """Run the requested command in this terminal when it is its turn, and return its exit code."""
    asked, is_shell = _with_shell(asked)
    _check_once(asked)
    if (around := _run_around(root)) is not None:
        return _run_inside(asked, root, around)
    terminal = f"spool-here-{os.getpid()}-{os.urandom(8).hex()}"
    draft = _draft(asked, root, terminal)
    spool = made(root) if submit.is_ours(root) else own(root)
    tell_doubts(spool.root, [draft], strict=manner.strict)
    wait = _Wait(spool, draft.name, quiet=manner.quiet)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(holder.address(terminal))
        listener.listen(1)
        try:
            with _interruptible():
                publish(spool.root, [draft], held=draft.held, replace=manner.replace)
                answer = wait.until_asked(listener)
                if isinstance(answer, End):
                    tell(told(answer))
                    return code_of(answer.outcome, answer.exit_code)
                connection, log = answer
                signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)  # until there is a command to tell of them
                master = _hand_over(connection, _environment(draft, whole=not asked.export), nohup=manner.nohup)
        except _InterruptedError as interruption:
            return wait.given_up(interruption.number)
    session = _Sitting(connection, master, _IdleNotices(spool, draft), -1 if is_shell else log)
    try:
        code = session.follow()
    finally:
        connection.close()
    return code if session.hung_up else _ended(spool, draft.name, code, quiet=manner.quiet)


def _with_shell(asked: Asked) -> tuple[Asked, bool]:
    """Return the request with a shell for its command if it names none, and whether it is that."""
    values = dict(asked.values)
    opens = values.get("shell") == [""]
    if opens:
        del values["shell"]
    has_command = asked.shell_command is not None or bool(asked.plain) or bool(asked.loose)
    if has_command and opens:
        raise UsageError("--shell alone opens a shell, and there is a command too; leave out one of the two")
    if has_command:
        return replace(asked, values=values), False
    shell = values.pop("shell", [""])[-1] or os.environ.get("SHELL") or pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
    return replace(asked, values=values, plain=(shell,)), True


def _check_once(asked: Asked) -> None:
    """Raise UsageError for options that would give the job more than one run."""
    for key, what in _ONE_RUN.items():
        if any(each.partition(".")[0] == key and given[-1] != "false" for each, given in asked.values.items()):
            raise UsageError(f"cannot run it here with {what}: it has one run, in this terminal")
    _check_no_container(asked.values)


def _check_no_container(keys: Iterable[str]) -> None:
    if any(key.partition(".")[0] == "container" for key in keys):
        remedy = "start it by its runtime, as in `spool run --here -- podman run -it IMAGE`"
        raise UsageError(cannot("run", "it here", "a terminal does not reach into a container of spool", remedy=remedy))


def _draft(asked: Asked, root: str, terminal: str) -> Draft:
    """Return the job, which is run once at most. Its environment goes by the socket, unless --export says which.

    Raises UsageError if it would run on another machine.
    """
    draft = draft_of(replace(asked, export=asked.export or ("NONE",)), root)
    keys = dict(draft.keys)
    _check_no_container(keys)  # in the lines of a script
    env = keys.pop("env", None)
    executor = keys.get("executor") or _configured_executor(root)
    if executor not in LOCAL_EXECUTORS:
        remedy = _ELSEWHERE.get(str(executor), f"{engine_title(str(executor))} may have a command of its own for that")
        why = f"its executor is {executor}, which runs jobs on other machines"
        raise UsageError(cannot("run", "it here", why, remedy=f"{remedy}; --executor process takes this machine"))
    keys |= {"executor": executor, "requeue": False, "terminal": terminal, **({"env": env} if env else {})}
    one = Draft(draft.name, keys, held=draft.held, named=draft.named)
    try:
        one.check(root)
    except SpoolError as error:  # such as an array in the lines of a script
        raise UsageError(cannot("run", "it here", str(error))) from None
    return one


def _configured_executor(root: str) -> str:
    config = config_if(root, b"executor")
    return config.executor if config is not None else LOCAL_EXECUTORS[0]


# Inside a job.


def _run_around(root: str) -> Grant | None:
    """Return what the run of the spool *root* has to which this process belongs; None if there is none that goes on."""
    job, run, metadir = (os.environ.get(f"SPOOL_{what}", "") for what in ("JOB", "RUN", "METADIR"))
    if not layout.valid_name(job) or not run.isdecimal():
        return None
    if os.path.realpath(metadir) != os.path.realpath(layout.Layout(root).metadir(job, int(run))):
        return None
    spool = Spool.open(root)
    record = spool.grant(job, int(run))
    if record is None or spool.load(job, int(run), MachineProber()).proof.verdict is Verdict.ENDED:
        return None
    return record.grant


def _run_inside(asked: Asked, root: str, has: Grant) -> int:
    """Become the command. Raises UsageError if it asks for more than the job around it has, or for a container."""
    draft = draft_of(replace(asked, export=("NONE",), capture=False), root)
    spec = jobfile.parse(draft.text(), name=draft.name)
    _check_no_container(draft.keys)
    asks, stated, given = spec.request, draft.keys, dict(has.resources)
    amounts = [
        ("gpus", asks.gpus, max(len(has.gpu_uuids), has.gpus_elsewhere)),
        ("cpus", asks.cpus, has.cpus),
        ("memory", None if asks.memory_auto else asks.memory_bytes, has.memory_bytes),
        ("gpu_memory", None if asks.gpu_memory_auto else asks.gpu_memory_bytes, has.gpu_memory_bytes),
        *(("resources", amount, given.get(name, 0)) for name, amount in asks.resources),
    ]
    for key, wanted, there in amounts:
        if key in stated and wanted is not None and there is not None and wanted > there:
            shown = stated[key] if not isinstance(stated[key], dict) else wanted
            why = f"it asks for {key} = {shown}, and job {os.environ['SPOOL_JOB']}, in which it would run, has less"
            remedy = "ask for less, or for more when you submit that job"
            raise UsageError(cannot("run", "it here", why, remedy=remedy))
    if "workdir" in asked.values:
        os.chdir(os.path.expanduser(spec.workdir or "~"))
    command = wrapper.with_setup(spec.setup, spec.command, spec.shell, is_whole_run=False)
    words = wrapper.words_of(command, spec.shell)
    try:
        os.execvpe(words[0], words, {**os.environ, **dict(spec.env)})  # noqa: S606  # that is what this is for
    except OSError as error:
        tell(cannot("execute", words[0], error.strerror or str(error)))
        return 127 if isinstance(error, FileNotFoundError) else 126


# Waiting.


class _InterruptedError(BaseException):
    """A signal that ends the wait. Not an Exception, so that nothing on the way takes it for an error."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise _InterruptedError when this process is to end. What was ignored, as under nohup, stays so."""

    def interrupted(number: int, _: FrameType | None) -> None:
        raise _InterruptedError(number)

    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupted) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Wait:
    """The wait for a job's turn, with the reason in one line."""

    def __init__(self, spool: Spool, name: str, *, quiet: bool) -> None:
        self._spool = spool
        self._name = name
        self._quiet = quiet
        self._line = render.StatusLine()
        self._notices = HoldNotices(spool, self._say)
        self._told = ""
        self._problem: str | None = None
        self._next_ns = time.monotonic_ns() + _LOOK_NS // 2

    def until_asked(self, listener: socket.socket) -> tuple[socket.socket, int] | End:
        """Return the holder's connection and the descriptor of the job's log, or the end of a job that has none."""
        self._say(f"job {self._name}")
        awaited = Awaited(self._spool, self._name, waited=True)
        listener.settimeout(_TURN_S)
        try:
            while True:
                with suppress(TimeoutError):
                    if (found := self._accepted(listener)) is not None:
                        return found
                if (end := awaited.poll()) is not None:
                    return end
                self._notices.see(awaited)
                self._look()
        finally:
            self._line.clear()

    def given_up(self, number: int) -> int:
        """Cancel the job, because the signal *number* ends the wait, and return the exit code."""
        with suppress(SpoolError):  # it was not submitted yet, or has just ended
            Requests(self._spool, this_user()).cancel(self._name, "interrupted")
            self._say(f"job {self._name} is cancelled")
        return 128 + number

    def _accepted(self, listener: socket.socket) -> tuple[socket.socket, int] | None:
        """Return the connection of the job's holder and its log, None for that of anything else."""
        connection, _ = listener.accept()
        connection.settimeout(_ANSWER_S)
        with suppress(OSError):
            if holder.is_ours(connection):
                told, fds = holder.received(connection, 1)
                if fds and told.decode(errors="replace").rpartition("/")[0] == self._name:
                    connection.settimeout(None)
                    return connection, fds[0]
        connection.close()
        return None

    def _look(self) -> None:
        """Show why it waits, and see to it that a dispatcher is there."""
        begun = time.monotonic_ns()
        if begun < self._next_ns:
            return
        if not self._spool.dispatcher_lives():
            problem = autostart.ensure(self._spool.root)
            if problem is not None and problem != self._problem:
                self._say(problem)
            self._problem = problem
        view, silent_ns = last_view(self._spool, time.time_ns())
        said = view.jobs.get(self._name) if view is not None and silent_ns is None else None
        if said is not None and said.state == State.QUEUED and said.reason and not self._quiet:
            why = in_words(said.reason, time.time_ns())
            self._line.draw(f"job {self._name} waits: {why}")
            head = said.reason.partition(":")[0]
            if not self._line.lively and head != self._told:
                self._told = head
                tell(f"job {self._name} waits: {why}")
        took = time.monotonic_ns() - begun
        self._next_ns = begun + max(_LOOK_NS, 20 * took)  # a large spool has a large view

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._line.clear()
            tell(text)


# In the terminal.


def _environment(draft: Draft, *, whole: bool) -> dict[str, str]:
    """Return the variables that the command gets from this terminal: all, or those that describe the terminal."""
    if not whole:
        return {name: os.environ[name] for name in ("TERM", "COLORTERM") if name in os.environ}
    stated = draft.keys.get("env")
    own = stated if isinstance(stated, dict) else {}
    found = {
        name: value
        for name, value in os.environ.items()
        if name not in own and name not in _OF_THE_JOB and not name.startswith(("SPOOL_", "spool_"))
    }
    if os.environ.get("PWD") and not _is_here(os.environ["PWD"], draft.keys.get("workdir")):
        del found["PWD"]
    return found


def _is_here(path: str, workdir: object) -> bool:
    """Whether a job's working directory is *path*, by whatever links that leads to it."""
    with suppress(OSError):
        return isinstance(workdir, str) and os.path.samefile(path, workdir)
    return False


def _hand_over(connection: socket.socket, environment: dict[str, str], *, nohup: bool) -> int | None:
    """Send this terminal and what belongs to it to the holder; return this side of a pseudo-terminal, if one is needed.

    Raises OSError.
    """
    is_terminal = os.isatty(0)
    direct = [number for number in range(3) if not (is_terminal and os.isatty(number))]
    terms = {"nohup": nohup, "direct": direct, "umask": umask()}
    with ExitStack() as closing:
        variables = os.memfd_create("environment")
        closing.callback(os.close, variables)
        with open(variables, "w", encoding="ascii", closefd=False) as file:
            json.dump(environment, file)
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        closing.callback(os.close, nothing)
        fds = [variables, *(number if _is_open(number) else nothing for number in direct)]
        master = None
        if is_terminal:
            master, slave = os.openpty()
            closing.callback(os.close, slave)
            if _in_foreground():  # else the settings are those of a shell that reads a line
                termios.tcsetattr(slave, termios.TCSANOW, termios.tcgetattr(0))
            _resize(master)
            fds += [master, slave]
        socket.send_fds(connection, [json.dumps(terms).encode()], fds)
    if master is not None:
        os.set_blocking(master, False)
    return master


def _is_open(fd: int) -> bool:
    with suppress(OSError):
        os.fstat(fd)
        return True
    return False


def _resize(master: int) -> None:
    """Give a pseudo-terminal the size of this terminal."""
    with suppress(OSError):
        size = fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(master, termios.TIOCSWINSZ, size)


class _IdleNotices:
    """Says in time that the GPUs of a job have been idle, and that they will be taken back if that is configured."""

    def __init__(self, spool: Spool, draft: Draft) -> None:
        self._spool = spool
        self._name = draft.name
        self.wanted = bool(draft.keys.get("gpus"))
        self._next_ns = 0
        self._told = False

    def look(self) -> str:
        """Return what must be said now, "" for nothing."""
        now_ns = time.monotonic_ns()
        if not self.wanted or now_ns < self._next_ns:
            return ""
        self._next_ns = now_ns + _IDLE_NS
        with suppress(OSError, SpoolError):  # the next look may succeed
            view, silent_ns = last_view(self._spool, time.time_ns())
            said = view.jobs.get(self._name) if view is not None and silent_ns is None else None
            if said is not None and said.run is not None:
                return self._words(said.gpu_idle_ns)
        return ""

    def _words(self, idle_ns: int) -> str:
        spec = self._spool.job_spec(RUNNING, self._name, defaults_of(self._spool.root)) if idle_ns else None
        limit_ns = spec.gpu_idle_ns if spec is not None else None
        if spec is None or limit_ns is None:
            self._told = False
            return ""
        stops = spec.gpu_idle_action == "stop"
        is_due = idle_ns >= limit_ns - (min(limit_ns // 2, _WARNED_NS) if stops else 0)
        if not is_due or self._told:
            self._told = self._told and is_due
            return ""
        self._told = True
        which = "the GPU has" if spec.request.gpus == 1 else "the GPUs have"
        after = f"at {format_duration(limit_ns)} spool ends job {self._name} and takes it back" if stops else ""
        after = after.replace("it back", "them back") if spec.request.gpus != 1 else after
        idle = f"{which} been idle for {show_duration(idle_ns)}"
        return f"{idle}; {after}" if after else f"{idle}, and others may wait for it: exit if you are done"


class _Sitting:
    """A command that runs in this terminal. *log* is where to put what it prints as well, -1: nowhere."""

    def __init__(self, connection: socket.socket, master: int | None, idle: _IdleNotices, log: int) -> None:
        self._connection = connection
        self._master = master
        self._idle = idle
        self._log = log
        self._out = next((number for number in (1, 2) if os.isatty(number)), 0)
        self._all_out = os.isatty(1) and os.isatty(2)
        self._saved: list[Any] | None = None  # the settings of the terminal, while it is the command's
        self._taken: list[Any] = []  # those that it has meanwhile
        self._typed = b""  # for the command
        self._code: int | None = None
        self._begun = False
        self._over = False
        self._closed = False  # no process has the pseudo-terminal any more
        self.hung_up = False

    def follow(self) -> int:
        """Return the exit code of the command, -1 if that is unknown because its holder was killed."""
        arrived, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        numbers = {*_FORWARDED, signal.SIGWINCH, signal.SIGCONT, signal.SIGHUP}
        numbers |= {signal.SIGTSTP} if self._master is None else set()
        kept = {n: signal.signal(n, _noted) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
        before = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        try:
            while not self._over:
                self._take_terminal()
                self._step(arrived)
            self._show_rest()
        except (OSError, termios.error):  # the terminal is gone
            self.hung_up = True
        finally:
            with suppress(OSError, termios.error):
                self._give_back()
            signal.set_wakeup_fd(before)
            for number, handler in kept.items():
                signal.signal(number, handler)
        return 128 + signal.SIGHUP if self.hung_up else -1 if self._code is None else self._code

    def _step(self, arrived: int) -> None:
        """Wait for the next of what can happen, and deal with it. Raises OSError if the terminal is gone."""
        poll = select.poll()
        poll.register(arrived, select.POLLIN)
        poll.register(self._connection, select.POLLIN)
        if self._master is not None:
            if not self._closed:
                poll.register(self._master, select.POLLIN | (select.POLLOUT if self._typed else 0))
            if self._saved is not None and not self._typed:
                poll.register(0, select.POLLIN)
        waits = self._master is not None and self._saved is None
        ready = {fd for fd, _ in poll.poll(_TURN_MS if waits or self._idle.wanted else None)}
        if arrived in ready:
            for number in os.read(arrived, _BLOCK):
                self._signalled(number)
        if 0 in ready:
            self._typed = os.read(0, _BLOCK)
            if not self._typed:
                raise OSError
        if self._master is not None and self._master in ready:
            self._type(self._master)
            self._show(self._master)
        if self._connection.fileno() in ready:
            self._listen()
        if said := self._idle.look():
            self._say(said)

    def _signalled(self, number: int) -> None:
        """Pass on a signal to this process, or act on it."""
        if number == signal.SIGHUP:
            raise OSError
        if number in (signal.SIGWINCH, signal.SIGCONT) and self._master is not None:
            _resize(self._master)
        if number == signal.SIGCONT and not self._is_taken():
            self._saved = None  # a shell has set the terminal as it likes it
        if number == signal.SIGTSTP:
            self._tell(holder.SIGNAL + bytes([number]))
            os.kill(os.getpid(), signal.SIGSTOP)
            self._tell(holder.CONTINUE)
        elif number in _FORWARDED:
            self._tell(holder.SIGNAL + bytes([number]))

    def _listen(self) -> None:
        """Do what the holder says; if it says nothing, it is gone."""
        try:
            told = self._connection.recv(holder.LONGEST)
        except OSError:
            told = b""
        if told == holder.BEGUN:
            self._begun = True
            return
        if told[:1] == holder.EXITED:
            self._code = told[1]
        elif told == holder.STOPPED:
            if self._master is not None:
                self._stop()
            return
        self._over = True

    def _stop(self) -> None:
        """Stop with the command, as the shell around this expects after a Ctrl-Z, and go on with it."""
        self._give_back()
        os.killpg(os.getpgrp(), signal.SIGTSTP)
        self._tell(holder.CONTINUE)

    def _tell(self, packet: bytes) -> None:
        with suppress(OSError):  # its holder is gone, which the next step notices
            self._connection.send(packet)

    def _type(self, master: int) -> None:
        """Give the command what was typed, as much as it takes."""
        with suppress(BlockingIOError):
            self._typed = self._typed[os.write(master, self._typed) :]

    def _show(self, master: int) -> bool:
        """Draw some of what the command prints; return whether there was something. Raises OSError."""
        try:
            data = os.read(master, _BLOCK)
        except BlockingIOError:
            return False
        except OSError:
            self._closed, self._typed = True, b""
            return False
        if self._log >= 0:
            with suppress(OSError):  # a full disk
                os.write(self._log, data)
        while data:
            data = data[os.write(self._out, data) :]
        return True

    def _show_rest(self) -> None:
        """Draw what is left. Processes that the command has left behind may print on: only what is there counts."""
        if self._master is not None:
            until = time.monotonic() + _LAST_S
            while not self._closed and self._show(self._master) and time.monotonic() < until:
                pass

    def _say(self, text: str) -> None:
        """Print a line on stderr, below what the command has printed."""
        ends = "\r\n" if self._saved is not None and self._all_out else "\n"
        os.write(2, f"{ends if self._master is not None else ''}spool: {text}{ends}".encode())

    def _take_terminal(self) -> None:
        """Pass every key on unchanged, once the command has begun and this process is in the foreground."""
        if self._master is None or self._saved is not None or not self._begun or not _in_foreground():
            return
        self._saved = termios.tcgetattr(0)
        tty.setraw(0, termios.TCSADRAIN)
        if not self._all_out:  # others in a pipeline may draw on it too
            raw = termios.tcgetattr(0)
            raw[1] = self._saved[1]
            termios.tcsetattr(0, termios.TCSADRAIN, raw)
        self._taken = termios.tcgetattr(0)

    def _is_taken(self) -> bool:
        """Whether the terminal has the settings of the command: after `fg` it may be taken before the signal comes."""
        return self._saved is not None and _in_foreground() and termios.tcgetattr(0) == self._taken

    def _give_back(self) -> None:
        """Restore the settings of the terminal."""
        if self._saved is not None:
            saved, self._saved = self._saved, None
            if _in_foreground():
                termios.tcsetattr(0, termios.TCSADRAIN, saved)


def _noted(number: int, frame: FrameType | None) -> None:
    """Let a signal only write to the descriptor that the loop reads."""


def _in_foreground() -> bool:
    """Whether this process may read from its terminal."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # not the terminal that controls it: then nothing forbids that
        return True


def _ended(spool: Spool, name: str, code: int, *, quiet: bool) -> int:
    """Wait until the end of the job is recorded, report it if it is not the command's own, and return the exit code."""
    awaited = Awaited(spool, name, waited=True)
    begun = time.monotonic_ns()
    while (end := awaited.poll()) is None:
        if time.monotonic_ns() - begun > PATIENCE_NS:
            if code >= 0:
                return code  # it may have an epilog, or there is no dispatcher
            if not spool.dispatcher_lives():
                tell(f"job {name} has ended, and no dispatcher is running that could say how")
                return code_of(State.LOST, None)
        time.sleep(POLL_S)
    if end.outcome in (State.FINISHED, State.FAILED) and code >= 0:
        return code
    if not quiet:
        tell(told(end))
    return code_of(end.outcome, end.exit_code)
