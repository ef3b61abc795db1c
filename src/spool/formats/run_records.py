"""The small records of a metadir, text to values and back: `jid`, `rc`, `stop`, `suspended`, `grant.toml` and so on.

The one-line records are whole only when they end with a newline. One without it is not there yet, and reads as None,
like a missing one; but one of `freetext.MOST_READ` bytes is whole, because no more is read. A whole record that cannot
be parsed raises InvalidRecord: it is evidence of something, and must not count as evidence of nothing.

How the records may change from one version to the next, for these and for `history`:

* A reader ignores everything that it does not know: later fields of a line, unknown keys.
* A field is added with a meaning for "absent" that is true of the older writers, and is never made required.
* A field never changes its meaning or its unit; another meaning gets another name.
* A word that a reader does not know (an outcome, a kind of stop) is an InvalidRecord, not a guess.
"""

from __future__ import annotations

import re

from msgspec import Struct

from spool.core.errors import InvalidRecord, cannot
from spool.core.gpuuse import GpuWatch
from spool.core.layout import LOCAL_EXECUTORS
from spool.core.lifecycle import EngineWord
from spool.core.model import SOMEONE_WHO, GpuUse, Grant, Jid, State, Stop, StopKind, Suspension
from spool.formats.freetext import MOST_READ, one_line
from spool.formats.wire import Table, optional, read_keys, several

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
    words = data.partition(b"\n")[0].decode("utf-8", "replace").split() if b"\n" in data else []
    return (one_line(words[0]), one_line(words[1]), one_line(words[2])) if len(words) >= 3 else None


def parse_engine_end(data: bytes) -> tuple[EngineWord, str] | None:
    """Return how the engine ended a run before it began, and its own words; None if the record has no such end."""
    words = data.partition(b"\n")[0].decode("utf-8", "replace").split() if b"\n" in data else []
    try:
        return (EngineWord(words[3]), one_line(" ".join(words[4:]))) if len(words) > 3 else None
    except ValueError:  # of a later version
        return None


def render_rc(code: int) -> bytes:
    """Return an exit code, 0-255, and a newline."""
    return f"{code}\n".encode()


_MOST_USAGE = 1024
_USAGE = re.compile(rb"^(cpu_time_ns|peak_memory_bytes|peak_process_bytes) = ([0-9]{1,18})$", re.MULTILINE)


def parse_rc(data: bytes) -> int | None:
    """Return an exit code, 128+n for signal n; None if the record is not whole. Raises InvalidRecord."""
    match = _matched(data, "rc", _RC)
    return None if match is None else int(match[0])


class WrittenUsage(Struct, frozen=True):
    """A run's resource use, as written by the wrapper. None is unknown."""

    cpu_time_ns: int | None = None
    peak_memory_bytes: int | None = None  # of its control group
    peak_process_bytes: int | None = None  # the largest single process

    @property
    def peak_bytes(self) -> int | None:
        """The largest known amount of memory."""
        return max(filter(None, (self.peak_memory_bytes, self.peak_process_bytes)), default=None)


def parse_usage(data: bytes) -> WrittenUsage:
    """Return the content of `usage`; unreadable values are unknown."""
    found = {key.decode(): int(number) for key, number in _USAGE.findall(data[:_MOST_USAGE])}
    return WrittenUsage(**found)


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
    place: str | None = None  # of the spool in which it was started (store/runfiles.py)
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

_WATCH = Table("a gpus record", GpuWatch, "at idle_ms! told! is_told")


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
    tables = several(keys, "gpu_use", dict)
    counters = tuple(optional(table, "counter_mj", int) for table in tables)
    known = counters if any(counter is not None for counter in counters) else ()
    return _WATCH.made(keys, gpus=tuple(map(USE.made, tables)), counters_mj=known)
