"""Where a key stands in a TOML source: the parser does not tell, and an error message must.

The source is one that the parser has accepted, so that this needs to follow its shape only, not to judge it.
"""

from __future__ import annotations

import re
import tomllib
from contextlib import suppress

from spool.formats.toml import Path

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


def has_long_key(text: str, most: int) -> bool:
    """Tell whether *text*, valid or not, has a key of more than *most* parts."""
    bare = _NO_KEYS.sub(lambda match: '""' if match.group("text") else "", text)
    part = r"[A-Za-z0-9_\"-]"
    return re.search(rf"(?<!{part})(?:{part}++[ \t]*+\.[ \t]*+){{{most}}}", bare) is not None


def find_line(text: str, path: Path) -> int | None:
    """Return the line, counted from 1, on which *path* is set in *text*, or None if it is not found.

    A path that is only implied (`a` of `[a.b]`) stands where it is first mentioned, and a list's element that is
    not found where its list begins.
    """
    lines = key_lines(text)
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


def key_lines(text: str) -> dict[Path, int]:
    """Return the line, counted from 1, of each key and each list element of the TOML source *text*."""
    scan = _Scan(text)
    with suppress(RecursionError):  # the lines found until then are right
        scan.document()
    return scan.lines


class _Scan:
    """One walk through the tokens of a source."""

    def __init__(self, text: str) -> None:
        self.lines: dict[Path, int] = {}
        self._tokens: list[tuple[str, int]] = []
        line = 1
        for match in _TOKEN.finditer(text):
            part = match.group()
            if match.lastgroup != "skip":
                self._tokens.append((part, line))
            line += part.count("\n")
        self._next = 0

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
                    self.lines[header] = self._tokens[self._next - 1][1]
            else:
                before = self._next
                path = self._keys(header)
                if self._take("="):
                    self._value(path)
                if self._next == before:
                    self._next += 1

    def _peek(self) -> str | None:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else None

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
                self.lines.setdefault(path, self._tokens[self._next][1])
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
                self.lines[element] = self._tokens[before][1]
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


def _plain_key(part: str) -> str:
    if part[0] in "\"'":
        try:
            return str(tomllib.loads(f"k={part}")["k"])
        except ValueError:
            return part[1:-1]
    return part
