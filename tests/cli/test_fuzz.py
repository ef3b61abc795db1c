"""Whatever a file of spool has become, no verb that reads it hangs or ends in a traceback.

`FUZZ_VARIANTS=5000 pytest tests/cli/test_fuzz.py` tries so many variants of each kind, `FUZZ_SEED=…` others.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import json
import logging
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from calling import Command, no_hang, spawned
from spool.cli import main
from spool.client import autostart
from spool.formats.state import GpuLook
from spool.listeners import set_up_logging
from spool.machine.processes import MachineProber
from spool.state import world
from spool.store.lock import Lock
from support import PATIENCE_S, ROOT, make_spool

MANY = int(os.environ.get("FUZZ_VARIANTS", "40"))
SEED = os.environ.get("FUZZ_SEED", "1")
HUGE = 3 << 20
Words = tuple[str, ...]

LISTS: tuple[Words, ...] = (
    ("ls", "-a"), ("ls", "--json", "-a"), ("info",), ("plan",), ("why", "waits"), ("show", "waits"), ("stats",),
    ("gpus",), ("reserve", "list"), ("why", "ended"), ("show", "ended"),
)  # fmt: skip
RECORDS: tuple[Words, ...] = (
    ("show", "NAME"), ("show", "--json", "NAME"), ("why", "NAME"), ("seff", "NAME"), ("log", "NAME"),
    ("log", "--path", "NAME"), ("ls", "-a"), ("diff", "NAME", "ended"), ("attach", "--dry-run", "NAME"),
    ("gc", "--dry-run", "--older-than", "1s"), ("stats",), ("wait", "NAME", "--timeout", "1ms"),
    ("requeue", "NAME"), ("rerun", "NAME", "--name", "again"), ("cancel", "NAME"), ("plot",),
    ("edit", "NAME", "--time-limit", "1h"), ("plan",), ("suspend", "NAME"),
)  # fmt: skip
VERBS: Mapping[str, tuple[Words, ...]] = {
    "job": (
        *LISTS, ("check", "FILE"), ("check", "--strict", "queued"), ("submit", "--hold", "--name", "new", "-f", "FILE"),
        ("edit", "waits", "--priority", "7"), ("hold", "waits"), ("edit", "waits", "--first"), ("cancel", "waits"),
        ("wait", "waits", "--timeout", "1ms"), ("doctor", "-q"), ("diff", "waits", "ended"), ("release", "waits"),
    ),
    "config": (
        *LISTS, ("check", "FILE"), ("submit", "--hold", "--name", "new", "true"), ("submit", "--name", "n", "true"),
        ("doctor", "-q"), ("seff", "ended"), ("simulate",), ("gc", "--dry-run", "--older-than", "1s"),
    ),
    "reservation": (
        *LISTS, ("check", "FILE"), ("reserve", "cancel", "r"), ("doctor", "-q"),
        ("reserve", "--gpus", "0", "--for", "1h", "--name", "other"), ("gc", "--dry-run", "--older-than", "1s"),
    ),
    "record": RECORDS,
    "array": (*RECORDS, ("wait", "sweep", "--timeout", "1ms"), ("doctor", "-q")),
    "history": (
        *LISTS, ("show", "gone"), ("seff", "gone"), ("simulate",), ("plot",), ("diff", "ended"),
        ("wait", "gone", "--timeout", "1ms"), ("stats", "--by", "user"), ("why", "gone"), ("doctor", "-q"),
    ),
    "state": (*LISTS, ("machine", "status"), ("doctor", "-q"), ("wait", "waits", "--timeout", "1ms")),
    "journal": (*LISTS, ("doctor", "-q"), ("edit", "waits", "--first")),
    "events": (*LISTS, ("doctor", "-q"), ("gc", "--dry-run", "--older-than", "1s")),
    "script": (
        ("submit", "--hold", "--name", "new", "FILE"), ("check", "FILE"),
        ("submit", "--dry-run", "FILE"), ("run", "--dry-run", "FILE"),
    ),
    "parameters": (
        ("submit", "--dry-run", "--name", "new", "--param-file", "FILE", "--", "echo", "{a}"),
        ("submit", "--hold", "--name", "new", "--lines", "FILE"), ("submit", "--dry-run", "--lines", "FILE"),
    ),
    "trace": (("simulate", "--cpus", "4", "FILE"), ("simulate", "--json", "FILE")),
}  # fmt: skip
FILES: Mapping[str, tuple[str, ...]] = {
    "job": ("queued/waits.toml", "held/parked.toml", "done/ended.toml"),
    "config": ("config.toml",),
    "reservation": ("reservations/r.toml",),
    "history": ("history.jsonl",),
    "state": ("state.json", ".machine", ".id"),
    "journal": (".journal", "jobs/.last-runs.json"),
    "events": ("events.jsonl", ".listeners/hooks.json"),
    "script": ("plain.sh", "slurm.sh", "pbs.sh", "sge.sh"),
    "parameters": ("rows.csv", "lines.txt"),
    "trace": ("trace.swf", "trace.csv", "trace.swf.gz", "trace.jsonl"),
}
ALWAYS: Mapping[str, bytes] = {
    "queued/waits.toml": b"""command = ["python3", "train.py"]\ncpus = 9999\nmemory = "16G"\ngpus = 1
