"""`spool seff`: what a job asked for against what it used."""

from __future__ import annotations

import os
import shutil
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from calling import Command, asked, put_job
from cli.records import end, expand, metadir_of
from spool.core import layout
from spool.core.model import SECOND_NS as S
from spool.core.model import Grant, Jid, Request, Result, State
from spool.formats import run_records
from spool.machine import identity
from spool.store.ownership import this_user

T0 = 1_700_000_000 * S
G = 1 << 30
HOUR = 3600 * S


def ended(root: Path, job: str, run: int = 1, outcome: State = State.FINISHED, **more: Any) -> Result:
    """File a run of an hour with 4 CPUs, 8 GiB and a GPU, as a dispatcher does: records and a line of history."""
    known: dict[str, Any] = {
        "submitted_at_ns": T0, "started_at_ns": T0, "ended_at_ns": T0 + HOUR, "cpu_time_ns": 2 * HOUR,
        "peak_memory_bytes": 2 * G, "request": Request(4, 8 * G, 1),
        "grant": Grant(4, 8 * G, ("GPU-0",), (0,)),
    } | more  # fmt: skip
    result = Result(job, run, 1, outcome, "", **known)
    metadir = end(root, result)
    (metadir / layout.SPEC_COPY).write_text('command = "true"\ncpus = 4\ntime_limit = "2h"\n')
    grant(metadir, run_records.GrantRecord(job, run, grant=result.grant))
    put_job(root, job, place="done")
    return result


def grant(metadir: Path, record: run_records.GrantRecord) -> None:
    """Record what a run was given."""
    (metadir / layout.GRANT).write_bytes(run_records.render_grant(record))


@pytest.mark.parametrize("auto", [False, True])
def test_one_size_is_given_for_the_next_run(spool: Command, spool_root: Path, auto: bool) -> None:
    """What to write into the file, or, where the file leaves it to spool, what the next run requests."""
    now_ns = time.time_ns()
    request, times = Request(4, 8 * G, 1, memory_auto=auto), (now_ns - HOUR, now_ns)
    ended(
        spool_root, "train", request=request, user=this_user(), started_at_ns=times[0], ended_at_ns=times[1],
        submitted_at_ns=times[0],
    )  # fmt: skip
    found = asked(spool, "seff", "train")
    assert found["auto"]
    assert found["advice"]["memory_bytes"] == 2560 << 20
    said = spool("seff", "train").out
    assert (said.count("\nauto "), said.count('memory = "')) == ((1, 0) if auto else (0, 1))


def test_json_has_units_in_its_names(spool: Command, spool_root: Path) -> None:
    """The keys are documented; what is unknown is null and never 0."""
    ended(spool_root, "train", cpu_time_ns=None, peak_memory_bytes=None)
    found = asked(spool, "seff", "train")
    assert (found["version"], found["job"], found["run"], found["state"]) == (1, "train", 1, "finished")
    assert (found["cpus"], found["memory_bytes"], found["gpus"], found["time_limit_ns"]) == (4, 8 * G, 1, 2 * HOUR)
    assert (found["run_time_ns"], found["gpu_hours"], found["time_limit_used"]) == (HOUR, 1, 0.5)
    for key in ("cpu_time_ns", "cpu_efficiency", "cpus_used", "peak_memory_bytes", "memory_efficiency"):
        assert found[key] is None, key
    assert (found["so_far"], found["advice"]["cpus"]) == (False, None)
    text = spool("seff", "train").out
    assert "CPU time   unknown" in text
    assert "peak unknown" in text


def test_the_newest_run_or_the_one_that_is_named(spool: Command, spool_root: Path) -> None:
    """The first run failed; the second is what is shown unless told otherwise."""
    ended(spool_root, "train", 1, State.FAILED, again="retry")
    ended(spool_root, "train", 2)
    assert (asked(spool, "seff", "train")["run"], asked(spool, "seff", "train")["runs"]) == (2, [1, 2])
    assert asked(spool, "seff", "train.toml", "--run", 1)["state"] == "failed"
    assert "run 1 of 2, failed" in spool("seff", "train", "--run", 1).out


def test_a_run_whose_records_were_removed_is_in_the_history(spool: Command, spool_root: Path) -> None:
    """All but its time limit, which no line of history has."""
    ended(spool_root, "train")
    shutil.rmtree(spool_root / "jobs" / "train")
    for words in (("train",), ("train", "--run", 1)):
        found = asked(spool, "seff", *words)
        assert (found["cpu_efficiency"], found["memory_efficiency"], found["time_limit_ns"]) == (0.5, 0.25, None)


