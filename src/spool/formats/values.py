"""The grammars of single values in files: signals, arrays, moments, paths, names; and the kinds that files share.

Each function takes the value from the file and returns it parsed, or raises InvalidValue with the reason and the
probable intention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from functools import partial
from sys import intern
from typing import Annotated, Any

from msgspec import Meta

from spool.core.arrays import INDEX
from spool.core.errors import InvalidValue
from spool.core.layout import why_not_name
from spool.core.model import ArraySpec, WarningSignal
from spool.core.units import format_duration, format_size, parse_duration, parse_size
from spool.formats.capabilities import MAX_INDEX, Key, executors, search
from spool.formats.toml import show
from spool.formats.validation import Kind, Kinds, closest

Names = str | tuple[str, ...]
Text = Annotated[str, Meta(min_length=1)]

MAX_TASKS = 100_000
"""The most jobs in one file."""

Matrix = tuple[tuple[str, tuple[str, ...]], ...]
"""The lists of a matrix, in the order of the file, with values as text."""

Rows = tuple[tuple[tuple[str, str], ...], ...]
"""The values of each task in a list of rows, with keys in the order of the first row, values as text."""

MAX_ARGUMENT_BYTES = 128 * 1024 - 1
"""The longest single argument or environment entry that Linux passes to a program (MAX_ARG_STRLEN, less its NUL)."""

WARNING_SIGNALS = ("USR1", "USR2", "TERM", "INT", "HUP", "QUIT", "ALRM", "CONT", "WINCH", "URG", "ABRT", "XCPU")
DEFAULT_WARNING_NS = 60_000_000_000

RETRY_OUTCOMES = ("failed", "timeout", "out_of_memory")

OWN_VARIABLES = (
    "SPOOL_DIR",
    "SPOOL_JOB",
    "SPOOL_RUN",
    "SPOOL_ATTEMPT",
    "SPOOL_METADIR",
    "SPOOL_CPUS",
    "SPOOL_CPU_LIST",
    "SPOOL_MEMORY_MB",
    "SPOOL_GPUS",
    "SPOOL_GPU_INDICES",
    "SPOOL_ARRAY_INDEX",
    "SPOOL_EXIT_CODE",
    "SPOOL_ENV",
)
"""Every `SPOOL_*` variable that a job may find but for its resources and parameters; inherited ones are forgotten."""

SET_BY_SPOOL = frozenset({*OWN_VARIABLES[:-2], "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"})
"""Variables that a job finds in its environment and may not set itself, nor those of its resources."""

RESOURCE_PREFIX = "SPOOL_RESOURCE_"

MACHINE_ZONE = "/etc/localtime"
"""The time zone of this machine (localtime(5))."""

_MATRIX_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")
_PADDED = re.compile(r"(?<![0-9])0+(?=[0-9])")
_AT_ONCE = re.compile(r"[1-9][0-9]{0,8}")
_RESOURCE = re.compile(r"[a-z0-9_-]{1,100}")
_BOURNE = frozenset({"sh", "ash", "bash", "dash", "ksh", "ksh93", "mksh", "oksh", "posh", "yash", "zsh"})
_OTHER_SHELLS = frozenset({"csh", "elvish", "fish", "nu", "rc", "tcsh", "xonsh"})
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|BASH_FUNC_[A-Za-z_][A-Za-z0-9_.-]*%%")  # bash exports functions so
_MOMENT = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,9})?)?(?:[Zz]|[+-][0-9]{2}:[0-9]{2})?"
)
_DATE_LIKE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LATEST_NS = (1 << 63) - 1


def one_of(value: str, words: Iterable[str]) -> str:
    """Return *value* if it is one of *words*."""
    words = tuple(words)
    if value in words:
        return value
    meant = closest(value, words)
    hint = f', did you mean "{meant}"?' if meant is not None else f"; it is one of {', '.join(words)}"
    raise InvalidValue(f"{show(value)} is unknown{hint}")


def at_least(least: float, parse: Callable[[object], int], text: object) -> int:
    """Return the size or duration *text*, parsed by *parse*, if it is not less than *least*."""
    amount = parse(text)
    if amount >= least:
        return amount
    if least == 1:
        raise InvalidValue(f"{show(text)} is zero; leave it out, or set more than zero")
    raise InvalidValue(f"{show(text)} is too short; the minimum is {int(least) // 1_000_000}ms")


def several(names: Names) -> tuple[str, ...]:
    """Return *names*, a list or a single name, as a tuple."""
    return (names,) if isinstance(names, str) else names


def trimmed(value: str) -> str:
    """Return *value* if it has no white space around it, which is invisible and a mistake."""
    bare = value.strip()
    if value and not bare:
        raise InvalidValue(f"{show(value)} is only white space")
    if value != bare:
        raise InvalidValue(f"{show(value)} has white space around it; write {show(bare)}")
    return value


def label(value: str) -> str:
    """Return *value* if it can name a group, a project or a tag: one printable line of 1-100 characters."""
    if not value.strip() or len(value) > 100 or not value.isprintable():
        raise InvalidValue(f"{show(value)} must be 1-100 characters on one line")
    return trimmed(value)


def resource_name(value: str) -> str:
    """Return *value* if it can name a resource."""
    if value in ("cpus", "memory", "gpus"):
        raise InvalidValue(f'{show(value)} is not a named resource; use the key "{value}"')
    if _RESOURCE.fullmatch(value) is None:
        raise InvalidValue(f"{show(value)} cannot name a resource: a name is 1-100 lower-case letters, digits, - and _")
    return value


def resource_variable(name: str) -> str:
    """Return the variable that tells a run the amount of the resource *name* that it was granted, or its indices."""
    return RESOURCE_PREFIX + name.upper().replace("-", "_")


def executor(name: str) -> str:
    """Return *name* if an executor has it. Raises InvalidValue."""
    if name not in executors():
        search(again=True)
    return one_of(name, executors())


_OPTION = re.compile(r"-{1,2}[A-Za-z][A-Za-z0-9_-]*", re.ASCII)


def options(stated: tuple[str, ...], *, example: str) -> tuple[str, ...]:
    """Return further options of another program unchanged, if each can be an option. Raises InvalidValue."""
    for option in stated:
        option_name(option, example)
    return stated


def option_name(option: str, example: str = "--constraint=ib") -> str:
    """Return the name of an option, `-q` or `--queue`. Raises InvalidValue if *option* is not an option."""
    name = re.split(r"[=\s]", option, maxsplit=1)[0]
    if not option.isprintable() or (_OPTION.fullmatch(name) is None and re.match("-[A-Za-z]", option) is None):
        raise InvalidValue(f'{option!a} is no option; write name and value as one, as in "{example}"')
    return name


def words(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return names or addresses unchanged: none may have white space around it, and each must be unique."""
    for value in values:
        trimmed(value)
    different(values)
    return values


