"""Removing what is old: metadirs of ended runs, and the records in `done/` of jobs of which nothing else is left.

Safe while a dispatcher lives. Only jobs are touched that have no file but in `done/`, whose newest run has ended for
good, and that no waiting job depends on. Before a job's newest run goes, its number is written down, so that it is
never used again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from spool.core import layout
from spool.core.errors import InvalidJob, SpoolError, cannot
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.formats import jobfile, records
from spool.store.disk import Disk
from spool.store.spool import Spool, read_bytes

_LOCK = f"{layout.STAGING}/gc.lock"


@dataclass(frozen=True, slots=True)
class Keep:
    """What is kept: runs younger than *max_age_ns*, the newest *max_runs* of each job, *max_bytes* of all."""

    max_age_ns: int | None = None
    max_runs: int | None = None
    max_bytes: int | None = None

    @property
    def everything(self) -> bool:
        """Whether nothing is a reason to remove anything."""
        return self.max_age_ns is None and self.max_runs is None and self.max_bytes is None


@dataclass(frozen=True, slots=True)
class OldRun:
    """One run that may be removed."""

    name: str
    run: int
    ended_at_ns: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Removal:
    """What goes: runs, and the jobs of which nothing stays, with the number of their newest run."""

    runs: tuple[OldRun, ...]
    jobs: tuple[tuple[str, int], ...]

    @property
    def size_bytes(self) -> int:
        """How much room that makes."""
        return sum(run.size_bytes for run in self.runs)


def plan_removal(spool: Spool, keep: Keep, now_ns: int) -> Removal:
    """Return what *keep* does not keep. Changes nothing."""
    wanted = _depended_on(spool)
    chosen: dict[tuple[str, int], OldRun] = {}
    left: list[OldRun] = []
    runs_of: dict[str, list[int]] = {}
    total_bytes = 0
    for name in sorted({*spool.jobs_with_runs(), *spool.names(DONE)}):
        runs_of[name] = spool.runs(name)
        found = _ended_runs(spool, name, runs_of[name]) if _may_go(spool, name, wanted) else []
        for at, old in enumerate(found):
            too_old = keep.max_age_ns is not None and now_ns - old.ended_at_ns > keep.max_age_ns
            too_many = keep.max_runs is not None and len(found) - at > keep.max_runs
            if too_old or too_many:
                chosen[name, old.run] = old
            else:
                left.append(old)
        if keep.max_bytes is not None:
            removable = {old.run for old in found}
            total_bytes += sum(old.size_bytes for old in found if (name, old.run) not in chosen)
            total_bytes += sum(_size(spool.layout.metadir(name, run)) for run in runs_of[name] if run not in removable)
    for old in sorted(left, key=lambda old: old.ended_at_ns) if keep.max_bytes is not None else ():
        if total_bytes <= (keep.max_bytes or 0):
            break
        chosen[old.name, old.run] = old
        total_bytes -= old.size_bytes
    jobs = [(name, runs[-1]) for name, runs in runs_of.items() if runs and all((name, run) in chosen for run in runs)]
    jobs += [(name, 0) for name, runs in runs_of.items() if not runs and _record_is_old(spool, name, keep, now_ns)]
    return Removal(tuple(sorted(chosen.values(), key=lambda old: (old.name, old.run))), tuple(jobs))


def remove(spool: Spool, removal: Removal, disk: Disk | None = None) -> Removal:
    """Remove what *removal* says and is still so; return what went. Raises SpoolError while another does the same."""
    disk = disk if disk is not None else Disk(spool.layout.at(layout.STAGING))
    with _alone(spool, disk):
        _remember(spool, disk, {name: run for name, run in removal.jobs if run})
        gone: list[OldRun] = []
        left_alone: set[str] = set()
        for old in removal.runs:
            if old.name in left_alone or not _may_go(spool, old.name, ()):
                left_alone.add(old.name)
                continue
            _remove_metadir(spool, disk, old.name, old.run)
            gone.append(old)
        jobs = tuple(job for job in removal.jobs if job[0] not in left_alone and _may_go(spool, job[0], ()))
        for name, _ in jobs:
            disk.discard(spool.layout.job_file(DONE, name))
            try:
                disk.rmdir(spool.layout.runs(name))
            except OSError:
                continue  # a run has begun meanwhile, or somebody keeps something there
    return Removal(tuple(gone), jobs)


def _remove_metadir(spool: Spool, disk: Disk, name: str, run: int) -> None:
    """Remove a metadir; it goes by one rename first, so that nobody ever sees half of one."""
    aside = spool.layout.at(f"{layout.STAGING}/{os.getpid()}.gc.{name}.{run}")
    disk.rename(spool.layout.metadir(name, run), aside)
    disk.remove_tree(aside)


def _may_go(spool: Spool, name: str, wanted: Collection[str]) -> bool:
    """Whether a job has ended for good and nobody waits for it."""
    if any(place != DONE for place in spool.places(name)):
        return False
    if name in wanted or any(name.startswith(f"{array}_") for array in wanted):
        return False
    run = spool.latest_run(name)
    if run is None:
        return True
    result = spool.result(name, run)
    return result is not None and result.again is None


def _ended_runs(spool: Spool, name: str, runs: list[int]) -> list[OldRun]:
    """Return the runs of a job that have ended, and those that never began."""
    found = []
    for run in runs:
        result = spool.result(name, run)
        metadir = spool.layout.metadir(name, run)
        try:
            changed_ns = os.stat(metadir).st_mtime_ns
        except OSError:
            continue
        if result is not None:
            found.append(OldRun(name, run, result.ended_at_ns or changed_ns, _size(metadir)))
        elif spool.record(name, run, layout.JID) == records.VOID_JID:
            found.append(OldRun(name, run, changed_ns, _size(metadir)))
    return found


def _record_is_old(spool: Spool, name: str, keep: Keep, now_ns: int) -> bool:
    """Whether a job that never ran lies in `done/` for longer than is kept."""
    if keep.max_age_ns is None or spool.places(name) != [DONE]:
        return False
    try:
        return now_ns - os.lstat(spool.layout.job_file(DONE, name)).st_ctime_ns > keep.max_age_ns
    except OSError:
        return False


def _depended_on(spool: Spool) -> set[str]:
    """Return the names that jobs which wait or are held depend on, and the arrays in progress."""
    names: set[str] = set()
    for place in (QUEUED, HELD):
        for name in spool.names(place):
            text = spool.job_text(place, name)
            if text is None or b"depends_on" not in text:
                continue
            try:
                spec = jobfile.parse(text, name=name)
            except InvalidJob:
                continue
            if spec.depends_on is not None:
                names.update(spec.depends_on.names())
    # An array in progress counts how its tasks have ended.
    for place in (RUNNING, HELD):
        for name in spool.names(place):
            run = spool.latest_run(name)
            if run is not None and spool.array(name, run) is not None:
                names.add(name)
    return names


def _remember(spool: Spool, disk: Disk, last: dict[str, int]) -> None:
    """Write down the numbers of the newest runs that go, beside those that went before."""
    if not last:
        return
    path = spool.layout.at(layout.LAST_RUNS)
    try:
        known = json.loads(read_bytes(path, 1 << 28) or b"{}")
    except ValueError:
        known = {}
    numbers = {name: run for name, run in known.items() if isinstance(run, int)} if isinstance(known, dict) else {}
    for name, run in last.items():
        numbers[name] = max(run, numbers.get(name, 0))
    disk.put(path, json.dumps(numbers, separators=(",", ":")).encode() + b"\n", durable=True)


@contextmanager
def _alone(spool: Spool, disk: Disk) -> Iterator[None]:
    """Keep another collector out."""
    disk.ensure_staging()
    fd = os.open(spool.layout.at(_LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SpoolError(cannot("clean up", spool.root, "another `spool gc` is at it")) from None
        yield
    finally:
        os.close(fd)


def _size(path: str) -> int:
    """Return how much room a metadir takes on the disk."""
    size = 0
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                size += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    size += _size(entry.path)
    except OSError:
        return size
    return size
