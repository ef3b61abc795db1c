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
from typing import Any, TypeGuard, TypeVar

from msgspec import Struct

from spool.core.errors import InvalidFile, InvalidRecord, cannot
from spool.core.gpuuse import GpuWatch
from spool.core.lifecycle import EngineWord
from spool.core.model import SOMEONE_WHO, GpuUse, Grant, Jid, State, Stop, StopKind, Suspension
from spool.core.names import LOCAL_EXECUTORS
from spool.formats import toml
from spool.formats.freetext import MOST_READ, one_line
from spool.formats.timestamps import at_lines, read_at

T = TypeVar("T")

NOTHING = Grant()
"""The grant of a run that never started."""

VOID_JID = b"void\n"
"""The `jid` that a dispatcher writes for a run that it settles: the run never started and never will."""

NS_PER_MS = 1_000_000

_MOST_PID = (1 << 31) - 1
_MOST_NAMED = 64 << 10  # bytes of a table of texts, in a record that has 1 MiB at most
_MOST = (1 << 63) - 1  # of counted or measured values: no record that spool has written has a larger one

_JID = re.compile(r"([1-9][0-9]{0,18}) ([0-9]{1,19}) (\S+) (\S+) (\S+)(?: (?:([a-z]+:\S+)(?: .*)?|.*))?")
_RC = re.compile(r"[0-9]{1,3}")
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
    line = _line(data, "jid")
    if line is None:
        return None
    match = _JID.fullmatch(line)
    if match is None:
        raise _senseless("jid", data)
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
    line = _line(data, "rc")
    if line is None:
        return None
    if _RC.fullmatch(line) is None or int(line) > 255:
        raise _senseless("rc", data)
    return int(line)


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
    line = _line(data, "suspended")
    if line is None:
        return None
    match = _SUSPENDED.fullmatch(line)
    if match is None:
        raise _senseless("suspended", data)
    before, since, boot = match.groups()
    if max(int(number or 0) for number in match.groups()) > _MOST:
        raise _senseless("suspended", data)
    return Suspension(int(before)) if since is None else Suspension(int(before), int(since), int(boot))


def render_status(state: State) -> bytes:
    """Return the state's word and a newline. It is for display: no state follows from it."""
    return f"{state}\n".encode()


class GrantRecord(Struct, frozen=True):
    """The content of `grant.toml`: the grant of a run, and what settles the run after a restart."""

    job: str
    run: int
    attempt: int = 1
    requeues: int = 0
    executor: str = "process"
    grant: Grant = NOTHING
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


def render_grant(record: GrantRecord) -> bytes:
    """Return the text of `grant.toml`."""
    grant = record.grant
    lines = [
        f"job = {toml.quote(record.job)}\nrun = {record.run}\nattempt = {record.attempt}\n",
        f"requeues = {record.requeues}\nexecutor = {toml.quote(record.executor)}\n",
        text_lines(("user", record.user), ("host", record.host), ("boot_id", record.boot_id)),
        text_lines(("place", record.place)),
        "" if record.inode is None else f'inode = "{record.inode}"\n',  # as text, since it may need all of 64 bits
        at_lines("submitted_at", record.submitted_at_ns),
        at_lines("granted_at", record.granted_at_ns),
        number_lines(("lease", record.lease)),
        f"waited_ms = {record.waited_ns // NS_PER_MS}\n" if record.waited_ns else "",
        grant_lines(grant),
    ]
    return "".join(lines).encode()


def parse_grant(data: bytes) -> GrantRecord:
    """Return the content of `grant.toml`. Raises InvalidRecord."""
    keys = read_keys(data, "grant")
    return GrantRecord(
        job=required(keys, "job", str, "grant"),
        run=required(keys, "run", int, "grant"),
        attempt=optional(keys, "attempt", int) or 1,
        requeues=optional(keys, "requeues", int) or 0,
        executor=said(keys, "executor") or "process",
        grant=grant_of(keys),
        user=said(keys, "user"),
        submitted_at_ns=read_at(keys, "submitted_at"),
        granted_at_ns=read_at(keys, "granted_at"),
        host=said(keys, "host"),
        boot_id=said(keys, "boot_id"),
        inode=_inode(keys.get("inode")),
        lease=optional(keys, "lease", int),
        place=said(keys, "place"),
        waited_ns=_span_ns(keys, "waited_ms"),
    )


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


def render_array(record: ArrayRecord) -> bytes:
    """Return the text of `array.toml`."""
    lines = [
        f"job = {toml.quote(record.job)}\nrun = {record.run}\ntasks = {record.tasks}\n",
        text_lines(("user", record.user), ("host", record.host), ("boot_id", record.boot_id)),
        "" if record.inode is None else f'inode = "{record.inode}"\n',  # as text, since it may need all of 64 bits
        at_lines("submitted_at", record.submitted_at_ns),
        at_lines("expanded_at", record.expanded_at_ns),
    ]
    return "".join(lines).encode()


