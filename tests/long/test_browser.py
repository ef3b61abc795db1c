"""The status page in a real browser: its looks, its script, and what hostile texts do there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cli.records import metadir_of
from extras.page.pages import EVIL, page_of
from long.browser import Browser
from spool.core.model import SECOND_NS
from support import wait_for
from views import a_running_job, a_view, a_waiting_job, busy_history, busy_view, lay

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests here: it takes seconds to start."""
    with Browser() as browser:
        browser.screen(1280, 900)
        yield browser


def put(path: Path, text: str) -> None:
    """Replace a page whole, as its writer does."""
    staged = path.with_name(f".{path.name}")
    staged.write_text(text)
    staged.rename(path)


def hostile_jobs(now_ns: int) -> dict[str, Any]:
    """Return jobs whose texts would like to be something else, or are very long."""
    long = "w" * 3000
    return {
        EVIL: a_running_job(now_ns, user=EVIL, project=EVIL, reason=EVIL),
        f"q{EVIL}": a_waiting_job(now_ns, EVIL * 4, user=EVIL),
        long: a_waiting_job(now_ns, long, user=long, project=long),
        "u" * 100: a_running_job(now_ns, user="x" * 90, project="y" * 90, reason="https://" + "z" * 500),
    }


def pages(now_ns: int) -> dict[str, Any]:
    """Return the views that are looked at, by a word for each."""
    return {
        "busy": busy_view(now_ns),
        "empty": a_view(now_ns),
        "hostile": a_view(now_ns, host=EVIL, problems=(EVIL, "p" * 4000), jobs=hostile_jobs(now_ns)),
    }


@pytest.mark.parametrize("which", ["busy", "empty", "hostile"])
@pytest.mark.parametrize("width", [320, 390, 768, 1280, 1920])
def test_nothing_is_wider_than_the_screen(browser: Browser, spool_root: Path, which: str, width: int) -> None:
    """Neither on a phone nor on a desk does the page scroll sideways, whatever texts are on it."""
    now_ns = time.time_ns()
    path = lay(spool_root, pages(now_ns)[which], busy_history(now_ns)) / "status.html"
    put(path, page_of(spool_root, now_ns))
    browser.screen(width, 800)
    browser.open(path)
    assert browser.ask("innerWidth") == width
    assert browser.ask("document.documentElement.scrollWidth") <= width
    browser.screen(1280, 900)


def test_hostile_texts_do_nothing(browser: Browser, spool_root: Path) -> None:
    """No script of a user runs, no element of a user exists, and ours are in force."""
    now_ns = time.time_ns()
    path = lay(spool_root, pages(now_ns)["hostile"]) / "status.html"
    put(path, page_of(spool_root, now_ns))
    browser.open(path)
    assert browser.ask("typeof window.owned") == "undefined"
    assert browser.ask("document.title").startswith("2 running, 2 waiting")
    assert browser.ask("document.scripts.length") == 1
    assert browser.ask("document.images.length") == 0
    assert browser.ask("document.querySelector('.age').textContent").endswith("s ago")  # our script has run
    assert browser.ask("getComputedStyle(document.body).marginTop") == "0px"  # and our style sheet is in force
    browser.ask("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.owned = 1\">')")
    time.sleep(0.3)
    assert browser.ask("typeof window.owned") == "undefined"  # the policy holds even for what gets in


def test_it_is_dark_where_readers_like_that(browser: Browser, spool_root: Path) -> None:
    """The page follows the reader's choice of light and dark, and its text stands out in both."""
    now_ns = time.time_ns()
    path = lay(spool_root, busy_view(now_ns)) / "status.html"
    put(path, page_of(spool_root, now_ns))

    def brightness(what: str) -> float:
        colour = browser.ask(f"getComputedStyle(document.body).{what}")
        return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(", "))) / 3

    browser.screen(1280, 900, dark=True)
    browser.open(path)
    assert brightness("backgroundColor") < 60
    assert brightness("color") > 180
    browser.screen(1280, 900)
    assert brightness("backgroundColor") > 200
    assert brightness("color") < 70


@pytest.mark.parametrize(("age_s", "served", "old"), [(1, True, False), (300, True, True), (300, False, False)])
def test_an_old_page_says_that_it_is_old(
    browser: Browser, spool_root: Path, age_s: int, served: bool, old: bool
) -> None:
    """A page that nobody has written for minutes says so; the last one of a dispatcher that left in peace does not."""
    then_ns = time.time_ns() - age_s * SECOND_NS
    path = lay(spool_root, busy_view(then_ns)) / "status.html"
    put(path, page_of(spool_root, then_ns, served=served))
    browser.open(path)
    seen = browser.ask("getComputedStyle(document.getElementById('stale')).display !== 'none'")
    assert seen is old
    assert browser.ask("document.documentElement.classList.contains('stale')") is old
    if old:
        assert browser.ask("document.querySelector('.age').textContent") == "5 min ago"


def test_a_file_renews_itself_where_its_reader_was(browser: Browser, spool_root: Path) -> None:
    """Opened from the disk, the page shows what was written since, scrolled to where it was."""
    now_ns = time.time_ns()
    path = lay(spool_root, busy_view(now_ns), busy_history(now_ns)) / "status.html"
    put(path, page_of(spool_root, now_ns, every_s=0.2))
    browser.open(path)
    browser.ask("scrollTo(0, 350)")
    view = busy_view(now_ns)
    view.jobs["fresh-job"] = a_waiting_job(now_ns, "busy")
    lay(spool_root, view)
    put(path, page_of(spool_root, now_ns + SECOND_NS, every_s=0.2))
    told = "document.body !== null && document.body.textContent.includes('fresh-job')"  # None while it reloads
    wait_for(lambda: browser.ask(told), what="the new page")
    wait_for(lambda: browser.ask("scrollY") == 350, what="the place on the page")


