"""Wake, look, decide, act: one pass after the other, in one thread, under the lock.

Every pass can be the last: whatever it has done when the process is killed is enough for the next dispatcher to
go on from.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime

from spool.core import layout
from spool.core.layout import DONE, HELD, QUEUED, RESERVATIONS, RUNNING
from spool.core.lifecycle import Liveness
from spool.core.model import SECOND_NS, State, Stop, StopKind
from spool.core.plan import Plan, View, decide
from spool.dispatcher.bookings import Bookings
from spool.dispatcher.finish import Finisher
from spool.dispatcher.limits import Limits
from spool.dispatcher.look import Look
from spool.dispatcher.recover import Recovery, recall
from spool.dispatcher.report import Report
from spool.dispatcher.settings import Settings
from spool.dispatcher.start import Starter
from spool.dispatcher.stop import Stopper
from spool.dispatcher.table import Job, Live, Table, this_user
from spool.dispatcher.usage import Usage
from spool.dispatcher.wake import Wakes
from spool.dispatcher.watch import Watch
from spool.dispatcher.world import Outcomes, World
from spool.formats import journal
from spool.machine.identity import MachineProber
from spool.store.locked import LockedSpool
from spool.store.logs import Logs

log = logging.getLogger(__name__)

# A file that an editor saves is gone for a moment. A deletion by `spool cancel` has left its record and counts at once.
MISSING_NS = 300_000_000
POLL_NS = SECOND_NS  # where no event tells of an end, or of a change of the files
LOCAL_ZONE = datetime.now().astimezone().tzinfo or UTC
_RESCAN_SHARE = 1000  # a look at everything may cost one part in so many of the time


class Dispatcher:
    """A dispatcher of one spool; made once the lock is held. `wakes` may be told to leave."""

    def __init__(self, spool: LockedSpool, *, clock: Callable[[], int] = time.time_ns) -> None:
        self.spool = spool
        self.clock = clock
        self.settings = Settings(spool)
        self.table = Table()
        self.logs = Logs(spool, strict=self.settings.config.durability == "strict")
        self.outcomes = Outcomes(spool)
        self.world = World(spool, self.table, self.settings)
        self.usage = Usage(spool, self.table)
        self.bookings = Bookings(spool)
        self.look = Look(spool, self.table, self.settings.filled)
        self.prober = MachineProber(frozenset(self.settings.config.other_hosts_gone))
        self.finisher = Finisher(spool, self.table, self.prober, self._revisit, self.outcomes.record)
        self.starter = Starter(spool, self.table, self.logs, self.settings)
        self.stopper = Stopper(spool.root)
        self.limits = Limits(self.table, self.stopper, self.order_stop)
        self.report = Report(spool, self.table)
        self.watch = Watch()
        self.wakes = Wakes(spool.root)
        self.plan: Plan | None = None
        self._decided: tuple[int, object] | None = None  # what the plan was made of
        self._paused_since_ns: int | None = None
        self._suspects: set[tuple[str, int]] = set()  # runs whose end there is reason to look for
        self._poll_at_ns = 0
        self._watches_gpus = False
        self._rescan_at_ns = 0
        self._directories: dict[str, int] = {}
        self.busy_at_ns = time.monotonic_ns()

    # Life.

    def open(self) -> None:
        """Find out how things stand: adopt what runs, finish what was cut off."""
        self.spool.sweep_staging()
        self.watch.start(
            {place: self.spool.layout.at(place) for place in (QUEUED, HELD, RUNNING, RESERVATIONS)}
            | {"": self.spool.root}
        )
        if self.watch.problem is not None:
            log.warning("%s; looking every %d s instead", self.watch.problem, POLL_NS // SECOND_NS)
        self.wakes.watch_files(self.watch.fileno(), self.watch.read)
        memory = recall(self.logs.read_journal())
        recovery = Recovery(self.spool, self.table, self.prober)
        recovery.unfinished_moves(memory)
        recovery.runs(memory)
        recovery.places(memory)
        for live in self.table.live.values():
            self._watch_run(live)
        self._look_at_everything()
        self._settle_places()
        self.look.lines = []  # all of it is in what follows
        self.logs.compact(self._worth_remembering())

    def close(self) -> None:
        """Leave; what runs goes on."""
        self._flush()
        self.report.write(self.plan, self.world.machine(self.clock()), paused=self.paused, force=True)
        self.watch.close()
        self.world.close()
        self.logs.close()
        self.wakes.close()

    @property
    def paused(self) -> bool:
        """Whether nothing is to start."""
        return self._paused_since_ns is not None

    @property
    def idle(self) -> bool:
        """Whether nothing waits that could ever start by itself, and nothing runs."""
        return not self.table.live and not len(self.table.queue)

    # A pass.

    def turn(self) -> bool:
        """Do one pass; return whether another has something to do at once."""
        self._see()
        ended = self._ends()
        self.limits.check()
        version = self.table.version
        started = self._decide_and_start()
        if ended:
            self.finisher.file(ended, self.logs.account, self.clock())
            for live in ended:
                self._after(live)
        self._flush()
        if self.logs.long:
            self.logs.compact(self._worth_remembering())
        if started or ended or self.table.version != version:
            self.busy_at_ns = time.monotonic_ns()
            self.report.changed()
        self.report.write(self.plan, self.world.machine(self.clock()), paused=self.paused)
        return bool(ended) or self.table.version != version

    def sleep(self, limit_ns: int | None = None) -> None:
        """Wait until there is a reason to look, at most *limit_ns*."""
        now = time.monotonic_ns()
        waits = [
            due - now
            for due in (
                self.look.next_due_ns(),
                self.stopper.next_due_ns(),
                self.report.next_due_ns(),
                self._rescan_at_ns,
                self._missing_due_ns(),
                self._poll_at_ns if self._must_poll() else None,
            )
            if due is not None
        ]
        if (due_in := self.limits.next_due_ns()) is not None:
            waits.append(due_in)
        if self.plan is not None and self.plan.next_at_ns is not None:
            waits.append(self.plan.next_at_ns - self.clock())
        if limit_ns is not None:
            waits.append(limit_ns)
        if self.world.gpus_matter():
            waits.append(self.settings.config.gpu.poll_ns)
            if not self._watches_gpus and self.world.gpus is not None:
                self._watches_gpus = True
                self.wakes.watch_files(self.world.gpus.fileno(), self.world.take_gpu_answer)
        self.wakes.wait(max(0, min(waits)) if waits else None)

    # Look.

    def _see(self) -> None:
        now = time.monotonic_ns()
        hints, self.watch.hints = self.watch.hints, []
        booked = False
        if self.wakes.reload_asked():
            self._reload()
        for place, filename in hints:
            if place == RESERVATIONS:
                booked = True
            elif place:
                self.look.hint(place, filename)
            elif filename in (layout.CONFIG, layout.PAUSED):
                self._reload()
        if booked:
            self._see_bookings()
        if self.watch.lost or now >= self._rescan_at_ns:
            self._rescan(now)
        self.look.due(now)
        self._see_moves()
        for name in list(self.look.strays):
            self._see_stray(name)
        self.look.strays.clear()
        self._see_cancelled()

    def _reload(self) -> None:
        if self.settings.reload():
            log.info("the configuration has changed")
            self.world.configuration_changed()
            self.logs.strict = self.settings.config.durability == "strict"
            self.table.version += 1
        self.report.problems = [p for p in (self.settings.problem, self.watch.problem) if p]
        self._see_pause()
        self.report.changed()

    def _see_pause(self) -> None:
        paused = self.spool.paused
        if paused and self._paused_since_ns is None:
            self._paused_since_ns = self.clock()
            self.table.version += 1
        elif not paused and self._paused_since_ns is not None:
            since, self._paused_since_ns = self._paused_since_ns, None
            self._skip_clocks(self.clock() - since)
            self.table.version += 1

    def _skip_clocks(self, pause_ns: int) -> None:
        """A time paused does not count as waiting."""
        for job in self.table.jobs.values():
            if job.wait is not None and job.wait.clock_at_ns is not None and job.queued is not None:
                job.wait.clock_at_ns += pause_ns
                self.look.remember(job)
                self.table.settle(job)

    def _rescan(self, now: int) -> None:
        """Look at everything if a directory changed behind the events' back, or if it is time to."""
        self.watch.lost = False
        begun = time.monotonic_ns()
        self._look_at_everything()
        cost = time.monotonic_ns() - begun
        every = POLL_NS if self.watch.problem is not None else self.settings.config.look_every_ns
        self._rescan_at_ns = now + max(every, _RESCAN_SHARE * cost)

    def _look_at_everything(self) -> None:
        self.look.everything()
        self._see_bookings()
        self._reload()

    def _see_bookings(self) -> None:
        if self.bookings.look():
            self.table.version += 1

    def _see_moves(self) -> None:
        """See what was done to the files of live runs: deleted, moved to another directory, replaced."""
        names, self.look.moved = self.look.moved, set()
        for name in names:
            job = self.table.jobs.get(name)
            live = job.live if job is not None else None
            if live is None or live.proof is not None:
                continue
            try:
                live.inode = os.lstat(self.spool.layout.job_file(RUNNING, name)).st_ino
                live.file_missing_ns = None
            except OSError:
                if live.file_missing_ns is None:
                    live.file_missing_ns = time.monotonic_ns()
        for live in self.table.live.values():
            if live.file_missing_ns is not None and live.stop is None and live.proof is None:
                self._see_missing(live)

    def _see_missing(self, live: Live) -> None:
        stop = self.spool.stop(live.name, live.run)
        if stop is None:
            for place, kind in ((QUEUED, StopKind.REQUEUE), (HELD, StopKind.HOLD), (DONE, StopKind.CANCEL)):
                if self.spool.holds(live.inode, live.name, place):
                    stop = Stop(kind, live.user, self.clock())
                    break
            else:
                if time.monotonic_ns() < (live.file_missing_ns or 0) + MISSING_NS:
                    return
                stop = Stop(StopKind.CANCEL, live.user, self.clock(), "its file was deleted from running/")
        self.order_stop(live, stop)

    def _missing_due_ns(self) -> int | None:
        return min(
            (
                live.file_missing_ns + MISSING_NS
                for live in self.table.live.values()
                if live.file_missing_ns is not None and live.stop is None
            ),
            default=None,
        )

    def _see_stray(self, name: str) -> None:
        """A file in `running/` that belongs to no run was put there by hand: it waits like any other."""
        job = self.table.jobs.get(name)
        if (job is None or job.live is None) and self.spool.put_back(name, QUEUED):
            log.warning("job %s lay in running/ without a run; it is queued", name)
            self.look.examine(QUEUED, name)

    def _see_cancelled(self) -> None:
        """A waiting job whose file was moved to `done/` is cancelled."""
        for name in self.look.gone():
            job = self.table.jobs.get(name)
            if job is None or job.live is not None or job.wait is None:
                continue
            if job.last_inode is not None and self.spool.holds(job.last_inode, name, DONE):
                self.finisher.end_unstarted(
                    job,
                    DONE,
                    State.CANCELLED,
                    f"cancelled by {this_user()} before it started",
                    self.logs.account,
                    self.clock(),
                )

    def _settle_places(self) -> None:
        """After the first look: what waited when the last dispatcher left, and is in no directory any more."""
        for job in list(self.table.jobs.values()):
            if job.wait is None or job.queued is not None or job.held is not None or job.live is not None:
                continue
            if os.path.lexists(self.spool.layout.job_file(DONE, job.name)):
                self.finisher.end_unstarted(
                    job, DONE, State.CANCELLED, "moved to done/ before it started", self.logs.account, self.clock()
                )
            else:
                self.look.forget(job.name)

    # Ends.

    def _ends(self) -> list[Live]:
        """Return the runs that are over; their resources are free from here on."""
        now = time.monotonic_ns()
        self._suspects |= {live.key for live in self.wakes.reap()}
        self._suspects |= self.wakes.ended_runs()
        if now >= self._poll_at_ns and self._must_poll():
            self._suspects |= {live.key for live in self.table.live.values() if _unwatched(live)}
            self._poll_at_ns = now + POLL_NS
        ended = []
        for live in self.stopper.tick():
            live.remains, live.cleared = False, True
            self.stopper.forget(live)
            self._suspects.add(live.key)
        suspects, self._suspects = self._suspects, set()
        for key in suspects:
            run = self.table.live.get(key)
            if run is not None and run.proof is None and self._over(run):
                ended.append(run)
                self.wakes.forget(run)
                self.stopper.forget(run)
                self.table.free(run)
        return ended

    def _over(self, live: Live) -> bool:
        """Whether nothing of the run is left; what outlived its wrapper is told to end."""
        if live.failure is None and not live.cleared and self._wrapper_gone(live):
            if live in self.stopper or self.wakes.left_behind(live):
                live.remains = True
                self.stopper.add(live)
                return False
            live.cleared = True
        return self.finisher.conclude(live)

    def _wrapper_gone(self, live: Live) -> bool:
        if not live.adopted:
            return live.exit_status is not None
        return live.jid is not None and self.prober.liveness(live.jid) is Liveness.GONE

    def _after(self, live: Live) -> None:
        proof = live.proof
        if proof is None or proof.outcome is None:
            return
        if live.result is not None:
            self.usage.add(live.result, self.settings.config.policy)
        log.info("job %s run %d: %s (%s)", live.name, live.run, proof.outcome, proof.reason)
        if proof.outcome not in (State.FINISHED, State.CANCELLED) and live.final:
            if self.settings.config.policy.on_failure == "pause" and not self.paused:
                log.warning("job %s has failed for good: the spool is paused", live.name)
                self.spool.pause(f"job {live.name}: {proof.outcome}: {proof.reason}")
                self._see_pause()

    # Decide and act.

    def _decide_and_start(self) -> bool:
        now = self.clock()
        machine = self.world.machine(now)
        if machine.gpus and machine.gpu_problem is None:
            self.bookings.machine_has(len(machine.gpus))
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
                reservations=self.bookings.standing,
                usage=self.usage.at(now, self.settings.config.policy),
                paused=self.paused,
                zone=LOCAL_ZONE,
                protected=plan.protected if plan is not None else None,
            ),
            now,
            self.settings.config.policy,
        )
        self.plan = plan
        self._decided = made_of
        self.report.changed()
        for ending in plan.endings:
            job = self.table.jobs.get(ending.name)
            if job is not None and job.live is None and (job.queued is not None or job.held is not None):
                place = QUEUED if job.queued is not None else HELD
                log.info("job %s: %s (%s)", ending.name, ending.outcome, ending.reason)
                self.finisher.end_unstarted(job, place, ending.outcome, str(ending.reason), self.logs.account, now)
        if not plan.starts:
            return False
        # What a look found goes to the journal before a start that follows from it.
        self._flush()
        runs, blocked = self.starter.start(plan.starts, now)
        for live in runs:
            self._watch_run(live)
            self.outcomes.forget(live.name)
        for one in blocked:
            log.error("cannot start job %s: %s", one.name, one.why)
            self.report.blocked[one.name] = one.why
        return True

    def _watch_run(self, live: Live) -> None:
        log.info("job %s run %d: %s", live.name, live.run, "adopted" if live.adopted else "started")
        if live.failure is not None:
            self._suspects.add(live.key)
            return
        self.wakes.watch_run(live)
        self.limits.add(live)
        if live.adopted:
            self._suspects.add(live.key)
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

    def _must_poll(self) -> bool:
        return any(_unwatched(live) for live in self.table.live.values())

    def _revisit(self, job: Job) -> None:
        """A run of the job is over: see what its name has in store."""
        self.look.examine(QUEUED, job.name, anew=True)
        self.look.examine(HELD, job.name, anew=True)
        self.table.settle(job)

    # Memory.

    def _flush(self) -> None:
        lines = self.look.lines + self.finisher.lines
        if lines:
            self.look.lines, self.finisher.lines = [], []
            self.logs.remember(lines)

    def _worth_remembering(self) -> list[journal.Line]:
        lines: list[journal.Line] = []
        for job in self.table.jobs.values():
            if job.wait is not None:
                wait = job.wait
                lines.append(journal.Waits(job.name, wait.arrived_at_ns, wait.waited_ns_before, wait.clock_at_ns))
        for live in self.table.live.values():
            lines.append(
                journal.Started(
                    live.name, live.run, self.prober.boot_id(), live.inode, live.wait.arrived_at_ns, live.started_at_ns
                )
            )
        return lines


def _unwatched(live: Live) -> bool:
    """Whether no event tells of the end of a run: its wrapper is neither our child nor watched by a pidfd."""
    return live.proof is None and live.pidfd is None and (live.adopted or live.pid is None)
