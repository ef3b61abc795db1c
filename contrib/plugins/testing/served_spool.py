"""Fixtures for the tests of all plugins: a spool with a dispatcher, which is the default one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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


@pytest.fixture(scope="session")
def root() -> Iterator[Path]:
    """Give a served spool, which is the default one here and in all child processes."""
    home = Path(tempfile.mkdtemp(prefix="spool-plugin-"))
    path = home / ".spool"
    os.environ |= {"HOME": str(home), "SPOOL_DIR": str(path)}
    spool.Client(make=True)
    (path / "config.toml").write_text('cpus = 8\nmemory = "64G"\nautostart = false\nkill_grace = "20s"\n')
    with (home / "dispatcher").open("wb") as said:
        command = [sys.executable, "-m", "spool", "dispatch"]
        dispatcher = subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | _gpus(home))
    wait_for((path / "state.json").exists, "a dispatcher")
    yield path
    for row in spool.Client().jobs().rows:
        if not row.state.ended:
            spool.Client().cancel(row.name)
    wait_for(lambda: not list(path.glob("running/*.toml")), "the end of all jobs")
    dispatcher.send_signal(signal.SIGTERM)
    assert dispatcher.wait(PATIENCE_S) == 0, (home / "dispatcher").read_text()
    shutil.rmtree(home)


@pytest.fixture(autouse=True)
def _served(root: Path) -> None:
    """Let no test near another spool."""
