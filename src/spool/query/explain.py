"""Why a job does not run, and which jobs would start now: the planner's answers for a snapshot of the files."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from spool.core.arrays import array_of
from spool.core.forecast import StartForecast, forecast, preempt
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.model import Grant, State, Waiting
from spool.core.priority import OrderFactors
from spool.core.queue import ShapeKey, shape_key
from spool.core.runtimes import Basis, TimeLeft
from spool.core.scheduler import Ending, Plan
from spool.formats.capabilities import capabilities
from spool.query.rows import JobRow, in_words
from spool.query.snapshot import Snapshot, snapshot
from spool.store.spool import Spool

if TYPE_CHECKING:
    from spool.query.details import JobDetails  # most explanations are of jobs that wait

_KEPT = frozenset({"held", "hook", "machine"})
# Prefixes of the dispatcher's reasons for what waits for an answer, or got a no, and the code of each.
_ANSWERS = {
    "hook ": "hook", **{f"{each.name}: ": each.name for each in capabilities() if each.steps},
}  # fmt: skip
_MACHINE = "machine: "  # … for a start that waits for the arbiter of a shared machine


class PendingReason(Struct, frozen=True):
    """One reason. `code` is the planner's code, `text` the sentence with numbers."""

    code: str
    text: str


class Standing(Struct, frozen=True):
    """Where a waiting job stands in the order."""

    ahead: int = 0  # waiting jobs that are considered before this one
    score: float | None = None
    words: str = ""  # its score, and the numbers behind it
    behind: str | None = None  # the first in the order, if that is another job
    behind_score: float | None = None
    behind_why: str = ""  # why that is first, in words


class Explanation(Struct, frozen=True):
    """Why a job waits, what it does, or how it ended. A waiting one without reasons starts in the next pass."""

    name: str
    place: str
    dispatcher: bool
    at_ns: int
    reasons: tuple[PendingReason, ...] = ()
    beside: tuple[str, ...] = ()  # the places of other files of the name
    start_at_ns: int | None = None  # if every run ends when expected; None: unknown
    must_end: tuple[str, ...] = ()  # runs that must end first
    start_is_guess: bool = False  # the start rests on a guessed run time
    expected_run_ns: int | None = None  # None: the job is an array, or cannot be read
    expected: str = ""  # … in words, with its source
    order: Standing = Standing()
    last_said: str = ""  # the reason in `state.json`
    engine: str | None = None  # the engine that it is for, which alone decides its start
    engine_id: str | None = None  # the job's id there; None: as far as is known it is not there yet
    starts_after: tuple[str, ...] = ()  # waiting jobs that go first, and whose end lets it start
    if_finished: tuple[str, ...] = ()  # jobs that must finish first, because it depends on them
    later_than_at_ns: int | None = None  # it starts after this; nothing is planned beyond
    start_unknown: str = ""  # why its start is unknown
    ends_as: str = ""  # the outcome that a dispatcher gives it now, without a start
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
    left_ns: int | None = None  # as its row has it, or while it is suspended of its limit
    left: str = ""  # … in words


def why(spool: Spool, name: str) -> Explanation:
    """Return why job *name* waits, what it does, or how it ended. Raises NoSuchJob."""
    places = spool.places(name)
    if QUEUED not in places and HELD not in places:
        if places or spool.runs(name):
            return _begun(spool, name)
        if not spool.is_to_come(name):
            raise spool.no_such_job("find", f"job {name}", name)
    seen = snapshot(spool, with_tasks=True)
    job = seen.view.queue.get(name) or seen.view.held.get(name)
    waits = QUEUED in places or HELD not in places  # a task that is still to be issued has no file
    answer = Explanation(
        name,
        QUEUED if waits else HELD,
        seen.dispatcher,
        seen.now_ns,
        reasons=(_unplanned(seen, name, places),) if job is None else _reasons(seen, name),
        beside=tuple(place for place in (RUNNING, HELD) if place in places and (place == RUNNING or waits)),
        last_said=seen.last_word(name),
        start_is_earliest=True if seen.shared is not None else None,
    )
    return answer if job is None else _foretold(answer, seen, job)


