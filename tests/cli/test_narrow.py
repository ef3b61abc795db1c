"""What the lists look like on terminals of any width, with names and texts that do not fit."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from rich.cells import cell_len

from calling import Command, put_job
from spool.cli import render
from spool.core.model import State

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
