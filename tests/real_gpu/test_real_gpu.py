"""A real card: what NVML tells, whose process is whose, memory, sharing, use and energy, beside nvidia-smi.

Skipped without an NVIDIA card that is idle. `pytest tests/real_gpu -m real_gpu -s` prints the figures that it measured,
and writes them to the file that REAL_GPU_FIGURES names. It burns one card for some minutes, and changes no setting.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from served import GPU_LOOKS, Served
from spool.core.model import SECOND_NS, Gpu
from spool.formats.state import GpuLook
from spool.machine.gpus import LIMIT_NS, GpuWatcher, in_pid_namespace
from spool.machine.nvml import Sample
from support import ROOT, optional, wait_for

pytestmark = pytest.mark.real_gpu

BURN = Path(__file__).with_name("burn.py")
MIB = 1 << 20
SIZE_MIB = 2048
LONG_NS = 60 * SECOND_NS
FIGURES: dict[str, object] = {}


def looked() -> GpuLook:
    """Return the GPUs of this machine, asked for anew."""
    watcher = GpuWatcher(limit_ns=LONG_NS)
    try:
        return watcher.look(time.time_ns(), max_age_ns=0, patience_ns=LONG_NS)
    finally:
        watcher.close()


def smi(*fields: str) -> list[list[str]]:
    """Return these fields of all GPUs as nvidia-smi prints them."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no nvidia-smi to compare with")
    words = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    return [[cell.strip() for cell in line.split(",")] for line in lines]


@pytest.fixture(scope="module", autouse=True)
def figures() -> Iterator[None]:
    """Print what was measured."""
    yield
    if FIGURES:
        text = json.dumps(FIGURES, indent=2)
        print(f"\n{text}")
        if name := os.environ.get("REAL_GPU_FIGURES"):
            Path(name).write_text(text + "\n")


