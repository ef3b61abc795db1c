"""Moments as people write them on a command line: "16:00", "tomorrow 8:00", "now + 2 hours", "friday", "24 dec".

Files hold only RFC 3339 and durations; the command line converts these words. A text that two people could read
differently is refused, with what to write instead. A day without a time is its beginning, so that on a Friday "friday"
is that of next week. A time without a day is the next such time, or the last one where the past is asked for.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta

from spool.core.errors import InvalidValue
from spool.core.units import parse_duration
from spool.formats.toml import show
from spool.formats.values import moment_or_delay, with_offset

_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_UNITS = {"s": "s", "sec": "s", "second": "s", "m": "m", "min": "m", "minute": "m", "h": "h", "hr": "h", "hour": "h",
          "d": "d", "day": "d", "w": "w", "week": "w"}  # fmt: skip
_TIME = re.compile(
    r"(?:^| )(?:(\d{1,2}):(\d{2})(?::(\d{2}))?(?: ?([ap])\.?m\.?)?|(\d{1,2}) ?([ap])\.?m\.?)(?= |$)", re.ASCII
)
_SPAN = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) ?([a-z]+?)s?(?: and| |(?=\d)|$) ?", re.ASCII)
_ISO = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_NEEDS_NO_READING = re.compile(r"\d{4}-\d{1,2}-\d{1,2}[Tt ]\d.*", re.ASCII)
EXAMPLES = 'write "16:00", "tomorrow 8:00", "friday", "now + 2 hours" or "2026-01-31 16:00"'


def understood(text: str, now_ns: int, *, past: bool = False) -> str:
    """Return *text* as a date and time or a duration, as a file has it, seen from *now_ns* in local time.

    With *past* the last such moment is meant, not the next. A duration is returned unchanged, and so is any other text,
    for its own reader. Raises InvalidValue for an ambiguous text, an impossible moment, or one that
    has passed.
    """
    if _NEEDS_NO_READING.fullmatch(text.strip()):
        return str(with_offset(text.strip()))
    words = " ".join(re.sub(r"[,_]|\bat\b|\bon\b", " ", text.lower()).split())
    now = datetime.fromtimestamp(now_ns // 1_000_000_000)
    if words == "now":
        return _written(now)
    if (away := re.fullmatch(r"(?:now ?)?([+-]) ?(.*)|(in) (.*)|(.*) (ago)", words)) is not None:
        return _written(_away(text, now, away, past=past))
    if _ambiguous(words) is not None:
        raise InvalidValue(f"{show(text)} {_ambiguous(words)}")
    span = _span(words)
    if span is not None and " " in words:
        return span
    found = _calendar(words, now, text, past=past) if words else None
    if found is None and re.search("[0-9]", words) is None:
        raise InvalidValue(f"{show(text)} is not a point in time; {EXAMPLES}")
    return text if found is None else _written(found)


def moment(text: str, now_ns: int) -> int:
    """Return the instant that *text* means: "7d" (that long ago), "today", "yesterday", a date, a date and time.

    What has no offset is local time. Raises InvalidValue.
    """
    text = text.strip()
    if _ISO.fullmatch(text):
        text = f"{text}T00:00"
    try:
        at_ns, ago_ns = moment_or_delay(understood(text, now_ns, past=True))
    except InvalidValue as error:
        raise InvalidValue(f'{error}; or a duration such as "7d" (7 days ago), a date, or "today"') from None
    return at_ns if at_ns is not None else now_ns - (ago_ns or 0)


def _written(moment: datetime) -> str:
    try:
        return datetime.fromtimestamp(moment.timestamp(), UTC).astimezone().isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        raise InvalidValue(f"{moment.isoformat()} is out of range") from None


def _away(text: str, now: datetime, match: re.Match[str], *, past: bool) -> datetime:
    """Return the moment at that distance from now."""
    sign, span = ("-", match[5]) if match[6] else (match[1] or "+", match[2] or match[4] or "")
    if sign == "-" and not past:
        raise InvalidValue(f"{show(text)} is in the past; {EXAMPLES}")
    if re.fullmatch("[0-9.]+", span):
        raise InvalidValue(f'{show(text)} has no unit; write "now + {span} minutes" or "now + {span} hours"')
    length = _span(span) or span
    try:
        away_s = parse_duration(length.replace(" ", "")) // 1_000_000_000
        return datetime.fromtimestamp(now.timestamp() + (away_s if sign == "+" else -away_s))
    except (ValueError, OverflowError, OSError):
        raise InvalidValue(f'{show(text)} is not a time from now; write "now + 2 hours" or "+90m"') from None


def _span(words: str) -> str | None:
    """Return "2 hours and 30 minutes" as "2h30m", None for anything else."""
    parts = []
    at = 0
    while at < len(words):
        match = _SPAN.match(words, at)
        if match is None or match[2] not in _UNITS:
            return None
        parts.append(match[1] + _UNITS[match[2]])
        at = match.end()
    return "".join(parts) or None


def _ambiguous(words: str) -> str | None:
    """Return how *words* could mean several moments, and what to write instead; None if they are clear."""
    if re.fullmatch(r"\d{1,2}:\d{2}:\d{2}", words):
        hours, minutes, _ = words.split(":")
        return f'could be a time of day or a duration; write "{hours}:{minutes}", or "now + {int(hours)} hours"'
    if re.fullmatch(r"\d{1,4}", words) and len(words) == 4:
        return f'could be a time of day or a year; write "{words[:2]}:{words[2:]}"'
    if re.search(r"\d[./]\d", words):
        return 'could have day and month in either order; write the date as in "2026-01-31 16:00"'
    if match := re.match(r"(?:next|this|coming|last) (\w+)", words):
        day = match[1]
        other = "now + 1 week" if day == "week" else f"{day}" if _weekday(day) is not None else "2026-01-31"
        return f'could be of this week or of the next; write "{other}" or a date'
    if "midnight" in words and words != "midnight":
        return 'could be the midnight before or after that day; write "tomorrow 0:00"'
    return None


def _calendar(words: str, now: datetime, text: str, *, past: bool) -> datetime | None:
    """Return the moment that a day, a time, or both name; None for any other words."""
    words = re.sub(r"\bnoon\b", "12:00", re.sub(r"\bmidnight\b", "0:00", words))
    match = _TIME.search(words)
    clock = None
    if match is not None:
        clock = _clock(match, text)
        words = " ".join((words[: match.start()] + " " + words[match.end() :]).split())
    if not words:
        assert clock is not None
        return _nearest(now, clock, timedelta(days=1), past=past)
    day = _weekday(words)
    if day is not None:
        first = now + timedelta(days=(day - now.weekday()) % 7)
        return _nearest(first, clock or timedelta(), timedelta(days=7), past=past, now=now)
    which = _day(words, now, past=past)
    if which is None:
        if clock is not None or any(_weekday(word) is not None for word in words.split()):
            raise InvalidValue(f"{show(text)} is not a known point in time; {EXAMPLES}")
        return None
    if clock is None and words == "today" and not past:
        return now
    found = datetime(which.year, which.month, which.day) + (clock or timedelta())
    if words == "today" and found < now and not past:
        raise InvalidValue(f'{show(text)} is in the past; write "tomorrow {found:%H:%M}"')
    return found


def _clock(match: re.Match[str], text: str) -> timedelta:
    hour, minute, second = int(match[1] or match[5]), int(match[2] or 0), int(match[3] or 0)
    half = match[4] or match[6]
    if hour > (12 if half else 23) or (half and hour == 0) or minute > 59 or second > 59:
        raise InvalidValue(f'{show(text)} is not a time of day, "0:00" to "23:59"')
    if half:
        hour = hour % 12 + (12 if half == "p" else 0)
    return timedelta(hours=hour, minutes=minute, seconds=second)


def _nearest(
    first: datetime, clock: timedelta, step: timedelta, *, past: bool, now: datetime | None = None
) -> datetime:
    """Return the next or last moment with that time of day, on the day of *first* or a multiple of *step* away."""
    now_s = (now or first).timestamp()
    found = datetime(first.year, first.month, first.day) + clock
    if past:
        return found if found.timestamp() <= now_s else found - step
    soon = (each for each in (found, found.replace(fold=1)) if each.timestamp() > now_s)  # 2:30 may come twice
    return next(soon, found + step)


def _weekday(word: str) -> int | None:
    short = [number for number, day in enumerate(_DAYS) if len(word) >= 3 and day.startswith(word)]
    return short[0] if short else None


def _day(words: str, now: datetime, *, past: bool) -> date | None:
    """Return the day that *words* name: today, tomorrow, yesterday, 2026-01-31, 24 dec, december 24 2026."""
    apart = {"today": 0, "tomorrow": 1, "yesterday": -1}.get(words)
    if apart is not None and (past or apart >= 0):
        return (now + timedelta(days=apart)).date()
    try:
        if _ISO.fullmatch(words):
            return date.fromisoformat(words)
        match = re.fullmatch(r"(?:(\d{1,2})\.? ([a-z]{3,9})|([a-z]{3,9}) (\d{1,2}))(?: (\d{4}))?", words, re.ASCII)
        month = (match[2] or match[3])[:3] if match is not None else ""
        if match is None or month not in _MONTHS:
            return None
        found = date(int(match[5] or now.year), _MONTHS.index(month) + 1, int(match[1] or match[4]))
        if match[5] is None and (found > now.date() if past else found < now.date()):
            found = found.replace(year=found.year + (-1 if past else 1))
    except ValueError:
        raise InvalidValue(f'"{words}" does not exist') from None
    return found
