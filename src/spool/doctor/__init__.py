"""The checks of `spool doctor`, and their fixes: unlike the queries of `query`, a check may write to the spool."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from enum import StrEnum
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

from spool.client.autostart import UNIT, unit_for
from spool.client.service import answer_of
from spool.client.submit import make_spool
from spool.core import layout
from spool.core.errors import InvalidConfig
from spool.core.layout import DONE, HELD, LOCAL_EXECUTORS, QUEUED, RUNNING
from spool.core.lifecycle import Verdict
from spool.core.model import SECOND_NS, State
from spool.core.reasons import count_of, some_of
from spool.core.units import show_duration, show_size
from spool.executors import Executors, compiled
from spool.formats import config
from spool.formats.capabilities import contributed
from spool.formats.config import Config
from spool.formats.state import parse_state
from spool.listeners import find_hooks
from spool.machine.host import (
    NO_CARD,
    file_system_of,
    is_mounted_noexec,
    is_shared_between_hosts,
    unlisted_cards,
    vendors_here,
)
from spool.machine.processes import MachineProber
from spool.query.jobs import JobLister, ignored_by_kind, ignored_by_name, without_ending
from spool.query.rows import STALE_NS, in_words
from spool.query.snapshot import machine_now
from spool.store.disk import Disk, is_yet_to_be_made, owner_of, remedy_for, status_of
from spool.store.glance import read_config
from spool.store.ownership import name_of, this_user, unknown_in, why_replaceable
from spool.store.spool import Service
from spool.store.tolerant import TolerantSpool

_MOST_IGNORED, _MOST_NAMED = 10, 5


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(Struct, frozen=True):
    """One finding of a check. `remedy` is the instruction; `fixed`: it has been carried out."""

    check: str  # the name of the check, or of a part of it
    level: Level
    text: str
    remedy: str = ""
    fixed: bool = False


Findings = Iterator[Finding]


def good(text: str, *, about: str = "") -> Finding:
    """Return a finding that all is well; *about* is the part of the check."""
    return Finding(about, Level.OK, text)


def warn(text: str, remedy: str = "", *, fixed: bool = False, about: str = "") -> Finding:
    """Return a finding that something should be better, and what to do."""
    return Finding(about, Level.WARN, text, remedy, fixed)


def fail(text: str, remedy: str = "", *, fixed: bool = False, about: str = "") -> Finding:
    """Return a finding that something must be fixed, and what to do."""
    return Finding(about, Level.FAIL, text, remedy, fixed)


class Subject:
    """The object of the checks: a spool, and whether to make safe fixes."""

    def __init__(self, root: str, *, fix: bool = False) -> None:
        self.root = root
        self.fix = fix
        self.spool = TolerantSpool(root)

    @property
    def is_own(self) -> bool:
        """Whether the spool is this user's, so that the checks may write there."""
        return owner_of(self.root) == os.geteuid()

    @cached_property
    def config(self) -> Config:
        """The configuration in force, the defaults if it is broken."""
        try:
            return config.parse(read_config(self.root) or b"")
        except (InvalidConfig, OSError):
            return Config()


class Check(Struct, frozen=True):
    """A row of the table. A finding that names no part of the check has the check's name."""

    name: str
    find: Callable[[Subject], Findings]
    needs: tuple[str, ...] = ()  # directories of the spool that the check needs

    def findings(self, subject: Subject) -> Findings:
        """Yield the findings of the check; a failure of the check itself is one too."""
        try:
            for finding in self.find(subject):
                yield finding if finding.check else replace(finding, check=self.name)
        except OSError as error:
            if not self.needs:
                raise  # not limited to one part of the spool, so the other checks would fail too
            where = f"{error.filename}: " if error.filename is not None else ""
            yield Finding(self.name, Level.FAIL, f"cannot be checked: {where}{error.strerror}", remedy_for(error))


def _directories(subject: Subject) -> Findings:
    root = subject.root
    there = _there(root)
    missing = [name for name in layout.DIRECTORIES if name not in there]
    if is_yet_to_be_made(root) and not subject.fix:
        yield good(f"no spool in {root} yet; `spool submit` makes one")
    elif not missing:
        yield good(f"the spool is in {root}")
    elif subject.fix:
        make_spool(root)
        yield warn(f"{root} lacked {', '.join(missing)}; created", fixed=True)
    else:
        what = f"{', '.join(missing)} {_are(missing)} missing" if there else "no spool there"
        yield fail(f"{root}: {what}", "`spool init` creates what is missing")


