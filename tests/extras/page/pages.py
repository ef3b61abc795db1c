"""The status page as tests read it."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

from msgspec import json

from spool.core.model import Machine
from spool.extras.page.document import render
from spool.formats.run_records import parse_history_line
from spool.formats.state import StateView, parse_state, render_state
from spool.query import overview
from spool.query.overview import OverviewReader
from spool.query.rows import JobList, JobRow, ListedState, row_of_result, row_of_view, usual_order

EVIL = (
    '</script><script>window.owned=1;document.title="owned"</script><img src=x onerror="window.owned=1">'
    "\" onclick='window.owned=1' </style></title>-->\u202egnp.exe\u0007\x1b[31m\ud800&amp;<!--"
)


def page_of(root: Path, now_ns: int, *, served: bool = True, every_s: float = 3, private: bool = False) -> str:
    """Return the page of a spool that `views.lay` has laid, as its writer would make it at that moment."""
    data = (root / "state.json").read_bytes() if (root / "state.json").exists() else b""
    view = parse_state(data)
    path = root / "history.jsonl"
    lines = path.read_bytes().splitlines() if path.is_file() else ()
    ended = sorted((row_of_result(parse_history_line(line)) for line in lines), key=lambda row: row.ended_at_ns or 0)
    found = JobList(
        rows=(*ended, *sorted(_rows(view, now_ns), key=usual_order)),
        dispatcher=served,
        starting=False,
        stale_ns=None,
        paused=(root / "paused").exists(),
        problems=view.problems if view is not None else (),
        at_ns=now_ns,
        unserved=False,
    )
    with (
        mock.patch.object(overview, "list_jobs", return_value=found),
        mock.patch.object(overview, "last_view", return_value=(view, None)),
        mock.patch.object(overview, "machine_now", return_value=Machine(1, 1)),
    ):
        seen = OverviewReader(str(root)).look(now_ns)
    assert seen is not None
    return render(seen, str(root), every_s, served=served, private=private).decode()


def _rows(view: StateView | None, now_ns: int) -> Iterator[JobRow]:
    listed = json.decode(render_state(view), type=ListedState).jobs if view is not None else {}
    for name, job in listed.items():
        yield row_of_view(name, job, now_ns)


class Page(HTMLParser):
    """A page as a browser takes it apart, strictly: an element that is not closed, or closed twice, is an error."""

    _VOID = frozenset({"br", "input", "meta"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    @property
    def text(self) -> str:
        """All that a reader sees, blanks single."""
        return " ".join(" ".join(self.texts).split())

    def all(self, name: str) -> list[dict[str, str]]:
        """Return the attributes of every element of that name."""
        return [attributes for element, attributes in self.elements if element == name]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element."""
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in self._VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost element."""
        assert self._open
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Take in a text."""
        if not self._open or self._open[-1] not in ("script", "style"):
            self.texts.append(data)
