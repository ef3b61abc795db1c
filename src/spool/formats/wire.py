"""Records as tables, which write and read them, as TOML and as JSON: a new field is one word.

A table lists the keys of a record in their order, each as `KEY=ATTRIBUTE:KIND!`. A kind says how a value is written and
read. Mostly the key is enough: its attribute has the same name, or ends in `_ns`, and the type of that says the kind.
An attribute of a part has a dot, "grant.cpus".

A key is left out if it would read as a missing key does: as the default of the attribute. "!" writes it in TOML even
so. In TOML a value that is not of its kind reads as a missing key; in JSON it is an error.

An instant is RFC 3339 in UTC, for users and tools, and exact to the nanosecond for spool itself.

Free text, which a job, a hook or an engine has written, may be anything: a hundred megabytes, terminal escapes, another
encoding. Spool keeps one line of it that can be printed anywhere and stored a million times (FORMAT 4).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from operator import attrgetter, itemgetter
from types import GenericAlias
from typing import Annotated, Any, Generic, TypeVar, Union

from msgspec import UNSET, DecodeError, Meta, Struct, UnsetType, ValidationError, convert, defstruct, json, to_builtins
from msgspec.structs import astuple

from spool.core.errors import InvalidFile, InvalidRecord, cannot, shown
from spool.core.model import OUTCOMES, State
from spool.formats import toml

_encode = json.Encoder().encode
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LATEST_NS = (1 << 63) - 1  # in the year 2262
_RFC_3339 = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}):([0-5][0-9])(?:\.([0-9]{1,9}))?([Zz]|[+-][0-9]{2}:[0-9]{2})"
)


def render_instant(at_ns: int, *, digits: int = 9) -> str:
    """Return *at_ns* as RFC 3339 in UTC, the second with that many digits after its point (rounded down)."""
    seconds, rest = divmod(at_ns, 1_000_000_000)
    fraction = f".{rest:09}"[: digits + 1] if digits else ""
    return f"{_whole_second(seconds)}{fraction}Z"


@lru_cache(maxsize=64)
def _whole_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def parse_instant(text: str) -> int | None:
    """Return an RFC 3339 date and time as ns since the epoch, exactly; None for any other text, and for a far one."""
    match = _RFC_3339.fullmatch(text)
    if match is None:
        return None
    minute, second, fraction, offset = match.groups()
    begun = _minute(minute, offset)
    if begun is None:
        return None
    at_ns = (begun + int(second)) * 1_000_000_000 + int((fraction or "0").ljust(9, "0"))
    return at_ns if abs(at_ns) <= _LATEST_NS else None


@lru_cache(maxsize=1024)  # the lines of a history are in the order of time
def _minute(text: str, offset: str) -> int | None:
    try:
        return (datetime.fromisoformat(f"{text}{offset}".upper()) - _EPOCH) // timedelta(seconds=1)
    except ValueError:
        return None


def at_lines(key: str, at_ns: int) -> str:
    """Return the two TOML lines of an instant.

    The date and time is to the microsecond, because TOML readers may keep no more; `…_ns` beside it is exact.
    """
    return f"{key} = {render_instant(at_ns, digits=6)}\n{key}_ns = {at_ns}\n"


def read_at(keys: dict[str, Any], key: str) -> int | None:
    """Return the instant that `at_lines` wrote, preferably the exact one."""
    exact = keys.get(f"{key}_ns")
    if type(exact) is int:
        return exact if 0 <= exact <= _LATEST_NS else None
    moment = keys.get(key)
    if isinstance(moment, datetime) and moment.tzinfo is not None:
        at_ns = (moment - _EPOCH) // _MICROSECOND * 1000
        return at_ns if 0 <= at_ns <= _LATEST_NS else None
    return None


MOST_BYTES = 1024
"""The longest text that is kept, in bytes of UTF-8."""

MOST_READ = 4096
"""The longest part of a one-line record that is read."""

_CUT = "…"
_METRIC = re.compile(r"[ \t]*([A-Za-z_][A-Za-z0-9_./@-]{0,39})[ \t]*=(.*)")
_MOST_METRICS = 20
_LONGEST_METRIC = 40  # characters of a value
_METRICS_TAIL = 8192  # bytes at the end of the file that count
_PEAK = re.compile(r"exceeded memory limit \(([0-9]{1,18}) > ([0-9]{1,18})\)", re.IGNORECASE | re.ASCII)


def one_line(text: bytes | str) -> str:
    """Return the first line of *text* that is not blank: printable, with single blanks, at most `MOST_BYTES` long."""
    if isinstance(text, bytes):
        text = text[: MOST_READ + 1].decode("utf-8", "replace")
    for line in text[:MOST_READ].splitlines():
        if words := line.split():
            return _shortened(" ".join(words))
    return ""


def metrics_in(text: bytes) -> tuple[tuple[str, str], ...]:
    """Return the metrics in the end of a file `metrics`: the last value of each, in the order of their first lines.

    Lines that are not `key = value` say nothing, and neither does what comes before the last few KiB.
    """
    if not text:
        return ()
    found: dict[str, str] = {}
    for line in text[-_METRICS_TAIL:].decode("utf-8", "replace").splitlines():
        match = _METRIC.fullmatch(line)
        value = one_line(match[2]) if match is not None else ""
        if match is not None and value and (match[1] in found or len(found) < _MOST_METRICS):
            found[match[1]] = value if len(value) <= _LONGEST_METRIC else f"{value[: _LONGEST_METRIC - 1]}…"
    return tuple(found.items())


def peak_in(words: str) -> int | None:
    """Return how many bytes a run had in memory when its engine ended it for that, in the engine's *words*; else None.

    Such words are `exceeded memory limit (324599808 > 52428800), being killed`.
    """
    match = _PEAK.search(words)
    if match is None:
        return None
    peak, limit = int(match[1]), int(match[2])
    return peak if peak > limit else None


def _shortened(line: str) -> str:
    """Return *line* with unprintable characters escaped, cut between two characters if it is too long."""
    if line.isascii() and line.isprintable() and len(line) <= MOST_BYTES:
        return line
    parts, size, fits = list[str](), 0, 0  # the first *fits* of *parts* leave room for the mark of the cut
    for character in line:
        part = shown(character)
        size += len(part.encode())
        if size > MOST_BYTES:
            return "".join(parts[:fits]).rstrip() + _CUT
        parts.append(part)
        if size <= MOST_BYTES - len(_CUT.encode()):
            fits = len(parts)
    return "".join(parts)


T = TypeVar("T")
Keys = dict[str, Any]

_NS_PER_MS = 1_000_000
_EARLIEST = "earliest"  # of a run without an exit code: it ended then or later
_MOST = (1 << 63) - 1  # of counted or measured values: no record that spool has written has a larger one
_MOST_NAMED = 64 << 10  # bytes of a table of texts, in a record that has 1 MiB at most
_OUTCOMES = {state.value: state for state in OUTCOMES}


class Form(Struct, frozen=True):
    """How values of a kind are written and read.

    *encode* makes the value of JSON, of that *type*, and *decode* undoes it; without them the two are the same. What is
    encoded as None is not written. What is decoded as None is unknown, as if the key were missing; a word that means
    nothing raises ValueError.

    TOML has the value of JSON too, unless *lines* and *read* say otherwise. *clean* is what counts of it there.
    """

    type: Any = Any
    encode: Callable[[Any], Any] | None = None
    decode: Callable[[Any], Any] | None = None
    clean: Callable[[Any], Any] | None = None
    lines: Callable[[str, Any], str] | None = None  # of TOML, by key and value
    read: Callable[[Keys, str], Any] | None = None  # the value, from the keys of TOML

    def found_in(self, keys: Keys, key: str) -> Any:
        """Return the value that *keys* of TOML have, None without one of that type."""
        if self.read is not None:
            return self.read(keys, key)
        if key not in keys:
            return None
        try:
            value = convert(keys[key], self.type)
        except ValidationError:
            return None
        value = value if self.clean is None else self.clean(value)
        return value if self.decode is None else self.decode(value)


class _Column(Struct, frozen=True):
    """One key of a table, with the attribute that it is of."""

    key: str
    form: Form
    path: str
    default: Any  # UNSET: the key is required
    left_out: Any  # the value of JSON that is not written
    always: bool  # whether it is also written if it would read as a missing key does

    @property
    def type(self) -> Any:
        """The type in JSON, where a missing value is also null if that is how it reads."""
        missing = UnsetType if self.default is UNSET else None if self.left_out is None else self.form.type
        return Union[self.form.type, missing]  # noqa: UP007  (made while the program runs)

    def lines(self, value: Any) -> str:
        """Return the TOML of *value*."""
        form = self.form
        if form.lines is not None:
            return form.lines(self.key, value)
        encoded = value if form.encode is None else form.encode(value)
        if encoded is None or (encoded == self.left_out and not self.always):
            return ""
        return f"{self.key} = {toml.inline(encoded)}\n"


class Table(Generic[T]):
    """The keys of a record. *what* names it in errors; *missing* has values for missing keys without a default.

    *forms* has the kinds that only this table knows. `line` is the record as JSON has it: flat, for msgspec.
    """

    def __init__(
        self, what: str, made: Callable[..., T], text: str, missing: Mapping[str, Any] | None = None, **forms: Form
    ) -> None:
        self._what = what
        defaults = {**_defaults(made), **(missing or {})}
        columns = self._columns = [_column(word, made, defaults, KINDS | forms) for word in text.split()]
        paths = [column.path for column in columns]
        self._values = attrgetter(*paths)
        self._encoded = [
            (at, column.form.encode, column.default, column.left_out)
            for at, column in enumerate(columns)
            if column.form.encode is not None
        ]
        self._decoded = [
            (at, column.form.decode, column.left_out, column.default)
            for at, column in enumerate(columns)
            if column.form.decode is not None or column.left_out is not column.default
        ]
        self._required = [(at, column.key) for at, column in enumerate(columns) if column.default is UNSET]
        self._twins = [(paths.index(path), at) for at, path in enumerate(paths) if path in paths[:at]]
        # The values of a record: those of the keys, of the attributes that have no key, and the parts with their own.
        parts = list(dict.fromkeys(path.partition(".")[0] for path in paths if "." in path))
        fields: tuple[str, ...] = getattr(made, "__struct_fields__")  # noqa: B009  (a class, for the type of `made`)
        others = [field for field in fields if field not in paths and field not in parts]
        self._others = [defaults.get(field) for field in others]
        places = {name: at for at, name in enumerate([*paths, *others, *parts])}
        self._parts = [_maker(type(defaults[part]), f"{part}.", places) for part in parts]
        self._make = _maker(made, "", places)
        fields_of_line = [(column.key, column.type, column.left_out) for column in columns]
        self.line: Any = defstruct("Keys", fields_of_line, omit_defaults=True)

    def defaults(self) -> Keys:
        """Return each key of JSON with its value where it is missing; None: it is required, or then unknown."""
        return {column.key: None if column.default is UNSET else column.left_out for column in self._columns}

    def to_line(self, record: T) -> Any:
        """Return *record* as a `line`."""
        values = list(self._values(record))
        for at, encode, default, left_out in self._encoded:
            encoded = None if values[at] is default else encode(values[at])
            values[at] = left_out if encoded is None else encoded
        return self.line(*values)

    def to_json(self, record: T) -> Keys:
        """Return the JSON of *record*."""
        found: Keys = to_builtins(self.to_line(record))
        return found

    def of_line(self, line: Any) -> T:
        """Return the record of a `line`. Raises ValueError."""
        values = list(astuple(line))
        for at, decode, left_out, default in self._decoded:
            value = values[at]
            if value is not left_out and decode is not None:
                value = decode(value)
            values[at] = default if value is None or value is left_out else value
        return self._record(values)

    def _record(self, values: list[Any]) -> T:
        """Return the record with the *values* of the columns, defaults included. Raises ValueError."""
        for at, key in self._required:
            if values[at] is UNSET:
                raise ValueError(f'"{key}" is missing or of another type')
        for first, second in self._twins:
            if values[second] is self._columns[second].default:
                values[second] = values[first]
        values += self._others
        for make in self._parts:
            values.append(make(values))
        made: T = self._make(values)
        return made

    def lines(self, record: T) -> str:
        """Return the TOML of *record*."""
        text = ""
        for column, value in zip(self._columns, self._values(record), strict=True):
            if value is not None and (column.always or value != column.default):
                text += column.lines(value)
        return text

    def render(self, record: T) -> bytes:
        """Return the TOML of *record*."""
        return self.lines(record).encode()

    def made(self, keys: Keys) -> T:
        """Return the record with the values in *keys*, from TOML. Raises InvalidRecord."""
        values = []
        try:
            for column in self._columns:
                value = column.form.found_in(keys, column.key)
                values.append(column.default if value is None else value)
            return self._record(values)
        except ValueError as error:
            raise InvalidRecord(cannot("understand", self._what, str(error))) from None

    def parse(self, data: bytes) -> T:
        """Return the record that is the TOML *data*. Raises InvalidRecord."""
        return self.made(read_keys(data, self._what))

    def part(self) -> Form:
        """Return the form of a record whose keys stand among the others."""
        return Form(lines=lambda _, record: self.lines(record), read=lambda keys, _: self.made(keys))

    def inner(self) -> Form:
        """Return the form of a record that is a table of its own."""
        return Form(
            lines=lambda key, record: f"\n[{key}]\n{self.lines(record)}",
            read=lambda keys, key: self.made(keys[key]) if isinstance(keys.get(key), dict) else None,
        )

    def each(self) -> Form:
        """Return the form of several records, each of which is a table."""
        return Form(
            GenericAlias(tuple, (self.line, ...)),
            lambda records: tuple(map(self.to_line, records)),
            lambda lines: tuple(map(self.of_line, lines)),
            lines=lambda key, records: "".join([f"\n[[{key}]]\n{self.lines(record)}" for record in records]),
            read=lambda keys, key: tuple(map(self.made, tables(keys, key))),
        )


def _defaults(made: Any) -> Keys:
    """Return the defaults of the fields of a Struct that have one."""
    defaults = made.__struct_defaults__
    return dict(zip(made.__struct_fields__[-len(defaults) :], defaults, strict=True)) if defaults else {}


def _column(word: str, made: Any, defaults: Keys, forms: Mapping[str, Form]) -> _Column:
    """Return the column of a *word* of a table, for records that are *made* so."""
    named, _, kind = word.rstrip("!").partition(":")
    key, _, path = named.partition("=")
    part, _, field = (path or key).rpartition(".")
    owner = type(defaults[part]) if part else made
    if field not in owner.__annotations__:
        field = f"{field.removesuffix('_ms')}_ns"
        kind = kind or ("ms" if key.endswith("_ms") else "instant")
    form = forms[kind or owner.__annotations__[field]]
    default = (_defaults(owner) if part else defaults).get(field, UNSET)
    left_out = default if form.encode is None or default in (None, UNSET) else form.encode(default)
    return _Column(key, form, f"{part}.{field}" if part else field, default, left_out, word.endswith("!"))


def _maker(made: Any, prefix: str, places: Mapping[str, int]) -> Callable[[list[Any]], Any]:
    """Return what makes a record of all values: those of its fields are at *places*, by *prefix* and name."""
    fields = itemgetter(*(places[prefix + field] for field in made.__struct_fields__))
    return lambda values: made(*fields(values))


def as_json(value: object) -> bytes:
    """Return *value* as JSON. What UTF-8 cannot hold is escaped: a record must always be written."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(_escaped(to_builtins(value)))


