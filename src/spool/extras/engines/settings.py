"""What users write about engines: tables of config.toml, options of a job, and the keys that an engine lacks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from msgspec import Struct

from spool.core.errors import InvalidConfig, InvalidValue, SpoolError, cannot
from spool.core.model import SECOND_NS, Spec
from spool.core.names import LOCAL_EXECUTORS, engine_title
from spool.core.units import parse_duration
from spool.extras.engines import ENGINE
from spool.formats import toml
from spool.formats.config import Config
from spool.formats.toml import Path
from spool.formats.validation import Format, PartReader, Reading
from spool.formats.values import KINDS, option_name

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}", re.ASCII)


class EngineConfig(Struct, frozen=True):
    """The settings that every engine has."""

    max_in_flight: int = 2000
    max_pending: int = 20  # of these, jobs and arrays that wait there
    poll_ns: int = 30 * SECOND_NS  # the longest interval of looks
    submit_per_second: float = 10
    options: tuple[str, ...] = ()


class SlurmConfig(EngineConfig, frozen=True):
    """The table `[slurm]` of the configuration: how jobs are handed to Slurm."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    preemptible_qos: str | None = None
    gpus: Mapping[str, str] = {}  # GPU type in job files -> Slurm's name
    gpu_memory: str = "refuse"  # or "shard"


class SgeConfig(EngineConfig, frozen=True):
    """The table `[sge]` of the configuration: how jobs are handed to Grid Engine."""

    queue: str | None = None
    project: str | None = None
    pe: str | None = None  # the parallel environment of jobs with more than one processor
    memory: str = "mem_free"  # the resource that stands for it
    memory_per_slot: bool = False
    gpus: str | None = None  # likewise; None: jobs with GPUs are refused
    gpu_types: Mapping[str, str] = {}  # GPU type in job files -> a further request


class EngineSettings(Struct, frozen=True):
    """The tables of a configuration about engines."""

    slurm: SlurmConfig = SlurmConfig()
    sge: SgeConfig = SgeConfig()
    of_packages: Mapping[str, Mapping[str, object]] = {}  # as written


_NONE = EngineSettings()


def settings_of(config: Config) -> EngineSettings:
    """Return the tables of a configuration about engines."""
    found: EngineSettings | None = config.part("engines")
    return _NONE if found is None else found


def shared_settings(table: Mapping[str, object]) -> EngineConfig:
    """Return the settings that every engine has, from a table `[engines.NAME]` that the configuration has checked.

    An engine that an installed package offers makes its policy of them.
    """
    known = {key: table[key] for key in ("max_in_flight", "max_pending", "submit_per_second") if key in table}
    if "poll" in table:
        known["poll_ns"] = parse_duration(table["poll"])
    options = table.get("options", ())
    assert isinstance(options, list | tuple)
    return EngineConfig(**known, options=tuple(options))  # type: ignore[arg-type]


# Reading.


def _read_config(reading: Reading) -> EngineSettings:
    """Return the tables of engines, and add the problems of their words and options."""
    for name, is_word in (("slurm", _is_slurm_word), ("sge", _is_sge_word)):
        for key, value in reading.found[name].items():
            if key == "options":
                reading.problems.value((name, key), _RULES[name], value, None)
            for each in (value,) if isinstance(value, str) else value.values() if isinstance(value, dict) else ():
                reading.problems.value((name, key), is_word, each, None)
    of_packages = reading.found["engines"].get("of_packages", {})
    _check_tables(of_packages, ("engines",), reading)
    return EngineSettings(SlurmConfig(**reading.found["slurm"]), SgeConfig(**reading.found["sge"]), of_packages)


CONFIG_READER = PartReader(_read_config)
"""What reads the tables of config.toml."""

JOB_READER = PartReader(lambda reading: reading.found["engines"].get("options", ()))
"""What reads the key `executor_options` of a job file."""


def _check_tables(tables: Mapping[str, Mapping[str, Any]], path: Path, reading: Reading) -> None:
    """Add the problems of the keys that every engine has; the others are an engine's own."""
    known = {key.name for key in ENGINE.keys}
    for name, table in tables.items():
        reading.problems.value((*path, name), _engine_name, name, "")
        shared = {key: value for key, value in table.items() if key in known}
        if shared:
            found = _engine_format().read(toml.write(shared), "the configuration").problems
            reading.problems.take(found, (*path, name))


@cache
def _engine_format() -> Format:
    return Format(ENGINE, KINDS, InvalidConfig)


def _engine_name(name: str) -> str:
    """Return *name* if an installed package can offer an engine under it. Raises InvalidValue."""
    if name in (*LOCAL_EXECUTORS, *_RULES):
        where = f"[{name}]" if name in _RULES else "config.toml itself"
        raise InvalidValue(f"is built in; its settings belong into {where}")
    if _NAME.fullmatch(name) is None:
        raise InvalidValue("cannot name an engine: a name is a letter, then letters, digits, - and _")
    return name


def check(reading: Reading) -> None:
    """Add the problems of a job file whose `executor` is Slurm or Grid Engine."""
    engine, asked = str(reading.document["executor"]), reading.found.get("request", {})
    options = reading.found["engines"].get("options", ())
    reading.problems.value(("executor_options",), _RULES[engine], options, None)
    found = _gpu_problem(engine, asked.get("gpu_min_memory_bytes"), asked.get("gpu_types", ()))
    if found is not None:
        reading.problems.add((found[0],), f"{found[1]}; {found[2]}")


