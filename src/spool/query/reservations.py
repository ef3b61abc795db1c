"""The reservations of a spool, each with its state and what is wrong with it, and what is wrong with a new one."""

from __future__ import annotations

import os
import pwd
from collections.abc import Collection, Sequence
from enum import StrEnum

from msgspec import Struct

from spool.core import layout
from spool.core.errors import InvalidReservation, SpoolError, cannot
from spool.core.model import Machine, Reservation
from spool.core.reservations import NOBODY, conflict, is_active, known_gpus, settle
from spool.formats import reservation
from spool.query.rows import in_words
from spool.store.disk import remedy_for
from spool.store.edited import ReadFailure, read_stable
from spool.store.spool import Spool


class ReservationState(StrEnum):
    """The state of a reservation at a point in time."""

    PENDING = "pending"
    ACTIVE = "active"
    COMPLETED = "completed"
    CANCELLED = "cancelled"  # its file was removed before its end
    INVALID = "invalid"  # its file is invalid, or it conflicts with an earlier one: no effect


class ReservationStatus(Struct, frozen=True):
    """One present or former file of `reservations/`. `problem` is why it has no effect."""

    name: str
    state: ReservationState
    reservation: Reservation | None = None
    problem: str = ""
    unread: bool = False  # its content is unknown
    removed_at_ns: int | None = None  # None: its file is there

    @property
    def stands(self) -> bool:
        """Whether it has, had or will have an effect."""
        return self.state not in (ReservationState.INVALID, ReservationState.CANCELLED)


class ReservationFiles(Struct, frozen=True):
    """All files of `reservations/`, and the valid reservations, in the order of writing."""

    rows: tuple[ReservationStatus, ...]
    standing: tuple[Reservation, ...]


class ReservationList(Struct, frozen=True):
    """All reservations of a spool, and the indices of the GPUs that they are about."""

    rows: tuple[ReservationStatus, ...]
    gpus: tuple[int, ...]
    gpu_problem: str | None
    at_ns: int


def read_reservations(spool: Spool, gpus: Collection[int] | None, now_ns: int) -> ReservationFiles:
    """Return every reservation; *gpus* are the indices of the existing GPUs, None if unknown."""
    read: list[Reservation] = []
    rows: list[ReservationStatus] = []
    for name in spool.names(layout.RESERVATIONS):
        path = spool.layout.job_file(layout.RESERVATIONS, name)
        try:
            seen = read_stable(path)
        except OSError as error:
            spool.note(error, path)
            why = f"cannot be read: {error.strerror or error}; {remedy_for(error)}"
            rows.append(ReservationStatus(name, ReservationState.INVALID, problem=why, unread=True))
            continue
        if isinstance(seen, ReadFailure):
            if seen is not ReadFailure.GONE:
                rows.append(ReservationStatus(name, ReservationState.INVALID, problem=f"its file is {seen.value}"))
            continue
        if why := spool.ownership.why_not(seen.origin, layout.RESERVATIONS, layout.file_of(name)):
            rows.append(ReservationStatus(name, ReservationState.INVALID, problem=why))
            continue
        try:
            read.append(reservation.parse(seen.data, name=name, created_at_ns=seen.mtime_ns))
        except InvalidReservation as error:
            why = "; ".join(problem.message for problem in error.problems)
            rows.append(ReservationStatus(name, ReservationState.INVALID, problem=why))
    settled = settle(read, gpus)
    rows += [ReservationStatus(one.name, state_at(one, now_ns), one) for one in settled.standing]
    refused = settled.refused
    rows += [
        ReservationStatus(one.name, ReservationState.INVALID, one, in_words(refused[one.name], now_ns))
        for one in read
        if one.name in refused
    ]
    return ReservationFiles(tuple(rows), settled.standing)


def removed_reservations(spool: Spool) -> tuple[ReservationStatus, ...]:
    """Return the reservations whose files were removed, before their end or later."""
    rows: list[ReservationStatus] = []
    directory = spool.layout.at(layout.GONE_RESERVATIONS)
    try:
        listed = sorted(os.listdir(directory))
    except FileNotFoundError:
        return ()
    for filename in listed:
        known = layout.gone_reservation_of(filename)
        seen = read_stable(f"{directory}/{filename}") if known is not None else ReadFailure.NOT_OURS
        if known is None or isinstance(seen, ReadFailure):
            continue
        name, created_at_ns = known
        try:
            one = reservation.parse(seen.data, name=name, created_at_ns=created_at_ns)
        except InvalidReservation:
            continue  # it had no effect while its file existed
        over = one.end_at_ns <= seen.ctime_ns
        state = ReservationState.COMPLETED if over else ReservationState.CANCELLED
        rows.append(ReservationStatus(name, state, one, removed_at_ns=seen.ctime_ns))
    return tuple(rows)


def state_at(one: Reservation, now_ns: int) -> ReservationState:
    """Return the state of a valid reservation at that instant."""
    if is_active(one, now_ns):
        return ReservationState.ACTIVE
    return ReservationState.PENDING if now_ns < one.start_at_ns else ReservationState.COMPLETED


def list_reservations(spool: Spool, machine: Machine, now_ns: int, *, everything: bool) -> ReservationList:
    """Return the reservations by their beginning; those that are over, or cancelled, only with *everything*."""
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


def check_new(spool: Spool, machine: Machine, new: Reservation, now_ns: int) -> tuple[str, ...]:
    """Return notes on a reservation that could be made: what could not be checked, what looks like a mistake.

    Raises SpoolError if it cannot stand.
    """
    notes = []
    if machine.gpu_problem is not None:
        notes.append(f"cannot check how many GPUs there are: {machine.gpu_problem}")
    gpus = known_gpus(machine)
    files = read_reservations(spool, gpus, now_ns)
    notes += [
        f"whether it conflicts with {row.name} is unknown: {row.name} {row.problem}" for row in files.rows if row.unread
    ]
    why_not = conflict(new, files.standing, gpus)
    if why_not is not None:
        remedy = "`spool reserve list` shows all reservations"
        raise SpoolError(cannot("make", f"reservation {new.name}", in_words(why_not, now_ns), remedy=remedy))
    if new.user is not None and new.user != NOBODY and not _exists(new.user):
        notes.append(f"there is no user {new.user} on this machine")
    return tuple(notes)


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True
