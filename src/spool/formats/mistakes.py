"""A document that does not fit its type, taken apart key by key: what is wrong, in the words of the format page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from spool.core.errors import InvalidValue
from spool.formats.checking import Problems
from spool.formats.toml import Path, show

K = TypeVar("K", bound=str | int)

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
