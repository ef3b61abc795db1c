"""Reservations: text to `Reservation`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from spool.core.errors import InvalidFile, InvalidReservation, InvalidValue
from spool.core.model import Reservation
from spool.core.units import parse_duration
from spool.formats import toml
from spool.formats.validation import Duration, Problems, convert
from spool.formats.values import different, label, moment_or_delay

_LATEST_NS = (1 << 63) - 1


class ReservationFile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """GPUs kept for somebody: `reservations/NAME.toml`. Delete the file to cancel it."""

    user: (
        Annotated[str, Meta(min_length=1, description='For whom. "nobody" keeps the GPUs free for interactive use.')]
        | UnsetType
    ) = UNSET
    project: Annotated[str, Meta(min_length=1, description="For which project, instead of a user.")] | UnsetType = UNSET
    gpus: Annotated[
        int | list[int],
        Meta(description="How many GPUs, or which: a list of indices."),
    ]
    start: Annotated[
        Any,
        Meta(
            description='From when: a date and time, or "now", the moment at which the file was written.',
            extra_json_schema={"type": "string", "examples": ["now", "2026-01-31T14:00:00+01:00"], "default": "now"},
        ),
    ] = "now"
    duration: Annotated[Duration, Meta(description="For how long. This or `end`.")] | UnsetType = UNSET
    end: Annotated[
        Any, Meta(description="Until when: a date and time. This or `duration`.", extra_json_schema={"type": "string"})
    ] = UNSET
    comment: Annotated[str, Meta(description="For people.")] | UnsetType = UNSET


def parse(data: bytes, *, name: str, created_at_ns: int) -> Reservation:
    """Return what the reservation *data* says; *created_at_ns*, the file's time, is its "now" and its rank.

    Raises only InvalidReservation, with every problem.
    """
    what = f"reservation {name}"
    try:
        document = toml.read(data, what)
    except InvalidFile as error:
        raise InvalidReservation(what, error.problems) from None
    problems = Problems()
    raw = convert(document, ReservationFile, problems)
    if not problems.limited(raw):
        raise InvalidReservation(what, problems.listed(toml.decode(data, what)))
    found = _reservation(raw, name, created_at_ns, problems)
    if problems:
        raise InvalidReservation(what, problems.listed(toml.decode(data, what)))
    return found


def render(
    *,
    gpus: int | tuple[int, ...],
    start_at_ns: int,
    duration: str | None = None,
    end_at_ns: int | None = None,
    user: str | None = None,
    project: str | None = None,
    comment: str | None = None,
) -> bytes:
    """Return the text of a reservation, for `parse` to judge; instants are to the second, in local time."""
    stated = {
        "user": user,
        "project": project,
        "gpus": gpus if isinstance(gpus, int) else list(gpus),
        "start": _local(start_at_ns),
        "duration": duration,
        "end": None if end_at_ns is None else _local(end_at_ns),
        "comment": comment,
    }
    return toml.write({key: value for key, value in stated.items() if value is not None})


def _local(at_ns: int) -> datetime:
    try:
        return datetime.fromtimestamp(at_ns // 1_000_000_000).astimezone()
    except (OverflowError, ValueError, OSError):
        raise InvalidValue("there is no such date") from None


def _reservation(raw: ReservationFile, name: str, created_at_ns: int, problems: Problems) -> Reservation:
    if (raw.user is UNSET) == (raw.project is UNSET):
        problems.add(("user",), 'a reservation is for a "user" or for a "project", one of the two')
    count, indices = problems.value(("gpus",), _gpus, raw.gpus, (None, ()))
    start = created_at_ns
    if raw.start != "now":
        start = problems.value(("start",), _moment, raw.start, created_at_ns)
    if (raw.end is UNSET) == (raw.duration is UNSET):
        problems.add(("duration",), 'a reservation has a "duration" or an "end", one of the two')
    end = start + 1
    if raw.end is not UNSET:
        end = problems.value(("end",), _moment, raw.end, end)
        if end <= start:
            problems.add(("end",), "is not after the start")
    elif raw.duration is not UNSET:
        end = start + problems.value(("duration",), parse_duration, raw.duration, 1)
        if end == start:
            problems.add(("duration",), "must be more than nothing")
        end = min(end, _LATEST_NS)
    return Reservation(
        name=name,
        user=None if raw.user is UNSET else problems.value(("user",), label, raw.user, None),
        project=None if raw.project is UNSET else problems.value(("project",), label, raw.project, None),
        start_at_ns=start,
        end_at_ns=end,
        gpu_count=count,
        gpu_indices=indices,
        comment=None if raw.comment is UNSET else raw.comment,
        created_at_ns=created_at_ns,
    )


def _gpus(stated: int | list[int]) -> tuple[int | None, tuple[int, ...]]:
    if isinstance(stated, int):
        if not 0 < stated <= 1_000_000:
            raise InvalidValue(f"{toml.show(stated)} is no number of GPUs to keep")
        return stated, ()
    if not stated:
        raise InvalidValue("is an empty list; name indices, or say how many")
    for index in stated:
        if not 0 <= index < 10_000:
            raise InvalidValue(f"{toml.show(index)} is no index of a GPU")
    different(stated)
    return None, tuple(sorted(stated))


def _moment(stated: object) -> int:
    moment, _ = moment_or_delay(stated)
    if moment is None:
        raise InvalidValue(f'{toml.show(stated)} is not a date and time, as in "2026-01-31T14:00:00+01:00"')
    return moment
