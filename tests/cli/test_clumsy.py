"""Wrong uses of the commands: each is answered in one line that says what is wrong and what to do next."""

from __future__ import annotations

from pathlib import Path

import pytest

from calling import Command, put_job


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["LS"], "did you mean `spool ls`?"),
        (["stop", "a"], "did you mean `spool cancel`?"),
        (["unhold", "a"], "did you mean `spool release`?"),
        (["watch"], "did you mean `spool ls --watch`?"),
        (["version"], "did you mean `spool --version`?"),
        (["help", "frobnicate"], "unknown command 'frobnicate'; `spool --help` lists the commands"),
        (["reserve", "show"], "the commands are create, list, cancel"),
        (["service", "start"], "the commands are install, status, remove"),
    ],
)
def test_an_unknown_command_is_answered_with_the_likely_one(spool: Command, words: list[str], told: str) -> None:
    """A word of another program, another case or a wrong subcommand: the message names the right command."""
    said = spool(*words)
    assert said.code == 2
    assert told in said.err
    assert len(said.err.splitlines()) == 1


def test_help_takes_a_command(spool: Command) -> None:
    """`spool help ls` prints what `spool ls --help` prints, and `spool help` the list of commands."""
    assert spool("help", "ls") == spool("ls", "--help")
    assert spool("help") == spool("--help")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ls", "-n", "x"], "-n must be a whole number of at least 0, not 'x'"),
        (["log", "a", "-n", "-1"], "--lines must be a whole number of at least 0, not -1"),
        (["log", "a", "--run", "last"], "--run must be a whole number, not 'last'"),
        (["simulate", "--history", "--limits", "7"], "--limits must be a number from 0 to 1, not 7"),
        (["simulate", "--history", "--scale-load", "0"], "--scale-load must be a number above 0, not 0"),
        (["gc", "--keep-runs", "0"], "--keep-runs must be a whole number of at least 1, not 0"),
    ],
)
def test_a_wrong_number_is_answered_with_the_numbers_that_are_right(
    spool: Command, words: list[str], told: str
) -> None:
    """The message names the option and what it takes, not a type of the program."""
    said = spool(*words)
    assert said.code == 2
    assert told in said.err


def test_a_word_too_many_is_named_with_what_the_command_takes(spool: Command) -> None:
    """`spool log a b` says that it takes one NAME."""
    assert "unexpected argument 'b'; `spool log` takes only NAME" in spool("log", "a", "b").err
    assert "unexpected argument 'now'; `spool pause` takes none" in spool("pause", "now").err


def test_a_misspelled_option_is_answered_with_the_likely_ones(spool: Command) -> None:
    """The suggestions stand in the message, without quotes and parentheses."""
    assert "unknown option --nam; did you mean --job-name or --name" in spool("submit", "--nam", "x", "--", "true").err
    assert "option --name needs a value" in spool("submit", "--name").err


NAMES_A_JOB = ("show", "why", "log", "attach", "wait", "seff", "cancel", "hold", "release", "requeue", "suspend",
               "continue", "edit", "ls")  # fmt: skip


@pytest.mark.parametrize("verb", [*NAMES_A_JOB, "move --first", "signal USR1"])
def test_an_unknown_job_is_answered_with_the_likely_one(spool: Command, spool_root: Path, verb: str) -> None:
    """Every command that takes a job says which one was probably meant, else how to list the jobs."""
    put_job(spool_root, "train-model", place="held")
    near = spool(*verb.split(), "train-modle")
    assert (near.code, near.err.count("\n")) == (3, 0)
    assert near.err.endswith("the spool has no job of that name; did you mean train-model?")
    assert spool(*verb.split(), "xyzzy").err.endswith("`spool ls --all` lists the jobs")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--memory", "10"], '--memory: "10" has no unit'),
        (["--time-limit", "10x"], '--time-limit: "10x" is not a duration'),
        (["--cpus", "-1"], "--cpus: must be a whole number >= 0, not -1"),
        (["--priority", "99999999999999999999"], "--priority: must be a whole number"),
        (["--retry-max", "x"], '--retry-max: must be a whole number, not "x"'),
        (["--depends-on", "a/b"], '--depends-on: "a/b" is not a valid job name'),
        (["--env", "=x"], '--env: "" is not a valid variable name'),
        (["--resource", "a=b"], '--resource: must be a whole number, not "b"'),
    ],
)
def test_a_wrong_value_is_answered_with_the_option(spool: Command, options: list[str], told: str) -> None:
    """An error of an option names the option: whoever wrote it has seen no file, no line and no made-up name."""
    said = spool("submit", *options, "--", "true")
    assert (said.code, said.err.count("\n")) == (4, 0)
    assert said.err.startswith(f"spool: cannot use this job: {told}")
    assert " on line " not in said.err


def test_edit_and_requeue_name_the_option_too(spool: Command, spool_root: Path) -> None:
    """What the command line changes is named as it was written; what the file has wrong keeps its line."""
    put_job(spool_root, "a", place="held")
    put_job(spool_root, "b", 'command = "true"\ncpus = "x"\n', place="held")
    put_job(spool_root, "c", place="done")
    assert 'cannot use job a: --memory: "10" has no unit' in spool("edit", "a", "--memory", "10").err
    assert '"cpus" on line 2: must be a whole number' in spool("edit", "b", "--memory", "10G").err
    assert 'cannot use job c: --with memory: "10" has no unit' in spool("requeue", "c", "--with", "memory=10").err
