"""Capture the code of a job before it starts, in a process of its own, without waiting for it (FORMAT 4.27).

A start whose code is being captured keeps its place in the plan, with its room, and begins in the pass after the
answer: what is captured is what the run begins with. Starts of one pass in one work tree share a capture. The records
are hard links to the same files. Nothing here holds up a start for long or for good: what cannot be captured is said in
the record.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence

from msgspec import Struct

from spool.core.model import SECOND_NS, Spec
from spool.core.scheduler import Start
from spool.dispatcher.context import Context, Steps
from spool.dispatcher.launcher import workdir_of
from spool.extras.capture.code import FILES, RECORD, Capture, program_of, render_capture
from spool.extras.commands import Command, CommandEnd, CommandRunner
from spool.formats.wire import one_line
from spool.machine.host import login_environment
from spool.state.run import ActiveRun, JobEntry
from spool.store.locked_spool import LockedSpool

log = logging.getLogger(__name__)

ASKED = "capture: its code is being captured"
_WITHIN_S = 15.0  # a little more than the worker gives itself
_GOOD_FOR_NS = 60 * SECOND_NS  # for the start that it was made for, which may wait for a hook or NVML


class _Capturing(Struct, eq=False):
    """One capture, on its way or done. `problem`: it has no files."""

    directory: str
    at_ns: int  # monotonic
    is_done: bool = False
    problem: str = ""

    def answered(self, end: CommandEnd) -> None:
        """Record how the process that captures has ended."""
        self.is_done = True
        if end.status != 0:
            self.problem = one_line("; ".join(end.err.split("\n")[-2:])) or "the process that captures was ended"
            log.warning("cannot capture the code of a job: %s", self.problem)

    def is_stale(self, now_ns: int) -> bool:
        """Whether it was made too long ago for another start."""
        return self.is_done and now_ns - self.at_ns > _GOOD_FOR_NS


class Captures(Steps):
    """The captures that are on their way, or wait for their start. `fileno` is readable when there is an answer."""

    def __init__(self, context: Context) -> None:
        self._spool = context.spool
        self._state = context.state
        self._timer = context.timers.timer("answers")
        self._runner = CommandRunner()
        self._common = login_environment()
        self._serial = 0
        self._orders: list[_Capturing] = []
        self._asked: dict[tuple[object, ...], _Capturing] = {}  # in this pass, by what they capture
        self._of: dict[str, tuple[tuple[object, ...], _Capturing]] = {}  # by the job, with its version

    def fileno(self) -> int:
        """Return the descriptor to watch; it never changes."""
        return self._runner.fileno()

    @property
    def waiting(self) -> bool:
        """Whether an answer is still missing."""
        return any(not order.is_done for order in self._orders)

    def close(self) -> None:
        """Release everything that was captured and not used."""
        self._runner.close()
        for order in self._orders:
            self._spool.unstage(order.directory)

    def ready(self, starts: Sequence[Start]) -> list[Start]:
        """Return the starts whose code has been captured; begin a capture of the others."""
        found = []
        self._asked.clear()
        for start in starts:
            job = self._state.jobs.get(start.name)
            if job is None or job.queued is None or job.queued.spec is None or job.live is not None:
                found.append(start)  # the launcher reports why it cannot be started
            elif self._is_ready(job, job.queued.spec):
                found.append(start)
        self._tidy()
        return found

    def work(self) -> bool:
        """Record the answers, and let their starts begin; return whether there were any."""
        answered = self._runner.work()
        for name, (_, order) in self._of.items():
            if order.is_done and (job := self._state.jobs.get(name)) is not None and job.asked == ASKED:
                self._state.await_answer(job, "")
        if answered:
            self._state.changed()  # a new plan is made, and these jobs start
        self._tidy()
        return answered

    def put(self, live: ActiveRun) -> None:
        """Give a claimed run its records. An error is logged: it must not hold up the start."""
        _, order = self._of.pop(live.name, (None, None))
        if order is None:
            return
        metadir = self._spool.layout.metadir(live.name, live.run)
        try:
            if order.problem:
                said = render_capture(Capture(captured_at_ns=time.time_ns(), problem=order.problem))
                self._spool.disk.create(f"{metadir}/{RECORD}", said, 0o400)
            else:
                _link(self._spool, order.directory, metadir)
        except OSError as error:
            log.warning("cannot keep the captured code of job %s run %d: %s", live.name, live.run, error)

    def _is_ready(self, job: JobEntry, spec: Spec) -> bool:
        version = (job.queued.version if job.queued is not None else None, job.attempts)
        known, order = self._of.get(job.name, (None, None))
        now_ns = time.monotonic_ns()
        if order is None or known != version or order.is_stale(now_ns):
            order = self._of_tree(spec, now_ns)
            self._of[job.name] = version, order
        if not order.is_done:
            self._state.await_answer(job, ASKED)
        return order.is_done

    def _of_tree(self, spec: Spec, now_ns: int) -> _Capturing:
        """Return the capture of a work tree that begins in this pass: an older one may lack what a run has changed."""
        workdir, environment = workdir_of(spec), {**self._common, **dict(spec.env)}
        environment = {key: environment.get(key, "") for key in ("PATH", "VIRTUAL_ENV", "CONDA_PREFIX")}
        # In a container, the image has its own Python.
        program = program_of(_words(spec)) if spec.part("containers") is None else None
        key = (workdir, *environment.values(), program)
        if (order := self._asked.get(key)) is not None:
            return order
        self._serial += 1
        directory = f"{self._spool.disk.staging}/{os.getpid()}.capture.{self._serial}"
        said = {"workdir": workdir, "program": program, "environment": environment, "into": directory}
        arguments = (sys.executable, "-P", "-m", "spool.extras.capture.code", json.dumps(said))
        order = self._asked[key] = _Capturing(directory, now_ns)
        self._runner.order(Command(arguments, within_s=_WITHIN_S, urgent=True), order.answered)
        self._orders.append(order)
        return order

    def _tidy(self) -> None:
        """Remove captures that no start wants any more, and set when there is work without an answer."""
        now_ns = time.monotonic_ns()
        self._of = {name: known for name, known in self._of.items() if not known[1].is_stale(now_ns)}
        wanted = {order for _, order in self._of.values()}
        for order in self._orders:
            if order.is_done and order not in wanted:
                self._spool.unstage(order.directory)
        self._orders = [order for order in self._orders if not order.is_done or order in wanted]
        due_ns = self._runner.due_ns()
        if any(order.is_done for order in self._orders):  # their starts are next, or never come
            due_ns = min(due_ns or now_ns + SECOND_NS, now_ns + SECOND_NS)
        self._timer.set(due_ns)


def _words(spec: Spec) -> list[str]:
    """Return the words by which a command names its interpreter."""
    if spec.script is not None:
        words = spec.script.partition("\n")[0].removeprefix("#!").split()
        return words[1:] if words and os.path.basename(words[0]) == "env" else words
    return spec.command.split() if isinstance(spec.command, str) else list(spec.command)


def _link(spool: LockedSpool, source: str, target: str) -> None:
    """Give the records in *source* names in *target* too; a file system without links gets copies."""
    for name in FILES:
        try:
            spool.disk.link(f"{source}/{name}", f"{target}/{name}")
        except (FileNotFoundError, FileExistsError):  # there is no diff
            continue
        except OSError:
            with open(f"{source}/{name}", "rb") as file:
                spool.disk.create(f"{target}/{name}", file.read(), 0o400)
