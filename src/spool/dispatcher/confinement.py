"""The one boundary that errors do not cross: the trouble of one thing costs that thing alone.

Every piece of work of a pass belongs to one *thing*: a job, a run, an array, a reservation, a listener, or the spool
as a whole. The work is done inside ``with confinement.of(thing, "verb")``. An error ends that piece of work and
nothing else: it is logged once, told in `state.json`, and the work waits for a growing pause before it is done again.
What fails for the spool as a whole (its journal, its history, its directories) holds up the starts, never the stops.
A service (`state.json`, the listeners) that fails holds up nothing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal, NamedTuple

from msgspec import Struct

from spool.core.errors import SpoolError, cannot
from spool.core.model import SECOND_NS
from spool.dispatcher.timers import Timer
from spool.store.disk import SpoolTrouble, remedy_for

log = logging.getLogger(__name__)

FIRST_PAUSE_NS, LONGEST_PAUSE_NS = SECOND_NS // 20, 5 * SECOND_NS
_FORGET_NS = 4 * LONGEST_PAUSE_NS  # a trouble that has not come back for this long is over
_MOST_TOLD = 50  # troubles in `state.json`; the rest are counted


class Thing(NamedTuple):
    """What a piece of work belongs to."""

    kind: Literal["job", "run", "array", "reservation", "spool", "service"]
    name: str
    run: int = 0

    @classmethod
    def of_job(cls, name: str) -> Thing:
        """Return the thing that a job's file is, with what was never started of it."""
        return cls("job", name)

    @classmethod
    def of_run(cls, key: tuple[str, int]) -> Thing:
        """Return the thing that one run is."""
        return cls("run", *key)

    def __str__(self) -> str:
        """Return what it is called in a message."""
        if self.kind in ("spool", "service"):
            return self.name
        return f"run {self.run} of job {self.name}" if self.kind == "run" else f"{self.kind} {self.name}"


class Trouble(Struct):
    """What keeps one piece of work from being done."""

    text: str
    pause_ns: int
    again_at_ns: int  # monotonic
    met_at_ns: int  # monotonic: when it was met last


class Confinement:
    """Remembers what troubles which thing, and when the work is tried again. *clock* is monotonic, in nanoseconds."""

    def __init__(self, root: str, timer: Timer, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """*timer*, on *clock*, is when the next piece of work is tried again."""
        self._root = root
        self._timer = timer
        self._clock = clock
        self._troubles: dict[tuple[Thing, str], Trouble] = {}
        self.troubled = False  # whether anything is
        self.changes = 0  # moves with every change of what it reports

    # Work.

    def of(self, thing: Thing, verb: str, *, partly: bool = False) -> Piece:
        """Return the boundary around one piece of work: *verb* says what is done to *thing*, as in "cannot VERB".

        *partly*: the work is not done after this block, so that a trouble of it lasts until :meth:`done`.
        """
        return Piece(self, thing, verb, partly=partly)

    def spool(self, verb: str, what: str = "the spool") -> Piece:
        """Return the boundary around work for the spool as a whole; its trouble holds up the starts."""
        return Piece(self, Thing("spool", what), verb)

    def service(self, verb: str, what: str) -> Piece:
        """Return the boundary around work that the others do not need."""
        return Piece(self, Thing("service", what), verb)

    def pauses(self, thing: Thing, verb: str) -> bool:
        """Whether that work has failed, and its pause is not over."""
        trouble = self._troubles.get((thing, verb)) if self._troubles else None
        return trouble is not None and self._clock() < trouble.again_at_ns

    def lasts(self, thing: Thing, verb: str) -> bool:
        """Whether that work has failed so often that its pauses grow no more: people have to see to it."""
        trouble = self._troubles.get((thing, verb)) if self._troubles else None
        return trouble is not None and trouble.pause_ns >= LONGEST_PAUSE_NS

    def end_pass(self) -> None:
        """Put off what was due in this pass and was not tried; forget what nobody tries any more."""
        now = self._clock()
        for key, trouble in list(self._troubles.items()):
            if trouble.again_at_ns <= now:
                trouble.again_at_ns = now + trouble.pause_ns
                if now - trouble.met_at_ns > _FORGET_NS:
                    del self._troubles[key]
                    self._changed()
        self._timer.set(min((trouble.again_at_ns for trouble in self._troubles.values()), default=None))

    def forget(self, *things: Thing) -> None:
        """Forget the troubles of things that are no more."""
        for key in [key for key in self._troubles if key[0] in things] if self._troubles else ():
            del self._troubles[key]
            self._changed()

    def keep(self, kind: str, names: set[str]) -> None:
        """Forget the troubles of all things of a *kind* but those called *names*."""
        self.forget(*{thing for thing, _ in self._troubles if thing.kind == kind and thing.name not in names})

    # What is told.

    def held_up(self, besides: str = "") -> str:
        """Return what is wrong with the spool as a whole, so that nothing starts; "" if nothing is.

        Troubles of the verb *besides* do not count.
        """
        if not self._troubles:
            return ""
        found = (one.text for (it, verb), one in self._troubles.items() if it.kind == "spool" and verb != besides)
        return next(found, "")

    def why(self, name: str) -> str:
        """Return what troubles the job or array of that name; "" if nothing does."""
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

    # What a piece of work comes to.

    def failed(self, thing: Thing, verb: str, error: Exception) -> None:
        """Take note that *error* has ended this work, and when it is done again."""
        text = self._text(thing, verb, error)
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
        """Take note that this work is done, or that there is none."""
        if self._troubles.pop((thing, verb), None) is not None:
            self._changed()
            log.info("can %s %s again", verb, thing)

    def _text(self, thing: Thing, verb: str, error: Exception) -> str:
        if not isinstance(error, OSError):
            why = str(error) if isinstance(error, SpoolError) else f"internal error: {error!r}"
            return cannot(verb, str(thing), why)
        where = error.filename2 if error.filename2 is not None else error.filename
        where = os.fsdecode(where) if isinstance(where, str | bytes) else None
        if where is not None and where.startswith(f"{self._root}/"):
            where = where[len(self._root) + 1 :]
        remedy = remedy_for(error)
        return cannot(
            verb,
            str(thing),
            error.strerror or str(error),
            where=where,
            remedy=f"{remedy}; spool retries automatically",
        )


class Piece:
    """One piece of work. After the block `failed` says whether an error ended it."""

    __slots__ = ("_confinement", "_partly", "_thing", "_verb", "failed")

    def __init__(self, confinement: Confinement, thing: Thing, verb: str, *, partly: bool = False) -> None:
        self._partly = partly
        self._confinement = confinement
        self._thing = thing
        self._verb = verb
        self.failed = False

    def __enter__(self) -> Piece:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """End it; an error goes no further, unless it is of the spool as a whole and the thing is not."""
        if error is None:
            if self._confinement.troubled and not self._partly:
                self._confinement.done(self._thing, self._verb)
            return False
        if not isinstance(error, Exception) or (
            isinstance(error, SpoolTrouble) and self._thing.kind not in ("spool", "service")
        ):
            return False
        self.failed = True
        self._confinement.failed(self._thing, self._verb, error)
        return True
