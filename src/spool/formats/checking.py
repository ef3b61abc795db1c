"""Strict reading of a document into a type, with every problem found, not only the first.

`msgspec` reads a document that is right, quickly, and stops at the first mistake of one that is not. Only then is the
document taken apart key by key (`mistakes`), so that each mistake is told, with its line and what was probably meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from spool.core.errors import InvalidValue, Problem
from spool.core.units import parse_duration, parse_size
from spool.formats.toml import Path, one_line

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

MAX_PROBLEMS = 50
"""So many problems of one file are told; of the others only the number."""


class Problems:
    """Collects what is wrong with one document."""

    def __init__(self) -> None:
        self._found: list[tuple[Path, str, str]] = []
        self._more = 0

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, path: Path, why: str) -> None:
        """Note that the value at *path* is wrong; *why* goes on after the key: "must be …", "needs …"."""
        self._add(path, f'"{dotted(path)}"', f": {why}")

    def _add(self, path: Path, subject: str, rest: str) -> None:
        if len(self._found) < MAX_PROBLEMS:
            self._found.append((path, subject, rest))
        else:
            self._more += 1

    def add_unknown(self, path: Path, known: Mapping[str, object]) -> None:
        """Note that the last key of *path* is none of *known*."""
        meant = closest(str(path[-1]), known) if len(self._found) < MAX_PROBLEMS else None
        if meant is not None:
            hint = f', did you mean "{dotted((*path[:-1], meant))}"?'
        else:
            hint = f"; the keys here are {', '.join(known)}"
        self._add(path, f'unknown key "{dotted(path)}"', hint)

    def value(self, path: Path, parse: Callable[[Any], T], value: object, default: D) -> T | D:
        """Return *parse* of *value*; where that raises InvalidValue note it and return *default*."""
        try:
            return parse(value)
        except InvalidValue as error:
            self.add(path, str(error))
            return default

    def listed(self, text: str) -> list[Problem]:
        """Return the problems in the order of their lines in *text*, those without a line first."""
        from spool.formats.lines import key_lines, line_of  # here, for only a file that is wrong needs it

        lines = key_lines(text)
        problems = []
        for path, subject, rest in self._found:
            line = line_of(lines, path)
            on_line = "" if line is None else f" on line {line}"
            problems.append(Problem(dotted(path), line, f"{subject}{on_line}{rest}"))
        problems.sort(key=lambda problem: problem.line or 0)
        if self._more:
            problems.append(Problem(None, None, f"{self._more} more problems are not listed"))
        return problems


def dotted(path: Path) -> str:
    """Return *path* the way people write it: `retry.max`, `depends_on[2]`. Absurdly long keys are cut."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            key = one_line(part if len(part) <= 60 else f"{part[:57]}...")
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
