"""Lines of `history.jsonl` as the accounting needs them: a part of each, a hundred lines at a time, of a million.

Instants are to the microsecond here: to have the nanoseconds would take three times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

import msgspec

from spool.core.accounting import Account
from spool.core.model import OUTCOMES

_OUTCOMES = frozenset(state.value for state in OUTCOMES)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_DAY = 100_000  # since 1970, in the year 2243: later instants do not fit 64 bits
_NS_PER_MS = 1_000_000
_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class _Line(msgspec.Struct, gc=False):
    """The fields of `ends.HistoryLine` that are counted, and what is made of them: an `Account`.

    Here `null` is as good as absent.
    """

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
    cpus: _Count = msgspec.field(default=0, name="granted_cpus")
    gpus: tuple[str, ...] = msgspec.field(default=(), name="gpu_uuids")
    resources: dict[str, _Count] | None = msgspec.field(default=None, name="granted_resources")
    peak_memory_bytes: int | None = None
    cpu_time_ms: int | None = None
    requeues: int = 0
    again: str | None = None
    executor: str | None = None
    submitted_at_ns: int | None = None  # these four are in no line
    started_at_ns: int | None = None
    ended_at_ns: int | None = None
    cpu_time_ns: int | None = None


class _End(msgspec.Struct, gc=False):
    ended_at: _Moment | None = None


_decode = msgspec.json.Decoder(_Line).decode
_decode_end = msgspec.json.Decoder(_End).decode


def read_accounts(text: bytes) -> tuple[Sequence[Account], int]:
    """Return what lines of history say, and how many of them cannot be understood: torn, of a later version.

    A last line without its newline may be half written: it is no such line.
    """
    *lines, last = text.split(b"\n")
    try:
        read = [_decode(line) for line in lines]
    except _ERRORS:
        lines = [line for line in lines if line.strip(b"\0 \r")]
        read = [each for each in map(_read, lines) if each is not None]
    known = [line for line in read if line.outcome in _OUTCOMES]
    unreadable = len(lines) - len(known)
    half = _read(last) if last else None
    if half is not None and half.outcome in _OUTCOMES:
        known.append(half)
    _convert(known)
    return known, unreadable


def _read(line: bytes) -> _Line | None:
    try:
        return _decode(line)
    except _ERRORS:
        return None


def _convert(lines: list[_Line]) -> None:
    submitted = _instants([line.submitted_at for line in lines])
    started = _instants([line.started_at for line in lines])
    ended = _instants([line.ended_at for line in lines])
    for line, submitted_at_ns, started_at_ns, ended_at_ns in zip(lines, submitted, started, ended, strict=True):
        line.submitted_at_ns, line.started_at_ns, line.ended_at_ns = submitted_at_ns, started_at_ns, ended_at_ns
        line.peak_memory_bytes = line.peak_memory_bytes or None
        line.cpu_time_ns = None if line.cpu_time_ms is None else line.cpu_time_ms * _NS_PER_MS


def read_end(line: bytes) -> int | None:
    """Return when the run of a line of history ended; None where the line does not say, or is none."""
    try:
        return _instants([_decode_end(line).ended_at])[0]
    except _ERRORS:
        return None


def _instants(moments: list[datetime | None]) -> list[int | None]:
    return [
        None
        if moment is None or not -_LAST_DAY < (days := (since := moment - _EPOCH).days) < _LAST_DAY
        else (days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1_000
        for moment in moments
    ]
