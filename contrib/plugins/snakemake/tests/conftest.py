"""A spool for each test, with a dispatcher of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def spool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a spool, which is the default one of the test, and serve it until the test is over."""
    home = Path(tempfile.mkdtemp(prefix="spool-plugin-"))
    root = home / "spool"
    for name in [name for name in os.environ if name.startswith("SPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("SPOOL_DIR", str(root))
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    subprocess.run([sys.executable, "-m", "spool", "init"], check=True, stdout=subprocess.DEVNULL)
    (root / "config.toml").write_text("autostart = false\n")  # else a client may be faster than the dispatcher below
    with open(home / "dispatcher.log", "wb") as log:
        dispatcher = subprocess.Popen([sys.executable, "-m", "spool", "dispatch"], stdout=log, stderr=log)
    try:
        yield root
    finally:
        subprocess.run([sys.executable, "-m", "spool", "cancel", "*"], check=False, capture_output=True)
        dispatcher.send_signal(signal.SIGTERM)
        dispatcher.wait()
        shutil.rmtree(home)
