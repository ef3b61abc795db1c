"""What plugins add to a job file: what is taken of it, what is refused, and how it is told from other defaults."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import pytest

from spool.core.errors import InvalidValue
from spool.core.model import JobDefaults
from spool.formats import jobfile, journal

FILE = b'command = "true"\ncpus = 2\nenv = { A = "own" }\n'


def taken(said: Mapping[str, Mapping[str, Any]], data: bytes = FILE) -> tuple[dict[str, Any], list[str]]:
    """Return what plugins add of what they said, and what is left, in words."""
    added, left = jobfile.additions("x", data, tuple(said.items()), jobfile.NO_DEFAULTS)
    return dict(added), left


def test_only_what_nobody_has_set_before_is_taken() -> None:
    """Of `env`, variable by variable; the words about the rest name plugin and key. A second plugin may add more."""
    said = {
        "p": {"cpus": 9, "priority": 3, "env": {"A": "1", "B": "2"}},
        "q": {"priority": 4, "env": {"B": "q", "C": "q"}},
    }
    added, left = taken(said)
    assert added == {"p": {"priority": 3, "env": {"B": "2"}}, "q": {"env": {"C": "q"}}}
    assert left[0].startswith("plugin p: cpus ")


@pytest.mark.parametrize("key", ["command", "script", "array", "matrix", "rows", "max_running", "depends_on", "task"])
def test_keys_that_make_another_job_of_it_are_refused(key: str) -> None:
    """With the plugin and the key."""
    with pytest.raises(InvalidValue, match=f'plugin p: cannot add "{key}"'):
        taken({"p": {key: "1"}})


@pytest.mark.parametrize("keys", [{"prio": 1}, {"priority": "much"}, {"env": {"A B": "x"}}, {"retry": [None]}])
def test_a_wrong_key_or_value_is_the_fault_of_its_plugin(keys: Mapping[str, Any]) -> None:
    """Also if other plugins have added good ones before."""
    with pytest.raises(InvalidValue, match=r"^plugin bad: .*" + next(iter(keys))):
        taken({"good": {"project": "p"}, "bad": keys})


def test_the_text_of_the_defaults_says_which_key_is_whose() -> None:
    """Those of plugins replace those of the configuration, and a text of several lines stays in its comment."""
    stated = {"time_limit": "2h", "env": {"A": "configured", "B": "configured"}}
    added = (("p", {"time_limit": "1h", "setup": "a\nb", "env": {"B": "added"}}), ("q", {"tags": ["x", "y"]}))
    found = jobfile.with_added(JobDefaults(keys=stated), added)
    env = {"A": "configured", "B": "added"}
    assert tomllib.loads(found.text) == {"time_limit": "1h", "env": env, "setup": "a\nb", "tags": ["x", "y"]}
    head = [line for line in found.text.splitlines() if line.startswith("#")]
    assert head == [
        '# added by plugin p: time_limit = "1h"',
        '# added by plugin p: setup = "a\\nb"',
        '# added by plugin p: env.B = "added"',
        '# added by plugin q: tags = ["x", "y"]',
    ]
    shown = jobfile.from_defaults(found, FILE)
    assert shown.splitlines()[:4] == head
    assert tomllib.loads(shown) == {"time_limit": "1h", "env": {"B": "added"}, "setup": "a\nb", "tags": ["x", "y"]}


def test_a_task_that_is_made_again_has_the_same_bytes() -> None:
    """From the array's file and its `defaults.toml`."""
    data = b'command = "echo {i}"\nmatrix = { i = [1, 2] }\n'
    text = jobfile.with_added(jobfile.NO_DEFAULTS, (("p", {"comment": "c", "env": {"N": "{i}"}}),)).text.encode()
    spec = jobfile.parse(data, name="many", defaults=jobfile.recorded_defaults(text, 1))
    task = jobfile.TaskFiles("many", data, spec, text).text(1)
    assert task.startswith(b'# added by plugin p: comment = "c"\n')
    assert jobfile.parse(task, name="many_1").env == (("N", "2"),)


def test_the_journal_forgets_what_was_added_with_the_job() -> None:
    """It is remembered while the job waits, runs and is retried; not once it has left or is over for good."""
    line = journal.Added("x", 1, 2, 3, (("p", {"priority": 3}),))
    assert list(journal.parse(journal.render([line]))) == [line]
    began = journal.Started("x", 1, "b", 1, 1, 1)
    assert journal.recall([line, began, journal.Over("x", 1, False)]).added == {"x": line}
    assert journal.recall([line, began, journal.Over("x", 1, True)]).added == {}
    assert journal.recall([line, journal.Left("x")]).added == {}
