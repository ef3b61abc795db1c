"""Plugins in the process of the listeners of the real dispatcher: the example, and bad ones."""

from __future__ import annotations

import os
import signal
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from end_to_end.hooking import hook, listeners, told, wait_told
from end_to_end.plugging import Plugged, install
from spool.formats.events import parse_cursor
from support import ROOT

EXAMPLE = ROOT / "examples" / "plugin"


def test_the_example_does_what_it_says(plugged: Plugged, tmp_path: Path) -> None:
    """A job has a time limit, every log begins with a word, and each end is in the ledger, once."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    ((entry, module),) = project["entry-points"]["spool"].items()
    install(tmp_path / "site", module, (EXAMPLE / f"{module}.py").read_text(), entry)
    spool = plugged("5s")
    spool.start()
    spool.completes("x", "echo mine", prolog="echo before", epilog="echo after")
    user = spool.history()[0]["user"]
    assert spool.log("x") == f"before\nhouse rules: this is a job of {user}\nmine\nafter\n"
    record = (spool.root / "jobs" / "x" / "1" / "defaults.toml").read_text()
    assert 'plugin house_rules: time_limit = "24h"\n' in record
    ledger = spool.root / "ledger"
    assert spool.until(lambda: ledger.exists() and ledger.read_text(), "the ledger") == "x 1 finished\n"


PLUGINS = {
    "raises": "@hookimpl\ndef spool_event(event):\n    raise ValueError('broken')\n",
    "leaves": "@hookimpl\ndef spool_event(event):\n    raise SystemExit(1)\n",
    "hangs": "import time\n@hookimpl\ndef spool_event(event):\n    time.sleep(600)\n",
    "cannot be imported": "import no_such_module\n",
    "hangs when it is imported": "import time\ntime.sleep(600)\n",
    "asks for what there is not": "@hookimpl\ndef spool_nonsense(event):\n    pass\n",
    "takes what there is not": "@hookimpl\ndef spool_event(events):\n    pass\n",
}


@pytest.mark.parametrize("how", PLUGINS)
def test_a_bad_plugin_is_reported_and_harms_nobody(plugged: Plugged, how: str) -> None:
    """Jobs run, hooks and the other plugin are told, and the log names the bad one."""
    good = "@hookimpl\ndef spool_event(event):\n    open(event.spool_dir + '/good', 'a').write(event.name + '\\n')\n"
    spool = plugged(bad=PLUGINS[how], good=good)
    hook(spool, "finished")
    spool.start()
    spool.completes("x", ["/bin/true"])
    wait_told(spool, "finished", "x")
    heard = spool.root / "good"
    spool.until(lambda: heard.exists() and "finished" in heard.read_text(), "the good plugin")
    spool.until(lambda: "plugin bad" in spool.said(), "a word about the bad one")


def test_a_plugin_that_kills_its_process_when_it_is_imported_is_left_out(plugged: Plugged, tmp_path: Path) -> None:
    """After three ends no plugin is loaded, the problem is told, and hooks and jobs go on; a restart tries anew."""
    loads = tmp_path / "loads"
    count = f"with open({str(loads)!r}, 'a') as file: file.write('.')\n"
    spool = plugged(bad=f"import os\n{count}os.kill(os.getpid(), 9)\n")
    hook(spool, "finished")
    refused = "loading the plugins has crashed the process"
    spool.start()
    spool.drop("x", ["/bin/true"])
    wait_told(spool, "finished", "x")
    assert "finished" in told(spool, "x")
    spool.until(lambda: refused in " ".join(spool.state()["problems"]), "the problem")
    os.kill(listeners(spool) or 0, signal.SIGKILL)
    spool.drop("y", ["/bin/true"])
    wait_told(spool, "finished", "y")
    assert loads.read_text() == "..."
    assert spool.stop() == 0
    said = spool.said().count(refused)
    spool.start()
    spool.until(lambda: spool.said().count(refused) > said, "another three")
    assert loads.read_text() == "......"


def test_what_plugins_that_are_left_out_are_not_told_does_not_pile_up(plugged: Plugged) -> None:
    """Their cursor goes along with that of the hooks, so that the file of the events can be cut."""
    spool = plugged(bad="import os\nos.kill(os.getpid(), 9)\n")
    hook(spool, "finished")
    spool.start()

    def cursor(kind: str) -> tuple[int, int] | None:
        return parse_cursor((spool.root / ".listeners" / kind).read_bytes())

    for name in ("x", "y"):
        spool.drop(name, ["/bin/true"])
        wait_told(spool, "finished", name)
        spool.until(lambda: cursor("plugins") == cursor("hooks"), "the cursor of the plugins")


@pytest.mark.parametrize("answer", ["'not today'", "False", "1 / 0", "__import__('time').sleep(600)"])
def test_a_no_of_a_plugin_holds_the_job(plugged: Plugged, answer: str) -> None:
    """A text is the reason; False, an exception and no answer in time are noes as well."""
    spool = plugged(bad=f"@hookimpl\ndef spool_submitting(event):\n    return {answer}\n")
    spool.start()
    spool.drop("x", ["/bin/true"])
    spool.wait_place("x", "held")
    words = {"'": "not today", "F": "no reason given", "1": "ZeroDivisionError", "_": "it took longer than 0.5s"}
    spool.wait_reason("x", words[answer[0]])
    assert spool.reason("x").startswith("plugin bad: ")


def test_texts_of_plugins_stand_in_the_wrapper(plugged: Plugged) -> None:
    """Init, prep and end run in their places, of every plugin, and a job that is asked about twice has them once."""
    source = "".join(
        f"@hookimpl\ndef spool_{word}(event):\n    return 'echo {word} ' + event.job\n"
        for word in ("init", "prep", "end")
    )
    spool = plugged("5s", one=source)
    spool.start()
    spool.completes("x", "echo command", prolog="echo prolog", epilog="echo epilog")
    assert spool.log("x") == "init x\nprolog\nprep x\ncommand\nend x\nepilog\n"


def test_a_plugin_may_refuse_a_cancel(plugged: Plugged) -> None:
    """The run goes on, with the plugin's words."""
    spool = plugged(bad="@hookimpl\ndef spool_cancelling(event):\n    return 'never ' + event.job\n")
    spool.start()
    spool.begun("x", "sleep 600")
    spool.path("running", "x").unlink()
    spool.wait_reason("x", "plugin bad: never x")
    assert spool.places("x") == ["running"]


