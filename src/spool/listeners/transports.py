"""Mail, chat and telephones through Apprise, the one place that imports it: an extra of the package."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spool.core.events import EventName
from spool.core.notices import ENDS
from spool.listeners.message import Letter, UndeliveredError, masked, scrubbed

NOT_INSTALLED = "Apprise is not installed; pip install 'spool-scheduler[notify]'"

_MOST_WORDS = 300
_REASON = "Socket Exception: "  # what it says of a mail server, but only to who debugs it
_TALKATIVE = ("urllib3", "requests", "requests_oauthlib", "oauthlib", "charset_normalizer")
_lock = threading.Lock()  # its plugins are loaded once, by whoever comes first


class Service:
    """One address that Apprise understands."""

    for_programs = False

    def __init__(self, address: str) -> None:
        """Ask nothing of Apprise yet: to import it takes a third of a second."""
        self._address = address
        self.shown = masked(address)
        self._plugin: Any = None

    def check(self) -> None:
        """Raise UndeliveredError if Apprise is not there or does not understand the address. Asks nobody."""
        with _reasons() as reasons, _lock:
            try:
                self._plugin = self._open()
            except UndeliveredError as error:
                raise UndeliveredError(
                    "; ".join(filter(None, [str(error), self._words(reasons)])), for_good=True
                ) from None

    def send(self, letter: Letter) -> None:
        """Send the letter as plain text. Apprise does not tell whether another try may help, so it is tried."""
        with _reasons() as reasons:
            if self._plugin is None:
                with _lock:
                    self._plugin = self._open()
            import apprise

            kind = apprise.NotifyType(_kind(letter.event))
            text = apprise.NotifyFormat.TEXT
            arrived = self._plugin.notify(title=letter.title, body=letter.body, notify_type=kind, body_format=text)
        if not arrived:
            raise UndeliveredError(self._words(reasons) or "it was not taken")

    def _open(self) -> Any:
        try:
            import apprise
        except ImportError:
            raise UndeliveredError(NOT_INSTALLED, for_good=True) from None
        asset = apprise.AppriseAsset(
            app_id="spool",
            app_desc="spool",
            async_mode=False,
            secure_logging=True,
            storage_mode=apprise.PersistentStoreMode.MEMORY,
        )
        plugin = apprise.Apprise.instantiate(_as_wanted(self._address), asset=asset)
        if plugin is None:
            raise UndeliveredError("Apprise does not understand the address", for_good=True)
        if _is_mail(self._address):
            plugin.request_rate_per_sec = 0  # a mail server needs no five seconds between two mails
        return plugin

    def _words(self, reasons: list[str]) -> str:
        return scrubbed("; ".join(reasons).replace("\n", " ")[:_MOST_WORDS], self._address)


def understands(address: str) -> bool:
    """Whether an `https://` address is a web hook of a chat service whose form Apprise knows, as Slack's."""
    try:
        import apprise
    except ImportError:
        return False
    with _reasons(), _lock:
        return apprise.Apprise.instantiate(address) is not None


def _is_mail(address: str) -> bool:
    return address.startswith(("mailto://", "mailtos://"))


def _as_wanted(address: str) -> str:
    """Return the address with what a plain message wants: no HTML, and in parts where it is too long."""
    wanted = {"overflow": "split"}
    if _is_mail(address):
        wanted["format"] = "text"
    query = address.partition("?")[2]
    stated = {piece.partition("=")[0] for piece in query.split("&")}
    more = "&".join(f"{key}={value}" for key, value in wanted.items() if key not in stated)
    if not more:
        return address
    return f"{address}{'&' if query else '' if address.endswith('?') else '?'}{more}"


def _kind(event: str) -> str:
    if event == EventName.FINISHED:
        return "success"
    if event == EventName.CANCELLED or event not in ENDS:
        return "warning" if event in (EventName.CANCELLED, EventName.RETRYING, EventName.HELD) else "info"
    return "failure"


class _Confided(threading.local):
    """What Apprise says in a thread. It goes to no log, for it may name the address."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep a complaint for whoever sends, and let nothing through."""
        words = record.getMessage()
        if record.levelno >= logging.WARNING or words.startswith(_REASON):
            self.said.append(words.removeprefix(_REASON))
        return False


_confided = _Confided()


@contextmanager
def _reasons() -> Iterator[list[str]]:
    """Yield a list that is filled with what Apprise complains of in this thread."""
    for name in _TALKATIVE:
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.setLevel(logging.WARNING)
    logger = logging.getLogger("apprise")
    logger.setLevel(logging.DEBUG)
    if _confided not in logger.filters:
        logger.addFilter(_confided)
    _confided.said = []
    yield _confided.said
