"""The ends of runs, text to value and back: `result.toml`, and the lines of `history.jsonl`, one by one or for sums.

The rules by which both may change from version to version are in `run_records`. Sums over a million lines read a part
of each, a hundred lines at a time, with instants to the microsecond: nanoseconds would take three times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from operator import itemgetter
from sys import intern
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from spool.core.errors import InvalidRecord, cannot
from spool.core.model import OUTCOMES, SECOND_NS, GpuUse, Grant, Request, Result, RunAccount, State
from spool.formats import toml
from spool.formats.freetext import one_line
from spool.formats.run_records import (
    NOTHING,
    NS_PER_MS,
    gpu_use_lines,
    gpu_use_of,
    grant_lines,
    grant_of,
    named,
    named_lines,
    number_lines,
    optional,
    read_keys,
    required,
    resource_lines,
    resources_of,
    said,
    several,
    text_lines,
)
from spool.formats.timestamps import at_lines, parse_instant, read_at, render_instant

V = TypeVar("V")

_OUTCOMES = frozenset(state.value for state in OUTCOMES)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_DAY = 100_000  # since 1970, in the year 2243: later instants do not fit 64 bits
_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

EARLIEST = "earliest"
"""The value of `ended_at_is` for a run without an exit code: it ended then or later."""

_LATE_NS = 60 * SECOND_NS  # from this long after the end, a line states when it was written

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Percent = Annotated[float, msgspec.Meta(ge=0, le=100)]
_Moment = Annotated[datetime, msgspec.Meta(tz=True)]


def render_result(result: Result) -> bytes:
    """Return the text of `result.toml`."""
    request = result.request
    lines = [
        f"job = {toml.quote(result.job)}\nrun = {result.run}\nattempt = {result.attempt}\n"
        f'outcome = "{result.outcome}"\nreason = {toml.quote(result.reason)}\n',
        number_lines(("exit_code", result.exit_code)),
        at_lines("submitted_at", result.submitted_at_ns),
        at_lines("started_at", result.started_at_ns),
        at_lines("ended_at", result.ended_at_ns),
        text_lines(("ended_at_is", EARLIEST if result.end_is_bound else None)),
        number_lines(("peak_memory_bytes", result.peak_memory_bytes)),
        number_lines(("cpu_time_ms", _to_ms(result.cpu_time_ns)), ("cpu_time_ns", result.cpu_time_ns)),
        number_lines(("requeues", result.requeues or None), ("suspended_ns", result.suspended_ns or None)),
        text_lines(("again", result.again)),
        at_lines("again_at", result.again_at_ns),
        text_lines(("user", result.user), ("project", result.project), ("group", result.group)),
        f"tags = [{', '.join(map(toml.quote, result.tags))}]\n" if result.tags else "",
        text_lines(("executor", result.executor), ("host", result.host), ("node", result.node)),
        f"\n[request]\ncpus = {request.cpus}\ngpus = {request.gpus}\n",
        number_lines(("memory_bytes", request.memory_bytes), ("gpu_memory_bytes", request.gpu_memory_bytes)),
        number_lines(("gpu_min_memory_bytes", request.gpu_min_memory_bytes)),
        _type_lines(request.gpu_types),
        "memory_auto = true\n" if request.memory_auto else "",
        "gpu_memory_auto = true\n" if request.gpu_memory_auto else "",
        resource_lines(request.resources),
    ]
    if result.grant != NOTHING:
        lines.append(f"\n[grant]\n{grant_lines(result.grant)}")
    lines += [named_lines("parameters", result.parameters), named_lines("metrics", result.metrics)]
    lines.append(gpu_use_lines(result.gpu_use))
    return "".join(lines).encode()


def _type_lines(types: tuple[str, ...]) -> str:
    """Return a lone type as `gpu_type`, several as `gpu_types`: older readers know one as a text."""
    if len(types) > 1:
        return f"gpu_types = [{', '.join(map(toml.quote, types))}]\n"
    return text_lines(("gpu_type", types[0] if types else None))


def _to_ms(duration_ns: int | None) -> int | None:
    return None if duration_ns is None else duration_ns // NS_PER_MS


def parse_result(data: bytes) -> Result:
    """Return the result in `result.toml`. Raises InvalidRecord."""
    keys = read_keys(data, "result")
    request = keys.get("request")
    grant = keys.get("grant")
    cpu_time_ns = optional(keys, "cpu_time_ns", int)
    cpu_time_ms = optional(keys, "cpu_time_ms", int)
    if cpu_time_ns is None and cpu_time_ms is not None:
        cpu_time_ns = cpu_time_ms * NS_PER_MS
    return Result(
        job=required(keys, "job", str, "result"),
        run=required(keys, "run", int, "result"),
        attempt=optional(keys, "attempt", int) or 1,
        outcome=_outcome(required(keys, "outcome", str, "result"), "result"),
        reason=said(keys, "reason") or "",
        submitted_at_ns=read_at(keys, "submitted_at"),
        started_at_ns=read_at(keys, "started_at"),
        ended_at_ns=read_at(keys, "ended_at"),
        end_is_bound=_is_bound(optional(keys, "ended_at_is", str), "result"),
        exit_code=optional(keys, "exit_code", int),
        peak_memory_bytes=optional(keys, "peak_memory_bytes", int) or None,  # 0 once meant unknown
        cpu_time_ns=cpu_time_ns,
        requeues=optional(keys, "requeues", int) or 0,
        again=said(keys, "again"),
        again_at_ns=read_at(keys, "again_at"),
        user=said(keys, "user"),
        project=said(keys, "project"),
        group=said(keys, "group"),
        tags=tuple(map(one_line, several(keys, "tags", str))),
        request=_request_of(request) if isinstance(request, dict) else Request(),
        grant=grant_of(grant) if isinstance(grant, dict) else NOTHING,
        executor=said(keys, "executor"),
        host=said(keys, "host"),
        node=said(keys, "node"),
        suspended_ns=max(0, optional(keys, "suspended_ns", int) or 0),
        gpu_use=gpu_use_of(keys),
        parameters=named(keys, "parameters"),
        metrics=named(keys, "metrics"),
    )


def _request_of(keys: dict[str, object]) -> Request:
    cpus = optional(keys, "cpus", int)
    return Request(
        cpus=1 if cpus is None else cpus,
        memory_bytes=optional(keys, "memory_bytes", int),
        gpus=optional(keys, "gpus", int) or 0,
        gpu_memory_bytes=optional(keys, "gpu_memory_bytes", int),
        gpu_types=tuple(map(one_line, several(keys, "gpu_types", str))) or _alone(said(keys, "gpu_type")),
        resources=resources_of(keys),
        memory_auto=optional(keys, "memory_auto", bool) or False,
        gpu_memory_auto=optional(keys, "gpu_memory_auto", bool) or False,
        gpu_min_memory_bytes=optional(keys, "gpu_min_memory_bytes", int),
    )


def _alone(gpu_type: str | None) -> tuple[str, ...]:
    return () if gpu_type is None else (gpu_type,)


def _is_bound(word: str | None, record: str) -> bool:
    if word not in (None, EARLIEST):
        raise InvalidRecord(cannot("understand", f"a {record} record", f"{toml.show(word)} says nothing of an end"))
    return word is not None


def _outcome(word: str, record: str) -> State:
    try:
        state = State(word)
    except ValueError:
        state = State.INVALID
    if not state.ended:
        raise InvalidRecord(cannot("understand", f"a {record} record", f"{toml.show(word)} is not an outcome"))
    return state


class GpuUseLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """An ended run's use of one of its GPUs."""

    watched_ms: int = 0
    mean_percent: _Percent | UnsetType = UNSET
    peak_percent: int | UnsetType = UNSET
    memory_watched_ms: int = 0
    mean_memory_bytes: int | UnsetType = UNSET
    peak_memory_bytes: int | UnsetType = UNSET
    energy_watched_ms: int = 0
    energy_mj: int | UnsetType = UNSET


class HistoryLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of `history.jsonl`: the accounting data of one ended run, flat. Unknown values are absent."""

    job: str
    run: int
    attempt: int = 1
    outcome: str
    reason: str = ""
    submitted_at: str | UnsetType = UNSET  # RFC 3339 in UTC, with all nine digits: exact
    started_at: str | UnsetType = UNSET  # absent: it never started
    ended_at: str | UnsetType = UNSET
    ended_at_is: str | UnsetType = UNSET  # "earliest": it ended then or later
    recorded_at: str | UnsetType = UNSET  # when this line was written, if that was more than a minute after the end
    exit_code: int | UnsetType = UNSET
    signal: int | UnsetType = UNSET  # exit_code - 128, where that is a signal's number
    user: str | UnsetType = UNSET
    project: str | UnsetType = UNSET
    group: str | UnsetType = UNSET
    tags: tuple[str, ...] = ()
    cpus: int = 1  # requested
    memory_bytes: int | UnsetType = UNSET
    gpus: int = 0
    gpu_memory_bytes: int | UnsetType = UNSET
    gpu_min_memory_bytes: int | UnsetType = UNSET
    gpu_type: str | UnsetType = UNSET  # if it named one
    gpu_types: tuple[str, ...] = ()  # if it named several
    memory_auto: bool = False  # `memory_bytes` is the first guess; what was worked out is granted
    gpu_memory_auto: bool = False
    resources: dict[str, int] | UnsetType = UNSET
    granted_cpus: int = 0  # granted
    granted_memory_bytes: int | UnsetType = UNSET
    granted_gpu_memory_bytes: int | UnsetType = UNSET
    granted_gpus: int = 0  # for a run of an engine that alone knows which; else `gpu_uuids` has them
    gpu_uuids: tuple[str, ...] = ()
    gpu_indices: tuple[int, ...] = ()
    granted_resources: dict[str, int] | UnsetType = UNSET
    resource_indices: dict[str, tuple[int, ...]] | UnsetType = UNSET
    peak_memory_bytes: int | UnsetType = UNSET
    cpu_time_ms: int | UnsetType = UNSET
    requeues: int = 0
    again: str | UnsetType = UNSET
    again_at: str | UnsetType = UNSET
    executor: str | UnsetType = UNSET
    host: str | UnsetType = UNSET
    node: str | UnsetType = UNSET
    suspended_ms: int = 0  # between its start and its end
    gpu_use: tuple[GpuUseLine, ...] = ()  # one for each of `gpu_uuids`
    cpu_list: str | UnsetType = UNSET  # granted


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(HistoryLine).decode


def render_history(result: Result, now_ns: int | None = None) -> bytes:
    """Return the line of `history.jsonl` for *result*, written at *now_ns*. CPU time is in milliseconds."""
    request, grant = result.request, result.grant
    recorded_at_ns = result.recorded_at_ns
    if now_ns is not None and result.ended_at_ns is not None and now_ns - result.ended_at_ns > _LATE_NS:
        recorded_at_ns = now_ns
    line = HistoryLine(
        job=_clean(result.job),
        run=result.run,
        attempt=result.attempt,
        outcome=result.outcome.value,
        reason=_clean(result.reason),
        submitted_at=_at(result.submitted_at_ns),
        started_at=_at(result.started_at_ns),
        ended_at=_at(result.ended_at_ns),
        ended_at_is=EARLIEST if result.end_is_bound else UNSET,
        recorded_at=_at(recorded_at_ns),
        exit_code=_known(result.exit_code),
        signal=UNSET if result.exit_code is None or not 128 < result.exit_code <= 192 else result.exit_code - 128,
        user=_text(result.user),
        project=_text(result.project),
        group=_text(result.group),
        tags=tuple(map(_clean, result.tags)),
        cpus=request.cpus,
        memory_bytes=_known(request.memory_bytes),
        gpus=request.gpus,
        gpu_memory_bytes=_known(request.gpu_memory_bytes),
        gpu_min_memory_bytes=_known(request.gpu_min_memory_bytes),
        gpu_type=_text(request.gpu_types[0]) if len(request.gpu_types) == 1 else UNSET,
        gpu_types=tuple(map(_clean, request.gpu_types)) if len(request.gpu_types) > 1 else (),
        memory_auto=request.memory_auto,
        gpu_memory_auto=request.gpu_memory_auto,
        resources=_table(request.resources),
        granted_cpus=grant.cpus,
        granted_memory_bytes=_known(grant.memory_bytes),
        granted_gpu_memory_bytes=_known(grant.gpu_memory_bytes),
        granted_gpus=grant.gpus_elsewhere,
        gpu_uuids=tuple(map(_clean, grant.gpu_uuids)),
        gpu_indices=grant.gpu_indices,
        granted_resources=_table(grant.resources),
        resource_indices=_table(grant.resource_indices),
        peak_memory_bytes=_known(result.peak_memory_bytes),
        cpu_time_ms=_known(_to_ms(result.cpu_time_ns)),
        requeues=result.requeues,
        again=_text(result.again),
        again_at=_at(result.again_at_ns),
        executor=_text(result.executor),
        host=_text(result.host),
        node=_text(result.node),
        suspended_ms=result.suspended_ns // NS_PER_MS,
        gpu_use=tuple(map(use_line, result.gpu_use)),
        cpu_list=_text(grant.cpu_list or None),
    )
    return _encode(line) + b"\n"


def use_line(use: GpuUse) -> GpuUseLine:
    """Return the history's form of a GPU's use."""
    return GpuUseLine(
        watched_ms=use.watched_ns // NS_PER_MS,
        mean_percent=UNSET if use.mean_percent is None else round(use.mean_percent, 2),
        peak_percent=_known(use.peak_percent),
        memory_watched_ms=use.memory_watched_ns // NS_PER_MS,
        mean_memory_bytes=_known(use.mean_memory_bytes),
        peak_memory_bytes=_known(use.peak_memory_bytes),
        energy_watched_ms=use.energy_watched_ns // NS_PER_MS,
        energy_mj=_known(use.energy_mj),
    )


def _use_of(line: GpuUseLine) -> GpuUse:
    return GpuUse(
        watched_ns=line.watched_ms * NS_PER_MS,
        mean_percent=_set(line.mean_percent),
        peak_percent=_set(line.peak_percent),
        memory_watched_ns=line.memory_watched_ms * NS_PER_MS,
        mean_memory_bytes=_set(line.mean_memory_bytes),
        peak_memory_bytes=_set(line.peak_memory_bytes),
        energy_watched_ns=max(0, line.energy_watched_ms) * NS_PER_MS,
        energy_mj=_set(line.energy_mj),
    )


def _clean(text: str) -> str:
    """Return *text* with only characters that UTF-8 can hold: a line must always be written."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _text(text: str | None) -> str | UnsetType:
    return UNSET if text is None else _clean(text)


