"""Whatever of a spool cannot be read, every verb says so in a line, ends with a documented code, and never hangs."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from calling import Command, asked, no_hang, put_job
from cli.records import end, metadir_of
from spool.cli import main
from spool.client import autostart
from spool.core.model import Grant, Request, Result, State
from spool.formats import run_records
from spool.formats.capabilities import capabilities, loaded
from spool.formats.run_records import render_history, render_result
from spool.query import snapshot
from spool.store.edited import Settings
from spool.store.tolerant import TolerantSpool
from support import make_spool

NOBODY = 65534
LISTS: tuple[tuple[str, ...], ...] = (
    ("ls",), ("ls", "-a"), ("ls", "--json"), ("info",), ("plan",), ("why", "waits"), ("stats",), ("doctor", "-q"),
    ("gpus",), ("reserve", "list"),
)  # fmt: skip
VERBS: tuple[tuple[str, ...], ...] = (
    *LISTS, ("show", "waits"), ("show", "ended"), ("log", "ended"), ("log", "--path", "ended"), ("why", "ended"),
    ("wait", "ended", "--timeout", "10ms"), ("wait", "waits", "--timeout", "10ms"), ("seff", "ended"),
    ("attach", "ended", "--dry-run"), ("gc", "--dry-run", "--older-than", "1s"), ("pause",), ("resume",),
    ("hold", "waits"), ("release", "waits"), ("edit", "waits", "--priority", "7"), ("requeue", "ended"),
    ("cancel", "waits"), ("submit", "-n", "new", "--", "true"), ("submit", "-n", "other", "--cpus=1", "--hold", "true"),
    ("init",),
)  # fmt: skip
FILES = (
    "paused", "state.json", ".journal", "history.jsonl", "dispatcher.log", "config.toml", "events.jsonl", ".lock",
    "README", "jobs/.last-runs.json", "jobs/ended/1/result.toml", "jobs/ended/1/run.sh", "jobs/ended/1/log",
    "queued/waits.toml", "done/ended.toml",
)  # fmt: skip
FOLDERS = ("jobs", "jobs/ended", "jobs/ended/1", "running", "held", "done", "queued", "hooks", "reservations", ".tmp")


def spool_at(root: Path) -> None:
    """Make a spool with a job that waits and one that has ended."""
    make_spool(root)
    (root / "hooks").mkdir()
    (root / "config.toml").write_text("autostart = false\nidle_exit = '1s'\n")
    put_job(root, "waits", 'command = "true"\ncpus = 9999\n')
    put_job(root, "ended", place="done")
    metadir = end(root, Result("ended", 1, 1, State.FINISHED, "", 1, 2, 3, 0, user="me"))
    granted = run_records.GrantRecord("ended", 1, grant=Grant(cpus=1))
    (metadir / "grant.toml").write_bytes(run_records.render_grant(granted))
    (metadir / "log").write_text("out\n")


def directory(path: Path) -> None:
    """Have a directory in the place of a file."""
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)


def fifo(path: Path) -> None:
    """Have a FIFO there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    os.mkfifo(path)


def file(path: Path) -> None:
    """Have a file in the place of a directory."""
    shutil.rmtree(path)
    path.write_text("")


def unreadable(path: Path) -> None:
    """Have nobody but root read it."""
    if not path.exists():
        path.write_text("")
    path.chmod(0)


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    *((name, damage) for name in FILES for damage in (directory, fifo, unreadable)),
    *((name, damage) for name in FOLDERS for damage in (file, fifo, unreadable)),
]


