"""The systemd units: systemd accepts them; those of users do not end jobs, that of a shared machine may do little."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from spool.client import machine_service
from spool.core.errors import ExitCode
from spool.machine import shared
from support import ROOT

UNITS = ROOT / "contrib" / "systemd"
MACHINE = "spool-machine.service"
NAMES = ["spool.service", "spool-once.service", "spool-once.path", "spool-once.timer"]


def read(name: str) -> dict[str, dict[str, str]]:
    """Return the sections of a unit; of a key that is given twice, the last value."""
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#", ";"))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNITS / name)
    return {section: dict(parser[section]) for section in parser.sections()}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Copy the units to where nothing else is, with a home in which the program exists."""
    program = tmp_path / "home" / ".local" / "bin" / "spool"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    units = tmp_path / "units"
    units.mkdir()
    for name in NAMES:
        (units / name).write_text((UNITS / name).read_text().replace("%h", str(tmp_path / "home")))
    return units


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_every_unit(installed: Path) -> None:
    """`systemd-analyze verify --user` finds nothing to say about any of the units."""
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", *(installed / name for name in NAMES)],
        capture_output=True,
        text=True,
        env={
            "HOME": str(installed.parent / "home"),
            "XDG_RUNTIME_DIR": str(installed.parent),
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
        },
    )
    said = [line for line in verified.stderr.splitlines() if any(name in line for name in NAMES)]
    assert (verified.returncode, said) == (0, []), verified.stderr


def test_these_are_all_units() -> None:
    """No unit lies in the folder that the tests, or the page beside it, do not know."""
    text = (UNITS / "README.md").read_text()
    assert [name for name in [*NAMES, MACHINE] if name not in text] == []
    assert sorted(path.name for path in UNITS.iterdir() if path.suffix and path.suffix != ".md") == sorted(
        [*NAMES, MACHINE, "sysusers.d", "user-.slice.d"]
    )


@pytest.mark.parametrize("name", ["spool.service", "spool-once.service"])
def test_no_service_ends_or_binds_its_jobs(name: str) -> None:
    """Its end, or a job out of memory, reaches no job; what children inherit (limits, umask, niceness) is not set."""
    service = read(name)["Service"]
    assert (service["KillMode"], service["OOMPolicy"], service["TasksMax"]) == ("process", "continue", "infinity")
    inherited = re.compile(
        r"Protect|Private|Restrict|NoNewPrivileges|UMask|Nice|Limit(?!Interval)|System|Capability|Memory|CPU|IO|Lock"
        r"|ReadOnly|ReadWrite|Inaccessible|WorkingDirectory|RuntimeMaxSec|User|Group|OOMScore|IgnoreSIGPIPE"
    )
    assert [key for key in service if inherited.match(key)] == []


@pytest.mark.parametrize(
    ("unit", "section", "values"),
    [
        ("spool.service", "Service", {"ExecStart": "%h/.local/bin/spool dispatch", "Restart": "on-failure"}),
        ("spool.service", "Service", {"RestartPreventExitStatus": "2"}),  # it was called wrongly
        ("spool.service", "Unit", {"StartLimitIntervalSec": "0"}),
        ("spool-once.path", "Path", {"Unit": "spool-once.service", "TriggerLimitIntervalSec": "0"}),
        ("spool-once.timer", "Timer", {"Unit": "spool-once.service"}),
        ("spool-once.service", "Unit", {"StartLimitIntervalSec": "0"}),
        ("spool-once.service", "Service", {"ExecStart": "%h/.local/bin/spool dispatch --once"}),
    ],
)
def test_the_units_start_the_dispatcher_and_come_back(unit: str, section: str, values: dict[str, str]) -> None:
    """A crash and a flood of changes end nothing; path and timer start the service that makes one pass."""
    assert {key: read(unit)[section][key] for key in values} == values


def test_the_path_unit_cannot_loop() -> None:
    """It waits for changes, not for a directory that is not empty."""
    assert set(read("spool-once.path")["Path"]) == {"PathChanged", "Unit", "TriggerLimitIntervalSec"}


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
    assert (name, home, int(uid) < 1000) == (shared.ACCOUNT, "/", True)
    assert shell.endswith("/nologin")


def test_the_arbiter_has_no_privilege() -> None:
    """It runs as its own account, without a capability, a network or a home, with nothing to write but its own."""
    service = read(MACHINE)["Service"]
    assert (service["User"], service["Group"]) == (shared.ACCOUNT, shared.ACCOUNT)
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
    assert f"/run/{service['RuntimeDirectory']}" == shared.DIRECTORY
    assert (service["RuntimeDirectoryMode"], service["RuntimeDirectoryPreserve"]) == ("0755", "yes")
    assert f"/var/lib/{service['StateDirectory']}" == machine_service.STATE_DIRECTORY
    assert service["ExecStart"].split()[1:] == ["machine", "serve"]


def test_the_arbiter_comes_back() -> None:
    """After any end but that of a mistake, at once, without a limit to the number of times."""
    unit = read(MACHINE)
    assert (unit["Service"]["Restart"], unit["Unit"]["StartLimitIntervalSec"]) == ("always", "0")
    mistakes = (ExitCode.USAGE, ExitCode.INVALID_FILE)
    assert unit["Service"]["RestartPreventExitStatus"] == " ".join(str(int(code)) for code in mistakes)


def test_the_slice_limits_each_user() -> None:
    """The drop-in is for the slices of users, and shares CPUs, memory and processes among them."""
    assert set(read("user-.slice.d/spool.conf")["Slice"]) == {"CPUWeight", "MemoryHigh", "TasksMax"}
