"""`spool doctor --slurm`: a probe in a real Slurm, and what is said of clusters that are not as they should be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from long.slurm.cluster import Cluster, path_with
from served import Served
from spool.doctor import Finding, Level, examine
from spool.extras.engines import probe
from spool.extras.engines.probe import OF_SLURM


def _found(root: Path) -> dict[str, Finding]:
    return {finding.check: finding for finding in examine(str(root), checks=OF_SLURM)}


def test_a_cluster_that_is_well_is_found_well(unserved: Served, slurm: Cluster) -> None:
    """The command looks at everything through a job, exits with 0, and leaves neither files nor a job."""
    said = unserved.spool("doctor", "--slurm", "--json")
    assert said.returncode == 0, said.stdout
    checks = {each["check"]: each for each in json.loads(said.stdout)["checks"]}
    assert {each["level"] for each in checks.values()} == {"ok"}
    assert {"shared spool", "exclusive creation", "user", "clocks", "comment", "requeue", "limits"} <= set(checks)
    assert "cluster test answers" in checks["Slurm"]["text"]
    assert os.listdir(unserved.root / ".tmp") == []
    assert [job["state"] for job in slurm.jobs() if job["name"] == "spool-doctor"] == ["COMPLETED"]


def test_what_slurm_refuses_is_told_in_its_words(unserved: Served) -> None:
    """A partition that is not there: the finding has Slurm's words and says which keys to look at."""
    with (unserved.root / "config.toml").open("a") as config:
        config.write('partition = "nowhere"\n')
    said = unserved.spool("doctor", "--slurm", "-q")
    assert said.returncode == 1
    assert "submission: Slurm refuses it: invalid partition specified" in said.stdout
    assert "[slurm] of config.toml" in said.stdout


def test_a_cluster_that_does_not_answer_is_told_of_once(
    unserved: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is submitted, and no further finding says that it could not be."""
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", path_with(tmp_path / "bin", "scontrol", 'echo "no configuration" >&2; exit 1'))
    assert [finding.check for finding in examine(str(unserved.root), checks=OF_SLURM)] == ["Slurm"]


def test_a_probe_that_waits_is_taken_back(unserved: Served, slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """While no node has room the probe says what it waits for, and leaves the queue."""
    slurm.set_nodes("drain")
    monkeypatch.setattr(probe, "PATIENCE_S", 1.5)
    found = _found(unserved.root)["probe"]
    assert found.level is Level.WARN
    assert "is still PENDING (ReqNodeNotAvail" in found.text or "is still PENDING (Nodes required" in found.text
    assert {job["state"] for job in slurm.jobs() if job["name"] == "spool-doctor"} <= {"CANCELLED", "COMPLETED"}


_BROKEN = {
    "squeue": """"$real" "$@" | sed 's/spool:doctor:.*/theirs/'""",
    "scontrol": """"$real" "$@" | sed '
        s/Requeue=0/Requeue=1/
        s/DefaultTime=NONE/DefaultTime=01:00:00/
        s/^MinJobAge .*/MinJobAge = 5 sec/'""",
}
_TOLD = {
    "comment": "changed the comment of a job to 'theirs'",
    "requeue": "starts jobs again by itself",
    "limits": "after 01:00:00",
    "Slurm's settings": "forgets a job 5s",
}


@pytest.mark.parametrize(
    ("scripts", "told"),
    [
        (_BROKEN, _TOLD),
        ({"sbatch": '"$real" --parsable --output=/dev/null --wrap=true'}, {"shared spool": "does not see"}),
    ],
)
def test_what_is_not_as_it_should_be_is_told(
    unserved: Served, monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str], told: dict[str, str]
) -> None:
    """A cluster that changes comments, requeues, limits and forgets, or shares no files."""
    paths = [path_with(unserved.root.parent / "before", program, text) for program, text in scripts.items()]
    monkeypatch.setenv("PATH", paths[0])
    found = _found(unserved.root)
    for check, words in told.items():
        assert found[check].level is not Level.OK
        assert words in found[check].text
        assert found[check].remedy
    assert os.listdir(unserved.root / ".tmp") == []


def test_without_slurm_the_probe_is_left_out(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Slurm's commands are not there, that is the one finding."""
    monkeypatch.setenv("PATH", "/nonexistent")
    (found,) = examine(str(spool_root), checks=OF_SLURM)
    assert (found.check, found.level) == ("Slurm", Level.FAIL)
    assert "no sbatch, squeue, scancel, scontrol, sinfo" in found.text
