"""Requests of users to a spool, without the lock: each does the same as the documented `mv` or `rm`.

Between the look and the move, the dispatcher may move the file. So every request looks, changes, and looks again if the
file was gone, until something was done or nothing is left to do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum

from msgspec import Struct

from spool.core import layout
from spool.core.errors import NoSuchJob, SpoolError, cannot
from spool.core.layout import DONE, HELD, LOCAL_EXECUTORS, QUEUED, RUNNING
from spool.core.model import State, Stop, StopKind
from spool.formats import run_records
from spool.formats.capabilities import engine_title, one_run_keys
from spool.store.disk import Disk, status_of
from spool.store.ownership import check_owner
from spool.store.reading import is_too_long, read_bytes
from spool.store.spool import Spool

_TRIES = 100  # a race may be lost once or twice; a hundred times means a bug


class ChangeKind(StrEnum):
    """The result of a request."""

    HELD = "held"
    STOPPED_AND_HELD = "is stopped and held"
    RELEASED = "released"
    QUEUED_AGAIN = "queued again"
    STOPPED_AND_QUEUED = "is stopped and queued again"
    CANCELLED = "cancelled"
    STOPPING = "is being stopped"
    SUSPENDED = "suspended"
    CONTINUED = "continued"


def _refusal(verb: str, name: str, why: str, *, remedy: str | None = None) -> SpoolError:
    return SpoolError(cannot(verb, f"job {name}", why, remedy=remedy))


def _check_for_another_run(name: str, text: bytes | None) -> None:
    """Raise SpoolError if that is a job file with a key that only one run can have."""
    for why in one_run_keys(text or b"").values():
        raise _refusal("requeue", name, why)


class Change(Struct, frozen=True):
    """A change of the job file in `place`. `beside` are the places of other files of that name.

    `dry_run`: it would be made, and nothing was changed.
    """

    kind: ChangeKind
    place: str
    beside: tuple[str, ...] = ()
    dry_run: bool = False

    def __str__(self) -> str:
        """Return what became of the job, or would."""
        return f"would be {self.kind.removeprefix('is ').removeprefix('being ')}" if self.dry_run else self.kind


def told(name: str, changes: Sequence[Change]) -> str:
    """Describe the change of a job; if it has several files, which ones changed and which did not."""
    words = [f"{name} ({change.place}/) {change}" if change.beside else f"{name} {change}" for change in changes]
    left = {place for change in changes for place in change.beside} - {change.place for change in changes}
    return "; ".join([*words, *(f"the one in {place}/ is unchanged" for place in layout.PLACES if place in left)])


class Requests:
    """The requests of one user."""

    def __init__(self, spool: Spool, user: str, disk: Disk | None = None) -> None:
        """Create the requests of *user*. Raises SpoolUnusable if the spool is another user's."""
        check_owner(spool.root)
        self._spool = spool
        self._layout = spool.layout
        self._disk = disk if disk is not None else Disk(spool.layout.at(layout.STAGING))
        self._user = user
        self._since_ns = time.time_ns()

    def hold(self, name: str, *, dry_run: bool = False) -> Change:
        """Hold a job: `mv queued/NAME.toml held/`; a running job is stopped first, `mv running/NAME.toml held/`."""
        # The running tasks of an array continue.
        running = ChangeKind.HELD if self._spool.newest_array(name) else ChangeKind.STOPPED_AND_HELD
        moves = {QUEUED: ChangeKind.HELD, RUNNING: running}
        return self._move("hold", name, moves, HELD, dry_run=dry_run)

    def release(self, name: str, *, dry_run: bool = False) -> Change:
        """Let a held job run: `mv held/NAME.toml queued/`. A suspended one continues, as by `go_on`."""
        if HELD not in self._spool.places(name) and self._spool.suspend_order(name) is not None:
            return self.go_on(name, dry_run=dry_run)
        return self._move("release", name, {HELD: ChangeKind.RELEASED}, QUEUED, dry_run=dry_run)

    def requeue(
        self, name: str, change: Callable[[str, bytes], bytes] | None = None, *, dry_run: bool = False
    ) -> Change:
        """Run a job again: `mv done/NAME.toml queued/`; a running job is stopped, `mv running/NAME.toml queued/`.

        *change*, given its name and its file's text, returns the text to run instead.
        """
        if RUNNING in self._spool.places(name) and self._spool.newest_array(name):
            failed = f"`spool requeue --failed '{name}_*'` runs the failed ones again"
            why = "the array has not ended"
            raise _refusal("requeue", name, why, remedy=f"{failed}; cancel it first to run all")
        moves = {RUNNING: ChangeKind.STOPPED_AND_QUEUED, DONE: ChangeKind.QUEUED_AGAIN}
        places = self._spool.places(name)
        source = next((place for place in moves if place in places), None)
        if change is None:
            _check_for_another_run(name, self._spool.job_text(source, name) if source else None)
            return self._move("requeue", name, moves, QUEUED, dry_run=dry_run)
        if source is None:
            raise self._not_there("requeue", name, places)
        self._check_text(name, source)
        new = change(name, self._spool.job_text(source, name) or b"")
        _check_for_another_run(name, new)
        if dry_run:
            return Change(moves[source], source, dry_run=True)
        return self._replace_and_move(name, source, moves[source], new)

    def _replace_and_move(self, name: str, source: str, kind: ChangeKind, new: bytes) -> Change:
        """Queue a job with the text *new* in place of its file in *source*. If interrupted, it leaves both files.

        Both files together mean a job that was submitted again and waits for the end of the running one.
        """
        try:
            self._disk.publish(self._layout.job_file(QUEUED, name), new, durable=True)
        except FileExistsError:
            raise self._in_the_way("requeue", name, QUEUED) from None
        if source == RUNNING:
            self._stop(name, "", StopKind.REQUEUE)
        else:
            self._disk.discard(self._layout.job_file(source, name))
        return Change(kind, source)

    def _in_the_way(self, verb: str, name: str, place: str) -> SpoolError:
        remedy = "cancel or rename that one first"
        return _refusal(verb, name, f"another job of that name is in {place}/", remedy=remedy)

    def cancel(self, name: str, reason: str = "", *, dry_run: bool = False) -> tuple[Change, ...]:
        """End a job: `mv queued/NAME.toml done/`, or `rm running/NAME.toml`; both if the name has both files.

        For a running job the user and the reason are recorded. Raises NoSuchJob, or SpoolError if it has ended, unless
        it was cancelled after these requests began: as what depends on the job before it in a list is.
        """
        found: dict[str, ChangeKind] = {}
        files: dict[str, int] = {}
        for _ in range(_TRIES):
            places = [place for place in self._spool.places(name) if place != DONE]
            if not places:
                if found:  # half way through the dispatcher's move, one file has two names
                    return _changes({at: found[at] for at in found if at == RUNNING or files[at] != files.get(RUNNING)})
                if self._is_cancelled_meanwhile(name):
                    return (Change(ChangeKind.CANCELLED, DONE),)
                raise self._not_there("cancel", name, self._spool.places(name))
            if dry_run:
                kinds = {place: ChangeKind.STOPPING if place == RUNNING else ChangeKind.CANCELLED for place in places}
                return _changes(kinds, dry_run=True)
            for place in places:
                status = status_of(self._layout.job_file(place, name))
                files[place] = 0 if status is None else status.st_ino
            for place in (QUEUED, HELD):
                if place in places and self._file_away(name, place):
                    found[place] = ChangeKind.CANCELLED
            if RUNNING in places and self._stop(name, reason):
                found[RUNNING] = ChangeKind.STOPPING
        raise _refusal("cancel", name, "someone else keeps moving it")

    def _is_cancelled_meanwhile(self, name: str) -> bool:
        result = self._spool.newest_result(name)
        return result is not None and result.outcome is State.CANCELLED and (result.ended_at_ns or 0) >= self._since_ns

    def withdraw(self, name: str) -> bool:
        """End a job only if it waits: `mv queued/NAME.toml done/`; return whether it did."""
        places = self._spool.places(name)
        return RUNNING not in places and any(self._file_away(name, at) for at in (QUEUED, HELD) if at in places)

    def suspend(self, name: str, reason: str = "", *, dry_run: bool = False) -> Change:
        """Suspend a run: `touch running/NAME.toml.suspended`. The file names the user and the reason.

        Raises SpoolError if it does not run here, is suspended already, or is an array.
        """
        run = self._running("suspend", name)
        grant = self._spool.grant(name, run)
        if grant is not None and grant.executor not in LOCAL_EXECUTORS:
            remedy = f"`spool hold {name}` stops it and holds it"
            raise _refusal("suspend", name, f"it runs in {engine_title(grant.executor)}", remedy=remedy)
        if self._spool.suspend_order(name) is not None:
            remedy = f"`spool continue {name}` resumes it"
            raise _refusal("suspend", name, "it is already suspended", remedy=remedy)
        if dry_run:
            return Change(ChangeKind.SUSPENDED, RUNNING, dry_run=True)
        said = f"{self._user}: {' '.join(reason.split())}" if reason else self._user
        with suppress(FileExistsError):  # another user was faster
            self._disk.publish(self._layout.suspend_file(name), f"{said}\n".encode(errors="replace"))
        if RUNNING not in self._spool.places(name) or self._spool.latest_run(name) != run:
            self._disk.discard(self._layout.suspend_file(name))  # it must not hit the next run
            raise _refusal("suspend", name, "it has ended meanwhile")
        return Change(ChangeKind.SUSPENDED, RUNNING)

    def go_on(self, name: str, *, dry_run: bool = False) -> Change:
        """Resume a suspended run: `rm running/NAME.toml.suspended`. Raises SpoolError if it is not."""
        if self._spool.suspend_order(name) is None:
            grant = self._spool.grant(name, self._running("continue", name))
            where = grant.executor if grant is not None and grant.executor not in LOCAL_EXECUTORS else None
            why = f"it runs in {engine_title(where)}, which alone suspends it" if where else "it is not suspended"
            raise _refusal("continue", name, why)
        if dry_run:
            return Change(ChangeKind.CONTINUED, RUNNING, dry_run=True)
        self._disk.discard(self._layout.suspend_file(name))
        return Change(ChangeKind.CONTINUED, RUNNING)

    def _running(self, verb: str, name: str) -> int:
        """Return the run of a running job. Raises SpoolError if it is not running, or is an array."""
        places, run = self._spool.places(name), self._spool.latest_run(name)
        if RUNNING not in places or run is None or self._spool.is_stopping(name):
            raise self._not_there(verb, name, [DONE] if RUNNING in places else places)
        if self._spool.newest_array(name):
            why = "it is an array, and none of its tasks is running"
            raise _refusal(verb, name, why, remedy=f"`spool hold {name}` keeps them from starting")
        return run

    def pause(self, reason: str = "") -> bool:
        """Stop starting jobs: `touch paused`. Return whether that is new."""
        try:
            self._disk.publish(self._layout.at(layout.PAUSED), f"{self._user} {reason}".strip().encode() + b"\n")
        except FileExistsError:
            return False
        return True

    def resume(self) -> bool:
        """Start jobs again: `rm paused`. Return whether the spool was paused."""
        return self._disk.discard(self._layout.at(layout.PAUSED))

    def replace(self, name: str, place: str, old: bytes, new: bytes) -> None:
        """Replace the file of a job that reads *old* by *new*: `mv .tmp/NAME.toml queued/`.

        Raises SpoolError, and changes nothing, if the file has changed or the job has started meanwhile.
        """
        path = self._layout.job_file(place, name)
        self._check_text(name, place)
        if is_too_long(old):  # it was not read completely
            raise _refusal("change", name, "its file is larger than 1 MiB")
        if read_bytes(path) != old:
            raise _refusal("change", name, "the file was changed or moved meanwhile")
        if place == RUNNING:
            self._exchange(name, path, old, new)
            return
        inode = os.lstat(path).st_ino
        self._disk.put(path, new, durable=True)
        # A dispatcher may have claimed the old file between the look and the move. The new file, which could not have
        # started beside it, would then be a second job.
        running = self._layout.job_file(RUNNING, name)
        if os.path.lexists(running) and os.lstat(running).st_ino == inode:
            self._disk.discard(path)
            raise _refusal("change", name, "it has started meanwhile")

    def _check_text(self, name: str, place: str) -> None:
        """Raise SpoolError if a job file does not count, because a text derived from it would."""
        if why := self._spool.why_no_order(place, name):
            raise _refusal("change", name, why)

    def _exchange(self, name: str, path: str, old: bytes, new: bytes) -> None:
        """Replace a file in `running/` by *new*; the file may be removed at any moment and must not come back."""
        staged = self._disk.staged(new, durable=True)
        try:
            if not self._disk.exchange(staged, path):
                remedy = f"change it in an editor: {path}"
                raise _refusal("change", name, "this file system cannot swap two files", remedy=remedy)
            if read_bytes(staged) != old:  # another user's newer text
                self._disk.exchange(staged, path)
                raise _refusal("change", name, "the file was changed meanwhile")
        except FileNotFoundError:
            raise _refusal("change", name, "it has ended meanwhile") from None
        finally:
            self._disk.discard(staged)

    def _move(self, verb: str, name: str, moves: dict[str, ChangeKind], into: str, *, dry_run: bool = False) -> Change:
        """Move the file of job *name* from the first of *moves* that has it. Never replaces a file."""
        target = self._layout.job_file(into, name)
        for _ in range(_TRIES):
            places = self._spool.places(name)
            source = next((place for place in moves if place in places), None)
            if source is None:
                raise self._not_there(verb, name, places)
            beside = tuple(place for place in places if place not in (source, DONE))
            if dry_run:
                if into in places:
                    raise self._in_the_way(verb, name, into)
                return Change(moves[source], source, beside, dry_run=True)
            try:
                self._disk.move(self._layout.job_file(source, name), target)
            except FileNotFoundError:
                continue
            except FileExistsError:
                if os.path.lexists(target):
                    raise self._in_the_way(verb, name, into) from None
                continue
            return Change(moves[source], source, beside)
        raise _refusal(verb, name, "someone else keeps moving it")

    def reserve(self, name: str, text: bytes) -> None:
        """Write `reservations/NAME.toml`. Raises SpoolError if there is one."""
        try:
            self._disk.publish(self._layout.job_file(layout.RESERVATIONS, name), text, durable=True)
        except FileExistsError:
            remedy = f"`spool reserve cancel {name}` first"
            why = "a reservation with this name exists"
            raise SpoolError(cannot("make", f"reservation {name}", why, remedy=remedy)) from None

    def cancel_reservation(self, name: str) -> str:
        """Put a reservation away, where `spool reserve list --all` finds it. Raises NoSuchJob if there is none."""
        path = self._layout.job_file(layout.RESERVATIONS, name)
        status = status_of(path) if layout.valid_name(name) else None
        if status is None or not self._put_away(path, self._layout.gone_reservation(name, status.st_mtime_ns)):
            why, remedy = "no reservation has this name", "`spool reserve list` lists them"
            raise NoSuchJob(cannot("cancel", f"reservation {name}", why, remedy=remedy))
        self._disk.discard(self._layout.error_file(layout.RESERVATIONS, name))
        return f"{name} cancelled"

    def _put_away(self, path: str, target: str) -> bool:
        """Move a file into a directory, created if necessary; False if the file is gone.

        If the file cannot be kept, on a full disk or without permission, it is removed all the same: it is not needed
        there.
        """
        with suppress(OSError):
            self._disk.ensure_twin(os.path.dirname(target), os.path.dirname(path))
            self._disk.rename(path, target)
            return True
        return self._disk.discard(path)

    def _file_away(self, name: str, place: str) -> bool:
        """Move a waiting job to `done/`, replacing an older record; False if it was gone."""
        try:
            self._disk.rename(self._layout.job_file(place, name), self._layout.job_file(DONE, name))
        except FileNotFoundError:
            return False
        return True

    def _stop(self, name: str, reason: str, kind: StopKind = StopKind.CANCEL) -> bool:
        """Record the user who stops the newest run, and remove its file from `running/`; False if that was gone."""
        # If it is being stopped already, it does not continue after that without its file. If nothing can be recorded
        # (the disk is full, the metadir is damaged), the deletion alone orders the stop, without user and reason.
        with suppress(OSError):
            run = self._spool.latest_run(name)
            if run is not None:
                stop = Stop(kind, self._user, time.time_ns(), reason)
                self._disk.publish(self._spool.own_record(name, run, layout.STOP), run_records.render_stop(stop))
        return self._disk.discard(self._layout.job_file(RUNNING, name))

    def _not_there(self, verb: str, name: str, places: list[str]) -> SpoolError:
        if not places and not self._spool.runs(name):
            return self._spool.no_such_job(verb, f"job {name}", name)
        words = {
            QUEUED: "it is waiting in queued/",
            HELD: "it is already held" if verb == "hold" else "it is held",
            RUNNING: "it is running",
            DONE: "it has ended",
        }
        remedy = {
            ("hold", DONE): f"`spool requeue {name}` runs it again",
            ("release", DONE): f"`spool requeue {name}` runs it again",
            ("requeue", HELD): f"`spool release {name}` releases it",
            ("suspend", QUEUED): f"`spool hold {name}` keeps it from starting",
            ("continue", HELD): f"`spool release {name}` releases it",
            ("suspend", DONE): f"`spool requeue {name}` runs it again",
        }
        place = places[0] if places else DONE
        if place == DONE and self._spool.is_stopping(name):
            return _refusal(verb, name, "it is being stopped", remedy=f"`spool wait {name}` returns when it has ended")
        return _refusal(verb, name, words[place], remedy=remedy.get((verb, place)))


def _changes(done: dict[str, ChangeKind], *, dry_run: bool = False) -> tuple[Change, ...]:
    """Return the change in each place, the run first."""
    places = [place for place in (RUNNING, QUEUED, HELD) if place in done]
    beside = {place: tuple(other for other in places if other != place) for place in places}
    return tuple(Change(done[place], place, beside[place], dry_run) for place in places)
