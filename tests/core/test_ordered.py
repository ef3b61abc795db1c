"""A list kept in order: whatever comes and goes, what is read is sorted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spool.core import queue as queue_module
from spool.core.queue import Ordered

# Added, taken out, or looked at: what is looked at in between decides which of the two ways of sorting is taken.
STEPS = st.lists(st.tuples(st.sampled_from(["add", "discard", "look"]), st.integers(0, 30)), max_size=120)


@pytest.fixture(scope="module", autouse=True)
def short_lists() -> Iterator[None]:
    """Let a list be a long one soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue_module, "_SHORT", 5)
        yield


@given(STEPS)
def test_entries_are_those_added_and_not_taken_out_in_order(steps: list[tuple[str, int]]) -> None:
    """The same as a plain list that is sorted anew for each look."""
    ordered: Ordered[tuple[int]] = Ordered()
    plain: list[tuple[int]] = []
    for step, number in steps:
        if step == "add":
            ordered.add((number,))
            plain.append((number,))
        elif step == "discard":
            ordered.discard((number,))
            if (number,) in plain:
                plain.remove((number,))
        else:
            assert ordered.entries == sorted(plain)
    assert ordered.entries == sorted(plain)
