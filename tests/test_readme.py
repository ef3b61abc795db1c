"""The README, run as its reader would type it."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
from pathlib import Path

import click
import pytest

from shell import Home, home_of_test
from spool.cli import group
from spool.formats.state import parse_state
from spool.store.reading import read_bytes
from support import ROOT, WHOLE, wait_for

pytestmark = WHOLE  # the pages are about all capabilities

README = (ROOT / "README.md").read_text(encoding="utf-8")
NO_CALLS = ("spool is full", "spool paused")  # reasons
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> list[str]:
    """Return the shell blocks that a reader types in order; not the two commands for those who have nothing yet."""
    text = re.sub(r"<!-- (?:demo|tests) -->\n```sh\n.*?```", "", text, flags=re.DOTALL)
    return re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_every_block_of_the_readme_runs() -> None:
    """All shell blocks, typed into one shell one after the other, succeed and print what they promise."""
    home = Home(home_of_test())
    try:
        numbered = (f"echo '### {number}'\n{block}" for number, block in enumerate(blocks(README)))
        printed = home.sh("\n".join(numbered))
    finally:
        end_dispatcher(home.spool)
    for promise in (
        "hello from hello",
        "hello by hand",
        "did you mean",
        'outcome = "finished"',
        'outcome = "cancelled"',
    ):
        assert promise in printed
    for job in ("hello", "byhand", "train", "collect"):
        runs = sorted((home.spool / "jobs" / job).iterdir())
        assert 'outcome = "finished"' in (runs[-1] / "result.toml").read_text(encoding="utf-8"), job


def end_dispatcher(spool: Path) -> None:
    """End the dispatcher that the first submission started in the background."""
    view = wait_for(lambda: parse_state(read_bytes(str(spool / "state.json")) or b""))
    os.kill(view.pid, signal.SIGTERM)
    wait_for(lambda: not Path(f"/proc/{view.pid}").exists(), what="the dispatcher's end")


def test_the_first_screen_has_the_two_commands() -> None:
    """What spool is and the two commands to try it stand within the first thirty lines, under their markers."""
    head = README.splitlines()[:30]
    for marker in ("<!-- demo -->", "<!-- tests -->"):
        at = head.index(marker)
        assert head[at + 1] == "```sh"
        assert head[at + 3] == "```"


def test_every_verb_that_the_pages_show_exists() -> None:
    """Each `spool VERB` in the README and the docs is a verb of the program."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        typed = re.findall(r"(?:`|^    )spool (?!paused|is full)([a-z]+)\b", text, re.MULTILINE)
        for block in blocks(text):
            typed += re.findall(r"^spool ([a-z]+)\b", block, re.MULTILINE)
        for verb in typed:
            assert verb in group.VERBS, (page.name, verb)


def calls(text: str) -> list[list[str]]:
    """Return the words of each call of spool that a page shows: on a line of its own, in a sentence or in a table."""
    text = text.replace("\\\n", " ")
    fenced = re.findall(r"^```sh.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in fenced for line in re.findall(r"^spool .*", block, re.MULTILINE)]
    printed = re.compile(r"^```text\n.*?^```", re.MULTILINE | re.DOTALL)  # a help has remarks behind its examples
    lines += re.findall(r"^    (spool .*)", printed.sub("", text), re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).replace(r"\|", "|")
    # A verb alone (`spool wait`) is the verb and no call, and "…" leaves something out.
    lines += [code for code in re.findall(r"`(spool\s+[a-z-][^`]*?\s[^`…]+)`", prose) if code not in NO_CALLS]
    return [first_command(line) for line in lines]


def first_command(line: str) -> list[str]:
    """Return the words of the first command of a line of shell, without what it is piped or sent to."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|>&;")
    lexer.whitespace_split = True
    return list(itertools.takewhile(lambda word: not set(word) <= set("|>&;"), lexer))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_call_that_the_pages_show_is_understood(page: Path) -> None:
    """The verb has these options, and takes these arguments."""
    for call in calls(page.read_text(encoding="utf-8")):
        try:
            read(group.spool, call)
        except click.exceptions.Exit:
            continue  # --help
        except click.UsageError as error:
            if isinstance(error, click.BadOptionUsage) and error.option_name == call[-1]:
                continue  # a sentence names an option without a value
            pytest.fail(f"{call}: {error.format_message()}")


def read(command: click.Command, words: list[str], parent: click.Context | None = None) -> None:
    """Read *words*, of which the first names *command*, as it would; click.UsageError if it would refuse them."""
    name, *rest = words
    if rest[:1] == ["--spool"]:
        rest = rest[2:] or ["ls"]
    if not isinstance(command, click.Group):
        command.make_context(name, rest, parent)
        return
    context = click.Context(command, parent, name)
    verb = command.get_command(context, rest[0])
    assert verb is not None, words
    read(verb, rest, context)
