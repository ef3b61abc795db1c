"""Spool on Slurm beside Slurm's own commands, on the cluster of this host or on one of the tests."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from spoolbench.drop import drop, job_text
from spoolbench.engines import SpoolEngine, spool_command
from spoolbench.table import machine
from spoolbench.tools import HERE, MissingError, Scratch, await_stamps, cpu_ns, family, stamps, until

_NAME = "spool-benchmark-"
_CONFIGURATION = """\
autostart = false
disk_floor = "0M"
executor = "slurm"
[slurm]
"""
_ASKED = ("REQUEST_JOB_INFO", "REQUEST_JOB_USER_INFO", "REQUEST_JOB_INFO_SINGLE", "REQUEST_PARTITION_INFO")
_OPTIONS = ("--parsable", "--cpus-per-task=1", "--mem=20", "--output=/dev/null")
_LIMIT = 30

# An sbatch that refuses to have more jobs in Slurm, as with MaxSubmitJobs; an array counts with all its elements.
_LIMITED = rf"""
number=1
for word; do
    case $word in
    --array=*)
        number=$(printf '%s' "${{word#--array=}}" | tr , '\n' |
            awk -F '[-%]' '{{ n += ($2 > $1 ? $2 - $1 : 0) + 1 }} END {{ print n }}')
        ;;
    esac
done
exec 9> "$0.lock" && flock 9
if [ $(($(squeue -h -r --me -t PD,R,CG,S,CF | wc -l) + number)) -gt {_LIMIT} ]; then
    echo "sbatch: error: AssocMaxSubmitJobLimit" >&2
    echo "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy" >&2
    exit 1
