"""What is told of a job whose messages cannot arrive, before it is submitted; and what its options are."""

from __future__ import annotations

from pathlib import Path

import pytest

from calling import Command
from spool.extras.notify.addresses import contacts, events
from spool.extras.notify.settings import Notify
from spool.formats import jobfile
from spool.store.spool import Spool


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
    """`--notify-on` alone is an error with the name of the option that it lacks."""
    words = ("--notify", "me", "--notify-on", "started", "--notify-log-lines", "5")
    assert spool("submit", "--hold", "--name", "a", *words, "--", "true").code == 0
    text = (spool_root / "held" / "a.toml").read_bytes()
    assert jobfile.parse(text, name="a").part("notify") == Notify(("me",), ("started",), 5)
    assert "--notify: has no recipients" in spool("submit", "--notify-on", "failed", "--", "true").err


def test_a_shell_completes_contacts_and_events(spool_root: Path) -> None:
    """Those of the configuration, and those that a job can have."""
    assert contacts(Spool(str(spool_root))) == []
    (spool_root / "config.toml").write_text('contacts = { team = "https://example.org/x" }\n')
    assert contacts(Spool(str(spool_root))) == ["team"]
    assert "failed" in events(Spool(str(spool_root)))
