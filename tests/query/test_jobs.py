"""Lists of jobs: a glance finds what a close look does, each view has the same numbers, and a move hides no job."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from calling import put_job
from cli.records import TRUE, begin, end, expand, metadir_of, serve, view
from filled import filled
from spool.client import autostart
from spool.client.autostart import outlook
from spool.client.submit import make_spool
from spool.client.waiting import Waiter
from spool.core import layout
from spool.core.arrays import Tasks
from spool.core.errors import SpoolUnusable
from spool.core.gpuuse import GpuWatch
from spool.core.model import SECOND_NS, GpuWork, Grant, Request, Result, Spec, State, Stop, StopKind, Suspension
from spool.formats import jobfile, run_records
from spool.formats.run_records import ArrayRecord, GrantRecord, render_history, render_stop
from spool.formats.state import GpuUseView, JobView, MachineView, StateView, parse_state, render_state
from spool.machine import identity
from spool.machine.processes import MachineProber
from spool.query.details import RunEfficiency, compare, job_details
from spool.query.explain import why
from spool.query.jobs import JobLister, counts, list_jobs
from spool.query.machine import machine_status
from spool.query.overview import OverviewReader
from spool.query.rows import JobFilter, JobList, JobRow, Parameters, row_of_result, tasks_in, with_parameters
from spool.query.selection import picked
from spool.query.shared import UserShare
from spool.state.run import ActiveRun, Attempts, JobEntry, JobFileVersion, QueueTime
from spool.state.table import new_array
from spool.store.lock import Lock
from spool.store.spool import Service, Spool
from spool.store.tolerant import TolerantSpool
from views import BOB, Arbiter


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


_OF_A_RUN = {"run", "started_at_ns", "suspended_ns", "suspended_at_ns", "engine", "node", "cpu_list"}
_ON_GPUS = {"gpu_uuids", "gpu_use", "gpu_idle_ns"}
_OF_AN_END = {"ended_at_ns", "exit_code", "gpu_percent"}
_ADDED = {"place", "progress", "progress_at_ns", "parameters", "metrics", "left", "start", "beside"}
# For each source of rows, the fields that it does not know, or that its caller adds.
LEFT_OUT = {
    "file": _ADDED | _ON_GPUS | _OF_A_RUN | _OF_AN_END | {"array"},
    "run": _ADDED | _OF_AN_END | {"array", "node"},  # its handle knows the node
    "array": _ADDED | _ON_GPUS | _OF_AN_END | _OF_A_RUN - {"run", "started_at_ns"} | {"problem"},
    "result": _ADDED | _ON_GPUS | {"priority", "suspended_at_ns", "array", "time_limit_ns", "engine", "problem"},
}


def _row_of(source: str) -> JobRow:
    """Return the row of a job of which that source knows everything."""
    if source == "result":
        return row_of_result(filled(Result))
    if source == "array":
        return JobRow(**new_array(filled(Spec), filled(ArrayRecord)).row(State.HELD, "why"))
    if source == "file":
        file = JobFileVersion(1, 1, 1, 1, 0, filled(Spec))
        job = JobEntry("x", queued=file, wait=filled(QueueTime), attempts=filled(Attempts))
        return JobRow(**job.row(file, "why", problem="unreadable"))
    run = ActiveRun.of_records(filled(GrantRecord), filled(Spec), granted_at_ns=2, stop=None, inode=1)
    run = replace(run, begun_at_ns=3, gpu_watch=filled(GpuWatch), suspension=filled(Suspension))
    return JobRow(**run.row(State.RUNNING, "why", problem="unreadable"))


@pytest.mark.parametrize("source", LEFT_OUT)
def test_each_source_of_rows_fills_each_field(source: str) -> None:
    """What a list has of a job that waits, it has of a run, an array, and one that has ended, if that knows it."""
    row, empty = _row_of(source), JobRow(state=State.INVALID)
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


# Lists that are made while files move: each job is in one once, as what it was before or after the move.


_CALLS = ("listdir", "lstat", "stat", "open", "scandir")


class Job:
    """One job in a spool of its own, that can be moved on as a dispatcher does it."""

    def __init__(self, root: Path, place: str, *, ended: bool) -> None:
        make_spool(str(root))
        self.root = root
        self._path(place).write_text('command = "true"\n')
        if place == layout.RUNNING:
            self._starts(ended=ended)
        if place == layout.DONE:
            self._starts(ended=True)
            self._recorded()

    def _path(self, place: str) -> Path:
        return self.root / place / "x.toml"

    def _record(self, name: str) -> Path:
        path = self.root / "jobs" / "x" / "1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _starts(self, *, ended: bool) -> None:
        file = [path for place in layout.PLACES if (path := self._path(place)).exists()]
        inode = file[0].stat().st_ino
        grant = run_records.GrantRecord("x", 1, grant=Grant(1), granted_at_ns=time.time_ns(), inode=inode, user="me")
        self._record(layout.SPEC_COPY).write_text('command = "true"\n')
        self._record(layout.GRANT).write_bytes(run_records.render_grant(grant))
        jid = identity.of_process(os.getpid())
        self._record(layout.JID).write_bytes(run_records.render_jid(replace(jid, start_ticks=1) if ended else jid))
        if ended:
            self._record(layout.RC).write_text("0\n")

    def _recorded(self) -> None:
        now = time.time_ns()
        ended = Result("x", 1, 1, State.FINISHED, "exit code 0", now, now, now, 0, request=Request(), grant=Grant(1))
        end(self.root, ended)

    def move(self, old: str, new: str) -> None:
        """Do what a dispatcher does, or a user, when the job goes from one directory to another."""
        if new == layout.RUNNING:
            self._starts(ended=False)
        if new == layout.DONE:
            self._recorded()
        os.rename(self._path(old), self._path(new))

    def serve(self, state: str | None) -> None:
        """Have a dispatcher that said *state* of the job last."""
        jobs = {} if state is None else {"x": JobView(state=state, run=1 if state != "queued" else None, user="me")}
        view(self.root, jobs)


def at_each_call(monkeypatch: pytest.MonkeyPatch, look: Callable[[], Any], make: Callable[[], Job]) -> Iterator[Any]:
    """Yield what *look* returns if a job moves before the first call of the file system, the second, and so on."""
    real = {name: getattr(os, name) for name in _CALLS}
    for cut in itertools.count():
        job = make()
        left = [cut]

        def called(name: str, left: list[int] = left, job: Any = job) -> Callable[..., Any]:
            def call(*given: Any, **named: Any) -> Any:
                left[0] -= 1
                if left[0] == -1:
                    for other in _CALLS:
                        monkeypatch.setattr(os, other, real[other])
                    job.then()
                return real[name](*given, **named)

            return call

        for name in _CALLS:
            monkeypatch.setattr(os, name, called(name))
        try:
            found = look(job.root)  # type: ignore[call-arg]
        finally:
            for name in _CALLS:
                monkeypatch.setattr(os, name, real[name])
        if left[0] >= 0:
            assert cut > 3, "nothing was read"
            return
        yield found


MOVES = [
    (layout.QUEUED, layout.RUNNING, "queued", {"queued", "running"}),
    (layout.HELD, layout.QUEUED, "held", {"held", "queued"}),
    (layout.QUEUED, layout.HELD, "queued", {"held", "queued"}),
    (layout.RUNNING, layout.DONE, "running", {"running", "stopping", "finished"}),
    (layout.RUNNING, layout.DONE, "stopping", {"stopping", "finished"}),
    (layout.DONE, layout.QUEUED, None, {"finished", "queued"}),
]


@pytest.mark.parametrize(("old", "new", "said", "states"), MOVES)
@pytest.mark.parametrize("served", [True, False], ids=["served", "alone"])
@pytest.mark.parametrize("how", ["ls", "ls NAME"])
def test_a_job_that_moves_is_listed_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    old: str,
    new: str,
    said: str | None,
    states: set[str],
    served: bool,
    how: str,
) -> None:
    """Whatever call of the file system comes after the move, the job is in the list once, in a state that it had."""
    numbers = itertools.count()
    monkeypatch.setattr(MachineProber, "has_left_processes", lambda *_: False)  # a look at each process of the machine
    monkeypatch.setattr(MachineProber, "is_wrapper", lambda *_: True)  # this process stands for it
    monkeypatch.setattr(Spool, "service", lambda self: Service.SERVED if served else Service.NONE)

    def make() -> Job:
        job = Job(tmp_path / str(next(numbers)), old, ended=said == "stopping")
        if served:
            job.serve(said)
        job.then = lambda: job.move(old, new)  # type: ignore[attr-defined]
        return job

    def look(root: Path) -> list[tuple[str, str]]:
        spool, wanted = Spool(str(root)), JobFilter(names=("x",))
        found: JobList = list_jobs(spool, wanted) if how == "ls NAME" else JobLister(spool).listing()
        return [(row.name, row.state.value) for row in found.rows]

    for rows in at_each_call(monkeypatch, look, make):  # type: ignore[arg-type]
        if how == "ls" and (old, new) == (layout.DONE, layout.QUEUED):
            assert len(rows) <= 1  # what has ended is read last, and a name that was asked for is looked for again
            continue
        assert [name for name, _ in rows] == ["x"], rows
        assert rows[0][1] in states, rows


def test_a_dispatcher_that_stands_still_lists_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has ended, and that a stopped dispatcher has not recorded, is one row and one awaited job."""
    monkeypatch.setattr(Spool, "service", lambda self: Service.SERVED)
    job = Job(tmp_path / "s", layout.RUNNING, ended=True)
    for said in ("running", "stopping", None):
        job.serve(said)
        rows = JobLister(Spool(str(job.root))).listing().rows
        assert [(row.name, row.state) for row in rows] == [("x", State.STOPPING)]
        assert "a dispatcher will record it" not in rows[0].reason
        assert picked(Spool(str(job.root)), JobFilter(states=frozenset({State.STOPPING})), layout.PLACES)[0] == ["x"]
        assert Waiter(Spool(str(job.root)), ("x",)).poll() == []


