"""Python plugins: the interface of the entry point group `spool`, and the listener that calls them.

A plugin is a module, or any object, with some of the functions of `HookSpecs`, each marked with `hookimpl`:

    from spool.listeners.plugins import Event, hookimpl

    @hookimpl
    def spool_event(event: Event) -> None:
        ...

Plugins live in the process of the listeners. They are called one at a time, each call in a thread of its own, which is
abandoned after `hook_time_limit`. Exceptions are logged, and count as a no in a review.
"""

from __future__ import annotations

import inspect
import logging
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from spool.core.events import Answer, Event, EventName
from spool.core.model import SECOND_NS
from spool.formats.config import Config
from spool.formats.events import plain_keys
from spool.listeners import GROUP, Begin, Listener

__all__ = ["Event", "EventName", "HookSpecs", "Plugins", "hookimpl"]

log = logging.getLogger(__name__)

hookimpl = pluggy.HookimplMarker(GROUP)
"""Marks a function of a plugin as an implementation of one in `HookSpecs`."""

_hookspec = pluggy.HookspecMarker(GROUP)
_MOST_HANGS = 3
_TEXTS = ("init", "prep", "end")


class HookSpecs:
    """The functions of a plugin, all of them optional. An event may be delivered twice, with the same `id`."""

    @_hookspec
    def spool_event(self, event: Event) -> None:
        """Receive an event: every kind except `polling`."""

    @_hookspec
    def spool_polling(self, event: Event) -> None:
        """Receive a sign that a run goes on, once a minute for each run."""

    @_hookspec
    def spool_queueing(self, event: Event) -> Mapping[str, Any] | None:
        """Return keys to add to the file of a new job, which has `event.keys`; what it sets itself stays as it is."""

    @_hookspec
    def spool_submitting(self, event: Event) -> str | None:
        """Return why the job must not start now, in words for its owner; None if it may. A no holds the job."""

    @_hookspec
    def spool_cancelling(self, event: Event) -> str | None:
        """Return why the run must not be cancelled; None if it may. After a no it goes on."""

    @_hookspec
    def spool_init(self, event: Event) -> str | None:
        """Return shell text that the wrapper runs before anything else, including the configured prolog."""

    @_hookspec
    def spool_prep(self, event: Event) -> str | None:
        """Return shell text that the wrapper runs just before the command."""

    @_hookspec
    def spool_end(self, event: Event) -> str | None:
        """Return shell text that the wrapper runs just after the command, before the epilog."""


class _FailedError(Exception):
    """A call of a plugin failed; the text says how."""


