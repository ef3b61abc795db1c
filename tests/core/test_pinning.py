"""Which CPUs a pinned run gets: its own, whole cores of one node, near its GPUs; and which GPUs go together."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from core.planning import GIB, gpus, job, machine, plan, run, started
from spool.core.gpus import choose_cpus, linked_first
from spool.core.model import Core, Gpu, Policy
from spool.core.reasons import ranges_of
from spool.core.units import cpus_in


def cores(*nodes: int, threads: int = 2, each: int = 2) -> tuple[Core, ...]:
    """Return *each* cores of so many hardware threads on each of *nodes*; siblings are numbered as on most machines."""
    many = len(nodes) * each
    return tuple(
        Core(tuple(at + thread * many for thread in range(threads)), node)
        for at, node in enumerate(node for node in nodes for _ in range(each))
    )


TWO_NODES = cores(0, 1)  # node 0: (0, 4) (1, 5); node 1: (2, 6) (3, 7)


@st.composite
def states(draw: st.DrawFn) -> tuple[tuple[Core, ...], set[int], int, set[int | None]]:
    """Draw cores of several widths on some nodes, those CPUs that are taken, a count, and near nodes."""
    numbers = iter(draw(st.permutations(range(64))))
    sizes = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=12))
    made = tuple(Core(tuple(sorted(next(numbers) for _ in range(width))), node) for width, node in sizes)
    every = [cpu for core in made for cpu in core.cpus]
    taken = set(draw(st.lists(st.sampled_from(every)))) if every else set()
    return made, taken, draw(st.integers(0, 20)), set(draw(st.lists(st.integers(0, 4), max_size=2)))


@given(states())
def test_a_choice_is_all_that_was_asked_for_and_free_or_nothing(state) -> None:
    """It has exactly that many different CPUs of the machine, none of them taken, whenever so many are free."""
    made, taken, count, near = state
    free = {cpu for core in made for cpu in core.cpus} - taken
    found = choose_cpus(made, taken, count, near)
    assert len(found) == (count if count <= len(free) else 0)
    assert set(found) <= free
    assert list(found) == sorted(set(found))


@given(states())
def test_one_node_is_enough_if_one_has_room_and_a_near_one_comes_first(state) -> None:
    """No run is spread over nodes that fits on one, and none leaves its GPU's node if that has room."""
    made, taken, count, near = state
    free: dict[int, int] = {}
    for core in made:
        free[core.node] = free.get(core.node, 0) + len(set(core.cpus) - taken)
    roomy = {node for node, number in free.items() if number >= count}
    found = choose_cpus(made, taken, count, near)
    nodes = {core.node for core in made if set(core.cpus) & set(found)}
    if count and roomy:
        assert len(nodes) == 1
        assert nodes <= (roomy & near or roomy)


