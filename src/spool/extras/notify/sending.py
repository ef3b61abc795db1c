"""How a message reaches an address, by Apprise if that is a URL, else by a shell command; and what is against it.

Each address has a queue with a thread of its own, so a dead receiver delays no other. A message that fails is retried
with growing delays, for a bounded time; a receiver that keeps failing loses its oldest messages. A receiver that
accepts messages gets all of them, however slowly: their number is bounded by the open events of the delivery. Many
messages to one person are sent as a single one.

Apprise is an extra of the package. Its import takes a third of a second, so it waits until an address needs it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, Protocol
from urllib.parse import unquote

from msgspec import Struct

from spool.core import layout
from spool.core.errors import InvalidValue
from spool.core.events import ENDS, JOB_WORDS, Event, EventName
from spool.core.layout import Layout
from spool.core.model import Spec
from spool.extras.notify.settings import NAME, Notifications, expanded, settings_of, wish_of
from spool.formats.config import Config
from spool.listeners import MESSAGES
from spool.store.glance import config_if
from spool.store.spool import Spool
from spool.version import __version__

log = logging.getLogger(__name__)

PREFIX = "spool: "
"""Prefix of every title, for sorting."""

NOT_INSTALLED = "Apprise is not installed; pip install 'spool-scheduler[notify]'"

_NO_SENDMAIL = "there is no `sendmail`; install one, such as msmtp-mta, or set `notifier` in config.toml"
_NO_WAY = "it is no URL, no mail address and no name in `contacts`, and the configuration has no `notifier`"
_SENDMAIL_PLACES = "/usr/sbin:/usr/lib"  # rarely in PATH
_SENDMAIL = rf"""PATH=$PATH:{_SENDMAIL_PLACES}
{{
    printf 'To: %s\nMIME-Version: 1.0\nContent-Type: text/plain; charset=utf-8\n' "$1"
    printf 'Content-Transfer-Encoding: 8bit\nSubject: '
    cat
}} | sendmail -i -- "$1"
"""

_COMMAND_LIMIT_S = 60.0
_MAIL = re.compile(r"\w[\w.+-]*@[\w.-]+")
_PLAIN = re.compile(r"[\w.+-]+(?:@[\w.-]+)?")
_HOOK = re.compile(r"((?:https?|jsons?)://)(?:[^/?#]*@)?([\w.-]+(?::\d+)?)(?=[/?#]|$)")
_NO_SECRET = 4  # a shorter secret protects nothing, and hiding it would black out half of a sentence
_MOST_WORDS = 300  # of what Apprise or a command says
_TALKATIVE = ("urllib3", "requests", "requests_oauthlib", "oauthlib", "charset_normalizer")

_MOST_IN_ORDER = 3  # after this number of tries a message lets the others go first
_AWAY = 3  # after this number of failures in a row the receiver is more than restarting
_TYPES: dict[str, str] = {
    **dict.fromkeys(ENDS, "failure"),
    EventName.FINISHED: "success",
    **dict.fromkeys((EventName.CANCELLED, EventName.RETRYING, EventName.HELD), "warning"),
}
"""Apprise's type of a message, by its event; "info" for the others."""


class UndeliveredError(Exception):
    """A message could not be delivered; the text says why, without secrets."""


class Message(Struct, frozen=True):
    """An event, worded for one address."""

    event: str
    title: str
    body: str
    document: dict[str, Any]  # the same as data for programs


class Transport(Protocol):
    """One way to one address."""

    for_programs: bool
    """Whether each message is sent separately, because a program reads it."""

    def send(self, message: Message) -> None:
        """Deliver the message, or raise UndeliveredError."""


def why_unreachable(address: str, notifier: str | None) -> str | None:
    """Return why nothing can be sent to *address*, None if nothing is known against it. Loads no Apprise."""
    if "://" in address:
        return NOT_INSTALLED if find_spec("apprise") is None else None
    if notifier is not None:
        return None
    if _MAIL.fullmatch(address) is None:
        return _NO_WAY
    path = f"{os.environ.get('PATH', os.defpath)}:{_SENDMAIL_PLACES}"
    return _NO_SENDMAIL if shutil.which("sendmail", path=path) is None else None


def transport_for(address: str, notifier: str | None) -> Transport:
    """Return the transport for *address*. Raises UndeliveredError if there is none. Contacts nothing yet."""
    if (why := why_unreachable(address, notifier)) is not None:
        raise UndeliveredError(why)
    return AppriseService(address) if "://" in address else ShellCommand(address, notifier or _SENDMAIL)


