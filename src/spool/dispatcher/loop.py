"""The dispatcher: one pass after the other, in one thread, under the lock.

A pass observes (files, exits, answers), plans, and carries the plan out. Every pass can be the last: its work up to a
kill of the process is enough for the next dispatcher to continue.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from spool.core import layout
from spool.core.layout import HELD, QUEUED
from spool.core.lifecycle import Filed, TakenBack, Unstartable
from spool.core.model import SECOND_NS, State
from spool.core.scheduler import Ending, Plan, Start
from spool.dispatcher.admission import Admission
from spool.dispatcher.arrays import Arrays
from spool.dispatcher.confinement import Confinement, Thing
from spool.dispatcher.context import Changes, Component, Context, ContributedSteps, Journal, all_lines
from spool.dispatcher.events import EventRecorder
from spool.dispatcher.finalizer import Finalizer
from spool.dispatcher.launcher import Launcher, is_on_its_way
from spool.dispatcher.leases import LeaseGate
from spool.dispatcher.monitor import GpuUseRecorder, LimitEnforcer, Monitor
from spool.dispatcher.observer import FileMoves, Observer, Pause
from spool.dispatcher.planner import Planner
from spool.dispatcher.recovery import Recovery
from spool.dispatcher.scanner import Reservations, Scanner
from spool.dispatcher.status import StatusWriter
from spool.dispatcher.supervisor import Supervisor
from spool.dispatcher.terminator import Halt, Preempter, StopOrders, Suspender, Terminator
from spool.dispatcher.wakeup import DirectoryWatcher, Part, Timers, Wakeup
from spool.executors import Executors
from spool.executors.local import LocalProcesses
from spool.formats import wrapper
from spool.formats.config import RetentionPolicy
from spool.formats.journal import recall
from spool.machine import cgroups
from spool.machine.cgroups import RunGroups
from spool.machine.helpers import import_path
from spool.machine.processes import MachineProber
from spool.state.load import OutcomeIndex
from spool.state.run import ActiveRun
from spool.state.table import SchedulerState
from spool.state.world import MachineMonitor
from spool.store.disk import SpoolTrouble
from spool.store.edited import Settings
from spool.store.locked_spool import LockedSpool
from spool.store.logs import Logs

log = logging.getLogger(__name__)

_LOCK = Thing("service", "the spool again"), "lock"
_START, _END = "start", "end"
_GC_EVERY_NS = 3600 * SECOND_NS
_LOCK_EVERY_NS = SECOND_NS // 20  # how soon the loss of the spool or its lock is noticed


class Step(Struct, frozen=True):
    """A step of a pass: it is taken if a timer of its part is due, or *has_work*, but not before it *may*.

    *call* returns whether it has more to do at once, in another pass. An error is reported as "cannot VERB WHAT". If it
    is *of_spool*, the spool as a whole, it holds up the starts, and the step pauses after it.
    """

    part: Part
    verb: str
    what: str
    call: Callable[[], object]
    has_work: Callable[[], object]
    may: Callable[[], bool] = lambda: True
    of_spool: bool = False


class Retention(Component):
    """Removes the runs beyond the limits: as soon as a limit is set or changed, then every hour.

    A removal can take minutes, so that a process of its own does it. What it cannot remove is told on the standard
    error of the dispatcher. It goes on if the dispatcher leaves.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._timer = context.timers.timer("old runs")
        self._limits = RetentionPolicy()  # of the last removal
        self._removal: subprocess.Popen[bytes] | None = None

    @property
    def has_work(self) -> bool:
        """Whether a removal is going on, or the limits are new."""
        return self._removal is not None or self._settings.config.gc != self._limits

    def work(self) -> None:
        """Begin a removal if one is due and none is going on."""
        if self._removal is not None and self._removal.poll() is None:
            self._timer.set(time.monotonic_ns() + _GC_EVERY_NS)  # a removal of hours must not leave it due
            return
        self._removal, limits = None, self._settings.config.gc
        if limits == self._limits and (self._timer.at_ns is None or self._timer.at_ns > time.monotonic_ns()):
            return
        self._limits = limits
        if limits == RetentionPolicy():
            self._timer.set(None)
            return
        self._timer.set(time.monotonic_ns() + _GC_EVERY_NS)
        arguments = (sys.executable, "-P", "-m", "spool", "--spool", self._spool.root, "gc")
        environment = {**os.environ, "PYTHONPATH": import_path()}
        try:
            self._removal = subprocess.Popen(
                arguments, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            log.warning("cannot remove old runs: %s; trying again in an hour", error.strerror or error)


class Dispatcher:
    """A dispatcher of one spool, created once the lock is held. `wakeup` may ask it to leave."""

    _unpinned: str | None = None  # what of the configuration has no effect on which CPUs runs get, as logged
    _shown_version = 0  # the version of the state that the status shows
    _passing, _busy = True, False  # during a pass; whether it has ended or started runs
    _ahead_of: tuple[object, ...] = ()  # what the prepared start follows from

    def __init__(self, spool: LockedSpool, *, clock: Callable[[], int] = time.time_ns) -> None:
        self.spool = spool
        self.clock = clock
        self.timers = Timers()
        self.confinement = Confinement(spool.root, self.timers.timer("files", always=True))
        self.settings = Settings(spool.root)
        spool.accept(lambda: self.settings.config.accept_from)
        self.prober = MachineProber(frozenset(self.settings.config.other_hosts_gone))
        self.executors = Executors(self._local_processes(), lambda: self.settings.config, spool)
        self.state = SchedulerState(executors=self.executors, newest_result=spool.newest_result)
        self.logs = Logs(spool, strict=self.settings.config.durability == "strict")
        self.events = EventRecorder(spool, self.settings, self.logs, self.confinement, self.timers)
        self.journal = Journal(self.logs, self.events.flush)
        self.watcher, self.wakeup = DirectoryWatcher(), Wakeup()
        self.gate = LeaseGate(spool, self.settings, self.state, self.timers, self.wakeup)
        self.context = context = Context(
            spool=spool,
            settings=self.settings,
            state=self.state,
            executors=self.executors,
            prober=self.prober,
            changes=Changes(),
            journal=self.journal,
            events=self.events,
            confinement=self.confinement,
            timers=self.timers,
            gate=self.gate,
            clock=clock,
        )
        reading, matters = self._reading_outcome, lambda name: bool(self.state.queue.watch.dependents(name))
        self.outcomes = OutcomeIndex(spool, self.state, reading, matters)
        self.world = MachineMonitor(spool, self.state, self.settings)
        self.reservations = Reservations(context)
        self.scanner = Scanner(context)
        self.finalizer = Finalizer(context, self.scanner, self.outcomes)
        self.terminator = Terminator(self.timers.timer("ends", always=True))
        self.monitor = Monitor(context, self.reservations, self.world)
        self.admission = Admission(context, self.scanner, self.monitor)
        self.stops = StopOrders(context, self.admission, self.monitor, self.terminator)
        self.limits = LimitEnforcer(context, self.stops.order)
        self.suspender = Suspender(context, self.limits.add)
        self.gpu_use = GpuUseRecorder(context, self.world, self.stops.order)
        self.supervisor = Supervisor(context, self.terminator, self.wakeup, self.monitor, self.limits)
        self.filemoves = FileMoves(context, self.scanner, self.finalizer, self.stops, self.limits)
        self.arrays = Arrays(context, self.scanner, self.finalizer, self.stops, self.world.why_no_room)
        self.observer = Observer(context, self.watcher, self.scanner, self.filemoves, self.reservations)
        self.pause = Pause(context)
        self.halt = Halt(context, self.stops, self.finalizer.end_unstarted, self.arrays.cancel)
        self.planner = Planner(context, self.world, self.reservations, self.outcomes)
        self.preempter = Preempter(context, self.stops, self._plan_again)
        self.steps = ContributedSteps(context, self.wakeup)
        self.launcher = Launcher(context, self.planner.shortage, self.steps.put)
        self.recovery = Recovery(context)
        self.status = StatusWriter(context, self.arrays, self.world)
        self._unfiled: list[ActiveRun] = []  # runs that are over, with unfinished paperwork
        self._first, self._then = self._observing(), self._acting()
        self._watches_gpus, self._watched = False, frozenset[int]()  # the descriptors of engines
        self._lock_seen_ns, self._logs_seen_ns, self.busy_at_ns = -_LOCK_EVERY_NS, 0, time.monotonic_ns()

    def _local_processes(self) -> LocalProcesses:
        groups = cgroups.find_run_groups()
        return LocalProcesses(
            self.spool.root,
            liveness=self.prober.liveness,
            groups=groups if isinstance(groups, RunGroups) else None,
            is_wrapper=self.prober.is_wrapper,
            outlasted=self.spool.outlasted,
        )

    def _reading_outcome(self, name: str) -> AbstractContextManager[object]:
        return self.confinement.of(Thing.of_job(name), "read the outcome of")

    # Life.

    def open(self) -> None:
        """Read the situation: adopt running jobs, finish interrupted work.

        Raises OSError if the spool as a whole cannot be read; another call continues.
        """
        confinement = self.confinement
        with confinement.service("read", "the wrapper"):
            wrapper.load()
        with confinement.service("clean up", "the staging directory"):
            self.spool.sweep_staging()
        self.observer.open()
        self.wakeup.watch_files(self.watcher.fileno(), self.watcher.read)
        self.wakeup.watch_files(self.events.client.child.fileno(), self.events.client.read)
        self.status.open()
        memory = recall(self.logs.read_journal())
        self.events.open()
        self.monitor.open(memory.told.values())
        self.recovery.open(memory)
        for name in list(self.recovery.arrays):
            self._resume_array(name)
        self.recovery.places()
        self.halt.open()
        for live in list(self.state.live.values()):
            self._watch(live)
        # The first look creates values that last; repeated garbage collection among them would cost as much again.
        gc.disable()
        self.observer.look_at_everything()
        self.reservations.look()
        gc.freeze()
        gc.enable()
        self.wakeup.look_at_children()
        self._reload()
        self.gate.look()
        self.filemoves.settle_places()
        self.arrays.count(self.clock())
        with confinement.spool("write", "the journal"):
            self.monitor.begins()
            self.events.flush()
            self._compact()

    def close(self) -> None:
        """Leave; runs go on."""
        steps = [part.close for part in (self.launcher, self.gate.leases, self.watcher, self.world, self.steps)]
        steps += [partial(self.events.close, passing=self._passing), self.logs.close, self.wakeup.close]
        if self.spool.is_ours:  # else another dispatcher may have reported since
            self._write_status(force=True)
            steps = [self.gpu_use.leave, self.monitor.leaves, self.journal.commit, *steps]
        for leave in steps:
            try:
                leave()
            except OSError as error:
                log.error("cannot exit cleanly: %s; some jobs may lose their place in the queue", error)

    @property
    def idle(self) -> bool:
        """Whether nothing runs, and no waiting job could ever start by itself."""
        of_held = (name for array in self.state.arrays.values() if array.held for name in array.open)
        waiting = len(self.state.queue) - sum(name in self.state.queue for name in of_held)
        if self.state.live or waiting or self.admission.awaits_keys:
            return False
        return not self.scanner.awaits_writers and self.arrays.idle

    @property
    def stuck(self) -> bool:
        """Whether nothing runs, and only users can help the jobs that wait or cannot be filed."""
        troubled = all(not live.holds_room and self.confinement.why(live.name) for live in self.state.live.values())
        plan = self.planner.plan
        is_new = self.scanner.awaits_writers or self.admission.awaits_keys
        return troubled and not is_new and plan is not None and plan.stuck

    @property
    def asking(self) -> bool:
        """Whether a review of a start or a cancellation, or a question to NVML or for a lease, is open."""
        return self.admission.waiting or self.planner.awaits_gpus or self.gate.leases.asking or self.steps.waiting

    # A pass.

    def _observing(self) -> tuple[Step, ...]:
        """Return the first steps of a pass: what has happened, and the stops that follow from it."""
        state, wakeup, events, executors = self.state, self.wakeup, self.events, self.executors
        admission, suspender, limits, stops = self.admission, self.suspender, self.limits, self.stops
        changes, ends, terminator = self.context.changes, self.supervisor, self.terminator
        return (
            Step("files", "look at", "the spool", self._observe,
                 lambda: wakeup.reload or self.observer.has_work, of_spool=True),
            Step("answers", "take in", "the answers of hooks", self._take_answers,
                 lambda: (events.replies or admission.allowed or state.to_review
                          or events.asked != admission.asked)),
            Step("answers", "take in", "the answers of capabilities", self.steps.work, lambda: self.steps.waiting),
            Step("recovery", "continue", "interrupted work", self._recover, lambda: state.unsettled),
            Step("ends", "find out", "which runs have ended", self._collect_ended,
                 lambda: (wakeup.children or wakeup.ended or ends.suspects or terminator.runs or executors.engines
                          or changes.leftovers.names)),
            # Engines have reported by now which runs they halt.
            Step("suspensions", "suspend or continue", "runs", suspender.work,
                 lambda: changes.suspensions.names or suspender.changing),
            Step("limits", "enforce", "the limits of runs", limits.check,
                 lambda: limits.moments or limits.with_memory),
            Step("stops", "record", "the stops of runs", stops.record_again, lambda: stops.unrecorded),
        )  # fmt: skip

    def _acting(self) -> tuple[Step, ...]:
        """Return the other steps of a pass, which follow from what was observed."""
        state, arrays, halt, monitor, events = self.state, self.arrays, self.halt, self.monitor, self.events
        journal, logs, world = self.journal, self.logs, self.world
        client, retention = events.client, Retention(self.context)
        filing = Step("paperwork", "file", "what has ended", self._file, lambda: self._unfiled, of_spool=True)
        return (
            Step("arrays", "continue", "the arrays", lambda: arrays.work(self.clock(), paused=self.pause.paused),
                 lambda: state.arrays or state.array_files or arrays.has_left, may=lambda: not self._held_up()),
            # Nothing must start after the first job that failed.
            replace(filing, may=lambda: self.settings.config.policy.on_failure != "continue"),
            Step("halt", "cancel", "what waits and runs", halt.work, lambda: halt.order),
            Step("starts", _START, "jobs", self._plan,
                 lambda: self.planner.is_old, may=self._may_start, of_spool=True),
            Step("preemption", "preempt", "runs", self.preempter.turn, lambda: self.preempter.has_work,
                 may=self._may_start),
            Step("gpu use", "watch", "the use of the GPUs", lambda: self.gpu_use.turn(self.planner.machine),
                 lambda: world.gpus_at_ns),
            filing,
            Step("conditions", "tell", "the listeners", lambda: monitor.turn(self.planner.machine),
                 lambda: events.wanted or monitor.has_work),
            Step("journal", "write", "the journal", self._write_journal,
                 lambda: journal.lines or events.lines or logs.problem or logs.long, of_spool=True),
            Step("listeners", "serve", "the listeners", events.work,
                 lambda: events.news or client.wanted or client.trouble),
            Step("machine", "speak with", "the arbiter of the machine", self._speak, lambda: self.gate.leases.has_work),
            Step("old runs", "remove", "old runs", retention.work, lambda: retention.has_work),
        )  # fmt: skip

    def turn(self) -> bool:
        """Do one pass; return whether another has something to do at once.

        Each step is confined by itself: a failure of the spool as a whole holds up the steps that depend on it, and
        never the limits and the stops.
        """
        confinement, state = self.confinement, self.state
        self._passing, self._busy = True, False
        self._keep_lock()
        due = self.timers.due()
        more = self._take_steps(self._first, due)
        version = state.version
        more = self._take_steps(self._then, due) or more
        self._passing = False
        if confinement.troubled:
            confinement.end_pass()
        changed = state.version != version
        if changed or self._busy:
            self.busy_at_ns = time.monotonic_ns()
        if changed or self._busy or state.version != self._shown_version:
            self.status.changed()
        self._shown_version = state.version
        if "status" in due or self.status.is_outdated:
            self._write_status()
        if "gpus" in due or self.world.gpus_matter():
            self.planner.end_pass()
        return (more or changed) and not self._held_up()

    def _take_steps(self, steps: Iterable[Step], due: Collection[Part]) -> bool:
        """Take each step with work, in this order; return whether there is more to do at once.

        An error ends one step alone. While there is any trouble all are taken, because the work that an error has left
        stays where it was.
        """
        confinement, more = self.confinement, False
        for step in steps:
            if not (confinement.troubled or step.part in due or step.has_work()) or not step.may():
                continue
            thing = Thing("spool" if step.of_spool else "service", step.what)
            if step.of_spool and confinement.pauses(thing, step.verb):
                continue
            try:
                more = bool(step.call()) or more
            except Exception as error:
                confinement.failed(thing, step.verb, error)
            else:
                if confinement.troubled:
                    confinement.done(thing, step.verb)
        return more

    def _held_up(self, besides: str = "") -> bool:
        """Whether nothing starts because of a problem of the spool as a whole."""
        return self.confinement.troubled and bool(self.confinement.held_up(besides))

    def _may_start(self) -> bool:
        return not self._held_up(besides=_START) and self.halt.order is None

    def _keep_lock(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns < self._lock_seen_ns + _LOCK_EVERY_NS and self.spool.lock_trouble is None:
            return
        self._lock_seen_ns = now_ns
        due = not (self.confinement.troubled and self.confinement.pauses(*_LOCK))
        if self.spool.keep(renew=due):
            log.warning("%s was deleted or replaced; creating it again", self.spool.layout.at(layout.LOCK))
        trouble = self.spool.lock_trouble
        if trouble is not None and due:
            self.confinement.failed(*_LOCK, trouble)
        elif trouble is None and self.confinement.troubled:
            self.confinement.done(*_LOCK)
        if now_ns >= self._logs_seen_ns + SECOND_NS and self.spool.is_ours:
            self._logs_seen_ns = now_ns
            with self.confinement.service("reopen", "the logs"):
                self.logs.keep()

    def _take_answers(self) -> None:
        for live, stop in self.admission.take_answers():
            self.stops.order(live, stop)

    def _speak(self) -> None:
        if self.gate.work():
            self.status.changed()

    def _write_journal(self) -> None:
        self.journal.commit()
        if self.logs.long:
            self._compact()
        if (problem := self.logs.problem) is not None:  # of the last grouped sync
            raise SpoolTrouble(problem.errno, problem.strerror, problem.filename) from problem

    def _compact(self) -> None:
        lines = all_lines(self.state, self.prober.boot_id()) + self.recovery.worth_remembering()
        self.journal.compact(lines + self.monitor.worth_remembering())

    def _write_status(self, *, force: bool = False) -> None:
        self.status.write(self.planner.plan, self.planner.machine, paused=self.pause.paused, force=force)

    def sleep(self, limit_ns: int | None = None) -> None:
        """Wait until there is a reason to look, at most *limit_ns*."""
        if not self._watches_gpus and self.world.gpus is not None:
            self._watches_gpus = True
            self.wakeup.watch_files(self.world.gpus.fileno(), self.world.take_gpu_answer)
        if self.executors.engines and (engines := self.executors.descriptors()) != self._watched:
            for fd in engines - self._watched:
                self.wakeup.watch_files(fd, lambda: None)  # each pass asks the engines
            self._watched = engines
        if limit_ns != 0 and self._ahead_of != (now := (self.state.decisive, self.events.asked)):
            self._ahead_of = now
            self.get_ahead()
        self.wakeup.wait(self.due_in_ns(limit_ns))

    def due_in_ns(self, limit_ns: int | None = None) -> int | None:
        """Return the time until a component has something to do, at most *limit_ns*; None: until an event."""
        due = self.timers.due_in_ns(held_up=self._held_up())
        engines_ns = self.executors.due_ns() if self.executors.engines else None
        engines = None if engines_ns is None else max(0, engines_ns - time.monotonic_ns())
        return min((wait for wait in (due, engines, limit_ns) if wait is not None), default=None)

    def get_ahead(self) -> None:
        """Prepare the probable next start, while there is nothing else to do, and ask for what is next in line."""
        self.gate.leases.line_up(self.planner.plan)
        start = None if self.admission.reviews_starts else self.planner.foreseen(paused=self.pause.paused)
        self.launcher.foresee(start, self.clock())

    # Observations.

    def _observe(self) -> bool:
        """Look at what may have changed; return whether a look has given way to starts."""
        asked = self.wakeup.reload_asked()
        if self.observer.listen() | asked:
            self._reload()
            self.gate.look(anew=asked)
        if self.observer.look():
            self.wakeup.look_at_children()
            self.executors.local.wake_wrappers()
            self.supervisor.look_for_leftovers()
            self.launcher.ask_executors_again()
        return self.observer.unfinished

    def _reload(self) -> None:
        """Check whether the configuration, the pause or the listeners have changed."""
        config, executor = self.settings.config, self.settings.config.executor
        reloaded = self.settings.reload()
        if reloaded:
            log.info("the configuration has changed")
            now = self.settings.config
            if (now.defaults, now.accept_from) != (config.defaults, config.accept_from):
                self.scanner.configuration_changed()
            if self.settings.config.executor != executor:
                self.launcher.tell_executors_problems()
            self.world.configuration_changed()
            self.logs.keep_strict(strict=self.settings.config.durability == "strict")
            self.state.changed()
        self.watcher.also(layout.HOOKS, self.spool.layout.at(layout.HOOKS))
        self.events.look()
        if (unpinned := self.world.why_not_pinned(is_shared=self.gate.is_shared)) != self._unpinned:
            self._unpinned = unpinned
            if unpinned is not None:
                log.warning("%s", unpinned)  # once: `info` repeats it, and no list does
        problems = (
            self.settings.problem,
            self.watcher.problem,
            *self.executors.problems(),
            *self.events.problems,
        )
        new_problems = self.status.show_problems(problem for problem in problems if problem)
        if self.pause.see() or reloaded or new_problems:
            self.status.changed()
        else:
            self.status.refresh()

    # Interrupted work.

    def _recover(self) -> None:
        """Try again to read records that were unreadable when the dispatcher began."""
        for name in self.recovery.try_again():
            if name in self.recovery.arrays:
                self._resume_array(name)
                if (array := self.state.arrays.get(name)) is not None:
                    self.arrays.count_one(array, self.clock())
            elif (live := self.state.live_of(name)) is not None:
                self._watch(live)
            if name not in self.state.unsettled:
                self.filemoves.settle_place(self.state.job(name))
                self.finalizer.revisit(self.state.job(name))

    def _resume_array(self, name: str) -> None:
        """Continue an array that an earlier dispatcher left in progress."""
        with self.confinement.of(Thing("array", name), "resume") as piece:
            array = self.recovery.unfinished_array(self.arrays.store, name)
        if piece.failed:
            self.recovery.unsettled_again(name)
        elif array is not None:
            self.state.add_array(array)

    # Starts.

    def _plan(self) -> bool:
        """Plan if anything has changed, and carry the plan out; return whether anything was started."""
        now, before = self.clock(), self.planner.machine
        plan = self.planner.renew(now, paused=self.pause.paused)
        machine = self.planner.machine
        if plan is not None or before is None or machine is None or machine.gpus != before.gpus:
            self.status.changed()
        started = plan is not None and self._carry_out(plan, now)
        if plan is None and not self.state.queue and self.gate.leases.holds_more:
            self.gate.leases.startable(())  # what was asked for is not wanted any more
        self._busy |= started
        return started

    def _plan_again(self, now: int) -> Plan | None:
        return None if self.gate.is_shared else self.planner.again(now, paused=self.pause.paused)

    def _carry_out(self, plan: Plan, now: int) -> bool:
        left = [ending for ending in plan.endings if not self._end(ending, now)]
        began = self._start(self.planner.startable(plan.starts, now), now)
        if not left:
            self.planner.carried_out(starts=began or 0)
        return began is not None

    def _end(self, ending: Ending, now: int) -> bool:
        """End a job that will never start; return whether that succeeded, else the next plan repeats it."""
        job = self.state.jobs.get(ending.name)
        if job is None or job.live is not None or (job.queued is None and job.held is None):
            return True
        place, end = QUEUED if job.queued is not None else HELD, self.finalizer.end_unstarted
        about = job, place, ending.outcome, str(ending.reason), now
        done = self.confinement.attempt(Thing.of_job(ending.name), _END, end, *about)
        if done:
            log.info("job %s: %s (%s)", ending.name, ending.outcome, ending.reason)
        return done

    def _start(self, wanted: list[Start], now: int) -> int | None:
        """Start jobs without open reviews; return how many are on their way, None if nothing was tried."""
        wanted = self.steps.ready([start for start in wanted if not self.arrays.expander.awaits(start.name)])
        # The last question of all: an approval is used up, and NVML's answer is old by the next pass.
        starts = self.admission.review(wanted, now) if wanted else []
        if not starts:
            return None
        # The findings of a look go to the journal before a start that follows from them.
        self.journal.commit()
        # They start now: an arbiter, and NVML, may have taken their time to answer, in which others' runs have ended.
        runs, trouble = self.launcher.start(starts, self.clock())
        for live in runs:
            self._watch(live)
            self.outcomes.forget(live.name)
            self.state.began(live.name)
        if trouble is not None:
            raise trouble
        return sum(is_on_its_way(live) for live in runs)

    def _watch(self, live: ActiveRun) -> None:
        """Watch a run from now on: its end, its limits, orders to stop it."""
        level, what = (logging.INFO, "adopted") if live.adopted else (logging.DEBUG, "started")
        log.log(level, "job %s run %d: %s", live.name, live.run, what)
        if isinstance(live.phase, Unstartable | TakenBack):  # nothing was started
            self.supervisor.watch(live)
            self.supervisor.suspects.add(live.key)
            return
        self.wakeup.watch_run(live)
        self.supervisor.watch(live)
        self.limits.add(live)
        self.monitor.watch_run(live)
        if live.adopted:
            self.gpu_use.watch_run(live)
            self.supervisor.suspects.add(live.key)
            self.context.changes.runs.add(live.name)
            self.stops.resume(live)

    # Ends.

    def _collect_ended(self) -> bool:
        """Collect the runs that are over; return whether any are."""
        ended = self.supervisor.collect()
        if self.executors.engines and self.executors.turned():
            self.launcher.ask_executors_again()
        if ended:
            self.planner.shortage.ended(ended, self.clock())
            self._unfiled += ended
            self._busy = True
        return bool(ended)

    def _file(self) -> None:
        """Do the paperwork of ended runs; work that an error leaves unfinished is done by a later call."""
        if not self._unfiled:
            return  # all parts are called while there is any trouble
        self.monitor.ended(self._unfiled)
        filed = self.finalizer.file(self._unfiled, self.clock())
        gone = {live.key for live in filed}
        self._unfiled = [live for live in self._unfiled if live.key not in gone]
        self.admission.forget(filed)
        for live in filed:
            self.stops.unrecorded.pop(live.key, None)
            self.suspender.forget(live)
            self.confinement.forget(Thing.of_run(live.key))
            self._after(live)

    def _after(self, live: ActiveRun) -> None:
        if not isinstance(live.phase, Filed):
            return  # it never began
        ended = live.phase.ended
        self.planner.learn(live)
        log.info("job %s run %d: %s (%s)", live.name, live.run, ended.outcome, ended.reason)
        if live.phase.final and ended.outcome not in (State.FINISHED, State.CANCELLED):
            for verb, failed in (("pause", self.pause.failed), ("halt", self.halt.failed)):
                with self.confinement.service(verb, "the spool"):
                    failed(live.name, f"{ended.outcome}: {ended.reason}")
