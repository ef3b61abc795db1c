"""What capabilities contribute, and a package outside that is one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from calling import spawned
from spool.cli import group
from spool.core.model import Grant
from spool.formats import capabilities
from spool.formats.capabilities import Capability
from spool.formats.run_records import render_history
from support import ROOT, wait_for
from views import an_end

EXAMPLE = ROOT / "examples" / "capability"
TEXTS = ("job", "config", "problem", "launch", "steps", "listener", "listens", "told", "checks")


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


def install(place: Path, name: str, entry: str) -> None:
    """Install a distribution of that name, which offers a capability, in *place*."""
    info = place / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[spool.capabilities]\n{entry}\n")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Install the example's package in a directory of its own, and return that."""
    place = tmp_path / "site"
    place.mkdir()
    (place / "spool_cost.py").write_bytes((EXAMPLE / "spool_cost.py").read_bytes())
    install(place, "spool_cost", "cost = spool_cost:CAPABILITY")
    return place


def test_a_package_outside_can_do_what_extras_do(installed: Path, spool_root: Path) -> None:
    """The example's table of config.toml is read, its mistakes are named, and its verb runs and is in the help."""
    (spool_root / "config.toml").write_text("cost = { gpu_hour = 0.4 }\n")
    ended = an_end(10**18, "x", hours_ago=1, grant=Grant(1, gpu_uuids=("GPU-0", "GPU-1")))
    (spool_root / "history.jsonl").write_bytes(render_history(ended))
    assert with_packages(installed, "cost").stdout == "alice  0.80\n"
    assert "cost" in with_packages(installed, "--help").stdout
    (spool_root / "config.toml").write_text("cost = { gpu_hours = 0.4 }\n")
    assert "cost.gpu_hour" in with_packages(installed, "doctor").stdout


def test_a_broken_package_is_left_out(tmp_path: Path) -> None:
    """What it raises is said on stderr, and commands work."""
    install(tmp_path, "broken", "x = nowhere:X")
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


WRITING = """
import os
from spool.formats.capabilities import Capability

class Writer:
    name = "writer"
    def __init__(self, root, config):
        self.path = f"{root}/heard"
    wants = {"queued", "finished", "finishd"}
    def hear(self, event, done):
        with open(self.path, "a") as file:
            file.write(f"{event.name} {event.job}\\n")
        done()
    def tick(self):
        return None
    def close(self):
        pass

def listens(config):
    return True

class Steps:
    waiting = False
    def __init__(self, context):
        self.pipe = os.pipe()
    def fileno(self):
        return self.pipe[0]
    def ready(self, starts):
        return starts
    def put(self, live):
        with open(f"{os.path.dirname(__file__)}/put", "w") as file:
            file.write(live.name)
    def work(self):
        return False
    def close(self):
        pass

CAPABILITY = Capability(
    "writer", "Writes.", listener="writing:Writer", listens="writing:listens", steps="writing:Steps"
)
"""


def test_a_package_hears_and_takes_part_in_starts_though_no_file_names_it(tmp_path: Path, spool_root: Path) -> None:
    """A dispatcher looks for capabilities of packages as it begins, without a key or a verb that is missed.

    A listener that misspells an event is told, with what was probably meant; it hears the others.
    """
    install(tmp_path, "writing", "w = writing:CAPABILITY")
    (tmp_path / "writing.py").write_text(WRITING)
    (spool_root / "queued" / "a.toml").write_text('command = "true"\n')
    said = with_packages(tmp_path, "dispatch", "--until-idle")
    assert said.returncode == 0
    assert 'the listener writer (writing:Writer) wants "finishd": no such event, did you mean finished?' in said.stderr
    assert (tmp_path / "put").read_text() == "a"
    wait_for(lambda: (spool_root / "heard").exists() and "finished a" in (spool_root / "heard").read_text())
