"""Records of any content, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from spool.core.model import OUTCOMES, Grant, Request, Result
from spool.formats import run_records
from spool.formats.freetext import one_line

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
    cpu_time_ns=st.none() | st.integers(0, 10**12).map(lambda ms: ms * 1_000_000),
    again=st.none() | st.sampled_from(["retry", "requeue", "hold"]),
    again_at_ns=number,
    **dict.fromkeys(("user", "project", "group", "executor", "host", "node"), _some),
    tags=_texts,
    request=_request,
    grant=_grant,
    **_run,
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
