"""The children of this process, and the orphans that it takes in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from spool.machine import children
from support import wait_for

# In a process of its own, for a subreaper stays one: a child leaves an orphan behind, which becomes ours.
_SUBREAPER = """
import json, os, subprocess, sys, time
from spool.machine import children
made = children.become_subreaper()
subprocess.run(["sh", "-c", "setsid sleep 0.05 & exit 0"])
orphans = children.children_of_self()
ended = {}
while not ended:
    ended = children.reap(orphans)
    time.sleep(0.002)
print(json.dumps([made, len(orphans), [r.exit_code for r in ended.values()], list(children.children_of_self())]))
"""


def test_a_subreaper_inherits_orphans_and_takes_them_away() -> None:
    """What a child leaves behind becomes our child, can be listed, and can be reaped."""
    done = subprocess.run([sys.executable, "-c", _SUBREAPER], capture_output=True, check=True)
    assert json.loads(done.stdout) == [True, 1, [0], []]


def test_our_children_are_listed_until_they_are_reaped() -> None:
    """A child is one from its start until somebody has asked how it ended."""
    before = children.children_of_self()
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "kill -KILL $$"], {})
    assert before is not None
    assert (children.children_of_self() or frozenset()) - before == {pid}
    ended = wait_for(lambda: children.reap([pid]))
    assert (ended[pid].pid, ended[pid].exit_code) == (pid, 128 + signal.SIGKILL)
    assert ended[pid].peak_memory_bytes > 0
    assert children.children_of_self() == before


# In a process of its own as well: one child of a nursery lives, another has left an orphan behind.
_NURSERY = """
import json, os, signal, sys, time
from spool.machine import children
children.become_subreaper()
nursery = children.Nursery()
def start(text):
    return lambda: os.posix_spawn("/bin/sh", ["sh", "-c", text], {}, setsigmask=[])
ready, told = os.pipe()
os.set_inheritable(told, True)
living = nursery.start(start("exec sleep 60"))
gone = nursery.start(start(f"sleep 60 & echo $! >&{told}"))
orphan = int(os.read(ready, 100))
os.waitpid(gone, 0)
masks = [line for task in os.listdir("/proc/self/task") for line in open(f"/proc/self/task/{task}/status")]
deaf = sum(int(line.split()[1], 16) & 1 << signal.SIGCHLD - 1 > 0 for line in masks if line.startswith("SigBlk"))
listed = children.children_of_self() == {orphan}
try:
    nursery.start(lambda: os.posix_spawn("/nowhere", ["sh"], {}))
except FileNotFoundError:
    failed = True
for pid in (living, orphan):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
nursery.close()
while len(os.listdir("/proc/self/task")) > 1:  # it has left Python, and not yet the kernel
    time.sleep(0.002)
print(json.dumps([listed, deaf, failed]))
"""


def test_only_orphans_are_listed_beside_the_children_of_a_nursery() -> None:
    """However many there are; the thread hears no signal, tells what fails, and leaves."""
    done = subprocess.run([sys.executable, "-c", _NURSERY], capture_output=True, check=True)
    assert json.loads(done.stdout) == [True, 1, True]


def test_a_machine_without_room_for_a_thread_has_children_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread starts them."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    nursery = children.Nursery()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    pid = nursery.start(lambda: os.posix_spawn("/bin/true", ["true"], {}))
    assert os.waitpid(pid, 0) == (pid, 0)
    nursery.close()


def test_only_the_named_children_are_reaped() -> None:
    """A child that lives, a child of which nobody spoke, and a process that is no child are left alone."""
    with subprocess.Popen(["sh", "-c", "exit 3"]) as unnamed, subprocess.Popen(["sleep", "60"]) as living:
        os.waitid(os.P_PID, unnamed.pid, os.WEXITED | os.WNOWAIT)
        assert children.reap([living.pid, 1]) == {}
        living.kill()
        assert unnamed.wait() == 3


def test_what_a_child_has_used_includes_what_it_waited_for() -> None:
    """CPU time and peak memory are those of the child and of the children that it waited for."""
    burn = "import time; x = bytearray(30_000_000)\nwhile time.process_time() < 0.05: pass"
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", '"$1" -c "$2"; exit 0', "sh", sys.executable, burn], dict(os.environ))
    used = wait_for(lambda: children.reap([pid]))[pid]
    assert used.cpu_time_ns >= 50_000_000
    assert used.peak_memory_bytes >= 30_000_000
