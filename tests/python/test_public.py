"""The public face: what `import spool` gives a program, its page, and the notebook of the examples."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import spool
from served import Served
from spool.core import errors
from support import ROOT

PAGE = ROOT / "docs" / "PYTHON.md"
SOURCE = ROOT / "src" / "spool"
STUDY = ROOT / "examples" / "study"


def test_importing_spool_imports_nothing_else() -> None:
    """So that `spool submit`, and every program that imports it, pays for what it uses."""
    text = "import sys, spool; print([name for name in sys.modules if name.startswith('spool')])"
    said = subprocess.run([sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert said.stdout.strip() == "['spool']"


def test_what_is_public_is_there_and_typed() -> None:
    """Each name can be had, is in `dir` and in the stub for type checkers, and no other name is."""
    named = re.findall(r"^from ([\w.]+) import (\w+) as ", (SOURCE / "__init__.pyi").read_text(), re.MULTILINE)
    there = [name for home, name in named if (ROOT / "src" / f"{home.replace('.', '/')}.py").exists()]
    assert sorted(there) == sorted(spool.__all__)
    assert sorted(dir(spool)) == sorted([*spool.__all__, "__version__"])
    for name in spool.__all__:
        assert callable(getattr(spool, name))
    with pytest.raises(AttributeError, match="no attribute 'Clients'"):
        spool.Clients  # type: ignore[attr-defined]  # noqa: B018


def test_every_error_that_a_public_method_raises_is_public() -> None:
    """What `python/`, `client/` and `query/` raise, and the classes that they inherit from, can be caught by name."""
    raised = set()
    for path in (path for layer in ("python", "client", "query") for path in (SOURCE / layer).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                raised.add(node.exc.func.id)
    of_spool = {getattr(errors, name) for name in raised if hasattr(errors, name)}
    assert {errors.InvalidValue, errors.NoSuchJob, errors.SpoolError, errors.NotAllSubmitted} <= of_spool
    ancestors = {base for each in of_spool for base in each.__mro__ if issubclass(base, errors.SpoolError)}
    assert {each.__name__ for each in ancestors} - {*spool.__all__} == set()


def _parameters(of: Any) -> list[str]:
    return [name for name in inspect.signature(of).parameters if name != "self"]


def _methods(of: type) -> dict[str, list[str]]:
    found = inspect.getmembers(of, inspect.isfunction)
    return {name: _parameters(method) for name, method in found if not name.startswith("_")}


@pytest.mark.parametrize("heading", ["Client", "Job", "Functions"])
def test_the_page_has_every_call_with_its_parameters(heading: str) -> None:
    """A row for each method of the client and of a job, and each function, and no other."""
    calls = {
        "Client": {"Client": _parameters(spool.Client), **_methods(spool.Client)},
        "Job": _methods(spool.Job),
        "Functions": {
            name: _parameters(getattr(spool, name))
            for name in spool.__all__
            if inspect.isfunction(getattr(spool, name))
        },
    }[heading]
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## )", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `(\w+)\((.*?)\)` \|", section, re.MULTILINE)
    assert {name for name, _ in rows} == set(calls)
    for name, parameters in rows:
        words = [word for word in parameters.split(", ") if word not in ("*", "")]
        assert [word.partition("=")[0].lstrip("*") for word in words] == calls[name], name


def test_the_asynchronous_client_takes_what_the_client_takes() -> None:
    """Each of its methods has the parameters of the client's, or of the function's."""
    functions = {each.__name__: _parameters(each) for each in (spool.as_completed, spool.wait_all, spool.wait_any)}
    client = {**_methods(spool.Client), "follow": ["job"], **functions}
    for name, parameters in _methods(spool.AsyncClient).items():
        assert parameters == client[name], name


def _of_page() -> str:
    """Return the page without the part about calls of functions if that extra was deleted."""
    text = PAGE.read_text()
    if hasattr(spool, "Executor"):
        return text
    return re.sub(r"^## Calls of functions\n.*?(?=^## )", "", text, flags=re.MULTILINE | re.DOTALL)


def test_the_examples_of_the_page_print_what_it_says(served: Served) -> None:
    """Each program on the page runs after the one before it, and prints the text below it."""
    text = _of_page()
    examples = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(examples) == text.count("```python") > 8
    names: dict[str, object] = {}
    for program, wanted in examples:
        said = StringIO()
        with redirect_stdout(said):
            exec(compile(program, str(PAGE), "exec"), names)
        assert said.getvalue() == wanted, program


@pytest.mark.parametrize("page", ["README.md", "docs/MIGRATE.md"])
def test_the_programs_of_other_pages_run(served: Served, tmp_path: Path, page: str) -> None:
    """As scripts of their own, in a directory of their own."""
    (tmp_path / "train.py").write_text("print('trained')\n")
    programs = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    for number, program in enumerate(each for each in programs if "Executor" not in each or hasattr(spool, "Executor")):
        script = tmp_path / f"script{number}.py"
        script.write_text(program.replace(", gpus=1", ""))
        environment = {**served.environment, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        said = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert said.returncode == 0, said.stderr
        assert said.stdout.count("\n") in (3, 10)


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


@pytest.mark.parametrize("words", [["mypy", "--cache-dir", os.devnull], ["pyright", "--pythonpath", sys.executable]])
def test_the_types_of_the_public_face_hold(words: list[str]) -> None:
    """The type checkers see through the names that are imported when they are used."""
    pytest.importorskip(words[0])
    words = [sys.executable, "-m", *words, "tests/public_types.py"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout


def test_every_public_type_is_known_to_pyright(tmp_path: Path) -> None:
    """It need not infer one, and none depends on the type checker: not in the names, and not in what they lead to."""
    pytest.importorskip("pyright")
    words = [sys.executable, "-m", "pyright", "--verifytypes", "spool", "--ignoreexternal", "--outputjson"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # it asks the first `python` where packages are
    environment = {**os.environ, "PATH": path}
    said = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    symbols = {each["name"]: each for each in json.loads(said.stdout)["typeCompleteness"]["symbols"]}
    names = {f"{home}.{name}" for name in spool.__all__ for home in ("spool", getattr(spool, name).__module__)}
    assert symbols.keys() >= {f"spool.{name}" for name in spool.__all__}
    unknown = [
        f"{name}: {each['diagnostics']}"
        for name, each in symbols.items()
        if (name in names or name.rpartition(".")[0] in names) and (each["isTypeAmbiguous"] or not each["isTypeKnown"])
    ]
    assert not unknown
