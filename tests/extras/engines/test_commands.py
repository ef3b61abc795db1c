"""Jobs for engines on the command line, and in a spool whose engine is not there."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from calling import Command, asked, put_job
from cli.records import serve
from crash.world import Session, world_at
from spool.core import layout
from spool.extras.engines import slurm
from spool.formats import jobfile
from spool.formats.state import JobView

_FOR_SLURM = "--slurm --set executor_options=--constraint=ib --set=executor_options=--exclude=n1,n2"


@pytest.mark.parametrize("way", ["quick", "full", "line"])
def test_an_option_is_short_for_its_executor(spool: Command, spool_root: Path, way: str) -> None:
    """On the command line as in a `#SPOOL` line; what sbatch is told besides goes along, option by option."""
    script = Path("script.sh")
    script.write_text(f"#!/bin/sh\n#SPOOL {_FOR_SLURM}\ntrue\n")
    full = ("--executor", "process", *_FOR_SLURM.split(), "--set", "prolog=true", "--", "true")
    words = {"quick": (*_FOR_SLURM.split(), "--", "true"), "full": full, "line": (script,)}
    spool("submit", "--name", "t", *words[way])
    spec = jobfile.parse((spool_root / "queued" / "t.toml").read_bytes(), name="t")
    assert (spec.executor, spec.part("engines")) == ("slurm", ("--constraint=ib", "--exclude=n1,n2"))


def test_options_for_slurm_that_the_default_executor_would_pass_over_keep_a_job_waiting(
    spool: Command, spool_root: Path
) -> None:
    """They are told of when it is submitted, and it starts nowhere without them."""
    submitted = spool("submit", "--name", "t", "--set=executor_options=--constraint=ib", "--", "true")
    assert (submitted.code, "executor_options" in submitted.err) == (0, True)
    assert [each["code"] for each in asked(spool, "why", "t")["reasons"]] == ["executor"]


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--set=gpu_idle=30m", "gpu_idle"),
        ("--set=keep_session=true", "keep_session"),
        ("--set=resources=x", "resources"),
    ],
)
def test_a_job_with_a_key_that_has_no_effect_in_slurm_does_not_start_there(
    spool: Command, spool_root: Path, tmp_path: Path, option: str, key: str
) -> None:
    """One that is configured to go there is told of at its submission, by `why` and by `check`."""
    (spool_root / "config.toml").write_text('autostart = false\nexecutor = "slurm"\n[resources]\nx = 1\n')
    submitted = spool("submit", "--name", "t", option, "--", "true")
    assert submitted.code == 0
    assert f"cannot start: its {key} " in submitted.err
    assert f"executor: its {key} " in spool("why", "t").out
    path = tmp_path / "t.toml"
    path.write_bytes((spool_root / "queued" / "t.toml").read_bytes())
    assert f"cannot start: its {key} " in spool("check", str(path)).err


def test_a_job_for_slurm_is_told_at_submission_that_slurm_is_missing(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning comes on stderr, and the job is submitted all the same; `--strict` submits nothing."""
    monkeypatch.setattr(slurm.SlurmLanguage, "programs", ("no-such-sbatch",))
    why = "job a cannot start: Slurm is not installed here: no no-such-sbatch in PATH"
    for strict, code, out in ((("--strict",), 1, ""), ((), 0, "a\n")):
        said = spool("submit", *strict, "--name", "a", "--slurm", "--", "true")
        assert (said.code, said.out, why in said.err) == (code, out, True)
        assert (spool_root / "queued" / "a.toml").exists() is not bool(strict)


def test_another_default_executor_that_is_not_there_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for it, with the reason, and do not fail; with the old one back they start."""
    monkeypatch.setattr(slurm.SlurmLanguage, "programs", ("sbatch-that-is-not-there",))
    with world_at(tmp_path / "spool", monkeypatch) as world:
        world.cpus, config = 1, world.root / layout.CONFIG
        config.write_text("cpus = 1\n")
        session = Session(world)
        for name, command in (("first", "hang until 2"), ("next", "hang # as submitted")):
            session.users.submit(name, command)
            session.settle()
        config.write_text('cpus = 1\nexecutor = "slurm"\n')
        session.now.wakeup.reload = True
        world.exit(world.pids("first")[0], 0)
        session.settle()
        assert not session.errors
        assert not world.pids("next")
        assert "sbatch-that-is-not-there" in str(session.now.planner.plan.reason("next"))
        config.write_text("cpus = 1\n")
        session.now.wakeup.reload = True
        session.settle()
        assert world.pids("next")
        session.end()


TEXT = 'command = "true"\nexecutor = "slurm"\n'
AWAY = "Slurm has not answered since 14:03: slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


def test_a_job_bound_for_slurm_says_everywhere_that_slurm_is_away(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the dispatcher has found, `why` and `plan` find too, in the words of `ls`, and promise no start."""
    put_job(spool_root, "bound", TEXT)
    put_job(spool_root, "here", 'command = "true"\nexecutor = "process"\n')
    monkeypatch.setattr(slurm.SlurmLanguage, "missing", lambda self: None)
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
