"""A dispatcher imports nothing after its start, and what it loads on demand it tries again."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from served import Served
from spool.dispatcher import service
from spool.executors import Executors

# What a module imports inside a function, and a dispatcher never calls.
NEVER_CALLED = {
    ("spool.dispatcher.loop", "_captured"): "only with `capture` in the configuration, which keeps it from no start",
    ("spool.client.autostart", "unit_for"): "commands look for the unit that starts a dispatcher",
    ("spool.executors.compiled", "build"): "the installation builds the wrapper",
    ("spool.executors.compiled", "main"): "the installation builds the wrapper",
    ("spool.executors.compiled", "_platforms"): "the installation builds the wrapper",
    ("spool.formats.jobfile", "edited"): "commands edit job files",
    ("spool.machine.nvml", "__init__"): "a process of its own asks NVML",
}
ON_DEMAND = {"libtmux", "spool.executors.tmux", "shlex", "json", "_json"}
RECORDER = """
import os, sys
if "dispatch" in open("/proc/self/cmdline").read().split("\\0"):
    class Recorder:
        def find_spec(self, name, path=None, target=None):
            with open(os.environ["IMPORTS"], "a") as file:
                file.write(f"{os.getpid()} {name}\\n")
    sys.meta_path.insert(0, Recorder())
"""


def _inner_imports(source: str) -> Iterator[tuple[str, str]]:
    """Yield each function of a module that imports something, and what."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Import):
                    yield from ((function.name, alias.name) for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module is not None:
                    yield function.name, node.module


def test_all_that_a_pass_can_import_is_loaded_before_the_first() -> None:
    """Every import inside a function of a module that a dispatcher has loaded is of a module that is loaded too."""
    program = """
import json, sys
from spool.dispatcher import service
service.preload()
ours = {name: module.__file__ for name, module in sys.modules.items()
        if name.split(".")[0] == "spool" and module.__file__}
print(json.dumps([ours, sorted(sys.modules)]))
"""
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    ours, loaded = json.loads(said)
    assert len(ours) > 80
    found = [
        (module, function, imported)
        for module, path in ours.items()
        for function, imported in _inner_imports(Path(path).read_text(encoding="utf-8"))
        if imported not in loaded and (module, function) not in NEVER_CALLED
    ]
    assert found == []


def test_a_dispatcher_imports_nothing_in_all_its_life(tmp_path: Path) -> None:
    """Jobs of all kinds, errors, reservations, hooks and a new configuration import nothing but what is on demand."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(RECORDER)
    record = tmp_path / "imports"
    path = os.pathsep.join([str(tmp_path / "hook"), str(Path(__file__).parents[2] / "src")])
    with Served(tmp_path / "spool", {"PYTHONPATH": path, "IMPORTS": str(record)}) as served:
        (served.root / "config.toml").write_text("cpus = 4\n")
        served.start()
        served.looked()
        before = len(record.read_text().splitlines())
        assert before > 100
        served.drop("plain", "true", memory="100M", project="p", tags=["t"], group="g", group_limit=1)
        served.drop("fails", "exit 3", retry={"max": 1}, stdout="%n.out", prolog="true", epilog="true")
        served.drop("typo", b'comand = "true"\n')
        served.drop("broken", b'command = "true"\nx = [[\n\xff')
        served.drop("many", "echo {i}", matrix={"i": [1, 2]})
        served.drop("limited", "sleep 1000", time_limit="2s", signal="USR1@1s")
        served.drop("cancelled", "sleep 1000")
        served.pid("cancelled")
        served.path("running", "cancelled").unlink()
        served.drop("after", "true", depends_on=["plain"])
        (served.root / "reservations" / "good.toml").write_text("gpus = 1\nstart = 2100-01-01T10:00:00Z\n")
        (served.root / "reservations" / "bad.toml").write_text("gpus = \n")
        served.drop("shown", "true", executor="tmux")
        served.wait_done("plain", "fails", "many_0", "many_1", "limited", "cancelled", "after")
        for name in ("typo", "broken"):
            served.until((served.root / "queued" / f"{name}.toml.error").exists, "a complaint")
        (served.root / "config.toml").write_text("cpus = 4\nbogus = 3\n")
        served.until(lambda: "bogus" in str(served.state()["problems"]), "a problem with the configuration")
        (served.root / "hooks").mkdir()
        hook = served.root / "hooks" / "started"
        hook.write_text("#!/bin/sh\nexit 0\n")
        hook.chmod(0o700)
        (served.root / "config.toml").write_text('cpus = 4\n[defaults]\nmemory = "10M"\n')
        served.until(lambda: "bogus" not in str(served.state()["problems"]), "the end of the problem")
        served.drop("hooked", "true")
        served.wait_done("hooked")
        lines = [line.split() for line in record.read_text().splitlines()[before:]]
        found = {name for pid, name in lines if pid == str(served.process.pid)}
        assert {name for name in found if not {name, name.split(".")[0]} & ON_DEMAND} == set()


class _Failing:
    """A finder before all others that fails for one package as a file system does."""

    def __init__(self, package: str, error: Exception) -> None:
        self.package, self.error, self.asked = package, error, 0

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name == self.package:
            self.asked += 1
            raise self.error
        return None


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(5, "Input/output error"), "Input/output error"),
        (ImportError("dlopen: cannot map"), "dlopen: cannot map"),
        (ModuleNotFoundError("No module named 'libtmux'", name="libtmux"), "libtmux is not installed"),
    ],
)
def test_an_executor_that_cannot_be_imported_is_told_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    """An import that fails is a problem in words, and the next question imports it after all."""
    for name in [name for name in sys.modules if name == "spool.executors.tmux"]:
        monkeypatch.delitem(sys.modules, name)
    finder = _Failing("spool.executors.tmux", error)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    executors = Executors()
    said = executors.problem("tmux")
    assert words in said
    assert executors.problems() == [said]
    assert executors.unloaded
    assert executors.problem("tmux") == said
    assert finder.asked == 1
    finder.package = "none"
    executors.ask_again()
    assert not executors.unloaded
    assert words not in (executors.problem("tmux") or "")


def test_a_search_that_failed_for_a_while_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that could not be read when a module was looked for is looked at again at the next attempt."""
    package = tmp_path / "packages"
    package.mkdir()
    (package / "spool_test_needed.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(package)])
    monkeypatch.setattr(service, "PRELOADED", ("spool_test_needed",))
    package.rename(tmp_path / "away")  # as a mount that is gone: Python remembers that there is no such directory
    with pytest.raises(ImportError):
        service.preload()
    (tmp_path / "away").rename(package)
    service.preload()
    assert sys.modules.pop("spool_test_needed")
