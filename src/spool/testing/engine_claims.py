"""The claims that hold for every engine, for the tests of a package that offers one.

A test file says `from spool.testing.engine_claims import *`, and defines one fixture, `engine_site`, which gives a
`Site`: a spool whose jobs go to the engine, and what happens there behind spool's back (docs/CLUSTER.md).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec import Struct

from spool.core import layout
from spool.testing.served import ServedSpool, wait_for


class Site(Struct, frozen=True):
    """A spool that is not served yet, and what others do with its engine.

    `cancel` ends a job, by the engine's id, without spool. The engine refuses a job named `refused` that has the keys
    `refused`. `silence` and `speak` make the engine stop answering, and answer again; `fill` and `drain` make submitted
    jobs wait there, and begin after all. Claims about what is None are skipped.
    """

    spool: ServedSpool
    name: str
    cancel: Callable[[str], object]
    refused: Mapping[str, Any] | None = None
    silence: Callable[[], object] | None = None
    speak: Callable[[], object] | None = None
    fill: Callable[[], object] | None = None
    drain: Callable[[], object] | None = None

    def id(self, name: str, run: int = 1) -> str:
        """Return what the engine calls a run, once it has it."""
        return self.spool.until(lambda: (self.spool.record(name, layout.ENGINE, run) or "").split()[2:], "its id")[0]


@pytest.fixture
def served_site(engine_site: Site) -> Site:
    """Give the site, served."""
    engine_site.spool.start()
    return engine_site


def test_a_job_runs_once_and_its_records_say_where(served_site: Site) -> None:
    """The jid names the engine and the id that the engine answered with."""
    site = served_site
    site.spool.drop("x", "echo hi")
    result = site.spool.wait_done("x")
    assert result is not None
    assert (result["outcome"], result["exit_code"], site.spool.log("x")) == ("finished", 0, "hi\n")
    assert (site.spool.record("x", layout.JID) or "").split()[5] == f"{site.name}:{site.id('x')}"


@pytest.mark.parametrize("code", [7, 99, 100])
def test_a_failure_has_its_exit_code(served_site: Site, code: int) -> None:
    """It is that of the command, whatever the engine calls it, and whatever it means there."""
    served_site.spool.drop("x", f"exit {code}")
    result = served_site.spool.wait_done("x")
    assert result is not None
    assert (result["outcome"], result["exit_code"], served_site.spool.runs("x")) == ("failed", code, [1])


def test_a_prolog_and_a_setup_reach_the_command(served_site: Site) -> None:
    """What the prolog adds to the environment is there, and the setup runs in the shell of the command."""
    prolog, setup = 'echo "TOKEN=it is" >> "$SPOOL_ENV"', "X=set; export X"
    served_site.spool.drop("reached", ["sh", "-c", 'echo "$TOKEN $X"'], prolog=prolog, setup=setup)
    served_site.spool.wait_done("reached")
    assert served_site.spool.log("reached") == "it is set\n"


def test_a_cancel_lets_the_job_leave_in_order(served_site: Site) -> None:
    """Its command is told once to end."""
    spool = served_site.spool
    spool.drop("x", "trap 'echo told; exit 9' TERM; echo up; while :; do sleep 0.1; done", kill_grace="60s")
    spool.says("x", "up")
    assert spool.spool("cancel", "x").returncode == 0
    spool.wait_done("x")
    assert (spool.outcome("x"), spool.log("x")) == ("cancelled", "up\ntold\n")


def test_a_warning_reaches_the_command_before_its_time_limit(served_site: Site) -> None:
    """It is sent once, and the job goes on."""
    spool = served_site.spool
    command = "trap 'echo warned' USR1; echo up; while :; do sleep 0.1; done"
    spool.drop("x", command, time_limit="1h", signal="USR1@6s", kill_grace="1s")
    spool.says("x", "up")
    assert spool.spool("edit", "x", "--time-limit", "8s").returncode == 0
    spool.says("x", "warned")
    spool.wait_done("x")
    assert (spool.outcome("x"), spool.log("x").count("warned")) == ("timeout", 1)


def test_what_is_cancelled_in_the_engine_is_cancelled(served_site: Site) -> None:
    """Spool sees it, and says that it was not spool's doing."""
    site = served_site
    site.spool.drop("x", "echo up; sleep 600")
    site.spool.says("x", "up")
    site.cancel(site.id("x"))
    result = site.spool.wait_done("x")
    assert result is not None
    assert (result["outcome"], result["reason"].split(":")[0]) == ("cancelled", "cancelled, and not by spool")