def _known(value: V | None) -> V | UnsetType:
    return UNSET if value is None else value


def _table(pairs: tuple[tuple[str, V], ...]) -> dict[str, V] | UnsetType:
    return {_clean(name): value for name, value in pairs} if pairs else UNSET


def _pairs(table: dict[str, V] | UnsetType) -> tuple[tuple[str, V], ...]:
    return () if table is UNSET else tuple(sorted(table.items(), key=itemgetter(0)))


def _at(at_ns: int | None) -> str | UnsetType:
    return UNSET if at_ns is None else render_instant(at_ns)


def _set(value: V | UnsetType) -> V | None:
    return None if value is UNSET else value


def _instant(text: str | UnsetType) -> int | None:
    return None if text is UNSET else parse_instant(text)


def job_of_line(line: bytes) -> str:
    """Return the job of a history line that cannot be parsed; "" if not even that can be read."""
    try:
        return _decode_job(line).job
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def parse_history_line(data: bytes) -> Result:
    """Return the result in one line of `history.jsonl`. Raises InvalidRecord, also for a torn line."""
    try:
        line = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRecord(cannot("understand", "a line of the history", str(error))) from None
    return Result(
        job=line.job,
        run=line.run,
        attempt=line.attempt,
        outcome=_outcome(line.outcome, "history"),
        reason=line.reason,
        submitted_at_ns=_instant(line.submitted_at),
        started_at_ns=_instant(line.started_at),
        ended_at_ns=_instant(line.ended_at),
        end_is_bound=_is_bound(_set(line.ended_at_is), "history"),
        recorded_at_ns=_instant(line.recorded_at),
        exit_code=_set(line.exit_code),
        peak_memory_bytes=_set(line.peak_memory_bytes) or None,
        cpu_time_ns=None if line.cpu_time_ms is UNSET else line.cpu_time_ms * NS_PER_MS,
        requeues=line.requeues,
        again=_set(line.again),
        again_at_ns=_instant(line.again_at),
        user=_set(line.user),
        project=_set(line.project),
        group=_set(line.group),
        tags=line.tags,
        request=Request(
            line.cpus,
            _set(line.memory_bytes),
            line.gpus,
            _set(line.gpu_memory_bytes),
            line.gpu_types or _alone(_set(line.gpu_type)),
            _pairs(line.resources),
            line.memory_auto,
            line.gpu_memory_auto,
            _set(line.gpu_min_memory_bytes),
        ),
        grant=Grant(
            line.granted_cpus,
            _set(line.granted_memory_bytes),
            line.gpu_uuids,
            line.gpu_indices,
            _set(line.granted_gpu_memory_bytes),
            _pairs(line.granted_resources),
            _pairs(line.resource_indices),
            gpus_elsewhere=max(0, line.granted_gpus),
            cpu_list=_set(line.cpu_list) or "",
        ),
        executor=_set(line.executor),
        host=_set(line.host),
        node=_set(line.node),
        suspended_ns=max(0, line.suspended_ms) * NS_PER_MS,
        gpu_use=tuple(map(_use_of, line.gpu_use)),
    )


_MOST_GPUS = 1024  # of one run on a cluster: an edited line may claim any number


class _RunLine(RunAccount, gc=False):
    """The fields of `HistoryLine` that are counted, and the sources of those that are derived from them.

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
    gpu_use: tuple[GpuUseLine, ...] = ()


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
        line.cpu_time_ns = None if line.cpu_time_ms is None else line.cpu_time_ms * NS_PER_MS
        if line.granted_gpus > 0:
            # Only the engine knows which GPUs these were. Each counts as one that no other run had.
            line.gpus = tuple(f"{line.job}:{line.run}:{at}" for at in range(min(line.granted_gpus, _MOST_GPUS)))
        if line.suspended_ms > 0:
            line.suspended_ns = line.suspended_ms * NS_PER_MS
        if line.gpu_use:
            known = [use.mean_percent for use in line.gpu_use if use.mean_percent is not UNSET]
            line.gpu_percent = sum(known) / len(known) if known else None
            energies = [use.energy_mj for use in line.gpu_use if use.energy_mj is not UNSET and use.energy_mj >= 0]
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
