"""What is shown of addresses and logs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spool.listeners.message import has_secret, masked, scrubbed
from spool.listeners.notifications import last_lines
from spool.listeners.transports import AppriseService, NotifierCommand, WebHook, transport_for

SLACK = "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"


@pytest.mark.parametrize(
    ("address", "shown", "secret"),
    [
        ("me", "me", False),
        ("bob@example.org", "bob@example.org", False),
        ("mailto:bob:pw@example.org", "mai...", False),
        ("mailto://bob:pw@example.org", "mailto://...", True),
        ("mailto://example.org?from=a@b.c&to=d@e.f", "mailto://...", False),
        ("mailtos://example.org?user=bob&pass=pw", "mailtos://...", True),
        ("tgram://token/chat", "tgram://...", True),
        ("https://bob:pw@example.org:8443/x?y=1", "https://example.org:8443/...", True),
        ("https://example.org/lab", "https://example.org/...", False),
        ("https://example.org/lab?a=1&+X-Token=t", "https://example.org/...", True),
        (SLACK, "https://hooks.slack.com/...", True),
        ("http://[bad", "http://...", False),
    ],
)
def test_an_address_is_shown_without_what_could_be_a_secret(address: str, shown: str, secret: bool) -> None:
    """Its scheme, and of a web hook the host; and it is known which addresses hold one."""
    assert masked(address) == shown
    assert has_secret(address) is secret


def test_what_others_say_is_scrubbed_of_the_address() -> None:
    """Each of its parts, as it is and decoded; the host of a web hook or a mail server may stand."""
    address = "https://bob:p%40ssword@example.org/secretpath?key=secretkey"
    said = "example.org refused p@ssword, p%40ssword, secretpath and secretkey of https://bob:p%40ssword@example.org/"
    words = scrubbed(said, address)
    assert words.startswith("example.org refused ***, ***, *** and ***")
    assert not any(secret in words for secret in ("ssword", "secret"))
    assert scrubbed("bot-token in chat", "tgram://bot-token/chat") == "*** in ***"


def test_each_kind_of_address_has_its_way() -> None:
    """A web hook of a chat service is that service; any other is ours; what is no URL is the notifier's."""
    assert isinstance(transport_for(SLACK, None), AppriseService)
    assert isinstance(transport_for("https://example.org/lab", None), WebHook)
    assert isinstance(transport_for("json://example.org/lab", None), WebHook)
    assert isinstance(transport_for("mailto://example.org", None), AppriseService)
    assert isinstance(transport_for("bob@example.org", "mail $1"), NotifierCommand)


def test_the_end_of_a_log_is_plain_text(tmp_path: Path) -> None:
    """No escapes, no control characters, of a progress bar its last state, and no line without an end."""
    assert last_lines(str(tmp_path), 5) == ""
    (tmp_path / "log").write_bytes(b"a\nb\n\x1b]0;title\x07\x1b[1mbold\x1b[0m\x00\n10%\r99%\r\nx\xff" + b"y" * 1000)
    lines = last_lines(str(tmp_path), 3).split("\n")
    assert lines[:2] == ["bold", "99%"]
    assert lines[2].startswith("x\ufffdyyy")
    assert len(lines[2]) < 400
    assert last_lines(str(tmp_path), 0) == ""


def test_a_log_that_is_no_file_hangs_nobody(tmp_path: Path) -> None:
    """A job may put a pipe or a link in the place of its log."""
    os.mkfifo(tmp_path / "log")
    assert last_lines(str(tmp_path), 5) == ""
    (tmp_path / "log").unlink()
    (tmp_path / "log").symlink_to("/etc/passwd")
    assert last_lines(str(tmp_path), 5) == ""
