"""The transports of messages: web hook, notifier, Apprise (docs/NOTIFICATIONS.md).

A web hook posts the event as JSON. The notifier, shell text in the configuration, handles every address that is not a
URL. Mail, chat and telephones go through Apprise, an extra of the package; its import takes a third of a second, so it
waits until an address needs it.
"""

from __future__ import annotations

import base64
import http.client
import logging
import os
import select
import signal
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Timer
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit, urlunsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, OpenerDirector, Request, build_opener

from spool.core.eventnames import ENDS, EventName
from spool.formats.events import render_facts
from spool.listeners.message import Message, Transport, UndeliveredError, masked, scrubbed
from spool.version import __version__

_SCHEMES = {"http": "http", "https": "https", "json": "http", "jsons": "https"}

WEB_HOOK_TIMEOUT_S = 10.0
"""Time limit for the answer of a web hook, and between any two bytes."""

WEB_HOOK_LIMIT_S = 30.0
"""Time limit for the whole exchange."""

NOTIFIER_LIMIT_S = 60.0
"""Time limit of the notifier."""

NOT_INSTALLED = "Apprise is not installed; pip install 'spool-scheduler[notify]'"

_MOST_WORDS = 300  # of the output of a notifier or Apprise
_MOST_OF_ERROR = 200
_TRANSIENT = {408, 409, 423, 425, 429}  # of the 4xx
_SOCKET_ERROR = "Socket Exception: "  # logged about a mail server, at debug level only
_TALKATIVE = ("urllib3", "requests", "requests_oauthlib", "oauthlib", "charset_normalizer")
_loading = threading.Lock()  # plugins are loaded once, by the first thread that needs them


def transport_for(address: str, notifier: str | None) -> Transport:
    """Return the transport for *address*. Raises UndeliveredError if there is none. Contacts nothing yet."""
    scheme, is_url, _ = address.partition("://")
    if not is_url:
        if notifier is None:
            why = "it is neither a URL nor a name in `contacts`, and the configuration has no `notifier`"
            raise UndeliveredError(why, for_good=True)
        return NotifierCommand(notifier, address)
    if scheme in _SCHEMES and not (scheme == "https" and understands(address)):
        return WebHook(address)
    return AppriseService(address)


class _NoRedirect(HTTPRedirectHandler):
    """Refuses redirects, which would turn the POST into a GET, and carry the secrets elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        """Return None: follow no redirect."""


class WebHook:
    """Posts to one address. `?+NAME=VALUE` in it is a header of the request, such as a token."""

    for_programs = True

    def __init__(self, address: str, *, limit_s: float | None = None) -> None:
        """Raise UndeliveredError if *address* cannot be understood."""
        self._address = address
        self.shown = masked(address)
        self._limit_s = limit_s or WEB_HOOK_LIMIT_S
        self._headers = {"Content-Type": "application/json", "User-Agent": f"spool/{__version__}"}
        try:
            self._url = self._understand(address)
        except ValueError:
            raise UndeliveredError("the address is not a URL", for_good=True) from None

    def _understand(self, address: str) -> str:
        parts = urlsplit(address)
        if not parts.hostname:
            raise ValueError(address)
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        plain = []
        for piece in filter(None, parts.query.split("&")):
            if piece.startswith("+"):
                name, _, value = unquote(piece[1:]).partition("=")
                if not name or not (name + value).isprintable():
                    raise ValueError(address)
                self._headers[name] = value
            else:
                plain.append(piece)
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname.encode("idna").decode()
        place = f"{host}:{parts.port}" if parts.port is not None else host
        path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
        return urlunsplit((_SCHEMES[parts.scheme], place, path, "&".join(plain), ""))

    def send(self, message: Message) -> None:
        """Post the message's document. Any answer but 2xx is a failure; most of 4xx are final."""
        document = message.document | {"title": message.title, "message": message.body}
        headers = self._headers | {"X-Spool-Event": message.event, "Idempotency-Key": _header(document.get("id", ""))}
        request = Request(self._url, render_facts(document), headers, method="POST")  # noqa: S310 (_SCHEMES)
        connections: list[http.client.HTTPConnection] = []
        cut = Timer(self._limit_s, partial(_cut_off, connections))
        cut.daemon = True
        cut.start()
        try:
            with _opener(connections.append).open(request, timeout=WEB_HOOK_TIMEOUT_S):
                return
        except HTTPError as error:
            with error:
                raise self._refused(error) from None
        except (URLError, OSError, http.client.HTTPException) as error:
            why = error.reason if isinstance(error, URLError) else error
            words = scrubbed(str(why)[:_MOST_OF_ERROR], self._address) or type(why).__name__
            raise UndeliveredError(words) from None
        except ValueError:
            raise UndeliveredError("the address is not a URL", for_good=True) from None
        finally:
            cut.cancel()

    def _refused(self, error: HTTPError) -> UndeliveredError:
        code = error.code
        if 300 <= code < 400:
            return UndeliveredError(f"it redirects elsewhere (HTTP {code}); use the new address", for_good=True)
        after = error.headers.get("Retry-After", "") if error.headers is not None else ""
        after_s = float(after) if after.isascii() and after.isdigit() else 0.0
        return UndeliveredError(f"HTTP {code}", for_good=400 <= code < 500 and code not in _TRANSIENT, after_s=after_s)


def _header(text: str) -> str:
    return quote(text, safe="/:@+,;=~. ")