def _there(root: str) -> list[str]:
    return [name for name in layout.DIRECTORIES if os.path.isdir(f"{root}/{name}")]


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _modes(subject: Subject) -> Findings:
    owner = os.stat(subject.spool.root).st_uid
    who, bad = name_of(owner), False
    if not subject.is_own:
        text = f"the spool belongs to {who}: only {who} can change it, and only a dispatcher of {who} serves it"
        yield warn(text, f"run spool as {who}, or use your own spool", about="owner")
    for name in ("", *_there(subject.spool.root)):
        path = subject.spool.layout.at(name).rstrip("/")
        status = os.stat(path)
        if status.st_uid != owner:
            bad = True
            text = f"{path} belongs to {name_of(status.st_uid)}, and the spool to {who}"
            yield fail(text, f"chown {who} {path}", about="owner")
        elif status.st_mode & 0o022:
            bad = True
            yield _open_to_others(subject, name, path, status)
    if why := why_replaceable(subject.spool.root):
        yield warn(why, f"`chmod go-w` it, or keep the spool in a directory of {who}", about="mode")
    if not bad:
        open_ = stat.S_IMODE(os.stat(subject.spool.root).st_mode) & 0o077
        yield (
            warn(f"{subject.spool.root} is readable by others", f"chmod 700 {subject.spool.root}", about="mode")
            if open_
            else good(f"only {'you have' if subject.is_own else f'{who} has'} access", about="mode")
        )


def _open_to_others(subject: Subject, name: str, path: str, status: os.stat_result) -> Finding:
    """Return the finding that other users can write to the directory *name* of the spool."""
    if name in (QUEUED, HELD) and subject.config.accept_from:
        text = f"others can put files into {path}; those of {', '.join(subject.config.accept_from)} run"
        if status.st_mode & stat.S_ISVTX:
            return good(text, about="mode")
        text += ", and others can rename and remove them"
        return warn(text, f"`chmod +t {path}` keeps each file its owner's", about="mode")
    if subject.fix:
        os.chmod(path, 0o700)
    does = {
        QUEUED: "whose files do not run, and who can rename and remove yours",
        HELD: "whose files do not run, and who can rename and remove yours",
        RUNNING: "who can stop your jobs",
        DONE: "who can remove your records",
        layout.RESERVATIONS: "who can remove your reservations",
    }.get(name, "who could run anything as you")
    return fail(f"{path} is writable by others, {does}", f"chmod 700 {path}", fixed=subject.fix, about="mode")


def _one_file_system(subject: Subject) -> Findings:
    devices = {name: os.stat(subject.spool.layout.at(name)).st_dev for name in _there(subject.spool.root)}
    apart = [name for name, device in devices.items() if device != devices[QUEUED]]
    if apart:
        text = f"{', '.join(apart)} {_are(apart)} on another file system than {QUEUED}, so files cannot be moved"
        yield fail(text, "keep the whole spool on one file system", about="file system")
    else:
        yield good("the whole spool is on one file system", about="file system")


def _moves(subject: Subject) -> Findings:
    """Try the operations of a submission and a start: create, link, rename, sync."""
    if not subject.is_own:
        return
    disk = Disk(subject.spool.layout.at(layout.STAGING))
    there = f"{subject.spool.layout.at(QUEUED)}/.doctor.{os.getpid()}"
    begun = time.monotonic_ns()
    try:
        staged = disk.staged(b"\n", durable=True)
        try:
            disk.link(staged, there)
            disk.rename(there, staged)
            disk.sync_directory(subject.spool.layout.at(QUEUED))
        finally:
            disk.discard(there)
            disk.discard(staged)
    except OSError as error:
        without_links = error.errno in (errno.EPERM, 95)
        remedy = "a file system without hard links cannot hold a spool" if without_links else remedy_for(error)
        yield fail(f"files cannot be created, linked and moved: {error.strerror}", remedy)
        return
    took_ms = (time.monotonic_ns() - begun) / 1e6
    yield good(f"files can be created, linked and moved ({took_ms:.1f} ms with two syncs)")


def _configuration(subject: Subject) -> Findings:
    data = read_config(subject.root)
    if data is None:
        yield good("no config.toml: the defaults apply")
        return
    try:
        found = config.parse(data)
        doubts = (*found.advice, *unknown_in(found.accept_from))
    except InvalidConfig as error:
        remedy = f"fix {subject.spool.layout.at(layout.CONFIG)}; `spool check` also checks it"
        for problem in error.problems:
            yield fail(problem.message, remedy)
        return
    for why in doubts:
        yield warn(why, f"fix {subject.spool.layout.at(layout.CONFIG)}")
    if not doubts:
        yield good("config.toml is valid")


