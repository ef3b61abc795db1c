"""Which tasks an array has, and what is put in the place of `{key}`."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spool.core.arrays import Substitution, Tasks
from spool.core.model import ArraySpec, ArrayTask, Spec

KEYS = st.lists(st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,5}", fullmatch=True), min_size=1, max_size=4, unique=True)
TEXTS = st.text(st.sampled_from("ab{}$\\ \n"), max_size=30)


def _values(tasks: Tasks) -> list[dict[str, str]]:
    return [tasks.values(position) for position in range(tasks.count)]


def test_an_array_alone_has_its_own_indices() -> None:
    """`array = "3,7-9:2"` makes tasks 3, 7 and 9; each row is one task; what is no array stands for itself."""
    tasks = Tasks("sweep", Spec("true", array=ArraySpec((3, 7, 9), 2)))
    assert tasks.names() == ("sweep_3", "sweep_7", "sweep_9")
    assert tasks.keys == ("index",)
    assert _values(tasks) == [{"index": "3"}, {"index": "7"}, {"index": "9"}]
    assert tasks.task(1) == ArrayTask("sweep", 7, 2)
    rows = ((("lr", "0.1"), ("seed", "1")), (("lr", "0.2"), ("seed", "9")))
    tasks = Tasks("r", Spec("true", rows=rows))
    assert _values(tasks) == [{"index": "0", **dict(rows[0])}, {"index": "1", **dict(rows[1])}]
    assert Tasks("plain", Spec("true")).count == 0
    assert Tasks("plain", Spec("true")).names() == ()


def test_a_matrix_is_the_product_and_its_last_key_varies_fastest() -> None:
    """The tasks of a matrix are numbered from 0, in the order in which nested loops would come to them."""
    tasks = Tasks("m", Spec("true", matrix=(("a", ("x", "y")), ("b", ("1", "2", "3"))), max_running=4))
    assert tasks.names() == tuple(f"m_{index}" for index in range(6))
    found = [(values["a"], values["b"], values["index"]) for values in _values(tasks)]
    assert found == [(a, b, str(i)) for i, (a, b) in enumerate(itertools.product("xy", "123"))]
    assert tasks.task(5) == ArrayTask("m", 5, 4)


def test_indices_beside_lists_make_a_product_in_which_they_vary_slowest() -> None:
    """`array` beside a matrix or rows repeats all of it; `{array}` is the index there, `{index}` the number of all."""
    array = ArraySpec((5, 6))
    for spec in (Spec("true", array=array, matrix=(("a", ("x", "y")),)),
                 Spec("true", array=array, rows=((("a", "x"),), (("a", "y"),)))):  # fmt: skip
        tasks = Tasks("p", spec)
        assert tasks.names() == ("p_0", "p_1", "p_2", "p_3")
        found = [(values["index"], values["array"], values["a"]) for values in _values(tasks)]
        assert found == [("0", "5", "x"), ("1", "5", "y"), ("2", "6", "x"), ("3", "6", "y")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train --lr {lr}", "train --lr 0.1"),
        ("{lr}{lr}-{index}", "0.10.1-3"),
        ("{{lr}}", "{lr}"),
        ("${lr} ${HOME} $lr", "${lr} ${HOME} $lr"),
        ("awk '{print $1}' {other} {lr }", "awk '{print $1}' {other} {lr }"),
        ("{{{lr}}}", "{{lr}}"),
        ('{"lr": {lr}}', '{"lr": 0.1}'),
        ("{LR}", "{LR}"),
        ("{lr-x}{lr_x}", "{lr-x}{lr_x}"),
    ],
)
def test_only_known_keys_are_replaced(text: str, expected: str) -> None:
    """A known key in braces becomes the value; doubled braces, the shell's and everybody else's stay braces."""
    assert Substitution(["index", "lr"]).apply(text, {"index": "3", "lr": "0.1"}) == expected


@given(TEXTS, KEYS)
def test_a_text_without_known_keys_stays_as_it_is(text: str, keys: list[str]) -> None:
    """What names no key comes out byte for byte, whatever braces it has."""
    substitution = Substitution(keys)
    if not any(f"{{{key}}}" in text for key in keys):
        assert not substitution.touches(text)
        assert substitution.apply(text, dict.fromkeys(keys, "!")) == text


@given(KEYS, st.lists(TEXTS, min_size=1, max_size=4))
def test_what_was_put_in_is_not_looked_at_again(keys: list[str], values: list[str]) -> None:
    """A value that looks like a key stays what it is."""
    given_values = dict(zip(keys, itertools.cycle([*values, "{" + keys[0] + "}"]), strict=False))
    text = "/".join(f"{{{key}}}" for key in keys)
    assert Substitution(keys).apply(text, given_values) == "/".join(given_values[key] for key in keys)
