"""Plan a pass: give the state of the machine and of the jobs to `decide` when either changes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from spool.core import layout
from spool.core.lifecycle import Void
from spool.core.model import SECOND_NS, Holding, Machine, State
from spool.core.reasons import instant
from spool.core.scheduler import Plan, Start, View, decide
from spool.dispatcher.context import Component, Context
from spool.dispatcher.scanner import Reservations
from spool.dispatcher.wakeup import Timer
from spool.formats import run_records
from spool.state.load import OutcomeIndex
from spool.state.past import past_of
from spool.state.run import NO_BACKOFF, ActiveRun
from spool.state.table import SchedulerState
from spool.state.world import MachineMonitor
from spool.store.locked_spool import LockedSpool

_FEW_HELD = 64  # held jobs: every decision looks at their dependencies
_GONE_BACK = run_records.render_status(State.QUEUED)  # the status of a wrapper that was refused something
_BEGUN_AFTER_NS = 2_000_000_000  # regardless of its records: the job may have removed them
_MACHINE_EVERY_NS = SECOND_NS // 4  # how often a pass looks at the machine though nothing else has changed
_FIRST_LOOK_NS, _LATER_LOOK_NS = 2_000_000, 250_000_000
_FORESEEN_FOR_NS = SECOND_NS  # the order of the jobs changes so slowly as they wait that this time makes no difference


class ForeseenPlan(Struct, frozen=True):
    """The plan for the moment at which a run has left its room, if nothing else changes before."""

    plan: Plan
    leaves: str  # the job of that run
    decisive: int  # of the state, before it leaves
    others: tuple[object, ...]  # the other inputs of the plan
    instead_of: Plan
    at_ns: int

    def has_come(self, state: SchedulerState, others: tuple[object, ...], plan: Plan | None, now_ns: int) -> bool:
        """Whether that run has left since, and nothing else has changed."""
        next_at_ns = self.plan.next_at_ns
        return (
            state.departure == (state.decisive, self.leaves) == (self.decisive + 1, self.leaves)
            and self.others == others
            and self.instead_of is plan
            and 0 <= now_ns - self.at_ns < _FORESEEN_FOR_NS
            and (next_at_ns is None or now_ns < next_at_ns)
        )


class Planner(Component):
    """Makes plans. `plan` is the current one, `machine` its machine; None before the first."""

    def __init__(
        self,
        context: Context,
        world: MachineMonitor,
        reservations: Reservations,
        outcomes: OutcomeIndex,
    ) -> None:
        super().__init__(context)
        self._world = world
        self._reservations = reservations
        self._outcomes = outcomes
        self._timer = context.timers.timer("starts", context.clock)  # due when the plan changes by itself
        self._gpu_timer = context.timers.timer("gpus")
        self.shortage = Shortage(context.spool, context.timers.timer("starts", context.clock))
        self._past_of: tuple[object, ...] | None = None  # what the past was read for
        self.plan: Plan | None = None
        self.machine: Machine | None = None
        self._planned_on: Machine | None = None  # that machine without the other users of a shared one
        self._decided: tuple[object, ...] | None = None  # the inputs of the plan, once it is carried out
        self._planned_ns = 0  # monotonic: the last time that the inputs were compared
        self._made_of: tuple[object, ...] = ()
        self._waits_for_gpus: list[Start] = []
        self._foreseen: ForeseenPlan | None = None

    @property
    def is_old(self) -> bool:
        """Whether an input of the plan may have changed."""
        if self._decided is None or self._decided[0] != self._state.decisive or self._world.gpus_matter():
            return True
        if self._gate.leases.news:
            return True
        return bool(self._state.executors.engines) or time.monotonic_ns() >= self._planned_ns + _MACHINE_EVERY_NS

    def renew(self, now_ns: int, *, paused: bool) -> Plan | None:
        """Return a new plan to carry out; None if none of its inputs has changed."""
        self._planned_ns = time.monotonic_ns()
        machine = self._gate.leases.machine(self._world.machine(now_ns))
        if refusal := self.shortage.words(now_ns):
            machine = replace(machine, refusal=refusal)
        self.machine = machine
        self._reservations.machine_has(self._world.gpu_indices)
        machine = self._planned_on = self._gate.leases.planned(machine)
        others = self._others(machine)
        self._made_of = (self._state.decisive, *others)
        plan = self.plan
        if (
            plan is not None
            and self._made_of == self._decided
            and (plan.next_at_ns is None or now_ns < plan.next_at_ns)
            and not (self._waits_for_gpus and self._world.gpus_are_new)
        ):
            if not self._gate.leases.news:
                return None
            self._decided = None
            return plan  # nothing else has changed: its starts have leases now
        if plan is not None and not self._state.queue and plan.holding == Holding():
            self._decided, self._waits_for_gpus = self._made_of, []
            self._timer.set(None)
            return None  # nothing waits, so there is nothing to decide
        foreseen = self._foreseen
        if foreseen is not None and foreseen.has_come(self._state, others, plan, now_ns):
            self.plan = foreseen.plan
        else:
            self.plan = self._decide(machine, now_ns, paused=paused)
        self._timer.set(self.plan.next_at_ns)
        self._decided = None  # until all of it is done: after an error it is made again
        return self.plan

    def startable(self, starts: Sequence[Start], now_ns: int) -> list[Start]:
        """Return the starts that have a lease, or need not wait for NVML to show the users of their GPUs."""
        if self._gate.is_shared:  # the arbiter asks NVML
            self._waits_for_gpus = []
            return self._gate.leases.startable(starts, self.plan)
        self._waits_for_gpus = [start for start in starts if not self._world.may_start_on(start.grant)]
        if self._waits_for_gpus:
            self._world.ask_gpus_again(now_ns)
        return [start for start in starts if start not in self._waits_for_gpus]

    def carried_out(self, *, starts: int) -> None:
        """Record that all of the plan is done, with *starts* starts: it holds until something else changes.

        If everything was started exactly as decided, no decision is left: a job that did not start then does not start
        now.
        """
        self._decided = self._made_of
        if self._gate.leases.jumped:
            return  # it started more than was decided
        if self.plan is not None and not self.plan.endings and starts == len(self.plan.starts):
            self._decided = (self._state.decisive, *self._made_of[1:])

    def end_pass(self) -> None:
        """Set the timer to the next look at the GPUs."""
        self._gpu_timer.set(self._world.due_ns())

    def learn(self, live: ActiveRun) -> None:
        """Use a run that is over to guess how long similar runs may last.

        Starts that such a guess holds back are decided again.
        """
        if live.result is not None and self._past_of is not None:
            self._state.learn(live, live.result)
        if self.plan is not None and self.plan.holds_back:
            self._decided = None

    @property
    def awaits_gpus(self) -> bool:
        """Whether a start waits for NVML to show the users of its GPUs, or any start for NVML's first answer."""
        return bool(self._waits_for_gpus) or self._world.gpus_are_asked

    def foreseen(self, *, paused: bool) -> Start | None:
        """Return the start that would follow if the oldest run left its room now; None if that is unknown."""
        self._foreseen = self._imagined(paused=paused)
        return next(iter(self._foreseen.plan.starts), None) if self._foreseen is not None else None

    def again(self, now_ns: int, *, paused: bool) -> Plan | None:
        """Return a plan for that instant, which is not carried out; None before the first plan."""
        return None if self._planned_on is None else self._decide(self._planned_on, now_ns, paused=paused)

    def _imagined(self, *, paused: bool) -> ForeseenPlan | None:
        state, now_ns = self._state, self._clock()
        oldest = next((run for run in state.runs.values() if run.elsewhere is None), None)
        if oldest is None or self.plan is None or self._planned_on is None or not state.queue:
            return None
        if not state.queue.is_simple or len(state.held) > _FEW_HELD:
            return None  # it would cost more than it saves
        if state.queue.watch.dependents(oldest.name):
            return None  # its outcome decides
        with state.runs.without(oldest.name):
            plan = self._decide(self._planned_on, now_ns, paused=paused)
        return ForeseenPlan(plan, oldest.name, state.decisive, self._others(self._planned_on), self.plan, now_ns)

    def _others(self, machine: Machine) -> tuple[object, ...]:
        """Return the inputs of a plan for *machine* beside the state."""
        return self._world.what_counts(machine), self._state.executors.machines()

    def _decide(self, machine: Machine, now_ns: int, *, paused: bool) -> Plan:
        holding = self.plan.holding if self.plan is not None else Holding()
        view = self.view(machine, now_ns, paused=paused, holding=holding)
        return decide(view, now_ns, self._settings.config.policy)

    def _remember(self, now_ns: int) -> None:
        """Read the past once there are waiting jobs to put in order, and again if it counts otherwise."""
        state, policy = self._state, self._settings.config.policy
        past_of_what = (policy.fair_share_by, sizes := state.sizing is not None)
        if past_of_what != self._past_of and state.queue and (len(state.queue) + len(state.runs) > 1 or sizes):
            state.remember(past_of(self._spool, now_ns, policy, sizes=sizes))
            self._past_of = past_of_what

    def view(self, machine: Machine, now_ns: int, *, paused: bool, holding: Holding) -> View:
        """Return the input of the next plan; *holding* is what the previous plan holds back."""
        self._state.fit(machine, self._settings.config.policy)
        self._remember(now_ns)
        return self._state.view(
            machine,
            ended=self._outcomes,
            arrays=self._outcomes.arrays,
            reservations=self._reservations.standing,
            paused=paused,
            holding=holding,
        )


