"""The user's side: submit the job, wait for its turn, and have a child in this terminal as its wrapper."""

from __future__ import annotations

import os
import signal
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from ctypes import CDLL
from subprocess import Popen
from types import FrameType

from msgspec.structs import replace

from spool.cli import render
from spool.cli.group import made, own
from spool.cli.render import tell
from spool.cli.submission import Asked, draft_of, publish, tell_doubts
from spool.cli.wait import HoldNotices, code_of, told
from spool.client import autostart, submit
from spool.client.draft import Draft
from spool.client.requests import Requests
from spool.client.waiting import PATIENCE_S, End, Waiter
from spool.core import layout
from spool.core.errors import SpoolError, UsageError, cannot
from spool.core.layout import LOCAL_EXECUTORS, UMASK
from spool.core.lifecycle import Verdict
from spool.core.model import SECOND_NS, Grant, State
from spool.extras.here.launching import own_terminal
from spool.formats import jobfile, wrapper
from spool.formats.capabilities import engine_title
from spool.formats.run_records import parse_rc
from spool.machine.host import login_environment, pinned
from spool.machine.processes import MachineProber, become_subreaper
from spool.query.rows import in_words, last_view
from spool.store.glance import config_if
from spool.store.ownership import this_user
from spool.store.spool import Spool

_POLL_S = 0.025  # between two looks at whether it is a job's turn
_LOOK_NS = SECOND_NS  # between two looks at why a job waits
_TURN_S = 0.5  # between two looks at whether a command has ended whose wrapper has not
_PR_SET_PDEATHSIG = 1
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the wait
_PASSED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # on to the command
_TYPED = (signal.SIGINT, signal.SIGQUIT)
_ELSEWHERE = {
    "slurm": "`srun --pty COMMAND` runs it in this terminal, and `salloc` opens a shell",
    "sge": "`qrsh COMMAND` runs it in this terminal, and `qlogin` opens a shell",
}


def run_here(root: str, asked: Asked, *, quiet: bool, strict: bool, replaces: bool) -> int:
    """Run the requested command in this terminal when it is its turn, and return its exit code."""
    asked = _with_shell(asked)
    if (around := _run_around(root)) is not None:
        return _run_inside(asked, root, around)
    draft = _draft(asked, root)
    spool = made(root) if submit.is_ours(root) else own(root)
    tell_doubts(spool.root, [draft], strict=strict)
    visit: _Visit | None = None
    try:
        with _handled(_interrupted, *_ENDS):
            with _blocked(*_ENDS):  # a job that is submitted is also cancelled
                publish(spool.root, [draft], held=draft.held, replace=replaces)
                visit = _Visit(spool, draft.name, _environment(whole=not asked.export), quiet=quiet)
            return visit.follow()
    except SystemExit as interruption:
        if visit is not None:
            visit.cancel()
        return int(str(interruption.code))


def _with_shell(asked: Asked) -> Asked:
    """Return the request with a shell for its command if it names none."""
    if asked.shell_command is not None or asked.plain or asked.loose:
        return asked
    values = dict(asked.values)
    shell = values.pop("shell", [""])[-1] or os.environ.get("SHELL") or login_environment()["SHELL"]
    return replace(asked, values=values, plain=(shell,))


def _draft(asked: Asked, root: str) -> Draft:
    """Return the job, which is run once at most, in this terminal.

    Its environment is that of this process, which no file has. Raises UsageError for what does not go with a terminal.
    """
    draft = draft_of(replace(asked, export=asked.export or ("NONE",)), root)
    config = config_if(root, b"executor")
    executor = str(draft.keys.get("executor") or (config.executor if config is not None else LOCAL_EXECUTORS[0]))
    if executor not in LOCAL_EXECUTORS:
        remedy = _ELSEWHERE.get(executor, f"{engine_title(executor)} may have a command of its own for that")
        why = f"its executor is {executor}, which runs jobs on other machines"
        raise UsageError(cannot("run", "it here", why, remedy=f"{remedy}; --executor process takes this machine"))
    if draft.keys.get("requeue"):
        raise UsageError("cannot run it here with a requeue: it has one run, in this terminal")
    keys = {**draft.keys, "executor": executor, "requeue": False, "terminal": own_terminal()}
    functions = {} if asked.export else {key: text for key, text in os.environ.items() if key.startswith("BASH_FUNC_")}
    if env := {**functions, **dict(keys.pop("env", {}))}:  # type: ignore[call-overload]  # sh passes on no function
        keys["env"] = env
    one = Draft(draft.name, keys, held=draft.held, named=draft.named)
    try:
        one.check(root)
    except SpoolError as error:
        raise UsageError(cannot("run", "it here", str(error))) from None
    return one


def _environment(*, whole: bool) -> dict[str, str]:
    """Return what a run here begins with: all of this environment, or only what describes the terminal."""
    mine = {key: text for key, text in os.environ.items() if whole or key in ("TERM", "COLORTERM")}
    return {**login_environment(), **{key: mine[key] for key in mine if not key.startswith(("SPOOL_", "spool_"))}}


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
    if "container" in draft.keys:
        remedy = "start it by its runtime, as in `spool run --here -- podman run -it IMAGE`"
        raise UsageError(cannot("run", "it here", "a run does not reach into a container of spool", remedy=remedy))
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


