"""What differs between engines: the commands that each is spoken to by, and what its answers mean."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from msgspec import Struct

from spool.core.errors import SpoolError
from spool.core.lifecycle import EngineWord
from spool.executors.base import Launch
from spool.formats.wrapper import EngineSurroundings
from spool.machine.commands import Command, CommandEnd


class EnginePolicy(Struct, frozen=True):
    """How an engine is used, as the configuration says."""

    poll_ns: int
    per_second: float
    most: int  # at once


class Sighting(Struct, frozen=True):
    """One job in the engine's list."""

    id: str
    mark: str
    said: str  # its state, in the engine's words
    begun: bool = False
    word: EngineWord | None = None  # None: it has not ended
    node: str = ""
    halted: bool = False  # it has begun, and stands still


class Language(Protocol):
    """How one engine is spoken to. The functions are pure: they make commands, and read what these have answered."""

    name: str
    """The word for it in job files and records."""

    title: str
    """What people call it."""

    surroundings: EngineSurroundings

    def policy(self) -> EnginePolicy:
        """Return how it is used now."""

    def missing(self) -> str | None:
        """Return why it cannot be spoken to from here at all; None if it can."""

    def identify(self) -> Command:
        """Return the question which cluster this is."""

    def cluster(self, done: CommandEnd) -> str | None:
        """Return its name; None: nobody has answered."""

    def submit(self, launch: Launch, mark: str) -> Command:
        """Return the command that hands a run over. Raises SpoolError for what the engine cannot be asked for."""

    def submitted(self, done: CommandEnd) -> str | SpoolError | None:
        """Return the id of what was handed over, or why the engine refuses it; None: it may be there or not.

        StartRefused: it refuses it for now, because it has too many.
        """

    def look(self) -> Command:
        """Return the one question for all jobs."""

    def seen(self, done: CommandEnd) -> list[Sighting] | None:
        """Return all jobs that the engine knows; None: nobody has answered."""

    def cancel(self, ids: Sequence[str], signal: str | None, *, only_waiting: bool, name: str = "") -> Command:
        """Return the command that ends jobs, or tells what they run: *signal* goes to their wrappers alone.

        With a *name*, a job of another name is left alone.
        """

    def is_silence(self, done: CommandEnd) -> bool:
        """Whether a command has failed because nobody has answered."""

    def nodes(self, names: Collection[str]) -> Command:
        """Return the question which of these nodes can be spoken to."""

    def nodes_back(self, done: CommandEnd) -> frozenset[str] | None:
        """Return those that can; None: nobody has answered."""

    def nodes_given_up(self) -> frozenset[str]:
        """Return the nodes that a person calls gone."""

    def last_words(self, log: str) -> tuple[EngineWord, str] | None:
        """Return how the engine has ended a job by what it wrote into the job's log; None if it did not."""
