"""The variables that a submission copies from the caller's environment, so that the job finds the same programs.

They go into the job file's `env`, where they can be seen and edited. Imports almost nothing, because every submission
uses it.
"""

from __future__ import annotations

import os

from spool.core.names import EXPORTED
from spool.store.glance import config_if

TYPE_CHECKING = False  # that of `typing`, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# Variables that spool sets itself, and those that describe only the current shell or tmux.
_NEVER = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "_", "SHLVL", "PWD", "OLDPWD", "TMUX", "TMUX_PANE"})
_NEVER_BEGIN = ("SPOOL_", "spool_", "BASH")
_SECRETS = ("TOKEN", "SECRET", "PASS", "CREDENTIAL", "KEY")


class Exports:
    """Variables for a job: `taken` from the caller, `assigned` on the command line; `left_out` are warnings."""

    def __init__(self) -> None:
        self.taken: dict[str, str] = {}
        self.assigned: dict[str, str] = {}
        self.left_out: list[str] = []

    def env(self, own: Mapping[str, object], placeholders: Iterable[str] = ()) -> dict[str, object]:
        """Return the `env` of a job whose own `env` is *own*, which overrides copied variables.

        *placeholders* are the `{key}` that have a meaning in the file, and must stay literal in copied values.
        """
        taken = self.taken
        for key in placeholders:
            taken = {name: value.replace(f"{{{key}}}", f"{{{{{key}}}}}") for name, value in taken.items()}
        return {**taken, **self.assigned, **own}

    def take(self, names: Iterable[str], environment: Mapping[str, str]) -> None:
        """Take the variables *names* of *environment*, if a file can hold them."""
        for name in sorted(names):
            value = environment[name]
            try:
                value.encode()
            except UnicodeEncodeError:
                self.left_out.append(f"{name} is not passed on: it is not UTF-8")
            else:
                self.taken[name] = value


def exports(root: str, asked: Sequence[str] = (), environment: Mapping[str, str] = os.environ) -> Exports:
    """Return the variables that the words of `--export` select from *environment*; by default, as configured in *root*.

    A word is ALL, NONE, a name, a pattern or NAME=VALUE, several separated by commas. Named variables that are not set
    are in `left_out`.
    """
    found = Exports()
    if not asked:
        found.take(_matching(patterns(root), environment), environment)
        return found
    wanted, everything = list[str](), False
    for word in ",".join(asked).split(","):
        name, equals, value = word.strip().partition("=")
        if equals:
            found.assigned[name] = value
        elif name.upper() == "ALL":
            everything = True
        elif name and name.upper() not in ("NONE", "NIL"):
            wanted.append(name)
            if not _is_pattern(name) and name not in environment:
                found.left_out.append(f"{name} is not passed on: it is not set")
            elif not _is_pattern(name) and not may_go(name):
                found.left_out.append(f"{name} is not passed on: it only makes sense in this process")
    names = {name for name in environment if may_go(name)} if everything else set()
    found.take(names | _matching(wanted, environment), environment)
    return found


def may_go(name: str) -> bool:
    """Whether a variable of that name can be in a job file and makes sense elsewhere."""
    return name.isascii() and name.isidentifier() and name not in _NEVER and not name.startswith(_NEVER_BEGIN)


def _matching(patterns: Iterable[str], environment: Mapping[str, str]) -> set[str]:
    """Return the matching names in *environment*. Possible secrets match full names only."""
    found = set()
    for pattern in patterns:
        if not _is_pattern(pattern):
            found |= {pattern} & environment.keys()
        elif _is_pattern(pattern[:-1]) or pattern[-1] != "*":
            from fnmatch import fnmatchcase  # imported here, because most callers do not need it

            found |= {name for name in environment if fnmatchcase(name, pattern) and not _may_be_secret(name)}
        else:
            head = pattern[:-1]
            found |= {name for name in environment if name.startswith(head) and not _may_be_secret(name)}
    return {name for name in found if may_go(name)}


def _is_pattern(word: str) -> bool:
    return any(char in word for char in "*?[")


def _may_be_secret(name: str) -> bool:
    return any(word in name.upper() for word in _SECRETS)


def patterns(root: str) -> Sequence[str]:
    """Return the variables copied by default: from the configuration of *root*, or the built-in list."""
    said = config_if(root, b"export")
    return EXPORTED if said is None else said.export
