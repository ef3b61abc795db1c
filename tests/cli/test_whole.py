"""The command line as a whole: help, errors, exit codes, completion, and what a command imports."""

from __future__ import annotations

import itertools
import json
import pkgutil
import re
import shutil
from importlib import import_module
from pathlib import Path

import click
import pytest

from calling import Command, put_job, spawned
from shell import Home, home_of_test
from spool import cli
from spool.cli import group, info, render, wait
from spool.cli.joboptions import COMMON_TITLE, OPTIONS
from spool.core.model import OUTCOMES, State
from spool.formats.keys import COMMON, SECTIONS
from spool.query.machine import GpuState
from spool.query.selection import UNSUCCESSFUL
from spool.query.snapshot import ReservationState
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
    assert all(len(line) <= 80 for line in everything.splitlines())
    code = "import sys; from spool.cli import group; group.run(['--help']); print('spool.cli.ls' in sys.modules)"
    done = spawned(program=("-c", code), check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_every_command_is_a_verb_or_a_part_of_one() -> None:
    """A command that the table of verbs does not name could not be called."""
    modules = [vars(import_module(each.name)) for each in pkgutil.iter_modules(cli.__path__, "spool.cli.")]
    made = {each for module in modules for each in module.values() if isinstance(each, click.Command)}
    verbs = {group.spool.get_command(click.Context(group.spool), verb) for verb in VERBS}
    parts = {part for each in verbs if isinstance(each, click.Group) for part in each.commands.values()}
    assert made - verbs - parts == {group.spool}


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


@pytest.mark.skipif(FISH is None, reason="there is no fish here")
def test_fish_completes_with_descriptions() -> None:
    """A verb with what it does."""
    home = Home(home_of_test())
    home.run("spool", "init")
    script = home.run("spool", "completion", "fish").stdout

    def completed(words: str) -> str:
        return home.run(FISH or "", "--no-config", "-c", f"{script}\ncomplete -C {words!r}").stdout

    assert completed("spool req") == f"requeue\t{group.VERBS['requeue']}\n"


def test_a_spool_may_be_named_by_a_link(spool: Command, spool_root: Path, tmp_path: Path) -> None:
    """It is made where the link leads; what jobs are told is its real path, what the user is told the one he gave."""
    link, real = tmp_path / "link", tmp_path / "real"
    link.symlink_to(real)
    said = spool("--spool", link, "ls")
    assert (said.code, str(link) in said.err) == (0, True)
    assert spool("--spool", link, "init").out == f"created a spool in {link}\n"
    assert (real / "queued").is_dir()
    assert Spool.open(str(link)).root == str(real)


def test_every_state_is_drawn_and_every_end_has_an_exit_code() -> None:
    """No member of State is without a style and an exit code, nor an outcome without a colour of its own."""
    assert [state for state in State if not render.style_of(state)] == [State.QUEUED]
    assert set(info._STYLES) == set(ReservationState)
    assert set(info._GPU_STYLES) == set(GpuState)
    assert len({render.colour_of(state) for state in OUTCOMES}) == len(OUTCOMES)
    assert render.colour_of("a word of a later version") == render.GREY
    assert [state for state in State if wait.code_of(state, None) == 0] == [State.FINISHED]
    assert wait.code_of(State.FAILED, 7) == 7
    assert len({wait.code_of(state, 7) for state in OUTCOMES}) == len(OUTCOMES)


def test_the_page_names_the_ends_that_are_requeued_as_failed() -> None:
    """`spool requeue --failed` takes each outcome but success and a user's wish, and the page lists them."""
    text = (ROOT / "docs" / "OPERATIONS.md").read_text(encoding="utf-8")
    sentence = text.partition("`spool requeue --failed` runs again")[2].partition(";")[0]
    assert set(re.findall(r"`(\w+)`", sentence)) == UNSUCCESSFUL == set(OUTCOMES) - {State.FINISHED, State.CANCELLED}


MOST = {"ls": 57, "stats": 31, "show a": 68, "why a": 85}
"""How many modules of ours a command may import; a lower number is taken down here.

No dispatcher runs, so that lists make the rows of jobs themselves as one would; they load nothing of the machine.
"""


@pytest.mark.parametrize("words", MOST)
def test_a_command_imports_what_it_shows(spool_root: Path, words: str) -> None:
    """A list needs no planner, sums over the history need no jobs, and no command needs what it does not show."""
    (spool_root / "config.toml").write_text("autostart = false\n")
    (spool_root / "held" / "a.toml").write_text('command = "true"\n')
    code = (
        "import sys; from spool.cli.main import run;"
        f"code = run({words.split()!r});"
        "print(*(name for name in sys.modules if name.startswith('spool')), file=sys.stderr); sys.exit(code)"
    )
    done = spawned(program=("-c", code), check=True)
    assert len(done.stderr.splitlines()[-1].split()) <= MOST[words], done.stderr


LONGEST = 70  # lines at 80 columns


def sections(text: str) -> dict[str, str]:
    """Return what stands under each title of a help."""
    parts = re.split(r"^(\S.*):\n", text[text.index(f"{COMMON_TITLE}:") :], flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("verb", ["submit", "run", "edit"])
def test_the_help_has_sections_and_the_common_options_come_first(
    spool: Command, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each option of a key stands once: the common ones in the first section, the others under the title of theirs.

    Those that few need are listed by `--help all` alone, and the others by both.
    """
    monkeypatch.setenv("COLUMNS", "80")
    found, brief = sections(spool(verb, "--help", "all").out), spool(verb, "--help").out
    for option in filter(lambda option: option.flags, OPTIONS):
        assert bool(re.search(rf"^  .*{option.flags[-1]}(?![\w-])", brief, re.MULTILINE)) is not option.rare
    assert list(found) == [COMMON_TITLE, *(title for title, _ in SECTIONS), "Other options"]
    home = {key.name: title for title, keys in SECTIONS for key in keys} | dict.fromkeys(COMMON, COMMON_TITLE)
    for option in filter(lambda option: option.flags, OPTIONS):
        line = re.compile(rf"^  (?:--?[\w-]+(?:, | / ))*{option.flags[-1]}(?![\w-])", re.MULTILINE)
        where = [title for title, text in found.items() if line.search(text)]
        assert where == [home[option.key.partition(".")[0]]], option.flags


def test_the_help_of_submit_is_no_longer_than_it_has_to_be(spool: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns; and nothing that is no option stands among them."""
    monkeypatch.setenv("COLUMNS", "80")
    said = spool("submit", "--help").out
    assert len(said.splitlines()) <= LONGEST
    assert "COMMAND..." not in said.partition(COMMON_TITLE)[2]


@pytest.mark.parametrize("kind", ["job", "config", "reservation"])
def test_check_prints_the_first_line_that_an_editor_understands(spool: Command, kind: str) -> None:
    """It names a file that is there, wherever spool is installed."""
    said = spool("check", "--schema", kind).out
    path = Path(said.removeprefix("#:schema ").strip())
    assert path.is_absolute()
    assert json.loads(path.read_text())["title"]