@given(states(), st.integers(1, 4))
def test_whole_cores_are_given_before_any_is_broken(state, width: int) -> None:
    """On equal cores of a node with room, a run has all whole ones that fit into its count, and breaks one at most."""
    made, taken, count, near = state
    made = tuple(Core(tuple(range(at * width, (at + 1) * width)), core.node) for at, core in enumerate(made))
    found = set(choose_cpus(made, taken, count, near))
    nodes = {core.node for core in made if set(core.cpus) & found}
    if len(nodes) == 1:
        idle = [core for core in made if core.node in nodes and not set(core.cpus) & taken]
        assert sum(set(core.cpus) <= found for core in idle) == min(len(idle), count // width)


@given(states(), st.randoms(use_true_random=False))
def test_the_order_of_the_cores_makes_no_difference(state, random) -> None:
    """The same cores and the same taken CPUs give the same choice."""
    made, taken, count, near = state
    other = list(made)
    random.shuffle(other)
    assert choose_cpus(other, taken, count, near) == choose_cpus(made, taken, count, near)


@given(st.sets(st.integers(0, 5000)))
def test_a_list_of_cpus_is_read_as_it_was_written(cpus: set[int]) -> None:
    """The form is that of the kernel: ascending, with a dash for neighbours."""
    text = ranges_of(cpus)
    assert set(cpus_in(text)) == cpus
    assert ranges_of(cpus_in(f"{text}\n")) == text


@pytest.mark.parametrize("text", ["x", "3-1", "1,", "-1", "0-99999999", "1 2", "²", "70000"])
def test_a_text_that_is_no_list_names_no_cpu(text: str) -> None:
    """A record that was tampered with is no reason to fail, and makes no set of a billion."""
    assert cpus_in(text) == ()


@pytest.mark.parametrize(
    ("taken", "count", "near", "expected"),
    [
        (set(), 2, set(), (0, 4)),  # both threads of one core, not one of two
        (set(), 1, set(), (0,)),
        ({0}, 1, set(), (4,)),  # the rest of a core in use; node 1 stays whole
        ({0}, 2, set(), (1, 5)),
        ({0}, 3, set(), (1, 4, 5)),
        (set(), 2, {1}, (2, 6)),  # near its GPU
        ({2, 6, 3}, 2, {1}, (0, 4)),  # one node before the near one
        ({0, 1, 2, 3}, 4, set(), (4, 5, 6, 7)),  # on both, as no node has room
        (set(), 6, {1}, (0, 2, 3, 4, 6, 7)),  # all of the near node, then whole cores of the other
    ],
)
def test_examples_on_two_nodes_of_two_cores(taken, count, near, expected) -> None:
    """The rules on a machine with two nodes of two cores with two threads each."""
    assert choose_cpus(TWO_NODES, taken, count, near) == expected


def test_a_core_without_siblings_is_not_kept_for_later_at_the_price_of_a_broken_one() -> None:
    """On a processor with cores of both kinds, one CPU is a core of its own while there is one."""
    mixed = (Core((0, 1)), Core((2, 3)), Core((4,)), Core((5,)))
    assert choose_cpus(mixed, set(), 1) == (4,)
    assert choose_cpus(mixed, set(), 3) == (0, 1, 4)


# The decision.


def pinned(number: int, cpus: str, **values):
    """Return a run that is pinned to *cpus*."""
    one = run(f"r{number}", cpus=len(cpus_in(cpus)), **values)
    return replace(one, grant=replace(one.grant, cpu_list=cpus))


def lists(found) -> dict[str, str]:
    """Return the CPUs of each start."""
    return {start.name: start.grant.cpu_list for start in found.starts}


@given(
    st.lists(st.integers(0, 5), max_size=8),
    st.lists(st.sampled_from([(0,), (3, 7), (1, 4, 5)]), unique=True, max_size=3),
)
def test_no_cpu_is_given_out_twice(wants: list[int], held: list[tuple[int, ...]]) -> None:
    """Neither by one decision nor beside the runs, and each start has as many as it asks for."""
    runs = [pinned(at, ranges_of(cpus)) for at, cpus in enumerate(held)]
    jobs = [job(f"j{at}", cpus=cpus, waited=9 - at) for at, cpus in enumerate(wants)]
    found = lists(plan(*jobs, on=machine(cpus=8, cores=TWO_NODES), running=runs))
    out = [cpu for cpus in held for cpu in cpus] + [cpu for text in found.values() for cpu in cpus_in(text)]
    assert len(out) == len(set(out))
    assert {name: len(cpus_in(text)) for name, text in found.items()} == {name: wants[int(name[1:])] for name in found}


def test_without_cores_no_run_is_pinned_and_the_gpus_are_those_of_before() -> None:
    """Where pinning is off, nothing of it is decided, whatever is known of the GPUs."""
    known = linked((0, 2), (1, 3))
    found = plan(job("j", gpus=2), on=machine(gpus=known))
    assert [(start.grant.cpu_list, start.grant.gpu_indices) for start in found.starts] == [("", (0, 1))]


def test_a_run_that_is_not_pinned_counts_and_keeps_no_cpu() -> None:
    """One that began before pinning was switched on: there is no more room, but its CPUs are nobody's in particular.

    With `cpus = 0` a job has none of its own; if `grant.toml` names more than its run was granted, others still start.
    """
    found = plan(job("j", cpus=4), job("k", cpus=1), on=machine(cpus=8, cores=TWO_NODES), running=[run("old", cpus=4)])
    assert started(found) == ["j"]
    assert lists(found) == {"j": "0-1,4-5"}
    assert lists(plan(job("j", cpus=0), on=machine(cpus=8, cores=TWO_NODES))) == {"j": ""}
    one = pinned(1, "0-6")
    greedy = replace(one, grant=replace(one.grant, cpus=1))
    assert lists(plan(job("j", cpus=2), on=machine(cpus=8, cores=TWO_NODES), running=[greedy])) == {"j": ""}


# The GPUs.


def linked(*pairs: tuple[int, int], nodes: tuple[int, ...] = (0, 0, 1, 1), links: int = 4) -> tuple[Gpu, ...]:
    """Return four GPUs on *nodes*, of which these pairs are linked."""
    return tuple(
        replace(
            gpu,
            node=nodes[gpu.index],
            links=tuple(
                (f"GPU-{other}", links) for pair in pairs if gpu.index in pair for other in pair if other != gpu.index
            ),
        )
        for gpu in gpus(4)
    )


def grants(*jobs, cards: tuple[Gpu, ...], policy: Policy | None = None, running=()):
    """Return the GPUs and the CPUs of each start on a machine with pinning."""
    found = plan(*jobs, on=machine(cpus=8, cores=TWO_NODES, gpus=cards), policy=policy, running=running)
    return {start.name: (start.grant.gpu_indices, start.grant.cpu_list) for start in found.starts}


def test_gpus_that_are_linked_go_together() -> None:
    """A job with two GPUs gets a linked pair, even across nodes; three begin with it; one alone breaks none."""
    assert grants(job("j", gpus=2), cards=linked((0, 2), (1, 3)))["j"][0] == (0, 2)
    assert grants(job("j", gpus=3), cards=linked((1, 3)))["j"][0] == (0, 1, 3)
    assert grants(job("j", gpus=1), cards=linked((0, 1)))["j"][0] == (2,)


def test_gpus_of_one_node_go_together_and_the_cpus_are_near() -> None:
    """Without links, two GPUs are of one node, and the CPUs of that node."""
    cards = linked(nodes=(0, 1, 1, 0))
    assert grants(job("j", gpus=2, cpus=2), cards=cards) == {"j": ((0, 3), "0,4")}
    assert grants(job("j", gpus=2, cpus=2), cards=cards[1:3]) == {"j": ((1, 2), "2,6")}


def test_a_gpu_with_free_cpus_near_it_comes_first() -> None:
    """If the CPUs near GPU 0 are out, the first GPU of the other node is taken."""
    busy = [pinned(1, "0,4"), pinned(2, "1")]
    assert grants(job("j", gpus=1, cpus=2), cards=linked(), running=busy) == {"j": ((2,), "2,6")}
    assert grants(job("j", gpus=1, cpus=1), cards=linked(), running=busy) == {"j": ((0,), "5")}


def test_what_the_configuration_asks_for_stays_first() -> None:
    """A strategy decides alone, a smaller GPU comes before a linked one, and shares are packed."""
    cards = linked((2, 3))
    assert grants(job("j", gpus=2), cards=cards, policy=Policy(gpu_strategy="sequential"))["j"][0] == (0, 1)
    large = (*cards[:2], *(replace(gpu, memory_total_bytes=90 * GIB, memory_free_bytes=90 * GIB) for gpu in cards[2:]))
    assert grants(job("j", gpus=2), cards=large)["j"][0] == (0, 1)
    sharing = [run("s", on=(1,), gpu_memory_bytes=GIB, cpus=1)]
    assert grants(job("j", gpus=1, gpu_memory_bytes=GIB), cards=cards, running=sharing)["j"][0] == (1,)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=7), st.integers(0, 8), st.data())
def test_only_gpus_of_equal_memory_change_places(kinds: list[tuple[int, int]], count: int, data: st.DataObject) -> None:
    """Whatever is linked, the result has the same GPUs, and the first *count* have the sizes that they had."""
    kinds.sort()
    edges = data.draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=9))
    cards = [
        Gpu(
            f"GPU-{at}", at, str(kind), kind * GIB, GIB, node=node,
            links=tuple({f"GPU-{b if a == at else a}": 1 for a, b in edges if at in (a, b) and a != b}.items()),
        )
        for at, (kind, node) in enumerate(kinds)
    ]  # fmt: skip
    found = linked_first(cards, count, {0: 2, 1: 1}, 2)
    assert sorted(gpu.index for gpu in found) == list(range(len(cards)))
    assert [gpu.name for gpu in found[:count]] == [gpu.name for gpu in cards[:count]]
    rest = [gpu.index for gpu in found[count:]]
    assert [key for key, _ in groupby(rest, lambda at: cards[at].name)] == sorted({cards[at].name for at in rest})
