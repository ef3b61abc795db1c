"""Lists of jobs: a glance finds what a close look does, and each view has the same numbers and parameters of tasks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from calling import put_job
from cli.records import TRUE, begin, end, expand, metadir_of, serve
from filled import filled
from spool.client import autostart
from spool.client.autostart import outlook
from spool.client.submit import make_spool
from spool.core import layout
from spool.core.arrays import Tasks
from spool.core.gpuuse import GpuWatch
from spool.core.model import SECOND_NS, GpuWork, Grant, Result, Spec, State, Stop, StopKind
from spool.formats import jobfile, run_records
from spool.formats.run_records import render_history, render_stop
from spool.formats.state import GpuUseView, JobView, of_spec, parse_state
from spool.machine.processes import MachineProber
from spool.query.details import RunEfficiency, compare, job_details
from spool.query.explain import why
from spool.query.jobs import counts, list_jobs
from spool.query.machine import machine_status
from spool.query.rows import JobFilter, JobRow, Parameters, row_of_result, tasks_in, with_parameters
from spool.store.spool import Service, Spool
from spool.store.tolerant import TolerantSpool


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a spool with a few waiting jobs."""
    make_spool(str(tmp_path / "s"))
    for number in range(3):
        put_job(tmp_path / "s", f"x0-{number}")
    return tmp_path / "s"


def test_records_that_cannot_be_read_are_told_of(root: Path) -> None:
    """A job whose directory is no directory is told of."""
    (root / "jobs" / "x0-1").write_text("")
    spool = TolerantSpool(str(root))
    row = next(row for row in list_jobs(spool).rows if row.name == "x0-1")
    assert "cannot read" in row.reason
    assert any("x0-1" in line for line in spool.told())


def test_an_array_whose_end_is_recorded_has_ended_wherever_its_file_is(root: Path) -> None:
    """A dispatcher that is killed leaves the file of an ended array in `running/`: `ls` and `show` tell of its end."""
    expand(root, "sweep", 3, 'command = "true"\narray = "0-2"\n')
    result = Result("sweep", 1, 1, State.FAILED, "2 of 3 finished, 1 failed", 1, 2, 3, user="ann")
    end(root, result, told=False)
    (row,) = list_jobs(Spool(str(root)), JobFilter(names=("sweep",))).rows
    assert (row.state, row.reason, row.ended_at_ns, row.array) == (State.FAILED, result.reason, 3, True)
    assert job_details(Spool(str(root)), "sweep").runs[0].state is State.FAILED


@pytest.mark.parametrize("served", [False, True], ids=["alone", "served"])
@pytest.mark.parametrize(
    ("place", "stop", "state", "words"),
    [
        ("running", None, State.RUNNING, "5 of 9 done, 1 running"),
        ("held", None, State.HELD, "5 of 9 done, 1 running"),
        ("running", "it is late", State.STOPPING, "cancelled by ann: it is late: 5 of 9 done, 1 running"),
    ],
)
def test_the_row_of_an_array_agrees_with_its_tasks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    stop: str | None,
    state: State,
    words: str,
    served: bool,
) -> None:
    """Tasks that are not issued, wait or run, by their files, have not ended, whatever a dispatcher said last.

    Files of other names do not count. It is cancelled by the record of that.
    """
    root = tmp_path / "s"
    make_spool(str(root))
    metadir = expand(root, "sweep", 9, 'command = "true"\narray = "0-8"\n', place)
    (metadir / "tasks").mkdir()
    if stop is not None:
        (metadir / "stop").write_bytes(render_stop(Stop(StopKind.CANCEL, "ann", 1, stop)))
    for where in (metadir / "tasks", root / "queued", root / "held", root / "running", root / "done"):
        (where / f"sweep_{len(where.name)}.toml").write_text('command = "true"\n')
    (root / "running" / "swept_3.toml").write_text('command = "true"\n')
    if served:
        said = JobView(state=place, reason="0 of 9 done, 0 running", run=1, array=True, user="ann")
        serve(monkeypatch, root, {"sweep": said, "sweep_7": JobView(state="queued")})
    spool = Spool(str(root))
    found = {row.name: row for row in list_jobs(spool).rows}
    row, task = found["sweep"], found["sweep_7"]
    assert (row.state, row.reason, row.array) == (state, words, True)
    assert task.place == "running"
    assert job_details(spool, "sweep").row == row
    answer = why(spool, "sweep")
    assert place == "held" or words in answer.doing


def test_why_tells_what_keeps_an_array(root: Path) -> None:
    """One whose tasks were made is held; one that waits for its tasks says so, or that the spool is paused."""
    text = 'command = "true"\narray = "0-2"\n'
    expand(root, "made", 3, text, "held")
    (root / "queued" / "waits.toml").write_text(text)
    spool = Spool(str(root))
    codes = [why(spool, name).reasons[0].code for name in ("made", "waits")]
    (root / "paused").touch()
    assert [*codes, why(spool, "waits").reasons[0].code] == ["held", "tasks", "paused"]


def test_an_array_that_is_held_has_no_run_time(root: Path) -> None:
    """The run times of an earlier job of its name say nothing of its tasks: neither `why` nor `show` takes them."""
    ended = Result("a", 1, 1, State.FINISHED, "", 1, 2, 3 * SECOND_NS, exit_code=0, user="root")
    (root / "history.jsonl").write_bytes(render_history(ended))
    (root / "held" / "a.toml").write_text('command = "true"\narray = "0-2"\n')
    spool = Spool(str(root))
    assert (why(spool, "a").expected_run_ns, job_details(spool, "a").expected_run_ns) == (None, None)


