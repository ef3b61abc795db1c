"""Free text that a job, a hook or an engine has written, before spool keeps or shows it (FORMAT 4).

It may be anything: a hundred megabytes, escapes of a terminal, another encoding. What is taken over
is one line that can be printed anywhere and stored a million times.
"""

from __future__ import annotations

from spool.core.errors import shown

MOST_BYTES = 1024
"""The longest text that is taken over, in UTF-8."""

MOST_READ = 4096
"""How much of a record of one line is read: a longer one is cut there."""

_CUT = "…"


def one_line(text: bytes | str) -> str:
    """Return the first line of *text* that says anything: printable, its blanks single, at most `MOST_BYTES` long."""
    if isinstance(text, bytes):
        text = text[: MOST_READ + 1].decode("utf-8", "replace")
    for line in text[:MOST_READ].splitlines():
        if words := line.split():
            return _shortened(" ".join(words))
    return ""


def _shortened(line: str) -> str:
    """Return a line with what cannot be printed escaped, cut between two characters where it is too long."""
    if line.isascii() and line.isprintable() and len(line) <= MOST_BYTES:
        return line
    parts, size, fits = list[str](), 0, 0  # of *parts*, the first *fits* leave room for the mark of the cut
    for character in line:
        part = shown(character)
        size += len(part.encode())
        if size > MOST_BYTES:
            return "".join(parts[:fits]).rstrip() + _CUT
        parts.append(part)
        if size <= MOST_BYTES - len(_CUT.encode()):
            fits = len(parts)
    return "".join(parts)
