"""Whose a GPU is, from one answer of NVML: by its processes, and by the memory that none of them accounts for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from spool.core.model import ForeignProcess, GpuWork
from spool.formats.config import GpuConfig
from spool.machine.gpus import QUIET_BYTES, DeviceUse, Ours, UseReader, in_pid_namespace, who
from spool.machine.nvml import Device

GIB = 1 << 30
NOBODY = Ours()
OUTSIDE = "in another pid namespace"


def device(
    used: int | None, processes: tuple[tuple[int, int | None], ...] | None = (), drawing: int | None = 0
) -> Device:
    """Make a GPU of which so much is used."""
    return Device("GPU-a", 0, "", "H100", 80 * GIB, None, used, processes, drawing)


def living(pid: int) -> tuple[str, str | None] | None:
    """Know the processes of the pids below 100."""
    return ("python", "alice") if pid < 100 else None


def pids(look: DeviceUse) -> list[tuple[int, int | None]]:
    """Return who is foreign, and with how much."""
    return [(process.pid, process.memory_bytes) for process in look.foreign]


def ours(**granted: int | None) -> Ours:
    """Make jobs that are on GPU-a; asking them for a pid is a mistake."""

    def job_of(pid: int) -> str | None:
        raise AssertionError(f"pid {pid} means nothing here")

    return Ours(job_of, {"GPU-a": granted})


@pytest.fixture
def reader() -> UseReader:
    """Make a reader inside a pid namespace; looking a pid up is a mistake there."""

    def who(pid: int) -> tuple[str, str | None] | None:
        raise AssertionError(f"pid {pid} means nothing here")

    return UseReader(pids_mean_something=False, who=who)


def test_memory_that_no_run_of_ours_can_hold_is_foreign(reader: UseReader) -> None:
    """Where no run of ours is, little is nobody's, as driver and display hold it; more is of a process out there.

    Its pid is 0, as the kernel says, or that of NVML's list, which cannot be looked up.
    """
    for look, foreign in (
        (device(QUIET_BYTES), ()),
        (device(21 * GIB), (ForeignProcess(0, OUTSIDE, 21 * GIB),)),
        (device(20 * GIB, ((4711, 20 * GIB),)), (ForeignProcess(4711, OUTSIDE, 20 * GIB),)),
    ):
        assert reader.read(look, NOBODY, NOBODY) == DeviceUse(foreign=foreign)


def test_where_our_run_is_nothing_is_foreign(reader: UseReader) -> None:
    """The processes on a GPU of ours are taken for ours: which they are cannot be told.

    So is the memory of a run that has just left: NVML was asked while it was there, and the next answer will tell.
    """
    run = ours(train=None)
    use = reader.read(device(70 * GIB, ((4711, 70 * GIB),)), run, run)
    assert (use.foreign, use.taken_bytes, use.problem) == ((), (("train", 70 * GIB),), None)
    assert reader.read(device(70 * GIB), NOBODY, run).foreign == ()


def test_what_others_held_before_is_not_counted_as_taken_by_ours(reader: UseReader) -> None:
    """The part that was used before our run came stays the others'."""
    reader.read(device(20 * GIB), NOBODY, NOBODY)
    run = ours(train=30 * GIB)
    assert reader.read(device(20 * GIB), run, run).taken_bytes == (("train", 0),)
    assert reader.read(device(32 * GIB), run, run).taken_bytes == (("train", 12 * GIB),)


def test_the_grants_that_are_not_taken_yet_come_out_right_in_sum(reader: UseReader) -> None:
    """Of two jobs it is not known which holds what; what is still to come of both together is."""
    runs = ours(one=30 * GIB, two=10 * GIB)
    taken = dict(reader.read(device(34 * GIB), runs, runs).taken_bytes)
    assert taken == {"one": 30 * GIB, "two": 4 * GIB}
    full = dict(reader.read(device(60 * GIB), runs, runs).taken_bytes)
    assert full == {"one": 30 * GIB, "two": 10 * GIB}


def test_without_processes_and_memory_whether_it_is_idle_is_unknown(reader: UseReader) -> None:
    """Unknown is not free: such a GPU has a problem. A driver that has no process list may tell by the memory."""
    assert reader.read(device(None, None), NOBODY, NOBODY).problem is not None
    assert reader.read(device(None, ()), NOBODY, NOBODY).problem is None
    use = UseReader().read(device(21 * GIB, None), NOBODY, NOBODY)
    assert use.foreign == (ForeignProcess(0, "unknown", 21 * GIB),)


