"""A client of a spool, served or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import spool
from served import Served


@pytest.fixture
def client(spool_root: Path) -> spool.Client:
    """Give a client of an empty spool that no dispatcher serves."""
    (spool_root / "config.toml").write_text("autostart = false\n")
    return spool.Client()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Give a spool with a dispatcher, which a client finds by itself."""
    with Served(tmp_path / "spool") as found:
        (found.root / "config.toml").write_text("autostart = false\n")  # while a test has stopped it, there is none
        monkeypatch.setenv("SPOOL_DIR", str(found.root))
        monkeypatch.chdir(tmp_path)
        yield found.start()
