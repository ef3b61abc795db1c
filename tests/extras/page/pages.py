"""The status page as tests read it."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from spool.extras.page.document import PageReader

EVIL = (
    '</script><script>window.owned=1;document.title="owned"</script><img src=x onerror="window.owned=1">'
    "\" onclick='window.owned=1' </style></title>-->\u202egnp.exe\u0007\x1b[31m\ud800&amp;<!--"
)


def page_of(root: Path, now_ns: int, *, served: bool = True, every_s: float = 3) -> str:
    """Return the page of a spool as its writer would make it at that moment."""
    return PageReader(str(root)).page(now_ns, every_s, 60, served=served).decode()


class Page(HTMLParser):
    """A page as a browser takes it apart, strictly: an element that is not closed, or closed twice, is an error."""

    _VOID = frozenset({"meta"})

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
