"""`spool plot`: what ran when and where, as a picture in the terminal or in a file."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from calling import Command
from spool.cli import render
from spool.core.model import SECOND_NS as S
from spool.core.model import Grant, Result, State
from spool.extras.plot import pictures
from spool.formats.run_records import render_history
from support import PATIENCE_S

T0 = 1_772_323_200 * S  # the first second of March 2026, UTC
GIB = 1 << 30
PERIOD = ("--since", "2026-03-01T00:00:00Z", "--until", "2026-03-01T08:00:00Z")
HOSTILE = (
    "$\\frac{",
    "_hidden",
    "</text><script>alert(1)</script>",
    "\x1b[2J\n\x9b31m",
    "&lt;--]]>",
    "漢字👩‍🔬",
    "\u202eevil",
)


def write(root: Path, results: Iterable[Result]) -> None:
    """Have these runs be the history."""
    ordered = sorted(results, key=lambda each: each.ended_at_ns or 0)
    (root / "history.jsonl").write_bytes(b"".join(map(render_history, ordered)))


def ended(job: str, start_h: float, end_h: float, *, wait_s: int = 60, **more: Any) -> Result:
    """Return a run from an hour of that day to another."""
    began = T0 + int(start_h * 3600) * S
    known: dict[str, Any] = {"outcome": State.FINISHED, "user": "alice", "grant": Grant(1, GIB)} | more
    times = {"submitted_at_ns": began - wait_s * S, "started_at_ns": began, "ended_at_ns": T0 + int(end_h * 3600) * S}
    return Result(job=job, run=1, attempt=1, reason="", **known | times)


def on_gpu(index: int) -> Grant:
    """Return a CPU and a GPU."""
    return Grant(1, 2 * GIB, (f"GPU-{index}",), (index,))


@pytest.fixture(autouse=True)
def _zone(monkeypatch: pytest.MonkeyPatch) -> Iterable[None]:
    """Have the local clock be UTC, and stdout no terminal with a width of its own."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def history(spool_root: Path) -> Path:
    """Write the history of a morning on a machine of two GPUs: three users, one failure."""
    write(
        spool_root,
        [
            ended("train", 0, 4, grant=on_gpu(0), peak_memory_bytes=GIB),
            ended("next", 4, 8, wait_s=7200, grant=on_gpu(0), user="bob", outcome=State.FAILED),
            ended("eval", 2, 3, grant=on_gpu(1), user="bob", project="vision"),
            ended("more", 3, 4, grant=on_gpu(1), user="bob"),
            ended("pack", 2, 6, grant=Grant(2), user="carol", tags=("x",)),
        ],
    )
    return spool_root


