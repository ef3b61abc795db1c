"""`spool machine`: share the machine among several users; and their part of `spool info`.

What only `status` needs is imported when it is used: an arbiter keeps what it has imported.
"""

from __future__ import annotations

import errno
import os
import shlex
import time
from collections.abc import Iterable, Sequence

import click

from spool.cli import render
from spool.cli.group import Subverbs, Verb, json_option
from spool.cli.render import tell
from spool.client import service
from spool.core.errors import ExitCode, InvalidConfig, SpoolError, SpoolUnusable, UsageError, cannot
from spool.core.reasons import count_of
from spool.core.units import show_size
from spool.extras.machine import ACCOUNT, MachineConfig, others_may_change, parse
from spool.extras.machine.protocol import sharing
from spool.formats.config import Config
from spool.machine.gpus import LIMIT_NS, GpuWatcher
from spool.machine.host import MACHINE_FILE, SHARED_DIRECTORY, Host, shared_directory
from spool.query.shared import MachineSharing, UserShare, pools_of
from spool.store.disk import Disk, read_file
from spool.store.glance import config_if

UNIT = "spool-machine.service"
STATE_DIRECTORY = "/var/lib/spool-machine"

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "units")
_UNITS = "/etc/systemd/system"
_SYSUSERS = "/etc/sysusers.d/spool-machine.conf"
_PROGRAM = "/usr/bin/spool"
_HOMES = tuple(f"{path}/" for path in ("/home", "/root", "/run/user"))  # what ProtectHome= hides
_FIRST = ("set -e", "umask 022")  # other users must be able to read what root writes
_BOOTED = "/run/systemd/system"  # sd_booted(3)

_SHARES = (
    render.Column("USER", cut="middle"),
    render.Column("LEASES", right=True),
    render.Column("CPU", right=True),
    render.Column("MEM", right=True, drop=2),
    render.Column("GPU", right=True),
    render.Column("RESOURCES", cut="words", drop=1),
    render.Column("WAITING", right=True),
)
_FIXED = 3  # columns that are there even if they are empty


@click.group(cls=Subverbs, short_help="Share the machine among several users.")
def command() -> None:
    """Share the machine among several users, each with a spool of their own.

    The users' dispatchers ask one arbiter before they start a job, so that CPUs, memory and GPUs are given out once, in
    a fair order. The arbiter needs no privilege: it opens no file of a user, and starts and ends nothing.

      sudo spool machine install
      spool machine status
    """


@command.command("status", cls=Verb, short_help="Show what each user has, and whether the arbiter answers.")
@json_option
@click.pass_obj
def status(root: str, as_json: bool) -> int:
    """Show what the machine has, how much of it each user holds by lease, and how many starts of each wait.

    If the arbiter does not answer, it says why and what to do. No job is named. Exits with 1 if the machine is not
    shared, or its arbiter does not answer. `spool info` shows it beside what this spool has.

    By hand: cat /run/spool/machine.json
    """
    settings, now_ns = config_if(root, b"machine") or Config(), time.time_ns()
    place = shared_directory(settings.machine)
    found = sharing(place, settings.machine_owner, os.geteuid(), now_ns) if place is not None else None
    if as_json:
        render.as_json({"machine": found})
    elif found is None:
        why = '`machine = "off"` in config.toml' if settings.machine == "off" else f"there is no {MACHINE_FILE}"
        render.prose(f"this spool shares its machine with no other: {why}; `sudo spool machine install` shares it")
    else:
        problem = f"problem: {found.problem}; {found.remedy}. Until then nothing starts"
        render.prose(problem if found.problem else f"the arbiter in {found.directory} answers")
        if found.use is not None:
            print_shared(found, now_ns, " (you)")
    return 0 if found is not None and not found.problem else int(ExitCode.FAILED)


