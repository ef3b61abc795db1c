"""The metrics of a real dispatcher."""

from __future__ import annotations

import json
from pathlib import Path

from served import Served
from support import wait_for


def test_metrics_follow_the_spool(served: Served, tmp_path: Path) -> None:
    """The file is there soon after the dispatcher, and says at its end what has happened, and that nobody serves."""
    out = tmp_path / "spool.prom"
    (served.root / "config.toml").write_text(f'cpus = 4\nlook_every = "1h"\nmetrics = "{out}"\n')
    served.start()
    wait_for(lambda: out.exists() and "spool_dispatcher_up" in out.read_text())
    assert out.stat().st_mode & 0o777 == 0o644
    served.drop("good", "true")
    served.drop("bad", "exit 1", retry={"max": 1})
    wait_for(lambda: served.places("good") == ["done"] and served.places("bad") == ["done"])
    assert served.stop() == 0
    wait_for(lambda: f'spool_dispatcher_up{{spool="{served.root}"}} 0.0' in out.read_text())
    text = out.read_text()
    spool = f'spool="{served.root}"'
    for line in (
        f"spool_submissions_total{{{spool}}} 2.0",
        f'spool_job_outcomes_total{{outcome="finished",{spool}}} 1.0',
        f'spool_job_outcomes_total{{outcome="failed",{spool}}} 1.0',
        f'spool_retries_total{{kind="retry",{spool}}} 1.0',
        f'spool_run_duration_seconds_count{{outcome="failed",{spool}}} 2.0',
        f"spool_job_wait_seconds_count{{{spool}}} 2.0",
        f"spool_errors_total{{{spool}}} 0.0",
    ):
        assert line in _sorted_labels(text), line
    passes = json.loads((served.root / "state.json").read_text())["passes"]
    assert passes["count"] == sum(passes["counts"]) > 0


def _sorted_labels(text: str) -> str:
    """Return the series with their labels in the order of the alphabet."""
    lines = []
    for line in text.splitlines():
        name, brace, rest = line.partition("{")
        labels, _, value = rest.rpartition("}")
        lines.append(f"{name}{{{','.join(sorted(labels.split(',')))}}}{value}" if brace else line)
    return "\n".join(lines)
