"""The reservations of a spool as its files say them, and what is wrong with those that cannot stand."""

from __future__ import annotations

import os
import time

from spool.core import layout
from spool.core.errors import InvalidReservation, Problem
from spool.core.model import Reservation
from spool.core.reservations import conflict
from spool.dispatcher.look import RECHECK_MAX_NS, RECHECK_NS
from spool.formats import reservation
from spool.store.locked import LockedSpool
from spool.store.whole import NotWhole, read_whole


class Bookings:
    """`reservations/*.toml`, read again when the directory says that something changed, or a file was being written."""

    def __init__(self, spool: LockedSpool) -> None:
        self._spool = spool
        self._files: dict[str, tuple[tuple[int, int, int], Reservation | None]] = {}
        self._standing: tuple[Reservation, ...] = ()
        self._gpus: frozenset[int] | None = None
        self._recheck: tuple[int, int] | None = None  # when, after how long

    @property
    def standing(self) -> tuple[Reservation, ...]:
        """Return the reservations that hold or will hold, earliest written first."""
        return self._standing

    def next_due_ns(self) -> int | None:
        """Return when to look again at what was being written, on the monotonic clock."""
        return self._recheck[0] if self._recheck is not None else None

    def look(self) -> bool:
        """Read what changed; return whether the reservations are others than before."""
        before = self._standing
        _, last = self._recheck or (0, 0)
        self._recheck = None
        found: dict[str, tuple[tuple[int, int, int], Reservation | None]] = {}
        try:
            names = self._spool.names(layout.RESERVATIONS)
        except OSError:  # those that stood before still do
            return False
        for name in names:
            seen = read_whole(self._spool.layout.job_file(layout.RESERVATIONS, name))
            if isinstance(seen, NotWhole):
                if seen is NotWhole.WRITING:
                    wait = min(max(RECHECK_NS, 2 * last), RECHECK_MAX_NS)
                    self._recheck = (time.monotonic_ns() + wait, wait)
                    if name in self._files:
                        found[name] = self._files[name]
                continue
            identity = (seen.inode, seen.mtime_ns, seen.size)
            known = self._files.get(name)
            if known is not None and known[0] == identity:
                found[name] = known
                continue
            try:
                found[name] = (identity, reservation.parse(seen.data, name=name, created_at_ns=seen.mtime_ns))
                self._mend(name)
            except InvalidReservation as error:
                found[name] = (identity, None)
                self._complain(name, list(error.problems))
        for name in self._files.keys() - found.keys():
            self._mend(name)
        self._files = found
        self._settle()
        return self._standing != before

    def machine_has(self, gpus: frozenset[int]) -> None:
        """Say which GPUs there are, by index, without which nobody knows what conflicts."""
        if gpus != self._gpus:
            self._gpus = gpus
            self._settle()

    def _settle(self) -> None:
        """Let reservations stand in the order in which they were written; one that conflicts with those does not."""
        now = time.time_ns()
        standing: list[Reservation] = []
        read = [found for _, found in self._files.values() if found is not None]
        for one in sorted(read, key=lambda found: (found.created_at_ns, found.name)):
            why = None
            if self._gpus is not None and one.end_at_ns > now:
                why = conflict(one, standing, self._gpus)
            if why is None:
                standing.append(one)
                self._mend(one.name)
            else:
                self._complain(one.name, [Problem(None, None, why)])
        self._standing = tuple(standing)

    def _complain(self, name: str, problems: list[Problem]) -> None:
        told = "".join(f"- {problem.message}\n" for problem in problems)
        text = f"The reservation {name} does not stand:\n{told}This file goes when that is mended or removed.\n"
        self._spool.complain(self._spool.layout.error_file(layout.RESERVATIONS, name), text)

    def _mend(self, name: str) -> None:
        path = self._spool.layout.error_file(layout.RESERVATIONS, name)
        if os.path.lexists(path):
            self._spool.disk.discard(path)
