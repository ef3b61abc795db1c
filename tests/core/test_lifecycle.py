"""From evidence to state, when a run ended, which ends are followed by another run, and the phases of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.planning import NOW, S, spec
from spool.core import lifecycle
from spool.core.lifecycle import (
    Active,
    Claimed,
    Ended,
    EndStep,
    EngineWord,
    Evidence,
    Filed,
    Gone,
    LastSigns,
    Liveness,
    Outlived,
    Phase,
    Recorded,
    Remains,
    RunEnd,
    TakenBack,
    Unread,
    Unstartable,
    Verdict,
    Void,
    continued,
    delay_ns,
    end_of,
    ending,
    exit_words,
    holds_room,
    is_over,
    known_end,
    prove,
)
from spool.core.lifecycle import after as next_phase
from spool.core.model import MAX_REQUEUES, OUTCOMES, Result, Retry, State, Stop, StopKind
from spool.state.run import Attempts, attempts_after

PAGE = Path(__file__).resolve().parents[2] / "docs" / "FORMAT.md"
CODES = (None, 0, 1, 137)


@dataclass(frozen=True)
class Row:
    """One line of the page's table: the words of each cell, and what they prove."""

    number: int
    cells: tuple[frozenset[str], ...]
    verdict: str
    outcome: str

    def fits(self, facts: tuple[frozenset[str], ...]) -> bool:
        """Tell whether each cell is empty or names one of the words for that fact."""
        return all(not cell or cell & words for cell, words in zip(self.cells, facts, strict=True))


@cache
def rows() -> tuple[Row, ...]:
    """Return the table of docs/FORMAT.md, 19.3."""
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("<!-- table of proofs -->\n")[2].partition("<!-- end of table -->")[0]
    lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
    header, _, *body = lines
    assert " ".join(header) == "row process rc stop recorded remains grace oom refused engine verdict outcome"
    return tuple(
        Row(
            int(line[0]),
            tuple(frozenset(word.strip() for word in cell.split("/") if word.strip()) for cell in line[1:10]),
            line[10],
            line[11],
        )
        for line in body
    )


def facts(evidence: Evidence) -> tuple[frozenset[str], ...]:
    """Return the words by which the page may call each part of *evidence*."""
    rc = "none" if evidence.rc is None else "0" if evidence.rc == 0 else "other"
    stop = {"none"} if evidence.stop is None else {"some", evidence.stop.value}
    flags = (evidence.leftovers, evidence.grace, evidence.oom_killed, evidence.refused)
    over = set() if evidence.liveness in (Liveness.VOID, Liveness.ALIVE) else {"over"}
    return (
        frozenset({evidence.liveness.value, *over}),
        frozenset({rc}),
        frozenset(stop),
        frozenset({"none" if evidence.recorded is None else "some"}),
        *(frozenset({"yes" if flag else "no"}) for flag in flags),
        frozenset({evidence.engine.value if evidence.engine is not None else "none"}),
    )


def combinations() -> Iterator[Evidence]:
    """Yield every combination of evidence; of the exit codes, one from each kind."""
    flags = (False, True)
    recorded = (None, *sorted(OUTCOMES))
    for each in product(Liveness, CODES, (None, *StopKind), recorded, flags, flags, flags, flags):
        yield Evidence(*each)
    few = (None, 0, 143)  # the codes and the records have been through all of the above
    for each in product(Liveness, few, (None, *StopKind), (None, State.FINISHED), *[flags] * 4, EngineWord):
        yield Evidence(*each)


def by_the_page(evidence: Evidence) -> tuple[int, str, str]:
    """Return the number, the verdict and the outcome of the first row that fits."""
    words = facts(evidence)
    for row in rows():
        if row.fits(words):
            outcome = row.outcome
            if outcome == "as recorded":
                outcome = evidence.recorded.value
            return row.number, row.verdict, outcome
    raise AssertionError(f"no row fits {evidence}")


def test_the_table_proves_what_the_page_says() -> None:
    """For every combination of evidence the code proves what the first fitting row says, and no row is hidden."""
    reached = set()
    for evidence in combinations():
        proof = prove(evidence)
        number, verdict, outcome = by_the_page(evidence)
        assert (proof.verdict.value, proof.outcome.value if proof.outcome else "") == (verdict, outcome), evidence
        assert (proof.verdict is Verdict.ENDED) == (proof.outcome is not None) == bool(proof.reason), evidence
        reached.add(number)
    assert reached == {row.number for row in rows()}


