"""Strict reading of a file by its table of keys: reports every problem, in the words of the format page.

Each key that is set is read by itself: msgspec checks its type, its `Kind` parses it, and the value goes into the field
of its row. A mistake hides no other; it has its line and the probable intention. Explaining one costs far more than
finding it, so beyond `MAX_PROBLEMS` they are only counted.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import UNSET, Struct

from spool.core.errors import InvalidFile, InvalidValue, shown
from spool.core.model import Parts, Problem
from spool.formats import toml
from spool.formats.capabilities import REQUIRED, Key, KeyTable, loaded, parts, search, with_parts
from spool.formats.toml import Path, key_lines, line_of, show

T = TypeVar("T")
D = TypeVar("D")

MAX_PROBLEMS = 100
"""The most problems of one file that are listed; the others are counted."""

_EXPECTED = re.compile(r"^Expected `(?P<types>[^`]*)`(?P<limit> [^,]*?)?(?:, got `[^`]*`)?(?: - at `.*`)?$")
_ZERO = re.compile(r"\s*0[smhd]?\s*")
_TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text in quotes",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}


class Problems:
    """Collects the problems of one document."""

    def __init__(self) -> None:
        self._found: list[tuple[Path, str, str]] = []
        self._more = 0

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, path: Path, why: str) -> None:
        """Add a problem with the value at *path*; *why* continues the message after the key: "must be …", "needs …"."""
        if self._is_listed():
            self._found.append((path, f'"{dotted(path)}"', f": {why}"))

    def add_unknown(self, path: Path, known: Collection[str], meant: str | None = None) -> None:
        """Add a problem: the last key of *path* is not among *known*. *meant*: another word for it."""
        if not self._is_listed():
            return
        meant = meant or closest(str(path[-1]), known)
        if meant is not None:
            hint = f', did you mean "{dotted((*path[:-1], meant))}"?'
        else:
            hint = f"; the keys here are {', '.join(known)}"
        self._found.append((path, f'unknown key "{dotted(path)}"', hint))

    def value(self, path: Path, parse: Callable[[Any], T], value: object, default: D) -> T | D:
        """Return *parse* of *value*; if that raises InvalidValue, add the problem and return *default*."""
        try:
            return parse(value)
        except InvalidValue as error:
            self.add(path, str(error))
            return default

    def _is_listed(self) -> bool:
        """Whether another problem is listed; beyond `MAX_PROBLEMS` it is counted."""
        is_full = len(self._found) >= MAX_PROBLEMS
        self._more += is_full
        return not is_full

    def take(self, others: Problems, at: Path) -> None:
        """Add the problems of *others*, whose document is at *at* in this one."""
        for path, subject, rest in others._found:
            here = (*at, *path)
            self._found.append((here, subject.replace(f'"{dotted(path)}"', f'"{dotted(here)}"'), rest))

    def listed(self, text: str) -> list[Problem]:
        """Return the problems in the order of their lines in *text*, those without a line first."""
        lines = key_lines(text)
        problems = []
        for path, subject, rest in self._found:
            line = line_of(lines, path)
            on_line = "" if line is None else f" on line {line}"
            problems.append(Problem(dotted(path), line, f"{subject}{on_line}{rest}"))
        problems.sort(key=lambda problem: problem.line or 0)
        if self._more:
            problems.append(Problem(None, None, f"and {self._more:,} more", self._more))
        return problems


def dotted(path: Path) -> str:
    """Return *path* as written in the file: `retry.max`, `depends_on[2]`. Absurdly long keys are cut."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            key = shown(part if len(part) <= 60 else f"{part[:57]}...")
            text += f".{key}" if text else key
    return text


def closest(word: str, known: Iterable[str], *, like: float = 0.6) -> str | None:
    """Return the one of *known* that *word* probably means: one as similar as *like* or more, else one it begins.

    Case does not matter, and a hyphen equals an underscore.
    """
    if len(word) > 60:
        return None
    import difflib  # imported here, because only a mistake needs it, and it is slow to import

    names = {_plain(name): name for name in known}
    plain = _plain(word)
    near = [plain] if plain in names else difflib.get_close_matches(plain, names, n=1, cutoff=like)
    near = near or [name for name in names if name.startswith(f"{plain}_")]
    return names[near[0]] if near else None


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")


