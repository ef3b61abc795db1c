"""Which GPUs a job gets: its own or shared, by type, by what is really free, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given as given_by
from hypothesis import strategies as st
from msgspec.structs import replace

from core.planning import GIB, NOW, code, foretold, gpus, job, machine, numbers, plan, run, started, why
from spool.core.gpus import is_of_type, unknown_gpus
from spool.core.model import ForeignProcess, Gpu, Policy

CARD = 80 * GIB


def given(found):
    """Return which GPUs each start gets."""
    return {start.name: start.grant.gpu_indices for start in found.starts}


def with_gpu(number: int, *, of: int = 2, **changes):
    """Return a machine whose GPU *number* is changed."""
    return machine(cpus=64, gpus=tuple(replace(gpu, **changes) if gpu.index == number else gpu for gpu in gpus(of)))


def share(name: str, gib: int, **values):
    """Return a job that asks for a share of one GPU."""
    return job(name, gpus=1, gpu_memory_bytes=gib * GIB, **values)


def mig(number: int) -> tuple[Gpu, ...]:
    """Return so many MIG instances."""
    return tuple(Gpu(f"MIG-{n}", 100 + n, "H100 MIG 1g.10gb", 10 * GIB, 10 * GIB, mig=True) for n in range(number))


ONE_AT_A_TIME = " not count: CUDA can use only one at a time, so a job with several GPUs needs whole ones"


def test_the_words_for_gpus_in_use():
    """The reason names who is on each GPU, ours and others, and says why idle MIG instances are no help."""
    notebook = ForeignProcess(4711, "python", 642 << 20)
    cards = gpus(5)
    box = machine(gpus=(*cards[:3], replace(cards[3], foreign=(notebook,)), cards[4], *mig(3)))
    runs = [run("a", on=(0,), gpu_memory_bytes=GIB), run("b", on=(0,), gpu_memory_bytes=GIB), run("c", on=(1, 2))]
    found = plan(job("j", gpus=2), on=box, running=runs)
    assert numbers(found, "j") == [2, 1, 0, 1, 2, 3, 4711, 642, 3]
    assert [one in why(found, "j") for one in (" a, b;", " c;", "(python, 642 MiB)")] == [True] * 3


def test_a_job_alone_gets_idle_gpus_only():
    """Without `gpu_memory` a GPU is one's own: none with a run on it, shared or not, is given; the lowest first."""
    grant = plan(job("j", gpus=2, memory_bytes=GIB), on=machine(gpus=gpus(4)[::-1])).starts[0].grant
    assert (grant.gpu_uuids, grant.gpu_indices, grant.gpu_memory_bytes) == (("GPU-0", "GPU-1"), (0, 1), None)
    assert plan(share("s", 2), on=machine(gpus=1)).starts[0].grant.gpu_memory_bytes == 2 * GIB
    box = machine(cpus=64, gpus=4)
    runs = [run("own", on=(0,)), run("sharing", on=(1,), gpu_memory_bytes=GIB)]
    found = plan(job("j", gpus=2), job("k", gpus=1, waited=-1), on=box, running=runs)
    assert given(found) == {"j": (2, 3)}
    assert code(found, "k") == "gpus"


def test_shares_add_up_to_no_more_than_the_card():
    """Shared grants and the request together stay within a GPU's memory; none goes beside a run that is alone."""
    box = machine(cpus=64, gpus=1)
    found = plan(*(share(f"j{n}", 30) for n in range(3)), on=box)
    assert started(found) == ["j0", "j1"]
    assert code(found, "j2") == "gpus"
    assert started(plan(share("k", 80), on=box)) == ["k"]
    assert code(plan(share("s", 1), on=box, running=[run("own", on=(0,))]), "s") == "gpus"


@pytest.mark.parametrize(
    ("free", "taken", "asked", "starts"),
    [
        (80, 50, 40, False),  # what was granted counts, though what looks free was measured before that
        (80, 50, 30, True),
        (70, 10, 30, True),
        (60, 10, 30, False),  # somebody else has some as well
        (20, 50, 20, True),
        (10, 70, 20, False),  # it has taken more than it was granted
    ],
)
def test_memory_that_a_run_has_not_taken_yet_is_not_free(free, taken, asked, starts):
    """What looks free on a GPU but was granted to a run that still loads is not given to a second one."""
    box = with_gpu(0, of=1, memory_free_bytes=free * GIB, taken_bytes=(("r", taken * GIB),))
    found = plan(share("j", asked), on=box, running=[run("r", on=(0,), gpu_memory_bytes=50 * GIB)])
    assert (started(found) == ["j"]) is starts


