"""`spool machine`: the arbiter of a shared machine is served, installed and looked at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from calling import Command, start
from extras.machine import sharing
from extras.machine.sharing import BOB, gpu_share, write
from spool.client import service
from spool.core.errors import SpoolError, SpoolUnusable
from spool.extras import machine as extra
from spool.extras.machine import MachineConfig, protocol, verb
from spool.machine import host
from spool.machine.host import Host, shared_directory
from spool.query.shared import UserShare
from spool.store.spool import Spool
from support import PATIENCE_S, wait_for

PROGRAM = ("/opt/spool/bin/spool",)


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """Return a directory that an arbiter may be served in; it does not exist yet."""
    return tmp_path / "lab"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let what is the machine's lie in a directory of this test, and return that."""
    here = tmp_path / "machine"
    here.mkdir()
    monkeypatch.setattr(verb, "_UNITS", f"{here}/units")
    monkeypatch.setattr(verb, "_SYSUSERS", f"{here}/sysusers.d/spool-machine.conf")
    monkeypatch.setattr(verb, "_BOOTED", str(here))
    for module in (host, verb):
        monkeypatch.setattr(module, "MACHINE_FILE", f"{here}/etc/machine.toml")
    monkeypatch.setattr(extra, "FILES", (replace(extra.FILES[0], path=f"{here}/etc/machine.toml"),))
    monkeypatch.setattr(service, "program", lambda: PROGRAM)
    for name in ("systemctl", "systemd-sysusers"):
        fake = here / "bin" / name
        fake.parent.mkdir(exist_ok=True)
        fake.write_text(f'#!/bin/sh\necho {name} "$@" >> {here}/asked\n')
        fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
    return here


def ordered(machine: Path) -> list[str]:
    """Return the commands of root since the last call."""
    notes = machine / "asked"
    lines = notes.read_text().splitlines() if notes.exists() else []
    notes.unlink(missing_ok=True)
    return lines


def test_anyone_can_serve_a_directory(lab: Path) -> None:
    """It is made if need be, with a file for everyone in it; the arbiter leaves at TERM, with 0, and took no socket."""
    arbiter = start("machine", "serve", str(lab))
    wait_for((lab / "machine.json").exists)
    wait_for((lab / "socket").exists)
    assert lab.stat().st_mode & 0o777 == 0o755
    told = protocol.parse_status((lab / "machine.json").read_bytes())
    assert (told.pid, told.cpus, told.users) == (arbiter.pid, os.cpu_count(), ())
    arbiter.send_signal(signal.SIGTERM)
    said = arbiter.communicate(timeout=PATIENCE_S)[1]
    assert arbiter.returncode == 0
    assert said.count("not protection") == 1
    assert not (lab / "socket").exists()


def test_status_says_whether_a_machine_is_shared_and_served(shares: Command, lab: Path, spool_root: Path) -> None:
    """As JSON too, with 1 if it is not; what was granted is shown beside an arbiter that is silent."""
    told(lab, BOB)
    os.utime(lab / "machine.json", (time.time() - 3600, time.time() - 3600))
    said = shares("machine", "status")
    assert (said.code, "1h00m" in said.out, "bob" in said.out) == (1, True, True)
    (spool_root / "config.toml").write_text('machine = "off"\n')
    said = shares("machine", "status", "--json")
    assert (said.code, json.loads(said.out)) == (1, {"version": 1, "machine": None})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can install the service")
@pytest.mark.usefixtures("four")
def test_installing_writes_and_starts_the_service(spool: Command, machine: Path) -> None:
    """The unit calls this program; a second time nothing is written but the service restarts; machine.toml stays.

    Its quotas leave a part of each resource to other users.
    """
    said = spool("machine", "install")
    assert said.code == 0, said
    unit = machine / "units" / "spool-machine.service"
    assert "ExecStart=/opt/spool/bin/spool machine serve" in unit.read_text()
    account = f"{machine}/sysusers.d/spool-machine.conf"
    assert ordered(machine) == [
        f"systemd-sysusers {account}",
        "systemctl daemon-reload",
        "systemctl enable --now spool-machine.service",
    ]
    toml = machine / "etc" / "machine.toml"
    limits, total = extra.parse(toml.read_bytes()).policy.default_user_limits, Host()
    assert limits.max_running_cpus == max(total.cpus() * 3 // 4, 1)
    assert limits.max_running_memory_bytes is not None
    assert 0.7 < limits.max_running_memory_bytes / MachineConfig().memory_of(total.memory().total_bytes) <= 0.75
    assert limits.max_running_gpus == 3
    toml.write_text("cpus = 1\n")
    said = spool("machine", "install")
    assert said.out.splitlines()[-2] == "systemctl try-restart spool-machine.service"
    assert toml.read_text() == "cpus = 1\n"
    assert ordered(machine)[-1] == "systemctl try-restart spool-machine.service"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can install the service")
@pytest.mark.parametrize("prints", [False, True])
def test_others_can_read_what_is_installed_under_any_umask(spool: Command, machine: Path, prints: bool) -> None:
    """Root's umask may be 027, and both the arbiter and the users' dispatchers look at the files.

    `--print` changes nothing; /bin/sh carries out what it prints.
    """
    before = os.umask(0o027)
    try:
        said = spool("machine", "install", *["--print"] * prints)
        if prints:
            assert sorted(path.name for path in machine.iterdir()) == ["bin"]
            subprocess.run(["/bin/sh"], input=said.out, text=True, check=True)
    finally:
        os.umask(before)
    made = [machine / "etc", machine / "etc" / "machine.toml", machine / "units", *(machine / "units").iterdir()]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o755, 0o644, 0o755, 0o644]
    assert ordered(machine)[-1] == "systemctl enable --now spool-machine.service"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs an account that may not look")
