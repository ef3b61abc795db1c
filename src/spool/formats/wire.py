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
from typing import Annotated, Any, Generic, Required, TypedDict, TypeGuard, TypeVar

from msgspec import DecodeError, Meta, Struct, json

from spool.core.errors import InvalidFile, InvalidRecord, cannot, shown
from spool.core.model import OUTCOMES, State
from spool.formats import toml

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LATEST_NS = (1 << 63) - 1  # in the year 2262
_RFC_3339 = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[Tt ]([0-9]{2}:[0-9]{2}):([0-5][0-9])(?:\.([0-9]{1,9}))?([Zz]|[+-][0-9]{2}:[0-9]{2})"
)


def render_instant(at_ns: int, *, digits: int = 9) -> str:
    """Return *at_ns* as RFC 3339 in UTC, the second with that many digits after its point (rounded down)."""
    seconds, rest = divmod(at_ns, 1_000_000_000)
    whole = _whole_second(seconds)
    return f"{whole}.{rest:09}"[: len(whole) + 1 + digits] + "Z" if digits else f"{whole}Z"


@lru_cache(maxsize=64)
def _whole_second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def parse_instant(text: str) -> int | None:
    """Return an RFC 3339 date and time as ns since the epoch, exactly; None for any other text, and for a far one."""
    match = _RFC_3339.fullmatch(text)
    if match is None:
        return None
    date, minute, second, fraction, offset = match.groups()
    begun = _minute(f"{date}T{minute}{offset.upper()}")
    if begun is None:
        return None
    at_ns = (begun + int(second)) * 1_000_000_000 + int((fraction or "0").ljust(9, "0"))
    return at_ns if abs(at_ns) <= _LATEST_NS else None


@lru_cache(maxsize=1024)  # the lines of a history are in the order of time
def _minute(text: str) -> int | None:
    try:
        return (datetime.fromisoformat(text) - _EPOCH) // timedelta(seconds=1)
    except ValueError:
        return None


def at_lines(key: str, at_ns: int | None) -> str:
    """Return the two TOML lines of an instant, "" if it is unknown.

    The date and time is to the microsecond, because TOML readers may keep no more; `…_ns` beside it is exact.
    """
    return "" if at_ns is None else f"{key} = {render_instant(at_ns, digits=6)}\n{key}_ns = {at_ns}\n"


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
_typed_dict: Any = TypedDict  # of keys that are known only when it is made


class Form(Struct, frozen=True):
    """How values of a kind are written and read. What reads as None is unknown, as if the key were missing.

    None as `to_json` or `of_json`: the value is the same there. A word that means nothing raises ValueError.
    """

    show: Callable[[Any], object]  # as a value of TOML
    read: Callable[[Keys, str], Any]  # from the keys of TOML
    json: Any = None  # its type in JSON; None: it is of TOML alone
    to_json: Callable[[Any], Any] | None = None
    of_json: Callable[[Any], Any] | None = None
    lines: Callable[[str, Any], str] | None = None  # of TOML, by key and value, instead of `show`


