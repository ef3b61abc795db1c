"""GPUs of AMD, over a library whose GPUs the test makes: alone on a machine, and beside NVIDIA's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from ctypes import CDLL
from pathlib import Path

import pytest

from plugins.fake_nvml import FakeDriver, FakeNvml, built
from served import Served
from spool.core.model import SECOND_NS, Gpu, Grant
from spool.extras.amd import visible
from spool.formats.state import GpuLook
from spool.machine.gpus import GpuWatcher, Ours, UseReader
from spool.machine.host import unlisted_cards
from spool.machine.nvml import Sample
from support import PATIENCE_S, ROOT, wait_for

SOURCE = Path(__file__).resolve().parent / "rocm_smi.c"
GIB = 1 << 30
_OF_NVIDIA = "GPU-11111111-1111-1111-1111-111111111111"
LONG_NS = int(PATIENCE_S) * SECOND_NS
Look = Callable[..., GpuLook]


class FakeRocm(FakeDriver):
    """GPUs of AMD, in the order in which they are made."""

    def __init__(self, rocm: Path, directory: Path) -> None:
        super().__init__(directory / "rocm-state")
        self.variables = {"ROCM_PATH": str(rocm), "FAKE_ROCM_STATE": str(self.state)}
        self._write()

    def gpu(
        self, number: int, *, bus: int = 0, total: int = 64 << 30, used: int = 0, busy: int = 0, energy: int = 0,
        name: str = "Instinct MI210",
    ) -> None:  # fmt: skip
        """Make a GPU with that unique ID; 0: it tells none."""
        self.add(f"gpu {number:#x} {bus} {total} {used} {busy} {energy} {name}")

    def process(self, pid: int, at: int, used: int = 1 << 30) -> None:
        """Put a process on GPU number *at*."""
        self.add(f"process {pid} {at} {used}")

    def error(self, call: str, code: int, at: int | None = None) -> None:
        """Let that C function return an error code, for one GPU or for all."""
        self.add(f"error {call} {code} {'' if at is None else at}")


@pytest.fixture(scope="session")
def fake_rocm_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the library once a session; return the directory of that ROCm."""
    rocm = tmp_path_factory.mktemp("fake-rocm")
    (rocm / "lib").mkdir()
    built(SOURCE, rocm / "lib" / "librocm_smi64.so")
    return rocm


@pytest.fixture
def fake_rocm(fake_rocm_path: Path, tmp_path: Path) -> FakeRocm:
    """GPUs of AMD for child processes to see; there are none yet."""
    return FakeRocm(fake_rocm_path, tmp_path)


@pytest.fixture
def look() -> Iterator[Look]:
    """Look at the GPUs that these variables lead to, each time afresh, or *again* with the last watcher."""
    made: list[GpuWatcher] = []

    def at(variables: Mapping[str, str], ours: Ours | None = None, *, again: bool = False) -> GpuLook:
        if not (again and made):
            reader = UseReader(pids_mean_something=True, who=lambda pid: ("python", "alice"))
            made.append(GpuWatcher(environment={**os.environ, **variables}, limit_ns=LONG_NS, uses=reader))
        return made[-1].look(SECOND_NS, ours, max_age_ns=0, patience_ns=LONG_NS)

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
    fake_nvml.gpu(_OF_NVIDIA, bus=5)
    fake_rocm.gpu(0xA, bus=1)
    fake_rocm.process(77, 0)
    found = look({**fake_nvml.variables, **fake_rocm.variables})
    assert [(gpu.vendor, gpu.index) for gpu in found.gpus] == [("AMD", 1), ("NVIDIA", 0)]
    assert [process.pid for process in found.gpus[0].foreign] == [77]


@pytest.mark.parametrize(
    ("numbers", "why"),
    [((0, 0xB), "GPU 0: it has no unique ID"), ((0xC, 0xC, 0xB), "it is a part of a GPU: others have its ID")],
)
def test_a_gpu_that_no_variable_can_name_is_not_there(
    fake_rocm: FakeRocm, look: Look, numbers: tuple[int, ...], why: str
) -> None:
    """One without an ID, and the parts of a split one, which share it: the answer says so, and the others are given."""
    for bus, number in enumerate(numbers):
        fake_rocm.gpu(number, bus=bus)
    found = look(fake_rocm.variables)
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-000000000000000b"]
    words = [sys.executable, "-m", "spool.machine.nvml", "60", "spool.extras.amd.rocm:Rocm"]
    environment = {**fake_rocm.environment, "PYTHONPATH": str(ROOT / "src")}
    told = Sample.from_json(subprocess.run(words, input=b"\n", capture_output=True, check=True, env=environment).stdout)
    assert why in next(f"GPU {index}: {each}" for index, each in told.unreadable)
    assert not told.leaving  # it is no fault that another start would mend


def test_what_the_library_withholds_is_unknown(fake_rocm: FakeRocm, look: Look) -> None:
    """A value that a card or a container does not give is None, and no problem."""
    fake_rocm.gpu(0xA)
    for call in ("rsmi_dev_memory_usage_get", "rsmi_dev_busy_percent_get", "rsmi_dev_energy_count_get"):
        fake_rocm.error(call, 2)
    assert look(fake_rocm.variables).gpus == (
        Gpu("GPU-000000000000000a", 0, "AMD Instinct MI210", 64 * GIB, None, vendor="AMD"),
    )


