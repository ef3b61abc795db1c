"""When and where the status page is written."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from extras.page.pages import a_view, a_waiting_job, an_end, busy_view, lay
from spool.core.model import State
from spool.doctor.checks import examine, of_the_machine
from spool.extras.page import writer
from spool.extras.page.writer import PageWriter
from spool.formats import config
from spool.formats.config import Config
from spool.formats.history import render_history
from spool.listeners.discovery import find_subscriptions

NOW_NS = 1_800_000_000_000_000_000
IN_SPOOL = Config(parts=(("page", "status.html"),))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every tick write that has something new."""
    monkeypatch.setattr(writer, "EVERY_S", 0.0)
    monkeypatch.setattr(writer, "_SHARE", 0)


def first_page(root: Path) -> PageWriter:
    """Have the page of a spool written into it, and return who goes on."""
    page = PageWriter(str(root), lambda: IN_SPOOL)
    page.tick()
    return page


def identity(path: Path) -> tuple[int, int]:
    """Return what tells one version of a file from the next."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def test_nothing_is_written_unless_asked_for(spool_root: Path) -> None:
    """Without `status_page` no page appears, whatever is called, and nobody listens."""
    lay(spool_root, busy_view(NOW_NS))
    before = sorted(spool_root.rglob("*"))
    page = PageWriter(str(spool_root), Config)
    page.tick()
    page.close()
    assert sorted(spool_root.rglob("*")) == before
    assert "page" not in find_subscriptions(str(spool_root), Config()).kinds


@pytest.mark.parametrize("inside", [True, False])
def test_only_a_page_in_the_spool_has_output(spool_root: Path, tmp_path: Path, inside: bool) -> None:
    """A page elsewhere is for everybody, and what a job wrote is its owner's."""
    lay(spool_root, a_view(NOW_NS), [an_end(NOW_NS, "bad", hours_ago=1, outcome=State.FAILED)])
    (spool_root / "jobs" / "bad" / "1").mkdir(parents=True)
    (spool_root / "jobs" / "bad" / "1" / "log").write_text("password=secret\n")
    path = spool_root / "status.html" if inside else tmp_path / "page.html"
    PageWriter(str(spool_root), lambda: Config(parts=(("page", str(path)),))).tick()
    assert ("password=secret" in path.read_text()) == inside


@pytest.mark.usefixtures("hasty")
def test_it_is_written_when_the_view_changes(spool_root: Path) -> None:
    """A new view makes a new page; the heartbeat of the same view does not."""
    lay(spool_root, a_view(NOW_NS))
    page = first_page(spool_root)
    path = spool_root / "status.html"
    first = identity(path)
    os.utime(spool_root / "state.json")
    page.tick()
    assert identity(path) == first
    lay(spool_root, a_view(NOW_NS + 1, jobs={"fresh": a_waiting_job(NOW_NS, "busy")}))
    page.tick()
    assert identity(path) != first
    assert "fresh" in path.read_text()


