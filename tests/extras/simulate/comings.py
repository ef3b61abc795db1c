"""Jobs of the future, drawn at random."""

from __future__ import annotations

from hypothesis import strategies as st
from msgspec.structs import replace

from core.planning import NOW, S
from core.worlds import SPECS
from spool.extras.simulate.simulation import SimulatedJob


@st.composite
def comings(draw: st.DrawFn, **fixed: object) -> list[SimulatedJob]:
    """Draw jobs that come over an hour and end within their limits."""
    jobs = []
    for number in range(draw(st.integers(1, 12))):
        spec = replace(draw(SPECS), **fixed)
        limit = spec.time_limit_ns
        duration = draw(st.integers(1, 900)) * S
        jobs.append(
            SimulatedJob(
                f"j{number:02}",
                spec,
                NOW + draw(st.sampled_from([0, 0, 5, 60, 700, 3600])) * S,
                duration if limit is None else min(duration, limit),
                draw(st.sampled_from(["alice", "bob"])),
            )
        )
    return jobs
