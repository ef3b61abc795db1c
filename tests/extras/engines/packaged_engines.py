"""An installed package that offers an engine, for tests: a directory for PYTHONPATH with its modules and metadata."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from extras.engines import batch
from support import ROOT

_ENGINE = """
from spool.formats.wrapper import EngineSurroundings
from extras.engines.batch import {language}


class Mine({language}):
    name = "mine"
    title = "my engine"
    surroundings = EngineSurroundings("mine", "BATCH_NODE", "BATCH_ID", watches=not {language}.signals)
"""


def install(directory: Path, module: str, name: str = "mine", attribute: str = "Mine") -> None:
    """Put a package with that text into *directory*, whose entry point *name* of `spool.engines` is *attribute*."""
    directory.mkdir(exist_ok=True)
    (directory / f"{name}_engine.py").write_text(module)
    about = directory / f"{name}_engine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-engine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[spool.engines]\n{name} = {name}_engine:{attribute}\n")


def batch_package(directory: Path, language: type[batch.BatchLanguage] = batch.BatchLanguage) -> None:
    """Install an engine `mine`, which is the batch system."""
    install(directory, _ENGINE.format(language=language.__name__))


def path_with(directory: Path) -> Mapping[str, str]:
    """Return the variable by which a program finds spool and the packages in *directory*."""
    return {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}{os.pathsep}{directory}"}
