"""Many jobs on a real Grid Engine while the dispatcher, the master and other people interfere."""

from __future__ import annotations

import os
import random
import time

import pytest

from long.gridengine.cluster import GridEngine
from spool.testing.engine_claims import Site

JOBS = int(os.environ.get("SGE_JOBS", "16"))
KILLS = int(os.environ.get("SGE_KILLS", "3"))


@pytest.mark.timeout(900)
def test_every_job_runs_as_often_as_it_says_whatever_is_killed(engine_site: Site, sge: GridEngine) -> None:
    """Each writes its name at its begin: once, whether it succeeds or fails, and the outcome is that of the command."""
    spool, dice = engine_site.spool, random.Random(7)
    ledger = spool.root.parent / "ledger"
    names = {f"j{number}": dice.choice((0, 0, 3, 99)) for number in range(JOBS)}
    for name, code in names.items():
        spool.drop(name, f"echo {name} >> {ledger}; sleep 0.{dice.randrange(10)}; exit {code}")
    for number in range(KILLS):
        spool.start()
        time.sleep(dice.uniform(0.3, 2))
        if number % 3 == 1:
            sge.kill_master()
            time.sleep(dice.uniform(0, 1))
            sge.start_master()
        spool.kill()
    spool.start()
    spool.wait_done(*names)
    assert sorted(ledger.read_text().split()) == sorted(names)
    outcomes = {name: spool.outcome(name, spool.runs(name)[-1]) for name in names}  # void runs come before
    assert outcomes == {name: "failed" if code else "finished" for name, code in names.items()}
