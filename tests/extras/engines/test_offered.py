"""Engines that installed packages offer as capabilities: their names, their settings, and what is wrong with them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from extras.engines.packaged_engines import batch_package, install, path_with
from served import Served


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Give the directory of packages that the programs of the test have."""
    directory = tmp_path / "packages"
    directory.mkdir()
    return directory


@pytest.fixture
def served(tmp_path: Path, packages: Path) -> Iterator[Served]:
    """Give a spool, which is not served yet."""
    batch = tmp_path / "batch"
    batch.mkdir()
    with Served(tmp_path / "spool", {**path_with(packages), "SPOOL_BATCH": str(batch)}) as spool:
        (spool.root / "config.toml").write_text('autostart = false\ndisk_floor = "0M"\n')
        yield spool


def test_its_name_works_wherever_a_built_in_one_does(served: Served, packages: Path) -> None:
    """In a job file, as an option, as the default; check, ls, show, why and doctor know it."""
    batch_package(packages)
    (served.root / "config.toml").write_text(
        'autostart = false\nexecutor = "mine"\ndisk_floor = "0M"\n[mine]\nmax_pending = 30\n'
    )
    file = served.root.parent / "job.toml"
    file.write_text('command = "sleep 600"\nexecutor = "mine"\n')
    assert served.spool("check", str(file)).returncode == 0
    assert served.spool("check", str(served.root / "config.toml")).returncode == 0
    served.start()
    submitted = served.spool("submit", "--name", "x", "--executor", "mine", "--", "sh", "-c", "echo up; sleep 600")
    assert (submitted.returncode, submitted.stderr) == (0, "")
    served.says("x", "up")
    served.drop("y", "true", executor=None)
    served.wait_done("y")
    assert (served.record("y", "engine") or "").startswith("mine toy ")
    assert "mine" in served.spool("show", "x").stdout
    assert "x" in served.spool("ls").stdout
    doctor = served.spool("doctor")
    assert "mine can be used" in doctor.stdout
    assert served.spool("cancel", "x").returncode == 0
    served.wait_done("x")
    assert served.outcome("x") == "cancelled"


def test_an_unknown_name_is_an_error_with_the_names_that_there_are(served: Served, packages: Path) -> None:
    """Those of packages are among them, and a similar one is what was meant."""
    batch_package(packages)
    file = served.root.parent / "job.toml"
    file.write_text('command = "true"\nexecutor = "mien"\n')
    assert '"mien"' in served.spool("check", str(file)).stdout
    file.write_text('command = "true"\nexecutor = "pbs"\n')
    assert " process, tmux, slurm, sge, mine" in served.spool("check", str(file)).stdout


@pytest.mark.parametrize(
    "module", ["import nowhere_to_be_found\n", "import sys\nsys.exit(3)\n", "CAPABILITY = 1 / 0\n"]
)
def test_one_that_cannot_be_loaded_keeps_no_other_job_from_running(served: Served, packages: Path, module: str) -> None:
    """Its jobs have an executor that is unknown; all others run, and the dispatcher goes on."""
    install(packages, module)
    served.start()
    served.drop("x", "true", executor="mine")
    served.drop("y", "true")
    served.wait_done("y")
    served.until((served.root / "queued" / "x.toml.error").exists, "what is wrong with x")
    assert served.places("x") == ["queued"]


@pytest.mark.parametrize("method", ["missing", "look"])
def test_one_that_breaks_later_is_confined(served: Served, packages: Path, method: str) -> None:
    """An error in a method of its language stops neither the dispatcher nor the jobs of others."""
    batch_package(packages)
    with (packages / "mine_engine.py").open("a") as file:
        file.write(f"\nMine.{method} = lambda *_: 1 / 0\n")
    served.start()
    served.drop("x", "exit 3", executor="mine")  # an exit code of 0 needs no look
    served.until(lambda: "ZeroDivisionError" in served.said(), "the error's line")
    served.drop("y", "true")
    served.wait_done("y")
    assert served.outcome("x") in (None, "failed")
    served.process.kill()
    served.process.wait()
    served.process = None
    served.stderr.write_text("")


def test_missing_programs_of_an_engine_are_named(served: Served) -> None:
    """Its jobs wait with that reason, and doctor says it."""
    words = "no qsub, qstat, qdel, qconf"
    served.environment["PATH"] = "/nonexistent"
    (served.root / "config.toml").write_text('autostart = false\nexecutor = "sge"\ndisk_floor = "0M"\n')
    served.start()
    served.drop("x", "true", executor=None)
    served.wait_reason("x", words)
    assert words in served.spool("doctor").stdout


def test_no_package_is_looked_for_unless_a_name_is_not_built_in() -> None:
    """The search costs more than a submission."""
    program = """
import sys
from spool.formats import config, jobfile
from spool.executors import Executors
jobfile.parse(b'command = "true"\\nexecutor = "slurm"\\n', name="x")
config.parse(b'executor = "sge"\\n')
executors = Executors()
[executors.problem(name) for name in ("process", "slurm", "sge")]
print("importlib.metadata" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
