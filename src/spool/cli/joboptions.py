"""The keys of a job file as options of the command line, each spelled once; and what the options say, as keys.

`spool submit` and `spool run` take them as arguments, scripts as `#SPOOL` lines, `spool edit` as new values. No
check is made here: the text that comes of it goes through the one reader of job files. Imports next to nothing, so
that the plain case of `spool submit` starts quickly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from spool.core.names import EXECUTORS

TEXT = "text"
COUNT = "count"
NUMBER = "number"
SIZE = "size"
DURATION = "duration"
NAMES = "names"  # a,b,c; may be repeated
PAIRS = "pairs"  # KEY=VALUE; may be repeated
FLAG = "flag"
WORD = "word"  # stands for a value of the key, its metavar


class Option:
    """One option: *key* is that of the job file, dotted in a table; *kind* is how its value is written."""

    __slots__ = ("flags", "key", "kind", "metavar", "repeats")

    def __init__(self, flags: str, key: str, kind: str, metavar: str) -> None:
        self.flags = flags.split()
        self.key = key
        self.kind = kind
        self.metavar = metavar
        self.repeats = kind in (NAMES, PAIRS)

    @property
    def word(self) -> str:
        """The option's name in a program: `retry_max` of the key `retry.max`."""
        if self.kind == WORD:
            return self.metavar
        return self.key.replace(".", "_")


OPTIONS = (
    Option("-g --gpus", "gpus", COUNT, "N"),
    Option("--gpu-memory", "gpu_memory", SIZE, "SIZE"),
    Option("--gpu-type", "gpu_type", TEXT, "NAME"),
    Option("--cpus", "cpus", COUNT, "N"),
    Option("-m --memory", "memory", SIZE, "SIZE"),
    Option("--resource --resources", "resources", PAIRS, "NAME=N,…"),
    Option("-t --time-limit", "time_limit", DURATION, "TIME"),
    Option("--signal", "signal", TEXT, "NAME@TIME"),
    Option("--kill-grace", "kill_grace", DURATION, "TIME"),
    Option("-p --priority", "priority", COUNT, "0-255"),
    Option("-d --depends-on", "depends_on", NAMES, "[KIND:]NAME,…"),
    Option("--on-dependency-failure", "on_dependency_failure", TEXT, "cancel|wait"),
    Option("--start-after", "start_after", TEXT, "TIME"),
    Option("--scheduling-timeout", "scheduling_timeout", DURATION, "TIME"),
    Option("--retry-max", "retry.max", COUNT, "N"),
    Option("--retry-delay", "retry.delay", DURATION, "TIME"),
    Option("--retry-backoff", "retry.backoff", NUMBER, "FACTOR"),
    Option("--retry-max-delay", "retry.max_delay", DURATION, "TIME"),
    Option("--retry-on", "retry.on", NAMES, "OUTCOME|CODE,…"),
    Option("--requeue --no-requeue", "requeue", FLAG, ""),
    Option("-e --env", "env", PAIRS, "KEY[=VALUE]"),
    Option("--workdir", "workdir", TEXT, "DIR"),
    Option("--shell", "shell", TEXT, "PATH"),
    Option("--stdout", "stdout", TEXT, "PATH"),
    Option("--stderr", "stderr", TEXT, "PATH"),
    Option("--prolog", "prolog", TEXT, "SHELL-TEXT"),
    Option("--epilog", "epilog", TEXT, "SHELL-TEXT"),
    Option("--executor", "executor", TEXT, "|".join(EXECUTORS)),
    Option("--tmux", "executor", WORD, "tmux"),
    Option("--keep-session --no-keep-session", "keep_session", FLAG, ""),
    Option("--group", "group", TEXT, "NAME"),
    Option("--group-limit", "group_limit", COUNT, "N"),
    Option("--array", "array", TEXT, "0-99:2%4"),
    Option("--matrix", "matrix", PAIRS, "KEY=VALUE,…"),
    Option("--param-file", "rows", TEXT, "FILE.csv"),
    Option("--max-running", "max_running", COUNT, "N"),
    Option("--project", "project", TEXT, "NAME"),
    Option("--tag --tags", "tags", NAMES, "TAG,…"),
    Option("--comment", "comment", TEXT, "TEXT"),
    Option("--notify", "notify.to", NAMES, "ADDRESS,…"),
    Option("--notify-on", "notify.on", NAMES, "EVENT,…"),
    Option("--notify-log-lines", "notify.log_lines", COUNT, "N"),
)

Values = dict[str, list[str]]
"""What was given for each key, as text, in order. A flag is "true" or "false"."""


