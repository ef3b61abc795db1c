"""The screen of `spool top`: two lists, the output of a job below them, and the actions of the keys.

Threads do all reading and changing of the spool, so that a key never waits for a disk. They are daemons: one that hangs
in an unresponsive file system does not prevent an exit.
"""

from __future__ import annotations

import fnmatch
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import ClassVar

from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Resize
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.widgets import Footer, Input, Static

from spool.cli import control, group, ls, render
from spool.cli.submit import change_keys
from spool.cli.wait import attach_command
from spool.cli.why import sentences
from spool.client import autostart
from spool.client.output import outputs
from spool.client.requests import Change, Requests, told
from spool.core.errors import SpoolError, shown
from spool.core.layout import is_pattern
from spool.core.model import ALIVE, OUTCOMES, SECOND_NS, State
from spool.core.reasons import count_of, some_of
from spool.core.runtimes import part_done
from spool.extras.top import header
from spool.extras.top.widgets import Dialog, ListColumn, RowList, TextPane
from spool.query.details import why_never_begun
from spool.query.explain import why
from spool.query.listing import ListedJob, folded
from spool.query.overview import Overview, OverviewReader
from spool.query.rows import JobRow
from spool.store.ownership import this_user
from spool.store.reading import end_of_file
from spool.store.spool import Spool

_EVERY_S = 1.0
_REST = 4  # a pause lasts at least this many times the look, to spare a large spool on a slow disk
_LONGEST_S = 5.0
_AGAIN_S = 10.0  # the reason for a wait changes without the job's row
_LOW = 16  # lines: a lower terminal shows nothing below the list, and no GPUs, until requested
_GPU_LINES = 4  # even if the list below needs the room
_OUTPUT_BYTES, _LINES = 1 << 17, 1000  # of the end of an output
_LONGEST = 2000  # characters of a line
_PROGRESS_BAR = 24  # cells
_TAB = 8
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")  # as ECMA-48 has them
_WAITING = frozenset({State.QUEUED, State.HELD, State.INVALID})
_VIEWS = {"queue": "Queue", "history": "History"}
_NOTHING = {"queue": "no active jobs", "history": "no job has ended yet"}
_CHANGES: dict[str, tuple[control.JobVerb, Callable[..., Change | tuple[Change, ...]], str, str]] = {
    "hold": (control.HOLD, Requests.hold, "Hold {}? It is stopped, and starts over when released.", "Stop and hold it"),
    "release": (control.RELEASE, Requests.release, "", ""),
    "cancel": (control.CANCEL, Requests.cancel, "Cancel {}, which has run for {}?", "Cancel it"),
    "requeue": (control.REQUEUE, Requests.requeue, "Stop {} and run it again?", "Stop and requeue it"),
}
"""What a key asks for: the verb, what carries it out, and the question for a job that runs, with the word for yes."""
_NARROW_KEYS = " ? help  c cancel  / filter  q quit"
_THEMES = ("textual-dark", "textual-light")
_COLUMNS = {
    "queue": "name state priority cpus memory gpus busy user time left progress reason",
    "history": "name state exit cpus memory gpus user time reason",
}
_KEYS = (
    ("1 2", "the queue, the history"),
    ("↑ ↓ j k", "move; also PgUp PgDn Home End"),
    ("Enter", "the job's output, or why it waits, in full screen; Escape returns"),
    ("/", "filter; Enter keeps it, Escape clears it"),
    ("Space", "mark a job; h, r, c, p and R act on all that are marked; Escape unmarks them"),
    ("h r", "hold or release a job"),
    ("c Del", "cancel it, after confirmation"),
    ("p", "change its priority"),
    ("R", "run it again"),
    ("e", "edit its file in $VISUAL or $EDITOR"),
    ("a", "attach to its terminal, if it has one; Ctrl-B D returns"),
    ("Tab", "switch between the list and the output"),
    ("t", "dark or light"),
    ("q Ctrl-C", "quit"),
)
_MORE = (
    "\nThe filter matches words in the name, state, user, project or tags, and patterns such as sweep_*. Double-click "
    "a job to open it. The curve beside a GPU shows how busy it was in the last half hour."
)


