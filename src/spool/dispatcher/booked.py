"""The reservations of a spool as anybody may see them, each with its state and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from enum import StrEnum

from spool.core import layout
from spool.core.errors import InvalidReservation
from spool.core.model import Machine, Reservation
from spool.core.reservations import conflict, is_active
from spool.formats import reservation
from spool.store.spool import Spool
from spool.store.whole import NotWhole, read_whole

MANY = 1 << 20
"""As the number of GPUs where that is not known: then only what is kept by index can be seen to conflict."""


class BookingState(StrEnum):
    """What a reservation is doing, by the clock."""

    PENDING = "pending"
    ACTIVE = "active"
    COMPLETED = "completed"
    INVALID = "invalid"  # its file is not valid, or it conflicts with one that was written before: no effect


@dataclass(frozen=True, slots=True)
class Booked:
    """One file of `reservations/`. `problem` is why it has no effect."""

    name: str
    state: BookingState
    reservation: Reservation | None = None
    problem: str = ""

    @property
    def stands(self) -> bool:
        """Whether it has, had or will have an effect."""
        return self.state is not BookingState.INVALID


def booked(spool: Spool, machine: Machine, now_ns: int) -> list[Booked]:
    """Return every reservation, in the order in which the files were written, which is their rank."""
    read: list[Reservation] = []
    found: list[Booked] = []
    for name in spool.names(layout.RESERVATIONS):
        seen = read_whole(spool.layout.job_file(layout.RESERVATIONS, name))
        if isinstance(seen, NotWhole):
            if seen is not NotWhole.GONE:
                found.append(Booked(name, BookingState.INVALID, problem=f"its file is {seen.value}"))
            continue
        try:
            read.append(reservation.parse(seen.data, name=name, created_at_ns=seen.mtime_ns))
        except InvalidReservation as error:
            why = "; ".join(problem.message for problem in error.problems)
            found.append(Booked(name, BookingState.INVALID, problem=why))
    standing: list[Reservation] = []
    for one in sorted(read, key=lambda each: (each.created_at_ns, each.name)):
        why_not = None
        if machine.gpus and one.end_at_ns > now_ns:
            why_not = conflict(one, standing, len(machine.gpus), local_zone())
        if why_not is None:
            standing.append(one)
            found.append(Booked(one.name, state_at(one, now_ns), one))
        else:
            found.append(Booked(one.name, BookingState.INVALID, one, why_not))
    return found


def state_at(one: Reservation, now_ns: int) -> BookingState:
    """Return what a reservation that stands is doing at that instant."""
    if is_active(one, now_ns):
        return BookingState.ACTIVE
    return BookingState.PENDING if now_ns < one.start_at_ns else BookingState.COMPLETED


def local_zone() -> tzinfo:
    """Return the zone in which instants are told to people."""
    return datetime.now().astimezone().tzinfo or UTC