def call(words: tuple[str, ...]) -> tuple[int | str, str, str]:
    """Call a verb in this process; return its code, or the traceback of what it raised, and what it said."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True), io.StringIO()
    code: int | str
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), no_hang():
            code = main.run(list(words))
    except BaseException:
        code = traceback.format_exc()
    return code, out.buffer.getvalue().decode("utf-8", "replace"), err.getvalue()  # type: ignore[attr-defined]


def as_nobody(work: Callable[[], object]) -> object:
    """Do *work* as a user to whom the modes of files mean something, and return what it returns, by way of JSON."""
    with tempfile.TemporaryFile("w+") as answer:
        pid = os.fork()
        if pid == 0:
            try:
                if os.getuid() == 0:
                    os.setgroups([])
                    os.setgid(NOBODY)
                    os.setuid(NOBODY)
                json.dump(work(), answer)
                answer.flush()
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.waitpid(pid, 0)
        answer.seek(0)
        return json.load(answer)


@pytest.fixture
def anywhere() -> Iterator[Path]:
    """Give a directory that every user may enter."""
    made = Path(tempfile.mkdtemp(prefix="spool-damaged-", dir="/tmp"))
    made.chmod(0o777)
    yield made
    for path, folders, _ in os.walk(made):
        for folder in folders:
            with contextlib.suppress(OSError):
                os.chmod(os.path.join(path, folder), 0o700)
    shutil.rmtree(made)


def summary(wrong: list[object]) -> str:
    """Return what went wrong, one of a kind."""
    kinds: dict[object, list[object]] = {}
    for name, damage, words, code, _, err in wrong:  # type: ignore[misc, attr-defined]
        last = code.strip().splitlines()[-1] if isinstance(code, str) else code
        kinds.setdefault((name, damage, last, err[-300:]), []).append(" ".join(words))
    return "\n".join(f"{kind}: {words}" for kind, words in kinds.items())


def test_no_damage_makes_a_verb_fail_without_a_word(anywhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry as a directory, a file, a FIFO or unreadable: a documented code, whole lines, no hang."""

    def work() -> list[object]:
        wrong: list[object] = []
        for at, (name, damage) in enumerate(DAMAGES):
            root = anywhere / str(at)
            spool_at(root)
            os.environ["SPOOL_DIR"] = str(root)
            damage(root / name)
            for words in VERBS:
                code, out, err = call(words)
                lines = err.splitlines()
                documented = code in (0, 1, 3, 4, 5, 124, 130)
                whole = all(line.startswith(("spool: ", "  ", "2")) for line in lines)  # 2: a line of the log
                told = bool(lines) or code in (0, 124) or words[0] == "doctor"
                lists = words not in LISTS or code == 0 or words[0] in ("why", "doctor") or name == "queued"
                if not (documented and whole and told and lists):
                    wrong.append((name, damage.__name__, words, code, out, err))
        return wrong

    monkeypatch.setattr(autostart, "start", lambda *_: 0)  # where config.toml cannot say that it is not wanted
    monkeypatch.setattr(snapshot, "_LONG_PATIENCE_NS", 0)  # no GPU is asked for
    monkeypatch.setattr(snapshot, "_GPU_PATIENCE_NS", 0)
    monkeypatch.setenv("HOME", str(anywhere))
    monkeypatch.setenv("SPOOL_DIR", str(anywhere / "whole"))
    spool_at(anywhere / "whole")
    for words in VERBS:  # all is imported by somebody who may read the interpreter's files
        call(words)
    wrong = as_nobody(work)
    assert isinstance(wrong, list)
    assert not wrong, summary(wrong)


