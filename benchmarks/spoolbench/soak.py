"""Spool after many short jobs: what the dispatcher, and the process that writes the status page, still hold."""

from __future__ import annotations

import time
from pathlib import Path

from spoolbench.drop import drop
from spoolbench.engines import SpoolEngine
from spoolbench.figures import Samples, Size
from spoolbench.tools import Scratch, memory_bytes, until

_SLOTS = 4
_TIMES = 5  # as many jobs in all as at the first look


def soak(engine: SpoolEngine, scratch: Scratch, size: Size) -> Samples:
    """Run short jobs of different names with the status page on, and look at the memory early and late."""
    engine.prepare(_SLOTS)
    with (engine.root / "config.toml").open("a") as config:
        config.write('status_page = "page.html"\n')
    engine.serve()
    found: Samples = {}
    try:
        for part in range(_TIMES):
            drop(str(engine.root), size.soaked, f"soak{part}x", ["/bin/true"], numbered=True, workdir="/")
            ended = (part + 1) * size.soaked
            until(lambda ended=ended: _lines(engine.root) >= ended, size.timeout_s, f"the end of {ended} jobs")  # type: ignore[misc]
            time.sleep(min(3.0, size.idle_s))  # until the page is written
            if part in (0, _TIMES - 1):
                when = "few" if part == 0 else "many"
                found[f"soak_{when}"] = [memory_bytes(engine.pids()[0])[0] / 2**20]
                found[f"soak_page_{when}"] = [sum(memory_bytes(pid)[0] for pid in _helpers(engine.pids()[0])) / 2**20]
    finally:
        engine.stop()
    return found


def _lines(root: Path) -> int:
    try:
        return (root / "history.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _helpers(pid: int) -> list[int]:
    """Return the Python processes that a dispatcher has started."""
    children = [each.read_text().split() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for some in children for child in some if b"listeners" in _words(child)]


def _words(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # a short job
        return b""
