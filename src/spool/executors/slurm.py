"""Slurm, by its own commands: their arguments, and the meaning of their answers (`formats/slurm.py` reads them)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from spool.core import layout
from spool.core.errors import SpoolError, StartRefused
from spool.core.lifecycle import EngineWord
from spool.core.names import ENGINES
from spool.executors.base import Launch
from spool.executors.language import ArrayRefused, EngineArray, EnginePolicy, Language, Sighting
from spool.executors.policies import policy_of
from spool.formats import slurm
from spool.formats.config import Config
from spool.formats.wrapper import EngineSurroundings
from spool.machine.commands import Command, CommandEnd

_PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo")
_WITHIN_S = 60.0  # squeue gives up an unreachable controller after 19 s


class SlurmLanguage(Language):
    """The commands and answers of Slurm."""

    name = "slurm"
    has_arrays = logs_ends = True
    title = ENGINES[name]
    surroundings = EngineSurroundings("slurm", "SLURMD_NODENAME", "SLURM_JOB_ID")

    def __init__(self, config: Callable[[], Config]) -> None:
        self._config = config
        self._sbatch: str | None = None  # its path at the last lookup of Slurm's programs
        self._array_width: int | None = None
        self._array_tasks: int | None = None
        self._memory_ns: int | None = None

    def policy(self) -> EnginePolicy:
        """Return the policy from `[slurm]`."""
        return policy_of(self._config().slurm)

    def check_options(self, options: Sequence[str]) -> None:
        """Refuse options of sbatch that spool sets itself."""
        slurm.allowed(tuple(options))

    def missing(self) -> str | None:
        """Return which of Slurm's programs are missing."""
        found = {program: shutil.which(program) for program in _PROGRAMS}
        self._sbatch = found.get("sbatch")
        missing = [program for program, path in found.items() if path is None]
        return f"Slurm is not installed here: no {', '.join(missing)} in PATH" if missing else None

    def identify(self) -> Command:
        """Return the question for the configuration."""
        return _urgent("scontrol", "show", "config")

    def cluster(self, done: CommandEnd) -> str | None:
        """Return the cluster's name in it."""
        if done.status != 0:
            return None
        self._array_width, self._array_tasks = slurm.array_width(done.out), slurm.array_tasks(done.out)
        self._memory_ns = slurm.memory_ns(done.out)
        return slurm.cluster_of(done.out)

    def submit(self, launch: Launch, mark: str) -> Command:
        """Return the submission of the wrapper as a batch script, in the environment that every job begins with."""
        log = slurm.file_pattern(f"{launch.metadir}/{layout.ENGINE_LOG}")
        said = slurm.submission(launch.job, mark, launch.metadir, log)
        return self._submission(launch, (*said, *self._options(launch), launch.script))

    def _options(self, launch: Launch) -> Iterator[str]:
        assert launch.spec is not None
        return slurm.options(launch.job, launch.spec, self._config().slurm)

    def array_width(self) -> int | None:
        """Return the largest power of ten within `MaxArraySize`."""
        return self._array_width

    def array_tasks(self) -> int | None:
        """Return `max_array_tasks`."""
        return self._array_tasks

    def submit_array(self, launch: Launch, mark: str, array: EngineArray) -> Command:
        """Return the submission of a script that finds the wrapper of each element."""
        log = slurm.array_log(array.jobs, array.name, array.first, array.width, array.run)
        said = slurm.submission(array.name, mark, array.jobs, log)
        elements = slurm.array_option(array.elements, array.at_once)
        script = slurm.array_script(array.jobs, array.name, array.first, array.run)
        return self._submission(launch, (*said, *self._options(launch), elements), script)

    def limit_array(self, array_id: str, at_once: int | None) -> Command:
        """Return the change of the limit after the `%` of `--array`; 0 is none."""
        return _urgent("scontrol", "update", f"jobid={array_id}", f"arraytaskthrottle={at_once or 0}")

    def _submission(self, launch: Launch, arguments: Sequence[str], script: str = "") -> Command:
        """Return the call of sbatch; without a file among *arguments* it reads *script*."""
        environment = slurm.environment(launch.inherited())
        environment |= {key: os.environ[key] for key in slurm.NEEDED if key in os.environ}
        # Found like the other commands, by the PATH of this process: that of the job may lack it.
        program = self._sbatch or shutil.which("sbatch") or "sbatch"
        return Command((program, *arguments), environment, _WITHIN_S, standard_input=script, ends_on=slurm.RETRIES)

    def submitted(self, done: CommandEnd) -> str | SpoolError | None:
        """Return the id, or the refusal in Slurm's words; a limit on the number of jobs is one for now."""
        if done.status == 0:
            return slurm.submitted_id(done.out)
        if slurm.has_too_many(done.err):
            words = f"Slurm takes no more jobs for now: {slurm.refusal(done.err)}"
            return None if done.out.strip() else StartRefused(words)
        if self.is_silence(done):
            return None
        if slurm.has_wrong_array(done.err):
            return ArrayRefused(f"Slurm takes no such array: {slurm.refusal(done.err)}")
        return SpoolError(f"Slurm refuses it: {slurm.refusal(done.err)}")

    def look(self) -> Sequence[Command]:
        """Return the question for all jobs of this user, including ended ones."""
        return (_urgent("squeue", "--me", "--states=all", f"--format={slurm.FIELDS}"),)

    def seen(self, answers: Sequence[CommandEnd]) -> list[Sighting] | None:
        """Return the jobs in squeue's answer."""
        (done,) = answers
        lines = slurm.queue_lines(done.out) if done.status == 0 else None
        return None if lines is None else [_sighting(line, each) for line in lines for each in slurm.ids(line.id)]

    def memory_ns(self) -> int | None:
        """Return `MinJobAge`."""
        return self._memory_ns

    def cancel(self, ids: Sequence[str], signal: str | None, *, only_waiting: bool, name: str = "") -> Command:
        """Return the call of scancel."""
        return _urgent(*slurm.cancel(ids, signal, only_waiting=only_waiting, name=name))

    def is_silence(self, done: CommandEnd) -> bool:
        """Whether the controller has not answered."""
        return slurm.is_silence(done.status, done.err)

    def nodes(self, names: Collection[str]) -> Command:
        """Return the question to sinfo."""
        return _urgent("sinfo", "--noheader", "-N", f"--nodes={','.join(names)}", "--format=%N\t%T")

    def nodes_back(self, done: CommandEnd) -> frozenset[str] | None:
        """Return the nodes that are not marked as not responding."""
        return slurm.nodes_back(done.out) if done.status == 0 else None

    def nodes_given_up(self) -> frozenset[str]:
        """Return the nodes in `other_hosts_gone`."""
        return frozenset(self._config().other_hosts_gone)

    def last_words(self, log: str) -> tuple[EngineWord, str] | None:
        """Return the last words of slurmstepd."""
        return slurm.last_words(log)

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return an environment without variables that would change the output of Slurm's commands."""
        return slurm.environment(variables) | slurm.WHOLE_LISTS

    def attach(self, job_id: str) -> tuple[str, ...]:
        """Return the call of srun that opens a shell within the allocation of a job."""
        return slurm.attach(job_id)


def _urgent(*arguments: str) -> Command:
    return Command(arguments, None, _WITHIN_S, urgent=True)


def _sighting(line: slurm.QueueLine, job_id: str) -> Sighting:
    """Return what a line of squeue says of one of its jobs. A job with an unknown state is alive."""
    begun = line.state not in slurm.WAITING and line.state not in slurm.ENDED
    halted, end = line.state in slurm.HALTED, slurm.ENDED.get(line.state)
    element = job_id.partition("_")[2]
    return Sighting(
        job_id,
        line.comment,
        line.text,
        begun,
        end,
        line.node,
        halted,
        blocked=slurm.is_blocked(line),
        element=int(element) if element.isdecimal() else None,
    )