fi
"$real" "$@" 9>&-
"""


class SlurmSpool(SpoolEngine):
    """A spool whose jobs go to Slurm."""

    def begin(self, settings: str = "", path: str = "") -> None:
        """Make an empty spool and have it served, with the defaults except for *settings* of `[slurm]`."""
        self.prepare(1)
        (self.root / "config.toml").write_text(_CONFIGURATION + settings)
        self.env["PATH"] = path + os.environ["PATH"]
        self.serve()
        until((self.root / "state.json").exists, 30, "the dispatcher's first pass")

    def drop_array(self, name: str, count: int, command: list[str], **keys: object) -> None:
        """Drop the file of an array."""
        staged = self.root / ".tmp" / f"{name}.toml"
        keys = {"workdir": "/", "cpus": 1, "memory": "20M", **keys}
        staged.write_text(job_text(command, array=f"0-{count - 1}", **keys))
        staged.rename(self.queued(name))

    def drop_job(self, name: str, command: list[str], **keys: object) -> None:
        """Drop the file of a job."""
        staged = self.root / ".tmp" / f"{name}.toml"
        staged.write_text(job_text(command, workdir="/", cpus=1, memory="20M", **keys))
        staged.rename(self.queued(name))

    def until_done(self, name: str, count: int, patience: float) -> None:
        """Wait for the paperwork of *count* jobs, or of the one called *name*; all must have finished."""
        done = self.root / "done"
        ended = (done / f"{name}.toml").exists if name else (lambda: len(os.listdir(done)) >= count)
        until(ended, patience, "the paperwork")
        outcomes = {json.loads(line)["outcome"] for line in (self.root / "history.jsonl").read_text().splitlines()}
        assert outcomes == {"finished"}, outcomes


class Controller:
    """What slurmctld was asked, and its CPU time."""

    def __init__(self, pid: int | None) -> None:
        self.pid = pid

    def measure(self, work: Callable[[], float]) -> str:
        """Return the columns of a row: what *work* returns, in s, and what it has cost slurmctld."""
        before, cpu = _requests(), cpu_ns(self.pid) if self.pid else 0
        wall = work()
        after = _requests()
        submitted = after.get("REQUEST_SUBMIT_BATCH_JOB", 0) - before.get("REQUEST_SUBMIT_BATCH_JOB", 0)
        asked = sum(after.get(kind, 0) - before.get(kind, 0) for kind in _ASKED)
        used = f"{(cpu_ns(self.pid) - cpu) / 1e9:8.2f}" if self.pid else "       -"
        _until_empty()
        return f"{wall:8.1f} {submitted:8} {asked:8} {used}"


def _requests() -> dict[str, int]:
    """Return how often slurmctld was sent each kind of request, by `sdiag`."""
    told = subprocess.run(["sdiag"], capture_output=True, text=True, timeout=60).stdout
    return {kind: int(count) for kind, count in re.findall(r"^\s*(REQUEST_\w+)\s*\(.*?count:(\d+)", told, re.MULTILINE)}


def main(arguments: list[str]) -> int:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    scratch = Scratch(options.dir)
    before = machine()
    try:
        with _cluster(own=options.own) as pid:
            bench = Bench(SlurmSpool(scratch, spool_command(options.spool)), scratch, Controller(pid), options)
            bench.rows()
            if options.own:
                bench.of_the_own_cluster()
            if options.in_flight:
                bench.many()
    except MissingError as missing:
        print(f"cannot measure: {missing}", file=sys.stderr)
        return 1
    finally:
        scratch.close()
    print(f"\n{before['cores']} cores, load {before['load']} before")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks/slurm", description="Measure spool on Slurm beside sbatch.")
    parser.add_argument("--own", action="store_true", help="start the cluster of the tests: root, Debian's packages")
    parser.add_argument("--jobs", type=int, default=200, metavar="N", help="number of jobs; default: %(default)s")
    parser.add_argument("--ms", type=int, default=1000, metavar="N", help="how long each lasts; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="number of rounds; default: %(default)s")
    parser.add_argument(
        "--in-flight", type=int, default=1000, metavar="N", help="tasks of the large array; 0: leave out"
    )
    parser.add_argument("--idle", type=float, default=60, metavar="S", help="number of seconds; default: %(default)s")
    parser.add_argument("--spool", metavar="COMMAND", help="how spool is called; default: the one of this Python")
    parser.add_argument("--dir", metavar="DIR", help="where spools are made, on a file system that the nodes share")
    return parser


@contextlib.contextmanager
def _cluster(*, own: bool) -> Iterator[int | None]:
    """Have a cluster that answers; give the pid of its controller if it is our own."""
    if not own:
        try:
            done = subprocess.run(["squeue", "--me"], capture_output=True, text=True, timeout=60)
        except OSError as error:
            raise MissingError("Slurm's commands are not installed") from error
        if done.returncode:
            raise MissingError(f"Slurm does not answer ({done.stderr.strip()}); --own starts one")
        yield None
        return
    sys.path.insert(0, str(HERE.parent / "tests"))
    from long.slurm import cluster

    if (reason := cluster.unavailable()) is not None:
        raise MissingError(reason)
    made = cluster.Cluster()
    os.environ.update(made.variables)
    try:
        yield int((made.directory / "slurmctld.pid").read_text())
    finally:
        made.close()


class Bench:
    """The measurements of one call."""

    def __init__(
        self, engine: SlurmSpool, scratch: Scratch, controller: Controller, options: argparse.Namespace
    ) -> None:
        self.engine, self.scratch, self.controller = engine, scratch, controller
        self.jobs, self.ms = options.jobs, options.ms
        self.rounds, self.in_flight, self.idle_s = options.rounds, options.in_flight, options.idle
        self.patience = 60 + 2 * self.jobs * self.ms / 1000

    def rows(self) -> None:
        """Print a row for each way to run the same jobs."""
        print(f"{self.jobs} jobs of {self.ms} ms")
        print(f"{'':44} {'wall, s':>8} {'submits':>8} {'asked':>8} {'CPU, s':>8}   (of slurmctld)")
        ways: dict[str, Callable[[], float]] = {
            "sbatch --array": self._slurm_array,
            "a loop of sbatch": self._slurm_loop,
            "submitit, map_array": self._submitit,
            "spool, an array": lambda: self._spool(self._drop_array, f"{_NAME}array"),
            "spool, a file for each": lambda: self._spool(self._drop_files, ""),
        }
        for _ in range(self.rounds):
            for title, work in ways.items():
                try:
                    print(f"{title:44} {self.controller.measure(work)}", flush=True)
                except MissingError as missing:
                    print(f"{title:44} {missing}")

    def _await(self, path: str, begun_ns: int) -> float:
        if not await_stamps(path, self.jobs, self.patience, 0.05):
            raise TimeoutError("the jobs do not end")
        return (max(end for _, end in stamps(path)) - begun_ns) / 1e9

    def _slurm_array(self) -> float:
        path, begun = self.scratch.fresh("array"), time.time_ns()
        _sbatch(f"--array=1-{self.jobs}", f"--wrap=exec {self.scratch.stamp} {path} {self.ms}")
        return self._await(path, begun)

    def _slurm_loop(self) -> float:
        path, begun = self.scratch.fresh("loop"), time.time_ns()
        for _ in range(self.jobs):
            _sbatch(f"--wrap=exec {self.scratch.stamp} {path} {self.ms}")
        return self._await(path, begun)

    def _submitit(self) -> float:
        """Run them by submitit until its last result is there."""
        program = (
            "import sys, time, submitit\n"
            "made = submitit.AutoExecutor(folder=sys.argv[1], cluster='slurm')\n"
            "made.update_parameters(mem_gb=0.05, cpus_per_task=1, timeout_min=5, slurm_array_parallelism=1000)\n"
            "jobs = made.map_array(time.sleep, [float(sys.argv[3]) / 1000] * int(sys.argv[2]))\n"
            "[job.result() for job in jobs]\n"
        )
        if subprocess.run([sys.executable, "-c", "import submitit"], capture_output=True).returncode:
            raise MissingError("submitit is not installed for this Python")
        begun = time.time_ns()
        words = [sys.executable, "-c", program, tempfile.mkdtemp(dir=self.scratch.path), str(self.jobs), str(self.ms)]
        subprocess.run(words, check=True, timeout=600, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return (time.time_ns() - begun) / 1e9

    def _drop_array(self, command: list[str]) -> None:
        self.engine.drop_array(f"{_NAME}array", self.jobs, command)

    def _drop_files(self, command: list[str]) -> None:
        drop(str(self.engine.root), self.jobs, _NAME, command, workdir="/", cpus=1, memory="20M")

    def _spool(self, put: Callable[[list[str]], None], name: str, path: str = "") -> float:
        """Return the time until all is in `done/`."""
        stamped = self.scratch.fresh("spool")
        self.engine.begin(path=path)
        try:
            begun = time.time_ns()
            put([self.scratch.stamp, stamped, str(self.ms)])
            self.engine.until_done(name, self.jobs, self.patience)
            return (time.time_ns() - begun) / 1e9
        finally:
            self.engine.stop()

    def of_the_own_cluster(self) -> None:
        """Print the rows that need a licence, a node to drain, or a limit."""
        for _ in range(self.rounds):
            print(
                f"{'a chain of five, --dependency=afterok':44} {self.controller.measure(self._slurm_chain)}", flush=True
            )
            title = f"a chain of five by spool, beside {self.jobs} others"
            print(f"{title:44} {self.controller.measure(self._spool_chain)}", flush=True)
        title = "four wait for a drained node: an urgent one"
        print(f"{title:44} {self.controller.measure(self._urgent)}", flush=True)
        from long.slurm.cluster import path_with

        limited = path_with(self.scratch.path / "limited", "sbatch", _LIMITED).removesuffix(os.environ["PATH"])
        jobs, self.jobs = self.jobs, 100
        ways: Mapping[str, tuple[Callable[[list[str]], None], str]] = {
            "an array of": (self._drop_array, f"{_NAME}array"),
            "files for": (self._drop_files, ""),
        }
        for what, (put, name) in ways.items():
            title = f"{what} 100 jobs under a limit of {_LIMIT}"
            row = self.controller.measure(lambda put=put, name=name: self._spool(put, name, limited))  # type: ignore[misc]
            print(f"{title:44} {row}", flush=True)
        self.jobs = jobs

    def _slurm_chain(self) -> float:
        path, begun = self.scratch.fresh("chain"), time.time_ns()
        wrap = f"--wrap=exec {self.scratch.stamp} {path} 0"
        last = _sbatch(wrap)
        for _ in range(4):
            last = _sbatch(f"--dependency=afterok:{last}", wrap)
        if not await_stamps(path, 5, 120, 0.05):
            raise TimeoutError("the chain does not end")
        return (max(end for _, end in stamps(path)) - begun) / 1e9

    def _spool_chain(self) -> float:
        """Run a chain while others wait in Slurm for a licence."""
        self.engine.begin("max_in_flight = 10000\n")
        try:
            options = ["--licenses=solver:1"]
            self.engine.drop_array(f"{_NAME}others", self.jobs, ["sleep", "1000"], executor_options=options)
            until(lambda: len(_in_slurm()) >= self.jobs, 120, "the others to be in Slurm")
            time.sleep(20)  # Slurm has been asked about them by then
            begun = time.time_ns()
            for number in range(5):
                after = {"depends_on": f"{_NAME}c{number - 1}"} if number else {}
                self.engine.drop_job(f"{_NAME}c{number}", ["true"], **after)
            self.engine.until_done(f"{_NAME}c4", 5, 120)
            return (time.time_ns() - begun) / 1e9
        finally:
            self.engine.stop()
            _cancel_all()

    def _urgent(self) -> float:
        """Start an urgent job while as many as may be in Slurm wait for a node that is drained."""
        subprocess.run(["scontrol", "update", "nodename=n1", "state=drain", "reason=benchmark"], check=True)
        self.engine.begin("max_in_flight = 4\n")
        try:
            for number in range(4):
                self.engine.drop_job(f"{_NAME}b{number}", ["true"], executor_options=["--nodelist=n1"])
            until(lambda: len(_in_slurm()) >= 4, 60, "them to be in Slurm")
            begun = time.time_ns()
            self.engine.drop_job(f"{_NAME}urgent", ["true"], priority=100)
            self.engine.until_done(f"{_NAME}urgent", 1, 120)
            return (time.time_ns() - begun) / 1e9
        finally:
            self.engine.stop()
            subprocess.run(["scontrol", "update", "nodename=n1", "state=resume"], check=True)
            _cancel_all()

    def many(self) -> None:
        """Print what a large array costs: its hand-over, and an idle dispatcher while it is in Slurm."""
        count = self.in_flight
        self.engine.begin(f"max_in_flight = {count + 1}\n")
        try:
            (pid,) = self.engine.pids()
            before, cpu, begun = _requests(), cpu_ns(pid), time.time_ns()
            self.engine.drop_array(f"{_NAME}many", count, ["sleep", "100000"])
            until(lambda: len(_in_slurm()) >= count, 60 + count / 10, "all to be in Slurm")
            wall = (time.time_ns() - begun) / 1e9
            time.sleep(15)  # until all is recorded
            cost = (cpu_ns(pid) - cpu) / 1e6 / count
            helper = sum(_cpu_with_children_ms(child) for child in family([pid])[1:]) / count
            sent = _requests().get("REQUEST_SUBMIT_BATCH_JOB", 0) - before.get("REQUEST_SUBMIT_BATCH_JOB", 0)
            print(f"an array of {count}: in Slurm after {wall:.1f} s, by {sent} submissions")
            print(
                f"  CPU for a task: {cost:.2f} ms of the dispatcher, expansion and all; {helper:.2f} ms of its helper"
            )
            time.sleep(60)  # no news for a while
            asked = _requests()
            cpu, begun = cpu_ns(pid), time.monotonic_ns()
            time.sleep(self.idle_s)
            used = 100 * (cpu_ns(pid) - cpu) / (time.monotonic_ns() - begun)
            looks = sum(_requests().get(kind, 0) - asked.get(kind, 0) for kind in _ASKED[:2])
            print(f"  idle: {used:.2f} % of a core, {looks} questions to slurmctld in {self.idle_s:g} s")
        finally:
            self.engine.stop()
            _cancel_all()


def _sbatch(*options: str) -> str:
    words = ["sbatch", f"--job-name={_NAME}bare", *_OPTIONS, *options]
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


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


def _cancel_all() -> None:
    jobs = list(dict.fromkeys(job.partition("_")[0] for job in _in_slurm()))
    subprocess.run(["scancel", *jobs], capture_output=True, timeout=120)
    _until_empty()


def _until_empty() -> None:
    until(lambda: not _in_slurm(), 120, "Slurm to be done with all jobs")
