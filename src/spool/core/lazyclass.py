"""`dataclass` of the standard library, with slots, whose methods are generated when the first of them is used.

A command imports some hundred of these classes and uses a few. To generate the methods of all takes longer than the
rest of its start.
"""

from __future__ import annotations

import dataclasses

TYPE_CHECKING = False  # that of `typing`
if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import dataclass as dataclass
    from typing import Any
else:

    def dataclass(*, slots, eq=True, order=False, frozen=False, kw_only=False):
        """Make a data class as `dataclasses.dataclass` does. Every annotation is a field; *slots* is always true."""
        assert slots, "without slots take that of the standard library"
        options = {"eq": eq, "order": order, "frozen": frozen, "kw_only": kw_only}
        return lambda source: _Recipe(source, options).made


_ORDERED = ("__lt__", "__le__", "__gt__", "__ge__")
_FROZEN = ("__setattr__", "__delattr__")
_DESCRIBED = ("__dataclass_fields__", "__dataclass_params__", "__match_args__")


class _Recipe:
    """How to generate the methods of one class, *made*."""

    def __init__(self, source: type, options: dict[str, bool]) -> None:
        self._options = options
        self._type = type(source)
        self._head = source.__name__, source.__bases__
        self._body = {name: value for name, value in vars(source).items() if name not in ("__dict__", "__weakref__")}
        self._body["__qualname__"] = source.__qualname__
        eq, frozen = options["eq"], options["frozen"]
        hashes = ("__hash__",) if eq and frozen else ()
        wanted = ("__init__", "__repr__", *("__eq__",) * eq, *hashes, *_ORDERED * options["order"], *_FROZEN * frozen)
        self._methods = tuple(name for name in wanted if name not in self._body)
        self.made = self._slotted(source)

    def _slotted(self, source: type) -> type:
        """Return the class with slots, and with a stub for each method."""
        inherited = {name for base in source.__mro__ for name in vars(base).get("__slots__", ())}
        fields = [name for name in source.__annotations__ if name not in inherited]
        body = {name: value for name, value in self._body.items() if name not in source.__annotations__}
        body["__slots__"] = tuple(fields)
        body.update((name, _Description(self.generated, name)) for name in _DESCRIBED)
        body.update((name, self._stub(name)) for name in self._methods)
        if self._options["eq"]:
            body.setdefault("__hash__", None)  # equal values may change, and with them their hash
        if self._options["frozen"]:
            body |= {"__getstate__": _state, "__setstate__": _set_state}
        body["__signature__"] = _Description(self.generated, "__signature__")
        return self._type(*self._head, body)

    def _stub(self, name: str) -> Callable[..., object]:
        def stub(*args: object, **kwargs: object) -> object:
            return self.generated(name)(*args, **kwargs)

        return stub

    def generated(self, name: str) -> Callable[..., object]:
        """Generate all methods in place of their stubs, and return the one of that *name*.

        Two threads may do that at once: each does it with a class of its own, and they come to the same.
        """
        body = self._body | {"__doc__": self._body["__doc__"] or " "}  # or it is made of the signature, at some cost
        source: type = dataclasses.dataclass(**self._options)(self._type(*self._head, body))
        for each in (*_DESCRIBED, *self._methods):
            setattr(self.made, each, vars(source)[each])
        setattr(self.made, "__signature__", None)  # noqa: B010  (that of __init__; the type knows no such attribute)
        found: Callable[..., object] = vars(self.made)[name]
        return found


class _Description:
    """What tells of the fields of a class, for `fields`, `match` and `inspect`, before the methods are generated."""

    __slots__ = ("_generated", "_name")

    def __init__(self, generated: Callable[[str], object], name: str) -> None:
        self._generated = generated
        self._name = name

    def __get__(self, instance: object, owner: type) -> object:
        return self._generated(self._name)


def _state(self: Any) -> list[object]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[object]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