class Kind(Struct, frozen=True):
    """A kind of value: its type in the file, and its parser; unchanged by default.

    `parse` takes the value and raises InvalidValue. `read` also takes its path and the whole reading, and adds problems
    itself. `written` turns a value back into what a file would say.
    """

    type: Any
    parse: Callable[[Any], object] | None = None
    read: Callable[[Any, Path, Reading], object] | None = None
    written: Callable[[Any], object] | None = None


Kinds = Mapping[str, Callable[[Key], Kind]]
"""The kinds that a table names; some depend on other columns of the row."""


class PartReader(Struct, frozen=True):
    """How the values of a capability's part of a file are read.

    `read` takes the whole reading, adds the problems between several keys, and returns the value of the part; it is
    called only if the file sets one of its keys. `kinds` are those of its keys alone. `models` returns what has the
    defaults of its tables, by their names. It is imported only if a file sets one of its keys, or if those have kinds
    of their own.
    """

    read: Callable[[Reading], object]
    kinds: Mapping[str, Callable[[Key], Kind]] = {}
    models: Callable[[], Mapping[str, Struct]] = dict


class _Type:
    """A type of msgspec, as the only element of a list: so msgspec keeps what it finds out about it."""

    __slots__ = ("_list", "hint")

    def __init__(self, hint: Any) -> None:
        self.hint = hint
        self._list: Any = msgspec.defstruct("Type", [("value", hint)], array_like=True)

    def of(self, stated: object) -> Any:
        """Return what is *stated* as a value of the type. Raises ValidationError."""
        return msgspec.convert((stated,), self._list).value


_LIST, _NAMED = _Type(tuple[Any, ...]), _Type(dict[str, Any])


class _Row:
    """A key, ready for reading: the type and the parser of its value, and its field in a part of the model."""

    __slots__ = ("field", "key", "needs", "parse", "part", "read", "rows", "short", "type", "why")

    def __init__(self, key: Key, kind: Kind | None, part: str) -> None:
        self.key = key
        self.type = _NAMED if kind is None else _Type(kind.type)  # of many tables, of each one
        self.parse = None if kind is None else kind.parse
        self.read = None if kind is None else kind.read
        into, _, self.field = key.target.rpartition(".")
        self.part = into or part
        self.needs, colon, why = key.needs.partition(":")
        self.why = f'needs "{self.needs}"{colon}{why}'
        self.rows: _Rows | None = None  # of a table
        self.short: _Row | None = None


class _Rows(dict[str, _Row]):
    """The keys of a table, by name."""

    required: tuple[str, ...] = ()


class FileKind(Struct, frozen=True):
    """A kind of file that is a capability's own: the name and the title of its schema, what reads it, and its path."""

    name: str
    title: str
    format: Format
    parse: Callable[[bytes], object]
    path: str


