"""What a job requests that leaves its memory to spool, or whose last run had too little."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from spool.core.model import FIRST_BYTES, GpuUse, Grant, Request, Result, Retry, Spec, State, Waiting
from spool.core.queue import WaitingQueue
from spool.core.sizes import LEAST_BYTES, Most, Sizes, may_grow, rounded_size, sized

GIB, MIB = 1 << 30, 1 << 20
AUTO = Request(memory_bytes=FIRST_BYTES, memory_auto=True)
ROOMY = Most(1024 * GIB)


def ended(
    peak: int | None,
    *,
    name: str = "train_1",
    granted: int | None = 64 * GIB,
    outcome: State = State.FINISHED,
    request: Request = AUTO,
) -> Result:
    """Return a run that has ended."""
    return Result(name, 1, 1, outcome, "", 1, 2, 3, peak_memory_bytes=peak, request=request, grant=Grant(1, granted))


def learnt(*results: Result) -> Sizes:
    """Return what these runs teach."""
    sizes = Sizes()
    for result in results:
        sizes.add("alice", result)
    return sizes


def asked(
    sizes: Sizes | None = None,
    last: Result | None = None,
    *,
    name: str = "train_9",
    request: Request = AUTO,
    retry: Retry = Retry(),  # noqa: B008  (frozen)
    most: Most = ROOMY,
) -> tuple[int | None, str]:
    """Return the memory that a job requests, and why."""
    job = Waiting(name, Spec("true", request=request, retry=retry), "alice", 0)
    found = sized(job, last, sizes, most)
    return (request.memory_bytes, "") if found is None else (found.request.memory_bytes, found.why)


def test_the_first_guess_is_stated_and_lasts_until_a_run_like_it_has_ended() -> None:
    """Another name, another user, other CPUs, a failure and a run without a limit teach nothing; a stated size does."""
    assert asked()[0] == FIRST_BYTES
    others = learnt(
        ended(GIB, name="other"),
        ended(GIB, request=replace(AUTO, cpus=2)),
        ended(GIB, outcome=State.FAILED),
        ended(GIB, granted=None),
        ended(None),
    )
    others.add("bob", ended(GIB))
    assert asked(others)[0] == FIRST_BYTES
    assert asked(request=replace(AUTO, memory_bytes=GIB))[0] == GIB
    assert asked(learnt(ended(5 * GIB, request=Request(memory_bytes=64 * GIB))))[0] == 6 * GIB


@pytest.mark.parametrize(
    ("peaks", "size", "why"),
    [
        ([10 * GIB], 12 * GIB, "20% above the 10 GiB that the last run like it used at most"),
        ([GIB, 10 * GIB, GIB], 12 * GIB, "20% above the 10 GiB that the last 3 runs like it used at most"),
        ([MIB], LEAST_BYTES, "256 MiB, the minimum, above the 1 MiB that the last run like it used at most"),
        (
            [10 * GIB] + [5 * GIB] * 29,
            6 * GIB,
            "5 GiB that the last 30 runs like it used at most, but for the highest 5%",
        ),
        ([10 * GIB] * 2 + [5 * GIB] * 28, 12 * GIB, "20% above the 10 GiB that the last 30 runs like it used at mo"),
        ([10 * GIB] * 5 + [5 * GIB] * 30, 6 * GIB, "20% above the 5 GiB that the last 30 runs like it used at most"),
    ],
)
def test_the_95th_percentile_of_the_last_30_peaks_and_a_fifth(peaks: list[int], size: int, why: str) -> None:
    """Up to 19 peaks that is the highest, and of 30 one may be higher."""
    got, words = asked(learnt(*map(ended, peaks)))
    assert got == size
    assert why in words


def test_a_killed_run_raises_those_like_it_until_one_has_shown_how_much_is_enough() -> None:
    """Twice what it had, or a fifth above what it had taken; a small run that ends meanwhile says nothing of that."""
    killed = ended(5 * GIB, granted=4 * GIB, outcome=State.OUT_OF_MEMORY)
    assert asked(learnt(killed))[0] == 8 * GIB
    assert asked(learnt(replace(killed, peak_memory_bytes=20 * GIB)))[0] == 24 * GIB
    assert asked(learnt(ended(GIB), killed, ended(GIB)))[0] == 8 * GIB
    assert asked(learnt(killed, ended(5 * GIB)))[0] == 6 * GIB


def test_the_job_of_the_killed_run_itself_gets_more_without_what_was_learnt() -> None:
    """The record of its last run says it, and a run that goes on after that keeps what it had."""
    last = ended(3 * GIB, granted=4 * GIB, outcome=State.OUT_OF_MEMORY)
    assert asked(None, last)[0] == 8 * GIB
    lost = ended(None, granted=8 * GIB, outcome=State.LOST)
    assert asked(None, replace(lost, again="requeue"))[0] == 8 * GIB
    assert asked(None, lost)[0] == FIRST_BYTES


def test_memory_factor_multiplies_what_was_too_little_and_later_runs_keep_it() -> None:
    """Without it nothing grows, and an edited number counts at once."""
    stated, factor = Request(memory_bytes=2 * GIB), Retry(max=3, memory_factor=1.5)
    killed = ended(3 * GIB, granted=2 * GIB, outcome=State.OUT_OF_MEMORY, request=stated)
    assert asked(None, killed, request=stated) == (2 * GIB, "")
    assert asked(None, killed, request=stated, retry=factor)[0] == 3 * GIB
    fine = ended(2 * GIB, granted=3 * GIB, request=stated)
    assert asked(None, fine, request=stated, retry=factor)[0] == 3 * GIB
    assert asked(None, ended(GIB, granted=2 * GIB, request=stated), request=stated, retry=factor) == (2 * GIB, "")
    assert asked(None, killed, request=Request(memory_bytes=GIB), retry=factor) == (GIB, "")
    assert asked(None, killed, retry=factor)[0] == FIRST_BYTES  # a number became "auto"


@pytest.mark.parametrize("request_", [AUTO, Request(memory_bytes=3 * GIB)])
def test_no_more_is_requested_than_the_machine_has(request_: Request) -> None:
    """Then it runs with all of it. What a file states and nothing fits stays, to be refused."""
    last = ended(None, granted=3 * GIB, outcome=State.OUT_OF_MEMORY, request=request_)
    factor = Retry(max=1, memory_factor=9.0)
    assert asked(None, last, request=request_, retry=factor, most=Most(10 * GIB))[0] == 10 * GIB
    assert asked(None, None, request=Request(memory_bytes=20 * GIB), retry=factor, most=Most(10 * GIB))[0] == 20 * GIB


def test_a_guess_that_was_too_small_is_no_fault_of_the_job() -> None:
    """A larger run follows whatever `retry` says, until one had all there is; a stated number is the file's affair."""
    spec, last = Spec("true", request=AUTO), ended(None, granted=4 * GIB, outcome=State.OUT_OF_MEMORY)
    grown = may_grow(spec, replace(last, attempt=7), Most(10 * GIB)).retry
    assert ("out_of_memory" in grown.on, grown.max) == (True, 7)
    assert may_grow(spec, replace(last, grant=Grant(1, 10 * GIB)), Most(10 * GIB)) is spec
    assert may_grow(spec, replace(last, outcome=State.FAILED), ROOMY) is spec
    stated = Spec("true", request=Request(memory_bytes=4 * GIB))
    assert may_grow(stated, last, ROOMY) is stated
    once = replace(spec, requeue=False)
    assert may_grow(once, last, ROOMY) is once


