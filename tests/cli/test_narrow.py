"""What the lists look like on terminals of any width, with names and texts that do not fit."""

from __future__ import annotations

import csv
import os
import re
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from rich.cells import cell_len

from calling import Command, asked, put_job
from cli.records import expand
from cli.test_looking import ended, names, running
from spool.cli import doctor, render, wait
from spool.cli.ls import FIELDS
from spool.client.waiting import End, Waiter
from spool.core.errors import shown
from spool.core.model import State
from spool.doctor import Finding, Level
from spool.formats.wrapper import Assignments, Surroundings
from spool.formats.wrapper import render as render_wrapper
from spool.query.listing import awaited, expected_end, folded
from spool.query.rows import JobRow
from spool.store.disk import Disk
from spool.store.spool import Spool

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = re.compile(r"\d+(\.\d+)?")  # an age: the second look is later, and "9.9s" becomes "10s"
_HOSTILE = (
    "plain", "long-" * 30 + "tail", "漢字" * 40, "e\u0301" * 50, "\x1b[2J\t\n", "\u202eevil", "[red]x[/red]",
    "👩‍🔬" * 20,
)  # fmt: skip
WIDTHS = pytest.mark.parametrize("width", [40, 80, 200])


def on_terminal(monkeypatch: pytest.MonkeyPatch, width: int, stream: str = "stdout", **more: str) -> None:
    """Have stdout, or stderr, be a terminal of that width from now on, with these variables."""
    monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": str(width), **more}.items():
        monkeypatch.setenv(name, value)


def lines(text: str) -> list[str]:
    """Return the lines of what was drawn, without colours."""
    return _COLOUR.sub("", text).splitlines()


def words(text: str) -> set[str]:
    """Return the words of a text."""
    return set(text.split())


@pytest.mark.parametrize("cells", [5, 12, 26, 40, 82])
def test_no_line_of_a_table_is_longer_than_the_terminal(cells: int) -> None:
    """Whatever the texts are, each row of a table without broken texts is one line of at most that many cells."""
    name, reason = render.Column("NAME", cut="middle"), render.Column("REASON", cut="end")
    columns = (name, render.Column("STATE"), render.Column("MEM", right=True, drop=1), reason)
    rows = [[name, "out_of_memory", "512M", reason] for name in _HOSTILE for reason in _HOSTILE]
    drawn = render.fitted(columns, rows, cells)
    assert [len(row) for row in drawn] == [1] * (len(rows) + 1)
    assert max(cell_len(line) for [line] in drawn) <= max(cells, 20)


def test_names_and_reasons_are_not_shorter_in_a_wider_terminal() -> None:
    """A column that says the same of every row goes before any other, and none takes the room of names and reasons."""
    columns = [FIELDS[name].column for name in ("name", "state", "priority", "cpus", "user", "time", "reason")]
    rows = [
        (f"resnet50-imagenet-lr0.00{at}-seed{at}", "queued", "10", str(at), "alice", f"{at}m00s", "cpus: needs 2 " * 4)
        for at in range(1, 4)
    ]
    seen = {}
    for width in (40, 60, 80, 100, 120, 200):
        cells = [[column.title for column in columns], *rows]
        kept, widths = render.layout(columns, cells, width)
        seen[width] = {columns[at].title: room for at, room in zip(kept, widths, strict=True)}
    for narrow, wide in pairwise(seen.values()):
        assert narrow["NAME"] <= wide["NAME"]
        assert narrow["REASON"] <= wide["REASON"]
        assert "PRIO" not in narrow or "CPU" in narrow
    assert {"TIME", "STATE"} <= seen[80].keys()
    assert seen[200].keys() == {column.title for column in columns}


@pytest.mark.parametrize("cells", [12, 15, 30, 51])
def test_a_broken_text_keeps_its_words(cells: int) -> None:
    """A text that goes on below is broken between words only, and nothing of it is lost."""
    text = "reserved for alice by demo from noon on, then free"
    drawn = render.fitted((render.Column("WHO", cut="words"),), [[text]], cells)
    assert " ".join(drawn[1]) == text
    assert max(map(len, drawn[1])) <= cells


def test_a_name_is_shortened_in_its_middle() -> None:
    """The beginning and the end of a name tell it from its like; a name is not shortened where it fits."""
    name = "resnet50-imagenet-lr0.001-seed42_17"
    assert render.short(name, 20, middle=True) == "resnet50-i…seed42_17"
    assert render.short(name, 60, middle=True) == name
    assert render.short("漢字漢字漢字", 6) == "漢字…"


