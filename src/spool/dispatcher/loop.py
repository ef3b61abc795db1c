"""Wake, look, decide, act: one pass after the other, in one thread, under the lock.

Every pass can be the last: whatever it has done when the process is killed is enough for the next dispatcher to
go on from.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from spool.core import layout
from spool.core.layout import HELD, QUEUED
from spool.core.model import Machine, State, Stop, StopKind
from spool.core.scheduler import Plan
from spool.dispatcher.admission import Admission
from spool.dispatcher.arrays import Arrays
from spool.dispatcher.confinement import Confinement, Piece, Thing
from spool.dispatcher.dues import due_in_ns
from spool.dispatcher.events import EventRecorder
from spool.dispatcher.filemoves import FileMoves
from spool.dispatcher.finalizer import Finalizer
from spool.dispatcher.inotify import DirectoryWatcher
from spool.dispatcher.journal import stopping_line, worth_remembering
from spool.dispatcher.launcher import Launcher
from spool.dispatcher.monitor import Monitor
from spool.dispatcher.observer import Observer
from spool.dispatcher.recovery import Recovery, restore_results, unfinished
from spool.dispatcher.reservations import Reservations
from spool.dispatcher.scanner import Scanner
from spool.dispatcher.scheduling import Scheduling
from spool.dispatcher.status import StatusWriter
from spool.dispatcher.supervisor import Concluder, Limits, Supervisor
from spool.dispatcher.terminator import Terminator
from spool.dispatcher.wakeup import Wakeup
from spool.executors import Executors
from spool.executors.local import LocalProcesses
from spool.formats import wrapper
from spool.formats.journal import Memory, recall
from spool.machine import cgroups
from spool.machine.cgroups import RunGroups
from spool.machine.processes import MachineProber
from spool.state.outcomes import Outcomes
from spool.state.past import Remembered
from spool.state.table import Job, Live, Table
from spool.state.world import World
from spool.store.config import Settings
from spool.store.disk import SpoolTrouble
from spool.store.locked_spool import LockedSpool
from spool.store.logs import Logs

log = logging.getLogger(__name__)

T = TypeVar("T")

_LEAST_SPARES, _MOST_SPARES = 2, 256


class Dispatcher:
    """A dispatcher of one spool; made once the lock is held. `wakes` may be told to leave."""

    def __init__(self, spool: LockedSpool, *, clock: Callable[[], int] = time.time_ns) -> None:
        self.spool = spool
        self.clock = clock
        self.confinement = Confinement(spool.root)
        self.settings = Settings(spool)
        self.table = Table()
        self.logs = Logs(spool, strict=self.settings.config.durability == "strict")
        self.outcomes = Outcomes(spool, self.table.array_state, self._reading_outcome)
        self.world = World(spool, self.table, self.settings)
        self.past = Remembered(spool, self.table)
        self.reservations = Reservations(spool, self.confinement)
        self.events = EventRecorder(spool, self.settings, self.logs, self.confinement)
        self.scanner = Scanner(spool, self.table, self.settings, self.events, self.confinement)
        self.prober = MachineProber(frozenset(self.settings.config.other_hosts_gone))
        self.finalizer = Finalizer(
            spool, self.table, self._revisit, self._ended_as, self.settings, self.events, self.confinement
        )
        groups = cgroups.find_run_groups()
        local = LocalProcesses(
            spool.root, liveness=self.prober.liveness, groups=groups if isinstance(groups, RunGroups) else None
        )
        local.inherit()
        self.executors = Executors(lambda: self.settings.executor, local)
        self.launcher = Launcher(
            spool, self.table, self.logs, self.settings, self.executors, self.events, self.confinement
        )
        self.table.executor_problem = self.executors.problem
        self.terminator = Terminator()
        self.limits = Limits(self.table, self.executors, self.order_stop, self.confinement)
        self.watcher = DirectoryWatcher()
        self.status = StatusWriter(spool, self.table, self.watcher, self.confinement)
        self.wakeup = Wakeup()
        self.supervisor = Supervisor(
            self.table, Concluder(spool, self.prober), self.terminator, self.wakeup, self.executors, self.confinement
        )
        self.filemoves = FileMoves(
            spool, self.table, self.scanner, self.finalizer, self.logs, self.order_stop, self.confinement
        )
        self.arrays = Arrays(
            spool,
            self.table,
            self.scanner,
            self.finalizer,
            self.logs,
            self.outcomes,
            self.order_stop,
            self.flush,
            self.world.why_no_room,
            self.confinement,
        )
        self.observer = Observer(self)
        self.monitor = Monitor(self)
        self.admission = Admission(self)
        self.scheduling = Scheduling(self)
        self.status.gpus_at = lambda: self.world.gpus_at_ns
        self.status.why_not_expanded = lambda name: self.arrays.expander.reason(name, paused=self.observer.paused)
        self._unfiled: list[Live] = []  # runs that are over, and whose paperwork is not done
        self._unrecorded: dict[tuple[str, int], Live] = {}  # runs that are stopped, which no record says yet
        self.recovery = self._recovery(Memory())
        self.plan: Plan | None = None
        self._watches_gpus = False
        self.machine: Machine | None = None
        self.busy_at_ns = time.monotonic_ns()

    def _recovery(self, memory: Memory) -> Recovery:
        parts = (self.confinement, self.settings, self.executors)
        return Recovery(self.spool, self.table, self.prober, memory, *parts)

    # Life.

    def open(self) -> None:
        """Find out how things stand: adopt what runs, finish what was cut off.

        Raises OSError where the spool as a whole cannot be read; opened anew by another call it goes on.
        """
        confinement = self.confinement
        with confinement.service("read", "the wrapper"):
            wrapper.load()
        with confinement.service("clean up", "the staging directory"):
            self.spool.sweep_staging()
        self.observer.open()
        self.wakeup.watch_files(self.events.client.fileno(), self.events.client.read)
        memory = recall(self.logs.read_journal())
        self.recovery = self._recovery(memory)
        self.events.open(memory.told)
        with confinement.service("restore", "the results that a power cut took"):
            restore_results(self.spool, memory, self.prober.boot_id(), confinement)
        self.recovery.unfinished_moves()
        self.recovery.runs()
        for name in list(self.recovery.arrays):
            self._resume_array(name)
        self.recovery.places()
        for live in list(self.table.live.values()):
            self._adopt(live)
        # What the first look finds stays for long; to collect garbage among it over and over would cost as much again.
        gc.disable()
        self.observer.look_at_everything()
        gc.freeze()
        gc.enable()
        self.filemoves.settle_places()
        self.arrays.count(self.clock())
        with confinement.spool("write", "the journal"):
            self.monitor.begins()
            self.events.flush()
            self._compact()

    def close(self) -> None:
        """Leave; what runs goes on."""
        parts = (self.launcher, self.watcher, self.world, self.events, self.logs, self.wakeup)
        steps = [part.close for part in parts]
        if self.spool.is_ours:  # else another dispatcher may have spoken since
            self.status.write(self.plan, self.machine, paused=self.observer.paused, force=True)
            steps = [self.monitor.leaves, self.flush, *steps]
        for leave in steps:
            try:
                leave()
            except OSError as error:
                log.error("cannot leave in good order: %s; some places in the queue may be forgotten", error)

    @property
    def idle(self) -> bool:
        """Whether nothing waits that could ever start by itself, and nothing runs."""
        waiting = len(self.table.queue) - self.arrays.waiting_held()
        return not self.table.live and not waiting and not self.scanner.awaits_writers and self.arrays.idle

    @property
    def stuck(self) -> bool:
        """Whether nothing runs, and what waits, or cannot be filed, can be helped by people only."""
        runs = self.table.live.values()
        troubled = all(not live.holds_room and self.confinement.why(live.name) for live in runs)
        return troubled and not self.scanner.awaits_writers and self.plan is not None and self.plan.stuck

    # A pass.

    def turn(self) -> bool:
        """Do one pass; return whether another has something to do at once.

        Each step is confined by itself: what fails for the spool as a whole holds up what follows from it, and never
        the limits and the stops.
        """
        self._keep_lock()
        confinement = self.confinement
        self.events.begin_pass()
        self._step("look at", "the spool", self.observer.see)
        with confinement.service("take in", "the answers of hooks"):
            self.admission.hear()
        self._recover()
        ended = self.supervisor.collect()
        for live in ended:
            live.ended_at_ns = self.clock()  # before what starts in its place: the accounting shows nobody twice
        self.launcher.shortage.ended(ended, self.clock())
        self._unfiled += ended
        self.limits.check()
        self._record_stops()
        version = self.table.version
        more = started = False
        if not confinement.held_up():
            with confinement.service("go on with", "the arrays"):
                more = self.arrays.work(self.clock(), paused=self.observer.paused)
        if self.settings.config.policy.on_failure == "pause":
            self._file()  # nothing is to start after the first that failed
        if not confinement.held_up(besides="start"):
            started = bool(self._step("start", "jobs", self.scheduling.work))
        self._file()
        with confinement.service("tell", "the listeners"):
            self.monitor.turn(self.machine)
        self._step("write", "the journal", self._write_journal)
        with confinement.service("serve", "the listeners"):
            self.events.tick()
        confinement.end_pass()
        if started or ended or self.table.version != version:
            self.busy_at_ns = time.monotonic_ns()
            self.status.changed()
        self.status.write(self.plan, self.machine, paused=self.observer.paused)
        more = more or self.observer.unfinished
        return (more or bool(ended) or self.table.version != version) and not confinement.held_up()

    def _keep_lock(self) -> None:
        due = not self.confinement.pauses(Thing("service", "the spool anew"), "lock")
        if self.spool.keep(renew=due):
            log.warning("%s was deleted or replaced; it is made anew", self.spool.layout.at(layout.LOCK))
        trouble = self.spool.lock_trouble
        if due or trouble is None:
            with self.confinement.service("lock", "the spool anew"):
                if trouble is not None:
                    raise trouble

    def keep_room(self) -> None:
        """Keep room on the disk for the stops of all that runs."""
        with self.confinement.service("keep room for", "stops on a full disk"):
            self.spool.keep_spares(min(max(_LEAST_SPARES, len(self.table.live)), _MOST_SPARES))

    def _step(self, verb: str, what: str, step: Callable[[], T]) -> T | None:
        """Do a step of a pass that holds up the starts while it cannot be done."""
        if self.confinement.pauses(Thing("spool", what), verb):
            return None
        with self.confinement.spool(verb, what):
            return step()
        return None

    def _write_journal(self) -> None:
        self.flush()
        if self.logs.long:
            self._compact()
        if (problem := self.logs.problem) is not None:
            raise SpoolTrouble(problem.errno, problem.strerror, problem.filename) from problem

    @property
    def asking(self) -> bool:
        """Whether somebody, or NVML, is asked about a start or a cancel, and has not answered."""
        return self.admission.waiting or self.scheduling.awaits_gpus

    def sleep(self, limit_ns: int | None = None) -> None:
        """Wait until there is a reason to look, at most *limit_ns*."""
        if not self._watches_gpus and self.world.gpus is not None:
            self._watches_gpus = True
            self.wakeup.watch_files(self.world.gpus.fileno(), self.world.take_gpu_answer)
        if limit_ns != 0:
            self.get_ahead()
        self.wakeup.wait(due_in_ns(self, limit_ns))

    def get_ahead(self) -> None:
        """Make the start that will probably be the next ready; for when there is nothing else to do."""
        self.launcher.foresee(self.scheduling.foreseen(), self.clock())

    # Ends.

    def _file(self) -> None:
        """Do the paperwork of what has ended; what an error leaves undone is done by a later call."""
        if not self._unfiled:
            return
        filed = self._step("file", "what has ended", self._do_paperwork)
        if filed:
            gone = {live.key for live in filed}
            self._unfiled = [live for live in self._unfiled if live.key not in gone]
            self.admission.forget(filed)
            for live in filed:
                self._unrecorded.pop(live.key, None)
                self.confinement.forget(Thing.of_run(live.key))
                self._after(live)

    def _do_paperwork(self) -> list[Live]:
        self.monitor.ended(self._unfiled)
        return self.finalizer.file(self._unfiled, self.logs.account, self.clock())

    def _after(self, live: Live) -> None:
        proof = live.proof
        if proof is None or proof.outcome is None:
            return
        self.past.learn(live)
        log.info("job %s run %d: %s (%s)", live.name, live.run, proof.outcome, proof.reason)
        if live.final and proof.outcome not in (State.FINISHED, State.CANCELLED):
            with self.confinement.service("pause", "the spool"):
                self.observer.failed(live.name, f"{proof.outcome}: {proof.reason}")

    # Runs.

    def watch_run(self, live: Live) -> None:
        """Look after a run from now on: its end, its limits, whether it is to be stopped."""
        log.log(
            logging.INFO if live.adopted else logging.DEBUG,
            "job %s run %d: %s",
            live.name,
            live.run,
            "adopted" if live.adopted else "started",
        )
        if live.failure is not None or live.cleared:  # nothing was started
            self.supervisor.watch(live)
            self.supervisor.suspect(live)
            return
        self.wakeup.watch_run(live)
        self.supervisor.watch(live)
        self.limits.add(live)
        self.monitor.watch_run(live)
        if live.adopted:
            self.supervisor.suspect(live)
            self.scanner.moved.add(live.name)
        if live.stop is not None and self.admission.may_stop(live, live.stop):
            self.monitor.stopping(live, live.stop)
            self.terminator.add(live, live.stop.at_ns)

    def order_stop(self, live: Live, stop: Stop) -> None:
        """Record that *live* is to be stopped, and begin to stop it; unless that may be refused, and is not settled.

        It is stopped also where that cannot be recorded: the record is tried again.
        """
        if not self.admission.may_stop(live, stop):
            return
        live.stop = stop
        self.terminator.add(live)
        self.table.recount(live)
        with suppress(OSError):  # what is to be told stays among the notes
            self.monitor.stopping(live, stop)
            if stop.kind is StopKind.CANCEL and self.events.notes:
                self.flush()  # the next dispatcher is not to ask again about a run that is ending already
        self._record_stop(live)
        log.info("job %s run %d: stopping (%s by %s)", live.name, live.run, live.stop.kind, live.stop.by)

    def _record_stop(self, live: Live) -> None:
        stop = live.stop
        if stop is None or self.confinement.pauses(Thing.of_run(live.key), "record the stop of"):
            return
        known = live.key in self._unrecorded
        with self.confinement.of(Thing.of_run(live.key), "record the stop of") as piece:
            if not self.spool.order_stop(live.name, live.run, stop):
                live.stop = self.spool.stop(live.name, live.run) or stop
            live.stop_recorded = True
            self._unrecorded.pop(live.key, None)
        if piece.failed and not known:  # until then the journal tells the next dispatcher
            self._unrecorded[live.key] = live
            self.finalizer.lines.append(stopping_line(live))

    def _record_stops(self) -> None:
        """Try again to record the stops that no record says yet."""
        for key, live in list(self._unrecorded.items()):
            if key in self.table.live and live.result is None:
                self._record_stop(live)
            else:
                del self._unrecorded[key]

    def _recover(self) -> None:
        """Try again to read what could not be read when the dispatcher began."""
        for name in self.recovery.try_again():
            if name in self.recovery.arrays:
                self._resume_array(name)
                if (array := self.table.arrays.get(name)) is not None:
                    self.arrays.count_one(array, self.clock())
            elif (live := self.table.job(name).live) is not None:
                self._adopt(live)
            if name not in self.table.unsettled:
                self._revisit(self.table.job(name))

    def _resume_array(self, name: str) -> None:
        """Go on with an array that an earlier dispatcher left in progress."""
        found = None
        with self.confinement.of(Thing("array", name), "resume") as piece:
            run = self.recovery.arrays[name]
            found = unfinished(self.spool, self.arrays.store, name, run, self.recovery.memory)
        if piece.failed:
            self.recovery.unsettled_again(name)
        elif found is not None:
            self.arrays.resume(*found)

    def _adopt(self, live: Live) -> None:
        """Look after a run that an earlier dispatcher started."""
        self.watch_run(live)

    def _reading_outcome(self, name: str) -> Piece:
        """Return the boundary around reading how a job has ended."""
        return self.confinement.of(Thing.of_job(name), "read the outcome of")

    def _ended_as(self, name: str, outcome: State) -> None:
        """Let those that depend on *name* know how it ended."""
        self.outcomes.record(name, outcome)
        self.arrays.ended(name, outcome)
        self.table.queue.changed(name)

    def _revisit(self, job: Job) -> None:
        """See what the name of a job whose run is over has in store."""
        self.scanner.examine(QUEUED, job.name, anew=True)
        self.scanner.examine(HELD, job.name, anew=True)
        self.table.settle(job)

    # Memory.

    def flush(self) -> None:
        """Write down what the next dispatcher has to know, what listeners are told first."""
        self.events.flush()
        lines = self.scanner.clocks.lines + self.finalizer.lines + self.events.notes
        if lines:
            self.logs.remember(lines)
            self.scanner.clocks.lines, self.finalizer.lines, self.events.notes = [], [], []

    def _compact(self) -> None:
        lines = worth_remembering(self.table, self.prober.boot_id()) + self.recovery.worth_remembering()
        self.logs.compact(lines + self.events.worth_remembering())
        # All of it is in what was written.
        self.scanner.clocks.lines, self.finalizer.lines, self.events.notes = [], [], []
