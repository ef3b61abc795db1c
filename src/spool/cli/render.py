"""Values as text: a table on a terminal, aligned text in a pipe, JSON for programs. Nothing is computed here.

Numbers and instants arrive as integers with their unit in the name; this module formats them.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

from msgspec import Struct

from spool.core.errors import ExitCode, InvalidFile, SpoolError, cannot, shown
from spool.core.model import OUTCOMES, GpuUse, Grant, Result, State
from spool.core.reasons import count_of, pools_in_words
from spool.core.units import show_duration, show_percent, show_size
from spool.formats.capabilities import contributed
from spool.store.disk import remedy_for

if TYPE_CHECKING:
    from spool.query.rows import JobRow  # `submit` needs no list
    from spool.query.timeline import Timeline


# Errors that any file system can have; any other OSError is a bug and gets a traceback.
_EXPECTED = frozenset(
    {
        errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EMFILE,
        errno.ENFILE, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EXDEV, errno.EMLINK,
        errno.EISDIR, errno.EEXIST, errno.ENXIO, errno.ENOTEMPTY, errno.ENOMEM, errno.EAGAIN, errno.ESPIPE,
    }
)  # fmt: skip


def tell(message: str) -> None:
    """Print a message on stderr."""
    print(f"spool: {shown(message)}", file=sys.stderr)


def code_of(act: Callable[[], int]) -> int:
    """Run a verb and return its exit code; an expected error prints one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # do not fail if the terminal lacks a character
    try:
        return act()
    except InvalidFile as error:
        _tell_invalid(error)
        return int(error.exit_code)
    except SpoolError as error:
        tell(str(error))
        return int(error.exit_code)
    except OSError as error:
        if isinstance(error, BrokenPipeError) or error.errno not in _EXPECTED:
            raise
        where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "the disk"
        tell(cannot("use", where, error.strerror or str(error), remedy=remedy_for(error)))
        return int(ExitCode.SPOOL_UNUSABLE)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the terminal has shown ^C
        return int(ExitCode.INTERRUPTED)


def _tell_invalid(error: InvalidFile) -> None:
    """Print each problem of a file on its own line, as compilers do."""
    if len(error.problems) < 2:
        tell(str(error))
        return
    tell(f"cannot use {error.what}: it has {error.count:,} problems")
    for problem in error.problems:
        print(f"  {shown(problem.message)}", file=sys.stderr)


GAP = "  "
"""The separator of two columns."""
_COMFORT = {"": 1 << 30, "middle": 16, "end": 24, "words": 24}  # cells; narrower columns make others drop
_AMPLE = {"middle": 32, "end": 48}  # cells; only then do the least important columns come back
DATE = 10  # cells
_BAR = 20  # cells of a bar
_REDRAWN_NS = 100_000_000  # the shortest time between two redraws
_NARROW = 5  # cells: no column becomes narrower than this

GREY = "#888888"
_TONES = {"good": "dim", "bad": "red", "warn": "dim yellow"}
_LOOKS = {
    State.SUBMITTED: ("blue", GREY),
    State.QUEUED: ("", GREY),
    State.HELD: ("cyan", GREY),
    State.INVALID: ("bold red", GREY),
    State.STARTING: ("green", "#56b4e9"),
    State.RUNNING: ("green", "#56b4e9"),
    State.STOPPING: ("yellow", "#0072b2"),
    **{state: (_TONES[each.tone], each.colour) for state, each in OUTCOMES.items()},
}
"""By state, the style of a line about a job, and its colour in charts; those of the page are in `page/page.css`."""


def style_of(state: State) -> str:
    """Return how a line about a job in that state is drawn."""
    return _LOOKS[state][0]


def style_of_row(row: JobRow) -> str:
    """Return how a line about that job is drawn: one that never fits stands out among those that wait."""
    if row.state is State.QUEUED and row.reason.startswith("never fits"):
        return "yellow"
    return style_of(row.state)


def colour_of(word: str) -> str:
    """Return the colour of a state in charts, grey for a word that is none."""
    return _LOOKS[State(word)][1] if word in set(State) else GREY


