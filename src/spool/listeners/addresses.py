"""From what stands in `notify` to the way there: contacts, web hooks, services, the notifier."""

from __future__ import annotations

from collections.abc import Mapping

from spool.listeners.message import Transport, UndeliveredError
from spool.listeners.shelltext import ShellText
from spool.listeners.webhook import SCHEMES, WebHook

_MOST_STEPS = 8  # from a contact to its address


def expanded(named: str, contacts: Mapping[str, tuple[str, ...]], steps: int = _MOST_STEPS) -> list[str]:
    """Return what a name stands for: itself, or the addresses of a contact, which may name others.

    Raises UndeliveredError where contacts go round in a circle.
    """
    if named not in contacts:
        return [named.strip()]
    if not steps:
        raise UndeliveredError("contacts of the configuration go round in a circle", for_good=True)
    return [address for to in contacts[named] for address in expanded(to, contacts, steps - 1)]


def way_to(address: str, notifier: str | None) -> Transport:
    """Return the way to *address*. Raises UndeliveredError if there is none. Asks nobody yet."""
    scheme, is_url, _ = address.partition("://")
    if not is_url:
        if notifier is None:
            why = "it is no URL and none of `contacts`, and the configuration has no `notifier`"
            raise UndeliveredError(why, for_good=True)
        return ShellText(notifier, address)
    from spool.listeners.transports import Service, understands

    if scheme in SCHEMES and not (scheme == "https" and understands(address)):
        return WebHook(address)
    return Service(address)
