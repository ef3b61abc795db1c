"""Other tools over spool: each example runs, where its tool is installed."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

from shell import Home, home_of_test
from support import ROOT, WHOLE, wait_for

pytestmark = WHOLE  # the pages are about all capabilities

EXAMPLES = sorted((ROOT / "examples" / "tools").glob("with_*.*"))
PROMISES = {
    "make": ["made a", "made b"],
    "parallel": ["sample a", "sample b", "sample c"],
    "pytest": [f"==> {name} <==\n" for name in ("files_0", "files_1", "shards_0", "shards_1")],
}
CANCELS = {"dask_jobqueue"}  # workers that are no longer needed


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_runs(example: Path) -> None:
    """The example prints what it promises, and its jobs have ended as they should."""
    home, tool = Home(home_of_test()), example.stem.removeprefix("with_")
    if example.suffix == ".py":
        if importlib.util.find_spec(tool) is None:
            pytest.skip(f"{tool} is not installed")
        promises = re.findall(r"# (\w+ .+)$", example.read_text(encoding="utf-8"), re.MULTILINE)
        command = [sys.executable, str(example)]
    else:
        if shutil.which(tool, path=home.environment["PATH"]) is None and importlib.util.find_spec(tool) is None:
            pytest.skip(f"{tool} is not installed")
        promises = PROMISES[tool]
        command = ["/bin/sh", str(example)]
    assert promises
    home.serve()
    try:
        printed = home.run(*command).stdout
        for promise in promises:
            assert promise in printed
        runs = list(home.spool.glob("jobs/*/*/"))
        assert len(runs) >= 2
        results = [run / "result.toml" for run in runs]
        wait_for(lambda: all(result.exists() for result in results), what="the end of the jobs")
        outcome = "cancelled" if tool in CANCELS else "finished"
        assert all(f'outcome = "{outcome}"' in result.read_text(encoding="utf-8") for result in results)
    finally:
        home.close()


def test_every_example_is_on_the_page() -> None:
    """The page about Python links each of them."""
    page = (ROOT / "docs" / "PYTHON.md").read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES if f"(../examples/tools/{path.name})" not in page] == []
