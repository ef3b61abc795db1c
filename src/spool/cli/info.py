"""`spool info` and `spool gpus`: the machine, what is in use, any problems. `spool reserve`: what is reserved of it."""

from __future__ import annotations

import fnmatch
import time
from datetime import datetime

import click

from spool.cli import render
from spool.cli.group import Subverbs, Verb, for_each, json_option, made, own, understood, viewed
from spool.cli.publicjson import plain
from spool.cli.render import tell
from spool.client.requests import Requests
from spool.core import layout
from spool.core.errors import ExitCode, InvalidValue, NoSuchJob, SpoolError, UsageError, cannot
from spool.core.gpus import NOBODY, stranger
from spool.core.layout import is_pattern, natural, why_not_name
from spool.core.model import Machine, Reservation
from spool.core.reasons import count_of, pools_in_words
from spool.core.units import show_duration, show_size
from spool.formats import reservation
from spool.formats.capabilities import contributed, engine_title
from spool.formats.values import moment_or_delay
from spool.query import machine
from spool.query.machine import GpuHolder, GpuList, GpuState, GpuStatus, MachineStatus, RunHere, machine_status
from spool.query.shared import elsewhere, lease_words
from spool.query.snapshot import ReservationStatus, check_new, list_reservations, machine_now
from spool.store.ownership import this_user

_COLUMNS = (
    render.Column("JOB", cut="middle"),
    render.Column("USER", cut="middle", drop=3),
    render.Column("CPU", right=True),
    render.Column("MEM", right=True, drop=2),
    render.Column("GPU", cut="words"),
    render.Column("RESOURCES", cut="words", drop=1, optional=True),
    render.Column("FOR", right=True),
    render.Column(""),
)

_GPU_COLUMNS = (
    render.Column("GPU", right=True),
    render.Column("NAME", cut="middle", drop=2),
    render.Column("FREE", right=True),
    render.Column("TOTAL", right=True, drop=3),
    render.Column("BUSY", right=True, drop=4),
    render.Column("MEM BUSY", right=True, drop=5),
    render.Column("STATE"),
    render.Column("WHO", cut="words", least=12),
    render.Column("UUID", drop=6),
)
# STATE and WHO say why these are unavailable.
_IN_USE = frozenset({GpuState.EXCLUSIVE, GpuState.SHARED, GpuState.LEASED, GpuState.FOREIGN})
_GPU_STYLES = {
    GpuState.IDLE: "green", GpuState.EXCLUSIVE: "", GpuState.SHARED: "", GpuState.LEASED: "",
    GpuState.FOREIGN: "yellow", GpuState.UNUSED: "dim", GpuState.PROBLEM: "red",
}  # fmt: skip


@click.command(cls=Verb)
@json_option
@click.pass_obj
def command(root: str, as_json: bool) -> int:
    """Show the machine, what is in use, how many jobs there are, and any problems.

    It reads the machine and the files afresh and needs no dispatcher; GPU values come from the dispatcher if it watches
    them. `spool gpus` shows more about GPUs, `spool doctor` about problems.

      spool info
      spool info --json | jq .states

    By hand: nproc; free; df .; ls running; cat state.json
    """
    spool = viewed(root)
    found = machine_status(spool)
    if as_json:
        render.as_json(found)
    else:
        _print(found, "unknown" if spool.unread else "")
    return 0


def _print(found: MachineStatus, unknown: str) -> None:
    seen, cpus = found.seen, found.cpus_granted
    of_others, others_bytes, _ = elsewhere(seen.shared, cpus, found.memory_granted_bytes, 0)
    others = f"{of_others} granted to others, " if of_others else ""
    lines = [
        ("spool", f"{found.spool}{'  (paused: no job starts)' if seen.view.paused else ''}"),
        ("dispatcher", _dispatcher(found)),
        ("CPUs", f"{seen.machine.cpus}, {cpus} granted, {others}{found.cpus_free} free"),
        ("memory", _memory(found, others_bytes)),
        ("GPUs", _gpus(found.gpus)),
        *((name, f"{use.total}, {use.granted} granted, {use.free} free") for name, use in found.resources.items()),
        ("disk", _disk(found)),
        ("runs", _runs(found)),
        ("jobs", render.counts(found.states) or unknown or "no active jobs"),
        ("last day", render.counts(found.ended) or unknown or "no jobs ended"),
    ]
    render.pairs(lines)
    for problem in found.problems:
        render.prose(f"problem: {problem}")
    if seen.shared is not None:
        for _, print_users in contributed("on_info"):
            print_users(seen.shared, seen.now_ns)
    if found.runs:
        render.say()
        render.table(_COLUMNS, [_row(each, seen.now_ns) for each in found.runs])


