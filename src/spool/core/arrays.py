"""Many jobs in one file: the tasks of an array, and the values that replace `{key}` in each.

Nothing here knows what a job file looks like; `formats.jobfile` makes the text of each task from it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from spool.core.model import ArraySpec, ArrayTask, Spec, State, Stop

INDEX = "index"
"""`{index}` is the task's index: the number at the end of its name, and `SPOOL_ARRAY_INDEX`."""

ARRAY = "array"
"""`{array}`, where `array` stands beside a matrix or rows: the task's index within `array` alone."""

PARAMETER = "SPOOL_PARAM_"
"""The beginning of the variables that tell a task the values of its keys."""


class Tasks:
    """The tasks of one array, by position. The cost of counting and naming them does not depend on their number.

    With `array` alone a task's index is that of the array; else the tasks are numbered from 0. Of a product the last
    key of the matrix varies fastest, and the indices of an `array` beside it slowest.
    """

    __slots__ = ("_array", "_indices", "_matrix", "_rows", "count", "keys", "max_running", "name")

    def __init__(self, name: str, spec: Spec) -> None:
        self.name = name
        self._array: ArraySpec | None = spec.array
        self._matrix = spec.matrix
        self._rows = spec.rows
        alone = not self._matrix and not self._rows
        indices = 1 if self._array is None else len(self._array.indices)
        self.count = (
            indices * (len(self._rows) or 1) * math.prod(len(choices) for _, choices in self._matrix)
            if spec.is_array
            else 0
        )
        self._indices: Sequence[int] = range(self.count)
        if alone and self._array is not None:
            self._indices = self._array.indices
        keys = [INDEX] if alone or self._array is None else [INDEX, ARRAY]
        keys += [key for key, _ in self._matrix]
        keys += [key for key, _ in self._rows[0]] if self._rows else []
        self.keys: tuple[str, ...] = tuple(keys)
        self.max_running = spec.max_running
        if self._array is not None and self._array.max_running is not None:
            self.max_running = self._array.max_running

    @property
    def variables(self) -> dict[str, str]:
        """The variable of each key but the index, which has its own; keys whose names differ too little have none."""
        names = {key: variable_of(key) for key in self.keys if key != INDEX}
        counts = Counter(names.values())
        return {name: key for key, name in names.items() if counts[name] == 1}

    def index(self, position: int) -> int:
        """Return the index of the task at *position*, from 0 to `count` - 1."""
        return self._indices[position]

    def position_of(self, index: int) -> int | None:
        """Return the position of the task with that index, None if there is none."""
        return self._indices.index(index) if index in self._indices else None

    def task_name(self, position: int) -> str:
        """Return the job name of the task at *position*."""
        return f"{self.name}_{self.index(position)}"

    def names(self) -> tuple[str, ...]:
        """Return the name of every task, in order."""
        return tuple([f"{self.name}_{index}" for index in self._indices])

    def task(self, position: int) -> ArrayTask:
        """Return the array and index of a task, as its file records them."""
        return ArrayTask(self.name, self.index(position), self.max_running)

    def values(self, position: int) -> dict[str, str]:
        """Return the value of each of `keys` in the task at *position*."""
        found = {INDEX: str(self.index(position))}
        rest = position
        for key, choices in reversed(self._matrix):
            rest, at = divmod(rest, len(choices))
            found[key] = choices[at]
        if self._rows:
            rest, at = divmod(rest, len(self._rows))
            found.update(self._rows[at])
        if ARRAY in self.keys and self._array is not None:
            found[ARRAY] = str(self._array.indices[rest])
        return found

    def parameters(self, position: int) -> dict[str, str]:
        """Return the result of `values` without the index, which is in the task's name: what the array varies."""
        values = self.values(position)
        return {key: values[key] for key in self.keys if key != INDEX}


def variable_of(key: str) -> str:
    """Return the variable that tells a task the value of *key*: SPOOL_PARAM_LEARNING_RATE for `learning-rate`."""
    return PARAMETER + key.upper().replace("-", "_")


def array_of(task: str) -> str:
    """Return the name of the array that a job of this name would belong to."""
    return task.rpartition("_")[0]


def outcome_of(ended: Collection[State], total: int) -> State:
    """Return the outcome of an array of *total* tasks that *ended* like this; the array itself was not cancelled."""
    finished = sum(state is State.FINISHED for state in ended)
    return State.FINISHED if finished == total else State.FAILED


def in_words(ended: Iterable[State], total: int, going_on: int = 0) -> str:
    """Return how the *total* tasks of an array have ended: "8 of 10 finished, 2 failed"."""
    counts = Counter(ended)
    known = counts.total() + going_on
    words = [f"{counts.pop(State.FINISHED, 0)} of {total} finished"]
    words += [f"{count} {state.replace('_', ' ')}" for state, count in sorted(counts.items())]
    if going_on:
        words.append(f"{going_on} still active" if going_on > 1 else "1 still active")
    if total > known:
        words.append(f"{total - known} never issued")
    return ", ".join(words)


def progress(done: int, total: int, running: int, taken: Sequence[str]) -> str:
    """Return how far an array is; *taken* are its tasks whose names other jobs have, so that they must wait."""
    words = f"{done} of {total} done, {running} running"
    if taken:
        more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
        words += f", {taken[0]}{more} not issued: another job of that name is there"
    return words


def cancelled_by(stop: Stop) -> str:
    """Return who has cancelled an array, and the reason."""
    return f"cancelled {stop.by_whom}"


class Substitution:
    """Replaces `{key}` for known keys. `{{key}}` is a literal `{key}`, and `${key}` is the shell's; both stay.

    All other braces stay: awk's, JSON's, `${HOME}`. Without *keys* every word is one.
    """

    __slots__ = ("_find",)

    def __init__(self, keys: Sequence[str] | None) -> None:
        known = r"\w+" if keys is None else "|".join(sorted(map(re.escape, keys), key=len, reverse=True))
        pattern = rf"\$\{{(?:{known})\}}|\{{\{{(?P<literal>{known})\}}\}}|\{{(?P<key>{known})\}}"
        self._find = re.compile(pattern)

    def touches(self, text: str) -> bool:
        """Whether *text* has anything to replace."""
        return self._find.search(text) is not None

    def keys_in(self, text: str) -> set[str]:
        """Return the keys of *text* that are replaced."""
        return {match["key"] for match in self._find.finditer(text) if match["key"] is not None}

    def apply(self, text: str, values: Mapping[str, str]) -> str:
        """Return *text* with every known key replaced. Inserted text is not searched again."""

        def replaced(match: re.Match[str]) -> str:
            key, literal = match["key"], match["literal"]
            if key is not None:
                return values[key]
            return match[0] if literal is None else f"{{{literal}}}"

        return self._find.sub(replaced, text)
