"""The status page of a real dispatcher."""

from __future__ import annotations

import re
from pathlib import Path

from extras.page.pages import Page
from served import Served
from support import wait_for


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
        assert page.stat().st_mode & 0o777 == 0o600


def test_a_killed_dispatcher_leaves_a_page_that_says_so(tmp_path: Path) -> None:
    """Even a dispatcher that can tidy nothing up has its end told, by the process of the listeners."""
    with Served(tmp_path / "spool") as served:
        page = served.root / "status.html"
        (served.root / "config.toml").write_text('status_page = "status.html"\n')
        served.start()
        wait_for(lambda: "Serving" in told(page), what="the page")
        served.kill()
        wait_for(lambda: "No dispatcher is running" in told(page), what="the end of the dispatcher")


def test_a_page_can_be_asked_for_while_a_dispatcher_works(tmp_path: Path) -> None:
    """The key takes effect when the configuration changes; what it asks for elsewhere is readable by others."""
    page = tmp_path / "public.html"
    with Served(tmp_path / "spool") as served:
        served.start()
        served.drop("a", "true")
        wait_for(lambda: served.outcome("a") == "finished")
        assert not list(served.root.glob("*.html"))
        (served.root / "config.toml").write_text(f'status_page = "{page}"\n')
        wait_for(lambda: "1 finished" in told(page), what="the page")
        assert page.stat().st_mode & 0o777 == 0o644
        assert not list(served.root.glob("*.html"))


def test_tasks_that_are_alike_stand_on_one_line(tmp_path: Path) -> None:
    """Of an array the page has a line, one for the tasks that wait, and one for those that were cancelled together."""
    with Served(tmp_path / "spool") as served:
        page = served.root / "status.html"
        (served.root / "config.toml").write_text('status_page = "status.html"\ncpus = 1\n')
        served.drop("sweep", "echo ' 37%|###   | 3/8'; sleep 1000", cpus=1, array="1-9", time_limit="1h")
        served.start()
        wait_for(lambda: "37% · " in told(page), what="the progress of the first task")
        assert re.search(r"sweep array \S+ 0 of 9 done, 1 running sweep_1 ", told(page))
        wait_for(lambda: "sweep_[2-9] 8 tasks" in told(page), what="the other tasks")
        assert "1 running 8 waiting" in told(page)
        assert served.spool("cancel", "sweep").returncode == 0
        wait_for(lambda: "9 cancelled" in told(page), what="the end")
        assert re.search(r"Recently ended .*\[\S+\] [89] tasks \S+ cancelled", told(page))
