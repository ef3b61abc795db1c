"""Records of any content, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st
from msgspec.structs import replace

from spool.core.gpuuse import GpuWatch
from spool.core.model import OUTCOMES, GpuUse, Grant, Request, Result
from spool.formats import run_records
from spool.formats.wire import one_line

text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12).map(one_line)
word = st.from_regex(r"[!-~]{1,20}", fullmatch=True)
number = st.none() | st.integers(0, (1 << 63) - 1)
instant = st.none() | st.integers(0, 5_000_000_000 * 10**9)
_some = st.none() | text
_texts = st.lists(text, max_size=3).map(tuple)
_numbers = st.lists(st.integers(0, 64), max_size=3).map(tuple)
_named = st.dictionaries(text, st.integers(1, 10**6), max_size=3).map(lambda named: tuple(sorted(named.items())))
_which = st.dictionaries(text, _numbers, max_size=2).map(lambda named: tuple(sorted(named.items())))
_request = st.builds(
    Request, st.integers(0, 64), number, st.integers(0, 8), number, _texts, _named, gpu_min_memory_bytes=number
)
_grant = st.builds(
    Grant, st.integers(0, 64), number, _texts, _numbers, number, _named, _which, gpus_elsewhere=st.integers(0, 8)
)
_ms = st.integers(0, 10**12).map(lambda ms: ms * 1_000_000)
_use = st.builds(
    GpuUse,
    _ms,
    st.none() | st.integers(0, 100).map(float),
    number,
    _ms,
    **dict.fromkeys(("mean_memory_bytes", "peak_memory_bytes", "energy_mj"), number),
    energy_watched_ns=_ms,
)
_uses = st.lists(_use, max_size=2).map(tuple)
_run = {"job": text, "run": st.integers(1, 10**6), "attempt": st.integers(1, 99), "requeues": st.integers(0, 9)}
results = st.builds(
    Result,
    outcome=st.sampled_from(sorted(OUTCOMES)),
    reason=text,
    submitted_at_ns=instant,
    started_at_ns=instant,
    ended_at_ns=instant,
    exit_code=st.none() | st.integers(0, 255),
    peak_memory_bytes=st.none() | st.integers(1, (1 << 63) - 1),
    cpu_time_ns=st.none() | _ms,
    again=st.none() | st.sampled_from(["retry", "requeue", "hold"]),
    again_at_ns=number,
    **dict.fromkeys(("user", "project", "group", "executor", "host", "node"), _some),
    tags=_texts,
    request=_request,
    grant=_grant,
    suspended_ns=_ms,
    gpu_use=_uses,
    end_is_bound=st.booleans(),
    **_run,
)
watches = st.builds(GpuWatch, st.integers(0, 10**18), _uses, _ms, st.integers(0, 9), st.booleans()).flatmap(
    lambda watch: (
        st.just(watch)
        | st.tuples(*([number] * len(watch.gpus))).filter(any).map(lambda known: replace(watch, counters_mj=known))
    )
)
grants = st.builds(
    run_records.GrantRecord,
    executor=text.filter(bool),
    grant=_grant,
    submitted_at_ns=instant,
    granted_at_ns=number,
    **dict.fromkeys(("user", "host", "boot_id"), _some),
    inode=st.none() | st.integers(0, (1 << 64) - 1),
    **_run,
)
