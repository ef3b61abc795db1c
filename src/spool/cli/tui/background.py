"""Work that the screen leaves to threads so that a key never waits for a disk: reading the spool and output.

The threads are daemons: one that hangs in an unresponsive file system does not prevent an exit.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from msgspec import Struct

from spool.cli.why import sentences
from spool.client.output import Follower, OutputPiece
from spool.core.errors import SpoolError, shown
from spool.core.model import State
from spool.query.explain import why, why_never_begun
from spool.query.jobs import JobRow
from spool.store.spool import Spool

_LINES = 1000  # of an output that are kept
_LONGEST = 2000  # characters of a line
_TAB = 8
_AGAIN_S = 10.0  # why a job waits changes without its row
_WAITING = frozenset({State.QUEUED, State.HELD, State.INVALID})
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")  # as ECMA-48 has them


class Repeater(threading.Thread):
    """Calls *turn* again and again, after the seconds that it returned, or sooner when it is woken.

    An error of it, which is a bug, is handed to *broken*, and is its end.
    """

    def __init__(self, turn: Callable[[], float], broken: Callable[[Exception], object]) -> None:
        super().__init__(daemon=True)
        self._turn = turn
        self._broken = broken
        self._woken = threading.Event()
        self._over = False

    def run(self) -> None:
        """Go on until it is ended."""
        try:
            while not self._over:
                self._woken.clear()
                self._woken.wait(self._turn())
        except Exception as error:
            quietly(partial(self._broken, error))

    def wake(self) -> None:
        """Have the next turn at once."""
        self._woken.set()

    def end(self) -> None:
        """Have no further turn."""
        self._over = True
        self._woken.set()


class LogText:
    """The last lines of an output, as a terminal would show them: a bar that is drawn again is one line."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._torn = b""

    def feed(self, data: bytes) -> None:
        """Take what has been written since."""
        *whole, self._torn = (self._torn + data).split(b"\n")
        self._lines.extend(map(_drawn, whole))
        self._torn = self._torn[-(_LONGEST * 16) :]

    def lines(self) -> list[str]:
        """Return the lines, the one that has no end yet too."""
        return [*self._lines, *([_drawn(self._torn)] if self._torn else ())]


def _drawn(line: bytes) -> str:
    r"""Return what is left of a line when everything before a \r is written over; without colours, controls escaped."""
    text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
    text = _ESCAPE.sub("", text).expandtabs(_TAB)
    return shown(text[:_LONGEST] + ("…" if len(text) > _LONGEST else ""))


class PaneSubject(Struct, frozen=True):
    """What the pane below the list shows: a job, in full or in brief."""

    row: JobRow
    fully: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """Return what is another value once something else has to be read."""
        row = self.row
        return row.name, row.place, row.run, row.state, self.fully, row.reason if row.state in _WAITING else ""


class SubjectReader:
    """Reads the details of one job: why it waits, or its output so far."""

    def __init__(self, root: str, subject: PaneSubject) -> None:
        self.subject = subject
        self._root = root
        self._text = LogText()
        self._shown: list[str] | None = None
        self._follower: Follower | None = None
        self._pieces: Iterator[OutputPiece | None] = iter(())
        self._begun = False
        self._asked_at = 0.0

    def news(self) -> list[str] | None:
        """Return the lines if they are others than those of the last call. Called by one thread."""
        try:
            lines = self._lines()
        except SpoolError as error:
            lines = [shown(str(error))]
        except OSError as error:
            lines = [f"cannot read it: {shown(error.strerror or str(error))}"]
        if lines == self._shown:
            return None
        self._shown = lines
        return lines

    def close(self) -> None:
        """Close the files."""
        if self._follower is not None:
            self._follower.close()

    def _lines(self) -> list[str]:
        row = self.subject.row
        if row.run is None or row.state in _WAITING:
            now = time.monotonic()
            if self._shown is None or now - self._asked_at >= _AGAIN_S:
                self._asked_at = now
                return self._reasons(row)
            return self._shown
        if not self._begun:
            self._begun = True
            self._follower = Follower(Spool(self._root), row.name, only=row.run, lines=_LINES)
            self._pieces = self._follower.pieces()
        for piece in self._pieces:
            if piece is None:
                break
            self._text.feed(piece.data)
        return self._text.lines() or self._without_output(row)

    def _reasons(self, row: JobRow) -> list[str]:
        if not self.subject.fully or row.state is State.INVALID:
            return list(map(shown, row.reason.split("\n")))
        return list(map(shown, sentences(why(Spool(self._root), row.name))))

    def _without_output(self, row: JobRow) -> list[str]:
        said = why_never_begun(Spool(self._root), row.name, row.run) if row.state.ended else ""
        return [said or ("no output" if row.state.ended else "no output yet")]


def in_thread(act: Callable[[], None]) -> None:
    """Call *act*, which handles its errors, without waiting for it."""
    threading.Thread(target=act, daemon=True).start()


def quietly(post: Callable[[], object]) -> None:
    """Call *post*, which reaches nobody once the screen has gone."""
    with suppress(RuntimeError):
        post()