def test_a_time_limit_counts_from_the_begin(served_site: Site) -> None:
    """It is spool's, to the second."""
    served_site.spool.drop("x", "sleep 600", time_limit="1s", kill_grace="1s")
    served_site.spool.wait_done("x")
    assert served_site.spool.outcome("x") == "timeout"


def test_a_job_that_is_refused_is_held_with_the_words_of_the_engine(served_site: Site) -> None:
    """It is not submitted again until a person releases it; the reason says how."""
    site = served_site
    if site.refused is None:
        pytest.skip("the engine refuses nothing")
    site.spool.drop("refused", "true", **site.refused)
    site.spool.wait_place("refused", "held")
    reason = (site.spool.root / "held" / "refused.toml.reason").read_text()
    assert reason.endswith("; `spool edit refused`, then `spool release refused`\n")
    assert site.spool.record("refused", layout.JID) == "void\n"


def test_a_killed_dispatcher_and_its_helper_lose_nothing(engine_site: Site) -> None:
    """Ten jobs under four kills, each in the middle of submissions: every one runs once."""
    spool = engine_site.spool
    ledger = spool.root.parent / "ledger"
    names = [f"j{number}" for number in range(10)]
    for name in names:
        spool.drop(name, f"echo {name} >> {ledger}")
    for seconds in (0.05, 0.2, 0.4, 0.8):
        spool.start()
        wait_for(lambda: ledger.exists() or spool.record("j0", layout.WRAPPER) is not None, what="the first start")
        signal.sigtimedwait([], seconds)
        spool.kill()
    spool.start()
    spool.wait_done(*names)
    assert sorted(ledger.read_text().split()) == sorted(names)


def test_nothing_follows_from_the_silence_of_an_engine(served_site: Site) -> None:
    """While it does not answer, no failure is concluded and nothing is submitted; afterwards everything goes on."""
    site, spool = served_site, served_site.spool
    if site.silence is None or site.speak is None:
        pytest.skip("the engine cannot be silenced here")
    spool.drop("x", "echo up; until [ -e go ]; do sleep 0.05; done; exit 3")
    spool.says("x", "up")
    site.silence()
    spool.until(lambda: "does not answer" in spool.said(), "the silence")
    spool.drop("y", "true")
    spool.looked()
    (spool.root.parent / "go").touch()
    spool.until(lambda: spool.record("x", layout.RC), "its exit code")
    spool.looked()
    assert (spool.places("x"), spool.places("y")) == (["running"], ["queued"])
    site.speak()
    spool.wait_done("x", "y")
    assert (spool.outcome("x"), spool.runs("x")) == ("failed", [1])


def test_a_job_that_waits_there_is_cancelled_before_it_begins(served_site: Site) -> None:
    """It never begins, and the next of its name does."""
    site, spool = served_site, served_site.spool
    if site.fill is None or site.drain is None:
        pytest.skip("the engine cannot be made to keep jobs waiting here")
    site.fill()
    spool.drop("x", "touch begun")
    site.id("x")
    assert spool.spool("cancel", "x").returncode == 0
    spool.wait_done("x")
    assert spool.outcome("x") == "cancelled"
    site.drain()
    spool.drop("x", "echo again")
    spool.until(lambda: spool.outcome("x", 2), "the second run")
    assert not (spool.root.parent / "begun").exists()


__all__ = ["Site", "served_site", *(name for name in globals() if name.startswith("test_"))]
