"""`spool service`: the units that it writes, enables and removes, with a service manager that only takes notes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from shell import Home
from spool.client import autostart, service

UNIT = ".config/systemd/user/spool.service"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Give a home with a `systemctl` that notes its words, and fails as long as there is a file `no-systemd`."""
    found = Home(tmp_path / "home")
    fake = found.path / ".local" / "bin" / "systemctl"
    fake.write_text(
        "#!/bin/sh\n"
        'if [ -e "$HOME/no-systemd" ]; then echo "Failed to connect to bus: No medium found" >&2; exit 1; fi\n'
        'echo "$@" >> "$HOME/asked"\n'
        "case $2 in is-enabled) echo enabled ;; is-active) echo active ;; esac\n"
    )
    fake.chmod(0o755)
    return found


def asked(home: Home) -> list[str]:
    """Return what systemctl was asked for since the last call, but for questions."""
    notes = home.path / "asked"
    lines = notes.read_text().splitlines() if notes.exists() else []
    notes.unlink(missing_ok=True)
    words = [line.removeprefix("--user ") for line in lines]
    return [line for line in words if line != "show-environment" and not line.startswith("is-")]


def test_installing_writes_and_starts_the_unit_for_this_program(home: Home) -> None:
    """The unit calls the program that wrote it; doing it again changes nothing; systemctl is told in order."""
    said = home.run("spool", "service", "install").stdout
    text = (home.path / UNIT).read_text()
    assert f"{home.path / UNIT} written" in said
    assert "loginctl enable-linger" in said
    (start,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    assert start.endswith(" dispatch")
    assert Path(start.split()[0].strip('"')).is_absolute()
    assert "SPOOL_DIR" not in text
    assert asked(home) == ["daemon-reload", "enable --now spool.service", "try-restart spool.service"]
    assert "unchanged" in home.run("spool", "service", "install").stdout
    assert (home.path / UNIT).read_text() == text
    assert asked(home) == ["daemon-reload", "enable --now spool.service"]
    assert re.search(r"spool.service +installed +enabled +active", home.run("spool", "service", "status").stdout)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("options", [[], ["--once"]])
def test_systemd_accepts_what_is_written(home: Home, options: list[str]) -> None:
    """Also for a spool whose path has blanks, quotes, dollars and percent signs, which nothing expands."""
    root = home.path / "a b'c\"d$HOME%h"
    home.run("spool", "--spool", str(root), "service", "install", *options)
    units = sorted((home.path / ".config/systemd/user").glob("spool*"))
    assert len(units) == (3 if options else 1)
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", *units],
        capture_output=True,
        text=True,
        check=False,
        env={"HOME": str(home.path), "XDG_RUNTIME_DIR": str(home.path), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
    )
    said = [line for line in verified.stderr.splitlines() if any(unit.name in line for unit in units)]
    assert (verified.returncode, said) == (0, []), verified.stderr


def test_submit_finds_the_unit_of_a_spool_elsewhere(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written into the unit is what a submission reads there, whatever the path has in it."""
    root = str(home.path / "a b%h\\c")
    home.run("spool", "--spool", root, "service", "install")
    monkeypatch.setenv("HOME", str(home.path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert autostart._root_of_unit([service.directory()]) == root


def test_without_systemd_the_line_for_cron_is_told_and_nothing_is_changed(home: Home) -> None:
    """The line has the full path, for cron's PATH has no such program."""
    (home.path / "no-systemd").touch()
    said = home.run("spool", "service", "install", check=False)
    assert said.returncode == 1
    assert "Failed to connect to bus" in said.stdout
    (line,) = re.findall(r"^@reboot (/.*) dispatch$", said.stdout, re.MULTILINE)
    assert Path(line.split()[0]).exists()
    assert not (home.path / UNIT).exists()
    assert not home.spool.exists()


def test_a_unit_that_somebody_edited_or_wrote_stays(home: Home) -> None:
    """Installing and removing leave it, and say so; --force overwrites it, and removes what was edited."""
    home.run("spool", "service", "install")
    unit = home.path / UNIT
    for text in (unit.read_text().replace("RestartSec=10s", "RestartSec=1s"), "[Service]\nExecStart=/bin/true\n"):
        unit.write_text(text)
        asked(home)
        said = home.run("spool", "service", "install", check=False)
        assert said.returncode == 1
        assert "--force" in said.stdout
        assert home.run("spool", "service", "remove", check=False).returncode == 1
        assert (unit.read_text(), asked(home)) == (text, [])
    assert home.run("spool", "service", "remove", "--force", check=False).returncode == 1
    assert unit.exists()  # it was never ours
    home.run("spool", "service", "install", "--force")
    unit.write_text(unit.read_text() + "\n")
    home.run("spool", "service", "remove", "--force")
    assert not unit.exists()


def test_removing_disables_and_deletes_only_our_units(home: Home) -> None:
    """Another unit beside them stays, and a second time there is nothing to do."""
    home.run("spool", "service", "install")
    other = home.path / ".config/systemd/user/other.service"
    other.write_text("[Service]\n")
    asked(home)
    assert f"{home.path / UNIT} removed" in home.run("spool", "service", "remove").stdout
    assert asked(home) == ["disable --now spool.service", "daemon-reload"]
    assert [path.name for path in other.parent.iterdir()] == ["other.service"]
    assert "nothing to do" in home.run("spool", "service", "remove").stdout
    assert home.run("spool", "service", "status", check=False).returncode == 1


def test_removing_works_where_systemd_runs_no_more(home: Home) -> None:
    """The files go, and the links that enabled them."""
    home.run("spool", "service", "install")
    wants = home.path / ".config/systemd/user/default.target.wants"
    wants.mkdir()
    (wants / "spool.service").symlink_to(home.path / UNIT)
    (home.path / "no-systemd").touch()
    home.run("spool", "service", "remove")
    assert list(wants.iterdir()) == []
    assert not (home.path / UNIT).exists()


def test_the_other_way_takes_the_place_of_the_first(home: Home) -> None:
    """`--once` removes the resident unit, and watches the directories of this spool."""
    home.run("spool", "service", "install")
    asked(home)
    home.run("spool", "--spool", str(home.path / "elsewhere"), "service", "install", "--once")
    assert not (home.path / UNIT).exists()
    text = (home.path / ".config/systemd/user/spool-once.path").read_text()
    assert f"PathChanged={home.path}/elsewhere/queued\n" in text
    assert asked(home)[0] == "disable --now spool.service"
    once = (home.path / ".config/systemd/user/spool-once.service").read_text()
    assert f'Environment="SPOOL_DIR={home.path}/elsewhere"' in once


def test_a_dry_run_prints_the_units_and_changes_nothing(home: Home) -> None:
    """Also where there is no systemd."""
    (home.path / "no-systemd").touch()
    said = home.run("spool", "service", "install", "--dry-run").stdout
    assert f"# {home.path / UNIT} (absent)" in said
    assert "KillMode=process" in said
    assert not (home.path / ".config").exists()
    assert not home.spool.exists()


def test_the_units_of_contrib_are_those_of_the_program(home: Home) -> None:
    """One that was copied by hand counts as installed."""
    unit = home.path / UNIT
    unit.parent.mkdir(parents=True)
    unit.write_bytes((Path(service.__file__).parent / "units" / "spool.service").read_bytes())
    assert re.search(r"spool.service +installed", home.run("spool", "service", "status").stdout)
