"""Reading and writing of TOML, and the lines of keys, for messages.

`read` accepts what TOML 1.0 allows, except what no file of a spool may hold: more than `MAX_BYTES`, an encoding other
than UTF-8, NUL in a text, numbers that are not finite or do not fit 64 bits, and nesting so deep that the parser
refuses it. Every refusal is one `InvalidFile` that names the line.

The parser does not report the position of a key, but an error message needs it. The search for it follows only the
shape of a source that the parser has accepted, and validates nothing. It takes ten times as long as the parser, so it
ends when every requested key is found, and after `MAX_TOKENS` in any case. `tomlkit` keeps positions but does not fit:
it reads a hostile 60 kB in ten seconds, and moves the tables of a list together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from datetime import datetime
from typing import Any

from spool.core.errors import InvalidFile, shown
from spool.core.model import Problem

Path = tuple[str | int, ...]
"""The place of a value: keys, and positions in lists. `("depends_on", "all", 2)`."""

MAX_BYTES = 1 << 20
"""Larger files are refused unread: 8 times the longest command that the kernel accepts, parsed in half a second."""

_BOM = b"\xef\xbb\xbf"
# Forbidden values are written with an escape, with many digits, with an exponent, or as one of two words. A search for
# these takes a tenth of the time of a check of every value.
_MAY_BE_BAD = re.compile(r"[0-9_](?:[eE]|[0-9A-Fa-f_]{14})")
_SMALLEST_INT, _LARGEST_INT = -(1 << 63), (1 << 63) - 1

MAX_TOKENS = 30_000
"""How far into a source lines are searched: no handwritten file has this many words and marks."""

# Compiled on first use, for mistakes and rarities: compiling takes longer than reading most files. None of them repeats
# a group, so a search never backtracks or needs memory for each character; and Python 3.11.2, which Debian 12 has,
# matches possessive groups wrongly.
_MARKS = "[]{}=,\n"  # no key extends beyond these
_SYNTAX = r"""[\[\]{}=,.\n]|"(?!"")[^"\\\n]*"|'(?!'')[^'\n]*'|["']|#[^\n]*"""  # of other strings only the begin
_WORD = r"""[^\s\[\]{}=,.#"']+"""
_END_OF_STRING = {
    '"': r'(?s)\\.|["\n]',
    "'": r"['\n]",
    '"""': r'(?s)\\.|"""',
    "'''": r"'''",
}


def read(data: bytes, what: str) -> dict[str, Any]:
    """Return the TOML document *data*; *what* names it in errors ("job train"). Raises only InvalidFile."""
    text = decode(data, what)
    suspicious = "\\" in text or "inf" in text or "nan" in text or "0x" in text or _MAY_BE_BAD.search(text) is not None
    try:
        document = _loads(text)
    except RecursionError:
        raise InvalidFile(what, [Problem(None, None, "not readable: it is nested too deeply")]) from None
    except ValueError as error:  # TOMLDecodeError is one, and so is int() of 5,000 digits
        raise InvalidFile(what, [_syntax_problem(text, error)]) from None
    if suspicious and (bad := _find_bad(document)) is not None:
        path, why = bad
        line = line_of(key_lines(text, {path}), path)
        on_line = "" if line is None else f" on line {line}"
        key = ".".join(str(part) for part in path)
        raise InvalidFile(what, [Problem(key, line, f'"{key}"{on_line}: {why}')])
    return document


def _loads(text: str) -> dict[str, Any]:
    # A compiled version of the standard library's parser: a start with 100,000 waiting jobs reads that many files.
    import tomli  # imported here, because a listing from the dispatcher's view parses none

    return tomli.loads(text)


def decode(data: bytes, what: str) -> str:
    """Return *data* as text: UTF-8, without a byte order mark. Raises InvalidFile."""
    if len(data) > MAX_BYTES:
        # The size itself is unknown: callers read no more than it takes to see that a file is too large.
        why = f"it has more than {MAX_BYTES} bytes, so it is not read"
        raise InvalidFile(what, [Problem(None, None, why)])
    try:
        return (data[3:] if data.startswith(_BOM) else data).decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        why = f"not UTF-8 on line {line}: byte 0x{data[error.start]:02x}"
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):
            why = "not UTF-8 on line 1: this looks like UTF-16"
            line = 1
        raise InvalidFile(what, [Problem(None, line, f"{why}; save it as UTF-8")]) from None


