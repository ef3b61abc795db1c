"""Why a job waits: a code for programs, a sentence with numbers for users.

One table has the codes, in the order of the rules, and what follows from each. A sentence may be read later and
elsewhere, so it has instants and no times from now; who prints it makes words of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta, tzinfo
from enum import Enum, auto

from spool.core.model import SECOND_NS
from spool.core.units import show_duration


class Until(Enum):
    """What ends a reason to wait."""

    ROOM = auto()  # the end of runs, whichever they are: it is a lack of room
    RUNS = auto()  # the end of certain runs, or of a reservation
    OTHER = auto()  # something else than a run
    CHANGE = auto()  # a change of the job


_ROOM = "Jobs that run hold what it asks for. It starts by itself once enough of them have ended."
_ITS_TURN = "It starts by itself once one of them has ended."

# A row stays a row of a table.
# fmt: off
REASONS = {
    "held": (Until.OTHER, "A held job does not start. `spool release {name}` starts it."),
    "paused": (Until.OTHER, "The whole spool is paused, and no job starts. `spool resume` lets them start again."),
    "scheduling_timeout": (Until.OTHER,
        "It has waited for longer than it was ready to wait. The dispatcher ends it."),
    "refused": (Until.OTHER, "Its last start was refused. The dispatcher tries again by itself."),
    "machine": (Until.OTHER,
        "Spools of several users share this machine. The job starts when the arbiter grants it its share."),
    "begins": (Until.OTHER, "It was submitted for a later time. It starts by itself then, if there is room."),
    "retry": (Until.OTHER, "Its last run failed, and the next waits for a while. It starts by itself."),
    "running": (Until.RUNS, "Jobs of one name run one after the other. It starts by itself after that run."),
    "dependency": (Until.RUNS, "It depends on other jobs. It can start once they have ended as it asks."),
    "group": (Until.RUNS, f"Its group runs a limited number of jobs at once. {_ITS_TURN}"),
    "array": (Until.RUNS, f"Its array runs a limited number of tasks at once. {_ITS_TURN}"),
    "quota": (Until.RUNS, f"Its user or project has all that the configuration allows at once. {_ITS_TURN}"),
    "max_running": (Until.RUNS, f"The spool runs a limited number of jobs at once. {_ITS_TURN}"),
    "max_in_flight": (Until.RUNS, f"The spool hands a limited number of jobs over at once. {_ITS_TURN}"),
    "max_pending": (Until.RUNS,
        "The spool lets a limited number of jobs wait there at once. It is handed over by itself."),
    "never_fits": (Until.CHANGE,
        "It asks for more than the machine has, or than it may use, so it never starts. `spool edit {name}` changes "
        "its request."),
    "memory": (Until.ROOM, _ROOM),
    "cpus": (Until.ROOM, _ROOM),
    "resources": (Until.ROOM, _ROOM),
    "gpus": (Until.ROOM, "No GPU that it may have is free. It starts by itself once these are free."),
    "reserved": (Until.RUNS, "There is room, but it is reserved for others. The job starts by itself after that."),
    "left": (Until.RUNS, f"There is room, but it is kept for a job that goes first. {_ITS_TURN}"),
    "disk": (Until.OTHER, "The disk is nearly full, so no job starts. Free some space; the jobs start by themselves."),
    "executor": (Until.OTHER, "Its executor cannot be used now. It starts by itself once that is fixed."),
    # Reasons that the scheduler does not give.
    "hook": (Until.OTHER, "A hook decides when it starts. It is asked again by itself."),
    "submitted": (Until.OTHER, ""),
    "tasks": (Until.OTHER, "The dispatcher makes a job of each of its tasks."),
    "unread": (Until.CHANGE, "The dispatcher looks at it again by itself."),
    "invalid": (Until.CHANGE, "Its file has an error. Fix it with `spool edit {name}`."),
}
# fmt: on
"""By code: what ends such a wait, and its meaning in at most two sentences, "" where the reason itself says it."""


def codes_until(*ends: Until) -> frozenset[str]:
    """Return the codes of the reasons that end so."""
    return frozenset(code for code, (end, _) in REASONS.items() if end in ends)


OF_ROOM = codes_until(Until.ROOM) | {"left"}
"""Reasons that a plan can end which gives the room of runs to others."""

FULL = codes_until(Until.ROOM) | {"reserved"}
"""Reasons that mean a lack of room: only holding other jobs back helps."""

INSTANT = re.compile(r"(due )?\b(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)", re.ASCII)
"""An instant in a sentence; one that is "due" reads as the time until then."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Reason:
    """One "no": `code` is one of REASONS, `text` the sentence. The sentence is built on demand."""

    __slots__ = ("_text", "code")

    def __init__(self, code: str, text: str | Callable[[], str]) -> None:
        self.code = code
        self._text = text

    @property
    def text(self) -> str:
        """The sentence, with numbers."""
        if not isinstance(self._text, str):
            self._text = self._text()
        return self._text

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Reason({self.code!r}, {self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reason) and (self.code, self.text) == (other.code, other.text)

    def __hash__(self) -> int:
        return hash((self.code, self.text))


def instant(at_ns: int) -> str:
    """Return an instant as a sentence has it, for `in_words`: to the second."""
    try:
        return f"{_EPOCH + timedelta(seconds=at_ns // SECOND_NS):%Y-%m-%dT%H:%M:%SZ}"
    except OverflowError:  # beyond the year 9999
        return f"{at_ns // SECOND_NS}s after 1970"


def in_words(text: str, now_ns: int, zone: tzinfo) -> str:
    """Return a sentence as it reads at *now_ns* in *zone*: "begins at 16:00", "retry in 39s"."""

    def words(match: re.Match[str]) -> str:
        at_ns = round(datetime.fromisoformat(match[2]).timestamp()) * SECOND_NS
        if match[1]:
            return f"in {show_duration(at_ns - now_ns)}" if at_ns > now_ns else "now"
        return _clock(at_ns, now_ns, zone)

    return INSTANT.sub(words, text)


def _clock(at_ns: int, now_ns: int, zone: tzinfo) -> str:
    """Return the local time in *zone*: "16:00", on another day "2026-01-31 16:00"."""
    try:
        at = (_EPOCH + timedelta(microseconds=at_ns // 1000)).astimezone(zone)
        now = (_EPOCH + timedelta(microseconds=now_ns // 1000)).astimezone(zone)
    except OverflowError:  # beyond the year 9999
        return f"{at_ns // SECOND_NS}s after 1970"
    clock = at.strftime("%H:%M:%S" if at.second else "%H:%M")
    return clock if at.date() == now.date() else f"{at.date().isoformat()} {clock}"


def ranges_of(numbers: Iterable[int], between: str = ",") -> str:
    """Return whole numbers in ascending order, with neighbours as ranges: "3-7,9"."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return between.join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def count_of(number: int, thing: str) -> str:
    """Return "1 GPU", "3 GPUs"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def some_of(names: Iterable[str], most: int = 4) -> str:
    """Return "a, b, c"; for a long list its beginning and the number of the rest."""
    listed = list(names)
    rest = len(listed) - most
    if rest <= 1:
        return ", ".join(listed)
    return f"{', '.join(listed[:most])} and {rest} more"


def pools_in_words(counts: Iterable[tuple[str, int]], indices: Iterable[tuple[str, tuple[int, ...]]] = ()) -> str:
    """Return named resources as "licence 1, tpu 2 (0, 3)"."""
    which = {name: f" ({', '.join(map(str, each))})" for name, each in indices}
    return ", ".join(f"{name} {count}{which.get(name, '')}" for name, count in counts)
