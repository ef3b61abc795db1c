"""What the commands say of a job that was handed to the engine of another machine, from the files alone."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from calling import Command, asked, put_job
from cli.records import metadir_of, serve, view
from spool.core.model import Grant, Jid, Stop, StopKind
from spool.extras.engines.slurm import SlurmLanguage
from spool.formats import run_records
from spool.formats.state import JobView
from spool.store.spool import Service, Spool

pytestmark = pytest.mark.usefixtures("own_process_stands_for_wrappers")
TEXT = 'command = "true"\nexecutor = "slurm"\ngpus = 2\n'
TODAY = datetime.now().replace(hour=16, minute=0, second=0, microsecond=0)
WAITS = "Slurm: PENDING (Resources)"


@pytest.fixture
def metadir(spool_root: Path) -> Path:
    """Put a job into running/ that waits in Slurm as its job 4711, and return its metadir."""
    put_job(spool_root, "far", TEXT, "running")
    metadir, now = metadir_of(spool_root, "far"), time.time_ns()
    (metadir / "job.toml").write_text(TEXT)
    grant = Grant(cpus=1, gpus_elsewhere=2)
    record = run_records.GrantRecord("far", 1, 1, 0, "slurm", grant, "me", now - 10**10, now - 10**9)
    (metadir / "grant.toml").write_bytes(run_records.render_grant(record))
    (metadir / "engine").write_bytes(run_records.render_engine("slurm", "lab", "4711"))
    return metadir


def begin(metadir: Path) -> None:
    """Write what the wrapper would, on its node."""
    jid = Jid(4711, 1, "there", "-", "node7", "slurm:4711")
    (metadir / "jid").write_bytes(run_records.render_jid(jid))


@pytest.fixture
def served(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a dispatcher live, which has heard of Slurm what the job waits for."""
    far = JobView(state="submitted", reason=WAITS, run=1, user="me", submitted_at_ns=time.time_ns() - 10**10)
    serve(monkeypatch, spool_root, {"far": far})


