"""Every example, run as its reader would run it."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shell import Home
from spool.formats import jobfile, reservation
from spool.formats.capabilities import contributed
from support import ROOT, WHOLE, wait_for

EXAMPLES = ROOT / "examples"
TOML = sorted(path for path in EXAMPLES.rglob("*.toml") if path.name != "pyproject.toml")


@contextmanager
def served(path: Path) -> Iterator[Home]:
    """Make a home with a copy of the examples and a dispatcher that serves its spool, until the end."""
    made = Home(path)
    shutil.copytree(EXAMPLES, made.path / "spool-examples", ignore=shutil.ignore_patterns("__pycache__"))
    made.serve()
    yield made
    (made.path / "go").touch()
    made.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Give the home of all examples that need no configuration."""
    with served(tmp_path_factory.mktemp("home")) as made:
        yield made


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Home]:
    """Give a home to one example, which may configure its spool."""
    with served(tmp_path / "home") as made:
        yield made


def configure(home: Home, page: Path) -> None:
    """Add the configuration of a page to that of the spool."""
    text = page.read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    assert text
    with (home.spool / "config.toml").open("a", encoding="utf-8") as config:
        config.write(text)


def log(home: Home, job: str) -> str:
    """Wait for the end of a job, and return the output of its newest run."""
    wait_for(lambda: (home.spool / "done" / f"{job}.toml").exists(), what=f"the end of {job}")
    return (home.spool / "jobs" / job / runs_of(home, job)[-1] / "log").read_text(encoding="utf-8")


def folder(home: Home, name: str) -> Path:
    """Return the folder of one example in the reader's home."""
    return home.path / "spool-examples" / name


def result(home: Home, job: str, run: int = 1) -> dict[str, object]:
    """Return how a run ended."""
    return tomllib.loads((home.spool / "jobs" / job / str(run) / "result.toml").read_text(encoding="utf-8"))


def granted(home: Home, job: str, run: int) -> int:
    """Return the memory that a run got, in MiB."""
    grant = result(home, job, run)["grant"]
    assert isinstance(grant, dict)
    return int(grant["memory_bytes"]) >> 20


def runs_of(home: Home, job: str) -> list[str]:
    """Return the runs of a job."""
    return sorted(path.name for path in (home.spool / "jobs" / job).iterdir())


@WHOLE
@pytest.mark.parametrize("path", TOML, ids=lambda path: path.relative_to(EXAMPLES).as_posix())
def test_every_job_file_names_its_schema_and_is_valid(path: Path) -> None:
    """The first line of each TOML file names a schema that goes along when the examples are copied, and it is valid."""
    text = path.read_bytes()
    first = text.decode().splitlines()[0]
    match = re.fullmatch(r"#:schema (\S+)", first)
    assert match is not None
    schema = path.parent / match.group(1)
    assert schema.resolve().is_relative_to(EXAMPLES)
    assert schema.exists()
    if schema.name == "reservation.schema.json":
        reservation.parse(text, name=path.stem, created_at_ns=0)
    elif schema.name == "job.schema.json":
        jobfile.parse(text, name=path.stem)
    else:
        others = {f"{kind.name}.schema.json": kind for _, kinds in contributed("files") for kind in kinds}
        others[schema.name].parse(text)


@WHOLE
def test_spool_check_finds_no_mistake(home: Home) -> None:
    """`spool check` passes every job file of the examples."""
    files = [str(path) for path in TOML if path.stem not in ("reservation", "machine")]
    home.run("spool", "check", *files)


def test_a_training_fails_once_and_goes_on_from_its_checkpoint(home: Home) -> None:
    """The second try of the training begins where the checkpoint is, not at the beginning, and finishes."""
    home.run("spool", "submit", "-f", "train.toml", cwd=folder(home, "train"))
    said = log(home, "train")
    assert result(home, "train", 1)["outcome"] == "failed"
    assert result(home, "train", 1)["again"] == "retry"
    assert result(home, "train", 2)["outcome"] == "finished"
    assert "attempt 2 begins after epoch 20" in said
    right = re.search(r"right for (\d+) of 200", said)
    assert right is not None
    assert int(right.group(1)) > 180


def test_a_study_reports_the_best(home: Home) -> None:
    """The study runs a job for each of its six points and prints their errors, the smallest first."""
    output = home.run("/bin/sh", "study.sh", cwd=folder(home, "study")).stdout
    errors = [float(error) for error in re.findall(r"rms ([0-9.]+)", output)]
    assert len(errors) == 6
    assert errors == sorted(errors)


def test_an_array_is_many_jobs_and_one_waits_for_them_all(home: Home) -> None:
    """Ten tasks of one file run, and the job that depends on the array sees what all of them wrote."""
    array = folder(home, "array")
    home.run("spool", "submit", "-f", "estimate.toml", "-f", "mean.toml", cwd=array)
    assert re.fullmatch(r"10 estimates, mean 3\.1\d\d\n", log(home, "mean"))
    assert result(home, "estimate")["reason"] == "10 of 10 finished"


def test_each_row_of_a_table_is_a_job(home: Home) -> None:
    """`--param-file` makes a job of each row, its cells in the place of the keys."""
    array = folder(home, "array")
    words = ["python3", "estimate.py", "--seed", "{seed}", "--darts", "{darts}", "--out", "rows/{seed}-{darts}"]
    home.run("spool", "submit", "--name", "rows", "--param-file", "points.csv", "--wait", "--", *words, cwd=array)
    assert sorted(path.name for path in (array / "rows").iterdir()) == ["1-5000", "2-10000", "7-40000"]


