"""The fixture `fake_rocm`: GPUs of AMD that are lines of a file, behind a real `librocm_smi64.so` built from C."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent / "rocm_smi.c"


class FakeRocm:
    """GPUs of AMD, in the order in which they are made; `variables` let a child process find them."""

    def __init__(self, rocm: Path, directory: Path) -> None:
        self.state = directory / "rocm-state"
        self._lines: list[str] = []
        self.variables: Mapping[str, str] = {"ROCM_PATH": str(rocm), "FAKE_ROCM_STATE": str(self.state)}
        self._write()

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment for a child process that is to see these GPUs."""
        return {**os.environ, **self.variables}

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

    def add(self, line: str) -> None:
        """Write one more line of the state; `rocm_smi.c` lists the grammar."""
        self._lines.append(line)
        self._write()

    def forget(self, word: str) -> None:
        """Take all lines that begin with *word* away."""
        self._lines = [line for line in self._lines if line.split()[0] != word]
        self._write()

    def _write(self) -> None:
        whole = self.state.with_suffix(".new")
        whole.write_text("\n".join([*self._lines, ""]))
        whole.rename(self.state)


@pytest.fixture(scope="session")
def fake_rocm_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the library once a session; return the directory of that ROCm."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the fake ROCm SMI with")
    rocm = tmp_path_factory.mktemp("fake-rocm")
    (rocm / "lib").mkdir()
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-o", rocm / "lib" / "librocm_smi64.so", SOURCE], check=True)
    return rocm


@pytest.fixture
def fake_rocm(fake_rocm_path: Path, tmp_path: Path) -> FakeRocm:
    """GPUs of AMD for child processes to see; there are none yet."""
    return FakeRocm(fake_rocm_path, tmp_path)
