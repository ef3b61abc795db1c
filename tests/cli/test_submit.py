"""What `spool submit` writes, refuses and prints."""

from __future__ import annotations

import datetime
import io
import os
import shutil
import stat
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from calling import Command, Said, put_job, spawned
from spool import Client
from spool.cli import fastsubmit, joboptions, main, submission, submit
from spool.cli.fastsubmit import UnclearError
from spool.cli.joboptions import OPTIONS
from spool.client.draft import Draft, Exports, exports, fresh_name, may_be_secret, stem_of
from spool.core import layout
from spool.core.errors import InvalidValue, UsageError
from spool.formats import jobfile
from spool.formats.schema import schema
from spool.machine.host import expanded, why_not_expanded
from spool.machine.identity import boot_id
from spool.store.glance import machine_line


def queued(root: Path, name: str) -> dict[str, object]:
    """Return the keys of a job file in `queued/`, but for what was taken of our environment."""
    keys = tomllib.loads((root / "queued" / f"{name}.toml").read_text())
    keys["env"] = {key: value for key, value in keys.pop("env", {}).items() if key not in exports(str(root)).taken}
    return {key: value for key, value in keys.items() if value != {}}


def env_of(root: Path, name: str) -> dict[str, str]:
    """Return the whole `env` of a job file in `queued/`."""
    found: dict[str, str] = tomllib.loads((root / "queued" / f"{name}.toml").read_text()).get("env", {})
    return found


@pytest.fixture(autouse=True, scope="module")
def _as_after_login() -> Iterator[None]:
    """Submit from a shell that is not niced, whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpriority", lambda _which, _who: 0)
        yield


def test_a_command_after_two_dashes_becomes_a_list_and_the_name_is_printed(spool: Command, spool_root: Path) -> None:
    """`submit -- CMD` writes the words as they are, and the directory it was called in."""
    said = spool("submit", "--name", "a", "--", "echo", "two words", "$HOME")
    assert (said.code, said.out) == (0, "a\n")
    assert queued(spool_root, "a") == {"command": ["echo", "two words", "$HOME"], "workdir": str(spool_root.parent)}
    spool("submit", "--name", "b", "--", "sort x | uniq")  # one word that only a shell understands
    assert queued(spool_root, "b")["command"] == "sort x | uniq"


def test_a_job_without_a_name_is_called_after_what_it_runs(spool: Command) -> None:
    """The name is the program's, or the script's of an interpreter, and a suffix that makes it new."""
    names = [
        spool("submit", *words).out.strip()
        for words in (("--", "sleep", "1"), ("--", "python3", "dir/train.py"), ("-c", "FOO=1 ./run-it.sh | cat"))
    ]
    assert [name.rpartition("-")[0] for name in names] == ["sleep", "train", "run-it"]
    assert all(layout.valid_name(name) for name in names)


@given(st.lists(st.text(min_size=1), min_size=1) | st.text())
def test_every_command_gives_a_valid_name(command: list[str] | str) -> None:
    """Whatever runs, the name made of it is one that a job can have."""
    assert layout.valid_name(fresh_name("/nonexistent", stem_of(command)))


def test_a_fresh_name_is_never_one_in_use(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is taken is not given again: the next one has a longer suffix."""
    monkeypatch.setattr(os, "urandom", bytes)
    names = []
    for _ in range(3):
        names.append(fresh_name(str(spool_root), "a"))
        put_job(spool_root, names[-1], place="done")
    assert names == ["a-2222", "a-22222", "a-222222"]


def test_every_key_can_be_set_and_what_can_be_set_is_a_key() -> None:
    """The table of options and the keys of the job file are the same, but for what is no option."""
    made = schema("job")
    others = {"task", "terminal", "retry", "notify", "container"}
    keys = {key for key in made["properties"] if key not in others}
    for table in {"retry", "container", "notify"} & made["properties"].keys():
        keys |= {f"{table}.{key}" for key in made["$defs"][f"{table.title()}Table"]["properties"]}
    assert {option.key for option in OPTIONS} == keys


