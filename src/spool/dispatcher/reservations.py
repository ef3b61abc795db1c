"""The reservations in the files of a spool, and the problems of the invalid ones."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Collection

from spool.core import layout
from spool.core.errors import InvalidReservation
from spool.core.model import Problem, Reservation
from spool.core.reservations import settle
from spool.dispatcher.confinement import Thing
from spool.dispatcher.context import Component, Context
from spool.dispatcher.scanner import RECHECK_MAX_NS, RECHECK_NS
from spool.formats import reservation
from spool.store.disk import status_of
from spool.store.stable_read import FileText, ReadFailure, read_stable

_TELL = "report what is wrong with"
_KEEP = "save the text of"
_REMOVED_NS = 1_000_000_000  # an editor that saves removes the file for a moment


class Reservations(Component):
    """`reservations/*.toml`, read again when the directory has changed, or a file was being written."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._timer = context.timers.timer("files")  # when to read a file again that was being written
        self._pause_ns = 0  # the pause before that
        self.untold: dict[str, str | None] = {}  # `.error` files that could not be written; None: or removed
        self.files: dict[str, tuple[tuple[int, int, int], Reservation | None]] = {}
        self.standing: tuple[Reservation, ...] = ()  # the valid ones, now or in future, in the order of writing
        self._gpus: frozenset[int] | None = None
        self._removed: dict[str, tuple[int, Reservation]] = {}  # when noticed, monotonic, and its value

    @property
    def due(self) -> bool:
        """Whether a file that was being written must be read again."""
        return self._timer.at_ns is not None and time.monotonic_ns() >= self._timer.at_ns

    def tell_again(self) -> None:
        """Retry the `.error` files that could not be written."""
        for name, text in list(self.untold.items()):
            if not self._confinement.pauses(Thing("reservation", name), _TELL):
                self._tell(name, text)

    def look(self) -> bool:
        """Read the changes; return whether the reservations have changed."""
        before = self.standing
        last, self._pause_ns = self._pause_ns, 0
        self._timer.set(None)
        found: dict[str, tuple[tuple[int, int, int], Reservation | None]] = {}
        names: list[str] | None = None
        with self._confinement.service("list", f"{layout.RESERVATIONS}/"):
            names = self._spool.names(layout.RESERVATIONS)
        if names is None:  # keep the valid ones as they were
            return False
        for name in names:
            seen: FileText | ReadFailure = ReadFailure.UNREADABLE
            with self._confinement.of(Thing("reservation", name), "read") as piece:
                seen = read_stable(self._spool.layout.job_file(layout.RESERVATIONS, name))
                if seen is ReadFailure.UNREADABLE:
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), f"{layout.RESERVATIONS}/{name}.toml")
            if piece.failed and name in self.files:  # keep it as it was
                found[name] = self.files[name]
            if isinstance(seen, ReadFailure):
                if seen is ReadFailure.WRITING:
                    self._pause_ns = min(max(RECHECK_NS, 2 * last), RECHECK_MAX_NS)
                    self._timer.set(time.monotonic_ns() + self._pause_ns)
                    if name in self.files:
                        found[name] = self.files[name]
                continue
            identity = (seen.inode, seen.mtime_ns, seen.size)
            known = self.files.get(name)
            if known is not None and known[0] == identity:
                found[name] = known
                continue
            if why := self._spool.ownership.why_not(seen.origin, layout.RESERVATIONS, layout.file_of(name)):
                found[name] = ((0, 0, 0), None)  # checked again at the next look: it may be accepted by then
                self._complain(name, [Problem(None, None, why)])
                continue
            try:
                found[name] = (identity, reservation.parse(seen.data, name=name, created_at_ns=seen.mtime_ns))
                self._tell(name, None)
            except InvalidReservation as error:
                found[name] = (identity, None)
                self._complain(name, list(error.problems))
        for name in self.files.keys() - found.keys():
            self._tell(name, None)
        self._see_removed(found)
        self._confinement.keep("reservation", {*names, *self.untold, *self._removed})
        self.files = found
        self._settle()
        return self.standing != before

    def _see_removed(self, found: Collection[str]) -> None:
        """Keep the texts of valid reservations whose files are gone."""
        now = time.monotonic_ns()
        for one in self.standing:
            if one.name not in found:
                self._removed.setdefault(one.name, (now, one))
        for name, (since_ns, one) in list(self._removed.items()):
            if name in found:  # it was changed
                del self._removed[name]
            elif now >= since_ns + _REMOVED_NS and not self._confinement.pauses(Thing("reservation", name), _KEEP):
                with self._confinement.of(Thing("reservation", name), _KEEP) as piece:
                    self._spool.keep_reservation(name, one.created_at_ns, reservation.render(one))
                if not piece.failed:
                    del self._removed[name]
        if self._removed:
            self._timer.advance(now + _REMOVED_NS)

    @property
    def ask_for_gpus(self) -> bool:
        """Whether there are reservations, and the GPUs are not known yet."""
        return self._gpus is None and bool(self.files)

    def machine_has(self, gpus: frozenset[int] | None) -> None:
        """Set the indices of the existing GPUs; None if they are not known (yet)."""
        if gpus != self._gpus:
            self._gpus = gpus
            self._settle()

    def _settle(self) -> None:
        """Determine the valid reservations, and report the problems of the others beside their files."""
        settled = settle((found for _, found in self.files.values() if found is not None), self._gpus)
        for one in settled.standing:
            self._tell(one.name, None)
        for name, why in settled.refused.items():
            self._complain(name, [Problem(None, None, why)])
        self.standing = settled.standing

    def _complain(self, name: str, problems: list[Problem]) -> None:
        told = "".join(f"- {problem.message}\n" for problem in problems)
        text = f"The reservation {name} is not in force:\n{told}This file disappears when it is fixed or removed.\n"
        self._tell(name, text)

    def _tell(self, name: str, text: str | None) -> None:
        """Write the `.error` file of a reservation; None: remove it."""
        path = self._spool.layout.error_file(layout.RESERVATIONS, name)
        with self._confinement.of(Thing("reservation", name), _TELL) as piece:
            if text is not None:
                self._spool.complain(path, text)
            elif status_of(path) is not None:
                self._spool.disk.discard(path)
        if piece.failed:
            self.untold[name] = text
        else:
            self.untold.pop(name, None)
