"""Nothing that others wrote reaches the terminal as a control: no escape, no bidi control, in any verb."""

from __future__ import annotations

import json
import re
import sys
import time
import tomllib
import unicodedata
from pathlib import Path

import pytest

from calling import Command, Said, put_job
from cli.records import end
from cli.records import view as last_view
from spool.cli.group import VERBS
from spool.core.errors import shown
from spool.core.model import Grant, Result, State
from spool.formats import jobfile, run_records
from spool.formats.schema import table
from spool.formats.state import JobView
from spool.store.lock import Lock
from support import make_spool

RAW = "\x9b31m\u202e\u2066\u2028\x85\u200b"  # what TOML lets stand as it is
HOSTILE = f"h\x1b[31m\x07\x08\r\n\t{RAW}"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def escaped(text: str) -> str:
    """Return *text* as a string of TOML that names every character."""
    return '"' + "".join(f"\\u{ord(char):04x}" for char in text) + '"'


def controls(text: str) -> str:
    """Return what of *text* a terminal would take for a control."""
    return "".join(
        char for char in text if char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    )


def tame(said: Said) -> None:
    """See that nothing of what a command said is a control, and that it is no traceback."""
    assert not controls(said.out), ascii(said.out)
    assert not controls(said.err), ascii(said.err)
    assert "Traceback" not in said.err


def keys(kind: str) -> list[str]:
    """Return every key that a file of this kind may have."""
    found = re.findall(r"^\| `([a-z_.A-Z]+)`", table(kind), re.MULTILINE)
    assert len(found) > 5
    return [key.replace("NAME", escaped(HOSTILE)) for key in found]


def jobs(root: Path) -> list[str]:
    """Put a job for each key into the spool whose value is hostile, some good ones too; return the names."""
    names = []
    for at, key in enumerate(keys("job")):
        head = "" if key == "command" else 'command = "true"\n'
        for how, value in (("a", escaped(HOSTILE)), ("b", f'"{RAW}"'), ("c", f"[{escaped(HOSTILE)}]")):
            put_job(root, f"k{at}{how}", f"{head}{key} = {value}\n")
            names.append(f"k{at}{how}")
    text = escaped(HOSTILE)
    plain = {
        "tagged": f'project = "p"\ncommand = {text}\n[env]\nX = {text}\n',
        "raw": f'command = "{RAW}" # {RAW}\n',
        "unknown": f'command = "true"\n{text} = 1\n',
        "torn": f'command = "{RAW}\n',
        "elsewhere": f'command = "true"\nstdout = "/tmp/{RAW}"\ndepends_on = "runs"\n',
        "where": f'command = "true"\nworkdir = "/nowhere/{RAW}"\n',
    }
    for name, keys_of in plain.items():
        put_job(root, name, keys_of)
    return names + list(plain)


def records_of(root: Path, name: str, outcome: State, reason: str = HOSTILE) -> None:
    """Give job *name* an ended run whose every text is hostile, with a line of history."""
    put_job(root, name, f"command = {escaped(HOSTILE)}\n", "done")
    now = time.time_ns()
    result = Result(
        name, 1, 1, outcome, reason, 1, now - 2_000_000_000, now, 3, user=HOSTILE, project=HOSTILE, group=HOSTILE,
        tags=(HOSTILE,), executor=HOSTILE, host=HOSTILE, grant=Grant(gpu_uuids=(HOSTILE,), gpu_indices=(0,)),
    )  # fmt: skip
    metadir = end(root, result)
    grant = run_records.GrantRecord(
        name, 1, grant=result.grant, user=HOSTILE, executor=HOSTILE, granted_at_ns=now, host=HOSTILE
    )
    (metadir / "grant.toml").write_bytes(run_records.render_grant(grant))
    (metadir / "kept").write_text(HOSTILE)
    (metadir / "failure").write_text(HOSTILE)
    (metadir / "run.sh").write_text(f"stdout='/nowhere/{HOSTILE}'\n")
    (metadir / "stop").write_text(f"cancel by {HOSTILE} at 1: {HOSTILE}\n")


def hostile(root: Path) -> list[str]:
    """Fill a spool with hostile texts, and return its jobs."""
    names = jobs(root)
    for outcome in (State.FAILED, State.FINISHED, State.CANCELLED):
        records_of(root, f"ended-{outcome}", outcome)
        names.append(f"ended-{outcome}")
    put_job(root, "runs", f"command = {escaped(HOSTILE)}\n", "running")
    (root / "jobs" / "runs" / "1").mkdir(parents=True)
    put_job(root, "refused", place="held")
    (root / "held" / "refused.toml.reason").write_text(HOSTILE)
    put_job(root, "bad")
    (root / "queued" / "bad.toml.error").write_text(f"- {HOSTILE}\n{HOSTILE}\n")
    for at, key in enumerate(keys("reservation")):
        (root / "reservations" / f"r{at}.toml").write_text(f'gpus = 1\nduration = "2h"\n{key} = {escaped(HOSTILE)}\n')
    (root / "reservations" / "good.toml").write_text(
        f'gpus = 1\nduration = "2h"\nuser = {escaped(HOSTILE)}\ncomment = {escaped(HOSTILE)}\n'
    )
    (root / "paused").write_text(HOSTILE)
    (root / "hooks").mkdir()
    (root / "hooks" / f"finished.{HOSTILE}").write_text("")
    (root / "hooks" / "finished").write_text("")
    return [*names, "runs", "refused", "bad"]


