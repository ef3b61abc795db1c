"""GPUs of AMD, over a library whose GPUs the test makes: alone on a machine, and beside NVIDIA's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping

import pytest

from plugins.fake_nvml import FakeNvml
from plugins.fake_rocm import FakeRocm
from spool.core.model import SECOND_NS, Gpu
from spool.machine.gpus import GpuLook, GpuWatcher, Ours, UseReader
from spool.machine.nvml import Sample
from support import ROOT

GIB = 1 << 30
LONG_NS = 30 * SECOND_NS
Look = Callable[..., GpuLook]


@pytest.fixture
def look() -> Iterator[Callable[..., GpuLook]]:
    """Look at the GPUs that these variables lead to, each time afresh."""
    made: list[GpuWatcher] = []

    def at(variables: Mapping[str, str], ours: Ours | None = None) -> GpuLook:
        reader = UseReader(pids_mean_something=True, who=lambda pid: ("python", "alice"))
        watcher = GpuWatcher(environment={**os.environ, **variables}, limit_ns=LONG_NS, uses=reader)
        made.append(watcher)
        return watcher.look(SECOND_NS, ours, patience_ns=LONG_NS)

    yield at
    for watcher in made:
        watcher.close()


def test_a_machine_with_gpus_of_amd_alone(fake_rocm: FakeRocm, look: Look) -> None:
    """They are known by their unique ID, with their memory, work and users."""
    fake_rocm.gpu(0x5C88007EC5AB4DDB, bus=0x31, used=3 * GIB, busy=70)
    fake_rocm.gpu(0x9, bus=0x11, name="AMD Instinct MI300X", total=192 * GIB)
    fake_rocm.process(4711, 0, 2 * GIB)
    ours = Ours(lambda pid: "train" if pid == 4711 else None, {"GPU-5c88007ec5ab4ddb": {"train": None}})
    second, first = look(fake_rocm.variables, ours).gpus
    assert (first.uuid, first.index, first.name) == ("GPU-5c88007ec5ab4ddb", 0, "AMD Instinct MI210")
    assert (first.memory_total_bytes, first.memory_free_bytes) == (64 * GIB, 61 * GIB)
    assert (first.utilisation_percent, first.taken_bytes) == (70, (("train", 2 * GIB),))
    assert (second.uuid, second.index, second.name) == ("GPU-0000000000000009", 1, "AMD Instinct MI300X")
    assert (first.vendor, second.foreign, second.problem) == ("AMD", (), None)


def test_both_vendors_in_one_machine(fake_rocm: FakeRocm, fake_nvml: FakeNvml, look: Look) -> None:
    """The indices of AMD's follow NVIDIA's; the order is that of the bus; foreign processes count on both."""
    fake_nvml.gpu("GPU-11111111-1111-1111-1111-111111111111", bus=5)
    fake_rocm.gpu(0xA, bus=1)
    fake_rocm.process(77, 0)
    found = look({**fake_nvml.variables, **fake_rocm.variables})
    assert [(gpu.vendor, gpu.index) for gpu in found.gpus] == [("AMD", 1), ("NVIDIA", 0)]
    assert [process.pid for process in found.gpus[0].foreign] == [77]
    assert found.driver == "999.1"


@pytest.mark.parametrize(
    ("numbers", "why"),
    [((0, 0xB), "GPU 0: it has no unique ID"), ((0xC, 0xC, 0xB), "it is a part of a GPU: others have its ID")],
)
def test_a_gpu_that_no_variable_can_name_is_not_there(
    fake_rocm: FakeRocm, look: Look, numbers: tuple[int, ...], why: str
) -> None:
    """One without an ID, and the parts of a split one, which share it: a note says so, and the others are given."""
    for bus, number in enumerate(numbers):
        fake_rocm.gpu(number, bus=bus)
    found = look(fake_rocm.variables)
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-000000000000000b"]
    assert why in found.notes[0]
    words = [sys.executable, "-m", "spool.machine.amd"]
    environment = {**fake_rocm.environment, "PYTHONPATH": str(ROOT / "src")}
    told = subprocess.run(words, input=b"\n", capture_output=True, check=True, env=environment).stdout
    assert not Sample.from_json(told).leaving  # it is no fault that another start would mend


@pytest.mark.parametrize(("code", "gpu"), [(2, Gpu("GPU-000000000000000a", 0, "AMD Instinct MI210", 64 * GIB, None))])
def test_what_the_library_withholds_is_unknown(fake_rocm: FakeRocm, look: Look, code: int, gpu: Gpu) -> None:
    """A value that a card or a container does not give is None, and no problem."""
    fake_rocm.gpu(0xA)
    for call in ("rsmi_dev_memory_usage_get", "rsmi_dev_busy_percent_get", "rsmi_dev_energy_count_get"):
        fake_rocm.error(call, code)
    found = look(fake_rocm.variables)
    assert found.gpus == (gpu,)


def test_an_error_of_one_gpu_is_its_problem_and_a_failure_that_of_all(fake_rocm: FakeRocm, look: Look) -> None:
    """Unknown is not free, where no GPU of NVIDIA is there either."""
    fake_rocm.gpu(0xA)
    fake_rocm.gpu(0xB, bus=1)
    fake_rocm.error("rsmi_dev_memory_usage_get", 6, 1)
    found = look(fake_rocm.variables)
    assert [gpu.problem for gpu in found.gpus] == [None, "rsmi_dev_memory_usage_get: RSMI_STATUS number 6"]
    fake_rocm.error("rsmi_init", 8)
    assert look(fake_rocm.variables).problem == "ROCm SMI: RSMI_STATUS number 8"


@pytest.fixture
def watch() -> Iterator[Callable[..., GpuLook]]:
    """Look at the GPUs that these variables lead to, again and again with one watcher."""
    made: list[GpuWatcher] = []

    def at(variables: Mapping[str, str]) -> GpuLook:
        if not made:
            uses = UseReader(pids_mean_something=True, who=lambda pid: None)
            made.append(GpuWatcher(environment={**os.environ, **variables}, limit_ns=LONG_NS, uses=uses))
        return made[0].look(SECOND_NS, max_age_ns=0, patience_ns=LONG_NS)

    yield at
    for watcher in made:
        watcher.close()


@pytest.mark.parametrize("broken", ["AMD", "NVIDIA"])
def test_one_vendors_trouble_is_its_own(fake_rocm: FakeRocm, fake_nvml: FakeNvml, watch: Look, broken: str) -> None:
    """While one library fails, its GPUs have that problem, and the other's are given as ever; both come back."""
    both = {**fake_nvml.variables, **fake_rocm.variables}
    fake_nvml.gpu("GPU-11111111-1111-1111-1111-111111111111")
    fake_rocm.gpu(0xA, bus=1)
    assert [gpu.problem for gpu in watch(both).gpus] == [None, None]
    if broken == "AMD":
        fake_rocm.error("rsmi_num_monitor_devices", 6)
    else:
        fake_nvml.error("nvmlDeviceGetCount_v2", 999)
    found = watch(both)
    assert found.problem is None
    said = {gpu.vendor: gpu.problem for gpu in found.gpus}
    why = said.pop(broken)
    assert why.startswith("ROCm SMI: " if broken == "AMD" else "NVML: ")
    assert list(said.values()) == [None]
    fake_rocm.forget("error")
    fake_nvml.mend()
    assert [gpu.problem for gpu in watch(both).gpus] == [None, None]


def test_a_library_of_rocm_that_cannot_start_hides_no_card_of_nvidia(
    fake_rocm: FakeRocm, fake_nvml: FakeNvml, look: Look
) -> None:
    """Some packages bring it to machines without a card of AMD, where it fails."""
    fake_rocm.error("rsmi_init", 8)
    fake_nvml.gpu("GPU-11111111-1111-1111-1111-111111111111")
    found = look({**fake_nvml.variables, **fake_rocm.variables})
    assert ([gpu.vendor for gpu in found.gpus], found.problem) == (["NVIDIA"], None)


def test_rocm_without_a_card_or_a_library_changes_nothing(fake_rocm: FakeRocm, fake_nvml: FakeNvml, look: Look) -> None:
    """A machine that has only the directory of ROCm, or no card, is as before: its NVIDIA cards are seen."""
    assert look(fake_rocm.variables).gpus == ()
    fake_nvml.gpu("GPU-11111111-1111-1111-1111-111111111111")
    found = look({**fake_nvml.variables, "ROCM_PATH": "/nowhere"})  # the library may be where the linker looks
    assert (found.problem, [gpu.problem for gpu in found.gpus if gpu.vendor == "NVIDIA"]) == (None, [None])
