"""The example of `[capture]` runs as its reader would run it."""

from __future__ import annotations

import re
from pathlib import Path

from extras.capture.test_code import pytestmark
from test_examples import configure, folder, served

__all__ = ["pytestmark"]


def test_an_earlier_run_is_run_again_as_it_was(tmp_path: Path) -> None:
    """With the configuration of the page, `diff` names what has changed, and the first run's code runs again."""
    with served(tmp_path / "home") as home:
        example = folder(home, "capture")
        configure(home, example / "README.md")
        output = home.run("/bin/sh", "again.sh", cwd=example).stdout
        assert re.search(r"loss +0\.5 +0\.4", output)
        assert output.endswith("the loss is 0.5\n")
