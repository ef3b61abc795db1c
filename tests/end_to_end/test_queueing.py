"""The hook `queueing` of the real dispatcher: it may veto a new job, and set its keys."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from typing import Any

import pytest

from end_to_end.hooking import hook
from served import Served
from support import ROOT

_NOTE = 'echo "$SPOOL_JOB" >> asked\n'


def setting(spool: Served, lines: str, before: str = "", *, name: str = "queueing") -> None:
    """Put a hook there that notes each question, and sets the keys in *lines* of TOML."""
    hook(spool, name, f"{_NOTE}{before}cat > \"$SPOOL_KEYS\" <<'END'\n{lines}\nEND\n")


def asked(spool: Served) -> list[str]:
    """Return the jobs about which the hook was asked, in the order of the questions."""
    path = spool.root / "asked"
    return path.read_text().split() if path.exists() else []


def said(spool: Served, *words: str) -> str:
    """Return what a command prints, whatever its exit code."""
    command = [sys.executable, "-m", "spool", *words]
    environment = {**os.environ, "SPOOL_DIR": str(spool.root)}
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True).stdout


def defaults(spool: Served, name: str, run: int = 1) -> dict[str, Any]:
    """Return the defaults in the metadir of a run."""
    return tomllib.loads((spool.root / "jobs" / name / str(run) / "defaults.toml").read_text())


def test_a_run_has_the_keys_that_a_hook_sets_and_the_records_say_so(served: Served) -> None:
    """They win over the file, which stays as it is; `[defaults]` fill what is left; `env` is merged."""
    (served.root / "config.toml").write_text('cpus = 4\n[defaults]\ntime_limit = "2h"\nmemory = "10M"\n')
    lines = 'command = "echo $A $B $SPOOL_CPUS"\ncpus = 2\ntime_limit = "1h"\n[env]\nA = "hook"\nB = "hook"'
    setting(served, lines, "cat > told\n")
    served.start()
    file = served.text("echo no", env={"A": "own"}, cpus=1, project="p")
    served.drop("x", file)
    served.wait_done("x")
    assert served.log("x") == "hook hook 2\n"
    assert served.path("done", "x").read_bytes() == file
    assert json.loads((served.root / "told").read_bytes())["keys"] == tomllib.loads(file.decode())
    record = (served.root / "jobs" / "x" / "1" / "defaults.toml").read_text()
    assert '# set by hooks/queueing: time_limit = "1h"\n# set by hooks/queueing: env.A = "hook"\n' in record
    found = defaults(served, "x")
    assert found.pop("set_by_hooks") == tomllib.loads(lines)
    assert found == {"time_limit": "2h", "memory": "10M"}
    text = said(served, "show", "x")
    assert '  hooks/queueing: env.A = "hook"' in text.replace("set by ", "")
    assert "2h" not in text


def test_the_example_does_what_it_says(served: Served) -> None:
    """A job has a time limit, GPUs need a project, and each end is in the ledger, once."""
    shutil.copytree(ROOT / "examples" / "hooks", served.root / "hooks")
    (served.root / "hooks").chmod(0o700)
    served.start()
    served.completes("x", "true")
    served.completes("y", "true", time_limit="1h")
    assert defaults(served, "x")["set_by_hooks"] == {"time_limit": "24h"}
    assert not (served.root / "jobs" / "y" / "1" / "defaults.toml").exists()
    ledger = served.root / "ledger"
    served.until(lambda: ledger.exists() and len(ledger.read_text().split()) == 6, "the ledger")
    line = ledger.read_text().splitlines()[0].split()
    again = {**os.environ, "SPOOL_EVENT_ID": line[0], "SPOOL_USER": line[1], "SPOOL_OUTCOME": line[2]}
    subprocess.run([served.root / "hooks" / "finished"], cwd=served.root, env=again, check=True)
    assert len(ledger.read_text().splitlines()) == 2
    for project, code in (("", 1), ("p", 0)):
        asking = {**os.environ, "SPOOL_GPUS": "1", "SPOOL_PROJECT": project}
        done = subprocess.run(
            [served.root / "hooks" / "submitting"], env=asking, check=False, stdout=subprocess.DEVNULL
        )
        assert done.returncode == code


def test_a_hook_may_put_a_script_around_a_command(served: Served) -> None:
    """The script gets the arguments that the hook states."""
    only = "[ $SPOOL_JOB = x ] || exit 0\n"
    setting(served, "command = ['around', 'it']\nscript = '''\n#!/bin/sh\necho script $1\n'''", only)
    served.start()
    served.completes("x", "echo no")
    assert served.log("x") == "script it\n"


def test_each_hook_sees_the_keys_of_those_before_it_and_the_last_one_counts(served: Served) -> None:
    """Those in `hooks/queueing.d/` are asked in the order of their names."""
    setting(served, "priority = 1\nproject = 'p'\nenv.A = 'first'\nretry.delay = '1s'", name="queueing.d/1")
    setting(served, "priority = 2\nenv.B = 'second'\nretry.max = 2", "cat > told\n", name="queueing.d/2")
    served.start()
    served.completes("x", "echo $A $B $C $SPOOL_RETRIES", env={"A": "own", "C": "own"}, retry={"backoff": 1, "max": 9})
    retry, env = {"delay": "1s", "max": 2}, {"A": "first", "B": "second"}
    assert defaults(served, "x")["set_by_hooks"] == {"priority": 2, "project": "p", "retry": retry, "env": env}
    keys = json.loads((served.root / "told").read_bytes())["keys"]
    assert (keys["priority"], keys["env"]) == (1, {"A": "first", "C": "own"})
    assert keys["retry"] == {"backoff": 1, "max": 9, "delay": "1s"}
    assert served.log("x") == "first second own\n"


def test_what_a_waiting_job_was_given_outlives_the_dispatcher(served: Served) -> None:
    """After a kill nobody is asked again, `show`, `ls` and `why` know the keys without a dispatcher; an edit asks."""
    only = "[ $SPOOL_JOB = x ] || exit 0\n"
    setting(served, "priority = 77\ncpus = 9", only)
    (served.root / "config.toml").write_text("cpus = 8\n")
    served.start()
    served.drop("x", "true")
    served.until(lambda: served.state()["jobs"].get("x", {}).get("priority") == 77, "the priority")
    served.kill()
    assert "priority = 77" in said(served, "show", "x")
    assert " 77 " in said(served, "ls")
    assert "9 CPUs" in said(served, "why", "x")
    served.start()
    served.looked()
    assert asked(served).count("x") == 1
    assert served.state()["jobs"]["x"]["priority"] == 77
    setting(served, "priority = 78", only)
    served.drop("x", "true", cpus=1)
    served.wait_done("x")
    assert asked(served).count("x") == 2
    assert defaults(served, "x")["set_by_hooks"] == {"priority": 78}


def test_a_question_that_is_cut_off_is_asked_again(served: Served) -> None:
    """A kill between question and answer: the job waits, and the next dispatcher asks and sets the keys."""
    (served.root / "config.toml").write_text('hook_time_limit = "60s"\n')
    setting(served, "project = 'p'", "until [ -e go ]; do sleep 0.01; done\n")
    served.start()
    served.drop("x", "true")
    served.until(lambda: asked(served) == ["x"], "the question")
    served.wait_reason("x", "hook queueing: asked")
    served.kill()
    (served.root / "go").touch()
    served.start()
    served.wait_done("x")
    assert asked(served) == ["x", "x"]
    assert served.history()[0]["project"] == "p"


def test_an_array_is_asked_about_once_and_its_tasks_have_the_keys(served: Served) -> None:
    """The files of the tasks have the keys and say who set them; `{i}` in one of them is each task's."""
    setting(served, "comment = 'of a hook'\ncommand = 'echo $N'\n[env]\nN = 'task {i}'")
    served.start()
    served.drop("many", "echo no", matrix={"i": [1, 2]})
    served.wait_done("many_0", "many_1", "many")
    assert [served.log("many_0"), served.log("many_1")] == ["task 1\n", "task 2\n"]
    text = served.path("done", "many_1").read_text()
    assert text.startswith('# set by hooks/queueing: comment = "of a hook"\n')
    assert asked(served) == ["many"]


