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

from spool.core.layout import HELD, QUEUED
from spool.core.model import Machine, State, Stop, StopKind
from spool.core.plan import Plan
from spool.dispatcher.acting import Acting
from spool.dispatcher.arrays import Arrays
from spool.dispatcher.bookings import Bookings
from spool.dispatcher.conclude import Concluder
from spool.dispatcher.dues import due_in_ns
from spool.dispatcher.ends import Ends
from spool.dispatcher.finish import Finisher
from spool.dispatcher.gates import Gates
from spool.dispatcher.limits import Limits
from spool.dispatcher.look import Look
from spool.dispatcher.memory import recall, worth_remembering
from spool.dispatcher.moves import Moves
from spool.dispatcher.noticing import Noticing
from spool.dispatcher.recover import Recovery
from spool.dispatcher.report import Report
from spool.dispatcher.restore import restore_results
from spool.dispatcher.resume import unfinished
from spool.dispatcher.settings import Settings
from spool.dispatcher.sight import Sight
from spool.dispatcher.start import Starter
from spool.dispatcher.stop import Stopper
from spool.dispatcher.table import Job, Live, Table
from spool.dispatcher.telling import Telling
from spool.dispatcher.usage import Usage
from spool.dispatcher.wake import Wakes
from spool.dispatcher.watch import Watch
from spool.dispatcher.world import Outcomes, World
from spool.machine import run_groups
from spool.machine.identity import MachineProber
from spool.machine.run_groups import RunGroups
from spool.store.locked import LockedSpool
from spool.store.logs import Logs

log = logging.getLogger(__name__)


