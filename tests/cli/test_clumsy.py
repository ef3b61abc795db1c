"""Wrong uses of the commands, and jobs that cannot run: what is wrong and what to do next is said in one line each."""

from __future__ import annotations

import errno
import json
import os
import shlex
from pathlib import Path

import click
import pytest

from calling import Command, asked, put_job, spawned
from spool.cli import fastsubmit, group
from spool.cli.group import VERBS, JobArgument
from spool.core.model import SECOND_NS
from spool.machine.identity import boot_id
from spool.query import snapshot
from spool.store.disk import Disk
from spool.store.glance import machine_line


def test_help_takes_a_command(spool: Command) -> None:
    """`spool help ls` prints what `spool ls --help` prints, and `spool help` the list of commands."""
    assert spool("help", "ls") == spool("ls", "--help")
    assert spool("help") == spool("--help")


def takes_a_job(verb: str) -> bool:
    """Whether a verb takes the name of a job."""
    command = group.spool.get_command(click.Context(group.spool), verb)
    return command is not None and any(isinstance(each, JobArgument) for each in command.params)


NAMES_A_JOB = [verb for verb in VERBS if verb not in ("signal", "diff") and takes_a_job(verb)]


@pytest.mark.parametrize("verb", [*NAMES_A_JOB, "edit --first", "signal USR1"])
def test_an_unknown_job_is_answered_with_the_likely_one(spool: Command, spool_root: Path, verb: str) -> None:
    """Every command that takes a job says which one was probably meant, else how to list the jobs."""
    put_job(spool_root, "train-model", place="held")
    near = spool(*verb.split(), "train-modle")
    assert (near.code, near.err.count("\n"), "train-model?" in near.err) == (3, 0, True)
    assert "spool ls --all" in spool(*verb.split(), "xyzzy").err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--priority", "9" * 5000], "--priority: "),  # which Python refuses to read
        (["--depends-on", "a/b"], "--depends-on: "),
        (["--set", "resources=a=b"], "--set resources: "),
        (["--set", "setup="], "--set setup: "),
        (["--set", "max_running=3"], "--set max_running: "),
        (["--set", "retry.memory_factor=2", "-m", "1G"], "--set retry.memory_factor: "),
        (["-d", ""], "--depends-on: "),
        (["--tag", "hold,hold"], "--tag: "),
    ],
)
def test_a_wrong_value_is_answered_with_the_option(
    spool: Command, spool_root: Path, options: list[str], told: str
) -> None:
    """An error of an option names the option, in a short line and not that of a file; and nothing is submitted."""
    said = spool("submit", *options, "--", "true")
    assert (said.code, said.err.count("\n"), len(said.err) < 400, " on line " in said.err) == (4, 0, True, False)
    assert f": {told}" in said.err
    assert os.listdir(spool_root / "queued") == []


def test_no_spool_is_made_among_the_files_of_others(spool: Command, tmp_path: Path) -> None:
    """`init`, and a command that would make one, refuse a directory with other files and leave it as it is."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("")
    for words in (("init", home), ("--spool", home, "submit", "--", "true"), ("--spool", home, "dispatch", "--once")):
        said = spool(*words)
        assert (said.code, said.out, f"{home}: " in said.err) == (5, "", True)
        assert [each.name for each in home.iterdir()] == ["thesis.tex"]
    (home / "config.toml").write_text("")
    assert spool("init", home).code == 0


def test_a_full_disk_is_told_of_in_a_line(spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever way a command takes to the disk, its error is one line and has a code of its own."""
    put_job(spool_root, "a", place="held")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for method in ("staged", "rename", "move", "publish", "put"):
        monkeypatch.setattr(Disk, method, full)
    for words in (("submit", "--", "true"), ("release", "a"), ("edit", "a", "--cpus", "2"), ("pause",)):
        said = spool(*words)
        assert (said.code, said.err.count("\n")) == (5, 0), words


_MISNAMED = {
    "a b.toml": "'queued/a b.toml' is ignored: a name is made of A-Z a-z 0-9 . _ and -, and ' ' is not allowed",
    "-rf.toml": "queued/-rf.toml is ignored: a name begins with a letter or a digit, not with '-'",
    "x.TOML": "queued/x.TOML is ignored: its name ends in .TOML, not in .toml",
    "a\nb.toml": "queued/a\\nb.toml is ignored: a name is made of A-Z a-z 0-9 . _ and -, and '\\n' is not allowed",
    f"{'x' * 101}.toml": f"queued/{'x' * 101}.toml is ignored: a name has at most 100 characters, this one has 101",
}


