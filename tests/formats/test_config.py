"""The configuration and reservations: every key, and what is said of each mistake."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spool.core.errors import InvalidConfig, InvalidReservation
from spool.core.events import NotifyRule
from spool.core.model import JobDefaults, Limits, Policy, Pool, Reservation
from spool.formats import config, reservation, toml
from spool.formats.config import Config, GcConfig, GpuConfig, Reserve
from spool.formats.slurm import SlurmConfig

GOLDEN = Path(__file__).parent / "golden" / "configs"
S = 1_000_000_000
GIB = 1 << 30
DEFAULTS = {
    "cpus": 2,
    "time_limit": "12h",
    "retry": {"max": 1},
    "notify": "team",
    "env": {"PATH": "/opt/bin:/usr/bin:/bin"},
}
EXPECTED = {
    "empty": Config(),
    "everything": Config(
        policy=Policy(
            order="arrival",
            learn_run_times=False,
            fair_share=True,
            fair_share_by="project",
            half_life_ns=14 * 86400 * S,
            cpu_weight=0.0,
            disk_floor_bytes=5 * GIB,
            gpu_strategy="spread",
            gpu_use=("0", "2", "GPU-8f1c0b1e-0000-0000-0000-000000000001"),
            reservation_horizon_ns=86400 * S,
            reservation_allows_unlimited=True,
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
        keep_session=True,
        durability="strict",
        autostart=False,
        idle_exit_ns=None,
        look_every_ns=10 * S,
        kill_grace_ns=20 * S,
        max_requeues=1,
        prolog="ulimit -c 0",
        epilog="sync",
        notifier='mail -s "$2" "$1"',
        contacts={
            "alice": ("mailto://alice:secret@mail.example.org",),
            "team": ("https://hooks.example.org/team", "alice"),
        },
        notify=(
            NotifyRule(to=("team",)),
            NotifyRule(
                to=("ops@example.org",),
                on=("failed", "dispatcher_stopped", "gpu_free"),
                users=("bob",),
                projects=("vision", "nlp-*"),
                names=("train-*",),
                log_lines=20,
            ),
        ),
        metrics="~/metrics/spool.prom",
        log_level="debug",
        other_hosts_gone=("oldbox",),
        gpu=GpuConfig(2 * S, frozenset({"Xorg"}), frozenset({"gdm"}), 600 << 20),
        gc=GcConfig(30 * 86400 * S, 5, 10 * GIB),
        export=("PATH", "WANDB_*"),
        defaults=JobDefaults(20 * S, DEFAULTS, toml.write(DEFAULTS).decode()),
    ),
    "preemption": Config(
        policy=Policy(
            preempt_after_ns=1200 * S,
            preempt_long_ns=12 * 3600 * S,
            preempt_short_ns=1800 * S,
            preempt_every_ns=3 * 3600 * S,
        ),
        slurm=SlurmConfig(qos="normal", preemptible_qos="scavenger"),
    ),
    "slurm": Config(
        executor="slurm",
        slurm=SlurmConfig(
            partition="gpu",
            account="vision",
            qos="long",
            max_in_flight=50,
            poll_ns=5 * S,
            submit_per_second=2.5,
            gpus={"A100": "gpu:a100", "H100": "gpu:h100"},
            gpu_memory="shard",
            options=("--constraint=ib", "--mail-type=FAIL"),
        ),
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_configurations_load_for_ever(name: str) -> None:
    """A configuration that was right once keeps its meaning in every later version."""
    assert {path.stem for path in GOLDEN.glob("*.toml")} == set(EXPECTED)
    assert config.parse((GOLDEN / f"{name}.toml").read_bytes()) == EXPECTED[name]


WRONG = [
    ("resources = 3", '"resources" on line 1: must be a table, not 3'),
    ("resources.licence = 0", '"resources.licence" on line 1: must be a whole number >= 1, not 0'),
    ("resources.licence = true", "must be a whole number or a table, not true"),
    ("resources.licence = 2.5", "must be a whole number or a table, not 2.5"),
    ('resources = { licence = 3, tpu = "4" }', '"resources.tpu" on line 1: must be a whole number or a table, not "4"'),
    ("resources.Licence = 1", '"Licence" cannot name a resource: a name is 1-100 lower-case letters, digits, - and _'),
    ("resources.gpus = 1", 'use the key "gpus"'),
    (
        "resources = { a-b = 1, a_b = 1 }",
        '"resources.a_b" on line 1: has the same variable as "a-b", SPOOL_RESOURCE_A_B',
    ),
    ("resources.tpu = { indices = [] }", '"resources.tpu.indices" on line 1: is an empty list'),
    ("resources.tpu = { indices = [1, 1] }", "names 1 twice"),
    ("resources.tpu = { indices = [-1] }", ">= 0"),
    ("resources.tpu = { indices = ['a'] }", '"resources.tpu.indices[0]" on line 1: must be a whole number, not "a"'),
    (f"resources.tpu = {{ indices = {list(range(1001))} }}", "has 1,001 entries"),
    ("resources.tpu = { count = 3, indices = [1] }", 'unknown key "resources.tpu.count"'),
    ("resources.tpu = {}", '"resources.tpu.indices" on line 1: is required'),
    ("max_running = 0", ">= 1"),
    ('executer = "tmux"', 'unknown key "executer" on line 1, did you mean "executor"?'),
    ('executor = "tmx"', 'did you mean "tmux"?'),
    ("slurm.max_in_flight = 0", '"slurm.max_in_flight" on line 1: must be a whole number >= 1, not 0'),
    ('slurm.poll = "1ms"', "the minimum is 100ms"),
    ("slurm.submit_per_second = 0", ">= 0.1"),
    ('slurm.partition = "a b"', "'a b' is no name in Slurm"),
    ('slurm.account = "--uid=0"', "'--uid=0' is no name in Slurm"),
    ('slurm.gpus = { A100 = "gpu a100" }', "'gpu a100' is no name in Slurm"),
    ('slurm.gpu_memory = "share"', 'did you mean "shard"?'),
    ('slurm.options = ["--time=1"]', "'--time=1' sets what spool sets itself"),
    ("slurm.max_in_flght = 1", 'did you mean "slurm.max_in_flight"?'),
    ('durability = "none"', "one of grouped, strict"),
    ("cpus = true", "must be a whole number, not true"),
    ("memory = 100", "has no unit"),
    ("memory_reserve = 5", "must be a text in quotes"),
    ('memory_reserve = "5"', "has no unit"),
    ('memory_reserve = "100%"', "would leave nothing"),
    ('memory_reserve = "-1%"', "not a percentage"),
    ("idle_exit = 600", "has no unit"),
    ('look_every = "1ms"', "the minimum is 100ms"),
    ('half_life = "0s"', "fair_share = false"),
    ("cpu_weight = -1", ">= 0"),
    ('fair_share_by = "group"', "one of user, project"),
    ('on_failure = "stop"', "one of continue, pause"),
    ('memory_reserve = "5% "', 'has white space around it; write "5%"'),
    ('memory = "8G\\n"', 'has white space around it; write "8G"'),
    ('other_hosts_gone = ["a "]', 'has white space around it; write "a"'),
    ('gpu.ignore_processes.names = [" python"]', 'write "python"'),
    ('gpu.use = ["01"]', "neither an index nor the UUID"),
    ("gpu.use = [1, '1']", 'names "1" twice'),
    ('contacts = { me = "x " }', 'has white space around it; write "x"'),
    ('notify = [{ to = ["me", "me"] }]', 'names "me" twice'),
    ('metrics = "/tmp/spool.prom "', "has white space around it"),
    (f"other_hosts_gone = {[str(at) for at in range(1001)]}", "has 1,001 entries"),
    (f"contacts = {{ {', '.join(f'a{at} = {chr(34)}x{chr(34)}' for at in range(1001))} }}", "has 1,001 entries"),
    ("gpu.use = [-1]", "neither an index nor the UUID"),
    ('gpu.use = ["all"]', "neither an index nor the UUID"),
    ('gpu.strategy = "pack"', 'did you mean "packed"?'),
    ('gpu.poll = "0s"', "the minimum is 100ms"),
    ("gpu.ignore_processes.below = 600", "has no unit"),
    ("gc.max_runs = 0", ">= 1"),
    ("gc.max_age = 30", "has no unit"),
    ('quotas.users.alice.max_running_jobs = "many"', 'neither a number nor "unlimited"'),
    ("quotas.users.alice.max_running_jobs = -1", ">= 0"),
    ("quotas.users.alice.max_running_job = 1", 'did you mean "quotas.users.alice.max_running_jobs"?'),
    ("quotas.users.alice = 3", "must be a table, not 3"),
    ("quotas.users = 3", "must be a table, not 3"),
    ('contacts = { "json://x" = "y" }', "an address itself"),
    ("contacts = { me = [] }", "needs an address"),
    ("contacts = { me = 1 }", "must be a text in quotes or a list, not 1"),
    ("notify = 'me'", "must be a list"),
    ("notify = ['me']", "must be a table"),
    ('notify = [{ on = "failed" }]', 'has no recipients; set "to"'),
    ('notify = [{ to = "me", log_lines = -1 }]', ">= 0"),
    ('notify = [{ to = "me", on = "fialed" }]', 'did you mean "failed"?'),
    ('notify = [{ to = "me", on = "polling" }]', "is unknown"),
    ('notify = [{ to = "me", user = "bob" }]', 'did you mean "notify[0].users"?'),
    ('metrics = "spool.prom"', "must be an absolute path"),
    ('metrics = "/tmp/spool.txt"', "must end with .prom"),
    ("a = nan", "not a finite number"),
]


@pytest.mark.parametrize(("line", "why"), WRONG, ids=[line[:40] for line, _ in WRONG])
def test_a_setting_that_cannot_be_meant_is_refused_with_the_reason(line: str, why: str) -> None:
    """The configuration is read as strictly as a job file: one mistake, one problem, with its line."""
    with pytest.raises(InvalidConfig) as error:
        config.parse(line.encode())
    (problem,) = error.value.problems
    assert why in problem.message
    assert problem.line == 1


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


@settings(max_examples=150)
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


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('user = "a"\nproject = "b"\ngpus = 1\nduration = "1h"', "either a"),
        ('gpus = 1\nduration = "1h"', "either a"),
        ('user = "a"\nduration = "1h"', '"gpus": is required'),
        ('user = "a"\ngpus = 0\nduration = "1h"', "not a number of GPUs"),
        ('user = "a"\ngpus = []\nduration = "1h"', "empty list"),
        ('user = "a"\ngpus = [-1]\nduration = "1h"', "not a GPU index"),
        ('user = "a"\ngpus = [0, 1, 0]\nduration = "1h"', "names 0 twice"),
        ('user = "a "\ngpus = 1\nduration = "1h"', 'has white space around it; write "a"'),
        ('user = "a"\ngpus = 1\nduration = " 1h"', 'has white space around it; write "1h"'),
        ('user = "a"\ngpus = 1\nduration = "1h"\nstart = "now "', "white space around it"),
        (f'user = "a"\ngpus = {[*range(1001)]}\nduration = "1h"', "has 1,001 entries"),
        ('user = "a"\ngpus = ["0"]\nduration = "1h"', "must be a whole number"),
        ('user = "a"\ngpus = 1', "either a"),
        ('user = "a"\ngpus = 1\nduration = "1h"\nend = 2026-01-31T00:00:00Z', "either a"),
        ('user = "a"\ngpus = 1\nduration = "0s"', "more than 0"),
        ('user = "a"\ngpus = 1\nend = 1970-01-01T00:00:01Z', "not after the start"),
        ('user = "a"\ngpus = 1\nend = "2h"', "is not a date and time"),
        ('user = "a"\ngpu = 1\ngpus = 1\nduration = "1h"', 'did you mean "gpus"?'),
        ("= 1", "not valid TOML"),
    ],
)
def test_a_reservation_that_cannot_be_meant_is_refused(text: str, why: str) -> None:
    """As strictly as a job file."""
    with pytest.raises(InvalidReservation) as error:
        reserved(text)
    assert why in error.value.problems[0].message


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('export = "PATH"', "must be a list"),
        ("export = [1]", "must be a text in quotes"),
        ('export = ["A B"]', "matches no variable; write a name or a pattern"),
        ('export = ["A=1"]', "matches no variable"),
        ('export = [""]', "matches no variable"),
        ('export = [" A"]', "white space"),
        ('export = ["A", "A"]', "twice"),
    ],
)
def test_what_is_exported_is_names_and_patterns(line: str, why: str) -> None:
    """What matches no variable is a mistake."""
    with pytest.raises(InvalidConfig, match=why):
        config.parse(line.encode())


def test_exports_are_read() -> None:
    """Names and patterns stay as they are; without the key they are the usual ones."""
    assert config.parse(b'export = ["FOO", "WANDB_*", "[A-C]?"]').export == ("FOO", "WANDB_*", "[A-C]?")
    assert config.parse(b"export = []").export == ()
    assert "VIRTUAL_ENV" in config.parse(b"").export


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("cpus = -1", r'"defaults.cpus" on line 2'),
        ('time_limit = "5"', r'"defaults.time_limit" on line 2'),
        ('retry = { on = ["finished"] }', r'"defaults.retry.on" on line 2'),
        ('notify = { on = ["gpu_free"] }', r'"defaults.notify'),
        (
            'notify = { to = "x@y.example", on = ["gpu_free"] }',
            r'"defaults.notify.on" on line 2: "gpu_free" is unknown',
        ),
        ('env = { SPOOL_JOB = "x" }', r'"defaults.env.SPOOL_JOB" on line 2: SPOOL_JOB is set by spool itself'),
        ('command = "x"', r'unknown key "defaults.command" on line 2'),
        ("gpus = 1", r'unknown key "defaults.gpus" on line 2'),
    ],
)
def test_defaults_are_judged_like_a_job_file(lines: str, why: str) -> None:
    """What no job file may say is no default, and the line of the configuration is told."""
    with pytest.raises(InvalidConfig, match=why):
        config.parse(f"[defaults]\n{lines}\n".encode())
