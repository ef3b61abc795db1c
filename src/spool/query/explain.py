"""Why a job does not run, and which jobs would start now: the planner's answers for a snapshot of the files."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from spool.client.output import last_words_of
from spool.core.arrays import array_of
from spool.core.forecast import StartForecast, forecast
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.model import Grant, State, Waiting
from spool.core.preemption import preempt
from spool.core.priority import OrderFactors
from spool.core.queue import ShapeKey, shape_key
from spool.core.scheduler import Ending, Plan
from spool.formats.capabilities import capabilities
from spool.query.details import FAILURES, job_details
from spool.query.jobs import JobLister
from spool.query.rows import JobRow, in_words
from spool.query.shared import MachineSharing
from spool.query.snapshot import IN_EDITOR, Snapshot, snapshot
from spool.store.spool import Spool

_KEPT = frozenset({"held", "hook", "machine"})
# Prefixes of the dispatcher's reasons for what waits for an answer, or got a no, and the code of each.
_ANSWERS = {
    "hook ": "hook", "plugins: ": "hook", **{f"{each.name}: ": each.name for each in capabilities() if each.steps},
}  # fmt: skip
_MACHINE = "machine: "  # … for a start that waits for the arbiter of a shared machine


class PendingReason(Struct, frozen=True):
    """One reason. `code` is the planner's code, `text` the sentence with numbers."""

    code: str
    text: str


class Explanation(Struct, frozen=True):
    """Why a job waits, what it does, or how it ended. A waiting one without reasons starts in the next pass."""

    name: str
    place: str
    beside: tuple[str, ...]  # the places of other files of the name
    reasons: tuple[PendingReason, ...]
    start_at_ns: int | None  # if every run ends when expected; None: unknown
    must_end: tuple[str, ...]  # runs that must end first
    start_is_guess: bool  # the start rests on a guessed run time
    expected_run_ns: int | None  # None: the job is an array, or cannot be read
    expected: str  # … in words, with its source
    score: float | None
    standing: str  # its score, and the numbers behind it
    behind: str | None  # the first in the order, if that is another job
    behind_score: float | None
    behind_why: str  # why that is first, in words
    ahead: int  # waiting jobs that are considered before this one
    dispatcher: bool
    last_said: str  # the reason in `state.json`
    at_ns: int
    engine: str | None = None  # the engine that it is for, which alone decides its start
    engine_id: str | None = None  # the job's id there; None: as far as is known it is not there yet
    starts_after: tuple[str, ...] = ()  # waiting jobs that go first, and whose end lets it start
    if_finished: tuple[str, ...] = ()  # jobs that must finish first, because it depends on them
    later_than_at_ns: int | None = None  # it starts after this; nothing is planned beyond
    start_unknown: str = ""  # why its start is unknown
    start_is_earliest: bool | None = None  # other users may come before it; None: the machine is not shared
    room_of: str | None = None  # the preemptible job whose run is stopped for it
    room_is_made: bool = False  # that run is being stopped; else the dispatcher is about to stop it
    preempted_for: str | None = None  # the job that its last run was stopped for
    requests: str = ""  # the memory that its next run requests and why, if its file leaves that to spool
    outcome: str | None = None  # how it ended; the reason says why, if there is one
    last_lines: tuple[str, ...] = ()  # of the output of a job that failed, or of `last_lines_of`
    last_lines_of: str | None = None  # the first task that failed, if it is an array
    doing: str = ""  # what it does, if it has started: "it is running"
    run: int | None = None  # … in that run
    command: str = ""  # … with that command
    started_at_ns: int | None = None
    time_limit_ns: int | None = None
    left_ns: int | None = None  # of its time limit


