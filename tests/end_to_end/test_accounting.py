"""Jobs that really ran, a dispatcher that is killed between them, and what the accounting makes of it."""

from __future__ import annotations

import json
import sys
from typing import Any

from served import Served

EXECUTORS = ("process",)


def said(served: Served, *words: str) -> dict[str, Any]:
    """Return the JSON that a command prints."""
    done = served.spool(*words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_what_real_jobs_used_is_known_also_of_one_that_outlived_its_dispatcher(served: Served) -> None:
    """Peak memory and CPU time are known of runs under one dispatcher, and of one that outlived its dispatcher."""
    (served.root / "config.toml").write_text("cpus = 4\n")
    # Started by a program that is larger than the job, as a notebook may be.
    large = "import os, sys; x = b'x' * (400 << 20); os.execv(sys.argv[1], sys.argv[1:])"
    served.start(prefix=[sys.executable, "-c", large])
    served.drop("eats", [sys.executable, "-c", "b = bytearray(150 << 20); sum(range(3_000_000))"], cpus=2)
    served.drop("fails", "exit 3", retry={"max": 1})
    served.wait_done("eats", "fails")
    found = said(served, "seff", "eats")
    assert found["peak_memory_bytes"] >= 150 << 20
    assert found["cpu_time_ns"] > 0
    assert found["cpu_efficiency"] > 0
    assert found["advice"]["memory_bytes"] >= 180 << 20

    gate = served.root.parent / "gate"
    works = "n=0; until [ $n -eq 100000 ]; do n=$((n + 1)); done"  # for more than a tick of the kernel's count
    waits = f"until [ -e {gate} ]; do sleep 0.05; done"
    served.up("outlives", f"{works}; echo up; {waits}", memory="1G", time_limit="1h")
    served.kill()
    now = said(served, "seff", "outlives")
    assert (now["state"], now["so_far"], now["time_limit_ns"]) == ("running", True, 3600 * 10**9)
    assert now["memory_now_bytes"] > 0
    assert now["run_time_ns"] > 0
    assert now["cpu_time_ns"] is not None
    served.start()
    gate.touch()
    served.wait_done("outlives")
    after = said(served, "seff", "outlives")
    assert after["state"] == "finished"
    assert after["cpu_time_ns"] > 0
    assert after["cpu_efficiency"] is not None

    whole = said(served, "stats", "--since", "1d", "--by", "state")
    assert (whole["total"]["runs"], whole["total"]["jobs"], whole["total"]["retries"]) == (4, 3, 1)
    assert whole["total"]["success_rate"] == 2 / 3
    assert (whole["total"]["cpu_used_runs"], whole["unreadable_lines"]) == (4, 0)
    assert {each["state"]: each["runs"] for each in whole["groups"]} == {"finished": 2, "failed": 2}
    assert 2 <= whole["total"]["peak_cpus"] <= 4
