"""What is read of a shared machine: a file of another account, which may hold anything."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extras.machine.sharing import BOB, G, gpu_share, mine, shares, write
from spool.core.model import SECOND_NS, ForeignProcess, Gpu
from spool.extras.machine import SharedMachine, protocol
from spool.extras.machine.protocol import parse_status, sharing
from spool.formats.wire import json_line
from spool.query.shared import (
    GpuLease,
    MachineSharing,
    UserShare,
    arbiter_view,
    elsewhere,
    in_words,
    leases_on,
    without_users,
)
from spool.store.ownership import this_user


def seen(directory: Path, now_ns: int | None = None) -> MachineSharing:
    """Return what the user of the tests sees of the machine that is served in *directory*."""
    return sharing(str(directory), None, os.getuid(), time.time_ns() if now_ns is None else now_ns)


def test_the_parts_add_up(tmp_path: Path) -> None:
    """The sums are over all users; one's own part is apart, and the others come by what they have."""
    carol = UserShare(user="carol", leases=1, cpus=6, gpus=1)
    own = mine(leases=1, cpus=1, memory_bytes=G, resources={"licence": 2})
    write(tmp_path, shares(BOB, carol, own=own, gpus=(gpu_share(0, ("bob", None)), gpu_share(1))))
    found = seen(tmp_path)
    use = found.use
    assert (found.problem, use.own, use.others) == ("", own, (carol, BOB))
    assert (use.cpus, use.cpus_granted, use.cpus_free) == (8, 12, 0)
    assert (use.memory_granted_bytes, use.memory_free_bytes) == (9 * G, 23 * G)
    assert (use.gpus, use.gpus_granted) == (2, 1)
    assert (use.resources["licence"].granted, use.resources["licence"].free) == (3, 0)
    assert elsewhere(found, 1, G, 1) == (11, 8 * G, 0)
    told = arbiter_view(found)
    assert (told.cpus, told.memory_bytes, told.problem) == (8, 32 * G, "")


def test_a_user_without_an_account_is_known_by_number(tmp_path: Path) -> None:
    """The arbiter names such a user by the number; that is one's own part all the same."""
    nobodys = 4_000_001
    write(tmp_path, shares(BOB, UserShare(user=str(nobodys), leases=1)))
    use = sharing(str(tmp_path), None, nobodys, time.time_ns()).use
    assert (use.own.leases, use.others) == (1, (BOB,))


def test_an_old_file_is_from_an_arbiter_that_does_not_answer(tmp_path: Path) -> None:
    """After five seconds without another the arbiter is said to be silent, and what it wrote is still there."""
    path = write(tmp_path, shares(BOB))
    at_ns = path.stat().st_mtime_ns
    assert seen(tmp_path, at_ns + 5 * SECOND_NS).problem == ""
    late = seen(tmp_path, at_ns + 6 * SECOND_NS)
    assert late.problem.endswith(" 6s")
    assert late.use is not None
    assert late.written_at_ns == at_ns
    assert seen(tmp_path, at_ns + 60 * SECOND_NS).gist == late.gist != seen(tmp_path, at_ns).gist


def test_nothing_but_a_regular_file_is_read(tmp_path: Path) -> None:
    """A link, a pipe that nobody writes, a directory and a file without an end are a problem each, at once."""
    path = write(tmp_path / "real", shares(BOB))
    at = tmp_path / "machine.json"
    for make in (
        lambda: at.symlink_to(path),
        lambda: os.mkfifo(at),
        lambda: at.mkdir(),
        lambda: at.write_bytes(b"[" * (5 << 20)),
    ):
        make()
        found = seen(tmp_path)
        assert found.problem
        assert found.use is None
        at.rmdir() if at.is_dir() and not at.is_symlink() else at.unlink()


def test_a_file_of_another_account_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only root, the arbiter's account, oneself and the account that one names are believed."""
    write(tmp_path, shares(BOB))
    trusted = SharedMachine(str(tmp_path), frozenset({os.geteuid() + 1}))
    monkeypatch.setattr(protocol, "served_in", lambda *_: trusted)
    found = seen(tmp_path)
    assert "trusted" in found.problem
    assert found.use is None


