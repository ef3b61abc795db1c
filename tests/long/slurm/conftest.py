"""The fixtures of this folder: a real cluster, one for each process that runs tests, and spools that use it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from long.slurm import cluster
from served import ENGINE_LOOKS, Served


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
def impatient(slurm: cluster.Cluster, tmp_path: Path) -> Iterator[Served]:
    """Give such a spool whose dispatcher does not wait long for Slurm."""
    with spool_on_slurm(tmp_path / "spool", Impatient) as spool:
        spool.environment["TEST"] = str(tmp_path)
        yield spool


@pytest.fixture
def served(unserved: Served) -> Served:
    """Give a spool of the test's own whose jobs go to Slurm, and have it served."""
    return unserved.start()


# A dispatcher that gives Slurm's commands up after 2s instead of a minute.
_IMPATIENT = """
from msgspec.structs import replace
from spool.cli.main import main
from spool.extras.engines.language import Language
from spool.extras.commands import CommandRunner
Language.look_ns = 200_000_000
order = CommandRunner.order
CommandRunner.order = lambda self, command, take: order(self, replace(command, within_s=2.0), take)
raise SystemExit(main())
"""


class Impatient(Served):
    """A spool whose dispatcher does not wait long for Slurm's commands."""

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", _IMPATIENT, "--spool", str(self.root), "dispatch", *arguments]

    def begin(self, *arguments: str, prefix: Sequence[str] = ()) -> Any:
        """Start a dispatcher and do not wait for it."""
        return super().begin(*arguments, prefix=prefix or ("env",))  # with a prefix it is a program of its own


def spool_on_slurm(root: Path, kind: type[Served] = Served) -> Served:
    """Make a spool whose jobs go to Slurm unless they say otherwise."""
    spool = kind(root, executor="slurm")
    (root / "config.toml").write_text('autostart = false\ndisk_floor = "0M"\n')
    spool.changes[ENGINE_LOOKS] = 200_000_000
    return spool
