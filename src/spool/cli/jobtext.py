"""The keys of a submission as the text of a job file, laid out as a person would.

It can write what options give: numbers, words, lists and tables of them. For a text that needs more than a backslash
in TOML it returns None, and the writer of `formats` is to be asked. Imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping


def render(keys: Mapping[str, object]) -> str | None:
    """Return *keys* as TOML, tables last; None for a value that this cannot write."""
    lines: list[str] = []
    tables: list[str] = []
    for key, value in keys.items():
        if isinstance(value, dict):
            inner = [_line(name, item) for name, item in value.items()]
            tables += ["", f"[{key}]", *inner]
        else:
            lines.append(_line(key, value))
    text = "\n".join([*lines, *tables]) + "\n"
    return None if "\0" in text else text


def _line(key: str, value: object) -> str:
    bare = key.isascii() and key.replace("-", "_").isidentifier()
    return f"{key if bare else _quoted(key)} = {_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    return "\0"


def _quoted(text: str) -> str:
    """Return *text* as a string of TOML; what needs more than a backslash becomes NUL, which `render` refuses."""
    if not text.isprintable():
        return "\0"
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
