"""The grammars of single values in a job file: signals, arrays, moments, paths, names.

Each function takes what stands in the file and returns the value, or raises InvalidValue, which says why not and
what was probably meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, date, datetime, time, timedelta

from spool.core.errors import InvalidValue
from spool.core.events import JOB_WORDS
from spool.core.model import WarningSignal
from spool.core.names import why_not_name
from spool.core.units import parse_duration
from spool.formats.toml import show
from spool.formats.validation import closest

MAX_ARGUMENT_BYTES = 128 * 1024 - 1
"""The longest single argument or environment entry that Linux passes to a program (MAX_ARG_STRLEN, less its NUL)."""

WARNING_SIGNALS = ("USR1", "USR2", "TERM", "INT", "HUP", "QUIT", "ALRM", "CONT", "WINCH", "URG", "ABRT", "XCPU")
DEFAULT_WARNING_NS = 60_000_000_000

RETRY_OUTCOMES = ("failed", "timeout", "out_of_memory")
NOTIFY_EVENTS = JOB_WORDS

SET_BY_SPOOL = frozenset(
    {
        "SPOOL_DIR",
        "SPOOL_JOB",
        "SPOOL_RUN",
        "SPOOL_ATTEMPT",
        "SPOOL_METADIR",
        "SPOOL_CPUS",
        "SPOOL_MEMORY_MB",
        "SPOOL_GPUS",
        "SPOOL_ARRAY_INDEX",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
    }
)
"""Variables that a job finds in its environment and may not set itself, nor those of its resources."""

RESOURCE_PREFIX = "SPOOL_RESOURCE_"

_RESOURCE = re.compile(r"[a-z0-9_-]{1,100}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
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


def positive(amount: int, text: str) -> int:
    """Return *amount*, which *text* states, if it is more than nothing."""
    if amount <= 0:
        raise InvalidValue(f"{show(text)} is nothing; leave the key out, or state more than zero")
    return amount


def trimmed(value: str) -> str:
    """Return *value* if it has no white space around it, which nobody sees and nobody means."""
    bare = value.strip()
    if value and not bare:
        raise InvalidValue(f"{show(value)} is nothing but white space")
    if value != bare:
        raise InvalidValue(f"{show(value)} has white space around it; write {show(bare)}")
    return value


def label(value: str) -> str:
    """Return *value* if it can name a group, a project or a tag: one line of 1-100 characters that can be shown."""
    if not value.strip() or len(value) > 100 or not value.isprintable():
        raise InvalidValue(f"{show(value)} must be 1-100 characters on one line")
    return trimmed(value)


def resource_name(value: str) -> str:
    """Return *value* if it can name a resource."""
    if value in ("cpus", "memory", "gpus"):
        raise InvalidValue(f'{show(value)} is no named resource; it has a key of its own, "{value}"')
    if _RESOURCE.fullmatch(value) is None:
        raise InvalidValue(f"{show(value)} cannot name a resource: a name is 1-100 lower-case letters, digits, - and _")
    return value


def resource_variable(name: str) -> str:
    """Return the variable in which a run finds how much of the resource *name* it was given, or which indices."""
    return RESOURCE_PREFIX + name.upper().replace("-", "_")


def words(values: tuple[str, ...]) -> None:
    """Check names or addresses that are used as they stand: none has white space around it, and each comes once."""
    for value in values:
        trimmed(value)
    different(values)


def different(values: Iterable[str | int]) -> None:
    """Check that no value of a list stands in it twice: one of the two was meant to be another."""
    seen: set[str | int] = set()
    for value in values:
        if value in seen:
            raise InvalidValue(f"names {show(value)} twice")
        seen.add(value)


def job_name(value: str) -> str:
    """Return *value* if a job can have that name."""
    why = why_not_name(value)
    if why is not None:
        raise InvalidValue(f"{show(value)} is no job's name: {why}")
    if value.endswith(".toml"):
        raise InvalidValue(f"{show(value)} is a file's name; the job's is \"{value[:-5]}\"")
    return value


def argument(value: str) -> str:
    """Return *value* if the kernel passes it to a program as one argument."""
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
        raise InvalidValue("is an empty list" if not value else "begins with an empty text, which is no program")
    for part in value:
        argument(part)
    return value


def variable(key: str, value: str) -> None:
    """Check one environment variable."""
    if _VARIABLE.fullmatch(key) is None:
        raise InvalidValue(f"{show(key)} cannot be a variable: shells pass on only A-Z a-z 0-9 _, the first no digit")
    if key in SET_BY_SPOOL or key.startswith(RESOURCE_PREFIX):
        raise InvalidValue(f"{key} is set by spool itself, from what the run was given")
    if len(key) + 1 + len(value.encode()) > MAX_ARGUMENT_BYTES:
        raise InvalidValue(f"is too long: the kernel refuses an entry of more than {MAX_ARGUMENT_BYTES} bytes")


def shell(value: str) -> str:
    """Return *value* if it is the absolute path of a shell."""
    if trimmed(value).startswith("/"):
        return value
    raise InvalidValue(f'{show(value)} must be an absolute path, as in "/bin/{value.rpartition("/")[2] or "sh"}"')


def _path(value: str) -> str:
    """Return *value* if it is not blank. A path may begin and end with white space: names of files do."""
    if not value.strip():
        raise InvalidValue(f"{show(value)} is nothing but white space")
    return value


def workdir(value: str) -> str:
    """Return *value* if it does not depend on a current directory, which a job file has not."""
    if _path(value)[0] in "/~${":
        return value
    raise InvalidValue(
        f"{show(value)} is relative, and a job file has no current directory; "
        f"begin with / or ~, as in {show('~/' + value.removeprefix('./'))}"
    )


def output_path(value: str) -> str:
    """Return *value* if every `%` in it is `%n`, `%r`, `%a` or `%%`."""
    for match in re.finditer(r"%(.?)", _path(value)):
        if match.group(1) not in ("n", "r", "a", "%"):
            raise InvalidValue(
                f"{show(value)} has {show(match.group())}; only %n (name), %r (run), %a (array index) and %% are known"
            )
    return value


def warning_signal(value: str) -> WarningSignal:
    """Return `"USR1@60s"` as a signal and how long before the limit it is sent; 60 seconds if not stated."""
    name, at, before = trimmed(value).partition("@")
    name = name.upper().removeprefix("SIG")
    if name in ("KILL", "STOP"):
        raise InvalidValue(f"{show(value)}: no program can take {name} as a warning; use USR1 or TERM")
    if name not in WARNING_SIGNALS:
        raise InvalidValue(f'{show(value)} is not a signal and a duration, as in "USR1@60s"')
    before_ns = parse_duration(before) if at else DEFAULT_WARNING_NS
    if before_ns == 0:
        raise InvalidValue(f'{show(value)} is no warning before the limit; write how long before, as in "USR1@60s"')
    return WarningSignal(name, before_ns)


def retry_on(values: tuple[str | int, ...]) -> frozenset[str | int]:
    """Return the outcomes and exit codes after which a run is tried again."""
    if not values:
        raise InvalidValue("is an empty list, so that nothing is tried again; leave the key out, or name outcomes")
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

    A date and time without an offset is the machine's local time, as for `at`; its seconds may be left out.
    """
    if isinstance(value, str):
        text = trimmed(value)
        if _MOMENT.fullmatch(text):
            try:
                return instant_ns(datetime.fromisoformat(text.upper())), None
            except ValueError:
                raise InvalidValue(f"{show(value)} is no date and time that exists") from None
        if _DATE_LIKE.match(text):
            raise InvalidValue(f'{show(value)} is not a date and time, as in "2026-01-31T09:00:00+01:00"')
        return None, parse_duration(text)
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
    """Return *moment* as ns since the epoch; one without an offset is local time. Raises InvalidValue."""
    try:
        since = (moment if moment.tzinfo is not None else moment.astimezone()) - _EPOCH
    except (OverflowError, OSError, ValueError):
        raise InvalidValue(f"{moment.isoformat()} is out of range") from None
    instant = since // _MICROSECOND * 1000
    if not 0 <= instant <= _LATEST_NS:
        raise InvalidValue(f"{moment.isoformat()} is before 1970 or after 2262")
    return instant
