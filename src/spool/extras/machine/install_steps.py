"""The system service of the arbiter of a shared machine: the steps that install it.

Root carries them out, or reads them first: as a shell script they are the same steps.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable, Sequence

from msgspec import Struct

from spool.client.service import BY_ROOT, NoServiceManager, Unit, UnitState, answer_of, marked, refuse, shipped, word
from spool.core.errors import SpoolError, cannot
from spool.core.model import Machine
from spool.extras.machine.machinefile import MachineConfig
from spool.machine.gpus import LIMIT_NS, GpuWatcher
from spool.machine.host import Host
from spool.store.disk import Disk, read_file

UNIT = "spool-machine.service"
STATE_DIRECTORY = "/var/lib/spool-machine"

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "units")
_UNITS = "/etc/systemd/system"
_ACCOUNT = "/etc/sysusers.d/spool-machine.conf"
_PROGRAM = "/usr/bin/spool"
_HOMES = ("/home", "/root", "/run/user")  # what ProtectHome= hides
_UMASK = "umask 022"  # other users must be able to read what root writes
_BOOTED = "/run/systemd/system"  # sd_booted(3)


class WriteStep(Struct, frozen=True):
    """A file of root. One that is not `ours` is left as it is, if it is there."""

    path: str
    text: bytes
    ours: bool = True


class RunStep(Struct, frozen=True):
    """A command of root."""

    words: tuple[str, ...]


Step = WriteStep | RunStep


def steps(program: Sequence[str], machine_file: str, whole: Machine, *, force: bool) -> list[Step]:
    """Return the steps that install the service, which runs *program*, on a machine that has *whole*.

    Raises SpoolError if the service could not see the program, or a unit that was edited is in the way and not *force*.
    """
    hidden = next((path for path in map(os.path.realpath, program) if _is_hidden(path)), None)
    if hidden is not None:
        why = f"{hidden} is in a home directory, which the service cannot see, and its owner could change it"
        remedy = "install spool for all users, as with `sudo pipx install --global spool`, and call that"
        raise SpoolError(cannot("install", UNIT, why, remedy=remedy))
    started = f"ExecStart={' '.join(map(word, program))} "
    text = shipped(UNIT, _FOLDER).decode().replace(f"ExecStart={_PROGRAM} ", started)
    unit = Unit(UNIT, f"{_UNITS}/{UNIT}", marked(text.encode(), BY_ROOT), _FOLDER)
    if not force:
        refuse([unit], BY_ROOT)
    restart = [RunStep(("systemctl", "try-restart", UNIT))] if unit.state is not UnitState.ABSENT else []
    return [
        WriteStep(_ACCOUNT, shipped("spool-machine.conf", _FOLDER)),
        RunStep(("systemd-sysusers", _ACCOUNT)),
        WriteStep(unit.path, unit.text),
        WriteStep(machine_file, _quotas(whole), ours=False),
        RunStep(("systemctl", "daemon-reload")),
        RunStep(("systemctl", "enable", "--now", UNIT)),
        *restart,
    ]


def whole() -> Machine:
    """Return what this machine has for jobs. GPUs that cannot be seen now are left out."""
    host, watcher = Host(), GpuWatcher()
    try:
        gpus = watcher.look(time.time_ns(), patience_ns=LIMIT_NS).gpus
    finally:
        watcher.close()
    return Machine(host.cpus(), MachineConfig().memory_of(host.memory().total_bytes), gpus=gpus)


def require_manager() -> None:
    """Raise NoServiceManager if systemd does not manage this machine."""
    if not os.path.isdir(_BOOTED):
        raise NoServiceManager(cannot("install", UNIT, "systemd does not run this machine"))


def carry_out(step: Step) -> str:
    """Do one step and return what was done, in words. Raises OSError, and SpoolError with what a command said."""
    if isinstance(step, WriteStep):
        before = read_file(step.path)
        if before is not None and not step.ours:
            return f"{step.path} stays as it is"
        if before == step.text:
            return f"{step.path} unchanged"
        disk = Disk(os.path.dirname(step.path))
        disk.ensure_public(disk.staging)
        disk.put_beside(step.path, step.text, 0o644)
        return f"{step.path} written"
    command = shlex.join(step.words)
    code, said = answer_of(step.words)
    if code != 0:
        raise SpoolError(cannot("run", f"`{command}`", said or f"exit code {code}"))
    return command


def script(wanted: Iterable[Step]) -> str:
    """Return the steps as a shell script for root."""
    lines = ["set -e", _UMASK]
    for step in wanted:
        lines += [shlex.join(step.words)] if isinstance(step, RunStep) else _written(step)
    return "\n".join(lines) + "\n"


def by_hand(program: Sequence[str], account: str, directory: str, machine_file: str, whole: Machine) -> str:
    """Return a shell script for root that does without systemd what the service does; for every boot."""
    name = shlex.quote(account)
    useradd = ("useradd", "--system", "--home-dir", "/", "--no-create-home", "--shell", "/usr/sbin/nologin", account)
    bare = ("--clear-groups", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all")
    serve = ("setpriv", f"--reuid={account}", f"--regid={account}", *bare, *program, "machine", "serve")
    lines = [
        "set -e",
        _UMASK,
        *_written(WriteStep(machine_file, _quotas(whole), ours=False)),
        f"id -u {name} > /dev/null 2>&1 || {shlex.join(useradd)}",
        shlex.join(("install", "-d", "-o", account, "-m", "755", directory)),
        shlex.join(("install", "-d", "-o", account, "-m", "750", STATE_DIRECTORY)),
        f"{shlex.join(serve)} &",
    ]
    return "\n".join(lines) + "\n"


def _quotas(whole: Machine) -> bytes:
    """Return the text of a new machine.toml, with quotas by which no user can hold the *whole* of a machine."""
    lines = ["", "[quotas.default_user]", f"max_running_cpus = {_part(whole.cpus)}"]
    lines.append(f'max_running_memory = "{_part(whole.memory_bytes >> 20)}M"')
    lines += [f"max_running_gpus = {_part(len(whole.gpus))}"] if whole.gpus else []
    return shipped("machine.toml", _FOLDER) + "\n".join([*lines, ""]).encode()


def _part(whole: int) -> int:
    return max(whole * 3 // 4, 1)


def _is_hidden(path: str) -> bool:
    return any(path.startswith(f"{home}/") for home in _HOMES)


def _written(step: WriteStep) -> list[str]:
    path = shlex.quote(step.path)
    unless = "" if step.ours else f"[ -e {path} ] || "
    text = step.text.decode().rstrip("\n")
    return [f"install -d {shlex.quote(os.path.dirname(step.path))}", f"{unless}cat > {path} << 'END'", text, "END"]
