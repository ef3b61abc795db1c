"""Plugins as the process of the listeners holds them: whose turn it is, and which functions can be called at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
from msgspec.structs import replace

from end_to_end.plugging import MARKER, install
from spool.core.events import Answer, Event, EventName
from spool.core.model import SECOND_NS
from spool.formats.config import Config
from spool.listeners.plugins import Plugins
from support import PATIENCE_S, wait_for

QUESTION = Event(id="x", name=EventName.SUBMITTING, at_ns=1, host="h", version="1", spool_dir="/s", job="x")
ASKED = "@hookimpl\ndef spool_submitting(event):\n    pass\n"

Load = Callable[..., Plugins]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Give what loads plugins of those names and texts, which have that many nanoseconds."""

    def made(limit_ns: int = 60 * SECOND_NS, **sources: str) -> Plugins:
        for name, source in sources.items():
            install(tmp_path / "site", name, MARKER + source)
        monkeypatch.syspath_prepend(tmp_path / "site")
        return Plugins(str(tmp_path), lambda: Config(hook_time_limit_ns=limit_ns))

    return made


def test_who_waits_for_a_turn_says_again_and_again_that_the_work_goes_on(load: Load) -> None:
    """However many are before it, the dispatcher is never without a word for longer than one of them may take."""
    plugins = load(SECOND_NS // 20, turned=ASKED)
    begun: list[int] = []
    answers: list[Answer] = []
    thread = Thread(target=lambda: answers.append(plugins.ask(QUESTION, begun.append)))
    with plugins._turn:
        thread.start()
        wait_for(lambda: len(begun) > 3, what="four words")
    thread.join(PATIENCE_S)
    assert answers == [Answer()]
    assert set(begun) == {SECOND_NS // 20}


UNFIT = {
    "a wrapper": "@hookimpl(wrapper=True)\ndef spool_submitting(event):\n    return (yield)\n",
    "an old wrapper": "@hookimpl(hookwrapper=True)\ndef spool_submitting(event):\n    yield\n",
    "a generator": "@hookimpl\ndef spool_submitting(event):\n    yield 'no'\n",
    "a coroutine function": "@hookimpl\nasync def spool_submitting(event):\n    return 'no'\n",
    "an asynchronous generator": "@hookimpl\nasync def spool_submitting(event):\n    yield 'no'\n",
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_function_that_cannot_just_be_called_has_no_say(load: Load, what: str) -> None:
    """It is left out and named, and the plugin's other functions count."""
    name = f"unfit_{what.replace(' ', '_')}"
    plugins = load(**{name: UNFIT[what] + "@hookimpl\ndef spool_cancelling(event):\n    return 'never'\n"})
    (problem,) = plugins.problems
    assert problem.startswith(f"spool_submitting of plugin {name} ")
    assert not plugins.asks(EventName.SUBMITTING)
    assert plugins.ask(QUESTION, lambda _: None) == Answer()
    cancel = replace(QUESTION, name=EventName.CANCELLING)
    assert plugins.ask(cancel, lambda _: None) == Answer(no=f"plugin {name}: never")


def test_a_plugin_returns_keys_for_a_new_job_and_says_nothing_by_none(load: Load) -> None:
    """Each plugin is asked and named; a value of None adds nothing; who has no such function is not asked at all."""
    arrival = replace(QUESTION, name=EventName.QUEUED, keys={"command": "true"})
    keys = "@hookimpl\ndef spool_queueing(event):\n    return {'comment': event.keys['command'], 'project': None}\n"
    plugins = load(fills=keys, silent="@hookimpl\ndef spool_queueing(event):\n    pass\n", other=ASKED)
    assert plugins.asks(EventName.QUEUED)
    assert plugins.ask(arrival, lambda _: None) == Answer(added=(("fills", {"comment": "true"}),))


def test_without_a_plugin_that_adds_keys_new_jobs_are_not_asked_about(load: Load) -> None:
    """Other functions, such as for the event that a job is queued, do not count."""
    assert not load(told="@hookimpl\ndef spool_event(event):\n    pass\n", gate=ASKED).asks(EventName.QUEUED)
