"""Each file of a name is a job, and every view counts it: beside a run, beside an array, and beside one that waits."""

from __future__ import annotations

import pytest

from crash.world import Session, _Processes
from spool.core import layout
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.core.model import Machine, State
from spool.formats.state import StateView, parse_state, render_state
from spool.query.jobs import counts, list_jobs
from spool.query.machine import machine_status
from spool.query.rows import JobRow
from spool.store.spool import Spool


@pytest.fixture
def session(session: Session, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Give a dispatcher that ends no run."""
    monkeypatch.setattr(_Processes, "terminate", lambda *_: [])
    return session


def _begin(session: Session, first: str) -> None:
    """Bring a job or an array `a` to where a second file of its name can lie beside it; none of its runs ends."""
    session.users.submit("a", "hang", 'array = "0-2"' if "array" in first else "")
    if first == "a job that waits":
        session.users.submit("a", "hang", 'depends_on = "nothing"')
    session.turns(3)
    if first == "a held array":
        assert session.users.move("a", RUNNING, HELD)
    elif first == "a cancelled array":
        assert session.users.move("a", RUNNING, DONE)
    session.turns(1)


def _view(session: Session) -> StateView:
    """Write state.json as of now, and return it as it is read."""
    machine = Machine(cpus=2, memory_bytes=1 << 30)
    text = render_state(session.now.status.view(session.now.planner.plan, machine, paused=False))
    (session.world.root / layout.STATE).write_bytes(text)
    return parse_state(text)


def _rows(session: Session) -> list[JobRow]:
    return [row for row in list_jobs(Spool(str(session.world.root))).rows if row.place != DONE]


MAIN = {
    "a run": (RUNNING, State.RUNNING),
    "an array": (RUNNING, State.RUNNING),
    "a held array": (HELD, State.HELD),
    "a cancelled array": (RUNNING, State.STOPPING),
    "a job that waits": (QUEUED, State.QUEUED),
}


@pytest.mark.parametrize("more", [(QUEUED,), (HELD,), (QUEUED, HELD)], ids="+".join)
@pytest.mark.parametrize("first", MAIN)
def test_each_file_of_a_name_is_counted_once_in_every_view(session: Session, first: str, more: tuple[str, ...]) -> None:
    """`ls`, `info` and state.json count what lies beside a run, an array or a job, with a dispatcher and without."""
    place, state = MAIN[first]
    _begin(session, first)
    more = tuple(each for each in more if each != place)
    for each in more:
        session.users.submit("a", "ok # another", place=each)
    session.turns(2)
    view = _view(session)
    rows = _rows(session)
    assert view.jobs["a"].state == state
    assert view.jobs["a"].beside == " ".join(more)
    told = {str(each): number for each, number in counts(rows).items()}
    assert told == view.counts() == machine_status(Spool(str(session.world.root))).states
    others = [row for row in rows if row.name == "a" and row.place in more]
    assert sorted((row.place, row.state, row.array) for row in others) == sorted(
        (each, State(each), False) for each in more
    )
    session.end()
    assert [row.array for row in _rows(session) if row.name == "a" and row.place in more] == [False] * len(more)


def test_a_file_beside_an_array_is_counted_as_long_as_it_lies_there(session: Session) -> None:
    """One that waits before the array's file is claimed, one that cannot be used, and one that is taken away again."""
    session.users.submit("a", "ok # another", place=HELD)
    _begin(session, "an array")
    assert _view(session).jobs["a"].beside == "held"
    session.users.submit("a", "ok", "no such key", place=HELD)
    session.turns(1)
    assert _view(session).jobs["a"].beside == "invalid"
    session.users.path(HELD, "a").unlink()
    session.turns(1)
    assert _view(session).jobs["a"].beside == ""
