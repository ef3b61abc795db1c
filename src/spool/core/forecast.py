"""When each waiting job is expected to start, and which run is stopped for one: the schedule in simulated time.

The simulator feeds it the jobs of a trace; the forecast gives it the spool as it is. It changes nothing outside: it
owns its queue, runs and past.

Runs end when people are told, and successfully; jobs that then start run as long as similar ones have, or up to their
limit; and so on, until every job has a start, nothing more happens, or the bound on the work is reached. A suspended
run, and one that waits on an engine, has no expected end: a job that needs its room gets no expected start.

There is no second set of rules: a job starts here when `decide` starts it. So every rule that can keep a job from
starting also applies here.

A preemptible run is stopped only if it is long, has run for a while, and a waiting job that states a short limit starts
without it. A guess stops nothing. Its own job waits again at its place, and the short job goes ahead of it.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import count

from msgspec import Struct
from msgspec.structs import replace

from spool.core.constraints import as_run
from spool.core.dependencies import dependencies_of
from spool.core.gpus import NEW_RUN, left_by
from spool.core.model import SECOND_NS, Machine, Policy, Running, State, Waiting
from spool.core.priority import Past
from spool.core.queue import ShapeKey, WaitingQueue, shape_key
from spool.core.reasons import Until, codes_until, some_of
from spool.core.resources import FreeResources, Runs
from spool.core.runtimes import TimeLeft
from spool.core.scheduler import Plan, View, decide, room_in

_BY_RUNS = codes_until(Until.ROOM, Until.RUNS)


def machine_left_by(machine: Machine, run: Running) -> Machine:
    """Return *machine* as it will look without *run*: what the kernel could give then is unknown."""
    if run.elsewhere is not None:
        return machine
    gpus = tuple(left_by(gpu, run) if gpu.uuid in run.grant.gpu_uuids else gpu for gpu in machine.gpus)
    return replace(machine, gpus=gpus, memory_available_bytes=None)


def _job_of(run: Running) -> Waiting:
    """Return the job of *run* as it waits again once that was preempted."""
    return Waiting(run.name, run.spec, run.user, run.arrived_at_ns or run.started_at_ns, sized=run.sized)


class Playback:
    """A spool in simulated time. Turn by turn: `take_ended`, `decide`, `perform`, and on to `next_at_ns`."""

    def __init__(self, view: View, policy: Policy) -> None:
        """Continue from *view*, whose queue, runs and past belong to the playback from now on."""
        self.queue: WaitingQueue = view.queue
        self.running: Runs = view.running
        self.past: Past = view.past
        self._outcomes: dict[str, State] = {}  # simulated ones, which come before those that are known
        known = ChainMap(self._outcomes, view.ended)  # type: ignore[arg-type]  # it is only read
        self.view = replace(view, ended=known)
        self._policy = policy
        self._ends: list[tuple[int, str, int, Running]] = []
        self._number = count()

    def ends_at(self, run: Running, at_ns: int) -> None:
        """Let *run* end at *at_ns*. A run without an end goes on for ever."""
        heappush(self._ends, (at_ns, run.name, next(self._number), run))

    def take_ended(self, now_ns: int) -> Iterator[tuple[int, Running]]:
        """Yield each run that has ended by then, and when; its room is free again. Report its outcome by `conclude`."""
        while self._ends and self._ends[0][0] <= now_ns:
            at_ns, _, _, run = heappop(self._ends)
            self._leave(run, at_ns)
            yield at_ns, run

    def preempt(self, run: Running, winner: str, now_ns: int) -> None:
        """End *run* without an outcome; its job waits again at its place, behind the job *winner*."""
        self._ends = [entry for entry in self._ends if entry[3].name != run.name]
        heapify(self._ends)
        self._leave(run, now_ns)
        self.queue.put(replace(_job_of(run), clock_at_ns=now_ns, yields_to=winner, preempted_at_ns=now_ns))

    def conclude(self, name: str, outcome: State) -> None:
        """Record the outcome of a job, for the jobs that depend on it."""
        self._outcomes[name] = outcome

    def decide(self, now_ns: int) -> Plan:
        """Return the plan for that instant."""
        return decide(self.view, now_ns, self._policy)

    def perform(self, plan: Plan, now_ns: int) -> list[tuple[Waiting, Running]]:
        """End and start jobs by *plan*; return each job that starts, and its run, whose end is set by `ends_at`."""
        self.view = replace(self.view, holding=plan.holding)
        for ending in plan.endings:
            self.queue.remove(ending.name)
            self.conclude(ending.name, ending.outcome)
        if plan.endings and self.view.held:
            ended = {ending.name for ending in plan.endings}
            held = {name: job for name, job in self.view.held.items() if name not in ended}
            self.view = replace(self.view, held=held)
        begun = []
        for start in plan.starts:
            job = self.queue[start.name]
            run = as_run(job, start.grant, now_ns)
            self.queue.remove(start.name)
            self.running.put(run)
            self.past.begin(run.user, run.spec.project, run.grant, now_ns)
            self._enter_machine(run)
            begun.append((job, run))
        return begun

    def next_at_ns(self, plan: Plan, now_ns: int) -> int | None:
        """Return when something happens next, after *plan* was performed at *now_ns*. None: nothing ever does."""
        times = [now_ns] if plan.endings else []  # other jobs may depend on what has just ended
        times += [max(self._ends[0][0], now_ns)] if self._ends else []
        times += [] if plan.next_at_ns is None else [plan.next_at_ns]
        return min(times, default=None)

    def _enter_machine(self, run: Running) -> None:
        """Subtract memory that was granted and that the kernel still calls free."""
        machine = self.view.machine
        if machine.memory_available_bytes is not None and run.grant.memory_bytes and run.elsewhere is None:
            left = machine.memory_available_bytes - run.grant.memory_bytes
            self.view = replace(self.view, machine=replace(machine, memory_available_bytes=left))

    def _leave(self, run: Running, at_ns: int) -> None:
        self.running.remove(run.name)
        self.past.end(run.user, run.spec.project, run.grant, at_ns)
        self.view = replace(self.view, machine=machine_left_by(self.view.machine, run))


ENOUGH = 200_000
"""The bound on the work of a forecast, about one second: it counts steps, so that the answer does not depend on the
clock.
"""

_TURN = 60  # cost of a turn; plus 1 for each shape of jobs that it looks at
_COMPARISONS = 50_000  # comparisons of a start with an ended run; beyond that, `must_end` stays empty
_GONE = "/"  # in no name: marks a run that has ended


class StartForecast(Struct, frozen=True):
    """The expected start of a job.

    Without `at_ns` the start is unknown: it is later than `later_than_ns`, if that is set, and `unknown` says why.
    """

    at_ns: int | None = None
    guessed: bool = False  # the time rests on a guessed run time
    must_end: tuple[str, ...] = ()  # runs that are there now, or would start now
    starts_after: tuple[str, ...] = ()  # waiting jobs that go first, and whose end lets it start
    if_finished: tuple[str, ...] = ()  # its dependencies that have not ended yet
    later_than_ns: int | None = None
    unknown: str = ""


def forecast(
    plan: Plan,
    names: Collection[str] | None = None,
    left: Mapping[str, TimeLeft | None] | None = None,
    *,
    enough: int = ENOUGH,
) -> Mapping[str, StartForecast]:
    """Return the expected starts of the waiting jobs *names* (None: all), by carrying *plan* forward.

    *left* is the time that people are told remains of the runs; others end as the rules expect. A job that starts by
    *plan* itself starts at the instant of *plan*; one that ends by it is left out. The view of *plan* is not changed.
    """
    return _Forecast(plan, names, left or {}, enough).made()


class _Forecast:
    """One schedule, carried forward."""

    def __init__(
        self, plan: Plan, names: Collection[str] | None, left: Mapping[str, TimeLeft | None], enough: int
    ) -> None:
        self._plan = plan
        self._told = left
        queue, running, past = WaitingQueue(plan.view.queue.values()), plan.view.running.copy(), plan.view.past.copy()
        self._spool = Playback(replace(plan.view, queue=queue, running=running, past=past), plan.policy)
        self._left = {name for name in (plan.view.queue if names is None else names) if name in plan.view.queue}
        self._at_once = {start.name for start in plan.starts}
        self._enough = enough
        self._comparisons = _COMPARISONS
        self._found: dict[str, StartForecast] = {}
        self._ended: list[Running] = []  # ended runs that exist now, in order
        self._just_ended: list[Running] = []  # … and imagined runs that ended at this instant
        self._guessed = False
        self._known: dict[ShapeKey, str] = {}

    def made(self) -> Mapping[str, StartForecast]:
        """Carry the schedule forward until every requested job has an answer."""
        spool, plan = self._spool, self._plan
        now_ns = plan.now_ns
        self._expect_ends()
        while True:
            self._take_in(plan, now_ns)
            following = spool.next_at_ns(plan, now_ns)
            if following is None or not self._left:
                break
            self._enough -= _TURN + len(spool.queue.shapes)
            if self._enough <= 0:
                self._found |= dict.fromkeys(self._left, StartForecast(later_than_ns=now_ns))
                return self._found
            if following > now_ns:
                self._just_ended = []
            now_ns = following
            self._end_runs(now_ns)
            plan = spool.decide(now_ns)
        for name in self._left:
            self._found[name] = StartForecast(unknown=self._why_never(name, plan))
        return self._found

    def _expect_ends(self) -> None:
        """Schedule the expected end of each run; a suspended or unstarted run has none."""
        running = self._spool.running
        for at_ns, name in running.ends(self._plan.now_ns):
            run = running[name]
            if not (run.submitted or (run.suspended and not run.stopping)):
                told = self._told.get(name)
                left_at_ns = at_ns if told is None else self._plan.now_ns + told.ns
                self._spool.ends_at(run, max(left_at_ns, self._plan.now_ns))

    def _end_runs(self, now_ns: int) -> None:
        for at_ns, run in self._spool.take_ended(now_ns):
            limit_ns = run.spec.time_limit_ns
            in_time = limit_ns is None or at_ns < run.counts_from_ns + limit_ns
            self._guessed = self._guessed or (in_time and not run.stopping)
            if run.elsewhere is None:
                self._spool.past.pass_by(run.arrived_at_ns, run.grant, max(at_ns - run.started_at_ns, 0))
            self._spool.conclude(run.name, State.FINISHED)
            (self._ended if self._is_of_now(run) else self._just_ended).append(run)

    def _take_in(self, plan: Plan, now_ns: int) -> None:
        """Record the starts and ends of *plan*, and carry it out."""
        spool = self._spool
        wanted = [start.name for start in plan.starts if start.name in self._left]
        room = room_in(spool.view, now_ns, self._plan.policy) if wanted and (self._ended or self._just_ended) else None
        for ending in plan.endings:
            if ending.name in self._left and now_ns > self._plan.now_ns:
                self._settle(ending.name, StartForecast(unknown=f"it would end as {ending.outcome}: {ending.reason}"))
            self._left.discard(ending.name)
        for job, run in spool.perform(plan, now_ns):
            if run.elsewhere is None:
                spool.ends_at(run, now_ns + spool.running.run_times.likely(job).ns)
            if job.name in self._left:
                self._settle(job.name, self._start_of(job, room, now_ns))
            if room is not None:
                room.start(run)

    def _settle(self, name: str, found: StartForecast) -> None:
        self._found[name] = found
        self._left.discard(name)

    def _start_of(self, job: Waiting, room: FreeResources | None, now_ns: int) -> StartForecast:
        """Return the start of *job*, for which there is *room* now; with None, no run has ended yet."""
        if job.elsewhere is not None and job.name not in self._at_once:
            return StartForecast(unknown=self._only_known_to(job.elsewhere))
        must_end, starts_after = self._in_its_way(job, room) if room is not None else ((), ())
        return StartForecast(
            at_ns=now_ns,
            guessed=self._guessed,
            must_end=must_end,
            starts_after=starts_after,
            if_finished=self._awaited(job),
        )

    def _in_its_way(self, job: Waiting, room: FreeResources) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the ended runs beside which *job* could not start.

        The first are runs that exist now, the second imagined runs that have just ended.
        """
        ended = self._ended + self._just_ended
        self._comparisons -= len(ended)
        if self._comparisons < 0:
            return (), ()
        first = self._first_names(job)
        beside, found = [], []
        for run in reversed(ended):
            gone = replace(run, name=f"{_GONE}{run.name}", run=NEW_RUN)
            room.claim(gone)
            if room.fits(job) and run.name not in first:
                beside.append(gone)
            else:
                room.release(gone)
                found.append(run)
        for gone in beside:
            room.release(gone)
        found.reverse()
        return (
            tuple(run.name for run in found if self._is_of_now(run)),
            tuple(run.name for run in found if not self._is_of_now(run)),
        )

    def _is_of_now(self, run: Running) -> bool:
        """Whether *run* exists already, or starts by the plan that is carried forward."""
        return run.run != NEW_RUN or run.name in self._at_once

    def _first_names(self, job: Waiting) -> frozenset[str]:
        """Return the names that must have ended before *job* begins, whatever room there is."""
        arrays = self._plan.view.arrays
        return frozenset((job.name, *(one for name in self._awaited(job) for one in arrays.get(name) or (name,))))

    def _awaited(self, job: Waiting) -> tuple[str, ...]:
        """Return the dependencies of *job* that had not ended when it was last judged."""
        if job.spec.depends_on is None:
            return ()
        return tuple(name for name in dependencies_of(job) if not self._has_ended(name))

    def _has_ended(self, name: str) -> bool:
        view = self._plan.view
        return all(
            not (member in view.running or member in view.queue or member in view.held)
            and (state := view.ended.get(member)) is not None
            and state.ended
            for member in view.arrays.get(name) or (name,)
        )

    # Reasons for an unknown time.

    def _only_known_to(self, engine: str) -> str:
        return f"{_title(engine, self._plan.view.elsewhere)} alone knows when it starts"

    def _why_never(self, name: str, plan: Plan) -> str:
        """Return why *name* keeps waiting after *plan*, the last one: nothing more is expected to happen."""
        job, reason = self._spool.queue[name], plan.reason(name)
        if reason is None:
            return ""
        if job.elsewhere is not None:
            return self._only_known_to(job.elsewhere)
        endless = list(self._spool.running.values())
        if endless and reason.code in ("dependency", "running"):
            first = self._first_names(job)
            said = _without_end([run for run in endless if run.name in first], self._plan.view.elsewhere)
        elif endless and reason.code in _BY_RUNS:
            key = shape_key(job)
            if key not in self._known:
                self._known[key] = _without_end(self._blocking(job, endless, plan.now_ns), self._plan.view.elsewhere)
            said = self._known[key]
        else:
            said = ""
        if said:
            return said
        before = self._plan.reason(name)  # the same reason with the numbers of now
        return str(before if before is not None and before.code == reason.code else reason)

    def _blocking(self, job: Waiting, endless: list[Running], now_ns: int) -> list[Running]:
        """Return the runs among *endless* that keep *job* from starting."""
        room = room_in(self._spool.view, now_ns, self._plan.policy)
        for run in endless:
            room.release(run)
        if not room.fits(job):
            return []
        found = []
        for run in endless:
            room.claim(run)
            if not room.fits(job):
                room.release(run)
                found.append(run)
        return found


