"""What lists and `show` say of the time that remains of a run, and of the start of a job that waits."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from calling import Command, asked, put_job
from cli.records import TRUE, begin, end, view
from spool.core.model import SECOND_NS, Result, State
from spool.extras.page.document import render
from spool.formats.state import JobView, MachineView
from spool.formats.wire import render_instant
from spool.python.client import Client
from spool.query.jobs import list_jobs
from spool.query.listing import OutlookReader, expected_end, with_outlook
from spool.query.overview import OverviewReader
from spool.store.lock import Lock
from spool.store.ownership import this_user
from spool.store.spool import Spool

MINUTE = 60 * SECOND_NS


def _running(root: Path, name: str, began_ns: int, limit: str = "", progress: str = "") -> None:
    text = 'command = "true"\n' + (f'time_limit = "{limit}"\n' if limit else "")
    metadir = begin(root, name, text, at_ns=began_ns, user=this_user())
    if progress:
        (metadir / "progress").write_text(progress)


def _had_half_hours(root: Path, now: int) -> None:
    """Have two runs of `x` in the history that took half an hour each."""
    times = (1, now - 90 * MINUTE, now - 60 * MINUTE)
    for at in range(2):
        end(root, Result(f"x_{at}", 1, 1, State.FINISHED, "", *times, exit_code=0, user=this_user()))


def test_a_run_has_the_time_that_remains_by_its_progress_else_by_its_limit(
    spool: Command, spool_root: Path, now: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list marks a limit, JSON names what the time rests on, `show` says it; without either it is unknown."""
    _running(spool_root, "says", now - 10 * MINUTE, "2h", "epoch 5/20")
    _running(spool_root, "limited", now - 10 * MINUTE, "1h")
    _running(spool_root, "silent", now - 10 * MINUTE)
    put_job(spool_root, "held", place="held")
    rows = {job["name"]: (job["left_ns"], job["left_by"]) for job in asked(spool, "ls")["jobs"]}
    unknown = {"silent": (None, None), "held": (None, None)}
    assert rows == {"says": (30 * MINUTE, "progress"), "limited": (50 * MINUTE, "limit"), **unknown}
    assert asked(spool, "show", "says")["row"]["left_ns"] == 30 * MINUTE
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "dumb")
    head, *lines = spool("ls", "--columns", "name,left").out.splitlines()
    assert head.split() == ["NAME", "LEFT"]
    cells = dict(line.split(None, 1) for line in lines)
    assert cells["limited"].startswith("≤50")
    assert cells["says"].startswith("30")
    assert cells["silent"] == cells["held"] == "-"
    assert "LEFT" in spool("ls").out


def test_the_planner_adds_guesses_and_starts_where_a_dispatcher_serves(spool_root: Path, now: int) -> None:
    """A run without a word or a limit ends as runs like it did, and a job that waits for it starts then."""
    _had_half_hours(spool_root, now)
    (spool_root / "config.toml").write_text("cpus = 1\n")
    _running(spool_root, "x_3", now - 10 * MINUTE)
    put_job(spool_root, "next", 'command = "true"\n')
    spool = Spool(str(spool_root))
    rows = list_jobs(spool).rows
    found = {row.name: row for row in with_outlook(spool, rows, now, served=True)}
    assert (found["x_3"].left_ns, found["x_3"].left_by) == (20 * MINUTE, "guess")
    assert (found["next"].start_at_ns, found["next"].start_is_guess) == (now + 20 * MINUTE, True)
    unserved = {row.name: row for row in with_outlook(spool, rows, now, served=False)}
    assert unserved["next"].outlook(now) == unserved["x_3"].outlook(now) == "-"


