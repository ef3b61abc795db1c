"""The plan of this moment, not performed: what would start, what waits, why, and until when."""

from __future__ import annotations

from dataclasses import dataclass

from spool.core.backfill import Expectation
from spool.core.model import Grant, Waiting
from spool.core.order import Standing
from spool.core.queue import ShapeKey, shape_key
from spool.core.waits import opens_at_ns
from spool.dispatcher.survey import Survey, survey
from spool.store.spool import Spool


@dataclass(frozen=True, slots=True)
class Starting:
    """A job that would start now, and what it would get."""

    place: int  # in the order of the queue, from 1
    name: str
    user: str
    priority: int
    grant: Grant
    expected_run_ns: int
    run_is_guess: bool  # nobody stated it
    expected: str  # how long it is expected to run, and what says so


@dataclass(frozen=True, slots=True)
class Waits:
    """A job that goes on waiting. `start_at_ns`: at the earliest, if every limit holds and nobody else is first."""

    place: int
    name: str
    user: str
    priority: int
    code: str
    reason: str
    start_at_ns: int | None
    start_is_guess: bool  # that rests on the guess of a run time
    must_end: tuple[str, ...]  # the runs that have to end first
    expected_run_ns: int
    run_is_guess: bool
    expected: str
    score: float | None


@dataclass(frozen=True, slots=True)
class Ends:
    """A job that would end now without having started."""

    name: str
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a dispatcher would do at this moment. Starts and waits are in the order of the queue.

    `protected` is the job that room is left for, until `protected_until_at_ns`. `left_out` are the files that cannot
    be planned, and why.
    """

    starts: tuple[Starting, ...]
    waits: tuple[Waits, ...]
    ends: tuple[Ends, ...]
    left_out: dict[str, str]
    held: int
    running: int
    paused: bool
    dispatcher: bool
    protected: str | None
    protected_until_at_ns: int | None
    protected_by_guess: bool
    config_problem: str | None
    at_ns: int


def forecast(spool: Spool) -> Forecast:
    """Look at the spool and the machine, and say what a dispatcher would do."""
    seen = survey(spool)
    view, plan = seen.view, seen.plan
    grants = {start.name: start.grant for start in plan.starts}
    ending = {each.name for each in plan.endings}
    expect = _Expecting(seen)
    starts: list[Starting] = []
    waits: list[Waits] = []
    order = [each for each in plan.in_order() if each[0].name not in ending]
    for place, (job, standing) in enumerate(order, 1):
        name, priority = job.name, job.spec.priority
        if name in grants:
            starts.append(Starting(place, name, job.user, priority, grants[name], *_runs(job, standing)))
            continue
        reason = plan.reason(name)
        expected = expect(job)
        waits.append(
            Waits(
                place,
                name,
                job.user,
                priority,
                reason.code if reason is not None else "",
                str(reason) if reason is not None else "",
                expected.at_ns if expected is not None else None,
                expected is not None and expected.guessed,
                expected.must_end if expected is not None else (),
                *_runs(job, standing),
                standing.score,
            )
        )
    return Forecast(
        starts=tuple(starts),
        waits=tuple(waits),
        ends=tuple(Ends(each.name, each.outcome.value, each.reason) for each in plan.endings),
        left_out=seen.left_out,
        held=len(view.held),
        running=len(view.running),
        paused=view.paused,
        dispatcher=spool.dispatcher_lives(),
        protected=plan.protected,
        protected_until_at_ns=plan.protected_until_ns,
        protected_by_guess=plan.protected_by_guess,
        config_problem=seen.config_problem,
        at_ns=seen.now_ns,
    )


def _runs(job: Waiting, standing: Standing) -> tuple[int, bool, str]:
    """Return how long *job* is expected to run, whether that is a guess, and what says so."""
    expected = standing.expected
    return expected.ns, expected.is_guess, expected.words(job.name, job.user)


class _Expecting:
    """The expected starts, found once for all jobs that are equal in everything that decides them."""

    def __init__(self, seen: Survey) -> None:
        self._plan = seen.plan
        self._paused = seen.view.paused
        self._known: dict[tuple[ShapeKey, int | None], Expectation | None] = {}

    def __call__(self, job: Waiting) -> Expectation | None:
        if self._paused:
            return None
        if job.spec.depends_on is not None:
            return self._plan.expected_start(job.name)
        key = (shape_key(job), opens_at_ns(job))
        if key not in self._known:
            self._known[key] = self._plan.expected_start(job.name)
        return self._known[key]