class Format:
    """One kind of file: its table of keys, the kinds of its values, and the error that it raises.

    *model* has the default of each field; its lists of tables have one entry, for the defaults in it. *parts_of* is the
    column of what capabilities contribute to such files, "job" or "config"; "" for none.
    """

    def __init__(
        self,
        table: KeyTable,
        kinds: Kinds,
        error: type[InvalidFile],
        model: Struct | None = None,
        parts_of: str = "",
    ) -> None:
        self.parts_of = parts_of
        self.model = model
        self.error = error
        self.kinds = dict(kinds)
        self._prepare(table)

    def _prepare(self, table: KeyTable) -> None:
        """Make what reads the keys of *table*."""
        own = {key.name for key in table.keys}
        found = parts(self.parts_of) if self.parts_of else {}
        self.parts = {name: part for name, part in found.items() if not own.isdisjoint(part.names)}
        for part in self.parts.values():
            if not part.kinds <= self.kinds.keys():
                self.kinds |= loaded(part.reader).kinds
        self.table = table
        self._root = self._rows(table, "")

    def read(
        self, data: bytes, what: str, name: str = "", complete: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    ) -> Reading:
        """Return the values that *data* sets, each parsed alone, with the problems. Raises `error` if it is unreadable.

        *what* names the file in errors, and *name* is the job's, for a job file. *complete* adds keys that the file
        does not set.
        """
        try:
            document = toml.read(data, what)
        except InvalidFile as error:
            raise self.error(what, error.problems) from None
        if complete is not None:
            document = complete(document)
        advice = tuple(self._without_gone(document))
        if self.parts_of and not self._root.keys() >= document.keys() and search():
            keys = with_parts(self.parts_of, self.table.keys)
            self._prepare(KeyTable(self.table.name, self.table.about, *keys, gone=self.table.gone))
        reading = Reading(document, Problems(), name, advice)
        reading.document = reading.read_table(self._root, document, (), reading.found)
        return reading

    def _without_gone(self, document: dict[str, Any]) -> Iterator[str]:
        """Remove the keys that have gone from *document*; yield what to do about each.

        A table that is a switch now is on or off, if that is what its old keys said: true, or a time of zero.
        """
        for gone in (self.table.gone, *(part.gone for part in self.parts.values())):
            said = dict[str, bool]()
            for key, why in gone.items():
                place, _, name = key.rpartition(".")
                table, row = document.get(place) if place else document, self._root.get(place)
                if isinstance(table, dict) and name in table:
                    value, is_switch = table.pop(name), row is not None and row.rows is None
                    is_off = is_switch and _ZERO.fullmatch(str(value)) is not None
                    if is_off or (is_switch and value is True):
                        said[place] = said.get(place, False) or not is_off
                    if not is_off:
                        yield f"{key} has no effect: {why}"
                if place and table == {}:
                    del document[place]
                    document |= {place: said[place]} if place in said else {}

    def judge(self, reading: Reading, data: bytes, what: str) -> None:
        """Raise `error` with every problem, if there is any."""
        if reading.problems:
            raise self.error(what, reading.problems.listed(toml.decode(data, what)))

    def read_parts(self, reading: Reading) -> Parts:
        """Return the values of the parts of capabilities that the file sets, and add their problems."""
        return tuple(
            [
                (name, loaded(part.reader).read(reading))
                for name, part in self.parts.items()
                if not part.names.isdisjoint(reading.document)
            ]
        )

    def kind_of(self, key: Key) -> Kind | None:
        """Return the kind of the value of a key; None for a table."""
        return None if key.table is not None else self.kinds[key.kind](key)

    def _rows(self, table: KeyTable, part: str) -> _Rows:
        rows = _Rows({key.name: self._row(key, part) for key in table.keys})
        rows.required = tuple(key.name for key in table.keys if key.default is REQUIRED)
        return rows

    def _row(self, key: Key, part: str) -> _Row:
        row = _Row(key, self.kind_of(key), part)
        if key.table is not None:
            inner = "" if key.many else f"{row.part}.{row.field}".lstrip(".")
            row.rows = self._rows(key.table, inner)
            if key.table.short is not None:
                row.short = self._row(key.table.short, inner)
                row.type = _Type(Union[row.short.type.hint, dict[str, Any]])  # noqa: UP007  (made while it runs)
        return row


Found = defaultdict[str, dict[str, Any]]
"""The fields of each part of the model, "" for the root."""