def test_an_error_of_one_gpu_is_its_problem_and_a_failure_that_of_all(fake_rocm: FakeRocm, look: Look) -> None:
    """Unknown is not free, where no GPU of NVIDIA is there either."""
    fake_rocm.gpu(0xA)
    fake_rocm.gpu(0xB, bus=1)
    fake_rocm.error("rsmi_dev_memory_usage_get", 6, 1)
    found = look(fake_rocm.variables)
    assert [gpu.problem for gpu in found.gpus] == [None, "rsmi_dev_memory_usage_get: RSMI_STATUS number 6"]
    fake_rocm.error("rsmi_init", 8)
    assert look(fake_rocm.variables).problem == "ROCm SMI: RSMI_STATUS number 8"


@pytest.mark.parametrize("broken", ["AMD", "NVIDIA"])
def test_one_vendors_trouble_is_its_own(fake_rocm: FakeRocm, fake_nvml: FakeNvml, look: Look, broken: str) -> None:
    """While one library fails, its GPUs have that problem, and the other's are given as ever; both come back."""
    both = {**fake_nvml.variables, **fake_rocm.variables}
    fake_nvml.gpu(_OF_NVIDIA)
    fake_rocm.gpu(0xA, bus=1)
    assert [gpu.problem for gpu in look(both, again=True).gpus] == [None, None]
    if broken == "AMD":
        fake_rocm.error("rsmi_num_monitor_devices", 6)
    else:
        fake_nvml.error("nvmlDeviceGetCount_v2", 999)
    found = look(both, again=True)
    assert found.problem is None
    said = {gpu.vendor: gpu.problem for gpu in found.gpus}
    why = said.pop(broken)
    assert why.startswith("ROCm SMI: " if broken == "AMD" else "NVML: ")
    assert list(said.values()) == [None]
    fake_rocm.forget("error")
    fake_nvml.mend()
    wait_for(lambda: {gpu.problem for gpu in look(both, again=True).gpus} == {None}, what="both")


def _rocm_of_this_machine() -> bool:
    """Return whether the linker finds a real library, which some packages bring to machines without a card of AMD."""
    for version in (1, 5, 6, 7):
        with suppress(OSError):
            return bool(CDLL(f"librocm_smi64.so.{version}"))
    return False


def test_rocm_without_a_card_or_a_library_changes_nothing(fake_rocm: FakeRocm, fake_nvml: FakeNvml, look: Look) -> None:
    """A machine that has only the directory of ROCm, or a library that cannot start: its NVIDIA cards are seen."""
    assert look(fake_rocm.variables).gpus == ()
    fake_nvml.gpu(_OF_NVIDIA)
    fake_rocm.error("rsmi_init", 8)
    for place in (fake_rocm.variables["ROCM_PATH"], "/nowhere")[: 1 if _rocm_of_this_machine() else 2]:
        found = look({**fake_nvml.variables, **fake_rocm.variables, "ROCM_PATH": place})
        assert ([gpu.vendor for gpu in found.gpus], found.problem) == (["NVIDIA"], None)


@pytest.mark.executors("process")
def test_gpus_of_amd_beside_gpus_of_nvidia(
    fake_nvml: FakeNvml, fake_rocm: FakeRocm, tmp_path: Path, executor: str
) -> None:
    """A job finds those of AMD in ROCR_VISIBLE_DEVICES and sees no other; `spool gpus` shows both vendors."""
    fake_nvml.gpu(_OF_NVIDIA, name="NVIDIA A100")
    for at in (1, 2):
        fake_rocm.gpu(at, bus=at)
    echo = 'echo "[$CUDA_VISIBLE_DEVICES] [${ROCR_VISIBLE_DEVICES-unset}] $SPOOL_GPUS"'
    variables = {**fake_nvml.variables, **fake_rocm.variables}
    with Served(tmp_path / "spool", variables, executor) as spool:
        spool.drop("amd", echo, gpus=2, gpu_type="MI210")
        spool.drop("any", echo, gpus=1)
        spool.drop("none", echo)
        spool.drop("own", echo, env={"ROCR_VISIBLE_DEVICES": "3"})
        assert spool.run() == 0
        assert spool.log("amd") == "[] [GPU-0000000000000001,GPU-0000000000000002] 2\n"
        assert spool.log("any") == f"[{_OF_NVIDIA}] [] 1\n"
        assert (spool.log("none"), spool.log("own")) == ("[] [] 0\n", "[] [3] 0\n")
        words = [sys.executable, "-m", "spool", "--spool", str(spool.root), "gpus", "--json"]
        told = json.loads(
            subprocess.run(words, env={**os.environ, **variables}, capture_output=True, check=True).stdout
        )
        assert [gpu["vendor"] for gpu in told["gpus"]] == ["NVIDIA", "AMD", "AMD"]


def test_cards_that_rocm_does_not_list_are_told_of(tmp_path: Path) -> None:
    """Cards for computing on the PCI bus count, graphics of a processor do not, and their trouble hides no other."""
    for number, kind in enumerate(["0x030000", "0x038000"]):
        (device := tmp_path / str(number)).mkdir()
        (device / "vendor").write_text("0x1002\n")
        (device / "class").write_text(f"{kind}\n")
    assert unlisted_cards(str(tmp_path), listed=["NVIDIA"]).startswith("1 AMD card is on the PCI bus, but the library")
    assert unlisted_cards(str(tmp_path), listed=["NVIDIA", "AMD"]) == ""


def test_a_run_sees_its_gpus_of_amd_alone() -> None:
    """They are for ROCm by UUID and none is for CUDA, which would count other cards by their indices."""
    theirs = Grant(1, None, ("GPU-0123456789abcdef",), (0,))
    assert visible(theirs, {"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "3"}) == {
        "CUDA_VISIBLE_DEVICES": "",
        "ROCR_VISIBLE_DEVICES": "GPU-0123456789abcdef",
    }
    assert visible(Grant(1, None, (_OF_NVIDIA,), (0,)), {}) == {"ROCR_VISIBLE_DEVICES": ""}
