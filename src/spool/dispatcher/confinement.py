"""The one boundary that errors do not cross: an error about one thing affects only that thing.

Every piece of work of a pass belongs to one *thing*: a job, a run, an array, a reservation, a listener, or the spool as
a whole. The work is done inside ``with confinement.of(thing, "verb")``. An error ends only that piece of work: it is
logged once, reported in `state.json`, and the work is retried after a growing pause. A failure of the spool as a whole
(its journal, its history, its directories) holds up the starts, never the stops. A service (`state.json`, the
listeners) that fails holds up nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, NamedTuple

from msgspec import Struct

from spool.core.errors import SpoolError, cannot
from spool.core.model import SECOND_NS
from spool.dispatcher.wakeup import Timer
from spool.store.disk import SpoolTrouble, remedy_for

log = logging.getLogger(__name__)

FIRST_PAUSE_NS, LONGEST_PAUSE_NS = SECOND_NS // 20, 5 * SECOND_NS
_FORGET_NS = 4 * LONGEST_PAUSE_NS  # a trouble that has not recurred for this long is over
_MOST_TOLD = 50  # troubles in `state.json`; the rest are counted


class Thing(NamedTuple):
    """The subject of a piece of work."""

    kind: Literal["job", "run", "array", "reservation", "spool", "service"]
    name: str
    run: int = 0

    @classmethod
    def of_job(cls, name: str) -> Thing:
        """Return the thing for a job's file, with its unstarted runs."""
        return cls("job", name)

    @classmethod
    def of_run(cls, key: tuple[str, int]) -> Thing:
        """Return the thing for one run."""
        return cls("run", *key)

    def __str__(self) -> str:
        """Return its name in messages."""
        if self.kind in ("spool", "service"):
            return self.name
        return f"run {self.run} of job {self.name}" if self.kind == "run" else f"{self.kind} {self.name}"


class Piece(Struct):
    """One piece of work. After its block `failed` says whether an error ended it."""

    failed: bool = False


class Trouble(Struct):
    """The last error of a piece of work."""

    text: str
    pause_ns: int
    again_at_ns: int  # monotonic
    met_at_ns: int  # monotonic: the last time


