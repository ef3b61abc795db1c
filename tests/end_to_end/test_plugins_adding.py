"""Plugins that add keys to new jobs, in the process of the listeners of the real dispatcher."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from typing import Any

import pytest

from end_to_end.plugging import Plugged
from served import Served


def adding(returned: str, before: str = "") -> str:
    """Return the source of a plugin that notes each question and returns the value of that expression."""
    note = "    open(event.spool_dir + '/asked', 'a').write(event.job + '\\n')\n"
    return f"import time\n@hookimpl\ndef spool_queueing(event):\n{note}{before}    return {returned}\n"


def asked(spool: Served) -> list[str]:
    """Return the jobs about which the plugin was asked, in the order of the questions."""
    path = spool.root / "asked"
    return path.read_text().split() if path.exists() else []


def said(spool: Served, *words: str) -> str:
    """Return what a command prints, whatever its exit code."""
    command = [sys.executable, "-m", "spool", *words]
    environment = {**os.environ, "SPOOL_DIR": str(spool.root)}
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True).stdout


def shown(spool: Served, name: str) -> str:
    """Return what `spool show` prints of a job."""
    return said(spool, "show", name)


def defaults(spool: Served, name: str, run: int = 1) -> dict[str, Any]:
    """Return the defaults in the metadir of a run."""
    return tomllib.loads((spool.root / "jobs" / name / str(run) / "defaults.toml").read_text())


def test_a_run_has_the_added_keys_and_the_records_say_of_which_plugin(plugged: Plugged) -> None:
    """The file stays as it is; its own keys stay in force, then come those of plugins, then `[defaults]`."""
    added = "{'time_limit': '1h', 'project': 'p', 'env': {'A': 'added', 'B': 'added'}, 'tags': [event.keys['command']]}"
    spool = plugged("5s", rules=adding(added))
    with (spool.root / "config.toml").open("a") as config:
        config.write('[defaults]\ntime_limit = "2h"\nmemory = "10M"\n')
    spool.start()
    spool.completes("x", "echo $A $B", env={"A": "own"})
    assert spool.log("x") == "own added\n"
    assert spool.history()[0]["project"] == "p"
    record = (spool.root / "jobs" / "x" / "1" / "defaults.toml").read_text()
    assert 'plugin rules: time_limit = "1h"\n' in record
    assert 'plugin rules: env.B = "added"\n' in record
    assert "env.A" not in record
    found = defaults(spool, "x")
    assert found == {
        "time_limit": "1h",
        "memory": "10M",
        "project": "p",
        "env": {"B": "added"},
        "tags": ["echo $A $B"],
    }
    assert 'plugin rules: project = "p"' in shown(spool, "x")
    assert "project" not in spool.path("done", "x").read_text()


def test_what_a_waiting_job_was_given_outlives_the_dispatcher(plugged: Plugged) -> None:
    """After a kill nobody is asked again, `show` and `plan` know the keys without a dispatcher, and an edit asks."""
    spool = plugged("5s", rules=adding("{'priority': 77, 'cpus': 9}"))
    spool.start()
    spool.drop("x", "true")
    spool.until(lambda: spool.state()["jobs"].get("x", {}).get("priority") == 77, "the added priority")
    spool.kill()
    assert "plugin rules: priority = 77" in shown(spool, "x")
    assert " 77 " in said(spool, "ls")
    assert "9 CPUs" in said(spool, "why", "x")
    spool.start()
    spool.looked()
    assert asked(spool).count("x") == 1
    assert spool.state()["jobs"]["x"]["priority"] == 77
    spool.drop("x", "true", cpus=1)
    spool.until(lambda: asked(spool).count("x") == 2, "another question")
    spool.wait_done("x")
    assert defaults(spool, "x") == {"priority": 77}


def test_a_question_that_is_cut_off_is_asked_again(plugged: Plugged) -> None:
    """A kill between question and answer: the job waits, and the next dispatcher asks and adds the keys."""
    waits = "    while not __import__('os').path.exists(event.spool_dir + '/go'): time.sleep(0.01)\n"
    spool = plugged("60s", rules=adding("{'project': 'p'}", waits))
    spool.start()
    spool.drop("x", "true")
    spool.until(lambda: asked(spool) == ["x"], "the question")
    spool.wait_reason("x", "plugins: asked which keys to add")
    spool.kill()
    (spool.root / "go").touch()
    spool.start()
    spool.wait_done("x")
    assert asked(spool) == ["x", "x"]
    assert defaults(spool, "x") == {"project": "p"}


def test_an_array_is_asked_about_once_and_its_tasks_have_the_keys(plugged: Plugged) -> None:
    """The files of the tasks say which plugin added what, and `{i}` in an added key is each task's."""
    spool = plugged("5s", rules=adding("{'comment': 'from a plugin', 'env': {'N': 'task {i}'}}"))
    spool.start()
    spool.drop("many", "echo $N", matrix={"i": [1, 2]})
    spool.wait_done("many_0", "many_1", "many")
    assert [spool.log("many_0"), spool.log("many_1")] == ["task 1\n", "task 2\n"]
    text = spool.path("done", "many_1").read_text()
    assert 'plugin rules: comment = "from a plugin"\n' in text
    assert asked(spool) == ["many"]
    assert "plugin rules" in shown(spool, "many")


