"""Spools with real dispatchers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from served import HOUR_NS, LOOKS, Served
from wrapper_runs import installed_wrapper


@pytest.fixture
def installed() -> str:
    """Give the compiled wrapper that dispatchers use."""
    return installed_wrapper()


@pytest.fixture
def served(tmp_path: Path, executor: str | None) -> Iterator[Served]:
    """Give a spool of the test's own; the test starts the dispatcher."""
    with Served(tmp_path / "spool", executor=executor) as spool:
        yield spool


@pytest.fixture
def live(served: Served) -> Served:
    """Give a spool of the test's own, which is served."""
    return served.start()


@pytest.fixture(scope="module")
def shared_spool(tmp_path_factory: pytest.TempPathFactory, executor: str | None) -> Iterator[Served]:
    """Give the spool of a whole module, for tests that do not disturb each other, with 8 CPUs to give."""
    with Served(tmp_path_factory.mktemp("shared") / "spool", executor=executor) as spool:
        (spool.root / "config.toml").write_text("cpus = 8\n")
        spool.changes[LOOKS] = HOUR_NS
        spool.start()
        yield spool


@pytest.fixture
def shared(shared_spool: Served) -> Served:
    """Give the module's spool, whose dispatcher must survive every test."""
    assert shared_spool.lives(), shared_spool.said()[-3000:]
    return shared_spool
