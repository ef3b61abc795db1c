"""With `[capture]`, each run says which code it began with."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from extras.capture.test_code import git, pytestmark
from extras.capture.test_code import tree as committed
from served import HOUR_NS, LOOKS, Served
from spool.formats import config
from support import wait_for
from test_examples import configure as configure_example
from test_examples import folder
from test_examples import served as example_spool

__all__ = ["committed", "pytestmark"]

EXECUTORS = ("process", "sh", "tmux")


def test_nothing_is_captured_unless_the_configuration_asks_for_it() -> None:
    """By default that is nothing at all; the table of earlier versions means what it meant, and is told."""
    assert [config.parse(text).part("capture") for text in (b"", b"capture = false", b"capture = true")] == [
        None, None, True,
    ]  # fmt: skip
    found = config.parse(b'[capture]\ngit = true\ndiff = "1M"\n')
    assert found.part("capture") is True
    assert config.parse(b"[capture]\ngit = false\n").part("capture") is None
    assert all("write capture = true instead" in each for each in found.advice)


@pytest.fixture
def tree(committed: Path) -> Path:
    """Give a work tree with one commit and a change."""
    (committed / "a").write_text("two\n")
    return committed


def path_before(directory: Path, program: str, text: str) -> str:
    """Put a script where it is found instead of a program of that name, and return the PATH."""
    directory.mkdir()
    (directory / program).write_text(text)
    (directory / program).chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


def configure(served: Served) -> None:
    """Write the configuration."""
    (served.root / "config.toml").write_text("cpus = 4\ncapture = true\n")
    served.changes[LOOKS] = HOUR_NS


def captured(served: Served, name: str, run: int = 1) -> dict[str, Any]:
    """Return what was captured."""
    return tomllib.loads(served.record(name, "capture.toml", run) or "")


def inodes(served: Served, name: str, run: int = 1) -> set[int]:
    """Return the files of a capture."""
    return {path.stat().st_ino for path in (served.root / "jobs" / name / str(run)).glob("capture.*")}


def test_a_run_has_the_commit_and_the_diff_that_it_began_with(served: Served, tree: Path) -> None:
    """What the job itself changes is not in it; the next run has that."""
    configure(served)
    served.start()
    served.completes("train", "cat a; echo three > a", workdir=str(tree))
    assert (served.log("train"), served.outcome("train")) == ("two\n", "finished")
    found = captured(served, "train")
    assert found["git"]["commit"] == git(tree, "rev-parse", "HEAD")
    assert (found["git"]["top"], found["git"]["changed"], found["git"]["diff"]) == (str(tree), 1, "whole")
    assert "+two" in (served.record("train", "capture.diff") or "")
    assert {"path", "packages"} <= found["python"].keys()
    served.move("train", "done", "queued")
    served.wait_outcome("train", 2)
    assert "+three" in (served.record("train", "capture.diff", 2) or "")
    shown = served.spool("show", "train")
    assert f"commit {found['git']['commit'][:12]}" in " ".join(shown.stdout.split())
    runs = json.loads(served.spool("show", "train", "--json").stdout)["runs"]
    assert runs[0]["capture"]["git"]["commit"] == found["git"]["commit"]
    assert not any(".capture." in entry for entry in os.listdir(served.root / ".tmp") if served.process is None)


def test_each_task_of_an_array_has_the_code_that_it_begins_with(served: Served, tree: Path) -> None:
    """Also under a dispatcher that came later, and when one runs again."""
    configure(served)
    served.start()
    text = "[ {index} = 0 ] || exit 0; until [ -e ../go ]; do sleep 0.02; done; [ $SPOOL_ATTEMPT = 2 ]"
    served.drop("s", text, array="0-2%1", workdir=str(tree), retry={"max": 1})
    served.until(lambda: served.record("s_0", "jid"), "the first task")
    (tree / "a").write_text("changed\n")
    served.restart()
    (tree.parent / "go").touch()
    served.wait_done("s")
    assert "+two" in (served.record("s_0", "capture.diff") or "")
    assert "+changed" in (served.record("s_0", "capture.diff", 2) or "")
    assert "+changed" in (served.record("s_2", "capture.diff") or "")


@pytest.mark.executors("process")
def test_what_is_no_work_tree_starts_all_the_same(served: Served) -> None:
    """The record says why there is no commit; a dispatcher that leaves when it is idle waits for the answer."""
    configure(served)
    served.drop("plain", "true", workdir=str(served.root.parent))
    served.drop("gone", "true", workdir="/nowhere/at/all")
    assert served.run() == 0
    assert (served.outcome("plain"), served.outcome("gone")) == ("finished", "failed")
    assert "not a git repository" in captured(served, "plain")["problem"]
    assert "No such file" in captured(served, "gone")["problem"]


@pytest.mark.executors("process")
def test_a_git_that_hangs_holds_up_its_own_start_alone_and_not_for_long(
    tmp_path: Path, tree: Path, executor: str
) -> None:
    """Meanwhile ends are recorded and the reason is said; a killed dispatcher captures again."""
    path = path_before(tmp_path / "bin", "git", f"#!/bin/sh\necho >> {tmp_path}/asked\nexec sleep 100\n")
    with Served(tmp_path / "spool", {"PATH": path}, executor) as served:
        served.start()
        served.drop("before", "until [ -e ../go ]; do sleep 0.02; done", workdir=str(tree))
        served.until(lambda: served.record("before", "jid"), "its start")
        configure(served)
        served.until(lambda: "has changed" in served.said(), "the configuration")
        served.drop("slow", "true", workdir=str(tree))
        served.wait_reason("slow", "its code is being captured")
        assert served.spool("why", "slow").stdout.startswith("slow: capture: ")
        wait_for((tmp_path / "asked").exists, what="git")
        served.restart()
        served.wait_reason("slow", "its code is being captured")
        (tmp_path / "go").touch()
        served.wait_done("before")
        assert served.places("slow") == ["queued"]
        served.wait_done("slow")
        assert captured(served, "slow")["problem"]
        assert served.runs("slow") == [1]


@pytest.mark.executors("process")
def test_starts_in_one_tree_share_a_capture_and_none_is_left_over(served: Served, tree: Path) -> None:
    """Many jobs at once ask git once; a capture that is not wanted any more goes away."""
    configure(served)
    for number in range(12):
        served.drop(f"j{number}", "true", workdir=str(tree), cpus=0)
    served.start()
    served.wait_done(*(f"j{number}" for number in range(12)))
    assert len({frozenset(inodes(served, f"j{number}")) for number in range(12)}) <= 2
    wait_for(lambda: not [name for name in os.listdir(served.root / ".tmp") if ".capture." in name], what="tidying")


@pytest.mark.executors("process")
def test_without_capture_nothing_is_asked_or_kept(served: Served, tree: Path) -> None:
    """No helper runs, and the metadir has no such record."""
    served.serves("cpus = 4\ncapture = false\n")
    served.completes("plain", "true", workdir=str(tree))
    assert not inodes(served, "plain")
    assert served.process is not None
    children = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text().split()
    assert not any(b"commands" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children)


@pytest.fixture
def ran(served: Served, tree: Path) -> Served:
    """Give a spool with two runs of a job, with other code each."""
    configure(served)
    served.start()
    served.drop(
        "train", 'cat a "$0"; echo "loss = 1" > $SPOOL_METADIR/metrics', workdir=str(tree), env={"A": f"{tree}/a"}
    )
    served.wait_done("train")
    git(tree, "commit", "-qam", "two")
    (tree / "a").write_text("three\n")
    served.drop("train", "cat a $A; exit 3", workdir=str(tree), env={"A": f"{tree}/a"})
    served.wait_outcome("train", 2)
    return served


@pytest.mark.executors("process")
def test_diff_says_what_differs_between_two_runs(ran: Served, tree: Path) -> None:
    """What is the same is left out; a run against itself, and one that is not there, are answered."""
    said = json.loads(ran.spool("diff", "train/1", "train", "--json").stdout)
    assert (said["one"], said["other"]) == ("train/1", "train/2")
    found = {(each["section"], each["key"]): (each["one"], each["other"]) for each in said["differences"]}
    commits = tuple(captured(ran, "train", run)["git"]["commit"] for run in (1, 2))
    assert found["code", "commit"] == commits
    assert found["outcome", "state"] == ("finished", "failed")
    assert found["metrics", "loss"] == ("1", None)
    assert ("file", "command") in found
    assert ("file", "workdir") not in found
    assert not {key for section, key in found if section in ("machine", "environment", "python", "packages")}
    assert any(f"git -C {tree} diff {commits[0][:12]} {commits[1][:12]}" in note for note in said["notes"])
    assert "do not differ" in ran.spool("diff", "train/1", "train/1").stdout
    assert "finished" in ran.spool("diff", "train/1", "train/2").stdout
    assert ran.spool("diff", "train/1", "train/").returncode == 0


@pytest.mark.executors("process")
def test_diff_shows_the_part_of_long_values_that_differs(served: Served) -> None:
    """Two command lines that differ in their last options read differently."""
    for name, rate in (("one", "0.1"), ("two", "0.25")):
        served.drop(name, f"true {'--option with a value ' * 9} --lr {rate} {'--more' * 9}")
    served.run()
    said = served.spool("diff", "one", "two").stdout
    assert "--lr 0.1 --more" in said
    assert "--lr 0.25 --more" in said
    assert max(map(len, said.splitlines())) < 120


@pytest.mark.executors("process")
def test_diff_does_not_call_unknown_what_differs(ran: Served) -> None:
    """A run that never started has no code to compare, a job that waits no run; values read as in the file."""
    ran.drop("never", ["a b", "c"], requeue=False, place="held")
    ran.move("never", "held", "done")
    ran.wait_outcome("never")
    said = json.loads(ran.spool("diff", "never", "train", "--json").stdout)
    assert not {"code", "python", "packages", "environment"} & {each["section"] for each in said["differences"]}
    assert not {"kernel", "driver"} & {each["key"] for each in said["differences"]}
    assert said["notes"]
    assert not any("capture = true" in note for note in said["notes"])
    values = {each["key"]: each["one"] for each in said["differences"] if each["section"] == "file"}
    assert (values["command"], values["requeue"]) == ('["a b", "c"]', "false")


@pytest.mark.executors("process")
def test_a_run_from_a_terminal_runs_again_without_one(served: Served) -> None:
    """Its terminal is gone, so the new job does not ask for it, and says so."""
    served.start()
    directory = served.root / "jobs" / "shell" / "1"
    directory.mkdir(parents=True)
    (directory / "job.toml").write_text('command = "echo done"\nterminal = "spool-here-1-0"\n')
    done = served.spool("rerun", "shell/1")
    assert done.stdout == "shell-2\n", done.stderr
    assert "shell-2" in done.stderr
    served.wait_done("shell-2")
    assert served.log("shell-2") == "done\n"


@pytest.mark.executors("process")
def test_a_rerun_has_the_file_of_its_run_and_the_code_of_now(ran: Served, tree: Path) -> None:
    """Whatever the job has become since."""
    (tree / "a").write_text("later\n")
    assert "cat a $A; exit 3" in ran.spool("rerun", "train/2", "--dry-run").stdout
    assert ran.spool("rerun", "train/1", "--name", "plain").stdout == "plain\n"
    ran.wait_done("plain")
    assert ran.log("plain").startswith("later\n")


def test_an_earlier_run_is_run_again_as_it_was(tmp_path: Path) -> None:
    """With the configuration of the page, `diff` names what has changed, and the patch makes the run's code again."""
    with example_spool(tmp_path / "home") as home:
        example = folder(home, "capture")
        configure_example(home, example / "README.md")
        output = home.run("/bin/sh", "again.sh", cwd=example).stdout
        assert re.search(r"loss +0\.5 +0\.4", output)
        assert output.endswith("the loss is 0.4\n")
