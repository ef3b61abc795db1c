"""`spool simulate`: a trace, or our own history, under one policy and another."""

from __future__ import annotations

import builtins
import gzip
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from calling import Command, asked
from spool.cli import blocks
from spool.core.model import SECOND_NS as S
from spool.core.model import Grant, Request, Result, State
from spool.core.simulation import Discipline
from spool.formats import ends

TRACE = """\
; MaxProcs: 4
1 0 -1 100 2 -1 -1 2 120 -1 1 1 1 1 1 -1 -1 -1
2 0 -1 100 4 -1 -1 4 120 -1 1 2 1 1 1 -1 -1 -1
3 10 -1 50 1 -1 -1 -1 60 -1 1 1 1 1 1 -1 -1 -1
4 10 -1 50 8 -1 -1 8 60 -1 1 1 1 1 1 -1 -1 -1
5 10 -1 -1 1 -1 -1 1 60 -1 5 1 1 1 1 -1 -1 -1
"""
T0 = 1_700_000_000 * S


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write a trace of three jobs that fit four processors, one that never does, and one that never ran."""
    path = tmp_path / "small.swf"
    path.write_text(TRACE)
    return path


def policies(spool: Command, *words: object) -> dict[str, Any]:
    """Return the figures of each policy."""
    return {one["policy"]: one for one in asked(spool, "simulate", *words)["policies"]}


def test_figures_by_policy(spool: Command, trace: Path) -> None:
    """FIFO lets nobody overtake: 3 waits for 2, which waits for 1. EASY lets 3 start at once, and delays nobody."""
    found = policies(spool, trace)
    assert list(found) == ["fifo", "easy", "spool"]
    fifo, easy = found["fifo"], found["easy"]
    assert (fifo["mean_wait_ns"], fifo["max_queue"], fifo["makespan_ns"]) == ((100 + 190) * S // 3, 2, 250 * S)
    assert (easy["mean_wait_ns"], easy["max_queue"], easy["makespan_ns"]) == (100 * S // 3, 1, 200 * S)
    assert fifo["utilisation"] == (200 + 400 + 50) / (4 * 250)


def test_what_is_left_out_is_counted(spool: Command, trace: Path) -> None:
    """A job that is larger than the machine never fits; one without a run time never ran."""
    said = spool("simulate", trace)
    assert said.code == 0, said.err
    assert said.out.splitlines()[0] == f"{trace}: 3 jobs on 4 CPUs (left out: 1 never fit, 1 did not run)"
    found = asked(spool, "simulate", trace, "--cpus", 2)
    assert (found["jobs"], found["never_fit"], found["incomplete"], found["machine"]["cpus"]) == (2, 2, 1, 2)


def test_a_table_and_a_picture(spool: Command, trace: Path) -> None:
    """A column for each policy that was asked for, and two rows of blocks for each."""
    lines = spool("simulate", trace, "--policy", "easy,fifo").out.splitlines()
    assert lines[3].split() == ["POLICY", "easy", "fifo"]
    assert lines[4].split() == ["jobs", "3", "3"]
    assert lines[5].split() == ["mean", "wait", "33", "s", "1", "m", "36", "s"]
    assert sum("█" in line for line in lines) == 4


def test_the_table_fits_a_terminal_of_80_columns(
    spool: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No figure is cut, however long the jobs wait, and how many there are."""
    path = tmp_path / "long.swf"
    job = "{} 0 -1 20000000 4 -1 -1 4 20000000 -1 1 1 1 1 1 -1 -1 -1\n"
    path.write_text("; MaxProcs: 4\n" + "".join(map(job.format, range(1, 51))))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", spool("simulate", path, "--gpus", 8).out)
    assert "…" not in drawn
    assert max(map(len, drawn.splitlines()[1:])) <= 80  # the first line names the file
    assert next(line for line in drawn.splitlines() if line.startswith("makespan")).count("11574 d 01 h") == 3


def test_a_compressed_trace(spool: Command, tmp_path: Path, trace: Path) -> None:
    """As the archive has them: .swf.gz."""
    packed = tmp_path / "small.swf.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    assert policies(spool, packed)["easy"]["makespan_ns"] == 200 * S