# As a job.


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], object] | signal.Handlers, *numbers: int) -> Iterator[None]:
    """Give these signals another effect. What was ignored, as under nohup, stays so."""
    before = {n: signal.signal(n, handler) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _interrupted(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _blocked(*numbers: int) -> Iterator[None]:
    """Let these signals wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begun(script: str, environment: Mapping[str, str]) -> Popen[bytes]:
    """Start a wrapper, with its signals blocked here. It gets HUP when this process ends."""
    caller = os.getpid()

    def prepare() -> None:
        CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGHUP))
        if os.getppid() != caller:
            os._exit(wrapper.NO_JID)
        become_subreaper()
        for number in (*_ENDS, *_PASSED, *_TYPED):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_ENDS, *_PASSED, *_TYPED, signal.SIGCHLD))

    # The umask of the command is in its text.
    return Popen(["/bin/sh", script], env=environment, umask=UMASK, preexec_fn=prepare)


class _Visit:
    """A job that waits for its turn in this terminal, and runs there."""

    def __init__(self, spool: Spool, name: str, environment: Mapping[str, str], *, quiet: bool) -> None:
        self._spool = spool
        self._name = name
        self._environment = environment
        self._quiet = quiet
        self._waiter = Waiter(spool, (name,), seen=True)
        self._line = render.StatusLine()
        self._notices = HoldNotices(spool, self._say)
        self._told = ""
        self._problem: str | None = None
        self._next_ns = time.monotonic_ns() + _LOOK_NS // 2

    def follow(self) -> int:
        """Run the command when it is its turn, and return the exit code."""
        self._say(f"job {self._name}")
        code: int | None = None
        while not isinstance(found := self._turn(has_ended=code is not None), End):
            if found is None and code is not None:
                return code  # it may have an epilog, or there is no dispatcher
            if found is not None:
                code = self._execute(found)
        if code is None or not (self._quiet or found.outcome in (State.FINISHED, State.FAILED)):
            tell(told(found))
        return code_of(found.outcome, found.exit_code)

    def cancel(self) -> None:
        """Cancel the job, because this process ends."""
        with suppress(SpoolError):  # it has just ended
            Requests(self._spool, this_user()).cancel(self._name, "interrupted")
            self._say(f"job {self._name} is cancelled")

    def _turn(self, *, has_ended: bool) -> int | End | None:
        """Wait for the job's start or end; return the run or the end. None: there is none yet of what *has_ended*."""
        begun = time.monotonic()
        try:
            while not (ends := self._waiter.wait(_POLL_S)):
                run = self._spool.latest_run(self._name)
                if run is not None and self._is_told(run):
                    return run
                if has_ended and time.monotonic() - begun > PATIENCE_S:
                    return None
                self._notices.see(self._waiter.held)
                self._look()
            return ends[0]
        finally:
            self._line.clear()

    def _is_told(self, run: int) -> bool:
        """Whether the dispatcher wants the wrapper of *run* to be started."""
        if self._spool.record(self._name, run, layout.LAUNCH) != own_terminal().encode():
            return False
        os.unlink(self._spool.layout.record(self._name, run, layout.LAUNCH))
        return True

    def _execute(self, run: int) -> int | None:
        """Start the wrapper and wait for the end of its command; return the exit code, None if there is none.

        Without a wrapper, the dispatcher soon takes the run back and starts another one.
        """
        grant = self._spool.grant(self._name, run)
        cpus = grant.grant.cpu_list if grant is not None else ""
        script = self._spool.layout.record(self._name, run, layout.WRAPPER)
        with _settings_kept(), ExitStack() as stack, _blocked(signal.SIGCHLD):
            try:
                with _blocked(*_ENDS, *_PASSED, *_TYPED), pinned(cpus) if cpus else nullcontext():
                    child = _begun(script, self._environment)
                    stack.enter_context(_handled(lambda number, _: child.send_signal(number), *_PASSED))
                    stack.enter_context(_handled(lambda *_: None, *_TYPED))  # the keys reach the command themselves
                    stack.enter_context(_handled(signal.SIG_DFL, signal.SIGHUP))
            except OSError as error:
                self._say(f"cannot start the command: {error.strerror}; spool tries again")
                return None
            while self._code(run) is None and child.poll() is None:
                signal.sigtimedwait({signal.SIGCHLD}, _TURN_S)
        return self._code(run)

    def _code(self, run: int) -> int | None:
        return parse_rc(self._spool.record(self._name, run, layout.RC) or b"")

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


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Give the terminal back the settings that it had, whatever becomes of the command."""
    try:
        settings = termios.tcgetattr(0)
    except termios.error:  # no terminal
        settings = None
    yield
    if settings is not None:
        with suppress(OSError, termios.error), _handled(signal.SIG_IGN, signal.SIGTTOU):
            if _is_free():
                termios.tcsetattr(0, termios.TCSADRAIN, settings)


def _is_free() -> bool:
    """Whether the terminal is that of this process group, or of one that is gone, as of a shell that was killed."""
    group = os.tcgetpgrp(0)
    if group != os.getpgrp():
        with suppress(ProcessLookupError):
            os.killpg(group, 0)
            return False
    return True
