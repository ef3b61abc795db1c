"""A shared machine in `info`, `gpus`, `why` and `plan`, and the file of another account that all of it is read from."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calling import Command, asked, put_job
from cli.records import begin
from cli.test_foretold import limited
from extras.machine.sharing import BOB, G, gpu_share, join, mine, shares, write
from plugins.fake_nvml import GIB, FakeNvml
from spool.core.model import SECOND_NS, ForeignProcess, Gpu, Grant
from spool.extras.machine import SharedMachine, protocol
from spool.extras.machine.protocol import parse_status, sharing
from spool.formats.state import GpuView, JobView, SharedView
from spool.formats.wire import json_line
from spool.query.listing import expected_end
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
from spool.store.locked_spool import LockedSpool
from spool.store.ownership import this_user
from spool.store.spool import Spool
from views import a_machine, a_view, lay

HELD = "machine: cpus: needs 2, 0 free (2 leases of bob hold 5)"


def told(root: Path, jobs: dict[str, JobView], **more: Any) -> None:
    """Write the view of a dispatcher on the shared machine of `join`."""
    directory = str(root.parent / "machine")
    given = {"directory": directory, "cpus": 8, "memory_bytes": 32 * G, **more}
    gpus = given.pop("gpus", ())
    machine = a_machine(8, 32 * G, shared=SharedView(**given), gpus=gpus, gpus_at_ns=1 if gpus else None)
    lay(root, a_view(time.time_ns(), machine=machine, jobs=jobs))


def test_a_job_that_waits_for_a_lease_says_who_has_what(spool: Command, spool_root: Path) -> None:
    """The arbiter's reason, as the dispatcher has it, is what `why`, `plan` and `ls` say; no start is promised."""
    join(spool_root, shares(BOB))
    put_job(spool_root, "one", limited("1h", "cpus = 2\n"))
    told(spool_root, {"one": JobView(state="queued", reason=HELD)})
    lock = LockedSpool(str(spool_root))
    try:
        why, plan = asked(spool, "why", "one"), asked(spool, "plan")
        assert why["reasons"] == [{"code": "machine", "text": HELD}]
        assert (why["start_at"], why["start_is_earliest"]) == (None, True)
        lines = spool("why", "one").out.splitlines()
        assert (lines[0], lines[2].startswith("expected run time: ")) == (f"one: {HELD}", True)
        assert plan["starts"] == []
        (waits,) = plan["waits"]
        assert (waits["code"], waits["reason"], waits["start_at"]) == ("machine", HELD, None)
        assert re.search(rf"^1 +one .* \? .*{re.escape(HELD)}$", spool("plan").out, re.MULTILINE)
        assert HELD in spool("ls").out
    finally:
        lock.release()


def test_the_end_of_an_array_is_not_promised(spool_root: Path, spool: Command) -> None:
    """`ls` and `wait` expect the end of what runs; when the rest of it starts is not theirs to say."""
    join(spool_root, shares(BOB), config="autostart = false\ncpus = 1\n")
    now_ns = time.time_ns()
    begin(spool_root, "first", limited("1h"), Grant(1), now_ns)
    put_job(spool_root, "next", limited("1h"))

    def ends() -> list[int | None]:
        return [expected_end(Spool(str(spool_root)), [name], now_ns) for name in ("first", "next")]

    here, later = ends()
    assert here is not None
    assert later is None
    (spool_root / "config.toml").write_text("autostart = false\ncpus = 1\n")
    assert None not in ends()


def test_gpus_names_the_users_that_have_leases(
    spool: Command, spool_root: Path, own_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of a user with a lease is that lease's; without one it is foreign, and so is everything else."""
    cards = (
        Gpu("GPU-0", 0, "A100", 80 * GIB, 20 * GIB, foreign=(ForeignProcess(47, "python", 60 * GIB, "bob"),)),
        Gpu("GPU-1", 1, "A100", 80 * GIB, 75 * GIB, foreign=(ForeignProcess(48, "python", 5 * GIB, "eve"),)),
        Gpu("GPU-2", 2, "A100", 80 * GIB, 80 * GIB),
        Gpu("GPU-3", 3, "A100", 80 * GIB, 80 * GIB),
    )
    on = (gpu_share(0, ("bob", None)), gpu_share(1, ("carol", 20 * G), ("dave", 30 * G)), gpu_share(3, ("bob", None)))
    join(spool_root, shares(BOB, gpus=(*on, gpu_share(2))))
    told(spool_root, {}, gpus=tuple(GpuView.of(card, ()) for card in cards))
    lock = LockedSpool(str(spool_root))
    try:
        found = {gpu["index"]: gpu for gpu in asked(spool, "gpus")["gpus"]}
        assert {index: gpu["state"] for index, gpu in found.items()} == {
            0: "leased",
            1: "leased",
            2: "idle",
            3: "leased",
        }
        assert found[0]["foreign"] == []
        assert found[0]["leases"] == [{"user": "bob", "granted_bytes": None, "taken_bytes": 60 * GIB}]
        assert found[0]["why_not"].endswith(" bob")
        assert [lease["user"] for lease in found[1]["leases"]] == ["carol", "dave"]
        assert [process["user"] for process in found[1]["foreign"]] == ["eve"]
        assert (found[2]["leases"], found[2]["why_not"]) == ([], None)
        said = spool("gpus").out
        assert "bob's lease (uses 60G)" in said
        assert [who in said for who in ("carol's lease", "dave's lease", "pid 48 (python, eve, 5G)")] == [True] * 3
        assert "unavailable" not in said
        assert "GPUs        4: leased 0, 1, 3; idle 2" in spool("info").out
    finally:
        lock.release()
    (spool_root / "config.toml").write_text("autostart = false\n")
    own_nvml.gpu("GPU-0", bus=1)
    (alone,) = asked(spool, "gpus")["gpus"]
    assert "leases" not in alone


def test_a_hostile_name_reaches_no_terminal_unescaped(spool: Command, spool_root: Path) -> None:
    """What the file calls users and resources is shown with its controls visible, in each command."""
    evil = "eve\x1b[2J\u202e\n"
    users = UserShare(user=evil, leases=1, cpus=1, asks=1, resources={evil: 2})
    join(spool_root, shares(users, gpus=(gpu_share(0, (evil, None)),), gpu_problem=evil, resources={evil: 3}))
    card = Gpu("GPU-0", 0, "A100", 80 * GIB, 80 * GIB)
    put_job(spool_root, "one")
    reason = f"machine: cpus: needs 2, 0 free (1 lease of {evil} holds 1)"
    told(spool_root, {"one": JobView(state="queued", reason=reason)}, gpus=(GpuView.of(card, ()),))
    lock = LockedSpool(str(spool_root))
    try:
        for words in (("info",), ("gpus",), ("why", "one"), ("plan",), ("ls",)):
            for more in ((), ("--json",)):
                said = spool(*words, *more)
                assert said.code == 0
                assert not {"\x1b", "\u202e"} & set(said.out + said.err)
        assert r"eve\u001b[2J\u202e\n's lease" in spool("gpus").out
    finally:
        lock.release()


# What is read: a file of another account, which may hold anything.


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