def _title(engine: str, elsewhere: Mapping[str, Machine]) -> str:
    return (elsewhere[engine].title if engine in elsewhere else "") or engine


def _without_end(runs: list[Running], titles: Mapping[str, Machine]) -> str:
    """Return why the end of these runs is unknown; "" without any."""
    suspended = [run.name for run in runs if run.suspended]
    said = []
    if suspended:
        said.append(f"{some_of(suspended)} {'is' if len(suspended) == 1 else 'are'} suspended")
    for engine in dict.fromkeys(run.elsewhere for run in runs if run.elsewhere is not None and not run.suspended):
        there = [run.name for run in runs if run.elsewhere == engine and not run.suspended]
        said.append(f"{some_of(there)} {'is' if len(there) == 1 else 'are'} in {_title(engine, titles)}")
    return "; ".join(said)


AFTER_NS = 600 * SECOND_NS
"""The least run time of a run that is preempted."""

_LONG_NS = 8 * 3600 * SECOND_NS  # its least expected run time
SHORT_NS = 2 * 3600 * SECOND_NS
"""The longest time limit of a job that it makes room for."""

EVERY_NS = 3600 * SECOND_NS
"""The least time between two preemptions of a job."""

_JOBS = 16  # short jobs that are looked at, the first in the order
_PLANS = 8  # plans that are made to find a run