# What a screen that stays open reads: anew only where something has changed.


def test_nothing_is_read_anew_while_nothing_changes(spool_root: Path) -> None:
    """The second look is None; a file that comes, the pause and ten seconds are each a reason to look."""
    reader = OverviewReader(str(spool_root))
    now = time.time_ns()
    first = reader.look(now)
    assert first.active == ()
    assert reader.look(now + SECOND_NS) is None
    put_job(spool_root, "one")
    second = reader.look(now + 2 * SECOND_NS)
    assert [row.name for row in second.active] == ["one"]
    assert second.found.unserved
    (spool_root / "paused").touch()
    third = reader.look(now + 3 * SECOND_NS)
    assert third.found.paused
    assert reader.look(now + 12 * SECOND_NS) is None
    assert reader.look(now + 13 * SECOND_NS) is not None


def test_a_dispatcher_that_went_is_noticed_though_no_file_changed(spool_root: Path) -> None:
    """The lock is asked at every look: what state.json says of the machine counts only while its writer lives."""
    lock = Lock(str(spool_root / ".lock"))
    now = time.time_ns()
    machine = MachineView(cpus=8, cpus_free=3, memory_bytes=1 << 30, memory_free_bytes=0, gpus_at_ns=now)
    (spool_root / "state.json").write_bytes(render_state(StateView(version=1, at_ns=now, pid=1, machine=machine)))
    reader = OverviewReader(str(spool_root))
    seen = reader.look(now)
    assert seen.machine is not None
    assert seen.machine.cpus_free == 3
    assert reader.look(now + 1) is None
    lock.release()
    seen = reader.look(now + 2)
    assert seen.machine is None
    assert not seen.found.dispatcher


