"""Strict reading of a document into a type, with every problem found, not only the first.

`msgspec` reads a document that is right, quickly, and stops at the first mistake of one that is not. Only then is the
document taken apart key by key, so that each mistake is told, with its line and what was probably meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from spool.core.errors import InvalidValue, Problem
from spool.core.units import parse_duration, parse_size
from spool.formats.lines import Path, key_lines, line_of
from spool.formats.toml import show

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

_EXPECTED = re.compile(r"^Expected `(?P<types>[^`]*)`(?P<limit> [^,]*?)?(?:, got `[^`]*`)?(?P<at> - at `.*`)?$")
_INDEX = re.compile(r"\[([0-9]+)\]")
_TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text in quotes",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}


class Problems:
    """Collects what is wrong with one document."""

    def __init__(self) -> None:
        self._found: list[tuple[Path, str, str]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, path: Path, why: str) -> None:
        """Note that the value at *path* is wrong; *why* goes on after the key: "must be …", "needs …"."""
        self._found.append((path, f'"{dotted(path)}"', f": {why}"))

    def add_unknown(self, path: Path, known: Mapping[str, object]) -> None:
        """Note that the last key of *path* is none of *known*."""
        import difflib  # here, for it is needed only when something is wrong, and slow to import

        meant = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.6)
        if meant:
            hint = f', did you mean "{dotted((*path[:-1], meant[0]))}"?'
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

    def listed(self, text: str) -> list[Problem]:
        """Return the problems in the order of their lines in *text*, those without a line first."""
        lines = key_lines(text)
        problems = []
        for path, subject, rest in self._found:
            line = line_of(lines, path)
            on_line = "" if line is None else f" on line {line}"
            problems.append(Problem(dotted(path), line, f"{subject}{on_line}{rest}"))
        return sorted(problems, key=lambda problem: problem.line or 0)


def dotted(path: Path) -> str:
    """Return *path* the way people write it: `retry.max`, `depends_on[2]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def convert(document: dict[str, Any], kind: type[S], problems: Problems) -> S:
    """Return *document* as a *kind*; what does not fit is noted in *problems* and left at its default."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError:
        return msgspec.convert(_salvage(document, kind, (), problems), kind)


def _salvage(document: dict[str, Any], kind: type[msgspec.Struct], path: Path, problems: Problems) -> dict[str, Any]:
    """Return the part of *document* that fits *kind*, required keys filled in, and note the rest."""
    hints = get_type_hints(kind, include_extras=True)
    good: dict[str, Any] = {}
    for key, value in document.items():
        if key not in hints:
            problems.add_unknown((*path, key), hints)
            continue
        hint = hints[key]
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            inner = _struct_in(hint)
            if inner is not None and isinstance(value, dict):
                value = _salvage(value, inner, (*path, key), problems)
            elif inner is None and isinstance(value, dict) and (each := _struct_of_values(hint)) is not None:
                value = {
                    name: _salvage(entry, each, (*path, key, name), problems)
                    for name, entry in value.items()
                    if _is_table(entry, (*path, key, name), problems)
                }
            else:
                where, why = _explain(value, hint, error)
                problems.add((*path, key, *where), why)
                continue
        good[key] = value
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in good:
            if field.name not in document:
                problems.add((*path, field.name), "is required")
            good[field.name] = _filler(hints[field.name])
    return good


def _is_table(entry: object, path: Path, problems: Problems) -> bool:
    if isinstance(entry, dict):
        return True
    problems.add(path, f"must be a table, not {show(entry)}")
    return False


def _parts(hint: Any) -> tuple[Any, ...]:
    """Return what a union consists of, annotations taken off; the hint itself if it is none."""
    if get_origin(hint) is Annotated:
        return _parts(get_args(hint)[0])
    args = get_args(hint)
    if args and get_origin(hint) not in (list, dict, tuple):
        return tuple(part for arg in args for part in _parts(arg))
    return (hint,)


def _struct_in(hint: Any) -> type[msgspec.Struct] | None:
    for part in _parts(hint):
        if isinstance(part, type) and issubclass(part, msgspec.Struct):
            return part
    return None


def _struct_of_values(hint: Any) -> type[msgspec.Struct] | None:
    for part in _parts(hint):
        if get_origin(part) is dict:
            return _struct_in(get_args(part)[1])
    return None


def _unit_of(hint: Any) -> Callable[[object], int] | None:
    """Return the parser of a size or duration, if that is what *hint* asks for."""
    for note in getattr(hint, "__metadata__", ()):
        if isinstance(note, msgspec.Meta) and note.extra:
            unit: Callable[[object], int] | None = note.extra.get("unit")
            return unit
    for arg in get_args(hint):
        if (unit := _unit_of(arg)) is not None:
            return unit
    return None


def _filler(hint: Any) -> object:
    return "x" if str in _parts(hint) else 0


def _explain(value: object, hint: Any, error: msgspec.ValidationError) -> tuple[Path, str]:
    """Return where below the key the mistake is, and what it is, in the words of the format page."""
    unit = _unit_of(hint)
    if unit is not None and not isinstance(value, (str, list, dict)):
        try:
            unit(value)
        except InvalidValue as why:
            return (), str(why)
    match = _EXPECTED.match(str(error))
    if match is None:
        return (), str(error)
    at: Path = ()
    for index in _INDEX.findall(match["at"] or ""):
        at = (*at, int(index))
        if isinstance(value, list):
            value = value[int(index)]
        elif isinstance(value, dict):
            break
    if isinstance(value, dict) and "[...]" in (match["at"] or ""):
        at, value = _in_table(value, hint, match["at"])
    words = [_TYPE_WORDS.get(word.strip(), word.strip()) for word in match["types"].split("|")]
    if "a whole number" in words and "a number" in words:
        words.remove("a whole number")
    return at, f"must be {' or '.join(words)}{match['limit'] or ''}, not {show(value)}"


def _in_table(table: dict[str, Any], hint: Any, at: str) -> tuple[Path, object]:
    """Find the entry of a table of like values that does not fit."""
    for part in _parts(hint):
        if get_origin(part) is dict:
            for key, value in table.items():
                try:
                    msgspec.convert(value, get_args(part)[1])
                except msgspec.ValidationError:
                    index = _INDEX.findall(at)
                    if index and isinstance(value, list):
                        return (key, int(index[0])), value[int(index[0])]
                    return (key,), value
    return (), table
