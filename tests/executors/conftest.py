"""Executors of plain processes: one that has the compiled wrapper, and one that has a shell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spool.executors import compiled, process
from support import PATIENCE_S
from wrapper_runs import ByShell, Shop, compiled_wrapper


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    """Give an executor that has the compiled wrapper, and waits for its server however busy the machine is."""
    if (program := compiled_wrapper()) is None:
        pytest.skip("no C compiler on this machine")
    monkeypatch.setattr(compiled, "PROGRAM", program)
    monkeypatch.setattr(process, "_ANSWERS_WITHIN_S", int(PATIENCE_S))
    with Shop(tmp_path) as made:
        yield made


@pytest.fixture(params=["auto", "sh"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """Give an executor that has the compiled wrapper, and one that has a shell."""
    if request.param == "auto":
        yield request.getfixturevalue("shop")
    else:
        with Shop(tmp_path, ByShell) as made:
            yield made
