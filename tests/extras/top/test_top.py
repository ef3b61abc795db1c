"""The screen of `spool top`, driven without a terminal: what it shows, and what its keys do to real job files."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from subprocess import Popen
from unittest.mock import Mock

import pytest
from rich.cells import cell_len

from calling import Command, put_job, start
from cli.records import expand
from cli.test_looking import ended, running
from plugins.fake_nvml import GIB, FakeNvml
from spool.core.model import State
from spool.query.listing import ListedJob
from spool.query.rows import JobRow
from spool.query.shared import UserShare
from spool.store.ownership import this_user
from spool.store.spool import Service, Spool
from support import PATIENCE_S, wait_for
from views import BOB, Arbiter, a_gpu_view, a_machine, a_view, lay

pytest.importorskip("textual", reason="the extra `top` is not installed")

from textual.pilot import Pilot
from textual.widgets import Input

from spool.cli import main
from spool.extras.top.app import Top, log_lines
from spool.extras.top.header import bar
from spool.extras.top.widgets import Dialog, RowList, TextPane

Steps = Callable[["Screen"], Awaitable[None]]
HOSTILE = ("[red]x[/red]", "\x1b[2Jclear", "\u202eevil", "漢字" * 30, "e\u0301" * 40, "<script>", "a\tb\nc")


class Screen:
    """The screen of a test, and its keys."""

    def __init__(self, app: Top, pilot: Pilot[int]) -> None:
        self.app, self.pilot = app, pilot
        self._heard = 0
        self._notify = app.notify = Mock(wraps=app.notify)  # type: ignore[method-assign]

    @property
    def lines(self) -> list[str]:
        """What is seen, line by line."""
        strips = self.app.screen._compositor.render_strips()
        return ["".join(segment.text for segment in strip) for strip in strips]

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)

    @property
    def told(self) -> str:
        """What the notifications said since the last ones that were heard; on a busy machine they are gone too soon."""
        return "\n".join(call.args[0] for call in self._notify.call_args_list[self._heard :])

    @property
    def current(self) -> str | None:
        """The name of the job under the cursor."""
        row = self.app.query_one(f"#{self.app._view}", RowList).current
        return row.name if row is not None else None

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Wait until something is so; the time limit only ends a test that would never end."""
        left = PATIENCE_S
        while not condition():
            if left <= 0:
                raise AssertionError(f"waited in vain for {what}; told: {self.told}\n{self.text}")
            await self.pilot.pause(0.02)
            left -= 0.02

    async def sees(self, *words: str) -> None:
        """Wait until all of *words* are on the screen."""
        await self.until(lambda: all(word in self.text for word in words), repr(words))

    async def hears(self, *words: str) -> None:
        """Wait until a notification says all of *words*."""
        await self.until(lambda: all(word in self.told for word in words), repr(words))
        self._heard = self._notify.call_count

    async def on(self, name: str) -> None:
        """Move the cursor to a job."""
        await self.sees(name)
        await self.press("home")
        for _ in range(30):
            if self.current == name:
                return
            await self.press("down")
        raise AssertionError(f"{name} is not in the list\n{self.text}")


def drive(root: Path | str, steps: Steps, size: tuple[int, int] = (80, 24)) -> int | None:
    """Open the screen, take the steps, close it; return what it returned."""

    async def go() -> int | None:
        app = Top(str(root))
        async with app.run_test(size=size) as pilot:
            await steps(Screen(app, pilot))
        return app.return_value

    return asyncio.run(go())


def test_the_screen_shows_what_runs_waits_and_has_ended(spool: Command, spool_root: Path) -> None:
    """At 80 by 24 the queue, the output of the run and the keys are seen, and the history by another key."""
    running(spool_root, "train")
    (spool_root / "jobs/train/1/log").write_bytes(b"epoch 1\n 10%|#   |\r 45%|##  |\r")
    put_job(spool_root, "later", 'command = "true"\npriority = 30\n')
    put_job(spool_root, "parked", place="held")
    ended(spool_root, "old", State.FAILED, time.time_ns() - 60_000_000_000, code=3)

    async def steps(screen: Screen) -> None:
        await screen.sees("train", "later", "parked", "45%", "epoch 1", "45%|##  |")
        assert len(screen.lines) == 24
        assert all(cell_len(line) == 80 for line in screen.lines)
        table = [line.split()[:2] for line in screen.lines if line.split()[:1] in (["train"], ["later"], ["parked"])]
        assert table[:3] == [["train", "running"], ["later", "queued"], ["parked", "held"]]
        assert "10%|" not in screen.text  # the bar was drawn again over it
        assert "━" * 11 + "─" in screen.text  # 45 % of the bar beside it
        assert "1 running · 1 queued · 1 held" in screen.lines[0]
        assert "`spool dispatch`" in screen.text
        await screen.sees("Hold", "Release", "Cancel", "Prio", "Again", "Edit", "Attach", "Filter", "Help", "Quit")
        await screen.press("2")
        await screen.sees("old", "failed", "exit code 3, 1m", " ago")
        assert "later" not in screen.text
        await screen.press("q")

    assert drive(spool_root, steps) is None