time_limit = "1h30m"\nsignal = "USR1@60s"\npriority = 20\nstart_after = 2030-01-01T00:00:00Z\nproject = "p"
tags = ["a", "b"]\narray = "0-9%2"\ngroup = "g"\n[env]\nA = "1"\n[retry]\nmax = 3\non = ["failed", 2]\n""",
    "held/parked.toml": b'command = "true"\ndepends_on = { all = ["ended"], any = ["gone"] }\n[resources]\nx = 1\n',
    "reservations/r.toml": b'user = "ann"\ngpu_indices = [0, 1]\nstart = 2020-01-01T00:00:00Z\nduration = "90000d"\n',
    "events.jsonl": b'{"base":0}\n{"event":"job_finished","id":"a","at":"2026-01-01T00:00:00Z","job":"x"}\n',
    ".listeners/hooks.json": b'{"offset": 12, "skipped": 0}\n',
    "plain.sh": b"#!/bin/bash\n#SPOOL --cpus 2\nsource ~/.bashrc; conda activate x\nsrun -n 2 python t.py\n",
    "slurm.sh": b"#!/bin/bash\n#SBATCH --cpus-per-task=2\n#SBATCH --mem=4G\n#SBATCH --array=0-9%2\n"
    b"#SBATCH --time=1-02:03:04\n#SBATCH --output=%x_%a.out\n#SBATCH --dependency=afterok:1\necho $SLURM_JOB_ID\n",
    "pbs.sh": b"#!/bin/sh\n#PBS -l nodes=1:ppn=4,walltime=1:00:00\n#PBS -t 0-3\n#PBS -o logs\ncd $PBS_O_WORKDIR\n",
    "sge.sh": b"#!/bin/sh\n#$ -pe smp 4 -l gpu=1\n#$ -cwd -j y\n#$ -t 1-10:2\necho $SGE_TASK_ID\n",
    "rows.csv": b'a,b,"c d"\n1,2,x\n"3,4",5,"y ""z"""\n',
    "lines.txt": "echo one\n# note\necho 'two ü'\n\n".encode(),
    "trace.swf": b"; UnixStartTime: 0\n; MaxProcs: 8\n1 0 5 10 1 -1 -1 1 20 -1 1 1 1 1 1 -1 -1 -1\n"
    b"2 3 0 10 4 -1 100 4 20 -1 1 1 1 1 1 -1 -1 -1\n",
    "trace.csv": (b"submit,run_time,gpus,cpus,user,name\n" b"0,100,1,2,ann,a\n5,7,0,1,bob,b\n"),
}  # fmt: skip
OTHERS = (
    b"NaN", b"-1", b"1e999", b"9" * 40, b"0", b'""', b"[]", b"{}", b"true", b"null", b"2026-13-45", b"1h", b"'''",
    b"\xff",
)  # fmt: skip
_WORD = re.compile(rb"[A-Za-z0-9_.:+-]+|\"[^\"\n]*\"")


OF_DISPATCHER = VERBS.keys() - {"script", "parameters", "trace"}
PASSES = 400
"""With one of so many variants, a dispatcher makes a pass too."""


