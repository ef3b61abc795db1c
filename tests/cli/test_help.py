"""The help of the verbs with many options: in sections, what most people look for first."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from calling import Command
from spool.cli.joboptions import COMMON_TITLE, OPTIONS
from spool.formats.keys import COMMON, SECTIONS

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
