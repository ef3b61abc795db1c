"""The manual pages: there is one for each verb and kind of file, they say what the help says, and roff takes them."""

from __future__ import annotations

import re
import shutil
import subprocess

import click
import pytest

from spool.cli import group, manpages
from spool.formats import config, jobfile, machinefile, reservation, schema
from support import ROOT

MAN = ROOT / "docs" / "man"
PAGES = manpages.pages()


def as_read(path: str, width: int = 80) -> str:
    """Return a page as a reader sees it."""
    words = ["groff", "-man", "-Tutf8", "-P-cbou", f"-rLL={width - 2}n"]
    return subprocess.run(words, input=PAGES[path], capture_output=True, text=True, check=True).stdout


def test_the_pages_of_the_checkout_are_up_to_date() -> None:
    """`python -m spool.cli.manpages --write` has been run after the last change of a help text or a key."""
    stored = {str(path.relative_to(MAN)): path.read_text(encoding="utf-8") for path in MAN.glob("man*/*")}
    stale = sorted(path for path in stored.keys() | PAGES.keys() if stored.get(path) != PAGES.get(path))
    assert stale == [], "run: python -m spool.cli.manpages --write"


def test_the_generated_pages_of_the_documentation_are_up_to_date() -> None:
    """The commands and the keys of the site are those of the program: the same run writes them."""
    for name, text in manpages.references().items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, "run: python -m spool.cli.manpages --write"


def test_every_verb_and_kind_of_file_has_its_page() -> None:
    """And the page of the program names them all."""
    assert {f"man1/spool-{verb}.1" for verb in group.VERBS} < PAGES.keys()
    for kind in schema.KINDS:
        assert f"man5/spool-{kind}.5" in PAGES
        assert f".BR spool\\-{kind} (5)" in PAGES["man1/spool.1"]
    for verb in group.VERBS:
        assert f".BR spool\\-{verb} (1)" in PAGES["man1/spool.1"]


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
@pytest.mark.parametrize("path", PAGES)
def test_groff_takes_a_page_without_a_warning(path: str) -> None:
    """With every warning turned on."""
    done = subprocess.run(
        ["groff", "-man", "-ww", "-z", "-Tutf8"], input=PAGES[path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
def test_mandoc_finds_nothing_but_the_missing_date() -> None:
    """A date would change with every build."""
    for path, text in PAGES.items():
        done = subprocess.run(
            ["mandoc", "-T", "lint", "-W", "warning"], input=text, capture_output=True, text=True, check=False
        )
        assert [line for line in done.stdout.splitlines() if "missing date" not in line] == [], path


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_the_page_of_a_verb_has_its_options_and_examples_as_they_are_typed() -> None:
    """A reader can copy from it: minus signs, tildes, quotes and backslashes are the ASCII ones."""
    text = as_read("man1/spool-submit.1")
    ctx = click.Context(group.spool, info_name="spool")
    command = group.spool.get_command(ctx, "submit")
    assert command is not None
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert re.search(rf"^ +.*{parameter.opts[-1]}\b", text, re.MULTILINE), parameter.opts
    assert "mv ~/.spool/.tmp/train.toml ~/.spool/queued/" in text
    assert "spool submit -c 'sort words | uniq -c > counts'" in text
    assert text.index("Common options") < text.index("Retries") < text.index("Other options")
    assert text.count("When it runs") == 1


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
@pytest.mark.parametrize("kind", schema.KINDS)
def test_the_page_of_a_file_has_every_key(kind: str) -> None:
    """With its type and default."""
    text = as_read(f"man5/spool-{kind}.5", width=200)
    for name, _, default, _ in schema.rows(kind):
        (head,) = re.findall(rf"^ +{re.escape(name.strip('`'))} \(.*$", text, re.MULTILINE)
        assert default.strip("`") in head


@pytest.mark.parametrize("kind", schema.KINDS)
def test_the_example_of_a_file_is_valid(kind: str) -> None:
    """Its reader takes it."""
    text = manpages._EXAMPLES[kind].encode()
    if kind == "config":
        config.parse(text)
    elif kind == "job":
        jobfile.parse(text, name="example")
    elif kind == "machine":
        machinefile.parse(text)
    else:
        reservation.parse(text, name="example", created_at_ns=0)