def test_a_retry_keeps_the_keys_and_nobody_is_asked_again(served: Served) -> None:
    """A job that runs again is the same submission."""
    setting(served, "project = 'p'\nretry = { max = 1, delay = '0s' }")
    served.start()
    served.completes("x", "exit 3")
    assert [line["project"] for line in served.history()] == ["p", "p"]
    assert asked(served) == ["x"]


def test_a_running_job_keeps_the_keys_when_its_file_is_edited(served: Served) -> None:
    """An edit of a run changes what can be changed, and not what a hook has set."""
    setting(served, 'time_limit = "5h"')
    served.start()
    served.begun("x", "sleep 600", time_limit="1h")
    served.spool("edit", "x", "--priority", "3")
    served.looked()
    assert "5h" in said(served, "show", "x")
    served.cancels("x")


def test_a_dispatcher_that_stops_when_idle_waits_for_the_answer(served: Served) -> None:
    """A job about which a hook is asked is work to do."""
    setting(served, "project = 'p'", "sleep 0.2\n")
    served.drop("x", "true")
    assert served.run() == 0
    assert [line["project"] for line in served.history()] == ["p"]


WRONG = {
    "priority = 'high'": 'hooks/queueing: "priority"',
    "prio = 3": "prio",
    "depends_on = ['y']": 'hooks/queueing: cannot set "depends_on"',
    "array = '1-3'": 'hooks/queueing: cannot set "array"',
    "signal = 'USR1@2h'\ntime_limit = '1h'": "hooks/queueing: ",
    "priority = ": "hook queueing: ",
    "project = 'p'\n# " + "x" * (64 << 10): "its $SPOOL_KEYS has more than 64 KiB",
    "END\necho not today; exit 1; true <<'END'": "hook queueing: not today",
    "END\nexec sleep 600; true <<'END'": "hook queueing: it took longer than 3s",
}


@pytest.mark.parametrize("lines", WRONG)
def test_a_hook_that_fails_or_says_no_holds_the_job_and_says_why(served: Served, lines: str) -> None:
    """A wrong key or value, no TOML, a veto and a hang: the reason names the hook; a release asks again."""
    (served.root / "config.toml").write_text(f'hook_time_limit = "{"3s" if "exec sleep" in lines else "10m"}"\n')
    setting(served, lines)
    served.start()
    served.drop("x", "true")
    served.wait_place("x", "held")
    served.wait_reason("x", WRONG[lines])
    served.move("x", "held", "queued")
    served.until(lambda: len(asked(served)) == 2, "another question")
    served.wait_place("x", "held")


def test_a_job_that_cannot_be_held_waits_and_says_why(served: Served) -> None:
    """Another file of its name is held: the one in `queued/` stays there with the words of the hook."""
    hook(served, "queueing", "echo no; exit 1")
    served.start()
    served.drop("x", "true", place="held")
    served.drop("x", "true")
    served.wait_reason("x", "hook queueing: no")
    assert served.path("queued", "x").exists()
