"""The page about scheduling against the reasons that the program gives."""

from __future__ import annotations

import re

from core.planning import job, plan
from core.test_forecast import SITUATIONS
from spool.core.reasons import CODES
from support import ROOT

PAGE = (ROOT / "docs" / "SCHEDULING.md").read_text(encoding="utf-8")


def quoted() -> list[list[str]]:
    """Return what the page says that reasons begin with: for each row of the table, its words as patterns."""
    _, _, rest = PAGE.partition("| reason begins with |")
    table, _, _ = rest.partition("\n\n")
    cells = [row.split("|")[1].replace("the name of a resource", "`l`") for row in table.splitlines()[2:]]
    words = [re.findall("`(.*?)`", cell) for cell in cells]
    return [[re.escape(each).replace("…", ".+") + r"(?!\w)" for each in row] for row in words]  # whole words


def test_the_reasons_of_the_page_are_those_of_the_program_in_its_order() -> None:
    """Each reason begins with the words of a row, each of these words begins a reason, and the rows are in order."""
    made = {code: str(SITUATIONS[code][0]().reason("j")) for code in CODES}
    texts = [str(plan(held=[job("j")]).reason("j")), *made.values()]
    rows = quoted()
    found = [next((at for at, row in enumerate(rows) if any(re.match(w, text) for w in row)), -1) for text in texts]
    assert -1 not in found, texts[found.index(-1)]
    assert found == sorted(found)
    assert all(any(re.match(words, text) for text in texts) for row in rows for words in row), texts