def test_no_text_of_a_file_moves_the_cursor(spool: Command, spool_root: Path) -> None:
    """Every verb shows what each key, record, reason and path of the spool says with its controls escaped."""
    names = hostile(spool_root)
    view = JobView(state="queued", reason=HOSTILE, user=HOSTILE, project=HOSTILE, tags=(HOSTILE,))
    last_view(spool_root, dict.fromkeys(names, view), problems=(HOSTILE,), host=HOSTILE)
    lock = Lock(str(spool_root / ".lock"))  # a dispatcher lives, and so what it said counts
    try:
        for words in LISTS:
            tame(spool(*words))
            if "gc" not in words:
                json.loads(said(spool(*words, "--json")).out)
    finally:
        lock.release()
    for words in LISTS:
        tame(spool(*words))
    for name in names:
        tame(spool("show", name))
        tame(spool("check", spool_root / "queued" / f"{name}.toml"))
    for name in ("tagged", "raw", "unknown", "bad", "refused", "runs", "ended-failed", "k0a", "k1a", "k4b", "k5c"):
        for words in (
            "why",
            "log",
            "log --path",
            "wait --timeout 1ms",
            "seff",
            "attach --dry-run",
            "edit --priority 3",
        ):
            tame(spool(*words.split(), name))
        for place in ("queued", "done"):
            path = spool_root / place / f"{name}.toml"
            tame(spool("submit", "-f", path, "-n", f"new-{name}", "--dry-run"))
            tame(spool("submit", "-f", path))
    for verb in ("hold", "release", "requeue", "cancel"):
        tame(spool(verb, *names))
    assert shown("\x1b") in spool("show", "ended-failed").out  # it is shown, not left out


def test_no_key_of_the_configuration_moves_the_cursor(spool: Command, spool_root: Path) -> None:
    """A mistake in config.toml is told with its text escaped, whichever key it is in."""
    put_job(spool_root, "a", 'command = "true"\nmemory = "1G"\n')
    for key in keys("config"):
        (spool_root / "config.toml").write_text(f"{key} = {escaped(HOSTILE)}\n")
        tame(spool("check", spool_root / "config.toml"))
    for text in (f'x = "{RAW}"\n', f"{escaped(HOSTILE)} = 1\n", f'"{RAW}\n'):
        (spool_root / "config.toml").write_text(f"autostart = false\n{text}")
        for verb in ("info", "plan", "doctor", "ls"):
            tame(spool(verb))


def test_no_argument_moves_the_cursor(
    spool: Command, spool_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every verb tells of an argument, of an option's value and of $SPOOL_DIR with their controls escaped."""
    bad = HOSTILE
    (tmp_path / "file").write_text("")
    for verb in VERBS:
        if verb in ("demo", "dispatch"):
            continue
        for words in ((verb, bad), (verb, f"--{bad}"), (verb, "--name", bad, "--", bad), (verb, "-n", bad, bad)):
            if verb not in ("submit", "run", "init"):
                tame(spool(*words))
        tame(spool("--spool", f"{tmp_path}/file/{bad}", verb, "x"))
    for words in ((bad,), (f"--{bad}",), ("submit", bad), ("submit", "-n", bad, "true"), ("run", "--cpus", bad, "x")):
        tame(spool(*words))
    for words in (("submit", "--dry-run", "-c", bad), ("submit", "--dry-run", "--env", f"A={RAW}", "--", RAW)):
        assert RAW in repr_of(tomllib.loads(said(spool(*words)).out))
    root = make_spool(tmp_path / f"s{RAW}")
    (root / "config.toml").write_text("autostart = false\n")
    monkeypatch.setenv("SPOOL_DIR", str(root))
    for words in ("init", "info", "doctor", "submit -n a -- true", "show a", "gc --dry-run"):
        tame(spool(*words.split()))
    monkeypatch.setenv("SPOOL_DIR", f"{tmp_path}/file/{bad}")
    tame(spool("submit", "-n", "a", "--", "true"))


def test_a_drawn_table_shows_no_markup_and_no_controls(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal only spool's own colours are left, and [red] in a text is text."""
    hostile(spool_root)
    records_of(spool_root, "marked", State.FAILED, reason=f"[red]x[/red] {HOSTILE}")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "300")
    for words in (("ls", "-a"), ("plan",), ("info",), ("stats", "--by", "user"), ("reserve", "list"), ("doctor",)):
        found = spool(*words)
        tame(Said(found.code, _COLOUR.sub("", found.out), _COLOUR.sub("", found.err)))
    assert "[red]x[/red]" in _COLOUR.sub("", spool("ls", "marked").out)


def test_a_job_file_that_is_written_names_its_controls() -> None:
    """What `submit` writes into a job file has no raw control, and means the same."""
    values = {"command": f"a{RAW}\nb", "env": {"X": RAW}}
    text = jobfile.dump(values)
    assert not controls(text.decode())
    assert tomllib.loads(text.decode()) == values


def repr_of(document: dict[str, object]) -> str:
    """Return every text of a document, as it is."""
    return json.dumps(document, ensure_ascii=False)


def said(found: Said) -> Said:
    """Return what a command said, which is tame."""
    tame(found)
    return found


LISTS = (
    ("ls",), ("ls", "-a"), ("info",), ("plan",), ("gpus",), ("doctor",), ("stats",), ("stats", "--by", "user"),
    ("stats", "--by", "project"), ("reserve", "list", "-a"), ("gc", "--dry-run", "--max-age", "1s"),
)  # fmt: skip
