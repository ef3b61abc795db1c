"""A spool as its one dispatcher changes it. Holding the lock is a type: only this class has methods that change it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec.json

from spool.core import layout
from spool.core.errors import InvalidRecord
from spool.formats import run_records
from spool.store.disk import (
    Disk,
    SpoolTrouble,
    disk_is_full,
    is_name_of,
    of_the_spool,
    open_directory,
    open_log,
    same_file,
    status_of,
)
from spool.store.lock import Lock
from spool.store.reading import read_bytes, read_record, read_with_status
from spool.store.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spool.core.model import Stop


_SPARE_BYTES = 4096  # a block
_EXECUTED = {layout.WRAPPER, layout.SCRIPT}
CUT_OFF_NS = 1_000_000_000  # a link and an unlink take some microseconds, and more on a busy machine

_STAGED = re.compile(  # staged by a process of that pid, or moved aside by `spool gc`
    rf"([1-9][0-9]*)\.(?:(?:[a-z]+|gc\.{layout.NAME_PATTERN})\.)?[0-9]+"
)


class Staged(NamedTuple):
    """A metadir that is not visible yet."""

    path: str
    blank: tuple[str, ...]  # records that exist, but are empty


class LockedSpool(Spool):
    """The spool of a live dispatcher. `lock` is held until the process ends."""

    def __init__(self, root: str, disk: Disk | None = None, *, wait_s: float = 1.0) -> None:
        super().__init__(root)
        self._lock: Lock | None = Lock(self.layout.at(layout.LOCK), wait_s)
        self.disk = disk if disk is not None else Disk(self.layout.at(layout.STAGING))
        self._last_runs: dict[str, int] = {}
        self._last_runs_seen: tuple[int, int] | None = None
        self._staged = 0
        self._pid = os.getpid()
        self._spares: list[str] = []  # files that reserve space
        self._identity: str | None = None
        self._accepted: Callable[[], Sequence[str]] | None = None
        self._modes: dict[str, int] = {}  # of the directories, when last seen
        self._place: str | None = None

    def accept(self, accept_from: Callable[[], Sequence[str]]) -> None:
        """Set the source of the accepted users: the configuration in force, not the one on disk."""
        self._accepted = accept_from

    def _accept_from(self) -> Sequence[str]:
        return self._accepted() if self._accepted is not None else super()._accept_from()

    def job_text(self, place: str, name: str) -> bytes | None:
        """Return the bytes of a job file that counts: text of other users never becomes a file of the owner's."""
        return self.order(place, name)

    def waiting_text(self, name: str, version: tuple[int, int, int, int]) -> bytes | None:
        """Return the text of a file in `queued/`, None if it is no longer that *version*: inode, time, size, owner."""
        found = read_with_status(self.layout.job_file(layout.QUEUED, name))
        if found is None:
            return None
        status, text = found
        seen = (status.st_ino, status.st_mtime_ns, len(text), status.st_uid)
        return text if seen == version else None

    def release(self) -> None:
        """Release the lock; the object must not be used afterwards."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def is_ours(self) -> bool:
        """Whether the lock is held: after `keep` has lost it, nothing may be changed any more."""
        return self._lock is not None and self._lock.held

    def keep(self, *, renew: bool = True) -> bool:
        """Keep the lock, and return whether `.lock` was recreated. Raises SpoolUnusable: the dispatcher must leave.

        Without *renew* a missing `.lock` stays missing.
        """
        return self._lock is not None and self._lock.keep(renew=renew)

    @property
    def lock_trouble(self) -> OSError | None:
        """Why `.lock` could not be recreated, None if nothing is wrong."""
        return self._lock.trouble if self._lock is not None else None

    def keep_directories(self) -> bool:
        """Recreate removed directories of the spool, with their modes; return whether there were any.

        Anything else with such a name stays: OSError names it, once all the others are created.
        """
        made, first = False, None
        for name in layout.DIRECTORIES:
            path = self.layout.at(name)
            try:
                made = self._keep_directory(path) or made
            except OSError as error:
                first = first or error
        if made:
            self._place = None
        if self._spares and not os.path.isdir(self.layout.at(layout.ROOM)):
            self._spares.clear()  # `keep_spares` makes new ones
        if first is not None:
            raise first
        return made

    def _keep_directory(self, path: str) -> bool:
        try:
            status = os.stat(path)
        except FileNotFoundError:
            if os.path.islink(path):
                raise NotADirectoryError(errno.ENOTDIR, "it is a link that leads nowhere", path) from None
        else:
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "it is not a directory", path)
            self._modes[path] = stat.S_IMODE(status.st_mode)
            return False
        self.disk.ensure_directory(path)
        if path in self._modes:
            os.chmod(path, self._modes[path])  # whatever the umask
        return True

    @property
    def place(self) -> str:
        """Where the runs that are started now begin. Raises OSError."""
        if self._place is None:
            self._place = super().place
        return self._place

    # Starting: each method is one step of the protocol in docs/FORMAT.md 5.

    def next_run(self, name: str) -> int:
        """Return the number of the next run of job *name*."""
        runs = self.runs(name)
        return (runs[-1] if runs else self.last_removed_run(name)) + 1

    def stage(self, files: dict[str, bytes], *, blank: tuple[str, ...] = ()) -> Staged:
        """Write the first records of a metadir in the staging directory; *blank* are empty until it is published."""
        self._staged += 1
        staged = Staged(f"{self.disk.staging}/{self._pid}.run.{self._staged}", blank)
        try:
            self.disk.mkdir(staged.path)
        except OSError as error:
            if disk_is_full(error):  # every other start would fail as well
                raise SpoolTrouble(error.errno, error.strerror, staged.path) from error
            raise
        try:
            self._fill(staged.path, files | dict.fromkeys(blank, b""))
        except OSError:
            self.unstage(staged.path)
            raise
        return staged

    def publish_metadir(self, name: str, run: int, files: dict[str, bytes], staged: Staged | None = None) -> None:
        """Step 1: make the metadir of a run visible, by one rename. *staged* holds the files given to `stage`."""
        if staged is None:
            staged = self.stage({})
        try:
            self._fill(staged.path, files, staged.blank)
            self.ensure_runs(name)
            self.disk.rename(staged.path, self.layout.metadir(name, run))
        except OSError:
            self.unstage(staged.path)
            raise

    def ensure_runs(self, name: str) -> None:
        """Create the directory for the runs of a job, if it is missing. Raises OSError if a link has its name."""
        if not self.disk.ensure_directory(self.layout.runs(name)):
            self.check_own_runs(name)

    def ensure_metadir(self, name: str, run: int) -> None:
        """Create the directory of a run, if it is missing. Raises OSError if a link has its name."""
        self.ensure_runs(name)
        if not self.disk.ensure_directory(self.layout.metadir(name, run)):
            self.check_own(name, run)

    def _fill(self, directory: str, files: dict[str, bytes], blank: tuple[str, ...] = ()) -> None:
        for record, data in files.items():
            path = f"{directory}/{record}"
            if record in blank:
                self.disk.fill(path, data)
            else:
                self.disk.create(path, data, 0o700 if record in _EXECUTED else 0o600)

    def unstage(self, path: str) -> None:
        """Remove a staged directory; the next dispatcher sweeps the rest."""
        with contextlib.suppress(OSError):
            self.disk.remove_tree(path)

    def is_between(self, name: str) -> bool:
        """Whether the file in `queued/` is in `held/` as well: a hold or release is under way.

        If that was interrupted, at least a second ago, complete the hold.
        """
        queued = self.layout.job_file(layout.QUEUED, name)
        if not same_file(self.layout.job_file(layout.HELD, name), queued):
            return False
        with contextlib.suppress(FileNotFoundError):
            if time.time_ns() - os.lstat(queued).st_ctime_ns > CUT_OFF_NS:
                self.disk.drop(queued, self.layout.job_file(layout.HELD, name))
        return True

    def claim(self, name: str, inode: int, mtime_ns: int, size: int, uid: int | None = None) -> bool:
        """Step 2: move the job file to `running/`. That commits the start.

        False if the file is no longer the one that was parsed, or `running/` has a file of that name; then nothing has
        changed. A file that is deleted from `running/` at that moment counts as claimed: the deletion cancels the run.
        """
        queued, running = self.layout.job_file(layout.QUEUED, name), self.layout.job_file(layout.RUNNING, name)
        try:
            self.disk.move(queued, running)
        except FileExistsError:
            _present(running)
            return False
        except FileNotFoundError:
            return _absent(queued, running)
        status = status_of(running)
        if status is None:
            return not self.holds(inode, name, layout.QUEUED, layout.HELD, layout.DONE, mtime_ns=mtime_ns)
        changed = (status.st_ino, status.st_mtime_ns, status.st_size) != (inode, mtime_ns, size)
        changed = changed or uid not in (None, status.st_uid)  # its author could forge the inode and the time
        # With two names, one is about to be removed, and it is unknown which.
        if changed or (status.st_nlink > 1 and is_name_of(status, self.layout.job_file(layout.HELD, name))):
            # Put it back; into held/ if another file has just taken its place in queued/.
            for place in (layout.QUEUED, layout.HELD):
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    self.disk.move(running, self.layout.job_file(place, name))
                    break
            return False
        return True

    def take_jid(self, name: str, run: int) -> bool:
        """Settle a run whose wrapper has not reported: take its `jid`. True: it never started and never will.

        If its metadir was removed, no wrapper can create a `jid` either. If another record shows that the run has
        begun, its `jid` was removed, and is not taken.
        """
        if self.has_begun(name, run):
            return False
        try:
            # By a link, so that it is never partial: a partial one is a wrapper's.
            self.disk.publish(self.own_record(name, run, layout.JID), run_records.VOID_JID)
        except FileExistsError:
            _present(self.layout.record(name, run, layout.JID))
            return False
        except FileNotFoundError:
            return True
        return True

    # Stopping and ending.

    def order_stop(self, name: str, run: int, stop: Stop) -> bool:
        """Record the order to stop a run; False if there is one already."""
        path, data = self.own_record(name, run, layout.STOP), run_records.render_stop(stop)
        try:
            self.disk.publish(path, data)
        except FileExistsError:
            _present(path)
            return False
        except FileNotFoundError:  # the metadir was removed: the run is stopped without a record
            return True
        except OSError as error:
            if not disk_is_full(error) or not self._spares or len(data) > _SPARE_BYTES:
                raise
            # It needs a free name in a directory that has one, and blocks that were reserved for this.
            self.disk.overwrite(self._spares[-1], data)
            try:
                self.disk.link(self._spares[-1], path)
            except FileExistsError:
                return False
            spare = self._spares.pop()  # first: from now on it is the run's
            with contextlib.suppress(OSError):  # `keep_spares` notices its two names
                self.disk.unlink(spare)
        return True

    def keep_spares(self, number: int) -> None:
        """Reserve space for the stops of *number* runs, so that they can be recorded on a full disk.

        Raises OSError if there is no space.
        """
        if len(self._spares) < number:
            self.disk.ensure_directory(self.layout.at(layout.ROOM))
        while len(self._spares) < number:
            path = f"{self.layout.at(layout.ROOM)}/{len(self._spares)}"
            if not _is_spare(path):
                self.disk.discard(path)  # only the name: the file may be the stop of a run
                self.disk.create(path, b"\n" * _SPARE_BYTES)
            self._spares.append(path)

    def put_record(self, name: str, run: int, record: str, data: bytes) -> None:
        """Write one record of a run atomically, in a new metadir if the old one was removed."""
        path = self.own_record(name, run, record)
        try:
            self.disk.put(path, data)
        except FileNotFoundError:
            self.ensure_metadir(name, run)
            self.disk.put(path, data)

    def put_note(self, name: str, run: int, record: str, data: bytes) -> None:
        """Write a record that nothing depends on; skipped if the metadir was removed."""
        with contextlib.suppress(FileNotFoundError):
            self.disk.put(self.own_record(name, run, record), data)

    def add_to_record(self, name: str, run: int, record: str, data: bytes) -> None:
        """Append to a record of a run."""
        fd = open_log(self.own_record(name, run, record))
        try:
            self.disk.append(fd, data)
        finally:
            os.close(fd)

    def notes(self) -> list[tuple[str, int, str]]:
        """Remove the notes of wrappers and return them: a job, its run, and a record that it has.

        They are hints, and any of them may be missing or false.
        """
        folder, found = self.layout.at(layout.NOTES), []
        try:
            at = open_directory(folder)
        except FileNotFoundError:
            self.disk.mkdir(folder)
            at = open_directory(folder)
        try:
            os.fchmod(at, 0o700)  # a network file system looks at a directory again after a change from here
            for filename in os.listdir(at):
                name, run, record = (*filename.rsplit(".", 2), "", "")[:3]
                if layout.valid_name(name) and run.isascii() and run.isdecimal() and len(run) < 10:
                    found.append((name, int(run), record))
                if not filename.startswith("."):  # as network file systems name what is removed and still open
                    with contextlib.suppress(OSError):  # such as of a directory
                        self.disk.discard(filename, at)
        finally:
            os.close(at)
        return found

    def archive(self, name: str, place: str, text: bytes | None) -> None:
        """Move the file of an ended job from *place* to `done/`, replacing an older record.

        If the file is gone (its deletion cancelled the job) the record is made from *text*.
        """
        if not self.archive_file(name, place) and text is not None:
            self.disk.put(self.layout.job_file(layout.DONE, name), text)

    def archive_file(self, name: str, place: str) -> bool:
        """Move a file from *place* to `done/`; False if it is missing or not a file."""
        file, done = self.layout.job_file(place, name), self.layout.job_file(layout.DONE, name)
        status = status_of(file)
        if status is None or not stat.S_ISREG(status.st_mode):
            return False
        try:
            if self.disk.rename_new(file, done):
                return True
        except FileExistsError:
            pass
        except FileNotFoundError:
            return _absent(file, done)
        try:
            self.disk.rename(file, done)
        except FileNotFoundError:
            return _absent(file, done)
        except IsADirectoryError:
            if not os.path.isdir(done):
                raise
            # A directory has its name in done/. The job would run again if its file stayed, so it gets another name.
            self.disk.rename(file, f"{done}.{time.time_ns()}")
        else:
            # If both are names of one file (`ln done/x.toml queued/x.toml`), rename(2) removes neither.
            self.disk.drop(file, done)
        return True

    def requeue_file(self, name: str, place: str) -> bool:
        """Move a job file from `running/` to *place* without replacing a newer one of that name.

        Anything but a regular file (a directory, a link, a FIFO) is ignored and stays.
        """
        running, back = self.layout.job_file(layout.RUNNING, name), self.layout.job_file(place, name)
        try:
            if not stat.S_ISREG(os.lstat(running).st_mode):
                return False
            self.disk.move(running, back)
        except FileExistsError:
            _present(back)
            return self.disk.drop(running, back)  # a move that was interrupted half way
        except FileNotFoundError:
            return _absent(running, back)
        return True

    def claim_again(self, name: str, place: str) -> None:
        """Repeat the claim of a job file in *place*, after a power cut undid it."""
        file, running = self.layout.job_file(place, name), self.layout.job_file(layout.RUNNING, name)
        try:
            self.disk.move(file, running)
        except FileNotFoundError:
            _absent(file, running)
        except FileExistsError:
            return

    def complete_move(self, name: str) -> None:
        """Complete a move of a job between `queued/` and `running/` that was interrupted half way.

        The file has both names then. It counts as running, and the evidence of its newest run decides the rest.
        """
        self.disk.drop(self.layout.job_file(layout.QUEUED, name), self.layout.job_file(layout.RUNNING, name))

    def sweep_staging(self) -> None:
        """Remove leftovers of dead processes from the staging directory; the rest waits for the next dispatcher."""
        staging = open_directory(self.disk.staging)
        try:
            for entry in os.listdir(staging):
                match = _STAGED.fullmatch(entry)
                if match is not None and (int(match[1]) == os.getpid() or not os.path.exists(f"/proc/{match[1]}")):
                    for _ in self.disk.removing(entry, staging):
                        pass
        finally:
            os.close(staging)

    def pause(self, why: str) -> None:
        """Pause all starts until a user deletes `paused`."""
        with contextlib.suppress(FileExistsError):
            self.disk.publish(self.layout.at(layout.PAUSED), f"{why}\n".encode())

    def order_halt(self, order: Stop) -> None:
        """Order the cancellation of all waiting and running jobs, also by the next dispatcher."""
        with contextlib.suppress(FileExistsError):
            self.disk.publish(self.layout.at(layout.HALT), run_records.render_stop(order), durable=True)

    def halt(self) -> Stop | None:
        """Return the order to cancel everything, with reason and time; None without one."""
        data = read_record(self.layout.at(layout.HALT))
        with contextlib.suppress(InvalidRecord):
            return run_records.parse_stop(data) if data else None
        return None

    # Engines.

    def identity(self) -> str:
        """Return the identity of this spool, by which engines know its jobs; created on first use."""
        if self._identity is None:
            path = self.layout.at(layout.IDENTITY)
            text = (read_record(path) or b"").decode("ascii", "replace").strip()
            if re.fullmatch(r"[0-9a-f]{16}", text) is None:  # none yet, or emptied by a power cut
                text = os.urandom(8).hex()
                self.disk.put(path, f"{text}\n".encode(), durable=True)
            self._identity = text
        return self._identity

    # Reports to users about files.

    def hold_because(self, name: str, why: str, place: str = layout.QUEUED) -> bool:
        """Move a job from *place* to `held/` with a reason; False if another job of its name is there."""
        path, target = self.layout.reason_file(name), self.layout.job_file(layout.HELD, name)
        if status_of(target) is not None:
            return False
        # In this order a crash leaves a reason without a job, which the next scan removes.
        self.disk.put(path, f"{why}\n".encode())
        try:
            self.disk.move(self.layout.job_file(place, name), target)
        except FileExistsError:
            self.disk.discard(path)
            return False
        except FileNotFoundError:  # moved or deleted meanwhile
            self.disk.discard(path)
        return True

    def keep_reservation(self, name: str, created_at_ns: int, text: bytes) -> None:
        """Keep the text of a reservation whose file was removed, unless that was done at its removal."""
        self.disk.ensure_twin(self.layout.at(layout.GONE_RESERVATIONS), self.layout.at(layout.RESERVATIONS))
        with contextlib.suppress(FileExistsError):
            self.disk.publish(self.layout.gone_reservation(name, created_at_ns), text)

    def complain(self, path: str, text: str, *, to_others: bool = False) -> None:
        """Write *text* to the `.error` file *path*, unless it has that already. *to_others*: all users may read it."""
        data = text.encode()
        if read_bytes(path) != data:
            self.disk.put(path, data, mode=0o644 if to_others else 0o600)

    # Run numbers that outlive the metadirs that `spool gc` removed.

    def last_removed_run(self, name: str) -> int:
        """Return the highest removed run of *name*, 0 if there is none. `spool gc` may work at the same time."""
        path = self.layout.at(layout.LAST_RUNS)
        status = status_of(path)
        if status is None:
            return 0
        seen = (status.st_ino, status.st_mtime_ns)
        if seen != self._last_runs_seen:
            with of_the_spool(path):  # without it a number could be used twice
                data = read_record(path, 1 << 28)
            try:
                self._last_runs = msgspec.json.decode(data, type=dict[str, int]) if data else {}
            except msgspec.DecodeError:
                self._last_runs = {}
            self._last_runs_seen = seen
        return self._last_runs.get(name, 0)


def _is_spare(path: str) -> bool:
    """Whether *path* is a complete spare file of an earlier dispatcher, with no other name."""
    status = status_of(path)
    if status is None or not stat.S_ISREG(status.st_mode):
        return False
    return status.st_nlink == 1 and status.st_size == _SPARE_BYTES


def _present(path: str) -> None:
    """Raise OSError if *path*, which is reported to exist, does not."""
    if status_of(path) is None:
        raise OSError(errno.ESTALE, "it does not exist and cannot be created", path)


def _absent(path: str, target: str) -> bool:
    """Return False if *path* does not exist; raise OSError if it does and cannot be moved to *target*."""
    if status_of(path) is not None:
        folder = os.path.dirname(target)
        if not os.path.isdir(folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
        raise OSError(errno.ESTALE, "it exists but cannot be found", path)
    return False