class Table(Generic[T]):
    """The keys of a record. *what* names it in errors; *missing* has values for missing keys without a default.

    *forms* has the kinds that only this table knows.
    """

    def __init__(
        self, what: str, made: Callable[..., T], text: str, missing: Mapping[str, Any] | None = None, **forms: Form
    ) -> None:
        self._what = what
        self._made = made
        self._missing = dict(missing or {})
        self._required: list[str] = []
        self._parts: dict[str, Callable[..., Any]] = {}
        self._write: list[tuple[str, Callable[[Any], object], Callable[[str, Any], str] | None, Any, object]] = []
        self._read: list[tuple[str, str, Callable[[Keys, str], Any]]] = []
        self._encode: list[tuple[str, Callable[[Any], Any] | None, Any, Any]] = []
        self._decode: dict[str, tuple[str, str, Callable[[Any], Any] | None]] = {}
        self._types: Keys = {}
        paths = []
        for word in text.split():
            always = word.endswith("!")
            named, _, kind = word.rstrip("!").partition(":")
            key, _, path = named.partition("=")
            part, _, field = (path or key).rpartition(".")
            owner = self._parts.setdefault(part, type(_defaults(made)[part])) if part else made
            types = owner.__annotations__
            if field not in types:
                field = f"{field.removesuffix('_ms')}_ns"
                kind = kind or ("ms" if key.endswith("_ms") else "instant")
            form = forms.get(kind) or KINDS[kind or types[field]]
            default = {**_defaults(owner), **self._missing}.get(field, ...)
            if default is ...:
                default = None
                self._required.append(key)
            usual = None if always else default
            paths.append(f"{part}.{field}" if part else field)
            left_out = "" if usual is None else form.lines(key, usual) if form.lines is not None else form.show(usual)
            self._write.append((key, form.show, form.lines, usual, left_out))
            self._read.append((key, field, form.read))
            encoded = default if form.to_json is None or default is None else form.to_json(default)
            self._encode.append((key, form.to_json, default, encoded))
            self._decode[key] = part, field, form.of_json
            self._types[key] = form.json
        self._values = attrgetter(*paths)

    @property
    def json(self) -> Any:
        """The type of the record in JSON."""
        types = {key: kind | None for key, kind in self._types.items()}
        required = {key: Required[self._types[key]] for key in self._required}
        return _typed_dict("Keys", types | required, total=False)

    def defaults(self) -> Keys:
        """Return each key of JSON with its value where it is missing; None: it is required, or then unknown."""
        return {key: default for key, _, _, default in self._encode}

    def render(self, record: T) -> bytes:
        """Return the TOML of *record*."""
        return self.lines(record).encode()

    def lines(self, record: T) -> str:
        """Return the TOML of *record*."""
        text = ""
        for (key, show, lines, usual, left_out), value in zip(self._write, self._values(record), strict=True):
            if value is not usual:
                shown = show(value) if lines is None else lines(key, value)
                if shown != left_out:
                    text += f"{key} = {shown}\n" if lines is None else f"{shown}"
        return text

    def parse(self, data: bytes) -> T:
        """Return the record that is the TOML *data*. Raises InvalidRecord."""
        return self.made(read_keys(data, self._what))

    def made(self, keys: Keys, **known: Any) -> T:
        """Return the record with the values in *keys*, from TOML, and those that are *known*. Raises InvalidRecord."""
        found: Keys = {**self._missing, **known}
        try:
            for key, field, read in self._read:
                value = read(keys, key)
                if value is not None:
                    found[field] = value
                elif key in self._required:
                    raise ValueError(f'"{key}" is missing or of another type')
        except ValueError as error:
            raise InvalidRecord(cannot("understand", self._what, str(error))) from None
        return self._made(**found)

    def to_json(self, record: T) -> Keys:
        """Return the JSON of *record*."""
        found = {}
        for (key, encode, usual, left_out), value in zip(self._encode, self._values(record), strict=True):
            if value is not usual:
                written = value if encode is None else encode(value)
                if written is not None and written != left_out:
                    found[key] = written
        return found

    def of_json(self, keys: Keys) -> T:
        """Return the record of *keys*, decoded as `json`. Raises ValueError."""
        found: Keys = self._missing.copy()
        parts: dict[str, Keys] = {part: {} for part in self._parts}
        parts[""] = found
        for key, value in keys.items():
            part, field, decode = self._decode[key]
            if decode is not None and value is not None:
                value = decode(value)
            if value is not None:
                parts[part][field] = value
        for part, made in self._parts.items():
            found[part] = made(**parts[part])
        return self._made(**found)

    def part(self) -> Form:
        """Return the form of a record whose keys stand among the others."""
        return Form(str, lambda keys, _: self.made(keys), lines=lambda _, record: self.lines(record))

    def inner(self) -> Form:
        """Return the form of a record that is a table of its own."""
        return Form(str, _typed(dict, self.made), lines=lambda key, record: f"\n[{key}]\n{self.lines(record)}")

    def each(self) -> Form:
        """Return the form of several records, each of which is a table."""
        return Form(
            str,
            lambda keys, key: tuple(map(self.made, several(keys, key, dict))),
            GenericAlias(tuple, (self.json, ...)),
            lambda records: tuple(map(self.to_json, records)),
            lambda tables: tuple(map(self.of_json, tables)),
            lambda key, records: "".join([f"\n[[{key}]]\n{self.lines(record)}" for record in records]),
        )


def _defaults(made: Any) -> Keys:
    """Return the defaults of the fields of a Struct that have one."""
    defaults = made.__struct_defaults__
    return dict(zip(made.__struct_fields__[-len(defaults) :], defaults, strict=True)) if defaults else {}


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


def optional(keys: Keys, key: str, kind: type[T]) -> T | None:
    """Return the value of *key*, None if it is missing or of another type, or a negative or too large number."""
    value = keys.get(key)
    return value if _is_of(value, kind) else None


def said(keys: Keys, key: str) -> str | None:
    """Return the text of *key* as `one_line`, because the job itself may have written the record."""
    text = optional(keys, key, str)
    return None if text is None else one_line(text)


def several(keys: Keys, key: str, kind: type[T]) -> tuple[T, ...]:
    """Return the list of *key* without elements of another type, empty if the key is missing."""
    value = keys.get(key)
    return tuple(element for element in value if _is_of(element, kind)) if isinstance(value, list) else ()


def _is_of(value: Any, kind: type[T]) -> TypeGuard[T]:
    if type(value) is int and not 0 <= value <= _MOST:
        return False
    return type(value) is kind


