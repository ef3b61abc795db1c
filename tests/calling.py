"""Calling the commands in tests: as processes of their own, and the job files they are given."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import PATIENCE_S, ROOT


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


def spawned(
    *words: object, program: Sequence[str] = ("-m", "spool"), **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `spool`, or another *program* of this interpreter, as a process of its own to its end."""
    kept = {} if options.keys() & {"stdout", "stderr"} else {"capture_output": True}
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, *program, *map(str, words)],
        **{"text": True, "check": False, "env": environment, **kept, **options},
    )


class HangError(BaseException):
    """What was called took longer than anything may."""


@contextlib.contextmanager
def no_hang() -> Iterator[None]:
    """Break off what hangs in this process: whatever takes longer than all that a test waits for."""

    def hangs(*_: object) -> None:
        raise HangError(f"longer than {PATIENCE_S}s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
