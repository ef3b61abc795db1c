"""Making, listing and cancelling reservations. Each is one file, and what happens here could be done by hand."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Sequence
from contextlib import suppress

from msgspec import Struct

from spool.core import layout
from spool.core.errors import InvalidValue, NoSuchJob, SpoolError, UsageError, cannot
from spool.core.model import Machine, Reservation
from spool.core.names import why_not_name
from spool.core.reservations import NOBODY, conflict, known_gpus
from spool.formats import reservation
from spool.formats.moments import understood
from spool.formats.values import moment_or_delay
from spool.machine.host import local_zone
from spool.query.reservations import ReservationState, ReservationStatus, read_reservations, removed_reservations
from spool.query.snapshot import machine_now
from spool.store.disk import Disk, status_of
from spool.store.ownership import check_owner
from spool.store.spool import Spool


class ReservationRequest(Struct, frozen=True):
    """What is asked for, in words. One of `user` and `project`; one of `duration` and `end`."""

    name: str
    gpus: str  # "2", or indices: "0,2"
    user: str | None = None
    project: str | None = None
    start: str = "now"
    duration: str | None = None
    end: str | None = None
    comment: str | None = None


class CreatedReservation(Struct, frozen=True):
    """A reservation that was made. `notes` are texts: what could not be checked, what looks like a mistake."""

    reservation: Reservation
    path: str
    notes: tuple[str, ...]


class ReservationList(Struct, frozen=True):
    """All reservations of a spool, and the indices of the GPUs that they are about."""

    rows: tuple[ReservationStatus, ...]
    gpus: tuple[int, ...]
    gpu_problem: str | None
    at_ns: int


def create(spool: Spool, request: ReservationRequest) -> CreatedReservation:
    """Write `reservations/NAME.toml`. Raises SpoolError, and writes nothing, if it cannot stand."""
    name, thing = request.name, f"reservation {request.name}"
    if not layout.valid_name(name):
        raise UsageError(cannot("make", thing, f"the name is not valid: {why_not_name(name)}"))
    now_ns = time.time_ns()
    keys = {
        "user": request.user,
        "project": request.project,
        "gpus": _gpus(request.gpus),
        "start": reservation.local_time(_instant(request.start, now_ns, "--start")),
        "duration": request.duration,
        "end": None if request.end is None else reservation.local_time(_instant(request.end, now_ns, "--end")),
        "comment": request.comment,
    }
    data = reservation.dump(keys)
    new = reservation.parse(data, name=name, created_at_ns=now_ns)
    if new.end_at_ns <= now_ns:
        raise SpoolError(cannot("make", thing, "it would already be over"))
    machine = machine_now(spool, now_ns)
    notes = []
    if machine.gpu_problem is not None:
        notes.append(f"cannot check how many GPUs there are: {machine.gpu_problem}")
    gpus = known_gpus(machine)
    files = read_reservations(spool, gpus, now_ns)
    notes += [
        f"whether it conflicts with {row.name} is unknown: {row.name} {row.problem}" for row in files.rows if row.unread
    ]
    why_not = conflict(new, files.standing, gpus, local_zone())
    if why_not is not None:
        raise SpoolError(cannot("make", thing, why_not, remedy="`spool reserve list` shows all reservations"))
    if new.user is not None and new.user != NOBODY and not _exists(new.user):
        notes.append(f"there is no user {new.user} on this machine")
    path = spool.layout.job_file(layout.RESERVATIONS, name)
    check_owner(spool.root)
    try:
        Disk(spool.layout.at(layout.STAGING)).publish(path, data, durable=True)
    except FileExistsError:
        remedy = f"`spool reserve cancel {name}` first"
        raise SpoolError(cannot("make", thing, "a reservation with this name exists", remedy=remedy)) from None
    return CreatedReservation(new, path, tuple(notes))


def _gpus(text: str) -> int | list[int]:
    """Return "2" as a number, "0,2" and "0," as indices."""
    words = [word.strip() for word in text.split(",")]
    numbers = [word for word in words if word]
    if not numbers or not all(word.isascii() and word.isdecimal() and len(word) < 9 for word in numbers):
        raise InvalidValue(f'cannot reserve GPUs {text!r}: write how many ("2") or which ("0,2"; a single one: "0,")')
    return int(numbers[0]) if len(words) == 1 else list(map(int, numbers))


def _instant(text: str, now_ns: int, option: str) -> int:
    """Return "now", "+2h", a moment in words or a date and time as an instant."""
    if text == "now":
        return now_ns
    try:
        moment, delay = moment_or_delay(understood(text, now_ns))
    except InvalidValue as error:
        raise InvalidValue(f"cannot use {option}: {error}") from None
    return moment if moment is not None else now_ns + (delay or 0)


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


def cancel(spool: Spool, name: str) -> str:
    """Put the file away, where `list` with everything finds it. Raises NoSuchJob if there is none."""
    check_owner(spool.root)
    disk = Disk(spool.layout.at(layout.STAGING))
    path = spool.layout.job_file(layout.RESERVATIONS, name)
    status = status_of(path) if layout.valid_name(name) else None
    if status is None or not _put_away(disk, path, spool.layout.gone_reservation(name, status.st_mtime_ns)):
        why, remedy = "no reservation has this name", "`spool reserve list` lists them"
        raise NoSuchJob(cannot("cancel", f"reservation {name}", why, remedy=remedy))
    disk.discard(spool.layout.error_file(layout.RESERVATIONS, name))
    return f"{name} cancelled"


def _put_away(disk: Disk, path: str, target: str) -> bool:
    """Move a file into a directory that is made if need be; False if it is gone.

    Where it cannot be kept, on a full disk or without permission, it goes all the same: nobody needs it there.
    """
    with suppress(OSError):
        disk.ensure_twin(os.path.dirname(target), os.path.dirname(path))
        disk.rename(path, target)
        return True
    return disk.discard(path)


def list_reservations(spool: Spool, *, everything: bool) -> ReservationList:
    """Return the reservations by their beginning; those that are over, or cancelled, only with *everything*."""
    now_ns = time.time_ns()
    machine = machine_now(spool, now_ns) if spool.names(layout.RESERVATIONS) else Machine(0, 0)
    rows = read_reservations(spool, known_gpus(machine), now_ns).rows
    shown = [one for one in rows if everything or not _is_over(one, now_ns)]
    shown += removed_reservations(spool) if everything else ()
    shown.sort(key=lambda one: (one.reservation.start_at_ns if one.reservation else 0, one.name))
    return ReservationList(tuple(shown), _indices(machine, shown), machine.gpu_problem, now_ns)


def _is_over(one: ReservationStatus, now_ns: int) -> bool:
    return one.state is ReservationState.COMPLETED or (
        one.reservation is not None and one.reservation.end_at_ns <= now_ns
    )


def _indices(machine: Machine, shown: Sequence[ReservationStatus]) -> tuple[int, ...]:
    kept = {index for one in shown if one.stands and one.reservation for index in one.reservation.gpu_indices}
    return tuple(sorted(kept | {gpu.index for gpu in machine.gpus}))
