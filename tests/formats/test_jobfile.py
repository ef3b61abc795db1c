"""Job files: what each key means, and what is said of each mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.wrong_values import texts_of
from spool.core.errors import InvalidConfig, InvalidJob, InvalidValue
from spool.core.model import (
    FIRST_BYTES,
    ArraySpec,
    ArrayTask,
    Dependencies,
    JobDefaults,
    Request,
    Retry,
    Spec,
    WarningSignal,
)
from spool.formats import config, jobfile, validation, values
from support import zone_file

GOLDEN = Path(__file__).parent / "golden" / "jobs"
S = 1_000_000_000
EXPECTED = {
    "minimal": Spec(command="echo hello"),
    "everything": Spec(
        command="python train.py --lr 0.1",
        shell="/bin/bash",
        workdir="~/projects/train",
        env=(("OMP_NUM_THREADS", "2"), ("EMPTY", "")),
        request=Request(4, 16 << 30, 2, 10 << 30, ("A100",), (("licence", 1), ("tpu", 2))),
        time_limit_ns=36 * 3600 * S,
        signal=WarningSignal("USR1", 60 * S),
        kill_grace_ns=30 * S,
        priority=200,
        depends_on=Dependencies(("prepare", "download"), ("mirror-1",), ("cleanup",), ("canary",)),
        cancel_on_dependency_failure=False,
        start_after_ns=1769846400 * S,
        scheduling_timeout_ns=86400 * S,
        group="night",
        group_limit=2,
        retry=Retry(3, 10 * S, 3.0, 600 * S, frozenset({"failed", "timeout", 75})),
        requeue=False,
        stdout="logs/%n.%r.out",
        stderr="logs/%n.%r.err",
        setup=". venv/bin/activate",
        prolog="module load cuda",
        epilog="rm -rf $TMPDIR",
        executor="tmux",
        keep_session=True,
        project="llm",
        tags=("paper", "ablation"),
        comment="Überprüfung\tnach dem Umzug",
    ),
    "list-command": Spec(
        command=("python", "-c", 'print("a b", "$HOME")', ""),
        depends_on=Dependencies(all=("prepare",)),
        start_delay_ns=5400 * S,
    ),
    "array": Spec(
        command="./step $SPOOL_ARRAY_INDEX",
        array=ArraySpec((0, 2, 4, 6, 8, 20), 4),
        stdout="out.%a",
        depends_on=Dependencies(each="prepare"),
    ),
    "matrix": Spec(
        command="python train.py --lr {lr} --seed {seed}",
        max_running=2,
        matrix=(("lr", ("0.1", "0.001")), ("seed", ("1", "2")), ("flag", ("true",)), ("name", ("a b",))),
    ),
    "rows": Spec(
        command="python train.py --lr {lr} --seed {seed}",
        rows=((("lr", "0.1"), ("seed", "1")), (("lr", "0.001"), ("seed", "7"))),
    ),
    "task": Spec(command="./step $SPOOL_ARRAY_INDEX", task=ArrayTask("sweep", 7, 4)),
    "script": Spec(
        command=("train.sh", "--epochs", "3"), script="#!/bin/sh\nprintf 'lr\\t%s\\n' \"$@\"\n", request=Request(cpus=2)
    ),
    "dotted": Spec(
        command="set -e\nmake\n",
        retry=Retry(max=1),
        env=(("A", "1"), ("B", "2")),
        start_after_ns=1769846400 * S + S // 2,
        request=Request(memory_bytes=3 << 29),
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_job_files_load_for_ever(name: str) -> None:
    """A job file that was right once keeps its meaning in every later version."""
    assert {path.stem for path in GOLDEN.glob("*.toml")} == set(EXPECTED)
    assert jobfile.parse((GOLDEN / f"{name}.toml").read_bytes(), name=name) == EXPECTED[name]


def problems(text: str | bytes, name: str = "train") -> list[str]:
    """Return the messages about a job file that must be wrong."""
    with pytest.raises(InvalidJob) as error:
        jobfile.parse(text if isinstance(text, bytes) else text.encode(), name=name)
    return [problem.message for problem in error.value.problems]


def parsed(text: str, name: str = "train") -> Spec:
    """Return the spec of a command with one more key."""
    return jobfile.parse(f'command = "x"\n{text}\n'.encode(), name=name)


@pytest.mark.parametrize("script", ["echo", "", "#! \\necho", "#!/bin/sh\\r\\necho"])
def test_a_script_that_the_kernel_cannot_execute_is_refused(script: str) -> None:
    """Its first line names what runs it, and has no Windows line ending."""
    (problem,) = problems(f'command = ["a.sh"]\nscript = "{script}"\n')
    assert problem.startswith('"script" on line 2: ')


def test_a_key_in_a_text_is_not_the_key_with_a_mistake() -> None:
    """The line that is named is that of the key, whatever the texts and comments above look like."""
    above = 'command = """\nmemroy = 1\n${#a[@]}"""\n# memroy = 2\nshell = \'/bin/sh\'\n'
    assert re.search(r'"memroy" on line 6, .*"memory"', problems(f'{above}memroy = "4G"\n')[0])


def test_a_key_that_needs_another_is_read_all_the_same() -> None:
    """What is wrong with its value is told beside what it lacks."""
    found = problems('command = "x"\ngpu_memory = "8 GiBs"\n')
    assert len(found) == 2
    assert found[0].startswith('"gpu_memory" on line 2: ')
    assert "is not a size" in found[1]


def test_every_problem_is_told_in_the_order_of_the_lines() -> None:
    """One look at `NAME.toml.error` is enough to mend a file, however much is wrong in it."""
    text = """command = ["a", 3]
gpu = 2
cpus = true
depends_on = { all = ["a", "b!"], any = 3, eny = "x" }
[retry]
on = ["failed", "foo", 300]
bakoff = 2
[env]
A = 1
"""
    found = problems(text)
    assert [message.split(" on line ")[0] for message in found] == [
        '"command[1]"',
        'unknown key "gpu"',
        '"cpus"',
        '"depends_on.all[1]"',
        '"depends_on.any"',
        'unknown key "depends_on.eny"',
        '"retry.on"',
        'unknown key "retry.bakoff"',
        '"env.A"',
    ]


def test_the_error_file_is_plain_text_with_one_problem_a_line() -> None:
    """What lies beside a bad job file can be read with `cat`, whatever the job file holds."""
    with pytest.raises(InvalidJob) as error:
        jobfile.parse(b'gpu = 1\n"a\\u001b[31m" = 2\n', name="train")
    text = jobfile.render_errors("train", error.value.problems)
    assert "3 problems" in text.splitlines()[0]
    assert '- "command": is required' in text
    assert all(line.isprintable() for line in text.splitlines())


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", "command"),
        ('command = " "', "command"),
        ("command = []", "command"),
        ('command = ["", "x"]', "command"),
        (f'command = "{"x" * 131072}"', "command"),
        (f'command = ["echo", "{"x" * 131072}"]', "command"),
        ("command = 3", "command"),
        ('command = ["x"]\nshell = "/usr/bin/fish"\nsetup = "x"', "setup"),
        ('command = "x"\nscript = "#!/bin/sh"', "command"),
    ],
)
def test_a_command_that_no_kernel_runs_is_refused(text: str, key: str) -> None:
    """Empty ones, and single arguments of more than 128 KiB, the text for the shell being one argument too."""
    assert problems(text)[0].startswith(f'"{key}"')


