"""The pages against the program: what they show works, and what they say of keys and reasons is so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest

from core.planning import job, plan
from core.test_forecast import SITUATIONS
from shell import Home, home_of_test
from spool.cli import main, submit
from spool.core.errors import InvalidFile
from spool.core.reasons import REASONS
from spool.core.units import format_duration, parse_duration, parse_size
from spool.formats import config, jobfile, keys, reservation, schema
from spool.formats.capabilities import contributed
from support import ROOT, WHOLE
from test_readme import calls, end_dispatcher

MIGRATION = ROOT / "docs" / "MIGRATE.md"
START = ROOT / "docs" / "index.md"
_OF_RUN = ("--quiet", "-q", "--here", "--nohup")
TABLES = [
    (page.relative_to(ROOT).as_posix(), text)
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for text in re.findall(r"^```toml\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
]


@pytest.fixture
def folder(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with the files that the pages speak of, and a spool in which nothing starts."""
    (spool_root / "config.toml").write_text(
        'autostart = false\nnotifier = "cat"\n[resources]\nansys = 2\n[contacts]\nme = "https://hooks.example.org"\n'
    )
    home = spool_root.parent
    monkeypatch.chdir(home)
    for name in ("job.sh", "train.sbatch", "array.sh"):
        (home / name).write_text("#!/bin/sh\necho ready\n", encoding="utf-8")
    for name in ("grid", "points"):
        (home / f"{name}.csv").write_text("lr,seed\n0.1,1\n", encoding="utf-8")
    (home / "cmds.txt").write_text("true\n", encoding="utf-8")
    for name in ("a", "train", "count"):
        (home / f"{name}.toml").write_text('command = "true"\n', encoding="utf-8")
    return home


