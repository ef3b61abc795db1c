"""The notebook of the examples runs from its first cell to its last, as its reader would run it."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest

import spool
from served import Served
from support import ROOT

STUDY = ROOT / "examples" / "study"


def _value(cell: str, names: dict[str, object]) -> object:
    """Run a cell and return the value of its last line, as a notebook would show it."""
    *statements, last = ast.parse(cell).body
    if not isinstance(last, ast.Expr):
        statements.append(last)
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


def test_the_notebook_of_the_study_finds_the_best(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cells were saved without results; they show the sweep, the best point, a table of six jobs, and the end."""
    shutil.copytree(STUDY, tmp_path / "study")
    monkeypatch.chdir(tmp_path / "study")
    notebook = json.loads((STUDY / "study.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    names: dict[str, object] = {}
    shown = [_value("".join(cell["source"]), names) for cell in code]
    sweep, best, table, reason = [value for value in shown if value is not None]
    assert isinstance(sweep, spool.Job)
    assert isinstance(best, dict)
    assert best["degree"] == "5"
    assert isinstance(table, spool.JobList)
    assert table._repr_html_().count("<tr>") == 1 + 6
    assert "degree=5, rate=0.1" in table._repr_html_()
    assert reason == "6 of 6 finished"