def different(values: Iterable[str | int]) -> None:
    """Check that no value is in a list twice: one of the two was meant to be another."""
    seen: set[str | int] = set()
    for value in values:
        if value in seen:
            raise InvalidValue(f"names {show(value)} twice")
        seen.add(value)


def job_name(value: str) -> str:
    """Return *value* if it is a valid job name."""
    why = why_not_name(value)
    if why is not None:
        raise InvalidValue(f"{show(value)} is not a valid job name: {why}")
    if value.endswith(".toml"):
        raise InvalidValue(f"{show(value)} is a file's name; the job's is \"{value[:-5]}\"")
    return value


def argument(value: str) -> str:
    """Return *value* if the kernel can pass it to a program as one argument."""
    size = len(value) if value.isascii() else len(value.encode())
    if size > MAX_ARGUMENT_BYTES:
        raise InvalidValue(
            f"is {size} bytes long, and the kernel refuses a single argument of more than {MAX_ARGUMENT_BYTES}; "
            "put the text into a script file and run that"
        )
    return value


def command(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """Return the command: a text for the shell, or the arguments of a program."""
    if isinstance(value, str):
        if not value or value.isspace():
            raise InvalidValue("is empty")
        return argument(value)
    if not value or not value[0]:
        raise InvalidValue("is an empty list" if not value else "begins with an empty string, which is not a program")
    for part in value:
        argument(part)
    return value


def program(value: str) -> str:
    """Return *value* if the kernel can execute it as a file: a script that names its interpreter."""
    line, _, _ = value.partition("\n")
    if not line.startswith("#!") or not line[2:].strip():
        raise InvalidValue('does not begin with "#!" and an interpreter, such as "#!/bin/sh"')
    if line.endswith("\r"):
        raise InvalidValue("has Windows line endings, so its interpreter would not be found; convert the file")
    return value


def variable(key: str, value: str) -> None:
    """Check one environment variable."""
    if _VARIABLE.fullmatch(key) is None:
        raise InvalidValue(
            f"{show(key)} is not a valid variable name: use only A-Z a-z 0-9 _, not starting with a digit"
        )
    if key in SET_BY_SPOOL or key.startswith(RESOURCE_PREFIX):
        raise InvalidValue(f"{key} is set by spool itself, from what the run was given")
    if len(key) + 1 + len(value.encode()) > MAX_ARGUMENT_BYTES:
        raise InvalidValue(f"is too long: the kernel refuses an entry of more than {MAX_ARGUMENT_BYTES} bytes")


def shell(value: str) -> str:
    """Return *value* if it is the absolute path of a shell."""
    if trimmed(value).startswith("/"):
        return value
    raise InvalidValue(f'{show(value)} must be an absolute path such as "/bin/{value.rpartition("/")[2] or "sh"}"')


def takes_setup(shell: str) -> bool:
    """Whether *shell* can run a setup before a list of arguments, and say that it failed."""
    return shell.rpartition("/")[2] in _BOURNE


def is_shell(shell: str) -> bool:
    """Whether *shell* can run commands written for a shell: a job's `shell` may be Python, too."""
    return takes_setup(shell) or shell.rpartition("/")[2] in _OTHER_SHELLS


def _path(value: str) -> str:
    """Return *value* if it is not blank. A path may begin and end with white space, as file names may."""
    if not value.strip():
        raise InvalidValue(f"{show(value)} is only white space")
    return value


def workdir(value: str) -> str:
    """Return *value* if it does not depend on a current directory, which a job file does not have."""
    if _path(value)[0] in "/~${":
        return value
    raise InvalidValue(
        f"{show(value)} is relative, but a job file has no current directory; "
        f"begin with / or ~, as in {show('~/' + value.removeprefix('./'))}"
    )


def output_path(value: str) -> str:
    """Return *value* if it can be that of a file, and every `%` in it is `%n`, `%r`, `%a`, `%4a` or `%%`."""
    for match in re.finditer(r"%(?:[1-9](?=a))?(.?)", _path(value)):
        if match.group(1) not in ("n", "r", "a", "%"):
            raise InvalidValue(
                f"{show(value)} has {show(match.group())}; only %n (name), %r (run), %a (array index) and %% are known"
                + ("; %j of other schedulers is %n.%r here" if match.group(1) in "jJAx" else "")
            )
    if value.endswith("/"):
        raise InvalidValue(f"{show(value)} is a directory; name a file in it, as in {show(value + '%n.%r.log')}")
    return value


def umask(value: str) -> int:
    """Return a umask, such as `"002"`."""
    if re.fullmatch("0?[0-7]{3}", value) is None:
        raise InvalidValue(f'{show(value)} is not a umask: three octal digits, such as "002"')
    return int(value, 8)


def warning_signal(value: str) -> WarningSignal:
    """Return `"USR1@60s"` as a signal and its lead before the limit; 60 seconds if not stated."""
    name, at, before = trimmed(value).partition("@")
    name = name.upper().removeprefix("SIG")
    if name in ("KILL", "STOP"):
        raise InvalidValue(f"{show(value)}: no program can take {name} as a warning; use USR1 or TERM")
    if name not in WARNING_SIGNALS:
        raise InvalidValue(f'{show(value)} is not a signal and a duration such as "USR1@60s"')
    before_ns = parse_duration(before) if at else DEFAULT_WARNING_NS
    if before_ns == 0:
        raise InvalidValue(
            f'{show(value)} gives no warning before the limit; write how long before, such as "USR1@60s"'
        )
    return WarningSignal(name, before_ns)


def retry_on(values: tuple[str | int, ...]) -> frozenset[str | int]:
    """Return the outcomes and exit codes after which a run is retried."""
    if not values:
        raise InvalidValue("is an empty list, so nothing would be retried; leave it out, or name outcomes")
    different(values)
    for value in values:
        if isinstance(value, int):
            if not 1 <= value <= 255:
                raise InvalidValue(f"{value} is not an exit code of a failure (1-255)")
        elif value == "lost":
            raise InvalidValue('a lost run is run again by "requeue", not by "retry"')
        else:
            one_of(value, RETRY_OUTCOMES)
    return frozenset(values)


def moment_or_delay(value: object) -> tuple[int | None, int | None]:
    """Return `start_after` as (instant in ns since the epoch, None) or (None, delay in ns).

    A date and time without an offset is in the time zone of the machine; its seconds may be left out.
    """
    if isinstance(value, str):
        text = trimmed(value)
        if _MOMENT.fullmatch(text):
            try:
                return instant_ns(datetime.fromisoformat(text.upper())), None
            except ValueError:
                raise InvalidValue(f"{show(value)} does not exist") from None
        if _DATE_LIKE.match(text):
            raise InvalidValue(f'{show(value)} is not a date and time such as "2026-01-31T09:00:00+01:00"')
        try:
            return None, parse_duration(text)
        except InvalidValue as error:
            raise InvalidValue(f'{error}, or a date and time such as "2026-01-31T16:00"') from None
    if isinstance(value, datetime):
        return instant_ns(value), None
    if isinstance(value, date):
        raise InvalidValue(f"{value} is a date without a time; write {value}T00:00:00")
    if isinstance(value, time):
        raise InvalidValue(f"{value} is a time without a date; write {_EPOCH.date().replace(year=2026)}T{value}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        parse_duration(value)
    raise InvalidValue(f"must be a date and time or a duration, not {show(value)}")


def instant_ns(moment: datetime) -> int:
    """Return *moment* as ns since the epoch; one without an offset is in the machine's zone. Raises InvalidValue.

    Where clocks are put forward, a time that they skip is counted from before that: 2:30 is 3:30. Where they are put
    back, one that comes twice is the first.
    """
    try:
        since = (moment if moment.tzinfo is not None else moment.replace(tzinfo=machine_zone())) - _EPOCH
    except (OverflowError, ValueError):
        raise InvalidValue(f"{moment.isoformat()} is out of range") from None
    instant = since // _MICROSECOND * 1000
    if not 0 <= instant <= _LATEST_NS:
        raise InvalidValue(f"{moment.isoformat()} is before 1970 or after 2262")
    return instant


def machine_zone() -> tzinfo:
    """Return the time zone of this machine. `TZ`, which each process can have another of, does not count in a file."""
    from zoneinfo import ZoneInfo  # imported here, because few files need it

    with suppress(OSError, ValueError), open(MACHINE_ZONE, "rb") as file:
        return ZoneInfo.from_file(file)
    return UTC


def with_offset(value: object) -> object:
    """Return a date and time without an offset with that of this process's zone, and any other *value* unchanged.

    A command that writes *value* into a file means it so. A text stays a text.
    """
    with suppress(OverflowError, OSError, ValueError):  # left to the reader of the file
        if isinstance(value, str):
            moment = datetime.fromisoformat(value.upper()) if _MOMENT.fullmatch(value) else None
            return value if moment is None or moment.tzinfo is not None else _here(moment).isoformat()
        if isinstance(value, datetime) and value.tzinfo is None:
            return _here(value)
    return value


def _here(moment: datetime) -> datetime:
    whole = datetime.fromtimestamp(moment.replace(microsecond=0).timestamp(), UTC)  # as `machine_zone` would be read
    return whole.astimezone().replace(microsecond=moment.microsecond)


def array(value: str) -> ArraySpec:
    """Return `"0-99:2%4"` as its indices, ascending. A blank may follow a comma."""
    ranges, percent, at_once = value.partition("%")
    if percent and _AT_ONCE.fullmatch(at_once) is None:
        raise InvalidValue(f'{show(value)}: the number after "%" is how many tasks run at once, at least 1')
    indices: set[int] = set()
    for part in ranges.replace(", ", ",").split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            if re.search(r"[0-9]{10}", part):
                raise InvalidValue(f"{show(value)}: no index is larger than {MAX_INDEX}")
            raise InvalidValue(f'{show(value)} is not an array; write "0-99", "0-99:2", "1,3,7-9" or "0-99%4"')
        if _PADDED.search(part):
            bare = _PADDED.sub("", part)
            raise InvalidValue(f"{show(value)}: {part} has leading zeros, but task names have none; write {bare}")
        first = int(match.group(1))
        last = first if match.group(2) is None else int(match.group(2))
        step = 1 if match.group(3) is None else int(match.group(3))
        if last < first:
            raise InvalidValue(f"{show(value)}: {part} ends before it begins")
        if step == 0:
            raise InvalidValue(f"{show(value)}: a step of 0 never ends")
        if last > MAX_INDEX:
            raise InvalidValue(f"{show(value)}: no index is larger than {MAX_INDEX}")
        more = range(first, last + 1, step)
        if len(more) + len(indices) > MAX_TASKS:
            raise InvalidValue(f"{show(value)} makes more than {MAX_TASKS} jobs")
        if not indices.isdisjoint(more):
            twice = next(index for index in more if index in indices)
            raise InvalidValue(f"{show(value)} names the index {twice} twice")
        indices.update(more)
    return ArraySpec(tuple(sorted(indices)), int(at_once) if percent else None)


def matrix(value: dict[str, list[str | int | float | bool]]) -> Matrix:
    """Return the lists of a matrix, with values as text."""
    tasks = 1
    for key, choices in value.items():
        _variable_key(key)
        if not choices:
            raise InvalidValue(f"{key} is an empty list, so there is nothing to run")
        tasks *= len(choices)
    if not value:
        raise InvalidValue("is empty; each key of it is a list of values")
    if tasks > MAX_TASKS:
        raise InvalidValue(f"makes {tasks} jobs, but one file may make at most {MAX_TASKS}")
    return tuple((key, tuple(_text_of(choice) for choice in choices)) for key, choices in value.items())


def rows(value: list[dict[str, str | int | float | bool]]) -> Rows:
    """Return a list of rows, with values as text."""
    if not value:
        raise InvalidValue("is an empty list, so that there is nothing to run")
    if len(value) > MAX_TASKS:
        raise InvalidValue(f"makes {len(value)} jobs, but one file may make at most {MAX_TASKS}")
    keys = tuple(value[0])
    if not keys:
        raise InvalidValue("begins with an empty table; each has the same keys, with this task's values")
    for key in keys:
        _variable_key(key)
    known = set(keys)
    for at, row in enumerate(value):
        if row.keys() != known:
            other = next(iter(sorted(known ^ row.keys())))
            lacks = "has no" if other in known else "has a"
            raise InvalidValue(f"row {at + 1} {lacks} {other}; every row has the same keys as the first")
    return tuple([tuple([(key, _text_of(row[key])) for key in keys]) for row in value])


def _variable_key(key: str) -> None:
    if _MATRIX_KEY.fullmatch(key) is None:
        raise InvalidValue(f"{show(key)} must be of letters, digits, _ and -, a letter first")
    if key == INDEX:
        raise InvalidValue("{index} is the task's number already; give the key another name")


def _text_of(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else repr(value)


def _text_called(title: str, *examples: str) -> Any:
    """Return the type of a text whose parser says what is wrong with a value that is none."""
    return Annotated[Any, Meta(title=title, extra_json_schema={"type": "string", "examples": list(examples)})]


_SIZE = _text_called("size", "512M", "16G")
SIZE_OR_AUTO = _text_called("size or auto", "16G", "auto", "auto:8G")
_DURATION = _text_called("duration", "90s", "1h30m", "1-12:00:00")


def _amount(type_: Any, parse: Callable[[object], int], written: Callable[[int], str], key: Key) -> Kind:
    return Kind(type_, parse if key.least is None else partial(at_least, key.least, parse), written=written)


def size_or_auto(least: float, text: object) -> tuple[int | None, bool]:
    """Return the size *text*; for "auto" or "auto:8G", the first guess if there is one, and that spool works it out."""
    word, colon, first = text.partition(":") if isinstance(text, str) else ("", "", "")
    if word != "auto":
        if isinstance(text, str) and text.strip().lower().startswith("auto"):
            raise InvalidValue(f'{show(text)}: write "auto", or "auto:8G" with a first guess')
        return at_least(least, parse_size, text), False
    try:
        return at_least(least, parse_size, first) if colon else None, True
    except InvalidValue as error:
        raise InvalidValue(f"{show(text)}: the first guess {error}") from None


KINDS: Kinds = {
    "flag": lambda key: Kind(bool),
    "count": lambda key: Kind(Annotated[int, Meta(ge=key.least or 0, le=key.most)]),
    "number": lambda key: Kind(Annotated[float, Meta(ge=key.least, le=key.most)]),
    "text": lambda key: Kind(str),
    "script": lambda key: Kind(Text, intern),
    "word": lambda key: Kind(str, partial(one_of, words=key.words)),
    "label": lambda key: Kind(Text, lambda text: intern(label(text))),
    "size": lambda key: _amount(_SIZE, parse_size, format_size, key),
    "duration": lambda key: _amount(_DURATION, parse_duration, format_duration, key),
    "executor": lambda key: Kind(str, executor),
    "options of a program": lambda key: Kind(tuple[str, ...], partial(options, example=key.examples[0][0])),
    "filled text": lambda key: Kind(Text),
    "texts by name": lambda key: Kind(dict[str, str]),
    "tables by name": lambda key: Kind(dict[str, dict[str, Any]]),
    "timeout": lambda key: Kind(_DURATION, lambda text: parse_duration(text) or None, written=format_duration),
}
"""The kinds of values shared by several files."""
