"""Reading and writing of TOML, and the lines of keys, for messages.

`read` accepts what TOML 1.0 allows, except what no file of a spool may hold: more than `MAX_BYTES`, an encoding other
than UTF-8, NUL in a text, numbers that are not finite or do not fit 64 bits, and nesting so deep that it can only be
malicious. Every refusal is one `InvalidFile` that names the line. Input that could keep the parser busy for long is
refused before parsing: the rest takes at most half a second, and that only for a file of 1 MiB.

The parser does not report the position of a key, but an error message needs it. So it is asked again: a key stands on
the first line with which a document, cut off behind it, has that key.
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import product
from typing import Any

from spool.core.errors import InvalidFile, shown
from spool.core.model import Problem

Path = tuple[str | int, ...]
"""The place of a value: keys, and positions in lists. `("depends_on", "all", 2)`."""

MAX_BYTES = 1 << 20
"""Larger files are refused unread: 8 times the longest command that the kernel accepts, parsed in half a second."""

MAX_DEPTH = 32
"""The deepest nesting of lists and inline tables. No file of a spool needs more than three."""

_LARGE = 1 << 16  # characters: a longer text may create enough objects to trigger the garbage collector

_BOM = b"\xef\xbb\xbf"
# Forbidden values are written with an escape, with many digits, with an exponent, or as one of two words. A search for
# these takes a tenth of the time of a check of every value.
_MAY_BE_BAD = re.compile(r"[0-9_](?:[eE]|[0-9A-Fa-f_]{14})")
_SMALLEST_INT, _LARGEST_INT = -(1 << 63), (1 << 63) - 1

# A key that the parser would need hours for: its time is quadratic in the parts. Compiled on first use.
_LONG_KEY = r"""(?<![\w"'. \t-])[ \t]*(?:[\w"'-]+[ \t]*\.[ \t]*){1000}"""
_ENDS = [  # of what a line may leave open, the likely ones first
    mark + "".join(ends) for depth in range(4) for ends in product("]}", repeat=depth) for mark in ("", '"""', "'''")
]
_MOST_SEARCHED = 4 << 20  # characters that are parsed to find lines: about a second
_TOO_DEEP = f"lists and tables are nested more than {MAX_DEPTH} deep"


def read(data: bytes, what: str) -> dict[str, Any]:
    """Return the TOML document *data*; *what* names it in errors ("job train"). Raises only InvalidFile."""
    text = decode(data, what)
    if text.count(".") >= 1000 and (long := re.search(_LONG_KEY, text)) is not None:
        at = text.count("\n", 0, long.start()) + 1
        raise InvalidFile(what, [Problem(None, at, f"not readable on line {at}: a key has more than 1,000 parts")])
    suspicious = "\\" in text or "inf" in text or "nan" in text or "0x" in text or _MAY_BE_BAD.search(text) is not None
    try:
        with uncollected(wanted=len(text) >= _LARGE):
            document = _loads(text)
    except RecursionError:  # the parser's own limit, far beyond ours
        raise InvalidFile(what, [Problem(None, None, f"not readable: {_TOO_DEEP}")]) from None
    except ValueError as error:  # TOMLDecodeError is one, and so is int() of 5,000 digits
        raise InvalidFile(what, [_syntax_problem(text, error)]) from None
    if text.count("[") + text.count("{") + text.count(".") > MAX_DEPTH and (deep := _too_deep(document)) is not None:
        line = find_lines(text, [deep]).get(deep)
        on_line = "" if line is None else f" on line {line}"
        raise InvalidFile(what, [Problem(None, line, f"not readable{on_line}: {_TOO_DEEP}")])
    if suspicious and (bad := _find_bad(document)) is not None:
        path, why = bad
        line = find_lines(text, [path]).get(path)
        on_line = "" if line is None else f" on line {line}"
        key = ".".join(str(part) for part in path)
        raise InvalidFile(what, [Problem(key, line, f'"{key}"{on_line}: {why}')])
    return document


def _loads(text: str) -> dict[str, Any]:
    # A compiled version of the standard library's parser: a start with 100,000 waiting jobs reads that many files.
    import tomli  # imported here, because a listing from the dispatcher's view parses none

    return tomli.loads(text)


@contextmanager
def uncollected(*, wanted: bool = True) -> Iterator[None]:
    """Disable garbage collection while thousands of values are made, if *wanted*: none of them is garbage.

    Collection takes a quarter of the time of a long list, and five times as long as parsing a large file.
    """
    if not wanted or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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


def _too_deep(document: dict[str, Any]) -> Path | None:
    """Return the path of a list or table that is nested too deeply, None if none is. The document does not count."""
    level: list[tuple[Path, Any]] = [((), document)]
    for _ in range(MAX_DEPTH + 1):
        level = [
            ((*path, key), value)
            for path, around in level
            for key, value in (around.items() if isinstance(around, dict) else enumerate(around))
            if isinstance(value, (dict, list))
        ]
        if not level:
            return None
    return level[0][0]


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


def find_lines(text: str, wanted: Iterable[Path]) -> dict[Path, int]:
    """Return the line, counted from 1, of each of *wanted* in the valid source *text*, or of its nearest parent there.

    A path that is only implied (`a` of `[a.b]`) has the line of its first mention. In a very large source some are
    missing: the search is given up before it takes long.
    """
    lines, left, usual = text.split("\n"), _MOST_SEARCHED, ""
    found: dict[Path, int] = {}

    def beginning(count: int) -> Any:
        """Return the document in the first *count* lines, None if they cannot be read alone."""
        nonlocal left, usual
        part = "\n".join([*lines[:count], ""])
        for end in (usual, *_ENDS):
            if (left := left - len(part)) < 0:
                break
            with suppress(ValueError, RecursionError), uncollected():
                known, usual = _loads(part + end), end
                return known
        return None

    def search(paths: Mapping[Path, Path], before: int, upto: int) -> None:
        """Find *paths*, none of which is in the first *before* lines, and each in the first *upto*."""
        for count in range((before + upto) // 2, upto) if paths and upto - before > 1 else ():
            if (known := beginning(count)) is not None:
                there = {path: at for path, at in paths.items() if _has(known, at)}
                search(there, before, count)
                search({path: at for path, at in paths.items() if path not in there}, count, upto)
                return
        if left >= 0:
            found.update(dict.fromkeys(paths, before + 1))

    whole, known = beginning(len(lines)), dict[Path, Path]()
    for path in wanted:
        known[path] = next((path[:end] for end in range(len(path), 0, -1) if _has(whole, path[:end])), ())
    search({path: at for path, at in known.items() if at}, 0, len(lines))
    return found


def _has(value: Any, path: Path) -> bool:
    for part in path:
        try:
            value = value[part] if type(value) in (dict, list) else None
        except (KeyError, IndexError, TypeError):
            return False
    return value is not None
