"""The pictures of the documentation: whole, drawn here, and fetched from nowhere else."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from support import ROOT


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
    for word in ("Hold", "Release", "Cancel", "Prio", "Rerun", "Edit", "Attach", "Filter", "Queue", "History", "GPUs"):
        assert word in text
