"""What a sized job can have at most."""

from __future__ import annotations

import pytest

from spool.core.model import FIRST_BYTES, Gpu, GpuUse, Grant, Machine, Policy, Request, Result, Spec, State, Waiting
from spool.core.priority import Past
from spool.core.sizes import Sizes
from spool.state.past import Sizing

GIB = 1 << 30


@pytest.mark.parametrize(("gpus", "shares"), [(1, True), (2, False)])
def test_what_not_so_many_gpus_have_is_asked_of_whole_ones(gpus: int, shares: bool) -> None:
    """A peak on the one large GPU does not make a request that no two GPUs can serve."""
    request = Request(gpus=gpus, gpu_memory_auto=True, memory_bytes=FIRST_BYTES)
    use = (GpuUse(peak_memory_bytes=50 * GIB),)
    sizes = Sizes()
    grant = Grant(1, FIRST_BYTES)
    sizes.add("alice", Result("a", 1, 1, State.FINISHED, "", 1, 2, 3, gpu_use=use, request=request, grant=grant))
    sizing = Sizing(lambda name: None)
    cards = [Gpu(f"GPU-{index}", index, "A", size * GIB, size * GIB) for index, size in enumerate((80, 40, 40))]
    sizing.fit(Machine(4, 64 * GIB, 64 * GIB, gpus=tuple(cards)), Policy())
    past = Past(Policy())
    past.sizes = sizes
    found = sizing.of(Waiting("a", Spec("true", request=request), "alice", 0), past)
    assert found is not None
    assert (found.request.gpu_memory_bytes is not None) is shares
    assert ("whole GPUs" in found.why) is not shares