def test_the_longest_argument_that_the_kernel_takes_is_taken() -> None:
    """128 KiB less the NUL at its end."""
    assert len(jobfile.parse(f'command = "{"x" * 131071}"'.encode(), name="a").command) == 131071


REFUSED = texts_of(r"""
shell: "bash" | "/bin/sh\n"
workdir: "proj" | "" | " "
env: { A = 1 } | { "" = "x" } | { "A=B" = "x" } | { "A-B" = "x" } | { SPOOL_JOB = "x" }
env: { CUDA_VISIBLE_DEVICES = "0" } | { SPOOL_RESOURCE_TPU = '1' }
cpus: -1 | 1.0 | 1000001 | "2"
memory: 16 | "16" | "0G" | "Auto" | "auto:" | "auto:8" | "auto:0G" | "auto 8G" | "auto=8G" | " 1G"
gpu_memory: "auto" | "10G"
gpus: -1
gpu_type: "A100"
gpus = 1 & gpu_type: [] | ["A100", "A100"] | ["A100", "auto"] | ["A100", ""] | 100 | " A100"
gpu_min_memory: "40G"
gpus = 1 & gpu_min_memory: "0G" | 40
time_limit: 60 | "0s" | "10:00" | " 1s\n"
signal: "USR1@60s"
time_limit = "1h" & signal: "USR1@2h" | "KILL@1s" | "FOO" | "USR1@60" | " USR1" | "USR1 @60s" | "USR1@ 60s" | "USR1@0s"
kill_grace: "-1s" | "1s "
priority: 256 | -1
depends_on: "train" | ["a/b"] | ["a.toml"] | { each = "a" } | {} | [] | { any = [] } | ["a", "b", "a"] | "" | "a\n"
depends_on: { al = "a" } | "\u0661"
on_dependency_failure: "wiat"
start_after: "tomorrow" | "2026-01-31" | "2026-02-30T00:00:00Z" | 2026-01-31 | 09:00:00 | 60 | true | " 1h"
start_after: 0001-01-01T00:00:00+01:00 | 9999-12-31T23:59:59-23:00 | "2026-01-31T09:00:00Z " | "2026-1-31T09:00:00Z"
start_after: "\u0662026-01-31T09:00:00Z"
group_limit: 1
group: "a\nb" | "a "
array: "9-0" | "0-9:0" | "0-9%0" | "0-9%x" | "a" | "" | "1,,2" | "0-100000" | "0-999999999" | "1,1" | "0-9,4"
array: "0-9:3,6-8" | "01-10" | "0-9%04" | "1 2,3" | " 0-9" | "0-9 %4" | "0 - 9" | "0-9\n" | "+1" | "1_0" | "0x10"
array: "\u0661" | "0-99999,0-99999"
array = "0-9%2" & max_running: 3
array = "0-99" & matrix: { a = [0], array = [1] }
array = "0-9" & task: { array = "a", index = 1 }
matrix: {} | { index = [1] } | { a = [] } | { a = [[1]] } | { a = 1 } | { '0x' = [1] }
rows: [] | [{}] | [{a = 1}, {b = 1}] | [{a = 1}, {a = 1, b = 1}] | [{a = 1}, {a = [1]}] | [{'0x' = 1}]
matrix = { a = [1] } & rows: [{b = 1}]
max_running: 3
retry: "3" | -1 | { max = -1 } | { backoff = 0.5 } | { on = [0] } | { on = [true] } | { on = ["lost"] }
retry: { on = ["time_out"] } | { delay = 10 } | { on = [] } | { on = [1, 1] } | { delay = ' 1s' }
retry: { max = 1, memory_factor = 2 }
memory = "1G" & retry: { memory_factor = 2 } | { max = 1, memory_factor = 0.5 }
requeue: 3
stdout: "a%x" | "a%" | "logs/" | "a%a" | " \n"
executor: "tmx" | "proces"
setup: ["x"]
tags: [1] | ["a", "b", "a"] | [" a"]
project: "a\n"
resources: 2 | { licence = 0 } | { a = 1, licence = '2' } | { Licence = 1 } | { cpus = 1 }
task: { array = 'a' } | { array = 'a', index = -1 }
""")
REFUSED += [
    ("env", [f'env = {{ A = "{"x" * 131070}" }}']),
    ("gpu_type", [f"gpus = 1\ngpu_type = {[f'G{n}' for n in range(17)]}"]),
    ("matrix", [f"matrix = {{ a = {[*range(1000)]}, b = {[*range(101)]} }}"]),
    ("array", [f'array = "0-999"\nmatrix = {{ a = {[*range(101)]} }}']),
]


