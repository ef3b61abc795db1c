"""Claims that are made once in the core, and under every other executor or shell in `tests/long`.

A module says `EXECUTORS = (...)`, a test `@pytest.mark.executors(...)`: those that use `executor` run under the first
of these here, and under the others in `tests/long/variants`. A claim that depends on the executor is parametrized by
the test itself, and runs under each of them everywhere. The same holds for `wrapper`: what carries out a `run.sh`.

`tests/long/variants` and `tests/long/cuts` have no files of tests: those of other folders are collected there again.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from support import ROOT
from wrapper_runs import FIRST_WRAPPERS, OTHER_WRAPPERS, Runs, installed_wrapper, runs_below, words_of

TESTS = ROOT / "tests"
VARIANTS, CUTS = TESTS / "long" / "variants", TESTS / "long" / "cuts"
_FIXTURES = ("executor", "wrapper")
_AGAIN = {
    VARIANTS: r"^EXECUTORS = |\bmark\.executors\(|\b(wrapper: str|runs: Runs)\b",
    CUTS: r"\b(thin: int|alike: Alike)\b",
}
"""Of each folder what the text of a module has in it that is collected there again."""


class Again(pytest.Directory):
    """A folder in which the tests of modules that lie elsewhere are collected again."""

    def collect(self) -> Iterator[pytest.Module]:
        """Yield the modules that have what varies in this folder."""
        for path in sorted(TESTS.rglob("test_*.py")):
            varies = re.search(_AGAIN[self.path], path.read_text(encoding="utf-8"), re.MULTILINE)
            if varies and not path.is_relative_to(VARIANTS.parent):
                nodeid = f"{self.nodeid}/{path.relative_to(TESTS)}"
                yield _SecondModule.from_parent(self, path=path, nodeid=nodeid)


class _SecondModule(pytest.Module):
    def _getobj(self) -> ModuleType:
        """Import it under a name of its own, for fixtures of a module are found for one collector alone."""
        return import_module(".".join(self.path.relative_to(TESTS).with_suffix("").parts))


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the folders without files of tests."""
    return Again.from_parent(parent, path=path) if path in _AGAIN else None


def pytest_configure(config: pytest.Config) -> None:
    """Name the mark."""
    config.addinivalue_line(
        "markers", "executors(name, ...): what runs the jobs of this test; the first one in the core"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test the executors and wrappers of its tier."""
    others = _in_variants(metafunc.definition)
    marks = list(metafunc.definition.iter_markers("parametrize"))
    for fixture in set(_FIXTURES) & set(metafunc.fixturenames):
        if not any(fixture in mark.args[0] for mark in marks) and (names := _names(metafunc, fixture, others=others)):
            metafunc.parametrize(fixture, names, indirect=True, scope="module")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out of these folders what does not vary: it is the same test again."""
    items[:] = [item for item in items if item.getparent(Again) is None or _varies(item)]


def _names(metafunc: pytest.Metafunc, fixture: str, *, others: bool) -> Sequence[str]:
    if fixture == "wrapper":
        return OTHER_WRAPPERS if others else FIRST_WRAPPERS
    mark = metafunc.definition.get_closest_marker("executors")
    names: Sequence[str] = mark.args if mark is not None else getattr(metafunc.module, "EXECUTORS", ())
    return names[1:] if others else names[:1]


def _in_variants(item: pytest.Item) -> bool:
    folder = item.getparent(Again)
    return folder is not None and folder.path == VARIANTS


def _varies(item: pytest.Item) -> bool:
    if not _in_variants(item):
        return "thin" in getattr(item, "fixturenames", ())
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


@pytest.fixture
def runs(wrapper: str, tmp_path: Path) -> Iterator[Runs]:
    """Make runs under each shell that there is, and under the compiled wrapper, which may become one of them."""
    with runs_below(tmp_path, words_of(wrapper)) as made:
        yield made
