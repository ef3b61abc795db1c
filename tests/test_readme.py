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
from spool.store.ownership import this_user
from spool.store.reading import read_bytes
from support import ROOT, WHOLE, wait_for

pytestmark = WHOLE  # the pages are about all capabilities

README = (ROOT / "README.md").read_text(encoding="utf-8")
NO_CALLS = ("spool is full", "spool paused", "spool help all")  # two reasons, and what is no verb
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> list[str]:
    """Return the shell blocks that a reader types in order; not the two commands for those who have nothing yet."""
    text = re.sub(r"<!-- (?:demo|tests) -->\n```sh\n.*?```", "", text, flags=re.DOTALL)
    return re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def plainly(text: str) -> list[str]:
    """Return the lines without widths, and each time, each user and each home as one word."""
    for pattern, word in (
        (r"\b(?:[\d.]+(?:ms|s|m))+\b", "TIME"),
        (rf"{re.escape(os.environ['HOME'])}|/home/anna", "HOME"),
        (rf"\b(?:anna|{re.escape(this_user())})\b", "USER"),
    ):
        text = re.sub(pattern, word, text)
    return [" ".join(line.split()) for line in text.splitlines()]


def test_every_block_of_the_readme_runs() -> None:
    """All blocks, typed into one shell one after the other, succeed; the session prints what the page says."""
    home = Home(home_of_test())
    (session,) = re.findall(r"^```console\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    commands = ""
    for line in re.findall(r"^\$ .*", session, re.MULTILINE):
        if line == "$ spool ls":  # which shows what the dispatcher has seen, and who types takes a moment
            commands += "until spool ls | grep -q dependency; do sleep 0.1; done\n"
        commands += f"printf '%s\\n' {shlex.quote(line)}\n{line[2:]}\n"
    try:
        assert plainly(home.sh(commands)) == plainly(session)
        printed = home.sh("\n".join(blocks(README)))
    finally:
        end_dispatcher(home.spool)
    for promise in ("try 1", "did you mean", 'outcome = "finished"'):
        assert promise in printed
    (result,) = (home.spool / "jobs" / "draw").glob("*/result.toml")
    assert 'outcome = "cancelled"' in result.read_text(encoding="utf-8")


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
        typed = re.findall(r"(?:`|^    )spool (?!paused|is full|help all)([a-z]+)\b", text, re.MULTILINE)
        for block in blocks(text):
            typed += re.findall(r"^spool ([a-z]+)\b", block, re.MULTILINE)
        for verb in typed:
            assert verb in group.VERBS, (page.name, verb)


def calls(text: str) -> list[list[str]]:
    """Return the words of each call of spool that a page shows: on a line of its own, in a sentence or in a table."""
    text = text.replace("\\\n", " ")
    fenced = re.findall(r"^```sh.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in fenced for line in re.findall(r"^spool .*", block, re.MULTILINE)]
    lines += re.findall(r"^\$ (spool .*)", text, re.MULTILINE)
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
