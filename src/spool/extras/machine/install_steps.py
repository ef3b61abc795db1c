"""The system service of the arbiter of a shared machine: the steps that install it, each a command of root's shell."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable, Sequence

from spool.client.service import BY_ROOT, NoServiceManager, Unit, UnitState, answer_of, marked, refuse, shipped, word
from spool.core.errors import SpoolError, cannot
from spool.extras.machine import ACCOUNT
from spool.extras.machine.machinefile import MachineConfig
from spool.machine import shared
from spool.machine.gpus import LIMIT_NS, GpuWatcher
from spool.machine.host import Host

UNIT = "spool-machine.service"
STATE_DIRECTORY = "/var/lib/spool-machine"

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "units")
_UNITS = "/etc/systemd/system"
_SYSUSERS = "/etc/sysusers.d/spool-machine.conf"
_PROGRAM = "/usr/bin/spool"
_HOMES = ("/home", "/root", "/run/user")  # what ProtectHome= hides
_FIRST = ("set -e", "umask 022")  # other users must be able to read what root writes
_BOOTED = "/run/systemd/system"  # sd_booted(3)


def steps(program: Sequence[str], *, force: bool) -> list[str]:
    """Return the steps that install the service, which runs *program*.

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
    restart = [f"systemctl try-restart {UNIT}"] if unit.state is not UnitState.ABSENT else []
    return [
        _written(_SYSUSERS, shipped("spool-machine.conf", _FOLDER)),
        f"systemd-sysusers {shlex.quote(_SYSUSERS)}",
        _written(unit.path, unit.text),
        _configured(),
        "systemctl daemon-reload",
        f"systemctl enable --now {UNIT}",
        *restart,
    ]


def require_manager() -> None:
    """Raise NoServiceManager if systemd does not manage this machine."""
    if not os.path.isdir(_BOOTED):
        raise NoServiceManager(cannot("install", UNIT, "systemd does not run this machine"))


def carry_out(step: str) -> str:
    """Take one step and return its command. Raises SpoolError with what it said if it fails."""
    command = step.partition(" <<")[0]
    code, said = answer_of(("/bin/sh", "-c", script([step])))
    if code != 0:
        raise SpoolError(cannot("run", f"`{command}`", said or f"exit code {code}"))
    return command


def script(wanted: Iterable[str]) -> str:
    """Return the steps as a shell script for root."""
    return "\n".join([*_FIRST, *wanted]) + "\n"


def by_hand(program: Sequence[str]) -> str:
    """Return a shell script for root that does without systemd what the service does; for every boot."""
    name = shlex.quote(ACCOUNT)
    useradd = ("useradd", "--system", "--home-dir", "/", "--no-create-home", "--shell", "/usr/sbin/nologin", ACCOUNT)
    bare = ("--clear-groups", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all")
    serve = ("setpriv", f"--reuid={ACCOUNT}", f"--regid={ACCOUNT}", *bare, *program, "machine", "serve")
    return script(
        [
            _configured(),
            f"id -u {name} > /dev/null 2>&1 || {shlex.join(useradd)}",
            f"install -d -o {name} -m 755 {shared.DIRECTORY}",
            f"install -d -o {name} -m 750 {STATE_DIRECTORY}",
            f"{shlex.join(serve)} &",
        ]
    )


def _configured() -> str:
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
    text = shipped("machine.toml", _FOLDER) + "\n".join([*lines, ""]).encode()
    path = shared.MACHINE_FILE
    return _written(path, text, unless=f"[ -e {shlex.quote(path)} ] || ")


def _part(whole: int) -> int:
    return max(whole * 3 // 4, 1)


def _is_hidden(path: str) -> bool:
    return any(path.startswith(f"{home}/") for home in _HOMES)


def _written(path: str, text: bytes, unless: str = "") -> str:
    place, lines = shlex.quote(os.path.dirname(path)), text.decode().rstrip("\n")
    return f"{unless}{{ install -d {place}; cat > {shlex.quote(path)}; }} << 'END'\n{lines}\nEND"
