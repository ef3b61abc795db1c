"""A spool for commands that list jobs: an unreadable file of one job does not hide the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from spool.core import layout
from spool.core.errors import cannot
from spool.core.layout import Layout
from spool.store.disk import remedy_for, status_of
from spool.store.spool import Spool

P = ParamSpec("P")
T = TypeVar("T")


def _tolerant(
    read: Callable[Concatenate[Any, P], T], instead: Callable[[], T], where: Callable[Concatenate[Layout, P], str]
) -> Callable[Concatenate[Any, P], T]:
    """Return *read*, a method of `Spool`, for a spool that has *instead* of what it cannot read at *where*."""

    @wraps(read)
    def tolerant(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return read(self, *args, **kwargs)
        except OSError as error:
            self.note(error, where(self.layout, *args, **kwargs))
            return instead()

    return tolerant


class TolerantSpool(Spool):
    """A spool that treats unreadable files as absent, and remembers them in `unread`.

    This is the only place where a command catches reading errors; elsewhere they end the command.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.unread: dict[str, OSError] = {}
        self.strict = Spool(self.root)

    def told(self, most: int = 5) -> list[str]:
        """Return the unreadable files, a line each; of many, the first ones and their number."""
        troubles: dict[str, list[str]] = {}
        for where, error in self.unread.items():
            troubles.setdefault(self.layout.whose(where) or where, []).append(unreadable(error, where))
        lines = [each[0] for each in troubles.values()]
        more = sum(map(len, list(troubles.values())[most:]))
        return lines[:most] + ([f"{more} more files cannot be read: `spool doctor` lists all"] if more > 0 else [])

    def note(self, error: OSError, where: str) -> None:
        """Remember an error."""
        self.unread.setdefault(_named(error, where), error)

    names_and_others = _tolerant(Spool.names_and_others, lambda: ([], []), lambda paths, place: paths.at(place))
    holds = _tolerant(Spool.holds, bool, lambda layout, inode, name, *places, mtime_ns=None: name)
    job_text = _tolerant(Spool.job_text, lambda: None, Layout.job_file)
    runs = _tolerant(Spool.runs, list[int], Layout.runs)
    has_begun = _tolerant(Spool.has_begun, bool, Layout.metadir)
    jobs_with_runs = _tolerant(Spool.jobs_with_runs, list[str], lambda paths: paths.at(layout.JOBS))
    record = _tolerant(Spool.record, lambda: None, Layout.record)
    dated_record = _tolerant(Spool.dated_record, lambda: None, Layout.record)
    file = _tolerant(Spool.file, lambda: None, lambda paths, name, limit=0: paths.at(name))

    def places(self, name: str) -> list[str]:
        """Return the result of `Spool.places`, checking each place separately."""
        found = []
        for place in layout.PLACES:
            path = self.layout.job_file(place, name)
            try:
                if status_of(path) is not None:
                    found.append(place)
            except OSError as error:
                self.note(error, path)
        return found

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
