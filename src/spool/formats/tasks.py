"""The files of an array's tasks, and the record that makes a metadir an array's.

A task's file is an ordinary job file: the keys of the array's own, less those that made it an array, with `{key}`
replaced, and a table `[task]`. It depends on nothing but the bytes of the array's file and the position, so that it
can be made again after a power cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spool.core.arrays import Substitution, Tasks
from spool.core.model import Spec
from spool.formats import toml
from spool.formats.run_records import number_lines, optional, read_keys, required, text_lines
from spool.formats.timestamps import at_lines, read_at

REPLACED = ("command", "workdir", "stdout", "stderr", "prolog", "epilog")
"""The keys, beside the values of `env`, in which `{key}` is replaced."""

_NOT_OF_A_TASK = ("array", "matrix", "rows", "max_running")


class TaskFiles:
    """Makes the files of the tasks of one array. Raises InvalidFile for what is no TOML."""

    def __init__(self, name: str, data: bytes, spec: Spec) -> None:
        self.tasks = Tasks(name, spec)
        self._substitution = Substitution(self.tasks.keys)
        document = toml.read(data, f"job {name}")
        same: dict[str, Any] = {}
        self._scalars: dict[str, Any] = {}  # what differs from task to task, if anything does
        self._env: dict[str, str] | None = None
        for key, value in document.items():
            if key in _NOT_OF_A_TASK:
                continue
            if key == "env" and any(self._substitution.touches(text) for text in value.values()):
                self._env = value
            elif key in REPLACED and any(map(self._substitution.touches, [value] if isinstance(value, str) else value)):
                self._scalars[key] = value
            else:
                same[key] = value
        # Tables come after all other keys, so that what differs goes before and behind what does not.
        self._same = toml.write(same) if same else b""

    def text(self, position: int) -> bytes:
        """Return the job file of the task at *position*."""
        values = self.tasks.values(position)
        apply = self._substitution.apply
        task = self.tasks.task(position)
        head: dict[str, Any] = {
            key: apply(value, values) if isinstance(value, str) else [apply(part, values) for part in value]
            for key, value in self._scalars.items()
        }
        last = f"\n[task]\narray = {toml.quote(task.array)}\nindex = {task.index}\n"
        last += number_lines(("max_running", task.max_running))
        env = b""
        if self._env is not None:
            env = b"\n" + toml.write({"env": {key: apply(value, values) for key, value in self._env.items()}})
        return (toml.write(head) if head else b"") + self._same + env + last.encode()


@dataclass(frozen=True, slots=True)
class ArrayRecord:
    """What `array.toml` says: of which file the tasks were made, and when. It is what a run's `grant.toml` is."""

    job: str
    run: int
    tasks: int
    inode: int | None = None  # of the job file that was claimed
    user: str | None = None
    host: str | None = None
    boot_id: str | None = None  # of the boot in which the tasks were written
    submitted_at_ns: int | None = None
    expanded_at_ns: int | None = None


def render_array(record: ArrayRecord) -> bytes:
    """Return the text of `array.toml`."""
    lines = [
        f"job = {toml.quote(record.job)}\nrun = {record.run}\ntasks = {record.tasks}\n",
        text_lines(("user", record.user), ("host", record.host), ("boot_id", record.boot_id)),
        "" if record.inode is None else f'inode = "{record.inode}"\n',  # a text: it may need all of 64 bits
        at_lines("submitted_at", record.submitted_at_ns),
        at_lines("expanded_at", record.expanded_at_ns),
    ]
    return "".join(lines).encode()


def parse_array(data: bytes) -> ArrayRecord:
    """Return what `array.toml` says. Raises InvalidRecord."""
    keys = read_keys(data, "array")
    inode = optional(keys, "inode", str)
    return ArrayRecord(
        job=required(keys, "job", str, "array"),
        run=required(keys, "run", int, "array"),
        tasks=required(keys, "tasks", int, "array"),
        inode=int(inode) if inode is not None and inode.isdecimal() else None,
        user=optional(keys, "user", str),
        host=optional(keys, "host", str),
        boot_id=optional(keys, "boot_id", str),
        submitted_at_ns=read_at(keys, "submitted_at"),
        expanded_at_ns=read_at(keys, "expanded_at"),
    )
