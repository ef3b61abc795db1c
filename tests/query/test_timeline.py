"""What ran when and where: the values of a timeline."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from spool.core.accounting import By, RunFilter
from spool.core.model import SECOND_NS as S
from spool.core.model import Grant, Machine, Result, State
from spool.formats.run_records import GrantRecord, render_grant, render_history
from spool.query import timeline as module
from spool.query.timeline import NO_GROUP, OTHERS, Frame, Timeline, TimelineUse, timeline
from spool.store.spool import Spool

T0 = 1_700_000_000 * S
GIB = 1 << 30
FRAME = Frame(columns=10, cpu_rows=8)


def ended(job: str, start: int | None, end: int, cpus: int = 1, **more: Any) -> Result:
    """Return a run from *start* to *end*, in seconds after T0, that had waited 5s."""
    began = None if start is None else T0 + start * S
    known: dict[str, Any] = {
        "run": 1,
        "attempt": 1,
        "outcome": State.FINISHED,
        "reason": "",
        "submitted_at_ns": T0 + ((end if start is None else start) - 5) * S,
        "user": "alice",
        "grant": Grant(cpus),
    }
    return Result(job=job, started_at_ns=began, ended_at_ns=T0 + end * S, **known | more)


def on_gpus(*indices: int, cpus: int = 1, memory_bytes: int | None = None) -> Grant:
    """Return these GPUs, all of each."""
    return Grant(cpus, memory_bytes, tuple(f"GPU-{index}" for index in indices), indices)


def drawn(
    root: Path,
    results: Iterable[Result],
    frame: Frame = FRAME,
    *,
    since: int | None = 0,
    until: int | None = 100,
    now: int = 1000,
    **whose: Any,
) -> Timeline:
    """Return the timeline of these runs on a machine without GPUs; instants in seconds after T0."""
    ordered = sorted(results, key=lambda each: each.ended_at_ns or 0)
    (root / "history.jsonl").write_bytes(b"".join(map(render_history, ordered)))
    period = [None if each is None else T0 + each * S for each in (since, until)]
    return timeline(Spool.open(str(root)), RunFilter(*period, **whose), frame, T0 + now * S)


def pictured(found: Timeline) -> dict[str, str]:
    """Return the rows as text: the first letter of the job in each column, capital where it is not alone."""
    rows = {}
    for row in (*found.gpu_rows, *found.cpu_rows):
        cells = ["."] * found.columns
        for bar in row.bars:
            cells[bar.first : bar.last] = [bar.run.job[0] if bar.alone else bar.run.job[0].upper()] * (
                bar.last - bar.first
            )
        rows[f"{row.label}/{row.track}" if row.track else row.label] = "".join(cells)
    return rows


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a machine of three CPUs and no GPU."""
    real = module.machine_now

    def three(*args: Any, **more: Any) -> Machine:
        return replace(real(*args, **more | {"with_gpus": False}), cpus=3, memory_bytes=8 * GIB)

    monkeypatch.setattr(module, "machine_now", three)


def test_runs_take_the_lowest_free_cpus_side_by_side(spool_root: Path) -> None:
    """A run of two CPUs has neighbouring rows; what is free again is taken first; more rows than CPUs if need be."""
    found = drawn(
        spool_root,
        [
            ended("a", 0, 40),
            ended("b", 10, 30),
            ended("c", 20, 100),
            ended("d", 30, 60, 2),  # of the three there were, only the second is free
            ended("e", 40, 80),
            ended("f", 80, 100, 2),
        ],
    )
    assert pictured(found) == {
        "CPU 1": "aaaaeeeeff",
        "CPU 2": ".bbddd..ff",
        "CPU 3": "..cccccccc",
        "CPU 4": "...ddd....",
    }


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 30), st.integers(0, 9)).map(
            lambda each: (each[0], each[0] + each[1], each[2])
        ),
        max_size=30,
    )
)
def test_no_cpu_is_given_twice(spans: list[tuple[int, int, int]]) -> None:
    """Runs that overlap have different lanes, each as many as it has CPUs."""
    runs = [_run(str(at), start, end, cpus) for at, (start, end, cpus) in enumerate(sorted(spans))]
    placed = list(module._placed(runs))
    assert [lanes.bit_count() for _, lanes in placed] == [run.grant.cpus for run in runs if run.grant.cpus]
    for (one, lanes), (other, others) in itertools.combinations(placed, 2):
        if (one.started_at_ns or 0) < (other.ended_at_ns or 0) and (other.started_at_ns or 0) < (one.ended_at_ns or 0):
            assert not lanes & others


