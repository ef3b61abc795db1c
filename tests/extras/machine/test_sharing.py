"""`spool machine`: the arbiter of a shared machine is served, installed and looked at; its unit and its account."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from calling import Command, start
from contrib.test_service import UNITS, read
from extras.machine.sharing import BOB, join, shares
from spool.client import service
from spool.core.errors import ExitCode, SpoolError, SpoolUnusable
from spool.extras import machine as extra
from spool.extras.machine import ACCOUNT, MachineConfig, protocol, verb
from spool.machine import host
from spool.machine.host import SHARED_DIRECTORY, Host, shared_directory
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


def test_status_says_whether_a_machine_is_shared_and_served(spool: Command, spool_root: Path) -> None:
    """As JSON too, with 1 if it is not; what was granted is shown beside an arbiter that is silent."""
    join(spool_root, shares(BOB), age_s=3600)
    said = spool("machine", "status")
    assert (said.code, "1h00m" in said.out, "bob" in said.out) == (1, True, True)
    (spool_root / "config.toml").write_text('machine = "off"\n')
    said = spool("machine", "status", "--json")
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


# The unit and the account: systemd accepts them, and the arbiter may do little.


MACHINE = "spool-machine.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit_of_a_shared_machine(tmp_path: Path) -> None:
    """`systemd-analyze verify` finds nothing wrong but keys that only a newer systemd knows, and which it ignores."""
    program = shutil.which("true")
    unit = tmp_path / MACHINE
    unit.write_text((UNITS / MACHINE).read_text().replace("/usr/bin/spool machine serve", str(program)))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False
    )
    said = [line for line in verified.stderr.splitlines() if MACHINE in line]
    assert said == [], verified.stderr


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed")
def test_systemd_makes_the_account_of_a_shared_machine(tmp_path: Path) -> None:
    """It has no password, no home and no shell, and is the one that dispatchers trust."""
    (tmp_path / "etc").mkdir()
    conf = (UNITS / "sysusers.d" / "spool-machine.conf").read_bytes()
    subprocess.run(["systemd-sysusers", f"--root={tmp_path}", "-"], input=conf, check=True, capture_output=True)
    (line,) = [line for line in (tmp_path / "etc/passwd").read_text().splitlines() if "spool" in line]
    name, _, uid, _, _, home, shell = line.split(":")
    assert (name, home, int(uid) < 1000) == (ACCOUNT, "/", True)
    assert shell.endswith("/nologin")


def test_the_arbiter_has_no_privilege() -> None:
    """It runs as its own account, without a capability, a network or a home, with nothing to write but its own."""
    service = read(MACHINE)["Service"]
    assert (service["User"], service["Group"]) == (ACCOUNT, ACCOUNT)
    assert (service["CapabilityBoundingSet"], service["AmbientCapabilities"]) == ("", "")
    assert service["RestrictAddressFamilies"] == "AF_UNIX"
    assert service["ProtectSystem"] == "strict"
    assert {service[key] for key in ("NoNewPrivileges", "ProtectHome", "PrivateNetwork", "PrivateTmp")} == {"yes"}
    assert "ReadWritePaths" not in service
    # Behind these it would take all its peers for nobody, or their processes for gone.
    assert not {"PrivateUsers", "ProtectProc", "ProcSubset"} & set(service)


def test_the_arbiter_serves_where_dispatchers_ask() -> None:
    """Its directories are those of the program, and stay over a restart, for the journal of the leases is there."""
    service = read(MACHINE)["Service"]
    assert f"/run/{service['RuntimeDirectory']}" == SHARED_DIRECTORY
    assert (service["RuntimeDirectoryMode"], service["RuntimeDirectoryPreserve"]) == ("0755", "yes")
    assert f"/var/lib/{service['StateDirectory']}" == verb.STATE_DIRECTORY
    assert service["ExecStart"].split()[1:] == ["machine", "serve"]


def test_the_arbiter_comes_back() -> None:
    """After any end but that of a mistake, at once, without a limit to the number of times."""
    unit = read(MACHINE)
    assert (unit["Service"]["Restart"], unit["Unit"]["StartLimitIntervalSec"]) == ("always", "0")
    mistakes = (ExitCode.USAGE, ExitCode.INVALID_FILE)
    assert unit["Service"]["RestartPreventExitStatus"] == " ".join(str(int(code)) for code in mistakes)


@pytest.mark.parametrize("fails", [False, True], ids=["whole", "disk full"])
def test_a_file_of_the_installation_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A machine.toml that is written in part would be kept by the next installation, which replaces none."""
    path = tmp_path / "a b" / "machine.toml"
    monkeypatch.setattr("spool.extras.machine.verb.MACHINE_FILE", str(path))
    step = verb.configured()
    cat = "cat() { echo '# part'; return 1; }\n" if fails else ""
    done = subprocess.run(["/bin/sh", "-c", cat + step], capture_output=True, text=True, check=False)
    assert (done.returncode != 0, path.exists()) == (fails, not fails)
    assert fails or "[quotas.default_user]" in path.read_text()
