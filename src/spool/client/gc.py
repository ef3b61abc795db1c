"""Garbage collection: the metadirs of old runs, and the records in `done/` of jobs without anything else.

Also the kept texts of reservations that were removed long ago.

Safe while a dispatcher is running. It only touches jobs that have no file except in `done/`, whose newest run has ended
for good with its line of history, and that no waiting job depends on. A job's newest run is removed last, and only if
nothing else of the job stays. Before that its number is recorded, so that it is neither reused nor restored.

Nothing outside the spool is removed: no link is followed, and each name is removed relative to the open directory that
holds it. Files that cannot be read or removed are reported, and the rest goes on.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from msgspec import Struct

from spool.client.submit import ever_used
from spool.core import layout
from spool.core.errors import SpoolError, SpoolUnusable, cannot
from spool.core.layout import CALLS, DONE, GONE_RESERVATIONS, HELD, JOBS, QUEUED, RUNNING, STAGING
from spool.formats import journal, run_records
from spool.formats.config import RetentionPolicy
from spool.formats.journal import recall
from spool.store.disk import Disk, open_directory, remedy_for, walk
from spool.store.ownership import check_owner
from spool.store.reading import read_record
from spool.store.spool import Spool, spec_of

_LOCK = "gc.lock"  # in the staging directory
_LONG = 400  # of a path in a message
_RUN = re.compile(r"[1-9][0-9]*", re.ASCII)
_ORPHAN_AGE_NS = 3600 * 10**9  # of a call without a job
_ASIDE = re.compile(rf"[1-9][0-9]*\.gc\.{layout.NAME_PATTERN}\.[0-9]+", re.ASCII)

Step = Callable[[int, int], object]  # called with the number of steps done, and of all


class ExpiredRun(Struct, frozen=True):
    """One run that may be removed."""

    name: str
    run: int
    ended_at_ns: int
    size_bytes: int


class Removal(Struct, frozen=True):
    """Runs to remove, jobs without any left, and files of reservations."""

    runs: tuple[ExpiredRun, ...]
    jobs: tuple[str, ...]
    problems: tuple[str, ...] = ()  # files that could not be read or removed, one line each
    reservations: tuple[str, ...] = ()  # files of removed reservations

    @property
    def size_bytes(self) -> int:
        """The space that this frees."""
        return sum(run.size_bytes for run in self.runs)


def plan_removal(spool: Spool, keep: RetentionPolicy, now_ns: int, step: Step = lambda done, of: None) -> Removal:
    """Return the runs and records that *keep* does not cover, without changing anything."""
    problems: list[str] = []
    wanted = _depended_on(spool, problems)
    if wanted is not None:
        wanted |= _unrecorded(spool)
    chosen: dict[tuple[str, int], ExpiredRun] = {}  # too old, or too many
    left: list[ExpiredRun] = []  # may be removed if space is needed
    runs_of: dict[str, list[int]] = {}
    total_bytes, sized = 0, keep.max_size_bytes is not None

    def is_expired(ended_at_ns: int, newest: int) -> bool:
        """Whether a run is too old, or exceeds the number kept; *newest* is its rank."""
        return _is_too_old(ended_at_ns, keep, now_ns) or (keep.max_runs is not None and newest > keep.max_runs)

    with _directories(spool) as at:
        reservations = _old_reservations(at.get(GONE_RESERVATIONS), keep, now_ns)
        names = sorted({*filter(layout.valid_name, os.listdir(at[JOBS])), *spool.names(DONE)})
        for done, name in enumerate(names):
            step(done, len(names))
            try:
                may_go = wanted is not None and _may_go(spool, name, wanted)
                runs, ended, stays_bytes = _runs_of(spool, name, at[JOBS], is_expired if may_go else None, sized=sized)
            except OSError as error:
                problems.append(_cannot("read", f"job {name}", error, spool.layout.runs(name)))
                continue
            if runs or may_go:
                runs_of[name] = runs
            chosen |= {(name, old.run): old for old, goes in ended if goes}
            left += [old for old, goes in ended if not goes]
            total_bytes += stays_bytes
    if keep.max_size_bytes is not None:
        total_bytes += sum(old.size_bytes for old in left)
        for old in sorted(left, key=lambda old: old.ended_at_ns):
            if total_bytes <= keep.max_size_bytes:
                break
            chosen[old.name, old.run] = old
            total_bytes -= old.size_bytes
    jobs = []
    for name, runs in runs_of.items():
        if runs and all((name, run) in chosen for run in runs):
            jobs.append(name)
        elif runs:
            chosen.pop((name, runs[-1]), None)  # it records the outcome of the job
        elif _record_is_old(spool, name, keep, now_ns):
            jobs.append(name)
    going = sorted(chosen.values(), key=lambda old: (old.name, old.run))
    return Removal(tuple(going), tuple(jobs), tuple(problems), reservations)


def remove_planned(
    spool: Spool, removal: Removal, disk: Disk | None = None, step: Step = lambda done, of: None
) -> Removal:
    """Carry out *removal* where it still applies; return what was removed, and all errors.

    Raises SpoolError while another collection is running.
    """
    check_owner(spool.root)
    disk = disk if disk is not None else Disk(spool.layout.at(layout.STAGING))
    disk.ensure_staging()
    runs_of: dict[str, list[ExpiredRun]] = {}
    for old in removal.runs:
        runs_of.setdefault(old.name, []).append(old)
    whole, jobs = frozenset(removal.jobs), []
    with _directories(spool) as at, _alone(spool, at[STAGING]):
        collector = _Collector(spool, disk, at)
        collector.sweep()
        collector.remember({name: max(old.run for old in runs) for name, runs in runs_of.items()})
        for name in sorted({*runs_of, *whole}):
            none_stays = collector.remove_runs(name, runs_of.get(name, ()), whole=name in whole)
            step(len(collector.gone), len(removal.runs))
            if name in whole and none_stays and collector.remove_record(name):
                jobs.append(name)
        what = (GONE_RESERVATIONS, "an old reservation")
        gone = tuple(filename for filename in removal.reservations if collector.discard(filename, *what))
    return Removal(tuple(collector.gone), tuple(jobs), (*removal.problems, *collector.problems), gone)


class _Collector:
    """Removes runs and records, and counts the removed and the failed ones."""

    def __init__(self, spool: Spool, disk: Disk, at: dict[str, int]) -> None:
        self._spool = spool
        self._disk = disk
        self._at = at
        self._unrecorded = _unrecorded(spool)
        self.gone: list[ExpiredRun] = []
        self.problems: list[str] = []

    def sweep(self) -> None:
        """Remove what an earlier collector moved aside, and what killed programs left without a job."""
        for entry in os.listdir(self._at[STAGING]):
            if _ASIDE.fullmatch(entry):
                self._clear(entry)
        at = self._at.get(CALLS)
        entries = os.listdir(at) if at is not None else ()
        for entry in entries:  # also one that was half written
            call, is_function, _ = entry.partition(layout.FUNCTION)
            if is_function and call in entries:
                continue
            with suppress(OSError):
                age_ns = time.time_ns() - os.stat(entry, dir_fd=at, follow_symlinks=False).st_mtime_ns
                if age_ns > _ORPHAN_AGE_NS and not (layout.valid_name(entry) and ever_used(self._spool.root, entry)):
                    self._disk.discard(entry, at)

    def remember(self, last: dict[str, int]) -> None:
        """Record the numbers of the newest runs to be removed, beside those removed before."""
        if not last:
            return
        path = self._spool.layout.at(layout.LAST_RUNS)
        try:
            known = json.loads(read_record(path, 1 << 28) or b"{}")
        except ValueError:
            known = {}
        except OSError as error:  # without its numbers, some would be reused
            raise SpoolUnusable(_cannot("clean up", self._spool.root, error, path)) from None
        numbers = {name: run for name, run in known.items() if isinstance(run, int)} if isinstance(known, dict) else {}
        numbers |= {name: max(run, numbers.get(name, 0)) for name, run in last.items()}
        staged = self._disk.staged(json.dumps(numbers, separators=(",", ":")).encode() + b"\n", durable=True)
        try:
            self._disk.rename(staged, os.path.basename(path), new_at=self._at[JOBS])
        except OSError as error:
            with suppress(OSError):
                self._disk.discard(staged)
            raise SpoolUnusable(_cannot("clean up", self._spool.root, error, path)) from None
        self._disk.sync_directory(self._spool.layout.at(JOBS))

    def remove_runs(self, name: str, runs: Sequence[ExpiredRun], *, whole: bool) -> bool:
        """Remove these runs of a job, and return whether none stays.

        The last one of a *whole* job goes only if all others are gone.
        """
        if not runs or not _may_go(self._spool, name, self._unrecorded):
            return not runs
        try:
            at = open_directory(name, self._at[JOBS])
        except OSError as error:
            self.problems.append(_cannot("remove", f"runs of job {name}", error, self._spool.layout.runs(name)))
            return False
        stays = False
        try:
            for old in runs:
                if (stays and whole and old is runs[-1]) or _goes_on(self._spool, name):
                    return False
                # Renamed first, so that half a run is never visible.
                aside = f"{os.getpid()}.gc.{name}.{old.run}"
                try:
                    self._disk.rename(str(old.run), aside, at, self._at[STAGING])
                except FileNotFoundError:  # another process has removed it
                    pass
                except OSError as error:
                    stays = True
                    where = self._spool.layout.metadir(name, old.run)
                    self.problems.append(_cannot("remove", f"run {old.run} of job {name}", error, where))
                else:
                    self._clear(aside)
                    self.gone.append(old)
        finally:
            os.close(at)
        return not stays

    def remove_record(self, name: str) -> bool:
        """Remove the file of a job without runs; return whether it is gone."""
        if not _may_go(self._spool, name, self._unrecorded):
            return False
        if not self.discard(layout.file_of(name), DONE, f"the record of job {name}"):
            return False
        with suppress(OSError):  # a run has begun meanwhile, or a user keeps a file there
            self._disk.rmdir(name, self._at[JOBS])
        if CALLS in self._at:
            with suppress(OSError):  # the next collection sees it
                self._disk.discard(name, self._at[CALLS])
                self._disk.discard(name + layout.FUNCTION, self._at[CALLS])
        return True

    def discard(self, filename: str, place: str, what: str) -> bool:
        """Remove a file, and return whether it is gone; else add the problem."""
        try:
            self._disk.discard(filename, self._at[place])
        except OSError as error:
            self.problems.append(_cannot("remove", what, error, self._spool.layout.at(f"{place}/{filename}")))
            return False
        return True

    def _clear(self, entry: str) -> None:
        """Remove an entry of the staging directory."""
        errors = [error for error in self._disk.removing(entry, self._at[STAGING]) if error is not None]
        if errors:
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            where = f"{self._disk.staging}/{errors[0].filename or entry}"
            self.problems.append(_cannot("remove", "all of an old run", errors[0], where) + more)


@contextmanager
def _directories(spool: Spool) -> Iterator[dict[str, int]]:
    """Open the relevant directories of *spool*, none of them by a link."""
    at: dict[str, int] = {}
    path = spool.root
    with ExitStack() as stack:
        try:
            root = open_directory(path)
            stack.callback(os.close, root)
            for name in (JOBS, DONE, STAGING, GONE_RESERVATIONS, CALLS):
                path = spool.layout.at(name)
                with suppress(FileNotFoundError):
                    at[name] = open_directory(name, root)
                    stack.callback(os.close, at[name])
        except OSError as error:
            raise SpoolUnusable(_cannot("clean up", spool.root, error, path)) from None
        if missing := [name for name in (JOBS, DONE) if name not in at]:
            why, remedy = f"{missing[0]} is missing", "`spool init` creates it"
            raise SpoolUnusable(cannot("clean up", spool.root, why, remedy=remedy))
        yield at


def _cannot(verb: str, thing: str, error: OSError, where: str) -> str:
    """Return a message for an error; jobs may have given their files any name."""
    why, remedy = error.strerror or str(error), remedy_for(error)
    if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(where):
        why, remedy = "it is a link", "remove or replace it by hand"
    if len(where) > _LONG:
        where = f"{where[: _LONG // 2]}...{where[-_LONG // 2 :]}"
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in where)
    return cannot(verb, thing, why, where=shown, remedy=remedy)


def _runs_of(
    spool: Spool, name: str, jobs: int, is_expired: Callable[[int, int], bool] | None, *, sized: bool
) -> tuple[list[int], list[tuple[ExpiredRun, bool]], int]:
    """Return the runs of a job, those that may be removed and whether each is expired, and the size of the others.

    *jobs* is the directory of all jobs. With *is_expired* None, none may be removed. *sized*: whether all sizes matter.
    """
    try:
        at = open_directory(name, jobs)
    except FileNotFoundError:
        return [], [], 0
    try:
        runs = sorted(int(run) for run in os.listdir(at) if _RUN.fullmatch(run))
        ends = {run: _ended_at_ns(spool, name, run, at) for run in runs} if is_expired is not None else {}
        ended = [(run, at_ns) for run, at_ns in ends.items() if at_ns is not None]
        judged = list[tuple[ExpiredRun, bool]]()
        for index, (run, at_ns) in enumerate(ended):
            goes = is_expired is not None and is_expired(at_ns, len(ended) - index)
            judged.append((ExpiredRun(name, run, at_ns, _size(str(run), at) if goes or sized else 0), goes))
        stays = [run for run in runs if ends.get(run) is None] if sized else []
        return runs, judged, sum(_size(str(run), at) for run in stays)
    finally:
        os.close(at)


def _is_too_old(since_ns: int, keep: RetentionPolicy, now_ns: int) -> bool:
    return keep.max_age_ns is not None and now_ns - since_ns > keep.max_age_ns


def _ended_at_ns(spool: Spool, name: str, run: int, at: int) -> int | None:
    """Return when a run ended, or was withdrawn before it began; None if it has not ended, or is a link."""
    try:
        result = spool.result(name, run)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return 0
    if result is not None and result.ended_at_ns:
        return result.ended_at_ns
    if result is None and spool.record(name, run, layout.JID) != run_records.VOID_JID:
        return None
    try:
        return os.stat(str(run), dir_fd=at, follow_symlinks=False).st_mtime_ns
    except FileNotFoundError:
        return None


def _goes_on(spool: Spool, name: str) -> bool:
    return any(place != DONE for place in spool.places(name))


def _may_go(spool: Spool, name: str, wanted: set[str]) -> bool:
    """Whether a job has ended for good and no waiting job depends on it."""
    if (
        _goes_on(spool, name)
        or name in wanted
        or any(name[:at] in wanted for at, char in enumerate(name) if char == "_")
    ):
        return False
    try:
        run = spool.latest_run(name)
        result = spool.result(name, run) if run is not None else None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return True  # a link is not a run: it is removed, without its target
    return run is None or (result is not None and result.again is None)


def _record_is_old(spool: Spool, name: str, keep: RetentionPolicy, now_ns: int) -> bool:
    """Whether the record in `done/` of a job that never ran is older than the policy keeps."""
    with suppress(OSError):
        since_ns = os.lstat(spool.layout.job_file(DONE, name)).st_ctime_ns
        return _is_too_old(since_ns, keep, now_ns) and spool.places(name) == [DONE]
    return False


def _old_reservations(at: int | None, keep: RetentionPolicy, now_ns: int) -> tuple[str, ...]:
    """Return the files in the directory *at* of reservations that were removed too long ago."""
    found = []
    for filename in sorted(os.listdir(at)) if at is not None else ():
        with suppress(OSError):
            status = os.stat(filename, dir_fd=at, follow_symlinks=False)
            known = stat.S_ISREG(status.st_mode) and layout.gone_reservation_of(filename) is not None
            if known and _is_too_old(status.st_ctime_ns, keep, now_ns):
                found.append(filename)
    return tuple(found)


def _unrecorded(spool: Spool) -> set[str]:
    """Return the jobs with news in the journal: a dispatcher still has to record an end.

    The journal's line that a run is over is written after the line of the history.
    """
    memory = recall(list(journal.parse(spool.file(layout.JOURNAL) or b"")))
    return {*memory.waits, *(name for name, _ in memory.open)}


def _depended_on(spool: Spool, problems: list[str]) -> set[str] | None:
    """Return the names that waiting or held jobs depend on, and the arrays in progress.

    None if one of those jobs cannot be read: it may depend on any name, so no run may be removed.
    """
    names: set[str] = set()
    complete = True
    for place in (QUEUED, HELD):
        for name in spool.names(place):
            try:
                text = spool.job_text(place, name) or b""
                spec = spec_of(text, name) if b"depends_on" in text else None
            except OSError as error:
                where = spool.layout.job_file(place, name)
                problems.append(_cannot("see what", f"job {name} depends on", error, where) + "; nothing is removed")
                complete = False
            else:
                names.update(spec.depends_on.names() if spec is not None and spec.depends_on is not None else ())
    # An array in progress needs the outcomes of its tasks.
    for place in (RUNNING, HELD):
        for name in spool.names(place):
            try:
                if spool.newest_array(name) is not None:
                    names.add(name)
            except OSError:  # it may be an array
                names.add(name)
    return names if complete else None


@contextmanager
def _alone(spool: Spool, staging: int) -> Iterator[None]:
    """Keep other collectors out."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(_LOCK, flags, 0o600, dir_fd=staging)
    except OSError as error:
        where = spool.layout.at(f"{STAGING}/{_LOCK}")
        raise SpoolUnusable(_cannot("clean up", spool.root, error, where)) from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SpoolError(cannot("clean up", spool.root, "another `spool gc` is running")) from None
        yield
    finally:
        os.close(fd)


def _size(name: str, at: int) -> int:
    """Return the disk space used by an entry of the directory *at*."""
    size = 0
    with suppress(OSError):
        for found in walk(name, at):
            with suppress(OSError):
                size += os.stat(found.name, dir_fd=found.at, follow_symlinks=False).st_blocks * 512
    return size
