"""Messages to the recipients that a job or the configuration names (docs/EVENTS.md).

The listener looks up the addresses for an event, writes the message, with the end of the run's log if requested, and
puts it into the queue of each address. It warns once if other users can read the addresses.
"""

from __future__ import annotations

import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime

from spool.core import layout
from spool.core.errors import InvalidValue
from spool.core.events import Event, EventName
from spool.core.gpuuse import mean_part
from spool.core.layout import engine_of
from spool.core.model import SECOND_NS, Grant, Result
from spool.core.reasons import pools_in_words
from spool.core.units import show_duration, show_percent, show_size
from spool.extras.notify.sending import (
    PREFIX,
    Message,
    Patience,
    SendQueue,
    UndeliveredError,
    masked,
    readable_by_others,
    transport_for,
)
from spool.extras.notify.settings import addressees, expanded, settings_of
from spool.formats.capabilities import engine_title
from spool.formats.config import Config
from spool.formats.events import facts
from spool.listeners import MESSAGES, Listener
from spool.store.reading import end_of_file

log = logging.getLogger(__name__)

_REMEMBERED = 20_000  # ids of events
_CLOSE_S = 3.0

_MOST_LOG_BYTES = 64 << 10
_MOST_COLUMNS = 300
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


class Notifier(Listener):
    """Notifies the recipients that a job or the configuration names. *config* returns the configuration in force."""

    name = "notify"

    def __init__(self, root: str, config: Callable[[], Config], *, patience: Patience | None = None) -> None:
        self._root = root
        self._config = config
        self._patience = patience
        self._queues: dict[tuple[str, str | None], SendQueue] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._complained: set[str] = set()

    def wants(self, name: EventName) -> bool:
        """Return True for all events except polling: whether a job wants those is in the event."""
        return name is not EventName.POLLING

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
        for path in readable_by_others(self._root, settings, event):
            self._complain(f"{path} holds secrets and is readable by others; chmod 600 {path}")
        queues = ((self._queue(address, settings.notifier), lines) for address, lines in found.items())
        return [(queue, lines) for queue, lines in queues if queue is not None]

    def _queue(self, address: str, notifier: str | None) -> SendQueue | None:
        key = (address, notifier)
        if key not in self._queues:
            try:
                self._queues[key] = SendQueue(masked(address), transport_for(address, notifier), self._patience)
            except UndeliveredError as error:
                MESSAGES.add("given_up")
                self._complain(f"cannot notify {masked(address)}: {error}")
        return self._queues.get(key)

    def _complain(self, words: str) -> None:
        if words not in self._complained:
            self._complained.add(words)
            log.error("%s", words)


_SAYS = {
    EventName.QUEUED: "is queued",
    EventName.SUBMITTING: "is about to start",
    EventName.SUBMITTED: "starts",
    EventName.HANDED_OVER: "was handed over",
    EventName.STARTED: "has started",
    EventName.POLLING: "runs",
    EventName.GPU_IDLE: "leaves its GPUs idle",
    EventName.FINISHED: "has finished",
    EventName.FAILED: "has failed",
    EventName.RETRYING: "continues with another run",
    EventName.CANCELLING: "is about to be cancelled",
    EventName.CANCELLED: "was cancelled",
    EventName.TIMEOUT: "was stopped at its time limit",
    EventName.OUT_OF_MEMORY: "ran out of memory",
    EventName.PREEMPTED: "was preempted",
    EventName.LOST: "was lost",
    EventName.UNSCHEDULABLE: "could not be scheduled",
    EventName.HELD: "is held",
    EventName.RELEASED: "is released",
    EventName.RESERVATION_STARTED: "has begun",
    EventName.RESERVATION_ENDED: "has ended",
    EventName.GPU_TAKEN: "is taken",
    EventName.GPU_FREE: "is free",
    EventName.DISPATCHER_STARTED: "has started",
    EventName.DISPATCHER_STOPPED: "has stopped",
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