def why(spool: Spool, name: str) -> Explanation:
    """Return why job *name* waits, what it does, or how it ended. Raises NoSuchJob."""
    places = spool.places(name)
    if QUEUED not in places and HELD not in places and (submitted := _elsewhere(spool, name, places)) is not None:
        return submitted
    lister = JobLister(spool)
    seen = snapshot(spool, with_tasks=True)
    view = lister.state.jobs.get(name) if lister.state is not None else None
    said = in_words(view.reason, seen.now_ns) if view is not None else ""
    job = seen.view.queue.get(name) or seen.view.held.get(name)
    if job is None and not places:
        raise spool.no_such_job("find", f"job {name}", name)
    if job is None:
        reasons: tuple[PendingReason, ...] = (_unplanned(seen, name, places),)
    else:
        reasons = _by_hooks(spool, name, said)
        noes = (PendingReason(no.code, in_words(no.text, seen.now_ns)) for no in seen.plan.all_reasons(name))
        reasons += tuple(no for no in noes if not reasons or no.code != "held")
        reasons = reasons or _by_machine(seen.shared, said)
    kept = any(reason.code in _KEPT for reason in reasons)  # until a user or the arbiter acts: no time can be given
    found = StartForecast() if kept else _forecast(seen, (name,)).get(name, StartForecast())
    place = _place(_that_can_start(seen.plan), job)
    room_of, room_is_made = _room_of(seen, name)
    run_time = seen.view.past.run_times.of_job(job) if job is not None and not job.spec.is_array else None
    return Explanation(
        name=name,
        place=HELD if HELD in places and QUEUED not in places else QUEUED,
        beside=tuple(other for other in (RUNNING, HELD) if other in places and QUEUED in places)
        or ((RUNNING,) if RUNNING in places else ()),
        reasons=reasons,
        start_at_ns=found.at_ns,
        must_end=found.must_end,
        start_is_guess=found.guessed,
        expected_run_ns=run_time.ns if run_time is not None else None,
        expected=run_time.words(name, job.user) if run_time is not None and job is not None else "",
        score=place.score,
        standing=place.standing,
        behind=place.behind,
        behind_score=place.behind_score,
        behind_why=place.behind_why,
        ahead=place.ahead,
        dispatcher=lister.dispatcher,
        last_said=said,
        at_ns=seen.now_ns,
        starts_after=found.starts_after,
        if_finished=found.if_finished,
        later_than_at_ns=found.later_than_ns,
        start_unknown=in_words(found.unknown, seen.now_ns),
        start_is_earliest=True if seen.shared is not None else None,
        room_of=room_of,
        room_is_made=room_is_made,
        preempted_for=job.yields_to if job is not None else None,
        requests=job.sized.why if job is not None and job.sized is not None else "",
    )


class _Standing(NamedTuple):
    """Those fields of `Explanation` that say where a job stands in the order."""

    ahead: int = 0
    score: float | None = None
    standing: str = ""
    behind: str | None = None
    behind_score: float | None = None
    behind_why: str = ""


def _that_can_start(plan: Plan) -> list[tuple[Waiting, OrderFactors]]:
    """Return the waiting jobs in their order, without those that never fit: they delay no other job."""
    never: dict[ShapeKey, bool] = {}
    found = []
    for job, standing in plan.in_order():
        key = shape_key(job)
        if key not in never:
            never[key] = any(reason.code == "never_fits" for reason in plan.all_reasons(job.name))
        if not never[key]:
            found.append((job, standing))
    return found


def _place(order: Sequence[tuple[Waiting, OrderFactors]], job: Waiting | None) -> _Standing:
    """Return where *job* stands in *order*."""
    for ahead, (other, standing) in enumerate(order):
        if other is job:
            first, theirs = order[0]
            if not ahead:
                return _Standing(0, standing.score, standing.words())
            at = ahead, standing.score
            if first.spec.priority != other.spec.priority:
                return _Standing(*at, standing.words(), first.name, theirs.score, f"priority {first.spec.priority}")
            words, why_behind = standing.words(theirs.score), standing.words_behind(theirs)
            return _Standing(*at, words, first.name, theirs.score, why_behind)
    return _Standing()


