"""The one tree of errors, and the exit code of each of its branches.

| code | meaning | class |
|---|---|---|
| 0 | done | |
| 1 | it was tried and failed | `SpoolError` |
| 2 | the command was called wrongly | `UsageError`, `InvalidValue` |
| 3 | there is no such job | `NoSuchJob` |
| 4 | a job file, reservation or configuration is not valid | `InvalidFile` and its children |
| 5 | the spool cannot be used: not there, not ours, damaged, the disk is full | `SpoolUnusable`, `InvalidRecord` |
| 6 | another dispatcher holds the lock | `LockHeld` |

Commands that stand for a job (`wait`, `run`) exit with the job's own code instead, once it has one.

A message is one line and has one grammar, *cannot VERB THING: where: why; what to do*; `cannot` puts it together.
"""

# ruff: noqa: N818  (an error is called by what is the matter, as users meet it)

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """What a command's exit code says. The table above is the reference."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NO_SUCH_JOB = 3
    INVALID_FILE = 4
    SPOOL_UNUSABLE = 5
    LOCK_HELD = 6


def cannot(verb: str, thing: str, why: str, *, where: str | None = None, remedy: str | None = None) -> str:
    """Return a message in the grammar of this module: *cannot VERB THING: where: why; what to do*."""
    place = f"{where}: " if where else ""
    end = f"; {remedy}" if remedy else ""
    return f"cannot {verb} {thing}: {place}{why}{end}"


class SpoolError(Exception):
    """Whatever may go wrong without being a bug: one line for people, and an exit code."""

    exit_code: ExitCode = ExitCode.FAILED


class UsageError(SpoolError):
    """The command was called wrongly; nothing was done."""

    exit_code = ExitCode.USAGE


class InvalidValue(UsageError, ValueError):
    """A text is not of the grammar it should be (a size, a duration, a name). Says why, and what would be."""


class NoSuchJob(SpoolError):
    """No job of that name is in the spool."""

    exit_code = ExitCode.NO_SUCH_JOB


class SpoolUnusable(SpoolError):
    """The spool is not there, not ours, damaged, or its disk is full."""

    exit_code = ExitCode.SPOOL_UNUSABLE


class InvalidRecord(SpoolUnusable):
    """A record in a metadir is whole, but says nothing that can be understood."""


class LockHeld(SpoolError):
    """Another dispatcher holds the lock."""

    exit_code = ExitCode.LOCK_HELD


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong in a file."""

    key: str | None  # dotted: "retry.max"; None where no key is to blame
    line: int | None  # counted from 1; None where no line is to blame (a key that is missing)
    message: str  # a sentence that can stand alone: names the key and the line, says what was probably meant


class InvalidFile(SpoolError):
    """A file that people write is not valid: everything that is wrong with it, in the order of its lines.

    *what* names the file for people: "job train", "the configuration".
    """

    exit_code = ExitCode.INVALID_FILE

    def __init__(self, what: str, problems: Iterable[Problem]) -> None:
        self.what = what
        self.problems = tuple(problems)
        first = self.problems[0].message if self.problems else "it is not valid"
        more = len(self.problems) - 1
        tail = f" (and {more} more)" if more > 0 else ""
        super().__init__(cannot("use", what, first + tail))


class InvalidJob(InvalidFile):
    """A job file is not valid."""


class InvalidReservation(InvalidFile):
    """A reservation is not valid."""


class InvalidConfig(InvalidFile):
    """The configuration is not valid."""
