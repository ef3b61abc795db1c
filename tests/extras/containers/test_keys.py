"""How a job file states the container of its command, and how the commands change that."""

from __future__ import annotations

from pathlib import Path

import pytest

from calling import Command, put_job
from spool.core.errors import InvalidJob
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
    assert spool("edit", "a", "--set=container.options=--volume=/a:/b").code == 0
    assert container(path.read_bytes()) == Container("x:1", None, ("--volume=/a:/b",))
    assert "cpus = 2" in path.read_text()
    assert spool("edit", "a", "--container", "x:2").code == 0
    assert container(path.read_bytes()) == Container("x:2", None, ("--volume=/a:/b",))
    assert spool("edit", "a", "--unset", "container.options").code == 0
    assert container(path.read_bytes()) == Container("x:2")


@pytest.mark.parametrize(
    "value",
    [
        *("3", '{ runtime = "docker" }', '"--volume=/:/x"', '{ image = "x", runtime = "dokcer" }'),
        *('{ image = "x", options = ["--name=x"] }', '{ image = "x", options = ["-itd"] }'),
        *('{ image = "x", options = ["-v", "/a:/a"] }', '{ image = "x", options = ["/data:/data"] }'),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_with_its_key_and_line(value: str) -> None:
    """One mistake gives one problem, with what was meant if that is known."""
    with pytest.raises(InvalidJob) as error:
        container(f'command = "x"\ncontainer = {value}\n'.encode())
    (problem,) = error.value.problems
    assert problem.message.startswith('"container')
    assert problem.line in (None, 2)
    assert "dokcer" not in value or problem.message.endswith('did you mean "docker"?')


def test_options_of_a_submission_state_it(spool: Command, spool_root: Path) -> None:
    """Image and options come out as a person would have written them; an image without a name is refused."""
    options = ("--set=container.options=--ipc=host", "--set=container.options=-v /a:/a")
    assert spool("submit", "--name", "a", "--container", "an/image", *options, "--", "true").code == 0
    found = container((spool_root / "queued" / "a.toml").read_bytes())
    assert found == Container("an/image", None, ("--ipc=host", "-v /a:/a"))
    said = spool("submit", "--container", "", "--", "true")
    assert (said.code, "--container: " in said.err) == (4, True)
