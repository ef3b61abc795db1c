"""Job files: text to `Spec`, and back to text; the files of an array's tasks; and changes of single keys.

The keys are the rows of `keys.JOB`; the grammars of single values are in `values`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from sys import intern
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta
from msgspec.structs import replace

from spool.core.arrays import ARRAY, Substitution, Tasks
from spool.core.errors import InvalidConfig, InvalidFile, InvalidJob, InvalidValue, cannot, shown
from spool.core.layout import ANY_GPU_TYPE, LIMITS, LOCAL_EXECUTORS, MAX_NAME_LENGTH, engine_of
from spool.core.model import (
    FIRST_BYTES,
    ArraySpec,
    ArrayTask,
    Dependencies,
    JobDefaults,
    Parts,
    Problem,
    Request,
    Retry,
    Spec,
)
from spool.core.units import format_size, parse_duration
from spool.formats import keys, toml, values
from spool.formats.capabilities import Key, contributed, engine_offer, engine_title, loaded, parts
from spool.formats.toml import Path
from spool.formats.validation import Format, Kind, Kinds, Problems, Reading
from spool.formats.values import MAX_TASKS, Matrix, Names, Rows, Text

V = TypeVar("V")

WhyNoPath = Callable[[str, Mapping[str, str]], str | None]

SetKeys = Sequence[tuple[str, Mapping[str, Any]]]
"""The keys that hooks set in a job: the name of each hook, and its keys."""

_MOST_GPU_TYPES = 16

NO_DEFAULTS = JobDefaults()

_PARTS = tuple(parts("job").values())


def parse(
    data: bytes,
    *,
    name: str,
    defaults: JobDefaults = NO_DEFAULTS,
    why_no_path: WhyNoPath | None = None,
) -> Spec:
    """Return the spec in the job file *data* of the job *name*. Raises only InvalidJob, with every problem.

    *defaults* are the configuration's, for keys that the file does not set, with what hooks have set. *why_no_path*
    says why a path cannot be expanded for a job with that `env` where it would run; None if that cannot be checked
    here.
    """
    what = f"job {name}"
    reading = FORMAT.read(data, what, name, partial(completed, defaults) if defaults.keys or defaults.winning else None)
    _check_together(reading)
    parts = FORMAT.read_parts(reading)
    if why_no_path is not None:
        env = dict(reading.found[""].get("env", ()))
        for key in ("workdir", "stdout", "stderr"):
            path = reading.found[""].get(key)
            if path and (why := why_no_path(path, env)) is not None:
                reading.problems.add((key,), why)
    FORMAT.judge(reading, data, what)
    return _spec(reading, defaults, parts)


def completed(defaults: JobDefaults, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job file *document* completed by *defaults*; `env` is merged variable by variable."""
    document = overridden(document, defaults.winning)
    keys = _applicable(defaults, document)
    return {**keys, **document, **_variables(keys, document)}


