"""The site: its navigation has every page, and what the pages for beginners, agents and comparers promise is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from shell import Home, home_of_test
from spool.formats.state import parse_state
from spool.store.reading import read_bytes
from support import ROOT, WHOLE
from test_readme import blocks, end_dispatcher

pytestmark = WHOLE  # the pages are about all capabilities

yaml = pytest.importorskip("yaml")
DOCS = ROOT / "docs"
COMPARISON = (DOCS / "COMPARISON.md").read_text(encoding="utf-8")
if not (ROOT / "mkdocs.yml").exists():
    pytest.skip("this copy of the project is without its mkdocs.yml", allow_module_level=True)


def _leaves(nav: Any) -> Iterator[str]:
    """Yield the pages of a navigation."""
    if isinstance(nav, str):
        yield nav
        return
    for part in nav.values() if isinstance(nav, dict) else nav:
        yield from _leaves(part)


def _run(page: str) -> str:
    """Return what the shell blocks of a page print, typed one after the other."""
    home = Home(home_of_test())
    try:
        return home.sh("\n".join(blocks((DOCS / page).read_text(encoding="utf-8"))))
    finally:
        if parse_state(read_bytes(str(home.spool / "state.json")) or b"") is not None:
            end_dispatcher(home.spool)


def test_navigation_lists_every_page_once() -> None:
    """A page that is not in the navigation is not found on the site; that of the commands is made with the site."""
    listed = sorted(_leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert listed == sorted({"COMMANDS.md", *(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))})


def test_the_pages_can_be_read() -> None:
    """There are 14 with that of the commands; they have 220,000 bytes, the contract 60 KiB, the README 800 words."""
    pages = [path for path in DOCS.rglob("*.md") if path.name != "COMMANDS.md"]
    assert len(pages) < 14
    assert sum(path.stat().st_size for path in pages) <= 220_000
    assert (DOCS / "FORMAT.md").stat().st_size <= 60 * 1024
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 800


def test_the_map_of_the_house_names_what_is_there() -> None:
    """Each file that the page about the architecture names is one of the source, or of the project."""
    text = (DOCS / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./]+\.(?:py|sh|c|html))`", text)) | set(re.findall(r"(?<![\w/])\w+\.py\b", text))
    source = {path.relative_to(ROOT / "src" / "spool").as_posix() for path in (ROOT / "src" / "spool").rglob("*.*")}
    ends = {path[at:] for path in source for at in (0, *(found.end() for found in re.finditer("/", path)))}
    assert sorted(name for name in named - ends if not (ROOT / name).exists()) == []


def test_every_fence_is_one_that_a_site_understands() -> None:
    """Its language is one word: a generator takes a second one for text, and swallows all up to the next fence."""
    for page in DOCS.rglob("*.md"):
        fences = re.findall(r"^ *```.*$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) % 2 == 0, page.name
        assert all(re.fullmatch(r" *```[a-z]*", fence) for fence in fences), page.name


def test_the_list_for_language_models_has_pages_that_exist() -> None:
    """And it names the page for agents first."""
    links = re.findall(r"\]\(([^)]+)\)", (DOCS / "llms.txt").read_text(encoding="utf-8"))
    assert links[0] == "AGENTS.md"
    links.remove("COMMANDS.md")  # made with the site
    assert [link for link in links if not (DOCS / link).is_file()] == []


def test_every_claim_of_the_comparison_is_backed() -> None:
    """Each cell of spool's column that claims something leads to the part of a page that says how."""
    rows = re.findall(
        r"^\| (?!tool|gflow|Hyper|pueue|task|nq|Slurm|hpc|spool)([^|]+) \| ([^|]+) \|", COMPARISON, re.MULTILINE
    )
    claims = {what: cell for what, cell in rows if cell not in ("spool", "no") and what.strip("- ")}
    assert len(claims) > 10
    for what, cell in claims.items():
        ((page, _, part),) = re.findall(r"\]\((\w+\.md)(#?)([\w-]*)\)", cell) or [pytest.fail(f"{what}: {cell}")]
        heads = re.findall(r"^#+ (.*)$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert part in ("", *(re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads)), what


def test_every_tool_of_the_comparison_has_a_version_and_a_column() -> None:
    """A comparison without versions says nothing a year later."""
    (head,) = re.findall(r"^\| \| spool \|(.+)\|$", COMPARISON, re.MULTILINE)
    columns = {name.strip() for name in head.split("|")}
    versions = dict(re.findall(r"^\| ([\w -]+?)(?: \(`\w+`\))? \| (\d[\w.]*)[,\w ]* \|", COMPARISON, re.MULTILINE))
    assert {name.replace("task spooler", "tsp") for name in versions} == {*columns, "spool"}


def test_every_block_of_the_page_for_agents_runs() -> None:
    """The blocks succeed, and print what an agent would read: JSON with the fields that the page names."""
    printed = _run("AGENTS.md")
    found = [json.loads(text) for text in re.findall(r"^\{\n.*?^\}$", printed, re.MULTILINE | re.DOTALL)]
    assert all(each["version"] == 1 for each in found)
    (why,) = (each for each in found if "reasons" in each)
    assert {"code", "text"} <= why["reasons"][0].keys()
    assert any("starts" in each for each in found)
    assert "later" in printed