@pytest.mark.usefixtures("metadir", "served")
def test_a_job_that_waits_in_slurm_is_submitted_with_slurms_reason(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the list, on a narrow terminal too, in `show`, `why` and `info`, and for programs; it has no start.

    No instant is made up for those that wait for it either.
    """
    for columns in ("80", "50"):
        monkeypatch.setenv("COLUMNS", columns)
        said = spool("ls").out
        assert "submitted" in said
        assert WAITS in said
    (row,) = json.loads(spool("ls", "--json").out)["jobs"]
    assert (row["state"], row["reason"], row["started_at"]) == ("submitted", WAITS, None)
    assert [job["name"] for job in json.loads(spool("ls", "--json", "--state", "submitted").out)["jobs"]] == ["far"]
    shown = spool("show", "far").out
    assert "slurm, job 4711" in shown
    assert WAITS in shown.splitlines()[0]
    assert WAITS in spool("why", "far").out.splitlines()[0]
    found = json.loads(spool("why", "--json", "far").out)
    assert (found["reasons"][0]["code"], found["engine"], found["engine_id"]) == ("submitted", "slurm", "4711")
    assert found["start_at"] is None
    assert "given      1 CPU, 2 GPUs" in shown
    put_job(spool_root, "after", 'command = "true"\ndepends_on = ["far"]\n')
    assert "1 submitted" in spool("plan").out
    assert [(each["name"], each["start_at"]) for each in asked(spool, "plan")["waits"]] == [("after", None)]
    said = spool("info").out
    assert "1 submitted" in said
    assert "2 GPUs" in said
    assert said.splitlines()[-1].endswith("in Slurm")


FULL = "Slurm takes no more jobs for now: QOSMaxSubmitJobPerUserLimit"


@pytest.mark.parametrize("reason", [FULL, "it is still to be handed over"])
def test_why_does_not_claim_that_slurm_has_what_it_has_not_taken(
    spool: Command, spool_root: Path, metadir: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """A job that waits to be handed over, or that Slurm takes later, is not there yet, with that reason."""
    (metadir / "engine").unlink()
    left_behind(spool_root, state="submitted", reason=reason)
    alone = spool("why", "far").out.splitlines()
    assert reason in alone[0]
    assert ["`spool dispatch`" in line for line in alone[1:]] == [True]
    monkeypatch.setattr(Spool, "service", lambda self: Service.SERVED)
    os.utime(spool_root / "state.json")
    served = spool("why", "far").out.splitlines()
    assert (served[0], len(served)) == (f"far: {reason}", 2)
    assert json.loads(spool("why", "--json", "far").out)["engine_id"] is None


@pytest.mark.usefixtures("served")
def test_a_job_that_has_begun_in_slurm_runs_whatever_was_said_before(spool: Command, metadir: Path) -> None:
    """The record of its wrapper is newer than what a dispatcher has written, and says where it runs."""
    begin(metadir)
    (row,) = json.loads(spool("ls", "--json").out)["jobs"]
    assert (row["state"], row["started_at"] is None) == ("running", False)
    assert asked(spool, "why", "far")["started_at"] is not None


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(("code", "said"), [(143, "has ended"), (0, "has ended (finished)")])
def test_an_end_that_slurm_may_have_caused_has_no_name_before_it_is_recorded(
    spool: Command, metadir: Path, code: int, said: str
) -> None:
    """An exit code of 143 may be called `preempted` a moment later; one of 0 stands."""
    begin(metadir)
    (metadir / "rc").write_bytes(run_records.render_rc(code))
    (row,) = json.loads(spool("ls", "--json").out)["jobs"]
    assert (row["state"], row["reason"]) == ("stopping", f"{said}, being recorded")


def left_behind(spool_root: Path, **said: Any) -> None:
    """Write what a dispatcher said last at 14:03, before it was killed."""
    view(spool_root, {"far": JobView(run=1, user="me", **said)}, at_ns=0)
    os.utime(spool_root / "state.json", (TODAY.replace(hour=14, minute=3).timestamp(),) * 2)


ALONE = "; no dispatcher is running"


def test_without_a_dispatcher_a_job_in_slurm_says_when_it_was_seen_last(
    spool: Command, spool_root: Path, metadir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is follows from the files; what Slurm said of it is as old as the last look."""
    monkeypatch.setattr(time, "time_ns", lambda: int(TODAY.timestamp()) * 10**9)

    def told() -> tuple[str, str]:
        (row,) = json.loads(spool("ls", "--json").out)["jobs"]
        (run,) = json.loads(spool("show", "--json", "far").out)["runs"]
        assert (run["state"], run["reason"]) == (row["state"], row["reason"])
        return row["state"], row["reason"]

    assert told() == ("submitted", f"in Slurm as job 4711{ALONE}")
    left_behind(spool_root, state="submitted", reason=WAITS)
    waited = f"in Slurm as job 4711, last seen at 14:03: PENDING (Resources){ALONE}"
    assert told() == ("submitted", waited)
    assert spool("why", "far").out.splitlines()[0] == f"far: {waited}"
    begin(metadir)
    os.utime(metadir / "jid", (TODAY.replace(hour=14, minute=5).timestamp(),) * 2)
    assert told() == ("running", f"in Slurm as job 4711, begun at 14:05{ALONE}")
    left_behind(spool_root, state="running", reason="")
    assert told() == ("running", f"in Slurm as job 4711, last seen at 14:03: running{ALONE}")
    (metadir / "engine").unlink()
    (metadir / "jid").unlink()
    (spool_root / "state.json").unlink()
    assert told() == ("submitted", f"on its way to Slurm{ALONE}")


def test_a_job_in_slurm_that_was_told_to_stop_is_stopping(spool: Command, metadir: Path) -> None:
    """The dispatcher that was to see to that is gone; the order stands."""
    begin(metadir)
    (metadir / "stop").write_bytes(run_records.render_stop(Stop(StopKind.CANCEL, "me", 0, "")))
    (row,) = json.loads(spool("ls", "--json").out)["jobs"]
    assert (row["state"], row["reason"]) == ("stopping", "cancel by me")


def test_attach_opens_a_shell_beside_a_job_that_has_begun_in_slurm(spool: Command, metadir: Path) -> None:
    """Within what the job was given; before that there is nothing to attach to, and nothing is only watched."""
    said = spool("attach", "--dry-run", "far")
    assert (said.code, "`spool why far`" in said.err) == (1, True)
    begin(metadir)
    assert spool("attach", "--dry-run", "far").out == "srun --jobid=4711 --overlap --pty sh\n"
    assert "`spool log -f far`" in spool("attach", "--dry-run", "-r", "far").err


def test_a_signal_for_a_job_in_slurm_is_refused_with_what_to_write(
    spool: Command, spool_root: Path, metadir: Path
) -> None:
    """Its processes are on a node, and only Slurm reaches them."""
    begin(metadir)
    said = spool("signal", "USR1", "far")
    assert said.code != 0
    assert "`spool hold far`" in spool("suspend", "far").err
    assert not (spool_root / "running" / "far.toml.suspended").exists()
    assert "`scancel --batch --signal=USR1 4711`" in said.err


@pytest.mark.usefixtures("metadir")
def test_the_doctor_leaves_a_run_on_a_node_to_its_engine(spool: Command, metadir: Path) -> None:
    """That its host is another one is as it should be."""
    begin(metadir)
    assert "far" not in spool("doctor", "-q").out


AWAY = "Slurm has not answered since 14:03: slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


def test_a_job_bound_for_slurm_says_everywhere_that_slurm_is_away(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the dispatcher has found, `why` and `plan` find too, in the words of `ls`, and promise no start."""
    put_job(spool_root, "bound", TEXT)
    put_job(spool_root, "here", 'command = "true"\nexecutor = "process"\n')
    monkeypatch.setattr(SlurmLanguage, "missing", lambda self: None)
    jobs = {"bound": JobView(state="queued", reason=f"executor: {AWAY}"), "here": JobView(state="queued")}
    serve(monkeypatch, spool_root, jobs, problems=(AWAY,), executors={"slurm": AWAY})
    rows = {row["name"]: row["reason"] for row in json.loads(spool("ls", "--json").out)["jobs"]}
    found = json.loads(spool("why", "--json", "bound").out)
    assert [reason["text"] for reason in found["reasons"]] == [f"executor: {AWAY}"] == [rows["bound"]]
    assert found["start_at"] is None
    assert "nothing blocks it" not in spool("why", "bound").out
    plan = json.loads(spool("plan", "--json").out)
    assert [each["name"] for each in plan["starts"]] == ["here"]
    assert [(each["name"], each["reason"]) for each in plan["waits"]] == [("bound", f"executor: {AWAY}")]
    assert AWAY in json.loads(spool("info", "--json").out)["problems"]
    old = time.time() - 3600
    os.utime(spool_root / "state.json", (old, old))
    assert AWAY not in spool("why", "bound").out.splitlines()[0]  # what was said an hour ago


@pytest.mark.usefixtures("served")
def test_a_job_that_slurm_has_not_confirmed_is_not_in_slurm(spool: Command, metadir: Path) -> None:
    """`info` and `why` say that it is on its way, as long as no id of it is known."""
    (metadir / "engine").unlink()
    assert "4711" not in spool("info").out + spool("why", "far").out
