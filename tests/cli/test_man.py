"""`spool man` shows each page, with a viewer or without one."""

from __future__ import annotations

import os
import pty
import re
import shutil
import sys
from pathlib import Path

import pytest

from spool.cli import main, man, manpages
from support import printed_on


@pytest.mark.parametrize("path", manpages.pages())
def test_a_page_is_plain_text_where_there_is_no_terminal(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It has a name, no line has an escape of roff, and none that can be broken is wider than a terminal."""
    section, name = path[3], Path(path).stem
    assert main.run(["man", section, name]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"NAME\n    {name} - ")
    assert not re.search(r"^\.[A-Z]|\\[f(&\[-]", said, re.MULTILINE)
    assert "\n\n\n" not in said


def test_topics_are_found_as_a_reader_says_them(capsys: pytest.CaptureFixture[str]) -> None:
    """A command comes before a kind of file of the same name; a section selects."""
    names = {(): "spool", ("submit",): "spool-submit", ("spool-submit",): "spool-submit", ("job",): "spool-job"}
    for words, name in names.items():
        assert main.run(["man", *words]) == 0
        assert capsys.readouterr().out.startswith(f"NAME\n    {name} - ")
    assert main.run(["man", "machine"]) == 0
    command = capsys.readouterr().out
    assert main.run(["man", "5", "machine"]) == 0
    assert "KEYS" in capsys.readouterr().out
    assert "KEYS" not in command


@pytest.mark.parametrize("words", [("no-such",), ("5", "submit"), ("7", "job"), ("5", "job", "config")])
def test_an_unknown_topic_lists_the_topics(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, with the exit code of wrong usage."""
    assert main.run(["man", *words]) == 2
    said = capsys.readouterr().err
    assert f"no manual page {' '.join(words)!r}; the topics are spool, submit, " in said
    assert said.count("\n") == 1


def test_a_text_is_what_the_page_says() -> None:
    """Options, values and examples are as they are typed."""
    text = man.plain(manpages.pages()["man1/spool-submit.1"])
    assert "spool submit -c 'sort words | uniq -c > counts'" in text
    assert "mv ~/.spool/.tmp/train.toml ~/.spool/queued/" in text
    assert re.search(r"^    -n, --name", text, re.MULTILINE)
    assert "spool(1), spool-job(5)" in text


def test_a_terminal_gets_the_page_from_a_viewer(tmp_path: Path) -> None:
    """The viewer gets the page on standard input; where it fails, or there is none, the plain text is printed."""
    viewer = tmp_path / "man"
    for script, seen in (("cat > /dev/null; echo viewed $*", "viewed -l -"), ("exit 16", "spool-job - the keys of")):
        viewer.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        viewer.chmod(0o755)
        assert seen in _typed(f"{tmp_path}:{Path(shutil.which('cat') or '/bin/cat').parent}", tmp_path)


def _typed(path: str, home: Path) -> str:
    """Return what `spool man job` prints on a terminal with this PATH, where mandoc is missing."""
    (home / "mandoc").write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    (home / "mandoc").chmod(0o755)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-m", "spool", "man", "job"], {**os.environ, "PATH": path})
    said = printed_on(terminal)
    os.waitpid(pid, 0)
    return said.decode()
