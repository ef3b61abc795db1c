"""The public face: what `import spool` gives a program."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import spool
from served import Served
from spool.core.errors import InvalidValue
from support import ROOT

PAGE = ROOT / "docs" / "PYTHON.md"


@pytest.fixture
def client(spool_root: Path) -> spool.Client:
    """Give a client of an empty spool that nobody serves."""
    (spool_root / "config.toml").write_text("autostart = false\n")
    return spool.Client()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Give a spool with a dispatcher."""
    with Served(tmp_path / "spool") as found:
        monkeypatch.setenv("SPOOL_DIR", str(found.root))
        yield found.start()


def test_importing_spool_imports_nothing_else() -> None:
    """So that `spool submit`, and every program that imports it, pays for what it uses."""
    text = "import sys, spool; print([name for name in sys.modules if name.startswith('spool')])"
    said = subprocess.run([sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert said.stdout.strip() == "['spool']"


def test_what_is_public_is_there_and_typed() -> None:
    """Each name can be had, stands in the stub for type checkers, and no other name does."""
    stub = (ROOT / "src" / "spool" / "__init__.pyi").read_text()
    assert re.findall(r" as (\w+)$", stub, re.MULTILINE) != []
    assert sorted(re.findall(r" as (\w+)$", stub, re.MULTILINE)) == spool.__all__
    for name in spool.__all__:
        assert inspect.isclass(getattr(spool, name))
    with pytest.raises(AttributeError, match="no attribute 'Clients'"):
        spool.Clients  # type: ignore[attr-defined]  # noqa: B018


def test_the_page_has_every_call_with_its_parameters() -> None:
    """A row for each method of the client, and no other."""
    calls = {"Client": inspect.signature(spool.Client)}
    for name, method in inspect.getmembers(spool.Client, inspect.isfunction):
        if not name.startswith("_"):
            calls[name] = inspect.signature(method)
    rows = re.findall(r"^\| `(\w+)\((.*?)\)` \|", PAGE.read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == set(calls)
    for name, parameters in rows:
        stated = [word.partition("=")[0].lstrip("*") for word in parameters.split(", ") if word != "*"]
        assert stated == [each for each in calls[name].parameters if each != "self"], name


def test_the_page_s_program_runs(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """With a dispatcher it prints what its comments say."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(program, str(PAGE), "exec"), {})
    said = capsys.readouterr().out
    assert said.startswith("failed 3\nhello\n")
    assert "greet failed exit code 3" in said
    assert "later held" in said


def test_the_types_of_the_public_face_hold() -> None:
    """The type checker sees through the names that are imported when they are used."""
    pytest.importorskip("mypy")
    words = [sys.executable, "-m", "mypy", "--cache-dir", os.devnull, "tests/public_types.py"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout


def test_a_job_that_waits_is_held_released_listed_explained_and_cancelled(
    client: spool.Client, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call does what the command of its name does, and returns what has come of it."""
    monkeypatch.chdir(spool_root)
    assert client.submit(["true"], name="a", cpus=1, tags=["x"]) == "a"
    assert (spool_root / "queued" / "a.toml").exists()
    assert client.hold("a").kind == "held"
    assert [reason.code for reason in client.why("a").reasons] == ["held"]
    assert client.release("a").place == "held"
    assert client.wait("a", timeout_s=0) is None
    assert [(row.name, row.state) for row in client.jobs(spool.JobFilter(tag="x")).rows] == [("a", "queued")]
    assert client.jobs().unserved
    assert [change.kind for change in client.cancel("a", "why")] == ["cancelled"]
    end = client.wait("a", timeout_s=30)
    assert end is not None
    assert end.outcome is spool.State.CANCELLED


def test_a_name_is_taken_until_its_job_is_replaced(client: spool.Client, spool_root: Path) -> None:
    """An error says where the other one is."""
    client.submit("true", name="a")
    with pytest.raises(spool.SpoolError, match="cannot submit job a: a job of that name is in queued/"):
        client.submit("false", name="a")
    client.submit("false", name="a", held=True, replace=True)
    assert not (spool_root / "queued" / "a.toml").exists()
    assert "false" in (spool_root / "held" / "a.toml").read_text()


def test_what_can_be_expected_to_fail_is_an_error_of_spool(client: spool.Client, tmp_path: Path) -> None:
    """No such job, no output yet, a key that there is not, a name that cannot be, no spool, no place for one."""
    with pytest.raises(spool.NoSuchJob):
        client.wait("none")
    with pytest.raises(spool.NoSuchJob):
        client.cancel("none")
    client.submit("true", name="a")
    with pytest.raises(spool.SpoolError, match="it has not run yet"):
        client.output("a")
    with pytest.raises(spool.InvalidJob, match="cpu"):
        client.submit("true", name="b", cpuz=1)
    with pytest.raises(InvalidValue, match="begins with a letter or a digit"):
        client.submit("true", name=".b")
    with pytest.raises(spool.SpoolUnusable):
        spool.Client(tmp_path / "elsewhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(spool.SpoolUnusable, match="cannot make a spool"):
        spool.Client(tmp_path / "file" / "spool", make=True)
    made = spool.Client(tmp_path / "new", make=True)
    assert made.root == str(tmp_path / "new")
    assert made.jobs().rows == ()


def test_a_dry_run_says_what_would_be_done_and_keys_change_a_job_that_runs_again(
    client: spool.Client, spool_root: Path
) -> None:
    """Nothing is changed by the first; the second keeps the rest of the file, and refuses what is not valid."""
    done = spool_root / "done" / "a.toml"
    done.write_text('# mine\ncommand = "true"\ntime_limit = "1h"\n')
    (spool_root / "jobs" / "a" / "1").mkdir(parents=True)
    assert client.requeue("a", dry_run=True, cpus=2).kind == "would be queued again"
    assert done.exists()
    with pytest.raises(spool.InvalidJob):
        client.requeue("a", cpus=-2)
    assert done.exists()
    assert client.requeue("a", cpus=2, time_limit=None).kind == "queued again"
    assert not done.exists()
    assert (spool_root / "queued" / "a.toml").read_text() == '# mine\ncommand = "true"\ncpus = 2\n'
    assert client.hold("a", dry_run=True).kind == "would be held"
    assert [change.kind for change in client.cancel("a", dry_run=True)] == ["would be cancelled"]
    assert (spool_root / "queued" / "a.toml").exists()
    client.hold("a")
    assert client.release("a", dry_run=True).kind == "would be released"
    with pytest.raises(spool.SpoolError, match="it is held"):
        client.suspend("a")


def test_a_job_is_suspended_and_goes_on(served: Served) -> None:
    """From a program as from the command line."""
    client = spool.Client()
    client.submit("sleep 100", name="long")
    served.until(lambda: served.places("long") == ["running"], "a run")
    assert client.suspend("long", dry_run=True).kind == "would be suspended"
    assert client.suspend("long", "demo").kind == "suspended"
    served.until(lambda: "demo" in served.reason("long"), "a suspended job")
    (row,) = client.jobs().rows
    assert row.suspended_at_ns is not None
    assert client.go_on("long").kind == "continued"
    client.cancel("long")
    served.wait_done("long")