@pytest.fixture(scope="session")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a spool that a dispatcher has served: jobs that ended each way, an array, one that runs no more."""
    root = make_spool(tmp_path_factory.mktemp("fuzz") / "spool")
    (root / "config.toml").write_text('autostart = false\nidle_exit = "1s"\ncpus = 4\n')
    jobs = {
        "ended": 'command = "echo out; echo step=3 > $SPOOL_METADIR/metrics"\nmemory = "50M"',
        "bad": 'command = "exit 3"', "sweep": 'command = "echo {x}"\n[matrix]\nx = [1, 2]',
    }  # fmt: skip
    for name, text in jobs.items():
        (root / "queued" / f"{name}.toml").write_text(f"{text}\n")
    spawned("--spool", root, "dispatch", "--until-idle", timeout=PATIENCE_S)
    (root / "config.toml").write_text((ROOT / "tests" / "cli" / "fuzz_config.toml").read_text())
    for name, data in ALWAYS.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(data)
    (root / "trace.swf.gz").write_bytes(gzip.compress(ALWAYS["trace.swf"]))
    shutil.copy(root / "history.jsonl", root / "trace.jsonl")
    shutil.move(root / "done" / "bad.toml", root / "running" / "bad.toml")  # with a result: its dispatcher was killed
    (root / "jobs" / "bad" / "1" / "result.toml").unlink()
    return root


def place(path: Path, data: bytes, dice: random.Random) -> str:
    """Have a variant of *data* at *path*, and return what it is."""
    path.unlink()
    match dice.randrange(60):
        case 0:
            os.mkfifo(path)
            return "fifo"
        case 1:
            path.symlink_to(dice.choice(["/dev/zero", "/dev/full", "/dev/null", "/dev/random"]))
            return "device"
        case 2:
            path.mkdir()
            return "directory"
        case 3:
            path.symlink_to(path.name)
            return "loop"
        case 4:
            path.symlink_to("nowhere")
            return "dangling"
        case 5:
            with socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
                server.bind(str(path))
            return "socket"
        case 6:
            return "missing"
        case 7:
            path.write_bytes(data)
            path.chmod(0)
            return "unreadable"
    text, what = variant(data, dice)
    path.write_bytes(text)
    return what


def variant(data: bytes, dice: random.Random) -> tuple[bytes, str]:
    """Return something that was *data*, and what was done to it."""
    at = dice.randrange(len(data) + 1)
    match dice.randrange(30):
        case 0:
            return b"", "empty"
        case 1:
            return dice.randbytes(dice.randrange(1, 5000)), "binary"
        case 2:
            return data[:at] + b"a" * dice.choice([1000, 70_000, HUGE]) + data[at:], "huge line"
        case 3:
            opening = dice.choice([b"[", b"{", b"a.", b"x=[", b'{"a":', b"[[", b"(", b"${", b"$(", b"x={y="])
            return data[:at] + opening * dice.choice([10, 900, 5000, 100_000]) + data[at:], "deep"
        case 4:
            return data[:at] + b"\0" * dice.randrange(1, 9) + data[at:], "NUL"
        case 5:
            wrong = dice.choice([b"\xff\xfe", b"\xed\xa0\x80", b"\xc3", b"\xf4\x90\x80\x80"])
            return data[:at] + wrong + data[at:], "UTF-8"
        case 6:
            return data[:at], "truncated"
        case 7:
            return data * dice.randrange(2, 400), "repeated"
        case 8:
            mark = dice.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\r", b"\x1b[2J"])
            return mark + data.replace(b"\n", b"\r\n"), "marked"
    for _ in range(dice.randrange(1, 5)):
        data = mutated(data, dice)
    return data, "mutated"


def mutated(data: bytes, dice: random.Random) -> bytes:
    """Return valid text with one thing changed."""
    words, lines = list(_WORD.finditer(data)), data.split(b"\n")
    match dice.randrange(6):
        case 0 if words:
            word = dice.choice(words)
            return data[: word.start()] + dice.choice([*OTHERS, dice.choice(words)[0]]) + data[word.end() :]
        case 1 if words:
            word = dice.choice(words)
            return data[: word.start()] + b"9" * dice.randrange(1, 30) + data[word.end() :]
        case 2:
            del lines[dice.randrange(len(lines))]
        case 3:
            lines.insert(dice.randrange(len(lines) + 1), dice.choice(lines))
        case 4:
            dice.shuffle(lines)
        case _:
            changed = bytearray(data or b"x")
            changed[dice.randrange(len(changed))] = dice.randrange(256)
            return bytes(changed)
    return b"\n".join(lines)


def fault_of(act: Callable[[], object]) -> str:
    """Return the hang or the traceback in which *act* ended; "" for neither."""
    said = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), no_hang():
            act()
    except BaseException:
        return traceback.format_exc()
    return traced(said.buffer.getvalue().decode("utf-8", "replace"))  # type: ignore[attr-defined]


def traced(text: str) -> str:
    """Return the end of what was said if there is a traceback in it."""
    return text[-3000:] if "Traceback (most" in text or "--- Logging error" in text else ""


def fault_of_a_pass(root: Path) -> str:
    """Return the hang or the traceback in which a pass of a dispatcher over that spool ended; "" for neither."""
    try:
        ended = spawned("--spool", root, "dispatch", "--once", errors="replace", timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        return "a pass hangs"
    return traced(ended.stderr)


def targets(root: Path, kind: str) -> list[Path]:
    """Return the files of a kind in that spool."""
    if kind == "array":
        return [root / "jobs" / "sweep" / "1" / name for name in ("array.toml", "job.toml")]
    if kind == "record":
        found = (path for job in ("ended", "bad") for path in sorted((root / "jobs" / job / "1").iterdir()))
        return [path for path in found if path.is_file()]
    return [root / name for name in FILES[kind] if (root / name).is_file()]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a helper that was not waited for
@pytest.mark.parametrize("kind", VERBS)
def test_no_verb_hangs_or_ends_in_a_traceback(
    kind: str, lived: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded variants of each file by each verb that reads it: a FIFO, a device, a link to itself, damaged text."""
    dice, faults, tried = random.Random(f"{SEED} {kind}"), dict[str, str](), dict[str, int]()
    verbs, root = VERBS[kind], tmp_path / "spool"
    monkeypatch.setenv("SPOOL_DIR", str(root))
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(lived, root)
    monkeypatch.chdir(root)
    monkeypatch.setattr(world.GpuWatcher, "look", lambda *_, **__: GpuLook())  # not a process each time
    monkeypatch.setattr(MachineProber, "has_left_processes", lambda *_: False)  # nor a walk over all
    monkeypatch.setattr(autostart, "start", lambda *_: 0)  # where config.toml cannot say that it is not wanted
    with contextlib.ExitStack() as kept:
        if kind == "state":  # else nobody believes it
            kept.callback(Lock(str(root / ".lock")).release)
        for number in range(MANY):
            path = dice.choice(targets(root, kind))
            data = path.read_bytes()
            what = place(path, data, dice)
            tried[what] = tried.get(what, 0) + 1
            job = path.parent.parent.name if kind in ("record", "array") else ""
            words = [job if word == "NAME" else word for word in verbs[number % len(verbs)]]
            words = [str(path) if word == "FILE" else word for word in words]
            fault = fault_of(lambda words=words: main.run(words))  # type: ignore[misc]
            if not fault and number % PASSES == 7 and kind in OF_DISPATCHER:
                words, fault = ["dispatch", "--once"], fault_of_a_pass(root)
            if fault:
                last = fault.strip().splitlines()
                where = [line for line in last if line.lstrip().startswith("File ")]
                faults.setdefault(f"{where[-1:]} {last[-1][:200]}", f"{words} of {path.name}: {what}\n{fault}")
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif os.path.lexists(path):
                path.unlink()
            restored(lived, root)
    print(f"{kind}: {sum(tried.values())} variants, {json.dumps(tried)}")
    assert not faults, "\n\n".join(faults.values())