class Plugins(Listener):
    """The installed plugins, as one listener."""

    name = "plugins"

    def __init__(self, root: str, config: Callable[[], Config], begin: Begin = lambda _: None) -> None:
        self._config = config
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(HookSpecs)
        self._turn = threading.Lock()
        self._unfit: list[pluggy.HookImpl] = []
        self._hangs: Counter[str] = Counter()
        self.problems: list[str] = []
        for entry in entry_points(group=GROUP):
            self._load(entry, begin)

    def wants(self, name: EventName) -> bool:
        """Whether a plugin receives events of that kind."""
        return bool(self._found("polling" if name is EventName.POLLING else "event"))

    def asks(self, name: EventName) -> bool:
        """Whether a plugin reviews events of that kind, has text for the wrapper, or adds keys to new jobs."""
        if name is EventName.QUEUED:
            return bool(self._found("queueing"))
        if name is EventName.SUBMITTING:
            return any(self._found(word) for word in ("submitting", *_TEXTS))
        return name is EventName.CANCELLING and bool(self._found("cancelling"))

    def hear(self, event: Event, done: Callable[[], None]) -> None:
        """Call every plugin, one after the other."""
        for implementation in self._found("polling" if event.name is EventName.POLLING else "event"):
            try:
                self._call(implementation, event)
            except _FailedError as error:
                log.error("plugin %s for event %s: %s", implementation.plugin_name, event.id, error)
        done()

    def ask(self, event: Event, begin: Begin) -> Answer:
        """Ask every plugin until one says no; then collect their texts for the wrapper."""
        try:
            if event.name is EventName.QUEUED:
                added = ((each.plugin_name, self._keys(each, event, begin)) for each in self._found("queueing"))
                return Answer(added=tuple((plugin, keys) for plugin, keys in added if keys))
            for implementation in self._found(event.name.value):
                no = self._call(implementation, event, begin)
                if no is not None and no is not True:
                    words = no if isinstance(no, str) and no.strip() else "no reason given"
                    return Answer(no=f"plugin {implementation.plugin_name}: {words}")
            if event.name is not EventName.SUBMITTING:
                return Answer()
            init, prep, end = (self._texts(word, event, begin) for word in _TEXTS)
            return Answer(init=init, prep=prep, end=end)
        except _FailedError as error:
            log.error("a plugin failed when asked about %s: %s", event.id, error)
            return Answer(no=f"plugin {error}")

    def _load(self, entry: EntryPoint, begin: Begin) -> None:
        def load() -> None:
            self._manager.register(entry.load(), name=entry.name)

        try:
            self._limited(load, begin)
            self._manager.check_pending()
        except (_FailedError, TimeoutError) as error:
            self._refuse(entry.name, str(error))
        except Exception as error:  # raised by pluggy for an unknown function
            self._refuse(entry.name, f"{type(error).__name__}: {error}")
        else:
            self._leave_out_unfit(entry.name)

    def _leave_out_unfit(self, name: str) -> None:
        for caller in self._manager.get_hookcallers(self._manager.get_plugin(name)) or ():
            for implementation in caller.get_hookimpls():
                why = _unfit(implementation) if implementation.plugin_name == name else None
                if why is not None:
                    self._unfit.append(implementation)
                    self._say(f"{caller.name} of plugin {name} is not used: {why}")

    def _say(self, problem: str) -> None:
        self.problems.append(problem)
        log.error("%s", problem)

    def _refuse(self, name: str, why: str) -> None:
        self._say(f"plugin {name} is not used: {why}")
        if self._manager.has_plugin(name):
            self._manager.unregister(name=name)

    def _found(self, word: str) -> list[pluggy.HookImpl]:
        found = getattr(self._manager.hook, f"spool_{word}").get_hookimpls()
        found = [each for each in reversed(found) if each not in self._unfit]
        return [each for each in found if self._hangs[each.plugin_name] < _MOST_HANGS]

    def _keys(self, implementation: pluggy.HookImpl, event: Event, begin: Begin) -> dict[str, Any]:
        """Return the keys that a plugin adds to a job. Raises _FailedError for what no job file can hold."""
        name, keys = implementation.plugin_name, self._call(implementation, event, begin)
        if keys is not None and not isinstance(keys, Mapping):
            raise _FailedError(f"{name}: spool_queueing returned {type(keys).__name__}, not a mapping")
        try:
            return plain_keys(keys or {})
        except (TypeError, ValueError, RecursionError) as error:
            raise _FailedError(f"{name}: spool_queueing returned what no job file can hold: {error}") from None

    def _texts(self, word: str, event: Event, begin: Begin) -> str:
        texts = [self._call(implementation, event, begin) for implementation in self._found(word)]
        return "\n".join(text for text in texts if isinstance(text, str) and text)

    def _call(self, implementation: pluggy.HookImpl, event: Event, begin: Begin = lambda _: None) -> Any:
        arguments = {"event": event} if "event" in implementation.argnames else {}
        name = implementation.plugin_name
        try:
            return self._limited(lambda: implementation.function(**arguments), begin)
        except TimeoutError as error:
            self._hangs[name] += 1
            if self._hangs[name] == _MOST_HANGS:
                log.error("plugin %s has hung %d times and is no longer called", name, _MOST_HANGS)
            raise _FailedError(f"{name}: {error}") from None
        except _FailedError as error:
            raise _FailedError(f"{name}: {error}") from None

    def _limited(self, call: Callable[[], Any], begin: Begin) -> Any:
        """Return the result of *call*. Raises TimeoutError if that takes too long, and _FailedError if it raises."""
        limit_ns = self._config().hook_time_limit_ns
        results: list[Any] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(call())
            except BaseException as error:
                errors.append(error)

        limit_s = limit_ns / SECOND_NS
        begin(limit_ns)
        while not self._turn.acquire(timeout=limit_s):
            begin(limit_ns)  # for the wait: each earlier call has its own time limit
        try:
            begin(limit_ns)
            thread = threading.Thread(target=work, name="spool-plugin", daemon=True)
            thread.start()
            thread.join(limit_s)
        finally:
            self._turn.release()
        if errors:
            raise _FailedError(_said(errors[0]))
        if not results:
            raise TimeoutError(f"it took longer than {limit_s:g}s")
        return results[0]


def _unfit(implementation: pluggy.HookImpl) -> str | None:
    """Return why that function cannot be called normally, so that its result would mean nothing."""
    function = implementation.function
    if implementation.wrapper or implementation.hookwrapper:
        return "it is a wrapper, but plugins are called one by one"
    if inspect.isgeneratorfunction(function):
        return "it is a generator and would never run to its end"
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "it is a coroutine function and nothing would await it"
    return None


def _said(error: BaseException) -> str:
    """Return the exception and its place, as text."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{type(error).__name__}: {error}{where}"
