"""Events of jobs, reservations and the spool (docs/FORMAT.md, "Events"), and what listeners answer."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from spool.core.eventnames import EventName
from spool.core.model import Grant, Request, Result


class Event(Struct, frozen=True, kw_only=True):
    """One event. After a crash it may be delivered twice, with the same `id`."""

    id: str  # derived from the event, not from the time of delivery
    name: EventName
    at_ns: int
    host: str
    version: str  # of spool
    spool_dir: str
    reason: str = ""
    job: str | None = None
    is_array: bool = False  # the event concerns an array as a whole, which has no runs of its own
    run: int | None = None
    attempt: int | None = None
    user: str | None = None
    project: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    executor: str | None = None
    engine_id: str | None = None  # of the run in its engine
    request: Request | None = None
    grant: Grant | None = None
    submitted_at_ns: int | None = None
    started_at_ns: int | None = None
    result: Result | None = None  # of a run that is over
    metadir: str | None = None
    wishes: dict[str, Any] = {}  # of the job file, by the capability whose listener it asks for; shown to no hook
    reservation: str | None = None
    gpu: str | None = None  # UUID
    keys: dict[str, Any] | None = None  # of the job file, for a plugin that may add some; shown to no hook


class Answer(Struct, frozen=True):
    """The listeners' answer to a new job, or to a proposed start or cancellation."""

    no: str | None = None  # the reason for a veto, in the listener's words
    init: str = ""  # shell text for the wrapper: before anything else, just before the command, after it
    prep: str = ""
    end: str = ""
    env: tuple[tuple[str, str], ...] = ()  # variables for the run
    added: tuple[tuple[str, dict[str, Any]], ...] = ()  # for a new job: plugins, and the keys that each returned

    def joined(self, other: Answer) -> Answer:
        """Return an approval with the texts, the variables and the keys of both."""
        pairs = ((self.init, other.init), (self.prep, other.prep), (self.end, other.end))
        init, prep, end = ("\n".join(filter(None, pair)) for pair in pairs)
        return Answer(None, init, prep, end, (*self.env, *other.env), (*self.added, *other.added))