def test_every_option_reaches_the_file(spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of every kind come out as the keys that a person would have written; `--env NAME` takes our value."""
    monkeypatch.setenv("COLOUR", "blue")
    said = spool(
        "submit", "--name", "a", "-g", 2, "--gpu-memory", "8G", "--cpus=4", "-m", "16G", "-t", "2h",
        "-p50", "-e", "A=1", "--env", "B=x=y", "-d", "any:x,y", "-d", "z", "--env", "COLOUR",
        "--retry-max", 3, "--set", "retry.on=failed,7",
        "--set", "resources=licence=1,scratch-bw=30", "--set", "resources=tpu",
        "--no-requeue", "--tag", "t,u", "--set", "retry.backoff=1.5",
        "--set", "setup=X=1",
        "--", "true",
    )  # fmt: skip
    assert said.code == 0, said.err
    keys = queued(spool_root, "a")
    del keys["workdir"]
    assert keys == {
        "command": ["true"], "gpus": 2, "gpu_memory": "8G", "cpus": 4, "memory": "16G", "time_limit": "2h",
        "priority": 50, "env": {"A": "1", "B": "x=y", "COLOUR": "blue"}, "requeue": False, "tags": ["t", "u"],
        "depends_on": {"any": ["x", "y"], "all": ["z"]}, "retry": {"max": 3, "on": ["failed", 7], "backoff": 1.5},
        "resources": {"licence": 1, "scratch-bw": 30, "tpu": 1},
        "setup": "X=1",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["", "-a", "a/b", "x" * 101, ".a", "a b", "a.toml"])
def test_a_name_that_no_job_can_have_is_refused(spool: Command, spool_root: Path, name: str) -> None:
    """What is not a valid job name is refused as a usage error."""
    assert spool("submit", f"--name={name}", "--", "true").code == 2
    assert os.listdir(spool_root / "queued") == []


@pytest.mark.parametrize("place", ["queued", "held"])
def test_a_name_that_waits_is_refused_and_replaced_when_asked(spool: Command, spool_root: Path, place: str) -> None:
    """A second job of a name that waits or is held is refused; --replace takes its place; an ended one is not in it."""
    put_job(spool_root, "a", place="done")
    old = put_job(spool_root, "a", place=place)
    said = spool("submit", "--name", "a", "--", "new")
    assert said.code == 1
    assert "--replace" in said.err
    assert old.read_text() == 'command = "true"\n'
    assert spool("submit", "--name", "a", "--replace", "--", "new").code == 0
    assert queued(spool_root, "a")["command"] == ["new"]
    assert not (spool_root / "held" / "a.toml").exists()


def test_a_job_file_is_copied_byte_for_byte(spool: Command, spool_root: Path, tmp_path: Path) -> None:
    """`submit -f` keeps comments, order and odd spacing, and takes the name of the file."""
    texts = {"one": b'# first\ncommand   = "true"  # now\n', "two": b'cpus=2\r\ncommand="true"\r\n'}
    for name, text in texts.items():
        (tmp_path / f"{name}.toml").write_bytes(text)
    said = spool("submit", *(word for name in texts for word in ("-f", tmp_path / f"{name}.toml")))
    assert said.out == "one\ntwo\n"
    assert {name: (spool_root / "queued" / f"{name}.toml").read_bytes() for name in texts} == texts


def test_of_several_job_files_none_is_taken_if_one_is_bad(spool: Command, spool_root: Path, tmp_path: Path) -> None:
    """All files are looked at before the first is put into the queue."""
    (tmp_path / "good.toml").write_text('command = "true"\n')
    (tmp_path / "bad.toml").write_text('comand = "true"\n')
    said = spool("submit", "-f", tmp_path / "good.toml", "-f", tmp_path / "bad.toml")
    assert (said.code, os.listdir(spool_root / "queued")) == (4, [])


def test_a_script_brings_its_own_options_and_the_command_line_wins(
    spool: Command, spool_root: Path, tmp_path: Path
) -> None:
    """`#SPOOL` lines count as options, and those of the command line stand above them."""
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\n#SPOOL --gpus 1 --time-limit 1h\n#SPOOL --tag night\necho hi\n")
    said = spool("submit", "-t", "2h", script, "--epochs", "3")
    name = said.out.strip()
    assert name.startswith("train-")
    keys = queued(spool_root, name)
    assert (keys["command"], keys["script"]) == ([str(script), "--epochs", "3"], script.read_text())
    assert (keys["gpus"], keys["time_limit"], keys["tags"]) == (1, "2h", ["night"])


@pytest.fixture
def piped(spool: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """Give what submits a text on stdin, with these words."""

    def submit(text: bytes, *words: str) -> Said:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
        return spool("submit", *words)

    return submit


def test_a_script_on_stdin_becomes_the_command(piped: Callable[..., Said], spool_root: Path) -> None:
    """`submit -` takes the whole text as the command for the shell, its `#SPOOL` lines as options."""
    text = b"#SPOOL --cpus 2 --name piped\necho one\necho two\n"
    assert piped(text, "-").out == "piped\n"
    assert queued(spool_root, "piped")["command"] == text.decode()
    assert queued(spool_root, "piped")["cpus"] == 2


@pytest.mark.parametrize(
    ("line", "more", "shell"),
    [
        ("/bin/bash", (), "/bin/bash"),
        (" /bin/bash ", (), "/bin/bash"),
        ("/usr/bin/env bash", (), shutil.which("bash")),
        ("/bin/bash\n#SPOOL --set shell=/bin/dash", (), "/bin/dash"),
        ("/bin/bash", ("--set", "shell=/bin/dash"), "/bin/dash"),
    ],
)
def test_a_script_on_stdin_is_run_by_the_shell_that_it_names(
    piped: Callable[..., Said], spool_root: Path, line: str, more: tuple[str, ...], shell: str
) -> None:
    """As it would be if it were a file, unless an option says otherwise."""
    text = f"#!{line}\n[[ 1 == 1 ]] && echo ok\n".encode()
    assert piped(text, "--name", "piped", *more, "-").code == 0
    keys = queued(spool_root, "piped")
    assert (keys["command"], keys["shell"]) == (text.decode(), shell)


@pytest.mark.parametrize("line", ["/usr/bin/python3", "/usr/bin/env python3", "/bin/bash -x", "/usr/bin/env nosh"])
def test_a_script_on_stdin_for_another_program_is_captured(
    piped: Callable[..., Said], spool_root: Path, line: str
) -> None:
    """Another program, or a shell with options, reads it from the copy in the metadir, with its arguments."""
    text = f"#!{line}\necho hi\n"
    assert piped(text.encode(), "--name", "piped", "-", "--epochs", "3").code == 0
    keys = queued(spool_root, "piped")
    assert (keys["command"], keys["script"]) == (["stdin", "--epochs", "3"], text)


@pytest.mark.parametrize(
    ("text", "words", "why"),
    [
        (b"#!\necho hi\n", (), "names no interpreter"),
        (b"#!/bin/sh\r\necho hi\r\n", ("x",), "Windows line endings"),
        (b" \n", (), "it is empty"),
        (b"#!/bin/sh\n\xff\n", (), "line 2 is not UTF-8"),
        (b"#!/bin/sh\n\0\n", (), "NUL"),
        (b"echo hi\n", ("x",), "to take arguments"),
    ],
)
def test_a_script_on_stdin_that_nothing_can_run_is_refused(
    piped: Callable[..., Said], spool_root: Path, text: bytes, words: tuple[str, ...], why: str
) -> None:
    """Nothing is submitted of it, and the error says why."""
    said = piped(text, "-", *words)
    assert (said.code, why in said.err) == (2, True), said.err
    assert os.listdir(spool_root / "queued") == []


def test_the_first_submission_makes_the_spool(tmp_path: Path, spool: Command) -> None:
    """A spool that is not there is made, for its owner alone, with a page that explains it."""
    root = tmp_path / "new" / "spool"
    root.parent.mkdir()
    (tmp_path / "config.toml").write_text("")
    assert main.run(["--spool", str(root), "init"]) == 0
    assert spool("--spool", root, "submit", "--hold", "--name", "a", "--", "true").code == 0
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert {path.name for path in root.iterdir()} == {*layout.DIRECTORIES, "README"}
    assert "queued/" in (root / "README").read_text()


QUICK_OR_FULL = pytest.mark.parametrize("way", [[], ["--set", "prolog=true"]], ids=["quick", "full"])


@QUICK_OR_FULL
def test_the_staging_directory_is_made_and_nothing_is_left_in_it(
    spool: Command, spool_root: Path, way: list[str]
) -> None:
    """Where it is missing, that is in nobody's way; whether a submission succeeds or is refused, no file stays."""
    (spool_root / ".tmp").rmdir()
    codes = [spool("submit", *way, *more, "--name", "a", "--", "true").code for more in ((), (), ("--replace",))]
    assert codes == [0, 1, 0]
    assert (os.listdir(spool_root / "queued"), os.listdir(spool_root / ".tmp")) == (["a.toml"], [])
    assert stat.S_IMODE((spool_root / ".tmp").stat().st_mode) == 0o700


@pytest.mark.parametrize("way", ["quick", "full", "line"])
def test_an_option_is_short_for_its_executor(spool: Command, spool_root: Path, way: str) -> None:
    """On the command line as in a `#SPOOL` line."""
    options = ("--tmux", "--set=keep_session=true")
    script = Path("script.sh")
    script.write_text(f"#!/bin/sh\n#SPOOL {' '.join(options)}\ntrue\n")
    full = ("--executor", "process", *options, "--set", "prolog=true", "--", "true")
    spool("submit", "--name", "t", *{"quick": (*options, "--", "true"), "full": full, "line": (script,)}[way])
    spec = jobfile.parse((spool_root / "queued" / "t.toml").read_bytes(), name="t")
    assert (spec.executor, spec.keep_session) == ("tmux", True)


QUICK_OPTIONS = st.lists(
    st.sampled_from(
        [
            ["--gpus", "1"], ["-g2"], ["--cpus", "0"], ["--memory", "16G"], ["-m", "0G"], ["--memory=16"],
            ["-t", "90s"],
            ["--time-limit", "1h30m"], ["--priority", "255"], ["-p", "256"], ["--project", "é"], ["--tag", "a,b"],
            ["--project", " "], ["--gpu-memory", "2G"], ["--workdir", "/tmp"], ["--workdir", "x"], ["--cpus", "x"],
            ["--env", "A=1"], ["--retry-max", "1"], ["--project", 'a"b\\'],
            ["--tmux"], ["--mem", "2G"], ["-D", "/tmp"], ["--time=5m"],
            ["-d", "b,c"], ["-d", "any:b"], ["-d", ","], ["-d", "x y"], ["-d", "b"],
            ["--executor", "process"],
            ["--executor", "x"], ["--no-requeue"], ["-t", "999999d"], ["-t", "99999d"],
            ["--tag", "a,a"], ["--project", "a "], ["--signal", "USR1@1s"], ["--gpus", "0"],
            ["--env", "SPOOL_X=1"], ["--env", "CUDA_VISIBLE_DEVICES=0"], ["-eA B=1"], ["-e", "A={x}\n"],
            ["-e", "PATH=é"], ["--env", "=1"], ["--env", "A=a\0b"], ["--env", "NONE"], ["--stdout", "a.txt"],
            ["--stdout", "x/%n"], ["-o", "d/"], ["--stderr", ".."], ["--stderr", ""], ["--stdout", "~/x"],
            ["--stdout", "//"], ["--stderr", "/dev/null"],
            ["--retry-max", "0"], ["--retry-max", "9999999"],
        ]
    ),
    max_size=4,
)  # fmt: skip


OPTIONS_WITH_ANY_VALUE = st.lists(
    st.tuples(
        st.sampled_from(
            [option.flags[0] for option in OPTIONS if option.flags and option.kind not in ("rows", "moment or delay")]
        ),
        st.one_of(
            st.text(st.characters(codec="utf-8"), max_size=6),
            st.sampled_from(["a\nb", "a\tb", "/a\nb", "a=\n", "a,b\n", "1\n", "1G\n", "a\u2028b", "A=a\x7f"]),
        ),
    ).map(list),
    max_size=2,
)


@given(
    st.one_of(QUICK_OPTIONS, OPTIONS_WITH_ANY_VALUE),
    st.lists(st.text(st.characters(codec="utf-8"), max_size=8), min_size=1, max_size=3),
)
@example([["--project", "a\nb"]], ["true"])
@example([["--project", "a\tb"]], ["true"])
@example([["--tag", "a\nb"]], ["true"])
@example([["-d", "b"], ["-d", "b"]], ["true"])
def test_what_the_quick_way_writes_is_what_the_full_way_reads(chosen: list[list[str]], words: list[str]) -> None:
    """The quick way takes a submission only if the full way would, and then means the same by it."""
    arguments = [word for option in chosen for word in option]
    try:
        values, _, _ = fastsubmit.read(arguments, joboptions.FLAGS)
    except UnclearError:
        return
    command = fastsubmit.command_of(words)
    exported = Exports()
    exported.take(["PATH"], {"PATH": "/bin"})
    draft = fastsubmit.drafted("a", command, values, exported)
    if draft is None or (text := draft.plain_text()) is None:
        return
    spec = jobfile.parse(text.encode(), name="a")
    keys = {"command": command, "workdir": os.getcwd(), **joboptions.keys_of(values)}
    own = keys.get("env", {})
    assert isinstance(own, dict)
    keys["env"] = {"PATH": "/bin", **own}
    assert spec == jobfile.parse(jobfile.dump(keys), name="a")


VALUES = st.text(max_size=8) | st.booleans() | st.integers() | st.floats(allow_nan=False)


@given(st.dictionaries(st.text(max_size=4), VALUES | st.lists(VALUES) | st.dictionaries(st.text(max_size=3), VALUES)))
@example({"a b": {"c.d": "x"}, "e": "'''\n", "f": "one\ntwo'", "g": ["\n"]})
def test_a_draft_is_read_as_it_was_filled(keys: dict[str, object]) -> None:
    """Whatever its keys and values are, its file has these, or is refused for what UTF-8 cannot hold."""
    try:
        text = Draft("a", keys).text()
    except InvalidValue:
        return
    assert tomllib.loads(text.decode()) == keys


@QUICK_OR_FULL
def test_a_dependency_that_is_there_is_taken_and_others_are_warned_of(
    spool: Command, spool_root: Path, way: list[str]
) -> None:
    """A job that waits for one that exists; one that waits for itself is refused, one for none is told of."""
    spool("submit", "--name", "first", "--", "true")
    said = spool("submit", *way, "-d", "first", "--name", "second", "--", "true")
    assert (said.code, said.err) == (0, "")
    spec = jobfile.parse((spool_root / "queued" / "second.toml").read_bytes(), name="second")
    assert spec.depends_on.all == ("first",)
    assert spool("submit", *way, "-d", "second", "--name", "second", "--replace", "--", "true").code == 4
    assert " none, " in spool("submit", *way, "-d", "none", "--", "true").err


def imported_by(words: list[str], spool_root: Path) -> set[str]:
    """Submit a job and return the modules that were imported for it, without those that every program has."""
    (spool_root / "config.toml").write_text("")
    (spool_root / ".machine").write_bytes(machine_line(boot_id(), 1, 1, 1))
    (spool_root / ".tmp" / "dispatcher.start").write_text(f"{os.getpid()}\n")  # so that none is started here
    code = (
        "import os, sys; before = set(sys.modules); from spool.cli.main import run;"
        f"code = run({words!r}); print(*set(sys.modules) - before, file=sys.stderr); sys.exit(code)"
    )
    done = spawned(program=("-S", "-c", code), check=True)
    assert len(os.listdir(spool_root / "queued")) == 1
    return set(done.stderr.split())


SMALL = {"__future__", "errno", "fcntl", "gc", "resource", "time"}


def test_the_plain_case_imports_next_to_nothing(spool_root: Path) -> None:
    """`spool submit -- CMD` imports nine modules of ours, and of the standard library only what is small."""
    found = imported_by(["submit", "--name", "a", "--export", "PATH", "--", "true"], spool_root)
    ours = {name for name in found if name.partition(".")[0] == "spool"}
    assert found - ours <= SMALL
    assert {name for name in ours if name.count(".") == 2} == {
        "spool.cli.main", "spool.cli.fastsubmit", "spool.client.submit", "spool.client.draft",
        "spool.client.autostart", "spool.core.layout", "spool.store.disk", "spool.store.glance",
        "spool.store.lock",
    }  # fmt: skip


def test_plain_options_need_the_table_of_keys_and_no_library(spool_root: Path) -> None:
    """`spool submit -g 1 -e A=1 -- CMD` imports little more: the keys, and the options that are made of them."""
    found = imported_by(["submit", "-g", "1", "-e", "A=1", "-t", "2h", "--", "true"], spool_root)
    assert {name for name in found if not name.startswith("spool")} <= SMALL
    assert {"spool.cli.joboptions", "spool.formats.keys"} < found
    assert len(found) <= 32


def test_the_table_of_options_is_that_of_click() -> None:
    """What the fast path and `#SPOOL` lines know is an option of `spool submit`, with a value where that has one."""
    options = [parameter for parameter in submit.command.params if isinstance(parameter, click.Option)]
    spelled = {
        flag: option.is_flag
        for option in options
        for flag in (*option.opts, *option.secondary_opts, *getattr(option, "also", ()))
    }
    known = {flag: bool(stands_for) for flag, (_, stands_for) in (joboptions.FLAGS | fastsubmit.OF_A_JOB).items()}
    assert known.items() < spelled.items()


FAST = [
    ["--name", "a", "--", "echo", "two words", "$HOME"],
    ["-na", "-c", "sort x | uniq"],
    ["--name", "a", "--hold", "-g", "1", "-t", "2h", "--", "true"],
    ["--name", "a", "-e", "B=1", "-e", "PATH=/own", "--tag", "x,y", "--tags=z", "-p50", "--", "sort x | uniq"],
    ["--name", "a", "--export", "NONE", "-d", "first", "--project", "é", "--", "true"],
    ["--name", "a", "-c", "one\ntwo\t\\"],
    ["--name", "a", "--cpus", "2", "--memory", "1M", "--", "--help"],
    ["--name", "a", "--name", "b", "--", "true"],
]


@pytest.mark.parametrize("words", FAST, ids=" ".join)
def test_the_fast_path_does_what_click_does(
    spool: Command, spool_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """The same command line ends with the same messages, code and files, whichever way reads it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (spool_root / "config.toml").write_text("autostart = false\n")
    (spool_root / ".machine").write_bytes(machine_line(boot_id(), 2, 1 << 20, 1))
    put_job(spool_root, "first", place="done")
    quick = fastsubmit.submit
    taken = list[bool]()

    def tried(arguments: list[str]) -> int | None:
        code = quick(arguments)
        taken.append(code is not None)
        return code

    def outcome() -> tuple[object, ...]:
        said = spool("submit", *words)
        files = [path for place in ("queued", "held") for path in (spool_root / place).iterdir()]
        found = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in files}
        for path in files:
            path.unlink()
        return said.code, said.out, [line for line in said.err.splitlines() if "warning" not in line], found

    monkeypatch.setattr(fastsubmit, "submit", tried)
    fast = outcome()
    monkeypatch.setattr(fastsubmit, "submit", lambda arguments: None)
    assert fast == outcome()
    assert taken == [True]


def test_a_table_of_parameters_becomes_rows(spool: Command, spool_root: Path, tmp_path: Path) -> None:
    """`--param-file` makes one row of each line, the cells as they stand there, whoever wrote the file."""
    table = tmp_path / "grid.csv"
    table.write_bytes(b'\xef\xbb\xbflr,note\r\n0.10,"a, ""b"""\r\n\r\n1e-3,\r\n')
    said = spool(
        "submit", "--name", "a", "--param-file", str(table), "--set", "max_running=2", "--", "train", "{lr}", "{note}"
    )
    assert said.code == 0, said.err
    keys = queued(spool_root, "a")
    assert keys["rows"] == [{"lr": "0.10", "note": 'a, "b"'}, {"lr": "1e-3", "note": ""}]
    assert (keys["command"], keys["max_running"]) == (["train", "{lr}", "{note}"], 2)


def test_indices_and_lists_become_an_array(spool: Command, spool_root: Path) -> None:
    """`--array` and `--matrix`, which may be repeated, write the keys of the job file."""
    assert spool("submit", "--name", "a", "--array", "0-99:2%4", "--", "true").code == 0
    assert queued(spool_root, "a")["array"] == "0-99:2%4"
    assert spool("submit", "--name", "b", "--matrix", "lr=0.1,0.01", "--matrix", "seed=1,2", "--", "true").code == 0
    assert queued(spool_root, "b")["matrix"] == {"lr": ["0.1", "0.01"], "seed": ["1", "2"]}


SCRIPT = b"""#!/bin/sh
# Trains the small model.
#SPOOL --gpus 1 --time-limit 2h
##SPOOL --gpus 8

#SPOOL\t--set group="night runs"   # the slow ones
#SPOOL
#SPOOLED --no
  # indented
set -e
#SPOOL --too-late
"""


def test_spool_lines_are_read_from_the_head_of_a_script() -> None:
    """The comments before the first command, and no others; `##SPOOL` switches one off; a program has none."""
    values = {"gpus": ["1"], "time_limit": ["2h"], "group": ["night runs"]}
    assert submission.own_options(SCRIPT, "train.sh") == values
    assert submission.own_options(SCRIPT.replace(b"\n", b"\r\n"), "train.sh") == values
    assert submission.late_lines(SCRIPT) == [11]
    for script in (b"", b"\n", b"\x7fELF\x02\x01\x01\0\0\n#SPOOL --gpus 1\n", b"echo\n#SPOOL --gpus 1"):
        assert submission.own_options(script, "x") == {}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'#SPOOL --project "night', "line 2: "),
        (b"#SPOOL gpus 1", "line 2: 'gpus' "),
        (b"#SPOOL --project a\0b", "line 2: it has a NUL"),
        (b"#SPOOL --gpus 1 x", "line 2: 'x' "),
        (b"#SPOOL --GPUS 1", "line 2: unknown option --GPUS; did you mean --gpus?"),
        (b"#SPOOL --tiem-limit 2h", "line 2: unknown option --tiem-limit; did you mean --time-limit?"),
        (b"#SPOOL --gpus", "line 2: --gpus needs a value"),
    ],
)
def test_a_wrong_spool_line_is_told_with_its_number(line: bytes, why: str) -> None:
    """The error names the script and the line."""
    with pytest.raises(UsageError) as error:
        submission.own_options(b"#!/bin/sh\n" + line + b"\n", "train.sh")
    assert f" train.sh: {why}" in str(error.value)