@pytest.mark.parametrize(
    "said",
    [
        shares(UserShare(user="eve", cpus=-1)),
        shares(UserShare(user="eve", resources={"x": -5})),
        shares(cpus=-8),
        shares(gpus=(gpu_share(0, ("eve", -1)),)),
        shares(*(UserShare(user=str(number)) for number in range(5000))),
        json_line(shares(BOB)).replace(b'"cpus":5', b'"cpus":9e99'),
        json_line(shares(BOB)).replace(b'"cpus":5', b'"cpus":18446744073709551615'),
        json_line(shares(BOB))[:-20],
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
    ],
    ids=str.split("negative pool total gpu many float big cut empty binary deep"),
)
def test_numbers_that_cannot_be_counted_with_are_damage(tmp_path: Path, said: object) -> None:
    """A negative number, one beyond all machines, thousands of users and half a file are all not readable."""
    write(tmp_path, said)  # type: ignore[arg-type]
    found = seen(tmp_path)
    assert "machine.json" in found.problem
    assert found.use is None


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(1, 50))
def test_no_content_of_the_file_raises(tmp_path_factory: pytest.TempPathFactory, new: bytes, at: int, cut: int) -> None:
    """Whatever bytes of a good file are replaced, it is read or refused."""
    text = json_line(shares(BOB, own=mine(cpus=1), gpus=(gpu_share(0, ("bob", 5)),)))
    directory = tmp_path_factory.getbasetemp() / "any"
    write(directory, text[:at] + new + text[at + cut :])
    found = seen(directory)
    assert (found.use is None) == bool(found.problem)


def test_a_users_part_in_words() -> None:
    """What is held, and how many starts wait."""
    assert in_words(BOB) == "2 leases: 5 CPUs, 8 GiB, 1 GPU, licence 1; 4 waiting"
    assert in_words(UserShare(user="eve", leases=1, cpus=1)) == "1 lease: 1 CPU"
    assert (in_words(UserShare(user="eve", asks=3)), in_words(UserShare(user="eve"))) == ("3 waiting", "nothing")


def test_leases_on_a_gpu_are_those_outside_of_the_spool(tmp_path: Path) -> None:
    """One's own lease counts as far as this spool's runs do not explain it; processes belong to their users' leases."""
    me = this_user()
    write(tmp_path, shares(gpus=(gpu_share(0, (me, 30 * G), ("bob", 10 * G)), gpu_share(1, (me, None)))))
    found = seen(tmp_path)
    foreign = (ForeignProcess(1, "a", G, "bob"), ForeignProcess(2, "b", 2 * G, "bob"), ForeignProcess(3, "c", G, "eve"))
    gpu = Gpu("GPU-0", 0, "A100", None, None, foreign=foreign)
    parts = {(lease.user, lease.granted_bytes, lease.taken_bytes) for lease in leases_on(gpu, found, [20 * G])}
    assert parts == {(me, 10 * G, None), ("bob", 10 * G, 3 * G)}
    assert {lease.user for lease in leases_on(gpu, found, [30 * G])} == {"bob"}
    assert [each.user for each in without_users(foreign, leases_on(gpu, found, []))] == ["eve"]
    assert without_users((ForeignProcess(4, "d", G, "4000001"),), [GpuLease("4000001", None, None)]) == ()
    unknown = (ForeignProcess(0, "", None),)
    assert without_users(unknown, leases_on(gpu, found, [])) == unknown
    alone = Gpu("GPU-1", 1, "A100", None, None)
    assert leases_on(alone, found, [None]) == ()
    assert [lease.user for lease in leases_on(alone, found, [])] == [me]
    assert leases_on(Gpu("GPU-2", 2, "A100", None, None), found, []) == leases_on(gpu, None, []) == ()


def test_the_file_of_an_arbiter_is_read_back() -> None:
    """What `render` writes, `parse` reads, and unknown keys are no damage."""
    said = shares(BOB, own=mine(leases=1), gpus=(gpu_share(0, ("bob", None)),))
    assert parse_status(json_line(said)) == said
    assert parse_status(json_line(said).replace(b'{"version"', b'{"later":[1],"version"')) == said
