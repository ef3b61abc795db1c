"""Spool on Slurm beside a bare loop of sbatch, on the cluster of this host or on one of the tests."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from spoolbench.drop import drop
from spoolbench.engines import SpoolEngine, spool_command
from spoolbench.table import Metric, machine
from spoolbench.tools import HERE, MissingError, Scratch, await_stamps, cpu_ns, family, stamps, until

METRICS = {
    "bare": Metric("bare loop of sbatch: first sbatch → last end", "s"),
    "spool": Metric("spool: first file → last end", "s"),
    "ratio": Metric("spool / bare", "", most=1.15),
    "hand_over": Metric("handed over", "jobs/s", least=50),
    "seen": Metric("end → seen, median", "s"),
    "seen_last": Metric("end → seen, longest", "s"),
    "cpu": Metric("CPU of the dispatcher for a job", "ms", most=2),
    "helper": Metric("CPU of its helper and Slurm's commands for a job", "ms"),
    "idle": Metric("idle, as many in Slurm as in the last line", "% of a core", most=1),
    "in_flight": Metric("in Slurm meanwhile", "jobs"),
}
_NAME = "spool-benchmark-"
_CONFIGURATION = """\
autostart = false
disk_floor = "0M"
log_level = "warning"
executor = "slurm"
[slurm]
max_in_flight = {most}
submit_per_second = 200
poll = "{poll}"
"""


class SlurmSpool(SpoolEngine):
    """A spool whose jobs go to Slurm."""

    def begin(self, most: int, poll: str) -> None:
        """Make an empty spool and have it served."""
        self.prepare(1)
        (self.root / "config.toml").write_text(_CONFIGURATION.format(most=most, poll=poll))
        self.serve()
        until((self.root / "state.json").exists, 30, "the dispatcher's first pass")


def main(arguments: list[str]) -> int:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    scratch = Scratch(options.dir)
    before = machine()
    found: dict[str, float] = {}
    try:
        with _cluster(own=options.own):
            engine = SlurmSpool(scratch, spool_command(options.spool))
            for _ in range(options.rounds):
                for key, value in _round(engine, scratch, options).items():
                    found[key] = min(value, found.get(key, value)) if key in ("bare", "spool") else value
            found["ratio"] = found["spool"] / found["bare"]
            if options.in_flight:
                found |= _idle(engine, options.in_flight, options.idle)
    except MissingError as missing:
        print(f"cannot measure: {missing}", file=sys.stderr)
        return 1
    finally:
        scratch.close()
    for key, metric in METRICS.items():
        if key in found:
            print(f"{metric.title:58} {found[key]:8.2f} {metric.unit:12} {metric.target}")
    print(f"\n{options.jobs} jobs of {options.ms} ms; {before['cores']} cores, load {before['load']} before")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks/slurm", description="Measure spool on Slurm beside sbatch.")
    parser.add_argument("--own", action="store_true", help="start the cluster of the tests: root, Debian's packages")
    parser.add_argument("--jobs", type=int, default=200, metavar="N", help="number of jobs; default: %(default)s")
    parser.add_argument("--ms", type=int, default=2000, metavar="N", help="how long each lasts; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="the fastest counts; default: %(default)s")
    parser.add_argument(
        "--in-flight", type=int, default=1000, metavar="N", help="for the idle dispatcher; 0: leave out"
    )
    parser.add_argument("--idle", type=float, default=60, metavar="S", help="number of seconds; default: %(default)s")
    parser.add_argument("--poll", default="10s", metavar="TIME", help="of the spool; default: %(default)s")
    parser.add_argument("--spool", metavar="COMMAND", help="how spool is called; default: the one of this Python")
    parser.add_argument("--dir", metavar="DIR", help="where spools are made, on a file system that the nodes share")
    return parser


@contextlib.contextmanager
def _cluster(*, own: bool) -> Iterator[None]:
    """Have a cluster that answers."""
    if not own:
        try:
            done = subprocess.run(["squeue", "--me"], capture_output=True, text=True, timeout=60)
        except OSError as error:
            raise MissingError("Slurm's commands are not installed") from error
        if done.returncode:
            raise MissingError(f"Slurm does not answer ({done.stderr.strip()}); --own starts one")
        yield
        return
    sys.path.insert(0, str(HERE.parent / "tests"))
    from slurm import cluster

    if (reason := cluster.unavailable()) is not None:
        raise MissingError(reason)
    made = cluster.Cluster()
    os.environ.update(made.variables)
    try:
        yield
    finally:
        made.close()


def _round(engine: SlurmSpool, scratch: Scratch, options: argparse.Namespace) -> dict[str, float]:
    """Measure the bare loop and the spool, one after the other."""
    patience = 60 + 2 * options.jobs * options.ms / 1000
    bare = scratch.fresh("bare")
    words = [scratch.stamp, bare, str(options.ms)]
    begun = time.time_ns()
    for _ in range(options.jobs):
        _sbatch(words)
    if not await_stamps(bare, options.jobs, patience, 0.05):
        raise TimeoutError("the bare jobs do not end")
    found = {"bare": (stamps(bare)[-1][1] - begun) / 1e9}
    _until_empty()
    with_spool = scratch.fresh("spool")
    engine.begin(options.jobs, options.poll)
    try:
        (pid,) = engine.pids()
        cpu_before = cpu_ns(pid)
        begun = time.time_ns()
        command = [scratch.stamp, with_spool, str(options.ms)]
        drop(str(engine.root), options.jobs, _NAME, command, workdir="/", cpus=1, memory="20M")
        if not await_stamps(with_spool, options.jobs, patience, 0.05):
            raise TimeoutError("the jobs of the spool do not end")
        done = engine.root / "done"
        until(lambda: len(os.listdir(done)) >= options.jobs, patience, "the paperwork")
        found["spool"] = (max(end for _, end in stamps(with_spool)) - begun) / 1e9
        found["cpu"] = (cpu_ns(pid) - cpu_before) / 1e6 / options.jobs
        found["helper"] = sum(_cpu_with_children_ms(child) for child in family([pid])[1:]) / options.jobs
        return found | _records(engine.root)
    finally:
        engine.stop()
        _until_empty()


def _sbatch(words: Sequence[str]) -> None:
    wrapped = f"exec {' '.join(words)}"
    options = [
        "--parsable",
        f"--job-name={_NAME}bare",
        "--cpus-per-task=1",
        "--mem=20",
        "--output=/dev/null",
        f"--wrap={wrapped}",
    ]
    subprocess.run(["sbatch", *options], check=True, stdout=subprocess.DEVNULL, timeout=60)


def _records(root: Path) -> dict[str, float]:
    """Return what the times of the records say: when jobs were handed over, and when their ends were seen."""
    metadirs = [path for path in (root / "jobs").glob("*/1") if (path / "rc").exists()]
    known = sorted((path / "engine").stat().st_mtime_ns for path in metadirs)
    first = min((path / "run.sh").stat().st_mtime_ns for path in metadirs)
    seen = [((path / "result.toml").stat().st_mtime_ns - (path / "rc").stat().st_mtime_ns) / 1e9 for path in metadirs]
    rate = len(known) / ((known[-1] - first) / 1e9)
    return {"hand_over": rate, "seen": statistics.median(seen), "seen_last": max(seen)}


def _cpu_with_children_ms(pid: int) -> float:
    """Return the CPU time of a process and of its children that have ended; the clock tick is fine enough for both."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) * 1000 / os.sysconf("SC_CLK_TCK")