def test_it_is_written_no_more_often_than_every_few_seconds(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast views follow each other, the next page waits; the listener asks to be called then."""
    monkeypatch.setattr(writer, "_SHARE", 0)  # on a busy machine a page may take long
    lay(spool_root, a_view(NOW_NS))
    page = first_page(spool_root)
    path = spool_root / "status.html"
    first = identity(path)
    for n in range(1, 20):
        lay(spool_root, a_view(NOW_NS + n))
        due_s = page.tick()
        assert due_s is not None
        assert 0 < due_s <= writer.EVERY_S
    assert identity(path) == first


@pytest.mark.usefixtures("hasty")
def test_it_is_renewed_while_nothing_changes(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page whose time has come is written again, so that a reader sees that somebody still does."""
    monkeypatch.setattr(writer, "REFRESH_S", 0.0)
    lay(spool_root, a_view(NOW_NS))
    page = first_page(spool_root)
    first = identity(spool_root / "status.html")
    page.tick()
    assert identity(spool_root / "status.html") != first


def test_a_page_that_takes_long_is_made_rarely(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page costs sets how long the next one waits, and when a reader calls it old."""
    monkeypatch.setattr(writer, "_SHARE", 1 << 40)
    lay(spool_root, a_view(NOW_NS))
    page = first_page(spool_root)
    lay(spool_root, a_view(NOW_NS + 1))
    due_s = page.tick()
    assert due_s is not None
    assert due_s > 3600


@pytest.mark.usefixtures("hasty")
def test_a_page_that_cannot_be_put_leaves_the_one_before(
    spool_root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the last step fails the old page is there, whole, nothing is left in `.tmp/`, and the log says it once."""
    monkeypatch.setattr(writer, "REFRESH_S", 0.0)
    lay(spool_root, a_view(NOW_NS))
    page = first_page(spool_root)
    path = spool_root / "status.html"
    before = path.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR):
        broken.setattr(os, "rename", fail)
        page.tick()
        page.tick()
    assert path.read_bytes() == before
    assert list((spool_root / ".tmp").iterdir()) == []
    assert [record.message for record in caplog.records] == [
        f"cannot write the status page: {path}: No space left on device"
    ]
    page.tick()
    assert path.read_bytes() != before


def test_a_reader_never_sees_half_a_page(spool_root: Path) -> None:
    """Whoever has the old page open reads it to its end while a new one takes its place."""
    lay(spool_root, busy_view(NOW_NS))
    page = first_page(spool_root)
    with (spool_root / "status.html").open("rb") as reader:
        begin = reader.read(100)
        page.close()
        text = begin + reader.read()
    assert text.endswith(b"</html>\n")
    assert text != (spool_root / "status.html").read_bytes()


@pytest.mark.parametrize(("inside", "mode"), [(True, 0o600), (False, 0o644)])
def test_who_may_read_it(spool_root: Path, tmp_path: Path, inside: bool, mode: int) -> None:
    """In the spool it is private; whoever names a place outside wants others to read it, whatever the umask."""
    lay(spool_root, a_view(NOW_NS))
    folder = tmp_path / "public_html"
    folder.mkdir()
    path = spool_root / "status.html" if inside else folder / "jobs.html"
    stated = Config(parts=(("page", "status.html" if inside else str(path)),))
    before = os.umask(0o077)
    try:
        PageWriter(str(spool_root), lambda: stated).tick()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert [each.name for each in path.parent.iterdir() if each.name.startswith(".jobs")] == []


def test_the_last_page_says_that_the_dispatcher_has_left(spool_root: Path) -> None:
    """When the listeners leave, the page is written once more, and never grows old."""
    lay(spool_root, a_view(NOW_NS))
    page = first_page(spool_root)
    page.close()
    text = (spool_root / "status.html").read_text()
    assert "No dispatcher is running" in text
    assert 'data-fresh="0"' in text


@pytest.mark.usefixtures("hasty")
def test_a_run_that_ends_stands_on_the_next_page(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is appended to the history between two pages is on the second."""
    monkeypatch.setattr("spool.extras.page.content._DAY_SHARE", 0)
    lay(spool_root, a_view(NOW_NS), [])
    page = first_page(spool_root)
    assert "Recently ended" not in (spool_root / "status.html").read_text()
    with (spool_root / "history.jsonl").open("ab") as history:
        history.write(render_history(an_end(time.time_ns(), "just-now", hours_ago=0.01)))
    lay(spool_root, a_view(NOW_NS + 1), None)
    page.tick()
    text = (spool_root / "status.html").read_text()
    assert "just-now" in text
    assert "1 runs have ended" not in text
    assert "1 run has ended" in text


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        ("sub/status.html", "must be a plain name"),
        ("status.htm", "must name an .html file"),
        (".html", "must name an .html file"),
        ("/srv/.html", "must name an .html file"),
        ("state.json", "must name an .html file"),
        (" status.html", "white space"),
    ],
)
def test_what_the_key_cannot_be(stated: str, why: str) -> None:
    """A path that would be lost somewhere, or would replace a file of the spool, is refused with the reason."""
    with pytest.raises(config.InvalidConfig, match=why):
        config.parse(f'status_page = "{stated}"'.encode())


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ("status.html", "written to {root}/status.html"),
        ("{root}/none/x.html", "{root}/none/x.html cannot be written"),
        ("{root}/taken.html", "{root}/taken.html cannot be written"),
        (None, None),
    ],
)
def test_the_doctor_tells_whether_it_can_be_written(spool_root: Path, stated: str | None, told: str | None) -> None:
    """`spool doctor` says where the page goes, or that it cannot go there; nothing where nobody asks for one."""
    (spool_root / "taken.html").mkdir()
    if stated is not None:
        (spool_root / "config.toml").write_text(f'status_page = "{stated.format(root=spool_root)}"\n')
    check = [check for check in of_the_machine() if check.name == "status page"]
    found = [finding.text for finding in examine(str(spool_root), checks=check)]
    assert found == ([told.format(root=spool_root)] if told is not None else [])


LOADS = """
import sys
from spool.cli import fastsubmit, group, ls
from spool.dispatcher import service
from spool.listeners import by_kind, process
service.preload()
before = "jinja2" in sys.modules
by_kind("page", ".", lambda: None)
print(before, "jinja2" in sys.modules)
"""


def test_the_template_engine_is_loaded_for_the_page_alone() -> None:
    """Neither a command nor a dispatcher nor the process of the listeners imports Jinja2 before a page is asked for."""
    said = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, check=True)
    assert said.stdout == "False True\n"