def _syntax_problem(text: str, error: ValueError) -> Problem:
    import tomli  # imported here, as in `_loads`

    if not isinstance(error, tomli.TOMLDecodeError):  # no position: a number that Python does not convert
        return Problem(None, None, f"not valid TOML: {str(error).split(';')[0]}")
    if error.pos >= len(error.doc):
        last = text.count("\n") + (0 if text.endswith("\n") else 1) or 1
        return Problem(None, last, f"not valid TOML on line {last}, at the end: {error.msg}")
    where = f"on line {error.lineno}, column {error.colno}"
    return Problem(None, error.lineno, f"not valid TOML {where}: {error.msg}")


def _find_bad(document: dict[str, Any]) -> tuple[Path, str] | None:
    """Return the first forbidden value, and why it is forbidden."""
    for key, value in document.items():
        bad = _bad_value(value)
        if bad is not None:
            return (key, *bad[0]), bad[1]
        if "\0" in key:
            return (key,), "NUL in a key"
    return None


def _bad_value(value: object) -> tuple[Path, str] | None:
    kind = type(value)
    if kind is str:
        return ((), "NUL cannot be passed to any program") if "\0" in value else None  # type: ignore[operator]
    if kind is bool:
        return None
    if isinstance(value, int):
        if _SMALLEST_INT <= value <= _LARGEST_INT:
            return None
        return (), "this number does not fit 64 bits; write a smaller one"
    if isinstance(value, float):
        return None if math.isfinite(value) else ((), f"{value} is not a finite number")
    if isinstance(value, list):
        for index, element in enumerate(value):
            bad = _bad_value(element)
            if bad is not None:
                return (index, *bad[0]), bad[1]
    elif isinstance(value, dict):
        return _find_bad(value)
    return None


def write(document: Mapping[str, Any]) -> bytes:
    """Return *document* as TOML. Multi-line strings are used for texts of several lines, where that is lossless.

    Raises ValueError for a text that UTF-8 cannot hold (a lone surrogate, from a file name that is not UTF-8).
    """
    import tomli_w  # imported here, because only commands that write need it

    text = tomli_w.dumps(document)
    if "\\n" in text and "\\r" not in text:
        text = tomli_w.dumps(document, multiline_strings=True)
    text.encode()  # raises for a surrogate, which must not be escaped
    return shown(text, "\n\t").encode()  # such characters can remain only within strings


_PLAIN = re.compile(r'[^\x00-\x1f"\\\x7f\ud800-\udfff]*')
_ESCAPE = re.compile(r'[\x00-\x1f"\\\x7f]')
_SHORT = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def quote(text: str) -> str:
    """Return *text* as a TOML string on one line. A lone surrogate becomes U+FFFD: a record must always be written."""
    if _PLAIN.fullmatch(text):
        return f'"{text}"'
    clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return '"' + _ESCAPE.sub(lambda match: _SHORT.get(match.group()) or f"\\u{ord(match.group()):04X}", clean) + '"'


def inline(value: object) -> str:
    """Return *value* as written behind a key, on one line: a text, a number, a list or a table of such."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return quote(value)
        case dict():
            return f"{{ {', '.join([f'{quote(key)} = {inline(item)}' for key, item in value.items()])} }}"
        case list() | tuple():
            return f"[{', '.join(map(inline, value))}]"
    return str(value)


def show(value: object) -> str:
    """Return *value* as short text for an error message, as written in a file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        text = shown(quote(value))
        return text if len(text) <= 60 else f'{text[:56]}..."'
    if isinstance(value, (int, float)):
        return str(value) if abs(value) < 1e18 else "a huge number"
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, list):
        return "a list"
    return "a table" if isinstance(value, dict) else str(value)


def line_of(lines: dict[Path, int], path: Path) -> int | None:
    """Return the line of *path*, or of its nearest parent, from the result of `key_lines`.

    A path that is only implied (`a` of `[a.b]`) has the line of its first mention.
    """
    while path:
        if path in lines:
            return lines[path]
        path = path[:-1]
    return None


def key_lines(text: str, wanted: Set[Path] | None = None) -> dict[Path, int]:
    """Return the line, counted from 1, of each key and each list element of the TOML source *text*.

    With *wanted* the result may have only those, and what is found on the way to them.
    """
    scan = _Scan(text, wanted)
    with suppress(RecursionError, _Enough):  # the lines found so far are right
        scan.document()
    return scan.lines


class _Enough(Exception):  # noqa: N818  (it is no error)
    """All wanted keys are found."""