# Words.

_SLURM_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:@/+*-]*", re.ASCII)
_SGE_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:@/+*=-]*", re.ASCII)


def _is_slurm_word(text: str) -> None:
    """Raise InvalidValue if *text* cannot name a partition or the like."""
    if _SLURM_WORD.fullmatch(text) is None:
        raise InvalidValue(f"{text!a} is no name in Slurm")


def _is_sge_word(text: str) -> None:
    """Raise InvalidValue if *text* cannot name a queue, a resource or the like."""
    if _SGE_WORD.fullmatch(text) is None:
        raise InvalidValue(f"{text!a} is no name of a queue, a project or a resource")


# Options.

_OF_SBATCH = (
    *("job-name", "comment", "output", "error", "input", "open-mode", "chdir", "wrap", "export", "export-file"),
    *("propagate", "parsable", "requeue", "no-requeue", "array", "dependency", "begin", "hold", "wait", "test-only"),
    *("time", "time-min", "signal", "mem", "mem-per-cpu", "mem-per-gpu", "nodes", "ntasks", "ntasks-per-node"),
    *("cpus-per-task", "cpus-per-gpu", "gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"),
    *("clusters", "uid", "gid", "get-user-env", "version", "help", "usage", "quiet", "tres-per-task"),
)
_OF_SBATCH_SHORT = frozenset("JoeiDatcnNGdbHWQMVh")
_FLAGS_SHORT = frozenset("kKOsvX")  # one letter, without a value: another letter may follow
_OF_QSUB = frozenset(
    (
        *("N", "o", "e", "i", "j", "wd", "cwd", "S", "V", "v", "r", "t", "tc", "hold_jid", "hold_jid_ad", "terse"),
        *("sync", "b", "C", "clear", "shell", "h", "a", "now", "verify", "pe", "ckpt", "c", "@", "help"),
        *("masterq", "dc", "ac", "sc", "inherit", "pty"),
    )
)
_REQUESTS_OF_QSUB = frozenset({"h_rt", "s_rt"})


def allowed_in_slurm(options: tuple[str, ...]) -> None:
    """Raise InvalidValue if one of further options of sbatch sets what spool sets itself."""
    for option in options:
        name = option_name(option)
        if name.startswith("--"):
            # Slurm's programs accept any prefix of an option's name.
            ours = any(each.startswith(name[2:]) for each in _OF_SBATCH)
        else:
            ours = any(letter in _OF_SBATCH_SHORT for letter in _letters(name[1:]))
        if ours:
            raise InvalidValue(f"{option!a} sets what spool sets itself")


def _letters(bundle: str) -> Iterator[str]:
    """Yield the one-letter options in a bundle; the rest after the first that takes a value is that value."""
    for letter in bundle:
        yield letter
        if letter not in _FLAGS_SHORT:
            return


def allowed_in_sge(options: tuple[str, ...]) -> None:
    """Raise InvalidValue if one of further options of qsub sets what spool sets itself."""
    for option in options:
        name = option_name(option)
        value = option[len(name) :].strip()
        if name.startswith("--") or "=" in option[: len(name) + 1]:
            raise InvalidValue(f'{option!a} is no option of qsub; write name and value as one, as in "-l scratch=10G"')
        requests = {part.partition("=")[0].strip() for part in value.split(",")} if name == "-l" else set()
        if name[1:] in _OF_QSUB or not _REQUESTS_OF_QSUB.isdisjoint(requests):
            raise InvalidValue(f"{option!a} sets what spool sets itself for Grid Engine")


_RULES: dict[str, Callable[[tuple[str, ...]], None]] = {"slurm": allowed_in_slurm, "sge": allowed_in_sge}


# GPUs.

_CHOOSES_BY = {
    "slurm": 'executor_options = ["--constraint=A|B"] with the features of your nodes',
    "sge": 'executor_options = ["-l RESOURCE=A|B"] with a resource of your site',
}
"""How engines choose among GPUs in other ways than by one type."""


def _gpu_problem(engine: str, least_bytes: int | None, types: tuple[str, ...]) -> tuple[str, str, str] | None:
    """Return the key that an engine has no words for, why, and what to do: a least size, or several types."""
    title = engine_title(engine)
    remedy = f"name one gpu_type, or write {_CHOOSES_BY[engine]}"
    if least_bytes is not None:
        why = f"it needs GPUs of a least size (gpu_min_memory), which {title} cannot be asked for"
        return "gpu_min_memory", why, remedy
    if len(types) > 1:
        return "gpu_type", f"it takes any of several GPU types ({', '.join(types)}), and {title} takes one", remedy
    return None


def check_gpus(name: str, spec: Spec, engine: str) -> None:
    """Raise SpoolError if *spec* asks for GPUs in a way that an engine has no words for."""
    found = _gpu_problem(engine, spec.request.gpu_min_memory_bytes, spec.request.gpu_types)
    if found is not None:
        _, why, remedy = found
        raise SpoolError(cannot("hand", f"job {name} to {engine_title(engine)}", why, remedy=remedy))
