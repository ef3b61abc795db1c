"""The same claims for every engine: Slurm, and a batch system in shell, which shows what another engine needs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from served import Served
from slurm.cluster import Cluster
from slurm.conftest import spool_on_slurm
from spool.testing import batch
from support import wait_for

# A dispatcher that has the batch system where others have Slurm.
_WITH_BATCH = """
from spool import executors
from spool.cli.main import main
executors._WHERE["slurm"] = ("spool.testing.batch", "BatchExecutor")
raise SystemExit(main())
"""


class OnBatch(Served):
    """A spool whose jobs go to the batch system."""

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", _WITH_BATCH, "--spool", str(self.root), "dispatch", *arguments]


class Site:
    """A spool, and what somebody else does with its engine."""

    def __init__(self, spool: Served, name: str, cancel: Callable[[str], object], **refused: object) -> None:
        """*cancel* ends a job behind spool's back; the engine refuses the job `refused` with those keys."""
        self.spool = spool
        self.name = name
        self.cancel = cancel
        self.refused = refused

    def id(self, name: str, run: int = 1) -> str:
        """Return what the engine calls a run, once it has it."""
        return self.spool.until(lambda: (self.spool.record(name, "engine", run) or "").split()[2:], "its id")[0]


@pytest.fixture(scope="module", autouse=True)
def _before(request: pytest.FixtureRequest) -> None:
    """Start the cluster, if there can be one, before the first test looks which processes there are."""
    with contextlib.suppress(pytest.skip.Exception):
        request.getfixturevalue("_cluster")


@pytest.fixture
def on_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Give a spool on the batch system."""
    directory = tmp_path / "batch"
    directory.mkdir()
    monkeypatch.setenv(batch.DIRECTORY, str(directory))

    def cancel(job: str) -> None:
        command = batch.BatchLanguage().cancel([job], None, only_waiting=False)
        subprocess.run(command.arguments, check=True)

    with OnBatch(tmp_path / "spool", executor="slurm") as spool:
        (spool.root / "config.toml").write_text('autostart = false\ndisk_floor = "0M"\n')
        yield Site(spool, "batch", cancel)


@pytest.fixture
def on_slurm(slurm: Cluster, tmp_path: Path) -> Iterator[Site]:
    """Give a spool on Slurm."""
    with spool_on_slurm(tmp_path / "spool") as spool:
        yield Site(spool, "slurm", lambda job: slurm.command("scancel", job), memory="9999G")


@pytest.fixture(params=["on_batch", "on_slurm"])
def unserved(request: pytest.FixtureRequest) -> Site:
    """Give a spool on one engine after the other; the test starts the dispatcher."""
    site: Site = request.getfixturevalue(request.param)
    return site


@pytest.fixture
def site(unserved: Site) -> Site:
    """Give a spool that is served."""
    unserved.spool.start()
    return unserved


def test_another_engine_takes_fewer_than_150_lines() -> None:
    """What engines share is not in it."""
    assert Path(batch.__file__).read_text().count("\n") < 150


def test_a_job_runs_once_and_its_records_say_where(site: Site) -> None:
    """The jid names the engine and the id that the engine answered with."""
    site.spool.drop("x", "echo hi")
    result = site.spool.wait_done("x")
    assert result is not None
    assert (result["outcome"], result["exit_code"], site.spool.log("x")) == ("finished", 0, "hi\n")
    assert (site.spool.record("x", "jid") or "").split()[5] == f"{site.name}:{site.id('x')}"


def test_a_failure_has_its_exit_code(site: Site) -> None:
    """It is that of the command, whatever the engine calls it."""
    site.spool.drop("x", "exit 7")
    result = site.spool.wait_done("x")
    assert result is not None
    assert (result["outcome"], result["exit_code"]) == ("failed", 7)


def test_a_cancel_lets_the_job_leave_in_order(site: Site) -> None:
    """Its command is told once to end."""
    site.spool.drop("x", "trap 'echo told; exit 9' TERM; echo up; while :; do sleep 0.1; done")
    site.spool.says("x", "up")
    assert site.spool.spool("cancel", "x").returncode == 0
    site.spool.wait_done("x")
    assert (site.spool.outcome("x"), site.spool.log("x")) == ("cancelled", "up\ntold\n")


def test_what_is_cancelled_in_the_engine_is_cancelled(site: Site) -> None:
    """Nobody told spool: it sees it, and says who it was."""
    site.spool.drop("x", "echo up; sleep 60")
    site.spool.says("x", "up")
    site.cancel(site.id("x"))
    result = site.spool.wait_done("x")
    assert result is not None
    assert (result["outcome"], result["reason"].split(":")[0]) == ("cancelled", "cancelled, and not by spool")


def test_a_time_limit_counts_from_the_begin(site: Site) -> None:
    """It is spool's, to the second."""
    site.spool.drop("x", "sleep 60", time_limit="1s", kill_grace="1s")
    site.spool.wait_done("x")
    assert site.spool.outcome("x") == "timeout"


