"""Wake, look, decide, act: one pass after the other, in one thread, under the lock.

Every pass can be the last: whatever it has done when the process is killed is enough for the next dispatcher to
go on from.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from spool.core.layout import HELD, QUEUED
from spool.core.model import Machine, State, Stop
from spool.core.plan import Plan, View, decide
from spool.dispatcher.arrays import Arrays
from spool.dispatcher.bookings import Bookings
from spool.dispatcher.conclude import Concluder
from spool.dispatcher.dues import due_in_ns
from spool.dispatcher.ends import Ends
from spool.dispatcher.finish import Finisher
from spool.dispatcher.limits import Limits
from spool.dispatcher.look import Look
from spool.dispatcher.moves import Moves
from spool.dispatcher.recover import Recovery, recall, worth_remembering
from spool.dispatcher.report import Report
from spool.dispatcher.restore import restore_results
from spool.dispatcher.resume import unfinished
from spool.dispatcher.settings import Settings
from spool.dispatcher.sight import Sight
from spool.dispatcher.start import Starter
from spool.dispatcher.stop import Stopper
from spool.dispatcher.table import Job, Live, Table
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

LOCAL_ZONE = datetime.now().astimezone().tzinfo or UTC


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
        self.look = Look(spool, self.table, self.settings)
        self.prober = MachineProber(frozenset(self.settings.config.other_hosts_gone))
        self.finisher = Finisher(spool, self.table, self._revisit, self._ended_as, self.settings)
        groups = run_groups.find()
        self.groups = groups if isinstance(groups, RunGroups) else None
        self.starter = Starter(spool, self.table, self.logs, self.settings, self.groups)
        self.table.executor_problem = self.starter.problem
        self.stopper = Stopper(spool.root)
        self.limits = Limits(self.table, self.stopper, self.order_stop)
        self.watch = Watch()
        self.report = Report(spool, self.table, self.watch)
        self.wakes = Wakes(spool.root)
        self.ends = Ends(self.table, Concluder(spool, self.prober), self.stopper, self.wakes, self.prober)
        self.moves = Moves(spool, self.table, self.look, self.finisher, self.logs, self.order_stop)
        self.arrays = Arrays(
            spool, self.table, self.look, self.finisher, self.logs, self.outcomes, self.order_stop, self._flush
        )
        self.sight = Sight(self)
        self.report.why_not_expanded = lambda name: self.arrays.expander.reason(name, paused=self.sight.paused)
        self._unfiled: list[Live] = []  # runs that are over, and whose paperwork is not done
        self.plan: Plan | None = None
        self._decided: tuple[int, object] | None = None  # what the plan was made of
        self._watches_gpus = False
        self._machine: Machine | None = None
        self.busy_at_ns = time.monotonic_ns()

    # Life.

    def open(self) -> None:
        """Find out how things stand: adopt what runs, finish what was cut off."""
        self.spool.sweep_staging()
        self.sight.open()
        memory = recall(self.logs.read_journal())
        recovery = Recovery(self.spool, self.table, self.prober)
        restore_results(self.spool, memory, self.prober.boot_id())
        recovery.unfinished_moves(memory)
        recovery.runs(memory)
        for array, unissued in unfinished(self.spool, self.arrays.store, recovery.arrays, memory):
            self.arrays.resume(array, unissued)
        recovery.places(memory)
        for live in self.table.live.values():
            if self.groups is not None:
                live.group = self.groups.existing(live.name, live.run)
            self._watch_run(live)
        # What the first look finds stays for long; to collect garbage among it over and over would cost as much again.
        gc.disable()
        self.sight.look_at_everything()
        gc.freeze()
        gc.enable()
        self.moves.settle_places()
        self.arrays.count(self.clock())
        self.look.lines = []  # all of it is in what follows
        self.logs.compact(worth_remembering(self.table, self.prober.boot_id()))

    def close(self) -> None:
        """Leave; what runs goes on."""
        try:
            self._flush()
        except OSError as error:
            log.error("cannot write to the journal: %s; some places in the queue are forgotten", error.strerror)
        self.report.write(self.plan, self._machine, paused=self.sight.paused, force=True)
        self.starter.close()
        self.watch.close()
        self.world.close()
        self.logs.close()
        self.wakes.close()

    @property
    def idle(self) -> bool:
        """Whether nothing waits that could ever start by itself, and nothing runs."""
        waiting = len(self.table.queue) - self.arrays.waiting_held()
        return not self.table.live and not waiting and self.arrays.idle

    @property
    def stuck(self) -> bool:
        """Whether nothing runs, and what waits can be helped by people only."""
        return not self.table.live and self.plan is not None and self.plan.stuck

    # A pass.

    def turn(self) -> bool:
        """Do one pass; return whether another has something to do at once."""
        self.sight.see()
        ended = self.ends.collect()
        for live in ended:
            live.ended_at_ns = self.clock()  # before what starts in its place: the accounting shows nobody twice
        self._unfiled += ended
        self.limits.check()
        version = self.table.version
        more = self.arrays.work(self.clock(), paused=self.sight.paused)
        if self.settings.config.policy.on_failure == "pause":
            self._file()  # nothing is to start after the first that failed
        started = self._decide_and_start()
        self._file()
        self._flush()
        if self.logs.long:
            self.logs.compact(worth_remembering(self.table, self.prober.boot_id()))
        if started or ended or self.table.version != version:
            self.busy_at_ns = time.monotonic_ns()
            self.report.changed()
        self.report.write(self.plan, self._machine, paused=self.sight.paused)
        return more or bool(ended) or self.table.version != version

    def sleep(self, limit_ns: int | None = None) -> None:
        """Wait until there is a reason to look, at most *limit_ns*."""
        if not self._watches_gpus and self.world.gpus is not None:
            self._watches_gpus = True
            self.wakes.watch_files(self.world.gpus.fileno(), self.world.take_gpu_answer)
        if limit_ns != 0:
            self.wakes.no_runs(self.starter.get_ready())
        self.wakes.wait(due_in_ns(self, limit_ns))

    # Ends.

    def _file(self) -> None:
        """Do the paperwork of what has ended; what an error leaves undone is done by the next call."""
        if self._unfiled:
            self.finisher.file(self._unfiled, self.logs.account, self.clock())
            filed, self._unfiled = self._unfiled, []
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

    # Decide and act.

    def _decide_and_start(self) -> bool:
        now = self.clock()
        machine = self._machine = self.world.machine(now)
        if machine.gpus and machine.gpu_problem is None:
            self.bookings.machine_has(frozenset(gpu.index for gpu in machine.gpus))
        made_of = (self.table.version, machine)
        plan = self.plan
        if plan is not None and made_of == self._decided and (plan.next_at_ns is None or now < plan.next_at_ns):
            return False
        plan = decide(
            View(
                machine=machine,
                queue=self.table.queue,
                held=self.table.held,
                running=tuple(live.view for live in self.table.live.values() if live.proof is None),
                ended=self.outcomes,
                arrays=self.arrays.names,
                held_arrays=self.table.held_arrays,
                reservations=self.bookings.standing,
                usage=self.usage.at(now, self.settings.config.policy),
                paused=self.sight.paused,
                zone=LOCAL_ZONE,
                protected=plan.protected if plan is not None else None,
            ),
            now,
            self.settings.config.policy,
        )
        self.plan = plan
        self._decided = None  # until all of it is done: after an error it is made again
        self.report.changed()
        for ending in plan.endings:
            job = self.table.jobs.get(ending.name)
            if job is not None and job.live is None and (job.queued is not None or job.held is not None):
                place = QUEUED if job.queued is not None else HELD
                log.info("job %s: %s (%s)", ending.name, ending.outcome, ending.reason)
                self.finisher.end_unstarted(job, place, ending.outcome, str(ending.reason), self.logs.account, now)
        if not plan.starts:
            self._decided = made_of
            return False
        # What a look found goes to the journal before a start that follows from it.
        self._flush()
        runs, blocked = self.starter.start(plan.starts, now)
        for live in runs:
            self._watch_run(live)
            self.outcomes.forget(live.name)
            self.arrays.names.forget(live.name)
            self.report.blocked.pop(live.name, None)
        for one in blocked:
            if self.report.blocked.get(one.name) != one.why:
                log.error("cannot start job %s: %s", one.name, one.why)
            job = self.table.job(one.name)
            job.blocked = self.report.blocked[one.name] = one.why
            self.table.settle(job)  # it keeps nobody else waiting, and is tried again after the next look
        self._decided = made_of
        return True

    def _watch_run(self, live: Live) -> None:
        log.log(
            logging.INFO if live.adopted else logging.DEBUG,
            "job %s run %d: %s",
            live.name,
            live.run,
            "adopted" if live.adopted else "started",
        )
        if live.failure is not None:
            self.ends.suspect(live)
            return
        self.wakes.watch_run(live)
        self.limits.add(live)
        if live.adopted:
            self.ends.suspect(live)
            self.look.moved.add(live.name)
        if live.stop is not None:
            self.stopper.add(live, live.stop.at_ns)

    def order_stop(self, live: Live, stop: Stop) -> None:
        """Record that *live* is to be stopped, and begin to stop it."""
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

    def _flush(self) -> None:
        lines = self.look.lines + self.finisher.lines
        if lines:
            self.logs.remember(lines)
            self.look.lines, self.finisher.lines = [], []