def _in_slurm() -> list[str]:
    """Return the ids of our jobs that have not ended; the user may have others."""
    words = ["squeue", "--me", "--noheader", "--array", "--format=%i %j"]
    lines = subprocess.run(words, capture_output=True, text=True, timeout=60).stdout.splitlines()
    return [job for job, _, name in (line.partition(" ") for line in lines) if name.startswith(_NAME)]


def _until_empty() -> None:
    until(lambda: not _in_slurm(), 120, "Slurm to be done with all jobs")


def _idle(engine: SlurmSpool, count: int, seconds: float) -> dict[str, float]:
    """Return what an idle dispatcher costs while *count* jobs are in Slurm."""
    engine.begin(count, "10s")
    try:
        drop(str(engine.root), count, f"{_NAME}held", ["sleep", "100000"], workdir="/", cpus=1, memory="20M")
        until(lambda: len(_in_slurm()) >= count, 60 + count / 10, "all to be in Slurm")
        time.sleep(15)  # until all is written down
        (pid,) = engine.pids()
        before, begun = cpu_ns(pid), time.monotonic_ns()
        time.sleep(seconds)
        used = (cpu_ns(pid) - before) / (time.monotonic_ns() - begun)
        return {"idle": 100 * used, "in_flight": float(len(_in_slurm()))}
    finally:
        engine.stop()
        subprocess.run(["scancel", *_in_slurm()], capture_output=True, timeout=60)
        _until_empty()
