"""Every table of the commands has every state."""

from __future__ import annotations

import re

from spool.cli import info, render, wait
from spool.core.model import OUTCOMES, State
from spool.query.machine import GpuState
from spool.query.selection import UNSUCCESSFUL
from spool.query.snapshot import ReservationState
from support import ROOT


def test_every_state_is_drawn_and_every_end_has_an_exit_code() -> None:
    """No member of State is without a style and an exit code, nor an outcome without a colour of its own."""
    assert [state for state in State if not render.style_of(state)] == [State.QUEUED]
    assert set(info._STYLES) == set(ReservationState)
    assert set(info._GPU_STYLES) == set(GpuState)
    assert len({render.colour_of(state) for state in OUTCOMES}) == len(OUTCOMES)
    assert render.colour_of("a word of a later version") == render.GREY
    assert [state for state in State if wait.code_of(state, None) == 0] == [State.FINISHED]
    assert wait.code_of(State.FAILED, 7) == 7
    assert len({wait.code_of(state, 7) for state in OUTCOMES}) == len(OUTCOMES)


def test_the_page_names_the_ends_that_are_requeued_as_failed() -> None:
    """`spool requeue --failed` takes each outcome but success and a user's wish, and the page lists them."""
    text = (ROOT / "docs" / "OPERATIONS.md").read_text(encoding="utf-8")
    sentence = text.partition("`spool requeue --failed` runs again")[2].partition(";")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) == UNSUCCESSFUL == OUTCOMES - {State.FINISHED, State.CANCELLED}
