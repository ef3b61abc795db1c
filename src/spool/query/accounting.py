"""Sums over the history: for `spool stats`."""

from __future__ import annotations

import time

from msgspec import Struct

from spool.core.accounting import By, Day, Ledger, RunFilter, Statistics
from spool.core.model import SECOND_NS
from spool.store.history import History
from spool.store.spool import Spool


class AccountingReport(Struct, frozen=True):
    """The sums, and the lines and files that could not be read."""

    statistics: Statistics
    unreadable: int
    problems: tuple[str, ...]


def account(spool: Spool, wanted: RunFilter, by: By | None) -> AccountingReport:
    """Return the sums over the history, rotated files included; days are those of this machine's clock."""
    history = History(spool.root)
    ledger = Ledger(wanted, by, local_day)
    ledger.add(history.since(wanted.since_at_ns))
    return AccountingReport(ledger.statistics(), history.unreadable, tuple(history.problems))


def local_day(at_ns: int) -> Day:
    """Return the day of an instant by this machine's clock."""
    now = time.localtime(at_ns // SECOND_NS)
    start, end = (
        int(time.mktime((now.tm_year, now.tm_mon, now.tm_mday + later, 0, 0, 0, 0, 0, -1))) for later in (0, 1)
    )
    return f"{now.tm_year:04}-{now.tm_mon:02}-{now.tm_mday:02}", start * SECOND_NS, end * SECOND_NS
