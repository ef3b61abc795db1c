"""What of the machine a decision is made of, and what a sized job can have of it."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from plugins.fake_nvml import FakeNvml
from spool.core.model import (
    FIRST_BYTES,
    SECOND_NS,
    Gpu,
    GpuUse,
    Grant,
    Machine,
    Policy,
    Request,
    Result,
    Running,
    Spec,
    State,
    Waiting,
)
from spool.core.priority import Past
from spool.core.sizes import Sizes
from spool.machine.gpus import NO_ANSWER, GpuWatcher
from spool.state.past import Sizing
from spool.state.table import SchedulerState
from spool.state.world import MachineMonitor
from spool.store.edited import Settings
from spool.store.spool import Spool
from support import PATIENCE_S, make_spool, wait_for

GIB = 1 << 30
MACHINE = Machine(4, 8 * GIB, 3 * GIB, disk_free_bytes=50 * GIB)
ALONE, SHARE = Grant(gpu_uuids=("GPU-a",)), Grant(gpu_uuids=("GPU-a",), gpu_memory_bytes=GIB)
NOW = time.time_ns()


@pytest.fixture
def table() -> SchedulerState:
    """Give what is known of the jobs of that spool: nothing yet."""
    return SchedulerState()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Give the configuration of an empty spool."""
    return Settings(str(make_spool(tmp_path / "spool")))


@pytest.fixture
def world(table: SchedulerState, settings: Settings, tmp_path: Path) -> MachineMonitor:
    """Give the world of an empty spool, whose disk is short below 1 GiB."""
    return MachineMonitor(Spool(str(tmp_path / "spool")), table, settings)


