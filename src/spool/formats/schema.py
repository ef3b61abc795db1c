"""JSON Schemas and tables of keys for the pages, made from the types that the readers use.

`python -m spool.formats.schema job` prints the schema that is shipped as `job.schema.json`; TOML editors complete and
check keys by it. `python -m spool.formats.schema job --table` prints the keys as a Markdown table. After a change of a
key, run `python -m spool.formats.schema --write` to update all of them in the current checkout.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Union

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from spool.formats import config, jobfile, reservation
from spool.formats.capabilities import OF_ITS_FIELD, REQUIRED, Key, KeyTable, contributed, loaded
from spool.formats.validation import Format

KINDS: dict[str, tuple[str, Format]] = {
    "job": ("a job file of spool", jobfile.FORMAT),
    "config": ("the configuration of spool", config.FORMAT),
    "reservation": ("a reservation of spool", reservation.FORMAT),
    **{kind.name: (kind.title, kind.format) for _, kinds in contributed("files") for kind in kinds},
}
FOLDERS = {kind.name: f"extras/{one.name}" for one, kinds in contributed("files") for kind in kinds}
"""The kinds of files of capabilities, and the folders below src/spool of these; the others are in formats."""


class Documented:
    """A format as types of msgspec that state the meaning and the default of each key, as a file would state it."""

    def __init__(self, of: Format) -> None:
        self._of = of
        self._models: dict[str, Struct] = {}
        for part in of.parts.values():
            self._models |= loaded(part.reader).models()
        self._defaults: dict[Key, object] = {}
        self._find_defaults(of.table, "")
        self._structs: dict[KeyTable, type[Struct]] = {}
        self.struct = self._struct(of.table)

    def default_of(self, key: Key) -> object:
        """Return the default of a key; None: it has none."""
        return self._defaults[key]

    def _find_defaults(self, table: KeyTable, part: str) -> None:
        """Find the default of each key in *table*; *part* is the part of the model for it."""
        for key in table.keys:
            path = key.target if "." in key.target else f"{part}.{key.target}".lstrip(".")
            self._defaults[key] = key.default if key.default is not OF_ITS_FIELD else self._default(key, path)
            if key.table is not None:
                self._find_defaults(key.table, path)

    def _default(self, key: Key, path: str) -> object:
        value: Any = self._of.model
        for name in path.split("."):
            owner = value[0] if isinstance(value, tuple) and value else value
            value = getattr(owner, name, None if owner is not self._of.model else self._models.get(name))
        kind = self._of.kind_of(key)
        if kind is None or value is None or value == () or isinstance(value, Struct):
            return None
        return value if kind.written is None else kind.written(value)

    def _struct(self, table: KeyTable) -> type[Struct]:
        made = self._structs.get(table)
        if made is None:
            made = self._structs[table] = msgspec.defstruct(
                table.name,
                [self._column(key) for key in table.keys],
                frozen=True,
                forbid_unknown_fields=True,
                kw_only=True,
                namespace={"__doc__": table.about},
            )
        return made

    def _column(self, key: Key) -> tuple[str, Any] | tuple[str, Any, Any]:
        hint = self._hint(key)
        extra: dict[str, Any] = {"type": "string"} if hint is Any else {}
        if key.words:
            extra["enum" if key.kind == "word" else "examples"] = list(key.words)
        if key.examples:
            extra["examples"] = list(key.examples)
        hint = Annotated[hint, Meta(description=key.about, extra_json_schema=extra or None)]
        default = self.default_of(key)
        if default is REQUIRED:
            return key.name, hint
        if default is None:
            return key.name, Union[hint, UnsetType], UNSET  # noqa: UP007  (made while the program runs)
        if key.table is not None and not key.many:
            return key.name, hint, self._struct(key.table)()
        return key.name, hint, default

    def _hint(self, key: Key) -> Any:
        kind, table = self._of.kind_of(key), key.table
        if kind is not None or table is None:
            return None if kind is None else kind.type
        hint: Any = self._struct(table)
        hint = hint if table.short is None else Union[self._hint(table.short), hint]  # noqa: UP007
        return {"": hint, "list": tuple[hint, ...], "named": dict[str, hint]}[key.many]


def schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of one *kind* of file, a key of `KINDS`."""
    root = Documented(KINDS[kind][1]).struct
    made = msgspec.json.schema(root)
    tables = made["$defs"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **tables.pop(root.__name__),
        "title": KINDS[kind][0],
        "$defs": tables,
    }


def render(kind: str) -> str:
    """Return the text of the schema of one *kind* of file."""
    return msgspec.json.format(msgspec.json.encode(schema(kind)), indent=2).decode() + "\n"


def table(kind: str) -> str:
    """Return the keys of one *kind* of file as a Markdown table: key, type, default, meaning."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows(kind)]
    return "\n".join(lines) + "\n"


def rows(kind: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield each key of one *kind* of file: its name, type, default and meaning, as Markdown."""
    format_ = Documented(KINDS[kind][1])
    return _rows(KINDS[kind][1].table, format_, msgspec.json.schema(format_.struct)["$defs"], "")


def _rows(
    table: KeyTable, format_: Documented, shapes: dict[str, Any], prefix: str
) -> Iterator[tuple[str, str, str, str]]:
    for key in (key for key in table.keys if not key.internal):
        stated = format_.default_of(key)
        default = ""
        if stated is REQUIRED:
            default = "required"
        elif stated not in (None, (), {}):
            default = f"`{msgspec.json.encode(stated).decode()}`"
        type_ = _type(shapes[table.name]["properties"][key.name])
        yield f"`{prefix}{key.name}`", type_, default, key.about
        if key.table is not None:
            named = "NAME." if key.many == "named" else ""
            yield from _rows(key.table, format_, shapes, f"{prefix}{key.name}.{named}")


def _type(value: dict[str, Any]) -> str:
    if value.get("title") in ("size", "size or auto", "duration"):
        return str(value["title"])
    if "enum" in value:
        return " or ".join(f'`"{word}"`' for word in value["enum"])
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_type(form) for form in value["anyOf"]))
    if "$ref" in value or value.get("type") == "object" or "allOf" in value:
        return "table"
    words = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
    if value.get("type") == "array":
        return "list"
    return words.get(value.get("type", ""), "")


def write(checkout: str) -> None:
    """Write the schemas into a *checkout*, with copies beside the examples."""
    for kind in KINDS:
        # Copies, not links, because examples are copied elsewhere.
        for folder in (f"src/spool/{FOLDERS.get(kind, 'formats')}", *(() if kind == "config" else ("examples",))):
            with open(f"{checkout}/{folder}/{kind}.schema.json", "w", encoding="utf-8") as file:
                file.write(render(kind))


def main(arguments: Sequence[str]) -> int:
    """Print the schema, or with `--table` the table, of the kind of file named; or `--write` all of them."""
    kinds = [argument for argument in arguments if argument in KINDS]
    if list(arguments) == ["--write"]:
        write(".")
    elif len(kinds) == 1 and set(arguments) <= {kinds[0], "--table"}:
        sys.stdout.write(table(kinds[0]) if "--table" in arguments else render(kinds[0]))
    else:
        sys.stderr.write(f"usage: python -m spool.formats.schema {{{','.join(KINDS)}}} [--table] | --write\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
