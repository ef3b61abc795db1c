"""What `spool doctor` says of notifications, and what is told of a job whose messages cannot arrive."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from calling import Command
from spool.doctor import Level, examine
from spool.extras.notify.checks import CHECKS
from spool.extras.notify.settings import Notify
from spool.formats import jobfile

SECRET = "s3cr3t-t0ken-of-mine"


def found(root: Path, text: str, mode: int = 0o600) -> list[tuple[str, Level, str]]:
    """Return the findings for a configuration."""
    path = root / "config.toml"
    path.write_text(text)
    path.chmod(mode)
    return [(finding.check, finding.level, finding.text) for finding in examine(str(root), checks=CHECKS)]


def test_receivers_that_are_understood_are_fine(spool_root: Path) -> None:
    """Web hooks, services and what the notifier takes; nothing is sent, and nothing said where there is no receiver."""
    assert found(spool_root, "cpus = 1") == []
    text = f"""notifier = "mail"
[contacts]
me = "me@example.org"
chat = "discord://4174216298/{SECRET}"
all = ["me", "chat", "https://hooks.example.org/"]
[[notify]]
to = "all"
"""
    ((check, level, said),) = found(spool_root, text)
    assert (check, level) == ("notify", Level.OK)
    assert said.startswith("3 recipients")


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("nobody", "no `notifier`"),
        ("me@example.org", "there is no `sendmail`"),
        (f"nosuch://{SECRET}", "does not understand"),
        (f"discord://{SECRET}", "does not understand"),
        ("me", "circle"),
        ("http://", "does not understand"),
    ],
)
def test_a_receiver_that_cannot_be_reached_is_named_without_a_secret(
    spool_root: Path, address: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name of the contact, with the reason."""
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    ((check, level, said),) = found(spool_root, f'contacts = {{ me = "{address}" }}')
    assert (check, level) == ("notify", Level.WARN)
    assert said.startswith("me: ")
    assert why in said
    assert SECRET not in said


def test_secrets_that_others_read_are_a_finding(spool_root: Path) -> None:
    """Where the spool's directory is open as well."""
    text = f'contacts = {{ me = "discord://4174216298/{SECRET}" }}'
    assert [level for _, level, _ in found(spool_root, text, 0o644)] == [Level.OK]
    spool_root.chmod(0o755)
    ((_, level, said),) = found(spool_root, text, 0o644)
    assert level is Level.WARN
    assert "readable by others" in said


def test_apprise_is_asked_for_where_an_address_needs_it(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finding says how to install it."""
    monkeypatch.setitem(sys.modules, "apprise", None)
    assert "not installed" in found(spool_root, 'contacts = { me = "mailto://example.org" }')[0][2]


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("someone", "cannot send anything to someone: it is no URL"),
        ("me@example.org", "there is no `sendmail`"),
        ("mailto://me:secret@example.org", "cannot send anything to mailto://...: Apprise is not installed"),
    ],
)
def test_an_address_that_nothing_reaches_is_told_at_submission(
    spool: Command, spool_root: Path, address: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning without secrets, and the job is submitted all the same; `--strict` submits nothing."""
    monkeypatch.setattr("spool.extras.notify.sending.find_spec", lambda name: None)
    monkeypatch.setattr("spool.extras.notify.sending.shutil.which", lambda *_, **__: None)
    for strict, code in (("--strict", 1), ("--no-capture", 0)):
        said = spool("submit", strict, "--name", "a", "--notify", address, "--", "true")
        assert (said.code, why in said.err, "secret" in said.err) == (code, True, False)


def test_the_options_fill_the_key(spool: Command, spool_root: Path) -> None:
    """`notify.on` alone is an error with the name of the option that it lacks."""
    words = ("--notify", "me", "--set", "notify.on=started", "--set", "notify.log_lines=5")
    assert spool("submit", "--hold", "--name", "a", *words, "--", "true").code == 0
    text = (spool_root / "held" / "a.toml").read_bytes()
    assert jobfile.parse(text, name="a").part("notify") == Notify(("me",), ("started",), 5)
    assert "--notify: " in spool("submit", "--set", "notify.on=failed", "--", "true").err