def parse_array(data: bytes) -> ArrayRecord:
    """Return the content of `array.toml`. Raises InvalidRecord."""
    keys = read_keys(data, "array")
    inode = optional(keys, "inode", str)
    return ArrayRecord(
        job=required(keys, "job", str, "array"),
        run=required(keys, "run", int, "array"),
        tasks=required(keys, "tasks", int, "array"),
        inode=int(inode) if inode is not None and inode.isdecimal() else None,
        user=said(keys, "user"),
        host=said(keys, "host"),
        boot_id=said(keys, "boot_id"),
        submitted_at_ns=read_at(keys, "submitted_at"),
        expanded_at_ns=read_at(keys, "expanded_at"),
    )


def render_gpus(watch: GpuWatch) -> bytes:
    """Return the text of `gpus.toml`."""
    lines = [
        at_lines("at", watch.at_ns),
        f"idle_ms = {watch.idle_ns // NS_PER_MS}\ntold = {watch.told}\n",
        "is_told = true\n" if watch.is_told else "",
        gpu_use_lines(watch.gpus, watch.counters_mj),
    ]
    return "".join(lines).encode()


def parse_gpus(data: bytes) -> GpuWatch:
    """Return the content of `gpus.toml`. Raises InvalidRecord."""
    keys = read_keys(data, "gpus")
    at_ns = read_at(keys, "at")
    if at_ns is None:
        raise InvalidRecord(cannot("understand", "a gpus record", '"at" is missing'))
    counters = tuple(optional(table, "counter_mj", int) for table in several(keys, "gpu_use", dict))
    return GpuWatch(
        at_ns,
        gpu_use_of(keys),
        idle_ns=_span_ns(keys, "idle_ms"),
        told=max(0, optional(keys, "told", int) or 0),
        is_told=optional(keys, "is_told", bool) or False,
        counters_mj=counters if any(counter is not None for counter in counters) else (),
    )


