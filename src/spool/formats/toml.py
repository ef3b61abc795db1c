"""TOML, read and written in one place.

`read` accepts what TOML 1.0 allows, less what no file of a spool may hold: more than `MAX_BYTES`, an encoding other
than UTF-8, NUL in a text, numbers that are not finite or do not fit 64 bits, and nesting so deep that it can only
be meant to do harm. Every refusal is one `InvalidFile` that names the line. What could keep the parser busy for long is
refused before the parser sees it: what is left takes at most half a second, and that only a file of 1 MiB.
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

# The parser of the standard library, compiled: a start with 100,000 waiting jobs reads that many files.
import tomli

from spool.core.errors import InvalidFile, Problem, shown

Path = tuple[str | int, ...]
"""Where a value stands: keys, and positions in lists. `("depends_on", "all", 2)`."""

MAX_KEY_PARTS = 16
"""The parser needs quadratic time for a key of many parts, and no file of a spool has one."""

MAX_BYTES = 1 << 20
"""A larger file is refused unread: eight times the longest command that the kernel takes, and read in half a second."""

MAX_DEPTH = 32
"""Lists and inline tables stand in each other at most so deep. No file of a spool needs more than three."""

_LARGE = 1 << 16  # characters: more of them may become so many objects that the collector of garbage is in the way

_BOM = b"\xef\xbb\xbf"
_POSITION = re.compile(r"^(.*) \(at (?:line ([0-9]+), column ([0-9]+)|end of document)\)$", re.DOTALL)
# What no file may hold is written with an escape, with many digits, with an exponent, or as one of two words. To look
# for these takes a tenth of the time that it takes to look at every value.
_MAY_BE_BAD = re.compile(r"[0-9_](?:[eE]|[0-9A-Fa-f_]{14})")
_SMALLEST_INT, _LARGEST_INT = -(1 << 63), (1 << 63) - 1


def read(data: bytes, what: str) -> dict[str, Any]:
    """Return the TOML document *data*; *what* names it in errors ("job train"). Raises InvalidFile and nothing else."""
    text = decode(data, what)
    if text.count(".") >= MAX_KEY_PARTS and _has_long_key(text):
        raise InvalidFile(what, [Problem(None, None, f"a key has more than {MAX_KEY_PARTS} parts")])
    if text.count("[") + text.count("{") > MAX_DEPTH and (line := _too_deep(text)) is not None:
        why = f"not readable on line {line}: lists and tables are nested more than {MAX_DEPTH} deep"
        raise InvalidFile(what, [Problem(None, line, why)])
    suspicious = "\\" in text or "inf" in text or "nan" in text or "0x" in text or _MAY_BE_BAD.search(text) is not None
    try:
        with _uncollected(text):
            document = tomli.loads(text)
        bad = _find_bad(document) if suspicious else None
    except RecursionError:
        raise InvalidFile(what, [Problem(None, None, "not valid TOML: it is nested too deeply")]) from None
    except ValueError as error:  # TOMLDecodeError is one, and so is int() of 5,000 digits
        raise InvalidFile(what, [_syntax_problem(text, error)]) from None
    if bad is not None:
        path, why = bad
        from spool.formats.lines import find_line  # here, for only a file that is wrong needs it

        line = find_line(text, path)
        on_line = "" if line is None else f" on line {line}"
        key = ".".join(str(part) for part in path)
        raise InvalidFile(what, [Problem(key, line, f'"{key}"{on_line}: {why}')])
    return document


def _has_long_key(text: str) -> bool:
    from spool.formats.lines import has_long_key  # here, for hardly any file has so many dots

    return has_long_key(text, MAX_KEY_PARTS)


def _too_deep(text: str) -> int | None:
    from spool.formats.lines import too_deep  # here, for few files have so many brackets

    return too_deep(text, MAX_DEPTH)


@contextmanager
def _uncollected(text: str) -> Iterator[None]:
    """Collect no garbage while a large *text* is parsed: there is none, and the search takes five times as long."""
    if len(text) < _LARGE or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def decode(data: bytes, what: str) -> str:
    """Return *data* as text: UTF-8, a byte order mark taken off. Raises InvalidFile."""
    if len(data) > MAX_BYTES:
        # Not how many: who reads a file for this reads no more of it than shows that it is too large.
        why = f"it has more than {MAX_BYTES} bytes, and so it is not read"
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
    match = _POSITION.match(str(error))
    if match is None:  # no position: a number that Python will not convert
        return Problem(None, None, f"not valid TOML: {str(error).split(';')[0]}")
    message, line, column = match.groups()
    if line is None:
        last = text.count("\n") + (0 if text.endswith("\n") else 1) or 1
        return Problem(None, last, f"not valid TOML on line {last}, at the end: {message}")
    return Problem(None, int(line), f"not valid TOML on line {line}, column {column}: {message}")


def _find_bad(document: dict[str, Any]) -> tuple[Path, str] | None:
    """Return the first value that no file may hold, and why not."""
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
        return None if _SMALLEST_INT <= value <= _LARGEST_INT else ((), "this number does not fit 64 bits")
    if isinstance(value, float):
        return None if math.isfinite(value) else ((), f"{value} is not a number that can be counted with")
    if isinstance(value, list):
        for index, element in enumerate(value):
            bad = _bad_value(element)
            if bad is not None:
                return (index, *bad[0]), bad[1]
    elif isinstance(value, dict):
        return _find_bad(value)
    return None


def write(document: Mapping[str, Any]) -> bytes:
    """Return *document* as TOML. Texts of several lines are written on several lines, where that loses nothing.

    Raises ValueError for a text that UTF-8 cannot hold (a lone surrogate, from a file name that is not UTF-8).
    """
    import tomli_w  # here, for only commands that write need it

    text = tomli_w.dumps(document)
    if "\\n" in text and "\\r" not in text:
        text = tomli_w.dumps(document, multiline_strings=True)
    text.encode()  # or it raises, and a surrogate is not escaped into something else
    return shown(text, "\n\t").encode()  # what is left of such characters stands in strings


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
    """Return *value* as short text for an error message, the way the file would have it."""
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
