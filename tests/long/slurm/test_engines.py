"""The claims of `spool.testing.engine_claims` for Slurm, and for engines that an installed package offers."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from extras.engines import batch
from extras.engines.packaged_engines import batch_package, path_with
from long.slurm.cluster import Cluster
from long.slurm.conftest import spool_on_slurm
from served import Served
from spool.testing.engine_claims import *  # noqa: F403
from spool.testing.engine_claims import Site

# What an engine that cannot signal the script of a job does otherwise.
_DEAF = (
    "test_a_cancel_lets_the_job_leave_in_order",
    "test_a_warning_reaches_the_command_before_its_time_limit",
    "test_a_time_limit_counts_from_the_begin",
    "test_what_is_cancelled_in_the_engine_is_cancelled",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Test each claim with the engines for which it may differ."""
    if "engine_site" in metafunc.fixturenames:
        names = ["on_batch", "on_slurm", *["on_deaf_batch"] * (metafunc.function.__name__ in _DEAF)]
        metafunc.parametrize("engine_site", names, indirect=True)


@pytest.fixture(scope="module", autouse=True)
def _before(request: pytest.FixtureRequest) -> None:
    """Start the cluster, if there can be one, before the first test looks which processes there are."""
    with contextlib.suppress(pytest.skip.Exception):
        request.getfixturevalue("_cluster")


def _on_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, language: type[batch.BatchLanguage]) -> Iterator[Site]:
    """Give a spool on the batch system, which is known by an entry point alone: nothing is patched."""
    directory = tmp_path / "batch"
    directory.mkdir()
    monkeypatch.setenv(batch.DIRECTORY, str(directory))
    batch_package(tmp_path / "packages", language)

    def cancel(job: str) -> None:
        command = batch.BatchLanguage().cancel([job], None)
        subprocess.run(command.arguments, check=True)

    with Served(tmp_path / "spool", path_with(tmp_path / "packages"), executor="mine") as spool:
        (spool.root / "config.toml").write_text('autostart = false\ndisk_floor = "0M"\n')
        yield Site(
            spool,
            "mine",
            cancel,
            refused={},
            silence=(directory / "away").touch,
            speak=(directory / "away").unlink,
            fill=(directory / "full").touch,
            drain=(directory / "full").unlink,
        )


@pytest.fixture
def on_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Give a spool on the batch system."""
    yield from _on_batch(tmp_path, monkeypatch, batch.BatchLanguage)


@pytest.fixture
def on_deaf_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Give a spool on a batch system that cannot signal the script of a job."""
    yield from _on_batch(tmp_path, monkeypatch, batch.DeafBatchLanguage)


@pytest.fixture
def on_slurm(slurm: Cluster, tmp_path: Path) -> Iterator[Site]:
    """Give a spool on Slurm."""
    with spool_on_slurm(tmp_path / "spool") as spool:
        yield Site(
            spool,
            "slurm",
            lambda job: slurm.command("scancel", job),
            refused={"memory": "9999G"},
            fill=lambda: slurm.set_nodes("drain"),
            drain=slurm.resume,
        )


@pytest.fixture
def engine_site(request: pytest.FixtureRequest) -> Site:
    """Give a spool on one engine after the other."""
    site: Site = request.getfixturevalue(request.param)
    return site


def test_another_engine_takes_fewer_than_150_lines() -> None:
    """What engines share is not in it."""
    assert Path(batch.__file__).read_text().count("\n") < 150


def test_the_code_of_a_job_is_captured_when_it_is_handed_over(engine_site: Site) -> None:
    """With `capture`; the engine's job is the same."""
    site, config = engine_site, engine_site.spool.root / "config.toml"
    config.write_text(f"capture = true\n{config.read_text()}")
    site.spool.start()
    site.spool.drop("x", "echo hi")
    site.spool.wait_done("x")
    assert (site.spool.outcome("x"), site.spool.log("x")) == ("finished", "hi\n")
    assert "captured_at_ns" in (site.spool.record("x", "capture.toml") or "")
