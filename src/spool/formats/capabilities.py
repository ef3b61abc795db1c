"""The capabilities that are there, of `spool.extras` and of installed packages, and the keys that they contribute.

Packages offer theirs by entry points of the group `spool.capabilities`. These are looked up only for a word that is
not known without them, because the search costs more than a submission.

It imports next to nothing, so that `spool submit` starts quickly: the tables of keys are elsewhere.
"""

from __future__ import annotations

import os
import sys

from spool.core.capability import Row
from spool.core.layout import LOCAL_EXECUTORS

TYPE_CHECKING = False  # that of `typing`, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from spool.core.capability import Capability, EngineOffer
    from spool.core.model import Spec

MOST = 1_000_000
"""The largest count in any file."""

SHORTEST_NS = 100_000_000
"""The shortest period of anything periodic."""

MAX_INDEX = 9_999_999
"""The largest index of an array."""

REQUIRED = object()
"""The default of a required key."""

OF_ITS_FIELD = object()
"""The default of a key that has the default of its field in the model."""


class Key(Row):
    """One key: its name, the kind of its value, its meaning as the docs state it, and further properties.

    * `default`: as written in the file; None: no default. By default that of its field, if that is not empty.
    * `field`: of the model; with a dot from its root, without one within the table's part. By default the key's name,
          plus the unit for a size or duration.
    * `option`: its spelling on the command line; `help` if that differs from the docs. `shortcuts` are flags that
          stand for one value each: the spelling, the value, the help.
    * `also`: how other tools spell the option; accepted, but not listed in the help.
    * `words`: the allowed ones. `least`, `most`: its bounds. `examples`: for editors.
    * `needs`: another key, and why this one is meaningless without it.
    * `array_only`: for the array file only, not for its tasks.
    * `in_defaults`: it may also stand in `[defaults]` of config.toml.
    * `many`: "list" for a list of such tables, "named" for a table of them by names that the user chooses.
    """

    name: str
    value: str | KeyTable
    about: str
    default: object = OF_ITS_FIELD
    field: str = ""
    option: str = ""
    also: str = ""
    help: str = ""
    shortcuts: tuple[tuple[str, str, str], ...] = ()
    words: tuple[str, ...] = ()
    least: float | None = None
    most: int = MOST
    examples: Sequence[Any] = ()
    needs: str = ""
    array_only: bool = False
    in_defaults: bool = False
    many: str = ""

    @property
    def table(self) -> KeyTable | None:
        """The table that is its value."""
        return None if isinstance(self.value, str) else self.value

    @property
    def kind(self) -> str:
        """The kind of its value."""
        return self.value if isinstance(self.value, str) else self.value.name

    @property
    def target(self) -> str:
        """The field of the model, stated or by default."""
        return self.field or self.name + _UNITS.get(self.kind, "")


class KeyTable:
    """The keys of a file, or of a table in it. A value that is not a table stands for the key *short*."""

    def __init__(self, name: str, about: str, *keys: Key, short: Key | None = None) -> None:
        self.name = name
        self.about = about
        self.keys = keys
        self.short = short


_UNITS = {"size": "_bytes", "duration": "_ns", "timeout": "_ns"}


class Part:
    """A capability's part of a file: its keys, behind the key *after*, and in *reader* what reads their values.

    *reader* names the `PartReader` as "module:attribute". A key that is no table has a `field` with a dot, such as
    "metrics.path", so that its value is found with the others of its part. Each states its `default`.

    *excludes* are keys of the file that one with its keys cannot have, each with the reason. Defaults do not add them.
    *once*: why only one run can have its keys; such a job is not queued again, and copies of it are without.
    """

    def __init__(
        self, *keys: Key, after: str, reader: str, excludes: Mapping[str, str] | None = None, once: str = ""
    ) -> None:
        self.keys = keys
        self.after = after
        self.reader = reader
        self.excludes = excludes or {}
        self.once = once

    @property
    def names(self) -> frozenset[str]:
        """The names of its keys."""
        return frozenset(key.name for key in self.keys)

    @property
    def kinds(self) -> set[str]:
        """The kinds of values that its keys have, those in their tables too."""
        return set(_kinds(self.keys))


def _kinds(keys: Iterable[Key]) -> Iterator[str]:
    for key in keys:
        if key.table is None:
            yield key.kind
        else:
            yield from _kinds(key.table.keys)


GROUP = "spool.capabilities"
"""The entry point group of capabilities."""

_EXTRAS = "spool.extras"  # by name, because what is above is not known here
_here: tuple[Capability, ...] | None = None
_outside: tuple[Capability, ...] | None = None


