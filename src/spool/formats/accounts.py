"""Lines of `history.jsonl` as the accounting needs them: a part of each, read a million at a time.

Instants are to the microsecond here: to have the nanoseconds would take three times as long.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import msgspec

from spool.core.model import OUTCOMES
from spool.core.tally import Account

_OUTCOMES = frozenset(state.value for state in OUTCOMES)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_DAY = 100_000  # since 1970, in the year 2243: later instants do not fit 64 bits
_NS_PER_MS = 1_000_000
_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class _Line(msgspec.Struct, gc=False):
    """The fields of `ends.HistoryLine` that are counted; here `null` is as good as absent."""

    job: str
    run: int
    outcome: str
    attempt: int = 1
    submitted_at: _Moment | None = None
    started_at: _Moment | None = None
    ended_at: _Moment | None = None
    user: str | None = None
    project: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    granted_cpus: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    gpu_uuids: tuple[str, ...] = ()
    peak_memory_bytes: int | None = None
    cpu_time_ms: int | None = None
    requeues: int = 0
    again: str | None = None
    executor: str | None = None


class _End(msgspec.Struct, gc=False):
    ended_at: _Moment | None = None


_decode = msgspec.json.Decoder(_Line).decode
_decode_end = msgspec.json.Decoder(_End).decode


def read_account(line: bytes) -> Account | None:
    """Return what one line of history says; None for one that cannot be understood: torn, of a later version."""
    try:
        read = _decode(line)
    except _ERRORS:
        return None
    if read.outcome not in _OUTCOMES:
        return None
    return Account(
        read.job,
        read.run,
        read.outcome,
        _instant(read.submitted_at),
        _instant(read.started_at),
        _instant(read.ended_at),
        read.granted_cpus,
        read.gpu_uuids,
        None if read.cpu_time_ms is None else read.cpu_time_ms * _NS_PER_MS,
        read.peak_memory_bytes,
        read.attempt,
        read.requeues,
        read.again,
        read.user,
        read.project,
        read.group,
        read.tags,
        read.executor,
    )


def read_end(line: bytes) -> int | None:
    """Return when the run of a line of history ended; None where the line does not say, or is none."""
    try:
        return _instant(_decode_end(line).ended_at)
    except _ERRORS:
        return None


def _instant(moment: datetime | None) -> int | None:
    if moment is None:
        return None
    since = moment - _EPOCH
    days = since.days
    if not -_LAST_DAY < days < _LAST_DAY:
        return None
    return (days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1_000
