"""A spool for commands that list jobs: an unreadable file of one job does not hide the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from spool.core import layout
from spool.core.errors import cannot
from spool.store.disk import remedy_for, status_of
from spool.store.spool import Spool

T = TypeVar("T")


class TolerantSpool(Spool):
    """A spool that treats unreadable files as absent, and remembers them in `unread`.

    This is the only place where a command catches reading errors; elsewhere they end the command.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.unread: dict[str, OSError] = {}
        self._strict = Spool(self.root)

    def told(self, most: int = 5) -> list[str]:
        """Return the unreadable files, a line each; of many, the first ones and their number."""
        troubles: dict[str, list[str]] = {}
        for where, error in self.unread.items():
            troubles.setdefault(self.layout.whose(where) or where, []).append(unreadable(error, where))
        lines = [each[0] for each in troubles.values()]
        more = sum(map(len, list(troubles.values())[most:]))
        return lines[:most] + ([f"{more} more files cannot be read: `spool doctor` lists all"] if more > 0 else [])

    def attempt(self, read: Callable[[], T], instead: T, where: str) -> T:
        """Return *read*(), or *instead* if it raises OSError; the error is remembered for *where*."""
        try:
            return read()
        except OSError as error:
            self.note(error, where)
            return instead

    @property
    def strict(self) -> Spool:
        """The same spool, raising every error."""
        return self._strict

    def note(self, error: OSError, where: str) -> None:
        """Remember an error."""
        self.unread.setdefault(_named(error, where), error)

    def names_and_others(self, place: str) -> tuple[list[str], list[str]]:
        """Return the result of `Spool.names_and_others`."""
        nothing: tuple[list[str], list[str]] = ([], [])
        at = self.layout.at(place)
        return self.attempt(lambda: super(TolerantSpool, self).names_and_others(place), nothing, at)

    def places(self, name: str) -> list[str]:
        """Return the result of `Spool.places`, checking each place separately."""
        found = [(place, self.layout.job_file(place, name)) for place in layout.PLACES]
        return [place for place, path in found if self.attempt(lambda path=path: status_of(path), None, path)]  # type: ignore[misc]

    def holds(self, inode: int, name: str, *places: str, mtime_ns: int | None = None) -> bool:
        """Return the result of `Spool.holds`."""
        return self.attempt(
            lambda: super(TolerantSpool, self).holds(inode, name, *places, mtime_ns=mtime_ns), False, name
        )

    def job_text(self, place: str, name: str) -> bytes | None:
        """Return the result of `Spool.job_text`."""
        path = self.layout.job_file(place, name)
        return self.attempt(lambda: super(TolerantSpool, self).job_text(place, name), None, path)

    def runs(self, name: str) -> list[int]:
        """Return the result of `Spool.runs`."""
        return self.attempt(lambda: super(TolerantSpool, self).runs(name), [], self.layout.runs(name))

    def has_begun(self, name: str, run: int) -> bool:
        """Return the result of `Spool.has_begun`."""
        where = self.layout.metadir(name, run)
        return self.attempt(lambda: super(TolerantSpool, self).has_begun(name, run), False, where)

    def jobs_with_runs(self) -> list[str]:
        """Return the result of `Spool.jobs_with_runs`."""
        return self.attempt(super().jobs_with_runs, [], self.layout.at(layout.JOBS))

    def record(self, name: str, run: int, record: str) -> bytes | None:
        """Return the result of `Spool.record`."""
        path = self.layout.record(name, run, record)
        return self.attempt(lambda: super(TolerantSpool, self).record(name, run, record), None, path)

    def dated_record(self, name: str, run: int, record: str) -> tuple[bytes, int] | None:
        """Return the result of `Spool.dated_record`."""
        path = self.layout.record(name, run, record)
        return self.attempt(lambda: super(TolerantSpool, self).dated_record(name, run, record), None, path)

    def file(self, name: str, limit: int = 1 << 31) -> bytes | None:
        """Return the result of `Spool.file`."""
        return self.attempt(lambda: super(TolerantSpool, self).file(name, limit), None, self.layout.at(name))

    def history(self) -> Iterator[bytes]:
        """Yield the result of `Spool.history`, as far as it can be read."""
        try:
            yield from super().history()
        except OSError as error:
            self.note(error, self.layout.at(layout.HISTORY))


def unreadable(error: OSError, where: str) -> str:
    """Return the message that something cannot be read: the file of *error*, else *where*."""
    return cannot("read", _named(error, where), error.strerror or str(error), remedy=remedy_for(error))


def _named(error: OSError, where: str) -> str:
    return error.filename if isinstance(error.filename, str) else where
