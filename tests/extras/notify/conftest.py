"""Apprise, loaded once."""

from __future__ import annotations

import warnings

import pytest


@pytest.fixture(scope="session", autouse=True)
def apprise_is_loaded() -> None:
    """Load Apprise's plugins once, and let what others deprecate in them be their own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import apprise

        apprise.Apprise.instantiate("json://localhost")
