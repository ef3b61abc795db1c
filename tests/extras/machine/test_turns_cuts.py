"""A dispatcher is killed at each step of its talk with the arbiter of a shared machine, and returns or does not."""

from __future__ import annotations

import os

import pytest

from extras.machine.shared_machine import SharedMachine, logs, shared_machine
from support import wait_for

# A dispatcher that kills itself before or after it says a word, hears one, or launches a run, for the n-th time.
CUT = """
import os, runpy, signal
from spool.dispatcher.launcher import Launcher
from spool.extras.machine.asking import ArbiterLeases
from spool.extras.machine import protocol

WORD, WHEN, left = {word!r}, {when!r}, {times}

def die(when):
    if when == WHEN:
        os.kill(os.getpid(), signal.SIGKILL)

def cut(function, concerns):
    def cutting(self, *arguments):
        global left
        met = concerns(self, *arguments)
        left -= met
        if met and not left:
            die("before")
        found = function(self, *arguments)
        if met and not left:
            die("after")
        return found
    return cutting

words = {{"hello": lambda order: isinstance(order, protocol.Hello),
         "ask": lambda order: isinstance(order, protocol.Ask),
          "begin": lambda order: isinstance(order, protocol.Use) and not order.pid,
          "began": lambda order: isinstance(order, protocol.Use) and order.pid,
          "end": lambda order: isinstance(order, protocol.EndLease)}}
if WORD == "launch":
    Launcher._launch = cut(Launcher._launch, lambda self, *_: True)
elif WORD == "grant":
    ArbiterLeases._hear = cut(ArbiterLeases._hear, lambda self, reply: isinstance(reply, protocol.Granted))
else:
    ArbiterLeases._flush = cut(ArbiterLeases._flush, lambda self: any(map(words[WORD], self._out)))
runpy.run_module("spool", run_name="__main__")
"""
WHOLE = ("-m", "spool")
WORDS = ("hello", "ask", "grant", "begin", "launch", "began", "end")
CUTS = [(word, when, 1) for word in WORDS for when in ("before", "after")]
CUTS += [("grant", "after", 3), ("begin", "after", 3), ("launch", "before", 3), ("launch", "after", 3)]
CUTS += [("began", "after", 3), ("end", "before", 3), ("end", "after", 3)]
STRIDE = 1 if "EVERY_CUT" in os.environ else 3


def cut_off(machine: SharedMachine, word: str, when: str, times: int) -> None:
    """Give the users jobs, and wait until the dispatcher of the first one has died at that step."""
    alina, bob, _ = machine.users
    for number in range(5):
        alina.give(f"a{number}", 1, device=number == 0, deed="sleep 0.2")
        bob.give(f"b{number}", 1, device=number == 0, deed="sleep 0.05")
    alina._program = ("-c", CUT.format(word=word, when=when, times=times))
    alina.serve()
    bob.serve()
    cut = alina.process
    wait_for(lambda: cut.poll() is not None, what="the cut")
    assert cut.returncode == -9, logs(machine)
    alina.process = None


@pytest.mark.parametrize(("word", "when", "times"), CUTS[::STRIDE])
def test_no_step_is_one_at_which_a_dispatcher_may_not_die(word: str, when: str, times: int) -> None:
    """It returns, in every other case to another arbiter: each job ran once, and nothing was given twice."""
    with shared_machine(cpus=2) as machine:
        machine.serve()
        cut_off(machine, word, when, times)
        if CUTS.index((word, when, times)) % 2:
            machine.kill()
            machine.serve()
        alina = machine.users[0]
        alina._program = WHOLE
        alina.serve()
        machine.check()


@pytest.mark.parametrize("word", ["grant", "launch", "began", "end"][:: min(STRIDE, 2)])
def test_a_dispatcher_that_never_returns_takes_nothing_with_it(word: str) -> None:
    """The others get the whole machine once its runs are gone, and no lease of it is left."""
    with shared_machine(cpus=2) as machine:
        machine.serve()
        cut_off(machine, word, "after", 1)
        alina, bob, _ = machine.users
        bob.give("wide", 2)
        wait_for(lambda: bob.is_done, what="the jobs of the other")
        wait_for(lambda: machine.is_free, what="a machine without leases")
        begun = machine.replay()
        assert [begun[job] for job in bob.jobs] == [1] * len(bob.jobs)
        assert all(begun[job] <= 1 for job in alina.jobs)