_CONTRASTS = """(function () {
  function numbers(text) { return text.match(/[0-9.]+/g).map(Number); }
  function light(colour) {
    return colour.slice(0, 3).reduce(function (sum, value, at) {
      var linear = value <= 10 ? value / 255 / 12.92 : Math.pow((value / 255 + 0.055) / 1.055, 2.4);
      return sum + [0.2126, 0.7152, 0.0722][at] * linear;
    }, 0);
  }
  function ground(element) {
    var colour = numbers(getComputedStyle(element).backgroundColor);
    return colour.length < 4 || colour[3] ? colour : ground(element.parentElement);
  }
  var found = {}, walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    var element = walk.currentNode.parentElement, style = getComputedStyle(element);
    if (!element.closest("script, title") && !element.hasAttribute("paint-order") && style.display !== "none") {
      var two = [light(numbers(element.closest("svg") ? style.fill : style.color)), light(ground(element))].sort();
      found[walk.currentNode.textContent] = (Math.max(two[0], two[1]) + 0.05) / (Math.min(two[0], two[1]) + 0.05);
    }
  }
  return found;
})()"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("age_s", [1, 300])
def test_every_text_stands_out(browser: Browser, spool_root: Path, dark: bool, age_s: int) -> None:
    """Each has a contrast of 4.5 or more, as WCAG asks, in light and dark, and when the page is old."""
    then_ns = time.time_ns() - age_s * SECOND_NS
    path = lay(spool_root, busy_view(then_ns), busy_history(then_ns)) / "status.html"
    put(path, page_of(spool_root, then_ns))
    browser.screen(1280, 900, dark=dark)
    browser.open(path)
    found = browser.ask(_CONTRASTS)
    browser.screen(1280, 900)
    assert len(found) > 50
    assert {text: contrast for text, contrast in found.items() if contrast < 4.5} == {}


def test_the_filter_and_what_is_unfolded_outlive_the_next_page(browser: Browser, spool_root: Path) -> None:
    """Lines without the words are hidden, also those of the next page, and the cursor stays in the box."""
    now_ns = time.time_ns()
    path = lay(spool_root, busy_view(now_ns), busy_history(now_ns)) / "status.html"
    (metadir_of(spool_root, "bad") / "log").write_text("no such file\n")
    put(path, page_of(spool_root, now_ns, every_s=0.2, private=True))
    browser.open(path)
    shown = "Array.from(document.querySelectorAll('#ended tbody tr')).filter(row => row.offsetHeight).length"
    assert browser.ask(shown) > 1
    browser.ask("document.querySelector('details').open = true")
    browser.ask("window.here = 1; document.getElementById('filter').focus()")
    browser.ask("document.execCommand('insertText', false, 'BAD exit')")
    assert browser.ask(shown) == 1
    wait_for(lambda: browser.ask("window.here") is None, what="a reload")
    kept = f"document.readyState === 'complete' && {shown} === 1 && document.querySelector('details').open"
    wait_for(lambda: browser.ask(f"{kept} && document.activeElement.value === 'BAD exit'"), what="the filter")
    browser.open("about:blank")


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_server_needs_nothing_but_the_file(browser: Browser, spool_root: Path) -> None:
    """Behind any web server the page takes the new one in without a reload, and outlives the server."""
    now_ns = time.time_ns()
    path = lay(spool_root, busy_view(now_ns), busy_history(now_ns)) / "status.html"
    put(path, page_of(spool_root, now_ns, every_s=0.2))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(spool_root)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        browser.open(f"http://127.0.0.1:{server.server_port}/status.html")
        browser.ask("window.here = 1; scrollTo(0, 350)")
        view = busy_view(now_ns)
        view.jobs["fresh-job"] = a_waiting_job(now_ns, "busy")
        lay(spool_root, view)
        put(path, page_of(spool_root, now_ns + SECOND_NS, every_s=0.2))
        wait_for(lambda: browser.ask("document.body.textContent.includes('fresh-job')"), what="the new page")
        assert browser.ask("window.here") == 1
        assert browser.ask("scrollY") == 350
        assert browser.ask("document.querySelector('.age').textContent").endswith("ago")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    time.sleep(1.0)
    assert browser.ask("document.body.textContent.includes('fresh-job')")
    browser.open("about:blank")


def test_what_a_reader_has_selected_stays(browser: Browser, spool_root: Path) -> None:
    """While text is selected, to be copied, the page stays as it is; then it goes on."""
    now_ns = time.time_ns()
    path = lay(spool_root, busy_view(now_ns)) / "status.html"
    put(path, page_of(spool_root, now_ns, every_s=0.1))
    browser.open(path)
    browser.ask("window.here = 1; getSelection().selectAllChildren(document.querySelector('h1'))")
    time.sleep(1.0)
    assert browser.ask("window.here") == 1
    assert browser.ask("String(getSelection())") == "gpu-box"
    browser.ask("getSelection().removeAllRanges()")
    wait_for(lambda: browser.ask("window.here") is None, what="a reload")
    browser.open("about:blank")


def test_it_can_be_read_without_its_script(browser: Browser, spool_root: Path) -> None:
    """With scripts off all is there, and the browser is told to look again."""
    now_ns = time.time_ns()
    path = lay(spool_root, busy_view(now_ns)) / "status.html"
    put(path, page_of(spool_root, now_ns))
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.call("Page.navigate", url=path.as_uri())
        wait_for(lambda: browser.ask("document.querySelectorAll('meta[http-equiv=refresh]').length") == 1)
        assert "needs 4 GPUs, and 1 is free" in browser.ask("document.body.textContent")
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
        browser.open("about:blank")
