"""The command line as a whole: help, errors, exit codes, completion."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import click
import pytest

from calling import Command, put_job, spawned, start
from shell import Home, home_of_test
from spool.cli import group, info
from spool.store.spool import Spool
from support import ROOT

VERBS = [verb for _, verbs in group.SECTIONS for verb in verbs]
FISH = shutil.which("fish")
PARTS = [f"reserve {part}" for part in info.reserve.commands]


@pytest.mark.parametrize("verb", [*VERBS, *PARTS])
def test_every_verb_explains_itself(spool: Command, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line of its help is that of the list of verbs, and no line is too long for a terminal of 80 columns.

    What stands behind `By hand:` is on one line, or below it as it was set: it can be pasted.
    """
    monkeypatch.setenv("COLUMNS", "80")
    said = spool(*verb.split(), "--help")
    lines = said.out.splitlines()
    assert (said.code, [line for line in lines if len(line) > 80]) == (0, [])
    assert lines[0].startswith(f"Usage: spool {verb}")
    for first, following in itertools.pairwise(lines):
        if first.startswith("  By hand"):
            assert following.startswith("    ") if first.endswith(":") else not following
    if verb in VERBS:
        command = group.spool.get_command(click.Context(group.spool), verb)
        assert command is not None
        assert (command.help or "").split()[0] == group.VERBS[verb].split()[0]


def test_help_shows_how_it_is_done_by_hand(spool: Command) -> None:
    """Command, meaning and verb stand in columns that fit a narrow terminal."""
    lines = spool("--help").out.splitlines()
    assert all(len(line) <= 80 for line in lines)


def test_help_lists_every_verb_and_imports_none(spool: Command) -> None:
    """The first list has at most twenty, that of `help all` is whole, and printing it is quick."""
    everything, first = spool("help", "all").out, spool("--help").out
    assert first == spool("help").out
    assert all(f"  {verb} " in everything for verb in VERBS)
    titles = {title: list(verbs) for title, verbs in group.SECTIONS}
    others = [verb for title in (group.MORE, group.ADMIN) for verb in titles.pop(title)]
    assert all(f"  {verb} " in first for verbs in titles.values() for verb in verbs)
    assert not [verb for verb in others if f"\n  {verb} " in first]
    assert len(VERBS) - len(others) <= 20
    assert len(VERBS) - len(dict(group.SECTIONS)[group.ADMIN]) <= 28
    code = "import sys; from spool.cli import group; group.run(['--help']); print('spool.cli.ls' in sys.modules)"
    done = spawned(program=("-c", code), check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_what_runs_a_spool_is_below_admin_too(spool: Command, spool_root: Path) -> None:
    """Each such verb is itself there, with its options, and its help says so."""
    assert spool("admin", "check", "nosuch.toml").out == spool("check", "nosuch.toml").out
    for verb in dict(group.SECTIONS)[group.ADMIN]:
        assert f"  spool admin {verb} " in spool("admin").out
        assert f"Also: `spool admin {verb}`" in spool(verb, "--help").out
    words = ["ls", "--plan", "--json"]
    assert json.loads(spool(*words).out).keys() == json.loads(spool("plan", "--json").out).keys()
    assert spool("ls", "--plan", "--all").code == 2


def test_a_disk_that_fails_is_one_line_and_a_bug_is_a_traceback(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the world does to us is told in a line with code 5; what we did wrong is shown whole."""
    put_job(spool_root, "a")
    monkeypatch.setattr("spool.cli.ls.list_jobs", _raising(OSError(28, "No space left on device", "/x")))
    said = spool("ls")
    assert (said.code, said.err.count("\n"), "cannot use /x: " in said.err) == (5, 0, True)
    monkeypatch.setattr("spool.cli.ls.list_jobs", _raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        spool("ls")


def _raising(error: Exception) -> object:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


def test_a_reader_that_goes_away_is_no_error(spool_root: Path) -> None:
    """`spool ls | head -1` prints no traceback."""
    for at in range(1500):  # more than a pipe holds
        put_job(spool_root, f"j{at}")
    process = start("ls")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    process.wait()
    process.stderr.close()
    assert "Traceback" not in err
    assert "Exception" not in err


@pytest.mark.skipif(FISH is None, reason="there is no fish here")
def test_fish_completes_with_descriptions() -> None:
    """A verb with what it does."""
    home = Home(home_of_test())
    home.run("spool", "init")
    script = home.run("spool", "completion", "fish").stdout

    def completed(words: str) -> str:
        return home.run(FISH or "", "--no-config", "-c", f"{script}\ncomplete -C {words!r}").stdout

    assert completed("spool req") == f"requeue\t{group.VERBS['requeue']}\n"


def test_names_complete_where_the_verb_can_use_them(spool_root: Path) -> None:
    """`spool release t<TAB>` offers held jobs, `spool show t<TAB>` all."""
    put_job(spool_root, "train", place="held")
    put_job(spool_root, "test", place="done")

    def completed(words: str) -> set[str]:
        asked = {"_SPOOL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        done = spawned(env=os.environ | {"PYTHONPATH": str(ROOT / "src")} | asked)
        return {line.split(",")[1] for line in done.stdout.splitlines()}

    assert completed("spool release t") == {"train"}
    assert completed("spool show t") == {"train", "test"}
    assert completed("spool rel") == {"release"}


def test_a_spool_may_be_named_by_a_link(spool: Command, spool_root: Path, tmp_path: Path) -> None:
    """It is made where the link leads; what jobs are told is its real path, what the user is told the one he gave."""
    link, real = tmp_path / "link", tmp_path / "real"
    link.symlink_to(real)
    said = spool("--spool", link, "ls")
    assert (said.code, str(link) in said.err) == (0, True)
    assert spool("--spool", link, "init").out == f"created a spool in {link}\n"
    assert (real / "queued").is_dir()
    assert Spool.open(str(link)).root == str(real)