def _dispatcher(subject: Subject) -> Findings:
    service = subject.spool.service()
    if subject.spool.paused:
        yield warn("the spool is paused: nothing starts", "`spool resume`", about="pause")
    path = subject.spool.layout.at(layout.STATE)
    if service is Service.NONE:
        rows = JobLister(subject.spool).listing(recent=0).rows
        waits = any(row.state not in (State.HELD, State.INVALID) and not row.state.ended for row in rows)
        none = "" if subject.spool.unread else "; no active jobs"
        text = "no dispatcher is running" + (", but there are active jobs" if waits else none)
        level = Level.WARN if waits else Level.OK
        yield Finding("dispatcher", level, text, "`spool dispatch`, or the next `spool submit`, starts one")
        return
    data = subject.spool.file(layout.STATE)
    state = parse_state(data) if data else None
    if service is Service.ASTRAY:
        who = f"the dispatcher with pid {state.pid}" if state is not None else "a dispatcher"
        text = f"someone deleted or replaced .lock while {who} is running"
        yield warn(text, "it recreates .lock shortly; run `spool doctor` again", about="lock")
    try:
        silent_ns = time.time_ns() - os.stat(path).st_mtime_ns
    except OSError:
        silent_ns = 0
    if state is None:
        yield warn("a dispatcher holds the lock and has not reported yet", "run `spool doctor` again")
    elif silent_ns > STALE_NS:
        text = f"pid {state.pid} holds the lock but has not reported for {show_duration(silent_ns)}"
        yield fail(text, f"check whether it is stopped; its jobs survive `kill -9 {state.pid}`")
    else:
        yield good(f"pid {state.pid} on {state.host} serves this spool")
        for problem in state.problems:
            yield warn(in_words(problem, time.time_ns()))


def _jobs(subject: Subject) -> Findings:
    tail = layout.JOB_SUFFIX + layout.ERROR_SUFFIX
    bad = [
        name
        for place in (QUEUED, HELD)
        for name in subject.spool.names(place)
        if os.path.lexists(f"{subject.spool.layout.at(place)}/{name}{tail}")
    ]
    strange = yield from _ignored(subject)
    others = [(place, name, why) for place in (QUEUED, HELD, RUNNING) for name, why in _not_orders(subject, place)]
    for place, name, why in others[:_MOST_IGNORED]:
        what, _, remedy = why.partition("; ")
        yield warn(f"{place}/{layout.file_of(name)} does not count: {what}", remedy, about="job files")
    strange = strange or bool(others)
    if bad:
        text = f"{count_of(len(bad), 'job file')} cannot be used: {some_of(sorted(bad), _MOST_NAMED)}"
        yield warn(text, "`spool show NAME` says what is wrong", about="job files")
    elif not strange:
        waiting, held = len(subject.spool.names(QUEUED)), len(subject.spool.names(HELD))
        yield good(f"{waiting} waiting, {held} held, {len(subject.spool.names(RUNNING))} running", about="job files")


def _not_orders(subject: Subject, place: str) -> Iterator[tuple[str, str]]:
    """Yield the jobs in *place* whose files other users may have put there, with the reasons."""
    owner = owner_of(subject.root)
    for name in sorted(subject.spool.names(place)):
        status = status_of(subject.spool.layout.job_file(place, name))
        if status is None or not stat.S_ISREG(status.st_mode):
            continue
        if (status.st_uid != owner or status.st_nlink > 1 or status.st_mode & 0o022) and (
            why := subject.spool.why_no_order(place, name)
        ):
            yield name, why


def _ignored(subject: Subject) -> Generator[Finding, None, bool]:
    """Report ignored files in the directories for job files; return whether there are any."""
    any_there = False
    for place in (QUEUED, HELD):
        names, others = subject.spool.names_and_others(place)
        found = ignored_by_name(place, others)
        for name in sorted(names):
            status = status_of(subject.spool.layout.job_file(place, name))
            other = ignored_by_kind(place, name, status.st_mode) if status is not None else None
            found += [other] if other is not None else []
        for each in found[:_MOST_IGNORED]:
            yield warn(f"{each.path} is ignored: {each.why}", each.remedy, about="job files")
        if len(found) > _MOST_IGNORED:
            more = f"{len(found) - _MOST_IGNORED:,} more in {place}/ are ignored for such reasons"
            yield warn(more, f"`ls {subject.spool.layout.at(place)}` lists them", about="job files")
        rest = without_ending(place, others)
        if rest:
            text = f"{some_of(rest, _MOST_NAMED)}: ignored, because a job file is called NAME.toml"
            remedy = "rename a job file, remove what is none; `spool submit` takes a script"
            yield warn(text, remedy, about="job files")
        any_there |= bool(found or rest)
    return any_there


