"""A spool as its one dispatcher changes it. Holding the lock is a type: only this class has methods that change."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from typing import TYPE_CHECKING

import msgspec.json

from spool.core import layout
from spool.formats import records
from spool.store.disk import Disk, disk_is_full, is_name_of, same_file
from spool.store.lock import hold
from spool.store.spool import Spool, read_bytes

if TYPE_CHECKING:
    from filelock import UnixFileLock

    from spool.core.model import Stop


CUT_OFF_NS = 1_000_000_000  # a link and an unlink take some microseconds, and more if the machine is busy

_STAGED = re.compile(  # what a process of that pid stages, or `spool gc` moves aside
    rf"([1-9][0-9]*)\.(?:(?:run|array|dropped|gc\.{layout.NAME_PATTERN})\.)?[0-9]+"
)


class LockedSpool(Spool):
    """The spool of a live dispatcher. `lock` is held until the process ends."""

    def __init__(self, root: str, disk: Disk | None = None, *, wait_s: float = 1.0) -> None:
        super().__init__(root)
        self._lock: UnixFileLock | None = hold(self.layout.at(layout.LOCK), wait_s)
        self.disk = disk if disk is not None else Disk(self.layout.at(layout.STAGING))
        self._last_runs: dict[str, int] = {}
        self._last_runs_seen: tuple[int, int] | None = None
        self._staged = 0

    def release(self) -> None:
        """Let go of the lock; the object is of no use afterwards."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # Starting: each method is one step of the protocol in docs/FORMAT.md 5.

    def next_run(self, name: str) -> int:
        """Return the number of the next run of job *name*, and see to it that its directory exists."""
        new = self.disk.ensure_directory(self.layout.runs(name))
        return self.following_run(name, [] if new else self.runs(name))

    def following_run(self, name: str, runs: list[int]) -> int:
        """Return the number of the next run of job *name* after *runs*."""
        return (runs[-1] if runs else self.last_removed_run(name)) + 1

    def stage(self, files: dict[str, bytes]) -> str:
        """Write the first records of a metadir where nobody sees them; return the directory."""
        self._staged += 1
        staged = f"{self.disk.staging}/{os.getpid()}.run.{self._staged}"
        self.disk.mkdir(staged)
        try:
            self._fill(staged, files)
        except OSError:
            self._unstage(staged)
            raise
        return staged

    def publish_metadir(self, name: str, run: int, files: dict[str, bytes], staged: str | None = None) -> None:
        """Step 1: make the metadir of a run appear whole, by one rename. *staged* holds what `stage` was given."""
        if staged is None:
            staged = self.stage({})
        try:
            self._fill(staged, files)
            self.disk.rename(staged, self.layout.metadir(name, run))
        except OSError:
            self._unstage(staged)
            raise

    def _fill(self, directory: str, files: dict[str, bytes]) -> None:
        for record, data in files.items():
            self.disk.create(f"{directory}/{record}", data, 0o700 if record == layout.WRAPPER else 0o600)

    def _unstage(self, staged: str) -> None:
        with contextlib.suppress(OSError):
            self.disk.remove_tree(staged)

    def is_between(self, name: str) -> bool:
        """Whether the file in `queued/` is in `held/` as well: somebody is in the middle of holding or releasing it.

        Somebody who was cut off in that, at least a second ago, is helped: the file is held.
        """
        queued = self.layout.job_file(layout.QUEUED, name)
        if not same_file(self.layout.job_file(layout.HELD, name), queued):
            return False
        with contextlib.suppress(FileNotFoundError):
            if time.time_ns() - os.lstat(queued).st_ctime_ns > CUT_OFF_NS:
                self.disk.drop(queued, self.layout.job_file(layout.HELD, name))
        return True

    def claim(self, name: str, inode: int, mtime_ns: int, size: int) -> bool:
        """Step 2: move the job file to `running/`. This commits the start.

        False if the file is no longer the one that was parsed, or a file of that name lies in `running/`; then
        nothing has changed.
        """
        queued, running = self.layout.job_file(layout.QUEUED, name), self.layout.job_file(layout.RUNNING, name)
        try:
            self.disk.move(queued, running)
            status = os.lstat(running)
        except (FileNotFoundError, FileExistsError):  # also if somebody has taken it out again at once
            return False
        changed = (status.st_ino, status.st_mtime_ns, status.st_size) != (inode, mtime_ns, size)
        # Of two names one is about to go away, and nobody can tell which.
        if changed or is_name_of(status, self.layout.job_file(layout.HELD, name)):
            # It waits on; in held/ if in this very moment another one was put in its place.
            for place in (layout.QUEUED, layout.HELD):
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    self.disk.move(running, self.layout.job_file(place, name))
                    break
            return False
        return True

    def withdraw(self, name: str, run: int) -> None:
        """Take back a metadir whose job could not be claimed; its number is not used again."""
        self.take_jid(name, run)

    def take_jid(self, name: str, run: int) -> bool:
        """Settle a run whose wrapper has not spoken: take its `jid`. True: it never started and never will.

        Without its metadir, which somebody removed, no wrapper can create one either.
        """
        try:
            # By a link, so that it is never there in part: a part of one is a wrapper's.
            self.disk.publish(self.layout.record(name, run, layout.JID), records.VOID_JID)
        except FileExistsError:
            return False
        except FileNotFoundError:
            return True
        return True

    # Stopping and ending.

    def order_stop(self, name: str, run: int, stop: Stop) -> bool:
        """Record that a run is to be stopped; False if somebody has ordered that before."""
        try:
            self.disk.publish(self.layout.record(name, run, layout.STOP), records.render_stop(stop))
        except FileExistsError:
            return False
        except FileNotFoundError:  # somebody removed the metadir: it is stopped without a record
            return True
        except OSError as error:  # no room for a record is no reason to let it go on
            if not disk_is_full(error):
                raise
        return True

    def put_record(self, name: str, run: int, record: str, data: bytes) -> None:
        """Write one record of a run; it appears whole, in a new metadir if somebody removed the old one."""
        try:
            self.disk.put(self.layout.record(name, run, record), data)
        except FileNotFoundError:
            self.disk.ensure_directory(self.layout.runs(name))
            self.disk.ensure_directory(self.layout.metadir(name, run))
            self.disk.put(self.layout.record(name, run, record), data)

    def file_away(self, name: str, place: str, text: bytes | None) -> None:
        """Move the file of an ended job from *place* to `done/`, where it takes the place of an older record.

        If the file is gone (its deletion was what cancelled the job) the record is made from *text*.
        """
        if not self.put_away(name, place) and text is not None:
            self.disk.put(self.layout.job_file(layout.DONE, name), text)

    def put_away(self, name: str, place: str) -> bool:
        """Move a file from *place* to `done/`; False if it is not there."""
        file, done = self.layout.job_file(place, name), self.layout.job_file(layout.DONE, name)
        try:
            self.disk.rename(file, done)
        except FileNotFoundError:
            return False
        except IsADirectoryError:
            # None of ours, and in the way. Left where it is the file would run again, so it is put aside, not lost.
            self.disk.rename(file, f"{done}.{time.time_ns()}")
        else:
            # Of two names of one file (`ln done/x.toml queued/x.toml`), rename(2) takes away neither.
            self.disk.drop(file, done)
        return True

    def put_back(self, name: str, place: str) -> bool:
        """Move a job file from `running/` to *place* without replacing a newer one of that name.

        What is no regular file (a directory, a link, a FIFO) is none of ours and stays.
        """
        running, back = self.layout.job_file(layout.RUNNING, name), self.layout.job_file(place, name)
        try:
            if not stat.S_ISREG(os.lstat(running).st_mode):
                return False
            self.disk.move(running, back)
        except FileExistsError:
            return self.disk.drop(running, back)  # a move that was cut off between its two halves
        except FileNotFoundError:
            return False
        return True

    def put_forward(self, name: str, place: str) -> None:
        """Make the claim of a job file in *place* again, after a power cut took it back."""
        try:
            self.disk.move(self.layout.job_file(place, name), self.layout.job_file(layout.RUNNING, name))
        except (FileExistsError, FileNotFoundError):
            return

    def complete_moves(self) -> None:
        """Undo or complete every move between `queued/` and `running/` that was cut off between its halves.

        The file has both names then. It is taken for running, and the evidence of its newest run says the rest.
        """
        for name in self.names(layout.RUNNING):
            self.disk.drop(self.layout.job_file(layout.QUEUED, name), self.layout.job_file(layout.RUNNING, name))

    def sweep_staging(self) -> None:
        """Remove what processes that are no more left in the staging directory."""
        for entry in os.listdir(self.disk.staging):
            match = _STAGED.fullmatch(entry)
            if match is not None and (int(match[1]) == os.getpid() or not os.path.exists(f"/proc/{match[1]}")):
                path = f"{self.disk.staging}/{entry}"
                if os.path.isdir(path) and not os.path.islink(path):
                    self.disk.remove_tree(path)
                else:
                    self.disk.discard(path)

    def pause(self, why: str) -> None:
        """Have nothing started any more until a person deletes `paused`."""
        with contextlib.suppress(FileExistsError):
            self.disk.publish(self.layout.at(layout.PAUSED), f"{why}\n".encode())

    # Telling users what is wrong with a file.

    def complain(self, path: str, text: str) -> None:
        """Write *text* to the `.error` file *path*, unless it says so already."""
        data = text.encode()
        if read_bytes(path) != data:
            self.disk.put(path, data)

    # Numbers that outlive the metadirs that `spool gc` removed.

    def last_removed_run(self, name: str) -> int:
        """Return the highest run of *name* that was removed, 0 if none was. `spool gc` may work while we live."""
        path = self.layout.at(layout.LAST_RUNS)
        try:
            status = os.stat(path)
        except OSError:
            return 0
        seen = (status.st_ino, status.st_mtime_ns)
        if seen != self._last_runs_seen:
            data = read_bytes(path, 1 << 28)
            try:
                self._last_runs = msgspec.json.decode(data, type=dict[str, int]) if data else {}
            except msgspec.DecodeError:
                self._last_runs = {}
            self._last_runs_seen = seen
        return self._last_runs.get(name, 0)
