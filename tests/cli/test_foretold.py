"""What users are told of starts to come: by `why`, `plan` and the pages, all by one forecast."""

from __future__ import annotations

import os
import re
import shutil
import time
from datetime import datetime
from pathlib import Path

import pytest

from calling import Command, asked, put_job
from cli.records import begin, expand, serve
from spool.core.model import SECOND_NS, Grant, Request, Result, State, Stop, StopKind, Suspension
from spool.formats import run_records
from spool.formats.run_records import render_history
from spool.formats.state import JobView
from spool.query.listing import expected_end
from spool.store.ownership import this_user
from spool.store.spool import Spool
from support import ROOT

MINUTE = 60 * SECOND_NS
_INSTANT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")


def limited(limit: str, more: str = "") -> str:
    """Return a job file that states a limit."""
    return f'command = "true"\ntime_limit = "{limit}"\n{more}'


def starts(spool: Command, now_ns: int) -> dict[str, float | None]:
    """Return in how many seconds each waiting job starts, by `plan`; `why` says the same of each."""
    found = {}
    for job in asked(spool, "plan")["waits"]:
        told = asked(spool, "why", job["name"])
        for key in ("start_at", "start_is_guess", "must_end", "later_than_at", "start_unknown"):
            assert told[key] == job[key], (job["name"], key)
        at = job["start_at"] and datetime.fromisoformat(job["start_at"]).timestamp()
        found[job["name"]] = None if at is None else round(at - now_ns / SECOND_NS, 3)
    return found


def test_jobs_that_share_a_licence_are_told_one_after_the_other(spool: Command, spool_root: Path, now: int) -> None:
    """Behind a run with the only licence they start at 2, 4 and 6s, and `why` says after which job."""
    (spool_root / "config.toml").write_text("autostart = false\ncpus = 8\n[resources]\nlicence = 1\n")
    text = limited("2s", "resources = { licence = 1 }\n")
    begin(spool_root, "l1", text, Grant(1, resources=(("licence", 1),)), now)
    for name in ("l2", "l3", "l4"):
        put_job(spool_root, name, text)
    assert sorted(starts(spool, now).values()) == [2, 4, 6]
    last = next(name for name, at in starts(spool, now).items() if at == 6)
    assert asked(spool, "why", last)["must_end"] == ["l1"]


def test_the_tasks_of_an_array_are_planned_before_it_is_expanded(spool: Command, spool_root: Path, now: int) -> None:
    """The tasks of a waiting `%1` array start one after the other, and then the job that depends on the array."""
    (spool_root / "config.toml").write_text("autostart = false\ncpus = 2\n")
    put_job(spool_root, "sweep", limited("2m", 'array = "0-2%1"\n'))
    put_job(spool_root, "after", limited("1m", 'depends_on = "sweep"\n'))
    plan = asked(spool, "plan")
    assert [each["name"] for each in plan["starts"]] == ["sweep_0"]
    assert starts(spool, now) == {"sweep_1": 120, "sweep_2": 240, "after": 360}
    assert asked(spool, "why", "sweep_2")["reasons"][0]["code"] == "array"
    assert spool("why", "sweep_3").code == 3


def test_the_tasks_that_an_array_has_not_issued_are_planned(spool: Command, spool_root: Path, now: int) -> None:
    """A task that is still in `tasks/` waits like the others, unless its array is held or another job has its name."""
    (spool_root / "config.toml").write_text("autostart = false\ncpus = 1\n")
    text = limited("2m", 'array = "0-2"\n')
    metadir = expand(spool_root, "sweep", 3, text, submitted_at_ns=now - MINUTE, expanded_at_ns=now)
    (metadir / "tasks").mkdir()
    for index in (1, 2):
        (metadir / "tasks" / f"sweep_{index}.toml").write_text(limited("2m"))
    put_job(spool_root, "sweep_2", limited("3m"), "held")
    assert [each["name"] for each in asked(spool, "plan")["starts"]] == ["sweep_1"]
    (spool_root / "running" / "sweep.toml").rename(spool_root / "held" / "sweep.toml")
    assert asked(spool, "plan")["starts"] == []


@pytest.mark.parametrize("is_expanded", [False, True])
def test_a_task_of_a_held_array_waits_for_the_release_of_the_array(
    spool: Command, spool_root: Path, now: int, *, is_expanded: bool
) -> None:
    """`why` names the array, issued or not: `spool release` refuses a task that is not held itself."""
    text = limited("2m", 'array = "0-1"\n')
    if is_expanded:
        expand(spool_root, "sweep", 2, text, submitted_at_ns=now - MINUTE, expanded_at_ns=now)
        put_job(spool_root, "sweep_1", limited("2m", '[task]\narray = "sweep"\nindex = 1\n'))
        (spool_root / "running" / "sweep.toml").rename(spool_root / "held" / "sweep.toml")
    else:
        put_job(spool_root, "sweep", text, "held")
    assert asked(spool, "why", "sweep_1")["reasons"][0] == {"code": "held", "text": "array sweep is held"}
    said = spool("why", "sweep_1").out
    assert "`spool release sweep` starts it" in said
    assert "release sweep_1" not in said


