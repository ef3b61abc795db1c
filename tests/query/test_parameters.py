"""The values of an array's matrix or rows that a task has, from the file of its array and its index."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.records import expand
from spool.core.arrays import Tasks
from spool.core.model import State
from spool.formats import jobfile
from spool.query.jobs import list_jobs
from spool.query.rows import JobFilter, JobRow, Parameters, tasks_in, with_parameters
from spool.store.spool import Spool

MATRIX = 'command = "true"\n[matrix]\nlr = [0.1, 0.2]\nseed = [1, 2]\n'


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (MATRIX, [{"lr": "0.1", "seed": "1"}, {"lr": "0.1", "seed": "2"}, {"lr": "0.2", "seed": "1"}]),
        ('array = "5-7"\n', [{}, {}, {}]),
        ('array = "5-6"\n[matrix]\na = ["x"]\n', [{"array": "5", "a": "x"}, {"array": "6", "a": "x"}]),
        (
            'rows = [{lr = 1, note = "a, b"}, {lr = 2, note = ""}]\n',
            [{"lr": "1", "note": "a, b"}, {"lr": "2", "note": ""}],
        ),
    ],
)
def test_each_task_has_the_values_that_its_file_was_made_with(
    spool_root: Path, text: str, wanted: list[dict[str, str]]
) -> None:
    """Of a matrix, of rows, of a product with indices; the index alone is in the task's name and is no parameter."""
    text = text if "command" in text else f'command = "true"\n{text}'
    expand(spool_root, "s", 4, text, None)
    tasks = Tasks("s", jobfile.parse(text.encode(), name="s"))
    known = Parameters(Spool(str(spool_root)))
    for position, values in enumerate(wanted):
        assert dict(known.of(tasks.task_name(position))) == tasks.parameters(position) == values
        assert tasks.position_of(tasks.index(position)) == position


@pytest.mark.parametrize("name", ["s", "s_4", "s_00", "s_x", "_1", "s_", "s_-1", "t_1", "s_1_1", "s_²"])
def test_a_job_that_is_not_a_task_has_no_parameters(spool_root: Path, name: str) -> None:
    """The array itself, a number that it has not, and names that only look like a task's."""
    expand(spool_root, "s", 4, MATRIX, None)
    assert Parameters(Spool(str(spool_root))).of(name) == ()


def test_a_task_has_the_values_of_the_array_that_it_was_submitted_with(spool_root: Path) -> None:
    """An array of the same name that came later, with other values, does not change those of tasks that have ended."""
    expand(spool_root, "s", 4, MATRIX, None, submitted_at_ns=10)
    expand(spool_root, "s", 4, MATRIX.replace("0.1", "7"), None, run=2, submitted_at_ns=20)
    known = Parameters(Spool(str(spool_root)))
    assert dict(known.of("s_0", 10))["lr"] == dict(known.of("s_0", 19))["lr"] == "0.1"
    assert dict(known.of("s_0", 20))["lr"] == dict(known.of("s_0"))["lr"] == "7"
    assert known.of("s_0", 9) == ()


def test_the_copy_of_a_file_that_a_power_cut_has_emptied_leaves_no_parameters(spool_root: Path) -> None:
    """The list goes on without them."""
    expand(spool_root, "s", 4, "", None)
    (spool_root / "queued" / "s_1.toml").write_text('command = "true"\n')
    spool = Spool(str(spool_root))
    assert tasks_in(spool, "s") is None
    (row,) = list_jobs(spool, JobFilter(("s_1",))).rows
    assert row.parameters == ()


def test_an_array_that_waits_or_was_submitted_again_has_the_tasks_of_its_file(spool_root: Path) -> None:
    """Before it is expanded there is nothing else; one of an earlier array that has ended does not count."""
    spool = Spool(str(spool_root))
    assert tasks_in(spool, "s") is None
    (spool_root / "queued" / "s.toml").write_text(MATRIX)
    tasks = tasks_in(spool, "s")
    assert tasks is not None
    assert tasks.count == 4
    assert dict(Parameters(spool).of("s_3")) == {"lr": "0.2", "seed": "2"}
    (spool_root / "queued" / "s.toml").write_text('command = "true"\n')
    assert tasks_in(spool, "s") is None


def test_each_array_s_file_is_read_once_for_a_list(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of its tasks are in the list."""
    expand(spool_root, "s", 4, MATRIX, None)
    spool, read = Spool(str(spool_root)), list[str]()
    record = Spool.record

    def counted(self: Spool, name: str, run: int, which: str) -> bytes | None:
        read.append(which)
        return record(self, name, run, which)

    monkeypatch.setattr(Spool, "record", counted)
    rows = [JobRow(name=f"s_{index % 4}", state=State.QUEUED) for index in range(100)]
    assert all(row.parameters for row in with_parameters(spool, rows))
    assert read.count("job.toml") == 1
