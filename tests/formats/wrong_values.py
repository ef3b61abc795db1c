"""Tables of values that no key may have: a line for each key."""

from __future__ import annotations


def texts_of(table: str) -> list[tuple[str, str]]:
    """Return key and text of each value of `OTHER = VALUE & KEY: VALUE | VALUE`, the others being in the text first."""
    found = []
    for line in table.strip().splitlines():
        head, _, values = line.partition(": ")
        *others, key = head.split(" & ")
        found += [(key, "\n".join([*others, f"{key} = {value}"])) for value in values.split(" | ")]
    return found
