"""Claims that are made once in the core, and under every other executor or shell in `tests/long`.

A module says `EXECUTORS = (...)`, a test `@pytest.mark.executors(...)`: those that use `executor` run under the first
of these here, and under the others in `tests/long/variants`. A claim that depends on the executor is parametrized by
the test itself, and runs under each of them everywhere. The same holds for `wrapper`: what carries out a `run.sh`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from support import ROOT
from wrapper_runs import FIRST_WRAPPERS, OTHER_WRAPPERS, installed_wrapper

VARIANTS = ROOT / "tests" / "long" / "variants"
_FIXTURES = ("executor", "wrapper")


def pytest_configure(config: pytest.Config) -> None:
    """Name the mark."""
    config.addinivalue_line(
        "markers", "executors(name, ...): what runs the jobs of this test; the first one in the core"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test the executors and wrappers of its tier."""
    others = _in_variants(metafunc.definition.path)
    marks = list(metafunc.definition.iter_markers("parametrize"))
    for fixture in set(_FIXTURES) & set(metafunc.fixturenames):
        if not any(fixture in mark.args[0] for mark in marks) and (names := _names(metafunc, fixture, others=others)):
            metafunc.parametrize(fixture, names, indirect=True, scope="module")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out of the variants what has none: it is the same test again."""
    items[:] = [item for item in items if not _in_variants(item.path) or _varies(item)]


def _names(metafunc: pytest.Metafunc, fixture: str, *, others: bool) -> Sequence[str]:
    if fixture == "wrapper":
        return OTHER_WRAPPERS if others else FIRST_WRAPPERS
    mark = metafunc.definition.get_closest_marker("executors")
    names: Sequence[str] = mark.args if mark is not None else getattr(metafunc.module, "EXECUTORS", ())
    return names[1:] if others else names[:1]


def _in_variants(path: Path) -> bool:
    return path.is_relative_to(VARIANTS)


def _varies(item: pytest.Item) -> bool:
    given = getattr(item, "callspec", None)
    said = " ".join(str(mark.args[0]) for mark in item.iter_markers("parametrize"))
    return given is not None and any(each in given.params and each not in said for each in _FIXTURES)


@pytest.fixture(scope="module")
def executor(request: pytest.FixtureRequest) -> str | None:
    """Name what runs the jobs of the test's spool; None is what spool takes by itself."""
    name: str | None = getattr(request, "param", None)
    if name == "tmux" and shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    if name == "sh":
        installed_wrapper()  # without it `process` is under sh
    return name


@pytest.fixture(scope="module")
def wrapper(request: pytest.FixtureRequest) -> str:
    """Name what carries out the test's `run.sh`: a shell, or the compiled wrapper."""
    name: str = request.param
    return name
