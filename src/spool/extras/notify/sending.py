"""Messages to the recipients that a job or the configuration names (docs/EVENTS.md): their words, and their way.

The listener looks up the addresses for an event and puts the message into the queue of each: by Apprise if the address
is a URL, else by a shell command. Each queue has a thread of its own, so a dead receiver delays no other. A message
that fails is retried with growing delays, for a bounded time. A receiver that accepts messages gets all of them,
however slowly: their number is bounded by the open events of the delivery.

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
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from typing import Any
from urllib.parse import unquote

from msgspec import Struct

from spool import __version__
from spool.core import layout
from spool.core.errors import InvalidValue
from spool.core.gpuuse import mean_part
from spool.core.layout import Layout, engine_of
from spool.core.model import ENDS, OUTCOMES, SECOND_NS, Event, EventName, Grant, Result, Spec
from spool.core.reasons import count_of, pools_in_words
from spool.core.units import show_duration, show_percent, show_size
from spool.extras.notify.settings import NAME, Notifications, addressees, expanded, settings_of
from spool.formats.capabilities import engine_title
from spool.formats.config import Config
from spool.formats.events import facts
from spool.listeners import Listener
from spool.store.reading import end_of_file

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

_REMEMBERED = 20_000  # ids of events
_CLOSE_S = 3.0
_MOST_LOG_BYTES = 64 << 10
_MOST_COLUMNS = 300
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_COMMAND_LIMIT_S = 60.0
_MAIL = re.compile(r"\w[\w.+-]*@[\w.-]+")
_PLAIN = re.compile(r"[\w.+-]+(?:@[\w.-]+)?")
_HOOK = re.compile(r"((?:https?|jsons?)://)(?:[^/?#]*@)?([\w.-]+(?::\d+)?)(?=[/?#]|$)")
_NO_SECRET = 4  # a shorter secret protects nothing, and hiding it would black out half of a sentence
_MOST_WORDS = 300  # of what Apprise or a command says
_TALKATIVE = ("urllib3", "requests", "requests_oauthlib", "oauthlib", "charset_normalizer")

_MOST_IN_ORDER = 3  # after this number of tries a message lets the others go first
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


Send = Callable[[Message], None]
"""Delivers a message to one address, or raises UndeliveredError."""


def check_way(address: str, notifier: str | None) -> None:
    """Raise UndeliveredError if something is known by which nothing can be sent to *address*. Loads no Apprise."""
    if "://" in address:
        if find_spec("apprise") is None:
            raise UndeliveredError(NOT_INSTALLED)
    elif notifier is None:
        if _MAIL.fullmatch(address) is None:
            raise UndeliveredError(_NO_WAY)
        if shutil.which("sendmail", path=f"{os.environ.get('PATH', os.defpath)}:{_SENDMAIL_PLACES}") is None:
            raise UndeliveredError(_NO_SENDMAIL)


def transport_for(address: str, notifier: str | None) -> Send:
    """Return what delivers messages to *address*. Raises UndeliveredError if there is none. Contacts nothing yet."""
    check_way(address, notifier)
    return AppriseService(address).send if "://" in address else partial(by_command, address, notifier or _SENDMAIL)


def why_undelivered(named: str, settings: Notifications, *, thoroughly: bool = False) -> str | None:
    """Return why messages to an address or contact cannot be sent, None if they can. Contacts nothing.

    *thoroughly*: ask Apprise whether it understands the address, which costs a third of a second.
    """
    try:
        for address in expanded(named, settings.contacts):
            (transport_for if thoroughly else check_way)(address, settings.notifier)
    except (InvalidValue, UndeliveredError) as error:
        return str(error)
    return None


def doubts(spec: Spec, config: Config) -> Iterator[str]:
    """Yield why messages of a job cannot be delivered. Contacts nothing."""
    for named in spec.part(NAME).to:
        if (why := why_undelivered(named, settings_of(config))) is not None:
            yield f"cannot send anything to {masked(named)}: {why}"


def readable_by_others(root: str, settings: Notifications) -> str | None:
    """Return the path of the configuration if it has URLs, which may hold passwords, and other users can read it."""
    stated = [*settings.contacts.values(), *(rule.to for rule in settings.rules)]
    path = Layout(root).at(layout.CONFIG)
    if not any("://" in address for to in stated for address in to):
        return None
    try:
        file, way = os.stat(path).st_mode, os.stat(root).st_mode
    except OSError:
        return None
    return path if any(file & read and way & enter for read, enter in ((0o040, 0o010), (0o004, 0o001))) else None


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


def by_command(address: str, command: str, message: Message, limit_s: float = _COMMAND_LIMIT_S) -> None:
    """Run a shell text with the address as `$1` and the event as `$2`; the message comes on its standard input.

    A non-zero exit code or a timeout is a failure; on a timeout its whole group is killed. Raises UndeliveredError.
    """
    arguments = ["/bin/sh", "-c", command, "notifier", address, message.event]
    text = f"{' '.join(message.title.split())}\n\n{message.body}".encode(errors="replace")
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=said, stderr=said, start_new_session=True) as process,
    ):
        try:
            process.communicate(text, limit_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            raise UndeliveredError(f"the command that sends it did not end within {limit_s:g}s") from None
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
            self._is_hook = self._stated.get("schema") in ("json", "jsons")
            self._plugin: Any = self._open() if self._stated else None
        if self._plugin is None:
            words = f": {scrubbed('; '.join(said), address)}" if said else ""
            raise UndeliveredError(f"Apprise does not understand the address{words}")

    def send(self, message: Message) -> None:
        """Send the message. Every failure is retried, since Apprise does not classify them."""
        import apprise

        with _collected() as said:
            plugin = self._open(_payload(message)) if self._is_hook else self._plugin
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
        if not self._is_hook:
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


_said: ContextVar[list[str]] = ContextVar("said")


def _collect(record: logging.LogRecord) -> bool:
    """Keep a complaint of Apprise for the sender, and let nothing through to the log: it may contain the address."""
    _said.get([]).append(record.getMessage())
    return False


@contextmanager
def _collected() -> Iterator[list[str]]:
    """Yield a list that collects Apprise's complaints in this thread."""
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logger = logging.getLogger("apprise")
    logger.setLevel(logging.WARNING)
    logger.addFilter(_collect)  # once: it is the same one
    _said.set(said := list[str]())
    yield said