@pytest.mark.parametrize(("key", "texts"), REFUSED)
def test_a_value_that_cannot_be_meant_is_refused_with_its_key_and_line(key: str, texts: list[str]) -> None:
    """Types are strict, ranges are checked, keys that need each other are asked for; one mistake gives one problem."""
    for text in texts:
        with pytest.raises(InvalidJob) as error:
            parsed(text)
        (problem,) = error.value.problems
        assert f'"{key}' in problem.message, text
        assert problem.line is None or text.split("\n")[problem.line - 2].startswith(key), text


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("CPUs = 1", "cpus"),
        ("Time-Limit = 1", "time_limit"),
        ("time = 1", "time_limit"),
        ("start = 1", "start_after"),
        ("gpu = 1", "gpus"),
        ('depends_on = { al = "a" }', "depends_on.all"),
        ('on_dependency_failure = "wiat"', "wait"),
        ('retry = { on = ["time_out"] }', "timeout"),
        ('executor = "tmx"', "tmux"),
    ],
)
def test_what_was_meant_is_told(text: str, meant: str) -> None:
    """Of a key and of a word alike, with the line: the message a user sees most often."""
    (found,) = problems(f'command = "x"\n\n{text}')
    assert "on line 3" in found
    assert found.endswith(f'did you mean "{meant}"?')


