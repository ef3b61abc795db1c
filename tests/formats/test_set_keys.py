"""What hooks set in a job file: it wins over the file, what is refused, and how it is told from the defaults."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import pytest

from spool.core.errors import InvalidValue
from spool.core.model import JobDefaults
from spool.formats import jobfile, journal

FILE = b'command = "true"\ncpus = 2\nenv = { A = "own" }\n'


def check(said: Mapping[str, Mapping[str, Any]], data: bytes = FILE) -> None:
    """Check what hooks set in a file."""
    jobfile.check_set("x", data, tuple(said.items()), jobfile.NO_DEFAULTS)


def test_keys_that_are_set_win_over_the_file_and_the_last_hook_counts() -> None:
    """`env` variable by variable, any other key whole; a command line takes the place of a script."""
    said = (
        ("p", {"cpus": 9, "priority": 3, "env": {"A": "1", "B": "2"}}),
        ("q", {"priority": 4, "env": {"B": "q", "C": "q"}, "command": "echo"}),
    )
    spec = jobfile.parse(FILE, name="x", defaults=jobfile.with_set(jobfile.NO_DEFAULTS, said))
    assert (spec.request.cpus, spec.priority) == (9, 4)
    assert dict(spec.env) == {"A": "1", "B": "q", "C": "q"}
    assert spec.command == "echo"
    scripted = b'command = ["it"]\nscript = "#!/bin/sh"\n'
    spec = jobfile.parse(scripted, name="x", defaults=jobfile.with_set(jobfile.NO_DEFAULTS, said))
    assert (spec.command, spec.script) == ("echo", None)


@pytest.mark.parametrize("key", ["array", "matrix", "rows", "max_running", "depends_on", "task"])
def test_keys_that_make_another_job_of_it_are_refused(key: str) -> None:
    """With the hook and the key."""
    with pytest.raises(InvalidValue, match=f'^p: cannot set "{key}"'):
        check({"p": {key: "1"}})


@pytest.mark.parametrize("keys", [{"prio": 1}, {"priority": "much"}, {"env": {"A B": "x"}}, {"retry": [1]}])
def test_a_wrong_key_or_value_is_the_fault_of_its_hook(keys: Mapping[str, Any]) -> None:
    """Also if other hooks have set good ones before."""
    with pytest.raises(InvalidValue, match=r"^bad: .*" + next(iter(keys))):
        check({"good": {"project": "p"}, "bad": keys})


def test_the_text_of_the_defaults_says_which_key_is_whose() -> None:
    """It can be read back, and a text of several lines stays in its comment."""
    stated = {"time_limit": "2h", "env": {"A": "configured", "B": "configured"}}
    said = (("p", {"time_limit": "1h", "setup": "a\nb", "env": {"B": "set"}}), ("q", {"tags": ["x", "y"]}))
    found = jobfile.with_set(JobDefaults(keys=stated), said)
    winning = {"time_limit": "1h", "setup": "a\nb", "env": {"B": "set"}, "tags": ["x", "y"]}
    assert tomllib.loads(found.text) == {**stated, "set_by_hooks": winning}
    read = jobfile.recorded_defaults(found.text.encode(), found.kill_grace_ns)
    assert (read.keys, read.winning) == (stated, winning)
    head = [line for line in found.text.splitlines() if line.startswith("#")]
    assert head == [
        '# set by p: time_limit = "1h"',
        '# set by p: setup = "a\\nb"',
        '# set by p: env.B = "set"',
        '# set by q: tags = ["x", "y"]',
    ]
    assert jobfile.from_defaults(found, FILE).splitlines() == head


def test_a_task_that_is_made_again_has_the_same_bytes() -> None:
    """From the array's file and its `defaults.toml`."""
    data = b'command = "echo {i}"\nmatrix = { i = [1, 2] }\n'
    text = jobfile.with_set(jobfile.NO_DEFAULTS, (("p", {"comment": "c", "env": {"N": "{i}"}}),)).text.encode()
    spec = jobfile.parse(data, name="many", defaults=jobfile.recorded_defaults(text, 1))
    task = jobfile.TaskFiles("many", data, spec).text(1)
    assert task.startswith(b'# set by p: comment = "c"\n')
    assert jobfile.parse(task, name="many_1").env == (("SPOOL_PARAM_I", "2"), ("N", "2"))


def test_the_journal_forgets_a_review_with_the_job() -> None:
    """It is remembered while the job waits, runs and is retried; not once it has left or is over for good."""
    line = journal.Reviewed("x", 1, 2, 3, (("p", {"priority": 3}),))
    assert list(journal.parse(journal.render([line]))) == [line]
    began = journal.Started("x", 1, "b", 1, 1, 1)
    assert journal.recall([line, began, journal.Over("x", 1, False)]).reviewed == {"x": line}
    assert journal.recall([line, began, journal.Over("x", 1, True)]).reviewed == {}
    assert journal.recall([line, journal.Left("x")]).reviewed == {}