class Top(App[int]):
    """The screen."""

    TITLE = "spool top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #header { height: auto; background: $panel; }
    #gpu-lines { height: auto; display: none; background: $panel; }
    #views { height: 1; background: $panel; link-style: none; link-color: $foreground; link-background: $panel;
             link-style-hover: bold; link-color-hover: $foreground; link-background-hover: $panel; }
    RowList { height: 1fr; scrollbar-size-vertical: 1; display: none; overflow-x: hidden; }
    RowList.chosen { display: block; }
    .rowlist--head { text-style: bold; color: $text-muted; background: $surface; }
    .rowlist--cursor { background: $primary; color: $text; text-style: bold; }
    .rowlist--cursor-blurred { background: $boost; text-style: bold; }
    #filter { display: none; height: 1; border: none; padding: 0 1; background: $boost; }
    #filter.asked { display: block; }
    #below { height: 30%; min-height: 4; }
    #facts { height: auto; max-height: 3; padding: 0 1; background: $panel; text-style: bold; }
    #pane { height: 1fr; padding: 0 1; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 1; }
    .narrow Footer { display: none; }
    #keys { display: none; height: 1; background: $panel; }
    .narrow #keys { display: block; }
    .low #below { display: none; }
    .enlarged RowList { display: none; }
    .enlarged #below { display: block; height: 1fr; }
    Dialog { align: center middle; }
    .dialog { width: 64; max-width: 95%; height: auto; max-height: 95%; padding: 1 2; background: $surface;
              border: round $primary; }
    .help { width: 84; }
    .answers { height: auto; margin-top: 1; align-horizontal: right; }
    .answers Button { margin-left: 2; }
    .hint { color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("h", "change('hold')", "Hold"),
        Binding("r", "change('release')", "Release"),
        Binding("c,delete", "change('cancel')", "Cancel", key_display="c"),
        Binding("p", "priority", "Prio"),
        Binding("R", "change('requeue')", "Again", key_display="R"),
        Binding("e", "edit", "Edit"),
        Binding("a", "attach", "Attach"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q,ctrl+c", "quit", "Quit", key_display="q"),
        Binding("1", "view('queue')", "Queue", show=False),
        Binding("2", "view('history')", "History", show=False),
        Binding("escape", "leave", "Back", show=False),
        Binding("t", "theme", "Theme", show=False),
    ]

    def __init__(self, root: str) -> None:
        super().__init__()
        self.animation_level = "none"
        self._root = root
        self._seen: Overview | None = None
        self._lines: Mapping[str, Sequence[ListedJob]] = {}  # of what was seen, in which similar tasks share one
        self._problem = ""
        self._view = "queue"
        self._facts = ""
        self._subject: JobRow | None = None  # below the list
        self._shown: tuple[object, list[str]] = None, []  # the subject whose lines were read, and these
        # Kept in attributes: messages still arrive while the screen is closed, when queries find no widgets any more.
        self._header, self._gpu_lines = Static(id="header"), Static(id="gpu-lines")
        self._facts_line, self._pane = Static(id="facts"), TextPane(id="pane")
        self._views = Static(id="views")
        self._filter = Input(placeholder="name, state, user, tag, or sweep_*", id="filter")
        self._lists = {
            view: RowList(list(map(self._column, names.split())), id=view) for view, names in _COLUMNS.items()
        }
        self._overviews = OverviewReader(root)
        self._looks = Repeater(self._look, partial(self._later, self._broken))
        self._reads = Repeater(self._read_subject, partial(self._later, self._broken))

    def compose(self) -> ComposeResult:
        """Create the widgets."""
        yield self._header
        yield self._gpu_lines
        yield self._views
        yield from self._lists.values()
        with Vertical(id="below"):
            yield self._facts_line
            yield self._pane
        yield self._filter
        yield Static(_NARROW_KEYS, id="keys", markup=False)
        footer = Footer(show_command_palette=False)
        footer.compact = True
        yield footer

    def on_mount(self) -> None:
        """Start reading."""
        self.action_view("queue")
        self._draw_header()
        self._looks.start()
        self._reads.start()
        self.set_interval(_EVERY_S, self._tick)

    def on_unmount(self) -> None:
        """End the threads."""
        self._looks.end()
        self._reads.end()

    # --- the threads ---------------------------------------------------------------------------------------------

    def _look(self) -> float:
        """Read the spool, send news, and return the time until the next look."""
        begun = time.monotonic()
        seen, problem = None, ""
        try:
            seen = self._overviews.look(time.time_ns())
            if seen is not None:
                spool = Spool(self._root)
                self._lines = {"queue": folded(spool, seen.active), "history": folded(spool, seen.ended, OUTCOMES)}
        except SpoolError as error:
            problem = str(error)
        except OSError as error:
            problem = f"cannot read the spool: {error.strerror or error}"
        self._later(self._looked, seen, problem)
        return min(max(_EVERY_S, _REST * (time.monotonic() - begun)), _LONGEST_S)

    def _read_subject(self) -> float:
        """Read the job under the cursor, send news, and return the time until the next look."""
        row = self._subject
        if row is None:
            return _EVERY_S
        try:
            lines = _reasons(self._root, row) if _waits(row) else _output(self._root, row)
        except SpoolError as error:
            lines = [shown(str(error))]
        except OSError as error:
            lines = [f"cannot read it: {shown(error.strerror or str(error))}"]
        if (_key(row), lines) != self._shown:
            anew = self._shown[0] != _key(row)
            self._shown = _key(row), lines
            self._later(self._subject_read, row, lines, anew)
        return _AGAIN_S if _waits(row) else _EVERY_S

    def _ask(self, names: Sequence[str], act: Callable[[Spool, str], str]) -> None:
        """Run *act* for each job in a thread and report the results; then look at once."""

        def do() -> None:
            done, failures = list[str](), list[str]()
            for name in names:
                try:
                    done.append(act(Spool.open(self._root), name))
                except SpoolError as error:
                    failures.append(str(error))
                except OSError as error:
                    failures.append(f"cannot change job {name}: {error.strerror or error}")
            for words in (done, failures):
                if words:
                    self._later(self._done, some_of(words), words is failures)

        threading.Thread(target=do, daemon=True).start()

    def _later(self, act: Callable[..., None], *values: object) -> None:
        """Call *act* on the screen with the news of a thread, unless the screen is closed."""
        with suppress(RuntimeError):
            self.call_later(lambda: act(*values) if self._is_open else None)

    def _broken(self, error: Exception) -> None:
        """Exit with the traceback of a bug in a thread."""
        raise error

    def _looked(self, seen: Overview | None, problem: str) -> None:
        """Show the spool; *seen* None: nothing new, or it is unusable (*problem*)."""
        if seen is None and problem == self._problem:
            return
        self._problem = problem
        if seen is not None:
            self._seen = seen
            self._draw_lists()
        self._draw_header()

    def _subject_read(self, row: JobRow, lines: Sequence[str], anew: bool) -> None:
        """Show the lines about a job, unless the cursor has moved on; *anew*: it is another job."""
        if self._subject is not None and _key(row) == _key(self._subject):
            if _waits(row):  # sentences, and no output
                room = max(self.size.width - 4, 1)
                lines = [part for line in lines for part in render.wrapped(line, room)]
            self._pane.show_lines(lines, anew=anew, from_top=_waits(row))

    def _done(self, words: str, failed: bool) -> None:
        severity: SeverityLevel = "error" if failed else "information"
        self.notify(shown(words), severity=severity, timeout=8 if failed else 4, markup=False)
        self._looks.wake()

    def _tick(self) -> None:
        if self._is_open:
            self._list.draw_changed()
            self._draw_facts()

    def _column(self, name: str) -> ListColumn:
        field = ls.FIELDS[name]

        def text(one: ListedJob) -> str:
            if name == "left":
                row = self._foreseen(one.row)
                return row.outlook(time.time_ns()) if row.left or row.start else ""
            if name in ("progress", "reason") and self.size.width < header.NARROW:  # these stand below the list
                return ""
            # A running job needs no reason.
            words = field.text(one, time.time_ns())
            part = part_done(one.row.progress) if name == "reason" and not words else None
            return words if part is None else header.bar(part, _PROGRESS_BAR)

        return ListColumn(field.column, text)

    def _foreseen(self, row: JobRow) -> JobRow:
        """Return *row* with what is expected of it at this moment."""
        return self._seen.outlook.of(row, time.time_ns()) if self._seen is not None else row

    # --- drawing -------------------------------------------------------------------------------------------------

    @property
    def _base(self) -> Screen[object]:
        """The screen below every question."""
        return self.screen_stack[0]

    @property
    def _is_open(self) -> bool:
        """Whether there is a screen to draw on: messages arrive even while it is closed."""
        return bool(self.screen_stack) and bool(self._base.query(TextPane))

    @property
    def _list(self) -> RowList:
        return self._lists[self._view]

    @property
    def _row(self) -> JobRow | None:
        return self._list.current

    def _draw_header(self) -> None:
        seen, (width, height) = self._seen, self.size
        self._header.update(header.header(seen, self._root, self._problem, width))
        gpus = self._gpu_lines
        gpus.display = seen is not None and bool(seen.gpus) and height >= _LOW
        if seen is not None:
            gpus.update(header.gpu_lines(seen.gpus, width, max(_GPU_LINES, height // 4 - 2)))
        self._draw_views()

    def _draw_views(self) -> None:
        seen, text = self._seen, Text(no_wrap=True, overflow="ellipsis")
        counts = (0, 0) if seen is None else (len(seen.active), len(seen.ended))
        for at, (view, number) in enumerate(zip(_VIEWS, counts, strict=True), 1):
            style = Style(bold=True, reverse=True) if view == self._view else Style()
            click = Style.from_meta({"@click": f"app.view('{view}')"})
            text.append(f" {at} {_VIEWS[view]} {number} ", style + click)
        if pattern := self._filter.value.strip():
            text.append(f"  filter: {shown(pattern)}", style="italic")
        self._views.update(text)

    def _draw_lists(self) -> None:
        seen, words = self._seen, self._filter.value.lower().split()
        if seen is None:
            return
        for view, rows in zip(_VIEWS, (seen.active, seen.ended), strict=True):
            found = [ListedJob(row, row.name) for row in rows if _matches(row, words)] if words else self._lines[view]
            self._lists[view].show_rows(found, "no job matches the filter" if rows else _NOTHING[view])

    def _draw_facts(self) -> None:
        row = self._row
        marked = f"{len(self._list.marked)} marked · " if self._list.marked else ""
        text = f"{marked}{header.facts(self._foreseen(row), time.time_ns())}" if row is not None else ""
        text = "\n".join(header.in_lines(text, max(self.size.width - 2, 1)))
        if text != self._facts:
            self._facts = text
            self._facts_line.update(Text(text, overflow="ellipsis"))

    @on(RowList.Moved)
    def moved(self) -> None:
        """Read the job under the cursor."""
        if not self._is_open:
            return
        row, before = self._row, self._subject
        self._draw_facts()
        if row is None or before is None or _key(row) != _key(before):
            self._pane.show_lines((), anew=True)
            self._subject = row
            self._reads.wake()

    @on(Resize)
    def resized(self) -> None:
        """Hide parts that do not fit."""
        self._base.set_class(self.size.height < _LOW, "low")
        self._base.set_class(self.size.width < header.NARROW, "narrow")
        self._draw_header()

    # --- keys ----------------------------------------------------------------------------------------------------

    def action_view(self, view: str) -> None:
        """Show another list."""
        self._view = view
        self._base.remove_class("enlarged")
        for each in _VIEWS:
            self._lists[each].set_class(each == view, "chosen")
        self._list.focus()
        self._draw_header()
        self.moved()

    @on(RowList.Opened)
    def action_enlarge(self) -> None:
        """Give the job the whole screen, or restore the list."""
        if self._row is None and not self._base.has_class("enlarged"):
            return
        enlarged = not self._base.has_class("enlarged")
        self._base.set_class(enlarged, "enlarged")
        (self._pane if enlarged else self._list).focus()

    def action_leave(self) -> None:
        """Close the last thing that was opened: the job, else the marks, else the filter."""
        if self._base.has_class("enlarged"):
            self.action_enlarge()
            return
        if self._list.marked:
            self._list.marked.clear()
            self._list.refresh()
            return
        self._filter.clear()
        self.filter_kept()

    def action_filter(self) -> None:
        """Ask for words to filter by."""
        self._filter.add_class("asked").focus()

    @on(Input.Changed, "#filter")
    def filter_changed(self) -> None:
        """Filter while the user types."""
        self._draw_lists()
        self._draw_views()

    @on(Input.Submitted, "#filter")
    def filter_kept(self) -> None:
        """Keep the filter and return to the list."""
        self._filter.remove_class("asked")
        self._list.focus()

    def action_help(self) -> None:
        """Show the keys."""
        table = Table.grid(padding=(0, 2))
        for key, does in _KEYS:
            table.add_row(Text(key, style="bold"), Text(does))
        self.push_screen(Dialog(table, Text(_MORE)))

    def action_theme(self) -> None:
        """Switch between dark and light."""
        self.theme = _THEMES[self.theme == _THEMES[0]]

    def action_change(self, which: str) -> None:
        """Hold, release, cancel or requeue the jobs; after confirmation if one is running, and before every cancel."""
        rows, what = self._jobs()
        if not rows:
            return
        verb, act, question, yes = _CHANGES[which]
        running = [row for row in rows if row.state in ALIVE]
        if len(rows) > 1 and running:
            question, yes = f"{which.capitalize()} {what}, {len(running)} of them running?", which.capitalize()
        elif not running:
            question = "Cancel {}?" if which == "cancel" else ""

        def do(spool: Spool, name: str) -> str:
            found = act(Requests(spool, this_user()), name)
            changes = (found,) if isinstance(found, Change) else found
            serves = verb.needs_dispatcher({change.kind for change in changes})
            return "; ".join(filter(None, (told(name, changes), autostart.ensure(spool.root) if serves else "")))

        def answered(answer: str | None) -> None:
            if answer is not None:
                self._ask([row.name for row in rows], do)

        if question:
            ran_ns = rows[0].time_ns(time.time_ns()) or 0
            ran = render.duration(ran_ns - ran_ns % SECOND_NS)
            self.push_screen(Dialog(Text(shown(question.format(what, ran))), yes=yes), answered)
        else:
            answered("")

    def action_priority(self) -> None:
        """Ask for another priority."""
        rows, what = self._jobs()
        if not rows:
            return

        def answered(text: str | None) -> None:
            if text is not None:
                self._ask([row.name for row in rows], lambda spool, name: _with_priority(spool, name, text))

        self.push_screen(Dialog(Text(shown(f"Priority of {what}")), value=str(rows[0].priority or 0)), answered)

    def action_edit(self) -> None:
        """Edit the job's file as `spool edit` does."""
        if (row := self._row) is not None:
            self._away(lambda: group.run(["--spool", self._root, "edit", "--", row.name]))

    def action_attach(self) -> None:
        """Attach to the terminal of the job."""
        if (row := self._row) is None:
            return
        try:
            words = attach_command(Spool.open(self._root), row.name, row.run)
        except SpoolError as error:
            self._done(str(error), failed=True)
            return
        self._away(lambda: subprocess.run(words, check=False).returncode)

    def _away(self, act: Callable[[], int]) -> None:
        """Give the terminal to *act*; if it fails, wait until its output has been read."""
        with self.suspend():
            before = signal.signal(signal.SIGINT, signal.default_int_handler)  # otherwise Ctrl-C would end the screen
            try:
                if act() != 0:
                    input("Press Enter to return to `spool top` ")
            except (KeyboardInterrupt, EOFError):
                pass
            finally:
                signal.signal(signal.SIGINT, before)
        self.refresh()
        self._looks.wake()

    def _jobs(self) -> tuple[list[JobRow], str]:
        """Return the jobs that are marked, or else under the cursor, in words too; without one, show a message."""
        rows = self._list.chosen
        if not rows:
            self.notify("no job is selected", severity="warning")
        return rows, rows[0].name if len(rows) == 1 else count_of(len(rows), "job")


def _with_priority(spool: Spool, name: str, text: str) -> str:
    try:
        priority = int(text.strip())
    except ValueError:
        raise SpoolError(f"cannot change job {name}: {text!r} is not a whole number") from None
    return change_keys(spool, name, {"priority": priority})


def _matches(row: JobRow, words: Sequence[str]) -> bool:
    texts = [each.lower() for each in (row.name, row.state, row.user or "", row.project or "", *row.tags)]
    return all(
        any(fnmatch.fnmatchcase(text, word) if is_pattern(word) else word in text for text in texts) for word in words
    )


class Repeater(threading.Thread):
    """Calls *turn* again and again, each time after the seconds that it returned, or sooner when woken.

    Its error, which is a bug, is passed to *broken*, and ends the thread.
    """

    def __init__(self, turn: Callable[[], float], broken: Callable[[Exception], object]) -> None:
        super().__init__(daemon=True)
        self._turn = turn
        self._broken = broken
        self._woken = threading.Event()
        self._over = False

    def run(self) -> None:
        """Run until `end` is called."""
        try:
            while not self._over:
                self._woken.clear()
                self._woken.wait(self._turn())
        except Exception as error:
            self._broken(error)

    def wake(self) -> None:
        """Start the next turn at once."""
        self._woken.set()

    def end(self) -> None:
        """Start no further turn."""
        self._over = True
        self._woken.set()


def _key(row: JobRow) -> tuple[object, ...]:
    """Return a value that changes when something else must be read about a job."""
    return row.name, row.place, row.run, row.state, row.reason if row.state in _WAITING else ""


def _waits(row: JobRow) -> bool:
    return row.run is None or row.state in _WAITING


def _reasons(root: str, row: JobRow) -> list[str]:
    if row.state is State.INVALID:
        return list(map(shown, row.reason.split("\n")))
    return list(map(shown, sentences(why(Spool(root), row.name))))


def _output(root: str, row: JobRow) -> list[str]:
    """Return the end of the output of a run."""
    spool = Spool(root)
    assert row.run is not None
    where = outputs(spool, row.name, row.run).stdout
    if lines := log_lines(end_of_file(where, _OUTPUT_BYTES, follow=True) if where is not None else b""):
        return lines
    if not row.state.ended:
        return ["no output yet"]
    return [why_never_begun(spool, row.name, row.run) or "no output"]


def log_lines(data: bytes) -> list[str]:
    """Return the last lines of an output as a terminal would show them: a redrawn progress bar is one line."""
    lines = data.split(b"\n")
    return [_drawn(line) for line in (lines if lines[-1] else lines[:-1])[-_LINES:]]


def _drawn(line: bytes) -> str:
    r"""Return the visible rest of a line in which \r overwrites; without colours, controls escaped."""
    text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
    text = _ESCAPE.sub("", text).expandtabs(_TAB)
    return shown(text[:_LONGEST] + ("…" if len(text) > _LONGEST else ""))
