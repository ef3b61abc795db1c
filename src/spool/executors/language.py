"""The differences between engines: their commands, and the meaning of their answers."""

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
    """How an engine is used, according to the configuration."""

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
    halted: bool = False  # it has begun, and is suspended


class Language(Protocol):
    """The commands and answers of one engine. The functions are pure: they make commands, and read their answers."""

    name: str
    """Its name in job files and records."""

    title: str
    """Its usual name for users."""

    surroundings: EngineSurroundings

    def policy(self) -> EnginePolicy:
        """Return the current policy."""

    def missing(self) -> str | None:
        """Return why its commands cannot be used from here at all; None if they can."""

    def identify(self) -> Command:
        """Return the question which cluster this is."""

    def cluster(self, done: CommandEnd) -> str | None:
        """Return the name of the cluster; None: no answer."""

    def submit(self, launch: Launch, mark: str) -> Command:
        """Return the command that submits a run. Raises SpoolError for options that the engine does not have."""

    def submitted(self, done: CommandEnd) -> str | SpoolError | None:
        """Return the id of the submitted job, or the refusal; None: the job may exist or not.

        StartRefused: refused for now, because there are too many jobs.
        """

    def look(self) -> Command:
        """Return the one question about all jobs."""

    def seen(self, done: CommandEnd) -> list[Sighting] | None:
        """Return all jobs that the engine knows; None: no answer."""

    def cancel(self, ids: Sequence[str], signal: str | None, *, only_waiting: bool, name: str = "") -> Command:
        """Return the command that ends jobs, or signals them: *signal* goes to their wrappers alone.

        With a *name*, a job of another name is left alone.
        """

    def is_silence(self, done: CommandEnd) -> bool:
        """Whether a command has failed because the engine did not answer."""

    def nodes(self, names: Collection[str]) -> Command:
        """Return the question which of these nodes are reachable."""

    def nodes_back(self, done: CommandEnd) -> frozenset[str] | None:
        """Return the reachable nodes; None: no answer."""

    def nodes_given_up(self) -> frozenset[str]:
        """Return the nodes that the administrator has declared gone."""

    def last_words(self, log: str) -> tuple[EngineWord, str] | None:
        """Return how the engine has ended a job, by its own lines in the job's log; None if there are none."""