def test_rows_are_numbered_in_order_and_are_those_of_the_code() -> None:
    """The rows count from 1 without a gap, and the comments in the code speak of the same numbers.

    The page has each verdict, and each outcome that evidence can prove by itself.
    """
    numbers = [row.number for row in rows()]
    assert numbers == list(range(1, len(numbers) + 1))
    source = Path(lifecycle.__file__).read_text(encoding="utf-8")
    spoken_of: set[int] = set()
    for first, word, last in re.findall(r"# rows? (\d+)(?: (and|to) (\d+))?", source):
        spoken_of |= set(range(int(first), int(last) + 1)) if word else {int(first)}
    assert spoken_of == set(numbers)
    assert {row.verdict for row in rows()} == {verdict.value for verdict in Verdict}
    proved = {row.outcome for row in rows()} - {"", "as recorded"}
    assert proved == {outcome.value for outcome in OUTCOMES}


def test_whatever_the_page_says_no_run_is_called_what_it_cannot_be() -> None:
    """What spool stopped never finished, what is alive has not ended, and what runs elsewhere is not lost."""
    for evidence in combinations():
        proof = prove(evidence)
        if evidence.stop is not None and evidence.liveness in (Liveness.GONE, Liveness.REBOOTED):
            assert evidence.recorded is not None or proof.outcome is not State.FINISHED
        if evidence.recorded is None and evidence.liveness is Liveness.ALIVE:
            assert proof.verdict in (Verdict.RUNNING, Verdict.STOPPING)
        if evidence.recorded is None and evidence.liveness is Liveness.ELSEWHERE:
            assert proof.outcome is not State.LOST


def test_every_state_is_a_word_of_the_page() -> None:
    """Each word for a state is explained on the page, and the page says which of them are outcomes."""
    section = PAGE.read_text(encoding="utf-8").partition("\n**19.1 ")[2].partition("\n**19.2 ")[0]
    ended = dict(re.findall(r"^\| `(\w+)` \|.*\| *(.*?) *\|$", section, re.MULTILINE))
    assert {word: ended.get(word) == "yes" for word in State} == {word: word.ended for word in State}
    assert set(State) <= set(ended)


def test_every_outcome_is_said_to_be_followed_by_a_run_or_not() -> None:
    """The page's table of what follows has a row for each outcome; those that never run again, never do."""
    section = PAGE.read_text(encoding="utf-8").partition("\n**19.4 ")[2]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)
    told = {word: what for words, what in rows for word in re.findall(r"`(\w+)`(?=,| \(|$)", words)}
    assert set(told) - {"gpu_idle"} == set(OUTCOMES)
    always = Retry(max=9, on=frozenset(OUTCOMES))
    assert {outcome for outcome in OUTCOMES if after(outcome, always) is None} == {
        State(word) for word, what in told.items() if what == "never"
    }


def test_an_exit_code_in_words_names_the_signal() -> None:
    """128+n is called signal n where there is such a signal; other codes are only numbers."""
    signals = {137: "signal 9 (exit code 137)", 192: "signal 64 (exit code 192)"}
    assert [exit_words(code) for code in (137, 192, 193, 128, 3)] == [
        signals.get(code, f"exit code {code}") for code in (137, 192, 193, 128, 3)
    ]


def after(outcome: State, retry: Retry | None = None, *, code=None, attempt=1, requeues=0, requeue=True, **values):
    """Return what follows, its earliest start, its attempt and its requeues; None if nothing does."""
    reason, stopped_by = values.pop("reason", ""), values.pop("stopped_by", None)
    result = Result("x", 1, attempt, outcome, reason, ended_at_ns=NOW, exit_code=code, requeues=requeues)
    found = continued(spec(retry=retry or Retry(), requeue=requeue), result, stopped_by, **values)
    following = attempts_after(found, stopped_by and Stop(stopped_by, "ann", NOW))
    return found.again and (found.again, found.again_at_ns, following.attempt, following.requeues)


def test_without_retry_nothing_but_a_loss_is_repeated():
    """By default only what was lost or preempted runs again."""
    assert {outcome for outcome in OUTCOMES if after(outcome)} == {State.LOST, State.PREEMPTED}


@pytest.mark.parametrize(("most", "runs"), [(0, 1), (1, 2), (3, 4)])
def test_as_many_tries_as_allowed(most, runs):
    """`max = n` makes n + 1 tries."""
    count, attempt = 1, 1
    while (next_one := after(State.FAILED, Retry(max=most), code=1, attempt=attempt)) is not None:
        count, attempt = count + 1, next_one[2]
    assert count == runs


