"""The fixtures of this folder: a real cluster, one for each process that runs tests, and spools that use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from long.slurm import cluster
from served import Served


@pytest.fixture(scope="session")
def _cluster() -> Iterator[cluster.Cluster]:
    if reason := cluster.unavailable():
        pytest.skip(reason)
    made = cluster.Cluster()
    yield made
    made.close()


@pytest.fixture
def slurm(_cluster: cluster.Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[cluster.Cluster]:
    """Return the cluster, idle; programs that the test starts find it by their environment."""
    for name, value in _cluster.variables.items():
        monkeypatch.setenv(name, value)
    yield _cluster
    _cluster.clear()


@pytest.fixture
def unserved(slurm: cluster.Cluster, tmp_path: Path) -> Iterator[Served]:
    """Give a spool of the test's own whose jobs go to Slurm; the test starts the dispatcher."""
    with spool_on_slurm(tmp_path / "spool") as spool:
        yield spool


@pytest.fixture
def served(unserved: Served) -> Served:
    """Give a spool of the test's own whose jobs go to Slurm, and have it served."""
    return unserved.start()


def spool_on_slurm(root: Path) -> Served:
    """Make a spool whose jobs go to Slurm unless they say otherwise."""
    spool = Served(root, executor="slurm")
    (root / "config.toml").write_text('autostart = false\ndisk_floor = "0M"\n[slurm]\npoll = "200ms"\n')
    return spool