def _runs(subject: Subject) -> Findings:
    """Look for runs that were never settled."""
    prober = MachineProber()
    running = set(subject.spool.names(RUNNING))
    problems = 0
    for name in running | set(subject.spool.names(DONE)):
        run = subject.spool.latest_run(name)
        if run is None:
            if name in running:
                problems += 1
                yield warn(f"{name} is in running/ without a run", "a dispatcher moves it back to queued/")
            continue
        if name not in running and subject.spool.result(name, run) is not None:
            continue
        if damaged := subject.spool.damaged(name, run):
            problems += 1
            text = f"run {run} of {name}: not a record of this run: {', '.join(damaged)}"
            yield warn(text, f"look at {subject.spool.layout.metadir(name, run)}; the job may have written it")
        files = subject.spool.load(name, run, prober)
        verdict = files.proof.verdict
        if verdict is Verdict.UNREACHABLE:
            if files.grant is not None and files.grant.executor not in LOCAL_EXECUTORS:
                continue  # its engine decides
            problems += 1
            text = f"run {run} of {name} belongs to another host or container and cannot be judged here"
            remedy = "if that host no longer exists, add it to `other_hosts_gone` in config.toml"
            yield fail(text, remedy)
        elif name not in running or (verdict is Verdict.ENDED and not subject.spool.dispatcher_lives()):
            problems += 1
            text = f"run {run} of {name} has no result.toml yet"
            yield warn(text, "a dispatcher writes it from what the run left")
    if not problems:
        yield good("every run is either alive or has its result")


def _clock(subject: Subject) -> Findings:
    now = time.time_ns()
    late = []
    for name in (layout.HISTORY, layout.STATE):
        try:
            if os.stat(f"{subject.root}/{name}").st_mtime_ns - now > 60 * SECOND_NS:
                late.append(name)
        except OSError:
            continue
    if late:
        text = f"{', '.join(late)} have times in the future: the clock was set back"
        yield warn(text, "check the time, and that NTP keeps it right")
    elif time.gmtime().tm_year < 2024:
        yield fail(f"the clock says {time.strftime('%Y-%m-%d')}", "set the clock")
    else:
        yield good(time.strftime("%Y-%m-%d %H:%M:%S %Z"))


def _file_system(subject: Subject) -> Findings:
    kind = file_system_of(subject.root)
    if is_shared_between_hosts(kind):
        text = f"{kind}: changes made on other hosts raise no file events and are seen seconds later"
        yield warn(text, "a local disk is faster and safer")
    else:
        yield good(kind or "unknown")
    if is_mounted_noexec(subject.root):
        text = "mounted with noexec: copies of scripts (`spool submit job.sh`) and hooks in hooks/ cannot be executed"
        yield warn(text, "remount it with exec, or submit scripts with --no-capture")


def _room(subject: Subject) -> Findings:
    found = os.statvfs(subject.root)
    free_bytes = found.f_bavail * found.f_frsize
    floor = subject.config.policy.disk_floor_bytes
    text = f"{show_size(free_bytes)} free; below {show_size(floor)} nothing starts"
    if free_bytes < floor:
        yield fail(text, "`spool gc`, or a lower disk_floor in config.toml")
    elif free_bytes < 2 * floor:
        yield warn(text, "`spool gc`")
    else:
        yield good(text)
    if found.f_files and found.f_favail < 10_000:
        text = f"{found.f_favail} more files can be created; a run needs about ten"
        yield warn(text, "`spool gc`", about="room for files")


def _executor(subject: Subject) -> Findings:
    name = subject.config.executor
    problem = Executors(config=lambda: subject.config).problem(name)
    if problem is not None:
        yield fail(f"{name}: {problem}", "install it, or set another `executor` in config.toml")
    else:
        yield good(f"{name} can be used")


def _wrapper(_: Subject) -> Findings:
    """Report the program that starts jobs; a dispatcher of the same installation uses the same."""
    found = compiled.find()
    if found.path is not None:
        yield good(f"compiled: {found.path}")
    else:
        yield Finding("", Level.WARN if found.broken else Level.OK, f"/bin/sh: {found.why}", found.remedy)