def _run(job: str, start: int, end: int, cpus: int) -> Result:
    times = {"started_at_ns": T0 + start * S, "ended_at_ns": T0 + end * S}
    return Result(job, 1, 1, State.FINISHED, "", grant=Grant(cpus), **times)


def test_each_gpu_has_a_row_and_a_shared_one_several(spool_root: Path) -> None:
    """Rows are in the order of the GPUs; runs that share one are drawn below each other, and it counts once."""
    found = drawn(
        spool_root,
        [
            ended("a", 0, 50, grant=on_gpus(1, 0)),
            ended("b", 50, 100, grant=on_gpus(1)),
            ended("c", 60, 80, grant=on_gpus(1)),
        ],
    )
    rows = {name: row for name, row in pictured(found).items() if name.startswith("GPU")}
    assert rows == {"GPU 0": "aaaaa.....", "GPU 1": "aaaaabbbbb", "GPU 1/1": "......cc.."}
    assert found.gpus == 2
    assert found.gpus_used == TimelineUse(1.5, 2)


def test_gpus_of_the_same_index_are_told_apart(spool_root: Path) -> None:
    """A GPU that was replaced has its own row, with the begin of its UUID; one without an index has only that."""
    old = Grant(1, None, ("GPU-aaaaaaaa-1",), (0,))
    new = Grant(1, None, ("GPU-bbbbbbbb-1",), (0,))
    bare = Grant(1, None, ("MIG-x",), ())
    found = drawn(
        spool_root, [ended("a", 0, 10, grant=old), ended("b", 20, 30, grant=new), ended("c", 20, 30, grant=bare)]
    )
    assert [row.label for row in found.gpu_rows] == ["GPU 0 aaaaaaaa", "GPU 0 bbbbbbbb", "MIG-x"]


def test_what_is_in_use_is_a_mean_over_the_period(spool_root: Path) -> None:
    """It is cut at the edges of the period."""
    found = drawn(spool_root, [ended("a", -20, 15, 2), ended("b", 95, 200, 3)])
    assert (found.cpus, found.cpus_used) == (3, TimelineUse(0.45, 3))


def test_odd_lines_of_the_history_break_nothing(spool_root: Path) -> None:
    """What ended before it began is left out, and a line that is there twice counts once.

    A run that took no time at all by the clock is seen.
    """
    found = drawn(spool_root, [ended("a", 50, 20), ended("b", 20, 30, submitted_at_ns=T0 + 90 * S)], since=None)
    assert found.runs == 1
    assert pictured(drawn(spool_root, [ended("a", 55, 55)] * 2)) == {
        "CPU 1": ".....a....",
        "CPU 2": "." * 10,
        "CPU 3": "." * 10,
    }


def test_without_a_period_it_is_what_ran_in_the_last_day(spool_root: Path) -> None:
    """It begins when the first of the runs did, and ends when the last of them did."""
    runs = [ended("old", -100_000, -99_000), ended("a", 10, 20), ended("b", 30, 60)]
    found = drawn(spool_root, runs, since=None, until=None, now=5000)
    assert (found.since_at_ns, found.until_at_ns, found.runs) == (T0 + 10 * S, T0 + 60 * S, 2)
    found = drawn(spool_root, runs, since=None, until=40, now=5000)
    assert (found.since_at_ns, found.until_at_ns) == (T0 + 10 * S, T0 + 40 * S)


