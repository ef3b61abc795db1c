"""How many jobs there are, and what comes next without a dispatcher: one number and one sentence in every view."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from calling import put_job
from cli.records import metadir_of, serve
from spool.client import autostart
from spool.client.autostart import outlook
from spool.core.model import State
from spool.formats.state import JobView
from spool.query.jobs import counts, list_jobs
from spool.query.machine import machine_status
from spool.store.spool import Spool

COUNTED = {State.RUNNING: 2, State.QUEUED: 1}
"""What `an_array_with_tasks` is counted as."""


def an_array_with_tasks(root: Path, place: str) -> dict[str, JobView]:
    """Lay an array with two tasks that run and one that waits; return what a dispatcher says of them."""
    word = "running" if place == "running" else "held"
    jobs = {
        "a": JobView(state=word, array=True, run=1, user="me"),
        "a_0": JobView(state="running", run=1, user="me"),
        "a_1": JobView(state="running", run=1, user="me"),
        "a_2": JobView(state="queued", user="me"),
    }
    lies = {"a": place, "a_0": "running", "a_1": "running", "a_2": "queued"}
    for name, where in lies.items():
        put_job(root, name, place=where)
        if jobs[name].run is not None:
            metadir_of(root, name)
    return jobs


@pytest.mark.parametrize("place", ["running", "held"])
def test_an_array_is_counted_as_its_tasks(spool_root: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """`ls` and `info` count two tasks that run and one that waits, and no job for their array."""
    serve(monkeypatch, spool_root, an_array_with_tasks(spool_root, place))
    spool = Spool(str(spool_root))
    assert dict(counts(list_jobs(spool).rows)) == machine_status(spool).states == COUNTED


def test_info_says_what_starts_the_next_dispatcher(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A submission does, unless autostart is off, systemd does it, or the spool is somebody else's."""
    root = str(spool_root)
    (spool_root / "config.toml").write_text("")
    assert outlook(root).endswith(" dispatch`")
    assert machine_status(Spool(root)).next_dispatcher == outlook(root)
    monkeypatch.setattr(autostart, "unit_for", lambda root: "spool.service")
    assert "(spool.service)" in outlook(root)
    owner = os.stat(root).st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert "until its owner, " in outlook(root)
    monkeypatch.undo()
    (spool_root / "config.toml").write_text("autostart = false\n")
    assert "autostart is off" in outlook(root)
