"""Hooks for tests: real shell scripts, and the ledger that they write."""

from __future__ import annotations

import os
from pathlib import Path

from served import Served, alive
from spool.machine.identity import read_stat

LEDGER = "ledger"
RECORD = f'echo "$SPOOL_EVENT|$SPOOL_JOB|$SPOOL_RUN|$SPOOL_OUTCOME|$SPOOL_REASON|$SPOOL_EVENT_ID" >> {LEDGER}'


def hook(spool: Served, name: str, script: str = RECORD, *, mode: int = 0o755) -> Path:
    """Put a hook there, whole: elsewhere first, then `mv`."""
    folder = spool.root / "hooks"
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / name
    target.parent.mkdir(mode=0o700, exist_ok=True)
    staged = spool.root / ".tmp" / f"hook.{name.replace('/', '.')}"
    staged.write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}\n")
    staged.chmod(mode)
    return staged.rename(target)


def ledger(spool: Served) -> list[list[str]]:
    """Return what the hooks have written: event, job, run, outcome, reason, id."""
    try:
        text = (spool.root / LEDGER).read_text()
    except FileNotFoundError:
        return []
    return [line.split("|") for line in text.splitlines()]


def told(spool: Served, job: str = "") -> list[str]:
    """Return the events of one job, or those of none, in the order in which they were told; repeats left out."""
    seen: dict[str, str] = {}
    for line in ledger(spool):
        if line[1] == job:
            seen.setdefault(line[5], line[0])
    return list(seen.values())


def wait_told(spool: Served, event: str, job: str = "") -> list[str]:
    """Wait until the event was told, and return its line."""

    def found() -> list[str]:
        return next((line for line in ledger(spool) if line[:2] == [event, job]), [])

    return spool.until(found, f"{event} of {job or 'nobody'}")


def listeners(spool: Served) -> int | None:
    """Return the pid of the process of the listeners: the dispatcher's child of that name."""
    assert spool.process is not None
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                stat = read_stat(int(entry))
            except OSError:
                continue
            if b"spool.listeners" in words and os.fsencode(spool.root) in words and stat and alive(int(entry)):
                parents[int(entry)] = stat.parent
    # A hook that is just being started is a copy of that process for a moment, and its child.
    return next((pid for pid, parent in parents.items() if parent not in parents), None)