class Patience(Struct, frozen=True):
    """Delays and limits of retries."""

    first_s: float = 2.0  # until the first retry; each later delay is doubled
    longest_s: float = 300.0
    tries: int = 15
    for_s: float = 3600.0  # a receiver that has failed for longer loses the messages that have waited for longer


class _Waiting(Struct, eq=False):
    message: Message
    done: Callable[[], None]
    since: float
    tries: int = 0


class SendQueue:
    """The messages for one address, which is *shown* in the log."""

    def __init__(self, shown: str, send: Send, patience: Patience) -> None:
        self._shown = shown
        self._send = send
        self._patience = patience
        self._change = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._thread: threading.Thread | None = None
        self._failures = 0  # of the receiver, in a row
        self._failing_since = 0.0
        self._closing = False

    def put(self, message: Message, done: Callable[[], None]) -> None:
        """Send *message* in the background, and call *done* once it has arrived or is given up."""
        with self._change:
            self._waiting.append(_Waiting(message, done, time.monotonic()))
            if self._thread is None and not self._closing:
                thread = threading.Thread(target=self._run, name=f"to {self._shown}", daemon=True)
                thread.start()
                self._thread = thread
            self._change.notify()

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
        while (waiting := self._next()) is not None:
            try:
                self._send(waiting.message)
            except UndeliveredError as error:
                self._failed(waiting, str(error))
            except Exception as error:
                # A foreign exception may contain anything, even the address.
                self._failed(waiting, f"{type(error).__name__} in what sends it")
            else:
                self._failures = 0
                waiting.done()

    def _next(self) -> _Waiting | None:
        """Wait for a message, and after a failure for the retry; return the message, None to end."""
        with self._change:
            if self._failures:
                delay_s = min(self._patience.first_s * 2 ** min(self._failures - 1, 30), self._patience.longest_s)
                self._change.wait_for(lambda: self._closing, delay_s)
            else:
                self._change.wait_for(lambda: self._closing or self._waiting)
            return self._waiting.popleft() if self._waiting and not (self._closing and self._failures) else None

    def _failed(self, waiting: _Waiting, why: str) -> None:
        now = time.monotonic()
        if not self._failures:
            self._failing_since = now
            log.warning("cannot notify %s of %s: %s; trying again", self._shown, waiting.message.title, why)
        self._failures += 1
        waiting.tries += 1
        with self._change:
            # In order; but a message that the receiver chokes on must not block the others.
            (self._waiting.appendleft if waiting.tries < _MOST_IN_ORDER else self._waiting.append)(waiting)
            given_up = [
                each
                for each in self._waiting
                if each.tries >= self._patience.tries
                or max(each.since, self._failing_since) < now - self._patience.for_s
            ]
            self._waiting = deque(each for each in self._waiting if each not in given_up)
        if given_up:
            more = f" and {len(given_up) - 1} more" if len(given_up) > 1 else ""
            log.error("gave up notifying %s of %s%s: %s", self._shown, given_up[0].message.title, more, why)
        for each in given_up:
            each.done()