class UnclearError(Exception):
    """The arguments are not of the plain kind; the message says why, for those that have nobody else to tell it."""


def read(
    arguments: Sequence[str], also: dict[str, tuple[str, bool]] | None = None
) -> tuple[Values, Sequence[str], bool]:
    """Return the values of the options that *arguments* begin with, what follows, and whether `--` stood between.

    *also* are further options and whether they take a value: {"--name": ("name", True)}. Raises UnclearError
    for what is no option.
    """
    known = {flag: (option.key, option.kind not in (FLAG, WORD)) for option in OPTIONS for flag in option.flags}
    words = {flag: option.metavar for option in OPTIONS if option.kind == WORD for flag in option.flags}
    known.update(also or {})
    values: Values = {}
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if word == "--":
            return values, arguments[at + 1 :], True
        if not word.startswith("-") or word == "-":
            break
        flag, equals, value = word.partition("=") if word.startswith("--") else (word[:2], "", word[2:])
        if flag not in known:
            raise UnclearError(f"there is no option {flag}")
        key, wants = known[flag]
        if not wants:
            if value or equals:
                raise UnclearError(f"{flag} takes no value")
            value = words.get(flag) or ("false" if flag.startswith("--no-") else "true")
        elif not value and not equals:
            at += 1
            if at == len(arguments):
                raise UnclearError(f"{flag} needs a value")
            value = arguments[at]
        values.setdefault(key, []).append(value)
        at += 1
    return values, arguments[at:], False


def keys_of(values: Values) -> dict[str, object]:
    """Return *values* as the keys of a job file, tables as dictionaries. What makes no sense stays as text."""
    keys: dict[str, object] = {}
    for option in OPTIONS:
        given = values.get(option.key)
        if not given:
            continue
        table, _, key = option.key.rpartition(".")
        into = keys.setdefault(table, {}) if table else keys
        assert isinstance(into, dict)
        into[key] = _READERS[option.kind](given) if option.key not in _SPECIAL else _SPECIAL[option.key](given)
    notify = keys.get("notify")
    if isinstance(notify, dict) and list(notify) == ["to"]:
        keys["notify"] = notify["to"]
    return keys


def _number(text: str) -> object:
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


def _last(given: list[str]) -> str:
    return given[-1]


def _names(given: Iterable[str]) -> list[str]:
    return [name for text in given for part in text.split(",") if (name := part.strip())]


def _count(given: list[str]) -> object:
    return int(given[-1]) if given[-1].isascii() and given[-1].isdecimal() else given[-1]


def _codes(given: list[str]) -> list[object]:
    return [_count([name]) for name in _names(given)]


def _variables(given: list[str]) -> dict[str, object]:
    """Return `KEY=VALUE` as a table; `KEY` alone is passed on from our own environment."""
    found: dict[str, object] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        found[key] = value if equals else os.environ.get(key, "")
    return found


def _resources(given: list[str]) -> dict[str, object]:
    """Return `NAME=N,…` as a table; `NAME` alone is one of it."""
    pairs = (text.partition("=") for text in _names(given))
    return {name: _count([count]) if equals else 1 for name, equals, count in pairs}


def _choices(given: list[str]) -> dict[str, object]:
    pairs = (pair.partition("=") for pair in given)
    return {key: [value for value in values.split(",") if value] for key, _, values in pairs}


def _rows(given: list[str]) -> object:
    from spool.cli.paramfile import rows  # here, for hardly any submission needs it

    return rows(given[-1])


def _dependencies(given: list[str]) -> object:
    """Return `a,b` as a list, `any:a,b` as a table."""
    table: dict[str, object] = {}
    for text in given:
        kind, colon, names = text.partition(":")
        found = _names([names if colon else text])
        kind = kind.strip() if colon else "all"
        if kind == "each" and len(found) == 1:
            table["each"] = found[0]
        else:
            before = table.get(kind, [])
            assert isinstance(before, list)
            table[kind] = [*before, *found]
    return table["all"] if list(table) == ["all"] else table


_READERS: dict[str, Callable[[list[str]], object]] = {
    TEXT: _last,
    SIZE: _last,
    DURATION: _last,
    COUNT: _count,
    NUMBER: lambda given: _number(given[-1]),
    NAMES: _names,
    PAIRS: _variables,
    FLAG: lambda given: given[-1] == "true",
    WORD: _last,
}
_SPECIAL: dict[str, Callable[[list[str]], object]] = {
    "depends_on": _dependencies,
    "matrix": _choices,
    "resources": _resources,
    "retry.on": _codes,
    "rows": _rows,
}
