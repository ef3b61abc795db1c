"""`spool edit` of a table that can be one of its keys alone."""

from __future__ import annotations

from pathlib import Path

from calling import Command, put_job
from spool.extras.containers.runtimes import Container
from spool.formats import jobfile


def test_a_short_form_becomes_a_table_and_stays_in_it(spool: Command, spool_root: Path) -> None:
    """An option of a container keeps its image, and another image its options."""
    path = put_job(spool_root, "a", 'command = "true"\ncontainer = "x:1"\ncpus = 2\n', "held")
    assert spool("edit", "a", "--container-option=--volume=/a:/b").code == 0
    spec = jobfile.parse(path.read_bytes(), name="a")
    assert (spec.part("containers"), spec.request.cpus) == (Container("x:1", None, ("--volume=/a:/b",)), 2)
    assert spool("edit", "a", "--container", "x:2").code == 0
    assert jobfile.parse(path.read_bytes(), name="a").part("containers") == Container("x:2", None, ("--volume=/a:/b",))
    assert spool("edit", "a", "--unset", "container.options").code == 0
    assert jobfile.parse(path.read_bytes(), name="a").part("containers") == Container("x:2")