def _opener(opened: Callable[[http.client.HTTPConnection], None]) -> OpenerDirector:
    """Return a URL opener, with the proxy of the environment, that reports its connections."""

    def telling(kind: type[http.client.HTTPConnection], *arguments: Any, **settings: Any) -> http.client.HTTPConnection:
        connection = kind(*arguments, **settings)
        opened(connection)
        return connection

    class Plain(HTTPHandler):
        def http_open(self, request: Request) -> http.client.HTTPResponse:
            return self.do_open(partial(telling, http.client.HTTPConnection), request)

    class Secured(HTTPSHandler):
        def https_open(self, request: Request) -> http.client.HTTPResponse:
            connect = partial(telling, http.client.HTTPSConnection)
            return self.do_open(connect, request, context=ssl.create_default_context())

    return build_opener(_NoRedirect, Plain, Secured)


def _cut_off(connections: list[http.client.HTTPConnection]) -> None:
    """Cut off connections that take too long, whatever they wait for."""
    for connection in connections:
        if connection.sock is not None:
            try:
                connection.sock.shutdown(2)
            except OSError:
                continue


class NotifierCommand:
    """Runs the text with the address as `$1` and the event as `$2`; the message comes on its standard input."""

    for_programs = False

    def __init__(self, text: str, address: str, *, limit_s: float = NOTIFIER_LIMIT_S) -> None:
        self._text, self._address, self._limit_s = text, address, limit_s
        self.shown = masked(address)

    def send(self, message: Message) -> None:
        """Run it. A non-zero exit code or a timeout is a failure; on a timeout its whole group is killed."""
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as stdin:
            stdin.write(f"{message.title}\n\n{message.body}".encode(errors="replace"))
            stdin.seek(0)
            try:
                process = subprocess.Popen(
                    ["/bin/sh", "-c", self._text, "notifier", self._address, message.event],
                    stdin=stdin,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                raise UndeliveredError(f"the notifier cannot be run: {type(error).__name__}") from None
            in_time = _ends_within(process.pid, self._limit_s)
            # Before it is reaped, its pid cannot be reused.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            if not in_time:
                raise UndeliveredError(f"the notifier did not end within {self._limit_s:g}s")
            if code != 0:
                words = _last_words(said.fileno())
                raise UndeliveredError(f"the notifier's exit code is {code}{f': {words}' if words else ''}")


def _ends_within(pid: int, limit_s: float) -> bool:
    fd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(limit_s * 1000))
    finally:
        os.close(fd)


def _last_words(fd: int) -> str:
    size = os.fstat(fd).st_size
    said = os.pread(fd, _MOST_WORDS, max(0, size - _MOST_WORDS)).decode(errors="replace")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return "".join(character if character.isprintable() else "?" for character in lines[-1]) if lines else ""


class AppriseService:
    """One address for Apprise."""

    for_programs = False

    def __init__(self, address: str) -> None:
        """Do not use Apprise yet: its import takes a third of a second."""
        self._address = address
        self.shown = masked(address)
        self._plugin: Any = None

    def check(self) -> None:
        """Raise UndeliveredError if Apprise is missing or does not understand the address. Contacts nothing."""
        with _complaints() as reasons, _loading:
            try:
                self._plugin = self._open()
            except UndeliveredError as error:
                raise UndeliveredError(
                    "; ".join(filter(None, [str(error), self._words(reasons)])), for_good=True
                ) from None

    def send(self, message: Message) -> None:
        """Send the message as plain text. Every failure is retried, since Apprise does not classify them."""
        with _complaints() as reasons:
            if self._plugin is None:
                with _loading:
                    self._plugin = self._open()
            import apprise

            kind = apprise.NotifyType(_type_of(message.event))
            text = apprise.NotifyFormat.TEXT
            arrived = self._plugin.notify(title=message.title, body=message.body, notify_type=kind, body_format=text)
        if not arrived:
            raise UndeliveredError(self._words(reasons) or "Apprise could not deliver the message")

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
    """Whether an `https://` address is a chat service's web hook that Apprise knows, such as Slack's."""
    try:
        import apprise
    except ImportError:
        return False
    with _complaints(), _loading:
        return apprise.Apprise.instantiate(address) is not None


def _is_mail(address: str) -> bool:
    return address.startswith(("mailto://", "mailtos://"))


def _as_wanted(address: str) -> str:
    """Return the address with options for plain messages: no HTML, and split if too long."""
    wanted = {"overflow": "split"}
    if _is_mail(address):
        wanted["format"] = "text"
    query = address.partition("?")[2]
    stated = {piece.partition("=")[0] for piece in query.split("&")}
    more = "&".join(f"{key}={value}" for key, value in wanted.items() if key not in stated)
    if not more:
        return address
    return f"{address}{'&' if query else '' if address.endswith('?') else '?'}{more}"


def _type_of(event: str) -> str:
    if event == EventName.FINISHED:
        return "success"
    if event == EventName.CANCELLED or event not in ENDS:
        return "warning" if event in (EventName.CANCELLED, EventName.RETRYING, EventName.HELD) else "info"
    return "failure"


class _Confided(threading.local):
    """Collects Apprise's log messages in a thread. They go to no log, since they may contain the address."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep an error message for the sender, and let nothing through."""
        words = record.getMessage()
        if record.levelno >= logging.WARNING or words.startswith(_SOCKET_ERROR):
            self.said.append(words.removeprefix(_SOCKET_ERROR))
        return False


_confided = _Confided()


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """Yield a list that collects Apprise's error messages in this thread."""
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