def test_gpu_memory_is_that_of_whole_gpus_until_a_run_has_shown_its_use() -> None:
    """Then the highest peak on one GPU and a margin; whole GPUs again if none is as large."""
    request = Request(gpus=2, gpu_memory_auto=True)
    job = Waiting("fit_1", Spec("true", request=request), "alice", 0)
    use = tuple(GpuUse(peak_memory_bytes=gib * GIB) for gib in (5, 10))
    known = learnt(replace(ended(None, name="fit_2", request=request), gpu_use=use))
    for sizes, most, memory in ((None, Most(), None), (known, Most(None, 24 * GIB), 12 * GIB),
                                (known, Most(None, 11 * GIB), None)):  # fmt: skip
        found = sized(job, None, sizes, most)
        assert (found.request.gpu_memory_bytes, found.request.memory_bytes) == (memory, None)


@given(
    runs=st.lists(st.tuples(st.integers(1, 100 * GIB), st.booleans()), max_size=60), most=st.integers(GIB, 200 * GIB)
)
def test_whatever_ran_a_size_is_between_the_least_and_the_most(runs: list[tuple[int, bool]], most: int) -> None:
    """… and it depends on the runs alone, so that a new dispatcher requests the same."""
    results = [
        ended(peak, granted=peak, outcome=State.OUT_OF_MEMORY if killed else State.FINISHED) for peak, killed in runs
    ]
    got, why = asked(learnt(*results), most=Most(most))
    assert got is not None
    assert min(LEAST_BYTES, most) <= got <= most
    assert (got, why) == asked(learnt(*results), most=Most(most))


def test_jobs_of_other_sizes_are_other_demands_of_one_kind() -> None:
    """The queue tells them apart by what they request, and their run times are learnt by what their file states."""
    queue = WaitingQueue()
    for number, sizes in enumerate((None, learnt(ended(10 * GIB)))):
        job = Waiting(f"train_{number}", Spec("true", request=AUTO), "alice", number)
        queue.put(replace(job, sized=sized(job, None, sizes, ROOMY)))
    seen = [(asked.memory_bytes, [key.stated for key in shapes]) for (asked, _), shapes in queue.demands.items()]
    assert seen == [(FIRST_BYTES, [AUTO]), (rounded_size(12 * GIB), [AUTO])]
