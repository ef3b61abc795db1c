"""A shared machine in `info`, `gpus`, `why` and `plan`: the users with whom it is shared, and what they have."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from calling import Command, asked, put_job
from cli.records import begin
from cli.test_foretold import limited
from extras.machine.sharing import BOB, G, gpu_share, join, shares
from plugins.fake_nvml import GIB, FakeNvml
from spool.core.model import ForeignProcess, Gpu, Grant
from spool.formats.state import GpuView, JobView, SharedView
from spool.query.listing import expected_end
from spool.query.shared import UserShare
from spool.store.locked_spool import LockedSpool
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