def _systemd(subject: Subject) -> Findings:
    """Report the fate of jobs when the user logs out."""
    if not os.path.isdir("/run/systemd/system"):
        yield good("not running here; jobs outlive your sessions")
        return
    unit = unit_for(subject.root)
    text = f"{UNIT} is installed" if unit is not None else f"{UNIT} is not installed; `spool submit` starts a process"
    yield good(text)
    code, said = answer_of(("loginctl", "show-user", this_user(), "--property=Linger", "--value"))
    if code:
        return
    if said == "yes":
        yield good("on: jobs outlive your last session", about="linger")
    else:
        text = "off: systemd may end your jobs when your last session ends"
        yield warn(text, "loginctl enable-linger", about="linger")


def _gpus(subject: Subject) -> Findings:
    machine = machine_now(subject.spool.strict, time.time_ns())  # as for every other command
    if machine.gpu_problem is not None:
        tools = ("nvidia-smi", *(vendor.tool for vendor in vendors_here()))
        yield fail(machine.gpu_problem, f"check whether {' and '.join(tools)} work{'s' if len(tools) == 1 else ''}")
        return
    names = sorted({gpu.name for gpu in machine.gpus})
    if names:
        yield good(f"{len(machine.gpus)}: {', '.join(names)}")
        if why := unlisted_cards(listed={gpu.vendor for gpu in machine.gpus}):
            yield warn(why, "install or repair the driver")
    elif machine.gpus_unused:
        yield good("none that can be used")
    elif why := unlisted_cards():
        yield warn(f"none: {why}", "install or repair the driver; nvidia-smi says more")
    else:
        yield good(f"none: {NO_CARD}")
    for gpu in machine.gpus:
        if gpu.problem is not None:
            yield warn(f"GPU {gpu.index} ({gpu.uuid}): {gpu.problem}", "no job starts on it")
    for text in machine.gpus_unused:
        yield warn(text, "a job gets a GPU by its UUID")


def _hooks(subject: Subject) -> Findings:
    hooks = find_hooks(subject.root)
    for problem in hooks.problems:
        yield warn(problem, "docs/EVENTS.md says which hooks run")
    if hooks.paths and not hooks.problems:
        yield good(f"run for {', '.join(sorted(hooks.paths))}")


def _unread(subject: Subject) -> Findings:
    for path, error in subject.spool.unread.items():
        yield fail(f"cannot read {path}: {error.strerror}", remedy_for(error))


_A_SPOOL = (QUEUED,)
OF_THE_SPOOL = (
    Check("directories", _directories),
    Check("modes", _modes, _A_SPOOL),
    Check("one file system", _one_file_system, _A_SPOOL),
    Check("moves", _moves, (QUEUED, layout.STAGING)),  # a check creates no directories
    Check("configuration", _configuration, _A_SPOOL),
    Check("dispatcher", _dispatcher, _A_SPOOL),
    Check("jobs", _jobs, _A_SPOOL),
    Check("runs", _runs, _A_SPOOL),
    Check("reading", _unread, _A_SPOOL),
)
OF_THE_MACHINE = (
    Check("clock", _clock),
    Check("disk type", _file_system),
    Check("room", _room),
    Check("executor", _executor),
    Check("wrapper", _wrapper),
    Check("systemd", _systemd),
    Check("GPUs", _gpus),
    Check("hooks", _hooks),
)


def of_the_machine() -> tuple[Check, ...]:
    """Return the checks of the machine, those of capabilities before the last one."""
    contributions = (check for _, checks in contributed("checks") for check in checks)
    return (*OF_THE_MACHINE[:-1], *contributions, OF_THE_MACHINE[-1])


_BEFORE_A_SPOOL = ("clock", "wrapper", "systemd", "GPUs")


def examine(root: str, *, fix: bool = False, checks: Sequence[Check] | None = None) -> Findings:
    """Check the spool at *root* and the machine, as far as that needs no spool if there is none yet.

    With *fix*, make safe fixes.
    """
    if checks is None:
        machine: Sequence[Check] = of_the_machine() if os.path.isdir(root) else ()
        if is_yet_to_be_made(root):
            machine = [check for check in OF_THE_MACHINE if check.name in _BEFORE_A_SPOOL]
        checks = (*OF_THE_SPOOL, *machine)
    subject = Subject(root, fix=fix)
    for check in checks:
        if all(os.path.isdir(f"{root}/{needed}") for needed in check.needs):
            yield from check.findings(subject)
