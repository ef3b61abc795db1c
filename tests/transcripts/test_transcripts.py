"""One transcript a verb: the place where the words of the commands are judged.

A file `VERB.transcript` begins with the spool that it needs: `busy` is that of `prepared.py`, `empty` is a home without
a spool, both with a clock that stands still; `served` has the real clock, and jobs that run. Then come commands, each
with what it prints to stdout, to stderr, and `[CODE]` where that is not 0. A line that does not begin with `spool` is
for a shell at home, and so is what follows a `|`. `SPOOL_RECORD=1 pytest tests/transcripts` writes all of them anew.
"""

from __future__ import annotations

import ast
import logging
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager
from pathlib import Path
from unittest import mock

import pytest

from calling import no_hang
from prepared import NOW_NS, imagined, prepared
from served import Served
from spool.cli import main
from spool.cli.group import VERBS
from spool.core.model import SECOND_NS
from support import PATIENCE_S, ROOT, make_spool

SOURCE = ROOT / "src/spool/extras"
FILES = [
    path
    for path in sorted((ROOT / "tests").rglob("*.transcript"))
    if path.parent.parent.name != "extras" or (SOURCE / path.parent.name).is_dir()
]
VARIABLES = {"COLUMNS": "100", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"}
VARIES = {
    r"\b(pid +)\d+": r"\1PID",
    r"\d[\d.]* [KMGT]iB free": "SIZE free",
    r"\b\d+ KiB": "SIZE",  # as the file system has its blocks
    r"\.\w{8}\.toml": ".RANDOM.toml",
    r"\S+/spool dispatch": "spool dispatch",
    r"(\ntook) +[\d. hms]+\n": r"\1  TIME\n",
}


@contextmanager
def in_world(name: str) -> Iterator[Path]:
    """Yield a home in which the spool of that *name* is, and to which this process has gone."""
    with ExitStack() as stack:
        if name == "busy":
            home = stack.enter_context(prepared()).parent
        else:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.enter_context(imagined(home, NOW_NS if name == "empty" else None))
        if name == "served":
            make_spool(home / ".spool")
            (home / ".spool/config.toml").write_text('cpus = 8\nmemory = "8G"\nautostart = false\n')
            stack.enter_context(Served(home / ".spool")).start()
        else:
            stack.enter_context(mock.patch.object(time, "time", return_value=NOW_NS / SECOND_NS))
        kept = {name: os.environ[name] for name in ("HOME", "SPOOL_DIR", "TZ")}
        stack.enter_context(mock.patch.dict(os.environ, {**VARIABLES, **kept}, clear=True))
        stack.enter_context(mock.patch.object(os, "getpriority", return_value=0))
        stack.enter_context(mock.patch.object(tempfile, "tempdir", str(home)))
        stack.enter_context(chdir(home))
        yield home


def run(line: str) -> int:
    """Do what a line says, in this process if `spool` is to do it; return the exit code."""
    words, stdin, variables = shlex.split(line), os.devnull, dict[str, str]()
    if words[-2:-1] == ["<"]:
        *words, _, stdin = words
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    if words[0] != "spool":
        return subprocess.run(["sh", "-c", line], stdin=subprocess.DEVNULL, timeout=PATIENCE_S, check=False).returncode
    before = os.dup(0)
    with mock.patch.dict(os.environ, variables), open(stdin) as file, mock.patch.object(sys, "stdin", file), no_hang():
        os.dup2(file.fileno(), 0)
        try:
            return main.run(words[1:])
        finally:
            os.dup2(before, 0)
            os.close(before)
            sys.stdout.flush()


def stop_clocks(home: Path, since_ns: int) -> None:
    """Have what was written *since* be of the moment at which the clock stands."""
    for path in home.rglob("*"):
        if path.lstat().st_mtime_ns >= since_ns:
            os.utime(path, ns=(NOW_NS, NOW_NS), follow_symlinks=False)


def played(text: str, capfd: pytest.CaptureFixture[str]) -> str:
    """Return the transcript *text* as it is today."""
    title = text.partition("\n")[0]
    world = title.partition(":")[0]
    said = f"{title}\n"
    with in_world(world) as home:
        began_ns = home.stat().st_ctime_ns
        for line in re.findall(r"^\$ (.+)", text, re.MULTILINE):
            if world != "served":
                stop_clocks(home, began_ns)
            capfd.readouterr()
            is_piped = "spool" in line.split()[:2] and "|" in shlex.split(line)
            command, _, through = line.rpartition(" | ") if is_piped else (line, "", "")
            code = run(command)
            out, err = capfd.readouterr()
            if through:
                out = subprocess.run(["sh", "-c", through], input=out, text=True, stdout=subprocess.PIPE).stdout
            printed = "".join(part if part.endswith("\n") or not part else f"{part}\n" for part in (out, err))
            for pattern, put in VARIES.items():
                printed = re.sub(pattern, put, printed)
            printed = printed.replace(str(home), "~").replace(str(ROOT), "SPOOL").replace("\r", "\\r")
            said += f"\n$ {line}\n{printed}" + (f"[{code}]\n" if code else "")
    return said


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_transcript_is_what_the_commands_print_today(
    path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command, done again, prints the same words and ends with the same code."""
    log = logging.getLogger("spool")  # `dispatch` sends it to the stderr of this test
    monkeypatch.setattr(log, "handlers", [*log.handlers])
    monkeypatch.setattr(log, "propagate", log.propagate)
    monkeypatch.setattr(log, "level", log.level)
    text = path.read_text(encoding="utf-8")
    today = played(text, capfd)
    if os.environ.get("SPOOL_RECORD"):
        path.write_text(today, encoding="utf-8")
    else:
        assert today.split("\n") == text.split("\n")


def test_every_verb_has_a_transcript() -> None:
    """Each verb of the help is used in the transcript of its name."""
    said = {path.stem: path.read_text(encoding="utf-8") for path in FILES}
    assert [verb for verb in VERBS if f"\n$ spool {verb}" not in said.get(verb, "")] == []


NOT_HERE = {
    "spool ls --watch": "a terminal",
    **dict.fromkeys(("spool edit refused", "spool release refused"), "an engine: spool.testing.engine_claims"),
    "spool machine install": "root, and /etc",
    "spool machine install --print": "the user of the unit",
    "spool run --here -- podman run -it IMAGE": "podman",
    "spool --spool \0 dispatch": "a dispatcher that stays",
    "spool requeue --failed \0": "an array that has run: tests/end_to_end/test_arrays.py",
    "spool requeue --failed '\0_*'": "the same",
}


def proposed() -> Iterator[str]:
    """Yield each command line, of a verb and more, that a text of the source has in backquotes; NUL is a value."""
    for path in (ROOT / "src/spool").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        parts |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        for node in nodes:
            values = node.values if isinstance(node, ast.JoinedStr) else () if id(node) in parts else (node,)
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in values)
            found = re.findall("`([^`]*)`", text)
            yield from (line for line in found if re.match(r"spool [\w-]+ .|spool --spool", line))


@pytest.mark.skipif(not (SOURCE / "machine").is_dir(), reason="its transcripts went with the extras")
def test_every_command_line_that_a_message_proposes_is_done() -> None:
    """A transcript does it, with other values, and it is understood; the messages that propose it stand before it."""
    entry = re.compile(r"^\$ (.+)\n(?:[^$].*\n)*?(?:\[(\d+)\]|\Z|(?=\n\$))", re.MULTILINE)
    done = [line for path in FILES for line, code in entry.findall(path.read_text()) if code != "2"]
    words = {line: re.sub(r"…|\0|\{name\}|\b[A-Z]+\b", "@", line).split() for line in {*proposed()} - {*NOT_HERE}}
    forms = {line: "( .*)? ".join(re.escape(word).replace("@", ".*") for word in each) for line, each in words.items()}
    assert [line for line, form in forms.items() if not any(re.match(form, each) for each in done)] == []