def restored(lived: Path, root: Path) -> None:
    """Have all files as they were."""
    wanted = {
        os.path.relpath(path, lived): os.lstat(path)
        for folder, _, files in os.walk(lived)
        for path in (os.path.join(folder, name) for name in files)
    }
    for folder, folders, files in os.walk(root):
        for name in [*files, *(each for each in folders if os.path.islink(os.path.join(folder, each)))]:
            path = os.path.join(folder, name)
            known, now = wanted.get(os.path.relpath(path, root)), os.lstat(path)
            if known is None:
                os.unlink(path)
            elif (now.st_mtime_ns, now.st_size, now.st_mode) == (known.st_mtime_ns, known.st_size, known.st_mode):
                del wanted[os.path.relpath(path, root)]
            else:
                os.unlink(path)
    for name in wanted:
        os.makedirs(root / os.path.dirname(name), exist_ok=True)
        if not (root / name).exists():
            shutil.copy2(lived / name, root / name)


def test_an_output_without_an_end_is_none(lived: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's log may be a link to a device: it keeps nothing, and no verb reads on for ever."""
    shutil.copytree(lived, root := tmp_path / "spool")
    monkeypatch.setenv("SPOOL_DIR", str(root))
    (log := root / "jobs" / "ended" / "1" / "log").unlink()
    log.symlink_to("/dev/zero")
    for words in (["log", "ended"], ["log", "--lines", "5", "ended"], ["show", "ended"], ["why", "ended"]):
        assert not fault_of(lambda words=words: main.run(words))  # type: ignore[misc]


NAMED: tuple[Words, ...] = (
    ("check", "FILE"), ("submit", "--dry-run", "-f", "FILE", "--name", "j"), ("submit", "--dry-run", "--lines", "FILE"),
    ("submit", "--dry-run", "--param-file", "FILE", "--", "true"), ("simulate", "FILE"), ("submit", "FILE"),
)  # fmt: skip


@pytest.mark.parametrize("what", ["pipe", "/dev/zero", "/dev/full", "/dev/null"])
def test_what_a_user_names_may_be_anything(spool: Command, tmp_path: Path, what: str) -> None:
    """A pipe that nobody writes to is not waited for, and what has no end is not read to its end: both are an error."""
    path = what
    if what == "pipe":
        os.mkfifo(path := str(tmp_path / "pipe.toml"))
    for words in NAMED:
        with no_hang():
            assert spool(*[path if word == "FILE" else word for word in words]).code in (1, 2, 4), words


def test_a_pipe_with_a_slow_writer_is_read_to_its_end(spool: Command, tmp_path: Path) -> None:
    """As that of `<(command)`: what comes late counts."""
    ours, theirs = os.pipe()
    writer = subprocess.Popen(
        ["/bin/sh", "-c", "read go; echo 'echo one'; read go; echo 'echo two'"], stdin=subprocess.PIPE, stdout=theirs
    )
    os.close(theirs)
    assert writer.stdin is not None
    os.write(writer.stdin.fileno(), b"\n\n")  # both lines are on their way, whenever the shell has written them
    said = spool("submit", "--dry-run", "--lines", f"/dev/fd/{ours}")
    writer.stdin.close()
    writer.wait()
    os.close(ours)
    assert said.out.count("line = ") == 2


@pytest.mark.parametrize(("words", "code"), [(("info",), 0), (("submit", "--name", "j", "true"), 0), (("nosuch",), 2)])
def test_messages_that_cannot_be_written_change_nothing(spool_root: Path, words: Words, code: int) -> None:
    """Stderr on a full disk, or without a reader: the command does its work, and its code says how it went."""
    (spool_root / "config.toml").write_text("autostart = false\n")
    reader, broken = os.pipe()
    os.close(reader)
    for at, stderr in enumerate((os.open("/dev/full", os.O_WRONLY), broken)):
        named = [f"j{at}" if word == "j" else word for word in words]
        assert spawned(*named, stdout=subprocess.DEVNULL, stderr=stderr).returncode == code
        os.close(stderr)


@pytest.mark.parametrize(("stream", "codes"), [("closed", (0,)), ("/dev/full", (5,)), ("broken", (1, 141))])
@pytest.mark.parametrize(
    "words",
    [("ls", "--json"), ("--help",), *(("submit", "--hold", *way, "--", "true") for way in ((), ("--set=prolog=x",)))],
)
def test_output_that_cannot_be_written_is_no_traceback(
    spool_root: Path, words: Words, stream: str, codes: tuple[int, ...]
) -> None:
    """Stdout closed, on a full disk, or without a reader: a code, and at most a line."""
    (spool_root / "config.toml").write_text("autostart = false\n")
    reader, stdout = os.pipe()
    os.close(reader)
    if stream == "/dev/full":
        os.close(stdout)
        stdout = os.open(stream, os.O_WRONLY)
    closing = (lambda: os.close(1)) if stream == "closed" else None
    ended = spawned(*words, stdout=stdout, stderr=subprocess.PIPE, preexec_fn=closing)
    os.close(stdout)
    assert (len(ended.stderr.splitlines()) <= 1, "Exception ignored" in ended.stderr) == (True, False)
    assert ended.returncode in codes


def test_a_line_of_the_log_that_has_no_room_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback of the log's own is printed into the log, once there is room again or elsewhere."""

    class Full(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                self.full = False
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    stderr, log = Full(), logging.getLogger("spool")
    monkeypatch.setattr(sys, "stderr", stderr)
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(log, name, getattr(log, name))
    monkeypatch.setattr(log, "handlers", [])
    set_up_logging("info", journald=False)
    log.info("lost")
    log.info("kept")
    assert stderr.getvalue().splitlines()[-1].endswith("kept")
    assert len(stderr.getvalue().splitlines()) == 1
