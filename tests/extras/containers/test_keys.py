"""How a job file states the container of its command, and how the commands change that."""

from __future__ import annotations

from pathlib import Path

from calling import Command, put_job
from spool.extras.containers.runtimes import Container
from spool.formats import jobfile


def container(text: bytes) -> object:
    """Return the container that a job file states."""
    return jobfile.parse(text, name="a").part("containers")


def test_a_golden_job_file_loads_for_ever() -> None:
    """A job that was right once keeps its meaning in every later version."""
    found = container((Path(__file__).parent / "golden" / "job.toml").read_bytes())
    assert found == Container("pytorch/pytorch", "docker", ("--ipc=host",))


def test_a_short_form_becomes_a_table_and_stays_in_it(spool: Command, spool_root: Path) -> None:
    """An option of a container keeps its image, and another image its options."""
    path = put_job(spool_root, "a", 'command = "true"\ncontainer = "x:1"\ncpus = 2\n', "held")
    assert spool("edit", "a", "--container-option=--volume=/a:/b").code == 0
    assert container(path.read_bytes()) == Container("x:1", None, ("--volume=/a:/b",))
    assert "cpus = 2" in path.read_text()
    assert spool("edit", "a", "--container", "x:2").code == 0
    assert container(path.read_bytes()) == Container("x:2", None, ("--volume=/a:/b",))
    assert spool("edit", "a", "--unset", "container.options").code == 0
    assert container(path.read_bytes()) == Container("x:2")
