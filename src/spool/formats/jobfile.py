"""Job files: text to `Spec`, and back to text. The keys are described in `job_schema`, single values in `values`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from sys import intern
from typing import Any

from msgspec import UNSET, UnsetType

from spool.core.errors import InvalidFile, InvalidJob, InvalidValue, Problem, shown
from spool.core.model import (
    DEFAULT_KILL_GRACE_NS,
    ArraySpec,
    ArrayTask,
    Dependencies,
    Notify,
    Request,
    Retry,
    Spec,
    WarningSignal,
)
from spool.core.names import EXECUTORS
from spool.core.units import parse_duration, parse_size
from spool.formats import job_schema, toml, values
from spool.formats.job_schema import (
    DependsOn,
    JobFile,
    Matrix,
    Names,
    NotifyTable,
    RetryTable,
    Rows,
    TaskTable,
    of_array,
)
from spool.formats.toml import Path
from spool.formats.validation import Problems, convert

_ANY_LENGTH = frozenset({"command", "matrix", "rows"})  # bounded otherwise: by the kernel, by the number of tasks

_PLAIN_REQUEST = Request()
_PLAIN_RETRY = Retry()

# Many jobs ask for the same: one value then serves them all.
_request = lru_cache(maxsize=4096)(Request)


def parse(
    data: bytes,
    *,
    name: str,
    default_kill_grace_ns: int = DEFAULT_KILL_GRACE_NS,
    why_no_path: Callable[[str], str | None] | None = None,
) -> Spec:
    """Return what the job file *data* of the job *name* says. Raises only InvalidJob, with every problem.

    *default_kill_grace_ns* is the configuration's, for a job that does not say. *why_no_path* says why a path cannot be
    expanded where the job would run; None if nobody knows that here.
    """
    what = f"job {name}"
    try:
        document = toml.read(data, what)
    except InvalidFile as error:
        raise InvalidJob(what, error.problems) from None
    problems = Problems()
    raw = convert(document, JobFile, problems)
    if not problems.limited(raw, _ANY_LENGTH):
        raise InvalidJob(what, problems.listed(toml.decode(data, what)))
    spec = _spec(raw, name, default_kill_grace_ns, problems)
    if why_no_path is not None:
        for key, path in (("workdir", spec.workdir), ("stdout", spec.stdout), ("stderr", spec.stderr)):
            if path and (why := why_no_path(path)) is not None:
                problems.add((key,), why)
    if problems:
        raise InvalidJob(what, problems.listed(toml.decode(data, what)))
    return spec


def dump(keys: Mapping[str, Any], *, schema: str | None = None) -> bytes:
    """Return *keys* as a job file; *schema*, an address, becomes the `#:schema` comment that editors understand.

    Raises InvalidValue for a text that UTF-8 cannot hold.
    """
    head = f"#:schema {schema}\n".encode() if schema else b""
    try:
        return head + toml.write(keys)
    except UnicodeEncodeError as error:
        foreign = error.object[error.start : error.end]
        raise InvalidValue(f"a job file is UTF-8 and cannot hold {foreign!a}") from None


def render_errors(name: str, problems: Sequence[Problem]) -> str:
    """Return the text of `NAME.toml.error`: what is wrong with the job file, in which key and on which line."""
    count = sum(problem.stands_for for problem in problems)
    head = f"The job {name} cannot run: its file has {count:,} problem{'s' if count != 1 else ''}.\n"
    tail = "This file goes away when the job file is mended or removed.\n"
    return head + "".join(f"- {shown(problem.message)}\n" for problem in problems) + tail


def _spec(raw: JobFile, name: str, default_kill_grace_ns: int, problems: Problems) -> Spec:
    """Return *raw* with every value understood; what cannot be is noted in *problems* and left at its default."""
    check = problems.value
    time_limit = _amount(raw.time_limit, "time_limit", parse_duration, problems)
    timeout = None
    if raw.scheduling_timeout is not UNSET:
        timeout = check(("scheduling_timeout",), parse_duration, raw.scheduling_timeout, 0) or None
    start_after, start_delay = None, None
    if raw.start_after is not UNSET:
        start_after, start_delay = check(("start_after",), values.moment_or_delay, raw.start_after, (None, None))
    if raw.on_dependency_failure != "cancel":
        check(("on_dependency_failure",), _on_dependency_failure, raw.on_dependency_failure, "cancel")
    if raw.executor is not UNSET:
        check(("executor",), _executor, raw.executor, "")
    array: ArraySpec | None = None if raw.array is UNSET else check(("array",), job_schema.array, raw.array, None)
    matrix: Matrix = () if raw.matrix is UNSET else check(("matrix",), job_schema.matrix, raw.matrix, ())
    rows: Rows = () if raw.rows is UNSET else check(("rows",), job_schema.rows, raw.rows, ())
    several = raw.array is not UNSET or raw.matrix is not UNSET or raw.rows is not UNSET
    if raw.task is not UNSET or several or raw.max_running is not UNSET:
        job_schema.check_together(raw, name, array, matrix, rows, problems)
    if raw.group_limit is not UNSET and raw.group is UNSET:
        problems.add(("group_limit",), 'needs "group"')
    return Spec(
        command=check(("command",), values.command, raw.command, ""),
        shell="/bin/sh" if raw.shell == "/bin/sh" else intern(check(("shell",), values.shell, raw.shell, "")),
        workdir=None if raw.workdir is UNSET else intern(check(("workdir",), values.workdir, raw.workdir, "")),
        env=_env(raw.env, problems) if raw.env else (),
        request=_wanted(raw, problems),
        time_limit_ns=time_limit,
        signal=None if raw.signal is UNSET else _signal(raw.signal, raw, time_limit, problems),
        kill_grace_ns=default_kill_grace_ns
        if raw.kill_grace is UNSET
        else check(("kill_grace",), parse_duration, raw.kill_grace, 0),
        priority=raw.priority,
        depends_on=None if raw.depends_on is UNSET else _dependencies(raw.depends_on, raw, name, problems),
        cancel_on_dependency_failure=raw.on_dependency_failure == "cancel",
        start_after_ns=start_after,
        start_delay_ns=start_delay,
        scheduling_timeout_ns=timeout,
        group=None if raw.group is UNSET else intern(check(("group",), values.label, raw.group, "")),
        group_limit=None if raw.group_limit is UNSET else raw.group_limit,
        array=array,
        matrix=matrix,
        rows=rows,
        max_running=None if raw.max_running is UNSET else raw.max_running,
        task=None if raw.task is UNSET else _task(raw.task, problems),
        retry=_PLAIN_RETRY if raw.retry is UNSET else _retry(raw.retry, problems),
        requeue=raw.requeue,
        stdout=None if raw.stdout is UNSET else _output("stdout", raw.stdout, raw, problems),
        stderr=None if raw.stderr is UNSET else _output("stderr", raw.stderr, raw, problems),
        prolog=None if raw.prolog is UNSET else intern(raw.prolog),
        epilog=None if raw.epilog is UNSET else intern(raw.epilog),
        executor=None if raw.executor is UNSET else raw.executor,
        keep_session=None if raw.keep_session is UNSET else raw.keep_session,
        project=None if raw.project is UNSET else intern(check(("project",), values.label, raw.project, "")),
        tags=_tags(raw.tags, problems) if raw.tags else (),
        comment=None if raw.comment is UNSET else raw.comment,
        notify=None if raw.notify is UNSET else _notify(raw.notify, problems),
    )


def _on_dependency_failure(value: str) -> str:
    return values.one_of(value, ("cancel", "wait"))


def _executor(value: str) -> str:
    return values.one_of(value, EXECUTORS)


def _tags(tags: tuple[str, ...], problems: Problems) -> tuple[str, ...]:
    problems.value(("tags",), values.different, tags, None)
    return tuple(intern(problems.value(("tags", at), values.label, tag, "")) for at, tag in enumerate(tags))


def _amount(text: Any, key: str, parse_unit: Callable[[object], int], problems: Problems) -> int | None:
    """Return a size or duration that must be more than nothing; None where the key is absent."""
    if text is UNSET:
        return None
    return problems.value((key,), lambda value: values.positive(parse_unit(value), value), text, None)


def _wanted(raw: JobFile, problems: Problems) -> Request:
    if raw.gpu_memory is not UNSET and raw.gpus == 0:
        problems.add(("gpu_memory",), 'needs "gpus": it is the memory of each GPU')
    if raw.gpu_type is not UNSET and raw.gpus == 0:
        problems.add(("gpu_type",), 'needs "gpus"')
    memory = _amount(raw.memory, "memory", parse_size, problems)
    resources = _resources(raw.resources, problems) if raw.resources else ()
    if memory is None and raw.gpus == 0 and raw.cpus == 1 and not resources:
        return _PLAIN_REQUEST
    gpu_type = None
    if raw.gpu_type is not UNSET and raw.gpu_type != "auto":
        gpu_type = problems.value(("gpu_type",), values.trimmed, raw.gpu_type, None)
    gpu_memory = _amount(raw.gpu_memory, "gpu_memory", parse_size, problems)
    return _request(raw.cpus, memory, raw.gpus, gpu_memory, gpu_type, resources)


def _resources(table: dict[str, int], problems: Problems) -> tuple[tuple[str, int], ...]:
    for name in table:
        problems.value(("resources", name), values.resource_name, name, "")
    return tuple(sorted((intern(name), count) for name, count in table.items()))


def _env(env: dict[str, str], problems: Problems) -> tuple[tuple[str, str], ...]:
    for key, value in env.items():
        try:
            values.variable(key, value)
        except InvalidValue as error:
            problems.add(("env", key), str(error))
    return tuple((intern(key), value) for key, value in env.items())


def _signal(text: str, raw: JobFile, time_limit: int | None, problems: Problems) -> WarningSignal | None:
    warning = problems.value(("signal",), values.warning_signal, text, None)
    if raw.time_limit is UNSET:
        problems.add(("signal",), 'needs "time_limit": it is a warning before that')
    elif warning is not None and time_limit is not None and warning.before_ns >= time_limit:
        problems.add(("signal",), f"{toml.show(text)} would come before the run begins, for it may not last that long")
    return warning


def _names(listed: Names, path: Path, name: str, problems: Problems) -> tuple[str, ...]:
    alone = isinstance(listed, str)
    if not listed and not alone:
        problems.add(path, "is an empty list; name jobs, or leave the key out")
    names: dict[str, None] = {}
    for at, other in enumerate((listed,) if isinstance(listed, str) else listed):
        where = path if alone else (*path, at)
        if other == name:
            problems.add(where, f"{toml.show(other)} is this job itself, which would wait for ever")
        elif other in names:
            problems.add(where, f"{toml.show(other)} stands in this list twice")
        names[intern(problems.value(where, values.job_name, other, ""))] = None
    return tuple(names)


def _dependencies(stated: Names | DependsOn, raw: JobFile, name: str, problems: Problems) -> Dependencies | None:
    if not isinstance(stated, DependsOn):
        names = _names(stated, ("depends_on",), name, problems)
        return Dependencies(all=names) if names else None
    if stated == DependsOn() and not problems:
        problems.add(("depends_on",), 'is an empty table; state "all", "any", "ended", "failed" or "each"')

    def clause(key: str, listed: Names | UnsetType) -> tuple[str, ...]:
        return () if listed is UNSET else _names(listed, ("depends_on", key), name, problems)

    each = None
    if stated.each is not UNSET:
        each = problems.value(("depends_on", "each"), values.job_name, stated.each, "")
        if not of_array(raw):
            problems.add(("depends_on", "each"), "pairs the tasks of two arrays, and this job is none")
    found = Dependencies(
        all=clause("all", stated.all),
        any=clause("any", stated.any),
        ended=clause("ended", stated.ended),
        failed=clause("failed", stated.failed),
        each=each,
    )
    return found if found.names() else None


def _retry(table: RetryTable, problems: Problems) -> Retry:
    def duration(key: str, text: str) -> int:
        return problems.value(("retry", key), parse_duration, text, 0)

    retry = Retry(
        max=table.max,
        delay_ns=duration("delay", table.delay),
        backoff=table.backoff,
        max_delay_ns=duration("max_delay", table.max_delay),
        on=problems.value(("retry", "on"), values.retry_on, table.on, frozenset()),
    )
    return _shared_retry(retry)


@lru_cache(maxsize=1024)
def _shared_retry(retry: Retry) -> Retry:
    return retry


def _task(table: TaskTable, problems: Problems) -> ArrayTask:
    array = problems.value(("task", "array"), values.job_name, table.array, "")
    return ArrayTask(intern(array), table.index, None if table.max_running is UNSET else table.max_running)


def _output(key: str, path: str, raw: JobFile, problems: Problems) -> str:
    if re.search(r"(?<!%)(?:%%)*%a", path) and not of_array(raw):
        problems.add((key,), f"{toml.show(path)} has %a, and this job is of no array")
    return problems.value((key,), values.output_path, path, "")


def _notify(stated: Names | NotifyTable, problems: Problems) -> Notify:
    table = stated if isinstance(stated, NotifyTable) else NotifyTable(to=stated)
    to = (table.to,) if isinstance(table.to, str) else table.to
    on = (table.on,) if isinstance(table.on, str) else table.on
    if not to or not all(address.strip() for address in to):
        problems.add(("notify",), 'needs "to": where the messages go')
    else:
        problems.value(("notify",), values.words, to, None)
    if not on:
        problems.add(("notify", "on"), "is an empty list, so that nobody is told; name events, or leave the key out")
    problems.value(("notify", "on"), values.different, on, None)
    for event in on:
        problems.value(("notify", "on"), lambda word: values.one_of(word, values.NOTIFY_EVENTS), event, "")
    return Notify(to, on, table.log_lines)
