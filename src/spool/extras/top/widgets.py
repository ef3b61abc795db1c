"""The widgets of the screen: lists that draw only visible lines, a text, and a dialog."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from msgspec import Struct
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.geometry import Region, Size
from textual.message import Message
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.visual import VisualType
from textual.widgets import Button, Input, Label, Static

from spool.cli import render
from spool.core.errors import shown
from spool.query.listing import ListedJob
from spool.query.rows import JobRow

_SAMPLE = 200  # rows whose texts determine the column widths of a long list
_END = 10**9  # rows


class ListColumn(Struct, frozen=True):
    """A column of a list: its layout, and its text for a line at this moment."""

    column: render.Column
    text: Callable[[ListedJob], str]


class RowList(ScrollView, can_focus=True):
    """A list of jobs under a heading; only visible ones are drawn, so its length costs nothing.

    The cursor stays on its job while others come and go, at the same line of the screen. At the top of a list without
    the focus it stays at the top.
    """

    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup,ctrl+b", "page(-1)", "A page up", show=False),
        Binding("pagedown,ctrl+f", "page(1)", "A page down", show=False),
        Binding("home,g", f"move(-{_END})", "First", show=False),
        Binding("end,G", f"move({_END})", "Last", show=False),
        Binding("enter", "open", "Open", show=False),
        Binding("space", "mark", "Mark", show=False),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {"rowlist--head", "rowlist--cursor", "rowlist--cursor-blurred"}

    class Moved(Message):
        """The cursor is on another row, or on none."""

    class Opened(Message):
        """Enter was pressed on a row, or it was clicked twice."""

    def __init__(self, columns: Sequence[ListColumn], *, id: str) -> None:  # noqa: A002 - textual calls it so
        super().__init__(id=id)
        self._columns = columns
        self._rows: Sequence[ListedJob] = ()
        self._at = 0
        self.marked: set[str] = set()
        self._nothing = ""
        self._kept: list[int] = []
        self._widths: list[int] = []
        self._drawn: dict[int, tuple[list[str], str]] = {}

    @property
    def current(self) -> JobRow | None:
        """The job under the cursor, of similar tasks the first."""
        return self._rows[self._at].row if self._rows else None

    @property
    def chosen(self) -> list[JobRow]:
        """The marked jobs, or those on the line under the cursor."""
        marked = [row for one in self._rows for row in one.tasks or (one.row,) if row.name in self.marked]
        lines = self._rows[self._at : self._at + 1]
        return marked or [row for one in lines for row in one.tasks or (one.row,)]

    def show_rows(self, rows: Sequence[ListedJob], nothing: str) -> None:
        """Show other jobs, or *nothing* where there are none."""
        before, at = self.current, self._at
        if before is not None and (at or self.has_focus):
            alike = [place for place, one in enumerate(rows) if one.row.name == before.name]
            at = next((place for place in alike if rows[place].row.place == before.place), [*alike, at][0])
        moved_by = at - self._at
        self._rows, self._nothing = rows, nothing
        self.marked &= {row.name for one in rows for row in one.tasks or (one.row,)}
        self._at = max(0, min(at, len(rows) - 1))
        self._lay_out()
        if moved_by:
            self.scroll_to(y=self.scroll_offset.y + moved_by, animate=False, force=True, immediate=True)
        self._keep_in_view()
        self.refresh()
        if before is not None or self.current is not None:
            self.post_message(self.Moved())

    def draw_changed(self) -> None:
        """Redraw the lines whose texts have changed, such as the run time of a job."""
        for y, (texts, style) in list(self._drawn.items()):
            at = self.scroll_offset.y + y - 1
            if at < len(self._rows) and self._look(self._rows[at]) != (texts, style):
                self.refresh(Region(0, y, self.size.width, 1))

    def on_resize(self) -> None:
        """Lay out the columns again."""
        self._lay_out()
        self._keep_in_view()

    def render_line(self, y: int) -> Strip:
        """Return a visible line."""
        width = self.size.width
        if y == 0:
            style = self.get_component_rich_style("rowlist--head")
            return self._strip([self._columns[at].column.title for at in self._kept], style, width)
        at = self.scroll_offset.y + y - 1
        if at >= len(self._rows):
            self._drawn.pop(y, None)
            text = f" {self._nothing}" if not self._rows and y == 1 else ""
            return Strip([Segment(text, self.rich_style)]).adjust_cell_length(width, self.rich_style)
        texts, colour = self._drawn[y] = self._look(self._rows[at])
        style = self.rich_style + Style.parse(colour)
        if at == self._at:
            name = "rowlist--cursor" if self.has_focus else "rowlist--cursor-blurred"
            style = self.get_component_rich_style(name)
        row = self._rows[at].row
        return self._strip([texts[at] for at in self._kept], style, width, "●" if row.name in self.marked else " ")

    def _strip(self, texts: Sequence[str], style: Style, width: int, mark: str = " ") -> Strip:
        columns = [self._columns[at].column for at in self._kept]
        cells = [
            render.cell(text, column, room) for text, column, room in zip(texts, columns, self._widths, strict=True)
        ]
        return Strip([Segment(mark + render.GAP.join(cells), style)]).adjust_cell_length(width, style)

    def _look(self, one: ListedJob) -> tuple[list[str], str]:
        return [shown(column.text(one)) for column in self._columns], render.style_of_row(one.row)

    def _lay_out(self) -> None:
        """Set the column widths, by the first rows and some others; drop empty columns."""
        some = [*self._rows[:_SAMPLE], *self._rows[_SAMPLE :: max(1, len(self._rows) // _SAMPLE)]]
        texts = [self._look(one)[0] for one in some]
        said = [at for at in range(len(self._columns)) if not texts or any(line[at] for line in texts)]
        columns = [self._columns[at].column for at in said]
        cells = [[column.title for column in columns], *([line[at] for at in said] for line in texts)]
        kept, self._widths = render.layout(columns, cells, max(1, self.size.width - 2))
        self._kept = [said[at] for at in kept]
        self._drawn.clear()
        self.virtual_size = Size(self.size.width, len(self._rows) + 1)

    def _keep_in_view(self) -> None:
        room = max(1, self.size.height - 1)
        top = self.scroll_offset.y
        wanted = min(max(top, self._at - room + 1), self._at)
        if wanted != top:
            self.scroll_to(y=wanted, animate=False, force=True, immediate=True)

    def watch_has_focus(self, _: bool) -> None:
        """Redraw the cursor, whose style depends on the focus."""
        self.refresh()

    def action_move(self, by: int) -> None:
        """Move the cursor by some rows."""
        self._go(self._at + by)

    def action_page(self, by: int) -> None:
        """Move the cursor by some screens."""
        self._go(self._at + by * max(1, self.size.height - 2))

    def _go(self, at: int) -> None:
        at = max(0, min(at, len(self._rows) - 1))
        if at != self._at:
            self._at = at
            self._keep_in_view()
            self.refresh()
            self.post_message(self.Moved())

    def action_mark(self) -> None:
        """Mark the jobs on the line under the cursor, or unmark them, and go on to the next line."""
        for one in self._rows[self._at : self._at + 1]:
            names = {row.name for row in one.tasks or (one.row,)}
            self.marked = self.marked - names if one.row.name in self.marked else self.marked | names
        self.refresh()
        self.action_move(1)

    def action_open(self) -> None:
        """Report that the row was opened."""
        if self._rows:
            self.post_message(self.Opened())

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the job; on a second click open it."""
        at = self.scroll_offset.y + event.y - 1
        if event.y > 0 and at < len(self._rows):
            self._go(at)
            if event.chain == 2:
                self.action_open()