def test_a_file_that_may_not_be_read_is_not_called_missing(machine: Path) -> None:
    """An arbiter that is not root says that it has no permission; so does a command for another user's spool."""
    (machine / "etc").mkdir(mode=0o700)
    (machine / "etc" / "machine.toml").write_text("")
    child = os.fork()
    if child == 0:
        code = 1
        with suppress(BaseException):
            os.setuid(65534)
            assert shared_directory("auto") is not None
            with pytest.raises(SpoolUnusable, match="Permission denied"):
                verb.serve.callback(None)  # type: ignore[misc]
            with pytest.raises(SpoolUnusable, match="Permission denied"):
                Spool.open(f"{machine}/etc/spool")
            code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can install the service")
def test_a_unit_that_was_edited_stays(spool: Command, machine: Path) -> None:
    """Without --force, and nothing else is written or started either."""
    unit = machine / "units" / "spool-machine.service"
    unit.parent.mkdir()
    unit.write_text("[Service]\nExecStart=/bin/true\n")
    said = spool("machine", "install")
    assert said.code == 1
    assert "--force" in said.err
    assert "`systemctl edit`" in said.err
    assert (ordered(machine), (machine / "etc").exists()) == ([], False)
    assert spool("machine", "install", "--force").code == 0
    assert "machine serve" in unit.read_text()


def test_a_command_that_fails_is_told(machine: Path) -> None:
    """The message has the command and what it said."""
    (machine / "bin" / "systemctl").write_text("#!/bin/sh\necho no such unit >&2\nexit 4\n")
    with pytest.raises(SpoolError, match=r"cannot run `systemctl daemon-reload`: no such unit"):
        verb.carry_out("systemctl daemon-reload")
    with pytest.raises(SpoolError, match=r"cannot run `install -d /dev/null/a; true`: .*Not a directory"):
        verb.carry_out("install -d /dev/null/a; true")


@pytest.mark.parametrize("home", ["/home/alice/.local/bin/spool", "/run/user/1000/venv/bin/spool"])
def test_a_program_in_a_home_is_not_installed(home: str) -> None:
    """The service sees no home, and the program's owner could change what runs for all."""
    with pytest.raises(SpoolError, match="is in a home directory"):
        verb.steps((home,), force=False)


def test_without_systemd_it_says_what_to_run(spool: Command, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is changed; the arbiter needs an account and two directories."""
    monkeypatch.setattr(verb, "_BOOTED", f"{machine}/no-systemd")
    said = spool("machine", "install")
    assert said.code == 1
    assert "`spool machine serve`" in said.err
    assert sorted(path.name for path in machine.iterdir()) == ["bin"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may")
def test_only_root_installs(spool: Command, machine: Path) -> None:
    """Another user is told how to look at the steps."""
    said = spool("machine", "install")
    assert said.code == 2
    assert "--print" in said.err


def test_check_reads_the_file_of_the_machine(spool: Command, machine: Path) -> None:
    """Mistakes can be found before the arbiter is restarted."""
    toml = machine / "etc" / "machine.toml"
    toml.parent.mkdir()
    toml.write_text("cpus = 1\nuser = ['a']\n")
    said = spool("check", toml)
    assert said.code == 4
    assert f'{toml}:2: unknown key "user"' in said.out
    toml.write_text("cpus = 1\n")
    assert spool("check", toml).code == 0


def told(lab: Path, *users: UserShare, **changes: object) -> None:
    """Let an arbiter have written its file into *lab*, now."""
    write(lab, sharing.shares(*users, gpus=(gpu_share(0, ("bob", None)), gpu_share(1)), **changes))


@pytest.fixture
def shares(spool: Command, spool_root: Path, lab: Path) -> Command:
    """Call `spool` for a spool whose machine is shared by way of *lab*."""
    (spool_root / "config.toml").write_text(f'autostart = false\nmachine = "{lab}"\n')
    return spool