def gpu_use_lines(gpus: tuple[GpuUse, ...], counters_mj: tuple[int | None, ...] = ()) -> str:
    """Return a table `[[gpu_use]]` for each GPU, as in `gpus.toml` and `result.toml`; they come last."""
    lines = ""
    for use, counter_mj in zip(gpus, counters_mj or (None,) * len(gpus), strict=True):
        mean = f"mean_percent = {round(use.mean_percent, 2)}\n" if use.mean_percent is not None else ""
        lines += f"\n[[gpu_use]]\nwatched_ms = {use.watched_ns // NS_PER_MS}\n{mean}" + number_lines(
            ("peak_percent", use.peak_percent),
            ("memory_watched_ms", use.memory_watched_ns // NS_PER_MS),
            ("mean_memory_bytes", use.mean_memory_bytes),
            ("peak_memory_bytes", use.peak_memory_bytes),
            ("energy_watched_ms", use.energy_watched_ns // NS_PER_MS or None),
            ("energy_mj", use.energy_mj),
            ("counter_mj", counter_mj),
        )
    return lines


def gpu_use_of(keys: dict[str, Any]) -> tuple[GpuUse, ...]:
    """Return the use that `gpu_use_lines` wrote."""
    return tuple(
        GpuUse(
            watched_ns=_span_ns(table, "watched_ms"),
            mean_percent=_percent(table, "mean_percent"),
            peak_percent=optional(table, "peak_percent", int),
            memory_watched_ns=_span_ns(table, "memory_watched_ms"),
            mean_memory_bytes=optional(table, "mean_memory_bytes", int),
            peak_memory_bytes=optional(table, "peak_memory_bytes", int),
            energy_watched_ns=_span_ns(table, "energy_watched_ms"),
            energy_mj=optional(table, "energy_mj", int),
        )
        for table in several(keys, "gpu_use", dict)
    )


def _percent(keys: dict[str, Any], key: str) -> float | None:
    value = optional(keys, key, float)
    return value if value is not None and 0 <= value <= 100 else None


def _span_ns(keys: dict[str, Any], key: str) -> int:
    return max(0, optional(keys, key, int) or 0) * NS_PER_MS


def _inode(value: object) -> int | None:
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,20}", value) else None


def text_lines(*pairs: tuple[str, str | None]) -> str:
    """Return a TOML line for each pair whose value is known."""
    lines = ""
    for key, value in pairs:
        if value is not None:
            lines += f"{key} = {toml.quote(value)}\n"
    return lines


def number_lines(*pairs: tuple[str, int | None]) -> str:
    """Return a TOML line for each pair whose value is known."""
    lines = ""
    for key, value in pairs:
        if value is not None:
            lines += f"{key} = {value}\n"
    return lines


def grant_lines(grant: Grant) -> str:
    """Return the keys of a grant, as in `grant.toml` and in the table `[grant]` of `result.toml`."""
    lines = f"cpus = {grant.cpus}\n" + text_lines(("cpu_list", grant.cpu_list or None))
    lines += number_lines(("memory_bytes", grant.memory_bytes))
    if grant.gpu_uuids or grant.gpu_indices:
        lines += f"gpu_uuids = [{', '.join(map(toml.quote, grant.gpu_uuids))}]\n"
        lines += f"gpu_indices = [{', '.join(map(str, grant.gpu_indices))}]\n"
    if grant.gpus_elsewhere:
        lines += f"gpus = {grant.gpus_elsewhere}\n"
    lines += number_lines(("gpu_memory_bytes", grant.gpu_memory_bytes)) + resource_lines(grant.resources)
    if grant.resource_indices:
        listed = (f"{toml.quote(name)} = [{', '.join(map(str, each))}]" for name, each in grant.resource_indices)
        lines += f"resource_indices = {{ {', '.join(listed)} }}\n"
    return lines


def resource_lines(resources: tuple[tuple[str, int], ...]) -> str:
    """Return a TOML line with named resources and their counts; "" if there are none."""
    if not resources:
        return ""
    return f"resources = {{ {', '.join(f'{toml.quote(name)} = {count}' for name, count in resources)} }}\n"


def named_lines(table: str, pairs: tuple[tuple[str, str], ...]) -> str:
    """Return a TOML table of texts by their names, "" if there are none; more than 64 KiB are left out."""
    lines, size = list[str](), 0
    for name, text in pairs:
        line = f"{toml.quote(one_line(name))} = {toml.quote(one_line(text))}\n"
        size += len(line.encode())
        if size > _MOST_NAMED:
            break
        lines.append(line)
    return f"\n[{table}]\n{''.join(lines)}" if lines else ""


def named(keys: dict[str, Any], table: str) -> tuple[tuple[str, str], ...]:
    """Return the texts that `named_lines` wrote."""
    texts = optional(keys, table, dict) or {}
    return tuple((one_line(name), one_line(text)) for name, text in texts.items() if isinstance(text, str))


def resources_of(keys: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    """Return the resources that `resource_lines` wrote."""
    table = optional(keys, "resources", dict) or {}
    return tuple(sorted((name, count) for name, count in table.items() if type(count) is int and count > 0))


def grant_of(keys: dict[str, Any]) -> Grant:
    """Return the grant that `grant_lines` wrote."""
    indices = optional(keys, "resource_indices", dict) or {}
    return Grant(
        cpus=optional(keys, "cpus", int) or 0,
        memory_bytes=optional(keys, "memory_bytes", int),
        gpu_uuids=tuple(map(one_line, several(keys, "gpu_uuids", str))),
        gpu_indices=several(keys, "gpu_indices", int),
        gpu_memory_bytes=optional(keys, "gpu_memory_bytes", int),
        gpus_elsewhere=max(0, optional(keys, "gpus", int) or 0),
        resources=resources_of(keys),
        resource_indices=tuple(sorted((name, several(indices, name, int)) for name in indices)),
        cpu_list=said(keys, "cpu_list") or "",
    )


def read_keys(data: bytes, record: str) -> dict[str, Any]:
    """Return the keys of a TOML record. Raises InvalidRecord."""
    try:
        return toml.read(data, f"a {record} record")
    except InvalidFile as error:
        raise InvalidRecord(cannot("understand", f"a {record} record", error.problems[0].message)) from None


def required(keys: dict[str, Any], key: str, kind: type[T], record: str) -> T:
    """Return the value of *key*. Raises InvalidRecord if it is missing or of another type."""
    value = optional(keys, key, kind)
    if value is None:
        raise InvalidRecord(cannot("understand", f"a {record} record", f'"{key}" is missing or of another type'))
    return value


def optional(keys: dict[str, Any], key: str, kind: type[T]) -> T | None:
    """Return the value of *key*, None if it is missing or of another type, or a negative or too large number."""
    value = keys.get(key)
    return value if _is_of(value, kind) else None


def said(keys: dict[str, Any], key: str) -> str | None:
    """Return the text of *key* as one line (`freetext`), because the job itself may have written the record."""
    text = optional(keys, key, str)
    return None if text is None else one_line(text)


def several(keys: dict[str, Any], key: str, kind: type[T]) -> tuple[T, ...]:
    """Return the list of *key* without elements of another type, empty if the key is missing."""
    value = keys.get(key)
    return tuple(element for element in value if _is_of(element, kind)) if isinstance(value, list) else ()


def _is_of(value: Any, kind: type[T]) -> TypeGuard[T]:
    if type(value) is int and not 0 <= value <= _MOST:
        return False
    return type(value) is kind