def _row(each: RunHere, now_ns: int) -> list[str]:
    run, grant = each.run, each.run.grant
    return [
        run.name,
        run.user,
        str(grant.cpus),
        render.size(grant.memory_bytes),
        ",".join(map(str, grant.gpu_indices)) if run.elsewhere is None else count_of(grant.gpu_count, "GPU"),
        pools_in_words(grant.resources, grant.resource_indices),
        render.duration(now_ns - run.started_at_ns),
        _remark(each),
    ]


def _remark(each: RunHere) -> str:
    run = each.run
    if run.stopping or run.suspended:
        return "stopping" if run.stopping else "suspended"
    if run.elsewhere is None:
        return ""
    return f"{'on its way to' if each.on_its_way else 'in'} {engine_title(run.elsewhere)}"


_ASTRAY = "ITS .lock WAS DELETED OR REPLACED: it creates a new one soon"


def _dispatcher(found: MachineStatus) -> str:
    one = found.dispatcher
    if one is None:
        return found.next_dispatcher
    if one.pid is None:
        return "running; no heartbeat yet" + (f", {_ASTRAY}" if one.lock_astray else "")
    now_ns, since_ns, beat_ns = found.seen.now_ns, one.since_at_ns, one.heartbeat_at_ns
    parts = (
        f"pid {one.pid}",
        f"for {show_duration(now_ns - since_ns)}" if since_ns is not None else "",
        f"heartbeat {show_duration(max(0, now_ns - beat_ns))} ago" if beat_ns is not None else "",
        "NO RECENT HEARTBEAT" if one.silent_ns is not None else "",
        _ASTRAY if one.lock_astray else "",
    )
    return ", ".join(filter(None, parts))


def _memory(found: MachineStatus, others_bytes: int) -> str:
    machine, granted, left = found.seen.machine, found.memory_granted_bytes, found.memory_not_granted_bytes
    usable = left if machine.memory_available_bytes is None else min(left, machine.memory_available_bytes)
    if not (granted or others_bytes or usable < left):
        return f"{show_size(machine.memory_bytes)} for jobs, all free"
    parts = (
        f"{show_size(machine.memory_bytes)} for jobs",
        f"{show_size(granted)} granted" if granted else "none granted" if not others_bytes else "",
        f"{show_size(others_bytes)} granted to others" if others_bytes else "",
        f"{show_size(usable)} {'really available' if usable < left else 'free'}",
    )
    return ", ".join(filter(None, parts))


def _runs(found: MachineStatus) -> str:
    runs, most = len(found.runs), found.seen.policy.max_running
    return "" if most is None else f"{runs} of {most}{': the spool is full' if runs >= most else ''}"


def _gpus(found: GpuList) -> str:
    if found.problem is not None:
        return f"unknown: {found.problem}"
    if not found.gpus:
        return f"none: {found.none_because}"
    states: dict[str, list[str]] = {}
    for each in found.gpus:
        is_kept = each.state is GpuState.IDLE and each.why_not is not None
        states.setdefault("reserved" if is_kept else each.state, []).append(str(each.gpu.index))
    parts = [*(f"{state} {', '.join(each)}" for state, each in states.items()), *found.unused]
    return f"{len(found.gpus)}: {'; '.join(parts)}"


def _disk(found: MachineStatus) -> str:
    free, floor = found.seen.machine.disk_free_bytes, found.seen.policy.disk_floor_bytes
    if free is None:
        return "unknown"
    low = ", too little to start jobs" if free < floor else ""
    return f"{show_size(free)} free, floor {show_size(floor)}{low}"


@click.command("gpus", cls=Verb)
@json_option
@click.pass_obj
def gpus(root: str, as_json: bool) -> int:
    """Show each GPU: its memory, who uses it, what else runs on it, and why it is unavailable.

    The values come from the dispatcher if it watches the GPUs, so that you see what it bases decisions on; otherwise
    from NVML. STATE is idle, exclusive (one run has it), shared (runs that set gpu_memory), leased (another user of a
    shared machine has it, or a part), foreign (processes outside spool are on it), unused (excluded by gpu.use) or
    problem. BUSY is the share of recent time in which it computed, MEM BUSY in which it read or wrote its memory; empty
    if NVML does not report them.

      spool gpus
      spool gpus --json | jq '.gpus[] | select(.why_not == null) | .index'

    By hand: nvidia-smi; grep gpu jobs/*/*/grant.toml
    """
    found = machine.gpus(viewed(root))
    if as_json:
        render.as_json(found)
        return 0
    if found.gpus:
        styles = [_GPU_STYLES[each.state] for each in found.gpus]
        render.table(_GPU_COLUMNS, [_gpu_row(each) for each in found.gpus], styles)
    elif found.problem is None:
        tell(f"no GPUs: {found.none_because}")
    for each in found.gpus:
        if each.why_not is not None and each.state not in _IN_USE:
            name = f"GPU {each.gpu.index}"
            render.prose(f"{name} is unavailable: {each.why_not.removeprefix(f'{name}: ')}")
    for line in found.unused if found.gpus else ():
        render.prose(line)
    for line in found.reserved:
        render.prose(f"reserved: {line}")
    if found.problem is not None:
        tell(f"free memory is unknown, so no GPU is given out: {found.problem}")
    return 0