class Column(Struct, frozen=True):
    """One column of a table, and what happens when a terminal is too narrow for it.

    *cut*: it is shortened in the "middle" or at its "end", or continues below, broken between "words". *drop*: columns
    with a higher number are left out first; those with 0 stay, and those below 0 too unless remaining columns would
    become narrower than *least* cells. *optional*: it is left out everywhere if no row has a text for it.
    """

    title: str
    right: bool = False
    cut: Literal["", "middle", "end", "words"] = ""
    drop: int = 0
    least: int = _NARROW
    optional: bool = False

    def floor(self, natural: int) -> int:
        """Return its least width if its texts have at most *natural* cells."""
        return min(natural, self.least) if self.cut else natural

    def ample(self, natural: int) -> int:
        """Return the width that it has before unimportant columns get any."""
        return min(natural, _AMPLE[self.cut]) if self.cut in _AMPLE else self.comfort(natural)

    def comfort(self, natural: int) -> int:
        """Return its least width while other columns can be dropped; a time may always take two lines."""
        return min(natural, max(self.least, _COMFORT[self.cut]) if self.least != DATE else DATE)


def say(line: str = "", *, drawn: str = "", at_once: bool = False) -> None:
    """Print *line* on stdout, after our own symbols and colours in *drawn*."""
    print(f"{drawn}{shown(line)}", flush=at_once)


def say_text(text: str) -> None:
    """Print a text of several lines unchanged, except for control characters."""
    sys.stdout.write(shown(text, "\n\t"))


def _columns() -> int:
    import shutil  # imported here: slow to import, and only a terminal needs it

    return shutil.get_terminal_size((80, 24)).columns


def terminal_width() -> int | None:
    """Return the width of stdout's terminal in cells; None if it is not a terminal."""
    return _columns() if sys.stdout.isatty() else None


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str] | None = None) -> None:
    """Print a table; *styles* has one for each row, for terminals."""
    kept = [at for at, column in enumerate(columns) if not column.optional or any(row[at] for row in rows)]
    if len(kept) < len(columns):
        columns, rows = [columns[at] for at in kept], [[row[at] for at in kept] for row in rows]
    width = terminal_width()
    if width is None:
        sys.stdout.write(aligned(columns, rows))
        return
    coloured = painter()
    drawn = zip(("bold", *(styles or [""] * len(rows))), fitted(columns, rows, width), strict=True)
    sys.stdout.write("".join(f"{coloured(style, line)}\n" for style, lines in drawn for line in lines))


