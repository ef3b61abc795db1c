"""The fixture `slurm`: a real cluster for the tests of this folder, one for each process that runs tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurm import cluster


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
