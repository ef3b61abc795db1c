"""An array in progress: its unissued tasks, its active ones, and the outcomes of the others.

All of it can be rebuilt from the array's metadir and the files of its tasks.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct, field

from spool.core.arrays import Tasks, in_words, outcome_of
from spool.core.model import Result, Spec, State, Stop
from spool.formats.run_records import ArrayRecord
from spool.store.ownership import this_user


class Array(Struct, eq=False):
    """One expanded array, from its claim until its own file lies in `done/`."""

    name: str
    run: int
    spec: Spec
    tasks: Tasks
    user: str
    inode: int  # of its job file
    arrived_at_ns: int  # where its tasks' places in the queue begin
    expanded_at_ns: int
    names: tuple[str, ...] = ()
    unissued: set[str] = field(default_factory=set)
    to_issue: deque[int] = field(default_factory=deque)  # positions
    taken: dict[str, int] = field(default_factory=dict)  # tasks whose names are in use, and their positions
    open: set[str] = field(default_factory=set)  # issued, and a job of that name is active
    ended: dict[str, State] = field(default_factory=dict)
    unknown: deque[str] = field(default_factory=deque)  # ended before this dispatcher started: outcome not read yet
    to_cancel: deque[str] = field(default_factory=deque)
    beside: tuple[State, ...] = ()  # the states of other jobs of its name, which wait for its end
    others_seen: tuple[tuple[str, int, int, int], ...] = ()  # place, inode, mtime and ctime of their files
    held_since_ns: int | None = None  # its file is in held/: no task is issued or started
    seen: tuple[int, int] | None = None  # inode and mtime of its job file when its text was last read
    max_running: int | None = None  # the limit of running tasks in its file now
    missing_ns: int | None = None  # monotonic: since when its file is missing
    cancelled: str | None = None  # the user and the reason
    cancelled_by: str = ""  # the user
    unrecorded: Stop | None = None  # the same, until a record has it
    ended_at_ns: int | None = None  # the last end of a task, or the cancellation; None: unknown
    result: Result | None = None  # set once it is over and reported; only the filing is left

    @property
    def held(self) -> bool:
        """Whether none of its tasks may be issued or started."""
        return self.held_since_ns is not None and self.cancelled is None

    @property
    def limit_edited(self) -> bool:
        """Whether `max_running` in its file differs from that in its tasks."""
        return self.max_running != self.tasks.max_running

    @property
    def over(self) -> bool:
        """Whether every task has ended, with a known outcome."""
        return not (self.unissued or self.open or self.unknown or self.to_issue)

    @property
    def outcome(self) -> State:
        """The outcome of the array, once it is over."""
        if self.cancelled is not None:
            return State.CANCELLED
        return outcome_of(self.ended.values(), len(self.names))

    # Transitions.

    def resume(self, unissued: set[str]) -> None:
        """Record which tasks have not been issued yet."""
        self.unissued = set(unissued)
        self.to_issue = deque(at for at, name in enumerate(self.names) if name in unissued)

    def file_seen(self, inode: int) -> None:
        """Record its file's inode: the file is in its place."""
        self.inode, self.missing_ns = inode, None

    def see_others(self, beside: tuple[State, ...], seen: tuple[tuple[str, int, int, int], ...]) -> None:
        """Record the states of the other jobs of its name, and which versions of their files have them."""
        self.beside, self.others_seen = beside, seen

    def edited(self, spec: Spec | None, seen: tuple[int, int]) -> bool:
        """Apply its job file as edited; return whether its limit changed. *seen* identifies that version of the file.

        A file that is invalid or not an array changes nothing.
        """
        before, self.seen = self.max_running, seen
        if spec is not None and spec.is_array:
            self.max_running = Tasks(self.name, spec).max_running
        return self.max_running != before

    def file_found(self) -> None:
        """Record that its job file exists again."""
        self.missing_ns = None

    def file_missing(self, at_ns: int) -> int:
        """Record that its job file is missing at *at_ns*, monotonic; return since when."""
        if self.missing_ns is None:
            self.missing_ns = at_ns
        return self.missing_ns

    def hold(self, now_ns: int) -> bool:
        """Stop issuing and starting its tasks; return whether that is new."""
        if self.held_since_ns is not None:
            return False
        self.held_since_ns = now_ns
        return True

    def release(self) -> int | None:
        """Resume; return since when it was held, None if it was not."""
        since_ns, self.held_since_ns = self.held_since_ns, None
        return since_ns

    def taken_by_another(self, task: str, position: int) -> None:
        """Record that another job has the name of a task, which must wait."""
        self.taken[task] = position

    def name_freed(self, task: str) -> None:
        """Issue a task next whose name another job had."""
        self.to_issue.appendleft(self.taken.pop(task))

    def task_ended(self, task: str, outcome: State, at_ns: int | None) -> None:
        """Record the outcome of a task, and its time, if known."""
        self.ended[task] = outcome
        self._went_on_until(at_ns)

    def _went_on_until(self, at_ns: int | None) -> None:
        if at_ns is not None:
            self.ended_at_ns = max(at_ns, self.ended_at_ns or 0)

    def cancel(self, stop: Stop) -> str:
        """Stop issuing, and end every active task; return the user and the reason."""
        self.unrecorded, self.cancelled_by = stop, stop.by
        self.cancelled = f"cancelled by {stop.by}" + (f": {stop.reason}" if stop.reason else "")
        self.missing_ns = None
        self._went_on_until(stop.at_ns)
        self.unissued.clear()
        self.to_issue.clear()
        self.taken.clear()
        self.to_cancel.extend(name for name in self.names if name in self.open)
        return self.cancelled

    def withdrawn(self) -> None:
        """Mark it as cancelled because its job file does not wait anywhere; the file does not tell the user."""
        self.cancelled = "cancelled"

    def cancel_recorded(self) -> None:
        """Record that the cancellation is on record."""
        self.unrecorded = None

    def conclude(self, result: Result) -> None:
        """Record its result, which has been reported."""
        self.result = result

    # In words.

    def counts(self) -> str:
        """Return the outcomes of its tasks, in words."""
        return in_words(self.ended.values(), len(self.names))

    def progress(self, running: int) -> str:
        """Return its progress in words; *running* is the number of tasks that run now."""
        words = [f"{len(self.ended) + len(self.unknown)} of {len(self.names)} done", f"{running} running"]
        if self.taken:
            first = next(iter(self.taken))
            more = f" and {len(self.taken) - 1} more" if len(self.taken) > 1 else ""
            words.append(f"{first}{more} not issued: another job of that name is there")
        return ", ".join(words)


def new_array(spec: Spec, record: ArrayRecord) -> Array:
    """Return the array of a record, without the states of its tasks."""
    tasks = Tasks(record.job, spec)
    at_ns = record.expanded_at_ns or 0
    return Array(
        name=record.job,
        run=record.run,
        spec=spec,
        tasks=tasks,
        user=record.user or this_user(),
        inode=record.inode or 0,
        arrived_at_ns=record.submitted_at_ns or at_ns,
        expanded_at_ns=at_ns,
        names=tasks.names(),
        max_running=tasks.max_running,
    )
