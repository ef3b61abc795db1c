"""Spools whose dispatcher serves already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from end_to_end.plugging import with_plugins
from served import Served


@pytest.fixture
def live(served: Served) -> Served:
    """Give a spool of the test's own, which is served."""
    return served.start()


@pytest.fixture
def plugged(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Give what makes a spool whose dispatcher has plugins of these names and texts."""
    with ExitStack() as spools:
        yield lambda *limit, **sources: spools.enter_context(with_plugins(tmp_path, *limit, **sources))
