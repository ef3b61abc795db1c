"""Wrong uses of the commands: each is answered in one line that says what is wrong and what to do next."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import click
import pytest

from calling import Command, asked, put_job
from spool.cli import group
from spool.cli.group import VERBS, JobArgument
from spool.store.disk import Disk


def test_help_takes_a_command(spool: Command) -> None:
    """`spool help ls` prints what `spool ls --help` prints, and `spool help` the list of commands."""
    assert spool("help", "ls") == spool("ls", "--help")
    assert spool("help") == spool("--help")


_NAME_JOBS = (
    "show", "why", "log", "attach", "wait", "seff", "cancel", "hold", "release", "requeue", "suspend", "continue",
    "edit", "ls", "rerun",
)  # fmt: skip
NAMES_A_JOB = tuple(verb for verb in _NAME_JOBS if verb in VERBS)


def test_every_verb_that_takes_a_job_is_asked_below() -> None:
    """A new verb that takes the name of a job is in the list of those whose answer is checked."""
    context = click.Context(group.spool)
    verbs = {verb: group.spool.get_command(context, verb) for verb in VERBS}
    takes = {
        verb
        for verb, command in verbs.items()
        if command is not None and any(isinstance(each, JobArgument) for each in command.params)
    }
    assert takes - {*NAMES_A_JOB, "signal", "diff"} == set()


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
        (["--memory", "10"], "--memory: "),
        (["--time-limit", "10x"], "--time-limit: "),
        (["--cpus", "-1"], "--cpus: "),
        (["--priority", "9" * 5000], "--priority: "),  # which Python refuses to read
        (["--depends-on", "a/b"], "--depends-on: "),
        (["--env", "=x"], "--env: "),
        (["--set", "resources=a=b"], "--set resources: "),
        (["--set", "setup="], "--set setup: "),
        (["--gpu-memory", "1G"], "--gpu-memory: "),
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


def test_edit_and_requeue_name_the_option_too(spool: Command, spool_root: Path) -> None:
    """What the command line changes is named as it was written; what the file has wrong keeps its line."""
    put_job(spool_root, "a", place="held")
    put_job(spool_root, "b", 'command = "true"\ncpus = "x"\n', place="held")
    put_job(spool_root, "c", place="done")
    assert "job a: --memory: " in spool("edit", "a", "--memory", "10").err
    assert '"cpus" on line 2: ' in spool("edit", "b", "--memory", "10G").err
    assert "job c: --set memory: " in spool("requeue", "c", "--set", "memory=10").err


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
