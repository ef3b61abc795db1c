"""The tasks of an array that was expanded: what they write, task after task, and how they stand by now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spool.core import layout
from spool.core.arrays import Tasks, array_of, in_words, outcome_of
from spool.core.errors import InvalidJob, InvalidRecord
from spool.core.layout import HELD, QUEUED, RUNNING
from spool.core.model import Result, State
from spool.formats import jobfile
from spool.formats.ends import parse_history_line
from spool.formats.tasks import ArrayRecord
from spool.store.spool import Spool
from spool.store.tails import Piece, Stream, Tail, outputs


class Gathering:
    """The outputs of the tasks of one expanded array: of each its newest run, whole, under its name.

    *lines*: only the last lines of each.
    """

    def __init__(self, spool: Spool, name: str, run: int, *, lines: int | None = None) -> None:
        self._spool = spool
        self._lines = lines
        record = spool.array(name, run)
        self._since_ns = (record.expanded_at_ns if record is not None else None) or 0
        self._left = dict.fromkeys(_names(spool, name, run, record))
        # The end of a task is a line there: to look at every task again and again would take long for thousands.
        self._history = Tail(spool.layout.at(layout.HISTORY))
        self._history.skip_to_last(0)
        self._torn = b""
        self._looked = False

    def tasks(self) -> Iterator[tuple[str, int]]:
        """Yield each task that has begun, in their order, and its newest run."""
        for task in self._left:
            run = self._spool.latest_run(task)
            if run is None:
                continue
            result = self._spool.result(task, run)
            if result is None or (result.ended_at_ns or 0) >= self._since_ns:
                yield task, run

    def ended(self, *, last: bool = False) -> Iterator[Piece]:
        """Yield the outputs of the tasks that have ended since the last call; *last*: the array is over."""
        over = self._over()
        if last or not self._looked:
            self._looked = True
            over |= {task: run for task, run in self.tasks() if last or self._is_over(task, run)}
        for task, run in over.items():
            if task in self._left:
                del self._left[task]
                yield from self.output(task, run)

    def output(self, task: str, run: int) -> Iterator[Piece]:
        """Yield the whole output of a task, a line with its name before it; nothing if it has written nothing."""
        where = outputs(self._spool, task, run)
        for stream, path in ((Stream.OUT, where.stdout), (Stream.ERR, where.stderr)):
            if path is None:
                continue
            tail = Tail(path)
            if self._lines is not None:
                tail.skip_to_last(self._lines)
            head = f"==> {task} <==\n".encode()
            while data := tail.read():
                yield Piece(run, stream, head + data)
                head = b""
            tail.close()

    def close(self) -> None:
        """Close the history."""
        self._history.close()

    def _is_over(self, task: str, run: int) -> bool:
        result = self._spool.result(task, run)
        return result is not None and result.again is None

    def _over(self) -> dict[str, int]:
        """Return the tasks that have ended for good since the last call, by the history, and their last runs."""
        found: dict[str, int] = {}
        while data := self._history.read():
            *lines, self._torn = (self._torn + data).split(b"\n")
            for line in lines:
                try:
                    result = parse_history_line(line)
                except InvalidRecord:
                    continue
                if result.again is None:
                    found[result.job] = result.run
        return found


@dataclass(frozen=True, slots=True)
class Standing:
    """How an array stands that has ended. `outcome` None: a task of it goes on, for it was queued again."""

    outcome: State | None
    reason: str
    ended_at_ns: int | None


def standing(spool: Spool, result: Result, *, ran_again: bool | None = None) -> Standing:
    """Return how the array stands that ended with *result*: each task counts as it ended last, as for a dependency.

    *ran_again*: whether a task has ended since; None: look into the history. Of a cancelled array that it was cancelled
    stands.
    """
    name = result.job
    then = Standing(result.outcome, result.reason, result.ended_at_ns)
    if result.outcome is State.CANCELLED:
        return then
    ended_at_ns = result.ended_at_ns or 0
    active = {task for place in (QUEUED, HELD, RUNNING) for task in spool.names(place) if array_of(task) == name}
    if ran_again is None:
        later = (known for known in spool.accounts_since(ended_at_ns) if (known.ended_at_ns or 0) > ended_at_ns)
        ran_again = any(array_of(known.job) == name for known in later)
    if not active and not ran_again:
        return then
    names = _names(spool, name, result.run, spool.array(name, result.run))
    going_on = len(active.intersection(names))
    ends = [_end(spool, task, result.submitted_at_ns or 0) for task in names if task not in active]
    outcomes = [outcome for outcome, _ in ends]
    words = in_words(outcomes, len(names), going_on)
    if going_on:
        return Standing(None, words, None)
    last_ns = max((at_ns for _, at_ns in ends), default=0)
    return Standing(outcome_of(outcomes, len(names)), words, max(last_ns, ended_at_ns))


def _end(spool: Spool, task: str, since_ns: int) -> tuple[State, int]:
    """Return how and when a task ended last; one that has not run since it was submitted was withdrawn."""
    run = spool.latest_run(task)
    result = spool.result(task, run) if run is not None else None
    if result is None or (result.submitted_at_ns or 0) < since_ns:
        return State.CANCELLED, 0
    return result.outcome, result.ended_at_ns or 0


def _names(spool: Spool, name: str, run: int, record: ArrayRecord | None) -> tuple[str, ...]:
    text = spool.record(name, run, layout.SPEC_COPY)
    try:
        return Tasks(name, jobfile.parse(text or b"", name=name)).names()
    except InvalidJob:  # a power cut has emptied it
        return tuple(f"{name}_{index}" for index in range(record.tasks if record is not None else 0))