def why_undelivered(named: str, settings: Notifications, *, thoroughly: bool = False) -> str | None:
    """Return why messages to an address or contact cannot be sent, None if they can. Contacts nothing.

    *thoroughly*: ask Apprise whether it understands the address, which costs a third of a second.
    """
    try:
        for address in expanded(named, settings.contacts):
            if thoroughly:
                transport_for(address, settings.notifier)
            elif (why := why_unreachable(address, settings.notifier)) is not None:
                return why
    except (InvalidValue, UndeliveredError) as error:
        return str(error)
    return None


def doubts(spec: Spec, config: Config) -> Iterator[str]:
    """Yield why messages of a job cannot be delivered. Contacts nothing."""
    for named in spec.part(NAME).to:
        if (why := why_undelivered(named, settings_of(config))) is not None:
            yield f"cannot send anything to {masked(named)}: {why}"


def readable_by_others(root: str, settings: Notifications, event: Event | None = None) -> Iterator[str]:
    """Yield the files with addresses, of the configuration and of the job of *event*, that other users can read.

    A URL may hold a password or a token.
    """
    at = Layout(root)
    stated = [*settings.contacts.values(), *(rule.to for rule in settings.rules)]
    paths = [at.at(layout.CONFIG)] if any("://" in address for to in stated for address in to) else []
    wish = wish_of(event) if event is not None else None
    if event is not None and event.job is not None and wish is not None and "://" in "".join(wish.to):
        paths += [at.job_file(place, event.job) for place in layout.PLACES]
    for path in paths:
        try:
            file, way = os.stat(path).st_mode, os.stat(root).st_mode
        except OSError:
            continue
        if any(file & read and way & enter for read, enter in ((0o040, 0o010), (0o004, 0o001))):
            yield path


def contacts(spool: Spool) -> list[str]:
    """Return the contacts in the configuration, for completion."""
    config = config_if(spool.root, b"contacts")
    return sorted(settings_of(config).contacts) if config is not None else []


def events(spool: Spool) -> tuple[str, ...]:
    """Return the events that a job can name, for completion."""
    return JOB_WORDS


def masked(address: str) -> str:
    """Return an address in a form for the log: of a URL only its scheme and, for a web hook, its host."""
    scheme, is_url, _ = address.partition("://")
    if not is_url:
        return address if _PLAIN.fullmatch(address) else f"{address[:3]}..."
    hook = _HOOK.match(address)
    return f"{hook[1]}{hook[2]}/..." if hook is not None else f"{scheme}://..."


def scrubbed(text: str, address: str) -> str:
    """Return the words of a foreign program, in one line and without any part of *address* that could be secret."""
    rest = address.partition("://")[2] or address
    pieces = {piece for form in (rest, unquote(rest)) for piece in (form, *re.split(r"[/?&=:@,;#+]", form))}
    pieces |= {unquote(piece) for piece in pieces}
    for piece in sorted(pieces, key=len, reverse=True):
        if len(piece) >= _NO_SECRET:
            text = text.replace(piece, "***")
    return "".join(character if character.isprintable() else " " for character in text).strip()[-_MOST_WORDS:]


class ShellCommand:
    """Runs a shell text with the address as `$1` and the event as `$2`; the message comes on its standard input."""

    for_programs = False

    def __init__(self, address: str, text: str, *, limit_s: float = _COMMAND_LIMIT_S) -> None:
        self._address, self._text, self._limit_s = address, text, limit_s

    def send(self, message: Message) -> None:
        """Run it. A non-zero exit code or a timeout is a failure; on a timeout its whole group is killed."""
        arguments = ["/bin/sh", "-c", self._text, "notifier", self._address, message.event]
        text = f"{' '.join(message.title.split())}\n\n{message.body}".encode(errors="replace")
        with (
            tempfile.TemporaryFile() as said,
            subprocess.Popen(
                arguments, stdin=subprocess.PIPE, stdout=said, stderr=said, start_new_session=True
            ) as process,
        ):
            try:
                process.communicate(text, self._limit_s)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise UndeliveredError(f"the command that sends it did not end within {self._limit_s:g}s") from None
            if process.returncode:
                said.seek(max(0, said.tell() - _MOST_WORDS))
                words = said.read().decode(errors="replace").strip().rpartition("\n")[2]
                why = f"the exit code of the command that sends it is {process.returncode}"
                raise UndeliveredError(f"{why}: {scrubbed(words, '')}" if words else why)