def test_a_pipeline_of_make_is_a_pipeline_of_jobs(home: Home) -> None:
    """`make -j4` runs each step as a job, and the counts of the merged file add up to the words of the texts."""
    if shutil.which("make", path=home.environment["PATH"]) is None:
        pytest.skip("make is not installed")
    make = folder(home, "makefile")
    home.run("make", "-j4", cwd=make)
    lines = (make / "merged.txt").read_text(encoding="ascii").splitlines()
    numbers = [int(line.split()[0]) for line in lines]
    assert sum(numbers) == 4 * 20_000
    assert numbers == sorted(numbers, reverse=True)
    assert {path.stem for path in (home.spool / "done").glob("words-*")} == {
        *(f"words-{step}-{n}" for step in ("text", "count") for n in range(1, 5)),
        "words-merge",
    }
    assert "up to date" in home.run("make", "-j4", cwd=make).stdout


def test_memory_is_worked_out_and_grows(home: Home) -> None:
    """The second run of a name requests what the first used; one that had too little is followed by a larger one."""
    sizes = folder(home, "sizes")
    home.run("spool", "submit", "--wait", "-f", "fit.toml", "-f", "grow.toml", cwd=sizes)
    grown = [granted(home, "grow", run) for run in (1, 2)]
    assert grown == [60, 240]
    home.run("spool", "requeue", "fit", "grow")
    assert log(home, "fit") + log(home, "grow")
    assert granted(home, "grow", 3) == 240
    assert "requests" not in home.run("spool", "show", "fit").stdout
    assert granted(home, "fit", 2) == 256


def test_resources_are_given_and_named(own: Home) -> None:
    """With the configuration of the page, each job finds in its environment what it was given."""
    resources = folder(own, "resources")
    configure(own, resources / "README.md")
    own.run("spool", "submit", "-f", "solve.toml", "-f", "measure.toml", cwd=resources)
    assert log(own, "solve") == "solving with 1 licence\n"
    assert log(own, "measure") == "measuring on /dev/ttyUSB0\n"


def test_a_run_has_cpus_of_its_own(own: Home) -> None:
    """With the configuration of the page, the job may use exactly the CPUs that it was given."""
    pinning = folder(own, "pinning")
    configure(own, pinning / "README.md")
    own.run("spool", "submit", "-f", "stream.toml", cwd=pinning)
    given, allowed = (line.split()[-1] for line in log(own, "stream").splitlines())
    assert given.isdecimal()
    assert given == allowed


def test_a_script_carries_its_own_options(home: Home) -> None:
    """The `#SPOOL` lines of the script hold, options of the command line win, and words after it are its arguments."""
    script = folder(home, "script")
    assert home.run("spool", "submit", "primes.sh", cwd=script).stdout == "primes\n"
    assert "2262 primes below 20000" in log(home, "primes")
    job = tomllib.loads((home.spool / "done" / "primes.toml").read_text(encoding="utf-8"))
    assert (job["memory"], job["time_limit"], job["retry"], job["tags"]) == ("200M", "5m", 1, ["example"])
    home.run("spool", "submit", "-n", "few", "-t", "1m", "primes.sh", "1000", cwd=script)
    assert "168 primes below 1000" in log(home, "few")
    assert tomllib.loads((home.spool / "done" / "few.toml").read_text(encoding="utf-8"))["time_limit"] == "1m"
    assert "job none" in home.run("sh", "primes.sh", "10", cwd=script).stdout


def test_a_prolog_gives_a_directory_and_a_setup_an_environment(home: Home) -> None:
    """The command has both, and the directory is gone after the run."""
    setup = folder(home, "setup")
    home.run("spool", "submit", "-f", "scratch.toml", cwd=setup)
    scratch, prefix = log(home, "scratch").split()
    assert "/scratch." in scratch
    assert not Path(scratch).exists()
    assert prefix == str(setup / "venv")


def test_cron_s_lines_do_what_they_say(own: Home) -> None:
    """The two lines of the crontab put the report into the queue and make passes until it has been written."""
    own.close()
    lines = (folder(own, "cron") / "crontab").read_text(encoding="utf-8").splitlines()
    entries = [line.split(None, 5) for line in lines if line and not line.startswith("#")]
    a_pass, report = (entry[5] for entry in entries)
    assert [entry[:5] for entry in entries] == [["*"] * 5, ["30", "3", "*", "*", "*"]]
    assert "%" not in a_pass + report  # cron takes it for a line break
    (own.spool / "queued" / "before.toml").write_text('command = "true"\n', encoding="utf-8")
    own.sh(a_pass)
    own.sh(report)
    wait_for(lambda: own.sh(a_pass) is not None and (own.spool / "done" / "report.toml").exists())
    text = (own.path / "spool-report.txt").read_text(encoding="utf-8")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d  1 finished; \d+\.\d\d CPU hours\n", text)


def test_the_job_that_comes_every_night_never_overlaps_itself(home: Home) -> None:
    """While a run of the name goes on, the same name waits, and the file that comes after takes its place."""
    slow = home.path / "slow.toml"
    slow.write_text('command = "until [ -e ~/go ]; do sleep 0.02; done"\n', encoding="utf-8")
    put = f"cp {slow} $HOME/.spool/.tmp/slow.toml && mv $HOME/.spool/.tmp/slow.toml $HOME/.spool/queued/slow.toml"
    home.sh(put)
    wait_for(lambda: (home.spool / "jobs/slow/1/jid").exists())
    home.sh(put)
    home.sh(put)
    home.sh("spool run --name later -- true")  # came after, and has been started and ended
    assert (home.spool / "queued/slow.toml").exists()
    assert runs_of(home, "slow") == ["1"]
    (home.path / "go").touch()
    wait_for(lambda: (home.spool / "jobs/slow/2/result.toml").exists())
    assert log(home, "slow") == ""
    assert runs_of(home, "slow") == ["1", "2"]
