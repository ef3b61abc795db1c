"""What users are told of starts and ends to come, and of how long jobs are expected to run, all by one forecast."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from calling import Command, asked, put_job
from cli.records import TRUE, begin, end, expand, serve, view
from spool.core.model import SECOND_NS, Grant, Request, Result, State, Stop, StopKind, Suspension
from spool.formats import run_records
from spool.formats.run_records import render_history
from spool.formats.state import JobView, MachineView
from spool.formats.wire import render_instant
from spool.python.client import Client
from spool.query import snapshot
from spool.query.jobs import list_jobs
from spool.query.listing import OutlookReader, expected_end, with_outlook
from spool.query.overview import OverviewReader
from spool.store.lock import Lock
from spool.store.ownership import this_user
from spool.store.spool import Spool
from support import ROOT, optional

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


# The time that remains of a run, in every view.


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
        document = optional("spool.extras.page.document")
        page = document.render(seen, str(spool_root), 5).decode() if document is not None else None
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
    assert page is None or all(told in page for told in ("Starts", "30m00s left", "in ~40m00s"))
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


# How long jobs are expected to run.


ONE = 'command = "true"\ncpus = 1\n'


def ran(root: Path, name: str, seconds: int, *, user: str = "", outcome: State = State.FINISHED, cpus: int = 1) -> None:
    """Put the line of a run into the history that ended an hour ago."""
    ended = time.time_ns() - 3600 * SECOND_NS
    result = Result(
        name, 1, 1, outcome, "", ended - (seconds + 5) * SECOND_NS, ended - seconds * SECOND_NS, ended,
        user=user or this_user(), request=Request(cpus=cpus), grant=Grant(cpus=cpus),
    )  # fmt: skip
    with (root / "history.jsonl").open("ab") as history:
        history.write(render_history(result))


@pytest.fixture
def full(spool_root: Path) -> Path:
    """Make a spool with one CPU and a job that nothing keeps from starting first, so that others wait."""
    (spool_root / "config.toml").write_text("cpus = 1\n")
    put_job(spool_root, "first", 'command = "true"\npriority = 200\n')
    return spool_root


@pytest.mark.parametrize(
    ("history", "words"),
    [
        ([("sweep_1", 100, {}), ("sweep_7", 200, {})], "about 3m20s, the median of the last 2 runs of sweep"),
        ([("sweep_1", 100, {}), ("other", 40, {})], "about 1m40s, a guess: the median of "),
        ([("sweep_1", 100, {"cpus": 2}), ("sweep_2", 100, {"outcome": State.FAILED})], "about 1m40s, a guess: "),
        (
            [("sweep_1", 300, {"user": "nobody-else"})],
            "about 5m00s, a guess: the median of everybody's last jobs; none of ",
        ),
        ([], "1h00m, the default: there are no earlier jobs to learn from"),
    ],
)
def test_what_is_learnt_is_told_with_its_source(
    spool: Command, full: Path, history: list[tuple[str, int, dict[str, object]]], words: str
) -> None:
    """Of its like, else of its user, else of everybody; what failed teaches nothing."""
    for name, seconds, more in history:
        ran(full, name, seconds, **more)  # type: ignore[arg-type]
    put_job(full, "sweep_3", ONE)
    assert f"expected run time: {words}" in spool("why", "sweep_3").out
    assert words in spool("show", "sweep_3").out
    planned = {job["name"]: job for job in asked(spool, "plan")["waits"]}
    assert planned["sweep_3"]["expected"].startswith(words)
    assert planned["sweep_3"]["run_is_guess"] is True


@pytest.mark.parametrize("where", ["queued", "held"])
def test_a_job_alone_is_expected_to_run_as_long_as_among_others(spool: Command, spool_root: Path, where: str) -> None:
    """`why` and `show` read the history whether one job waits, is held, or many do."""
    ran(spool_root, "other", 100)
    ran(spool_root, "other", 100)
    put_job(spool_root, "alone", 'command = "true"\ncpus = 1\n', where)
    expected = asked(spool, "show", "alone")["expected"]
    assert "1m40s" in expected
    assert asked(spool, "why", "alone")["expected"] == expected
    if where == "queued":
        planned = asked(spool, "plan")
        assert [job["expected"] for job in (*planned["starts"], *planned["waits"])] == [expected]


def test_a_stated_limit_is_what_is_expected(spool: Command, full: Path) -> None:
    """Whatever runs of its name have taken."""
    ran(full, "train", 100)
    ran(full, "train", 100)
    put_job(full, "train", 'command = "true"\ntime_limit = "20m"\n')
    assert asked(spool, "why", "train")["expected"].startswith("20m00s")


def test_why_tells_the_numbers_of_the_order(spool: Command, full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long it waits, what it is expected to run, what comes of both, and who is first."""
    ran(full, "short", 1200)
    ran(full, "short", 1200)
    put_job(full, "short", ONE)
    later_ns = time.time_ns() + 3 * 3600 * SECOND_NS
    monkeypatch.setattr(snapshot, "time", SimpleNamespace(time_ns=lambda: later_ns))
    answer = asked(spool, "why", "short")
    assert answer["score"] == pytest.approx(10, abs=0.1)
    assert (answer["behind"], answer["ahead"]) == ("first", 1)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's file")
def test_who_has_used_much_reads_so_in_why(spool: Command, full: Path) -> None:
    """The factor of fair share is told where there is somebody to be fair to."""
    ran(full, "mine", 7200)
    put_job(full, "mine_2", ONE)
    (full / "config.toml").write_text('cpus = 1\naccept_from = ["4711"]\n')
    os.chown(full / "queued" / "first.toml", 4711, -1)
    assert "fair share \N{MULTIPLICATION SIGN}0.71" in spool("why", "mine_2").out


@pytest.mark.parametrize("old", ['starvation_after = "30m"', "time_bonus = false"])
def test_an_old_configuration_is_told_what_to_write(spool: Command, full: Path, old: str) -> None:
    """The rest of it is in force all the same."""
    (full / "config.toml").write_text(f"cpus = 3\n{old}\n")
    found = asked(spool, "info")
    assert found["cpus"] == 3
    key = old.partition(" ")[0]
    (problem,) = found["problems"]
    checked = spool("check", str(full / "config.toml"))
    assert checked.code == 0
    for said in (problem, checked.err, spool("doctor").out):
        assert f"{key} has no effect" in said
    assert "order = " in problem
