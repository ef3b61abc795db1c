"""Completion as a user has it: real shells on a terminal, and how fast the answer is."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from calling import put_job, spawned
from shell import Home, Terminal
from support import wait_for

# How each is started, and a key, Ctrl-G, that shows the line.
SHELLS = {
    "bash": (
        ["--norc", "--noprofile", "-i"],
        r"""bind -x '"\C-g": printf "LINE<%s>\n" "$READLINE_LINE"; READLINE_LINE='""",
    ),
    "zsh": (
        ["-f", "-i"],
        "autoload -Uz compinit && compinit -i; "
        'show() { print -r -- "LINE<$BUFFER>"; BUFFER=; zle redisplay }; zle -N show; bindkey "^G" show',
    ),
}


class Shell(Terminal):
    """A shell on a terminal of its own, with the completion that `spool completion` prints and nothing else set up."""

    def __init__(self, home: Home, shell: str) -> None:
        words, show = SHELLS[shell]
        super().__init__([shell, *words], {**home.environment, "TERM": "dumb", "PS1": "$ "}, home.path)
        self.type(f'{show}; eval "$(spool completion {shell})"; echo rea""dy\r')
        self.shows("ready\r\n")

    def completed(self, typed: str) -> str:
        """Return the line after *typed* and a TAB."""
        before = len(self.screen())
        self.type(f"{typed}\t\x07")
        return wait_for(lambda: re.search(r"LINE<(.*?)>", self.screen()[before:]), what="the line")[1]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Give a home with a spool in which jobs of all kinds lie."""
    found = Home(tmp_path_factory.mktemp("home"))
    found.run("spool", "init")
    put_job(found.spool, "train-1", 'command = "true"\nproject = "vision"\ntags = ["night", "big"]\ngroup = "g1"\n')
    put_job(found.spool, "test-1", 'command = "true"\nproject = "nlp"\n', place="held")
    put_job(found.spool, "old-1", place="done")
    (found.spool / "jobs" / "ran-1" / "1").mkdir(parents=True)
    (found.spool / "jobs" / ".notes").mkdir()
    (found.spool / "reservations" / "demo.toml").write_text("")
    return found


@pytest.fixture(scope="module", params=SHELLS)
def terminal(request: pytest.FixtureRequest, home: Home) -> Iterator[Shell]:
    """Give a terminal with each shell."""
    if shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param} here")
    found = Shell(home, request.param)
    yield found
    found.leave()


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("spool rel", "spool release "),
        ("spool cancel tr", "spool cancel train-1 "),
        ("spool release t", "spool release test-1 "),
        ("spool log r", "spool log ran-1 "),
        ("spool log ", "spool log ran-1 "),
        ("spool reserve cancel d", "spool reserve cancel demo "),
        ("spool ls --state que", "spool ls --state queued "),
        ("spool ls --state queued,fi", "spool ls --state queued,finished "),
        ("spool ls --project vi", "spool ls --project vision "),
        ("spool ls --columns name,pri", "spool ls --columns name,priority "),
        ("spool submit -d tr", "spool submit -d train-1 "),
        ("spool submit --signal USR1", "spool submit --signal USR1@60s "),
        ("spool requeue --set prio", "spool requeue --set priority= "),
        ("spool edit --unset mem", "spool edit --unset memory "),
    ],
)
def test_a_shell_completes_what_can_stand_there(terminal: Shell, typed: str, line: str) -> None:
    """A TAB writes the one word that fits."""
    assert terminal.completed(typed) == line


def test_a_shell_completes_files_where_a_script_can_stand(terminal: Shell, home: Home) -> None:
    """As it does for any other program."""
    (home.path / "simulate.sh").write_text("")
    assert terminal.completed("spool submit simu") == "spool submit simulate.sh "


def test_there_is_no_complaint_where_there_is_no_spool(terminal: Shell, tmp_path: Path) -> None:
    """The line stays as it was typed."""
    typed = f"spool --spool {tmp_path}/none cancel tr"
    assert terminal.completed(typed) == typed


@pytest.mark.parametrize("words", ["spool cancel tr", "spool rel"])
def test_a_completion_imports_nothing_that_it_does_not_need(home: Home, words: str) -> None:
    """The shell waits for it: neither the list of jobs nor the packages that take long to import are loaded."""
    code = "import sys; from spool.cli.main import run; run([]); print(*sys.modules, file=sys.stderr)"
    line = {"COMP_WORDS": words, "COMP_CWORD": words.split()[-1]}
    asked = {**home.environment, "_SPOOL_COMPLETE": "fish_complete", **line}
    done = spawned(program=("-c", code), env=asked, check=True)
    assert done.stdout.startswith("plain,")
    slow = {"spool.query.jobs", "spool.machine.host", "psutil", "rich", "tomlkit", "libtmux", "filelock", "pynvml"}
    assert slow & set(done.stderr.split()) == set()