@pytest.mark.parametrize("pids_mean_something", [True, False])
def test_memory_that_no_process_accounts_for_is_foreign_where_pids_tell_too(pids_mean_something: bool) -> None:
    """12 GiB in use and nobody listed is somebody that cannot be seen; a little is the driver's own.

    What only draws does not count, and its memory is nobody's secret. A notebook that is ignored for its little memory,
    the one rule of three that works without names, hides nobody behind it.
    """
    reader, notebook = UseReader(pids_mean_something=pids_mean_something, who=living), ((7, GIB // 2),)
    for look, foreign in (
        (device(12 * GIB), [(0, 12 * GIB)]),
        (device(QUIET_BYTES), []),
        (device(9 * GIB, drawing=GIB), [(0, 8 * GIB)]),
        (device(GIB, drawing=GIB), []),
        (device(GIB, drawing=None), []),
        (device(15 * GIB, ((7, 3 * GIB),)), [(7, 3 * GIB), (0, 12 * GIB)]),
    ):
        assert pids(reader.read(look, NOBODY, NOBODY)) == foreign
    picky = Ours(ignores=GpuConfig(ignore_below_bytes=GIB).ignores)
    for look, foreign in (
        (device(GIB - 1), []),
        (device(GIB), [(0, GIB)]),
        (device(GIB // 2, notebook), []),
        (device(12 * GIB, notebook), [(0, 12 * GIB - GIB // 2)]),
    ):
        assert pids(reader.read(look, picky, NOBODY)) == foreign


def test_memory_beside_a_run_of_ours_may_be_its_own() -> None:
    """Where a run is, or was when NVML was asked, what is left over is not called foreign; the next answer tells."""
    reader, run = UseReader(who=living), Ours(on={"GPU-a": {"train": None}})
    for now, asked in ((run, run), (Ours(), run)):
        assert reader.read(device(12 * GIB, ((4711, 12 * GIB),)), now, asked).foreign == ()
        assert pids(reader.read(device(12 * GIB, ((7, GIB),)), now, asked)) == [(7, GIB)]


def test_a_run_on_a_gpu_that_it_was_not_given_is_somebody() -> None:
    """A job that ignores CUDA_VISIBLE_DEVICES keeps the GPU from being given alone, and is named."""
    reader, on = UseReader(who=living), {"GPU-a": {"train": None}, "GPU-b": {"greedy": None}}
    jobs = {7: "train", 8: "greedy"}
    run = Ours(jobs.get, on)
    use = reader.read(device(3 * GIB, ((7, GIB), (8, 2 * GIB))), run, run)
    assert use.foreign == (ForeignProcess(8, "python", 2 * GIB, "alice", "greedy"),)
    assert use.taken_bytes == (("train", GIB),)


def test_a_listed_process_that_has_ended_is_judged_by_the_memory_alone() -> None:
    """Still in use: somebody holds it, at the first sight as at the tenth; free again: NVML is just late."""
    fresh, old = UseReader(who=living), UseReader(who=living)
    held, late = device(12 * GIB, ((4711, 12 * GIB),)), device(0, ((4711, 12 * GIB),))
    for _ in range(10):
        assert pids(old.read(held, NOBODY, NOBODY)) == [(4711, 12 * GIB)]
        assert old.read(late, NOBODY, NOBODY) == DeviceUse()
    assert fresh.read(held, NOBODY, NOBODY) == old.read(held, NOBODY, NOBODY)
    beside = device(3 * GIB, ((7, 3 * GIB), (4711, 12 * GIB)))
    assert pids(fresh.read(beside, NOBODY, NOBODY)) == [(7, 3 * GIB)]
    assert pids(fresh.read(device(None, ((4711, GIB),)), NOBODY, NOBODY)) == [(4711, GIB)]


def test_a_zombie_has_ended(tmp_path: Path) -> None:
    """A process that nobody has waited for holds nothing any more.

    The first pid namespace has a number that the kernel fixes; what cannot be read counts as another.
    """
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert who(child.pid) is None
    assert who(child.pid) is None
    for name, number in (("first", 4026531836), ("other", 4026532711)):
        (tmp_path / name / "self" / "ns").mkdir(parents=True)
        (tmp_path / name / "self" / "ns" / "pid").symlink_to(f"pid:[{number}]")
    assert not in_pid_namespace(proc=str(tmp_path / "first"))
    assert in_pid_namespace(proc=str(tmp_path / "other"))
    assert in_pid_namespace(proc=str(tmp_path / "absent"))


def reading(pids_of: dict[int, str], **granted: int | None) -> Ours:
    """Make jobs that are on GPU-a, and whose pids are known."""
    return Ours(pids_of.get, {"GPU-a": granted})


def working(
    *processes: tuple[int, int | None],
    percent: int | None = 60,
    computing: tuple[tuple[int, int], ...] | None = None,
    used: int = 0,
    **more: Any,
) -> Device:
    """Make a GPU that computes."""
    return replace(device(used, processes), utilisation_percent=percent, computing=computing, **more)


def test_the_figures_of_a_gpu_are_those_of_the_run_that_is_alone_there() -> None:
    """Its utilisation is the device's, its memory that of its processes, and a run without a process has none."""
    reader = UseReader(who=living)
    run = reading({1: "train", 2: "train"}, train=None)
    assert reader.read(working((1, 4 * GIB), (2, GIB)), run, run).work == (GpuWork("train", 60, 5 * GIB),)
    assert reader.read(working(percent=0), run, run).work == (GpuWork("train", 0, 0),)
    assert reader.read(working((1, None), used=9 * GIB), run, run).work == (GpuWork("train", 60, 9 * GIB),)
    assert reader.read(working(used=9 * GIB), run, run).work == (GpuWork("train", 60, 9 * GIB),)
    assert reader.read(working(used=QUIET_BYTES), run, run).work == (GpuWork("train", 60, 0),)


def test_runs_that_share_a_gpu_have_what_their_own_processes_do() -> None:
    """Where NVML tells it of each process; a run of which none computed did nothing.

    Where it does not, half of it is never guessed, and unknown is not 0.
    """
    reader = UseReader(who=living)
    runs = reading({1: "one", 2: "one", 3: "two"}, one=30 * GIB, two=10 * GIB, three=GIB)
    told = working((1, GIB), (2, GIB), (3, 3 * GIB), computing=((1, 30), (2, 25)))
    assert reader.read(told, runs, runs).work == (
        GpuWork("one", 55, 2 * GIB), GpuWork("three", 0, 0), GpuWork("two", 0, 3 * GIB),
    )  # fmt: skip
    use = reader.read(working((1, GIB), (3, None)), runs, runs)
    assert use.work == (GpuWork("one", None, GIB), GpuWork("three", None, 0), GpuWork("two", None, None))


def test_beside_a_stranger_the_figures_of_the_gpu_are_nobodys() -> None:
    """Also beside one that does not count, as an idle notebook: it may compute after all."""
    reader = UseReader(who=living)
    run = replace(reading({1: "train"}, train=None), ignores=GpuConfig(frozenset({"python"})).ignores)
    assert reader.read(working((1, GIB), (7, GIB)), run, run).work == (GpuWork("train", None, GIB),)
    told = working((1, GIB), (7, GIB), computing=((1, 20), (7, 40)))
    assert reader.read(told, run, run).work == (GpuWork("train", 20, GIB),)


def test_an_instance_tells_nothing_but_who_has_no_process_there_computes_nothing() -> None:
    """MIG: the utilisation of a run is unknown, and 0 while it has no process on the instance.

    The answer is of a time at which one that came or left since was not there, or not alone: it is not judged.
    """
    reader = UseReader(who=living)
    run = reading({1: "train"}, train=None)
    busy = working((1, GIB), percent=None, parent="GPU-p")
    assert reader.read(busy, run, run).work == (GpuWork("train", None, GIB),)
    assert reader.read(working(percent=None, parent="GPU-p"), run, run).work == (GpuWork("train", 0, 0),)
    one, two = reading({1: "one"}, one=None), reading({1: "one"}, two=None)
    assert reader.read(working((1, GIB)), one, two).work == ()
    assert reader.read(working((1, GIB)), one, NOBODY).work == ()


def test_in_a_pid_namespace_the_run_that_is_alone_has_the_figures(reader: UseReader) -> None:
    """What others held before it came is not its; of two runs nothing is known."""
    one, two = ours(one=None), ours(one=GIB, two=GIB)
    busy = replace(device(40 * GIB), utilisation_percent=60)
    assert reader.read(busy, one, one).work == (GpuWork("one", 60, 40 * GIB),)
    assert reader.read(busy, two, two).work == ()
    reader.read(device(10 * GIB), NOBODY, NOBODY)
    assert reader.read(busy, one, one).work == (GpuWork("one", None, 30 * GIB),)
