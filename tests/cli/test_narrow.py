"""What the lists look like on terminals of any width, with names and texts that do not fit."""

from __future__ import annotations

import csv
import os
import re
import sys
import time
from pathlib import Path

import pytest
from rich.cells import cell_len

from calling import Command, asked, put_job
from spool.cli import render
from spool.core.errors import shown
from spool.core.model import State
from spool.formats import run_records
from spool.formats.wrapper import Assignments, Surroundings
from spool.formats.wrapper import render as render_wrapper

from .test_looking import ended, running

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_HOSTILE = (
    "plain",
    "long-" * 30 + "tail",
    "漢字" * 40,
    "e\u0301" * 50,
    "\x1b[2J\t\n",
    "\u202eevil",
    "[red]x[/red]",
    "👩‍🔬" * 20,
)
WIDTHS = (40, 60, 80, 200)


def on_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Have stdout be a terminal of that width from now on."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(width))


def lines(text: str) -> list[str]:
    """Return the lines of what was drawn, without colours."""
    return _COLOUR.sub("", text).splitlines()


def words(text: str) -> set[str]:
    """Return the words of a text."""
    return set(text.split())


@pytest.mark.parametrize("cells", range(5, 90, 7))
def test_no_line_of_a_table_is_longer_than_the_terminal(cells: int) -> None:
    """Whatever the texts are, each row of a table without broken texts is one line of at most that many cells."""
    columns = (
        render.Column("NAME", cut="middle"),
        render.Column("STATE"),
        render.Column("MEM", right=True, drop=1),
        render.Column("REASON", cut="end"),
    )
    rows = [[name, "out_of_memory", "512M", reason] for name in _HOSTILE for reason in _HOSTILE]
    drawn = render.fitted(columns, rows, cells)
    assert [len(row) for row in drawn] == [1] * (len(rows) + 1)
    assert max(cell_len(line) for [line] in drawn) <= max(cells, 20)


@pytest.mark.parametrize("cells", range(12, 60, 3))
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


@pytest.mark.parametrize("width", WIDTHS)
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
    assert ("PRIO" in found[0]) == (width >= 80)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_list_breaks_a_word(spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """What the lists say on a terminal has no word that they do not say in a pipe, but for those shortened with …."""
    put_job(spool_root, "waits", 'command = "true"\ncpus = 100000\ndepends_on = ["some-name-that-is-not-there"]\n')
    put_job(spool_root, "held-job", 'command = "true"\ncpus = 100000\n', "held")
    running(spool_root, "runs-and-has-a-rather-long-name")
    for verb in ("info", "why waits", "why held-job", "show waits", "show runs-and-has-a-rather-long-name", "plan"):
        full = words(re.sub(r"\d", "", spool(*verb.split()).out))
        with pytest.MonkeyPatch.context() as patch:
            on_terminal(patch, width)
            drawn = words(re.sub(r"\d", "", _COLOUR.sub("", spool(*verb.split()).out)))
        assert {word for word in drawn - full if "…" not in word} == set(), verb


def array(root: Path, name: str, count: int, *, failed: int, waiting: int) -> None:
    """Put an array into the spool that runs: its first task failed, some wait, the others are still to be issued."""
    put_job(root, name, f'command = "true"\narray = "0-{count - 1}"\n', "running")
    metadir = root / "jobs" / name / "1"
    metadir.mkdir(parents=True)
    (metadir / "job.toml").write_text(f'command = "true"\narray = "0-{count - 1}"\n')
    record = run_records.ArrayRecord(name, 1, count, user="me", submitted_at_ns=1)
    (metadir / "array.toml").write_bytes(run_records.render_array(record))
    for index in range(failed):
        ended(root, f"{name}_{index}", State.FAILED, time.time_ns(), code=3)
    for index in range(failed, failed + waiting):
        put_job(root, f"{name}_{index}")


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
    on_terminal(monkeypatch, 80)
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
    assert [line.split()[0] for line in spool("ls", "sweep", "-s", "failed").out.splitlines()[1:]] == [
        "sweep_0",
        "sweep_1",
    ]
    assert "tasks" not in asked(spool, "ls", "other")
    on_terminal(monkeypatch, 40)
    drawn = lines(spool("ls", "sweep").out)
    assert [line.split()[0] for line in drawn[4:]] == ["sweep_[2-4]", "sweep_[5-19]"]
    assert max(map(len, drawn)) <= 40


def test_ls_shows_the_last_that_ended_and_those_since(spool: Command, spool_root: Path) -> None:
    """-n counts the ended ones, however old; --since takes a duration, a word or a date; both leave what goes on."""
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


@pytest.mark.parametrize("width", WIDTHS)
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
    assert any(re.fullmatch(r"failed tasks +sweep_0, sweep_1", line) for line in drawn)
    assert any(line.startswith("sweep_[5-19]  queued") for line in drawn)
    assert "sweep_0, " not in spool("show", "other").out


@pytest.mark.parametrize(
    ("output", "word", "told"),
    [
        (b" 12%|#2   | 12/100\r 37%|###7 | 37/100 [00:01<00:02, 30it/s]\r", None, "37 %"),
        (b"100%|####| 5/5\n  4%|    | 1/25", None, "4 %"),
        (b"99.5%|####", None, "99 %"),
        (b"accuracy 93% | loss 3%, 250%| x", None, ""),
        (b"  4%|", b"\n epoch  3/10\nmore", "epoch 3/10"),
        (b"  4%|", b" \n", "4 %"),
        (b"", "漢".encode() * 99 + b"\x1b[2J", "漢" * 23 + "…"),
        (b"", b"\xff\x1b[2J", "\ufffd\x1b[2J"),
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
    assert "PROGRESS" not in spool("ls").out
    on_terminal(monkeypatch, 100)
    head, row = lines(spool("ls").out)
    assert ("PROGRESS" in head) == bool(told)
    assert shown(told) in row
    assert shown(told) in spool("show", "a").out
    assert "\x1b[2J" not in spool("ls").out + spool("show", "a").out


def test_what_is_no_file_tells_no_progress(spool: Command, spool_root: Path) -> None:
    """A FIFO or a directory in the place of the word or of the output costs nothing, and blocks nobody."""
    running(spool_root, "a")
    metadir = spool_root / "jobs" / "a" / "1"
    os.mkfifo(metadir / "progress")
    (metadir / "log").mkdir()
    assert [row["progress"] for row in asked(spool, "ls")["jobs"]] == [""]


def test_an_output_of_an_earlier_run_tells_nothing_of_this_one(spool: Command, spool_root: Path) -> None:
    """A file of the job's own that runs append to counts once this run has written to it."""
    running(spool_root, "a")
    metadir = spool_root / "jobs" / "a" / "1"
    own = spool_root.parent / "own"
    own.write_text(" 80%|####")
    assignments = Assignments(
        metadir=str(metadir), command="true", surroundings=Surroundings("-", "host"), stdout=str(own)
    )
    (metadir / "run.sh").write_bytes(render_wrapper(assignments))
    os.utime(own, (1, 1))
    assert [row["progress"] for row in asked(spool, "ls")["jobs"]] == [""]
    os.utime(own)
    assert [row["progress"] for row in asked(spool, "ls")["jobs"]] == ["80 %"]
