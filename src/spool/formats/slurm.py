"""How Slurm is spoken to: values and text only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from spool.core.errors import InvalidValue
from spool.core.model import SECOND_NS

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:@/+*-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class SlurmConfig:
    """The table `[slurm]` of the configuration: how jobs are handed to Slurm."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    max_in_flight: int = 200
    poll_ns: int = 10 * SECOND_NS
    submit_per_second: float = 10.0
    gpus: Mapping[str, str] = field(default_factory=dict)  # what Slurm calls the types of job files
    gpu_memory: str = "refuse"  # or "shard"
    options: tuple[str, ...] = ()


# What people write.

_OURS = (
    *("job-name", "comment", "output", "error", "input", "open-mode", "chdir", "wrap", "export", "export-file"),
    *("propagate", "parsable", "requeue", "no-requeue", "array", "dependency", "begin", "hold", "wait", "test-only"),
    *("time", "time-min", "signal", "mem", "mem-per-cpu", "mem-per-gpu", "nodes", "ntasks", "ntasks-per-node"),
    *("cpus-per-task", "cpus-per-gpu", "gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"),
    *("clusters", "uid", "gid", "get-user-env", "version", "help", "usage"),
)
_OURS_SHORT = frozenset("JoeiDatcnNGdbHWQMVh")
_OPTION = re.compile(r"--[A-Za-z][A-Za-z0-9-]*|-[A-Za-z].*", re.ASCII)
_FLAGS_SHORT = frozenset("kKOsvX")  # of one letter, and without a value: another letter may follow


def allowed(options: tuple[str, ...]) -> tuple[str, ...]:
    """Return further options of sbatch as they are. Raises InvalidValue if one sets what spool sets itself."""
    for option in options:
        _check(option)
    return options


def _check(option: str) -> None:
    name = re.split(r"[=\s]", option, maxsplit=1)[0]
    if not option.isprintable() or _OPTION.fullmatch(name) is None:
        raise InvalidValue(f'{option!a} is no option; write name and value as one, as in "--constraint=ib"')
    if name.startswith("--"):
        # Slurm's programs take any beginning of an option's name for it.
        ours = any(each.startswith(name[2:]) for each in _OURS)
    else:
        ours = any(letter in _OURS_SHORT for letter in _letters(name[1:]))
    if ours:
        raise InvalidValue(f"{option!a} sets what spool sets itself")


def _letters(bundle: str) -> Iterator[str]:
    """Yield the options of one letter in a bundle; what follows the first that takes a value is that value."""
    for letter in bundle:
        yield letter
        if letter not in _FLAGS_SHORT:
            return


def word(text: str) -> str:
    """Return the name of a partition or the like. Raises InvalidValue."""
    if _SAFE.fullmatch(text) is None:
        raise InvalidValue(f"{text!a} is no name in Slurm")
    return text
