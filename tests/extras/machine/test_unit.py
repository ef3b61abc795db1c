"""The unit and the account of a shared machine's arbiter: systemd accepts them, and the arbiter may do little."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from contrib.test_service import UNITS, read
from spool.core.errors import ExitCode
from spool.extras.machine import ACCOUNT, verb
from spool.machine.host import SHARED_DIRECTORY

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
