"""The page as a document: what is on it, that it is whole, and that no text of a user becomes markup."""

from __future__ import annotations

import re
import time
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import pytest
from msgspec.structs import replace

from cli.records import expand, metadir_of
from extras.page.pages import EVIL, Page, page_of
from spool.core.model import SECOND_NS, ForeignProcess, State
from spool.extras.page import document
from spool.formats.state import JobView, PoolView, SharedView
from spool.query.shared import UserShare
from support import WHOLE
from views import (
    BOB,
    HOUR_NS,
    Arbiter,
    G,
    a_gpu_view,
    a_machine,
    a_running_job,
    a_view,
    a_waiting_job,
    an_end,
    busy_history,
    busy_view,
    lay,
)

NOW_NS = time.time_ns()


def the_page(root: Path, *, served: bool = True) -> Page:
    """Return the page of a spool, taken apart."""
    return Page(page_of(root, NOW_NS, served=served))


def test_a_busy_spool_is_told_whole(spool_root: Path) -> None:
    """Jobs with their reasons, progress, GPUs with who has them, users, outcomes and what ended stand on the page."""
    lay(spool_root, busy_view(NOW_NS), busy_history(NOW_NS))
    page = the_page(spool_root)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for told in (
        "gpu-box",
        "needs 4 GPUs, and 1 is free",
        "9h00m of 1d00h · GPU 93% busy",
        "12 of 40 tasks have ended",
        "79 / 80 GiB",
        "87% busy",
        "fell off the bus",
        "pid 4711",
        "2 / 3 licence",
        "held by bob",
        'cpus: "many" is not a number',
        "18 finished",
        "1 failed",
        "exit code 1",
        "19 jobs have ended",
    ):
        assert told in page.text, told


def test_an_empty_spool_says_so(spool_root: Path) -> None:
    """A spool in which nothing has happened has a page that says just that."""
    text = the_page(lay(spool_root, a_view(NOW_NS))).text
    for told in ("Nothing is running.", "Nothing is waiting.", "No job has ended in the last 24 hours.", "0 / 16 CPUs"):
        assert told in text, told


def hostile(root: Path) -> Path:
    """Lay a spool in which every text would like to be markup, or is very long."""
    machine = a_machine(
        refusal=EVIL,
        gpu_problem=EVIL,
        gpus_at_ns=NOW_NS - HOUR_NS,
        gpus=(a_gpu_view(0, uuid=EVIL, name=EVIL, problem=EVIL, jobs=(EVIL,), taken_bytes={EVIL: 1}),),
        resources={EVIL: PoolView(total=1)},
    )
    words = {"user": EVIL, "project": EVIL, "reason": EVIL, "problem": EVIL}
    jobs = {
        EVIL: a_running_job(NOW_NS, gpu_uuids=(EVIL,), **words),
        f"q{EVIL}": a_waiting_job(NOW_NS, EVIL, user=EVIL, project=EVIL),
        "n" * 10_000: a_waiting_job(NOW_NS, "r" * 10_000, user="u" * 10_000, project="p" * 10_000),
    }
    view = a_view(NOW_NS, host=EVIL, problems=(EVIL,), machine=machine, jobs=jobs)
    ended = an_end(NOW_NS, EVIL, hours_ago=1, user=EVIL, reason=EVIL, again=EVIL, outcome=State.FAILED)
    (root / "jobs" / "x").mkdir(parents=True)
    return lay(root, view, [ended])


def test_no_text_of_a_user_becomes_markup(spool_root: Path) -> None:
    """Names, reasons, problems and whatever else comes from elsewhere add no element and no attribute."""
    page = the_page(hostile(spool_root))
    assert len(page.all("script")) == 1
    assert not page.all("img")
    for name, attributes in page.elements:
        assert not {each for each in attributes if each.startswith("on") or each in ("style", "src", "href")}, name
    assert "onerror=" in page.text  # it is seen