class Shortage:
    """A shortage of the machine that affects any job, and the time until which nothing is started.

    The cause of the first refusal may be the job itself, so it waits alone. But from then on jobs start one after the
    other, each once the one before it has begun, until one has; and if another is refused, nothing starts for a while.
    """

    def __init__(self, spool: LockedSpool, timer: Timer) -> None:
        """*timer*, on the wall clock, is due when :meth:`words` may change."""
        self._spool = spool
        self._timer = timer
        self._refusal = NO_BACKOFF
        self._job: str | None = None  # refused last; None: no shortage
        self._why = ""  # its refusal
        self._first: ActiveRun | None = None  # on its way, and the others wait for it
        self._known_ns = 0  # the time of the last refusal
        self._look_in_ns = _FIRST_LOOK_NS

    def most(self) -> int | None:
        """Return how many may start at once, None without a shortage."""
        return None if self._job is None else 0 if self._first is not None else 1

    def tries(self, live: ActiveRun) -> None:
        """Record that a run is on its way."""
        if self._job is not None:
            self._first, self._look_in_ns = live, _FIRST_LOOK_NS
            self._timer.set(time.time_ns() + _FIRST_LOOK_NS)

    def refused(self, live: ActiveRun, why: str | None, now_ns: int) -> None:
        """Count the machine's refusal of *live*; *why* None: there was none."""
        if live is self._first:
            self._first = None
        if why is None or live.started_at_ns <= self._known_ns:
            return  # both were on their way together
        self._known_ns = now_ns
        if self._job not in (None, live.name):
            self._refusal = self._refusal.again(why, now_ns)
        self._job, self._why = live.name, why

    def ended(self, lives: Iterable[ActiveRun], now_ns: int) -> None:
        """Process runs that are over."""
        for live in lives:
            if live.elsewhere is not None:
                continue  # it says nothing about this machine
            if isinstance(live.phase, Void):
                self.refused(live, live.phase.refusal, now_ns)
            elif live.started_at_ns > self._known_ns and live.ended is not None and live.ended.exit_code is not None:
                self._is_over()
            elif live is self._first:
                self._first = None

    def words(self, now_ns: int) -> str:
        """Return why nothing must start now, "" if something may."""
        first = self._first
        if first is not None and self._has_begun(first):
            self._is_over()
        if self._first is not None:
            self._look_in_ns = min(2 * self._look_in_ns, _LATER_LOOK_NS)
            self._timer.set(now_ns + self._look_in_ns)
            return f"{self._why}; job {self._first.name} is tried first"
        if self._refusal.until_ns <= now_ns:
            self._timer.set(None)
            return ""
        self._timer.set(self._refusal.until_ns)
        return f"{self._why}; tried again at {instant(self._refusal.until_ns)}"

    def _has_begun(self, live: ActiveRun) -> bool:
        """Whether its wrapper has registered, or is alive for so long that a refusal is unlikely."""
        if time.clock_gettime_ns(time.CLOCK_BOOTTIME) - live.started_boot_ns >= _BEGUN_AFTER_NS:
            return not live.is_over and live.exit_status is None
        try:
            return self._spool.record(live.name, live.run, layout.STATUS) not in (None, _GONE_BACK)
        except OSError:  # only its job can have made it unreadable
            return True

    def _is_over(self) -> None:
        self._job, self._first, self._refusal = None, None, NO_BACKOFF
