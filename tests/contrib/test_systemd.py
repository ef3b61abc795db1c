"""The systemd units: systemd accepts them; those of users do not end jobs."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support import ROOT

UNITS = ROOT / "contrib" / "systemd"
NAMES = ["spool.service"]


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
    assert [name for name in NAMES if name not in text] == []
    assert sorted(path.name for path in UNITS.iterdir() if path.suffix and path.suffix != ".md") == sorted(
        [*NAMES, "spool-machine.service", "sysusers.d", "user-.slice.d"]
    )


def test_the_service_does_not_end_or_bind_its_jobs() -> None:
    """Its end, or a job out of memory, reaches no job; what children inherit (limits, umask, niceness) is not set."""
    service = read("spool.service")["Service"]
    assert (service["KillMode"], service["OOMPolicy"], service["TasksMax"]) == ("process", "continue", "infinity")
    inherited = re.compile(
        r"Protect|Private|Restrict|NoNewPrivileges|UMask|Nice|Limit(?!Interval)|System|Capability|Memory|CPU|IO|Lock"
        r"|ReadOnly|ReadWrite|Inaccessible|WorkingDirectory|RuntimeMaxSec|User|Group|OOMScore|IgnoreSIGPIPE"
    )
    assert [key for key in service if inherited.match(key)] == []


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("Service", {"ExecStart": "%h/.local/bin/spool dispatch", "Restart": "on-failure"}),
        ("Service", {"RestartPreventExitStatus": "2"}),  # it was called wrongly
        ("Unit", {"StartLimitIntervalSec": "0"}),
    ],
)
def test_the_unit_starts_the_dispatcher_and_comes_back(section: str, values: dict[str, str]) -> None:
    """A crash ends nothing."""
    assert {key: read("spool.service")[section][key] for key in values} == values


def test_the_slice_limits_each_user() -> None:
    """The drop-in is for the slices of users, and shares CPUs, memory and processes among them."""
    assert set(read("user-.slice.d/spool.conf")["Slice"]) == {"CPUWeight", "MemoryHigh", "TasksMax"}
