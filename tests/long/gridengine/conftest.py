"""The fixtures of this folder: a real Grid Engine, one for each process that runs tests, and spools that use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from long.gridengine.cluster import GridEngine, unavailable
from served import ENGINE_LOOKS, Served
from spool.testing.engine_claims import Site

SETTINGS = 'autostart = false\ndisk_floor = "0M"\n[sge]\npe = "smp"\ngpus = "gpu"\n'


@pytest.fixture(scope="session", autouse=True)
def _sge() -> Iterator[GridEngine]:
    """Start it before the first test looks which processes there are."""
    if reason := unavailable():
        pytest.skip(reason)
    made = GridEngine()
    yield made
    made.close()


@pytest.fixture
def sge(_sge: GridEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[GridEngine]:
    """Return the cluster, without jobs; programs that the test starts find it by their environment."""
    for name, value in _sge.variables.items():
        monkeypatch.setenv(name, value)
    yield _sge
    _sge.clear()


@pytest.fixture
def engine_site(sge: GridEngine, tmp_path: Path) -> Iterator[Site]:
    """Give a spool on Grid Engine; the test starts the dispatcher."""
    with Served(tmp_path / "spool", executor="sge") as spool:
        (spool.root / "config.toml").write_text(SETTINGS)
        spool.changes[ENGINE_LOOKS] = 200_000_000
        yield Site(
            spool,
            "sge",
            lambda job: sge.command("qdel", job),
            refused={"executor_options": ["-q nowhere.q"]},
            silence=sge.kill_master,
            speak=sge.start_master,
            fill=lambda: sge.command("qmod", "-d", "main.q"),
            drain=lambda: sge.command("qmod", "-e", "main.q"),
        )
