"""Fixtures: a real web server and a real mail server, which can refuse, stall and recover."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from receivers import MailServer, WebServer, serving


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speak to the loopback itself, whatever proxy this machine has."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def web(no_proxy: None) -> Iterator[WebServer]:
    """Serve HTTP."""
    with serving(WebServer()) as server:
        yield server


@pytest.fixture
def mail(no_proxy: None) -> Iterator[MailServer]:
    """Serve SMTP."""
    with serving(MailServer()) as server:
        yield server