def _foretold(answer: Explanation, seen: Snapshot, job: Waiting) -> Explanation:
    """Return *answer* with what the plan says of a waiting job: its place in the order, its start and its run time."""
    kept = any(reason.code in _KEPT for reason in answer.reasons)  # until a user or the arbiter acts: no time is known
    found = StartForecast() if kept else _forecast(seen, (job.name,)).get(job.name, StartForecast())
    run_time = None if job.spec.is_array else seen.view.past.run_times.of_job(job)
    room_of, room_is_made = _room_of(seen, job.name)
    return replace(
        answer,
        start_at_ns=found.at_ns,
        must_end=found.must_end,
        start_is_guess=found.guessed,
        starts_after=found.starts_after,
        if_finished=found.if_finished,
        later_than_at_ns=found.later_than_ns,
        start_unknown=in_words(found.unknown, seen.now_ns),
        ends_as=next((each.outcome for each in seen.plan.endings if each.name == job.name), ""),
        expected_run_ns=run_time.ns if run_time is not None else None,
        expected=run_time.words(job.name, job.user) if run_time is not None else "",
        order=_standing(seen.plan, job),
        room_of=room_of,
        room_is_made=room_is_made,
        preempted_for=job.yields_to,
        requests=job.sized.why if job.sized is not None else "",
    )


def _standing(plan: Plan, job: Waiting) -> Standing:
    """Return where *job* stands in the order, without those that never fit: they delay no other job."""
    never: dict[ShapeKey, bool] = {}
    before: list[tuple[Waiting, OrderFactors]] = []
    for other, own in plan.in_order():
        key = shape_key(other)
        if key not in never:
            never[key] = any(reason.code == "never_fits" for reason in plan.all_reasons(other.name))
        if other is job and not never[key]:
            break
        before += [] if never[key] else [(other, own)]
    else:
        return Standing()
    if not before:
        return Standing(0, own.score, own.words())
    first, theirs = before[0]
    if first.spec.priority != job.spec.priority:
        words, why_behind = own.words(), f"priority {first.spec.priority}"
    else:
        words, why_behind = own.words(theirs.score), own.words_behind(theirs)
    return Standing(len(before), own.score, words, first.name, theirs.score, why_behind)


def _room_of(seen: Snapshot, name: str) -> tuple[str | None, bool]:
    """Return the job whose run is stopped for that job, and whether it has the order already."""
    for each in seen.view.running.values():
        if each.preempted_for == name:
            return each.name, True
    found = preempt(seen.plan) if seen.shared is None else None
    return (found.victim if found is not None and found.winner == name else None), False


def _forecast(seen: Snapshot, names: Collection[str] | None = None) -> Mapping[str, StartForecast]:
    """Return the forecast; on a shared machine a job that would start now may wait for its lease as well."""
    found = forecast(seen.plan, names, seen.left)
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


def _begun(spool: Spool, name: str) -> Explanation:
    """Return what a job does, or how it ended. Raises NoSuchJob if it is gone."""
    from spool.query.details import job_details  # most explanations are of jobs that wait

    found = job_details(spool, name)
    row, last = found.row, found.runs[-1] if found.runs else None
    answer = Explanation(name, row.place or RUNNING, found.dispatcher, found.at_ns)
    if row.state.ended or row.place != RUNNING:
        return _ended(spool, found, answer)
    if row.state is State.SUBMITTED and last is not None:  # its engine alone decides its start
        reasons, engine = (PendingReason("submitted", row.reason),), last.record.executor
        return replace(answer, reasons=reasons, last_said=row.reason, engine=engine, engine_id=last.engine_id)
    answer = replace(answer, doing=_what_it_does(spool, row))
    spec = spool.spec(name, last.record.run) if last is not None else None
    if last is None or spec is None or row.array:
        return replace(answer, doing=f"{answer.doing}: {row.reason}") if row.array and row.reason else answer
    ran_ns, limit_ns, left = last.ran_ns(answer.at_ns), row.time_limit_ns, row.left
    if left is None and limit_ns is not None and ran_ns is not None and ran_ns < limit_ns:
        left = TimeLeft(limit_ns - ran_ns, Basis.LIMIT)
    return replace(
        answer,
        run=last.record.run,
        command=spec.command if isinstance(spec.command, str) else shlex.join(spec.command),
        started_at_ns=last.record.started_at_ns,
        time_limit_ns=limit_ns,
        left_ns=left.ns if left is not None else None,
        left=left.told() if left is not None else "",
    )


def _what_it_does(spool: Spool, row: JobRow) -> str:
    """Return the state of a started job."""
    if row.state is State.STOPPING:
        return f"it is being stopped ({row.reason})" if row.reason else "it is being stopped"
    if row.suspended_at_ns is not None:
        remedy = f"; `spool continue {row.name}` resumes it" if spool.suspend_order(row.name) is not None else ""
        return f"it is {row.reason}{remedy}"
    kept = spool.cancel_denial(row.name, row.run) if row.run is not None else ""
    does = "it is starting" if row.state is State.STARTING else "it is running"
    if kept:
        return f"{does} and was not cancelled: {kept}"
    return f"{does} ({row.reason})" if row.reason else does