class Reading:
    """One file being read: its content, its problems, advice about keys without effect, and the resulting fields."""

    __slots__ = ("advice", "document", "found", "name", "problems")

    def __init__(self, document: Mapping[str, Any], problems: Problems, name: str, advice: tuple[str, ...]) -> None:
        self.document = document
        self.problems = problems
        self.name = name
        self.advice = advice
        self.found: Found = defaultdict(dict)

    def read_table(self, rows: _Rows, document: Mapping[str, Any], at: Path, found: Found) -> dict[str, Any]:
        """Read each key of *document* into *found*, and return what is known and of its type."""
        good: dict[str, Any] = {}
        for name in rows.required:
            if name not in document:
                self.problems.add((*at, name), "is required")
        for name, stated in document.items():
            here, row = (*at, name), rows.get(name)
            if row is None and here == ("name",) and self.name:
                self.problems.add(here, "is not a key; a job has the name of its file")
                continue
            if row is None:
                flag = f"--{name.replace('_', '-')}"
                meant = (key for key, row in rows.items() if flag in f"{row.key.option} {row.key.also}".split())
                known = [key for key, row in rows.items() if not row.key.internal]
                self.problems.add_unknown(here, known, next(meant, None))
                continue
            if row.needs and document.get(row.needs) in (None, 0):
                self.problems.add(here, row.why)
            value = (self._read_many if row.key.many else self._read_value)(row, stated, here, found)
            if value is not UNSET:
                good[name] = value
        return good

    def _read_value(self, row: _Row, stated: Any, at: Path, found: Found) -> Any:
        """Read the value of a key, and return what of it is of its type; UNSET if it is not."""
        if row.rows is not None and isinstance(stated, dict):
            return self.read_table(row.rows, stated, at, found)
        value = self._of_type(row.type, stated, at)
        if value is UNSET:
            return UNSET
        row = row.short or row
        if row.parse is not None:
            try:
                value = row.parse(value)
            except InvalidValue as error:
                self.problems.add(at, str(error))
                return stated
        elif row.read is not None:
            value = row.read(value, at, self)
        found[row.part][row.field] = value
        return stated

    def _read_many(self, row: _Row, stated: Any, at: Path, found: Found) -> Any:
        """Read several tables, as `_read_value` does with each."""
        is_named = row.key.many == "named"
        if self._of_type(_NAMED if is_named else _LIST, stated, at) is UNSET:
            return UNSET
        good: dict[Any, Any] = {}
        fields: dict[Any, dict[str, Any]] = {}
        for key, entry in stated.items() if is_named else enumerate(stated):
            inner: Found = defaultdict(dict)
            value = self._read_value(row, entry, (*at, key), inner)
            if value is not UNSET:
                good[key], fields[key] = value, inner[""]
        found[row.part][row.field] = fields if is_named else list(fields.values())
        return good if is_named else list(good.values())

    def _of_type(self, type_: _Type, stated: Any, at: Path) -> Any:
        """Return what is *stated* as a value of a type; UNSET, and a problem is added, if it is none."""
        try:
            return type_.of(stated)
        except msgspec.ValidationError as error:
            where, why = _explain(stated, type_.hint, error)
            self.problems.add((*at, *where), why)
            return UNSET


def _parts(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union without annotations; any other hint is its own only member."""
    if get_origin(hint) is Annotated:
        return _parts(get_args(hint)[0])
    args = get_args(hint)
    if args and get_origin(hint) not in (list, dict, tuple):
        return tuple(part for arg in args for part in _parts(arg))
    return (hint,)


def _explain(value: object, hint: Any, error: msgspec.ValidationError) -> tuple[Path, str]:
    """Return the path of the mistake below the key, and its description, in the words of the format page."""
    for key, entry, its_hint in _entries(value, hint):
        try:
            msgspec.convert(entry, its_hint)
        except msgspec.ValidationError as mistake:
            at, why = _explain(entry, its_hint, mistake)
            return (key, *at), why
    match = _EXPECTED.match(str(error))
    if match is None:
        return (), str(error).partition(" - at `")[0]
    words = [_TYPE_WORDS.get(word.strip(), word.strip()) for word in match["types"].split("|")]
    if "a whole number" in words and "a number" in words:
        words.remove("a whole number")
    if match["limit"] == " of length >= 1":
        return (), "is empty"
    return (), f"must be {' or '.join(words)}{match['limit'] or ''}, not {show(value)}"


def _entries(value: object, hint: Any) -> Iterator[tuple[str | int, object, Any]]:
    """Yield the entries of a list or of a table of like values, each with its key and its type."""
    for part in _parts(hint):
        if isinstance(value, list) and get_origin(part) in (list, tuple):
            yield from ((at, entry, get_args(part)[0]) for at, entry in enumerate(value))
        elif isinstance(value, dict) and get_origin(part) is dict:
            yield from ((key, entry, get_args(part)[1]) for key, entry in value.items())