class Dispatcher:
    """A dispatcher of one spool; made once the lock is held. `wakes` may be told to leave."""

    def __init__(self, spool: LockedSpool, *, clock: Callable[[], int] = time.time_ns) -> None:
        self.spool = spool
        self.clock = clock
        self.settings = Settings(spool)
        self.table = Table()
        self.logs = Logs(spool, strict=self.settings.config.durability == "strict")
        self.outcomes = Outcomes(spool, self.table.array_state)
        self.world = World(spool, self.table, self.settings)
        self.usage = Usage(spool, self.table)
        self.bookings = Bookings(spool)
        self.telling = Telling(spool, self.settings, self.logs)
        self.look = Look(spool, self.table, self.settings, self.telling)
        self.prober = MachineProber(frozenset(self.settings.config.other_hosts_gone))
        self.finisher = Finisher(spool, self.table, self._revisit, self._ended_as, self.settings, self.telling)
        groups = run_groups.find()
        self.groups = groups if isinstance(groups, RunGroups) else None
        self.starter = Starter(spool, self.table, self.logs, self.settings, self.groups, self.telling)
        self.table.executor_problem = self.starter.problem
        self.stopper = Stopper(spool.root)
        self.limits = Limits(self.table, self.stopper, self.order_stop)
        self.watch = Watch()
        self.report = Report(spool, self.table, self.watch)
        self.wakes = Wakes(spool.root)
        self.ends = Ends(self.table, Concluder(spool, self.prober), self.stopper, self.wakes, self.prober)
        self.moves = Moves(spool, self.table, self.look, self.finisher, self.logs, self.order_stop)
        self.arrays = Arrays(
            spool,
            self.table,
            self.look,
            self.finisher,
            self.logs,
            self.outcomes,
            self.order_stop,
            self.flush,
            self.world.why_no_room,
        )
        self.sight = Sight(self)
        self.noticing = Noticing(self)
        self.gates = Gates(self)
        self.acting = Acting(self)
        self.report.why_not_expanded = lambda name: self.arrays.expander.reason(name, paused=self.sight.paused)
        self._unfiled: list[Live] = []  # runs that are over, and whose paperwork is not done
        self.plan: Plan | None = None
        self._watches_gpus = False
        self.machine: Machine | None = None
        self.busy_at_ns = time.monotonic_ns()

    # Life.

    def open(self) -> None:
        """Find out how things stand: adopt what runs, finish what was cut off."""
        self.spool.sweep_staging()
        self.sight.open()
        self.wakes.watch_files(self.telling.listening.fileno(), self.telling.listening.read)
        memory = recall(self.logs.read_journal())
        recovery = Recovery(self.spool, self.table, self.prober)
        self.telling.open(memory.told)
        restore_results(self.spool, memory, self.prober.boot_id())
        recovery.unfinished_moves(memory)
        recovery.runs(memory)
        for array, unissued in unfinished(self.spool, self.arrays.store, recovery.arrays, memory):
            self.arrays.resume(array, unissued)
        recovery.places(memory)
        for live in self.table.live.values():
            if self.groups is not None:
                live.group = self.groups.existing(live.name, live.run)
            self.watch_run(live)
        # What the first look finds stays for long; to collect garbage among it over and over would cost as much again.
        gc.disable()
        self.sight.look_at_everything()
        gc.freeze()
        gc.enable()
        self.moves.settle_places()
        self.arrays.count(self.clock())
        self.noticing.begins()
        self.telling.flush()
        self.look.clocks.lines = []  # all of it is in what follows
        self._compact()

    def close(self) -> None:
        """Leave; what runs goes on."""
        self.noticing.leaves()
        try:
            self.flush()
        except OSError as error:
            log.error("cannot write to the journal: %s; some places in the queue are forgotten", error.strerror)
        self.report.write(self.plan, self.machine, paused=self.sight.paused, force=True)
        self.starter.close()
        self.watch.close()
        self.world.close()
        self.telling.close()
        self.logs.close()
        self.wakes.close()

    @property
    def idle(self) -> bool:
        """Whether nothing waits that could ever start by itself, and nothing runs."""
        waiting = len(self.table.queue) - self.arrays.waiting_held()
        return not self.table.live and not waiting and not self.look.awaits_writers and self.arrays.idle

    @property
    def stuck(self) -> bool:
        """Whether nothing runs, and what waits can be helped by people only."""
        return not self.table.live and not self.look.awaits_writers and self.plan is not None and self.plan.stuck

    # A pass.

    def turn(self) -> bool:
        """Do one pass; return whether another has something to do at once."""
        self.telling.begin_pass()
        self.sight.see()
        self.gates.hear()
        ended = self.ends.collect()
        for live in ended:
            live.ended_at_ns = self.clock()  # before what starts in its place: the accounting shows nobody twice
        self._unfiled += ended
        self.limits.check()
        version = self.table.version
        more = self.arrays.work(self.clock(), paused=self.sight.paused)
        if self.settings.config.policy.on_failure == "pause":
            self._file()  # nothing is to start after the first that failed
        started = self.acting.work()
        self._file()
        self.noticing.turn(self.machine)
        self.flush()
        self.telling.tick()
        if self.logs.long:
            self._compact()
        if started or ended or self.table.version != version:
            self.busy_at_ns = time.monotonic_ns()
            self.report.changed()
        self.report.write(self.plan, self.machine, paused=self.sight.paused)
        return more or bool(ended) or self.table.version != version

    @property
    def asking(self) -> bool:
        """Whether somebody is asked about a start or a cancel, and has not answered."""
        return self.gates.waiting

    def sleep(self, limit_ns: int | None = None) -> None:
        """Wait until there is a reason to look, at most *limit_ns*."""
        if not self._watches_gpus and self.world.gpus is not None:
            self._watches_gpus = True
            self.wakes.watch_files(self.world.gpus.fileno(), self.world.take_gpu_answer)
        if limit_ns != 0:
            self.get_ahead()
        self.wakes.wait(due_in_ns(self, limit_ns))

    def get_ahead(self) -> None:
        """Make the start that will probably be the next ready; for when there is nothing else to do."""
        self.wakes.no_runs(self.starter.foresee(self.acting.foreseen(), self.clock()))

    # Ends.

    def _file(self) -> None:
        """Do the paperwork of what has ended; what an error leaves undone is done by the next call."""
        if self._unfiled:
            self.noticing.ended(self._unfiled)
            self.finisher.file(self._unfiled, self.logs.account, self.clock())
            filed, self._unfiled = self._unfiled, []
            self.gates.forget(filed)
            for live in filed:
                self._after(live)

    def _after(self, live: Live) -> None:
        proof = live.proof
        if proof is None or proof.outcome is None:
            return
        if live.result is not None:
            self.usage.add(live.result, self.settings.config.policy)
        log.info("job %s run %d: %s (%s)", live.name, live.run, proof.outcome, proof.reason)
        if live.final and proof.outcome not in (State.FINISHED, State.CANCELLED):
            self.sight.failed(live.name, f"{proof.outcome}: {proof.reason}")

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
            self.ends.suspect(live)
            return
        self.wakes.watch_run(live)
        self.limits.add(live)
        self.noticing.watch_run(live)
        if live.adopted:
            self.ends.suspect(live)
            self.look.moved.add(live.name)
        if live.stop is not None and self.gates.may_stop(live, live.stop):
            self.noticing.stopping(live, live.stop)
            self.stopper.add(live, live.stop.at_ns)

    def order_stop(self, live: Live, stop: Stop) -> None:
        """Record that *live* is to be stopped, and begin to stop it; unless that may be refused, and is not settled."""
        if not self.gates.may_stop(live, stop):
            return
        self.noticing.stopping(live, stop)
        if stop.kind is StopKind.CANCEL and self.telling.notes:
            with suppress(OSError):  # it stays among the notes
                self.flush()  # the next dispatcher is not to ask again about a run that is ending already
        if not self.spool.order_stop(live.name, live.run, stop):
            stop = self.spool.stop(live.name, live.run) or stop
        live.stop = stop
        log.info("job %s run %d: stopping (%s by %s)", live.name, live.run, stop.kind, stop.by)
        self.stopper.add(live)
        self.table.version += 1

    def _ended_as(self, name: str, outcome: State) -> None:
        """Let those that depend on *name* know how it ended."""
        self.outcomes.record(name, outcome)
        self.arrays.ended(name, outcome)
        self.table.queue.changed(name)

    def _revisit(self, job: Job) -> None:
        """See what the name of a job whose run is over has in store."""
        self.look.examine(QUEUED, job.name, anew=True)
        self.look.examine(HELD, job.name, anew=True)
        self.table.settle(job)

    # Memory.

    def flush(self) -> None:
        """Write down what the next dispatcher has to know, what listeners are told first."""
        self.telling.flush()
        lines = self.look.clocks.lines + self.finisher.lines + self.telling.notes
        if lines:
            self.logs.remember(lines)
            self.look.clocks.lines, self.finisher.lines, self.telling.notes = [], [], []

    def _compact(self) -> None:
        lines = worth_remembering(self.table, self.prober.boot_id())
        self.logs.compact(lines + self.telling.worth_remembering())
        self.telling.notes = []
