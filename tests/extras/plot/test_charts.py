"""The charts of other verbs."""

from __future__ import annotations

import time
from datetime import datetime

import pytest

from spool.cli import render
from spool.cli.charts import Bar, Line
from spool.core.model import SECOND_NS as S
from spool.core.model import Result, State
from spool.extras.plot import charts

HOUR = 3600 * S


def test_the_picture_shows_waits_runs_and_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job is a row: dots while it waits, blocks while it runs, a cross where a run ended badly."""
    monkeypatch.setattr(charts, "can_draw", lambda: False)
    second = 1_000_000_000
    runs = {
        "a": [
            Result("a", 1, 1, State.FAILED, "", 0, 2 * second, 4 * second),
            Result("a", 2, 2, State.FINISHED, "", 0, 6 * second, 10 * second),
        ],
        "b": [Result("b", 1, 1, State.CANCELLED, "", 0, None, 5 * second)],
    }
    lines = charts.gantt(runs, 0, 10 * second, 40)
    row = lines[0].split("  ")[1]
    assert row.startswith("..")
    assert row.index("#") < row.index("x") < row.rindex("#")
    assert "x" in lines[1]
    assert "+0s" in lines[2]
    monkeypatch.setattr(render, "painter", lambda: lambda style, text: f"<{style}>{text}")
    for row, outcome in zip(charts.gantt(runs, 0, 10 * second, 40), ("failed", "cancelled"), strict=False):
        assert f"<{render.colour_of(outcome)}>" in row


def test_the_timeline_marks_now_and_draws_each_where_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each; the bar as wide as its time, the mark of now in every row, one scale below."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    now = int(datetime.fromisoformat("2026-01-31T12:00:00+00:00").timestamp()) * S
    lines = [
        Line("a", [Bar(now - 2 * HOUR, now + 2 * HOUR, "active")]),
        Line("long", [Bar(now + 4 * HOUR, now + 8 * HOUR, "pending")]),
    ]
    try:
        first, second, scale = charts.timeline(lines, now, 46)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert first == "a     " + "█" * 8 + "┃" + "█" * 7
    assert second == "long  " + " " * 8 + "┃" + " " * 15 + "░" * 16
    assert scale == "      10:00   12:00   14:00   16:00   18:00"


def test_blocks_show_what_is_not_nothing() -> None:
    """The smallest value that is not 0 has a mark, the highest a full one, and nothing divides by 0."""
    assert charts.curve([0.0, 0.001, 0.5, 1.0, 2.0], 1.0) == " ▁▄██"
    assert charts.curve([0.0, 0.0], 0.0) == "  "