@pytest.mark.parametrize(
    ("outcome", "code", "on", "again"),
    [
        (State.FAILED, 75, {75}, True),
        (State.FAILED, 1, {75}, False),
        (State.TIMEOUT, 143, {143}, False),
        (State.TIMEOUT, 143, {"timeout"}, True),
        (State.TIMEOUT, 1, Retry().on, False),
        (State.OUT_OF_MEMORY, 137, {"out_of_memory"}, True),
        (State.CANCELLED, 1, {"cancelled", "failed", 1}, False),
    ],
)
def test_on_names_outcomes_and_exit_codes(outcome, code, on, again):
    """A run is retried if `on` holds its outcome, or, having failed, its exit code."""
    assert bool(after(outcome, Retry(max=1, on=frozenset(on)), code=code)) is again


@pytest.mark.parametrize(
    ("outcome", "values", "follows"),
    [
        (State.LOST, {"attempt": 7, "requeues": 2}, ("requeue", None, 7, 3)),
        (State.LOST, {"requeues": MAX_REQUEUES}, None),
        (State.LOST, {"requeue": False}, None),
        (State.LOST, {"retry": Retry(max=1, on=frozenset({"lost"})), "requeues": 3}, ("retry", None, 2, 3)),
        (State.FAILED, {"retry": Retry(max=1), "requeues": 3}, ("retry", None, 2, 3)),
        # A run that its engine preempted goes on uncounted, if it may be run again at all.
        (State.PREEMPTED, {"requeues": MAX_REQUEUES}, ("requeue", None, 1, MAX_REQUEUES)),
        (State.PREEMPTED, {"requeue": False}, None),
        # What a person moved goes where it was moved, uncounted.
        (State.CANCELLED, {"stopped_by": StopKind.REQUEUE, "requeues": 3}, ("requeue", None, 1, 3)),
        (State.FAILED, {"stopped_by": StopKind.HOLD}, ("hold", None, 1, 0)),
        (State.CANCELLED, {"stopped_by": StopKind.CANCEL}, None),
    ],
)
def test_losses_are_counted_apart(outcome, values, follows):
    """A lost run is repeated at most three times, whatever was retried before, and keeps its attempt."""
    assert after(outcome, **values) == follows


