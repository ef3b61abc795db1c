"""Questions: whether a start or a cancel may be, asked of everybody who has a say, several at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from spool.core.events import Event, EventName
from spool.formats.listening import AT_ONCE, Busy, Reply, render
from spool.listeners.base import Gate, Listener

log = logging.getLogger(__name__)

_LONGEST_NO = 500  # characters


class Answers:
    """Asks the gates among *listeners* and hands each answer to *say*."""

    def __init__(self, listeners: Mapping[str, Listener], say: Callable[[bytes], None]) -> None:
        self._listeners = listeners
        self._say = say
        self._pool: ThreadPoolExecutor | None = None

    def asks(self, name: EventName, listeners: Iterable[Listener]) -> bool:
        """Whether one of *listeners* wants to be asked about such an event."""
        return any(gate.asks(name) for gate in _gates(listeners))

    def ask(self, number: int, event: Event) -> None:
        """Answer a question in the background."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(AT_ONCE, "spool-answer")
        self._pool.submit(self._answer, number, event)

    def _answer(self, number: int, event: Event) -> None:
        def begin(within_ns: int) -> None:
            self._say(render(Busy(within_ns, number)))

        texts: dict[str, list[str]] = {"init": [], "prep": [], "end": []}
        for gate in _gates(list(self._listeners.values())):
            if not gate.asks(event.name):
                continue
            try:
                answer = gate.ask(event, begin)
                no = answer.no
            except Exception as error:
                log.exception("a plugin failed when it was asked about %s", event.id)
                no = f"{type(error).__name__}: {error}"
            if no is not None:
                self._say(render(Reply(number, no=" ".join(no.split())[:_LONGEST_NO] or "no reason given")))
                return
            for key, text in (("init", answer.init), ("prep", answer.prep), ("end", answer.end)):
                if text:
                    texts[key].append(text)
        self._say(render(Reply(number, **{key: "\n".join(found) for key, found in texts.items()})))


def _gates(listeners: Iterable[Listener]) -> list[Gate]:
    return [listener for listener in listeners if isinstance(listener, Gate)]