@command.command("serve", cls=Verb, short_help="Run the arbiter.")
@click.argument("directory", metavar="[DIR]", required=False)
def serve(directory: str | None) -> int:
    """Run the arbiter of a shared machine until TERM or Ctrl-C. Its log goes to stderr; runs do not depend on it.

    Without DIR it is the machine's, as `spool machine install` starts it: it serves in /run/spool, by
    /etc/spool/machine.toml. With DIR it needs neither root nor an account of its own: DIR is a directory of yours that
    only you can write to, and DIR/machine.toml may say more. The other users name both in their config.toml:

      machine = "/var/tmp/lab"
      machine_owner = "carol"

    Such an arbiter gives turns to users who trust you with turns; it does not protect them from each other.
    """
    from spool.extras.machine.arbiter import Arbiter
    from spool.listeners import set_up_logging

    path = os.path.abspath(directory) if directory is not None else SHARED_DIRECTORY
    if directory is None:
        if shared_directory("auto") is None:
            why = f"{MACHINE_FILE} does not exist, so no dispatcher asks there"
            raise SpoolUnusable(cannot("serve", path, why, remedy="`spool machine install` writes one"))
        settings = _configuration(MACHINE_FILE)
        state = STATE_DIRECTORY
    else:
        disk = Disk(path)
        if disk.ensure_directory(path):
            disk.chmod(path, 0o755)  # whatever the umask: the others connect to a socket in it
        settings = _configuration(f"{path}/machine.toml")
        state = path
        tell(
            f"this arbiter gives turns, not protection: it counts for users whose config.toml names {path}, and no "
            "user must name it"
        )
    set_up_logging("info", journald="JOURNAL_STREAM" in os.environ)
    arbiter = Arbiter(path, settings, state_directory=state)
    try:
        arbiter.serve()
    finally:
        arbiter.close()
    return 0


@command.command("install", cls=Verb, short_help="Install the arbiter as a system service.")
@click.option("--force", is_flag=True, help="Overwrite a unit that was edited or written by hand.")
@click.option("--print", "prints", is_flag=True, help="Print the steps as a shell script, and change nothing.")
def install(force: bool, prints: bool) -> int:
    """Install the arbiter as a service of systemd, for all users of the machine. Only root can.

    It makes the account `spool-machine`, which owns nothing else, writes /etc/spool/machine.toml unless it exists, with
    quotas of three quarters of this machine for each user, and starts spool-machine.service. Running jobs continue and
    are counted, and running dispatchers ask it from then on. Running it again updates and restarts the service, which
    loses no lease.

      spool machine install --print
      sudo spool machine install
    """
    program = service.program()
    if prints:
        render.say_text(script(steps(program, force=force)))
        return 0
    if not os.path.isdir(_BOOTED):
        remedy = (
            f"at every boot, run `spool machine serve` as an account {ACCOUNT} that owns {SHARED_DIRECTORY} and "
            f"{STATE_DIRECTORY}"
        )
        raise service.NoServiceManager(cannot("install", UNIT, "systemd does not run this machine", remedy=remedy))
    if os.geteuid() != 0:
        raise UsageError(
            cannot("install", "the service", "only root can", remedy="`spool machine install --print` shows the steps")
        )
    for step in steps(program, force=force):
        render.say(carry_out(step))
    render.say(f"the machine is shared: {MACHINE_FILE} names the users, and `spool machine status` shows what each has")
    return 0


def steps(program: Sequence[str], *, force: bool) -> list[str]:
    """Return the steps that install the service, which runs *program*.

    Raises SpoolError if the service could not see the program, or a unit that was edited is in the way and not *force*.
    """
    hidden = next((path for path in map(os.path.realpath, program) if path.startswith(_HOMES)), None)
    if hidden is not None:
        why = f"{hidden} is in a home directory, which the service cannot see, and its owner could change it"
        remedy = "install spool for all users, as with `sudo pipx install --global spool`, and call that"
        raise SpoolError(cannot("install", UNIT, why, remedy=remedy))
    started = f"ExecStart={' '.join(map(service.word, program))} "
    text = service.shipped(UNIT, _FOLDER).decode().replace(f"ExecStart={_PROGRAM} ", started)
    unit = service.Unit(UNIT, f"{_UNITS}/{UNIT}", service.marked(text.encode(), service.BY_ROOT), _FOLDER)
    if not force:
        service.refuse(unit, service.BY_ROOT)
    restart = [f"systemctl try-restart {UNIT}"] if unit.state is not service.UnitState.ABSENT else []
    return [
        _written(_SYSUSERS, service.shipped("spool-machine.conf", _FOLDER)),
        f"systemd-sysusers {shlex.quote(_SYSUSERS)}",
        _written(unit.path, unit.text),
        configured(),
        "systemctl daemon-reload",
        f"systemctl enable --now {UNIT}",
        *restart,
    ]


def carry_out(step: str) -> str:
    """Take one step and return its command. Raises SpoolError with what it said if it fails."""
    command = step.partition(" <<")[0]
    code, said = service.answer_of(("/bin/sh", "-c", script([step])))
    if code != 0:
        raise SpoolError(cannot("run", f"`{command}`", said or f"exit code {code}"))
    return command


