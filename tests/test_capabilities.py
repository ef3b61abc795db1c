"""What capabilities contribute, and a package outside that is one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from calling import spawned
from spool.cli import group
from spool.core.capability import Capability
from spool.formats import capabilities
from support import ROOT

EXAMPLE = ROOT / "examples" / "capability"
TEXTS = ("job", "config", "problem", "launch", "steps", "wanted", "listener", "listens", "told", "checks")


def targets(capability: Capability) -> list[str]:
    """Return every text "module:attribute" of a row."""
    named = [getattr(capability, column) for column in TEXTS]
    return [each for each in (*named, *(verb.command for verb in capability.verbs.values())) if each]


@pytest.mark.parametrize("capability", capabilities.capabilities(), ids=lambda each: each.name)
def test_what_a_row_names_is_there_and_in_its_own_folder(capability: Capability) -> None:
    """Each text of a row names an object below `spool.extras.NAME`, so that the folder goes with all of it."""
    for target in targets(capability):
        assert target.startswith(f"spool.extras.{capability.name}"), target
        assert capabilities.loaded(target) is not None


def with_packages(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `spool` where the packages in *place* are installed too."""
    return spawned(*words, env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{place}"})


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Install the example's package in a directory of its own, and return that."""
    place = tmp_path / "site"
    (place / "spool_cost-1.0.dist-info").mkdir(parents=True)
    (place / "spool_cost.py").write_bytes((EXAMPLE / "spool_cost.py").read_bytes())
    (place / "spool_cost-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: spool-cost\nVersion: 1.0\n"
    )
    stated = "[spool.capabilities]\ncost = spool_cost:CAPABILITY\n"
    (place / "spool_cost-1.0.dist-info" / "entry_points.txt").write_text(stated)
    return place


def test_a_package_outside_can_do_what_extras_do(installed: Path, spool_root: Path) -> None:
    """The example's table of config.toml is read, its mistakes are named, and its verb runs and is in the help."""
    (spool_root / "config.toml").write_text("cost = { gpu_hour = 0.4 }\n")
    assert with_packages(installed, "cost").returncode == 0
    assert "cost" in with_packages(installed, "--help").stdout
    (spool_root / "config.toml").write_text("cost = { gpu_hours = 0.4 }\n")
    assert "cost.gpu_hour" in with_packages(installed, "doctor").stdout


def test_a_broken_package_is_left_out(tmp_path: Path) -> None:
    """What it raises is said on stderr, and commands work."""
    (tmp_path / "broken-1.0.dist-info").mkdir()
    (tmp_path / "broken-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (tmp_path / "broken-1.0.dist-info" / "entry_points.txt").write_text("[spool.capabilities]\nx = nowhere:X\n")
    said = with_packages(tmp_path, "--help")
    assert (said.returncode, "nowhere" in said.stderr) == (0, True)


def test_a_verb_stands_behind_the_one_that_its_row_names() -> None:
    """The help keeps its order whatever folder a verb comes from."""
    for title, verbs in group.SECTIONS:
        names = [*verbs]
        for capability in capabilities.capabilities():
            for verb, each in capability.verbs.items():
                if each.section == title and each.after in names:
                    assert names.index(verb) > names.index(each.after)
