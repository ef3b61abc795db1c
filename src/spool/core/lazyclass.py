"""`dataclass`, `field` and `replace` as in the standard library, with slots, and quicker to import and to make.

A command imports some hundred of these classes and uses a few. The standard library generates the methods of all of
them, for longer than the rest of the start takes; here each method is generated when it is used first. What only
`dataclasses` itself asks for (`fields`, `asdict`) comes from there.
"""

from __future__ import annotations

TYPE_CHECKING = False  # that of `typing`, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import replace as replace
    from typing import Any
else:

    def dataclass(*, slots, eq=True, order=False, frozen=False, kw_only=False):
        """Make a data class as `dataclasses.dataclass` does. Every annotation is a field; *slots* is always true."""
        assert slots, "without slots take that of the standard library"
        return lambda source: _made(source, {"eq": eq, "order": order, "frozen": frozen, "kw_only": kw_only})

    def field(**options):
        """Return the properties of a field, of those that `dataclasses.field` takes."""
        return _Properties(options)

    def replace(value, /, **changes):
        """Return *value* with other fields, as `dataclasses.replace` does."""
        recipe = getattr(type(value), "__recipe__", None)
        if recipe is None or not recipe.all_given:
            from dataclasses import replace as general

            return general(value, **changes)
        for name in recipe.names:
            if name not in changes:
                changes[name] = getattr(value, name)
        return type(value)(**changes)


def names_of(kind: type) -> tuple[str, ...] | None:
    """Return the names of the fields of a class that is made here, None of another."""
    recipe = getattr(kind, "__recipe__", None)
    return recipe.names if isinstance(recipe, _Recipe) else None


