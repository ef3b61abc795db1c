"""The tasks of an array on the disk: which there are, how they ended, and how they are written and issued.

Tasks are written in the staging directory, appear with the array's metadir by one rename, and are then issued one after
the other: moved from `jobs/NAME/RUN/tasks/` to `queued/`. A file still in `tasks/` was not issued.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING

from msgspec.structs import replace

from spool.core import layout
from spool.core.arrays import Tasks, array_of, in_words, outcome_of
from spool.core.errors import InvalidRecord
from spool.core.layout import DONE, HELD, PLACES, QUEUED, RUNNING
from spool.core.model import Result, State
from spool.formats.run_records import ArrayRecord
from spool.store.disk import disk_is_full, same_file, status_of
from spool.store.spool import Spool

if TYPE_CHECKING:
    from spool.store.locked_spool import LockedSpool


def array_outcome(spool: Spool, result: Result, *, ran_again: bool | None = None) -> Result:
    """Return the end of an array that ended with *result*: each task counts by its last end, as for a dependency.

    *ran_again*: whether a task has ended since; None: look into the history. A cancelled array stays cancelled, and one
    with a task that is active again is `running`.
    """
    name = result.job
    if result.outcome is State.CANCELLED:
        return result
    ended_at_ns = result.ended_at_ns or 0
    active = {task for place in (QUEUED, HELD, RUNNING) for task in spool.names(place) if array_of(task) == name}
    if ran_again is None:
        later = (known for known in spool.accounts_since(ended_at_ns) if (known.ended_at_ns or 0) > ended_at_ns)
        ran_again = any(array_of(known.job) == name for known in later)
    if not active and not ran_again:
        return result
    names = task_names(spool, name, result.run, spool.array(name, result.run))
    going_on = len(active.intersection(names))
    ends = [_end_of(spool, task, result.submitted_at_ns or 0) for task in names if task not in active]
    outcomes = [outcome for outcome, _ in ends]
    words = in_words(outcomes, len(names), going_on)
    if going_on:
        return replace(result, outcome=State.RUNNING, reason=words, ended_at_ns=None)
    last_ns = max((at_ns for _, at_ns in ends), default=0)
    outcome = outcome_of(outcomes, len(names))
    return replace(result, outcome=outcome, reason=words, ended_at_ns=max(last_ns, ended_at_ns))


def _end_of(spool: Spool, task: str, since_ns: int) -> tuple[State, int]:
    """Return how and when a task last ended; one that has not run since it was submitted was withdrawn.

    INVALID: its record cannot be parsed.
    """
    run = spool.latest_run(task)
    result = spool.known_end(task, run) if run is not None else None
    if isinstance(result, InvalidRecord):
        return State.INVALID, 0
    if result is None or (result.submitted_at_ns or 0) < since_ns:
        return State.CANCELLED, 0
    return result.outcome, result.ended_at_ns or 0


def task_names(spool: Spool, name: str, run: int, record: ArrayRecord | None) -> tuple[str, ...]:
    """Return the tasks of an expanded array, in order; *record* is that of its run."""
    spec = spool.spec(name, run)
    if spec is None:  # emptied by a power cut
        return tuple(f"{name}_{index}" for index in range(record.tasks if record is not None else 0))
    return Tasks(name, spec).names()


def still_to_issue(spool: Spool, name: str, run: int) -> set[str]:
    """Return the tasks of an expanded array whose files lie in its metadir yet."""
    with suppress(FileNotFoundError):
        return set(layout.jobs_of(os.listdir(f"{spool.layout.metadir(name, run)}/{layout.TASKS}")))
    return set()


class Issue(Enum):
    """The result of issuing a task."""

    ISSUED = "issued"
    TAKEN = "its name is taken"
    GONE = "someone removed it"


class ArrayStore:
    """Changes a locked spool for its arrays. Discarded files are removed step by step, by :meth:`clean`."""

    def __init__(self, spool: LockedSpool) -> None:
        self._spool = spool
        self._disk = spool.disk
        self._layout = spool.layout
        self._serial = 0
        self._rubbish: list[str] = []
        self._removing: Iterator[OSError | None] | None = None  # removal of the first discarded directory

    def begin(self) -> str:
        """Return a new directory in which to prepare an array's metadir."""
        while True:
            path = self._fresh("array")
            if self._disk.ensure_directory(path):  # otherwise left behind by an earlier process of this pid
                break
        try:
            self._disk.mkdir(f"{path}/{layout.TASKS}")
        except OSError:
            self.abandon(path)
            raise
        return path

    def add(self, staged: str, task: str, text: bytes) -> None:
        """Write the file of one task."""
        self._disk.create(f"{staged}/{layout.TASKS}/{layout.file_of(task)}", text)

    def publish(self, staged: str, name: str, run: int, files: dict[str, bytes]) -> None:
        """Make the metadir appear whole, with every task in it."""
        for record, data in files.items():
            self._disk.create(f"{staged}/{record}", data)
        for record in files.keys() & {layout.SPEC_COPY, layout.DEFAULTS}:  # the tasks can be recreated from these
            self._disk.sync_file(f"{staged}/{record}")
        self._spool.ensure_runs(name)
        self._disk.rename(staged, self._layout.metadir(name, run))

    def withdraw(self, name: str, run: int) -> None:
        """Take back a metadir whose file could not be claimed; its number is not used again."""
        self._spool.take_jid(name, run)
        self.drop(name, run)

    def abandon(self, staged: str) -> None:
        """Discard a prepared directory."""
        self._rubbish.append(staged)

    def unissued(self, name: str, run: int) -> set[str]:
        """Return the tasks not issued yet, after completing every issue that was interrupted half way.

        A file with both names is issued; only its old name needs removal.
        """
        found: set[str] = set()
        self._spool.check_own(name, run)
        with suppress(FileNotFoundError), os.scandir(f"{self._layout.metadir(name, run)}/{layout.TASKS}") as entries:
            for entry in entries:
                task = layout.job_of(entry.name)
                if task is None:
                    continue
                is_linked = entry.stat(follow_symlinks=False).st_nlink > 1
                if is_linked and any(same_file(entry.path, self._layout.job_file(place, task)) for place in PLACES):
                    self._disk.discard(entry.path)
                else:
                    found.add(task)
        return found

    def issue(self, name: str, run: int, task: str) -> Issue:
        """Move a task to `queued/`, unless a job of its name waits, is held or runs."""
        if any(os.path.lexists(self._layout.job_file(place, task)) for place in (HELD, RUNNING)):
            return Issue.TAKEN
        self._spool.check_own(name, run)
        source, target = self._layout.task_file(name, run, task), self._layout.job_file(QUEUED, task)
        try:
            self._disk.move(source, target)
        except FileExistsError:
            if status_of(target) is None:
                raise
            return Issue.TAKEN
        except FileNotFoundError:
            if status_of(source) is not None:
                raise
            return Issue.GONE
        return Issue.ISSUED

    def drop(self, name: str, run: int) -> None:
        """Discard every task that was not issued, by one rename."""
        path = self._fresh("dropped")
        self._spool.check_own(name, run)
        with suppress(FileNotFoundError):
            self._disk.rename(f"{self._layout.metadir(name, run)}/{layout.TASKS}", path)
            self._rubbish.append(path)

    def archive(self, inode: int, name: str, text: bytes | None) -> None:
        """Move the file of an ended array to `done/`, from wherever it is; recreate it from *text* if it is gone."""
        spool = self._spool
        for place in (RUNNING, HELD):
            if spool.holds(inode, name, place):
                spool.archive(name, place, None)
                return
        if not spool.holds(inode, name, QUEUED, DONE):
            spool.archive(name, RUNNING, text)

    @property
    def has_rubbish(self) -> bool:
        """Whether discarded files remain."""
        return bool(self._rubbish)

    def clean(self, until_ns: int) -> bool:
        """Remove discarded files until *until_ns*, monotonic; return whether there is more."""
        while self._rubbish:
            if self._removing is None:
                self._removing = self._disk.removing(self._rubbish[0])
            for error in self._removing:
                if error is not None and disk_is_full(error):
                    self._removing = None
                    raise error
                if time.monotonic_ns() >= until_ns:
                    return True
            self._removing = None  # the rest stays until the next dispatcher sweeps
            del self._rubbish[0]
        return False

    def _fresh(self, word: str) -> str:
        self._serial += 1
        return f"{self._disk.staging}/{os.getpid()}.{word}.{self._serial}"
