"""The memory that the next run of a job requests, for those who ask before a plan has it."""

from __future__ import annotations

import time

from msgspec.structs import replace

from spool.core.model import FIRST_BYTES, Result, Sized, Spec, Waiting
from spool.core.names import engine_of
from spool.query.snapshot import machine_now
from spool.state.past import past_of
from spool.state.sizing import Sizing
from spool.store.config import Settings
from spool.store.spool import Spool


def next_request(spool: Spool, name: str, user: str, spec: Spec) -> Sized | None:
    """Return what the next run of a job of *user* with that *spec* requests; None: what its file states."""
    if not spec.is_sized:
        return None
    now_ns, config, request = time.time_ns(), Settings(spool).config, spec.request
    past = past_of(spool, now_ns, config.policy, sizes=True)
    sizing = Sizing(spool.newest_result)
    sizing.fit(machine_now(spool, now_ns, with_gpus=bool(request.gpus and request.gpu_memory_auto)), config.policy)
    elsewhere = engine_of(spec.executor or config.executor)
    return sizing.of(Waiting(name, spec, user, now_ns, elsewhere=elsewhere), past)


def as_auto(spool: Spool, result: Result) -> str:
    """Return what the next run of a job would request with `memory = "auto"`, after *result*, its newest.

    "" if no run has shown that.
    """
    request = result.request
    if not request.memory_auto:
        request = replace(request, memory_bytes=FIRST_BYTES, memory_auto=True)
    spec = Spec("true", request=request, executor=result.executor, project=result.project)
    found = next_request(spool, result.job, result.user or "", spec)
    return "" if found is None or not found.learnt else found.why