@pytest.fixture(scope="module")
def card() -> Gpu:
    """Find an idle card of NVIDIA; without one all tests here are skipped."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.skip("no NVIDIA driver (libcuda.so.1)")
    found = looked()
    idle = [gpu for gpu in found.gpus if gpu.vendor == "NVIDIA" and not (gpu.mig or gpu.foreign or gpu.problem)]
    if not idle:
        pytest.skip(f"no idle NVIDIA card: {found.problem or [gpu.name for gpu in found.gpus]}")
    code = optional("spool.extras.capture.code")
    FIGURES["card"], FIGURES["driver"] = idle[0].name, code and code.driver_version()
    return idle[0]


def now(card: Gpu) -> Gpu:
    """Return the card as it is now."""
    return next(gpu for gpu in looked().gpus if gpu.uuid == card.uuid)


@pytest.fixture
def spool(card: Gpu, tmp_path: Path, executor: str) -> Iterator[Served]:
    """Give a spool that uses that card alone, and looks at it often."""
    with Served(tmp_path / "spool", None, executor) as served:
        (served.root / "config.toml").write_text(f'gpu.use = ["{card.uuid}"]\nstatus_page = "status.html"\n')
        served.changes[GPU_LOOKS] = 10**9
        yield served.start()


@pytest.fixture(params=["process", "tmux"])
def executor(request: pytest.FixtureRequest) -> str:
    """Name what runs the jobs."""
    if request.param == "tmux" and shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    name: str = request.param
    return name


def burn(seconds: float, percent: int = 100, mebibytes: int = SIZE_MIB) -> list[str]:
    """Return the command that burns."""
    return [sys.executable, str(BURN), str(mebibytes), str(seconds), str(percent)]


def ready(spool: Served, name: str) -> tuple[int, int]:
    """Wait until a job has its memory; return its pid, and how many milliseconds that took it."""
    words = wait_for(lambda: "\n" in spool.log(name) and spool.log(name).split())
    assert words[0] == "ready", spool.log(name)
    return int(words[1]), int(words[2])


@contextmanager
def foreign(card: Gpu, seconds: float = 600) -> Iterator[int]:
    """Burn on the card outside spool for as long as the body takes; yield the pid."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": card.uuid}
    process = subprocess.Popen(burn(seconds, 10), stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready")
        yield process.pid
    finally:
        process.kill()
        process.wait()


def shown(spool: Served, card: Gpu) -> dict[str, Any]:
    """Return the card as `spool gpus` shows it."""
    told = json.loads(spool.spool("gpus", "--json").stdout)["gpus"]
    found: dict[str, Any] = next(each for each in told if each["uuid"] == card.uuid)
    return found


def test_the_fields_of_nvml_are_those_of_nvidia_smi(card: Gpu) -> None:
    """Name, UUID, index and memory agree, and how long an answer takes is measured, with NVML begun and without."""
    listed = {line[0]: line[1:] for line in smi("uuid", "index", "name", "memory.total", "memory.free")}
    for gpu in looked().gpus:
        if gpu.mig or gpu.vendor != "NVIDIA":
            continue
        index, name, total, free = listed[gpu.uuid]
        assert (str(gpu.index), gpu.name) == (index, name)
        assert gpu.memory_total_bytes is not None
        assert gpu.memory_free_bytes is not None
        assert abs(gpu.memory_total_bytes // MIB - int(total)) <= 1
        assert abs(gpu.memory_free_bytes // MIB - int(free)) <= 64
    watcher, took_ms = GpuWatcher(), []
    for _ in range(2):
        began_ns = time.monotonic_ns()
        watcher.look(time.time_ns(), max_age_ns=0, patience_ns=LIMIT_NS)
        took_ms.append(round((time.monotonic_ns() - began_ns) / 1e6, 1))
    watcher.close()
    FIGURES["answer_ms"] = took_ms


def test_a_job_has_the_card_alone_and_its_process_is_known(spool: Served, card: Gpu) -> None:
    """Its memory is taken by it and not foreign; another one waits, and starts when the memory is really free."""
    spool.drop("first", burn(30), gpus=1)
    pid, warm_ms = ready(spool, "first")
    FIGURES["warm_up_ms"] = warm_ms
    spool.drop("second", burn(1), gpus=1)
    assert "in exclusive use by first" in spool.wait_reason("second", "unshared GPU")
    found = wait_for(
        lambda: [each for each in [shown(spool, card)] if each["holders"] and each["holders"][0]["taken_bytes"]]
    )
    assert found[0]["state"] == "exclusive"
    assert found[0]["foreign"] == []
    assert found[0]["holders"][0]["taken_bytes"] >= SIZE_MIB * MIB
    if not in_pid_namespace() and shutil.which("nvidia-smi") is not None:
        words = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
        assert str(pid) in subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert card.name in wait_for(lambda: (spool.root / "status.html").exists()
                                 and (spool.root / "status.html").read_text())  # fmt: skip
    ended = spool.wait_done("second")
    assert ended is not None
    assert ended["outcome"] == "finished", spool.log("second")
    assert not now(card).foreign


def test_a_killed_job_leaves_no_memory_behind(spool: Served, card: Gpu) -> None:
    """After KILL the card is given again at once, and how long its memory stays in use is measured."""
    before = now(card).memory_free_bytes
    spool.drop("killed", burn(600), gpus=1, kill_grace="0s")
    ready(spool, "killed")
    spool.spool("cancel", "killed")
    spool.wait_done("killed")
    began = time.monotonic()
    wait_for(lambda: (now(card).memory_free_bytes or 0) >= (before or 0) - 64 * MIB)
    FIGURES["memory_free_after_s"] = round(time.monotonic() - began, 2)
    spool.drop("next", burn(1), gpus=1)
    assert spool.wait_done("next")


def test_two_jobs_share_the_card_and_a_third_waits_for_memory(spool: Served, card: Gpu) -> None:
    """Each gets the memory that it stated, and one that would not fit beside them waits."""
    for name in ("one", "two"):
        spool.drop(name, burn(45, 50), gpus=1, gpu_memory="4G")
    ready(spool, "one")
    ready(spool, "two")
    wait_for(lambda: {each["job"] for each in shown(spool, card)["holders"]} == {"one", "two"})
    assert card.memory_total_bytes is not None
    spool.drop("large", burn(1), gpus=1, gpu_memory=f"{card.memory_total_bytes // MIB - 1024}M")
    spool.wait_reason("large", "GPU")
    assert spool.wait_done("one", "two", "large")


def test_a_foreign_process_keeps_the_card(spool: Served, card: Gpu) -> None:
    """A job waits while another program is on the card, is told which, and starts when that is gone."""
    with foreign(card) as pid:
        spool.drop("waits", burn(1), gpus=1)
        reason = spool.wait_reason("waits", "GPU")
        if not in_pid_namespace():
            assert str(pid) in spool.wait_reason("waits", "outside spool"), reason
        free = now(card).memory_free_bytes
    wait_for(lambda: (now(card).memory_free_bytes or 0) >= (free or 0) + SIZE_MIB * MIB)
    assert spool.wait_done("waits")


def test_use_and_energy_are_what_was_burnt(spool: Served, card: Gpu) -> None:
    """A run that computes all the time is busy, and its energy is what NVML's counter went on meanwhile."""
    before = _energy_mj(card)
    spool.drop("busy", burn(30), gpus=1)
    ended = spool.wait_done("busy")
    after = _energy_mj(card)
    assert ended is not None
    (use,) = ended["gpu_use"]
    FIGURES["busy"] = use
    assert use["mean_percent"] > 80
    assert use["peak_memory_bytes"] >= SIZE_MIB * MIB
    if before is None or after is None:
        pytest.skip("the card has no counter of energy")
    assert 0.6 * (after - before) <= use["energy_mj"] <= after - before
    assert 20_000 <= use["energy_mj"] / (use["energy_watched_ms"] / 1000) <= 1_500_000  # milliwatts
    FIGURES["energy_mj"] = {"nvml": after - before, "recorded": use["energy_mj"]}


def test_a_job_that_leaves_the_card_idle_is_stopped(spool: Served) -> None:
    """With memory taken and nothing computed, `gpu_idle` counts; with half the time computed it does not."""
    spool.drop("idle", burn(120, 0), gpus=1, gpu_idle="5s", gpu_idle_action="stop", kill_grace="1s")
    ended = spool.wait_done("idle")
    assert ended is not None
    assert (ended["outcome"], "idle" in ended["reason"]) == ("cancelled", True)
    spool.drop("half", burn(15, 50), gpus=1, gpu_idle="5s", gpu_idle_action="stop")
    ended = spool.wait_done("half")
    assert ended is not None
    assert ended["outcome"] == "finished"


def test_a_driver_whose_library_breaks_stops_only_jobs_with_gpus(card: Gpu, tmp_path: Path) -> None:
    """As after an upgrade of the driver without a reboot: unknown is not free, and other jobs go on."""
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"no library")
    with Served(tmp_path / "spool", {"LD_LIBRARY_PATH": str(tmp_path)}) as served:
        served.start()
        served.drop("wants", "true", gpus=1)
        served.drop("plain", "true")
        served.wait_done("plain")
        served.wait_reason("wants", "what is free is unknown")


def _energy_mj(card: Gpu) -> int | None:
    """Return NVML's counter, as the helper tells it."""
    words = [sys.executable, "-m", "spool.machine.nvml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    told = subprocess.run(words, input=b"\n", capture_output=True, check=True, env=environment).stdout
    return next(device.energy_mj for device in Sample.from_json(told).devices if device.uuid == card.uuid)
