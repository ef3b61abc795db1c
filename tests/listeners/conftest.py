"""Receivers, and events to tell them of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from receivers import MailServer, WebServer, serving


@pytest.fixture(scope="session", autouse=True)
def apprise_is_loaded() -> None:
    """Load Apprise's plugins once, and let what others deprecate in them be their own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import apprise

        apprise.Apprise.instantiate("json://localhost")


@pytest.fixture
def web() -> Iterator[WebServer]:
    """Serve HTTP."""
    with serving(WebServer()) as server:
        yield server


@pytest.fixture
def mail() -> Iterator[MailServer]:
    """Serve SMTP."""
    with serving(MailServer()) as server:
        yield server


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speak to the loopback itself, whatever proxy this machine has."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
