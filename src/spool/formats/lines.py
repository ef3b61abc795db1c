"""Where a key stands in a TOML source: the parser does not tell, and an error message must.

The source is one that the parser has accepted, so that this needs to follow its shape only, not to judge it. It takes
ten times as long as the parser, so it ends when all is found that was asked for, and after `MAX_TOKENS` in any case.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Set
from contextlib import suppress

from spool.formats.toml import Path

MAX_TOKENS = 30_000
"""So far into a source lines are looked for: no file that people write by hand has as many words and marks."""

_STRING = (
    r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*+"{3,5}'
    r"|'''(?:[^']|'{1,2}(?!'))*+'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*+"'
    r"|'[^'\n]*+'"
)
_TOKEN = re.compile(
    rf"(?P<skip>[ \t\r]+|#[^\n]*)|(?P<text>{_STRING})|(?P<mark>[\[\]{{}}=,.\n])|(?P<bare>[^\s\[\]{{}}=,.#\"']+)",
    re.DOTALL,
)
_NO_KEYS = re.compile(rf"(?P<text>{_STRING})|#[^\n]*", re.DOTALL)
_NESTING = re.compile(rf"{_STRING}|#[^\n]*|[\[\]{{}}]", re.DOTALL)


def has_long_key(text: str, most: int) -> bool:
    """Tell whether *text*, valid or not, has a key of more than *most* parts."""
    bare = _NO_KEYS.sub(lambda match: '""' if match.group("text") else "", text)
    part = r"[A-Za-z0-9_\"-]"
    return re.search(rf"(?<!{part})(?:{part}++[ \t]*+\.[ \t]*+){{{most}}}", bare) is not None


def too_deep(text: str, most: int) -> int | None:
    """Return the line on which *text*, valid or not, opens more than *most* brackets in each other; None if nowhere."""
    depth = 0
    for match in _NESTING.finditer(text):
        mark = match.group()
        if mark in ("[", "{"):
            depth += 1
            if depth > most:
                return text.count("\n", 0, match.start()) + 1
        elif mark in ("]", "}"):
            depth = max(0, depth - 1)
    return None


def find_line(text: str, path: Path) -> int | None:
    """Return the line, counted from 1, on which *path* is set in *text*, or None if it is not found.

    A path that is only implied (`a` of `[a.b]`) stands where it is first mentioned, and a list's element that is
    not found where its list begins.
    """
    lines = key_lines(text, {path})
    while path:
        if path in lines:
            return lines[path]
        if isinstance(path[-1], str):
            return None
        path = path[:-1]
    return None


def line_of(lines: dict[Path, int], path: Path) -> int | None:
    """Return the line of *path*, or of the nearest thing around it, from what `key_lines` returned."""
    while path:
        if path in lines:
            return lines[path]
        path = path[:-1]
    return None


def key_lines(text: str, wanted: Set[Path] | None = None) -> dict[Path, int]:
    """Return the line, counted from 1, of each key and each list element of the TOML source *text*.

    With *wanted* it may be those alone, and what is found on the way to them.
    """
    scan = _Scan(text, wanted)
    with suppress(RecursionError, _Enough):  # the lines found until then are right
        scan.document()
    return scan.lines


class _Enough(Exception):  # noqa: N818  (it is no error)
    """All that was wanted is found."""


class _Scan:
    """One walk through the tokens of a source."""

    def __init__(self, text: str, wanted: Set[Path] | None) -> None:
        self.lines: dict[Path, int] = {}
        self._wanted = set(wanted) if wanted is not None else None
        self._source = _tokens(text)
        self._tokens: list[tuple[str, int]] = []
        self._next = 0

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
        tables: dict[Path, int] = {}
        while (part := self._peek()) is not None:
            if part == "\n":
                self._next += 1
            elif part == "[":
                self._next += 1
                many = self._take("[")
                header = self._keys(())
                self._skip_line()
                if many:
                    tables[header] = tables.get(header, -1) + 1
                    header = (*header, tables[header])
                    self._set(header, self._tokens[self._next - 1][1])
            else:
                before = self._next
                path = self._keys(header)
                if self._take("="):
                    self._value(path)
                if self._next == before:
                    self._next += 1

    def _peek(self) -> str | None:
        if self._next == len(self._tokens):
            token = next(self._source, None)
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
        """Read a dotted key below *path* and note the line of each of its parts."""
        while (part := self._peek()) is not None and part not in "[]{}=,\n":
            if part != ".":
                path = (*path, _plain_key(part))
                self._set(path, self._tokens[self._next][1])
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
                if self._next == before:  # what can begin no value, as "}"
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


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    """Yield each token of *text* with its line, up to the last that is looked at."""
    line, number = 1, 0
    for match in _TOKEN.finditer(text):
        part = match.group()
        if match.lastgroup != "skip":
            yield part, line
            number += 1
            if number == MAX_TOKENS:
                return
        line += part.count("\n")


def _plain_key(part: str) -> str:
    if part[0] in "\"'":
        try:
            return str(tomllib.loads(f"k={part}")["k"])
        except ValueError:
            return part[1:-1]
    return part
