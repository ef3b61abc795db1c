"""The pictures of the documentation: whole, drawn here, and fetched from nowhere else."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from support import ROOT

PICTURES = ROOT / "docs/pictures"


def test_pictures_ask_no_other_host() -> None:
    """Each drawing is valid XML, says something, and names no address but that of its own format."""
    paths = list((ROOT / "docs/pictures").glob("*.svg"))
    assert paths
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert set(re.findall(r"\w+://[^\"')\s]+", text)) <= {
            "http://www.w3.org/2000/svg",
            "http://www.w3.org/1999/xlink",
            "https://www.textualize.io",
        }, path
        assert "@font-face" not in text
        assert "url(http" not in text


def test_the_screen_in_the_picture_is_that_of_today() -> None:
    """The picture of `spool top` has the keys that its footer has now."""
    text = (ROOT / "docs/pictures/top.svg").read_text(encoding="utf-8").replace("&#160;", " ")
    for word in ("Hold", "Release", "Cancel", "Prio", "Again", "Edit", "Attach", "Filter", "Queue", "History"):
        assert word in text


def test_every_picture_is_linked_and_every_link_has_its_picture() -> None:
    """The pages name exactly the files that are there, and these are small."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {
        (page.parent / link).resolve()
        for page in pages
        for link in re.findall(r"\]\(([^)#]+\.(?:svg|png))\)", page.read_text(encoding="utf-8"))
    }
    there = {path for path in PICTURES.iterdir() if path.suffix in (".svg", ".png")}
    assert {path for path in named if path.parent == PICTURES} == there
    assert sum(path.stat().st_size for path in there) < 1_000_000
    assert (PICTURES / "session-dark.svg").stat().st_size < 200_000


def test_the_script_draws_them(tmp_path: Path) -> None:
    """What it draws has the names of the files in docs, two users, true ages, and answers of a real session."""
    pytest.importorskip("textual", reason="the extra `top` is not installed")
    for folder in ("page", "top"):
        pytest.importorskip(f"spool.extras.{folder}")
    words = [sys.executable, "tests/pictures.py", tmp_path, "screens", "session"]
    subprocess.run(words, cwd=ROOT, check=True, timeout=300)  # type: ignore[arg-type]
    drawn = {path.name: _text_of(path) for path in tmp_path.iterdir()}
    assert drawn.keys() == {path.name for path in PICTURES.glob("*.svg")}
    for word in ("alice", "bob", "in ~26m10s", "distill_vit: gpus: needs 2 unshared GPUs", "waited 55m00s", "▂"):
        assert word in drawn["top.svg"]
    assert "unknown" not in drawn["ls-200-light.svg"]
    for word in ("hello from hello", "dependency: train is running", "accuracy 0.93"):
        assert word in drawn["session-light.svg"]
    assert ROOT.as_posix() not in drawn["session-light.svg"]


def _text_of(path: Path) -> str:
    return " ".join(ET.fromstring(path.read_text(encoding="utf-8")).itertext())
