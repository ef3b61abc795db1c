"""Spools with real dispatchers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from served import Served


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """Give a spool of the test's own; the test starts the dispatcher."""
    spool = Served(tmp_path / "spool")
    try:
        yield spool
        spool.close()
    finally:
        if spool.process is not None:
            spool.process.kill()
            spool.process.wait()
        spool.end_runs()


@pytest.fixture(scope="module")
def shared_spool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Give the spool of a whole module, for tests that do not disturb each other, with 8 CPUs to give."""
    spool = Served(tmp_path_factory.mktemp("shared") / "spool")
    (spool.root / "config.toml").write_text('cpus = 8\nlook_every = "1h"\n')
    spool.start()
    try:
        yield spool
        spool.close()
    finally:
        if spool.process is not None:
            spool.process.kill()
            spool.process.wait()
        spool.end_runs()


@pytest.fixture
def shared(shared_spool: Served) -> Served:
    """Give the module's spool, whose dispatcher must survive every test."""
    assert shared_spool.lives(), shared_spool.said()[-3000:]
    return shared_spool
