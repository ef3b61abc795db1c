"""The one tree of errors, and the exit code of each of its branches.

| code | meaning | class |
|---|---|---|
| 0 | done | |
| 1 | the attempt failed | `SpoolError`, `NotAllSubmitted`, `StartRefused` |
| 2 | wrong usage | `UsageError`, `InvalidValue` |
| 3 | no such job | `NoSuchJob` |
| 4 | a job file, reservation or configuration is not valid | `InvalidFile` and its children |
| 5 | the spool cannot be used: missing, not ours, damaged, or the disk is full | `SpoolUnusable`, `InvalidRecord` |
| 6 | another dispatcher holds the lock | `LockHeld` |
| 7 | `dispatch --until-idle` is done, and a job failed | |
| 130 | interrupted with Ctrl-C | |

Commands that stand for a job (`wait`, `run`) exit with the job's own code instead, once it has one.

A message is one line and has one grammar, *cannot VERB THING: where: why; what to do*; `cannot` builds it. This module
imports almost nothing, because every command and every worker of a call starts with it.
"""

# ruff: noqa: N818  (an error is named for the problem that users meet)

from __future__ import annotations

import errno
from enum import IntEnum

TYPE_CHECKING = False  # that of `typing`, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from spool.core.model import Problem


class ExitCode(IntEnum):
    """The exit codes of the commands. The table above is the reference."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NO_SUCH_JOB = 3
    INVALID_FILE = 4
    SPOOL_UNUSABLE = 5
    LOCK_HELD = 6
    JOBS_FAILED = 7
    INTERRUPTED = 130


_SHOWN = 3  # of many names in a message

NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT))
"""The errors of a full disk or an exhausted quota."""

TOO_LITTLE = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))
"""The errors of a machine or process that is out of descriptors or memory, whatever the file."""

SHORTAGES = NO_ROOM | TOO_LITTLE | {errno.EAGAIN}
"""All errors of a start that say nothing about the job; the last means that the machine is out of processes."""


def cannot(verb: str, thing: str, why: str, *, where: str | None = None, remedy: str | None = None) -> str:
    """Return a message in the grammar of this module: *cannot VERB THING: where: why; what to do*."""
    place = f"{where}: " if where else ""
    end = f"; {remedy}" if remedy else ""
    return f"cannot {verb} {thing}: {place}{why}{end}"


def shown(text: str, keep: str = "") -> str:
    r"""Return *text* safe for a terminal: escape, as `\u001b`, what moves the cursor, or hides or reorders text.

    That is every unprintable character except those in *keep*: C0, C1, bidi controls, line separators, lone surrogates.
    The escapes are those of TOML. All text from a file, an argument or the environment goes through here.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    short = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}.get(char)
    return short or (f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}")


class SpoolError(Exception):
    """Any failure that is not a bug: a one-line message and an exit code."""

    exit_code: ExitCode = ExitCode.FAILED


class UsageError(SpoolError):
    """Wrong usage; nothing was done."""

    exit_code = ExitCode.USAGE


class InvalidValue(UsageError, ValueError):
    """A text does not match its grammar (a size, a duration, a name). The message says why, and gives a valid form."""


class NoSuchJob(SpoolError):
    """The spool has no job of that name."""

    exit_code = ExitCode.NO_SUCH_JOB


class NotAllSubmitted(SpoolError):
    """Some of the jobs that were submitted together are in the spool, and the others are not.

    `submitted` are the names of those that are, in their order.
    """

    def __init__(self, what: str, why: str, submitted: Iterable[str], count: int) -> None:
        self.submitted: tuple[str, ...] = tuple(submitted)
        first = ", ".join(self.submitted[:_SHOWN]) + (", …" if len(self.submitted) > _SHOWN else "")
        remedy = f"{len(self.submitted)} of the {count} jobs were submitted before it: {first}"
        super().__init__(cannot("submit", what, why, remedy=remedy))


class SpoolUnusable(SpoolError):
    """The spool is missing, not ours, damaged, or its disk is full."""

    exit_code = ExitCode.SPOOL_UNUSABLE


class InvalidRecord(SpoolUnusable):
    """A record in a metadir is complete but cannot be understood."""


class StartRefused(SpoolError):
    """The machine refuses what a start needs, and may allow it soon: this start did not happen and never will."""


class LockHeld(SpoolError):
    """Another dispatcher holds the lock."""

    exit_code = ExitCode.LOCK_HELD


class InvalidFile(SpoolError):
    """A file written by users is not valid: all of its problems, in the order of its lines.

    *what* names the file in messages: "job train", "the configuration".
    """

    exit_code = ExitCode.INVALID_FILE

    def __init__(self, what: str, problems: Iterable[Problem]) -> None:
        self.what = what
        self.problems: tuple[Problem, ...] = tuple(problems)
        first = self.problems[0].message if self.problems else "it is not valid"
        more = self.count - 1
        tail = f" (and {more:,} more)" if more > 0 else ""
        super().__init__(cannot("use", what, first + tail))

    @property
    def count(self) -> int:
        """Return the number of problems, including those not listed."""
        return sum(problem.stands_for for problem in self.problems)

    def without_lines(self) -> Self:
        """Return the same error for a user who has not seen the file."""
        from msgspec.structs import replace  # imported here, because few commands need it

        problems = [
            replace(problem, message=problem.message.replace(f" on line {problem.line}", "", 1), line=None)
            for problem in self.problems
        ]
        return type(self)(self.what, problems)


class InvalidJob(InvalidFile):
    """A job file is not valid."""


class InvalidReservation(InvalidFile):
    """A reservation is not valid."""


class InvalidConfig(InvalidFile):
    """The configuration is not valid."""
