"""Spools with real dispatchers.

A module that says `EXECUTORS = (...)` has each of its tests that use one run under each of these, unless the test says
itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from served import Served
from wrapper_runs import installed_wrapper


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the executor to the tests of the modules that name several."""
    names = getattr(metafunc.module, "EXECUTORS", ())
    says = any("executor" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if names and "executor" in metafunc.fixturenames and not says:
        metafunc.parametrize("executor", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def executor(request: pytest.FixtureRequest) -> str | None:
    """Name what runs the jobs of the test's spool; None is what spool takes by itself."""
    name: str | None = getattr(request, "param", None)
    if name == "tmux" and shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    if name == "sh":
        installed_wrapper()  # without it `process` is under sh
    return name


@pytest.fixture
def installed() -> str:
    """Give the compiled wrapper that dispatchers use."""
    return installed_wrapper()


@pytest.fixture
def served(tmp_path: Path, executor: str | None) -> Iterator[Served]:
    """Give a spool of the test's own; the test starts the dispatcher."""
    with Served(tmp_path / "spool", executor=executor) as spool:
        yield spool


@pytest.fixture(scope="module")
def shared_spool(tmp_path_factory: pytest.TempPathFactory, executor: str | None) -> Iterator[Served]:
    """Give the spool of a whole module, for tests that do not disturb each other, with 8 CPUs to give."""
    with Served(tmp_path_factory.mktemp("shared") / "spool", executor=executor) as spool:
        (spool.root / "config.toml").write_text('cpus = 8\nlook_every = "1h"\n')
        spool.start()
        yield spool


@pytest.fixture
def shared(shared_spool: Served) -> Served:
    """Give the module's spool, whose dispatcher must survive every test."""
    assert shared_spool.lives(), shared_spool.said()[-3000:]
    return shared_spool
