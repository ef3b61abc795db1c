"""Strict reading of a document into a type: every problem found, not only the first, in the words of the format page.

`msgspec` reads a document that is right, quickly, and stops at the first mistake of one that is not. Only then is the
document taken apart key by key (`salvage`), so that each mistake is told, with its line and what was probably meant.
To explain a mistake costs far more than to find it, so beyond `MAX_PROBLEMS` they are only counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set, Sized
from functools import lru_cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from spool.core.errors import InvalidValue, Problem, shown
from spool.core.units import parse_duration, parse_size
from spool.formats.toml import Path, key_lines, line_of, show

T = TypeVar("T")
D = TypeVar("D")
K = TypeVar("K", bound=str | int)
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
        return msgspec.convert(salvage(document, kind, (), problems), kind)


def salvage(document: dict[str, Any], kind: type[msgspec.Struct], path: Path, problems: Problems) -> dict[str, Any]:
    """Return the part of *document* that fits *kind*, required keys filled in, and note the rest."""
    hints = _hints(kind)
    good: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        if field.required:
            good[field.name] = _filler(hints[field.name])
            if field.name not in document:
                problems.add((*path, field.name), "is required")
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
                value = salvage(value, inner, (*path, key), problems)
            elif inner is None and isinstance(value, dict) and (each := _entries(hint, dict)) is not None:
                value = dict(_salvaged(value.items(), each, (*path, key), problems))
            elif isinstance(value, list) and (each := _entries(hint, tuple)) is not None:
                value = [entry for _, entry in _salvaged(enumerate(value), each, (*path, key), problems)]
            else:
                where, why = _explain(value, hint, error)
                problems.add((*path, key, *where), why)
                continue
        good[key] = value
    return good


@lru_cache(maxsize=64)
def _hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _salvaged(
    entries: Iterable[tuple[K, Any]], each: Any, path: Path, problems: Problems
) -> Iterator[tuple[K, object]]:
    """Yield what fits *each*, and note the rest; once enough is told, what does not fit is only counted."""
    struct = _struct_in(each)
    for key, entry in entries:
        where = (*path, key)
        if isinstance(entry, dict) and struct is not None and not problems.full:
            yield key, salvage(entry, struct, where, problems)
            continue
        try:
            msgspec.convert(entry, each)
        except msgspec.ValidationError as error:
            if problems.full:
                problems.count()
            else:
                at, why = _explain(entry, each, error)
                problems.add((*where, *at), why)
            continue
        yield key, entry


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


def _entries(hint: Any, kind: type) -> Any:
    """Return what the entries of a *kind* (dict or tuple) that *hint* allows are, if a struct may be one; else None."""
    for part in _parts(hint):
        if get_origin(part) is kind:
            entry = get_args(part)[1 if kind is dict else 0]
            return entry if _struct_in(entry) is not None else None
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
    parts = _parts(hint)
    return "x" if str in parts else [0] if any(get_origin(part) is tuple for part in parts) else 0


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
    before, table, after = (match["at"] or "").partition("[...]")
    if isinstance(value, dict) and table:
        listed = at if "[" in before else ()
        within, value = _in_table(value, hint, after)
        at = (*listed, *within)
    words = [_TYPE_WORDS.get(word.strip(), word.strip()) for word in match["types"].split("|")]
    if "a whole number" in words and "a number" in words:
        words.remove("a whole number")
    return at, f"must be {' or '.join(words)}{match['limit'] or ''}, not {show(value)}"


def _in_table(table: dict[str, Any], hint: Any, at: str) -> tuple[Path, object]:
    """Find the entry of a table of like values that does not fit."""
    for part in _parts(hint):
        if get_origin(part) is list:
            return _in_table(table, get_args(part)[0], at)
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
