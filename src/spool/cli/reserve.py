"""`spool reserve`: reserve GPUs for a user or project."""

from __future__ import annotations

import fnmatch
import shutil
import time
from collections.abc import Sequence
from datetime import datetime

import click

from spool.cli import publicjson, render
from spool.cli.charts import Bar, Line, charts
from spool.cli.common import for_each, json_option, own, viewed
from spool.cli.group import Subverbs, Verb, unreviewed
from spool.cli.moments import understood
from spool.cli.telling import made, tell
from spool.client.requests import Requests
from spool.core import layout
from spool.core.errors import ExitCode, InvalidValue, NoSuchJob, SpoolError, UsageError, cannot
from spool.core.layout import is_pattern, natural, why_not_name
from spool.core.model import Machine, Reservation
from spool.core.reasons import count_of
from spool.core.reservations import NOBODY
from spool.formats import reservation
from spool.formats.values import moment_or_delay
from spool.query.reservations import ReservationList, ReservationStatus, check_new, list_reservations
from spool.query.snapshot import machine_now
from spool.store.ownership import this_user

_COLUMNS = (
    render.Column("NAME", cut="middle"),
    render.Column("STATE"),
    render.Column("FOR", cut="middle", drop=1),
    render.Column("GPUS", cut="words", drop=-2),
    render.Column("FROM", cut="words", least=render.DATE),
    render.Column("UNTIL", cut="words", drop=-1, least=render.DATE),
    render.Column("COMMENT", cut="words", least=12),
)
_STYLES = {"active": "green", "pending": "", "completed": "dim", "cancelled": "dim", "invalid": "red"}

_HELP = unreviewed("""\
Reserve GPUs for a user or project.

While a reservation is active, others cannot start jobs on its GPUs; before it begins, they cannot start jobs that
would run into it. Reservations never stop running jobs.

  spool reserve create demo --gpus 2 --duration 2h
  spool reserve list
  spool reserve cancel demo

By hand: a file in reservations/; rm cancels it
""")


@click.group(cls=Subverbs, help=_HELP, short_help="Reserve GPUs for a user or project.")
def command() -> None:
    """Do nothing: the subcommands do the work."""


@command.command("create", cls=Verb, short_help="Create a reservation.")
@click.argument("name")
@click.option("--gpus", required=True, metavar="N|I,J", help='How many, "2", or which, "0,2" (a single one: "0,").')
@click.option("--user", metavar="USER", help="For this user's jobs. Default: yours.")
@click.option("--project", metavar="NAME", help="For this project's jobs.")
@click.option("--nobody", is_flag=True, help="For no jobs: keep the GPUs free for interactive work.")
@click.option(
    "--start",
    default="now",
    show_default=True,
    metavar="TIME",
    help="Start: 16:00, 'tomorrow 8:00', +2h, or a date and time.",
)
@click.option("--duration", metavar="TIME", help='Duration: "2h".')
@click.option("--end", metavar="TIME", help="End time instead of a duration, written like --start.")
@click.option("--comment", metavar="TEXT", help="Free-text comment.")
@click.pass_obj
def create(
    root: str,
    name: str,
    gpus: str,
    user: str | None,
    project: str | None,
    nobody: bool,
    start: str,
    duration: str | None,
    end: str | None,
    comment: str | None,
) -> int:
    r"""Create a reservation, unless it conflicts with an existing one.

      spool reserve create demo --gpus 2 --duration 2h
      spool reserve create course --project ml101 --gpus 0,2 \
        --start 2026-01-31T14:00 --end 2026-01-31T18:00
      spool reserve create desk --nobody --gpus 1 --start +30m --duration 4h

    By hand, with the same effect:
      printf 'user = "alice"\ngpus = 2\nduration = "2h"\n' > .tmp/demo
      mv .tmp/demo reservations/demo.toml
    """
    if (user is not None) + (project is not None) + nobody > 1:
        raise UsageError("--user, --project and --nobody cannot be combined; give one of them")
    if (duration is None) == (end is None):
        raise UsageError(cannot("make", f"reservation {name}", "give either --duration or --end"))
    if project is None and user is None:
        user = NOBODY if nobody else this_user()
    name = name.removesuffix(layout.JOB_SUFFIX)
    spool, now_ns = made(root), time.time_ns()
    if not layout.valid_name(name):
        raise UsageError(cannot("make", f"reservation {name}", f"the name is not valid: {why_not_name(name)}"))
    text = reservation.dump(
        {
            "user": user,
            "project": project,
            "gpus": _gpus(gpus),
            "start": _instant("--start", start, now_ns),
            "duration": duration,
            "end": None if end is None else _instant("--end", end, now_ns),
            "comment": comment,
        }
    )
    one = reservation.parse(text, name=name, created_at_ns=now_ns)
    if one.end_at_ns <= now_ns:
        raise SpoolError(cannot("make", f"reservation {name}", "it would already be over"))
    notes = check_new(spool, machine_now(spool, now_ns), one, now_ns)
    Requests(spool, this_user()).reserve(name, text)
    for note in notes:
        tell(note)
    render.say(
        f"{name}: {_what(one)} for {one.holder}, {render.moment(one.start_at_ns)} to {render.moment(one.end_at_ns)}"
    )
    return 0


