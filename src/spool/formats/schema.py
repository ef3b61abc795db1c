"""JSON Schemas and tables of keys for the pages, made from the types that the readers use.

`python -m spool.formats.schema job` prints the schema that is shipped as `job.schema.json`; editors that know TOML
complete and check keys by it. `python -m spool.formats.schema job --table` prints the keys as a Markdown table. After a
change of a key `python -m spool.formats.schema --write` puts all of them into the checkout in which it is run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from spool.formats import config, jobfile, reservation
from spool.formats.validation import Format

KINDS: dict[str, tuple[str, Format]] = {
    "job": ("a job file of spool", jobfile.FORMAT),
    "config": ("the configuration of spool", config.FORMAT),
    "reservation": ("a reservation of spool", reservation.FORMAT),
}


def schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of one *kind* of file: "job", "config" or "reservation"."""
    title, format_ = KINDS[kind]
    root = format_.struct
    made = msgspec.json.schema(root)
    tables = made["$defs"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **tables.pop(root.__name__),
        "title": title,
        "$defs": tables,
    }


def render(kind: str) -> str:
    """Return the text of the schema of one *kind* of file."""
    return msgspec.json.format(msgspec.json.encode(schema(kind)), indent=2).decode() + "\n"


def table(kind: str) -> str:
    """Return the keys of one *kind* of file as a Markdown table: key, type, default, meaning."""
    made = schema(kind)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    rows += _rows(made, made["$defs"], "")
    return "\n".join(rows) + "\n"


def _rows(shape: dict[str, Any], tables: dict[str, Any], prefix: str) -> list[str]:
    rows = []
    for key, value in shape["properties"].items():
        required = key in shape.get("required", ())
        default = "required" if required else _default(value)
        cells = (f"`{prefix}{key}`", _type(value), default, str(value.get("description", "")))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        inner = _table_of(value, tables)
        if inner is not None:
            name = "NAME." if "additionalProperties" in value else ""
            rows += _rows(inner, tables, f"{prefix}{key}.{name}")
    return rows


def _table_of(value: dict[str, Any], tables: dict[str, Any]) -> dict[str, Any] | None:
    """Return the table that a key holds, or that is one of its forms, or that each of its entries is."""
    entries = value.get("additionalProperties")
    items = value.get("items")
    outer = [value, *(entry for entry in (entries, items) if isinstance(entry, dict))]
    forms = [form for each in outer for form in (each, *each.get("anyOf", ()), *each.get("allOf", ()))]
    for form in forms:
        if "$ref" in form:
            found: dict[str, Any] = tables[form["$ref"].rpartition("/")[2]]
            return found
    return None


def _default(value: dict[str, Any]) -> str:
    default = value.get("default")
    return (
        ""
        if default is None or default == () or isinstance(default, dict)
        else f"`{msgspec.json.encode(default).decode()}`"
    )


def _type(value: dict[str, Any]) -> str:
    if value.get("title") in ("size", "duration"):
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
    """Put the schemas, and the tables of docs/FORMAT.md, into a *checkout* of the project."""
    for kind in KINDS:
        with open(f"{checkout}/src/spool/formats/{kind}.schema.json", "w", encoding="utf-8") as file:
            file.write(render(kind))
    with open(f"{checkout}/docs/FORMAT.md", "r+", encoding="utf-8") as page:
        text = page.read()
        for kind in KINDS:
            before, mark, rest = text.partition(f"<!-- keys of {kind} -->\n")
            _, end, after = rest.partition("<!-- end of keys -->")
            text = f"{before}{mark}{table(kind)}{end}{after}"
        page.seek(0)
        page.truncate()
        page.write(text)


def main(arguments: Sequence[str]) -> int:
    """Print the schema, or with `--table` the table, of the kind of file that is named; or `--write` all of them."""
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