def test_nothing_is_promised_under_the_floor_of_the_disk(spool: Command, spool_root: Path) -> None:
    """`why`, `plan` and `info` say the same of the disk, in the same units, and no start is told."""
    (spool_root / "config.toml").write_text('autostart = false\ndisk_floor = "100T"\n')
    put_job(spool_root, "a")
    told, planned = asked(spool, "why", "a"), asked(spool, "plan")
    assert ([each["code"] for each in told["reasons"]], told["start_at"]) == (["disk"], None)
    assert (planned["starts"], planned["waits"][0]["code"], planned["waits"][0]["start_at"]) == ([], "disk", None)
    said = spool("why", "a").out
    assert "could start" not in said
    floor = r"[0-9.]+ \w+ free, floor 100 TiB\b"  # others use the disk between the two looks
    assert re.search(f"disk: {floor}", said, re.MULTILINE)
    assert re.search(floor, spool("info").out, re.MULTILINE)
    assert re.search(r"a .* \? ", spool("plan").out)


def test_a_suspended_run_is_named_and_no_time_is_promised(spool: Command, spool_root: Path, now: int) -> None:
    """What needs its room is told who stands still; what does not is told its start."""
    (spool_root / "config.toml").write_text("autostart = false\ncpus = 2\n")
    metadir = begin(spool_root, "ss", limited("1h"), Grant(1), now - MINUTE)
    (metadir / "suspended").write_bytes(run_records.render_suspended(Suspension(0, now - SECOND_NS, 0)))
    begin(spool_root, "other", limited("10m"), Grant(1), now)
    put_job(spool_root, "both", limited("5m", "cpus = 2\n"))
    put_job(spool_root, "one", limited("5m"))
    assert starts(spool, now) == {"both": None, "one": 600}
    assert [expected_end(Spool(str(spool_root)), [name], now) for name in ("ss", "both", "one")] == [
        None,
        None,
        now + 15 * MINUTE,
    ]
    assert "ss" in asked(spool, "why", "both")["start_unknown"]


def test_a_stopping_run_ends_with_its_grace_however_late_one_asks(
    spool: Command, spool_root: Path, now: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grace counts from the order to stop; once it is over the start is a matter of moments."""
    (spool_root / "config.toml").write_text('autostart = false\ncpus = 1\nkill_grace = "12s"\n')
    metadir = begin(spool_root, "r", 'command = "true"\n', Grant(1), now - MINUTE)
    (metadir / "stop").write_bytes(run_records.render_stop(Stop(StopKind.CANCEL, "me", now)))
    put_job(spool_root, "next", limited("5m"))
    for later in (0, 3, 10):
        monkeypatch.setattr(time, "time_ns", lambda later=later: now + later * SECOND_NS)
        assert starts(spool, now) == {"next": 12}
    monkeypatch.setattr(time, "time_ns", lambda: now + 30 * SECOND_NS)
    assert starts(spool, now) == {"next": 30}


def test_a_job_that_a_hook_is_asked_about_is_not_said_to_start(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan` and `why` know what the dispatcher waits for before it starts a job, and promise nothing."""
    put_job(spool_root, "a", 'command = "true"\ncpus = 0\n')
    serve(monkeypatch, spool_root, {"a": JobView(state="queued", reason="hook submitting: asked")})
    found = asked(spool, "plan")
    assert (found["starts"], [(job["name"], job["code"]) for job in found["waits"]]) == ([], [("a", "hook")])
    assert asked(spool, "why", "a")["start_at"] is None


def quoted(command: str) -> list[str]:
    """Return what docs/SCHEDULING.md says that a command prints."""
    page = (ROOT / "docs" / "SCHEDULING.md").read_text()
    (block,) = re.findall(rf"```text\n\$ {command}\n(.*?)```", page, re.DOTALL)
    return plainly(block)


def plainly(text: str) -> list[str]:
    """Return the lines without widths, and instants and the user as one word each."""
    user = os.environ.get("USER", "")
    words = (_INSTANT.sub("INSTANT", line).split() for line in text.splitlines())
    return [
        " ".join("USER" if word in ("anna", "root", user) else word for word in line)
        for line in words
        if "no dispatcher is running" not in " ".join(line)
    ]


def test_what_the_page_quotes_is_what_the_program_says(spool: Command, spool_root: Path, now: int) -> None:
    """docs/SCHEDULING.md quotes `why` and `plan` word by word; instants and users may differ."""
    (spool_root / "config.toml").write_text("autostart = false\ncpus = 8\n")
    begin(spool_root, "sim", limited("1h", "cpus = 4\n"), Grant(4), now - 25 * MINUTE)
    begin(spool_root, "mesh", limited("4h", "cpus = 3\n"), Grant(3), now - 5 * MINUTE)
    with (spool_root / "history.jsonl").open("ab") as history:
        for run in range(1, 6):
            end = now - run * 600 * MINUTE
            request = Request(cpus=4)
            past = Result("train", run, 1, State.FINISHED, "", end - 40 * MINUTE, end - 20 * MINUTE, end, exit_code=0,
                          user=this_user(), request=request, grant=Grant(4))  # fmt: skip
            history.write(render_history(past))
    put_job(spool_root, "train", 'command = "true"\ncpus = 4\n')
    put_job(spool_root, "report", limited("10m", 'depends_on = ["train"]\n'))
    put_job(spool_root, "eval", limited("30m", "cpus = 5\n"))
    assert plainly(spool("why", "train").out) == quoted("spool why train")
    assert plainly(spool("plan").out) == quoted("spool plan")
    shutil.rmtree(spool_root / "jobs")
