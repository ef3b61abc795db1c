"""The records of runs, text to values and back: those of a metadir, `result.toml`, the lines of `history.jsonl`.

The one-line records are whole only when they end with a newline. One without it is not there yet, and reads as None,
like a missing one; but one of `MOST_READ` bytes is whole, because no more is read. A whole record that cannot be parsed
raises InvalidRecord: it is evidence of something, and must not count as evidence of nothing.

How the records may change from one version to the next, for these and for the history:

* A reader ignores everything that it does not know: later fields of a line, unknown keys.
* A field is added with a meaning for "absent" that is true of the older writers, and is never made required.
* A field never changes its meaning or its unit; another meaning gets another name.
* A word that a reader does not know (an outcome, a kind of stop) is an InvalidRecord, not a guess.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from spool.core.errors import InvalidRecord, cannot
from spool.core.gpuuse import GpuWatch
from spool.core.layout import LOCAL_EXECUTORS
from spool.core.lifecycle import EngineWord, Evidence, Exit, Liveness, Proof, prove
from spool.core.model import (
    SECOND_NS,
    SOMEONE_WHO,
    GpuUse,
    Grant,
    Jid,
    Request,
    Result,
    State,
    Stop,
    StopKind,
    Suspension,
)
from spool.formats.wire import MOST_READ, Table, decoded, json_line, one_line, read_keys, tables

VOID_JID = b"void\n"
"""The `jid` that a dispatcher writes for a run that it settles: the run never started and never will."""

_MOST_PID = (1 << 31) - 1
_MOST = (1 << 63) - 1  # of counted or measured values: no record that spool has written has a larger one

_JID = re.compile(r"([1-9][0-9]{0,18}) ([0-9]{1,19}) (\S+) (\S+) (\S+)(?: (?:([a-z]+:\S+)(?: .*)?|.*))?")
_RC = re.compile(r"[01]?[0-9]{1,2}|2[0-4][0-9]|25[0-5]")
_SUSPENDED = re.compile(r"([0-9]{1,19})(?: ([0-9]{1,19}) ([0-9]{1,19})(?: .*)?)?")


def _line(data: bytes, record: str) -> str | None:
    """Return the first line of a record, None if it is not whole."""
    end = data.find(b"\n")
    if end < 0:
        if len(data) < MOST_READ:
            return None
        return data[:MOST_READ].decode("utf-8", "replace")  # more is not read, however long it becomes
    try:
        return data[:end].decode()
    except UnicodeDecodeError:
        raise _senseless(record, data) from None


def _matched(data: bytes, record: str, pattern: re.Pattern[str]) -> re.Match[str] | None:
    """Return the match of the whole first line of a record, None if that is not whole. Raises InvalidRecord."""
    line = _line(data, record)
    match = None if line is None else pattern.fullmatch(line)
    if match is None and line is not None:
        raise _senseless(record, data)
    return match


def _senseless(record: str, data: bytes) -> InvalidRecord:
    return InvalidRecord(cannot("understand", f"a {record} record", f"it reads {data[:80]!r}"))


def _word(text: str) -> str:
    """Return *text* as one word of a line: no white space inside, never empty."""
    return "_".join(text.split()) or "-"


def render_jid(jid: Jid) -> bytes:
    """Return `PID START_TICKS BOOT_ID PID_NAMESPACE HOST [ENGINE:ID]` and a newline; an empty field is `-`."""
    words = [_word(jid.boot_id), _word(jid.pid_namespace), _word(jid.host)]
    words += [] if jid.engine is None else [_word(jid.engine)]
    return f"{jid.pid} {jid.start_ticks} {' '.join(words)}\n".encode(errors="replace")


def parse_jid(data: bytes) -> Jid | None:
    """Return the identity of a wrapper, None if the record is not whole. Raises InvalidRecord."""
    match = _matched(data, "jid", _JID)
    if match is None:
        return None
    pid, ticks, boot_id, namespace, host, engine = match.groups()
    if int(pid) > _MOST_PID or int(ticks) > _MOST:
        raise _senseless("jid", data)
    return Jid(int(pid), int(ticks), boot_id, namespace, host, engine)


def render_engine(engine: str, cluster: str, job_id: str, end: tuple[EngineWord, str] | None = None) -> bytes:
    """Return `ENGINE CLUSTER ID` and a newline, for a run on an engine.

    *end*: how the engine ended it before it began, as `END` and its own words, which follow on the line.
    """
    ended = f" {end[0]} {' '.join(end[1].split())}" if end is not None else ""
    return f"{_word(engine)} {_word(cluster)} {_word(job_id)}{ended}\n".encode(errors="replace")


def parse_engine(data: bytes) -> tuple[str, str, str] | None:
    """Return the engine, its cluster and the id there; None if the record is not whole or cannot be parsed."""
    words = _words(data)
    return (one_line(words[0]), one_line(words[1]), one_line(words[2])) if len(words) >= 3 else None


def parse_engine_end(data: bytes) -> tuple[EngineWord, str] | None:
    """Return how the engine ended a run before it began, and its own words; None if the record has no such end."""
    words = _words(data)
    try:
        return (EngineWord(words[3]), one_line(" ".join(words[4:]))) if len(words) > 3 else None
    except ValueError:  # of a later version
        return None


def _words(data: bytes) -> list[str]:
    line, newline, _ = data.partition(b"\n")
    return line.decode("utf-8", "replace").split() if newline else []


_MOST_USAGE = 1024
_USAGE = re.compile(rb"^(cpu_time_ns|peak_memory_bytes|peak_process_bytes) = ([0-9]{1,18})$", re.MULTILINE)


def parse_rc(data: bytes) -> int | None:
    """Return an exit code, 128+n for signal n; None if the record is not whole. Raises InvalidRecord."""
    match = _matched(data, "rc", _RC)
    return None if match is None else int(match[0])


class Usage(Struct, frozen=True):
    """The resources that a run has used; None is unknown."""

    cpu_time_ns: int | None = None
    peak_memory_bytes: int | None = None
    oom_killed: bool = False  # the kernel's out-of-memory killer ended one of its processes


def parse_usage(data: bytes) -> Usage:
    """Return the content of `usage`, as the wrapper wrote it; unreadable values are unknown.

    Of its two peaks, of the control group and of the largest single process, each was reached: the larger one counts.
    """
    found = {key: int(number) for key, number in _USAGE.findall(data[:_MOST_USAGE])}
    peaks = (found.get(b"peak_memory_bytes"), found.get(b"peak_process_bytes"))
    return Usage(found.get(b"cpu_time_ns"), max(filter(None, peaks), default=None))


def render_stop(stop: Stop) -> bytes:
    """Return `KIND BY AT_NS REASON` and a newline. The reason is reduced to one line."""
    reason = " ".join(stop.reason.split())
    return f"{stop.kind} {_word(stop.by)} {stop.at_ns}{' ' if reason else ''}{reason}\n".encode(errors="replace")


def parse_stop(data: bytes, *, at_ns: int = 0) -> Stop | None:
    """Return the order to stop a run, None if the record is not whole. Raises InvalidRecord.

    A user may write it by hand, `echo cancel > stop`: then *at_ns* (the file's time) is its time, and its author is
    unknown.
    """
    line = _line(data, "stop")
    if line is None:
        return None
    kind, *rest = line.split(" ", 3)
    try:
        known = StopKind(kind)
    except ValueError:
        raise _senseless("stop", data) from None
    by = rest[0] if rest else "-"
    if by.startswith(_word(SOMEONE_WHO)):
        by = by.replace("_", " ")
    if len(rest) > 1 and re.fullmatch(r"[0-9]{1,19}", rest[1]):
        return Stop(known, one_line(by), int(rest[1]), one_line(rest[2]) if len(rest) > 2 else "")
    return Stop(known, one_line(by), at_ns, one_line(" ".join(rest[1:])))


def render_suspended(suspension: Suspension) -> bytes:
    """Return `BEFORE_NS`, or `BEFORE_NS SINCE_NS SINCE_BOOT_NS` of a run that is suspended now, and a newline."""
    since = "" if suspension.since_ns is None else f" {suspension.since_ns} {suspension.since_boot_ns or 0}"
    return f"{suspension.before_ns}{since}\n".encode()


def parse_suspended(data: bytes) -> Suspension | None:
    """Return how long a run has been suspended, None if the record is not whole. Raises InvalidRecord."""
    match = _matched(data, "suspended", _SUSPENDED)
    if match is None:
        return None
    before, since, boot = match.groups()
    if max(int(number or 0) for number in match.groups()) > _MOST:
        raise _senseless("suspended", data)
    return Suspension(int(before)) if since is None else Suspension(int(before), int(since), int(boot))


def render_status(state: State) -> bytes:
    """Return the state's word and a newline. It is for display: no state follows from it."""
    return f"{state}\n".encode()


GRANT = Table(
    "a grant",
    Grant,
    """
    cpus! cpu_list memory_bytes gpu_uuids gpu_indices gpus=gpus_elsewhere gpu_memory_bytes resources resource_indices
    """,
)
"""A grant, as in `grant.toml` and in the table `[grant]` of `result.toml`."""

USE = Table(
    "a use of a GPU",
    GpuUse,
    """
    watched_ms! mean_percent peak_percent memory_watched_ms! mean_memory_bytes peak_memory_bytes
    energy_watched_ms energy_mj
    """,
)
"""A table `[[gpu_use]]`, as in `gpus.toml` and `result.toml`, or an object of the history."""


class GrantRecord(Struct, frozen=True):
    """The content of `grant.toml`: the grant of a run, and what settles the run after a restart."""

    job: str
    run: int
    attempt: int = 1
    requeues: int = 0
    executor: str = "process"
    grant: Grant = Grant()
    user: str | None = None
    submitted_at_ns: int | None = None
    granted_at_ns: int | None = None
    host: str | None = None
    boot_id: str | None = None  # of the boot in which the run was started
    inode: int | None = None  # of the job file that was claimed
    lease: int | None = None  # of the arbiter of a shared machine
    place: str | None = None  # of the spool in which it was started (`why_copied`)
    waited_ns: int = 0  # wait until the start, by the clock of its scheduling timeout, which goes on in an engine

    def may_be_of(self, jid: Jid) -> bool:
        """Whether *jid* can belong to a wrapper that was started with it: on this machine it is from the same boot."""
        if self.executor not in LOCAL_EXECUTORS:
            return True  # any node may run it
        return jid.engine is None and self.boot_id in (None, jid.boot_id)


_GRANT_RECORD = Table(
    "a grant record",
    GrantRecord,
    """
    job:name run attempt:positive! requeues! executor! user host boot_id place inode:inode submitted_at granted_at lease
    waited_ms grant:grant!
    """,
    grant=GRANT.part(),
)

render_grant, parse_grant = _GRANT_RECORD.render, _GRANT_RECORD.parse
"""`grant.toml`."""


class ArrayRecord(Struct, frozen=True):
    """The content of `array.toml`: the source of the tasks, and when. An array has it instead of `grant.toml`."""

    job: str
    run: int
    tasks: int
    inode: int | None = None  # of the job file that was claimed
    user: str | None = None
    host: str | None = None
    boot_id: str | None = None  # of the boot in which the tasks were written
    submitted_at_ns: int | None = None
    expanded_at_ns: int | None = None


_ARRAY = Table(
    "an array record",
    ArrayRecord,
    "job:name run tasks user host boot_id inode:inode submitted_at expanded_at",
)

render_array, parse_array = _ARRAY.render, _ARRAY.parse
"""`array.toml`."""

_WATCH = Table("a gpus record", GpuWatch, "at idle_ms! told! is_told", {"gpus": ()})


def render_gpus(watch: GpuWatch) -> bytes:
    """Return the text of `gpus.toml`."""
    counters = watch.counters_mj or (None,) * len(watch.gpus)
    uses = [
        f"\n[[gpu_use]]\n{USE.lines(use)}" + (f"counter_mj = {counter}\n" if counter is not None else "")
        for use, counter in zip(watch.gpus, counters, strict=True)
    ]
    return (_WATCH.lines(watch) + "".join(uses)).encode()


def parse_gpus(data: bytes) -> GpuWatch:
    """Return the content of `gpus.toml`. Raises InvalidRecord."""
    keys = read_keys(data, "a gpus record")
    uses = tables(keys, "gpu_use")
    counters = tuple(number if type(number := use.get("counter_mj")) is int else None for use in uses)
    known = counters if any(counter is not None for counter in counters) else ()
    return replace(_WATCH.made(keys), gpus=tuple(map(USE.made, uses)), counters_mj=known)


_LATE_NS = 60 * SECOND_NS  # from this long after the end, a line states when it was written

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

_decode = msgspec.json.Decoder(HISTORY.line).decode
_any = msgspec.json.Decoder()


render_result, parse_result = _RESULT.render, _RESULT.parse
"""`result.toml`."""


def render_history(result: Result, now_ns: int | None = None) -> bytes:
    """Return the line of `history.jsonl` for *result*, written at *now_ns*. CPU time is in milliseconds."""
    if now_ns is not None and result.ended_at_ns is not None and now_ns - result.ended_at_ns > _LATE_NS:
        result = replace(result, recorded_at_ns=now_ns)
    return json_line(HISTORY.to_line(result))


def parse_history_line(data: bytes) -> Result:
    """Return the result in one line of `history.jsonl`. Raises InvalidRecord, also for a torn line."""
    try:
        return HISTORY.of_line(_decode(data))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # no ValueError in older versions of msgspec
        raise InvalidRecord(cannot("understand", "a line of the history", str(error))) from None


def job_of_line(line: bytes) -> str:
    """Return the job of a history line that cannot be parsed; "" if not even that can be read."""
    found = decoded(_any, line)
    return str(found.get("job", "")) if isinstance(found, dict) else ""


def read_ended_runs(text: bytes) -> tuple[list[Result], int]:
    """Return the runs in lines of history, and the number of lines that cannot be parsed: torn, or of a later version.

    A last line without its newline may be half written: it is not counted among these.
    """
    *lines, last = text.split(b"\n")
    known, unreadable = list[Result](), 0
    for line in (*lines, last):
        try:
            known.append(parse_history_line(line))
        except InvalidRecord:
            unreadable += line is not last and bool(line.strip(b"\0 \r"))
    return known, unreadable


def read_told(line: bytes) -> int | None:
    """Return when a line of history was written, as `Result.told_at_ns`; None if it has no such time or is no line."""
    try:
        return parse_history_line(line).told_at_ns
    except InvalidRecord:
        return None


class RunFiles(Struct, frozen=True):
    """What the files of one run say, each read once, in the order that proves it. None: there is no such record."""

    name: str
    run: int
    jid: Jid | Liveness
    grant: GrantRecord | None
    array: ArrayRecord | None  # an array has it instead of a grant
    left: Exit | None
    stop: Stop | None
    result: Result | None
    refusal: str | None  # why the machine did not let its command begin
    suspension: Suspension
    began_ns: int | None  # of an array: when it was expanded; None: its engine has not begun it
    evidence: Evidence

    @property
    def proof(self) -> Proof:
        """What the evidence proves."""
        return prove(self.evidence)

    @property
    def is_submitted(self) -> bool:
        """Whether it waits on its engine: it was not started here, and has not begun."""
        return self.grant is not None and self.grant.executor not in LOCAL_EXECUTORS and self.began_ns is None

    @property
    def so_far(self) -> Result:
        """What the record of its end will say of a run, as far as that is known before."""
        code = None if self.left is None else self.left.code
        found = Result(self.name, self.run, 1, State.RUNNING, "", started_at_ns=self.began_ns, exit_code=code)
        granted = self.grant
        if granted is None:
            return found
        node = self.jid.node if isinstance(self.jid, Jid) and granted.executor not in LOCAL_EXECUTORS else None
        names = ("attempt", "submitted_at_ns", "requeues", "user", "grant", "executor")
        return replace(found, node=node, **{name: getattr(granted, name) for name in names})
