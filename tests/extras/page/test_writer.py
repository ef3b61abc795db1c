"""When and where the status page is written, by a real dispatcher too, and that it says what the commands say."""

from __future__ import annotations

import logging
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from calling import put_job
from extras.page.pages import Page
from served import Served
from spool.doctor import examine, of_the_machine
from spool.extras.page import document
from spool.extras.page.document import PageWriter
from spool.formats import config
from spool.formats.config import Config
from spool.listeners import find_subscriptions
from support import wait_for
from views import a_view, busy_view, lay

NOW_NS = 1_800_000_000_000_000_000
IN_SPOOL = Config(parts=(("page", "status.html"),))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every tick write that has something new."""
    monkeypatch.setattr(document, "EVERY_S", 0.0)
    monkeypatch.setattr(document, "_SHARE", 0)


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


def test_it_is_written_again_and_again(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing has changed, so that readers see that somebody still writes; what has changed is on it."""
    page = first_page(spool_root)
    path = spool_root / "status.html"
    first = identity(path)
    monkeypatch.setattr(page, "_next", 0.0)
    page.tick()
    assert identity(path) != first
    put_job(spool_root, "fresh")
    monkeypatch.setattr(page, "_next", 0.0)
    page.tick()
    assert "fresh" in path.read_text()


def test_it_is_written_no_more_often_than_every_few_seconds(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast views follow each other, the next page waits; the listener asks to be called then."""
    monkeypatch.setattr(document, "_SHARE", 0)  # on a busy machine a page may take long
    lay(spool_root, a_view(NOW_NS))
    page = first_page(spool_root)
    path = spool_root / "status.html"
    first = identity(path)
    for n in range(1, 20):
        lay(spool_root, a_view(NOW_NS + n))
        due_s = page.tick()
        assert due_s is not None
        assert 0 < due_s <= document.EVERY_S
    assert identity(path) == first


def test_a_page_that_takes_long_is_made_rarely(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page costs sets how long the next one waits, and when a reader calls it old."""
    monkeypatch.setattr(document, "_SHARE", 1 << 40)
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
    assert [f": {path}: " in record.message for record in caplog.records] == [True]
    page.tick()
    assert path.read_bytes() != before


@pytest.mark.parametrize(("inside", "mode"), [(True, 0o600), (False, 0o644)])
def test_who_may_read_it(spool_root: Path, tmp_path: Path, inside: bool, mode: int) -> None:
    """In the spool it is private, a place outside is for others, under any umask."""
    path = spool_root / "status.html" if inside else tmp_path / "jobs.html"
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
    assert "dispatcher" in text
    assert 'data-fresh="0"' in text


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


# Beside a dispatcher.


def told(path: Path) -> str:
    """Return what stands on the page; "" while there is none."""
    return Page(path.read_text()).text if path.exists() else ""


def test_a_dispatcher_keeps_the_page_up_to_date(tmp_path: Path) -> None:
    """The page follows a job from the queue to its end, and says in the end that the dispatcher has left."""
    with Served(tmp_path / "spool") as served:
        page = served.root / "status.html"
        (served.root / "config.toml").write_text('status_page = "status.html"\ncpus = 1\n')
        served.drop("first", "while [ ! -e go ]; do sleep 0.1; done; exit 3", time_limit="1h", cpus=1)
        served.start()
        wait_for(lambda: "1 running 0 waiting 1 / 1 CPUs" in told(page), what="the running job")
        assert re.search(r"first .* of 1h00m", told(page))
        served.drop("second", "true")
        wait_for(lambda: "1 running 1 waiting" in told(page), what="the waiting job")
        wait_for(lambda: re.search(r"second .* .* cpus: needs 1, 0 free", told(page)), what="its reason")
        (served.root / "paused").touch()
        wait_for(lambda: "The spool is paused" in told(page), what="the pause")
        (tmp_path / "go").touch()
        wait_for(lambda: "exit code 3" in told(page), what="the end of the job")
        assert "1 failed" in told(page)
        served.stop()
        wait_for(lambda: "No dispatcher is running, so nothing starts. Active jobs: 1." in told(page), what="the end")


def test_tasks_that_are_alike_stand_on_one_line(tmp_path: Path) -> None:
    """Of an array the page has a line, one for the tasks that wait, and one for those that were cancelled together."""
    with Served(tmp_path / "spool") as served:
        page = served.root / "status.html"
        (served.root / "config.toml").write_text('status_page = "status.html"\ncpus = 1\n')
        served.drop("sweep", "echo ' 37%|###   | 3/8'; sleep 1000", cpus=1, array="1-9", time_limit="1h")
        served.start()
        wait_for(lambda: "37% · " in told(page), what="the progress of the first task")
        line = r"sweep array \S+ 0 of 9 done, 1 running sweep_1 "  # the dispatcher counts after its files have moved
        wait_for(lambda: re.search(line, told(page)), what="the line of the array")
        wait_for(lambda: "sweep_[2-9] 8 tasks" in told(page), what="the other tasks")
        wait_for(lambda: "1 running 8 waiting" in told(page), what="the counts")
        assert served.spool("cancel", "sweep").returncode == 0
        wait_for(lambda: re.search(r"9 cancelled.*Recently ended .*sweep.* cancelled", told(page)), what="the end")


def test_a_page_asked_for_later_tells_of_a_killed_dispatcher(tmp_path: Path) -> None:
    """The key takes effect with the configuration, and the process of the listeners writes the last page."""
    page = tmp_path / "public.html"
    with Served(tmp_path / "spool") as served:
        served.start()
        served.completes("a", "true")
        (served.root / "config.toml").write_text(f'status_page = "{page}"\n')
        wait_for(lambda: "Dispatching" in told(page) and "1 finished" in told(page), what="the page")
        assert not list(served.root.glob("*.html"))
        served.kill()
        wait_for(lambda: "No dispatcher is running" in told(page), what="the end of the dispatcher")