class Preemption(Struct, frozen=True):
    """The run of the job *victim* is stopped, so that the job *winner* can start."""

    victim: str
    winner: str


def preemptible_at_ns(run: Running, expected_ns: int) -> int | None:
    """Return from when on *run* may be preempted; None if it may not be.

    *expected_ns* is its expected run time. A run that exceeds it is long once it has run for long enough.
    """
    if not run.spec.preemptible or run.elsewhere is not None or run.stopping or run.suspended:
        return None
    times = [run.started_at_ns + AFTER_NS]
    if run.preempted_at_ns is not None:
        times.append(run.preempted_at_ns + EVERY_NS)
    if expected_ns < _LONG_NS:
        if run.spec.time_limit_ns is not None:
            return None
        times.append(run.counts_from_ns + _LONG_NS)
    return max(times)


def may_yield(view: View, now_ns: int) -> list[Running]:
    """Return the runs that may be preempted now: of the lowest priority first, then the smallest, then the latest."""
    found = []
    for name in view.running.preemptible:
        run = view.running[name]
        from_ns = preemptible_at_ns(run, view.running.run_times.of_job(run).ns)
        if from_ns is not None and from_ns <= now_ns:
            found.append(run)
    found.sort(
        key=lambda run: (run.spec.priority, len(run.grant.gpu_uuids), run.grant.cpus, -run.started_at_ns, run.name)
    )
    return found