def script(wanted: Iterable[str]) -> str:
    """Return the steps as a shell script for root."""
    return "\n".join([*_FIRST, *wanted]) + "\n"


def configured() -> str:
    """Return the step that writes machine.toml, unless there is one.

    It has quotas by which no user can hold the whole machine. GPUs that cannot be seen now have none.
    """
    host, watcher = Host(), GpuWatcher()
    try:
        gpus = watcher.look(time.time_ns(), patience_ns=LIMIT_NS).gpus
    finally:
        watcher.close()
    memory = MachineConfig().memory_of(host.memory().total_bytes) >> 20
    lines = ["", "[quotas.default_user]", f"max_running_cpus = {_part(host.cpus())}"]
    lines.append(f'max_running_memory = "{_part(memory)}M"')
    lines += [f"max_running_gpus = {_part(len(gpus))}"] if gpus else []
    text = service.shipped("machine.toml", _FOLDER) + "\n".join([*lines, ""]).encode()
    return _written(MACHINE_FILE, text, unless=f"[ -e {shlex.quote(MACHINE_FILE)} ] || ")


def _part(whole: int) -> int:
    return max(whole * 3 // 4, 1)


def _written(path: str, text: bytes, unless: str = "") -> str:
    """Return the step that writes a file, whole or not at all."""
    place, whole, new = (shlex.quote(each) for each in (os.path.dirname(path), path, f"{path}.new"))
    lines = text.decode().rstrip("\n")
    return f"{unless}{{ install -d {place} && cat > {new} && mv {new} {whole}; }} << 'END'\n{lines}\nEND"


def _configuration(path: str) -> MachineConfig:
    """Return what *path* configures; tell what has no effect there. Raises OSError, SpoolUnusable, InvalidConfig."""
    try:
        found = parse(read_file(path, check=_why_not_trusted) or b"")
    except PermissionError as error:
        remedy = f"let everyone read it: `chmod a+rx {os.path.dirname(path)}; chmod a+r {path}`"
        if error.errno == errno.EPERM:  # it can be read, and does not count
            remedy = f"make it yours alone: `chmod go-w {path}`"
        raise SpoolUnusable(
            cannot("read", "the configuration", str(error.strerror), where=path, remedy=remedy)
        ) from None
    except InvalidConfig as error:
        raise InvalidConfig(path, error.problems) from None
    for each in found.advice:
        tell(f"{path}: {each}")
    return found


def _why_not_trusted(status: os.stat_result) -> str:
    why = "other users can change it; it must belong to you or root, and be writable by its owner alone"
    return why if others_may_change(status) else ""


def print_shared(shared: MachineSharing, now_ns: int, remark: str = " (this spool)") -> None:
    """Print the totals of a shared machine, and a line for each of its users, first one's own with a *remark*."""
    render.say()
    use = shared.use
    if use is None:
        render.prose(f"shared machine: {shared.problem}")
        return
    totals = [f"{use.cpus_granted} of {count_of(use.cpus, 'CPU')}"]
    totals.append(f"{show_size(use.memory_granted_bytes)} of {show_size(use.memory_bytes)}")
    totals += [f"{use.gpus_granted} of {count_of(use.gpus, 'GPU')}"] if use.gpus else []
    totals += [f"{pool.granted} of {pool.total} {name}" for name, pool in use.resources.items()]
    told = f"{shared.problem}; granted then" if shared.problem else f"arbiter pid {use.arbiter}; granted"
    render.prose(f"shared machine ({shared.directory}): {told}: {', '.join(totals)}")
    if use.gpu_problem is not None:
        render.prose(f"its GPUs are unknown: {use.gpu_problem}")
    if without := sorted({user for gpu in use.by_gpu.values() for user in gpu.without_lease}):
        render.prose(f"on GPUs without a lease: {', '.join(without)}")
    rows = [_share(use.own, remark), *map(_share, use.others)]
    kept = [at for at, column in enumerate(_SHARES) if at < _FIXED or any(row[at] for row in rows)]
    render.table([_SHARES[at] for at in kept], [[row[at] for at in kept] for row in rows])


def _share(share: UserShare, remark: str = "") -> list[str]:
    return [
        f"{share.user}{remark}",
        str(share.leases),
        str(share.cpus),
        render.size(share.memory_bytes) if share.memory_bytes else "",
        str(share.gpus or ""),
        pools_of(share),
        str(share.asks or ""),
    ]
