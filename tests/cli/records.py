"""What dispatchers leave in a spool of jobs that run, have ended or are arrays: for tests that have no dispatcher."""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from calling import put_job
from spool.core import layout
from spool.core.model import Grant, Result
from spool.formats import run_records
from spool.formats.run_records import render_history, render_result
from spool.formats.state import JobView, StateView, render_state
from spool.machine import identity
from spool.store.spool import Service, Spool

TRUE = 'command = "true"\n'
ONE_CPU = Grant(cpus=1)


def metadir_of(root: Path, name: str, run: int = 1) -> Path:
    """Return the directory of a run, which is made if there is none."""
    metadir = root / "jobs" / name / str(run)
    metadir.mkdir(parents=True, exist_ok=True)
    return metadir


def places(root: Path, *names: str) -> list[str]:
    """Return the directories in which these jobs have a file, job by job."""
    return [at for name in names for at in layout.PLACES if (root / at / f"{name}.toml").exists()]


def queued(root: Path, name: str) -> dict[str, Any]:
    """Return a waiting job's keys."""
    return tomllib.loads((root / layout.QUEUED / f"{name}.toml").read_text())


def end(root: Path, result: Result, *, told: bool = True) -> Path:
    """Record how a run ended, in its directory and, where it is *told*, in the history; return the directory."""
    metadir = metadir_of(root, result.job, result.run)
    (metadir / layout.RESULT).write_bytes(render_result(result))
    if told:
        with (root / layout.HISTORY).open("ab") as history:
            history.write(render_history(result))
    return metadir


def begin(
    root: Path, name: str, text: str = TRUE, grant: Grant = ONE_CPU, at_ns: int | None = None, user: str = "me"
) -> Path:
    """Put a job into running/ whose wrapper is this very process; return the directory of its run."""
    put_job(root, name, text, "running")
    metadir = metadir_of(root, name)
    (metadir / layout.SPEC_COPY).write_text(text)
    granted_at_ns = time.time_ns() if at_ns is None else at_ns
    record = run_records.GrantRecord(name, 1, grant=grant, user=user, granted_at_ns=granted_at_ns)
    (metadir / layout.GRANT).write_bytes(run_records.render_grant(record))
    jid = identity.of_process(os.getpid())
    assert jid is not None
    (metadir / layout.JID).write_bytes(run_records.render_jid(jid))
    return metadir


def expand(root: Path, name: str, tasks: int, text: str, place: str | None = "running", **more: Any) -> Path:
    """Have an array that was expanded, with its file in *place*; return the directory of its run."""
    if place is not None:
        put_job(root, name, text, place)
    record = run_records.ArrayRecord(
        name, **{"run": 1, "tasks": tasks, "submitted_at_ns": 1, "expanded_at_ns": 1} | more
    )
    metadir = metadir_of(root, name, record.run)
    (metadir / layout.SPEC_COPY).write_text(text)
    (metadir / layout.ARRAY).write_bytes(run_records.render_array(record))
    return metadir


def view(root: Path, jobs: Mapping[str, JobView], **more: Any) -> None:
    """Have `state.json` say this of the jobs."""
    state = StateView(**{"version": 1, "at_ns": time.time_ns(), "pid": 1, "jobs": dict(jobs)} | more)
    (root / layout.STATE).write_bytes(render_state(state))


def serve(monkeypatch: pytest.MonkeyPatch, root: Path, jobs: Mapping[str, JobView], **more: Any) -> None:
    """Have a dispatcher live, as far as the commands can tell, which has said this of the jobs."""
    view(root, jobs, **more)
    monkeypatch.setattr(Spool, "service", lambda self: Service.SERVED)