class Notifier(Listener):
    """Notifies the recipients that a job or the configuration names. *config* returns the configuration in force."""

    name = "notify"
    wants = frozenset(EventName) - {EventName.POLLING}  # whether a job asks to be told is in the event

    def __init__(self, root: str, config: Callable[[], Config], *, patience: Patience | None = None) -> None:
        self._config = config
        self._patience = patience or Patience()
        self._queues: dict[tuple[str, str | None], SendQueue] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._complained: set[str] = set()

    def hear(self, event: Event, done: Callable[[], None]) -> None:
        """Send a message to each address; call *done* when the last has arrived or is given up.

        A repeat is done at once: after a crash the first one, before it in the file of events, is delivered again.
        """
        if event.id in self._seen:
            done()
            return
        self._seen[event.id] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        to = self._to(event)
        if not to:
            done()
            return
        left = list(to)

        def arrived() -> None:
            left.pop()
            if not left:  # which two threads may see: an event may be done twice
                done()

        document = facts(event)
        title = f"{PREFIX}{headline(event)}"
        texts = {lines: body(event, last_lines(event.metadir or "", lines)) for lines in {lines for _, lines in to}}
        for queue, lines in to:
            queue.put(Message(event.name.value, title, texts[lines], document), arrived)

    def close(self) -> None:
        """Send what waits, for a moment. The rest is left to the next process."""
        deadline = time.monotonic() + _CLOSE_S
        for queue in self._queues.values():
            queue.close()
        for queue in self._queues.values():
            queue.join(deadline)

    def _to(self, event: Event) -> list[tuple[SendQueue, int]]:
        settings = settings_of(self._config())
        found: dict[str, int] = {}
        for named, lines in addressees(event, settings.rules).items():
            try:
                for address in expanded(named, settings.contacts):
                    found[address] = max(found.get(address, 0), lines)
            except InvalidValue as error:
                self._complain(f"cannot notify {masked(named)}: {error}")
        to = []
        for address, lines in found.items():
            key = address, settings.notifier
            try:
                if key not in self._queues:
                    self._queues[key] = SendQueue(masked(address), transport_for(*key), self._patience)
                to.append((self._queues[key], lines))
            except UndeliveredError as error:
                self._complain(f"cannot notify {masked(address)}: {error}")
        return to

    def _complain(self, words: str) -> None:
        if words not in self._complained:
            self._complained.add(words)
            log.error("%s", words)


_SAYS = {
    EventName.QUEUEING: "is about to be queued",
    EventName.QUEUED: "is queued",
    EventName.SUBMITTING: "is about to start",
    EventName.SUBMITTED: "starts",
    EventName.HANDED_OVER: "was handed over",
    EventName.STARTED: "has started",
    EventName.POLLING: "runs",
    EventName.GPU_IDLE: "leaves its GPUs idle",
    EventName.RETRYING: "continues with another run",
    EventName.CANCELLING: "is about to be cancelled",
    EventName.HELD: "is held",
    EventName.RELEASED: "is released",
    EventName.RESERVATION_CREATED: "was made",
    EventName.RESERVATION_CANCELLED: "was cancelled",
    EventName.RESERVATION_STARTED: "has begun",
    EventName.RESERVATION_ENDED: "has ended",
    EventName.GPU_TAKEN: "is taken",
    EventName.GPU_FREE: "is free",
    EventName.DISPATCHER_STARTED: "has started",
    EventName.DISPATCHER_STOPPED: "has stopped",
    **{EventName(outcome): each.words for outcome, each in OUTCOMES.items()},
}


