"""The configuration and reservations: every key, and what is said of each mistake."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from formats.wrong_values import texts_of
from spool.core.errors import InvalidConfig, InvalidReservation
from spool.core.model import JobDefaults, Limits, Policy, Pool, Reservation
from spool.formats import config, reservation, toml
from spool.formats.config import Config, GpuConfig, Reserve, RetentionPolicy

GOLDEN = Path(__file__).parent / "golden" / "configs"
S = 1_000_000_000
GIB = 1 << 30
DEFAULTS = {"cpus": 2, "time_limit": "12h", "retry": {"max": 1}, "env": {"PATH": "/opt/bin:/usr/bin:/bin"}}
EXPECTED = {
    "empty": Config(),
    "everything": Config(
        policy=Policy(
            order="arrival",
            fair_share=True,
            fair_share_by="project",
            disk_floor_bytes=5 * GIB,
            gpu_strategy="spread",
            gpu_use=("0", "2", "GPU-8f1c0b1e-0000-0000-0000-000000000001"),
            default_user_limits=Limits(max_running_jobs=8, max_running_gpus=2),
            default_project_limits=Limits(max_queued_jobs=1000),
            user_limits={"alice": Limits(max_running_gpus=config.UNLIMITED)},
            project_limits={"big one": Limits(max_running_cpus=0)},
            max_running=100,
            on_failure="pause",
        ),
        cpus=14,
        memory_bytes=100 * GIB,
        memory_reserve=Reserve(share_ppm=25_000),
        resources=(Pool("licence", 3), Pool("scratch-bw", 100), Pool("tpu", 3, (0, 1, 5))),
        executor="tmux",
        max_requeues=1,
        durability="strict",
        autostart=False,
        idle_exit_ns=None,
        kill_grace_ns=20 * S,
        prolog="ulimit -c 0",
        epilog="sync",
        other_hosts_gone=("oldbox",),
        gpu=GpuConfig(frozenset({"Xorg"}), frozenset({"gdm"}), 600 << 20),
        gc=RetentionPolicy(30 * 86400 * S, max_size_bytes=10 * GIB),
        export=("PATH", "WANDB_*"),
        defaults=JobDefaults(20 * S, DEFAULTS, toml.write(DEFAULTS).decode()),
    ),
    "preemption": Config(),
}


GONE = {
    "everything": [
        *("learn_run_times", "half_life", "cpu_weight", "reservation_horizon", "reservation_allows_unlimited"),
        *("look_every", "log_level", "keep_session", "gpu.poll", "gc.max_runs"),
    ],
    "preemption": [f"preemption.{key}" for key in ("after", "long", "short", "every")],
}
"""The keys in these files that have no effect any more."""


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_configurations_load_for_ever(name: str) -> None:
    """A configuration that was right once is so in every later version; of a key that went, it is told what to do."""
    assert {path.stem for path in GOLDEN.glob("*.toml")} == set(EXPECTED)
    found = config.parse((GOLDEN / f"{name}.toml").read_bytes())
    assert replace(found, advice=()) == EXPECTED[name]
    assert [text.partition(" ")[0] for text in found.advice] == GONE.get(name, [])


WRONG = texts_of(r"""
resources: 3 | { licence = 3, tpu = "4" } | { a-b = 1, a_b = 1 }
resources.licence: 0 | true | 2.5
resources.Licence: 1
resources.gpus: 1
resources.tpu: { indices = [] } | { indices = [1, 1] } | { indices = [-1] } | { indices = ['a'] } | {}
resources.tpu: { count = 3, indices = [1] }
max_running: 0
executor: "tmx"
durability: "none"
cpus: true
memory: 100 | "8G\n"
memory_reserve: 5 | "5" | "100%" | "-1%" | "5% "
idle_exit: 600
fair_share_by: "group"
on_failure: "stop"
other_hosts_gone: ["a "]
gpu.ignore_processes.names: [" python"]
gpu.ignore_processes.below: 600
gpu.use: ["01"] | [1, '1'] | [-1] | ["all"]
gpu.strategy: "pack"
gc.max_age: 30
quotas.users.alice.max_running_jobs: "many" | -1
quotas.users.alice: 3
quotas.users: 3
export: "PATH" | [1] | ["A B"] | ["A=1"] | [""] | [" A"] | ["A", "A"]
defaults.cpus: -1
defaults.time_limit: "5"
defaults.retry: { on = ["finished"] }
defaults.env: { SPOOL_JOB = "x" }
defaults.command: "x"
defaults.gpus: 1
a: nan
""")


def test_a_setting_that_cannot_be_meant_is_refused_with_its_key_and_line() -> None:
    """The configuration, and the defaults in it, are read as strictly as a job file: one mistake, one problem."""
    for key, line in ((key, line) for key, lines in WRONG for line in lines):
        with pytest.raises(InvalidConfig) as error:
            config.parse(f"\n{line}".encode())
        (problem,) = error.value.problems
        assert key.rpartition(".")[2] in problem.message, line
        assert problem.line == 2, line


def test_what_was_meant_is_told() -> None:
    """Of a key and of a word alike."""
    for line, meant in [
        ('executer = "tmux"', "executor"),
        ('executor = "tmx"', "tmux"),
        ('gpu.strategy = "pack"', "packed"),
        ("quotas.users.alice.max_running_job = 1", "quotas.users.alice.max_running_jobs"),
    ]:
        with pytest.raises(InvalidConfig, match=re.escape(f'did you mean "{meant}"?')):
            config.parse(line.encode())


@pytest.mark.parametrize(
    ("reserve", "total", "kept"),
    [
        (Reserve(), 100 * GIB, 5 * GIB),
        (Reserve(), 2 * GIB, 512 << 20),
        (Reserve(share_ppm=100_000), 100 * GIB, 10 * GIB),
        (Reserve(share_ppm=10_000), 10 * GIB, 512 << 20),
        (Reserve(share_ppm=0), 100 * GIB, 0),
        (Reserve(size_bytes=0), 100 * GIB, 0),
        (Reserve(size_bytes=8 * GIB), 4 * GIB, 8 * GIB),
    ],
)
def test_the_reserve_is_a_share_or_a_size(reserve: Reserve, total: int, kept: int) -> None:
    """5 % unless stated; a share is at least 512 MiB unless it is nothing; a size is just that."""
    assert reserve.bytes_of(total) == kept


_TEXTS = [path.read_bytes() for path in sorted(GOLDEN.glob("e*.toml"))]


@given(st.data())
def test_a_configuration_with_one_byte_changed_is_read_or_refused(data: st.DataObject) -> None:
    """A slip of the finger raises InvalidConfig or nothing, so that the last good one can stay in force."""
    text = _TEXTS[-1]
    at = data.draw(st.integers(0, len(text) - 1))
    with suppress(InvalidConfig):
        config.parse(text[:at] + data.draw(st.binary(max_size=1)) + text[at + 1 :])


def reserved(text: str) -> Reservation:
    """Return the reservation of a file that was written at 1000s."""
    return reservation.parse(text.encode(), name="demo", created_at_ns=1000 * S)


def test_a_reservation_begins_now_unless_it_says_when() -> None:
    """The word `now` means the moment of the file, so that reading it later changes nothing."""
    expected = Reservation("demo", "alice", None, 1000 * S, 4600 * S, gpu_count=2, created_at_ns=1000 * S)
    assert reserved('user = "alice"\ngpus = 2\nduration = "1h"') == expected
    assert reserved('user = "alice"\ngpus = 2\nduration = "1h"\nstart = "now"') == expected
    found = reserved(
        'project = "llm"\ngpus = [2, 0]\ncomment = "demo"\nstart = 1970-01-01T01:00:00Z\nend = "1970-01-01T02:00:00Z"'
    )
    assert found == Reservation(
        "demo", None, "llm", 3600 * S, 7200 * S, gpu_indices=(0, 2), comment="demo", created_at_ns=1000 * S
    )


RESERVED = texts_of(r"""
gpus = 1 & duration = "1h" & user: "a "
gpus = 1 & duration = "1h" & project = "b" & user: "a"
user = "a" & duration = "1h" & gpus: 0 | [] | [-1] | [0, 1, 0] | ["0"]
user = "a" & gpus = 1 & duration: " 1h" | "0s"
user = "a" & gpus = 1 & duration = "1h" & start: "now "
user = "a" & gpus = 1 & end = 2026-01-31T00:00:00Z & duration: "1h"
user = "a" & gpus = 1 & end: 1970-01-01T00:00:01Z | "2h"
user = "a" & gpus = 1 & duration = "1h" & gpu: 1
""")
RESERVED += [
    ("gpus", ['user = "a"\nduration = "1h"']),
    ("user", ['gpus = 1\nduration = "1h"']),
    ("duration", ['user = "a"\ngpus = 1']),
    ("", ["= 1"]),
]


def test_a_reservation_that_cannot_be_meant_is_refused_with_its_key() -> None:
    """As strictly as a job file."""
    for key, text in ((key, text) for key, texts in RESERVED for text in texts):
        with pytest.raises(InvalidReservation) as error:
            reserved(text)
        assert f'"{key}' in error.value.problems[0].message or not key, text


def test_exports_are_read() -> None:
    """Names and patterns stay as they are; without the key they are the usual ones."""
    assert config.parse(b'export = ["FOO", "WANDB_*", "[A-C]?"]').export == ("FOO", "WANDB_*", "[A-C]?")
    assert config.parse(b"export = []").export == ()
    assert "VIRTUAL_ENV" in config.parse(b"").export


@pytest.mark.parametrize(
    ("text", "preemption"),
    [
        ("[preemption]\n", True),
        ('[preemption]\nshort = "0s"\n', False),
        ('[preemption]\nafter = "1h"\nshort = "1h"\n', True),
        ("preemption = false\n", False),
    ],
)
def test_a_table_that_is_a_switch_now_means_what_it_meant(text: str, preemption: bool) -> None:
    """A table whose keys were taken out is no mistake, and what was off stays off."""
    assert config.parse(text.encode()).policy.preemption == preemption


def test_what_is_gone_is_advice_and_no_mistake() -> None:
    """Each key that went, and each table, stays where it is with any value; the advice says what to do."""
    for key in config.GONE:
        for value in ("3", "{ x = [1] }"):
            (advice,) = config.parse(f"{key} = {value}\n".encode()).advice
            assert advice.startswith(f"{key} has no effect: ")
            assert re.search(r"; remove it|remove \[|write |multiply |requeue = false", advice), advice