_OF_A_RUN = ("run", "attempt", "started_at_ns", "suspended_ns", "suspended_at_ns", "gpu_percent", "node", "cpu_list")
_OF_A_VIEW = ("gpu_uuids", "gpu_use", "gpu_idle_ns")
_ADDED = (
    "place",
    "progress",
    "progress_at_ns",
    "parameters",
    "metrics",
    "left",
    "start",
    "problem",
    "engine",
    "beside",
)
_OF_AN_END = ("ended_at_ns", "exit_code")
# For each source of rows, the fields that it does not know, or that its caller adds.
LEFT_OUT = {
    # Neither a result nor its line has them.
    "result": {*_ADDED, *_OF_A_VIEW, "priority", "suspended_at_ns", "array", "time_limit_ns"},
    "file": {*_ADDED, *_OF_A_VIEW, *_OF_A_RUN, *_OF_AN_END, "user", "submitted_at_ns", "reason", "array"},
}


@pytest.mark.parametrize("source", LEFT_OUT)
def test_each_source_of_rows_fills_each_field(source: str) -> None:
    """What a row has of a job that waits or runs, it has of one that has ended or that no dispatcher looks at."""
    state = State.FAILED
    row = {
        "result": lambda: row_of_result(filled(Result)),
        "file": lambda: JobRow(name="x", state=state, **of_spec(filled(Spec))),
    }[source]()
    empty = JobRow(name="", state=State.INVALID)
    same = {name for name in JobRow.__struct_fields__ if getattr(row, name) == getattr(empty, name)}
    assert same - {"name", "state"} == LEFT_OUT[source]


COUNTED = {State.RUNNING: 2, State.QUEUED: 1}
"""What `an_array_with_tasks` is counted as."""


def an_array_with_tasks(root: Path, place: str) -> dict[str, JobView]:
    """Lay an array with two tasks that run and one that waits; return what a dispatcher says of them."""
    word = "running" if place == "running" else "held"
    jobs = {
        "a": JobView(state=word, array=True, run=1, user="me"),
        "a_0": JobView(state="running", run=1, user="me"),
        "a_1": JobView(state="running", run=1, user="me"),
        "a_2": JobView(state="queued", user="me"),
    }
    lies = {"a": place, "a_0": "running", "a_1": "running", "a_2": "queued"}
    for name, where in lies.items():
        put_job(root, name, place=where)
        if jobs[name].run is not None:
            metadir_of(root, name)
    return jobs


@pytest.mark.parametrize("place", ["running", "held"])
def test_an_array_is_counted_as_its_tasks(spool_root: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """`ls` and `info` count two tasks that run and one that waits, and no job for their array."""
    serve(monkeypatch, spool_root, an_array_with_tasks(spool_root, place))
    spool = Spool(str(spool_root))
    assert dict(counts(list_jobs(spool).rows)) == machine_status(spool).states == COUNTED


def test_info_says_what_starts_the_next_dispatcher(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A submission does, unless autostart is off, systemd does it, or the spool is somebody else's."""
    root = str(spool_root)
    (spool_root / "config.toml").write_text("")
    assert outlook(root).endswith(" dispatch`")
    assert machine_status(Spool(root)).next_dispatcher == outlook(root)
    monkeypatch.setattr(autostart, "unit_for", lambda root: "spool.service")
    assert "(spool.service)" in outlook(root)
    owner = os.stat(root).st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert "until its owner, " in outlook(root)
    monkeypatch.undo()
    (spool_root / "config.toml").write_text("autostart = false\n")
    assert "autostart is off" in outlook(root)


S = 1_000_000_000


@pytest.mark.parametrize("written", [True, False], ids=["an old record", "no record"])
def test_state_json_is_believed_before_the_record_while_a_dispatcher_lives(
    spool_root: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """`seff`, `show` and `ls` tell the last look, though the record is older; without a dispatcher that."""
    now = time.time_ns()
    old = GpuWatch.since(now - 20 * S, 1).looked(now - 18 * S, [GpuWork("x", 0, 1 << 20)], 60 * S)
    new = old.looked(now - 2 * S, [GpuWork("x", 80, 1 << 30)], 60 * S).looked(now, [GpuWork("x", 0, 1 << 30)], 60 * S)
    metadir = begin(spool_root, "x", f"{TRUE}gpus = 1\n", Grant(1, None, ("GPU-1",), (0,)), now - 20 * S)
    if written:
        (metadir / layout.GPUS).write_bytes(run_records.render_gpus(old))
    said = JobView(
        state="running", run=1, gpus=1, gpu_uuids=("GPU-1",), gpu_use=GpuUseView.of(new), gpu_idle_ns=new.idle_ns
    )
    serve(monkeypatch, spool_root, {"x": said}, at_ns=now)
    spool = Spool(str(spool_root))
    monkeypatch.setattr(MachineProber, "is_wrapper", lambda *_: True)  # this process stands for it
    view = parse_state((spool_root / layout.STATE).read_bytes())
    assert view is not None
    known = tuple(each.use() for each in view.jobs["x"].gpu_use)
    found = compare(spool, "x")
    assert isinstance(found, RunEfficiency)
    details = job_details(spool, "x").runs[-1]
    assert (found.used.record.gpu_use, details.record.gpu_use, details.gpu_idle_ns) == (known, known, 2 * S)
    assert list_jobs(spool).rows[0].gpu_percent == 0
    assert round(known[0].mean_percent or 0) == round(100 * (found.compared.gpu_efficiency or 0))
    monkeypatch.setattr(Spool, "service", lambda self: Service.NONE)
    assert job_details(spool, "x").runs[-1].record.gpu_use == (old.gpus if written else ())


# The values of an array's matrix or rows that a task has, from the file of its array and its index.

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
