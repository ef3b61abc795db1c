"""Times on a command line: "16:00", "tomorrow 8:00", "friday", "friday 8:00", "2h", "2026-01-31 16:00".

Files hold only RFC 3339 and durations; the command line converts the other forms. A day without a time is its
beginning, so that on a Friday "friday" is that of next week. A time without a day is the next such time, or the last
one where the past is asked for.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from spool.core.errors import InvalidValue
from spool.core.units import parse_duration
from spool.formats.toml import show
from spool.formats.values import moment_or_delay, with_offset

_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_CLOCK = r"([01]?\d|2[0-3]):([0-5]\d)"
_WORDS = re.compile(rf"(?=.)([a-z]{{3,}})?(?:(?:^| ){_CLOCK})?", re.ASCII)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_FORMS = 'write "16:00", "tomorrow 8:00", "friday", "friday 8:00", "2h" or "2026-01-31 16:00"'


def understood(text: str, now_ns: int, *, past: bool = False) -> str:
    """Return *text* as a date and time or a duration, as a file has it, seen from *now_ns* in local time.

    With *past* the last such moment is meant, not the next. Raises InvalidValue.
    """
    words = " ".join(text.lower().split())
    if _DATE.match(words):
        return str(with_offset(f"{words}T00:00" if _DATE.fullmatch(words) else text.strip()))
    match = _WORDS.fullmatch(words)
    found = _calendar(match, datetime.fromtimestamp(now_ns // 1_000_000_000), past=past) if match is not None else None
    if found is not None:
        return datetime.fromtimestamp(found.timestamp(), UTC).astimezone().isoformat(timespec="seconds")
    length = words if past else words.removeprefix("+")
    try:
        if ":" in length:  # "16:00:00" could be a time of day or a duration
            raise InvalidValue(f"{show(text)} is not a time")
        parse_duration(length)
    except InvalidValue as error:
        told = error if length[:1].isdigit() else f"{show(text)} is not a time"
        raise InvalidValue(f"{told}; {_FORMS}") from None
    return length


def moment(text: str, now_ns: int) -> int:
    """Return the past instant that *text* means; a duration such as "7d" is that long ago. Raises InvalidValue."""
    at_ns, ago_ns = moment_or_delay(understood(text, now_ns, past=True))
    return at_ns if at_ns is not None else now_ns - (ago_ns or 0)


def _calendar(match: re.Match[str], now: datetime, *, past: bool) -> datetime | None:
    """Return the moment that a day, a time, or both name; None for another word."""
    day, clock = match[1], timedelta(hours=int(match[2] or 0), minutes=int(match[3] or 0))
    midnight = datetime(now.year, now.month, now.day)
    if day == "tomorrow":
        return midnight + timedelta(days=1) + clock
    if day is None:
        return _nearest(midnight + clock, now, timedelta(days=1), past=past)
    number = next((number for number, name in enumerate(_DAYS) if name.startswith(day)), None)
    if number is None:
        return None
    first = midnight + timedelta(days=(number - now.weekday()) % 7)
    return _nearest(first + clock, now, timedelta(days=7), past=past)


def _nearest(found: datetime, now: datetime, step: timedelta, *, past: bool) -> datetime:
    """Return the next or last moment that is *found* or a multiple of *step* away."""
    now_s = now.timestamp()
    if past:
        return found if found.timestamp() <= now_s else found - step
    soon = (each for each in (found, found.replace(fold=1)) if each.timestamp() > now_s)  # 2:30 may come twice
    return next(soon, found + step)
