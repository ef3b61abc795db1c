"""What the history adds up to: for `spool stats`. No dispatcher is needed."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from spool.core.accounting import By, Day, Ledger, RunFilter, Statistics
from spool.core.errors import InvalidValue
from spool.core.model import SECOND_NS
from spool.formats.values import moment_or_delay
from spool.store.history import History
from spool.store.spool import Spool

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_DAYS_AGO = {"today": 0, "yesterday": 1}


@dataclass(frozen=True, slots=True)
class Report:
    """The sums, and what makes them worth less than they look: lines and files that could not be read."""

    statistics: Statistics
    unreadable: int
    problems: tuple[str, ...]


def report(spool: Spool, wanted: RunFilter, by: By | None) -> Report:
    """Read the history, rotated files too, and add it up; days are those of this machine's clock."""
    history = History(spool.root)
    ledger = Ledger(wanted, by, local_day)
    ledger.add(history.since(wanted.since_at_ns))
    return Report(ledger.statistics(), history.unreadable, tuple(history.problems))


def local_day(at_ns: int) -> Day:
    """Return the day of an instant by this machine's clock."""
    now = time.localtime(at_ns // SECOND_NS)
    start, end = (
        int(time.mktime((now.tm_year, now.tm_mon, now.tm_mday + later, 0, 0, 0, 0, 0, -1))) for later in (0, 1)
    )
    return f"{now.tm_year:04}-{now.tm_mon:02}-{now.tm_mday:02}", start * SECOND_NS, end * SECOND_NS


def moment(text: str, now_ns: int) -> int:
    """Return the instant that *text* means: "7d" (so long ago), "today", "yesterday", a date, a date and time.

    What has no offset is local time. Raises InvalidValue.
    """
    text = text.strip()
    if text.lower() in _DAYS_AGO:
        start = local_day(now_ns)[1]
        return start if text.lower() == "today" else local_day(start - 1)[1]
    if _DATE.fullmatch(text):
        text = f"{text}T00:00"
    try:
        at_ns, ago_ns = moment_or_delay(text)
    except InvalidValue as error:
        raise InvalidValue(f'{error}; a duration is so long ago, and a date or "today" will do') from None
    return at_ns if at_ns is not None else now_ns - (ago_ns or 0)