@WHOLE
@pytest.mark.parametrize("page", [MIGRATION, START], ids=lambda page: page.name)
def test_every_job_that_the_pages_submit_is_accepted(
    page: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each `spool submit` and `spool run` makes a job file that is valid, with the values that the page shows."""
    for program, *words in calls(page.read_text(encoding="utf-8")):
        if words[0] == "--spool":
            words = words[2:]
        if words[0] not in ("submit", "run") or "--help" in words or ("--here" in words and "--" not in words):
            continue  # of these the last opens a shell
        words = ["--shell-command" if word == "-c" else word for word in words[1:] if word not in _OF_RUN]
        code = main.run(["submit", "--dry-run", *words])
        assert code == 0, (program, words, capsys.readouterr())


def test_every_option_that_is_the_same_is_one() -> None:
    """Where a table says that an option of the other scheduler is "the same" here, `spool submit` takes it."""
    taken = {
        name
        for option in submit.command.params
        for name in (*option.opts, *option.secondary_opts, *getattr(option, "also", ()))
    }
    rows = re.findall(r"^\| (.*?) \| the same", MIGRATION.read_text(encoding="utf-8"), re.MULTILINE)
    for option in re.findall(r"`(--?[\w-]+)", " ".join(rows)):
        assert option in taken, option


@WHOLE
@pytest.mark.parametrize(("page", "text"), TABLES)
def test_every_table_of_the_pages_is_valid(page: str, text: str) -> None:
    """Each block of TOML is a job file, or else a configuration, of a spool or a machine, or a reservation."""
    tomllib.loads(text)
    wrong = []
    of_job, of_time = partial(jobfile.parse, name="job"), partial(reservation.parse, name="demo", created_at_ns=0)
    others = [kind.parse for _, kinds in contributed("files") for kind in kinds]
    for parse in (of_job, config.parse, of_time, *others):
        try:
            parse(text.encode())
        except InvalidFile as error:
            wrong.append(str(error))
        else:
            return
    pytest.fail(f"{page}:\n{text}\n" + "\n".join(wrong))


def test_every_block_of_the_first_page_runs() -> None:
    """The shell blocks, a first job and the recipes that need nothing but Linux, print what they promise."""
    home = Home(home_of_test())
    text = START.read_text(encoding="utf-8")
    for old, new in (
        ("-m venv", "-m venv --without-pip"),  # which takes long, and which nothing here uses
        ('[85, "timeout"]', '[85, 138, "timeout"]'),  # a slow machine warns a program that cannot take it yet
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    try:
        printed = home.sh("\n".join(blocks))
    finally:
        end_dispatcher(home.spool)
    first = ("hello from hello", "hello by hand", str(home.path / "env/bin/python"))
    # On a slow machine the log is followed from a later attempt than the first.
    for promise in (*first, "lr=0.01 seed=3", "lr 0.3 seed 1", "resumes at step ", "done"):
        assert promise in printed, promise
    attempts = sorted((home.spool / "jobs" / "count").iterdir())
    assert len(attempts) > 1, "the warning came, and another try followed"
    assert 'outcome = "finished"' in (attempts[-1] / "result.toml").read_text(encoding="utf-8")


# "`disk_floor` (1 GiB", "`kill_grace` (10 s"
_STATED = re.compile(r"`(?P<key>[a-z_.]+)`(?:,| \() ?(?P<value>[0-9.]+(?:s\b| (?:GiB|seconds|hours|days)\b)?)")
_UNITS = {"days": "d", "hours": "h", "seconds": "s", "GiB": "G"}


def _amount(text: str) -> float:
    """Return an amount as a number, in ns or in bytes."""
    number, _, unit = text.partition(" ")
    unit = _UNITS.get(unit, unit)
    if not unit and number[-1].isdigit():
        return float(number)
    return (parse_size if (unit or number).endswith(("G", "M")) else parse_duration)(number + unit)


@WHOLE
def test_pages_name_the_defaults_that_keys_have() -> None:
    """Where a page says after the name of a key what it is by default, the key has that default."""
    rows = [row for kind in ("job", "config") for row in schema.rows(kind) if re.search("[0-9]", row[2])]
    defaults = {name.strip("`"): _amount(default.strip('`"')) for name, _, default, _ in rows}
    stated = set()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for match in _STATED.finditer(page.read_text(encoding="utf-8")):
            key = match["key"] if match["key"] in defaults else f"{page.stem.lower()}.{match['key']}"
            if key in defaults:
                assert _amount(match["value"]) == defaults[key], f"{page.name}: {match.group()}"
                stated.add(key)
    assert stated >= {"disk_floor", "kill_grace"}


def test_rows_of_job_keys_name_the_defaults_of_the_configuration() -> None:
    """What the rows of a job's keys say of keys of the configuration is what these are by default."""
    rows = {key.name: key for key in keys.JOB.keys}
    known = config.Config()
    assert f"Default: {format_duration(known.kill_grace_ns)}." in rows["kill_grace"].about
    assert f"at most {known.max_requeues} times" in rows["requeue"].about
    reserve = config.reserve("5%").bytes_of(1 << 40), config.reserve("512M").bytes_of(1 << 30)
    assert (known.memory_reserve.bytes_of(1 << 40), known.memory_reserve.bytes_of(1 << 30)) == reserve
    assert "Default: 5%, at least 512 MiB." in next(
        key.about for key in config.CONFIG.keys if key.name == "memory_reserve"
    )


@WHOLE
def test_the_pages_that_are_generated_are_those_of_the_program() -> None:
    """`.ci/reference` has been run after the last change of a key, or of what a layer imports."""
    words = [sys.executable, str(ROOT / ".ci" / "reference"), "--check"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


SCHEDULING = (ROOT / "docs" / "SCHEDULING.md").read_text(encoding="utf-8")


def reasons_quoted() -> list[list[str]]:
    """Return what the page says that reasons begin with: for each row of the table, its words as patterns."""
    _, _, rest = SCHEDULING.partition("| reason begins with |")
    table, _, _ = rest.partition("\n\n")
    cells = [row.split("|")[1].replace("the name of a resource", "`l`") for row in table.splitlines()[2:]]
    words = [re.findall("`(.*?)`", cell) for cell in cells]
    return [[re.escape(each).replace("…", ".+") + r"(?!\w)" for each in row] for row in words]  # whole words


def test_the_reasons_of_the_page_are_those_of_the_program_in_its_order() -> None:
    """Each reason begins with the words of a row, each of these words begins a reason, and the rows are in order."""
    made = {code: str(SITUATIONS[code][0]().reason("j")) for code in REASONS if code in SITUATIONS}
    texts = [str(plan(held=[job("j")]).reason("j")), *made.values()]
    rows = reasons_quoted()
    found = [next((at for at, row in enumerate(rows) if any(re.match(w, text) for w in row)), -1) for text in texts]
    assert -1 not in found, texts[found.index(-1)]
    assert found == sorted(found)
    assert all(any(re.match(words, text) for text in texts) for row in rows for words in row), texts
