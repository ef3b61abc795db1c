"""Web hooks: an event as JSON, posted to an address (docs/NOTIFICATIONS.md, "Web hooks")."""

from __future__ import annotations

import base64
import http.client
import ssl
from collections.abc import Callable
from functools import partial
from threading import Timer
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit, urlunsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, OpenerDirector, Request, build_opener

from spool import __version__
from spool.formats.facts import render_facts
from spool.listeners.message import Letter, UndeliveredError, masked, scrubbed

SCHEMES = {"http": "http", "https": "https", "json": "http", "jsons": "https"}

TIMEOUT_S = 10.0
"""How long a receiver may take to answer, and between any two bytes."""
LIMIT_S = 30.0
"""How long all of it may take."""

_AGAIN = {408, 409, 423, 425, 429}
_MOST_WORDS = 200


class _NoRedirect(HTTPRedirectHandler):
    """A redirect would turn the POST into a GET, and carry the secrets elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        """Follow none."""


class WebHook:
    """Posts to one address. `?+NAME=VALUE` in it is a header of the request, as a token."""

    for_programs = True

    def __init__(self, address: str, *, limit_s: float | None = None) -> None:
        """Raise UndeliveredError if *address* cannot be understood."""
        self._address = address
        self.shown = masked(address)
        self._limit_s = limit_s or LIMIT_S
        self._headers = {"Content-Type": "application/json", "User-Agent": f"spool/{__version__}"}
        try:
            self._url = self._understand(address)
        except ValueError:
            raise UndeliveredError("the address is no URL", for_good=True) from None

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
        return urlunsplit((SCHEMES[parts.scheme], place, path, "&".join(plain), ""))

    def send(self, letter: Letter) -> None:
        """Post the letter's document. What the receiver says but 2xx is a failure; most of 4xx are for good."""
        document = letter.document | {"title": letter.title, "message": letter.body}
        headers = self._headers | {"X-Spool-Event": letter.event, "Idempotency-Key": _header(document.get("id", ""))}
        request = Request(self._url, render_facts(document), headers, method="POST")  # noqa: S310 (SCHEMES)
        connections: list[http.client.HTTPConnection] = []
        cut = Timer(self._limit_s, partial(_cut, connections))
        cut.daemon = True
        cut.start()
        try:
            with _opener(connections.append).open(request, timeout=TIMEOUT_S):
                return
        except HTTPError as error:
            with error:
                raise self._refused(error) from None
        except (URLError, OSError, http.client.HTTPException) as error:
            why = error.reason if isinstance(error, URLError) else error
            words = scrubbed(str(why)[:_MOST_WORDS], self._address) or type(why).__name__
            raise UndeliveredError(words) from None
        except ValueError:
            raise UndeliveredError("the address is no URL", for_good=True) from None
        finally:
            cut.cancel()

    def _refused(self, error: HTTPError) -> UndeliveredError:
        code = error.code
        if 300 <= code < 400:
            return UndeliveredError(f"it redirects elsewhere (HTTP {code}); name that address", for_good=True)
        after = error.headers.get("Retry-After", "") if error.headers is not None else ""
        after_s = float(after) if after.isascii() and after.isdigit() else 0.0
        return UndeliveredError(f"HTTP {code}", for_good=400 <= code < 500 and code not in _AGAIN, after_s=after_s)


def _header(text: str) -> str:
    return quote(text, safe="/:@+,;=~. ")


def _opener(opened: Callable[[http.client.HTTPConnection], None]) -> OpenerDirector:
    """Return what opens an address, by a proxy where the environment names one, and tells of its connections."""

    def plain(*arguments: Any, **settings: Any) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(*arguments, **settings)
        opened(connection)
        return connection

    def secured(*arguments: Any, **settings: Any) -> http.client.HTTPSConnection:
        connection = http.client.HTTPSConnection(*arguments, **settings)
        opened(connection)
        return connection

    class Plain(HTTPHandler):
        def http_open(self, request: Request) -> http.client.HTTPResponse:
            return self.do_open(plain, request)

    class Secured(HTTPSHandler):
        def https_open(self, request: Request) -> http.client.HTTPResponse:
            return self.do_open(secured, request, context=ssl.create_default_context())

    return build_opener(_NoRedirect, Plain, Secured)


def _cut(connections: list[http.client.HTTPConnection]) -> None:
    """End what takes too long, whatever it waits for."""
    for connection in connections:
        if connection.sock is not None:
            try:
                connection.sock.shutdown(2)
            except OSError:
                continue