def aligned(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text: the columns padded with spaces, two of them between; the last is not padded."""
    padded: list[Sequence[str]] = []
    for column, cells in zip(columns, zip(*rows, strict=True) if rows else [()] * len(columns), strict=True):
        different = {column.title, *cells}  # most texts of a long column are equal
        plain = "".join(different).isprintable()
        texts = {cell: cell if plain else shown(cell) for cell in different}
        width = max(map(len, texts.values()))
        if column.right:
            texts = {cell: text.rjust(width) for cell, text in texts.items()}
        elif len(padded) < len(columns) - 1:
            texts = {cell: text.ljust(width) for cell, text in texts.items()}
        padded.append([texts[column.title], *map(texts.__getitem__, cells)])
    return "".join([f"{GAP.join(line).rstrip()}\n" for line in zip(*padded, strict=True)])


def fitted(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """Return a table as text in lines of at most *width* cells: a list of lines for the head and for each row."""
    cells = [[column.title for column in columns], *([shown(cell) for cell in row] for row in rows)]
    kept, widths = layout(columns, cells, width)
    found = []
    for line in cells:
        parts = [
            wrapped(line[at], room) if columns[at].cut == "words" else [line[at]]
            for at, room in zip(kept, widths, strict=True)
        ]
        found.append(
            [
                GAP.join(
                    cell(part[at] if at < len(part) else "", columns[column], room)
                    for part, column, room in zip(parts, kept, widths, strict=True)
                ).rstrip()
                for at in range(max(1, *map(len, parts)))
            ]
        )
    return found


def layout(columns: Sequence[Column], cells: Sequence[Sequence[str]], width: int) -> tuple[list[int], list[int]]:
    """Return the columns that fit into a table of that *width*, and their widths.

    *cells* are its texts, those of the head first.
    """
    from rich.cells import cell_len

    natural = [max(cell_len(line[at]) for line in cells) for at in range(len(columns))]
    worth = [len({line[at] for line in cells[1:]} - {""}) for at in range(len(columns))]
    if len(cells) == 2:  # with one row, no column is the same in every row
        worth = [2 * min(1, texts) for texts in worth]
    kept = _kept(columns, natural, worth, width)
    return kept, _widths([columns[at] for at in kept], [natural[at] for at in kept], width)


def _kept(columns: Sequence[Column], natural: Sequence[int], worth: Sequence[int], width: int) -> list[int]:
    """Return which columns fit: long texts are dropped first, then empty columns, those with one text, and by `drop`.

    *worth* is the number of different texts. Names and reasons have ample room before the less important come back, so
    that they are not shorter in a wider terminal.
    """
    kept = list(range(len(columns)))

    def leave_out(droppable: Callable[[Column], bool], wanted: Callable[[int], int]) -> None:
        going = sorted(
            (at for at in kept if droppable(columns[at])),
            key=lambda at: (columns[at].cut != "end", min(worth[at], 2), -columns[at].drop),
        )
        for at in going:
            if sum(map(wanted, kept)) + len(GAP) * (len(kept) - 1) <= width:
                return
            kept.remove(at)

    leave_out(lambda column: column.drop > 1, lambda at: columns[at].ample(natural[at]))
    leave_out(lambda column: column.drop > 0, lambda at: columns[at].comfort(natural[at]))
    leave_out(lambda column: column.drop < 0, lambda at: columns[at].floor(natural[at]))
    return kept


def _widths(columns: Sequence[Column], natural: Sequence[int], width: int) -> list[int]:
    """Return the widths of the remaining columns: a name up to a third of the line, then the text, then names."""
    widths = [column.comfort(cells) for cells, column in zip(natural, columns, strict=True)]
    room = width - sum(widths) - len(GAP) * (len(widths) - 1)
    names = [at for at, column in enumerate(columns) if column.cut == "middle"]
    texts = [at for at, column in enumerate(columns) if column.cut in ("end", "words")]
    wishes = [(at, min(natural[at], width // 3)) for at in names] + [(at, natural[at]) for at in (*texts, *names)]
    for at, wish in wishes:
        more = max(0, min(room, wish - widths[at]))
        widths[at] += more
        room -= more
    floors = [column.floor(cells) for cells, column in zip(natural, columns, strict=True)]
    while room < 0 and max(widths) > _NARROW:
        at = max(range(len(widths)), key=lambda at: (widths[at] > floors[at], widths[at]))
        widths[at] -= 1
        room += 1
    return widths


def cell(text: str, column: Column, width: int) -> str:
    """Return *text* in exactly *width* cells, shortened or padded by the rules of *column*."""
    from rich.cells import cell_len

    text = short(text, width, middle=column.cut in ("middle", "words"))
    space = " " * (width - cell_len(text))
    return space + text if column.right else text + space


def short(text: str, width: int, *, middle: bool = False) -> str:
    """Return *text* in at most *width* cells, with … where its end, or its *middle*, is cut."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= width:
        return text
    if width <= 1:
        return "…"[:width]
    tail = (width - 1) // 2 if middle else 0
    head = set_cell_size(text, width - 1 - tail).rstrip()
    return f"{head}…{set_cell_size(text[::-1], tail)[::-1].lstrip() if tail else ''}"


def wrapped(text: str, width: int) -> list[str]:
    """Return *text* in lines of at most *width* cells, broken between words; a longer word gets its own line."""
    from rich.cells import cell_len

    if cell_len(text) <= width:
        return [text]
    lines: list[str] = []
    for word in text.split(" "):
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def painter() -> Callable[[str, str], str]:
    """Return a function that styles a text, if stdout has colours and the user wants them."""
    from rich.console import COLOR_SYSTEMS, Console
    from rich.style import Style

    console = Console()
    system = COLOR_SYSTEMS[console.color_system] if console.color_system is not None else None

    def coloured(style: str, text: str) -> str:
        found = Style.parse(style)
        if console.no_color:
            found = found.without_color
        return found.render(text, color_system=system) if style else text

    return coloured


def prose(line: str) -> None:
    """Print a sentence; on a terminal wrapped at words, with further lines indented."""
    width = terminal_width()
    text = shown(line)
    if width is None:
        say(text)
        return
    first, *more = wrapped(text, width)
    say(first)
    for each in wrapped(" ".join(more), max(width - len(GAP), _NARROW)) if more else ():
        say(f"{GAP}{each}")


def headline(before: str, answer: str, style: str) -> None:
    """Print *before* and, on a terminal in bold and in the colours of *style*, the *answer*, wrapped at words."""
    width = terminal_width()
    text = shown(f"{before}: {answer}" if before else answer)
    if width is None:
        say(text)
        return
    coloured = painter()
    for line in wrapped(text, width):
        say(drawn=coloured(f"bold {style}".strip(), line))


def beside(line: str, taken: int) -> list[str]:
    """Return a sentence in lines that fit beside the first *taken* cells of a terminal; elsewhere in one."""
    width = terminal_width()
    return [line] if width is None else wrapped(shown(line), max(width - taken, _NARROW))


def clear() -> None:
    """Clear the terminal; print an empty line on one that cannot."""
    sys.stdout.write("\x1b[H\x1b[2J\x1b[3J" if os.environ.get("TERM") != "dumb" else "\n")


def lively(stream: TextIO) -> bool:
    """Whether *stream* is a terminal that can redraw a line, and the user wants that."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


class StatusLine:
    """A status line at the bottom of stderr's terminal, redrawn in place; elsewhere nothing is printed."""

    def __init__(self) -> None:
        self.lively = lively(sys.stderr)
        self._drawn = ""

    def draw(self, text: str, *, part: float | None = None) -> None:
        """Show *text* after a bar filled up to *part*, in place of the previous line."""
        if not self.lively:
            return
        width = _columns() - 1
        if part is not None and width >= 2 * _BAR:
            filled = round(_BAR * min(1.0, max(0.0, part)))
            full, empty = "█░" if (sys.stderr.encoding or "").lower().startswith("utf") else "#."
            text = f"{full * filled}{empty * (_BAR - filled)} {text}"
        line = short(shown(text), width)
        if line != self._drawn:
            self._drawn = line
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Remove the line so that other output can follow."""
        if self._drawn:
            self._drawn = ""
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress on stderr if it is a terminal; the line disappears at the end."""
    line = StatusLine()
    drawn_ns = 0

    def step(done: int, of: int) -> None:
        nonlocal drawn_ns
        now_ns = time.monotonic_ns()
        if line.lively and (now_ns - drawn_ns >= _REDRAWN_NS or done == of):
            drawn_ns = now_ns
            line.draw(f"{what}: {done:,} of {of:,}", part=done / max(1, of))

    try:
        yield step
    finally:
        line.clear()


def pairs(lines: Iterable[tuple[str, str]]) -> None:
    """Print names and values that are not empty, one pair per line, the values aligned; longer ones are indented."""
    listed = [(name, value) for name, value in lines if value]
    width = max((len(name) for name, _ in listed), default=0)
    room = terminal_width()
    for name, value in listed:
        parts = value.splitlines()
        if room is not None:
            parts = [part for line in parts for part in wrapped(shown(line), max(room - width - len(GAP), _NARROW))]
        first, *more = parts
        say(f"{name.ljust(width)}  {first}".rstrip())
        for line in more:
            say(f"{'':{width}}  {line}")


def as_json(*parts: Struct | Mapping[str, Any]) -> None:
    """Print one JSON object: its version and the fields of all *parts*, in their order.

    Structs are objects, `…_at_ns` is RFC 3339 `…_at`, unknown values are null.
    """
    import json  # imported here, because most commands print none

    from spool.cli.publicjson import plain

    found = {"version": 1}
    for part in parts:
        found |= plain(part)
    text = json.dumps(found, indent=2, ensure_ascii=False)
    sys.stdout.write((text if shown(text, "\n") == text else json.dumps(found, indent=2)) + "\n")


@lru_cache(maxsize=256)
def size(size_bytes: int | None) -> str:
    """Return a size for a table's cell."""
    return "" if size_bytes is None else show_size(size_bytes).replace(" ", "").replace("iB", "")


def duration(duration_ns: int | None) -> str:
    """Return a duration for a table's cell."""
    return "" if duration_ns is None else show_duration(max(0, duration_ns))


def granted(grant: Grant, memory: str, *gpus: str) -> str:
    """Return what a run gets, its memory and GPUs in these words: "2 CPUs (0-1), 4 GiB, GPU 0, licence 1"."""
    cpus = count_of(grant.cpus, "CPU") + (f" ({grant.cpu_list})" if grant.cpu_list else "")
    pools = pools_in_words(grant.resources, grant.resource_indices)
    return ", ".join(filter(None, (cpus, memory, *gpus, pools)))


def cpu_time(duration_ns: int | None) -> str:
    """Return a duration that may be very short."""
    if duration_ns is None:
        return ""
    return f"{duration_ns / 1e9:.3f}s" if duration_ns < 10_000_000_000 else show_duration(duration_ns)


def parameters(values: Sequence[tuple[str, str]]) -> str:
    """Return the parameters of a task in one line."""
    return ", ".join(f"{key}={value}" for key, value in values)


def count(number: int | None) -> str:
    """Return a number for a table's cell."""
    return "" if number is None else str(number)


def counts(numbers: Mapping[str, int]) -> str:
    """Return how many there are of what: "2 running, 1 queued"."""
    return ", ".join(f"{number} {what}" for what, number in numbers.items() if number)


def ratio(number: float | None) -> str:
    """Return a number for a table's cell, a small one with decimals."""
    if number is None:
        return ""
    return f"{number:.0f}" if number >= 1000 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def fine(number: float) -> str:
    """Return a number as `ratio` does, one below 0.1 with four decimals."""
    if 0 < number < 0.1:
        return f"{number:.4f}" if number >= 0.0001 else "<0.0001"
    return ratio(number)


def percent(part: float | None) -> str:
    """Return a fraction as a percentage."""
    return "" if part is None else show_percent(part)


def gpu_use(use: GpuUse) -> str:
    """Describe the use of a GPU: "43.0% busy on average, 100% at most; …" and its memory."""
    busy = "use unknown" if use.mean_percent is None else f"{percent(use.mean_percent / 100)} busy on average"
    most = f", {use.peak_percent}% at most" if use.peak_percent is not None else ""
    memory = f"; memory {size(use.mean_memory_bytes)} on average" if use.mean_memory_bytes is not None else ""
    peak = f", {size(use.peak_memory_bytes)} at most" if use.peak_memory_bytes is not None else ""
    used = f"; {energy(use.energy_mj)}" if use.energy_mj is not None else ""
    return f"{busy}{most}{memory}{peak}{used}"


def energy(energy_mj: int) -> str:
    """Return an energy in millijoules as "12.5 Wh" or "1.25 kWh"."""
    hours = energy_mj / 3_600_000
    return f"{fine(hours)} Wh" if hours < 1000 else f"{ratio(hours / 1000)} kWh"


def with_reason(state: str, reason: str) -> str:
    """Return a state and its reason; one such as "cancelled by alice" says the state itself."""
    return reason if reason.startswith(state) else f"{state}: {reason}" if reason else str(state)


def indented(title: str, text: str | None) -> None:
    """Print a text, if there is one, below its title and after an empty line."""
    if not text:
        return
    say()
    say(f"{title}:")
    for line in text.rstrip().splitlines():
        say(f"  {line.expandtabs()}")


def moment(at_ns: int | None, now_ns: int | None = None) -> str:
    """Return an instant in local time, and how long ago it was."""
    if at_ns is None:
        return ""
    from datetime import datetime

    text = datetime.fromtimestamp(at_ns // 1_000_000_000).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    if now_ns is None:
        return text
    ago = now_ns - at_ns
    return f"{text} ({duration(ago)} ago)" if ago >= 0 else f"{text} (in {duration(-ago)})"


class Charts(Protocol):
    """What draws charts: `Capability.charts` names one."""

    def gantt(self, runs: Mapping[str, Sequence[Result]], begin_ns: int, end_ns: int, width: int) -> list[str]:
        """Return the runs between *begin_ns* and *end_ns*, a row for each job with its runs, oldest first."""

    def runs(self, found: Timeline) -> str:
        """Return runs on the GPUs and the CPUs over time as SVG for a web page, in the colour of its text."""


def charts() -> Charts | None:
    """Return what draws charts; None if nothing here does."""
    return next((drawing for _, drawing in contributed("charts")), None)