HELPERS = {
    "a program": "helper = subprocess.Popen(['sleep', '600']).pid",
    "a copy of itself": "helper = os.fork() or time.sleep(600)",
}


@pytest.mark.parametrize("how", HELPERS)
def test_what_a_plugin_has_started_does_not_hide_the_end_of_its_process(plugged: Plugged, how: str) -> None:
    """Killed while a helper of the plugin lives on, the process is replaced, and the new one tells what comes."""
    source = (
        "import os, subprocess, time\n"
        "@hookimpl\n"
        "def spool_event(event):\n"
        "    helper = 0\n"
        f"    if event.job == 'x': {HELPERS[how]}\n"
        "    with open(event.spool_dir + '/told', 'a') as file:\n"
        "        file.write(f'{event.name} {event.job} {os.getpid()} {helper}\\n')\n"
    )
    spool = plugged("5s", one=source)

    def told_of(job: str) -> list[list[str]]:
        path = spool.root / "told"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split() for line in lines if line.split()[1] == job]

    spool.start()
    try:
        spool.drop("x", ["/bin/true"])
        spool.until(lambda: "finished" in [line[0] for line in told_of("x")], "the end of x to be told")
        os.kill(int(told_of("x")[0][2]), signal.SIGKILL)
        spool.drop("y", ["/bin/true"])
        spool.until(lambda: "finished" in [line[0] for line in told_of("y")], "the end of y to be told")
    finally:
        for line in told_of("x"):
            with suppress(ProcessLookupError):
                os.kill(int(line[3]), signal.SIGKILL)


def test_a_program_of_a_plugin_that_reads_its_input_swallows_no_question(plugged: Plugged) -> None:
    """It finds the end of its input at once, and every job that is asked about starts."""
    reads = "import subprocess\n@hookimpl\ndef spool_submitting(event):\n    subprocess.run(['cat'], check=True)\n"
    spool = plugged("20s", one=reads)
    spool.start()
    names = [f"job-{at}" for at in range(4)]
    for name in names:
        spool.drop(name, ["/bin/true"])
    spool.wait_done(*names)
