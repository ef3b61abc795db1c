"""Reading and writing of TOML, and the lines of keys, for messages.

`read` accepts what TOML 1.0 allows, except what no file of a spool may hold: more than `MAX_BYTES`, an encoding other
than UTF-8, NUL in a text, numbers that are not finite or do not fit 64 bits, and nesting so deep that the parser
refuses it. Every refusal is one `InvalidFile` that names the line.

The parser does not report the position of a key, but an error message needs it. The search for it follows only the
shape of a source that the parser has accepted, and validates nothing. It takes ten times as long as the parser, so it
ends after `MAX_TOKENS`. `tomlkit` keeps positions but does not fit: it reads a hostile 60 kB in ten seconds, and moves
the tables of a list together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import islice
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
_TOO_LARGE = 1 << 63

MAX_TOKENS = 30_000
"""How far into a source lines are searched: no handwritten file has this many words and marks."""

# Compiled on first use: that takes longer than reading most files. A string ends at quotes after an even number of
# backslashes; no long one repeats a group, which would need memory for each character.
_TOKENS = "|".join(
    (
        r'"{3}(?s:.*?)(?<!\\)(?:\\\\)*"{3,5}(?!")',
        r"'{3}(?s:.*?)'{3,5}(?!')",
        r'".*?(?<!\\)(?:\\\\)*"',
        r"'[^'\n]*'",
        r"#.*",
        r"[\[\]{}=,.\n]",
        r"""[^\s\[\]{}=,.#"']+""",
    )
)


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
    if suspicious and (bad := next(_forbidden(document), None)) is not None:
        path, why = bad
        line = line_of(key_lines(text), path)
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
    line = text.split("\n")[error.lineno - 1]
    bare = re.fullmatch(r"""\s*([\w.-]+\s*=)\s*(?!true|false|[\d.]+\s*(?:#|$))([^\s"'\[{#][^"#]*?)\s*(?:#.*)?""", line)
    hint = "" if bare is None else f"; a text is in quotes: {bare[1]} {show(bare[2])}"
    return Problem(None, error.lineno, f"not valid TOML {where}: {error.msg}{hint}")


def _forbidden(value: object, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield the place of each forbidden value, and why it is forbidden."""
    match value:
        case dict():
            for key, item in value.items():
                if "\0" in key:
                    yield (*path, key), "NUL in a key"
                yield from _forbidden(item, (*path, key))
        case list():
            for at, item in enumerate(value):
                yield from _forbidden(item, (*path, at))
        case str() if "\0" in value:
            yield path, "NUL cannot be passed to any program"
        case int() if not -_TOO_LARGE <= value < _TOO_LARGE:
            yield path, "this number does not fit 64 bits; write a smaller one"
        case float() if not math.isfinite(value):
            yield path, f"{value} is not a finite number"


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
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(inline, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join([f'{quote(key)} = {inline(item)}' for key, item in value.items()])} }}"
    return str(value).lower() if isinstance(value, bool) else str(value)


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


def key_lines(text: str) -> dict[Path, int]:
    """Return the line, counted from 1, of each key and each list element of the valid TOML source *text*."""
    scan = _Scan(text)
    with suppress(RecursionError, IndexError):  # the lines found so far are right
        scan.document()
    return scan.lines


class _Scan:
    """One pass over the tokens of a source. Each step takes one at least, or raises IndexError at the end."""

    def __init__(self, text: str) -> None:
        self.lines: dict[Path, int] = {}
        self._tokens: list[tuple[str, int]] = []
        self._at = 0
        self._last: dict[Path, int] = {}  # for each list of tables, `[[a]]`, the index of the last one
        line = 1
        for match in islice(re.finditer(_TOKENS, text), MAX_TOKENS):
            if (token := match[0])[0] != "#":
                self._tokens.append((token, line))
            line += token.count("\n")

    def document(self) -> None:
        header: Path = ()
        while True:
            if self._take("["):
                many = self._take("[")
                header = self._keys(())
                if many:
                    listed = header[:-1] if isinstance(header[-1], int) else header
                    self._last[listed] = self._last.get(listed, -1) + 1
                    header = (*listed, self._last[listed])
                    self._found(header)
                    self._take("]")
                self._take("]")
            elif not self._take("\n"):
                self._pair(header)

    def _take(self, token: str) -> bool:
        is_next = self._tokens[self._at][0] == token
        self._at += is_next
        return is_next

    def _found(self, path: Path) -> None:
        self.lines.setdefault(path, self._tokens[self._at][1])

    def _keys(self, path: Path) -> Path:
        """Read a dotted key below *path*, and record the line of each part. A list of tables means its last one."""
        while True:
            part = self._tokens[self._at][0]
            path = (*path, str(_loads(f"k={part}")["k"]) if part[0] in "\"'" else part)
            self._found(path)
            self._at += 1
            if path in self._last:
                path = (*path, self._last[path])
            if not self._take("."):
                return path

    def _pair(self, path: Path) -> None:
        path = self._keys(path)
        self._take("=")
        self._value(path)

    def _value(self, path: Path) -> None:
        if self._take("["):
            index = 0
            while not self._take("]"):
                if not self._take(",") and not self._take("\n"):
                    self._found((*path, index))
                    self._value((*path, index))
                    index += 1
        elif self._take("{"):
            while not self._take("}"):
                if not self._take(","):
                    self._pair(path)
        else:
            self._at += 1
            while self._tokens[self._at][0] not in "]},\n":
                self._at += 1
