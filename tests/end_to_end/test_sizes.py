"""Jobs that leave their memory to spool, or ask for more after a run that had too little."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from served import Served, remember

EXECUTORS = ("process", "sh", "tmux")
MIB = 1 << 20
TAKES = f"exec {sys.executable} -c 'import time; x = bytearray(150 << 20); x[::4096] = x[::4096]; time.sleep(600)'"
FIRST = f"[ $SPOOL_ATTEMPT != 1 ] || {TAKES}"
"""Takes 150 MiB, but not when it is tried again."""


def granted(spool: Served, name: str, run: int) -> int:
    """Return the memory that an ended run was granted, in MiB."""
    size: int = (spool.result(name, run) or {})["grant"]["memory_bytes"]
    return size // MIB


def test_a_guess_that_was_too_small_is_followed_by_a_larger_run(live: Served) -> None:
    """Without any `retry`, and under each executor; the history says what was guessed and what was granted."""
    live.drop("eager", FIRST, memory="auto:50M")
    assert live.wait_outcome("eager", 1) == "out_of_memory"
    live.wait_done("eager")
    assert (live.outcome("eager", 2), granted(live, "eager", 1)) == ("finished", 50)
    assert granted(live, "eager", 2) >= 256
    first, second = live.history()
    assert (first["memory_bytes"], first["memory_auto"], first["again"]) == (50 * MIB, True, "retry")
    assert second["granted_memory_bytes"] == granted(live, "eager", 2) * MIB


@pytest.mark.parametrize("keys", [{"memory": "auto:50M"}, {"memory": "50M", "retry": {"max": 1, "memory_factor": 4}}])
def test_what_a_killed_run_had_survives_its_dispatcher(live: Served, keys: dict[str, Any]) -> None:
    """The larger request follows from the record of that run, which another dispatcher reads."""
    live.begun("eager", FIRST, **keys)
    (live.root / "paused").touch()
    assert live.wait_outcome("eager", 1) == "out_of_memory"
    live.kill()
    said = live.spool("why", "eager").stdout
    assert " run 1 " in said
    live.start()
    (live.root / "paused").unlink()
    live.wait_done("eager")
    assert (live.outcome("eager", 2), granted(live, "eager", 2) >= 200) == ("finished", True)


def test_commands_say_what_would_be_requested_and_why(served: Served) -> None:
    """`submit`, `why` and `show` before the run, `ls` with the plan, `seff` after it."""
    remember(served, "train", 300, runs=3)
    (served.root / "paused").touch()
    served.start()
    words = "memory 384 MiB, 20% above the 300 MiB that the last 3 runs like it used at most"
    told = served.spool("submit", "--name", "train", "-m", "auto", "--retry-max", "1", "--", "true")
    assert f"job train requests {words}\n" in told.stderr
    assert f"requests: {words}" in served.spool("why", "train").stdout
    assert words in " ".join(served.spool("show", "train").stdout.split())
    served.wait_reason("train", "paused")
    (row,) = json.loads(served.spool("ls", "--json").stdout)["jobs"]
    assert row["memory_bytes"] == 384 * MIB
    (served.root / "paused").unlink()
    served.wait_done("train")
    assert "memory 384 MiB" in served.spool("seff", "train").stdout
    assert json.loads(served.spool("show", "--json", "train").stdout)["requests"] == ""
