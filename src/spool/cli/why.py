"""`spool why`: why a job is not running yet."""

from __future__ import annotations

from collections.abc import Iterator

import click

from spool.cli import publicjson, render
from spool.cli.common import json_option, name_argument, one_job, viewed
from spool.cli.group import Verb
from spool.core.names import engine_title
from spool.core.reasons import some_of
from spool.core.units import show_duration
from spool.query.explain import Explanation, why

_MOST = 8  # names in one line
_NEXT = "nothing blocks it; it starts in the dispatcher's next pass"
_ON_SHARED = "nothing in this spool blocks it; it starts when the arbiter of the shared machine grants it a lease"


@click.command(cls=Verb)
@name_argument
@json_option
@click.pass_obj
def command(root: str, name: str, as_json: bool) -> int:
    """Explain why a job is not running yet.

    Prints every reason in the order in which the rules apply; the first is the one that `spool ls` shows. Then it
    prints which jobs must end first, and when the job could start if each job ends when it is expected to; `spool plan`
    gives the same time. The scheduler itself answers, from a fresh look at the files.

    By hand: state.json has the dispatcher's last answer
    """
    spool = viewed(root)
    answer = why(spool, one_job(spool, name))
    if as_json:
        render.as_json({"version": 1, **publicjson.plain(answer)})
    else:
        for line in sentences(answer):
            render.prose(line)
    return 0


def sentences(answer: Explanation) -> Iterator[str]:
    """Yield the sentences and lists that explain why a job waits."""
    if not answer.reasons:
        yield f"{answer.name}: {_ON_SHARED if answer.start_is_earliest else _NEXT}"
    for at, reason in enumerate(answer.reasons):
        head = f"{answer.name}:" if at == 0 else f"{'':{len(answer.name) + 1}}"
        yield f"{head} {reason.text}"
    if answer.room_of is not None:
        how = "is being stopped for it" if answer.room_is_made else "will be stopped for it"
        yield f"preemption: {answer.room_of}, which is preemptible, {how}"
    if answer.preempted_for is not None:
        yield f"preempted: its last run was stopped for {answer.preempted_for}, which goes first if it still waits"
    for place in answer.beside:
        yield f"this is {answer.place}/{answer.name}.toml; another job of that name is in {place}/"
    if answer.engine is not None:
        yield from _in_engine(answer, engine_title(answer.engine))
    if answer.must_end:
        yield f"must end first: {some_of(answer.must_end, _MOST)}"
    if answer.starts_after:
        yield f"starts after: {some_of(answer.starts_after, _MOST)}"
    if answer.place == "held":
        yield f"could start: not before `spool release {answer.name}`"
    elif any(reason.code == "hook" for reason in answer.reasons):
        yield "could start: not before the hook allows it"
    if answer.reasons:
        yield from _start(answer)
    if answer.expected:
        yield f"expected run time: {answer.expected}"
    if answer.standing and answer.place == "queued":
        behind = ""
        if answer.behind is not None:
            behind = f"; behind {answer.behind}{', ' if answer.behind_why else ''}{answer.behind_why}"
        yield f"order: {answer.standing}{behind}"
    if answer.ahead and answer.place == "queued":
        yield f"ahead of it in the queue: {answer.ahead} job{'' if answer.ahead == 1 else 's'}"
    if answer.last_said and (not answer.reasons or answer.last_said != answer.reasons[0].text.removeprefix("held: ")):
        yield f"the dispatcher last reported: {answer.last_said}"
    if not answer.dispatcher and answer.engine is None:
        yield "no dispatcher is running: `spool dispatch` starts one"


def _start(answer: Explanation) -> Iterator[str]:
    """Yield the expected start of the job, or why it is unknown, unless the reasons say so."""
    if answer.start_at_ns is not None:
        wait = answer.start_at_ns - answer.at_ns
        about = "about " if answer.start_is_guess else ""
        when = f"in {about}{show_duration(wait)}, {render.moment(answer.start_at_ns)}" if wait > 0 else "any moment now"
        finish = f"; assumes that {some_of(answer.if_finished, _MOST)} will finish" if answer.if_finished else ""
        on = "jobs end as expected" if answer.start_is_guess else "the time limits hold"
        first = "; at the earliest, as other users' jobs may go first" if answer.start_is_earliest else ""
        yield f"could start: {when}, if {on}{finish}{first}"
    elif answer.later_than_at_ns is not None:
        yield f"could start: later than {render.moment(answer.later_than_at_ns)}; the plan goes no further"
    elif answer.start_unknown and all(answer.start_unknown != reason.text for reason in answer.reasons):
        yield f"could start: unknown, {answer.start_unknown}"


def _in_engine(answer: Explanation, engine: str) -> Iterator[str]:
    if answer.engine_id is None:
        remedy = "" if answer.dispatcher else "; `spool dispatch` goes on with it"
        yield f"not in {engine} yet, as far as spool knows{remedy}"
    elif answer.dispatcher:
        yield f"in {engine} as job {answer.engine_id}, which alone knows when it starts"
    else:
        yield f"{engine} alone knows when it starts; `spool dispatch` asks it again"