def json_line(value: object) -> bytes:
    """Return *value* as JSON on a line, ended by a newline."""
    return as_json(value) + b"\n"


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list | tuple) else value


def decoded(decoder: json.Decoder[T], data: bytes) -> T | None:
    """Return the value of *data*, None if it cannot be decoded: it may be torn, or of a later version."""
    try:
        return decoder.decode(data)
    except (DecodeError, RecursionError, UnicodeDecodeError):
        return None


def read_keys(data: bytes, what: str) -> Keys:
    """Return the keys of a TOML record. Raises InvalidRecord."""
    try:
        return toml.read(data, what)
    except InvalidFile as error:
        raise InvalidRecord(cannot("understand", what, error.problems[0].message)) from None


def tables(keys: Keys, key: str) -> list[Keys]:
    """Return the tables in the list of *key*, without what is none; none if the key is missing."""
    value = keys.get(key)
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def one_lines(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return each of *texts* as `one_line`."""
    return tuple(map(one_line, texts))


def _counts(table: Keys) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((name, count) for name, count in table.items() if type(count) is int and 0 < count <= _MOST))


def _to_table(pairs: tuple[tuple[str, Any], ...]) -> Keys | None:
    return dict(pairs) or None


def _named_lines(key: str, pairs: tuple[tuple[str, str], ...]) -> str:
    """Return a table of texts by their names, the last text of each; more than 64 KiB are left out."""
    lines, size = list[str](), 0
    for name, text in {one_line(name): one_line(text) for name, text in pairs}.items():
        line = f"{toml.quote(name)} = {toml.quote(text)}\n"
        size += len(line.encode())
        if size > _MOST_NAMED:
            break
        lines.append(line)
    return f"\n[{key}]\n{''.join(lines)}" if lines else ""


def _named(texts: Keys) -> tuple[tuple[str, str], ...]:
    return tuple((one_line(name), one_line(text)) for name, text in texts.items() if isinstance(text, str))


def _outcome(word: str) -> State:
    if (state := _OUTCOMES.get(word)) is None:
        raise ValueError(f"{toml.show(word)} is not an outcome")
    return state


def _is_bound(word: str) -> bool:
    if word != _EARLIEST:
        raise ValueError(f"{toml.show(word)} says nothing of an end")
    return True


_NUMBER = Form(Annotated[int, Meta(ge=0, le=_MOST)])
_TEXT = Form(str, clean=one_line)  # the job itself may have written it

KINDS = {
    "name": Form(str),  # a text that is compared, exactly
    "str": _TEXT,
    "str | None": _TEXT,
    "int": _NUMBER,
    "int | None": _NUMBER,
    # A number where 0 means unknown.
    "positive": Form(int, None, lambda number: number if number > 0 else None),
    "bool": Form(bool),
    "instant": Form(str, render_instant, parse_instant, lines=at_lines, read=read_at),
    "ms": Form(
        int, lambda span_ns: span_ns // _NS_PER_MS, lambda span_ms: span_ms * _NS_PER_MS if span_ms >= 0 else None
    ),
    "float | None": Form(Annotated[float, Meta(ge=0, le=100)], lambda percent: round(percent, 2)),
    "tuple[str, ...]": Form(tuple[str, ...], clean=one_lines),
    "tuple[int, ...]": Form(tuple[int, ...], clean=lambda numbers: tuple([n for n in numbers if 0 <= n <= _MOST])),
    "tuple[tuple[str, int], ...]": Form(dict[str, Any], _to_table, _counts),
    "tuple[tuple[str, tuple[int, ...]], ...]": Form(
        dict[str, tuple[int, ...]], _to_table, lambda table: tuple(sorted(table.items(), key=itemgetter(0)))
    ),
    "tuple[tuple[str, str], ...]": Form(dict[str, Any], None, _named, lines=_named_lines),
    "inode": Form(  # a number as text, since it may need all of 64 bits
        str, str, lambda text: int(text) if re.fullmatch(r"[0-9]{1,20}", text) else None
    ),
    "State": Form(str, attrgetter("value"), _outcome),
    "bound": Form(str, lambda is_bound: _EARLIEST if is_bound else None, _is_bound),
    # A list of one text, as that text, which is all that older readers know; its row stands before that of "several".
    "alone": Form(str, lambda texts: texts[0] if len(texts) == 1 else None, lambda text: (text,), one_line),
    "several": Form(tuple[str, ...], lambda texts: texts if len(texts) != 1 else None, clean=one_lines),
    # Of an exit code. It is never read: the exit code has it.
    "signal": Form(int, lambda code: code - 128 if 128 < code <= 192 else None, lambda _: None),
}
"""The kinds that each table knows, by a word, or by the type of an attribute that states no other."""