def headline(event: Event) -> str:
    """Return *event* as one line: "train has failed: exit code 3"."""
    kinds = ((event.reservation, "reservation "), (event.gpu, "GPU "), (event.spool_dir, "the dispatcher of "))
    subject = event.job or next((f"{kind}{name}" for name, kind in kinds if name is not None), "")
    said = f"{subject} {_SAYS[event.name]}"
    if event.name is EventName.SUBMITTED and (engine := engine_of(event.executor)) is not None:
        said = f"{subject} is on its way to {engine_title(engine)}"  # which decides when it starts
    if event.name is EventName.CANCELLED and event.reason.startswith("cancelled "):
        return f"{subject} was {event.reason}"
    # "Finished" already means exit code 0.
    return f"{said}: {event.reason}" if event.reason and event.name is not EventName.FINISHED else said


def body(event: Event, log: str = "") -> str:
    """Return the details of *event*, one fact per line, and the last lines of its log."""
    result = event.result
    lines = []
    if event.job is not None:
        attempt = f" (attempt {event.attempt})" if event.attempt is not None and event.attempt > 1 else ""
        who = ", ".join(filter(None, [event.user, event.project and f"project {event.project}"]))
        lines = [("run", f"{event.run}{attempt}" if event.run is not None else ""), ("user", who)]
    if (one := event.reserved) is not None:
        gpus = f"GPU {', '.join(map(str, one.gpu_indices))}" if one.gpu_indices else count_of(one.gpu_count or 0, "GPU")
        lines = [("reserved", f"{gpus} for {one.holder}, {_moment(one.start_at_ns)} to {_moment(one.end_at_ns)}")]
    lines += [("host", event.host), ("time", _moment(event.at_ns))]
    if result is not None:
        lines += _result(result)
    elif event.started_at_ns is not None:
        lines.append(("waited", _span(event.submitted_at_ns, event.started_at_ns)))
    grant = event.grant or (result.grant if result is not None else Grant())
    lines.append(("GPUs", ", ".join(map(str, grant.gpu_indices))))
    lines.append(("resources", pools_in_words(grant.resources, grant.resource_indices) if grant.resources else ""))
    lines.append(("metadir", event.metadir or ""))
    text = "".join(f"{key}: {value}\n" for key, value in lines if value)
    return f"{text}\nThe end of its log:\n\n{log}\n" if log else text


def _result(result: Result) -> list[tuple[str, str]]:
    code, peak_bytes, asked = (result.exit_code, result.peak_memory_bytes, result.grant.memory_bytes)
    signal = f" (signal {code - 128})" if code is not None and code > 128 else ""
    ran = _span(result.started_at_ns, result.ended_at_ns, result.suspended_ns)
    of = f" of {show_size(asked)}" if asked else ""
    busy = mean_part(result.gpu_use)
    later = f", not before {_moment(result.again_at_ns)}" if result.again_at_ns is not None else ""
    return [
        ("exit code", f"{code}{signal}" if code is not None else ""),
        ("ran", ran),
        ("suspended", show_duration(result.suspended_ns) if ran and result.suspended_ns else ""),
        ("waited", _span(result.submitted_at_ns, result.started_at_ns or result.ended_at_ns)),
        ("memory", f"{show_size(peak_bytes)}{of}" if peak_bytes is not None else ""),
        ("CPU time", show_duration(result.cpu_time_ns) if result.cpu_time_ns is not None else ""),
        ("GPUs busy", f"{show_percent(busy)} on average" if busy is not None else ""),
        ("goes on", f"{result.again}{later}" if result.again is not None else ""),
    ]


def _span(since_ns: int | None, until_ns: int | None, without_ns: int = 0) -> str:
    return "" if since_ns is None or until_ns is None else show_duration(max(0, until_ns - since_ns - without_ns))


def _moment(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns // SECOND_NS, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def last_lines(metadir: str, count: int) -> str:
    """Return the last *count* lines of the run's log as plain text, "" if the job has no log there."""
    if not metadir or count <= 0:
        return ""
    try:
        data = end_of_file(f"{metadir}/{layout.JOB_LOG}", _MOST_LOG_BYTES)
    except OSError:
        return ""
    lines = []
    for line in data.decode(errors="replace").rstrip("\n").split("\n")[-count:]:
        shown = _ESCAPES.sub("", line).rstrip("\r").rpartition("\r")[2]  # the visible part of a progress bar
        plain = "".join(character for character in shown if character.isprintable() or character == "\t")
        lines.append(plain if len(plain) <= _MOST_COLUMNS else f"{plain[:_MOST_COLUMNS]}...")
    return "\n".join(lines)
