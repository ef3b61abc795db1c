"""Reading of the spool and of output in threads, so that a key never waits for a disk.

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
from spool.query.rows import JobRow
from spool.store.spool import Spool

_LINES = 1000  # lines kept of an output
_LONGEST = 2000  # characters of a line
_TAB = 8
_AGAIN_S = 10.0  # the reason for a wait changes without the job's row
WAITING = frozenset({State.QUEUED, State.HELD, State.INVALID})
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")  # as ECMA-48 has them


class Repeater(threading.Thread):
    """Calls *turn* again and again, each time after the seconds that it returned, or sooner when woken.

    Its error, which is a bug, is passed to *broken*, and ends the thread.
    """

    def __init__(self, turn: Callable[[], float], broken: Callable[[Exception], object]) -> None:
        super().__init__(daemon=True)
        self._turn = turn
        self._broken = broken
        self._woken = threading.Event()
        self._over = False

    def run(self) -> None:
        """Run until `end` is called."""
        try:
            while not self._over:
                self._woken.clear()
                self._woken.wait(self._turn())
        except Exception as error:
            quietly(partial(self._broken, error))

    def wake(self) -> None:
        """Start the next turn at once."""
        self._woken.set()

    def end(self) -> None:
        """Start no further turn."""
        self._over = True
        self._woken.set()


class LogText:
    """The last lines of an output as a terminal would show them: a redrawn progress bar is one line."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._torn = b""

    def feed(self, data: bytes) -> None:
        """Append new output."""
        *whole, self._torn = (self._torn + data).split(b"\n")
        self._lines.extend(map(_drawn, whole))
        self._torn = self._torn[-(_LONGEST * 16) :]

    def lines(self) -> list[str]:
        """Return the lines, including an incomplete last one."""
        return [*self._lines, *([_drawn(self._torn)] if self._torn else ())]


def _drawn(line: bytes) -> str:
    r"""Return the visible rest of a line in which \r overwrites; without colours, controls escaped."""
    text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
    text = _ESCAPE.sub("", text).expandtabs(_TAB)
    return shown(text[:_LONGEST] + ("…" if len(text) > _LONGEST else ""))


class PaneSubject(Struct, frozen=True):
    """The content of the pane below the list: a job, in full or in brief."""

    row: JobRow
    fully: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """A value that changes when something else must be read."""
        row = self.row
        return row.name, row.place, row.run, row.state, self.fully, row.reason if row.state in WAITING else ""


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
        """Return the lines if they have changed since the last call. For one thread."""
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
        if row.run is None or row.state in WAITING:
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
    """Call *act*, which handles its own errors, in a new thread."""
    threading.Thread(target=act, daemon=True).start()


def quietly(post: Callable[[], object]) -> None:
    """Call *post*, ignoring errors of a closed screen."""
    with suppress(RuntimeError):
        post()