def test_a_clock_that_was_set_gives_no_time(spool: Command, spool_root: Path) -> None:
    """A run that ended before it began has no run time, and nothing that follows from one."""
    ended(spool_root, "train", ended_at_ns=T0 - 5 * S)
    assert asked(spool, "seff", "train")["run_time_ns"] is None
    lines = spool("seff", "train").out.splitlines()
    assert "memory     8 GiB given, 2 GiB at most: 25%" in lines
    assert "time       unknown" in lines


def test_an_end_that_nobody_has_filed_yet(spool: Command, spool_root: Path) -> None:
    """With no dispatcher, the exit code says how it ended, and its file when, as in `show`; its use is not known."""
    metadir = metadir_of(spool_root, "train")
    grant(metadir, run_records.GrantRecord("train", 1, grant=Grant(4), granted_at_ns=time.time_ns() - 5 * S))
    (metadir / layout.JID).write_bytes(run_records.render_jid(replace(identity.of_process(os.getpid()), start_ticks=1)))
    (metadir / layout.RC).write_text("0\n")
    found = asked(spool, "seff", "train")
    assert (found["state"], found["so_far"], found["cpu_time_ns"]) == ("finished", False, None)
    [shown] = asked(spool, "show", "train")["runs"]
    began, ended = (datetime.fromisoformat(shown[key]) for key in ("started_at", "ended_at"))
    assert found["run_time_ns"] // S == int((ended - began).total_seconds()) >= 5


def test_an_array_is_the_sum_of_its_tasks(spool: Command, spool_root: Path) -> None:
    """From the history and the tasks' own records, of each task the newest run since the array was expanded."""
    ended(spool_root, "sweep_0", started_at_ns=T0 - 50 * HOUR, ended_at_ns=T0 - 49 * HOUR, cpu_time_ns=0)
    text = 'command = "true"\narray = "0-3"\ntime_limit = "2h"\n'
    expand(spool_root, "sweep", 4, text, place=None, submitted_at_ns=None, expanded_at_ns=T0)
    ended(spool_root, "sweep_0", 2)
    ended(spool_root, "sweep_1", 1, State.FAILED, again="retry")
    ended(spool_root, "sweep_1", 2, peak_memory_bytes=4 * G)
    ended(spool_root, "sweep_2", 1, State.TIMEOUT, ended_at_ns=T0 + 2 * HOUR)
    ended(spool_root, "sweep_9")  # of no array
    found = asked(spool, "seff", "sweep")
    assert (found["array"], found["tasks"], found["states"]) == (True, 4, {"queued": 1, "finished": 2, "timeout": 1})
    assert found["peak_memory_bytes"] == {"known": 3, "median": 2 * G, "most": 4 * G}
    assert (found["gpu_hours"], found["cpu_efficiency"]) == (4, 6 / 16)
    assert (found["advice"]["memory_bytes"], found["advice"]["time_limit_ns"]) == (5 * G, 4 * HOUR)
    lines = spool("seff", "sweep").out.splitlines()
    assert lines[0] == "array      sweep, 4 tasks: 1 queued, 2 finished, 1 timeout"
    assert lines[2] == "memory     8 GiB given to each, median 2 GiB, 4 GiB at most"


def test_gpus_elsewhere_count_as_many_as_were_asked_for(spool: Command, spool_root: Path) -> None:
    """The engine alone knows which they were and what they did."""
    ended(spool_root, "far", grant=Grant(4, 8 * G, gpus_elsewhere=2), executor="grid", cpu_time_ns=None)
    said = spool("seff", "far").out.splitlines()
    assert "GPUs       2 GPUs given, use unknown, 2.00 GPU hours" in said
    assert "note       its CPU time is unknown: only grid measures it" in said


def test_a_run_that_slurm_has_now_counts_its_time_and_gpus_so_far(spool: Command, spool_root: Path) -> None:
    """Its processes are on a node: what they use nobody asks."""
    put_job(spool_root, "far", place="running")
    metadir, began_s = metadir_of(spool_root, "far"), time.time() - 1800
    given = {"grant": Grant(4, gpus_elsewhere=2), "granted_at_ns": int((began_s - 5) * S)}
    grant(metadir, run_records.GrantRecord("far", 1, executor="slurm", **given))
    (metadir / layout.JID).write_bytes(run_records.render_jid(Jid(4711, 1, "there", "-", "node7", "slurm:4711")))
    os.utime(metadir / layout.GRANT, (began_s - 5, began_s - 5))
    os.utime(metadir / layout.JID, (began_s, began_s))
    found = asked(spool, "seff", "far")
    assert (found["state"], found["gpus"], found["cpu_time_ns"]) == ("running", 2, None)
    assert found["gpu_hours"] == pytest.approx(1.0, abs=0.05)
