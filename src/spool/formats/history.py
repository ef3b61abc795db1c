"""The ends of runs, text to value and back: `result.toml`, and the lines of `history.jsonl`, one by one or for sums.

The rules by which both may change from version to version are in `run_records`. Sums over a million lines read a part
of each, a hundred lines at a time, with instants to the microsecond: nanoseconds would take three times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from sys import intern
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from spool.core.errors import InvalidRecord, cannot
from spool.core.model import OUTCOMES, SECOND_NS, Request, Result, RunAccount
from spool.formats.run_records import GRANT, USE
from spool.formats.wire import Table

_OUTCOMES = frozenset(state.value for state in OUTCOMES)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_DAY = 100_000  # since 1970, in the year 2243: later instants do not fit 64 bits
_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_LATE_NS = 60 * SECOND_NS  # from this long after the end, a line states when it was written

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Moment = Annotated[datetime, msgspec.Meta(tz=True)]

_REQUEST = Table(
    "a result record",
    Request,
    """
    cpus! gpus! memory_bytes gpu_memory_bytes gpu_min_memory_bytes gpu_type=gpu_types:alone gpu_types:several
    memory_auto gpu_memory_auto resources
    """,
)

# 0 bytes once meant an unknown peak. CPU time has two keys: the later one is exact, and is read last.
_RESULT = Table(
    "a result record",
    Result,
    """
    job:name run attempt:positive! outcome reason! exit_code submitted_at started_at ended_at
    ended_at_is=end_is_bound:bound peak_memory_bytes:positive cpu_time_ms cpu_time_ns requeues suspended_ns again
    again_at user project group tags executor host node request:request! grant:grant parameters metrics gpu_use:uses
    """,
    {"attempt": 1, "reason": ""},
    request=_REQUEST.inner(),
    grant=GRANT.inner(),
    uses=USE.each(),
)

HISTORY = Table(
    "a line of the history",
    Result,
    """
    job:name run attempt:positive outcome reason submitted_at started_at ended_at ended_at_is=end_is_bound:bound
    recorded_at exit_code signal=exit_code:signal user project group tags
    cpus=request.cpus memory_bytes=request.memory_bytes gpus=request.gpus gpu_memory_bytes=request.gpu_memory_bytes
    gpu_min_memory_bytes=request.gpu_min_memory_bytes gpu_type=request.gpu_types:alone
    gpu_types=request.gpu_types:several memory_auto=request.memory_auto gpu_memory_auto=request.gpu_memory_auto
    resources=request.resources
    granted_cpus=grant.cpus granted_memory_bytes=grant.memory_bytes granted_gpu_memory_bytes=grant.gpu_memory_bytes
    granted_gpus=grant.gpus_elsewhere:positive gpu_uuids=grant.gpu_uuids gpu_indices=grant.gpu_indices
    granted_resources=grant.resources resource_indices=grant.resource_indices
    peak_memory_bytes:positive cpu_time_ms requeues again again_at executor host node suspended_ms gpu_use:uses
    cpu_list=grant.cpu_list
    """,
    {"attempt": 1, "reason": ""},
    uses=USE.each(),
)
"""One line of `history.jsonl`: the accounting data of one ended run, flat. Unknown values are absent."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(HISTORY.json).decode


render_result, parse_result = _RESULT.render, _RESULT.parse
"""`result.toml`."""


def render_history(result: Result, now_ns: int | None = None) -> bytes:
    """Return the line of `history.jsonl` for *result*, written at *now_ns*. CPU time is in milliseconds."""
    if now_ns is not None and result.ended_at_ns is not None and now_ns - result.ended_at_ns > _LATE_NS:
        result = replace(result, recorded_at_ns=now_ns)
    return _encode(HISTORY.to_json(result)) + b"\n"


def parse_history_line(data: bytes) -> Result:
    """Return the result in one line of `history.jsonl`. Raises InvalidRecord, also for a torn line."""
    try:
        return HISTORY.of_json(_decode(data))
    except (ValueError, RecursionError) as error:
        raise InvalidRecord(cannot("understand", "a line of the history", str(error))) from None


def job_of_line(line: bytes) -> str:
    """Return the job of a history line that cannot be parsed; "" if not even that can be read."""
    try:
        return _decode_job(line).job
    except _ERRORS:
        return ""


_MOST_GPUS = 1024  # of one run on a cluster: an edited line may claim any number


class _Use(msgspec.Struct, gc=False):
    mean_percent: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    energy_mj: int | None = None