def test_overlapping_ranges_end_with_the_first_index_that_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte of them took minutes: no more indices are made than a file may make tasks."""
    made: list[range] = []

    def counted(*bounds: int) -> range:
        made.append(range(*bounds))
        return made[-1]

    monkeypatch.setattr(values, "range", counted, raising=False)
    assert " 1 twice" in problems(f'command = "x"\narray = "{"1-50000," * 900}0"')[0]
    assert sum(map(len, made)) <= values.MAX_TASKS


def test_a_hundred_mistakes_are_told_and_the_others_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was meant, and on which line it stands, is found for those that are told alone."""
    guessed: list[str] = []
    monkeypatch.setattr(validation, "closest", lambda word, known: guessed.append(word))
    text = 'command = "x"\n' + "".join(f"k{at:x}=1\n" for at in range(12_000))
    found = problems(text)
    assert '"k0" on line 2' in found[0]
    assert '"k63" on line 101' in found[99]
    assert found[100:] == ["and 11,900 more"]
    assert guessed == [f"k{at:x}" for at in range(100)]
    with pytest.raises(InvalidJob, match=r"\(and 11,999 more\)$") as error:
        jobfile.parse(text.encode(), name="train")
    head = jobfile.render_errors("train", error.value.problems).split("\n")[0]
    assert "12,000 problems" in head


def test_mistakes_within_tables_are_counted_alike() -> None:
    """Each table of a list that does not fit is one more, once a hundred mistakes are told."""
    with pytest.raises(InvalidConfig) as error:
        config.parse("".join(f"[quotas.users.u{at}]\nx = 1\n" for at in range(700)).encode())
    assert error.value.problems[100].message == "and 600 more"


def test_a_name_too_long_for_its_tasks_is_refused() -> None:
    """`NAME_INDEX` must be a job's name too."""
    name = "a" * 96
    assert jobfile.parse(b'command = "x"\narray = "0-999"', name=name).array is not None
    assert "longer than 100" in problems('command = "x"\narray = "0-1000"', name)[0]
    assert "longer than 100" in problems('command = "x"\nmatrix = { a = [1, 2], b = [1, 2] }', "a" * 99)[0]


HOUR = 'time_limit = "1h"\n'


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ('array = "0-99%4"', "array", ArraySpec(tuple(range(100)), 4)),
        ('array = "0-99:2"', "array", ArraySpec(tuple(range(0, 100, 2)), None)),
        ('array = "7-9, 1, 12"', "array", ArraySpec((1, 7, 8, 9, 12), None)),
        ('array = "5"', "array", ArraySpec((5,), None)),
        ('array = "0-10:5%1"', "array", ArraySpec((0, 5, 10), 1)),
        ('array = "0-99999"', "array", ArraySpec(tuple(range(100_000)), None)),
        (HOUR + 'signal = "USR1@60s"', "signal", WarningSignal("USR1", 60 * S)),
        (HOUR + 'signal = "SIGTERM@5m"', "signal", WarningSignal("TERM", 300 * S)),
        (HOUR + 'signal = "int"', "signal", WarningSignal("INT", 60 * S)),
        ('scheduling_timeout = "0s"', "scheduling_timeout_ns", None),
        ('gpus = 1\ngpu_type = "auto"', "request", Request(gpus=1)),
        ('gpus = 1\ngpu_type = ["auto"]', "request", Request(gpus=1)),
        (
            'gpus = 2\ngpu_type = ["A100", "H100"]\ngpu_min_memory = "40G"',
            "request",
            Request(gpus=2, gpu_types=("A100", "H100"), gpu_min_memory_bytes=40 << 30),
        ),
        ('memory = "auto"', "request", Request(memory_bytes=FIRST_BYTES, memory_auto=True)),
        ('memory = "auto:8G"', "request", Request(memory_bytes=8 << 30, memory_auto=True)),
        ('gpus = 1\ngpu_memory = "auto"', "request", Request(gpus=1, gpu_memory_auto=True)),
        (
            'gpus = 1\ngpu_memory = "auto:8G"',
            "request",
            Request(gpus=1, gpu_memory_bytes=8 << 30, gpu_memory_auto=True),
        ),
        (
            'memory = "1G"\nretry = { max = 2, memory_factor = 1.5 }',
            "retry",
            Retry(2, memory_factor=1.5, on=frozenset({"failed", "out_of_memory"})),
        ),
    ],
)
def test_a_value_has_its_meaning(text: str, field: str, value: object) -> None:
    """An array is ascending, a signal comes 60 seconds before, and a size to be worked out may have a first guess."""
    assert getattr(parsed(text), field) == value


