"""What all engines of runs elsewhere share: their settings, the names of engines, and the check of further options.

Packages offer engines by entry points of the group `spool.engines`. Those are looked up only for a name that is not
built in, because the search costs more than a submission.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping
from importlib import import_module

from msgspec import Struct

from spool.core.errors import InvalidValue, SpoolError, cannot
from spool.core.model import SECOND_NS, Spec
from spool.core.names import ENGINES, EXECUTORS
from spool.core.units import parse_duration
from spool.formats.validation import closest

GROUP = "spool.engines"
"""The entry point group of engines."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}", re.ASCII)
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:@/+*=-]*", re.ASCII)
_OPTION = re.compile(r"-{1,2}[A-Za-z][A-Za-z0-9_-]*", re.ASCII)
_offered: set[str] = set()  # names that were found; they stay valid as long as this process lives


class EngineConfig(Struct, frozen=True):
    """The settings that every engine has."""

    max_in_flight: int = 2000
    max_pending: int = 20
    poll_ns: int = 30 * SECOND_NS
    submit_per_second: float = 10
    options: tuple[str, ...] = ()


class SgeConfig(EngineConfig, frozen=True):
    """The table `[sge]` of the configuration: how jobs are handed to Grid Engine."""

    queue: str | None = None
    project: str | None = None
    pe: str | None = None  # the parallel environment of jobs with more than one processor
    memory: str = "mem_free"  # the resource that stands for it
    memory_per_slot: bool = False
    gpus: str | None = None  # likewise; None: jobs with GPUs are refused
    gpu_types: Mapping[str, str] = {}  # GPU type in job files -> a further request


def generic(settings: Mapping[str, object]) -> EngineConfig:
    """Return the settings that every engine has, from a table `[engines.NAME]` that the configuration has checked.

    An engine that an installed package offers makes its policy of them.
    """
    known = {key: settings[key] for key in ("max_in_flight", "max_pending", "submit_per_second") if key in settings}
    if "poll" in settings:
        known["poll_ns"] = parse_duration(settings["poll"])
    options = settings.get("options", ())
    assert isinstance(options, list | tuple)
    return EngineConfig(**known, options=tuple(options))  # type: ignore[arg-type]


# Names.


def offered() -> list[str]:
    """Return the names of the engines that installed packages offer, whether they can be loaded or not.

    None, if the packages cannot be searched now.
    """
    try:
        metadata = import_module("importlib.metadata")  # on this call, because it is slow to import
        return sorted({entry.name for entry in metadata.entry_points(group=GROUP)} - {*EXECUTORS})
    except (ImportError, OSError, ValueError):
        return []


def executor(name: str) -> str:
    """Return *name* if it is a built-in executor, or an engine that a package offers. Raises InvalidValue."""
    if name in EXECUTORS or name in _offered:
        return name
    _offered.update(offered())
    if name in _offered:
        return name
    known = (*EXECUTORS, *sorted(_offered))
    meant = closest(name, known)
    hint = f', did you mean "{meant}"?' if meant is not None else f"; it is one of {', '.join(known)}"
    raise InvalidValue(f'"{name}" is unknown{hint}')


def engine_name(name: str) -> str:
    """Return *name* if an installed package can offer an engine under it. Raises InvalidValue."""
    if name in EXECUTORS:
        where = f"[{name}]" if name in ENGINES else "config.toml itself"
        raise InvalidValue(f"is built in; its settings belong into {where}")
    if _NAME.fullmatch(name) is None:
        raise InvalidValue("cannot name an engine: a name is a letter, then letters, digits, - and _")
    return name


# Options.


def plausible(options: tuple[str, ...], *, example: str = "--constraint=ib") -> tuple[str, ...]:
    """Return further options of some engine unchanged, if each can be an option. Raises InvalidValue."""
    for option in options:
        option_name(option, example)
    return options


def option_name(option: str, example: str = "--constraint=ib") -> str:
    """Return the name of an option, `-q` or `--queue`. Raises InvalidValue if *option* is not an option."""
    name = re.split(r"[=\s]", option, maxsplit=1)[0]
    if not option.isprintable() or (_OPTION.fullmatch(name) is None and re.match("-[A-Za-z]", option) is None):
        raise InvalidValue(f'{option!a} is no option; write name and value as one, as in "{example}"')
    return name


def allowed(engine: str, options: tuple[str, ...]) -> tuple[str, ...]:
    """Return further options of a built-in engine's submissions unchanged. Raises InvalidValue.

    Each engine has its own rule, in the module of its name. For the engine of a package, its `Language` decides.
    """
    if engine not in ENGINES or not options:
        return options
    check: Callable[[tuple[str, ...]], tuple[str, ...]] = import_module(f"spool.formats.{engine}").allowed
    return check(options)


def word(text: str) -> str:
    """Return *text* if it can name a queue, a resource or the like. Raises InvalidValue."""
    if _SAFE.fullmatch(text) is None:
        raise InvalidValue(f"{text!a} is no name of a queue, a project or a resource")
    return text


# Answers.

_NOT_EXECUTED = (126, 127)  # the exit codes of a shell, and of the helper that runs commands


def is_silence(status: int | None, said: str, unreachable: re.Pattern[str]) -> bool:
    """Whether a command failed because it got no answer, and not because of its request.

    *unreachable* finds the engine's words for that in what it *said*. A command that could not be executed has asked
    nothing, unless it was too long to be executed at all.
    """
    if status is None or status < 0:
        return True
    if status in _NOT_EXECUTED:
        return os.strerror(errno.E2BIG) not in said
    return status != 0 and unreachable.search(said) is not None


# GPUs.


_CHOOSES_BY = {
    "slurm": 'executor_options = ["--constraint=A|B"] with the features of your nodes',
    "sge": 'executor_options = ["-l RESOURCE=A|B"] with a resource of your site',
}
"""How engines choose among GPUs in other ways than by one type."""


def gpu_kind_problem(engine: str, least_bytes: int | None, types: tuple[str, ...]) -> tuple[str, str, str] | None:
    """Return the key that a built-in engine has no words for, why, and what to do: a least size, or several types."""
    key, why = "", ""
    if least_bytes is not None:
        key = "gpu_min_memory"
        why = f"it needs GPUs of a least size ({key}), which {ENGINES[engine]} cannot be asked for"
    elif len(types) > 1:
        key = "gpu_type"
        why = f"it takes any of several GPU types ({', '.join(types)}), and {ENGINES[engine]} takes one"
    instead = f", or write {_CHOOSES_BY[engine]}" if engine in _CHOOSES_BY else ""
    return (key, why, f"name one gpu_type{instead}") if key else None


def check_gpu_kind(name: str, spec: Spec, engine: str) -> None:
    """Raise SpoolError if *spec* asks for GPUs in a way that a built-in engine has no words for."""
    found = gpu_kind_problem(engine, spec.request.gpu_min_memory_bytes, spec.request.gpu_types)
    if found is not None:
        _, why, remedy = found
        raise SpoolError(cannot("hand", f"job {name} to {ENGINES[engine]}", why, remedy=remedy))