def test_one_unreadable_metadir_leaves_the_rest_of_the_list(anywhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ls, info, plan and why show every other job and tell of the one in a line; its own verbs end with code 5.

    Doctor and gc end with 1.
    """
    root = anywhere / "spool"
    monkeypatch.setenv("HOME", str(anywhere))
    monkeypatch.setenv("SPOOL_DIR", str(root))
    monkeypatch.setattr(snapshot, "_LONG_PATIENCE_NS", 0)

    def work() -> object:
        spool_at(root)
        put_job(root, "bad", place="running")
        (root / "jobs" / "bad" / "1").mkdir(parents=True)
        (root / "jobs" / "bad").chmod(0)
        return {" ".join(words): call(words) for words in (*LISTS[:6], ("show", "bad"), ("log", "bad"), *others)}

    others = (("doctor",), ("gc", "--older-than", "1d", "--dry-run"))
    for words in (*LISTS, ("show", "ended"), ("log", "ended"), *others):  # imported here, where that is allowed
        call(words)
    found = as_nobody(work)
    assert isinstance(found, dict)
    for verb in ("ls", "ls -a", "ls --json", "info", "plan", "why waits"):
        code, out, err = found[verb]
        assert code == 0, (verb, code, err)
        lines = [line for line in err.splitlines() if "cannot read" in line]
        assert len(lines) == 1, (verb, err)
        assert f"{root}/jobs/bad: " in lines[0]
        assert "waits" in out or verb == "info"
    rows = {row["name"]: row for row in json.loads(found["ls --json"][1])["jobs"]}
    assert rows.keys() == {"waits", "bad"}
    assert f"{root}/jobs/bad: " in rows["bad"]["reason"]
    for verb in ("show bad", "log bad"):
        code, out, err = found[verb]
        assert (code, out, err.count("\n")) == (5, "", 1), (verb, code, err)
    for words in others:
        code, out, err = found[" ".join(words)]
        assert (code, f"{root}/jobs/bad: " in out + err) == (1, True), (words, out, err)


def test_what_cannot_be_read_is_not_told_as_empty(anywhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a readable directory of jobs there may be jobs, and a spool that may not be entered is one."""
    root = anywhere / "spool"
    monkeypatch.setenv("HOME", str(anywhere))
    monkeypatch.setenv("SPOOL_DIR", str(root))
    monkeypatch.setattr(snapshot, "_LONG_PATIENCE_NS", 0)
    verbs = (("ls",), ("ls", "-a"), ("info",), ("plan",), ("stats",), ("doctor",))

    def work() -> object:
        spool_at(root)
        for name in ("queued", "running", "held", "history.jsonl", "done"):
            (root / name).chmod(0)
        closed = {" ".join(words): call(words)[1:] for words in verbs}
        root.chmod(0)
        return closed, call(("ls",))

    for words in (*verbs, ("doctor", "-q")):  # imported here, where that is allowed
        call(words)
    for capability in capabilities():
        for target in filter(None, (capability.checks, capability.listener, capability.listens)):
            loaded(target)
    found, (code, _, said) = as_nobody(work)  # type: ignore[misc]
    for verb, (out, err) in found.items():
        assert "Permission denied" in out + err, verb
        empty = [words for words in ("no active", "no jobs", "no waiting", "no run has") if words in out + err]
        assert not empty, (verb, out, err)
    assert (code, "Permission denied" in said, "spool init" in said) == (5, True, False)


def test_a_list_looks_up_where_its_spool_lies_once(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read strictly for each row costs no new spool for each row."""
    spool = TolerantSpool(str(spool_root))
    monkeypatch.setattr(os.path, "realpath", None)
    assert [spool.strict.names("queued") for _ in range(2)] == [[], []]


@pytest.mark.parametrize("damage", [directory, fifo, lambda path: (path.unlink(), path.symlink_to("nowhere"))])
def test_a_configuration_that_cannot_be_read_leaves_the_last_good_one(
    spool: Command, spool_root: Path, damage: Callable[[Path], None]
) -> None:
    """What was in force stays so and the problem is told, also by the commands; when the file is back it counts."""
    path = spool_root / "config.toml"
    path.write_text("autostart = false\ncpus = 3\n")
    settings = Settings(str(spool_root))
    damage(path)
    assert settings.reload() is False
    assert settings.config.policy is not None
    assert settings.config.cpus == 3
    assert f": {path}: " in str(settings.problem)
    for words in (("plan",), ("info",)):
        said = spool(*words)
        assert f": {path}: " in said.out + said.err
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    path.write_text("cpus = 4\n")
    assert settings.reload()
    assert (settings.config.cpus, settings.problem) == (4, None)


def test_a_configuration_that_could_not_be_read_for_a_moment_is_read_by_the_next_look(
    spool_root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a descriptor to spare the old one stays in force, is told once, and the new one counts in the end."""
    path = spool_root / "config.toml"
    path.write_text("cpus = 3\n")
    settings = Settings(str(spool_root))
    path.write_text("cpus = 4\nautostart = false\n")

    def fails(path: str) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    with monkeypatch.context() as patch:
        patch.setattr("spool.store.edited.read_config", fails)
        assert [settings.reload() for _ in range(3)] == [False] * 3
        assert (settings.config.cpus, os.strerror(errno.EMFILE) in str(settings.problem)) == (3, True)
        assert len(caplog.records) == 1
    assert settings.reload()
    assert (settings.config.cpus, settings.problem, settings.reload()) == (4, None, False)


def test_a_configuration_that_may_not_be_read_is_told_until_it_may(anywhere: Path) -> None:
    """Without the right to read it the last good one stays in force; a chmod is enough to have it read."""
    root = anywhere / "spool"
    make_spool(root)

    def work() -> object:
        spool_at(root.with_name("mine"))
        path = root.with_name("mine") / "config.toml"
        path.write_text("cpus = 3\n")
        settings = Settings(str(path.parent))
        path.chmod(0)
        changed = settings.reload()
        told = [settings.config.cpus, settings.problem, changed]
        path.chmod(0o600)
        settings.reload()
        return [*told, settings.problem]

    cpus, problem, changed, after = as_nobody(work)  # type: ignore[misc]
    assert (cpus, changed, after) == (3, False, None)
    assert "Permission denied" in problem


KINDS = {
    "unknown word": lambda text: text.replace(b'"failed"', b'"evaporated"'),
    "cut off": lambda text: text[: text.index(b"outcome") + 4],
    "empty": lambda text: b"",
    "no text": lambda text: b"\xff\x00\xff",
}


@pytest.fixture(params=KINDS)
def ended(request: pytest.FixtureRequest, spool_root: Path) -> Result:
    """Make a job that has failed, of which the record of the end is damaged."""
    put_job(spool_root, "x", place="done")
    now, metadir = time.time_ns(), metadir_of(spool_root, "x")
    end = Result("x", 1, 1, State.FAILED, "exit code 3", now, now, now, 3, request=Request(), grant=Grant(1))
    (metadir / "result.toml").write_bytes(KINDS[request.param](render_result(end)))
    (metadir / "rc").write_text("3\n")
    return end


def test_an_end_that_cannot_be_understood_is_told_as_that(spool: Command, ended: Result) -> None:
    """`ls`, `show`, `wait`, `seff` and `requeue --failed` name the record; none calls it cancelled or running."""
    (row,) = asked(spool, "ls", "--all")["jobs"]
    assert (row["name"], row["state"]) == ("x", "invalid")
    assert "result" in row["reason"]
    shown = asked(spool, "show", "x")
    assert (shown["row"]["state"], shown["runs"][-1]["state"]) == ("invalid", "invalid")
    assert spool("wait", "x").code == 4
    assert spool("seff", "x").code != 0
    assert "`spool requeue x`" in spool("requeue", "--failed").err


def test_the_history_tells_of_an_end_whose_record_is_damaged(spool: Command, spool_root: Path, ended: Result) -> None:
    """Where its line is there, everything follows from that."""
    (spool_root / "history.jsonl").write_bytes(render_history(ended))
    (row,) = asked(spool, "ls")["jobs"]
    assert (row["state"], row["exit_code"]) == ("failed", 3)
    assert asked(spool, "show", "x")["runs"][-1]["state"] == "failed"
    assert spool("wait", "x").code == 3
    assert asked(spool, "seff", "x")["state"] == "failed"
    assert spool("requeue", "--failed", "--dry-run").code == 0


def test_a_line_of_the_history_with_an_unknown_word_is_told_in_the_list(
    spool: Command, spool_root: Path, ended: Result
) -> None:
    """The short list, too, has the job; `stats` counts the line as one that it cannot read."""
    line = render_history(ended).replace(b'"failed"', b'"evaporated"')
    (spool_root / "history.jsonl").write_bytes(line)
    (row,) = asked(spool, "ls")["jobs"]
    assert (row["name"], row["state"]) == ("x", "invalid")
    assert "evaporated" in row["reason"]
    assert "1" in (told := spool("stats").err), told
