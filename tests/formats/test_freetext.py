"""What a job writes for others to read is taken over as one short line that can be printed anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spool.core.model import State, StopKind
from spool.formats.run_records import parse_engine, parse_engine_end, parse_grant, parse_result, parse_stop
from spool.formats.wire import MOST_BYTES, MOST_READ, one_line, peak_in

HOSTILE = "\x1b[2J\u202e\u2066a" * 50_000


@given(st.one_of(st.text(), st.binary()))
def test_any_text_becomes_one_printable_line_of_at_most_a_kibibyte(text: str | bytes) -> None:
    """Whatever is written, what is taken over is printable, on one line, and at most 1 KiB of UTF-8."""
    said = one_line(text)
    assert said.isprintable()
    assert len(said.encode()) <= MOST_BYTES
    assert len(said.splitlines()) <= 1


@given(st.characters(exclude_categories=["C", "Z"]), st.integers(min_value=0, max_value=3))
def test_a_text_that_is_too_long_is_cut_between_two_characters(character: str, before: int) -> None:
    """A long text is cut at a whole character, as late as there is room for the sign of the cut."""
    said = one_line("x" * before + character * 2000)
    assert said.endswith("…")
    assert set(said[before:-1]) == {character}
    assert MOST_BYTES - len(character.encode()) < len(said.encode()) <= MOST_BYTES


@given(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=MOST_BYTES // 4))
def test_a_short_text_stays_as_it_is(text: str) -> None:
    """A printable text of one line and at most 1 KiB is taken over unchanged."""
    assert one_line(f"\n \n{text}\nmore") == text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("é" * 512, "é" * 512),
        ("é" * 512 + "x", "é" * 510 + "…"),
        ("\x1b" * 2000, "\\u001b" * ((MOST_BYTES - 3) // 6) + "…"),
        ("é".encode() * 9000, "é" * 510 + "…"),
        (b"\0" * 9000, "\\u0000" * ((MOST_BYTES - 3) // 6) + "…"),
    ],
)
def test_a_kibibyte_is_taken_over_whole_and_of_more_no_half_of_anything(data: str | bytes, said: str) -> None:
    """1,024 bytes stay; the mark of the cut takes the place of whole characters and whole escapes."""
    assert one_line(data) == said


def test_what_a_job_writes_into_its_records_is_bounded() -> None:
    """Every text of a result, a grant, a stop or the words of an engine that a job has forged is one short line."""
    line = "\\u001b[2Jx" * 2_000
    text = f'job = "a"\nrun = 1\noutcome = "finished"\nreason = "{line}"\nuser = "{line}"\nproject = "{line}"\n'
    text += f'group = "{line}"\ntags = ["{line}"]\nexecutor = "{line}"\nhost = "{line}"\nagain = "{line}"\n'
    result = parse_result(text.encode())
    assert result.outcome is State.FINISHED
    texts = [result.reason, result.user, result.project, result.group, *result.tags, result.executor, result.host]
    grant = parse_grant(f'job = "a"\nrun = 1\nuser = "{line}"\nhost = "{line}"\nboot_id = "{line}"\n'.encode())
    words = f"slurm {HOSTILE} {HOSTILE} NOT_STARTED {HOSTILE}\n".encode()
    engine, end = parse_engine(words), parse_engine_end(b"slurm c 7 timeout " + HOSTILE.encode() + b"\n")
    stop = parse_stop(b"cancel " + HOSTILE.encode()[: MOST_READ - 7])
    assert engine is not None
    assert end is not None
    assert stop.kind is StopKind.CANCEL
    assert stop.reason.isprintable()
    assert len(stop.reason.encode()) <= MOST_BYTES
    for said in [*texts, result.again, grant.user, grant.host, grant.boot_id, *engine, end[1]]:
        assert said is not None
        assert said.isprintable()
        assert 0 < len(said.encode()) <= MOST_BYTES


@pytest.mark.parametrize(
    ("words", "peak"),
    [
        ("slurmstepd: error: StepId=7.batch exceeded memory limit (324599808 > 52428800), being killed", 324599808),
        ("over its memory limit: Slurm wrote 'Step 7.0 Exceeded memory limit (11 > 10), being killed'", 11),
        ("exceeded memory limit (10 > 11)", None),
        ("exceeded memory limit (x > y)", None),
        (f"exceeded memory limit ({'9' * 40} > 1)", None),
        ("Detected 1 oom_kill event in StepId=7.batch", None),
        ("loss (2 > 1)", None),
        ("", None),
    ],
)
def test_the_memory_in_an_engines_words_is_a_peak(words: str, peak: int | None) -> None:
    """What a run had when its engine ended it for that is known from the words, and from no others."""
    assert peak_in(words) == peak
