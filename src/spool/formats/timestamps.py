"""Instants as text: RFC 3339 in UTC, for users and tools, and exact to the nanosecond for spool itself."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LATEST_NS = (1 << 63) - 1  # in the year 2262
_TEXT = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[Tt ]([0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?([Zz]|[+-][0-9]{2}:[0-9]{2})"
)


def render_instant(at_ns: int, *, digits: int = 9) -> str:
    """Return *at_ns* as RFC 3339 in UTC, the second with that many digits after its point (rounded down)."""
    seconds, rest = divmod(at_ns, 1_000_000_000)
    whole = _whole_second(seconds)
    return f"{whole}.{rest:09}"[: len(whole) + 1 + digits] + "Z" if digits else f"{whole}Z"


@lru_cache(maxsize=64)
def _whole_second(seconds: int) -> str:
    moment = time.gmtime(seconds)
    return (
        f"{moment.tm_year:04}-{moment.tm_mon:02}-{moment.tm_mday:02}"
        f"T{moment.tm_hour:02}:{moment.tm_min:02}:{moment.tm_sec:02}"
    )


def parse_instant(text: str) -> int | None:
    """Return an RFC 3339 date and time as ns since the epoch, exactly; None for any other text."""
    match = _TEXT.fullmatch(text)
    if match is None:
        return None
    date, clock, fraction, offset = match.groups()
    try:
        moment = datetime.fromisoformat(f"{date}T{clock}{offset.upper()}")
    except ValueError:
        return None
    return (moment - _EPOCH) // timedelta(seconds=1) * 1_000_000_000 + int((fraction or "0").ljust(9, "0"))


def at_lines(key: str, at_ns: int | None) -> str:
    """Return the two TOML lines of an instant, "" if it is unknown.

    The date and time is to the microsecond, because TOML readers may keep no more; `…_ns` beside it is exact.
    """
    return "" if at_ns is None else f"{key} = {render_instant(at_ns, digits=6)}\n{key}_ns = {at_ns}\n"


def read_at(keys: dict[str, Any], key: str) -> int | None:
    """Return the instant that `at_lines` wrote, preferably the exact one."""
    exact = keys.get(f"{key}_ns")
    if type(exact) is int:
        return exact if 0 <= exact <= _LATEST_NS else None
    moment = keys.get(key)
    if isinstance(moment, datetime) and moment.tzinfo is not None:
        at_ns = (moment - _EPOCH) // _MICROSECOND * 1000
        return at_ns if 0 <= at_ns <= _LATEST_NS else None
    return None