def _elsewhere(spool: Spool, name: str, places: Collection[str]) -> Explanation | None:
    """Return what a job does, or how it has ended; None for a task that its array has not issued yet.

    Raises NoSuchJob.
    """
    lister = JobLister(spool)
    row = lister.row(name)
    if row is not None and row.place == RUNNING:
        return _submitted(spool, lister, row) or _started(spool, name)
    if DONE in places or spool.runs(name):
        return _ended(spool, name)
    if not spool.places(array_of(name)):  # nor is it a task that waits to be issued
        raise spool.no_such_job("find", f"job {name}", name)
    return None


def _room_of(seen: Snapshot, name: str) -> tuple[str | None, bool]:
    """Return the job whose run is stopped for that job, and whether it has the order already."""
    for each in seen.view.running.values():
        if each.preempted_for == name:
            return each.name, True
    found = preempt(seen.plan) if seen.shared is None else None
    return (found.victim if found is not None and found.winner == name else None), False


def _forecast(seen: Snapshot, names: Collection[str] | None = None) -> Mapping[str, StartForecast]:
    """Return the forecast; on a shared machine a job that would start now may wait for its lease as well."""
    found = forecast(seen.plan, names)
    if seen.shared is None:
        return found
    here = seen.view.running
    return {
        name: replace(
            start,
            must_end=tuple(other for other in start.must_end if other in here),
            starts_after=(*(other for other in start.must_end if other not in here), *start.starts_after),
        )
        for name, start in found.items()
    }


def _submitted(spool: Spool, lister: JobLister, row: JobRow) -> Explanation | None:
    """Return why a job waits on its engine, which alone decides its start; None if it does not wait there."""
    if row.state is not State.SUBMITTED or row.run is None:
        return None
    grant, known = spool.grant(row.name, row.run), spool.engine(row.name, row.run)
    return replace(
        _without_a_plan(lister, row.name, RUNNING, (PendingReason("submitted", row.reason),)),
        last_said=row.reason,
        engine=grant.executor if grant is not None else None,
        engine_id=known[2] if known is not None else None,
    )


def _started(spool: Spool, name: str) -> Explanation:
    """Return what a started job does. Raises NoSuchJob if it is gone."""
    found = job_details(spool, name)
    row, last = found.row, found.runs[-1] if found.runs else None
    if row.state.ended:
        return _ended(spool, name)
    answer = replace(_without_a_plan(JobLister(spool), name, RUNNING, ()), doing=_what_it_does(spool, name))
    spec = spool.spec(name, last.record.run) if last is not None else None
    if last is None or spec is None or row.array:
        return replace(answer, doing=f"{answer.doing}: {row.reason}") if row.array and row.reason else answer
    ran_ns, limit_ns = last.ran_ns(answer.at_ns), row.time_limit_ns
    return replace(
        answer,
        run=last.record.run,
        command=spec.command if isinstance(spec.command, str) else shlex.join(spec.command),
        started_at_ns=last.record.started_at_ns,
        time_limit_ns=limit_ns,
        left_ns=max(0, limit_ns - ran_ns) if limit_ns is not None and ran_ns is not None else None,
    )


def _ended(spool: Spool, name: str) -> Explanation:
    """Return how a job ended, and the last lines of its output, or its first task's, that failed. Raises NoSuchJob."""
    found = job_details(spool, name)
    row, lister = found.row, JobLister(spool)
    last = found.runs[-1] if found.runs else None
    outcome = row.state if row.state.ended or last is None or last.state is None else last.state
    reasons = (PendingReason(outcome, row.reason),) if row.reason else ()
    ended = _without_a_plan(lister, name, DONE, reasons)
    failed = next((task for task in found.tasks if task.state in FAILURES), None)
    if failed is not None and failed.run is not None:
        lines = last_words_of(spool, failed.name, failed.run)
        return replace(ended, outcome=outcome.value, last_lines=lines, last_lines_of=failed.name)
    return replace(ended, outcome=outcome.value, last_lines=found.last_lines)