def test_a_spool_that_is_gone_is_an_error_and_may_come_back(spool_root: Path) -> None:
    """A look at a spool that was moved away raises; once it is there again, it is read."""
    put_job(spool_root, "one")
    reader = OverviewReader(str(spool_root))
    assert reader.look(time.time_ns()) is not None
    spool_root.rename(spool_root.with_name("elsewhere"))
    with pytest.raises(SpoolUnusable):
        reader.look(time.time_ns())
    spool_root.with_name("elsewhere").rename(spool_root)
    put_job(spool_root, "two", place="held")
    seen = reader.look(time.time_ns())
    assert (seen.count(State.QUEUED), seen.count(State.HELD), seen.count(State.QUEUED, State.HELD)) == (1, 1, 2)


def test_what_other_users_have_is_news_and_the_time_is_none(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another lease is a reason to look; that the arbiter renews its file is none, until it no longer does."""
    arbiter = Arbiter(spool_root, monkeypatch)
    arbiter.says(BOB)
    now = time.time_ns()
    reader = OverviewReader(str(spool_root))
    assert [share.user for share in reader.look(now).shared.use.others] == ["bob"]
    arbiter.says(BOB, written_at_ns=2)
    assert reader.look(now + SECOND_NS) is None
    arbiter.says(BOB, UserShare(user="carol", asks=1))
    assert reader.look(now + 2 * SECOND_NS).problems == ()
    arbiter.says(problem="the arbiter has not answered for 6s")
    assert " 6s;" in reader.look(now + 3 * SECOND_NS).problems[0]