@pytest.mark.usefixtures("own_process_stands_for_wrappers")
def test_every_view_tells_the_same(spool: Command, spool_root: Path, now: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run ends by its progress, one as similar runs did, neither at its limit; what waits for them starts then."""
    user = this_user()
    _had_half_hours(spool_root, now)
    (spool_root / "config.toml").write_text("cpus = 2\n")
    _running(spool_root, "says", now - 10 * MINUTE, "8h", "epoch 4/20")
    os.utime(spool_root / "jobs/says/1/progress", ns=(now, now - 2 * MINUTE))
    _running(spool_root, "x_3", now - 20 * MINUTE, "8h")
    put_job(spool_root, "next", f"{TRUE}cpus = 2\n")
    put_job(spool_root, "after", f'{TRUE}depends_on = ["x_3"]\npriority = 20\n')
    limit = {"time_limit_ns": 480 * MINUTE, "user": user, "cpus": 1, "run": 1}
    begun = {"says": now - 10 * MINUTE, "x_3": now - 20 * MINUTE}
    jobs = {name: JobView(state="running", started_at_ns=at, **limit) for name, at in begun.items()}
    jobs |= {name: JobView(state="queued", cpus=1, user=user, reason="cpus") for name in ("next", "after")}
    lock = Lock(str(spool_root / ".lock"))
    machine = MachineView(cpus=2, cpus_free=0, memory_bytes=1 << 30, memory_free_bytes=1 << 30)
    view(spool_root, jobs, at_ns=now, pid=os.getpid(), machine=machine)
    os.utime(spool_root / "state.json", ns=(now, now))
    starts = {"after": now + 10 * MINUTE, "next": now + 40 * MINUTE}
    told = {"says": (30 * MINUTE, "progress"), "x_3": (10 * MINUTE, "guess")}
    try:
        listed = {job["name"]: job for job in asked(spool, "ls")["jobs"]}
        shown = {name: asked(spool, "show", name)["row"] for name in listed}
        seen = OverviewReader(str(spool_root)).look(now)
        assert seen is not None
        rows = {row.name: seen.outlook.of(row, now) for row in seen.active}
        page = render(seen, str(spool_root), 5).decode()
        planned = {job["name"]: job for job in asked(spool, "plan")["waits"]}
        why = {name: asked(spool, "why", name) for name in listed}
        monkeypatch.setenv("COLUMNS", "200")
        texts = (
            spool("ls", "--columns", "name,left").out,
            spool("plan").out,
            *(spool("why", name).out for name in listed),
        )
        awaited = expected_end(Spool(str(spool_root)), ["says"], now)
        client = Client(spool_root)
        plain = {row.name: row for row in client.jobs().rows}
        foreseen = {row.name: row for row in client.jobs(forecast=True).rows}
    finally:
        lock.release()
    unserved = OverviewReader(str(spool_root)).look(now)
    assert unserved is not None
    assert unserved.outlook.starts == {}
    for name, (left_ns, by) in told.items():
        assert {each[name]["left_ns"] for each in (listed, shown, why)} | {rows[name].left_ns} == {left_ns}
        assert foreseen[name].left_ns == left_ns
        assert {each[name]["left_by"] for each in (listed, shown)} | {rows[name].left_by} == {by}
    for name, at_ns in starts.items():
        at = render_instant(at_ns)
        assert [each[name]["start_at"] for each in (listed, shown, planned, why)] == [at] * 4
        assert rows[name].start_at_ns == foreseen[name].start_at_ns == at_ns
        assert plain[name].start is None
    assert rows["next"].outlook(now + MINUTE) == "in ~39m00s"
    assert "Starts" in page
    assert "30m00s left" in page
    assert "in ~40m00s" in page
    assert [text.count("~10m00s") for text in texts[:2]] == [2, 1]
    assert "time left: 30m00s, by its progress\ntime limit: 8h00m" in texts[2 + list(listed).index("says")]
    assert "in about 40m00s, " in texts[2 + list(listed).index("next")]
    assert awaited == now + 30 * MINUTE


def test_a_view_that_stays_open_asks_rarely(spool_root: Path, now: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within seconds it has the same answer; without a dispatcher it has none, and asks at once when one is there."""
    (spool_root / "config.toml").write_text("cpus = 1\n")
    put_job(spool_root, "next", 'command = "true"\n')
    spool, reader = Spool(str(spool_root)), OutlookReader()
    rows = list_jobs(spool).rows
    assert reader.look(spool, rows, now, served=False).starts == {}
    first = reader.look(spool, rows, now, served=True)
    assert set(first.starts) == {"next"}
    assert reader.look(spool, rows, now + SECOND_NS, served=True) is first
    assert reader.look(spool, rows, now + 61 * SECOND_NS, served=True) is not first