@pytest.mark.parametrize("filename", _MISNAMED)
def test_a_job_file_with_a_wrong_name_is_told_of(spool: Command, spool_root: Path, filename: str) -> None:
    """It never starts; the lists, the machine's status and doctor say why, and nobody touches it."""
    path = spool_root / "queued" / filename
    path.write_text('command = "true"\n')
    told = _MISNAMED[filename]
    assert f"spool: {told}; rename it" in spool("ls").err.splitlines()
    assert asked(spool, "ls")["problems"] == [f"{told}; rename it"]
    assert f"{told}; rename it" in asked(spool, "info")["problems"]
    found = [each for each in asked(spool, "doctor")["checks"] if each["check"] == "job files"]
    assert [(each["level"], each["text"], each["remedy"]) for each in found] == [("warn", told, "rename it")]
    assert path.read_text() == 'command = "true"\n'
    path.rename(spool_root / "queued" / "fine.toml")
    assert asked(spool, "ls")["problems"] == []


def test_a_name_that_is_no_text_is_told_of(spool: Command, spool_root: Path) -> None:
    """A file name in another encoding is shown with escapes, in JSON as well."""
    os.close(os.open(os.fsencode(spool_root) + b"/held/\xff.toml", os.O_CREAT | os.O_WRONLY))
    assert "held/\\udcff.toml" in spool("ls").err
    assert "held/\\udcff.toml" in asked(spool, "ls")["problems"][0]
    assert "held/\\udcff.toml" in spool("doctor", "-q").out


def test_what_is_no_file_under_the_name_of_one_is_told_of(spool: Command, spool_root: Path, tmp_path: Path) -> None:
    """A link to a job file, a directory and a FIFO start nothing; the lists and doctor say what they are."""
    file = tmp_path / "train.toml"
    file.write_text('command = "true"\n')
    link, folder, pipe = (spool_root / "queued" / f"{name}.toml" for name in ("link", "folder", "pipe"))
    link.symlink_to(file)
    assert "queued/link.toml" in spool("ls").err
    folder.mkdir()
    os.mkfifo(pipe)
    text = spool("doctor", "-q").out
    assert [f"queued/{name}.toml" in text for name in ("folder", "link", "pipe")] == [True] * 3


def test_other_files_where_jobs_are_put_are_for_doctor_alone(spool: Command, spool_root: Path) -> None:
    """A script or a file without the ending is named by doctor; what editors leave, and what spool writes, is not."""
    queued = spool_root / "queued"
    for name in ("job.sh", "train", ".hidden.toml", "a.toml~", "#a.toml#", ".a.toml.swp", "4913", "b.toml.error"):
        (queued / name).write_text("")
    put_job(spool_root, "b", "]")
    assert "ignored" not in spool("ls").err
    text = spool("doctor", "-q").out
    assert "queued/job.sh, queued/train: " in text
    assert text.count("ignored") == 1


def test_many_files_with_wrong_names_are_a_few_lines(spool: Command, spool_root: Path) -> None:
    """The list has one line for all of them; doctor has ten, and says how many more there are."""
    for at in range(30):
        (spool_root / "queued" / f"job {at:02}.toml").write_text("")
        (spool_root / "queued" / f"script{at:02}").write_text("")
    assert spool("ls").err.count("ignored") == 1
    lines = spool("doctor", "-q").out
    assert lines.count(" is ignored: ") == 10


# What is told of a job before it is submitted: it never fits, or a dependency is not there.


_STATVFS = os.statvfs

NEVER = [
    (("--memory", "1T"), "never fits: needs 1 TiB, the machine has 8 GiB"),
    (("--gpus", "1"), "never fits: needs 1 GPU, the machine has none"),
    (("--set", "resources=licence=1"), "never fits: "),
    (("--workdir", "/nowhere/at/all"), "cannot start until its workdir exists: /nowhere/at/all"),
    (("--depends-on", "nosuch"), "depends on nosuch, which does not exist"),
]