@pytest.mark.parametrize(("holder", "taken"), [(50, 60), (None, 60), (None, None)])
def test_what_a_run_has_taken_is_expected_back(holder, taken):
    """The memory that a run holds on a GPU now is counted on for the time after its end, and nobody else's is."""
    known = () if taken is None else (("r", taken * GIB),)
    box = with_gpu(0, of=1, memory_free_bytes=20 * GIB, taken_bytes=known)
    values = {} if holder is None else {"gpu_memory_bytes": holder * GIB}
    runs = [run("r", on=(0,), **values)]
    expected = foretold(plan(share("j", 75), on=box, running=runs), "j")
    assert expected.must_end == ("r",)
    foreign = (ForeignProcess(7, "python", 10 * GIB),)
    beside = with_gpu(0, of=1, memory_free_bytes=20 * GIB, foreign=foreign)
    assert foretold(plan(share("j", 75), on=beside, running=runs), "j") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"foreign": (ForeignProcess(7, "python", 60 * GIB),), "memory_free_bytes": 50 * GIB},
        {"memory_total_bytes": None, "memory_free_bytes": 40 * GIB},
        {"memory_free_bytes": 50 * GIB, "taken_bytes": (("a", 30 * GIB),)},  # by an earlier run of that name
    ],
)
def test_two_jobs_of_one_pass_do_not_see_the_same_free_memory(changes):
    """Only what is really free is shared: of two that each find their share the second sees the first's grant."""
    box = with_gpu(0, of=1, **changes)
    assert started(plan(share("a", 30), share("b", 30), on=box)) == ["a"]
    assert started(plan(share("a", 51), on=box)) == []


@pytest.mark.parametrize(
    ("changes", "alone", "shared", "large"),
    [
        ({"memory_free_bytes": None}, True, False, True),
        ({"memory_total_bytes": None}, True, True, False),  # too little is not what it is called
        ({"problem": "fell off the bus"}, False, False, False),
        ({"foreign": (ForeignProcess(7, "python", 60 * GIB),), "memory_free_bytes": 20 * GIB}, False, True, False),
    ],
)
def test_unknown_is_not_free_and_not_never(changes, alone, shared, large):
    """What is unknown of a GPU, or wrong with it, keeps those off it that need that, and they wait."""
    box = with_gpu(0, of=1, **changes)
    jobs = job("j", gpus=1), share("j", 1), job("j", gpus=1, gpu_min_memory_bytes=GIB)
    for each, starts in zip(jobs, (alone, shared, large), strict=True):
        assert code(plan(each, on=box), "j") == (None if starts else "gpus")


def test_without_nvml_gpu_jobs_wait_and_others_start():
    """NVML failing means unknown: GPU jobs are told so, CPU jobs go on."""
    for cards in ((), gpus(2)):
        box = machine(gpus=cards, gpu_problem="NVML hangs")
        found = plan(job("g", gpus=1, waited=9), share("s", 1), job("c"), on=box)
        assert (started(found), code(found, "g"), code(found, "s")) == (["c"], "gpus", "gpus")


@pytest.mark.parametrize(
    ("cards", "asked", "reason"),
    [
        (gpus(2), {"gpus": 3}, "needs 3 GPUs, the machine has 2"),
        (gpus(2), {"gpu_type": "H100"}, "needs 1 GPU of type H100, the machine has 0 (NVIDIA A100-SXM4-80GB)"),
        (gpus(2), {"gpu_memory_bytes": 81 * GIB}, "needs 1 GPU with 81 GiB, the machine has 0 as large as that"),
        ((), {}, "needs 1 GPU, the machine has none"),
        (mig(7), {"gpus": 2}, f"needs 2 GPUs, the machine has 0; 7 MIG instances do{ONE_AT_A_TIME}"),
        ((*gpus(1), *mig(1)), {"gpus": 2}, f"needs 2 GPUs, the machine has 1; 1 MIG instance does{ONE_AT_A_TIME}"),
        ((*gpus(2), *mig(4)), {"gpus": 2, "gpu_memory_bytes": 81 * GIB},
         f"needs 2 GPUs with 81 GiB, the machine has 0 as large as that; 4 MIG instances do{ONE_AT_A_TIME}"),
    ],
)  # fmt: skip
def test_what_the_machine_has_not_never_fits(cards, asked, reason):
    """More GPUs, another type, a larger card than there is: the job is told so, and why instances do not count."""
    assert why(plan(job("j", **{"gpus": 1, **asked}), on=machine(gpus=cards)), "j") == f"never fits: {reason}"