class AppriseService:
    """One URL for Apprise. A web hook gets the facts of the event as JSON; everyone else gets plain text."""

    def __init__(self, address: str) -> None:
        """Raise UndeliveredError if Apprise does not understand the address."""
        self._address = address
        with _collected() as said:
            self._stated = _understood(address)
            self.for_programs = self._stated.get("schema") in ("json", "jsons")
            self._plugin: Any = self._open() if self._stated else None
        if self._plugin is None:
            words = f": {scrubbed('; '.join(said), address)}" if said else ""
            raise UndeliveredError(f"Apprise does not understand the address{words}")

    def send(self, message: Message) -> None:
        """Send the message. Every failure is retried, since Apprise does not classify them."""
        import apprise

        with _collected() as said:
            plugin = self._open(_payload(message)) if self.for_programs else self._plugin
            arrived = plugin.notify(
                title=message.title,
                body=message.body,
                notify_type=apprise.NotifyType(_TYPES.get(message.event, "info")),
                body_format=apprise.NotifyFormat.TEXT,
            )
        if not arrived:
            raise UndeliveredError(scrubbed("; ".join(said), self._address) or "Apprise could not deliver the message")

    def _open(self, payload: dict[str, Any] | None = None) -> Any:
        import apprise

        asset = apprise.AppriseAsset(
            app_id="spool",
            app_desc="spool",
            async_mode=False,
            secure_logging=True,
            storage_mode=apprise.PersistentStoreMode.MEMORY,
        )
        is_mail = self._stated["schema"] in ("mailto", "mailtos")
        ours: dict[str, Any] = {"redirect": "no"}  # it would carry the secrets elsewhere
        if not self.for_programs:
            ours["overflow"] = "split"  # a long text becomes several messages
        if is_mail:
            ours["format"] = "text"
        stated = ours | self._stated
        if payload is not None:
            stated["payload"] = payload | (stated.get("payload") or {})
        plugin = apprise.Apprise.instantiate(stated, asset=asset)
        if plugin is not None and is_mail:
            plugin.request_rate_per_sec = 0  # a mail server needs no five seconds between two mails
        return plugin


def _understood(address: str) -> dict[str, Any]:
    """Return Apprise's reading of an address, {} for none. `http://` is a web hook, unless it is one of a service.

    Apprise takes the parameters of a web hook's query for settings of its own unless they begin with a dash.
    """
    from apprise.plugins import url_to_dict

    scheme, _, rest = address.partition("://")
    try:
        stated = url_to_dict(address)
        if stated is None and scheme in ("http", "https"):
            place, mark, query = rest.rstrip("?").partition("?")
            pieces = (piece if piece.startswith("+") else f"-{piece}" for piece in query.split("&") if piece)
            stated = url_to_dict(f"{scheme.replace('http', 'json')}://{place}{mark}{'&'.join(pieces)}")
    except ValueError:  # of urllib, which earlier versions of Apprise let through
        return {}
    return stated or {}


def _payload(message: Message) -> dict[str, Any]:
    """Return the facts of an event for a web hook; empty values remove what Apprise adds by itself."""
    document = {key: value for key, value in message.document.items() if key != "version"}
    return {"version": "", "attachments": "", "type": "", "spool_version": __version__} | document


class _Complaints(threading.local):
    """Collects what Apprise logs in a thread. It goes to no log, since it may contain the address."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep a complaint for the sender, and let nothing through."""
        self.said.append(record.getMessage())
        return False


_collector = _Complaints()


@contextmanager
def _collected() -> Iterator[list[str]]:
    """Yield a list that collects Apprise's complaints in this thread."""
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logger = logging.getLogger("apprise")
    logger.setLevel(logging.WARNING)
    logger.addFilter(_collector)  # once: it is the same one
    _collector.said = []
    yield _collector.said


class Patience(Struct, frozen=True):
    """Delays and limits of retries."""

    first_s: float = 2.0  # until the first retry; each later delay is doubled
    longest_s: float = 300.0
    tries: int = 15
    for_s: float = 3600.0  # a receiver that has failed for longer loses the messages that have waited for longer
    most_waiting: int = 2_000  # for one receiver that is away; the oldest are given up
    gather_from: int = 20  # this many for one person are sent as a single message
    gather_most: int = 200

    def after(self, failures: int) -> float:
        """Return the delay after this number of failures in a row, at least one."""
        return float(min(self.first_s * 2 ** min(failures - 1, 30), self.longest_s))


