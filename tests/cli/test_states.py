"""Every table of the commands has every state: a new one is told as it is, and crashes nothing."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from spool.cli import charts, pictures, render, wait
from spool.core.errors import ExitCode
from spool.core.model import OUTCOMES, State

_RUN = {State.STARTING, State.RUNNING, State.STOPPING}


def test_every_state_is_drawn_and_every_end_has_an_exit_code() -> None:
    """The tables of colours, styles and exit codes lack no member of State."""
    assert set(render.STATE_STYLES) == set(State)
    assert set(charts.OUTCOME_COLOURS) == OUTCOMES
    assert set(pictures.STATE_COLOURS) >= OUTCOMES | _RUN
    assert set(wait.CODES) | {State.FAILED} == OUTCOMES | {State.INVALID}
    assert State.FAILED not in wait.CODES


def test_the_page_has_a_colour_for_every_end() -> None:
    """The style sheet of the page names each outcome where it is said, and each state in the bar of a day."""
    css = (files("spool.page") / "page.css").read_text()
    assert set(re.findall(r"[.]say[.](\w+)", css)) >= OUTCOMES | {State.HELD, State.INVALID}
    assert set(re.findall(r"rect[.](\w+)", css)) >= OUTCOMES | _RUN


def test_a_state_that_a_table_lacks_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that somebody adds, and gives no colour, is plain text and not an error."""
    monkeypatch.delitem(render.STATE_STYLES, State.RUNNING)
    monkeypatch.delitem(wait.CODES, State.LOST)
    assert render.style_of(State.RUNNING) == ""
    assert wait.code_of(State.LOST, None) == ExitCode.FAILED
