"""How many jobs there are, and what comes next without a dispatcher: one number and one sentence in every view."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from cli.records import serve
from spool.client import autostart
from spool.client.autostart import outlook
from spool.core.model import State
from spool.formats.state import JobView, StateView
from spool.query.jobs import counts, list_jobs
from spool.query.machine import machine_status
from spool.store.spool import Spool
from support import optional

PAGE = optional("spool.extras.page.content")
TOP = optional("spool.extras.top.reading")


@pytest.mark.parametrize("place", ["running", "held"])
def test_an_array_is_counted_as_its_tasks_in_every_view(
    spool_root: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """`info`, `top` and the page count two tasks that run and one that waits, and no job for their array."""
    word = "running" if place == "running" else "held"
    jobs = {
        "a": JobView(state=word, array=True, run=1, user="me"),
        "a_0": JobView(state="running", run=1, user="me"),
        "a_1": JobView(state="running", run=1, user="me"),
        "a_2": JobView(state="queued", user="me"),
    }
    lies = {"a": place, "a_0": "running", "a_1": "running", "a_2": "queued"}
    for name, where in lies.items():
        (spool_root / where / f"{name}.toml").write_text('command = "true"\n')
        if jobs[name].run is not None:
            (spool_root / "jobs" / name / "1").mkdir(parents=True)
    now = time.time_ns()
    serve(monkeypatch, spool_root, jobs, at_ns=now)
    spool, wanted = Spool(str(spool_root)), {State.RUNNING: 2, State.QUEUED: 1}
    assert dict(counts(list_jobs(spool).rows)) == wanted
    assert machine_status(spool).states == wanted
    if TOP is not None:
        seen = TOP.OverviewReader(str(spool_root)).look(now)
        assert {state: seen.count(state) for state in State if seen.count(state)} == wanted
    if PAGE is not None:
        assert PAGE.ContentReader(str(spool_root)).read(now, served=True).counts == wanted


def test_info_says_what_starts_the_next_dispatcher(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A submission does, unless autostart is off, systemd does it, or the spool is somebody else's."""
    root = str(spool_root)
    (spool_root / "config.toml").write_text("")
    assert outlook(root).startswith("not running: the next submission starts one, or `spool ")
    assert machine_status(Spool(root)).next_dispatcher == outlook(root)
    monkeypatch.setattr(autostart, "unit_for", lambda root: "spool.service")
    assert "starts one by systemd (spool.service)" in outlook(root)
    owner = os.stat(root).st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert "until its owner, " in outlook(root)
    monkeypatch.undo()
    (spool_root / "config.toml").write_text("autostart = false\n")
    assert "autostart is off: no job starts until you run `spool " in outlook(root)


def test_a_second_job_of_a_name_is_counted_in_every_view(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ls`, `info`, the page and `state.json` count a job that waits for the run of its name to end."""
    jobs = {"twice": JobView(state="running", run=1, user="me", beside="queued")}
    for where in ("running", "queued"):
        (spool_root / where / "twice.toml").write_text('command = "true"\n')
    (spool_root / "jobs" / "twice" / "1").mkdir(parents=True)
    now = time.time_ns()
    serve(monkeypatch, spool_root, jobs, at_ns=now)
    view = StateView(version=1, at_ns=now, pid=1, jobs=jobs)
    spool, wanted = Spool(str(spool_root)), {State.RUNNING: 1, State.QUEUED: 1}
    assert dict(counts(list_jobs(spool).rows)) == machine_status(spool).states == wanted
    assert view.counts() == wanted
    if PAGE is not None:
        assert PAGE.ContentReader(str(spool_root)).read(now, served=True).counts == wanted
