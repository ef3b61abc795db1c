"""A dispatcher's memory does not grow with the jobs that it has run, and nothing is lost through random lives."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest

from crash.lives import SEED, Life, live_each
from crash.world import Session, World, world_at
from spool.core import layout, priority, runtimes
from spool.dispatcher import observer, scanner
from spool.state import load

ROUND = 60  # jobs of each kind between two countings, far more than anything is let to keep
KEPT = 20


def _children(thing: object) -> Iterator[tuple[str, object]]:
    """Yield what *thing* holds, each with the name that it has there."""
    if isinstance(thing, Mapping) and isinstance(thing, dict):
        for key, value in thing.items():
            yield "[]", value
            yield "key", key
    elif isinstance(thing, list | tuple | deque | AbstractSet):
        yield from (("[]", each) for each in thing)
    elif type(thing).__module__.startswith("spool."):
        names = {name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())}
        for name in sorted(names | getattr(thing, "__dict__", {}).keys()):
            if (value := getattr(thing, name, None)) is not None:
                yield name, value


def sizes(root: object) -> Counter[str]:
    """Return how many elements the containers hold that can be reached from *root*, by the attribute they are in."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [(type(root).__name__, root)]
    while waiting:
        path, thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, World | str | bytes | int | float | type):
            continue
        seen.add(id(thing))
        if isinstance(thing, dict | list | set | deque):
            found[path] += len(thing)
        for name, value in _children(thing):
            inner = path if name in ("[]", "key") else f"{type(thing).__name__}.{name}"
            waiting.append((inner, value))
    return found


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """Give a dispatcher in a world of its own, which keeps little of what it may forget."""
    monkeypatch.setattr(observer, "MISSING_NS", 0)
    monkeypatch.setattr(load, "FEW", KEPT)
    monkeypatch.setattr(scanner, "_SAME_TEXT", KEPT)
    monkeypatch.setattr(priority, "_POINTS", KEPT)
    monkeypatch.setattr(runtimes, "_KINDS", KEPT)
    with world_at(tmp_path / "spool", monkeypatch) as world:
        made = Session(world)
        made.looks_at_everything = True
        yield made
        made.end()


def life(session: Session, begin: int) -> None:
    """Run jobs of every kind to their end."""
    users = session.users
    for number in range(begin, begin + ROUND, 4):
        users.submit(f"good{number}", "ok")
        users.submit(f"bad{number}", "fail", "[retry]", "max = 1")
        users.submit(f"after{number}", "ok", f'depends_on = ["good{number}"]')
        users.submit(f"never{number}", "ok", f'depends_on = ["bad{number}"]')
        users.submit(f"many{number}", "ok", 'array = "0-1"')
        users.submit(f"gone{number}", "ok", place=layout.HELD)
        users.submit(f"broken{number}", "ok", "bogus = 1")
        session.turns(2)
        users.move(f"gone{number}", layout.HELD, layout.DONE)
        users.path(layout.QUEUED, f"broken{number}").unlink()
        session.settle()


def test_nothing_in_a_dispatcher_grows_with_the_jobs_that_it_has_run(session: Session) -> None:
    """After twice as many jobs, of every kind, no container of the dispatcher holds more than after once as many."""
    life(session, 0)
    life(session, 1000)
    once = sizes(session.now)
    life(session, 2000)
    life(session, 3000)
    twice = sizes(session.now)
    # One list for each pool: CPUs, memory and GPUs; and on a slow machine fewer points are near enough to be one.
    more = dict.fromkeys(("PassedWork._sums", "Served._times", "Served._amounts"), 3 * 3 * KEPT)
    grown = {path: (once[path], size) for path, size in twice.items() if size > once[path] + more.get(path, 3 * KEPT)}
    assert grown == {}
    assert len(once) > 100


def test_a_leak_would_be_found(session: Session) -> None:
    """The counting sees a container that somewhere in the dispatcher keeps each job."""
    life(session, 0)
    before = sizes(session.now)
    session.now.outcomes._known.update((f"leak{number}", None) for number in range(1000))  # type: ignore[misc]
    after = sizes(session.now)
    assert {path for path in after if after[path] > before[path] + 900} == {"OutcomeIndex._known"}


LIVES = int(os.environ.get("LIVES", "12"))
# A life in which the end of a submission, cancelled beside another of its name, once lost its line of history.
KNOWN = (461140811,)


def test_nothing_is_lost_and_nothing_runs_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever people do and whatever ends the dispatcher, each submission runs, and each run once."""
    live_each(tmp_path, monkeypatch, Life, (*KNOWN, *range(SEED, SEED + LIVES)), 30)
