"""`spool why`: the reason a job is not running. `spool plan`: what would start now, and what waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from spool.cli import render
from spool.cli.group import Verb, for_each, json_option, names_argument, one_job, viewed
from spool.cli.render import tell
from spool.core.arrays import array_of
from spool.core.layout import HELD, QUEUED
from spool.core.model import Grant
from spool.core.reasons import OF_ROOM, REASONS, Until, codes_until, count_of, some_of
from spool.core.units import show_duration
from spool.formats.capabilities import engine_title
from spool.query.explain import Explanation, PlannedJob, Preview, WaitingJob, preview, why

_MOST = 8  # names in one line
_NEXT = {
    True: "nothing blocks it; it starts in the dispatcher's next pass",
    False: "nothing blocks it; it starts once a dispatcher is running",
}
"""The answer for a job that nothing keeps from starting, by whether a dispatcher is running."""
_ON_SHARED = "nothing in this spool blocks it; it starts when the arbiter of the shared machine grants it a lease"
_BEFORE_START = Until.OTHER, "It starts by itself once that is done."  # for a code of a capability
_HELPLESS = codes_until(Until.CHANGE)  # no forecast: the job starts only after a change


@click.command(cls=Verb)
@names_argument(places=(QUEUED, HELD), required=True)
@json_option
@click.pass_obj
def command(root: str, names: tuple[str, ...], as_json: bool) -> int:
    """Explain why jobs are not running yet, what they are doing, or how they ended.

    The job goes first that has waited longest for its size; its size is its time limit (or what jobs like it took) plus
    what its user has been given since it came; heavy users count for up to a third less. A job goes first, one at a
    time, once later ones have used the whole machine for 8 hours (15% of its wait if that is more, plus twice what its
    own user got beyond that), and nothing may delay the first job that does not fit.

    Prints every reason in the order in which the rules apply; the first is the one that `spool ls` shows, and the
    next line says what it means. Then it prints which jobs must end first, and when the job could start if each job
    ends when it is expected to; `spool plan` gives the same time. The scheduler itself answers, from a fresh look at
    the files. Of a running job it prints the command, its start, the time that remains and its time limit; of one that
    has ended the outcome, and of one that failed the last lines of its output.

    By hand: state.json has the dispatcher's last answer
    """
    spool = viewed(root)
    answers: list[Explanation] = []

    def answer(name: str) -> str:
        found = why(spool, one_job(spool, name))
        if not as_json:
            if answers:
                render.say()
            _print(found)
        answers.append(found)
        return ""

    if len(names) == 1:
        answer(names[0])
        if as_json:
            render.as_json(answers[0])
        return 0
    code = for_each(names, answer)
    if as_json:
        render.as_json({"jobs": answers})
    return code


def _print(answer: Explanation) -> None:
    first, *rest = sentences(answer)
    render.headline("", first, "")
    for line in rest:
        render.prose(line)
    whose = f"the output of {answer.last_lines_of}" if answer.last_lines_of else "its output"
    render.indented(f"the last lines of {whose}", "\n".join(answer.last_lines))


def sentences(answer: Explanation) -> Iterator[str]:
    """Yield the sentences and lists that explain why a job waits, what it does, or how it ended; first the answer."""
    if answer.outcome is not None:
        yield f"{answer.name}: {render.with_reason(answer.outcome, answer.reasons[0].text if answer.reasons else '')}"
    elif answer.doing:
        yield from _doing(answer)
    else:
        codes = [reason.code for reason in answer.reasons]
        yield from _reasons(answer, codes)
        yield from _others(answer)
        yield from _prospect(answer, codes)
        if not answer.dispatcher and answer.engine is None:
            yield "no dispatcher is running: `spool dispatch` starts one"


def _reasons(answer: Explanation, codes: Sequence[str]) -> Iterator[str]:
    """Yield why a job waits, and for a newcomer what that means and what ends the wait, unless the reason says it."""
    if not codes:
        yield f"{answer.name}: {_ON_SHARED if answer.start_is_earliest else _NEXT[answer.dispatcher]}"
        return
    head = f"{answer.name}:"
    for reason in answer.reasons:
        if "never_fits" not in codes or reason.code not in OF_ROOM:  # these do not matter then
            yield f"{head} {reason.text}"
            head = " " * len(head)
    code = next((code for code in codes if code in _HELPLESS), codes[0])
    if answer.ends_as:
        yield f"It ends without a start. The dispatcher records it as {answer.ends_as}."
    elif meaning := REASONS.get(code, _BEFORE_START)[1]:
        is_its_array = code == "held" and answer.place == "queued"
        yield meaning.format(name=array_of(answer.name) if is_its_array else answer.name)


def _others(answer: Explanation) -> Iterator[str]:
    """Yield what other jobs, files and engines have to do with the wait."""
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
        yield f"waits for {some_of(answer.must_end, _MOST)} to end"
    if answer.starts_after:
        yield f"starts after: {some_of(answer.starts_after, _MOST)}"


def _prospect(answer: Explanation, codes: Sequence[str]) -> Iterator[str]:
    """Yield when the job could start, with what request, for how long, and its place in the queue."""
    if answer.ends_as:
        return
    can_start = _HELPLESS.isdisjoint(codes)
    if answer.place == "held":
        yield f"could start: not before `spool release {answer.name}`"
    elif "hook" in codes:
        yield "could start: not before the hook allows it"
    if codes and can_start:
        yield from _start(answer)
    if answer.requests:
        yield f"requests: {answer.requests}"
    if can_start:
        if answer.expected:
            yield f"expected run time: {answer.expected}"
        yield from _order(answer)
    said_it = codes[:1] == ["invalid"] or any(each.text.endswith(answer.last_said) for each in answer.reasons[:1])
    if answer.last_said and not said_it:
        yield f"the dispatcher last reported: {answer.last_said}"


def _doing(answer: Explanation) -> Iterator[str]:
    """Yield what a started job does: its command, its start, the time that remains and its time limit."""
    yield f"{answer.name}: {answer.doing}"
    if answer.command:
        yield f"command: {' '.join(answer.command.split())}"
    if answer.started_at_ns is not None:
        yield f"started: {render.moment(answer.started_at_ns, answer.at_ns)}, run {answer.run}"
        yield f"time left: {answer.left or ('none' if answer.time_limit_ns else 'it has no time limit')}"
        if answer.time_limit_ns is not None:
            yield f"time limit: {show_duration(answer.time_limit_ns)}"


def _order(answer: Explanation) -> Iterator[str]:
    """Yield where the job stands in the queue."""
    order = answer.order
    if order.words and answer.place == "queued":
        first = ", ".join(filter(None, (order.behind, order.behind_why)))
        yield f"order: {order.words}{f'; behind {first}' if first else ''}"
    if order.ahead and answer.place == "queued":
        yield f"ahead of it in the queue: {count_of(order.ahead, 'job')}"


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


_COLUMNS = (
    render.Column("#", right=True),
    render.Column("NAME", cut="middle"),
    render.Column("USER", cut="middle", drop=3),
    render.Column("PRIO", right=True, drop=2),
    render.Column("START", right=True),
    render.Column("RUNS", right=True, drop=1),
    render.Column("WHY", cut="words", least=12),
)


@click.command(cls=Verb)
@json_option
@click.pass_obj
def plan(root: str, as_json: bool) -> int:
    """Show what would start now, what waits, why, and until when. Nothing is started.

    Jobs are in queue order. The scheduler itself answers, from a fresh look at the files and the machine; no dispatcher
    is needed. It carries the schedule forward: START is when a job starts if every job finishes when expected. RUNS is
    how long it may run. A ~ marks an estimate from earlier runs; `spool why` says from which. Some starts cannot be
    foreseen, such as behind a suspended run: START is ?, and WHY says why. Far ahead, START is "later".

      spool plan
      spool plan --json | jq -r '.starts[].name'
    """
    spool = viewed(root)
    found = preview(spool)
    if as_json:
        render.as_json(found)
    else:
        _print_plan(found, partly=bool(spool.unread))
    return 0


def _print_plan(found: Preview, *, partly: bool) -> None:
    if found.config_problem is not None:
        tell(found.config_problem)
    if found.paused:
        tell("the spool is paused: no job starts until `spool resume`")
    rows = [(each.place, _row(each, "now", _gets(each.grant)), "green") for each in found.starts]
    rows += [(each.place, _row(each, _planned_start(each, found), _why(each)), "") for each in found.waits]
    rows.sort(key=lambda row: row[0])
    if rows:
        render.table(_COLUMNS, [row for _, row, _ in rows], [style for _, _, style in rows])
    for ended in found.ends:
        render.prose(f"{ended.name}: would end as {ended.outcome}: {ended.reason}")
    for name, reason in sorted(found.left_out.items()):
        render.prose(f"{name}: left out: {reason}")
    begun = found.running - found.submitted
    counts = {"running": begun, "submitted": found.submitted, "waiting": len(found.waits), "held": found.held}
    told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    more = "nothing else" if begun or found.submitted else "nothing"
    starts = f"{len(found.starts)} would start now" if found.starts else f"{more} starts now"
    if not (rows or found.ends or found.left_out or partly):
        starts = "no waiting jobs"
    render.prose("; ".join(filter(None, [told, starts])))
    if found.protected is not None:
        until = ""
        if found.protected_until_at_ns is not None:
            about = "about " if found.protected_by_guess else ""
            until = f", which could start in {about}{show_duration(max(0, found.protected_until_at_ns - found.at_ns))}"
            until += " at the earliest" if found.start_is_earliest else ""
        render.prose(f"resources are kept free for {found.protected}{until}")
    if found.start_is_earliest and rows:
        render.prose("the machine is shared, and other users' jobs may go first: each START is the earliest")
    if not found.dispatcher:
        render.prose("no dispatcher is running: `spool dispatch` starts one")


def _row(each: PlannedJob, start: str, reason: str) -> list[str]:
    job, expected = each.job, each.standing.expected
    runs = f"{'~' if expected.is_guess else ''}{show_duration(expected.ns)}"
    return [str(each.place), job.name, job.user, str(job.spec.priority), start, runs, reason]


def _planned_start(each: WaitingJob, found: Preview) -> str:
    start = each.start
    if start.at_ns is None:
        return "?" if start.later_than_ns is None else "later"
    wait = start.at_ns - found.at_ns
    about = "~" if start.guessed else ""
    return f"in {about}{show_duration(wait)}" if wait > 0 else "next"


def _why(each: WaitingJob) -> str:
    """Return why a job waits, and why its start is unknown, if that is another reason."""
    known = each.start.unknown in ("", each.reason)
    return each.reason if known else f"{each.reason}; {each.start.unknown}"


def _gets(grant: Grant) -> str:
    plural = "s" if len(grant.gpu_indices) > 1 else ""
    share = f" ({render.size(grant.gpu_memory_bytes)} of each)" if grant.gpu_memory_bytes is not None else ""
    gpus = f"GPU{plural} {', '.join(map(str, grant.gpu_indices))}{share}" if grant.gpu_indices else ""
    return "starts with " + render.granted(grant, render.size(grant.memory_bytes), gpus)
