"""An installed package that offers an engine, for tests: a directory for PYTHONPATH with its modules and metadata."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from extras.engines import batch
from support import ROOT

_ENGINE = """
from spool.formats.capabilities import Capability, EngineOffer
from spool.extras.engines import keys_of_all
from spool.extras.engines.engine import ClusterEngine
from spool.extras.engines.language import EngineConfig
from spool.formats.capabilities import Key, KeyTable, Part
from spool.formats.validation import PartReader
from spool.formats.wrapper import EngineSurroundings
from extras.engines.batch import {language}

TABLE = KeyTable("MineTable", "How to hand jobs to my engine.", *keys_of_all("my engine", "my-submit"))
CONFIG = Part(
    Key("mine", TABLE, "How to hand jobs to my engine.", default=None), after="sge", reader="mine_engine:READER"
)
READER = PartReader(lambda reading: EngineConfig(**reading.found["mine"]) if "mine" in reading.document else None)


class Mine({language}):
    name = "mine"
    title = "my engine"
    surroundings = EngineSurroundings("mine", "BATCH_NODE", "BATCH_ID", watches=not {language}.signals)


def executor(name, config, home):
    return ClusterEngine(Mine(config), home, gone=lambda: config().other_hosts_gone)


CAPABILITY = Capability(
    "mine",
    "Hands jobs to my engine.",
    config="mine_engine:CONFIG",
    engines={{"mine": EngineOffer("my engine", "mine_engine:executor")}},
)
"""


def install(directory: Path, module: str) -> None:
    """Put a package with that text into *directory*, whose capability is CAPABILITY."""
    directory.mkdir(exist_ok=True)
    (directory / "mine_engine.py").write_text(module)
    about = directory / "mine_engine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine-engine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[spool.capabilities]\nmine = mine_engine:CAPABILITY\n")


def batch_package(directory: Path, language: type[batch.BatchLanguage] = batch.BatchLanguage) -> None:
    """Install an engine `mine`, which is the batch system."""
    install(directory, _ENGINE.format(language=language.__name__))


def path_with(directory: Path) -> Mapping[str, str]:
    """Return the variable by which a program finds spool and the packages in *directory*."""
    return {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}{os.pathsep}{directory}"}
