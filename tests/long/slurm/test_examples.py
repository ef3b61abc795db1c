"""The example for Slurm, as its reader would run it, with the configuration of its page."""

from __future__ import annotations

import re
import tomllib

from long.slurm.cluster import Cluster
from served import Served
from support import ROOT

EXAMPLE = ROOT / "examples" / "slurm"


def test_the_example_runs_on_a_node(unserved: Served, slurm: Cluster) -> None:
    """The two lines of configuration are enough, and the job says on which node it was and as which of Slurm's."""
    lines = (EXAMPLE / "README.md").read_text().partition("```toml\n")[2].partition("```")[0]
    assert len(tomllib.loads(lines)) == len(lines.splitlines()) == 2
    assert lines in (ROOT / "docs" / "CLUSTER.md").read_text()
    (unserved.root / "config.toml").write_text(f'autostart = false\ndisk_floor = "0M"\n{lines}')
    unserved.start()
    submitted = unserved.spool("submit", "-f", str(EXAMPLE / "pi.toml"), "--wait")
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert re.fullmatch(r"on n\d, Slurm's job \d+\npi is 3\.141593\n", unserved.log("pi"))
    unserved.executor = None  # as one whose file says nothing of Slurm
    unserved.drop("plain", "echo $SLURMD_NODENAME")
    unserved.wait_done("plain")
    assert re.fullmatch(r"n\d\n", unserved.log("plain"))