class _RunLine(RunAccount, gc=False):
    """The keys of `HISTORY` that are counted, and the sources of those that are derived from them.

    Here `null` is the same as absent.
    """

    cpus: _Count = msgspec.field(default=0, name="granted_cpus")
    gpus: tuple[str, ...] = msgspec.field(default=(), name="gpu_uuids")
    memory_bytes: int | None = msgspec.field(default=None, name="granted_memory_bytes")
    resources: dict[str, _Count] | None = msgspec.field(default=None, name="granted_resources")
    submitted_at: _Moment | None = None
    started_at: _Moment | None = None
    ended_at: _Moment | None = None
    recorded_at: _Moment | None = None
    granted_gpus: int = 0
    cpu_time_ms: int | None = None
    suspended_ms: int = 0
    gpu_use: tuple[_Use, ...] = ()


class _Told(msgspec.Struct, gc=False):
    ended_at: _Moment | None = None
    recorded_at: _Moment | None = None


class _JobAlone(msgspec.Struct, gc=False):
    """The job of a line that cannot be parsed."""

    job: str


_decode_job = msgspec.json.Decoder(_JobAlone).decode
_decode_run = msgspec.json.Decoder(_RunLine).decode
_decode_told = msgspec.json.Decoder(_Told).decode


def read_ended_runs(text: bytes) -> tuple[Sequence[RunAccount], int]:
    """Return the runs in lines of history, and the number of lines that cannot be parsed: torn, or of a later version.

    A last line without its newline may be half written: it is ignored.
    """
    *lines, last = text.split(b"\n")
    try:
        read = [_decode_run(line) for line in lines]
    except _ERRORS:
        lines = [line for line in lines if line.strip(b"\0 \r")]
        read = [each for each in map(_read_run, lines) if each is not None]
    known = [line for line in read if line.outcome in _OUTCOMES]
    unreadable = len(lines) - len(known)
    half = _read_run(last) if last else None
    if half is not None and half.outcome in _OUTCOMES:
        known.append(half)
    _to_nanoseconds(known)
    return known, unreadable


def compacted(run: RunAccount) -> RunAccount:
    """Return *run* in half the memory: its texts are shared, and the sources of its times are dropped."""
    if isinstance(run, _RunLine):
        run.submitted_at = run.started_at = run.ended_at = None
        run.outcome, run.user, run.project, run.group, run.executor = map(
            _shared, (run.outcome, run.user, run.project, run.group, run.executor)
        )
    return run


def _shared(text: Any) -> Any:
    return text if text is None else intern(text)


def _read_run(line: bytes) -> _RunLine | None:
    try:
        return _decode_run(line)
    except _ERRORS:
        return None


def _to_nanoseconds(lines: list[_RunLine]) -> None:
    submitted = _instants([line.submitted_at for line in lines])
    started = _instants([line.started_at for line in lines])
    ended = _instants([line.ended_at for line in lines])
    for line, submitted_at_ns, started_at_ns, ended_at_ns in zip(lines, submitted, started, ended, strict=True):
        line.submitted_at_ns, line.started_at_ns, line.ended_at_ns = submitted_at_ns, started_at_ns, ended_at_ns
        line.told_at_ns = ended_at_ns if line.recorded_at is None else _instants([line.recorded_at])[0]
        line.peak_memory_bytes = line.peak_memory_bytes or None
        line.cpu_time_ns = None if line.cpu_time_ms is None else line.cpu_time_ms * 1_000_000
        if line.granted_gpus > 0:
            # Only the engine knows which GPUs these were. Each counts as one that no other run had.
            line.gpus = tuple(f"{line.job}:{line.run}:{at}" for at in range(min(line.granted_gpus, _MOST_GPUS)))
        if line.suspended_ms > 0:
            line.suspended_ns = line.suspended_ms * 1_000_000
        if line.gpu_use:
            known = [use.mean_percent for use in line.gpu_use if use.mean_percent is not None]
            line.gpu_percent = sum(known) / len(known) if known else None
            energies = [use.energy_mj for use in line.gpu_use if use.energy_mj is not None and use.energy_mj >= 0]
            line.gpu_energy_mj = sum(energies) if energies else None


def read_told(line: bytes) -> int | None:
    """Return when a line of history was written, as `Result.told_at_ns`; None if it has no such time or is no line."""
    try:
        told = _decode_told(line)
        return _instants([told.recorded_at or told.ended_at])[0]
    except _ERRORS:
        return None


def _instants(moments: list[datetime | None]) -> list[int | None]:
    return [
        None
        if moment is None or not -_LAST_DAY < (days := (since := moment - _EPOCH).days) < _LAST_DAY
        else (days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1_000
        for moment in moments
    ]