def test_the_delay_grows_up_to_its_limit():
    """Before try n of the repetition: min(delay * backoff^(n-1), max_delay)."""
    retry = Retry(max=9, delay_ns=10 * S, backoff=3.0, max_delay_ns=200 * S)
    assert [delay_ns(retry, number) // S for number in (1, 2, 3, 4, 5, 10**6)] == [10, 30, 90, 200, 200, 200]
    assert after(State.FAILED, retry, attempt=2) == ("retry", NOW + 30 * S, 3, 0)


@pytest.mark.parametrize(
    ("attempt", "retry", "seconds"),
    [(1, {}, 1), (2, {}, 2), (3, {}, 4), (60, {}, 3600), (1, {"delay_ns": 30 * S}, 30), (5, {"max_delay_ns": 0}, 1)],
)
def test_what_could_not_start_is_never_tried_at_once(attempt, retry, seconds):
    """An executor that cannot start is tried again after 1s, 2s, 4s … or the job's own delay if that is longer."""
    found = after(State.FAILED, Retry(max=99, **retry), attempt=attempt, could_not_start=True)
    assert found[1] == NOW + seconds * S
    assert after(State.FAILED, could_not_start=True) is None


def test_a_run_that_spool_preempted_goes_on_uncounted() -> None:
    """Always, and the job knows for which one, and when, so that it lets that one go first."""
    stop = Stop(StopKind.PREEMPT, "spool", NOW, "short")
    ended = Result("j", 1, 1, State.PREEMPTED, "preempted for short", requeues=MAX_REQUEUES)
    result = continued(spec(requeue=False), ended, StopKind.PREEMPT)
    assert result.again == "requeue"
    assert attempts_after(result, stop) == Attempts(1, MAX_REQUEUES, preempted=stop)


def test_the_word_of_an_engine_never_goes_against_an_exit_code_of_0_or_a_stop() -> None:
    """What has finished is finished, and what spool stopped was stopped by spool, whatever the engine calls it."""
    for evidence in combinations():
        if evidence.engine is None or evidence.liveness is not Liveness.GONE or evidence.leftovers or evidence.recorded:
            continue
        without = prove(replace(evidence, engine=None))
        if evidence.rc == 0 or evidence.stop is not None:
            assert prove(evidence) == without


def test_an_engine_is_quoted_in_its_own_words() -> None:
    """Why a run has ended that an engine has ended is said in the engine's words as well."""
    said = Evidence(Liveness.GONE, rc=143, engine=EngineWord.TIMEOUT, said="Slurm says TIMEOUT")
    assert "Slurm says TIMEOUT" in prove(said).reason
    assert "file system" in prove(Evidence(Liveness.GONE, engine=EngineWord.COMPLETED)).reason


@given(st.integers(0, 10**13), st.floats(0.5, 1e6), st.integers(0, 10**16), st.integers(1, 10**5))
def test_a_delay_is_never_above_its_limit(delay, backoff, most, number):
    """Whatever the numbers, a delay is between nothing and `max_delay`."""
    assert 0 <= delay_ns(Retry(delay_ns=delay, backoff=backoff, max_delay_ns=most), number) <= most


def test_a_run_is_over_only_if_nothing_can_be_left_of_it() -> None:
    """Every combination of what a look can find is answered as docs/FORMAT.md says, told here as rules, not rows."""
    for facts in product([False, True], repeat=7):
        remains = Remains(*facts)
        left = remains.others or remains.wrapper
        step = ending(remains)
        assert (step is EndStep.OVER) is (not left and remains.certain), remains
        assert (step is EndStep.LOOK) is (not left and not remains.certain), remains
        if not remains.grace_over:  # nothing is stopped or killed before
            assert step in (EndStep.OVER, EndStep.LOOK, EndStep.ASK), remains
        if step is EndStep.KILL:  # the wrapper alone has time for its records
            assert remains.others, remains
            assert remains.frozen or remains.tired, remains
        if step is EndStep.FREEZE:
            assert remains.others > remains.frozen, remains
        assert (step is EndStep.KILL_ALL) is (left and remains.grace_over and remains.wrapper_grace_over), remains


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


ARCHITECTURE = Path(__file__).resolve().parents[2] / "docs" / "ARCHITECTURE.md"
ENDED = Ended(State.FAILED, "exit code 1", RunEnd(7), 1)
RESULT = Result("a", 1, 1, State.FAILED, "exit code 1")
PHASES: tuple[Phase, ...] = (
    Unread(),
    Unread(empty=True),
    Claimed(),
    Unstartable("no shell"),
    TakenBack(),
    TakenBack("no process"),
    Active(),
    Outlived(),
    Outlived(5),
    Gone(),
    Void(RunEnd(7)),
    Void(RunEnd(7), "no process", "refused"),
    ENDED,
    Recorded(ENDED, RESULT),
    Recorded(ENDED, RESULT, accounted=True),
    Filed(ENDED, RESULT, final=True),
    Filed(ENDED, RESULT, final=False),
)


@cache
def leads_to() -> dict[str, set[str]]:
    """Return the table of docs/ARCHITECTURE.md: each phase, and those that it goes on to."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    table = text.partition("<!-- table of phases -->\n")[2].partition("<!-- end of table -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines()[2:]]
    return {phase: {word.strip() for word in leads.split(",") if word.strip()} for phase, _, leads in rows}


def named(phase: Phase) -> str:
    """Return the name of a phase, as the page has it."""
    return type(phase).__name__


def reached(phase: Phase) -> list[Phase]:
    """Return every phase that one can lead to, itself too."""
    found = [phase]
    for each in found:
        found += [new for seen in PHASES if (new := next_phase(each, seen)) not in found]
    return found


def test_the_page_and_these_tests_have_every_phase() -> None:
    """Each member of the union has a row on the page and a value here."""
    every = {phase.__name__ for phase in get_args(Phase)}
    assert every == set(leads_to()) == {named(phase) for phase in PHASES}


def test_every_pair_of_phases_is_as_the_page_says() -> None:
    """What goes on from a phase is entered as it was seen; every other observation changes nothing.

    One that is repeated, as after an error, leaves a run as the first one did.
    """
    for phase, seen in product(PHASES, PHASES):
        expected = seen if named(seen) in leads_to()[named(phase)] else phase
        if isinstance(phase, Unread) and isinstance(seen, Gone):
            expected = Unread(empty=True)
        assert next_phase(phase, seen) == next_phase(expected, seen) == expected, (phase, seen)


def test_no_phase_is_a_dead_end_before_the_run_is_over() -> None:
    """From every phase a run can come to its end or be found void, and never back from there."""
    for phase in PHASES:
        later = reached(phase)
        assert any(isinstance(each, Void | Filed) for each in later), phase
        assert not is_over(phase) or all(is_over(each) for each in later), phase


def test_room_that_is_free_is_never_held_again_once_the_records_are_read() -> None:
    """What a run was granted goes to the next run for good: no later observation takes it back."""
    for phase in PHASES:
        if not holds_room(phase) and not isinstance(phase, Unread):
            assert not any(map(holds_room, reached(phase))), phase


def test_how_a_run_ended_does_not_change_any_more() -> None:
    """Its result and the move of its file are made from one end; a void run and one that goes on have none."""
    for phase in PHASES:
        ends = {known_end(each) for each in reached(phase)} - {None}
        assert ends <= {ENDED}
        assert (known_end(phase) is not None) == (is_over(phase) and not isinstance(phase, Void))
