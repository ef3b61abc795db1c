"""Questions: whether a start or a cancel may be, asked of everybody who has a say, several at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from spool.core.events import EventName
from spool.formats.listening import AT_ONCE, Ask, Busy, Reply, render
from spool.listeners.base import Begin, Gate, Listener

log = logging.getLogger(__name__)

_LONGEST_NO = 500  # characters


class Answers:
    """Asks the gates among *listeners* and hands each answer to *say*.

    *catch_up* returns when one has been told of all about a job that stands before a position in the events.
    """

    def __init__(
        self,
        listeners: Mapping[str, Listener],
        say: Callable[[bytes], None],
        catch_up: Callable[[str, str | None, int, Begin], None],
    ) -> None:
        self._catch_up = catch_up
        self._listeners = listeners
        self._say = say
        self._pool: ThreadPoolExecutor | None = None

    def asks(self, name: EventName, listeners: Iterable[Listener]) -> bool:
        """Whether one of *listeners* wants to be asked about such an event."""
        return any(isinstance(gate, Gate) and gate.asks(name) for gate in listeners)

    def ask(self, question: Ask) -> None:
        """Answer a question in the background."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(AT_ONCE, "spool-answer")
        self._pool.submit(self._answer, question)

    def _answer(self, question: Ask) -> None:
        number, event = question.number, question.event

        def begin(within_ns: int) -> None:
            self._say(render(Busy(within_ns, number)))

        texts: dict[str, list[str]] = {"init": [], "prep": [], "end": []}
        for kind, gate in list(self._listeners.items()):
            if not isinstance(gate, Gate) or not gate.asks(event.name):
                continue
            try:
                self._catch_up(kind, event.job, question.after, begin)
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
