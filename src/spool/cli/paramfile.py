"""A table of parameters, as `spool submit --param-file` takes it: one job for each row."""

from __future__ import annotations

import csv

from spool.core.errors import InvalidValue, cannot


def rows(path: str) -> list[dict[str, str]]:
    """Return the rows of the table in the file *path*, the cells as they stand there. Raises InvalidValue.

    The first line has the keys. Cells are parted by commas, in a `.tsv` file by tabs; empty lines are passed over.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = [line for line in csv.reader(file, delimiter="\t" if path.endswith(".tsv") else ",") if line]
    except OSError as error:
        raise _useless(path, error.strerror or str(error)) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise _useless(path, str(error)) from None
    keys = [key.strip() for key in lines[0]] if lines else []
    if len(set(keys)) < len(keys):
        raise _useless(path, "two of its columns have the same name")
    for number, line in enumerate(lines[1:], start=1):
        if len(line) != len(keys):
            raise _useless(path, f"row {number} has {len(line)} cells, and the first line has {len(keys)}")
    return [dict(zip(keys, line, strict=True)) for line in lines[1:]]


def _useless(path: str, why: str) -> InvalidValue:
    return InvalidValue(cannot("use", "the table of parameters", why, where=path))