def capabilities() -> tuple[Capability, ...]:
    """Return the capabilities of `spool.extras` that are there, and those of packages once they were searched."""
    global _here
    if _here is None:
        try:
            extras = _imported(_EXTRAS)
        except ImportError:
            extras = None
        folder = os.path.dirname(getattr(extras, "__file__", None) or "")
        table = getattr(extras, "TABLE", ())  # all of it may be deleted
        _here = tuple([each for each in table if os.path.isfile(f"{folder}/{each.name}/__init__.py")])
    return _here + (_outside or ())


def search(*, again: bool = False) -> bool:
    """Look for capabilities of installed packages; return whether there are any. Broken ones are left out.

    The search is made once, or *again* because a package may have been installed since.
    """
    global _outside
    if _outside is None or again:
        found = []
        try:
            for entry in _imported("importlib.metadata").entry_points(group=GROUP) if is_offered(GROUP) else ():
                try:
                    found.append(entry.load())
                except (Exception, SystemExit) as error:  # foreign code
                    sys.stderr.write(f"spool: {entry.value}: {type(error).__name__}: {error}\n")
        except (ImportError, OSError, ValueError):  # the packages cannot be searched now
            return bool(_outside)
        _outside = tuple(found)
    return bool(_outside)


def is_offered(group: str) -> bool:
    """Whether a distribution that this process can import has an entry point of that group.

    The files are read directly, since `importlib.metadata` costs as much as a pass or two.
    """
    for place in sys.path:
        try:
            names = os.listdir(place or ".")
        except OSError:
            continue
        for name in names:
            stated = f"{place or '.'}/{name}/entry_points.txt"
            if name.endswith((".dist-info", ".egg-info")) and _names_group(stated, f"[{group}]".encode()):
                return True
    return False


def _names_group(path: str, header: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return any(line.strip() == header for line in file)
    except OSError:
        return False


def engines() -> dict[str, EngineOffer]:
    """Return the engines that are offered, by their names, as far as packages were searched."""
    return {name: offer for capability in capabilities() for name, offer in capability.engines.items()}


def engine_offer(name: str) -> EngineOffer | None:
    """Return the engine of that name, which may be of an installed package; None: there is none."""
    return engines().get(name) or (engines().get(name) if search(again=True) else None)


def engine_title(executor: str) -> str:
    """Return the usual name of an engine; an unknown one, such as one that is not installed, keeps its own word."""
    offer = engines().get(executor)
    return offer.title if offer is not None else executor


def is_of_a_package(name: str) -> bool:
    """Whether the engine of that name is of an installed package."""
    return any(name in capability.engines for capability in _outside or ())


def executors() -> tuple[str, ...]:
    """Return the names of all executors, as far as packages were searched."""
    return (*LOCAL_EXECUTORS, *engines())


def loaded(target: str) -> Any:
    """Return the object that a text "module:attribute" names. Raises ImportError."""
    module, _, attribute = target.partition(":")
    return getattr(_imported(module), attribute)


def _imported(module: str) -> Any:
    __import__(module)  # importlib takes long to import
    return sys.modules[module]


def contributed(column: str) -> Iterator[tuple[Capability, Any]]:
    """Yield each capability that has something in that column, such as "checks", with the object named there."""
    for capability in capabilities():
        if target := getattr(capability, column):
            yield capability, loaded(target)


def only(column: str) -> Any | None:
    """Return the object of the one capability that has something in that column; None if there is none."""
    return next((found for _, found in contributed(column)), None)


def used_by(spec: Spec) -> list[Capability]:
    """Return the capabilities whose keys a job has."""
    return [each for each in capabilities() if spec.part(each.name) is not None] if spec.parts else []


def one_run_keys(data: bytes) -> dict[str, str]:
    """Return the keys of the job file *data* that only one run can have, each with the reason."""
    bound = {name: part.once for part in parts("job").values() if part.once for name in part.names}
    if not any(name.encode() in data for name in bound):
        return {}  # nearly always, so few files are parsed for this
    from spool.core.errors import InvalidFile
    from spool.formats import toml

    try:
        stated = toml.read(data, "the job file")
    except InvalidFile:
        return {}
    return {name: why for name, why in bound.items() if name in stated}


def parts(column: str) -> dict[str, Part]:
    """Return the parts of one kind of file, "job" or "config", by the names of their capabilities."""
    return {capability.name: part for capability, part in contributed(column)}


def with_parts(column: str, keys: tuple[Key, ...]) -> tuple[Key, ...]:
    """Return *keys* with those of the capabilities behind the keys after which they stand."""
    merged = list(keys)
    for part in parts(column).values():
        at = next((index for index, key in enumerate(merged, 1) if key.name == part.after), None)
        if at is not None and part.keys[0] not in merged:
            merged[at:at] = part.keys
    return tuple(merged)
