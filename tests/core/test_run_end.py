"""When a run ended: what its exit code, its last proofs of life and the clocks say of that."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from spool.core.lifecycle import LastSigns, RunEnd, end_of

WATCHED = LastSigns(granted_at_ns=100, began_ns=110, watched=True)
ALONE = replace(WATCHED, watched=False)
moments = st.one_of(st.none(), st.integers(-(1 << 63), 1 << 63))


def test_the_exit_code_is_the_end_whoever_looks_and_when() -> None:
    """A run ends when its exit code was written, however late that is seen, watched or not.

    If its processes were seen after that it ended with the last of them; that a dispatcher lived does not move it.
    """
    for signs in (WATCHED, ALONE):
        assert end_of(signs, 10_000, exit_ns=150, wrote_ns=9_000) == RunEnd(150)
    assert end_of(replace(ALONE, outlived_ns=400), 500, exit_ns=150, wrote_ns=None) == RunEnd(400)
    assert end_of(replace(ALONE, outlived_ns=140), 500, exit_ns=150, wrote_ns=None) == RunEnd(150)
    signs = replace(ALONE, served_ns=300)
    assert end_of(signs, 500, exit_ns=150, wrote_ns=None) == RunEnd(150)
    assert end_of(signs, 500, exit_ns=None, wrote_ns=200) == RunEnd(300, is_bound=True)


def test_an_end_without_an_exit_code_is_now_if_it_was_watched_and_else_a_bound() -> None:
    """What is watched ends as it is seen, as does what never began; what is not has its last proof of life, a bound."""
    assert end_of(WATCHED, 500, exit_ns=None, wrote_ns=200) == RunEnd(500)
    assert end_of(ALONE, 500, exit_ns=None, wrote_ns=200) == RunEnd(200, is_bound=True)
    assert end_of(ALONE, 500, exit_ns=None, wrote_ns=None) == RunEnd(110, is_bound=True)
    assert end_of(replace(ALONE, began_ns=None), 500, exit_ns=None, wrote_ns=None) == RunEnd(500)


@given(exit_ns=moments, wrote_ns=moments, outlived_ns=moments, served_ns=moments, watched=st.booleans())
def test_no_clock_makes_nonsense_of_the_end(
    exit_ns: int | None, wrote_ns: int | None, outlived_ns: int | None, served_ns: int | None, watched: bool
) -> None:
    """Whatever clocks and `touch` say, a run ends between its begin and the look that finds it over."""
    signs = replace(ALONE, outlived_ns=outlived_ns, served_ns=served_ns, watched=watched)
    assert 110 <= end_of(signs, 500, exit_ns=exit_ns, wrote_ns=wrote_ns).at_ns <= 500
    assert end_of(signs, 50, exit_ns=exit_ns, wrote_ns=wrote_ns).at_ns == 110  # the clock was set back