def test_hold_release_cancel_and_requeue_move_the_file(spool: Command, spool_root: Path) -> None:
    """The keys do what the verbs do, or say why not; cancel asks first, and the cursor stays with its job."""
    ended(spool_root, "old", State.FAILED, time.time_ns(), code=3)
    put_job(spool_root, "one")
    put_job(spool_root, "two")
    put_job(spool_root, "zzz")

    async def steps(screen: Screen) -> None:
        await screen.on("two")
        await screen.press("h")
        await screen.hears("two held")
        assert (spool_root / "held/two.toml").exists()
        await screen.until(lambda: screen.current == "two", "the cursor on the job that was held")
        await screen.press("r")
        await screen.hears("two released")
        assert (spool_root / "queued/two.toml").exists()
        await screen.press("c")
        await screen.sees("Cancel two?")
        await screen.press("n")
        assert (spool_root / "queued/two.toml").exists()
        await screen.press("c")
        await screen.sees("Cancel two?")
        await screen.press("enter")  # the careful answer has the focus
        assert (spool_root / "queued/two.toml").exists()
        await screen.press("c", "y")
        await screen.hears("two cancelled")
        assert not (spool_root / "queued/two.toml").exists()
        await screen.until(lambda: screen.current in ("one", "zzz"), "a neighbour")
        await screen.press("R")
        await screen.hears("cannot requeue job", "it is waiting in queued/")
        await screen.press("2")
        await screen.on("old")
        await screen.press("R")
        await screen.hears("old queued again")
        assert (spool_root / "queued/old.toml").exists()

    drive(spool_root, steps)


def test_priority_is_asked_for_and_a_wrong_one_is_told(spool: Command, spool_root: Path) -> None:
    """The file gets the new priority, with its comments; what is no number changes nothing and is said to be none."""
    path = put_job(spool_root, "one", '# mine\ncommand = "true"\npriority = 5\n')

    async def steps(screen: Screen) -> None:
        await screen.on("one")
        await screen.press("p")
        await screen.until(lambda: isinstance(screen.app.screen, Dialog), "the question")
        assert screen.app.screen.query_one(Input).value == "5"
        await screen.press("backspace", "4", "2", "enter")
        await screen.hears("one changed")
        assert path.read_text() == '# mine\ncommand = "true"\npriority = 42\n'
        await screen.press("p")
        await screen.until(lambda: isinstance(screen.app.screen, Dialog), "the question")
        await screen.press("x", "enter")
        await screen.hears("is not a whole number")
        await screen.press("p", "9", "escape")
        assert "priority = 42" in path.read_text()

    drive(spool_root, steps)


def test_a_job_that_has_gone_meanwhile_is_told_of(spool: Command, spool_root: Path) -> None:
    """Every key on a job whose file somebody took away tells that it is gone; the screen goes on."""
    put_job(spool_root, "ghost")

    async def steps(screen: Screen) -> None:
        await screen.on("ghost")
        row = screen.app._row
        assert row is not None
        for key, words in (
            ("h", "cannot hold job ghost: the spool has no job of that name"),
            ("r", "cannot release job ghost"),
            ("R", "cannot requeue job ghost"),
            ("a", "cannot attach to job ghost"),
        ):
            (spool_root / "queued/ghost.toml").unlink(missing_ok=True)
            async with asyncio.timeout(PATIENCE_S):
                while words not in screen.told:  # a refresh may take the row away before the key is seen
                    screen.app.query_one("#queue", RowList).show_rows([ListedJob(row, row.name)], "")
                    await screen.press(key)
                    await screen.pilot.pause()
        await screen.sees("no active jobs")
        for key in ("h", "r", "c", "p", "R", "e", "a", "enter"):
            await screen.press(key)
        await screen.hears("no job is selected")

    drive(spool_root, steps)