def _ended(spool: Spool, found: JobDetails, answer: Explanation) -> Explanation:
    """Return how a job ended, and the last lines of its output, or its first task's, that failed."""
    from spool.client.output import last_words_of  # needed for this alone
    from spool.query.details import FAILURES

    row, last = found.row, found.runs[-1] if found.runs else None
    outcome = row.state if row.state.ended or last is None or last.state is None else last.state
    lines, whose = found.last_lines, None
    failed = next((task for task in found.tasks.rows if task.state in FAILURES), None)
    if failed is not None and failed.run is not None:
        lines, whose = last_words_of(spool, failed.name, failed.run), failed.name
    reasons = (PendingReason(outcome, row.reason),) if row.reason else ()
    return replace(answer, place=DONE, reasons=reasons, outcome=outcome.value, last_lines=lines, last_lines_of=whose)


def _unplanned(seen: Snapshot, name: str, places: Collection[str]) -> PendingReason:
    """Return why no plan has a job: it is an array, or its file is invalid or cannot be read now.

    Or it is a task of an array that issues none now.
    """
    if not places:
        array = array_of(name)
        if array in seen.view.held or array in seen.view.held_arrays:
            return PendingReason("held", f"array {array} is held")
        return PendingReason("tasks", seen.left_out.get(array, "its array has just ended"))
    why = seen.left_out.get(name, "its file has just been removed")
    if name not in seen.table.arrays and name not in seen.table.array_files:
        job = seen.table.jobs.get(name)
        file = (job.queued or job.held) if job is not None else None
        return PendingReason("invalid" if file is not None and file.invalid else "unread", why)
    if QUEUED not in places:
        return PendingReason("held", "held")
    return PendingReason("paused", "spool paused") if seen.view.paused else PendingReason("tasks", why)


def _reasons(seen: Snapshot, name: str) -> tuple[PendingReason, ...]:
    """Return why a job waits: the answers and vetoes that only the dispatcher and the files know, then the plan."""
    said, job = seen.last_word(name), seen.table.jobs.get(name)
    held = job.hold_reason if job is not None else ""
    code, text = ("held", f"held: {held}") if held else (_code_of(said), said)
    reasons = [PendingReason(code, text)] if code is not None else []
    noes = (no for no in seen.plan.all_reasons(name) if code is None or no.code != "held")
    reasons += [PendingReason(no.code, in_words(no.text, seen.now_ns)) for no in noes]
    if not reasons and seen.shared is not None and said.startswith(_MACHINE):
        reasons.append(PendingReason("machine", said))
    return tuple(reasons)


def _code_of(said: str) -> str | None:
    """Return the code of a reason of the dispatcher that tells of a missing answer, or of a no; None for others."""
    return next((code for prefix, code in _ANSWERS.items() if said.startswith(prefix)), None)


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
    seen = snapshot(spool, with_tasks=True, quiet=True)
    view, plan = seen.view, seen.plan
    grants = {start.name: start.grant for start in plan.starts}
    ending = {each.name for each in plan.endings}
    expected = _forecast(seen)
    starts: list[StartingJob] = []
    waits: list[WaitingJob] = []
    order = [each for each in plan.in_order() if each[0].name not in ending]
    for place, (job, standing) in enumerate(order, 1):
        said, grant = seen.last_word(job.name), grants.get(job.name)
        asked = _code_of(said) or ("machine" if grant is not None and said.startswith(_MACHINE) else None)
        if asked is not None:  # a hook about its start, or the arbiter for a lease
            waits.append(WaitingJob(place, job, standing, asked, said, StartForecast(unknown=said)))
        elif grant is not None:
            starts.append(StartingJob(place, job, standing, grant))
        else:
            no = plan.reason(job.name)
            code, reason = (no.code, in_words(no.text, seen.now_ns)) if no is not None else ("", "")
            found = expected.get(job.name, StartForecast())
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
        dispatcher=seen.dispatcher,
        protected=plan.protected,
        protected_until_at_ns=protected.at_ns,
        protected_by_guess=protected.guessed,
        config_problem=seen.config_problem or seen.unpinned,
        at_ns=seen.now_ns,
        start_is_earliest=True if seen.shared is not None else None,
    )