@pytest.mark.parametrize(
    "value", ["2026-01-31T03:00:00", '"2026-01-31 03:00:00"', "2026-01-31T09:00:00+01:00", '"2026-01-31t08:00:00z"']
)
def test_a_moment_without_an_offset_is_in_the_machines_zone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    """Whatever TZ says; with an offset it is the same moment everywhere, in quotes or not."""
    monkeypatch.setattr(values, "MACHINE_ZONE", str(tmp_path / "localtime"))
    (tmp_path / "localtime").write_bytes(zone_file("EST5EDT,M3.2.0,M11.1.0"))
    assert parsed(f"start_after = {value}").start_after_ns == 1769846400 * S


def test_defaults_are_shared_between_jobs() -> None:
    """A hundred thousand jobs that ask for the same hold one request, one retry and one workdir between them."""
    text = 'cpus = 2\nmemory = "4G"\nworkdir = "/w"\nretry = { max = 2 }'
    first, second = parsed(text), parsed(text)
    assert first.request is second.request
    assert first.retry is second.retry
    assert first.workdir is second.workdir
    assert parsed("").request is parsed("").request


def test_the_default_kill_grace_is_the_configurations() -> None:
    """Only a job that says nothing takes it; one that states the usual value keeps that."""
    assert jobfile.parse(b'command = "x"', name="a", defaults=JobDefaults(7)).kill_grace_ns == 7
    text = b'command = "x"\nkill_grace = "10s"'
    assert jobfile.parse(text, name="a", defaults=JobDefaults(7)).kill_grace_ns == 10 * S


def test_a_dumped_file_parses() -> None:
    """What `spool submit` writes is an ordinary job file; what is not UTF-8 is refused with a reason."""
    with pytest.raises(InvalidValue, match="UTF-8"):
        jobfile.dump({"command": "x\udcff"})
    keys = {"command": ["a", "b c"], "env": {"A": "1"}, "cpus": 2, "retry": {"max": 1}}
    assert jobfile.parse(jobfile.dump(keys), name="a") == Spec(
        command=("a", "b c"), env=(("A", "1"),), request=Request(cpus=2), retry=Retry(max=1)
    )


def reads_or_refuses(text: bytes) -> bool:
    """Return whether *text* is a job file, or is refused with problems that can be told."""
    try:
        jobfile.parse(text, name="train")
    except InvalidJob as error:
        return bool(jobfile.render_errors("train", error.problems)) and bool(error.problems)
    return True


_FILES = [path.read_bytes() for path in sorted(GOLDEN.glob("*.toml"))]


@given(st.sampled_from(_FILES), st.data())
def test_a_file_with_one_byte_changed_or_cut_off_is_read_or_refused(text: bytes, data: st.DataObject) -> None:
    """No mutation of a valid file raises anything but InvalidJob, and each problem says something; nor does half."""
    at = data.draw(st.integers(0, len(text) - 1))
    byte = data.draw(st.binary(max_size=1) | st.sampled_from([bytes([char]) for char in b'"[]{}=.,-09%#\n']))
    cut = data.draw(st.booleans())
    assert reads_or_refuses(text[:at] + byte + text[at + cut :])
    assert reads_or_refuses(text[:at])


