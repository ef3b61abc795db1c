"""`#SPOOL` lines: options of `spool submit` that stand in the script itself.

    #!/bin/sh
    # Trains the small model.
    #SPOOL --gpus 1 --time-limit 2h
    #SPOOL --group "night runs"

Only the head of the script is read: the lines before the first that is neither empty nor a comment. `##SPOOL` is a
comment like any other.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from spool.core.errors import UsageError, cannot

_DIRECTIVE = re.compile(r"#SPOOL(?:[ \t]+(.*))?")
_MAX_HEAD_BYTES = 64 * 1024


def words(script: bytes, what: str) -> list[str]:
    """Return the option words of a script's `#SPOOL` lines, in their order; *what* names the script in errors.

    Raises UsageError, which names the line.
    """
    found: list[str] = []
    for number, line in _head(script):
        match = _DIRECTIVE.fullmatch(line)
        if match is None:
            continue
        try:
            options = shlex.split(match.group(1) or "", comments=True)
        except ValueError as error:
            raise _wrong(what, number, f"{str(error).lower()} in {line!r}") from None
        if options and not options[0].startswith("-"):
            raise _wrong(what, number, f"{options[0]!r} is not an option; write them as in `#SPOOL --gpus 1`")
        if "\0" in line:
            raise _wrong(what, number, "it has a NUL")
        found += options
    return found


def late_lines(script: bytes) -> list[int]:
    """Return the numbers of `#SPOOL` lines that stand too late to be read, for a warning."""
    last = len(list(_head(script)))
    lines = script[:_MAX_HEAD_BYTES].decode(errors="replace").split("\n")
    return [number for number, line in enumerate(lines, 1) if number > last and _DIRECTIVE.fullmatch(line.rstrip("\r"))]


def _head(script: bytes) -> Iterator[tuple[int, str]]:
    """Yield the lines of the head, numbered from 1."""
    for number, line in enumerate(script[:_MAX_HEAD_BYTES].split(b"\n"), 1):
        bare = line.strip()
        if bare and not bare.startswith(b"#"):
            return
        yield number, line.rstrip(b"\r").decode(errors="surrogateescape")


def _wrong(what: str, number: int, why: str) -> UsageError:
    return UsageError(cannot("read", f"the #SPOOL lines of {what}", why, where=f"line {number}"))
