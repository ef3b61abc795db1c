"""The fixture `fake_rocm`: GPUs of AMD that are lines of a file, behind a real `librocm_smi64.so` built from C."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugins.fake_nvml import FakeDriver, built

SOURCE = Path(__file__).resolve().parent / "rocm_smi.c"


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
