"""Strict reading of a document into a type, with every problem found, not only the first.

`msgspec` reads a document that is right, quickly, and stops at the first mistake of one that is not. Only then is the
document taken apart key by key (`mistakes`), so that each mistake is told, with its line and what was probably meant.
To explain a mistake costs far more than to find it, so beyond `MAX_PROBLEMS` they are only counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set, Sized
from typing import Annotated, Any, TypeVar

import msgspec

from spool.core.errors import InvalidValue, Problem, shown
from spool.core.units import parse_duration, parse_size
from spool.formats.toml import Path

T = TypeVar("T")
D = TypeVar("D")
S = TypeVar("S", bound=msgspec.Struct)

Size = Annotated[
    str, msgspec.Meta(title="size", extra={"unit": parse_size}, extra_json_schema={"examples": ["512M", "16G"]})
]
"""A size, as text in the file."""
Duration = Annotated[
    str,
    msgspec.Meta(
        title="duration", extra={"unit": parse_duration}, extra_json_schema={"examples": ["90s", "1h30m", "1-12:00:00"]}
    ),
]
"""A duration, as text in the file."""

MAX_PROBLEMS = 100
"""The most problems of one file that are told; the others are counted."""

MAX_NAMES = 1000
"""The most names, tags and addresses in all lists of one file together, and the most entries of a table of names."""


class Problems:
    """Collects what is wrong with one document."""

    def __init__(self) -> None:
        self._found: list[tuple[Path, str, str]] = []
        self._more = 0

    def __bool__(self) -> bool:
        return bool(self._found)

    @property
    def full(self) -> bool:
        """Whether as many problems are noted as are told: of any other one only the number counts."""
        return len(self._found) >= MAX_PROBLEMS

    def count(self, number: int = 1) -> None:
        """Note *number* problems that nobody is told of; for when it is `full`."""
        self._more += number

    def add(self, path: Path, why: str) -> None:
        """Note that the value at *path* is wrong; *why* goes on after the key: "must be …", "needs …"."""
        if self.full:
            self.count()
        else:
            self._found.append((path, f'"{dotted(path)}"', f": {why}"))

    def add_unknown(self, path: Path, known: Mapping[str, object]) -> None:
        """Note that the last key of *path* is none of *known*."""
        if self.full:
            self.count()
            return
        meant = closest(str(path[-1]), known)
        if meant is not None:
            hint = f', did you mean "{dotted((*path[:-1], meant))}"?'
        else:
            hint = f"; the keys here are {', '.join(known)}"
        self._found.append((path, f'unknown key "{dotted(path)}"', hint))

    def value(self, path: Path, parse: Callable[[Any], T], value: object, default: D) -> T | D:
        """Return *parse* of *value*; where that raises InvalidValue note it and return *default*."""
        try:
            return parse(value)
        except InvalidValue as error:
            self.add(path, str(error))
            return default

    def limited(self, raw: msgspec.Struct, free: Set[str] = frozenset()) -> bool:
        """Return whether the lists and tables of *raw* are short enough to be looked into; note it if not.

        *free* are the keys that may hold as much as fits into the file.
        """
        lists: list[tuple[int, Path]] = []
        for path, value in _collections(raw, (), free):
            if not isinstance(value, dict):
                lists.append((len(value), path))
            elif len(value) > MAX_NAMES:
                self.add(path, f"has {len(value):,} entries, and it may have {MAX_NAMES:,}")
                return False
        total = sum(length for length, _ in lists)
        if total <= MAX_NAMES:
            return True
        length, longest = max(lists, key=lambda one: one[0])
        others = "" if length == total else f", and all lists of the file {total:,} together"
        self.add(longest, f"has {length:,} entries{others}; they may have {MAX_NAMES:,}")
        return False

    def listed(self, text: str) -> list[Problem]:
        """Return the problems in the order of their lines in *text*, those without a line first."""
        from spool.formats.lines import key_lines, line_of  # here, for only a file that is wrong needs it

        lines = key_lines(text, {path for path, _, _ in self._found})
        problems = []
        for path, subject, rest in self._found:
            line = line_of(lines, path)
            on_line = "" if line is None else f" on line {line}"
            problems.append(Problem(dotted(path), line, f"{subject}{on_line}{rest}"))
        problems.sort(key=lambda problem: problem.line or 0)
        if self._more:
            problems.append(Problem(None, None, f"and {self._more:,} more", self._more))
        return problems


def _collections(raw: msgspec.Struct, path: Path, free: Set[str]) -> Iterator[tuple[Path, Sized]]:
    for key in raw.__struct_fields__:
        value = getattr(raw, key)
        if key in free and not path:
            continue
        if isinstance(value, msgspec.Struct):
            yield from _collections(value, (*path, key), free)
        elif isinstance(value, (tuple, list, dict)) and value:
            yield (*path, key), value


def dotted(path: Path) -> str:
    """Return *path* the way people write it: `retry.max`, `depends_on[2]`. Absurdly long keys are cut."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            key = shown(part if len(part) <= 60 else f"{part[:57]}...")
            text += f".{key}" if text else key
    return text


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the one of *known* that was probably meant by *word*, if one is near."""
    if len(word) > 60:
        return None
    import difflib  # here, for it is needed only when something is wrong, and slow to import

    return next(iter(difflib.get_close_matches(word, known, n=1)), None)


def convert(document: dict[str, Any], kind: type[S], problems: Problems) -> S:
    """Return *document* as a *kind*; what does not fit is noted in *problems* and left at its default."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError:
        from spool.formats.mistakes import salvage  # here, for only a file that is wrong needs it

        return msgspec.convert(salvage(document, kind, (), problems), kind)