class TextPane(ScrollView, can_focus=True):
    """Lines of text. While its end is in view it stays there as lines are added."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - textual calls it so
        super().__init__(id=id)
        self._lines: Sequence[str] = ()

    def show_lines(self, lines: Sequence[str], *, anew: bool, from_top: bool = False) -> None:
        """Show other lines; *anew*: of another text, from their end on, or *from_top*."""
        at_end = (anew or self.is_vertical_scroll_end) and not from_top
        if anew and from_top:
            self.scroll_to(x=0, y=0, animate=False, force=True, immediate=True)
        self._lines = lines
        self.virtual_size = Size(max(map(cell_len, lines), default=0), len(lines))
        if at_end:
            self.scroll_to(x=0 if anew else None, y=len(lines), animate=False, force=True, immediate=True)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Return a visible line."""
        x, top = self.scroll_offset
        at = top + y
        text = self._lines[at] if at < len(self._lines) else ""
        return Strip([Segment(text, self.rich_style)]).crop_extend(x, x + self.size.width, self.rich_style)


class Dialog(ModalScreen[str | None]):
    """A page over the lists: its *texts*, below them a *value* to edit, or the word for *yes* beside that for no.

    It returns the text, or "" for yes; None: it was left.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "yes", "Yes"),
        Binding("n,escape,q,question_mark,enter", "leave", "No"),
        Binding("left,right", "app.focus_next", "Other", show=False),
    ]

    def __init__(self, *texts: VisualType, value: str | None = None, yes: str = "") -> None:
        super().__init__()
        self._texts, self._value, self._yes = texts, value, yes

    def compose(self) -> ComposeResult:
        """Create the dialog; the text, or the safe answer, has the focus."""
        asks = bool(self._yes) or self._value is not None
        with VerticalScroll(classes="dialog" if asks else "dialog help", can_focus=not asks):
            yield from map(Static, self._texts)
            if self._value is not None:
                yield Input(self._value, compact=True)
                yield Label("Enter saves, Escape cancels", classes="hint")
            elif self._yes:
                with Horizontal(classes="answers"):
                    yield Button("Leave it (n)", id="no", compact=True)
                    yield Button(Text(f"{self._yes} (y)"), id="yes", variant="error", compact=True)

    @on(Button.Pressed)
    def pressed(self, event: Button.Pressed) -> None:
        """Answer by mouse, or Enter."""
        self.dismiss("" if event.button.id == "yes" else None)

    @on(Input.Submitted)
    def submitted(self, event: Input.Submitted) -> None:
        """Return the typed text."""
        self.dismiss(event.value)

    def action_yes(self) -> None:
        """Answer by a key."""
        if self._yes:
            self.dismiss("")

    def action_leave(self) -> None:
        """Close it without an answer."""
        self.dismiss(None)
