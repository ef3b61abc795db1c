"""Calling the commands in tests: as processes of their own, and the job files they are given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import ROOT


@dataclass(frozen=True)
class Said:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Said]


def asked(spool: Command, *words: object) -> Any:
    """Return what a command says as JSON."""
    said = spool(*words, "--json")
    assert said.code == 0, said.err
    return json.loads(said.out)


def start(*words: object, stdin: int | None = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """Start `spool` as a process of its own, leader of its own group."""
    return subprocess.Popen(
        [sys.executable, "-m", "spool", *map(str, words)],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        start_new_session=True,
    )


def put_job(root: Path, name: str, text: str = 'command = "true"\n', place: str = "queued") -> Path:
    """Put a job file into a state directory."""
    path = root / place / f"{name}.toml"
    path.write_text(text)
    return path