def _clean(text: str) -> str:
    """Return *text* with only characters that UTF-8 can hold: a record must always be written."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _typed(kind: type[T], decode: Callable[[T], Any] | None = None) -> Callable[[Keys, str], Any]:
    """Return what reads a key whose value is of that type."""
    if decode is None:
        return lambda keys, key: optional(keys, key, kind)
    return lambda keys, key: None if (value := optional(keys, key, kind)) is None else decode(value)


def _quoted(texts: tuple[str, ...]) -> str:
    return f"[{', '.join(map(toml.quote, texts))}]"


def _clean_all(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(_clean, texts))


def _inline(pairs: tuple[tuple[str, Any], ...]) -> str:
    """Return an inline table of numbers, or lists of numbers, by their names."""
    shown = (f"{toml.quote(name)} = {list(value) if isinstance(value, tuple) else value}" for name, value in pairs)
    return f"{{ {', '.join(shown)} }}"


def _read_texts(keys: Keys, key: str) -> tuple[str, ...] | None:
    return tuple(map(one_line, several(keys, key, str))) or None


def _counts(table: Keys) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((name, count) for name, count in table.items() if type(count) is int and count > 0))


def _to_table(pairs: tuple[tuple[str, Any], ...]) -> Keys | None:
    return {_clean(name): value for name, value in pairs} or None


def _of_table(table: Keys) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(table.items(), key=itemgetter(0)))


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


def _to_ms(span_ns: int) -> int:
    return span_ns // _NS_PER_MS


def _of_ms(span_ms: int) -> int | None:
    return span_ms * _NS_PER_MS if span_ms >= 0 else None


def _rounded(percent: float) -> float:
    return round(percent, 2)


def _outcome(word: str) -> State:
    if (state := _OUTCOMES.get(word)) is None:
        raise ValueError(f"{toml.show(word)} is not an outcome")
    return state


def _is_bound(word: str) -> bool:
    if word != _EARLIEST:
        raise ValueError(f"{toml.show(word)} says nothing of an end")
    return True


_NUMBER = Form(str, _typed(int), Annotated[int, Meta(ge=0, le=_MOST)])
_TEXT = Form(toml.quote, said, str, _clean)

KINDS = {
    "name": Form(toml.quote, _typed(str), str, _clean),  # a text that is compared, exactly
    "str": _TEXT,
    "str | None": _TEXT,
    "int": _NUMBER,
    "int | None": _NUMBER,
    # A number where 0 means unknown.
    "positive": Form(
        str, _typed(int, lambda number: number or None), int, None, lambda number: number if number > 0 else None
    ),
    "bool": Form(toml.show, _typed(bool), bool),
    "instant": Form(str, read_at, str, render_instant, parse_instant, at_lines),
    "ms": Form(_to_ms, _typed(int, _of_ms), int, _to_ms, _of_ms),
    "float | None": Form(  # a percentage
        _rounded,
        _typed(float, lambda value: value if 0 <= value <= 100 else None),
        Annotated[float, Meta(ge=0, le=100)],
        _rounded,
    ),
    "tuple[str, ...]": Form(_quoted, _read_texts, tuple[str, ...], _clean_all, lambda texts: texts or None),
    "tuple[int, ...]": Form(list, lambda keys, key: several(keys, key, int), tuple[int, ...]),
    "tuple[tuple[str, int], ...]": Form(_inline, _typed(dict, _counts), dict[str, int], _to_table, _of_table),
    "tuple[tuple[str, tuple[int, ...]], ...]": Form(
        _inline,
        _typed(dict, lambda table: tuple(sorted((name, several(table, name, int)) for name in table))),
        dict[str, tuple[int, ...]],
        _to_table,
        _of_table,
    ),
    "tuple[tuple[str, str], ...]": Form(str, _typed(dict, _named), lines=_named_lines),
    "inode": Form(  # a number as text, since it may need all of 64 bits
        lambda number: f'"{number}"',
        _typed(str, lambda text: int(text) if re.fullmatch(r"[0-9]{1,20}", text) else None),
    ),
    "State": Form(toml.quote, _typed(str, _outcome), str, attrgetter("value"), _outcome),
    "bound": Form(
        lambda is_bound: f'"{_EARLIEST}"' if is_bound else "",
        _typed(str, _is_bound),
        str,
        lambda is_bound: _EARLIEST if is_bound else None,
        _is_bound,
    ),
    # A list of one text, as that text, which is all that older readers know; its row stands before that of "several".
    "alone": Form(
        lambda texts: toml.quote(texts[0]) if len(texts) == 1 else "",
        lambda keys, key: None if (text := said(keys, key)) is None else (text,),
        str,
        lambda texts: _clean(texts[0]) if len(texts) == 1 else None,
        lambda text: (text,),
    ),
    "several": Form(
        lambda texts: _quoted(texts) if len(texts) > 1 else "",
        _read_texts,
        tuple[str, ...],
        lambda texts: _clean_all(texts) if len(texts) != 1 else None,
        lambda texts: texts or None,
    ),
    # Of an exit code. It is never read: the exit code has it.
    "signal": Form(
        lambda _code: "",
        lambda _keys, _key: None,
        int,
        lambda code: code - 128 if 128 < code <= 192 else None,
        lambda _: None,
    ),
}
"""The kinds that each table knows, by a word, or by the type of an attribute that states no other."""