def test_what_is_free_counts_where_it_decides(world: MachineMonitor, table: SchedulerState) -> None:
    """Below the floor of the disk another number is another machine; free memory once a job waits that asks for it."""
    short, shorter = replace(MACHINE, disk_free_bytes=GIB // 2), replace(MACHINE, disk_free_bytes=GIB // 4)
    assert len({world.what_counts(each) for each in (MACHINE, short, shorter)}) == 3
    spec = Spec(command="true", request=Request(memory_bytes=4 * GIB))
    table.queue.put(Waiting("a", spec, "alice", 0))
    other = replace(MACHINE, memory_available_bytes=5 * GIB)
    assert world.what_counts(MACHINE) != world.what_counts(other)


# Whether another value of a field alone makes another decision, and so another plan.
OF_THE_MACHINE = {
    "cpus": True, "memory_bytes": True, "memory_available_bytes": False, "gpus": True, "gpu_problem": True,
    "disk_free_bytes": False, "refusal": True, "resources": True, "most_runs": True, "no_leases": True,
    "most_pending": True, "title": True, "cores": True, "gpus_unused": True,
}  # fmt: skip
OF_A_GPU = {
    "uuid": True, "index": True, "name": True, "memory_total_bytes": True, "memory_free_bytes": True, "foreign": True,
    "problem": True, "taken_bytes": True, "mig": True, "utilisation_percent": False, "work": False, "vendor": True,
    "memory_utilisation_percent": False, "temperature_c": False, "power_w": False, "node": True, "links": True,
}  # fmt: skip


def test_each_fact_of_the_machine_is_said_to_count_or_not(world: MachineMonitor) -> None:
    """A number that changes all the time makes no new plan with every look: each field is in a table above."""
    gpu = Gpu("GPU-a", 0, "H100", GIB, GIB)
    before = replace(MACHINE, gpus=(gpu,))
    other = {name: replace(before, **{name: 77 * GIB}) for name in Machine.__struct_fields__}
    other["gpus"] = replace(before, gpus=())
    cards = {name: replace(gpu, **{name: 77 * GIB}) for name in Gpu.__struct_fields__}
    others = {name: replace(before, gpus=(card,)) for name, card in cards.items()}
    for changed, table in ((other, OF_THE_MACHINE), (others, OF_A_GPU)):
        found = {name: world.what_counts(before) != world.what_counts(after) for name, after in changed.items()}
        assert found == table


# Starts on GPUs. A spool whose answers stay good for an hour, so that what is asked again is asked for a start.


@pytest.fixture
def watched(
    table: SchedulerState, settings: Settings, tmp_path: Path, own_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MachineMonitor]:
    """Give a world with one GPU that somebody asks about."""
    own_nvml.gpu("GPU-a")
    monkeypatch.setattr(GpuWatcher, "every_ns", 3600 * 10**9)
    world = MachineMonitor(Spool(str(tmp_path / "spool")), table, settings, with_gpus=True)
    yield world
    world.close()


def answer(world: MachineMonitor) -> Machine:
    """Do what the dispatcher does when NVML's answer wakes it, or when it was there at once."""
    assert world.gpus is not None
    if world.gpus.asked > world.gpus.answered:
        assert select.select([world.gpus.fileno()], [], [], PATIENCE_S)[0]
        world.take_gpu_answer()
    return world.machine(NOW)


def may_start(world: MachineMonitor, *grants: Grant) -> list[bool]:
    """Return which of these grants may start now."""
    return [world.may_start_on(grant) for grant in grants]


@pytest.fixture
def answered(watched: MachineMonitor) -> MachineMonitor:
    """Give that world once NVML has answered."""
    watched.machine(NOW)
    answer(watched)
    return watched


def test_an_answer_is_good_for_the_starts_of_one_pass(watched: MachineMonitor, fake_nvml: FakeNvml) -> None:
    """The pass that sees it may start on it; the next asks again, and a grant without GPUs asks nobody."""
    assert watched.machine(NOW).gpu_problem == NO_ANSWER
    assert may_start(watched, ALONE, Grant()) == [False, True]
    answer(watched)
    assert may_start(watched, ALONE, SHARE) == [True, True]
    watched.machine(NOW)
    assert may_start(watched, ALONE, SHARE) == [False, False]
    fake_nvml.hang("nvmlDeviceGetMemoryInfo_v2")
    watched.ask_gpus_again(NOW)
    watched.machine(NOW)
    assert not watched.may_start_on(ALONE)
    fake_nvml.mend()
    answer(watched)
    assert watched.may_start_on(ALONE)


def test_an_answer_that_comes_at_once_is_seen_at_once(answered: MachineMonitor) -> None:
    """It makes no descriptor readable, so that the next pass is due without."""
    answered.ask_gpus_again(NOW)
    answered._look_at_gpus(NOW, 30 * SECOND_NS)
    assert answered.answer_due_ns() == 0
    answered.machine(NOW)
    assert answered.may_start_on(ALONE)
    assert answered.answer_due_ns() is None


def test_a_question_is_asked_once_however_many_passes_wait(answered: MachineMonitor, fake_nvml: FakeNvml) -> None:
    """Passes that come while the answer is awaited ask nothing more: no start makes a busy loop."""
    fake_nvml.hang("nvmlDeviceGetMemoryInfo_v2")
    for _ in range(20):
        answered.ask_gpus_again(NOW)
        answered.machine(NOW)
    fake_nvml.mend()
    answer(answered)
    assert answered.gpus is not None
    assert answered.gpus.asked == answered.gpus.answered == 2


def test_a_question_that_was_open_before_does_not_count(answered: MachineMonitor, fake_nvml: FakeNvml) -> None:
    """NVML may have answered it in part already; the start waits for the one after."""
    fake_nvml.hang("nvmlDeviceGetMemoryInfo_v2")
    answered.machine(NOW + 2 * 3600 * SECOND_NS)
    answered.ask_gpus_again(NOW)
    fake_nvml.mend()
    assert answered.gpus is not None
    while answered.gpus.answered < 3:  # the second was open, the third is the start's own
        assert not answered.may_start_on(ALONE)
        answer(answered)
    assert answered.may_start_on(ALONE)


def test_gpus_are_unknown_while_a_start_waits_too_long_for_its_answer(
    watched: MachineMonitor, fake_nvml: FakeNvml
) -> None:
    """After a moment the start keeps its room from nobody any more, and why is said until the answer comes."""
    watched.machine(NOW)
    before = answer(watched)
    fake_nvml.hang("nvmlDeviceGetMemoryInfo_v2")
    assert watched.answer_due_ns() is None
    watched.ask_gpus_again(NOW)
    assert watched.answer_due_ns() is not None
    late = wait_for(lambda: (seen := watched.machine(NOW)).gpu_problem and seen)
    assert late.gpu_problem == NO_ANSWER
    assert watched.answer_due_ns() is None  # nothing more to wake for
    assert watched.gpus_at_ns is not None
    fake_nvml.mend()
    assert answer(watched).gpus == before.gpus
    assert watched.may_start_on(ALONE)


def test_what_was_asked_while_a_run_was_there_clears_no_gpu_for_one_alone(
    watched: MachineMonitor, table: SchedulerState
) -> None:
    """What such an answer shows besides may be the run's; a share needs no more than the memory that is free."""
    table.runs.put(Running("before", 1, "alice", Spec(command="true"), ALONE, NOW))
    watched.machine(NOW)
    table.runs.remove("before")  # though its paperwork is not done
    answer(watched)
    assert may_start(watched, ALONE, SHARE) == [False, True]
    watched.ask_gpus_again(NOW)
    answer(watched)
    assert watched.may_start_on(ALONE)


def test_nobody_is_asked_while_no_gpu_matters(world: MachineMonitor, fake_nvml: FakeNvml) -> None:
    """A spool without GPU jobs has no process that asks NVML, whatever it looks at."""
    world.machine(NOW)
    world.ask_gpus_again(NOW)
    assert (world.gpus, world.answer_due_ns(), world.gpus_at_ns, fake_nvml.calls()) == (None, None, None, [])


def test_where_things_are_is_asked_only_on_a_spool_that_pins(
    watched: MachineMonitor, settings: Settings, fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    """With `cpu_pinning` the machine has its cores and each GPU its node, from the next look on; else neither."""
    fake_nvml.near("GPU-a", 3)
    watched.machine(NOW)
    before = answer(watched)
    assert (before.cores, before.gpus[0].node) == ((), None)
    (tmp_path / "spool" / "config.toml").write_text("cpu_pinning = true\ncpus = 4096\n")
    settings.reload()
    watched.configuration_changed()
    watched.ask_gpus_again(NOW)
    after = answer(watched)
    assert after.gpus[0].node == 3
    assert after.cpus == sum(len(core.cpus) for core in after.cores) == len(os.sched_getaffinity(0))
    assert (watched.why_not_pinned(is_shared=False) or "").startswith("cpus = 4096 counts as ")
    assert "machine.toml" in (watched.why_not_pinned(is_shared=True) or "")


@pytest.mark.parametrize(("gpus", "shares"), [(1, True), (2, False)])
def test_what_not_so_many_gpus_have_is_asked_of_whole_ones(gpus: int, shares: bool) -> None:
    """A peak on the one large GPU does not make a request that no two GPUs can serve."""
    request = Request(gpus=gpus, gpu_memory_auto=True, memory_bytes=FIRST_BYTES)
    use = (GpuUse(peak_memory_bytes=50 * GIB),)
    sizes = Sizes()
    grant = Grant(1, FIRST_BYTES)
    sizes.add("alice", Result("a", 1, 1, State.FINISHED, "", 1, 2, 3, gpu_use=use, request=request, grant=grant))
    sizing = Sizing(lambda name: None)
    cards = [Gpu(f"GPU-{index}", index, "A", size * GIB, size * GIB) for index, size in enumerate((80, 40, 40))]
    sizing.fit(Machine(4, 64 * GIB, 64 * GIB, gpus=tuple(cards)), Policy())
    past = Past(Policy())
    past.sizes = sizes
    found = sizing.of(Waiting("a", Spec("true", request=request), "alice", 0), past)
    assert found is not None
    assert (found.request.gpu_memory_bytes is not None) is shares
    assert ("whole GPUs" in found.why) is not shares