def _unplanned(seen: Snapshot, name: str, places: Collection[str]) -> PendingReason:
    """Return why no plan has a job: it is an array, or its file is invalid or cannot be read now."""
    why = seen.left_out.get(name, "its file has just been removed")
    if name not in seen.table.arrays and name not in seen.table.array_files:
        job = seen.table.jobs.get(name)
        file = (job.queued or job.held) if job is not None else None
        is_wrong = file is not None and file.spec is None and file.problem != IN_EDITOR
        return PendingReason("invalid" if is_wrong else "unread", why)
    if QUEUED not in places:
        return PendingReason("held", "held")
    return PendingReason("paused", "spool paused") if seen.view.paused else PendingReason("tasks", why)


def _without_a_plan(lister: JobLister, name: str, place: str, reasons: tuple[PendingReason, ...]) -> Explanation:
    """Return the explanation of a job that no plan of this spool has."""
    return Explanation(
        name=name,
        place=place,
        beside=(),
        reasons=reasons,
        start_at_ns=None,
        must_end=(),
        start_is_guess=False,
        expected_run_ns=None,
        expected="",
        score=None,
        standing="",
        behind=None,
        behind_score=None,
        behind_why="",
        ahead=0,
        dispatcher=lister.dispatcher,
        last_said="",
        at_ns=lister.at_ns,
    )


def _what_it_does(spool: Spool, name: str) -> str:
    """Return the state of a started job, as in the list of jobs."""
    row = JobLister(spool).row(name)
    if row is not None and row.state is State.STOPPING:
        return f"it is being stopped ({row.reason})" if row.reason else "it is being stopped"
    if row is not None and row.suspended_at_ns is not None:
        remedy = f"; `spool continue {name}` resumes it" if spool.suspend_order(name) is not None else ""
        return f"it is {row.reason}{remedy}"
    run = spool.latest_run(name)
    kept = spool.cancel_denial(name, run) if run is not None else ""
    return f"it is running and was not cancelled: {kept}" if kept else "it is running"


def why_never_begun(spool: Spool, name: str, run: int | None = None) -> str:
    """Return why a job has not begun, or ended before it did, so that it has no output; "" if it has begun."""
    newest = spool.latest_run(name)
    run = newest if run is None else run
    if run is not None:
        result = spool.result(name, run)
        if result is None or result.outcome is State.FINISHED or spool.array(name, run) is not None:
            return ""
        if failure := spool.failure(name, run):
            return f"it could not start: {failure}"
        if result.started_at_ns is not None or result.exit_code is not None:
            return ""
        return f"it never started: {result.reason or result.outcome}"
    row = JobLister(spool).row(name)
    if row is None:
        return ""
    if row.state.ended:
        return f"it never started: {row.reason or row.state}"
    said = row.reason or ("nothing is in its way" if row.state is State.QUEUED else "")
    if said.startswith(row.state):
        return f"it has not run yet: {said}"
    return f"it has not run yet: {row.state}{f', {said}' if said else ''}"


def _by_hooks(spool: Spool, name: str, said: str) -> tuple[PendingReason, ...]:
    """Return the answers that a job waits for, and vetoes, which only the dispatcher and the files know."""
    try:
        held = spool.hold_reason(name, os.stat(spool.layout.job_file(HELD, name)).st_mtime_ns)
    except OSError:
        held = ""
    if held:
        return (PendingReason("held", f"held: {held}"),)
    code = _code_of(said)
    return (PendingReason(code, said),) if code is not None else ()


def _code_of(said: str) -> str | None:
    """Return the code of a reason of the dispatcher that tells of a missing answer, or of a no; None for others."""
    return next((code for prefix, code in _ANSWERS.items() if said.startswith(prefix)), None)


def _by_machine(shared: MachineSharing | None, said: str) -> tuple[PendingReason, ...]:
    """Return why the arbiter of a shared machine lets a job wait that nothing in its spool keeps from starting."""
    return (PendingReason("machine", said),) if shared is not None and said.startswith(_MACHINE) else ()