def test_whose_runs_are_drawn(spool_root: Path) -> None:
    """A user's, a project's, those with a tag."""
    runs = [
        ended("a", 0, 10),
        ended("b", 0, 10, user="bob", project="vision"),
        ended("c", 0, 10, user="bob", tags=("x", "y")),
    ]
    assert drawn(spool_root, runs, user="bob").runs == 2
    assert drawn(spool_root, runs, project="vision").runs == 1
    assert drawn(spool_root, runs, tag="y").runs == 1
    assert drawn(spool_root, runs, user="nobody").runs == 0


def test_the_largest_groups_have_a_name(spool_root: Path) -> None:
    """Six and the others; users where there are several, else how runs ended."""
    found = drawn(spool_root, [ended(f"j{at}", 0, 10 + 10 * at, user=f"u{at}") for at in range(9)])
    assert (found.by, found.groups) == (By.USER, ("u8", "u7", "u6", "u5", "u4", "u3", OTHERS))
    assert {found.group_of(bar.run) for row in found.cpu_rows for bar in row.bars} == set(found.groups)
    found = drawn(spool_root, [ended("a", 0, 10), ended("b", 0, 20, outcome=State.FAILED)])
    assert (found.by, found.groups) == (By.STATE, ("failed", "finished"))
    found = drawn(spool_root, [ended("a", 0, 10), ended("b", 0, 20, project="p")], Frame(10, 8, By.PROJECT))
    assert found.groups == ("p", NO_GROUP)


def test_many_cpus_share_rows(spool_root: Path) -> None:
    """A row of several CPUs shows who had most of it, and how much of it was in use."""
    found = drawn(spool_root, [ended("a", 0, 100, 12), ended("b", 0, 50, 4)], Frame(10, 4))
    assert [row.label for row in found.cpu_rows] == ["CPU 1-4", "CPU 5-8", "CPU 9-12", "CPU 13-16"]
    assert list(pictured(found).values()) == ["aaaaaaaaaa"] * 3 + ["bbbbb....."]
    found = drawn(spool_root, [ended("a", 0, 100, 1), ended("b", 0, 50, 4)], Frame(10, 1))
    assert [(bar.first, bar.last, bar.busy, bar.run.job, bar.alone) for bar in found.cpu_rows[0].bars] == [
        (0, 5, 1.0, "b", False),
        (5, 10, 0.25, "a", True),
    ]


def test_a_run_that_goes_on_is_drawn_up_to_now(spool_root: Path) -> None:
    """It is read from its records; what is in the history as well is drawn once."""
    for name in ("on", "over"):
        (spool_root / "running" / f"{name}.toml").write_text('command = "sleep 9"\n')
        metadir = Path(Spool.open(str(spool_root)).layout.metadir(name, 1))
        metadir.mkdir(parents=True)
        (metadir / "job.toml").write_text('command = "sleep 9"\n')
        record = GrantRecord(
            job=name, run=1, grant=on_gpus(0, cpus=2), user="alice", submitted_at_ns=T0, granted_at_ns=T0 + 50 * S
        )
        (metadir / "grant.toml").write_bytes(render_grant(record))
    found = drawn(spool_root, [ended("over", 50, 60)], until=None, now=100)
    assert (found.runs, found.going_on) == (2, 1)
    assert pictured(found)["CPU 1"] == ".....ooooo"
    assert found.cpus_used == TimelineUse(1.1, 3)


def test_what_runs_in_slurm_takes_nothing_of_the_machine_that_is_drawn(spool_root: Path) -> None:
    """It is counted, and is in no row and no group."""
    far = ended("far", 0, 50, cpus=64, executor="slurm", user="bob", grant=Grant(64, 1 << 40, gpus_elsewhere=4))
    going = ended("near", 50, 100, executor="process")
    found = drawn(spool_root, [far, going])
    assert (found.runs, found.elsewhere, found.gpus) == (2, {"slurm": 1}, 0)
    assert {run.run.job for row in found.cpu_rows for run in row.bars} == {"near"}
    assert (found.cpus_used.highest, found.gpus_used.highest) == (1, 0)
    assert found.groups == ("alice",)