def test_the_list_filters_as_one_types(spool: Command, spool_root: Path) -> None:
    """Words of the name, the state or a tag, and patterns; Escape shows all again. Typed letters are no commands."""
    for name in ("sweep_1", "sweep_2", "train"):
        put_job(spool_root, name, 'command = "true"\ntags = ["night"]\n' if name == "sweep_2" else 'command = "true"\n')
    put_job(spool_root, "parked", place="held")

    async def steps(screen: Screen) -> None:
        def listed() -> list[str]:
            return [row.name for row in screen.app.query_one("#queue", RowList)._rows]

        await screen.sees("sweep_1", "parked")
        await screen.press("slash", *"sweep")
        await screen.until(lambda: listed() == ["sweep_1", "sweep_2"], "the filter")
        await screen.press("enter")
        assert "filter: sweep" in screen.text
        await screen.press("h")
        await screen.hears("sweep_1 held")
        await screen.press("escape")
        await screen.until(lambda: len(listed()) == 4, "all jobs")
        for words, found in (("night", ["sweep_2"]), ("held par", ["parked"]), ("*_[2-9]", ["sweep_2"]), ("qqq", [])):
            await screen.press("slash")
            screen.app.query_one("#filter", Input).value = words
            await screen.until(lambda found=found: listed() == found, words)
            await screen.press("escape")
        screen.app.query_one("#filter", Input).value = "qqq"
        await screen.sees("no job matches the filter")

    drive(spool_root, steps)


