"""What `spool demo` tells of its jobs as they end."""

from __future__ import annotations

from types import SimpleNamespace

from spool.cli.demo import Demonstration
from spool.core.model import SECOND_NS, Result, State


def test_the_clock_of_the_demo_does_not_go_back() -> None:
    """A run whose end is noticed late is told with the time of the one before it."""
    study = object.__new__(Demonstration)
    study._begun_at_ns = 0
    study.dispatcher = SimpleNamespace(poll=lambda: 0)  # type: ignore[assignment]
    ends = (("a", 1), ("b", 3), ("c", 2), ("d", 4))
    results = [Result(name, 1, 1, State.CANCELLED, "x", ended_at_ns=at * SECOND_NS) for name, at in ends]
    study.results = lambda: results  # type: ignore[method-assign]
    assert [line.split()[:2] for line in study.told()] == [["1.0s", "a"], ["3.0s", "b"], ["3.0s", "c"], ["4.0s", "d"]]
