"""Slurm, by its own commands: their arguments, and what their answers mean (`formats/slurm.py` reads them)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from spool.core import layout
from spool.core.errors import SpoolError, StartRefused, cannot
from spool.core.layout import Layout
from spool.core.lifecycle import EngineWord
from spool.core.names import ENGINES
from spool.executors.base import Home, Launch
from spool.executors.engine import ClusterExecutor
from spool.executors.language import EnginePolicy, Sighting
from spool.executors.local import LocalProcesses
from spool.formats import slurm
from spool.formats.config import Config
from spool.formats.freetext import MOST_READ
from spool.formats.run_records import parse_jid
from spool.formats.wrapper import EngineSurroundings
from spool.machine.commands import Command, CommandEnd, CommandRunner

_PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo")
_WITHIN_S = 60.0  # squeue gives a controller up after 19 s that is not there


class SlurmLanguage:
    """What Slurm is told and says."""

    name = "slurm"
    title = ENGINES[name]
    surroundings = EngineSurroundings("slurm", "SLURMD_NODENAME", "SLURM_JOB_ID")

    def __init__(self, config: Callable[[], Config]) -> None:
        self._config = config
        self._sbatch: str | None = None  # where it was when Slurm's programs were last looked for

    def policy(self) -> EnginePolicy:
        """Return what `[slurm]` says."""
        config = self._config().slurm
        return EnginePolicy(config.poll_ns, config.submit_per_second, config.max_in_flight)

    def missing(self) -> str | None:
        """Return which of Slurm's programs are not there."""
        found = {program: shutil.which(program) for program in _PROGRAMS}
        self._sbatch = found.get("sbatch")
        missing = [program for program, path in found.items() if path is None]
        return f"Slurm is not installed here: no {', '.join(missing)} in PATH" if missing else None

    def identify(self) -> Command:
        """Ask for the configuration."""
        return _urgent("scontrol", "show", "config")

    def cluster(self, done: CommandEnd) -> str | None:
        """Return the name in it."""
        return slurm.cluster_of(done.out) if done.status == 0 else None

    def submit(self, launch: Launch, mark: str) -> Command:
        """Hand the wrapper over as a batch script, in the environment that every job begins with."""
        config = self._config().slurm
        assert launch.spec is not None
        said = slurm.options(launch.job, launch.spec, mark=mark, metadir=launch.metadir, config=config)
        environment = slurm.environment(launch.inherited())
        environment |= {key: os.environ[key] for key in slurm.NEEDED if key in os.environ}
        # Found as the other commands are, by the PATH of this process: that of the job may lack it.
        return Command(
            (self._sbatch or shutil.which("sbatch") or "sbatch", *said, launch.script), environment, _WITHIN_S
        )

    def submitted(self, done: CommandEnd) -> str | SpoolError | None:
        """Return the id, or Slurm's words for why it refuses; a limit on the number of jobs is one for now."""
        if done.status == 0:
            return slurm.submitted_id(done.out)
        if self.is_silence(done):
            return None
        if slurm.has_too_many(done.err):
            return StartRefused(f"Slurm takes no more jobs for now: {slurm.refusal(done.err)}")
        return SpoolError(f"Slurm refuses it: {slurm.refusal(done.err)}")

    def look(self) -> Command:
        """Ask for all jobs of this user, those that have ended among them."""
        return _urgent("squeue", "--me", "--array", "--states=all", f"--format={slurm.FIELDS}")

    def seen(self, done: CommandEnd) -> list[Sighting] | None:
        """Return them."""
        lines = slurm.queue_lines(done.out) if done.status == 0 else None
        return None if lines is None else [_sighting(line) for line in lines]

    def cancel(self, ids: Sequence[str], signal: str | None, *, only_waiting: bool, name: str = "") -> Command:
        """Call scancel."""
        return _urgent(*slurm.cancel(ids, signal, only_waiting=only_waiting, name=name))

    def is_silence(self, done: CommandEnd) -> bool:
        """Whether the controller has not answered."""
        return slurm.is_silence(done.status, done.err)

    def nodes(self, names: Collection[str]) -> Command:
        """Ask sinfo."""
        return _urgent("sinfo", "--noheader", "-N", f"--nodes={','.join(names)}", "--format=%N\t%T")

    def nodes_back(self, done: CommandEnd) -> frozenset[str] | None:
        """Return those that are not marked as silent."""
        return slurm.nodes_back(done.out) if done.status == 0 else None

    def nodes_given_up(self) -> frozenset[str]:
        """Return what `other_hosts_gone` names."""
        return frozenset(self._config().other_hosts_gone)

    def last_words(self, log: str) -> tuple[EngineWord, str] | None:
        """Return what slurmstepd wrote."""
        return slurm.last_words(log)


def _urgent(*arguments: str) -> Command:
    return Command(arguments, None, _WITHIN_S, urgent=True)


def _sighting(line: slurm.QueueLine) -> Sighting:
    """Return what a line of squeue means. A word that nobody knows is that of a job that lives."""
    begun = line.state not in slurm.WAITING and line.state not in slurm.ENDED
    halted, end = line.state in slurm.HALTED, slurm.ENDED.get(line.state)
    return Sighting(line.id, line.comment, line.text, begun, end, line.node, halted)


class SlurmExecutor(ClusterExecutor):
    """Hands wrappers over to Slurm."""

    def __init__(
        self, local: LocalProcesses | None = None, config: Callable[[], Config] = Config, home: Home | None = None
    ) -> None:
        """Speak to Slurm as *config* says. Without a *home*, no run can be handed over or adopted."""
        super().__init__(SlurmLanguage(config), home, CommandRunner(lambda: slurm.environment(os.environ)))

    def attach(self, spool_dir: str, job: str, run: int, *, read_only: bool) -> tuple[str, ...]:
        """Return the command that opens a shell beside what the run runs, on its node."""
        what, there = f"job {job}", Layout(spool_dir)
        if read_only:
            remedy = f"`spool log -f {job}` shows its output"
            raise SpoolError(cannot("attach to", what, "a job in Slurm has no terminal to watch", remedy=remedy))
        with suppress(FileNotFoundError), open(there.record(job, run, layout.JID), "rb", opener=_unblocked) as record:
            jid = parse_jid(record.read(MOST_READ))
            if jid is not None and jid.engine is not None:
                return slurm.attach(jid.engine.partition(":")[2])
        remedy = f"`spool why {job}` shows what it waits for"
        raise SpoolError(cannot("attach to", what, "it has not started in Slurm", remedy=remedy))


def _unblocked(path: str, flags: int) -> int:
    """Open a record of a job, who may have put a FIFO there."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