def test_a_moment_is_written_as_people_write_it(spool: Command, spool_root: Path) -> None:
    """`--start-after` takes words; the job file has the date and time, or the duration."""
    days = [datetime.datetime.now()]
    assert spool("submit", "-n", "a", "--start-after", "tomorrow 8:00", "--", "true").code == 0
    days.append(datetime.datetime.now())  # another one at midnight
    found = datetime.datetime.fromisoformat(queued(spool_root, "a")["start_after"])
    assert found.date() in [(day + datetime.timedelta(days=1)).date() for day in days]
    assert (found.hour, found.tzinfo is not None) == (8, True)
    assert spool("submit", "-n", "b", "--start-after", "+2h", "--", "true").code == 0
    assert queued(spool_root, "b")["start_after"] == "2h"
    assert spool("submit", "--start-after", "soon", "--", "true").code == 2
    assert sorted(os.listdir(spool_root / "queued")) == ["a.toml", "b.toml"]


OF_CALLER = {
    "AWS_SECRET_ACCESS_KEY", "CONDA_DATABASE_URL", "CONDA_DSN", "CONDA_PAT", "CONDA_PWD", "CONDA_TOKEN", "CONDA_URL",
    "DATABASE_URL",
}  # fmt: skip


@pytest.fixture
def caller(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Be a caller in a virtual environment, with secrets; return what goes along by itself."""
    for name in list(os.environ):
        if name.startswith(("LC_", "CONDA_")):
            monkeypatch.delenv(name)
    goes = {
        "CONDA_PREFIX": "/conda", "LANG": "de_DE.UTF-8", "LC_ALL": "C", "LD_LIBRARY_PATH": "/lib",
        "PATH": "/venv/bin:/bin", "PYTHONPATH": "/lib/\"a\"", "TZ": "UTC", "VIRTUAL_ENV": "/venv",
    }  # fmt: skip
    stays = {"API_KEY": "1", "CONDA_TOKEN": "2", "AWS_SECRET_ACCESS_KEY": "3", "FOO": "4", "BAR_{index}": "5"}
    stays |= {"CONDA_PAT": "6", "CONDA_PWD": "7", "CONDA_DSN": "8", "CONDA_URL": "postgres://me:9@host/x"}
    stays |= {"DATABASE_URL": "10", "CONDA_DATABASE_URL": "11"}
    for name, value in (goes | stays).items():
        monkeypatch.setenv(name, value)
    return goes


WAYS = pytest.mark.parametrize("way", [("-n", "a"), ("-n", "a", "--comment", "full")])


@WAYS
def test_a_submission_takes_the_callers_programs_along_and_no_secrets(
    spool: Command, spool_root: Path, caller: dict[str, str], way: tuple[str, ...]
) -> None:
    """Both ways to submit write what finds the caller's programs into `env`, in the same order, and nothing else."""
    assert spool("submit", *way, "--", "true").code == 0
    assert list(env_of(spool_root, "a").items()) == list(caller.items())


@WAYS
@pytest.mark.parametrize(
    ("words", "env"),
    [
        (("NONE",), {}),
        (("nil",), {}),
        (("",), {}),
        (("FOO",), {"FOO": "4"}),
        (("FOO,B=1=2", "C="), {"FOO": "4", "B": "1=2", "C": ""}),
        (("CONDA_*",), {"CONDA_PREFIX": "/conda"}),
        (("CONDA_TOKEN, ?OO",), {"CONDA_TOKEN": "2", "FOO": "4"}),
        (("NONE,FOO",), {"FOO": "4"}),
    ],
)
def test_export_says_what_goes_along(
    spool: Command, spool_root: Path, caller: dict[str, str], way: tuple[str, ...], words: tuple[str, ...], env: object
) -> None:
    """As in sbatch: what is named goes along instead of the usual. A pattern takes no secret; its full name does."""
    said = spool("submit", *way, *(part for word in words for part in ("--export", word)), "--", "true")
    assert (said.code, said.err) == (0, "")
    assert env_of(spool_root, "a") == env


@WAYS
def test_all_takes_all_that_means_something_elsewhere(
    spool: Command, spool_root: Path, caller: dict[str, str], way: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ALL is all, as in sbatch, but for what spool or a shell sets itself; assignments come on top."""
    for name in ("CUDA_VISIBLE_DEVICES", "SPOOL_JOB", "PWD", "SHLVL", "BASH_ENV", "BASH_FUNC_f x%%"):
        monkeypatch.setenv(name, "of-the-caller")
    monkeypatch.setenv("CONDA_PATH", "/x")
    for name in [
        name for name in os.environ if may_be_secret(name, os.environ[name]) and name not in OF_CALLER | {"API_KEY"}
    ]:
        monkeypatch.delenv(name)
    said = spool("submit", *way, "--export", "ALL,FOO=own,API_KEY", "--", "true")
    assert said.code == 0
    assert len(told := said.err.splitlines()) == 1
    assert {name for name in OF_CALLER if name in told[0].split(": ")[-1]} == OF_CALLER
    assert "API_KEY" not in told[0]
    assert "CONDA_PATH" not in told[0]
    found = env_of(spool_root, "a")
    assert caller.items() <= found.items()
    assert (found["API_KEY"], found["FOO"]) == ("1", "own")
    assert "of-the-caller" not in found.values()


def test_what_cannot_go_along_is_told(spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is submitted without it, and a line names it: what was asked for by name, or was to go along anyway."""
    monkeypatch.setenv("LATIN", "\udce4")
    for name in ("NOT_THERE", "SPOOL_DIR", "LATIN"):
        said = spool("submit", "-n", "a", "--replace", "--export", name, "--", "true")
        assert (said.code, said.err.count("\n"), f"{name} is not" in said.err) == (0, 0, True)
        assert env_of(spool_root, "a") == {}
    monkeypatch.setenv("PYTHONPATH", "/\udce4")
    said = spool("submit", "-n", "b", "--", "true")
    assert (said.code, "PYTHONPATH" in said.err) == (0, True)
    assert "PATH" in env_of(spool_root, "b")


@pytest.mark.parametrize("word", ["A B=1", "=1", "CUDA_VISIBLE_DEVICES=0"])
def test_an_assignment_that_no_job_can_have_is_refused(spool: Command, spool_root: Path, word: str) -> None:
    """As with `--env`, and nothing is submitted."""
    assert spool("submit", "-n", "a", "--export", word, "--", "true").code == 4
    assert not list((spool_root / "queued").iterdir())


def test_what_is_stated_wins_over_what_is_taken(
    spool: Command, spool_root: Path, caller: dict[str, str], tmp_path: Path
) -> None:
    """`--env` is last; a script may say `#SPOOL --export`, and the command line wins over that."""
    assert spool("submit", "-n", "a", "-e", "PATH=/own", "--export", "PATH,FOO", "--", "true").code == 0
    assert env_of(spool_root, "a") == {"PATH": "/own", "FOO": "4"}
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n#SPOOL --export NONE\ntrue\n")
    assert spool("submit", "-n", "b", script).code == 0
    assert env_of(spool_root, "b") == {}
    assert spool("submit", "-n", "c", "--export", "FOO", script).code == 0
    assert env_of(spool_root, "c") == {"FOO": "4"}


@WAYS
@pytest.mark.parametrize(
    ("config", "goes"),
    [
        ('export = ["FOO", "API_KEY"]', {"API_KEY", "FOO"}),
        ("export = []", set()),
        ('export = ["CONDA_*"]', {"CONDA_PREFIX"}),
        ('prolog = "export X=1"', None),
    ],
)
def test_the_configuration_says_what_goes_along(
    spool: Command, spool_root: Path, caller: dict[str, str], way: tuple[str, ...], config: str, goes: set[str] | None
) -> None:
    """`export` in the configuration replaces the usual list."""
    (spool_root / "config.toml").write_text(f"autostart = false\n{config}\n")
    assert spool("submit", *way, "--", "true").code == 0
    assert set(env_of(spool_root, "a")) == (set(caller) if goes is None else goes)


def test_a_configuration_that_is_wrong_leaves_the_usual(spool_root: Path, caller: dict[str, str]) -> None:
    """The dispatcher tells of it; a submission goes on."""
    (spool_root / "config.toml").write_text("export = 3\n")
    assert exports(str(spool_root)).taken == caller


def test_braces_of_what_is_taken_mean_nothing_to_an_array(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that happens to have `{lr}` in it reaches each task as it is; one that was assigned is replaced."""
    monkeypatch.setenv("TZ", "{lr}-${lr}-{{lr}}-{index}-{array}")
    words = ("--export", "TZ,MINE={lr}", "--matrix", "lr=7,8")
    assert spool("submit", "-n", "a", *words, "--", "true", "{lr}").code == 0
    plain = spool_root.parent / "b.toml"
    plain.write_text('command = "true {lr}"\n[matrix]\nlr = [7, 8]\n')
    assert spool("submit", "-f", plain, "--export", "TZ,MINE={lr}").code == 0
    Client(spool_root).submit("true {lr}", name="c", matrix={"lr": [7, 8]}, env={"MINE": "{lr}"})
    for name in ("a", "b", "c"):
        data = (spool_root / "queued" / f"{name}.toml").read_bytes()
        task = jobfile.parse(jobfile.TaskFiles(name, data, jobfile.parse(data, name=name)).text(0), name=f"{name}_0")
        env = {key: value for key, value in task.env if key in ("TZ", "MINE")}
        assert env == {"TZ": "{lr}-${lr}-{{lr}}-{index}-{array}", "MINE": "7"}


def test_a_program_and_the_command_line_write_the_same_file(spool: Command, spool_root: Path) -> None:
    """`Client.submit` fills the draft that `spool submit` fills."""
    assert (
        spool("submit", "-n", "a", "-g", 1, "-t", "2h", "-e", "B=1", "-d", "x,y", "--", "echo", "two words").code == 0
    )
    keys = {"gpus": 1, "time_limit": "2h", "depends_on": ["x", "y"], "env": {"B": "1"}}
    Client(spool_root).submit(["echo", "two words"], name="b", **keys)
    files = [(spool_root / "queued" / f"{name}.toml").read_text().splitlines() for name in ("a", "b")]
    assert sorted(files[0]) == sorted(files[1])
    assert files[1][0] == 'command = ["echo", "two words"]'


def test_a_job_file_stays_as_it_is_unless_export_is_given(
    spool: Command, spool_root: Path, caller: dict[str, str], tmp_path: Path
) -> None:
    """`-f` is what `cp` is; with `--export` its own variables stay, assignments win, and comments are kept."""
    text = '# mine\ncommand = "true" # yes\nenv = { PATH = "/own", B = "0" }\n'
    file = tmp_path / "job.toml"
    file.write_text(text)
    assert spool("submit", "-n", "a", "-f", file).code == 0
    assert (spool_root / "queued" / "a.toml").read_text() == text
    assert spool("submit", "-n", "b", "-f", file, "--export", "NONE").code == 0
    assert (spool_root / "queued" / "b.toml").read_text() == text
    assert spool("submit", "-n", "c", "-f", file, "--export", "PATH,FOO,B=1").code == 0
    assert env_of(spool_root, "c") == {"PATH": "/own", "FOO": "4", "B": "1"}
    assert "# mine\n" in (spool_root / "queued" / "c.toml").read_text()
    assert file.read_text() == text


@WAYS
def test_a_workdir_is_taken_from_where_one_stands(spool: Command, spool_root: Path, way: tuple[str, ...]) -> None:
    """`--workdir sub` is a directory below this one; `~`, variables and absolute paths stay as they are."""
    here = spool_root.parent
    given = {"sub": f"{here}/sub", ".": str(here), "..": str(here.parent), "./a b/": f"{here}/a b"}
    given |= {"/abs/x": "/abs/x", "~/x": "~/x", "$HOME/x": "$HOME/x"}
    for word, expected in given.items():
        assert spool("submit", *way, "--replace", "--workdir", word, "--", "true").code == 0
        assert queued(spool_root, "a")["workdir"] == expected


@WAYS
@pytest.mark.parametrize("words", [(), ("--workdir", "sub")])
def test_a_dollar_sign_in_the_current_directory_begins_no_variable(
    spool: Command,
    spool_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    way: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    """The job runs in the very directory, whichever way it was submitted, also from a Python program."""
    here = tmp_path / "a$b ${HOME}$"
    (here / "sub").mkdir(parents=True)
    monkeypatch.chdir(here)
    said = spool("submit", *way, *words, "--", "true")
    assert (said.code, said.err) == (0, "")
    workdir = str(queued(spool_root, "a")["workdir"])
    assert why_not_expanded(workdir, {}) is None
    assert expanded(workdir, {}) == str(here / "sub" if words else here)
    Client(spool_root).submit("true", name="b", held=True)
    text = tomllib.loads((spool_root / "held" / "b.toml").read_text())["workdir"]
    assert expanded(text, {}) == str(here)


def test_a_workdir_is_refused_only_where_there_is_nowhere_to_stand(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a directory that was removed an absolute workdir does, and a relative one is told."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    said = spool("submit", "-n", "a", "--workdir", "sub", "--", "true")
    assert (said.code, "--workdir" in said.err) == (2, True)
    assert spool("submit", "-n", "a", "--workdir", "/tmp", "--", "true").code == 0
    assert queued(spool_root, "a")["workdir"] == "/tmp"
    for words in (("--spool", "rel", "ls"), ("--spool", "rel", "submit", "--", "true"), ("init", "rel")):
        said = spool(*words)
        assert (said.code, "an absolute path" in said.err) == (5, True), words


def test_a_submission_is_judged_with_the_defaults(spool: Command, spool_root: Path, tmp_path: Path) -> None:
    """A warning needs a time limit; where the configuration has one, the job file need not, and does not get one."""
    words = ("submit", "-n", "a", "--signal", "USR1@10s", "--", "true")
    assert spool(*words).code == 4
    (spool_root / "config.toml").write_text('autostart = false\n[defaults]\ntime_limit = "1m"\nenv = { A = "1" }\n')
    assert spool(*words).code == 0
    assert "time_limit" not in queued(spool_root, "a")
    assert "A" not in env_of(spool_root, "a")
    file = tmp_path / "b.toml"
    file.write_text('command = "true"\nsignal = "USR1"\ntime_limit = "2m"\n')
    assert spool("submit", "-f", file, "--export", "B=2").code == 0
    assert env_of(spool_root, "b") == {"B": "2"}
    assert spool("edit", "b", "--unset", "time_limit", "--signal", "USR1@10s").code == 0
    shown = spool("show", "b").out
    assert "\nfrom [defaults]" in shown
    assert '  time_limit = "1m"' in shown
    assert "from [defaults]" not in spool("submit", "-n", "c", "--dry-run", "--", "true").out