def test_the_mouse_moves_opens_and_chooses(spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A click moves the cursor, two open the job, one on a word shows another list."""
    monkeypatch.setattr(Top, "CLICK_CHAIN_TIME_THRESHOLD", 60.0)  # two clicks are two, however slow the machine is
    for name, priority in (("aaa", 10), ("bbb", 90), ("ccc", 50)):
        put_job(spool_root, name, f'command = "true"\npriority = {priority}\n')

    async def steps(screen: Screen) -> None:
        await screen.sees("`spool dispatch` starts one", "ccc")  # the list has its place now: a click goes by that
        await screen.pilot.click("#queue", offset=(3, 2))
        assert screen.current == "ccc"
        await screen.pilot.click("#queue", offset=(3, 20))  # below the last one
        assert screen.current == "ccc"
        await screen.pilot.click("#queue", offset=(3, 3), times=2)
        await screen.until(lambda: screen.app.screen.has_class("enlarged"), "the job on the whole screen")
        await screen.press("escape")
        await screen.pilot.click("#views", offset=(16, 0))
        assert screen.app._view == "history"
        await screen.sees("no job has ended yet")

    drive(spool_root, steps)


def test_the_output_follows_a_run_and_is_escaped(spool: Command, spool_root: Path) -> None:
    """New lines are shown as they come; colours, controls and markup in them do nothing."""
    running(spool_root, "train")
    log = spool_root / "jobs/train/1/log"
    log.write_bytes(
        b"\x1b[31mred\x1b[0m [bold]no markup[/bold]\n\x1b]0;title\x07after\n\xff\x00bytes\n\xe2\x80\xaeevil\n"
    )

    async def steps(screen: Screen) -> None:
        await screen.sees("red [bold]no markup[/bold]", "after", "�\\u0000bytes", "\\u202eevil")
        with log.open("ab") as file:
            file.write(b"one more\n")
        await screen.sees("one more")
        await screen.press("enter")
        with log.open("ab") as file:
            file.write(b"".join(b"line %d\n" % number for number in range(3000)))
        await screen.sees("line 2999")
        pane = screen.app.query_one(TextPane)
        assert len(pane._lines) <= 1001
        assert not screen.app.query_one("#queue", RowList).display
        await screen.press("escape")
        assert screen.app.query_one("#queue", RowList).display

    drive(spool_root, steps)


@pytest.mark.parametrize("size", [(40, 10), (200, 60), (1, 1)])
def test_no_size_is_too_small(size: tuple[int, int], spool: Command, spool_root: Path) -> None:
    """Every list, the help and the questions can be shown in a terminal of any size."""
    running(spool_root, "train")
    put_job(spool_root, "x" * 200)

    async def steps(screen: Screen) -> None:
        await screen.until(lambda: screen.app._seen, "the first look")
        for key in ("1", "2", "1", "question_mark", "escape", "down", "c", "n", "p", "escape", "enter", "escape"):
            await screen.press(key)
            assert all(cell_len(line) == size[0] for line in screen.lines)
        await screen.press("slash", "t", "enter", "t")

    drive(spool_root, steps, size)


def test_hostile_texts_are_escaped_everywhere(spool: Command, spool_root: Path) -> None:
    """Reasons, users' texts and comments of any kind neither move the cursor nor are taken for markup."""
    for at, text in enumerate(HOSTILE):
        put_job(spool_root, f"bad_{at}", f"command = {text!r}\n")
        (spool_root / f"queued/bad_{at}.toml.error").write_text(f"- {text}\n")

    async def steps(screen: Screen) -> None:
        await screen.sees("bad_0", "[red]x[/red]", "\\u001b[2Jclear", "\\u202eevil", "<script>")
        for _ in HOSTILE:
            assert [line for line in screen.lines if not line.isprintable() or cell_len(line) != 80] == []
            await screen.press("down")
        await screen.press("c")
        await screen.sees("Cancel bad_")
        await screen.press("n", "slash")
        screen.app.query_one("#filter", Input).value = "[red]"
        await screen.sees("filter: [red]")

    drive(spool_root, steps)


def test_a_paused_a_broken_and_a_vanished_spool_are_told_of(spool: Command, spool_root: Path) -> None:
    """The lines above the lists say what keeps jobs from starting, also when the spool goes while one looks."""
    put_job(spool_root, "one")
    (spool_root / "paused").write_text("")

    async def steps(screen: Screen) -> None:
        await screen.sees("the spool is paused: no job starts until `spool resume`", "no dispatcher is running")
        (spool_root / "paused").unlink()
        await screen.until(lambda: "is paused" not in screen.text, "the pause to be over")
        shutil.rmtree(spool_root)
        await screen.sees(" ! cannot ")
        await screen.press("h")
        await screen.hears("cannot ")

    drive(spool_root, steps)


def test_the_gpus_have_their_memory_and_use(spool: Command, spool_root: Path, own_nvml: FakeNvml) -> None:
    """With a dispatcher that watches them: who has which, how much of the memory is taken, how much they compute."""
    own_nvml.gpu("GPU-a", bus=1, total=80 * GIB, free=20 * GIB)
    own_nvml.gpu("GPU-b", bus=2)
    own_nvml.add("utilisation GPU-a 87 40\nheat GPU-a 64 310400")
    dispatcher = start("dispatch")
    try:
        wait_for(Spool(str(spool_root)).dispatcher_lives)
        put_job(spool_root, "training", 'command = "sleep 1000"\ngpus = 1\n')
        wait_for(lambda: (spool_root / "running/training.toml").exists())

        async def steps(screen: Screen) -> None:
            await screen.sees("━━━━━━━╾── 60G/80G", "█  87%   64°C  310W  ", "?  training", "dispatching", "1/2")
            own_nvml.hang("nvmlDeviceGetMemoryInfo_v2")
            own_nvml.hang("nvmlDeviceGetMemoryInfo")
            await screen.on("training")
            await screen.press("c", "y")
            await screen.hears("training is being stopped")
            await screen.sees("no active jobs")

        drive(spool_root, steps, (100, 30))
        own_nvml.mend()
    finally:
        dispatcher.terminate()
        dispatcher.communicate(timeout=PATIENCE_S)


def test_a_real_run_is_seen_from_its_start_to_its_end(spool: Command, spool_root: Path, dispatcher: Popen[str]) -> None:
    """A job that is submitted while one looks starts, writes, is stopped by a key and stands in the history."""

    async def steps(screen: Screen) -> None:
        await screen.sees("dispatching", "no active jobs", "CPU ", "MEM ")
        put_job(spool_root, "live", 'command = "echo begun; sleep 1000"\ntime_limit = "1h"\n')
        await screen.sees("live", "running", "begun", "LEFT", "≤59m", "s left · run 1")
        await screen.press("h")
        await screen.sees("Hold live? It is stopped")
        await screen.press("y")
        await screen.hears("live is stopped and held")
        await screen.until(lambda: (spool_root / "jobs/live/1/result.toml").exists(), "the end of the run")
        await screen.press("2")
        await screen.press("1")
        await screen.on("live")
        await screen.press("r")
        await screen.until(lambda: (spool_root / "jobs/live/2/log").exists(), "the second run")
        await screen.sees("live · running", "run 2")
        await screen.press("c")
        await screen.sees("Cancel live, which has run for")
        await screen.press("y")
        await screen.sees("no active jobs")
        await screen.press("2")
        await screen.sees("live", "cancelled")

    drive(spool_root, steps, (160, 30))


def test_edit_leaves_the_terminal_to_the_editor(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`e` runs the editor on the job's file and comes back; where that fails what it said is read first."""
    path = put_job(spool_root, "one", 'command = "true"\npriority = 5\n')
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i "s/priority = 5/priority = 77/" "$1"\n')
    editor.chmod(0o755)
    asked: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda text="": asked.append(text) or "")
    monkeypatch.setenv("EDITOR", str(editor))
    monkeypatch.setattr(Top, "suspend", lambda self: contextlib.nullcontext())  # no terminal is here to be left

    async def steps(screen: Screen) -> None:
        await screen.on("one")
        await screen.press("e")
        await screen.until(lambda: "priority = 77" in path.read_text(), "the edit")
        assert asked == []
        monkeypatch.setenv("EDITOR", "false")
        await screen.press("e")
        await screen.until(lambda: asked, "the question")
        assert path.read_text() == 'command = "true"\npriority = 77\n'
        await screen.sees("one")

    drive(spool_root, steps)


def test_ten_thousand_jobs_are_drawn_as_fast_as_ten(spool: Command, spool_root: Path) -> None:
    """Only the lines in view are made, whatever the length of the list; the ends are one key away."""
    drawn: list[str] = []

    async def steps(screen: Screen) -> None:
        await screen.until(lambda: screen.app._seen, "the first look")
        listed = [JobRow(name=f"job_{at}", state=State.QUEUED, reason="x") for at in range(10_000)]
        rows = [ListedJob(row, row.name) for row in listed]
        jobs = screen.app.query_one("#queue", RowList)
        screen.app._looks.end()
        jobs.show_rows(rows, "")
        await screen.press("end")
        await screen.sees("job_9999")
        look = jobs._look
        jobs._look = lambda one: drawn.append(one.name) or look(one)  # type: ignore[method-assign, func-returns-value]
        await screen.press("home")
        await screen.sees("job_0 ")
        assert set(drawn) <= {f"job_{at}" for at in (*range(24), *range(9970, 10_000))}
        jobs.show_rows([ListedJob(JobRow(name="new", state=State.RUNNING), "new"), *rows], "")
        assert screen.current == "job_0"

    drive(spool_root, steps)


def test_without_a_terminal_or_a_usable_one_it_says_so(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pipe, under TERM=dumb and without textual one line says what to do instead."""
    said = spool("top")
    assert said.code == 1
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert main.run(["top"]) == 1
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.delitem(sys.modules, "spool.extras.top.app")
    monkeypatch.delitem(sys.modules, "spool.extras.top.widgets")
    assert main.run(["top"]) == 1


def test_a_log_is_what_a_terminal_would_show() -> None:
    """What is drawn over is gone, and so are colours; the last line is shown before it has an end, and old ones go."""
    assert log_lines("a\x1b[1mb\x1b[0m\r\nx\ry\n漢\tz\nlast".encode()) == ["ab", "y", "漢       z", "last"]
    assert log_lines(b"") == []
    lines = log_lines(b"".join(b"%d\n" % number for number in range(5000)))
    assert (len(lines), lines[-1]) == (1000, "4999")


@pytest.mark.parametrize(("part", "seen"), [(0, "────"), (0.001, "╾───"), (0.5, "━━──"), (1, "━━━━"), (9, "━━━━")])
def test_a_bar_shows_whatever_is_not_nothing(part: float, seen: str) -> None:
    """A bar has its width whatever the part, and a little is not nothing."""
    assert bar(part, 4) == seen


def test_what_others_have_of_a_shared_machine_is_counted(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bars count what they hold, and a GPU names them, without the control characters of their names."""
    others = (BOB, UserShare(user=HOSTILE[1], leases=1, cpus=2), UserShare(user="u", leases=1, cpus=4))
    Arbiter(spool_root, monkeypatch).says(*others, by_gpu={"bob": None, HOSTILE[1]: None})
    with_gpus(spool_root, monkeypatch, 2, cpus=16, cpus_free=14, memory_bytes=32 * GIB)

    async def steps(screen: Screen) -> None:
        await screen.sees("2+9/16", "0B+8G/32G", "0+2/2", "bob's lease", r"\u001b[2Jclear's lease")
        assert "\x1b" not in screen.text

    drive(spool_root, steps, size=(100, 40))


def with_gpus(root: Path, monkeypatch: pytest.MonkeyPatch, number: int, **more: int) -> None:
    """Have the view of a dispatcher that watches so many GPUs."""
    now = time.time_ns()
    gpus = [a_gpu_view(at, memory_free_bytes=20 * GIB) for at in range(number)]
    lay(root, a_view(now, machine=a_machine(**more, gpus=tuple(gpus), gpus_at_ns=now)))
    monkeypatch.setattr(Spool, "service", lambda self: Service.SERVED)


def test_nothing_is_cut_at_forty_columns(spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts have their own line, sentences take several, GPUs have no bars, and the keys are the main ones."""
    put_job(spool_root, "later", 'command = "true"\ncpus = 100000\n')
    put_job(spool_root, "parked", place="held")
    with_gpus(spool_root, monkeypatch, 2)

    async def steps(screen: Screen) -> None:
        await screen.sees("dispatching", "1 queued · 1 held", "GPU 1 60G/80G", " 87%", "? help", "q quit", "later")
        await screen.on("later")
        await screen.until(lambda: "never fits: needs 100000 CPUs" in " ".join(screen.text.split()), "the answer")
        below = screen.lines[1:]  # the first line has the path of the spool, however long it is
        assert not any("…" in line for line in below), screen.text

    drive(spool_root, steps, (40, 24))


def test_tasks_that_are_alike_share_a_line_and_marked_jobs_a_change(spool: Command, spool_root: Path) -> None:
    """A line of tasks stands for all of them, Space marks it, and a key acts on all marked; the filter unfolds it."""
    expand(spool_root, "sweep", 5, 'command = "true"\narray = "1-5"\n')
    for at in range(1, 6):
        put_job(spool_root, f"sweep_{at}")
    for name in ("one", "two"):
        put_job(spool_root, name)

    async def steps(screen: Screen) -> None:
        await screen.sees("sweep_[1-5]", "one", "two")
        await screen.press("home", "down")
        assert screen.current == "sweep_1"
        await screen.press("space")
        await screen.on("two")
        await screen.press("space")
        await screen.sees("●sweep_[1-5]", "●two", "6 marked")
        await screen.press("h")
        await screen.hears("sweep_1 held, sweep_2 held, sweep_3 held, sweep_4 held and 2 more")
        held = {path.stem for path in (spool_root / "held").iterdir()}
        assert held == {"two", *(f"sweep_{at}" for at in range(1, 6))}
        await screen.press("escape", "slash", *"sweep_3", "enter")
        await screen.until(lambda: "●" not in screen.text and "sweep_[" not in screen.text, "the filter")
        await screen.until(lambda: screen.current == "sweep_3", "the task")
        await screen.press("r")
        await screen.hears("sweep_3 released")
        await screen.press("escape")
        await screen.sees("sweep_[1-2,4-5]")
        await screen.on("one")
        await screen.press("space", "c")
        await screen.sees("Cancel one?")
        await screen.press("n")
        await screen.on("two")
        await screen.press("space", "c")
        await screen.sees("Cancel 2 jobs?")
        await screen.press("y")
        await screen.hears("one cancelled, two cancelled")
        put_job(spool_root, "three")
        put_job(spool_root, "live", place="running")
        for name in ("three", "live"):
            await screen.on(name)
            await screen.press("space")
        await screen.press("c")
        await screen.sees("Cancel 2 jobs, 1 of them running?")
        await screen.press("n")

    drive(spool_root, steps, (100, 30))


@pytest.mark.parametrize("width", [40, 80])
def test_names_and_facts_are_whole(width: int, spool: Command, spool_root: Path) -> None:
    """At 40 columns the reason is below the list alone; at 80 too the facts of a job take several lines."""
    for at in range(3):
        put_job(spool_root, f"train_vit_base_{at}", f'command = "true"\ncpus = {100000 + at}\nmemory = "4G"\n')

    async def steps(screen: Screen) -> None:
        await screen.sees("train_vit_base_0", "train_vit_base_1", "train_vit_base_2", "priority 10")
        assert this_user() in " ".join(screen.text.split())
        assert ("REASON" in screen.text) == (width == 80)

    drive(spool_root, steps, (width, 30))