def test_a_job_with_several_gpus_gets_no_mig_instance():
    """CUDA uses one instance at a time: several GPUs are whole ones; one may be an instance, or a share of it."""
    box = machine(cpus=64, gpus=(*mig(3), *(replace(gpu, index=gpu.index + 7) for gpu in gpus(2))))
    found = plan(job("two", gpus=2, waited=9), job("one", gpus=1), share("part", 5), on=box)
    assert given(found) == {"two": (7, 8), "one": (100,), "part": (101,)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"foreign": (ForeignProcess(0, "unknown", 12 * GIB),)}, " is used by a process that cannot be seen (12 GiB)"),
        ({"foreign": (ForeignProcess(4711, "python", GIB, "bob", "greedy"),)},
         " is used by pid 4711 (python, bob, 1 GiB) of greedy"),
        ({"problem": "fell off the bus"}, ": fell off the bus"),
    ],
)  # fmt: skip
def test_who_uses_a_gpu_that_was_not_given_is_named(changes, said):
    """Pid 0 is nobody's pid: the memory is told instead; of a job that was given another GPU, whose it is."""
    assert f"GPU 0{said}" in why(plan(job("j", gpus=1), on=with_gpu(0, of=1, **changes)), "j")


@pytest.mark.parametrize(
    ("name", "fits", "does_not"),
    [
        ("NVIDIA A100-SXM4-80GB", ("NVIDIA A100-SXM4-80GB", "A100", "a100-sxm", "auto", None), ("H100", "A10", "0GB")),
        ("NVIDIA GeForce RTX 4090", ("4090",), ("RTX 40",)),
        ("NVIDIA T400", ("T400",), ("T4",)),
        ("Tesla T4", ("t4",), ()),
        ("A+100", ("A+",), ()),
    ],
)
def test_the_type_is_part_of_the_name(name, fits, does_not):
    """A type matches a part of the name in either case, numbers whole; `auto` is any."""
    assert [wanted for wanted in (*fits, *does_not) if is_of_type(name, wanted)] == list(fits)


def test_a_list_of_types_takes_any_of_them():
    """A job that names one type or several gets a GPU of those, the smallest, and no other; `auto` is any."""
    box = machine(cpus=64, gpus=mixed("RTX 4090", "H100", "A100-40GB"))
    types = ("H100", "A100")
    found = plan(*(job(f"j{n}", gpus=1, gpu_type=types, waited=9 - n) for n in range(3)), on=box)
    assert given(found) == {"j0": (2,), "j1": (1,)}
    assert code(found, "j2") == "gpus"
    assert code(plan(job("j", gpus=3, gpu_type=types), on=box), "j") == "never_fits"
    found = plan(job("h", gpus=1, gpu_type="H100"), job("any", gpus=1, gpu_type="auto"), on=box)
    assert given(found) == {"any": (0,), "h": (1,)}


def test_a_least_memory_takes_a_whole_gpu_as_large_as_that():
    """The smallest that is large enough, exclusively, or a share of one; too few of them never fit."""
    box = machine(cpus=64, gpus=mixed("H100", "RTX 4090", "A100-40GB"))
    asked = {"gpus": 1, "gpu_min_memory_bytes": 40 * GIB}
    found = plan(job("a", waited=9, **asked), job("b", **asked), job("c", waited=-1, **asked), on=box)
    assert given(found) == {"a": (2,), "b": (0,)}
    assert all(start.grant.gpu_memory_bytes is None for start in found.starts)
    assert code(found, "c") == "gpus"
    assert given(plan(share("j", 8, gpu_min_memory_bytes=60 * GIB), on=box)) == {"j": (0,)}
    for few in ({"gpu_min_memory_bytes": 100 * GIB},
                {"gpus": 2, "gpu_type": ("A100", "4090"), "gpu_min_memory_bytes": 30 * GIB}):  # fmt: skip
        assert code(plan(job("j", **asked | few), on=box), "j") == "never_fits"


@pytest.mark.parametrize(
    ("asked_gib", "has_mib", "fits"), [(80, 81559, True), (48, 46068, True), (24, 23028, True), (12, 11264, False)]
)
def test_a_gpu_is_as_large_as_its_name_says(asked_gib, has_mib, fits):
    """An "80 GB" card reports less than 80 GiB: what the driver and error correction keep does not count."""
    size = has_mib << 20
    found = plan(
        job("j", gpus=1, gpu_min_memory_bytes=asked_gib * GIB), on=machine(gpus=(Gpu("G", 0, "X", size, size),))
    )
    assert (started(found) == ["j"]) is fits


def of_amd(*indices: int) -> tuple[Gpu, ...]:
    """Return GPUs of AMD of these indices."""
    return tuple(Gpu(f"GPU-{index:016x}", index, "AMD Instinct MI210", CARD, CARD, vendor="AMD") for index in indices)


