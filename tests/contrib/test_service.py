"""`spool service`: its units, with a service manager that only takes notes, and what those of contrib say."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shell import Home
from spool.cli import main
from spool.client import service
from support import ROOT

UNITS = ROOT / "contrib" / "systemd"
UNIT = ".config/systemd/user/spool.service"


class Here(Home):
    """A home whose `spool` is called in this process."""

    capfd: pytest.CaptureFixture[str]

    def service(self, *words: str, code: int = 0, spool: str | None = None) -> str:
        """Call `spool service`, which has to end so; return what it said."""
        self.capfd.readouterr()
        ended = main.run([*(["--spool", spool] if spool else []), "service", *words])
        sys.stdout.flush()
        said = "".join(self.capfd.readouterr())
        assert ended == code, said
        return said


@pytest.fixture
def home(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """Give a home with a `systemctl` that notes its words, and fails as long as there is a file `no-systemd`."""
    found = Here(tmp_path / "home")
    found.capfd = capfd
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", [str(found.path / ".local" / "bin" / "spool")])
    fake = found.path / ".local" / "bin" / "systemctl"
    fake.write_text(
        "#!/bin/sh\n"
        'if [ -e "$HOME/no-systemd" ]; then echo "Failed to connect to bus: No medium found" >&2; exit 1; fi\n'
        'echo "$@" >> "$HOME/asked"\n'
    )
    fake.chmod(0o755)
    return found


def asked(home: Here) -> list[str]:
    """Return what systemctl was told since the last call."""
    notes = home.path / "asked"
    lines = notes.read_text().splitlines() if notes.exists() else []
    notes.unlink(missing_ok=True)
    words = [line.removeprefix("--user ") for line in lines]
    return [line for line in words if line != "show-environment"]


def test_installing_writes_and_starts_the_unit_for_this_program(home: Here) -> None:
    """The unit calls the program that wrote it; doing it again changes nothing; systemctl is told in order."""
    said = home.service("install")
    text = (home.path / UNIT).read_text()
    assert f"{home.path / UNIT} written" in said
    assert "loginctl enable-linger" in said
    (start,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    assert start.endswith(" dispatch")
    assert Path(start.split()[0].strip('"')).is_absolute()
    assert "SPOOL_DIR" not in text
    assert asked(home) == ["daemon-reload", "enable --now spool.service", "try-restart spool.service"]
    assert "unchanged" in home.service("install")
    assert (home.path / UNIT).read_text() == text
    assert asked(home) == ["daemon-reload", "enable --now spool.service"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_what_is_written(home: Here) -> None:
    """Also for a spool whose path has blanks, quotes, dollars and percent signs, which nothing expands."""
    root = home.path / "a b'c\"d$HOME%h"
    home.service("install", spool=str(root))
    units = sorted((home.path / ".config/systemd/user").glob("spool*"))
    assert len(units) == 1
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", *units],
        capture_output=True,
        text=True,
        check=False,
        env={"HOME": str(home.path), "XDG_RUNTIME_DIR": str(home.path), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
    )
    said = [line for line in verified.stderr.splitlines() if any(unit.name in line for unit in units)]
    assert (verified.returncode, said) == (0, []), verified.stderr


def test_without_systemd_the_line_for_cron_is_told_and_nothing_is_changed(home: Here) -> None:
    """The line has the full path, for cron's PATH has no such program."""
    (home.path / "no-systemd").touch()
    said = home.service("install", code=1)
    (line,) = re.findall(r"^@reboot (/.*) dispatch$", said, re.MULTILINE)
    assert Path(line.split()[0]).exists()
    assert not (home.path / UNIT).exists()
    assert not home.spool.exists()


def test_a_unit_that_somebody_edited_or_wrote_stays(home: Here) -> None:
    """Installing and removing leave it, and say so; --force overwrites it, and removes what was edited."""
    home.service("install")
    unit = home.path / UNIT
    for text in (unit.read_text().replace("RestartSec=10s", "RestartSec=1s"), "[Service]\nExecStart=/bin/true\n"):
        unit.write_text(text)
        asked(home)
        said = home.service("install", code=1)
        assert "--force" in said
        home.service("remove", code=1)
        assert (unit.read_text(), asked(home)) == (text, [])
    home.service("remove", "--force", code=1)
    assert unit.exists()  # it was never ours
    home.service("install", "--force")
    unit.write_text(unit.read_text() + "\n")
    home.service("remove", "--force")
    assert not unit.exists()