def test_memory_counts_when_it_is_said_how_much_there_is(spool: Command, tmp_path: Path) -> None:
    """Two jobs of 1 MiB for each of 2 processors: beside each other, unless the machine has less than both need."""
    job = "0 -1 100 2 -1 -1 2 120 1024 1 1 1 1 1 -1 -1 -1\n"
    path = tmp_path / "m.swf"
    path.write_text(f"; MaxProcs: 8\n1 {job}2 {job}")
    assert policies(spool, path)["easy"]["makespan_ns"] == 100 * S
    assert policies(spool, path, "--memory", "3M")["easy"]["makespan_ns"] == 200 * S
    assert spool("simulate", path, "--memory", "1M").code == 2


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        ((), 2, "give a trace, or --history"),
        (("small.swf", "--history"), 2, "give a trace, or --history"),
        (("small.swf", "--policy", "random"), 2, f"there are {', '.join(Discipline)}"),
        (("small.swf", "--policy", ","), 2, "names none"),
        (("gone.swf",), 1, "No such file"),
        (("bad.swf",), 4, "line 1: has something in it that is no number"),
        (("bare.swf",), 2, "give --cpus"),
        (("cut.swf.gz",), 1, "cannot read the trace"),
        (("small.swf", "--plot", "x.pdf"), 2, "a .png or an .svg"),
        (("--history",), 4, "no run of it has both begun and ended"),
    ],
)
def test_mistakes_are_told(spool: Command, tmp_path: Path, trace: Path, words: Any, code: int, why: str) -> None:
    """One line each, and the exit code of its class."""
    (tmp_path / "bad.swf").write_text("1 two\n")
    (tmp_path / "bare.swf").write_text(TRACE.partition("\n")[2])
    (tmp_path / "cut.swf.gz").write_bytes(gzip.compress(TRACE.encode())[:40])
    said = spool("simulate", *words)
    assert said.code == code
    assert why in said.err
    assert said.out == ""


def test_no_spool_is_needed_and_none_is_made(spool: Command, tmp_path: Path, trace: Path) -> None:
    """Without a spool the defaults of the configuration hold."""
    assert spool("--spool", tmp_path / "none", "simulate", trace).code == 0
    assert not (tmp_path / "none").exists()


def test_the_spool_s_configuration_is_simulated(spool: Command, spool_root: Path, trace: Path) -> None:
    """With a starvation of nothing the policy `spool` protects the first at once; quotas hold too."""
    (spool_root / "config.toml").write_text("[quotas.default_user]\nmax_running_cpus = 1\n")
    found = policies(spool, trace, "--policy", "spool")["spool"]
    assert found["left"] == 2
    assert "2 jobs never started" in spool("simulate", trace, "--policy", "spool").out


def ended(job: str, submitted: int, began: int | None, end: int, run: int = 1, **more: Any) -> bytes:
    """Return a line of history; instants in seconds after T0."""
    return ends.render_history(
        Result(
            job, run, 1, State.FINISHED, "",
            submitted_at_ns=T0 + submitted * S,
            started_at_ns=None if began is None else T0 + began * S,
            ended_at_ns=T0 + end * S,
            user="alice",
            **({"request": Request(2), "grant": Grant(2)} | more),
        )
    )  # fmt: skip


def test_our_own_history(spool: Command, spool_root: Path) -> None:
    """Every run that began and ended is a job; a retry comes when the run before had ended; limits are job.toml's."""
    lines = [
        ended("a", 0, 5, 105, again="retry"),
        ended("never", 0, None, 50),
        ended("b", 0, 105, 205, request=Request(2, gpus=1, gpu_type="A100"), grant=Grant(2, gpu_uuids=("GPU-1",))),
        ended("a", 0, 205, 255, run=2),
        b'{"torn',
    ]
    (spool_root / "history.jsonl").write_bytes(b"".join(lines))
    metadir = spool_root / "jobs" / "b" / "1"
    metadir.mkdir(parents=True)
    (metadir / "job.toml").write_text('command = "true"\ntime_limit = "50s"\n')
    found = asked(spool, "simulate", "--history", "--cpus", 2, "--gpus", 1, "--policy", "fifo")
    assert (found["jobs"], found["incomplete"], found["never_fit"]) == (3, 2, 0)
    (fifo,) = found["policies"]
    # a from 0 to 100; b, cut at its limit, to 150; the second a, which came at 105, to 200.
    assert (fifo["makespan_ns"], fifo["max_queue"]) == (200 * S, 1)
    assert fifo["gpu_utilisation"] == 0.25
    assert "time limit" in spool("simulate", "--history", "--cpus", 2, "--gpus", 1).err
    assert asked(spool, "simulate", "--history", "--cpus", 2)["never_fit"] == 1


def test_without_matplotlib_it_says_how_to_get_it(
    spool: Command, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is simulated, with the command that installs it."""
    really = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return really(name, *rest)

    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    said = spool("simulate", trace, "--plot", tmp_path / "x.svg")
    assert (said.code, said.out) == (1, "")
    assert "pip install 'spool-scheduler[plot]'" in said.err


@pytest.mark.parametrize(("kind", "begin"), [("png", b"\x89PNG\r\n"), ("svg", b"<?xml")])
def test_with_matplotlib_it_draws(spool: Command, trace: Path, tmp_path: Path, kind: str, begin: bytes) -> None:
    """A PNG or an SVG, with a curve for each policy."""
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    path = tmp_path / f"picture.{kind}"
    said = spool("simulate", trace, "--plot", path)
    assert said.code == 0, said.err
    assert path.read_bytes().startswith(begin)
    assert str(path) in said.err


def test_blocks_show_what_is_not_nothing() -> None:
    """The smallest value that is not 0 has a mark, the highest a full one, and nothing divides by 0."""
    assert blocks.curve([0.0, 0.001, 0.5, 1.0, 2.0], 1.0) == " ▁▄██"
    assert blocks.curve([0.0, 0.0], 0.0) == "  "