class Confinement:
    """Remembers the trouble of each thing, and when to retry the work. *clock* is monotonic, in nanoseconds."""

    def __init__(self, root: str, timer: Timer, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """*timer*, on *clock*, is set to the next retry."""
        self._root = root
        self._timer = timer
        self._clock = clock
        self._troubles: dict[tuple[Thing, str], Trouble] = {}
        self.troubled = False  # whether there is any trouble
        self.changes = 0  # grows with every change of the reported troubles

    # The work.

    @contextmanager
    def of(self, thing: Thing, verb: str, *, partly: bool = False) -> Iterator[Piece]:
        """Return the boundary around one piece of work on *thing*: *verb* is used in "cannot VERB THING".

        It suppresses an error, unless that is the spool's and the thing is not the spool. *partly*: the work is not
        complete after this block, so its trouble lasts until :meth:`done`.
        """
        piece = Piece()
        try:
            yield piece
        except Exception as error:
            if isinstance(error, SpoolTrouble) and thing.kind not in ("spool", "service"):
                raise
            piece.failed = True
            self.failed(thing, verb, error)
        else:
            if self.troubled and not partly:
                self.done(thing, verb)

    def attempt(
        self, thing: Thing, verb: str, action: Callable[..., object], *about: object, partly: bool = False
    ) -> bool:
        """Do a piece of work, unless it failed a moment ago; return whether it succeeded."""
        if self._troubles and self.pauses(thing, verb):
            return False
        with self.of(thing, verb, partly=partly) as piece:
            action(*about)
        return not piece.failed

    def spool(self, verb: str, what: str = "the spool") -> AbstractContextManager[Piece]:
        """Return the boundary around work for the spool as a whole; its trouble delays all starts."""
        return self.of(Thing("spool", what), verb)

    def service(self, verb: str, what: str) -> AbstractContextManager[Piece]:
        """Return the boundary around work that nothing else needs."""
        return self.of(Thing("service", what), verb)

    def pauses(self, thing: Thing, verb: str) -> bool:
        """Whether that work has failed, and its pause is not over."""
        trouble = self._troubles.get((thing, verb)) if self._troubles else None
        return trouble is not None and self._clock() < trouble.again_at_ns

    def lasts(self, thing: Thing, verb: str) -> bool:
        """Whether that work has failed so often that its pauses no longer grow: a user must act."""
        trouble = self._troubles.get((thing, verb)) if self._troubles else None
        return trouble is not None and trouble.pause_ns >= LONGEST_PAUSE_NS

    def end_pass(self) -> None:
        """Delay retries that were due in this pass and not made; forget troubles without further retries."""
        now = self._clock()
        for key, trouble in list(self._troubles.items()):
            if trouble.again_at_ns <= now:
                trouble.again_at_ns = now + trouble.pause_ns
                if now - trouble.met_at_ns > _FORGET_NS:
                    del self._troubles[key]
                    self._changed()
        self._timer.set(min((trouble.again_at_ns for trouble in self._troubles.values()), default=None))

    def forget(self, *things: Thing) -> None:
        """Forget the troubles of things that no longer exist."""
        for key in [key for key in self._troubles if key[0] in things] if self._troubles else ():
            del self._troubles[key]
            self._changed()

    def keep(self, kind: str, names: set[str]) -> None:
        """Forget the troubles of all things of a *kind* whose names are not in *names*."""
        self.forget(*{thing for thing, _ in self._troubles if thing.kind == kind and thing.name not in names})

    # Reports.

    def held_up(self, besides: str = "") -> str:
        """Return the trouble of the spool as a whole, which keeps every job from starting; "" without one.

        Troubles of the verb *besides* do not count.
        """
        if not self._troubles:
            return ""
        found = (one.text for (it, verb), one in self._troubles.items() if it.kind == "spool" and verb != besides)
        return next(found, "")

    def why(self, name: str) -> str:
        """Return the trouble of the job or array of that name; "" if there is none."""
        if not self._troubles:
            return ""
        kinds = ("job", "run", "array")
        return next((one.text for (it, _), one in self._troubles.items() if it.name == name and it.kind in kinds), "")

    def problems(self) -> list[str]:
        """Return every trouble, the spool's own first."""
        found = sorted(self._troubles.items(), key=lambda item: item[0][0].kind not in ("spool", "service"))
        texts = list(dict.fromkeys(trouble.text for _, trouble in found))
        more = len(texts) - _MOST_TOLD
        return texts[:_MOST_TOLD] + ([f"{more} more problems: see the log"] if more > 0 else [])

    def _changed(self) -> None:
        self.changes += 1
        self.troubled = bool(self._troubles)
        if not self.troubled:
            self._timer.set(None)

    # The results of work.

    def failed(self, thing: Thing, verb: str, error: Exception) -> None:
        """Record that *error* has ended this work, and set its retry."""
        if isinstance(error, RuntimeError) and "start new thread" in str(error):
            error = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))  # a shortage of the machine like any other
        if isinstance(error, OSError):
            where = error.filename2 if error.filename2 is not None else error.filename
            where = os.fsdecode(where) if isinstance(where, str | bytes) else None
            where = where.removeprefix(f"{self._root}/") if where is not None else None
            remedy = f"{remedy_for(error)}; spool retries automatically"
            text = cannot(verb, str(thing), error.strerror or str(error), where=where, remedy=remedy)
        else:
            why = str(error) if isinstance(error, SpoolError) else f"internal error: {error!r}"
            text = cannot(verb, str(thing), why)
        known = self._troubles.get((thing, verb))
        pause_ns = min(2 * known.pause_ns, LONGEST_PAUSE_NS) if known is not None else FIRST_PAUSE_NS
        now = self._clock()
        self._troubles[thing, verb] = Trouble(text, pause_ns, now + pause_ns, now)
        self._timer.advance(now + pause_ns)
        if known is None or known.text != text:
            self._changed()
            expected = isinstance(error, OSError | SpoolError)
            log.error("%s", text, exc_info=None if expected else error)

    def done(self, thing: Thing, verb: str) -> None:
        """Record that this work is done, or no longer needed."""
        if self._troubles.pop((thing, verb), None) is not None:
            self._changed()
            log.info("can %s %s again", verb, thing)
