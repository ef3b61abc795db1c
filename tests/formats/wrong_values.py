"""Tables of values that no key may have: a line for each key."""

from __future__ import annotations


def texts_of(table: str) -> list[tuple[str, list[str]]]:
    """Return keys and their texts, from lines `OTHER = VALUE & KEY: VALUE | VALUE`; the others stand in each text."""
    found = []
    for line in table.strip().splitlines():
        head, _, values = line.partition(": ")
        *others, key = head.split(" & ")
        found.append((key, ["\n".join([*others, f"{key} = {value}"]) for value in values.split(" | ")]))
    return found