_ANY = st.recursive(
    st.text(st.characters(codec="utf-8"), max_size=8)
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["all", "max", "on", "to", "a"]), inner, max_size=3)
    ),
    max_leaves=4,
)
_KEYS = [key for key in Spec.__struct_fields__ if key not in ("request", "time_limit_ns")] + [
    "cpus",
    "gpus",
    "memory",
    "time_limit",
]


@given(st.dictionaries(st.sampled_from(_KEYS), _ANY, max_size=4))
def test_any_value_for_any_key_is_read_or_refused(keys: dict[str, object]) -> None:
    """Types are checked all the way down: no value makes the reader fail."""
    assert reads_or_refuses(jobfile.dump({"command": "x"} | keys))


def defaults(text: str) -> JobDefaults:
    """Return the defaults that a configuration with *text* in `[defaults]` gives."""
    return config.parse(f"[defaults]\n{text}".encode()).defaults


def test_defaults_fill_what_a_file_leaves_open() -> None:
    """Each key that the file does not state, and of `env` each variable; what it states is its own, whole."""
    given = defaults(
        'cpus = 3\nmemory = "2G"\ntime_limit = "1h"\nretry = { max = 4, delay = "5s" }\nenv = { A = "1", B = "2" }\n'
    )
    bare = jobfile.parse(b'command = "x"', name="a", defaults=given)
    assert (bare.request, bare.time_limit_ns) == (Request(cpus=3, memory_bytes=2 << 30), 3600 * S)
    assert (bare.retry.max, bare.retry.delay_ns) == (4, 5 * S)
    assert dict(bare.env) == {"A": "1", "B": "2"}
    own = jobfile.parse(
        b'command = "x"\ncpus = 1\ntime_limit = "1s"\nretry = { max = 1 }\nenv = { B = "own" }',
        name="a",
        defaults=given,
    )
    assert (own.request.cpus, own.time_limit_ns, own.retry.max, own.retry.delay_ns) == (1, S, 1, 0)
    assert dict(own.env) == {"A": "1", "B": "own"}


def test_a_file_is_judged_with_the_defaults() -> None:
    """A warning needs a limit, which may be a default; one before the run begins is a mistake all the same."""
    text = b'command = "x"\nsignal = "USR1@30s"'
    with pytest.raises(InvalidJob, match="time_limit"):
        jobfile.parse(text, name="a")
    assert jobfile.parse(text, name="a", defaults=defaults('time_limit = "1m"')).signal is not None
    with pytest.raises(InvalidJob, match='"signal" on line 2'):
        jobfile.parse(text, name="a", defaults=defaults('time_limit = "10s"'))
    with pytest.raises(InvalidJob, match='"env"'):  # and a mistake of the file's own is told as ever
        jobfile.parse(b'command = "x"\nenv = 3', name="a", defaults=defaults('env = { A = "1" }'))


def test_what_comes_from_the_defaults_can_be_told() -> None:
    """As TOML; nothing of what the file says, and nothing of a file that cannot be read."""
    given = defaults('cpus = 3\n[defaults.env]\nA = "1"\nB = "2"')
    assert jobfile.from_defaults(given, b'command = "x"\nenv.B = "3"') == 'cpus = 3\n\n[env]\nA = "1"\n'
    assert jobfile.from_defaults(given, b'cpus = 1\nenv = { A = "", B = "" }') == ""
    assert jobfile.from_defaults(given, b"?") == ""


def test_defaults_of_a_run_are_read_again() -> None:
    """What the metadir has is what the configuration had; a damaged one counts as none."""
    given = defaults('time_limit = "1m"\nretry = { max = 2, on = ["failed"] }')
    spec = jobfile.parse(b'command = "x"', name="a", defaults=given)
    again = jobfile.recorded_defaults(spec.defaults_text.encode(), given.kill_grace_ns)
    assert jobfile.parse(b'command = "x"', name="a", defaults=again) == spec
    assert jobfile.recorded_defaults(b"\xff = ", 7) == JobDefaults(7)
    assert jobfile.recorded_defaults(None, 7) == JobDefaults(7)