@command.command("list", cls=Verb, short_help="List reservations, with a timeline.")
@click.option("-a", "--all", "everything", is_flag=True, help="Include past and cancelled ones.")
@json_option
@click.pass_obj
def list_(root: str, everything: bool, as_json: bool) -> int:
    """List reservations, with a timeline.

    STATE is pending, active, completed, cancelled or invalid; an invalid reservation has an error, or conflicts with
    one whose file is older, and has no effect.

    By hand: head reservations/*
    """
    spool, now_ns = viewed(root), time.time_ns()
    machine = machine_now(spool, now_ns) if spool.names(layout.RESERVATIONS) else Machine(0, 0)
    found = list_reservations(spool, machine, now_ns, everything=everything)
    if as_json:
        rows = [{"name": one.name, "state": one.state, **_values(one)} for one in found.rows]
        render.as_json({"version": 1, "gpus": found.gpus, "gpu_problem": found.gpu_problem, "reservations": rows})
        return 0
    if not found.rows:
        tell("no reservations")
        return 0
    rows_of_text = [_row(one) for one in found.rows]
    render.table(_COLUMNS, rows_of_text, [_STYLES[one.state] for one in found.rows])
    lines, drawing = _lines(found), charts()
    if lines and drawing is not None:
        render.say()
        for line in drawing.timeline(lines, found.at_ns, min(shutil.get_terminal_size((80, 24)).columns, 120)):
            render.say(line)
    if found.gpu_problem is not None:
        tell(f"the machine's GPUs are unknown: {found.gpu_problem}")
    return 0


@command.command("cancel", cls=Verb, short_help="Cancel reservations.")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.pass_obj
def cancel(root: str, names: tuple[str, ...]) -> int:
    """Cancel pending or active reservations. NAME may be a glob.

    By hand: rm reservations/demo.toml
    """
    spool = own(root)
    wanted: list[str] = []
    code = 0
    for pattern in names:
        name = pattern.removesuffix(layout.JOB_SUFFIX)
        matches = [name]
        if is_pattern(name):
            matches = sorted(fnmatch.filter(spool.names(layout.RESERVATIONS), name), key=natural)
        if not matches:
            tell(str(NoSuchJob(cannot("find", "a reservation", f"no reservation matches {pattern!r}"))))
            code = int(ExitCode.NO_SUCH_JOB)
        wanted += matches
    requests = Requests(spool, this_user())
    return max(code, for_each(dict.fromkeys(wanted), requests.cancel_reservation))


def _gpus(text: str) -> int | list[int]:
    """Return "2" as a number, "0,2" and "0," as indices."""
    words = [word.strip() for word in text.split(",")]
    numbers = [word for word in words if word]
    if not numbers or not all(word.isascii() and word.isdecimal() and len(word) < 9 for word in numbers):
        raise InvalidValue(f'cannot reserve GPUs {text!r}: write how many ("2") or which ("0,2"; a single one: "0,")')
    return int(numbers[0]) if len(words) == 1 else list(map(int, numbers))


def _instant(option: str, text: str, now_ns: int) -> datetime:
    """Return the instant of "now", "+2h", words, or a date and time in the form of a reservation."""
    if text == "now":
        return reservation.local_time(now_ns)
    try:
        moment, delay = moment_or_delay(understood(text, now_ns))
    except InvalidValue as error:
        raise InvalidValue(f"cannot use {option}: {error}") from None
    return reservation.local_time(moment if moment is not None else now_ns + (delay or 0))


def _what(one: Reservation) -> str:
    if one.gpu_indices:
        return f"GPU{'s' if len(one.gpu_indices) > 1 else ''} {', '.join(map(str, one.gpu_indices))}"
    return count_of(one.gpu_count or 0, "GPU")


def _values(one: ReservationStatus) -> dict[str, object]:
    values = publicjson.plain(one.reservation) if one.reservation is not None else {}
    more = {"problem": one.problem or None, "removed_at_ns": one.removed_at_ns}
    return {key: value for key, value in values.items() if key != "name"} | more


def _row(one: ReservationStatus) -> list[str]:
    said = one.reservation
    if said is None:
        return [one.name, one.state.value, "", "", "", "", one.problem]
    return [
        one.name,
        one.state.value,
        said.holder,
        _what(said),
        render.moment(said.start_at_ns),
        render.moment(said.end_at_ns),
        one.problem or said.comment or "",
    ]


def _lines(found: ReservationList) -> Sequence[Line]:
    """Return a row for each valid reservation, and one for each GPU that one of them names."""
    standing = [(one, one.reservation) for one in found.rows if one.stands and one.reservation is not None]
    lines = [Line(one.name, [Bar(said.start_at_ns, said.end_at_ns, one.state.value)]) for one, said in standing]
    for index in found.gpus:
        bars = [
            Bar(said.start_at_ns, said.end_at_ns, one.state.value)
            for one, said in standing
            if index in said.gpu_indices
        ]
        if bars:
            lines.append(Line(f"GPU {index}", bars))
    return lines