@WIDTHS
def test_ls_has_one_line_for_each_job(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """A long name or reason leaves every job one line that fits, with its state and the beginning of its reason."""
    name = "resnet50-imagenet-lr0.001-wd0.0005-batch256-cosine-warmup5-augment-mixup-seed42-machine3-v17"
    put_job(spool_root, name, place="held")
    put_job(spool_root, "b", 'command = "true"\nmemory = "64G"\ngpus = 1\n')
    (spool_root / "queued" / "b.toml.error").write_text(f"- {'wrong ' * 60}\n")
    running(spool_root, "runs")
    ended(spool_root, "old", State.FAILED, time.time_ns() - 60_000_000_000, code=3)
    on_terminal(monkeypatch, width)
    found = lines(spool("ls").out)
    assert len(found) == 5
    assert max(map(len, found)) <= width
    assert [line.split()[1] for line in found[1:]] == ["failed", "running", "held", "invalid"]
    assert "REASON" in found[0]
    assert "wrong" in found[4]
    assert found[3].startswith("resnet5")
    assert re.match(r"resnet5\S*…\S*-v17  ", found[3])
    assert name in spool("ls", "-q").out
    assert ("PRIO" in found[0]) == (width >= 200)  # names and reasons need the room


@WIDTHS
def test_no_list_breaks_a_word(spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """What the lists say on a terminal has no word that they do not say in a pipe, but for those shortened with …."""
    put_job(spool_root, "waits", 'command = "true"\ncpus = 100000\ndepends_on = ["some-name-that-is-not-there"]\n')
    put_job(spool_root, "held-job", 'command = "true"\ncpus = 100000\n', "held")
    running(spool_root, "runs-and-has-a-rather-long-name")
    (spool_root / "reservations" / "reservation-with-a-long-name.toml").write_text(
        'user = "somebody-with-a-long-name"\ngpu_count = 1\nstart = 2099-01-01T10:00:00\nduration = "2h"\n'
        'comment = "the demonstration for the visitors of the institute, with every GPU that there is"\n'
    )
    verbs = ("info", "why waits", "why held-job", "show waits", "show runs-and-has-a-rather-long-name", "plan")
    for verb in (*verbs, "reserve list"):
        full = words(_NUMBER.sub("", spool(*verb.split()).out))
        with pytest.MonkeyPatch.context() as patch:
            on_terminal(patch, width)
            drawn = words(_NUMBER.sub("", _COLOUR.sub("", spool(*verb.split()).out)))
        assert {word for word in drawn - full if "…" not in word} == set(), verb


def array(root: Path, name: str, count: int, *, failed: int, waiting: int) -> None:
    """Put an array into the spool that runs: its first task failed, some wait, the others are still to be issued."""
    expand(root, name, count, f'command = "true"\narray = "0-{count - 1}"\n', user="me")
    for index in range(failed):
        ended(root, f"{name}_{index}", State.FAILED, time.time_ns(), code=3)
    for index in range(failed, failed + waiting):
        put_job(root, f"{name}_{index}")


def test_a_task_that_is_tried_again_has_a_line_of_its_own(spool_root: Path) -> None:
    """Its attempt would be said of all that share the line."""
    array(spool_root, "sweep", 8, failed=0, waiting=0)
    rows = [JobRow(name=f"sweep_{index}", state=State.QUEUED, attempt=2 if index == 1 else None) for index in range(8)]
    assert [one.name for one in folded(Spool(str(spool_root)), rows)] == ["sweep_[0,2-7]", "sweep_1"]


def test_the_waiting_tasks_of_an_array_are_one_line_of_a_terminal(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line counts them; a pipe, --all and the names that look like tasks but are jobs have a line each."""
    array(spool_root, "sweep", 20, failed=1, waiting=12)
    for index in range(4):
        put_job(spool_root, f"run_{index}")
    assert spool("ls").out.count("\nsweep_") == 13
    on_terminal(monkeypatch, 80)
    found = lines(spool("ls").out)
    assert [line.split()[:2] for line in found if line.startswith("sweep")] == [
        ["sweep_0", "failed"],
        ["sweep", "running"],
        ["sweep_[1-12]", "queued"],
    ]
    assert "12 tasks: " in next(line for line in found if "sweep_[" in line)
    assert sum(line.startswith("run_") for line in found) == 4
    assert _COLOUR.sub("", spool("ls", "-a").out).count("\nsweep_") == 13


def test_the_name_of_an_array_lists_its_tasks(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task with its outcome, those not issued yet too; --quiet and the rows of the JSON stay the array alone."""
    array(spool_root, "sweep", 20, failed=2, waiting=3)
    put_job(spool_root, "other")
    listed = spool("ls", "sweep").out.splitlines()[1:]
    assert [line.split()[0] for line in listed] == ["sweep", *(f"sweep_{index}" for index in range(20))]
    assert sum("exit code 3" in line for line in listed) == 2
    assert sum("not issued yet" in line for line in listed) == 15
    assert spool("ls", "-q", "sweep").out == "sweep\n"
    found = asked(spool, "ls", "sweep")
    assert [row["name"] for row in found["jobs"]] == ["sweep"]
    assert len(found["tasks"]["sweep"]) == 20
    assert names(spool("ls", "sweep", "-s", "failed").out) == ["sweep_0", "sweep_1"]
    assert "tasks" not in asked(spool, "ls", "other")
    on_terminal(monkeypatch, 40)
    drawn = lines(spool("ls", "sweep").out)
    assert [line.split()[0] for line in drawn[4:]] == ["sweep_[2-4]", "sweep_[5-19]"]
    assert max(map(len, drawn)) <= 40


def test_ls_shows_the_last_that_ended_and_those_since(spool: Command, spool_root: Path) -> None:
    """-n counts the ended ones, however old; --since takes a duration, a day or a date; both leave what goes on."""
    now, day = time.time_ns(), 24 * 3600 * 1_000_000_000
    for at in range(15):
        ended(spool_root, f"job_{at}", State.FINISHED, now - (15 - at) * day, code=0)
    put_job(spool_root, "waits")
    assert spool("ls", "-q").out.split() == ["waits"]
    assert spool("ls", "-q", "-n", "2").out.split() == ["job_13", "job_14", "waits"]
    assert spool("ls", "-q", "-n", "0").out.split() == ["waits"]
    assert spool("ls", "-q", "-n", "1", "--user", "me").out.split() == ["job_14"]
    assert spool("ls", "-q", "--since", "60h").out.split() == ["job_13", "job_14", "waits"]
    assert spool("ls", "-q", "--since", "60h", "-n", "1").out.split() == ["job_14", "waits"]
    wrong = spool("ls", "--since", "then")
    assert (wrong.code, "--since" in wrong.err) == (2, True)
    assert spool("ls", "-n", "-3").code == 2


def test_columns_and_csv_say_what_is_asked_for(spool: Command, spool_root: Path) -> None:
    """--columns has an order of its own; CSV has every column, is quoted, and shows no control."""
    ended(spool_root, "a", State.FAILED, time.time_ns(), code=3)
    put_job(spool_root, "b", 'command = "true"\nproject = "x, y"\ntags = ["t", "u"]\n')
    (spool_root / "queued" / "c.toml").write_text("=")
    (spool_root / "queued" / "c.toml.error").write_text('- say "\x1b[2J", or not\n')
    assert spool("ls", "--columns", "exit, NAME").out.splitlines() == ["EXIT  NAME", "   3  a", "      b", "      c"]
    rows = list(csv.DictReader(spool("ls", "--csv").out.splitlines()))
    assert [row["name"] for row in rows] == ["a", "b", "c"]
    assert (rows[1]["project"], rows[1]["tags"]) == ("x, y", "t,u")
    assert rows[2]["reason"] == 'say "\\u001b[2J", or not'
    assert spool("ls", "--csv", "--columns", "name").out == "name\na\nb\nc\n"
    for words in (("--columns", "nmae"), ("--columns", ""), ("--csv", "--json"), ("--watch",), ("--csv", "-q")):
        assert spool("ls", *words).code == 2
    assert "reason" in spool("ls", "--columns", "nmae").err


def test_watching_draws_the_list_again_until_it_is_interrupted(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time the screen is cleared, what has changed is seen, and the list is cut to the height of the terminal."""
    put_job(spool_root, "a")
    monkeypatch.setenv("LINES", "24")

    def change(seconds: float) -> None:
        if (spool_root / "queued" / "b19.toml").exists():
            raise KeyboardInterrupt
        for at in range(20):
            put_job(spool_root, f"b{at}")

    monkeypatch.setattr(time, "sleep", change)
    on_terminal(monkeypatch, 80)
    said = spool("ls", "--watch")
    assert said.code == 130
    first, second = said.out.split("\x1b[H\x1b[2J\x1b[3J")[1:]
    assert "b1" not in first
    assert "… and 3 more" in second


@WIDTHS
def test_show_of_an_array_says_which_tasks_failed(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """It counts the tasks by their states, names those that failed, and lists them; of a job there is no such thing."""
    array(spool_root, "sweep", 20, failed=2, waiting=3)
    put_job(spool_root, "other")
    found = asked(spool, "show", "sweep")
    assert (found["task_counts"], found["failed_tasks"]) == ({"failed": 2, "queued": 18}, ["sweep_0", "sweep_1"])
    assert len(found["tasks"]) == 20
    assert found["runs"][0]["state"] == "running"
    assert asked(spool, "show", "other")["tasks"] == []
    on_terminal(monkeypatch, width)
    drawn = lines(spool("show", "sweep").out)
    assert any(re.fullmatch(r"tasks +2 failed, 18 queued", line) for line in drawn)
    assert any(line.endswith("  sweep_0, sweep_1") for line in drawn)
    assert any(line.startswith("sweep_[5-19]  queued") for line in drawn)
    assert "sweep_0, " not in spool("show", "other").out


@pytest.mark.parametrize(
    ("output", "word", "told"),
    [
        (b" 12%|#2   | 12/100\r 37%|###7 | 37/100 [00:01<00:02, 30it/s]\r", None, "37%"),
        (b"100%|####| 5/5\n  4%|    | 1/25", None, "4%"),
        (b"99.5%|####", None, "99%"),
        (b"accuracy 93% | loss 3%, 250%| x, -5%| 5%-10%|", None, ""),
        (b"  4%|", b"\n epoch  3/10\nmore", "epoch 3/10"),
        (b"  4%|", b" \n", "4%"),
        (b"", "漢".encode() * 99 + b"\x1b[2J", "漢" * 23 + "…"),
        (b"", b"\xff\x1b[2J", "\ufffd\\u001b[2J"),
        (None, None, ""),
    ],
)
def test_a_run_tells_how_far_it_is(
    spool: Command,
    spool_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    output: bytes | None,
    word: bytes | None,
    told: str,
) -> None:
    """Its own word counts, else the last bar of tqdm; anything else is none, and a terminal gets no controls."""
    running(spool_root, "a")
    for name, data in (("log", output), ("progress", word)):
        if data is not None:
            (spool_root / "jobs" / "a" / "1" / name).write_bytes(data)
    assert [row["progress"] for row in asked(spool, "ls")["jobs"]] == [told]
    assert asked(spool, "show", "a")["runs"][0]["progress"] == told
    assert ("PROGRESS" in spool("ls").out) == bool(told)
    on_terminal(monkeypatch, 100)
    head, row = lines(spool("ls").out)
    assert ("PROGRESS" in head) == bool(told)
    assert shown(told) in row
    assert shown(told) in spool("show", "a").out
    assert "\x1b[2J" not in spool("ls").out + spool("show", "a").out


def test_an_output_of_an_earlier_run_tells_nothing_of_this_one(spool: Command, spool_root: Path) -> None:
    """A file of the job's own that runs append to counts once this run has written to it."""
    running(spool_root, "a")
    metadir = spool_root / "jobs" / "a" / "1"
    own = spool_root.parent / "own"
    own.write_text(" 80%|####")
    surroundings = Surroundings("-", "host")
    assignments = Assignments(metadir=str(metadir), command="true", surroundings=surroundings, stdout=str(own))
    (metadir / "run.sh").write_bytes(render_wrapper(assignments))
    os.utime(own, (1, 1))
    assert [row["progress"] for row in asked(spool, "ls")["jobs"]] == [""]
    os.utime(own)
    assert [row["progress"] for row in asked(spool, "ls")["jobs"]] == ["80%"]


INTERRUPTED = "spool: interrupted: no job was cancelled; `spool cancel` does that\n"


# What the commands say comes line by line, so that the carriage return of a line that is drawn again is a line's end.
@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the bar of `wait` at once, press Ctrl-C at the first sleep, and never miss a dispatcher, however slow."""

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(wait, "_BAR_AFTER_NS", 0)
    monkeypatch.setattr(time, "sleep", interrupt)
    monkeypatch.setattr(Waiter, "is_unserved", False)


@WIDTHS
@pytest.mark.usefixtures("impatient")
def test_wait_shows_on_a_terminal_how_far_the_jobs_are(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """One line for all of them, an array as its tasks, or for the one with its progress; it goes at the end."""
    array(spool_root, "sweep", 20, failed=2, waiting=3)
    running(spool_root, "long-" * 15)
    (spool_root / "jobs" / ("long-" * 15) / "1" / "progress").write_text("epoch 3\x1b[2J")
    on_terminal(monkeypatch, width, "stderr")
    said = spool("wait", "sweep", "long-" * 15)
    assert said.code == 130
    begin, drawn, end = said.err.split("\n\x1b[K")
    assert (begin, end) == ("", INTERRUPTED)
    assert "2 of 21 done" in drawn
    assert width < 80 or "1 running, 2 not finished" in drawn
    one = spool("wait", "long-" * 15).err.split("\n\x1b[K")[1]
    assert "\x1b" not in one
    assert width < 200 or "running for" in one
    assert width < 200 or r"epoch 3\u001b[2J" in one
    assert max(map(cell_len, (drawn, one))) < width


@pytest.mark.parametrize("setting", [None, {"TERM": "dumb"}, {"NO_COLOR": "1"}], ids=["pipe", "dumb", "no colour"])
@pytest.mark.usefixtures("impatient")
def test_wait_and_gc_show_no_bar_to_those_that_cannot_use_it(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch, setting: dict[str, str] | None
) -> None:
    """A pipe, a terminal without a cursor and a user who wants no colours get the messages alone; others get a bar."""
    put_job(spool_root, "a")
    if setting is not None:
        on_terminal(monkeypatch, 80, "stderr", **setting)
    assert spool("wait", "a").err == INTERRUPTED
    for drawn in (False, True):
        ended(spool_root, "old", State.FINISHED, 1)
        said = spool("gc", "--older-than", "1s")
        assert (said.code, "removing" in said.err, "1 of 1" in said.err) == (0, drawn, drawn)
        assert said.out.startswith("1 run (")
        on_terminal(monkeypatch, 80, "stderr")


@pytest.mark.usefixtures("impatient")
def test_a_message_is_told_above_the_line_of_wait(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is taken away first, so that neither is written into the other."""
    put_job(spool_root, "a")
    os.mkdir(spool_root / "jobs" / "b")
    put_job(spool_root, "b", 'command = "true"\n')
    on_terminal(monkeypatch, 80, "stderr")

    look = Waiter.wait

    def hold(waiter: Waiter, timeout_s: float) -> list[End]:
        if timeout_s == 0:
            return look(waiter, timeout_s)
        if (spool_root / "held" / "a.toml").exists():
            raise KeyboardInterrupt
        os.rename(spool_root / "queued" / "a.toml", spool_root / "held" / "a.toml")
        return look(waiter, 0)

    monkeypatch.setattr(Waiter, "wait", hold)
    pieces = spool("wait", "a", "b").err.split("\n\x1b[K")
    assert "0 of 2 done" in pieces[1]
    assert pieces[2].startswith("spool: job a ")


def test_the_end_of_many_is_that_of_the_plan(spool_root: Path) -> None:
    """Known while all that are left have a limit or an earlier run to judge by."""
    now, names = time.time_ns(), [f"j{at}" for at in range(10)]
    for name in names:
        put_job(spool_root, name, 'command = "true"\ntime_limit = "1h"\n')
    spool = Spool(str(spool_root))
    assert {row.state for row in awaited(spool, names)} == {State.QUEUED}
    assert (expected_end(spool, names, now) or 0) >= now + 3600 * 1_000_000_000
    assert expected_end(spool, [*names, "nosuch"], now) is None


def test_a_tree_has_each_job_below_what_it_depends_on(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every job once, tasks below their array, circles and names that are not there as they can be shown."""
    array(spool_root, "sweep", 9, failed=1, waiting=5)
    put_job(spool_root, "fetch")
    put_job(spool_root, "report", 'command = "true"\ndepends_on = ["sweep", "fetch"]\n')
    put_job(spool_root, "mail", 'command = "true"\ndepends_on = { ended = ["report"] }\n', "held")
    put_job(spool_root, "lost", 'command = "true"\ndepends_on = ["nosuch"]\n')
    put_job(spool_root, "ring", 'command = "true"\ndepends_on = ["round"]\n')
    put_job(spool_root, "round", 'command = "true"\ndepends_on = ["ring"]\n')
    put_job(spool_root, "bad", "=")
    said = spool("ls", "--tree", "--columns", "name")
    assert said.out.splitlines()[1:] == [
        "sweep",
        "├─ sweep_0",
        "├─ sweep_[1-5]",
        "└─ report (also after fetch)",
        "   └─ mail",
        "fetch",
        "lost",
        "bad",
        "ring",
        "└─ round",
    ]
    on_terminal(monkeypatch, 40)
    assert max(map(cell_len, lines(spool("ls", "--tree").out))) <= 40
    assert spool("ls", "--tree", "--csv").code == 2


def test_a_long_chain_is_a_tree_that_fits(spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deep levels are not indented for ever, and cost no recursion."""
    put_job(spool_root, "j0")
    for at in range(1, 1100):
        put_job(spool_root, f"j{at}", f'command = "true"\ndepends_on = ["j{at - 1}"]\n')
    on_terminal(monkeypatch, 60)
    found = lines(spool("ls", "--tree").out)
    assert len(found) == 1101
    assert max(map(cell_len, found)) <= 60


@pytest.mark.parametrize("setting", [{"TERM": "dumb"}, {"NO_COLOR": "1"}], ids=["dumb", "no colour"])
def test_a_table_without_colours_has_its_lines_alone(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch, setting: dict[str, str]
) -> None:
    """Nothing of a colour reaches a terminal that has none, or whose user wants none."""
    put_job(spool_root, "a", place="held")
    on_terminal(monkeypatch, 80, **setting)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", spool("ls").out)


def test_a_submission_of_many_files_shows_how_far_it_is(
    spool: Command, spool_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bar on a terminal, which is gone before anything else is printed; a pipe gets none."""
    files = [word for number in range(4) for word in ("-f", str(put_job(tmp_path, f"j{number}", place=".")))]
    assert "submitting" not in spool("submit", *files).err
    monkeypatch.setattr(render, "_REDRAWN_NS", 0)
    on_terminal(monkeypatch, 80, "stderr")
    said = spool("submit", "--replace", "--hold", *files)
    _, *drawn, last = said.err.split("\n\x1b[K")
    assert [line.partition("submitting: ")[2] for line in drawn] == [f"{number} of 4" for number in range(4)]
    assert last == ""
    assert said.out.split() == ["j0", "j1", "j2", "j3"]


def test_an_interrupted_submission_says_how_many_jobs_are_there(
    spool: Command, spool_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle: what was put before stays, it is counted, and the exit code is 130."""
    files = [put_job(tmp_path, f"j{number}", place=".") for number in range(4)]
    links = []

    def link(self: Disk, old: str, new: str) -> None:
        if len(links) == 2:
            raise KeyboardInterrupt
        links.append(new)
        os.link(old, new)

    monkeypatch.setattr(Disk, "link", link)
    said = spool("submit", *(word for file in files for word in ("-f", str(file))))
    assert (said.code, "2 of 4" in said.err) == (130, True)
    assert sorted(os.listdir(spool_root / "queued")) == ["j0.toml", "j1.toml"]


@WIDTHS
def test_the_doctor_keeps_to_the_width_and_breaks_no_word(
    spool: Command, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Further lines of a finding stand below its text; a word alone may be longer, as a path is."""
    long = "a finding of many words that no narrow terminal has room for in one line"
    found = [Finding("Slurm", Level.FAIL, long, "a remedy that is as long as that"), Finding("x", Level.OK, "y")]
    monkeypatch.setattr(doctor, "examine", lambda *_, **__: iter(found))
    piped = spool("doctor").out
    on_terminal(monkeypatch, width)
    drawn = lines(spool("doctor").out)
    assert max(map(cell_len, drawn)) <= width
    assert " ".join(" ".join(drawn).split()) == " ".join(piped.split())
    assert [line[:6].strip() for line in drawn if line[:6].strip()] == ["fail", "ok"]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in spool("doctor").out