def test_without_colours_a_group_is_a_letter(spool: Command, history: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is wider than the terminal, down to 40 cells."""
    for width, widest in ((80, 80), (40, 40), (1, 40)):
        monkeypatch.setenv("COLUMNS", str(width))
        said = spool("plot", *PERIOD)
        assert (said.code, said.err, "AAAA" in said.out) == (0, "", True)
        assert max(map(cell_len, said.out.splitlines())) <= widest


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_terminal_has_colours_and_shades(
    spool: Command, history: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Blocks in the colour of the group; with NO_COLOR letters; no line is wider than the terminal."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.delenv("NO_COLOR", raising=False)
    drawn = spool("plot", *PERIOD).out
    assert "\x1b[38;2;0;114;178m█" in drawn
    assert "AA" not in drawn
    assert max(cell_len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in drawn.splitlines()) <= width
    monkeypatch.setenv("NO_COLOR", "1")
    drawn = spool("plot", *PERIOD).out
    assert "\x1b" not in drawn
    assert "AAAA" in drawn


def test_a_locale_without_blocks_gets_ascii(history: Path) -> None:
    """In another process, because the encoding of stdout is chosen when it begins; names are escaped, not refused."""
    write(history, [ended("a" * 300, 0, 4, user="ü" * 60), ended("b", 1, 7, user="漢" * 30)])
    words = [sys.executable, "-m", "spool", "plot", *PERIOD]
    surroundings = os.environ | {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
    }
    done = subprocess.run(words, capture_output=True, env=surroundings, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()
    assert b"AAAA" in done.stdout


def test_colours_mean_what_is_asked_for(spool: Command, history: Path) -> None:
    """Projects, how runs ended; those of one user alone how they ended."""
    assert "A -  B vision" in spool("plot", *PERIOD, "--by", "project").out
    assert "A finished  B failed" in spool("plot", *PERIOD, "--by", "state").out
    assert "A failed  B finished" in spool("plot", *PERIOD, "--user", "bob").out
    assert spool("plot", *PERIOD, "--user", "carol").out.startswith("1 run, ")


def test_an_svg_has_its_words_as_text_and_the_colours_of_groups(spool: Command, history: Path, tmp_path: Path) -> None:
    """Names in the bars and the legend, headings, whose run a bar is."""
    path = tmp_path / "x.svg"
    said = spool("plot", *PERIOD, "-o", path)
    assert (said.code, said.out) == (0, "")
    assert f"spool: drew {path}" in said.err
    texts = texts_of(path)
    assert {"train", "next", "alice", "bob", "carol", "GPU 0", "GPU 1", "CPU 1", "04:00"} <= texts
    assert [text for text in texts if text.startswith("GPUs: 62%")]
    elements = list(ET.fromstring(path.read_bytes()).iter())
    assert "train, alice, Mar 01 00:00 to Mar 01 04:00" in {each.text for each in elements if "title" in each.tag}
    bars = {each.get("fill") for each in elements if each.get("fill-opacity")}
    assert bars == {"#0072b2", "#e69f00", "#009e73"}


def texts_of(path: Path) -> set[str]:
    """Return the texts of an SVG, which must be well formed."""
    root = ET.fromstring(path.read_bytes())
    assert not [each for each in root.iter() if each.tag.endswith("script")]
    return {"".join(each.itertext()) for each in root.iter() if each.tag.endswith("}text")}


def test_hostile_names_stay_text(spool: Command, spool_root: Path, tmp_path: Path) -> None:
    """Markup, formulas and control characters of users, and of jobs in their bars, on a terminal and in a file."""
    write(spool_root, [ended(user, at, at + 1, user=user) for at, user in enumerate(HOSTILE)])
    said = spool("plot", *PERIOD)
    assert said.code == 0
    path = tmp_path / "x.svg"
    assert spool("plot", *PERIOD, "-o", path).code == 0
    texts = texts_of(path)
    assert {"$\\frac{", "_hidden", "</text><scrip…", "&lt;--]]>"} <= texts
    assert b"<script" not in path.read_bytes()
    assert not {*said.out, *"".join(texts)} & {"\x1b", "\x9b", "\u202e"}


def test_very_many_runs_become_no_more_than_the_picture_has(spool: Command, spool_root: Path, tmp_path: Path) -> None:
    """Thousands of runs on 64 CPUs: an SVG of less than 2 MB, and a terminal picture of the usual height."""
    dice = random.Random(7)
    runs = []
    for at in range(6_000):
        begin = dice.uniform(0, 8)
        runs.append(ended(f"j{at}", begin, begin + dice.expovariate(60), user=f"u{dice.randrange(20)}"))
    write(spool_root, runs)
    said = spool("plot", *PERIOD)
    assert len(said.out.splitlines()) < 20
    path = tmp_path / "x.svg"
    assert spool("plot", *PERIOD, "-o", path).code == 0
    assert path.stat().st_size < 2 << 20


def test_a_row_is_the_cpu_that_a_run_had_to_itself(spool: Command, spool_root: Path) -> None:
    """It bears the number of that CPU, whichever order the runs came in."""
    (spool_root / "config.toml").write_text("cpus = 4\n")
    runs = [("a", "2", "alice"), ("b", "0", "bob")]
    write(spool_root, [ended(name, 1, 2, grant=Grant(1, cpu_list=cpu), user=user) for name, cpu, user in runs])
    rows = [line.split()[:3] for line in spool("plot", *PERIOD).out.splitlines() if line.startswith("CPU ")]
    assert [(row[1], row[2].upper()[:1]) for row in rows if len(row) > 2] == [("0", "B"), ("2", "A")]


def test_the_picture_shows_waits_runs_and_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job is a row: dots while it waits, blocks while it runs, a cross where a run ended badly."""
    monkeypatch.setattr(pictures, "can_draw", lambda: False)
    runs = {
        "a": [
            Result("a", 1, 1, State.FAILED, "", 0, 2 * S, 4 * S),
            Result("a", 2, 2, State.FINISHED, "", 0, 6 * S, 10 * S),
        ],
        "b": [Result("b", 1, 1, State.CANCELLED, "", 0, None, 5 * S)],
    }
    lines = pictures.gantt(runs, 0, 10 * S, 40)
    row = lines[0].split("  ")[1]
    assert row.startswith("..")
    assert row.index("#") < row.index("x") < row.rindex("#")
    assert "x" in lines[1]
    assert "+0s" in lines[2]
    monkeypatch.setattr(render, "painter", lambda: lambda style, text: f"<{style}>{text}")
    for row, outcome in zip(pictures.gantt(runs, 0, 10 * S, 40), ("failed", "cancelled"), strict=False):
        assert f"<{render.colour_of(outcome)}>" in row
