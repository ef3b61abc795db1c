"""The columns of a table of keys: what a row says of a key, and what a capability's part of a file consists of.

Separate from the tables, which capabilities contribute to, and without imports, so that `spool submit` starts quickly.
"""

from __future__ import annotations

TYPE_CHECKING = False  # that of `typing`, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

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


class KeyTable:
    """The keys of a file, or of a table in it. A value that is not a table stands for the key *short*."""

    def __init__(self, name: str, about: str, *keys: Key, short: Key | None = None) -> None:
        self.name = name
        self.about = about
        self.keys = keys
        self.short = short


class Key:
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

    def __init__(  # a row has many columns, most of them empty
        self,
        name: str,
        kind: str | KeyTable,
        about: str,
        *,
        default: object = OF_ITS_FIELD,
        field: str = "",
        option: str = "",
        also: str = "",
        help: str = "",  # noqa: A002  (no other word says it)
        shortcuts: tuple[tuple[str, str, str], ...] = (),
        words: tuple[str, ...] = (),
        least: float | None = None,
        most: int = MOST,
        examples: Sequence[Any] = (),
        needs: str = "",
        array_only: bool = False,
        in_defaults: bool = False,
        many: str = "",
    ) -> None:
        self.name = name
        self.table = None if isinstance(kind, str) else kind
        self.kind = kind if isinstance(kind, str) else kind.name
        self.about = about
        self.default = default
        self.field = field or name + _UNITS.get(self.kind, "")
        self.option = option
        self.also = also
        self.help = help or about.replace("`", "")
        self.shortcuts = shortcuts
        self.words = words
        self.least = least
        self.most = most
        self.examples = examples
        self.needs = needs
        self.array_only = array_only
        self.in_defaults = in_defaults
        self.many = many


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
