"""What the pages and the examples show of `spool run --here` runs."""

from __future__ import annotations

import re
from pathlib import Path

from docs.test_pages import RECIPES
from shell import Home, home_of_test
from test_examples import folder, result, served
from test_readme import end_dispatcher


def test_a_notebook_runs_in_the_terminal(tmp_path: Path) -> None:
    """The script runs Jupyter here as a job, with the limits that it states."""
    with served(tmp_path / "home") as home:
        jupyter = home.path / ".local/bin/jupyter"
        jupyter.write_text('#!/bin/sh\necho "$SPOOL_JOB on $SPOOL_CPUS CPUs: $*"\n', encoding="utf-8")
        jupyter.chmod(0o755)
        home.environment["GPUS"] = "0"
        printed = home.run("sh", "notebook.sh", cwd=folder(home, "here")).stdout
        assert printed.endswith("notebook on 2 CPUs: lab --no-browser --port 8899\n")
        assert result(home, "notebook")["outcome"] == "finished"


def test_the_recipe_of_jupyter_runs() -> None:
    """Its first block runs Jupyter; here that is a program of that name, and there is no GPU."""
    home = Home(home_of_test())
    jupyter = home.path / ".local" / "bin" / "jupyter"
    jupyter.write_text('#!/bin/sh\necho "in $SPOOL_JOB: $*"\n', encoding="utf-8")
    jupyter.chmod(0o755)
    recipe = RECIPES.read_text(encoding="utf-8").partition("## Jupyter on a GPU\n")[2]
    block = re.findall(r"^```shell\n(.*?)^```", recipe, re.MULTILINE | re.DOTALL)[0]
    try:
        printed = home.sh(block.replace("-g 1", "-g 0").replace("--cpus 4", "--cpus 1"))
    finally:
        end_dispatcher(home.spool)
    assert printed.endswith("in jupyter: lab --no-browser --port 8899\n")