def _gpu_row(each: GpuStatus) -> list[str]:
    gpu = each.gpu
    who = [_holder(holder) for holder in each.holders]
    who += [lease_words(lease, render.size) for lease in each.leases or ()]
    who += [stranger(one, render.size(one.memory_bytes)) for one in gpu.foreign]
    who += [f"reserved {line}" for line in each.reserved]
    return [
        str(gpu.index),
        gpu.name,
        render.size(gpu.memory_free_bytes) or "?",
        render.size(gpu.memory_total_bytes) or "?",
        *("" if part is None else f"{part}%" for part in (gpu.utilisation_percent, gpu.memory_utilisation_percent)),
        each.state,
        "; ".join(who),
        gpu.uuid,
    ]


def _holder(holder: GpuHolder) -> str:
    taken = f"uses {render.size(holder.taken_bytes)}" if holder.taken_bytes is not None else ""
    run, share = holder.run, holder.run.grant.gpu_memory_bytes
    granted = f"granted {render.size(share)}" if share is not None else ""
    tail = ", ".join(filter(None, [run.user, granted, taken]))
    return f"{run.name} ({tail})"


_RESERVATION_COLUMNS = (
    render.Column("NAME", cut="middle"),
    render.Column("STATE"),
    render.Column("FOR", cut="middle", drop=1),
    render.Column("GPUS", cut="words", drop=-2),
    render.Column("FROM", cut="words", least=render.DATE),
    render.Column("UNTIL", cut="words", drop=-1, least=render.DATE),
    render.Column("COMMENT", cut="words", least=12),
)
_STYLES = {"active": "green", "pending": "", "completed": "dim", "cancelled": "dim", "invalid": "red"}


@click.group(cls=Subverbs, short_help="Reserve GPUs for a user or project.")
def reserve() -> None:
    """Reserve GPUs for a user or project.

    While a reservation is active, others cannot start jobs on its GPUs; before it begins, they cannot start jobs that
    would run into it. Reservations never stop running jobs.

      spool reserve create demo --gpus 2 --duration 2h
      spool reserve list
      spool reserve cancel demo

    By hand: a file in reservations/; rm cancels it
    """


@reserve.command("create", cls=Verb, short_help="Create a reservation.")
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
            "gpus": _gpus_of(gpus),
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


@reserve.command("list", cls=Verb, short_help="List reservations, with a timeline.")
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
    found, gpus = list_reservations(spool, machine, now_ns, everything=everything)
    if as_json:
        rows = [
            {"name": one.name, "state": one.state}
            | (plain(one.reservation) if one.reservation is not None else {})
            | {"problem": one.problem or None, "removed_at_ns": one.removed_at_ns}
            for one in found
        ]
        render.as_json({"gpus": gpus, "gpu_problem": machine.gpu_problem, "reservations": rows})
    elif not found:
        tell("no reservations")
    else:
        styles = [_STYLES[one.state] for one in found]
        render.table(_RESERVATION_COLUMNS, [_reservation_row(one) for one in found], styles)
        if machine.gpu_problem is not None:
            tell(f"the machine's GPUs are unknown: {machine.gpu_problem}")
    return 0


@reserve.command("cancel", cls=Verb, short_help="Cancel reservations.")
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
        matching = fnmatch.filter(spool.names(layout.RESERVATIONS), name)
        matches = sorted(matching, key=natural) if is_pattern(name) else [name]
        if not matches:
            tell(str(NoSuchJob(cannot("find", "a reservation", f"no reservation matches {pattern!r}"))))
            code = int(ExitCode.NO_SUCH_JOB)
        wanted += matches
    requests = Requests(spool, this_user())
    return max(code, for_each(dict.fromkeys(wanted), requests.cancel_reservation))


def _gpus_of(text: str) -> int | list[int]:
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


def _reservation_row(one: ReservationStatus) -> list[str]:
    said, head = one.reservation, [one.name, one.state.value]
    if said is None:
        return [*head, "", "", "", "", one.problem]
    period = render.moment(said.start_at_ns), render.moment(said.end_at_ns)
    return [*head, said.holder, _what(said), *period, one.problem or said.comment or ""]