class PlannedJob(Struct, frozen=True):
    """A waiting job, and its place in queue order, from 1."""

    place: int
    job: Waiting
    standing: OrderFactors

    @property
    def expected(self) -> str:
        """Its expected run time in words, with its source."""
        return self.standing.expected.words(self.job.name, self.job.user)


class StartingJob(PlannedJob, frozen=True):
    """A job that would start now, and its grant."""

    grant: Grant


class WaitingJob(PlannedJob, frozen=True):
    """A job that keeps waiting, and when it starts if every run ends when expected, including jobs that go first."""

    code: str
    reason: str
    start: StartForecast


class Preview(Struct, frozen=True):
    """The decisions of a dispatcher at this moment. Starts and waits are in queue order.

    `protected` is the job that room is kept for, until `protected_until_at_ns`. `left_out` are files that cannot be
    planned, with the reasons.
    """

    starts: tuple[StartingJob, ...]
    waits: tuple[WaitingJob, ...]
    ends: tuple[Ending, ...]
    left_out: dict[str, str]
    held: int
    running: int
    submitted: int  # of these, those that wait on their engine
    paused: bool
    dispatcher: bool
    protected: str | None
    protected_until_at_ns: int | None
    protected_by_guess: bool
    config_problem: str | None
    at_ns: int
    start_is_earliest: bool | None = None  # as in `Explanation`: of each start


def preview(spool: Spool) -> Preview:
    """Return what a dispatcher would do now and later, from a fresh look at the spool and the machine."""
    seen = snapshot(spool, with_tasks=True)
    view, plan = seen.view, seen.plan
    would_start = {start.name for start in plan.starts}
    asked = {
        name: reason
        for name, reason in _asked_about(spool, seen.now_ns).items()
        if name in would_start or not reason.startswith(_MACHINE)
    }
    grants = {start.name: start.grant for start in plan.starts if start.name not in asked}
    ending = {each.name for each in plan.endings}
    expected = _forecast(seen)
    starts: list[StartingJob] = []
    waits: list[WaitingJob] = []
    order = [each for each in plan.in_order() if each[0].name not in ending]
    for place, (job, standing) in enumerate(order, 1):
        name = job.name
        if name in grants:
            starts.append(StartingJob(place, job, standing, grants[name]))
            continue
        if name in asked:
            reason = asked[name]
            code, found = _code_of(reason) or "machine", StartForecast(unknown=reason)
        else:
            no = plan.reason(name)
            code, reason = (no.code, in_words(no.text, seen.now_ns)) if no is not None else ("", "")
            found = expected.get(name, StartForecast())
            found = replace(found, unknown=in_words(found.unknown, seen.now_ns))
        waits.append(WaitingJob(place, job, standing, code, reason, found))
    protected = expected.get(plan.protected, StartForecast()) if plan.protected is not None else StartForecast()
    return Preview(
        starts=tuple(starts),
        waits=tuple(waits),
        ends=tuple(plan.endings),
        left_out=seen.left_out,
        held=len(view.held),
        running=len(view.running),
        submitted=sum(run.submitted for run in view.running.values()),
        paused=view.paused,
        dispatcher=spool.dispatcher_lives(),
        protected=plan.protected,
        protected_until_at_ns=protected.at_ns,
        protected_by_guess=protected.guessed,
        config_problem=seen.config_problem or seen.unpinned,
        at_ns=seen.now_ns,
        start_is_earliest=True if seen.shared is not None else None,
    )


def _asked_about(spool: Spool, now_ns: int) -> dict[str, str]:
    """Return the dispatcher's last words about the jobs whose start waits for hooks and plugins, or for a lease."""
    state = JobLister(spool).state
    jobs = state.jobs.items() if state is not None else ()
    said = {name: in_words(view.reason, now_ns) for name, view in jobs}
    return {name: why for name, why in said.items() if why.startswith((*_ANSWERS, _MACHINE))}