def preempt(plan: Plan) -> Preemption | None:
    """Return the run to stop now, None if there is none.

    Runs that are being preempted already count as gone, and the jobs that they make room for as started. A run is
    stopped only if the next plan starts that job then, and does not give the room to others that are ahead of it.
    """
    view = plan.view
    victims = may_yield(view, plan.now_ns) if plan.policy.preemption and not view.paused else []
    if not victims:
        return None
    leaving = [run for name in view.running.preemptible if (run := view.running[name]).preempted_for is not None]
    room = plan.room_without(leaving)
    served = {run.preempted_for or "" for run in leaving}
    for name in sorted(served):
        if (job := view.queue.get(name)) is not None and room.fits(job):
            room.start(as_run(job, room.grant(job), plan.now_ns))
    plans = 0
    for job in plan.short_in_line(SHORT_NS, _JOBS, served):
        if room.fits(job):
            continue
        for run in victims:
            if run.spec.priority > job.spec.priority or not room.without([run]).fits(job):
                continue
            then = decide(_without(view, [*leaving, run]), plan.now_ns, plan.policy)
            if any(start.name == job.name for start in then.starts):
                return Preemption(run.name, job.name)
            plans += 1
            if plans == _PLANS:
                return None
    return None


def _without(view: View, runs: list[Running]) -> View:
    """Return *view* as if these runs had left.

    Their jobs count as held: the outcome of a run that is preempted decides nothing, and its job waits again behind the
    one that it was preempted for.
    """
    machine, held, running = view.machine, dict(view.held), view.running.copy()
    for run in runs:
        running.remove(run.name)
        machine = machine_left_by(machine, run)
        held[run.name] = _job_of(run)
    return replace(view, machine=machine, held=held, running=running)