def test_removing_disables_and_deletes_only_our_units(home: Here) -> None:
    """Another unit beside them stays, and a second time there is nothing to do."""
    home.service("install")
    other = home.path / ".config/systemd/user/other.service"
    other.write_text("[Service]\n")
    asked(home)
    assert f"{home.path / UNIT} removed" in home.service("remove")
    assert asked(home) == ["disable --now spool.service", "daemon-reload"]
    assert [path.name for path in other.parent.iterdir()] == ["other.service"]
    assert "nothing to do" in home.service("remove")


def test_removing_works_where_systemd_runs_no_more(home: Here) -> None:
    """The files go, and the links that enabled them."""
    home.service("install")
    wants = home.path / ".config/systemd/user/default.target.wants"
    wants.mkdir()
    (wants / "spool.service").symlink_to(home.path / UNIT)
    (home.path / "no-systemd").touch()
    home.service("remove")
    assert list(wants.iterdir()) == []
    assert not (home.path / UNIT).exists()


def test_a_dry_run_prints_the_units_and_changes_nothing(home: Here) -> None:
    """Also where there is no systemd."""
    (home.path / "no-systemd").touch()
    said = home.service("install", "--dry-run")
    assert f"# {home.path / UNIT} (absent)" in said
    assert "KillMode=process" in said
    assert not (home.path / ".config").exists()
    assert not home.spool.exists()


def test_the_units_of_contrib_are_those_of_the_program(home: Here) -> None:
    """One that was copied by hand is removed like one that was installed."""
    unit = home.path / UNIT
    unit.parent.mkdir(parents=True)
    unit.write_bytes((Path(service.__file__).parent / "units" / "spool.service").read_bytes())
    assert f"{unit} removed" in home.service("remove")


# The units themselves.


def read(name: str) -> dict[str, dict[str, str]]:
    """Return the sections of a unit; of a key that is given twice, the last value."""
    parser = configparser.RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#", ";"))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNITS / name)
    return {section: dict(parser[section]) for section in parser.sections()}


def test_these_are_all_units() -> None:
    """No unit lies in the folder that the tests, or the page beside it, do not know."""
    text = (UNITS / "README.md").read_text()
    assert "spool.service" in text
    found = sorted(path.name for path in UNITS.iterdir() if path.suffix and path.suffix != ".md")
    assert found == ["spool-machine.service", "spool.service", "sysusers.d", "user-.slice.d"]


def test_the_service_does_not_end_or_bind_its_jobs() -> None:
    """Its end, or a job out of memory, reaches no job; what children inherit (limits, umask, niceness) is not set."""
    service = read("spool.service")["Service"]
    assert (service["KillMode"], service["OOMPolicy"], service["TasksMax"]) == ("process", "continue", "infinity")
    inherited = re.compile(
        r"Protect|Private|Restrict|NoNewPrivileges|UMask|Nice|Limit(?!Interval)|System|Capability|Memory|CPU|IO|Lock"
        r"|ReadOnly|ReadWrite|Inaccessible|WorkingDirectory|RuntimeMaxSec|User|Group|OOMScore|IgnoreSIGPIPE"
    )
    assert [key for key in service if inherited.match(key)] == []


def test_the_unit_starts_the_dispatcher_and_comes_back() -> None:
    """A crash ends nothing; a wrong call is not repeated."""
    unit = read("spool.service")
    starts = {"ExecStart": "%h/.local/bin/spool dispatch", "Restart": "on-failure", "RestartPreventExitStatus": "2"}
    assert starts.items() <= unit["Service"].items()
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"


def test_the_slice_limits_each_user() -> None:
    """The drop-in is for the slices of users, and shares CPUs, memory and processes among them."""
    assert set(read("user-.slice.d/spool.conf")["Slice"]) == {"CPUWeight", "MemoryHigh", "TasksMax"}