def overridden(document: Mapping[str, Any], winning: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return *document* with keys that win over its own; a command line takes the place of a script.

    A table changes the keys that it names, also if one of the two is a short form. Keys that mean nothing in the
    document are left out.
    """
    if not winning:
        return document
    winning = _applicable(JobDefaults(keys=winning), {**document, **winning})
    without = "script" if isinstance(winning.get("command"), str) else None
    own = {key: value for key, value in document.items() if key != without}
    return {**own, **{key: _merged(key, own.get(key), value) for key, value in winning.items()}}


def _merged(key: str, below: object, above: object) -> object:
    """Return the value *above* of a key over the one *below*."""
    one, other = (
        {short: each} if (short := _SHORT.get(key)) and each is not None and not isinstance(each, Mapping) else each
        for each in (below, above)
    )
    return {**one, **other} if isinstance(one, Mapping) and isinstance(other, Mapping) else above


def _applicable(defaults: JobDefaults, document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of *defaults* that mean something where the job *document* runs."""
    executor = document.get("executor")
    shell = document.get("shell")
    has_shell = not isinstance(shell, str) or (_can_set_up(document) and values.is_shell(shell))
    without: tuple[str, ...] = () if has_shell else ("setup",)
    if isinstance(executor, str) and engine_of(executor) is not None:
        without = (*without, "gpu_idle", "gpu_idle_action")
    for part in _PARTS:
        if part.excludes and not part.names.isdisjoint(document):
            without = (*without, *part.excludes)
    return {key: value for key, value in defaults.keys.items() if key not in without} if without else defaults.keys


def _variables(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    env, own = below.get("env"), above.get("env")
    return {"env": {**env, **own}} if isinstance(env, dict) and isinstance(own, dict) else {}


def from_defaults(defaults: JobDefaults, data: bytes) -> str:
    """Return, as TOML, the keys that *defaults* add to the job file *data*; "" if none, or if that cannot be read.

    Comments before them say what hooks have set.
    """
    try:
        own = overridden(toml.read(data, "the job file"), defaults.winning)
    except InvalidFile:
        return ""
    added = {key: value for key, value in _applicable(defaults, own).items() if key not in own}
    if isinstance(env := defaults.keys.get("env"), dict) and isinstance(stated := own.get("env"), dict):
        added |= {"env": {key: value for key, value in env.items() if key not in stated}}
    text = toml.write({key: value for key, value in added.items() if value != {}}).decode()
    return "".join(line for line in defaults.text.splitlines(keepends=True) if line.startswith(SET_BY)) + text


SET_BY = "# set by "
"""The beginning of a comment that says which hook has set what."""


def with_set(defaults: JobDefaults, said: SetKeys) -> JobDefaults:
    """Return *defaults* with the keys that hooks set in one job; comments in the text name the hooks."""
    winning: Mapping[str, Any] = {}
    for _, each in said:
        winning = overridden(winning, each)
    text = comments(said) + toml.write({**defaults.keys, _SET: winning}).decode()
    return JobDefaults(defaults.kill_grace_ns, defaults.keys, text, winning)


def comments(said: SetKeys) -> str:
    """Return lines of TOML comments that say which hook sets what."""
    lines = []
    for hook, each in said:
        for key, value in each.items():
            pairs = {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
            for name, one in pairs.items():
                brief = ", ".join(map(toml.show, one)).join("[]") if isinstance(one, list) else toml.show(one)
                lines.append(f"{SET_BY}{hook}: {name} = {brief}\n")
    return shown("".join(lines), "\n")


def check_set(
    name: str, data: bytes, said: SetKeys, defaults: JobDefaults, why_no_path: WhyNoPath | None = None
) -> None:
    """Raise InvalidValue if the job file *data* would be invalid with what hooks set in it."""
    for at, (hook, each) in enumerate(said, 1):
        if bad := each.keys() & _NEVER_SET:
            raise InvalidValue(f'{hook}: cannot set "{min(bad)}", which makes another job of it')
        try:
            parse(data, name=name, defaults=with_set(defaults, said[:at]), why_no_path=why_no_path)
        except InvalidJob as error:
            raise InvalidValue(f"{hook}: {'; '.join(one.message for one in error.problems)}") from None
        except (TypeError, ValueError) as error:
            raise InvalidValue(f"{hook}: {', '.join(each)}: {error}") from None


def defaults_of(stated: Mapping[str, Any]) -> tuple[JobDefaults, Problems]:
    """Return the keys *stated* as job defaults, and the problems in them."""
    data = toml.write(stated)
    reading = _DEFAULTS_FORMAT.read(data, "the defaults")
    _check_together(reading)
    _DEFAULTS_FORMAT.read_parts(reading)
    return JobDefaults(keys=stated, text=data.decode()), reading.problems


def recorded_defaults(text: bytes | None, kill_grace_ns: int) -> JobDefaults:
    """Return the defaults in force at the start of a run, from its metadir; unreadable ones count as none."""
    if not text:
        return JobDefaults(kill_grace_ns)
    try:
        keys = toml.read(text, "the defaults")
        return JobDefaults(kill_grace_ns, keys, text.decode(), winning=keys.pop(_SET, {}))
    except InvalidFile:
        return JobDefaults(kill_grace_ns)


def dump(keys: Mapping[str, Any]) -> bytes:
    """Return *keys* as a job file. Raises InvalidValue for a text that UTF-8 cannot hold."""
    try:
        return toml.write(keys)
    except UnicodeEncodeError as error:
        foreign = error.object[error.start : error.end]
        raise InvalidValue(f"a job file is UTF-8 and cannot hold {foreign!a}") from None


def render_errors(name: str, problems: Sequence[Problem]) -> str:
    """Return the text of `NAME.toml.error`: the problems of the job file, each with its key and line."""
    count = sum(problem.stands_for for problem in problems)
    head = f"The job {name} cannot run: its file has {count:,} problem{'s' if count != 1 else ''}.\n"
    tail = "This file disappears when the job file is fixed or removed.\n"
    return head + "".join(f"- {shown(problem.message)}\n" for problem in problems) + tail


def gist_of(errors: str | None) -> str:
    """Return the first problem in the text of an `.error` file, and how many more there are."""
    lines = [line.removeprefix("- ") for line in (errors or "").splitlines() if line.startswith("- ")]
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return lines[0] + more if lines else (errors or "").strip()


def _spec(reading: Reading, defaults: JobDefaults, parts: Parts) -> Spec:
    """Return the spec of a valid job file."""
    found = reading.found
    spec = found[""]
    spec.setdefault("kill_grace_ns", defaults.kill_grace_ns)
    if "request" in found:
        spec["request"] = _shared(Request(**found["request"]))
    if "retry" in found:
        retry = Retry(**found["retry"])
        if retry.memory_factor is not None:
            retry = replace(retry, on=retry.on | {"out_of_memory"})
        spec["retry"] = _shared(retry)
    if "depends_on" in found:
        spec["depends_on"] = Dependencies(**found["depends_on"])
    if "task" in found:
        spec["task"] = ArrayTask(**found["task"])
    if "start_after" in spec:
        spec["start_after_ns"], spec["start_delay_ns"] = spec.pop("start_after")
    if "on_dependency_failure" in spec:
        spec["cancel_on_dependency_failure"] = spec.pop("on_dependency_failure") == "cancel"
    if parts:
        spec["parts"] = _shared(parts)
    return Spec(**spec, defaults_text=defaults.text)


@lru_cache(maxsize=4096)
def _shared(value: V) -> V:
    """Return *value*, or an equal one seen before: many jobs request the same, and then share one value."""
    return value


def _check_together(reading: Reading) -> None:
    """Add the problems between several keys. Those of single keys are already there."""
    document, problems, found = reading.document, reading.problems, reading.found
    if "signal" in document:
        warning, time_limit = found[""].get("signal"), found[""].get("time_limit_ns")
        if warning is not None and time_limit is not None and warning.before_ns >= time_limit:
            text = toml.show(document["signal"])
            problems.add(("signal",), f"{text} would come before the run begins: the time limit is shorter")
    if document.get("gpu_idle_action") == "stop" and "gpu_idle" not in document:
        problems.add(("gpu_idle_action",), 'needs "gpu_idle": how long GPUs may be idle before that')
    if "script" in document and isinstance(document.get("command"), str):
        problems.add(("command",), 'is a list beside "script": a name for the script, and its arguments')
    if "setup" in document and not _can_set_up(document):
        why = f"cannot be run by {document['shell']} before a command that is a list; write the command as a text"
        problems.add(("setup",), f'{why}, or "shell" as /bin/sh or /bin/bash')
    if "executor" in found[""]:
        _check_place(reading, found[""]["executor"])
    for part in _PARTS:
        if part.excludes and not part.names.isdisjoint(document):
            for key in filter(document.get, part.excludes):
                problems.add((key,), f'does not go with "{part.keys[0].name}": {part.excludes[key]}')
    if document.get("depends_on") == {} and not problems:  # or there were keys, but wrong ones
        problems.add(("depends_on",), 'is an empty table; set "all", "any", "ended", "failed" or "each"')
    factor = found.get("retry", {}).get("memory_factor")
    if factor is not None and "memory" not in document:
        problems.add(("retry", "memory_factor"), 'needs "memory": what it multiplies')
    if factor is not None and not found["retry"].get("max"):
        problems.add(("retry", "memory_factor"), 'needs "retry.max": how many times to try again')
    if "array" in document or "matrix" in document or "rows" in document:
        _check_array(reading)
    elif "max_running" in document:
        why = 'needs "array", "matrix" or "rows"; to limit several jobs together use "group"'
        problems.add(("max_running",), why)


def _can_set_up(document: Mapping[str, Any]) -> bool:
    """Whether the job's shell can run a setup before its command."""
    shell = document.get("shell")
    return not (isinstance(shell, str) and isinstance(document.get("command"), list) and not values.takes_setup(shell))


_NOT_ELSEWHERE = {
    "keep_session": 'needs executor = "tmux"; a job in {} has no session',
    "gpu_idle": "has no effect in {}, where spool does not see the GPUs; leave it out, or set `time_limit` instead",
    "gpu_memory": 'is "auto", which learns from the GPUs of this machine; in {} state a size, or leave it out',
    "resources": "are counted on this machine alone; name what {} counts in `executor_options`, as --licenses=NAME:N",
}
"""The keys that mean something on this machine only, with the remedy for a job of an engine."""


def _misplaced(executor: str, is_set: Callable[[str, str], object]) -> Iterator[tuple[str, str]]:
    """Yield each key that has no meaning where *executor* runs the job, with what to do.

    *is_set* says whether a capability, "" for none, has that key set.
    """
    is_here = executor in LOCAL_EXECUTORS
    where = executor if is_here else engine_title(executor)
    for key, why in () if is_here else _NOT_ELSEWHERE.items():
        if is_set("", key):
            yield key, why.format(where)
    for capability, part in contributed("job"):
        if why := capability.only_elsewhere if is_here else capability.only_here:
            yield from ((key.name, why.format(where)) for key in part.keys if is_set(capability.name, key.name))


def _check_place(reading: Reading, executor: str) -> None:
    """Add the keys that have no meaning where *executor* runs the job, and what its engine has against others."""
    found, asked = reading.found[""], reading.found.get("request", {})
    here = {
        "keep_session": found.get("keep_session"),
        "gpu_idle": found.get("gpu_idle_ns"),
        "gpu_memory": asked.get("gpu_memory_auto"),
        "resources": asked.get("resources"),
    }
    for key, why in _misplaced(executor, lambda of, key: key in reading.document if of else here[key]):
        reading.problems.add((key,), why)
    offer = engine_offer(executor) if executor not in LOCAL_EXECUTORS else None
    if offer is not None and offer.check:
        loaded(offer.check)(reading)


def why_not_there(spec: Spec, executor: str) -> str | None:
    """Return which key of a job has no meaning where *executor* runs it, and what to do; None if all have.

    For a job whose file names no executor. What the configured defaults say of GPUs is for jobs on this machine.
    """
    idle_ns = None if executor in LOCAL_EXECUTORS else spec.gpu_idle_ns
    here = {
        "keep_session": spec.keep_session,
        "gpu_idle": idle_ns is not None and idle_ns != _default_idle_ns(spec.defaults_text),
        "gpu_memory": spec.request.gpu_memory_auto,
        "resources": spec.request.resources,
    }
    misplaced = _misplaced(executor, lambda of, key: spec.part(of) if of else here[key])
    return next((f"its {key} {why}" for key, why in misplaced), None)


@lru_cache(maxsize=16)
def _default_idle_ns(defaults_text: str) -> int | None:
    """Return the `gpu_idle` of the configured defaults; None without one."""
    stated = recorded_defaults(defaults_text.encode(), 0).keys.get("gpu_idle")
    return (parse_duration(stated) or None) if isinstance(stated, str) else None


def _check_array(reading: Reading) -> None:
    document, problems, found = reading.document, reading.problems, reading.found[""]
    array: ArraySpec | None = found.get("array")
    matrix: Matrix = found.get("matrix", ())
    rows: Rows = found.get("rows", ())
    makers = [key for key in ("array", "matrix", "rows") if key in document]
    if "task" in document:
        problems.add(("task",), "is written by spool into the files of single tasks; a task cannot be an array")
    if "matrix" in document and "rows" in document:
        problems.add(("rows",), 'cannot be combined with "matrix"; write the product into the rows')
    at_once = document.get("max_running")
    if array is not None and array.max_running is not None and at_once not in (None, array.max_running):
        problems.add(("max_running",), f'says {at_once}, and "array" says {array.max_running}')
    given = {key for key, _ in (*matrix, *(rows[0] if rows else ()))}
    if array is not None and ARRAY in given:
        problems.add((makers[1], ARRAY), 'is what {array} means beside "array": its index; give the key another name')
    tasks = math.prod(len(choices) for _, choices in matrix) * (len(rows) or 1)
    last = tasks - 1
    if array is not None:
        last = array.indices[-1] if len(makers) == 1 else tasks * len(array.indices) - 1
        if len(makers) > 1 and tasks * len(array.indices) > MAX_TASKS:
            made = tasks * len(array.indices)
            problems.add(
                ("array",), f'makes {made} jobs together with "{makers[1]}", but one file may make at most {MAX_TASKS}'
            )
    if len(f"{reading.name}_{last}") > MAX_NAME_LENGTH:
        names = f"{reading.name}_{last}"
        why = f"the tasks' names ({names}) would be longer than {MAX_NAME_LENGTH} characters; rename the file"
        problems.add((makers[0],), why)


def _of_array(reading: Reading) -> bool:
    """Whether the file makes an array, or is a task of one."""
    return not {"array", "matrix", "rows", "task"}.isdisjoint(reading.document)


def _size_or_auto(key: Key, text: object, at: Path, reading: Reading) -> int | None:
    size, is_auto = reading.problems.value(at, partial(values.size_or_auto, key.least or 0), text, (None, False))
    if is_auto:
        reading.found["request"][f"{key.name}_auto"] = True
    return FIRST_BYTES if is_auto and size is None and key.name == "memory" else size


def _tags(tags: tuple[str, ...], at: Path, reading: Reading) -> tuple[str, ...]:
    reading.problems.value(at, values.different, tags, None)
    return tuple([intern(reading.problems.value((*at, n), values.label, tag, "")) for n, tag in enumerate(tags)])


def _gpu_types(listed: Names, at: Path, reading: Reading) -> tuple[str, ...]:
    names = values.several(listed)
    if names == (ANY_GPU_TYPE,):
        return ()
    if not names:
        reading.problems.add(at, f'is an empty list; name GPU types, or write "{ANY_GPU_TYPE}" for any')
    if len(names) > _MOST_GPU_TYPES:
        reading.problems.add(at, f"lists {len(names)} types; at most {_MOST_GPU_TYPES} are allowed")
    if ANY_GPU_TYPE in names:
        reading.problems.add(at, f'lists "{ANY_GPU_TYPE}", which is any type, beside others; remove either')
    reading.problems.value(at, values.words, names, None)
    return tuple(map(intern, names))


def _resources(table: dict[str, int], at: Path, reading: Reading) -> tuple[tuple[str, int], ...]:
    for name in table:
        reading.problems.value((*at, name), values.resource_name, name, "")
    return tuple(sorted([(intern(name), count) for name, count in table.items()]))


def _limits(
    table: dict[str, int | Literal["unlimited"]], at: Path, reading: Reading
) -> tuple[tuple[str, int | None], ...]:
    for name in table:
        if name not in LIMITS:
            reading.problems.add_unknown((*at, name), LIMITS)
    return tuple([(intern(name), value if isinstance(value, int) else None) for name, value in sorted(table.items())])


def _env(env: dict[str, str], at: Path, reading: Reading) -> tuple[tuple[str, str], ...]:
    for key, value in env.items():
        try:
            values.variable(key, value)
        except InvalidValue as error:
            reading.problems.add((*at, key), str(error))
    variables: tuple[tuple[str, str], ...] = _shared(tuple([(intern(key), value) for key, value in env.items()]))
    return variables


def _jobs(listed: Names, at: Path, reading: Reading) -> tuple[str, ...]:
    alone = isinstance(listed, str)
    if not listed and not alone:
        reading.problems.add(at, "is an empty list; name jobs, or leave it out")
    names: dict[str, None] = {}
    for index, other in enumerate(values.several(listed)):
        where = at if alone else (*at, index)
        if other == reading.name:
            reading.problems.add(where, f"{toml.show(other)} is this job itself, so it would wait forever")
        elif other in names:
            reading.problems.add(where, f"{toml.show(other)} is in this list twice")
        names[intern(reading.problems.value(where, values.job_name, other, ""))] = None
    return tuple(names)


def _paired_job(name: str, at: Path, reading: Reading) -> str:
    if not _of_array(reading):
        reading.problems.add(at, "pairs the tasks of two arrays, but this job is not an array")
    return reading.problems.value(at, values.job_name, name, "")


def _output(path: str, at: Path, reading: Reading) -> str:
    if re.search(r"(?<!%)(?:%%)*%[1-9]?a", path) and not _of_array(reading):
        reading.problems.add(at, f"{toml.show(path)} has %a, but this job is not part of an array")
    return reading.problems.value(at, values.output_path, path, "")


_KINDS: Kinds = {
    "command": lambda key: Kind(Names, values.command),
    "program": lambda key: Kind(str, lambda text: intern(values.program(text))),
    "shell": lambda key: Kind(str, lambda path: intern(values.shell(path))),
    "workdir": lambda key: Kind(Text, lambda path: intern(values.workdir(path))),
    "variables": lambda key: Kind(dict[str, str], read=_env),
    "umask": lambda key: Kind(str, values.umask, written=lambda umask: f"{umask:03o}"),
    "limits": lambda key: Kind(dict[str, Annotated[int, Meta(ge=0)] | Literal["unlimited"]], read=_limits),
    "size or auto": lambda key: Kind(values.SIZE_OR_AUTO, read=partial(_size_or_auto, key), written=format_size),
    "niceness": lambda key: Kind(Annotated[int, Meta(ge=-20, le=19)]),
    "GPU type": lambda key: Kind(Text | tuple[Text, ...], read=_gpu_types),
    "amounts": lambda key: Kind(dict[str, Annotated[int, Meta(ge=1, le=key.most)]], read=_resources),
    "signal": lambda key: Kind(str, values.warning_signal),
    "job": lambda key: Kind(str, lambda name: intern(values.job_name(name))),
    "jobs": lambda key: Kind(Names, read=_jobs),
    "paired job": lambda key: Kind(str, read=_paired_job),
    "moment or delay": lambda key: Kind(Any, values.moment_or_delay),
    "indices": lambda key: Kind(str, values.array),
    "choices": lambda key: Kind(dict[str, list[str | int | float | bool]], values.matrix),
    "rows": lambda key: Kind(list[dict[str, str | int | float | bool]], values.rows),
    "ends": lambda key: Kind(tuple[str | int, ...], values.retry_on, written=tuple),
    "output": lambda key: Kind(Text, read=_output),
    "labels": lambda key: Kind(tuple[Text, ...], read=_tags),
}

_SHORTEST = Spec(command="")  # every other field has its default

FORMAT = Format(keys.JOB, {**values.KINDS, **_KINDS}, InvalidJob, _SHORTEST, "job")
"""The reader of job files."""

_DEFAULTS_FORMAT = Format(keys.DEFAULTS, {**values.KINDS, **_KINDS}, InvalidConfig, _SHORTEST, "job")


# The keys, beside the values of `env`, in which `{key}` is replaced; the keys that make an array; and the tables whose
# entries have options.
_REPLACED = {key.name for key in keys.JOB.keys if key.kind in ("command", "workdir", "output", "script")}
_ARRAY_ONLY = {key.name for key in keys.JOB.keys if key.array_only}
_NEVER_SET = {*_ARRAY_ONLY, "task", "depends_on"}.union(*(part.names for part in _PARTS if part.once))
_SET = "set_by_hooks"  # the table with them in the record of the defaults
_ADDED_TO = {
    key.name for key in keys.JOB.keys if key.kind in ("variables", "amounts") or (key.table and not key.option)
}
_SHORT = {key.name: key.table.short.name for key in keys.JOB.keys if key.table and key.table.short}


class TaskFiles:
    """Makes the files of the tasks of one array. Raises InvalidFile for invalid TOML.

    A task's file is an ordinary job file: the keys of the array's file, without those that make an array, with `{key}`
    replaced, plus its parameters in `env` and a table `[task]`. It depends only on the bytes of the array's file, what
    hooks have set in it, and the position, so that it can be made again after a power cut.
    """

    def __init__(self, name: str, data: bytes, spec: Spec) -> None:
        defaults = spec.defaults_text.encode()
        self.tasks = Tasks(name, spec)
        self._substitution = Substitution(self.tasks.keys)
        document = toml.read(data, f"job {name}")
        document = dict(overridden(document, recorded_defaults(defaults, 0).winning))
        self._head = b"".join(line for line in defaults.splitlines(keepends=True) if line.startswith(SET_BY.encode()))
        same: dict[str, Any] = {}
        self._scalars: dict[str, Any] = {}  # keys that differ from task to task
        parameters = {variable: f"{{{key}}}" for variable, key in self.tasks.variables.items()}
        env = {**parameters, **document.pop("env", {})}
        self._env = {key: text for key, text in env.items() if self._substitution.touches(text)}
        for key, value in document.items():
            if key in _ARRAY_ONLY:
                continue
            if key in _REPLACED and any(map(self._substitution.touches, [value] if isinstance(value, str) else value)):
                self._scalars[key] = value
            else:
                same[key] = value
        if env:
            same["env"] = {key: text for key, text in env.items() if key not in self._env}
        # Tables come after all other keys, so the differing keys go before and after the common ones; `env` is last.
        self._same = toml.write(same) if same else b""

    def text(self, position: int) -> bytes:
        """Return the job file of the task at *position*."""
        values = self.tasks.values(position)
        apply = self._substitution.apply
        task = self.tasks.task(position)
        head: dict[str, Any] = {
            key: apply(value, values) if isinstance(value, str) else [apply(part, values) for part in value]
            for key, value in self._scalars.items()
        }
        last = f"\n[task]\narray = {toml.quote(task.array)}\nindex = {task.index}\n"
        if task.max_running is not None:
            last += f"max_running = {task.max_running}\n"
        env = toml.write({key: apply(value, values) for key, value in self._env.items()}) if self._env else b""
        return self._head + (toml.write(head) if head else b"") + self._same + env + last.encode()


def edited(data: bytes, changes: Mapping[str, object], unset: Iterable[str] = (), *, name: str) -> bytes:
    """Return the job file *data* with the keys of *changes* set and those of *unset* (dotted) removed.

    Tables, such as `env` and `retry`, in *changes* are merged with the existing ones, also where one of the two is the
    short form. Raises InvalidJob if *data* cannot be read, InvalidValue for a key of *unset* that it
    does not have. The result is not validated.
    """
    import tomlkit  # imported here, because only `spool edit` needs it
    from tomlkit.exceptions import TOMLKitError

    text = data if data.endswith(b"\n") else data + b"\n"
    try:
        document = tomlkit.parse(text.decode())
    except (TOMLKitError, UnicodeDecodeError, ValueError) as error:
        raise InvalidJob(f"job {name}", [Problem(None, None, f"not valid TOML: {error}")]) from None
    for key, value in changes.items():
        before, short = document.get(key), _SHORT.get(key)
        if isinstance(value, dict) and key in _ADDED_TO:
            if before is not None and short is not None and not isinstance(before, Mapping):
                document[key] = tomlkit.inline_table()  # it may not begin a section in front of other keys
                document[key][short] = before
            elif not isinstance(before, Mapping):
                document[key] = tomlkit.table()
            document[key].update(value)
        elif key in _ADDED_TO and short is not None and isinstance(before, Mapping):
            document[key][short] = value
        else:
            document[key] = values.with_offset(value)
    for key in unset:
        *tables, last = key.split(".")
        inner: Any = document
        for part in tables:
            inner = inner.get(part) if isinstance(inner, Mapping) else None
        if not isinstance(inner, Mapping) or last not in inner:
            raise InvalidValue(cannot("take", f'"{key}" out of job {name}', "it is not set"))
        del inner[last]  # type: ignore[attr-defined]
    return tomlkit.dumps(document).encode()


def with_offset(data: bytes, before: bytes = b"", *, name: str) -> bytes:
    """Return the valid job file *data* with the offset of this process's zone in its `start_after`, if that has none.

    One that the job file *before* has as well stays as it is.
    """
    if b"start_after" not in data:
        return data
    stated = toml.read(data, f"job {name}").get("start_after")
    if stated == values.with_offset(stated) or (before and stated == toml.read(before, "a job").get("start_after")):
        return data
    return edited(data, {"start_after": stated}, name=name)
