"""Free text that a job, a hook or an engine has written, before spool keeps or shows it (FORMAT 4).

It may be anything: a hundred megabytes, terminal escapes, another encoding. Spool keeps one line of it that can be
printed anywhere and stored a million times.
"""

from __future__ import annotations

import re

from spool.core.errors import shown

MOST_BYTES = 1024
"""The longest text that is kept, in bytes of UTF-8."""

MOST_READ = 4096
"""The longest part of a one-line record that is read."""

_CUT = "…"
_METRIC = re.compile(r"[ \t]*([A-Za-z_][A-Za-z0-9_./@-]{0,39})[ \t]*=(.*)")
_MOST_METRICS = 20
_LONGEST_METRIC = 40  # characters of a value
_METRICS_TAIL = 8192  # bytes at the end of the file that count
_PEAK = re.compile(r"exceeded memory limit \(([0-9]{1,18}) > ([0-9]{1,18})\)", re.IGNORECASE | re.ASCII)


def one_line(text: bytes | str) -> str:
    """Return the first line of *text* that is not blank: printable, with single blanks, at most `MOST_BYTES` long."""
    if isinstance(text, bytes):
        text = text[: MOST_READ + 1].decode("utf-8", "replace")
    for line in text[:MOST_READ].splitlines():
        if words := line.split():
            return _shortened(" ".join(words))
    return ""


def metrics_in(text: bytes) -> tuple[tuple[str, str], ...]:
    """Return the metrics in the end of a file `metrics`: the last value of each, in the order of their first lines.

    Lines that are not `key = value` say nothing, and neither does what comes before the last few KiB.
    """
    if not text:
        return ()
    found: dict[str, str] = {}
    for line in text[-_METRICS_TAIL:].decode("utf-8", "replace").splitlines():
        match = _METRIC.fullmatch(line)
        value = one_line(match[2]) if match is not None else ""
        if match is not None and value and (match[1] in found or len(found) < _MOST_METRICS):
            found[match[1]] = value if len(value) <= _LONGEST_METRIC else f"{value[: _LONGEST_METRIC - 1]}…"
    return tuple(found.items())


def peak_in(words: str) -> int | None:
    """Return how many bytes a run had in memory when its engine ended it for that, in the engine's *words*; else None.

    Such words are `exceeded memory limit (324599808 > 52428800), being killed`.
    """
    match = _PEAK.search(words)
    if match is None:
        return None
    peak, limit = int(match[1]), int(match[2])
    return peak if peak > limit else None


def _shortened(line: str) -> str:
    """Return *line* with unprintable characters escaped, cut between two characters if it is too long."""
    if line.isascii() and line.isprintable() and len(line) <= MOST_BYTES:
        return line
    parts, size, fits = list[str](), 0, 0  # the first *fits* of *parts* leave room for the mark of the cut
    for character in line:
        part = shown(character)
        size += len(part.encode())
        if size > MOST_BYTES:
            return "".join(parts[:fits]).rstrip() + _CUT
        parts.append(part)
        if size <= MOST_BYTES - len(_CUT.encode()):
            fits = len(parts)
    return "".join(parts)
