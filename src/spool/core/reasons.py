"""Why a job waits: a code for programs, a sentence with numbers for users.

The codes stand in the order of the rules. `invalid` comes before all of them: such a file never becomes a waiting job.
A sentence may be read later and elsewhere, so it has instants and no times from now; who prints it makes words of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta, tzinfo

from spool.core.model import SECOND_NS
from spool.core.units import show_duration

CODES = (
    "held",
    "paused",
    "scheduling_timeout",
    "refused",
    "machine",
    "begins",
    "retry",
    "running",
    "dependency",
    "group",
    "array",
    "quota",
    "max_running",
    "max_in_flight",
    "max_pending",
    "never_fits",
    "memory",
    "cpus",
    "resources",
    "gpus",
    "reserved",
    "left",
    "disk",
    "executor",
)

INSTANT = re.compile(r"(due )?\b(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)", re.ASCII)
"""An instant in a sentence; one that is "due" reads as the time until then."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Reason:
    """One "no": `code` is one of CODES, `text` the sentence. The sentence is built on demand."""

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