class _Scan:
    """One pass over the tokens of a source."""

    def __init__(self, text: str, wanted: Set[Path] | None) -> None:
        self.lines: dict[Path, int] = {}
        self._wanted = set(wanted) if wanted is not None else None
        self._source = _tokens(text, f"{_SYNTAX}|{_WORD}")
        self._tokens: list[tuple[str, int]] = []
        self._next = 0
        self._last: dict[Path, int] = {}  # for each list of tables, `[[a]]`, the index of the last one

    def _set(self, path: Path, line: int) -> None:
        if path in self.lines:
            return
        self.lines[path] = line
        if self._wanted is not None:
            self._wanted.discard(path)
            if not self._wanted:
                raise _Enough

    def document(self) -> None:
        header: Path = ()
        while (part := self._peek()) is not None:
            if part == "\n":
                self._next += 1
            elif part == "[":
                self._next += 1
                many = self._take("[")
                header = self._keys(())
                if many:
                    listed = header[:-1] if header and isinstance(header[-1], int) else header
                    self._last[listed] = self._last.get(listed, -1) + 1
                    header = (*listed, self._last[listed])
                    self._set(header, self._tokens[self._next - 1][1])
                self._skip_line()
            else:
                before = self._next
                path = self._keys(header)
                if self._take("="):
                    self._value(path)
                if self._next == before:
                    self._next += 1

    def _peek(self) -> str | None:
        if self._next == len(self._tokens):
            token = next(self._source, None) if self._next < MAX_TOKENS else None
            if token is None:
                return None
            self._tokens.append(token)
        return self._tokens[self._next][0]

    def _take(self, part: str) -> bool:
        if self._peek() == part:
            self._next += 1
            return True
        return False

    def _skip_line(self) -> None:
        while self._peek() not in (None, "\n"):
            self._next += 1

    def _keys(self, path: Path) -> Path:
        """Read a dotted key below *path*, and record the line of each part. A list of tables means its last one."""
        while (part := self._peek()) is not None and part not in _MARKS:
            if part != ".":
                path = (*path, _plain_key(part))
                self._set(path, self._tokens[self._next][1])
                if path in self._last:
                    path = (*path, self._last[path])
            self._next += 1
        return path

    def _value(self, path: Path) -> None:
        if self._take("["):
            index = 0
            while (part := self._peek()) is not None and part != "]":
                if part in ",\n":
                    self._next += 1
                    continue
                element, before = (*path, index), self._next
                self._set(element, self._tokens[before][1])
                self._value(element)
                if self._next == before:  # not the beginning of a value, such as "}"
                    self._next += 1
                index += 1
            self._take("]")
        elif self._take("{"):
            while (part := self._peek()) is not None and part != "}":
                before = self._next
                inner = self._keys(path)
                if self._take("="):
                    self._value(inner)
                if self._next == before or self._peek() == ",":
                    self._next += 1
            self._take("}")
        else:
            while (part := self._peek()) is not None and part not in "[]{},\n":
                self._next += 1


def _tokens(text: str, kinds: str) -> Iterator[tuple[str, int]]:
    """Yield the matches of *kinds* in *text*, with lines: strings whole, no comments, nothing after an open string."""
    line, at = 1, 0
    pattern = re.compile(kinds)
    while (match := pattern.search(text, at)) is not None:
        part, at = match.group(), match.end()
        if part in ('"', "'"):
            end = _end_of_string(text, match.start())
            if end is None:
                return
            part, at = text[match.start() : end], end
            yield part, line
            line += part.count("\n")
        elif part[0] != "#":
            yield part, line
            line += part == "\n"


def _end_of_string(text: str, start: int) -> int | None:
    """Return the end of the string that begins at *start* of *text*; None if it has none."""
    quote = text[start]
    delimiter = quote * 3 if text.startswith(quote * 3, start) else quote
    for match in re.compile(_END_OF_STRING[delimiter]).finditer(text, start + len(delimiter)):
        if match.group() == "\n":
            return None
        if match.group() == delimiter:
            end = match.end()
            while len(delimiter) == 3 and end < match.end() + 2 and text.startswith(quote, end):
                end += 1  # one or two quotes before the end belong to the string
            return end
    return None


def _plain_key(part: str) -> str:
    if part[0] in "\"'":
        try:
            return str(_loads(f"k={part}")["k"])
        except ValueError:
            return part[1:-1]
    return part
