"""The keys that make many jobs of one file, `array`, `matrix` and `rows`: what each may be, and beside which others."""

from __future__ import annotations

import math
import re

from msgspec import UNSET

from spool.core.arrays import ARRAY, INDEX
from spool.core.errors import InvalidValue
from spool.core.model import ArraySpec
from spool.core.names import MAX_NAME_LENGTH
from spool.formats.jobkeys import JobFile
from spool.formats.toml import show
from spool.formats.validation import MAX_NAMES, Problems

MAX_TASKS = 100_000
"""One file makes at most so many jobs."""

MAX_INDEX = 9_999_999

Matrix = tuple[tuple[str, tuple[str, ...]], ...]
"""The lists of a matrix, in the order of the file, their values as text."""

Rows = tuple[tuple[tuple[str, str], ...], ...]
"""What each task of a list of rows has, the keys in the order of the first row, the values as text."""

_MATRIX_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")
_PADDED = re.compile(r"(?<![0-9])0+(?=[0-9])")
_AT_ONCE = re.compile(r"[1-9][0-9]{0,8}")


def array(value: str) -> ArraySpec:
    """Return `"0-99:2%4"` as its indices, ascending. A blank may follow a comma."""
    ranges, percent, at_once = value.partition("%")
    if percent and _AT_ONCE.fullmatch(at_once) is None:
        raise InvalidValue(f'{show(value)}: after "%" stands how many tasks run at once, at least 1')
    if ranges.count(",") >= MAX_NAMES:
        raise InvalidValue(f"{show(value)} lists more than {MAX_NAMES:,} indices and ranges; write a range, or rows")
    indices: set[int] = set()
    for part in ranges.replace(", ", ",").split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise InvalidValue(f'{show(value)} is not an array; write "0-99", "0-99:2", "1,3,7-9" or "0-99%4"')
        if _PADDED.search(part):
            bare = _PADDED.sub("", part)
            raise InvalidValue(f"{show(value)}: {part} has leading zeros, and the tasks' names have none; write {bare}")
        first = int(match.group(1))
        last = first if match.group(2) is None else int(match.group(2))
        step = 1 if match.group(3) is None else int(match.group(3))
        if last < first:
            raise InvalidValue(f"{show(value)}: {part} ends before it begins")
        if step == 0:
            raise InvalidValue(f"{show(value)}: a step of 0 never ends")
        if last > MAX_INDEX:
            raise InvalidValue(f"{show(value)}: no index is larger than {MAX_INDEX}")
        more = range(first, last + 1, step)
        if len(more) + len(indices) > MAX_TASKS:
            raise InvalidValue(f"{show(value)} makes more than {MAX_TASKS} jobs")
        if not indices.isdisjoint(more):
            twice = next(index for index in more if index in indices)
            raise InvalidValue(f"{show(value)} names the index {twice} twice, and makes one task of each")
        indices.update(more)
    return ArraySpec(tuple(sorted(indices)), int(at_once) if percent else None)


def matrix(value: dict[str, list[str | int | float | bool]]) -> Matrix:
    """Return the lists of a matrix, their values as text."""
    tasks = 1
    if len(value) > MAX_NAMES:
        raise InvalidValue(f"has {len(value):,} keys, and it may have {MAX_NAMES:,}")
    for key, choices in value.items():
        _matrix_key(key)
        if not choices:
            raise InvalidValue(f"{key} is an empty list, so that there is nothing to run")
        tasks *= len(choices)
    if not value:
        raise InvalidValue("is empty; each key of it is a list of values")
    if tasks > MAX_TASKS:
        raise InvalidValue(f"makes {tasks} jobs, and one file may make {MAX_TASKS}")
    return tuple((key, tuple(_matrix_text(choice) for choice in choices)) for key, choices in value.items())


def rows(value: list[dict[str, str | int | float | bool]]) -> Rows:
    """Return a list of rows, their values as text."""
    if not value:
        raise InvalidValue("is an empty list, so that there is nothing to run")
    if len(value) > MAX_TASKS:
        raise InvalidValue(f"makes {len(value)} jobs, and one file may make {MAX_TASKS}")
    keys = tuple(value[0])
    if not keys:
        raise InvalidValue("begins with an empty table; each has the same keys, with this task's values")
    if len(keys) > MAX_NAMES:
        raise InvalidValue(f"has {len(keys):,} keys in each row, and it may have {MAX_NAMES:,}")
    for key in keys:
        _matrix_key(key)
    known = set(keys)
    for at, row in enumerate(value):
        if row.keys() != known:
            other = next(iter(sorted(known ^ row.keys())))
            lacks = "has no" if other in known else "has a"
            raise InvalidValue(f"row {at + 1} {lacks} {other}; every row has the same keys as the first")
    return tuple([tuple([(key, _matrix_text(row[key])) for key in keys]) for row in value])


def _matrix_key(key: str) -> None:
    if _MATRIX_KEY.fullmatch(key) is None:
        raise InvalidValue(f"{show(key)} must be of letters, digits, _ and -, a letter first")
    if key == INDEX:
        raise InvalidValue("{index} is the task's number already; give the key another name")


def _matrix_text(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else repr(value)


def of_array(raw: JobFile) -> bool:
    """Whether the file makes an array, or is a task of one."""
    return any(key is not UNSET for key in (raw.array, raw.matrix, raw.rows, raw.task))


def check_together(
    raw: JobFile, name: str, array: ArraySpec | None, matrix: Matrix, rows: Rows, problems: Problems
) -> None:
    """Note what is wrong between the keys of an array or a task. What is wrong with one alone is noted already."""
    keys = [key for key in ("array", "matrix", "rows") if getattr(raw, key) is not UNSET]
    if not keys:
        if raw.max_running is not UNSET:
            problems.add(
                ("max_running",), 'needs "array", "matrix" or "rows"; to limit several jobs together use "group"'
            )
        return
    if raw.task is not UNSET:
        problems.add(("task",), "is written by spool into the files of single tasks, which are no arrays themselves")
    if raw.matrix is not UNSET and raw.rows is not UNSET:
        problems.add(("rows",), 'cannot stand beside "matrix"; write the product into the rows')
    if array is not None and array.max_running is not None and raw.max_running not in (UNSET, array.max_running):
        problems.add(("max_running",), f'says {raw.max_running}, and "array" says {array.max_running}')
    given = {key for key, _ in (*matrix, *(rows[0] if rows else ()))}
    if array is not None and ARRAY in given:
        problems.add((keys[1], ARRAY), 'is what {array} means beside "array": its index; give the key another name')
    tasks = math.prod(len(choices) for _, choices in matrix) * (len(rows) or 1)
    last = tasks - 1
    if array is not None:
        last = array.indices[-1] if len(keys) == 1 else tasks * len(array.indices) - 1
        if len(keys) > 1 and tasks * len(array.indices) > MAX_TASKS:
            made = tasks * len(array.indices)
            problems.add(("array",), f'makes {made} jobs together with "{keys[1]}", and one file may make {MAX_TASKS}')
    if len(f"{name}_{last}") > MAX_NAME_LENGTH:
        problems.add(
            (keys[0],),
            f"the tasks' names ({name}_{last}) would be longer than {MAX_NAME_LENGTH} characters; rename the file",
        )