def test_a_job_that_is_refused_is_held_with_the_engine_s_words(site: Site) -> None:
    """It is not submitted again until a person releases it; the reason says how."""
    site.spool.drop("refused", "true", **site.refused)
    site.spool.wait_place("refused", "held")
    reason = (site.spool.root / "held" / "refused.toml.reason").read_text()
    assert reason.endswith("; `spool edit refused`, then `spool release refused`\n")
    assert site.spool.record("refused", "jid") == "void\n"


def test_a_killed_dispatcher_and_its_helper_lose_nothing(unserved: Site) -> None:
    """Ten jobs under four kills, each in the middle of submissions: every one runs once."""
    spool = unserved.spool
    ledger = spool.root.parent / "ledger"
    names = [f"j{number}" for number in range(10)]
    for name in names:
        spool.drop(name, f"echo {name} >> {ledger}")
    for seconds in (0.05, 0.2, 0.4, 0.8):
        spool.start()
        wait_for(lambda: ledger.exists() or spool.record("j0", "run.sh") is not None, what="the first start")
        signal.sigtimedwait([], seconds)
        spool.kill()
    spool.start()
    spool.wait_done(*names)
    assert sorted(ledger.read_text().split()) == sorted(names)


def test_what_the_batch_system_forgets_to_answer_proves_nothing(on_batch: Site) -> None:
    """While it is away nothing is concluded or submitted; afterwards everything goes on."""
    spool, directory = on_batch.spool.start(), Path(os.environ[batch.DIRECTORY])
    spool.drop("x", "echo up; until [ -e go ]; do sleep 0.05; done")
    spool.says("x", "up")
    (directory / "away").touch()
    spool.until(lambda: "does not answer" in spool.said(), "the silence")
    spool.drop("y", "true")
    spool.wait_reason("y", "has not answered since")
    (spool.root.parent / "go").touch()
    spool.until(lambda: spool.record("x", "rc"), "its exit code")
    spool.looked()
    assert spool.places("x") == ["running"]
    (directory / "away").unlink()
    spool.wait_done("x", "y")


def test_a_job_that_waits_in_the_batch_system_is_cancelled_before_it_begins(on_batch: Site) -> None:
    """It never begins, and the next of its name does."""
    spool, directory = on_batch.spool.start(), Path(os.environ[batch.DIRECTORY])
    (directory / "full").touch()
    spool.drop("x", "touch begun")
    on_batch.id("x")
    assert spool.spool("cancel", "x").returncode == 0
    spool.wait_done("x")
    assert spool.outcome("x") == "cancelled"
    (directory / "full").unlink()
    spool.drop("x", "echo again")
    spool.until(lambda: spool.outcome("x", 2), "the second run")
    assert not (spool.root.parent / "begun").exists()
