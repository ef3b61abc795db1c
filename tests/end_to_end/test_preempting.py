"""Preemption with real processes: a long job that saves its state makes room for a short one, and continues."""

from __future__ import annotations

import pytest

from served import Served

_TRAINS = """
trap 'echo saved > $SPOOL_METADIR/../../../saved; exit 0' USR1
if [ -e $SPOOL_METADIR/../../../saved ]; then echo continued; exit 0; fi
echo begun
while :; do sleep 0.05; done
"""


@pytest.fixture
def served(served: Served) -> Served:
    """Give a spool of one processor in which a run may be stopped as soon as it has begun."""
    (served.root / "config.toml").write_text('cpus = 1\ndisk_floor = "0M"\n[preemption]\nafter = "0s"\n')
    return served.start()


def test_a_long_job_saves_its_state_and_continues_after_the_short_one(served: Served) -> None:
    """It gets its warning signal and time; what it was stopped for is told of both jobs, and nothing is counted."""
    served.drop("long", ["sh", "-c", _TRAINS], preemptible=True, time_limit="1d", signal="USR1@60s", requeue=False)
    served.says("long", "begun")
    served.drop("short", "sleep 1", time_limit="1h")
    assert (served.wait_done("short") or {})["outcome"] == "finished"
    served.wait_done("long")
    assert [served.outcome("long", run) for run in served.runs("long")] == ["preempted", "finished"]
    first, last = (served.result("long", run) or {} for run in (1, 2))
    assert (first["reason"], first["again"]) == ("preempted for short", "requeue")
    assert (last["attempt"], last.get("requeues", 0)) == (1, 0)
    assert first["submitted_at_ns"] == last["submitted_at_ns"]
    assert "continued" in served.log("long", 2)
    assert "preempted" in served.spool("show", "long").stdout


def test_why_says_who_makes_room_for_whom(served: Served) -> None:
    """The short job is told which run is stopped for it; the long one, once it waits, for which job it was stopped."""
    command = "trap '' USR1; echo begun; while :; do sleep 0.05; done"
    served.drop("long", ["sh", "-c", command], preemptible=True, time_limit="1d", signal="USR1@60s")
    served.says("long", "begun")
    served.drop("short", "sleep 100", time_limit="1h")
    served.until(lambda: "preempted for short" in served.spool("ls").stdout, "the order to stop it")
    assert "preemption: long, " in served.spool("why", "short").stdout
    served.spool("cancel", "long")
