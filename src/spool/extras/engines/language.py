"""The differences between engines: their commands, and the meaning of their answers.

A `Language` is all that a new engine needs; a package offers one by an entry point of the group `spool.engines`
(docs/SLURM.md, "Add another engine"). Its methods only make commands and read answers: `engine.py` runs the commands.
"""

from __future__ import annotations

import errno
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from msgspec import Struct

from spool.core.errors import SpoolError, StartRefused
from spool.core.lifecycle import EngineWord
from spool.core.units import whole_words
from spool.executors.base import Launch
from spool.extras.engines.settings import EngineConfig
from spool.formats.wrapper import EngineSurroundings
from spool.machine.commands import Command, CommandEnd


class Sighting(Struct, frozen=True):
    """One job, or one element of an array, in the engine's list."""

    id: str
    mark: str
    said: str  # its state, in the engine's words
    begun: bool = False
    word: EngineWord | None = None  # None: it has not ended
    node: str = ""
    halted: bool = False  # it has begun, and is suspended
    blocked: bool = False  # it waits for something other than room: its node, a limit, a licence, a user
    stuck: bool = False  # the engine cannot start it, and keeps it until it is cancelled
    element: int | None = None  # its index in the array that has the mark


class ArrayRefused(StartRefused):
    """The engine takes no array of that size or with these indices; :meth:`Language.identify` tells what it takes."""


class EngineArray(Struct, frozen=True):
    """Tasks of one array of spool that are submitted together, as elements of one array of the engine.

    Element *e* runs the wrapper of task `first + e`. The records of a task lie in `JOBS/NAME_INDEX/RUN`.
    """

    name: str  # of the array
    run: int  # of each task
    first: int  # a multiple of `width`
    width: int  # a power of ten, larger than each element
    elements: Sequence[int]  # in ascending order
    jobs: str  # the directory of all metadirs
    at_once: int | None = None  # how many may run at once

    def task(self, element: int) -> str:
        """Return the name of the task that is that element."""
        return f"{self.name}_{self.first + element}"


class Language(ABC):
    """The commands and answers of one engine.

    An answer that may mean silence is None: nothing follows from silence. The optional methods have a default.
    """

    name: ClassVar[str]
    """Its name in job files and records."""

    title: ClassVar[str]
    """Its usual name for users."""

    surroundings: ClassVar[EngineSurroundings]

    signals: ClassVar[bool] = True
    """Whether :meth:`cancel` can signal the script of a job alone. If not, the wrapper reads the signals from a record
    of its metadir (`signals`), and only `signal = None` is asked for."""

    has_arrays: ClassVar[bool] = False
    """Whether :meth:`submit_array` can be asked for, as far as the cluster allows."""

    logs_ends: ClassVar[bool] = False
    """Whether :meth:`last_words` finds every end that the engine itself has caused."""

    @abstractmethod
    def policy(self) -> EngineConfig:
        """Return the current settings, as far as every engine has them."""

    @abstractmethod
    def missing(self) -> str | None:
        """Return why its commands cannot be used from here at all; None if they can."""

    @abstractmethod
    def identify(self) -> Command:
        """Return the question which cluster this is."""

    @abstractmethod
    def cluster(self, done: CommandEnd) -> str | None:
        """Return the name of the cluster; None: no answer. What else the answer says is kept here."""

    @abstractmethod
    def submit(self, launch: Launch, mark: str) -> Command:
        """Return the command that submits a run. Raises SpoolError for options that the engine does not have."""

    @abstractmethod
    def submitted(self, done: CommandEnd) -> str | SpoolError | None:
        """Return the id of the submitted job or array, or the refusal; None: it may exist or not.

        StartRefused: refused for now, because there are too many jobs; ArrayRefused: or too many in the array.
        """

    @abstractmethod
    def look(self) -> Sequence[Command]:
        """Return the questions about all jobs; they are asked one after the other."""

    @abstractmethod
    def seen(self, answers: Sequence[CommandEnd]) -> list[Sighting] | None:
        """Return all jobs that the engine knows; None: no answer."""

    @abstractmethod
    def cancel(self, ids: Sequence[str], signal: str | None, *, only_waiting: bool, name: str = "") -> Command:
        """Return the command that ends jobs, or signals them: *signal* goes to their wrappers alone.

        With *only_waiting*, a job that has begun is left alone, as far as the engine can tell them apart. With a
        *name*, a job of another name is left alone.
        """

    @abstractmethod
    def is_silence(self, done: CommandEnd) -> bool:
        """Whether a command has failed because the engine did not answer."""

    # Optional.

    def check_options(self, options: Sequence[str]) -> None:
        """Check the `executor_options` of a job. Raises InvalidValue for one that spool sets itself."""
        return

    def environment(self, variables: Mapping[str, str]) -> Mapping[str, str]:
        """Return the environment of its commands, made from the dispatcher's."""
        return variables

    def array_width(self) -> int | None:
        """Return the power of ten below which the indices of an array lie; None: no arrays, or not known yet."""
        return None

    def array_tasks(self) -> int | None:
        """Return how many elements an array may have; None: as many as there are indices."""
        return None

    def submit_array(self, launch: Launch, mark: str, array: EngineArray) -> Command:
        """Return the command that submits an array; *launch* is that of its first element, and stands for all."""
        raise NotImplementedError

    def element(self, job_id: str, element: int) -> str:
        """Return the id of one element of an array."""
        return f"{job_id}_{element}"

    def array_of(self, job_id: str) -> str | None:
        """Return the id of the array of an element; None: it is no element."""
        array, is_element, _ = job_id.partition("_")
        return array if is_element else None

    def memory_ns(self) -> int | None:
        """Return how long a job is listed after its end; None: not known.

        An element that waited this recently, and is missing while its array is listed, was cancelled.
        """
        return None

    def limit_array(self, array_id: str, at_once: int | None) -> Command | None:
        """Return the command that changes how many elements of an array run at once; None: it has none."""
        return None

    def nodes(self, names: Collection[str]) -> Command:
        """Return the question which of these nodes are reachable."""
        return self.identify()

    def nodes_back(self, done: CommandEnd) -> frozenset[str] | None:
        """Return the reachable nodes; None: no answer."""
        return frozenset()

    def nodes_given_up(self) -> frozenset[str]:
        """Return the nodes that the administrator has declared gone."""
        return frozenset()

    def last_words(self, log: str) -> tuple[EngineWord, str] | None:
        """Return how the engine has ended a job, by its own lines in the job's log; None if there are none."""
        return None

    def attach(self, job_id: str) -> tuple[str, ...] | None:
        """Return the command that opens a shell beside a job, on its node; None: the engine has none."""
        return None


_NOT_EXECUTED = (126, 127)  # the exit codes of a shell, and of the helper that runs commands


def is_unanswered(status: int | None, said: str, unreachable: re.Pattern[str]) -> bool:
    """Whether a command failed because it got no answer, and not because of its request.

    *unreachable* finds the engine's words for that in what it *said*. A command that could not be executed has asked
    nothing, unless it was too long to be executed at all.
    """
    if status is None or status < 0:
        return True
    if status in _NOT_EXECUTED:
        return os.strerror(errno.E2BIG) not in said
    return status != 0 and unreachable.search(said) is not None


_MOST_WORDS = 200  # characters of an engine's words about a job


def printable(text: str) -> str:
    """Return an engine's words about a job, not too many of them, without control characters."""
    text = whole_words(text.strip(), _MOST_WORDS)
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