def test_a_retry_keeps_the_keys_and_nobody_is_asked_again(plugged: Plugged) -> None:
    """A job that runs again is the same submission."""
    spool = plugged("5s", rules=adding("{'retry': {'max': 1, 'delay': '0s'}, 'project': 'p'}"))
    spool.start()
    spool.completes("x", "exit 3")
    assert [line["project"] for line in spool.history()] == ["p", "p"]
    assert asked(spool) == ["x"]


def test_a_dispatcher_that_stops_when_idle_waits_for_the_answer(plugged: Plugged) -> None:
    """A job about which a plugin is asked is work to do."""
    spool = plugged("5s", rules=adding("{'project': 'p'}", "    time.sleep(0.2)\n"))
    spool.drop("x", "true")
    assert spool.run() == 0
    assert [line["project"] for line in spool.history()] == ["p"]


WRONG = {
    "{'priority': 'high'}": 'plugin rules: "priority"',
    "{'prio': 3}": "prio",
    "{'command': 'true'}": 'plugin rules: cannot add "command"',
    "{'signal': 'USR1@2h', 'time_limit': '1h'}": "plugin rules: ",
    "[1]": "plugin rules: spool_queueing returned list, not a mapping",
    "{'env': {1, 2}.union}": "plugin rules: spool_queueing returned what no job file can hold",
    "1 / 0": "plugin rules: ZeroDivisionError",
    "time.sleep(600)": "plugin rules: it took longer than 0.5s",
}


@pytest.mark.parametrize("returned", WRONG)
def test_a_plugin_that_fails_holds_the_job_and_says_why(plugged: Plugged, returned: str) -> None:
    """A wrong key or value, an exception and a hang: the reason names the plugin; a release asks again."""
    spool = plugged(rules=adding(returned))
    spool.start()
    spool.drop("x", "true")
    spool.wait_place("x", "held")
    spool.wait_reason("x", WRONG[returned])
    spool.move("x", "held", "queued")
    spool.until(lambda: len(asked(spool)) == 2, "another question")
    spool.wait_place("x", "held")


def test_a_job_that_cannot_be_held_waits_and_says_why(plugged: Plugged) -> None:
    """Another file of its name is held: the one in `queued/` stays there with the words of the plugin."""
    spool = plugged(rules=adding("1 / 0"))
    spool.start()
    spool.drop("x", "true", place="held")
    spool.drop("x", "true")
    spool.wait_reason("x", "plugin rules: ZeroDivisionError")
    assert spool.path("queued", "x").exists()


def test_a_plugin_that_ends_its_process_holds_the_job(plugged: Plugged) -> None:
    """After the third time; the other jobs wait no longer than that."""
    spool = plugged(rules=adding("{}", "    __import__('os')._exit(1)\n"))
    spool.start()
    spool.drop("x", "true")
    spool.wait_place("x", "held")
    spool.wait_reason("x", "a plugin: it crashed the listeners' process 3 times")


def test_of_two_plugins_the_first_to_set_a_key_is_heard(plugged: Plugged) -> None:
    """What the second adds besides is taken, and the log says what was not."""
    first, second = adding("{'priority': 1}"), adding("{'priority': 2, 'project': 'q'}")
    spool = plugged("5s", first=first, second=second)
    spool.start()
    spool.completes("x", "true")
    winner = defaults(spool, "x")["priority"]
    loser = {1: "second", 2: "first"}[winner]
    assert defaults(spool, "x")["project"] == "q"
    assert f"plugin {loser}: priority " in spool.said()