def test_controls_and_bidi_controls_are_made_visible(spool_root: Path) -> None:
    """What hides or reorders text, and what is no character, stands on the page as an escape."""
    text = page_of(hostile(spool_root), NOW_NS)
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", text)
    assert r"\u202egnp.exe\u0007\u001b[31m\ud800" in text


def test_only_our_own_style_and_script_go_in_as_they_are() -> None:
    """The template escapes everything but these and the picture of plot, which escapes its own words."""
    template = (files("spool.extras.page") / "page.html").read_text()
    assert re.findall(r"(\w+) *\| *safe\b", template) == ["style", "timeline", "script"]
    assert not re.search(r"autoescape|Markup", template)


def test_long_texts_are_shortened(spool_root: Path) -> None:
    """A name of ten thousand characters, and a reason as long, take no more of the page than others."""
    assert len(page_of(hostile(spool_root), NOW_NS)) < 60_000


def test_the_policy_allows_our_style_and_our_script_alone(spool_root: Path) -> None:
    """The hashes in the policy are those of the one style sheet and the one script, and nothing else may load."""
    text = page_of(lay(spool_root, busy_view(NOW_NS)), NOW_NS)
    policies = [meta["content"] for meta in Page(text).all("meta") if "Policy" in meta.get("http-equiv", "")]
    assert len(policies) == 1
    for name in ("style", "script"):
        inner = re.findall(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
        assert len(inner) == 1
        digest = b64encode(sha256(inner[0].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}';" in policies[0]
    assert policies[0].startswith("default-src 'none';")
    assert "://" not in text


def test_a_long_queue_is_cut(spool_root: Path) -> None:
    """Of 10,000 waiting jobs the page shows the first hundred and how many more there are."""
    jobs = {f"job-{n}": a_waiting_job(NOW_NS, "busy", submitted_at_ns=NOW_NS - n * SECOND_NS) for n in range(10_000)}
    text = page_of(lay(spool_root, a_view(NOW_NS, jobs=jobs)), NOW_NS)
    assert len(text) < 100_000
    assert "and 9,900 more" in Page(text).text
    assert "job-9999" in text  # has waited longest
    assert "job-9899<" not in text


@WHOLE
def test_the_last_day_is_drawn_where_something_draws(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs on each GPU and on the CPUs, with whose they are; without what draws, the page has the rest."""
    lay(spool_root, busy_view(NOW_NS), busy_history(NOW_NS))
    page = the_page(spool_root)
    for told in ("GPUs: ", "CPUs: ", "in use on average", "job-17, alice, "):
        assert told in page.text, told
    monkeypatch.setattr(document, "charts", lambda: None)
    page = the_page(spool_root)
    assert "in use on average" not in page.text
    assert "19 jobs have ended" in page.text


def test_a_busy_day_has_a_bounded_picture(spool_root: Path) -> None:
    """Thousands of short runs become a timeline of bounded size."""
    ended = [
        an_end(
            NOW_NS, f"job-{n}", hours_ago=23 - n / 1000, started_at_ns=NOW_NS - 23 * HOUR_NS + (n - 9) * HOUR_NS // 1000
        )
        for n in range(6_000)
    ]
    view = a_view(NOW_NS, machine=a_machine(64))
    text = page_of(lay(spool_root, view, ended), NOW_NS)
    assert "6,000 jobs have ended" in text
    assert len(text) < 300_000


def test_without_a_dispatcher_the_page_says_that_nothing_starts(spool_root: Path) -> None:
    """A page that was written last by a process that lost its dispatcher says so, and what that means for jobs."""
    lay(spool_root, busy_view(NOW_NS))
    assert "Active jobs: 6." in the_page(spool_root, served=False).text
    lay(spool_root, a_view(NOW_NS))
    assert "no jobs are active" in the_page(spool_root, served=False).text


def test_what_is_wrong_is_told_above_the_jobs(spool_root: Path) -> None:
    """A pause, problems, and a history that cannot be read."""
    lay(spool_root, busy_view(NOW_NS))
    assert "is paused" not in the_page(spool_root).text
    lay(spool_root, replace(busy_view(NOW_NS), problems=("cannot use the configuration: line 3",)))
    (spool_root / "paused").touch()
    (spool_root / "history.jsonl.1.gz").write_bytes(b"not packed")
    text = the_page(spool_root).text
    for told in ("The spool is paused: nothing starts", "cannot read all of", "the configuration: line 3"):
        assert text.index(told) < text.index("Running")
    assert "needs 4 GPUs, and 1 is free" in text


def test_a_job_that_waits_in_slurm_stands_among_those_that_wait(spool_root: Path) -> None:
    """With a mark, Slurm's reason and a number of its own above all; it is none of the running jobs."""
    reason = "Slurm: PENDING (Resources)"
    jobs = {
        "far": JobView(state="submitted", reason=reason, run=1, user="me", submitted_at_ns=NOW_NS - HOUR_NS),
        "near": a_waiting_job(NOW_NS, "why"),
    }
    lay(spool_root, a_view(NOW_NS, jobs=jobs))
    text = the_page(spool_root).text
    assert "1 submitted" in text
    assert reason in text
    assert "0 running" in text


def test_what_others_have_of_a_shared_machine_is_counted(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU names the lease, and the tiles count what others have."""
    arbiter = Arbiter(spool_root, monkeypatch)
    evil = UserShare(user=EVIL.replace("\ud800", ""), leases=1, cpus=1)
    arbiter.says(BOB, evil, own={"leases": 1, "cpus": 2}, by_gpu={"bob": 20 * G})
    foreign = (ForeignProcess(4711, "python", 3 * G, "bob"),)
    machine = a_machine(
        cpus_free=14,
        gpus_at_ns=NOW_NS,
        gpus=(a_gpu_view(0, foreign_processes=foreign), a_gpu_view(1)),
        shared=SharedView(directory=arbiter.directory),
    )
    lay(spool_root, a_view(NOW_NS, machine=machine))
    text = the_page(spool_root).text
    for told in ("8 / 16 CPUs", "1 / 2 GPUs", "bob's lease (granted 20 GiB, uses 3 GiB)"):
        assert told in text
    assert "pid 4711" not in text
    arbiter.says(problem="the arbiter is not running")
    assert "shared machine: " in the_page(spool_root).text


def test_what_failed_unfolds_its_last_lines_where_nobody_else_reads(spool_root: Path) -> None:
    """A private page has them, and the log; of tasks that share a line those of the first. Others have none."""
    ended = [
        an_end(NOW_NS, f"sweep_{at}", hours_ago=1 + at / 60, outcome=State.FAILED, reason="exit code 1", run=1)
        for at in (1, 2, 3)
    ]
    lay(spool_root, a_view(NOW_NS), [*ended, an_end(NOW_NS, "fine", hours_ago=1, run=1)])
    expand(spool_root, "sweep", 3, 'command = "false"\narray = "1-3"\n', place=None)
    for name in ("sweep_1", "sweep_2", "sweep_3", "fine"):
        (metadir_of(spool_root, name) / "log").write_text(f"loading\n<b>{name}</b>: no such file\n")
    page = Page(page_of(spool_root, NOW_NS, private=True))
    (unfolds,) = page.all("details")
    first = unfolds["id"].split("-")[1]
    assert f"{first}, run 1: loading <b>{first}</b>: no such file the whole log" in page.text
    assert page.all("a") == [{"href": f"jobs/{first}/1/log"}]
    assert "3 failed" in page.text
    assert not Page(page_of(spool_root, NOW_NS)).all("details")


def test_a_job_that_was_tried_again_counts_once(spool_root: Path) -> None:
    """The page counts jobs, and an array's tasks are jobs: neither the runs before a retry nor the array itself."""
    tried = an_end(NOW_NS, "flaky", hours_ago=2, outcome=State.FAILED, reason="exit code 1", run=1, again="retry")
    lay(spool_root, a_view(NOW_NS), [tried, an_end(NOW_NS, "flaky", hours_ago=1, run=2)])
    text = the_page(spool_root).text
    assert "1 job has ended" in text
    assert "1 finished" in text
    assert "1 failed" not in text
