"""Data classes whose methods are generated when the first of them is used."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from spool.core import lazyclass
from support import ROOT

Decorator = Callable[..., Any]


def point(dataclass: Decorator, **options: bool) -> Any:
    """Return a class with a default, a default that is made, a method of its own and one field that is computed."""
    field = lazyclass.field if dataclass is lazyclass.dataclass else dataclasses.field

    @dataclass(slots=True, **options)
    class Point:
        """A point."""

        x: int
        y: int = 2
        tags: list[str] = field(default_factory=list, compare=False)
        length: int = field(default=0, init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "length", abs(self.x) + abs(self.y))

        def moved(self, by: int) -> Any:
            """Return it at another place."""
            return dataclasses.replace(self, x=self.x + by)

    return Point


OPTIONS = [{}, {"frozen": True}, {"eq": False}, {"frozen": True, "order": True}, {"kw_only": True}]
QUESTIONS: dict[str, Callable[[Any], object]] = {
    "repr": lambda cls: repr(cls(x=1)),
    "equal": lambda cls: (cls(x=1) == cls(x=1, y=2, tags=["a"]), cls(x=1) == cls(x=2), cls(x=1) == 1),
    "hash": lambda cls: len({hash(one) for one in [cls(x=1), cls(x=1)]}),
    "order": lambda cls: (cls(x=1) < cls(x=2), cls(x=1) >= cls(x=2)),
    "positions": lambda cls: cls(1, 3).length,
    "missing": lambda cls: cls(),
    "assigned": lambda cls: setattr(cls(x=1), "x", 5),
    "deleted": lambda cls: delattr(cls(x=1), "x"),
    "unknown": lambda cls: refuses(cls(x=1), "other"),
    "slots": lambda cls: (cls.__slots__, hasattr(cls(x=1), "__dict__")),
    "method": lambda cls: cls(x=1).moved(2).x,
    "own defaults": lambda cls: cls(x=1).tags is cls(x=1).tags,
    "fields": lambda cls: [(each.name, each.init, each.compare) for each in dataclasses.fields(cls)],
    "is one": dataclasses.is_dataclass,
    "as a table": lambda cls: dataclasses.asdict(cls(x=1)),
    "match": lambda cls: cls.__match_args__,
    "signature": lambda cls: str(inspect.signature(cls)),
    "params": lambda cls: (cls.__dataclass_params__.frozen, cls.__dataclass_params__.order),
    "copy": lambda cls: repr(copy.deepcopy(cls(x=1, tags=["a"]))),
    "doc": lambda cls: (cls.__doc__, cls.__name__, cls.__qualname__, cls.__module__),
    "hashable": lambda cls: cls.__hash__ is None,
}


def refuses(value: object, name: str) -> bool:
    """Return whether no attribute of that name can be assigned; with what error differs between versions of Python."""
    try:
        setattr(value, name, 5)
    except (AttributeError, TypeError):
        return True
    return False


def answer(question: Callable[[Any], object], cls: Any) -> object:
    """Return what comes of a question: its answer, or the kind of error."""
    try:
        return question(cls)
    except (TypeError, AttributeError) as error:
        return type(error)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_each_answer_is_that_of_the_standard_library(
    options: dict[str, bool], question: Callable[[Any], object]
) -> None:
    """Whatever is the first use of a class, it does what a class of `dataclasses` does."""
    assert answer(question, point(lazyclass.dataclass, **options)) == answer(
        question, point(dataclasses.dataclass, **options)
    )


def test_a_class_inherits_fields_of_one_that_nobody_has_used_yet() -> None:
    """Fields and slots of a base count for what is made of it."""
    base = point(lazyclass.dataclass, frozen=True)

    @lazyclass.dataclass(frozen=True, slots=True)
    class Below(base):  # type: ignore[misc]
        z: int = 4

    assert repr(Below(1)).endswith("Below(x=1, y=2, tags=[], length=3, z=4)")
    assert Below.__slots__ == ("z",)


@lazyclass.dataclass(frozen=True, slots=True)
class Pair:
    """Two values, for the tests below."""

    left: int
    right: int = 2


def test_a_value_is_pickled_and_matched_by_position() -> None:
    """A class that is matched before it is used tells its fields, and a frozen value comes back as it was."""
    found = 0
    match pickle.loads(pickle.dumps(Pair(1))):
        case Pair(left, right):
            found = 10 * left + right
    assert found == 12


def test_threads_that_use_a_class_first_at_once_all_get_it() -> None:
    """Nobody sees a class of which only a part is generated."""
    for _ in range(20):
        cls, found = point(lazyclass.dataclass, frozen=True), list[object]()
        begin = threading.Barrier(4)

        def use(cls: Any = cls, begin: threading.Barrier = begin, found: list[object] = found) -> None:
            begin.wait()
            found.append(repr(cls(1)) == repr(cls(1)) and cls(1, tags=["a"]) == cls(1))

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 4


def test_values_need_no_library() -> None:
    """Neither to import the values of the program nor to make, compare, change and show one needs `dataclasses`."""
    code = (
        "import sys; from spool.core import model; from spool.core.lazyclass import replace\n"
        "one = replace(model.Spec(command='true'), project='p')\n"
        "assert one == replace(one) and hash(one) and 'true' in repr(one)\n"
        "print('dataclasses' in sys.modules, 'inspect' in sys.modules)"
    )
    env = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_value_with_other_fields_is_a_new_one() -> None:
    """`replace` leaves the value as it is, takes any field but an unknown one, and does classes of `dataclasses`."""
    one = Pair(1)
    assert (lazyclass.replace(one, right=5), one) == (Pair(1, 5), Pair(1, 2))
    with pytest.raises(TypeError):
        lazyclass.replace(one, other=1)
    for made in (dataclasses.dataclass, lazyclass.dataclass):
        assert lazyclass.replace(point(made)(3, tags=["a"]), y=7).length == 10
    with pytest.raises(ValueError, match="length"):
        lazyclass.replace(point(lazyclass.dataclass)(3), length=7)


def test_a_class_tells_its_fields() -> None:
    """The names stand in the order of the fields; other classes, and what only has such an attribute, tell none."""
    assert lazyclass.names_of(Pair) == ("left", "right")
    assert lazyclass.names_of(str) is lazyclass.names_of(point(dataclasses.dataclass)) is None
