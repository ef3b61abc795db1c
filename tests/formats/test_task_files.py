"""The files of an array's tasks, and the record of an array."""

from __future__ import annotations

import datetime
import tomllib

import pytest

from spool.core.errors import InvalidRecord
from spool.core.model import ArrayTask
from spool.formats import jobfile
from spool.formats.jobfile import TaskFiles
from spool.formats.run_records import ArrayRecord, parse_array, render_array

FILE = b"""\
# a comment, which is nobody's business
command = "set -e\\ntrain --lr {lr} ${HOME} {{lr}}\\n"
workdir = "/data/{set}"
comment = "the {lr} of the whole"
max_running = 3
start_after = 2026-01-31T09:00:00Z
prolog = "mkdir -p out/{lr}"
env = { LR = "{lr}", PLAIN = "1" }
retry = { max = 2 }
stdout = "out/{lr}/%a"

[depends_on]
each = "prepare"

[matrix]
lr = [0.1, "1e-3"]
set = ["a b", 'q"uote\\']
"""


def _files(data: bytes = FILE) -> TaskFiles:
    return TaskFiles("sweep", data, jobfile.parse(data, name="sweep"))


def test_a_task_is_an_ordinary_job_file() -> None:
    """It has every key of the array's file, its own values put in, and says whose task it is."""
    document = tomllib.loads(_files().text(3).decode())
    assert document == {
        "command": "set -e\ntrain --lr 1e-3 ${HOME} {lr}\n",
        "workdir": '/data/q"uote\\',
        "comment": "the {lr} of the whole",
        "start_after": datetime.datetime(2026, 1, 31, 9, tzinfo=datetime.UTC),
        "prolog": "mkdir -p out/1e-3",
        "env": {"LR": "1e-3", "PLAIN": "1", "SPOOL_PARAM_LR": "1e-3", "SPOOL_PARAM_SET": 'q"uote\\'},
        "retry": {"max": 2},
        "stdout": "out/1e-3/%a",
        "depends_on": {"each": "prepare"},
        "task": {"array": "sweep", "index": 3, "max_running": 3},
    }


@pytest.mark.parametrize(
    ("keys", "env"),
    [
        ('matrix = { learning-rate = [0.1], x2 = ["a\\nb"] }', {"LEARNING_RATE": "0.1", "X2": "a\nb"}),
        ('array = "7"\nrows = [{ x = true }]', {"ARRAY": "7", "X": "true"}),
        ("matrix = { lr = [1], LR = [2], a = [3] }", {"A": "3"}),
        ('matrix = { lr = [1] }\nenv = { SPOOL_PARAM_LR = "mine" }', {"LR": "mine"}),
        ('array = "7"', {}),
    ],
)
def test_a_task_has_its_parameters_in_its_environment(keys: str, env: dict[str, str]) -> None:
    """In SPOOL_PARAM_…, unless two keys would have the same variable, or the array's own `env` sets it."""
    spec = jobfile.parse(_files(f'command = "true"\n{keys}\n'.encode()).text(0), name="sweep_0")
    assert dict(spec.env) == {f"SPOOL_PARAM_{key}": value for key, value in env.items()}


def test_every_task_parses() -> None:
    """What is written is read again, with the task in it and no array."""
    files = _files()
    for position in range(files.tasks.count):
        spec = jobfile.parse(files.text(position), name=files.tasks.task_name(position))
        assert spec.task == ArrayTask("sweep", position, 3)
        assert not spec.is_array


@pytest.mark.parametrize(
    ("data", "command"),
    [
        (b'command = ["a", "{x}", "-{x}-"]\nrows = [{x = "1 \'2\\" $3"}]', ("a", "1 '2\" $3", "-1 '2\" $3-")),
        (b'command = "true"\narray = "0-2"', "true"),
        (b'command = "{index}"\narray = "5"', "5"),
    ],
)
def test_the_smallest_arrays_make_the_smallest_tasks(data: bytes, command: str | tuple[str, ...]) -> None:
    """A command and one of the three keys are enough; a value with blanks and quotes stays one argument of a list."""
    spec = jobfile.parse(_files(data).text(0), name="sweep_0")
    assert (spec.command, spec.task is not None) == (command, True)


def test_the_record_of_an_array_is_read_again() -> None:
    """What was written is read, and what a later version adds is passed over."""
    record = ArrayRecord(
        "sweep", 2, 5, 1 << 63, "alice", "host", "boot", 1_800_000_000_000_000_001, 1_800_000_001_000_000_002
    )
    assert parse_array(render_array(record)) == record
    assert parse_array(render_array(record) + b'later = "x"\n') == record
    assert parse_array(b'job = "a"\nrun = 1\ntasks = 3\n') == ArrayRecord("a", 1, 3)
    with pytest.raises(InvalidRecord):
        parse_array(b'job = "a"\nrun = 1\n')
