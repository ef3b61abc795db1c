"""A message to one address, its errors, and the display of addresses without their secrets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from threading import Lock
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from msgspec import Struct

PREFIX = "spool: "
"""Prefix of every title, for sorting."""

_PLAIN = re.compile(r"[\w.+-]+(?:@[\w.-]+)?")
_NO_SECRET = 4  # a shorter secret protects nothing, and hiding it would black out half of a sentence
_LONG = 16  # a part of a path of this length is probably a secret
_WITH_TOKEN_IN_PATH = ("http", "https", "json", "jsons")


class UndeliveredError(Exception):
    """A message could not be delivered; the text says why, without secrets. *for_good*: a retry would fail as well."""

    def __init__(self, why: str, *, for_good: bool = False, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.for_good = for_good
        self.after_s = after_s  # the receiver's least delay before a retry


class Message(Struct, frozen=True):
    """An event, worded for one address."""

    event: str
    title: str
    body: str
    document: dict[str, Any]  # the same as data for programs


class Transport(Protocol):
    """One way to one address."""

    @property
    def shown(self) -> str:
        """The address for the log: without secrets."""

    @property
    def for_programs(self) -> bool:
        """Whether each message is sent separately, because a program reads it."""

    def send(self, message: Message) -> None:
        """Deliver, within a bounded time, or raise UndeliveredError."""


def digest(messages: Sequence[Message]) -> Message:
    """Return many messages to one person as a single one."""
    counts: dict[str, int] = {}
    for message in messages:
        counts[message.event] = counts.get(message.event, 0) + 1
    told = ", ".join(f"{count} {event}" for event, count in counts.items())
    lines = "".join(
        f"{message.document.get('time', '')[:19]} {message.title.removeprefix(PREFIX)}\n" for message in messages
    )
    first = messages[0]
    return Message(first.event, f"{PREFIX}{len(messages)} events: {told}", lines, first.document)


def masked(address: str) -> str:
    """Return an address in a form for the log: of a URL only its scheme and, for a web hook, its host."""
    scheme, is_url, _ = address.partition("://")
    if not is_url:
        return address if _PLAIN.fullmatch(address) else f"{address[:3]}..."
    if scheme in _WITH_TOKEN_IN_PATH:
        try:
            parts = urlsplit(address)
            port = f":{parts.port}" if parts.port else ""
            return f"{scheme}://{parts.hostname}{port}/..."
        except ValueError:
            pass
    return f"{scheme}://..."


def scrubbed(text: str, address: str) -> str:
    """Return *text* without any part of *address* that could be secret, for the output of foreign programs.

    For a URL that is every part except the scheme; the host of a mail server or a web hook is kept.
    """
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
    except ValueError:
        return "it is not a valid URL"
    rest = address.partition("://")[2] or address
    pieces = {rest, *re.split(r"[/?&=:@,;#]", rest), *re.split(r"[/?&=:@,;#]", unquote(rest))}
    pieces |= {unquote(piece) for piece in pieces}
    if parts.scheme in (*_WITH_TOKEN_IN_PATH, "mailto", "mailtos"):
        pieces.discard(host)
    for piece in sorted(pieces, key=len, reverse=True):
        if len(piece) >= _NO_SECRET:
            text = text.replace(piece, "***")
    return text


def has_secret(address: str) -> bool:
    """Whether an address may contain a secret: a password, or the token of a service."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return False
    if "://" not in address:
        return False
    if parts.scheme not in (*_WITH_TOKEN_IN_PATH, "mailto", "mailtos"):
        return True
    long = any(len(piece) >= _LONG for piece in parts.path.split("/"))
    return (
        parts.password is not None
        or parts.query.startswith("+")
        or "&+" in parts.query
        or "pass=" in parts.query
        or long
    )


class Counters:
    """Counts by word, starting at zero in each process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[str] = Counter()

    def add(self, word: str, count: int = 1) -> None:
        """Count *word*."""
        with self._lock:
            self._counts[word] += count

    def read(self) -> dict[str, int]:
        """Return all counts."""
        with self._lock:
            return dict(self._counts)


MESSAGES = Counters()
"""Messages by outcome: "delivered", "failed" (and may be tried again), "given_up"."""
