"""What is shown of an address."""

from __future__ import annotations

import pytest

from spool.listeners.message import has_secret, masked, scrubbed

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
