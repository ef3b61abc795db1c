"""`spool man`: show a manual page. It needs no MANPATH, which many ways of installing a Python program leave alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from contextlib import suppress

import click

from spool.cli import manpages
from spool.cli.group import Verb
from spool.cli.render import say_text
from spool.core.errors import UsageError
from spool.core.names import without_here

_VIEWERS = (("man", "-l", "-"), ("mandoc", "-a"))  # of man-db, and of mandoc: both read the page from standard input
_WIDTH, _TAG, _BODY = 80, " " * 4, " " * 8


@click.command(cls=Verb)
@click.argument("topic", nargs=-1, metavar="[1|5] [TOPIC]")
def command(topic: tuple[str, ...]) -> int:
    """Show a manual page: that of spool, of a command, or of the keys of a kind of file.

    TOPIC is a command, or `job`, `config`, `reservation` or `machine`:
      spool man submit
      spool man job
      spool man 5 machine       the keys of machine.toml
      spool man machine         the command

    On a terminal, man or mandoc shows the page. Elsewhere, and without them, it is plain text.
    """
    section, name = topic if len(topic) == 2 else ("", topic[0] if topic else "spool")  # as man has them
    text = manpages.page(name, section) if len(topic) <= 2 and section in ("", "1", "5") else None
    if text is None:
        raise UsageError(f"no manual page {' '.join(topic)!r}; the topics are {', '.join(manpages.topics())}")
    if not sys.stdout.isatty() or not _view(text):
        say_text(plain(text))
    return 0


def _view(text: str) -> bool:
    """Show a page in a viewer of this machine; return False if there is none that works."""
    known, null = without_here(os.environ), subprocess.DEVNULL
    for words in _VIEWERS:
        with suppress(OSError):
            if subprocess.run(words, input=text.encode(), stderr=null, env=known, check=False).returncode == 0:
                return True
    return False


def plain(page: str) -> str:
    """Return one of our pages as text. It knows only the requests that `manpages` writes."""
    lines: list[str] = []
    indent, tag, as_is = _TAG, False, False
    for line in page.splitlines():
        request, _, rest = line.partition(" ")
        match request:
            case ".TH":
                continue
            case ".SH" | ".SS":
                lines += ["", _text(rest) if request == ".SH" else f"  {_text(rest)}"]
                indent = _TAG
            case ".PP":
                lines.append("")
                indent = _TAG
            case ".TP":
                lines.append("")
                indent, tag = _TAG, True
            case ".nf" | ".fi":
                as_is = request == ".nf"
            case ".br":
                continue
            case _:
                said = _text(rest.replace(" ", "") if request in (".B", ".BR", ".IR") else line)
                lines += (
                    [f"{indent}{said}"]
                    if as_is or tag
                    else textwrap.wrap(
                        said, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
                    )
                )
                indent, tag = (_BODY, False) if tag else (indent, False)
    return re.sub(r"(\(\d\),)\n +", r"\1 ", "\n".join(lines).lstrip("\n")) + "\n"  # a list of pages is one line


def _text(roff: str) -> str:
    """Return a line without the escapes of roff."""
    known = {r"\(ti": "~", r"\(ha": "^", r"\(ga": "`", r"\-": "-", r"\e": "\\", r"\&": ""}

    def meant(found: re.Match[str]) -> str:
        return chr(int(found[1], 16)) if found[1] else known.get(found[0], "")

    return re.sub(r"\\(?:\[u([0-9A-F]+)\]|\((?:ti|ha|ga)|f[BIR]|[-e&])", meant, roff)
