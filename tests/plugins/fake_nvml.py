"""The fixture `fake_nvml`: GPUs that are lines of a file, behind a real `libnvidia-ml.so.1` built from C."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "fake_nvml" / "nvml.c"
GIB = 1 << 30


class FakeDriver:
    """GPUs that a test makes, fills, breaks and mends while a program looks at them.

    Every method writes the whole state at once; the library reads it at its next call. `environment` holds the
    variables that a child process needs to find these GPUs.
    """

    variables: Mapping[str, str]

    def __init__(self, state: Path) -> None:
        self.state = state
        self._lines: list[str] = []
        self._only: dict[str, str] = {}

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment for a child process that is to see these GPUs."""
        return {**os.environ, **self.variables}

    def add(self, line: str) -> None:
        """Write one more line of the state; the library in C lists the grammar."""
        self._lines.append(line)
        self._write()

    def forget(self, *words: str) -> None:
        """Take all lines that begin with one of *words* away."""
        self._lines = [line for line in self._lines if line.split()[0] not in words]
        self._write()

    def _write(self) -> None:
        whole = self.state.with_suffix(".new")
        whole.write_text("\n".join([*self._only.values(), *self._lines, ""]))
        whole.rename(self.state)


def built(source: Path, library: Path) -> Path:
    """Return *library*, which is built from *source*; without a compiler the test is left out."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip(f"no C compiler (cc) to build {source.name} with")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-o", library, source], check=True)
    return library


class FakeNvml(FakeDriver):
    """Those of NVIDIA; `calls()` tells what was asked."""

    def __init__(self, library: Path, directory: Path) -> None:
        super().__init__(directory / "nvml-state")
        self._calls = directory / "nvml-calls"
        search = [str(library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        self.variables = {
            "LD_LIBRARY_PATH": os.pathsep.join(search),
            "FAKE_NVML_STATE": str(self.state),
            "FAKE_NVML_CALLS": str(self._calls),
        }
        self._write()

    def gpu(
        self, uuid: str, *, bus: int = 0, total: int = 80 * GIB, free: int | None = None, name: str = "H100"
    ) -> None:
        """Make a GPU, or replace the one of that UUID. *bus* is its PCI bus number."""
        self._set(uuid, f"gpu {uuid} 00000000:{bus:02X}:00.0 {total} {total if free is None else free} {name}")

    def mig(self, uuid: str, parent: str, slot: int, *, total: int = 10 * GIB, free: int | None = None) -> None:
        """Make a MIG instance; its parent is then in MIG mode."""
        self.add(f"migmode {parent}")
        self._set(uuid, f"mig {uuid} {parent} {slot} {total} {total if free is None else free} H100 MIG 1g.10gb")

    def remove(self, uuid: str) -> None:
        """Let a GPU or an instance fall off."""
        self._only.pop(uuid)
        self._write()

    def process(self, uuid: str, pid: int, used: int | None = GIB, kind: str = "compute") -> None:
        """Put a process on a GPU: `compute`, `graphics` or `mps`; None bytes is "not available"."""
        self.add(f"process {kind} {uuid} {pid} {'-' if used is None else used}")

    def busy(self, uuid: str, percent: int, memory: int) -> None:
        """Let a GPU tell its utilisation; until then it tells none."""
        self.add(f"utilisation {uuid} {percent} {memory}")

    def energy(self, uuid: str, millijoules: int) -> None:
        """Let a GPU tell the energy that it has consumed; until then it tells none."""
        self.add(f"energy {uuid} {millijoules}")

    def computes(self, uuid: str, pid: int, percent: int) -> None:
        """Let a GPU tell what one process does of its utilisation; until then it tells that of none."""
        self.add(f"computes {uuid} {pid} {percent}")

    def near(self, uuid: str, node: int) -> None:
        """Put a GPU on a NUMA node; until then it tells none."""
        self.add(f"node {uuid} {node}")

    def links(self, one: str, other: str, number: int) -> None:
        """Put so many NVLinks between two GPUs; 0: they reach each other by a switch."""
        self.add(f"links {one} {other} {number}")

    def error(self, call: str, code: int, uuid: str = "") -> None:
        """Let that C function return an error code, for one device or for all."""
        self.add(f"error {call} {code} {uuid}")

    def hang(self, call: str, uuid: str = "") -> None:
        """Let that C function not return until `mend`."""
        self.add(f"hang {call} {uuid}")

    def mend(self) -> None:
        """Take all errors and hangs away."""
        self.forget("error", "hang")

    def leave(self, pid: int | None = None) -> None:
        """Take a process, or all, off every GPU."""
        self._lines = [line for line in self._lines if not _is_process(line, pid)]
        self._write()

    def calls(self) -> list[str]:
        """Return every call that was made, in order, as `NAME UUID`, the UUID `-` where no device is meant."""
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    def _set(self, uuid: str, line: str) -> None:
        self._only[uuid] = line
        self._write()


def _is_process(line: str, pid: int | None) -> bool:
    words = line.split()
    return words[0] == "process" and (pid is None or words[3] == str(pid))


@pytest.fixture(scope="session")
def fake_nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the library once a session."""
    return built(SOURCE, tmp_path_factory.mktemp("fake-nvml") / "libnvidia-ml.so.1")


@pytest.fixture
def fake_nvml(fake_nvml_library: Path, tmp_path: Path) -> FakeNvml:
    """GPUs for child processes to see; there are none yet."""
    return FakeNvml(fake_nvml_library, tmp_path)


@pytest.fixture
def own_nvml(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """GPUs for this process and its children to see; there are none yet."""
    for name, value in fake_nvml.variables.items():
        monkeypatch.setenv(name, value)
    return fake_nvml


@pytest.fixture
def four(own_nvml: FakeNvml) -> FakeNvml:
    """Four GPUs, GPU-0 to GPU-3, that this process and its children see."""
    for index in range(4):
        own_nvml.gpu(f"GPU-{index}", bus=index + 1, name="A100" if index < 2 else "T4")
    return own_nvml
