"""The reservations of a spool, each with its state and what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Collection
from enum import StrEnum

from msgspec import Struct

from spool.core import layout
from spool.core.errors import InvalidReservation
from spool.core.model import Reservation
from spool.core.reservations import is_active, settle
from spool.formats import reservation
from spool.machine.host import local_zone
from spool.store.disk import remedy_for
from spool.store.spool import Spool
from spool.store.stable_read import ReadFailure, read_stable


class ReservationState(StrEnum):
    """What a reservation is doing, by the clock."""

    PENDING = "pending"
    ACTIVE = "active"
    COMPLETED = "completed"
    CANCELLED = "cancelled"  # its file was removed before its end
    INVALID = "invalid"  # its file is not valid, or it conflicts with one that was written before: no effect


class ReservationStatus(Struct, frozen=True):
    """One file of `reservations/`, or one that was. `problem` is why it has no effect."""

    name: str
    state: ReservationState
    reservation: Reservation | None = None
    problem: str = ""
    unread: bool = False  # nobody can tell what it says
    removed_at_ns: int | None = None  # None: its file is there

    @property
    def stands(self) -> bool:
        """Whether it has, had or will have an effect."""
        return self.state not in (ReservationState.INVALID, ReservationState.CANCELLED)


class ReservationFiles(Struct, frozen=True):
    """All files of `reservations/`, and the reservations that stand, those that were written first in front."""

    rows: tuple[ReservationStatus, ...]
    standing: tuple[Reservation, ...]


def read_reservations(spool: Spool, gpus: Collection[int] | None, now_ns: int) -> ReservationFiles:
    """Return every reservation; *gpus* are the indices of the GPUs that there are, None if nobody knows."""
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
    settled = settle(read, gpus, local_zone())
    rows += [ReservationStatus(one.name, state_at(one, now_ns), one) for one in settled.standing]
    refused = settled.refused
    rows += [
        ReservationStatus(one.name, ReservationState.INVALID, one, refused[one.name])
        for one in read
        if one.name in refused
    ]
    return ReservationFiles(tuple(rows), settled.standing)


def removed_reservations(spool: Spool) -> tuple[ReservationStatus, ...]:
    """Return the reservations whose files were removed: before their end, or later."""
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
            continue  # it had no effect while its file was there
        over = one.end_at_ns <= seen.ctime_ns
        state = ReservationState.COMPLETED if over else ReservationState.CANCELLED
        rows.append(ReservationStatus(name, state, one, removed_at_ns=seen.ctime_ns))
    return tuple(rows)


def state_at(one: Reservation, now_ns: int) -> ReservationState:
    """Return what a reservation that stands is doing at that instant."""
    if is_active(one, now_ns):
        return ReservationState.ACTIVE
    return ReservationState.PENDING if now_ns < one.start_at_ns else ReservationState.COMPLETED