_NOTHING = object()  # no default
_OPERATORS = {"__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">="}
_DESCRIBED = ("__dataclass_fields__", "__dataclass_params__")


class _Properties:
    """What a class says of a field beside its type: the options of `dataclasses.field`."""

    __slots__ = ("options",)

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options


def _made(source: type, options: dict[str, bool]) -> type:
    """Return the class with slots, and with something that generates the real one in place of each method."""
    body = {name: value for name, value in vars(source).items() if name not in ("__dict__", "__weakref__")}
    body["__qualname__"] = source.__qualname__
    own = tuple(source.__annotations__)
    inherited = {name for base in source.__mro__ for name in vars(base).get("__slots__", ())}
    wanted = ["__init__", "__repr__"]
    if options["eq"]:
        wanted += ["__eq__", *["__hash__"] * options["frozen"]]
    if options["order"]:
        wanted += _OPERATORS
    recipe = _Recipe(source, body, options)
    content = {name: value for name, value in body.items() if name not in own}
    content["__slots__"] = tuple(name for name in own if name not in inherited)
    content["__recipe__"] = recipe
    content["__match_args__"] = recipe.positional
    content.update((name, _stub(recipe, name)) for name in wanted if name not in body)
    content.update((name, _Description(recipe.described, name)) for name in (*_DESCRIBED, "__signature__"))
    if options["eq"]:
        content.setdefault("__hash__", None)  # equal values may change, and with them their hash
    if options["frozen"]:
        content |= {"__setattr__": _no_assignment, "__delattr__": _no_deletion}
        content |= {"__getstate__": _state, "__setstate__": _restore}
    made: type = type(source)(source.__name__, source.__bases__, content)
    recipe.made = made
    return made


def _stub(recipe: _Recipe, name: str) -> Callable[..., object]:
    def stub(*args: object, **kwargs: object) -> object:
        return recipe.generated(name)(*args, **kwargs)

    return stub


class _Recipe:
    """How to generate the methods of one class, *made*. Two threads may do that at once, and come to the same."""

    made: type

    def __init__(self, source: type, body: dict[str, Any], options: dict[str, bool]) -> None:
        self._type = type(source)
        self._head = source.__name__, source.__bases__
        self._body = body
        self._options = options
        self.fields: dict[str, tuple[dict[str, Any], bool]] = {}  # its properties, and whether by keyword only
        for base in reversed(source.__mro__[1:]):
            if "__recipe__" in vars(base):
                self.fields |= vars(base)["__recipe__"].fields
        for name in source.__annotations__:
            value = body.get(name, _NOTHING)
            given = value.options if isinstance(value, _Properties) else {} if value is _NOTHING else {"default": value}
            self.fields[name] = given, options["kw_only"]
        self.names = tuple(self.fields)
        self.all_given = all(given.get("init", True) for given, _ in self.fields.values())
        self.positional = tuple(
            name
            for name, (given, keyword_only) in self.fields.items()
            if given.get("init", True) and not given.get("kw_only", keyword_only)
        )

    def generated(self, name: str) -> Callable[..., object]:
        """Generate the method *name* in place of its stub, and return it."""
        names: dict[str, Any] = {}
        if name == "__init__":
            head, lines = self._initializer(names)
        elif name == "__repr__":
            shown = [f"{each}={{self.{each}!r}}" for each, (given, _) in self.fields.items() if given.get("repr", True)]
            head, lines = "self", [f"return f'{{self.__class__.__qualname__}}({', '.join(shown)})'"]
        elif name == "__hash__":
            head, lines = "self", [f"return hash({self._compared('self')})"]
        else:
            same = f"{self._compared('self')} {_OPERATORS.get(name, '==')} {self._compared('other')}"
            head = "self, other"
            lines = ["if other.__class__ is self.__class__:", f"    return {same}", "return NotImplemented"]
        text = f"def {name}({head}):\n" + "".join(f"    {line}\n" for line in lines)
        exec(text, names)  # noqa: S102  (made of the names of fields, which are identifiers)
        method: Callable[..., object] = names[name]
        method.__qualname__ = f"{self.made.__qualname__}.{name}"
        method.__module__ = self.made.__module__
        if name == "__repr__":
            from reprlib import recursive_repr

            method = recursive_repr()(method)  # type: ignore[arg-type]
        setattr(self.made, name, method)
        return method

    def _compared(self, of: str) -> str:
        names = [f"{of}.{name}, " for name, (given, _) in self.fields.items() if given.get("compare", True)]
        return f"({''.join(names)})"

    def _initializer(self, names: dict[str, Any]) -> tuple[str, list[str]]:
        """Return parameters and lines of `__init__`; *names* gets what these mean. Slots are set past `__setattr__`."""
        positional, by_keyword, lines = ["self"], list[str](), list[str]()
        for name, (given, keyword_only) in self.fields.items():
            factory, default = given.get("default_factory", _NOTHING), given.get("default", _NOTHING)
            value, parameter = name, name
            if factory is not _NOTHING:
                names |= {f"_make_{name}": factory, "_NOTHING": _NOTHING}
                parameter = f"{name}=_NOTHING"
                value = f"_make_{name}() if {name} is _NOTHING else {name}"
            elif default is not _NOTHING:
                names[f"_default_{name}"] = default
                parameter = f"{name}=_default_{name}"
            if given.get("init", True):
                (by_keyword if given.get("kw_only", keyword_only) else positional).append(parameter)
            elif factory is not _NOTHING:
                value = f"_make_{name}()"
            elif default is not _NOTHING:
                value = f"_default_{name}"
            else:
                continue
            names[f"_set_{name}"] = getattr(self.made, name).__set__
            lines.append(f"_set_{name}(self, {value})" if self._options["frozen"] else f"self.{name} = {value}")
        if hasattr(self.made, "__post_init__"):
            lines.append("self.__post_init__()")
        return ", ".join([*positional, *["*"] * bool(by_keyword), *by_keyword]), lines or ["pass"]

    def described(self, name: str) -> object:
        """Take from the standard library what tells of the fields, and return what is called *name*."""
        import dataclasses

        body = self._body | {"__doc__": self._body["__doc__"] or " "}  # or it is made of the signature, at some cost
        for each, value in body.items():
            if isinstance(value, _Properties):
                body[each] = dataclasses.field(**value.options)
        source: type = dataclasses.dataclass(**self._options)(self._type(*self._head, body))
        for each in _DESCRIBED:
            setattr(self.made, each, vars(source)[each])
        if name == "__signature__":
            import inspect

            setattr(self.made, name, inspect.signature(source))
        return vars(self.made)[name]


class _Description:
    """What tells of the fields of a class, for `fields`, `match` and `inspect`, until it is asked for."""

    __slots__ = ("_described", "_name")

    def __init__(self, described: Callable[[str], object], name: str) -> None:
        self._described = described
        self._name = name

    def __get__(self, instance: object, owner: type) -> object:
        return self._described(self._name)


def _no_assignment(self: object, name: str, value: object) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _no_deletion(self: object, name: str) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[object]:
    return [getattr(self, name) for name in self.__recipe__.names]


def _restore(self: Any, state: list[object]) -> None:
    for name, value in zip(self.__recipe__.names, state, strict=True):
        object.__setattr__(self, name, value)
