"""Reservations: text to `Reservation`, and back to text. Their keys are the rows of a table."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from spool.core.errors import InvalidReservation, InvalidValue
from spool.core.model import SECOND_NS, Reservation
from spool.formats import toml
from spool.formats.capabilities import REQUIRED, Key, KeyTable
from spool.formats.toml import Path
from spool.formats.validation import Format, Kind, Kinds, Problems
from spool.formats.values import KINDS, different, moment_or_delay

_LATEST_NS = (1 << 63) - 1

# A row stays a row of a table.
# fmt: off

RESERVATION = KeyTable(
    "ReservationFile",
    "A GPU reservation: `reservations/NAME.toml`. Delete the file to cancel it.",
    Key("user", "label", 'The user. "nobody" keeps the GPUs free for interactive use.'),
    Key("project", "label", "The project, instead of a user."),
    Key("gpus", "reserved GPUs", "How many GPUs, or which: a list of indices.", default=REQUIRED),
    Key("start", "moment or now", 'Start: a date and time, or "now", the time at which the file was written.',
        examples=["now", "2026-01-31T14:00:00+01:00"], default="now"),
    Key("duration", "duration", "Duration; set this or `end`."),
    Key("end", "moment", "End: a date and time; set this or `duration`."),
    Key("comment", "text", "Free-text comment."),
)

# fmt: on


def parse(data: bytes, *, name: str, created_at_ns: int) -> Reservation:
    """Return the reservation in *data*; *created_at_ns*, the time of the file, is its "now" and its rank.

    Raises only InvalidReservation, with every problem.
    """
    what = f"reservation {name}"
    reading = FORMAT.read(data, what)
    problems, document, found = reading.problems, reading.document, reading.found[""]
    if ("user" in document) == ("project" in document):
        problems.add(("user",), 'a reservation needs either a "user" or a "project"')
    made = reservation_of({**found, "name": name, "created_at_ns": created_at_ns}, document, problems, ())
    FORMAT.judge(reading, data, what)
    return made


def reservation_of(found: Mapping[str, Any], document: Mapping[str, Any], problems: Problems, at: Path) -> Reservation:
    """Return the reservation of the fields *found* in *document*, the table at *at*; add what is wrong with its end.

    Its name and `created_at_ns` are among the fields.
    """
    if ("end" in document) == ("duration" in document):
        problems.add((*at, "duration"), 'a reservation needs either a "duration" or an "end"')
    start = found["created_at_ns"] if found.get("start") is None else found["start"]
    end = found.get("end", start + 1)
    if end <= start:
        problems.add((*at, "end"), "is not after the start")
    elif "end" not in document:
        end = min(start + found.get("duration_ns", 1), _LATEST_NS)
        if end == start:
            problems.add((*at, "duration"), "must be more than 0")
    count, indices = found.get("gpus", (None, ()))
    return Reservation(
        name=found["name"],
        user=found.get("user"),
        project=found.get("project"),
        start_at_ns=start,
        end_at_ns=end,
        gpu_count=count,
        gpu_indices=indices,
        comment=found.get("comment"),
        created_at_ns=found["created_at_ns"],
    )


def dump(keys: Mapping[str, object]) -> bytes:
    """Return those of *keys* that are not None as the text of a reservation, for `parse` to judge."""
    return toml.write({key: value for key, value in keys.items() if value is not None})


def render(one: Reservation) -> bytes:
    """Return the text of a reservation, with start and end as dates, to the second."""
    gpus = list(one.gpu_indices) or one.gpu_count
    times = {"start": local_time(one.start_at_ns), "end": local_time(-(-one.end_at_ns // SECOND_NS) * SECOND_NS)}
    return dump({"user": one.user, "project": one.project, "gpus": gpus, **times, "comment": one.comment})


def local_time(at_ns: int) -> datetime:
    """Return an instant as written in a reservation: to the second, in local time. Raises InvalidValue."""
    try:
        return datetime.fromtimestamp(at_ns // 1_000_000_000).astimezone()
    except (OverflowError, ValueError, OSError):
        raise InvalidValue("there is no such date") from None


def _gpus(stated: int | list[int]) -> tuple[int | None, tuple[int, ...]]:
    if isinstance(stated, int):
        if not 0 < stated <= 1_000_000:
            raise InvalidValue(f"{toml.show(stated)} is not a number of GPUs; reserve at least 1")
        return stated, ()
    if not stated:
        raise InvalidValue("is an empty list; list indices, or give a number")
    for index in stated:
        if not 0 <= index < 10_000:
            raise InvalidValue(f"{toml.show(index)} is not a GPU index")
    different(stated)
    return None, tuple(sorted(stated))


def _moment(stated: object) -> int:
    moment, _ = moment_or_delay(stated)
    if moment is None:
        raise InvalidValue(f'{toml.show(stated)} is not a date and time, as in "2026-01-31T14:00:00+01:00"')
    return moment


_KINDS: Kinds = {
    "reserved GPUs": lambda key: Kind(int | list[int], _gpus),
    "moment": lambda key: Kind(Any, _moment),
    "moment or now": lambda key: Kind(Any, lambda stated: None if stated == "now" else _moment(stated)),
}

FORMAT = Format(RESERVATION, {**KINDS, **_KINDS}, InvalidReservation)
"""The reader of reservations."""
