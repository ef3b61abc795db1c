"""Sizes and durations: the one parser and the one writer of each; and lists of CPUs.

A size is a number and a binary unit: `"512M"`, `"16G"`, `"1.5G"`; K, M, G, T and P are powers of 1024, with or
without `B` or `iB` after them, in either case; `B` alone is bytes. It comes out as whole bytes, rounded down.

A duration is numbers with units, largest first (`"90s"`, `"1h30m"`, `"500ms"`; w, d, h, m, s, ms, us, ns), or a
clock reading, `"HH:MM:SS"` or `"D-HH:MM:SS"`. It comes out as whole nanoseconds, rounded down.

A number without a unit is an error in both, because schedulers disagree about its unit. So is white space around
either: such a text comes from a mistake.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from spool.core.errors import InvalidValue

LARGEST = (1 << 63) - 1
"""The largest size and duration: it fits into every format (292 years, 8 EiB)."""

_LONGEST_TEXT = 100  # longer texts are invalid, and must not fill the caches

MOST_CPUS = 1 << 16
"""No CPU has this number: the kernel numbers them from 0, up to its NR_CPUS."""

_SIZE = re.compile(r"([0-9]{1,20})(?:\.([0-9]{1,20}))? ?(?:([KMGTP])(?:I?B)?|B)", re.IGNORECASE | re.ASCII)
_NUMBER = re.compile(r"[+-]?[0-9][0-9_]*(?:\.[0-9]*)?")
_POWER = {None: 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}

_UNIT_NS = {
    "w": 7 * 86_400_000_000_000,
    "d": 86_400_000_000_000,
    "h": 3_600_000_000_000,
    "m": 60_000_000_000,
    "s": 1_000_000_000,
    "ms": 1_000_000,
    "us": 1_000,
    "ns": 1,
}
_PART = r"([0-9]{1,20})(?:\.([0-9]{1,20}))? ?(ms|us|ns|w|d|h|m|s) ?"
_PARTS = re.compile(_PART)
_DURATION = re.compile(f"(?:{_PART})+")
_CLOCK = re.compile(r"(?:([0-9]{1,6})-)?([0-9]{1,6}):([0-9]{2}):([0-9]{2})")


def parse_size(text: object) -> int:
    """Return *text* as bytes. Raises InvalidValue, which says what was probably meant."""
    if type(text) is str:
        return _parse_size(text)
    raise InvalidValue(_not_text(text, "size", _BARE_SIZE))


def parse_duration(text: object) -> int:
    """Return *text* as nanoseconds. Raises InvalidValue, which says what was probably meant."""
    if type(text) is str:
        return _parse_duration(text)
    raise InvalidValue(_not_text(text, "duration", _BARE_DURATION))


_BARE_SIZE = (
    "has no unit, and what a bare number means differs between schedulers (bytes, kB, MB, MiB); "
    'write "{0}G" for GiB or "{0}M" for MiB'
)
_BARE_DURATION = (
    "has no unit, and what a bare number means differs between schedulers (seconds, minutes); "
    'write "{0}s" for seconds, "{0}m" for minutes or "{0}h" for hours'
)


def _not_text(value: object, kind: str, bare: str) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = _shorten(str(value)) if abs(value) < 1e18 else "1"
        return f"{number} {bare.format(number)}"
    return f"is not a {kind} in quotes"


def _blanks_around(bare: str) -> str:
    return f'has white space around it; write "{bare}"'


def whole_words(text: str, most: int) -> str:
    """Return *text* in at most *most* characters, cut after a word and with … where it was longer."""
    if len(text) <= most:
        return text
    head, space, _ = text[:most].rpartition(" ")
    return f"{head if space else text[: most - 2]} …"


def _shorten(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."


@lru_cache(maxsize=4096)
def _parse_size(text: str) -> int:
    bare = text.strip() if len(text) <= _LONGEST_TEXT else ""
    match = _SIZE.fullmatch(bare)
    if match is None:
        raise InvalidValue(_why_no_size(text))
    if bare != text:
        raise InvalidValue(_blanks_around(bare))
    whole, fraction, unit = match.groups()
    factor = 1 << 10 * _POWER[unit.upper() if unit else None]
    size: int = int(whole) * factor
    if fraction:
        size += int(fraction) * factor // 10 ** len(fraction)
    if size > LARGEST:
        raise InvalidValue(f'"{_shorten(text)}" is larger than any machine')
    return size


def _why_no_size(text: str) -> str:
    bare = text.strip()
    if not bare:
        return 'is empty; a size is a number and a unit, such as "16G"'
    if bare.startswith("-"):
        return f'"{_shorten(bare)}" is negative'
    if _NUMBER.fullmatch(bare):
        return f'"{_shorten(bare)}" {_BARE_SIZE.format(_shorten(bare))}'
    return f'"{_shorten(text)}" is not a size; a size is a number and a unit, K, M, G, T or P, such as "16G"'


@lru_cache(maxsize=4096)
def _parse_duration(text: str) -> int:
    bare = text.strip() if len(text) <= _LONGEST_TEXT else "?"
    clock = _CLOCK.fullmatch(bare)
    if clock is not None:
        total = _clock_ns(clock, text)
    elif _DURATION.fullmatch(bare):
        total = _units_ns(bare)
    else:
        raise InvalidValue(_why_no_duration(text))
    if total > LARGEST:
        raise InvalidValue(f'"{_shorten(text)}" is longer than 292 years')
    if bare != text:
        raise InvalidValue(_blanks_around(bare))
    return total


def _clock_ns(clock: re.Match[str], text: str) -> int:
    days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
    if minutes > 59 or seconds > 59:
        raise InvalidValue(f'"{_shorten(text)}" has more than 59 minutes or seconds')
    if clock.group(1) is not None and hours > 23:
        raise InvalidValue(f'"{_shorten(text)}" has more than 23 hours in addition to its days')
    return (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * _UNIT_NS["s"]


def _units_ns(bare: str) -> int:
    total = 0
    last = LARGEST
    for whole, fraction, unit in _PARTS.findall(bare):
        factor = _UNIT_NS[unit]
        if factor >= last:
            raise InvalidValue(f'"{_shorten(bare)}" must name each unit once, the largest first, as in "1h30m"')
        last = factor
        total += int(whole) * factor
        if fraction:
            total += int(fraction) * factor // 10 ** len(fraction)
    return total


def _why_no_duration(text: str) -> str:
    bare = text.strip()
    if not bare:
        return 'is empty; a duration is a number and a unit, as in "90s" or "1h30m"'
    if bare.startswith("-"):
        return f'"{_shorten(bare)}" is negative'
    if _NUMBER.fullmatch(bare):
        return f'"{_shorten(bare)}" {_BARE_DURATION.format(_shorten(bare))}'
    if re.fullmatch(r"[0-9]+:[0-9]+", bare):
        return f'"{_shorten(bare)}" could be minutes and seconds or hours and minutes; write HH:MM:SS, as in "01:30:00"'
    if re.fullmatch(r"[0-9]+-[0-9:]+", bare):
        return f'"{_shorten(bare)}" is not D-HH:MM:SS, as in "1-12:00:00"'
    word = re.fullmatch(r"([0-9.]+) ?([smhdw])(?:ecs?|econds?|ins?|inutes?|rs?|ours?|ays?|eeks?)", bare)
    forms = f'"{word[1]}{word[2]}"' if word else '"90s", "30m", "2h", "1d", "1h30m", HH:MM:SS or D-HH:MM:SS'
    return f'"{_shorten(text)}" is not a duration; write {forms}'


def format_size(size_bytes: int) -> str:
    """Return the shortest text that `parse_size` turns back into exactly *size_bytes*: "16G", "1536M", "0B"."""
    if size_bytes:
        for unit in "PTGMK":
            factor = 1 << 10 * _POWER[unit]
            if size_bytes % factor == 0:
                return f"{size_bytes // factor}{unit}"
    return f"{size_bytes}B"


def format_duration(duration_ns: int) -> str:
    """Return the text that `parse_duration` turns back into exactly *duration_ns*: "1h30m", "500ms", "0s"."""
    parts = []
    rest = duration_ns
    for unit, factor in _UNIT_NS.items():
        if unit == "w":
            continue
        count, rest = divmod(rest, factor)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def show_size(size_bytes: int) -> str:
    """Return *size_bytes* in words: "24 GiB", "11.2 GiB", "642 MiB". At most one decimal, so not exact."""
    for unit, name in (("P", "PiB"), ("T", "TiB"), ("G", "GiB"), ("M", "MiB"), ("K", "KiB")):
        factor = 1 << 10 * _POWER[unit]
        if abs(size_bytes) >= factor:
            tenths = (size_bytes * 10 + factor // 2) // factor
            whole, tenth = divmod(tenths, 10)
            return f"{whole}.{tenth} {name}" if tenth and abs(whole) < 100 else f"{whole} {name}"
    return f"{size_bytes} B"


def show_duration(duration_ns: int) -> str:
    """Return *duration_ns* in words, its two largest units: "1h02m", "3d04h", "45s", "0.4s"."""
    seconds = duration_ns // _UNIT_NS["s"]
    if seconds < 0:
        return f"-{show_duration(-duration_ns)}"
    if seconds >= 86400:
        return f"{seconds // 86400}d{seconds % 86400 // 3600:02}h"
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02}m"
    if seconds >= 60:
        return f"{seconds // 60}m{seconds % 60:02}s"
    tenths = duration_ns // 100_000_000 % 10
    return f"{seconds}.{tenths}s" if seconds < 10 and tenths else f"{seconds}s"


def show_percent(part: float) -> str:
    """Return a fraction in words: "87%"; a part of one per cent with a decimal, "0.4%"."""
    percent = 100 * part
    return f"{percent:.1f}%" if 0 < percent < 0.95 else f"{percent:.0f}%"


@lru_cache(maxsize=1024)
def cpus_in(text: str) -> tuple[int, ...]:
    """Return the CPUs of a list as the kernel writes it, "0-3,8", in order; none if *text* is no such list."""
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        if not all(end.isdecimal() and end.isascii() and len(end) < 6 for end in ends):
            return ()
        begin, end = map(int, ends)
        if not begin <= end < MOST_CPUS:
            return ()
        found.update(range(begin, end + 1))
    return tuple(sorted(found))


def nearest_rank(ordered: Sequence[int], percent: int) -> int | None:
    """Return the nearest-rank percentile: the smallest of *ordered* that *percent* of them do not exceed."""
    return ordered[max(-(-len(ordered) * percent // 100), 1) - 1] if ordered else None