class _Waiting(Struct, eq=False):
    message: Message
    done: Callable[[], None]
    since: float
    tries: int = 0


class SendQueue:
    """The messages for one address, which is *shown* in the log."""

    def __init__(self, shown: str, transport: Transport, patience: Patience | None = None) -> None:
        self._shown = shown
        self._transport = transport
        self._patience = patience or Patience()
        self._change = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._thread: threading.Thread | None = None
        self._failures = 0  # of the receiver, in a row
        self._failing_since = 0.0
        self._closing = False

    def put(self, message: Message, done: Callable[[], None]) -> None:
        """Send *message* in the background, and call *done* once it has arrived or is given up."""
        with self._change:
            # Messages to a receiver that is away must not take the room of others.
            most, count = self._patience.most_waiting, len(self._waiting)
            many = count - most * 9 // 10 if self._failures >= _AWAY and count >= most else 0
            surplus = [self._waiting.popleft() for _ in range(many)]
            self._waiting.append(_Waiting(message, done, time.monotonic()))
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name=f"to {self._shown}", daemon=True)
                self._thread.start()
            self._change.notify()
        self._give_up(surplus, "it keeps failing and too many messages are waiting")

    def close(self) -> None:
        """Send what waits unless the receiver is failing, and end. What is not delivered then is not done."""
        with self._change:
            self._closing = True
            self._change.notify()

    def join(self, deadline: float) -> None:
        """Wait until the thread has ended, at most until *deadline* (monotonic)."""
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while batch := self._next():
            self._deliver(batch)

    def _next(self) -> list[_Waiting]:
        """Wait for messages, and after a failure for the retry; return those to send together, [] to end."""
        with self._change:
            if self._failures:
                self._change.wait_for(lambda: self._closing, self._patience.after(self._failures))
            else:
                self._change.wait_for(lambda: self._closing or self._waiting)
            if not self._waiting or (self._closing and self._failures):
                return []
            count = len(self._waiting)
            gathers = not self._transport.for_programs and count >= self._patience.gather_from
            return [self._waiting.popleft() for _ in range(min(count, self._patience.gather_most) if gathers else 1)]

    def _deliver(self, batch: list[_Waiting]) -> None:
        messages = [waiting.message for waiting in batch]
        try:
            self._transport.send(messages[0] if len(messages) == 1 else _digest(messages))
        except UndeliveredError as error:
            self._failed(batch, str(error))
        except Exception as error:
            # A foreign exception may contain anything, even the address.
            self._failed(batch, f"{type(error).__name__} in what sends it")
        else:
            self._failures = 0
            MESSAGES.add("delivered", len(batch))
            for waiting in batch:
                waiting.done()

    def _failed(self, batch: list[_Waiting], why: str) -> None:
        MESSAGES.add("failed", len(batch))
        now = time.monotonic()
        if not self._failures:
            self._failing_since = now
            log.warning("cannot notify %s of %s: %s; trying again", self._shown, batch[0].message.title, why)
        self._failures += 1
        too_old = now - self._patience.for_s
        with self._change:
            for waiting in batch:
                waiting.tries += 1
            # In order; but a message that the receiver chokes on must not block the others.
            self._waiting.extendleft(waiting for waiting in reversed(batch) if waiting.tries < _MOST_IN_ORDER)
            self._waiting.extend(waiting for waiting in batch if waiting.tries >= _MOST_IN_ORDER)
            given_up = [
                waiting
                for waiting in self._waiting
                if waiting.tries >= self._patience.tries or max(waiting.since, self._failing_since) < too_old
            ]
            self._waiting = deque(waiting for waiting in self._waiting if waiting not in given_up)
        self._give_up(given_up, why)

    def _give_up(self, given_up: Sequence[_Waiting], why: str) -> None:
        if not given_up:
            return
        more = f" and {len(given_up) - 1} more" if len(given_up) > 1 else ""
        log.error("gave up notifying %s of %s%s: %s", self._shown, given_up[0].message.title, more, why)
        MESSAGES.add("given_up", len(given_up))
        for waiting in given_up:
            waiting.done()


def _digest(messages: Sequence[Message]) -> Message:
    """Return many messages to one person as a single one."""
    told = ", ".join(f"{count} {event}" for event, count in Counter(message.event for message in messages).items())
    lines = (f"{message.document.get('time', '')[:19]} {message.title.removeprefix(PREFIX)}\n" for message in messages)
    return Message(messages[0].event, f"{PREFIX}{len(messages)} events: {told}", "".join(lines), {})
