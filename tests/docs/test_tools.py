"""Other tools over spool: each example of the page runs, where its tool is installed."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys

import pytest

from shell import Home, home_of_test
from support import ROOT, WHOLE, wait_for

pytestmark = WHOLE  # the pages are about all capabilities

SECTION = (ROOT / "docs" / "PYTHON.md").read_text(encoding="utf-8").partition("## Other tools\n")[2]
EXAMPLES = re.findall(r"^<!-- needs (\w+) -->\n```(python|sh)\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
PROMISES = {
    "make": ["made a", "made b"],
    "parallel": ["sample a", "sample b", "sample c"],
    "pytest": [f"==> {name} <==\n" for name in ("files_0", "files_1", "shards_0", "shards_1")],
}
CANCELS = {"dask_jobqueue"}  # workers that are no longer needed


@pytest.mark.parametrize(("tool", "language", "text"), EXAMPLES, ids=[tool for tool, *_ in EXAMPLES])
def test_an_example_runs(tool: str, language: str, text: str) -> None:
    """The example prints what it promises, and its jobs have ended as they should."""
    home = Home(home_of_test())
    if language == "python":
        if importlib.util.find_spec(tool) is None:
            pytest.skip(f"{tool} is not installed")
        promises = re.findall(r"# (\w+ .+)$", text, re.MULTILINE)
        (home.path / "example.py").write_text(text, encoding="utf-8")
        command = [sys.executable, "example.py"]
    else:
        if shutil.which(tool, path=home.environment["PATH"]) is None and importlib.util.find_spec(tool) is None:
            pytest.skip(f"{tool} is not installed")
        promises = PROMISES[tool]
        command = ["/bin/sh", "-c", text]
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


def test_every_example_is_run() -> None:
    """No block of the section lacks the line that says what it needs."""
    assert SECTION.count("```") == 2 * len(EXAMPLES) > 12