def test_gpus_of_two_vendors_are_never_mixed_up():
    """Beside NVIDIA's, those of AMD are for jobs that name their type; several GPUs are of one vendor."""
    box = machine(cpus=64, gpus=(*gpus(2), *of_amd(2, 3, 4)))
    any_two, amd = job("any", gpus=2, waited=9), job("amd", gpus=3, gpu_type="amd")
    assert given(plan(any_two, amd, on=box)) == {"any": (0, 1), "amd": (2, 3, 4)}
    assert given(plan(job("either", gpus=2, gpu_type=("MI210", "A100")), on=box)) == {"either": (2, 3)}
    assert code(plan(job("j", gpus=3), on=box), "j") == "never_fits"
    assert given(plan(any_two, on=machine(gpus=of_amd(0, 1)))) == {"any": (0, 1)}
    ones = [job(name, gpus=1, gpu_type=("MI210", "H100")) for name in ("one", "two")]
    assert len(given(plan(*ones, on=machine(gpus=(*gpus(1, "NVIDIA H100"), *of_amd(1)))))) == 2


def test_only_the_chosen_gpus_are_given():
    """`gpu.use` names GPUs by index or UUID; the others are not given, and unknown ones never mean all."""
    box = machine(gpus=4)
    assert given(plan(job("j", gpus=2), on=box, policy=Policy(gpu_use=("3", "GPU-1")))) == {"j": (1, 3)}
    found = plan(job("j", gpus=1), on=box, policy=Policy(gpu_use=("9",)))
    assert code(found, "j") == "never_fits"
    assert unknown_gpus(("3", "GPU-1", "9", "GPU-x"), box) == ("9", "GPU-x")
    assert unknown_gpus(None, box) == unknown_gpus(("9",), machine(gpu_problem="?")) == ()


HALF = {"running": [run("a", on=(1,), gpu_memory_bytes=10 * GIB), run("b", on=(2,), gpu_memory_bytes=20 * GIB)]}


@pytest.mark.parametrize(
    ("strategy", "gib", "index"),
    [(None, 5, 2), ("packed", 5, 2), (None, 65, 1), ("spread", 5, 0), ("sequential", 5, 0)],
)
def test_the_order_of_shared_gpus(strategy, gib, index):
    """Shares go to the fullest GPU that has room by default; `spread` to the emptiest, `sequential` to the first."""
    found = plan(share("j", gib), on=machine(cpus=64, gpus=3), policy=Policy(gpu_strategy=strategy), **HALF)
    assert given(found) == {"j": (index,)}


KINDS = {"RTX 4090": 24, "A100-40GB": 40, "A100-80GB": 80, "H100": 80}


def mixed(*kinds: str) -> tuple[Gpu, ...]:
    """Return GPUs of these kinds, in this order."""
    cards = [gpus(1, f"NVIDIA {kind}", KINDS[kind] * GIB)[0] for kind in kinds]
    return tuple(replace(card, uuid=f"GPU-{index}", index=index) for index, card in enumerate(cards))


@given_by(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=6), st.integers(1, 3), st.sets(st.integers(0, 5)))
def test_a_job_for_any_gpu_takes_the_smallest(kinds, number, busy):
    """Each GPU that a job gets is as small as any that it leaves, then as early."""
    box = machine(cpus=64, gpus=mixed(*kinds))
    runs = [run(f"r{index}", on=(index,)) for index in busy if index < len(kinds)]
    order = sorted((gpu.memory_total_bytes, gpu.index) for gpu in box.gpus if gpu.index not in busy)
    found = given(plan(job("j", gpus=number), on=box, running=runs))
    assert found == ({} if len(order) < number else {"j": tuple(sorted(index for _, index in order[:number]))})


def test_random_is_seeded_by_the_pass():
    """`random` takes GPUs in an order that differs between passes and is the same within one."""
    policy = Policy(gpu_strategy="random")
    box = machine(gpus=8)
    seen = {plan(job("j", gpus=1), on=box, policy=policy, now=NOW + n).starts[0].grant for n in range(40)}
    assert len(seen) == 8
    again = [plan(job("j", gpus=3), on=box, policy=policy).starts[0].grant for _ in range(2)]
    assert again[0] == again[1]


def test_a_gpu_that_went_away_keeps_its_grant():
    """A run whose GPU is gone keeps its other resources, and disturbs nobody."""
    lost = run("r", on=(7,), cpus=3)
    found = plan(job("j", cpus=2, gpus=1), job("k", gpus=1), on=machine(gpus=2), running=[lost])
    assert given(found) == {"k": (0,)}
    assert (code(found, "j"), numbers(found, "j")) == ("cpus", [2, 0, 2, 4])