@pytest.mark.parametrize(("words", "why"), NEVER)
def test_what_can_never_be_is_told_at_submission(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], why: str
) -> None:
    """A warning with the numbers comes on stderr, and the job is submitted all the same; `--strict` submits nothing."""
    look = snapshot.machine_now  # a command waits a second for NVML's process, which may take longer to start
    monkeypatch.setattr(snapshot, "machine_now", lambda *given, **_: look(*given, patience_ns=60 * SECOND_NS))
    (spool_root / "config.toml").write_text('autostart = false\ncpus = 4\nmemory = "8G"\n')
    for strict, code, out in ((("--strict",), 1, ""), ((), 0, "a\n")):
        said = spool("submit", *strict, "--name", "a", *words, "--", "true")
        assert (said.code, said.out, f"job a {why}" in said.err) == (code, out, True)
        assert (spool_root / "queued" / "a.toml").exists() is not bool(strict)


class _NoExec:
    """What `os.statvfs` says of a file system that is mounted with noexec."""

    def __init__(self, path: str) -> None:
        self._found = _STATVFS(path)
        self.f_flag = self._found.f_flag | os.ST_NOEXEC

    def __getattr__(self, name: str) -> object:
        return getattr(self._found, name)


def test_a_script_that_its_file_system_does_not_execute_is_told_of(
    spool: Command, spool_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of a script is a file of the spool: where that is mounted with noexec, submit and doctor say so."""
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr(os, "statvfs", _NoExec)
    said = spool("submit", "-n", "a", script)
    assert (said.code, said.out, "noexec; --no-capture" in said.err) == (0, "a\n", True)
    assert spool("submit", "-n", "b", "--no-capture", script).err == ""
    assert spool("submit", "-n", "c", "--", "true").err == ""
    assert "noexec" in spool("doctor", "-q").out
    monkeypatch.undo()
    assert "noexec" not in spool("doctor").out


@pytest.mark.parametrize("strict", [(), ("--strict",)])
def test_check_tells_the_same(spool: Command, spool_root: Path, tmp_path: Path, strict: tuple[str, ...]) -> None:
    """`check` warns of what `submit` warns of; with `--strict` such a file is wrong."""
    (spool_root / "config.toml").write_text("autostart = false\ncpus = 4\n")
    file = tmp_path / "big.toml"
    file.write_text('command = "true"\ncpus = 5\n')
    said = spool("check", file, *strict)
    assert said.code == (4 if strict else 0)
    found = json.loads(spool("check", file, *strict, "--json").out)["files"][0]
    assert found["valid"] is not bool(strict)
    assert len(found["problems" if strict else "warnings"]) == 1


def test_jobs_that_are_submitted_together_may_depend_on_each_other(
    spool: Command, spool_root: Path, tmp_path: Path
) -> None:
    """Of several files, and of arrays, no dependency is missed; nor of what ended long ago, or waits as a file."""
    for name, text in {"a": 'array = "0-3"\n', "b": 'depends_on = ["a", "a_2", "old", "gone", "new_7"]\n'}.items():
        (tmp_path / f"{name}.toml").write_text(f'command = "true"\n{text}')
    put_job(spool_root, "old", place="done")
    put_job(spool_root, "new", 'command = "true"\narray = "0-9"\n')
    (spool_root / "history.jsonl").write_text('{"job":"gone","run":1}\n')
    said = spool("submit", "--strict", "-f", tmp_path / "a.toml", "-f", tmp_path / "b.toml")
    assert (said.code, said.err) == (0, "")


def test_a_thousand_dependencies_that_are_not_there_are_told_in_a_few_lines(
    spool: Command, spool_root: Path, tmp_path: Path
) -> None:
    """Many names that nobody has are counted."""
    names = ", ".join(f'"x{number}"' for number in range(1000))
    (tmp_path / "a.toml").write_text(f'command = "true"\ndepends_on = [{names}]\n')
    said = spool("submit", "-f", tmp_path / "a.toml")
    assert said.code == 0
    assert len(said.err.splitlines()) == 21
    assert "depends on 980 more jobs" in said.err


VARIED = [
    ("--matrix lr=1,2 -- echo {lr}", ""),
    ("--matrix lr=1,2 -c 'echo $SPOOL_PARAM_LR'", ""),
    ("--matrix lr=1,2 -- sh reads.sh", ""),
    ("--matrix lr=1,2 -- sh t.csv", "does not use lr: its value is where the command has {lr}, and in $SPOOL_PARAM_LR"),
    ("--matrix lr=1,2 -- echo $SPOOL_PARAM_LR", "-c takes a text for the shell, and {lr} is its value"),
    (
        "--matrix lr-a=1,2 --matrix LR_a=3,4 -- echo {lr-a} {LR_a}",
        "has no $SPOOL_PARAM_LR_A: lr-a and LR_a would have that",
    ),
    ("--matrix a=1 --matrix A=1 --matrix b=1 --matrix B=1 -- echo {a}", "has no $SPOOL_PARAM_B: b and B would have"),
    ("--matrix a=1 --matrix A=2 -- echo {a}", "does not use A: its value is where the command has {A}\n"),
    ("--matrix lr=1,2 --matrix seed=1,2 -- echo {lr}", "does not use seed: "),
    ("--matrix lr=1,2 -c 'echo ${lr} {{lr}}'", "does not use lr: "),
    ("--matrix lr=1,2 --env RATE={lr} -- env", ""),
    ("--matrix lr=1,2 -c 'awk {{lr}} {lr}}'", ""),
    ("--matrix seed=1..9 -- echo {seed}", "has only one value of seed, 1..9"),
    ("--param-file t.csv -- echo {b}", ""),
    ("--param-file t.csv -- echo {c}", "does not use a: "),
    ("--array 0-2 -- echo {index}", ""),
    ("--array 0-2 -c 'echo $SPOOL_ARRAY_INDEX'", ""),
    ("--array 0-2 -- python3 t.csv", ""),
    ("--array 0-2 -- python3 -m package", ""),
    ("--array 5 -- echo hi", ""),
]


@pytest.mark.parametrize(("line", "why"), VARIED)
def test_a_sweep_that_varies_nothing_is_told(
    spool: Command, spool_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, why: str
) -> None:
    """A misspelled key, an unused one, a list in brackets; not what a program may read from its environment."""
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3,4\n")
    (tmp_path / "reads.sh").write_text("echo $SPOOL_PARAM_LR\n")
    monkeypatch.chdir(tmp_path)
    said = spool("submit", "--name", "a", *shlex.split(line))
    assert (said.code, bool(said.err), why in f"{said.err}\n") == (0, bool(why), True), said.err


def test_a_plain_job_asks_for_nothing(spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of one processor reads neither the machine nor the state."""
    monkeypatch.setattr("spool.query.rows.machine_told", None)
    assert spool("submit", "--strict", "--name", "a", "-c", "true").code == 0


def test_a_job_without_gpus_does_without_what_plans(spool_root: Path) -> None:
    """What it asks for is compared with the machine itself, without the rest of the program and what watches GPUs."""
    found = imported_by(["submit", "--memory", "1M", "--array", "1-2", "--hold", "--", "true"], spool_root)
    assert "spool.query.foresight" in found
    assert found.isdisjoint({"spool.query.snapshot", "spool.query.jobs", "spool.machine.gpus", "psutil", "logging"})


def imported_by(words: list[str], spool_root: Path) -> set[str]:
    """Run a command line and return the modules that were imported for it."""
    code = f"import sys; from spool.cli.main import run; run({words!r}); print(*sys.modules, file=sys.stderr)"
    return set(spawned(program=("-c", code), check=True).stderr.split())


def test_what_cannot_be_read_keeps_nobody_from_submitting(spool: Command, spool_root: Path) -> None:
    """A history that is no file hides a warning, and the job is submitted."""
    (spool_root / "history.jsonl").mkdir()
    assert spool("submit", "--name", "a", "--depends-on", "b", "--", "true").code == 0


def test_the_quick_way_is_for_what_the_machine_surely_has(spool_root: Path) -> None:
    """What `.machine` says to be there goes the quick way; for all else the full one looks, and warns."""
    quick = ["--spool", str(spool_root), "submit", "--name"]
    (spool_root / "config.toml").write_text("autostart = false\n")
    assert fastsubmit.submit([*quick, "a", "--", "true"]) == 0
    assert fastsubmit.submit([*quick, "b", "--cpus", "2", "--", "true"]) is None
    line = machine_line(boot_id(), 4, 8 << 30, 2)
    (spool_root / ".machine").write_bytes(line)
    assert fastsubmit.submit([*quick, "b", "--cpus", "4", "--memory", "8G", "-g", "2", "--", "true"]) == 0
    for words in (("--cpus", "5"), ("--memory", "9G"), ("--memory", "8193M"), ("--gpus", "3"), ("--executor", "tmux")):
        assert fastsubmit.submit([*quick, "c", *words, "--", "true"]) is None
    for stale in (b"0" * 36 + line[36:], b"", b"\n", line[:36], line[:36] + b" many 1 1", line + b" 1"):
        (spool_root / ".machine").write_bytes(stale)
        assert fastsubmit.submit([*quick, "c", "--cpus", "2", "--", "true"]) is None
