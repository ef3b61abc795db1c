"""Write `state.json`: the last view of the dispatcher, for users and tools. No decision depends on it."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Iterable

from spool.core import layout, lifecycle
from spool.core.lifecycle import Evidence, Liveness, Proof, Verdict, prove, shown
from spool.core.model import SECOND_NS, Holding, Jid, Machine, State
from spool.core.scheduler import Plan
from spool.dispatcher.arrays import Arrays
from spool.dispatcher.context import Component, Context
from spool.dispatcher.wakeup import Pace
from spool.formats.state import (
    GpuView,
    JobView,
    MachineView,
    PoolView,
    RefusalView,
    StateView,
    parse_parts,
    render_state,
)
from spool.machine import identity
from spool.state.run import ActiveRun, JobEntry, JobFileVersion
from spool.state.table import SchedulerState
from spool.state.world import MachineMonitor
from spool.store.glance import machine_line

_AT_MOST_EVERY_NS = SECOND_NS // 2
_HEARTBEAT_NS = 10 * SECOND_NS
_SHARE = 200  # writing may use one part in N of a processor
_REFRESH_SHARE = 20  # and writing an unchanged content, one part in N of that


class StatusWriter(Component):
    """Writes `state.json` as a whole, as often as its size allows."""

    def __init__(self, context: Context, arrays: Arrays, machine: MachineMonitor) -> None:
        super().__init__(context)
        self._timer = context.timers.timer("status", always=True)
        self._arrays = arrays
        self._world = machine
        self.logged = ErrorCount()
        self._written_of = (0, 0)
        self._started_at_ns = time.time_ns()
        self._next_ns = 0  # monotonic
        self._pace = Pace(_SHARE)
        self._wanted = True
        self._awaits_word = False  # a run is shown as starting, and no event reports when that is over
        self._refresh_ns = 0  # monotonic
        self._beat_ns = 0
        self._problems: tuple[str, ...] = ()
        self._gpus_seen = 0
        self._machine_text = b""  # as it was written last
        self._spoken: set[tuple[str, int]] = set()  # runs whose jid was seen, though their handle does not know it

    def open(self) -> None:
        """Go on with what the last dispatcher showed of the half hour before."""
        with self._confinement.service("read", layout.STATE):
            self._state.recent.resume(parse_parts(self._spool.file(layout.STATE) or b"").recent)

    def changed(self) -> None:
        """Mark the file's content as outdated."""
        self._wanted = True

    def refresh(self) -> None:
        """Let the file be written again, for changes without events; rarely if writing takes long."""
        self._wanted |= self._awaits_word or time.monotonic_ns() >= self._refresh_ns

    @property
    def is_outdated(self) -> bool:
        """Whether the file shows an older state, or other troubles."""
        return self._wanted or self._troubles() != self._written_of

    def _troubles(self) -> tuple[int, int]:
        return self.logged.errors, self._confinement.changes

    def show_problems(self, problems: Iterable[str]) -> bool:
        """Show these problems of the spool from now on; return whether they have changed."""
        before, self._problems = self._problems, tuple(problems)
        return self._problems != before

    def write(self, plan: Plan | None, machine: Machine | None, *, paused: bool, force: bool = False) -> None:
        """Write the file if it is outdated and due."""
        self._write(plan, machine, paused=paused, force=force)
        self._timer.set(min(self._next_ns, self._beat_ns) if self._wanted else self._beat_ns)

    def _write(self, plan: Plan | None, machine: Machine | None, *, paused: bool, force: bool) -> None:
        now = time.monotonic_ns()
        troubles = self._troubles()
        self._wanted |= troubles != self._written_of
        if not force and not (self._wanted and now >= self._next_ns):
            if now >= self._beat_ns:
                self._beat(now)
            return
        self._awaits_word = False
        with self._confinement.service("write", layout.STATE) as piece, self._pace:
            text = render_state(self.view(plan, machine, paused=paused))
            self._spool.disk.put(self._spool.layout.at(layout.STATE), text)
        if piece.failed:
            self._next_ns = self._beat_ns = now + SECOND_NS
            return
        if machine is not None:
            self._write_machine(machine)
        self._wanted, self._written_of = False, troubles
        self._next_ns = now + max(_AT_MOST_EVERY_NS, self._pace.pause_ns)
        self._refresh_ns = now + _REFRESH_SHARE * self._pace.pause_ns
        self._beat_ns = now + _HEARTBEAT_NS

    def _write_machine(self, machine: Machine) -> None:
        """Write the resources of the machine for submissions, if changed. GPUs count until NVML is asked again."""
        if self._world.gpus_at_ns is not None:
            self._gpus_seen = len(machine.gpus)
        text = machine_line(identity.boot_id(), machine.cpus, machine.memory_bytes, self._gpus_seen)
        if text != self._machine_text:
            with self._confinement.service("write", layout.MACHINE) as piece:
                self._spool.disk.put(self._spool.layout.at(layout.MACHINE), text)
            self._machine_text = b"" if piece.failed else text

    def _beat(self, now: int) -> None:
        try:
            os.utime(self._spool.layout.at(layout.STATE))
        except OSError:
            self._wanted = True
        self._beat_ns = now + _HEARTBEAT_NS

    def view(self, plan: Plan | None, machine: Machine | None, *, paused: bool) -> StateView:
        """Return what `state.json` is to say now."""
        jobs: dict[str, JobView] = {}
        if len(self._spoken) > 2 * len(self._state.live):
            self._spoken &= self._state.live.keys()
        for job in self._state.jobs.values():
            if job.live is not None:
                jobs[job.name] = self._live(job.live)
            elif (file := job.queued or job.held) is not None:
                jobs[job.name] = self._waiting(job, file, plan, paused=paused)
        jobs |= array_views(self._state)
        now = time.time_ns()
        return StateView(
            version=1,
            at_ns=now,
            heartbeat_ns=now,
            pid=os.getpid(),
            host=identity.host(),
            boot_id=identity.boot_id(),
            started_at_ns=self._started_at_ns,
            paused=paused,
            problems=(*self._problems, *self._confinement.problems()),
            machine=self._machine(machine) if machine is not None else None,
            errors=self.logged.errors,
            jobs=jobs,
            held_back=plan.holding if plan is not None and plan.holding != Holding() else None,
            executors=self._state.executors.unavailable(),
            refused={
                job.name: RefusalView(why=job.refused.why, until_ns=job.refused.until_ns)
                for job in self._state.jobs.values()
                if job.refused.until_ns > now and job.live is None
            },
            recent=self._state.recent.use,
        )

    def _waiting(self, job: JobEntry, file: JobFileVersion, plan: Plan | None, *, paused: bool) -> JobView:
        reason: object = plan.reason(job.name) if plan is not None else None
        if job.name in self._state.array_files:
            reason = self._arrays.expander.reason(job.name, paused=paused)
        if job.queued is not None and (held_up := self._confinement.held_up()):
            reason = f"refused: {held_up}"  # as in the commands that plan with `refusal`
        else:
            reason = job.blocked or job.asked or job.hold_reason or reason or self._gate.leases.reason(job.name)
        waiting = self._state.queue.get(job.name) or self._state.held.get(job.name)
        return JobView(
            beside=_beside(job, file.inode) if job.queued is not None and job.held is not None else "",
            **job.row(
                file,
                reason or "",
                problem=self._confinement.why(job.name),
                request=waiting.request if waiting is not None else None,
            ),
        )

    def _live(self, live: ActiveRun) -> JobView:
        problem = self._confinement.why(live.name) or (live.handle.resists if live.handle is not None else "")
        others = _beside(self._state.jobs.get(live.name), live.inode)
        return JobView(beside=others, **live.row(*self._state_of(live), problem=problem))

    def _state_of(self, live: ActiveRun) -> tuple[State, str]:
        """Return the state of a run, and the reason, as in every view."""
        phase = live.phase
        if isinstance(phase, lifecycle.Gone) or phase == lifecycle.Unread(empty=True):  # its end cannot be read yet
            return State.STOPPING, "has ended"
        if isinstance(phase, lifecycle.Void):
            proof = Proof(Verdict.VOID)
        elif (ended := live.ended) is not None:
            proof = Proof(Verdict.ENDED, ended.outcome, ended.reason)
        else:
            proof = self._proof(live)
        state, reason = shown(proof, filed=False, stop=live.stop, submitted=live.submitted)
        return state or State.STARTING, reason

    def _proof(self, live: ActiveRun) -> Proof:
        """Return the proof for a run that may be alive, asking the disk and the machine no more than needed."""
        if live.submitted is not None:  # its supervisor notices when that is over
            return Proof(Verdict.STOPPING if live.stop is not None else Verdict.STARTING)
        registered = live.elsewhere is not None or live.jid is not None or self._has_spoken(live)
        self._awaits_word |= not registered
        liveness = Liveness.GONE if live.is_outlived else Liveness.ALIVE if registered else Liveness.ABSENT
        return prove(Evidence(liveness, stop=live.stop_kind, leftovers=live.is_outlived, grace=True))

    def _has_spoken(self, live: ActiveRun) -> bool:
        if live.key in self._spoken:
            return True
        try:
            jid = self._spool.jid(live.name, live.run)
        except OSError:  # reported where the run is looked at
            return True
        if isinstance(jid, Jid):
            self._spoken.add(live.key)
        return jid is not Liveness.ABSENT

    def _machine(self, machine: Machine) -> MachineView:
        runs = self._state.runs
        on = runs.on_gpus()
        return MachineView(
            cpus=machine.cpus,
            cpus_free=machine.cpus - runs.counts.cpus,
            memory_bytes=machine.memory_bytes,
            memory_free_bytes=machine.memory_bytes - runs.counts.memory_bytes,
            gpu_problem=machine.gpu_problem,
            gpus_unused=machine.gpus_unused,
            refusal=self._confinement.held_up() or machine.refusal,
            gpus_at_ns=self._world.gpus_at_ns,
            resources={
                pool.name: PoolView(total=pool.total, granted=runs.counts.named.granted(pool.name))
                for pool in machine.resources
            },
            gpus=tuple(GpuView.of(gpu, [run.name for run in on[gpu.uuid]]) for gpu in machine.gpus),
            shared=self._gate.leases.view,
        )


def _beside(job: JobEntry | None, inode: int) -> str:
    """Return the states of the other jobs of a name than that of the file *inode*, as one text; "" without any."""
    if job is None:
        return ""
    found: dict[int, State] = {}
    for state, file in ((State.QUEUED, job.queued), (State.HELD, job.held)):
        if file is not None and file.inode != inode:
            found.setdefault(file.inode, State.INVALID if file.invalid else state)
    return " ".join(found.values())


class ErrorCount(logging.Handler):
    """Counts errors, as a handler of the log."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count an error."""
        self.errors += 1


def array_views(table: SchedulerState) -> dict[str, JobView]:
    """Return the view of every array in progress: its progress is its reason."""
    if not table.arrays:
        return {}
    running = Counter(live.spec.task.array for live in table.live.values() if live.spec.task is not None)
    views = {}
    for array in table.arrays.values():
        state, reason = State.RUNNING, array.progress(running[array.name])
        if array.cancelled is not None:
            state, reason = State.STOPPING, f"{array.cancelled}: {reason}"
        elif array.held:
            state = State.HELD
        views[array.name] = JobView(beside=" ".join(array.beside), **array.row(state, reason))
    return views
