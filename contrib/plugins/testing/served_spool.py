"""Fixtures for the tests of all plugins: a spool with a dispatcher, which is the default one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from waiting import PATIENCE_S, wait_for

import spool

_FAKE_NVML = Path(__file__).resolve().parents[3] / "tests" / "plugins" / "fake_nvml.py"


def _gpus(home: Path) -> dict[str, str]:
    """Return the variables for a machine with two GPUs, none if this copy has not what that takes."""
    compiler = shutil.which("cc")
    if compiler is None or not _FAKE_NVML.exists():
        return {}
    spec = importlib.util.spec_from_file_location("fake_nvml", _FAKE_NVML)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    library = home / "nvml" / "libnvidia-ml.so.1"
    library.parent.mkdir()
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, module.SOURCE], check=True)
    nvml = module.FakeNvml(library, home)
    nvml.gpu("GPU-a", bus=1)
    nvml.gpu("GPU-b", bus=2)
    return dict(nvml.variables)


@contextmanager
def _serving(root: Path, config: str, more: Mapping[str, str] | None = None) -> Iterator[None]:
    """Serve a spool that is made, and end all its jobs before its dispatcher. *more*: variables of the dispatcher."""
    client = spool.Client(root, make=True)
    (root / "config.toml").write_text(f"autostart = false\n{config}")  # else a client may start a dispatcher first
    with (root.parent / "dispatcher").open("wb") as said:
        command = [sys.executable, "-m", "spool", "dispatch"]
        dispatcher = subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | (more or {}))
    try:
        wait_for((root / "state.json").exists, "a dispatcher")
        yield
    finally:
        for row in client.jobs().rows:
            if not row.state.ended:
                with suppress(spool.SpoolError):  # it has just ended
                    client.cancel(row.name)
        wait_for(lambda: not list(root.glob("running/*.toml")), "the end of all jobs")
        dispatcher.send_signal(signal.SIGTERM)
        assert dispatcher.wait(PATIENCE_S) == 0, (root.parent / "dispatcher").read_text()
        shutil.rmtree(root.parent)


@pytest.fixture(scope="session")
def root() -> Iterator[Path]:
    """Give a served spool, which is the default one here and in all child processes."""
    home = Path(tempfile.mkdtemp(prefix="spool-plugin-"))
    path = home / ".spool"
    os.environ |= {"HOME": str(home), "SPOOL_DIR": str(path)}
    with _serving(path, 'cpus = 8\nmemory = "64G"\nkill_grace = "20s"\n', _gpus(home)):
        yield path


@pytest.fixture(autouse=True)
def _served(root: Path) -> None:
    """Let no test near another spool."""


@pytest.fixture(name="spool")
def own_spool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a served spool of the test's own, which is the default one until the test is over."""
    home = Path(tempfile.mkdtemp(prefix="spool-plugin-"))
    path = home / ".spool"
    for name in [name for name in os.environ if name.startswith("SPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("SPOOL_DIR", str(path))
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    with _serving(path, ""):
        yield path
