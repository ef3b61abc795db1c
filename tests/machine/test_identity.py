"""Who a process is, and whether it still is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from machine.fake_proc import FakeProc
from spool.core.lifecycle import Liveness
from spool.core.model import Jid
from spool.machine import identity

JID = Jid(50, 1000, "boot-1", "pid:[1]", "here")


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    """Show a machine called boot-1 on which the process of JID runs."""
    made = FakeProc(tmp_path)
    made.process(50, start=1000)
    return made


def liveness(jid: Jid, proc: FakeProc) -> Liveness:
    """Return what *jid* is on the fake machine, which is called "here"."""
    return identity.liveness(jid, proc=str(proc), here="here")


def test_a_process_that_has_ended_is_gone_even_while_nobody_has_waited_for_it() -> None:
    """What runs is alive, and says where it runs; a zombie is gone: only its exit code is left."""
    pid = os.posix_spawn("/bin/cat", ["cat"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)])
    jid = identity.of_process(pid)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    stat = identity.read_stat(pid)
    assert stat.state == "Z"
    assert identity.liveness(jid) is Liveness.GONE
    os.waitpid(pid, 0)
    assert identity.liveness(jid) is Liveness.GONE
    assert identity.of_process(pid) is None
    jid = identity.of_process(os.getpid())
    assert (jid.pid, jid.host) == (os.getpid(), identity.host())
    assert identity.liveness(jid) is Liveness.ALIVE


def test_another_process_with_the_same_pid_is_not_it(proc: FakeProc) -> None:
    """Its start time proves that the first is gone; one whose first thread has ended runs as long as another does."""
    proc.process(50, start=1000, state="Z", threads=2)
    assert liveness(JID, proc) is Liveness.ALIVE
    proc.process(50, start=1001)
    assert liveness(JID, proc) is Liveness.GONE


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Liveness.ALIVE),
        ({"pid": 51}, Liveness.GONE),
        ({"boot_id": "boot-0"}, Liveness.REBOOTED),
        ({"boot_id": "boot-0", "pid_namespace": "pid:[2]"}, Liveness.REBOOTED),
        ({"boot_id": "boot-0", "host": "there"}, Liveness.ELSEWHERE),
        ({"pid_namespace": "pid:[2]"}, Liveness.ELSEWHERE),
        ({"pid_namespace": "pid:[2]", "host": "there"}, Liveness.ELSEWHERE),
        ({"host": "there"}, Liveness.ALIVE),  # this boot, this namespace: the host was given another name
    ],
)
def test_only_this_boot_and_namespace_can_prove_anything(
    proc: FakeProc, changes: dict[str, object], expected: Liveness
) -> None:
    """Another boot of this host means gone; another host or pid namespace means that we cannot know."""
    assert liveness(replace(JID, **changes), proc) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a b", "a) S 1 2 (b", ")", "((", "x) Z 9 9 9"])
def test_a_programs_name_may_hold_anything(proc: FakeProc, name: str) -> None:
    """Spaces and parentheses in a program's name do not move the fields after it."""
    proc.process(60, start=77, parent=3, session=4, name=name)
    stat = identity.read_stat(60, proc=str(proc))
    assert (stat.state, stat.parent, stat.session, stat.start_ticks) == ("S", 3, 4, 77)


def test_a_host_without_a_name_is_told_apart_by_its_machine_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines that are both called localhost are not the same host."""
    uname = os.uname()
    nameless = os.uname_result((uname.sysname, "localhost", uname.release, uname.version, uname.machine))
    monkeypatch.setattr(os, "uname", lambda: nameless)
    monkeypatch.setattr(identity, "read_bytes", lambda path: b"0123456789abcdef\n")
    identity.host.cache_clear()
    try:
        assert identity.host() == "localhost-0123456789ab"
    finally:
        identity.host.cache_clear()
