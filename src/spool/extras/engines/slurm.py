"""Slurm, by its own commands: their arguments, and the meaning of their answers.

The readers of answers are total: a line that cannot be read is skipped, and an unknown state counts as alive, because
nothing follows from it. docs/FORMAT.md 5.2 has the tables.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from spool.core import layout
from spool.core.lifecycle import EngineWord
from spool.core.model import SECOND_NS, Spec
from spool.executors.base import Launch
from spool.extras.commands import Command, CommandEnd
from spool.extras.engines.language import BuiltInLanguage, EngineConfig, Sighting, table_of, urgent
from spool.formats.values import option_name
from spool.formats.wire import one_line
from spool.formats.wrapper import EngineSurroundings

_MEBIBYTE, _GIBIBYTE = 1 << 20, 1 << 30
_MINUTE_NS = 60 * SECOND_NS

# What sbatch says when it waits, for up to two minutes, for the end of one of all jobs of the cluster.
_RETRIES = "temporarily unable to accept job"
_FIELDS = "%i\t%T\t%r\t%N\t%k"  # id, state, reason, nodes and, last because it may hold anything, comment

# The states of Slurm.
_WAITING = re.compile("PENDING|CONFIGURING|REQUEUED|REQUEUE_HOLD|REQUEUE_FED|RESV_DEL_HOLD|SPECIAL_EXIT")
_HALTED = frozenset({"SUSPENDED", "STOPPED"})
_ENDED = {
    "COMPLETED": EngineWord.COMPLETED,
    "FAILED": EngineWord.FAILED,
    "CANCELLED": EngineWord.CANCELLED,
    "TIMEOUT": EngineWord.TIMEOUT,
    "DEADLINE": EngineWord.TIMEOUT,
    "OUT_OF_MEMORY": EngineWord.OUT_OF_MEMORY,
    "NODE_FAIL": EngineWord.NODE_LOST,
    "REVOKED": EngineWord.NODE_LOST,
    "PREEMPTED": EngineWord.PREEMPTED,
    "BOOT_FAIL": EngineWord.NOT_STARTED,
}
_NO_REASON = frozenset({"", "None", "(null)"})
_FOR_ROOM = _NO_REASON | {"Priority", "Resources", "Cleaning", "Prolog"}
_AWAY = re.compile(r".*\*$|down|fail|unk|no_respond|error|future", re.IGNORECASE)  # of nodes

_LAST_WORDS = (
    ("DUE TO TIME LIMIT", EngineWord.TIMEOUT),
    ("DUE TO PREEMPTION", EngineWord.PREEMPTED),
    ("DUE TO JOB REQUEUE", EngineWord.PREEMPTED),  # by a user who wants its node, and wants it to run again
    ("DUE TO NODE FAILURE", EngineWord.NODE_LOST),
    ("exceeded memory limit", EngineWord.OUT_OF_MEMORY),
    ("oom-kill", EngineWord.OUT_OF_MEMORY),
    ("oom_kill", EngineWord.OUT_OF_MEMORY),
    ("CANCELLED AT", EngineWord.CANCELLED),
    ("Error running slurm prolog", EngineWord.NOT_STARTED),  # Slurm drains the node, and cancels the job
)


# The options that spool sets itself, each with the key of a job file that stands for it, if there is one.
_OURS = table_of("""
    job-name comment output=stdout error=stderr input open-mode chdir=workdir wrap=command export=env export-file
    propagate parsable requeue=requeue no-requeue array=array dependency=depends_on begin=start_after hold wait
    test-only time=time_limit time-min signal=signal mem=memory mem-per-cpu=memory mem-per-gpu nodes ntasks
    ntasks-per-node cpus-per-task=cpus cpus-per-gpu gres=gpus gpus=gpus gpus-per-node=gpus gpus-per-task=gpus
    gpus-per-socket=gpus clusters uid gid get-user-env version help usage quiet tres-per-task
""")
_SHORT = table_of("""
    J=job-name o=output e=error i=input D=chdir a=array t=time c=cpus-per-task n=ntasks N=nodes G=gpus d=dependency
    b=begin H=hold W=wait Q=quiet M=clusters V=version h=help
""")
_FLAGS_SHORT = frozenset("kKOsvX")  # one letter, without a value: another letter may follow


class SlurmConfig(EngineConfig, frozen=True):
    """The table `[slurm]` of the configuration: how jobs are handed to Slurm."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    preemptible_qos: str | None = None
    gpus: Mapping[str, str] = {}  # GPU type in job files -> Slurm's name
    gpu_memory: str = "refuse"  # or "shard"


class SlurmLanguage(BuiltInLanguage):
    """The commands and answers of Slurm."""

    name = "slurm"
    title = "Slurm"
    surroundings = EngineSurroundings("slurm", "SLURMD_NODENAME", "SLURM_JOB_ID")
    logs_ends = True
    programs = ("sbatch", "squeue", "scancel", "scontrol", "sinfo")
    settings = SlurmConfig
    choose = 'executor_options = ["--constraint=A|B"] with the features of your nodes'
    shell = ("srun", "--jobid={}", "--overlap", "--pty", "sh")
    misleading = re.compile(r"(?:_?SLURM|SBATCH|SQUEUE|SCANCEL|SINFO|SCONTROL|SALLOC|SRUN|SPANK)_")
    variables = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
    # Slurm's own words for its errors of communication, whole: a job may be refused because of its sockets, and a
    # plugin may print anything.
    unheard = re.compile(
        r"unable to contact slurm|slurm backup controller in standby|socket timed out|missing socket error|"
        r"connection (?:timed out|refused|reset)|communication (?:connection|shutdown) failure|"
        r"zero bytes were transmitted|message (?:send|receive) failure|failed to send entire message|"
        r"received (?:zero length message|message length < 0)|header lengths are longer|insane message length|"
        r"unexpected message received|protocol (?:authentication error|version)|incompatible versions|"
        r"stream version number error|can't find an address|authentication credential|munge encode failed|"
        r"transport endpoint|no route to host|network is unreachable|broken pipe|temporarily unavailable|"
        r"no answer from|not responding|unable to (?:resolve|establish)|"
        r"fatal: .*(?:configuration|plugin|auth|munge|credential)",
        re.IGNORECASE,
    )
    reason = re.compile(r"(?:submission failed|Kill job error on job id \S+): (.*)")
    # Limits on submissions, as QOSMaxSubmitJobPerUserLimit, and troubles of the controller's own: a full disk, a
    # restart.
    full = re.compile(
        rf"\b(?:Assoc|QOS)\w*Submit\w*Limit\b|{_RETRIES}|Unable to create job record, try again|"
        r"I/O error writing script/environment to file|Requested operation is presently disabled"
    )
    noise = re.compile("^sbatch: (?:error: )?(?:Batch job submission failed: )?")

    def ours(self, option: str) -> Iterator[str]:
        """Yield the key for each option of sbatch that spool sets itself, in a bundle of letters too."""
        name = option_name(option)
        if name.startswith("--"):  # Slurm's programs accept any prefix of an option's name
            yield from (key for each, key in sorted(_OURS.items()) if each.startswith(name[2:]))
            return
        for letter in name[1:]:
            if letter in _SHORT:
                yield _OURS[_SHORT[letter]]
            if letter not in _FLAGS_SHORT:
                return  # the rest is its value

    def identify(self) -> Command:
        """Return the question for the configuration."""
        return urgent("scontrol", "show", "config")

    def cluster(self, done: CommandEnd) -> str | None:
        """Return the cluster's name in it."""
        name = re.search(r"^ClusterName\s+= (.*)$", done.out, re.MULTILINE)
        return name[1].strip() if name is not None and done.status == 0 else None

    # Handing over.

    def submit(self, launch: Launch, mark: str) -> Command:
        """Return the submission of the wrapper as a batch script, in the environment that every job begins with."""
        assert launch.spec is not None
        log = f"{launch.metadir}/{layout.ENGINE_LOG}".replace("%", "%%")
        words = (
            *("sbatch", f"--job-name={launch.job}", f"--chdir={launch.metadir}", f"--output={log}"),
            *(f"--comment={mark}", "--parsable", "--no-requeue", "--open-mode=append"),
            *("--propagate=NONE", "--input=/dev/null", "--export=ALL"),
            *self._options(launch.job, launch.spec),
        )
        return Command((*words, launch.script), launch.inherited(), ends_on=_RETRIES)

    def _options(self, name: str, spec: Spec) -> Iterator[str]:
        """Yield the options for what the job *name* requests. Raises SpoolError for what Slurm cannot express."""
        request = spec.request
        config: SlurmConfig = self.policy()
        yield from ("--nodes=1", "--ntasks=1", f"--cpus-per-task={max(1, request.cpus)}")
        if request.memory_bytes is not None:
            yield f"--mem={max(1, -(-request.memory_bytes // _MEBIBYTE))}M"
        if request.gpus:
            yield f"--gres={self._gres(name, spec)}"
        if spec.time_limit_ns is not None:
            # In minutes, from the moment at which Slurm makes the node ready: it ends later than spool's own limit.
            yield f"--time={-(-spec.time_limit_ns // _MINUTE_NS) + 1}"
        qos = (spec.preemptible and config.preemptible_qos) or config.qos
        for option, value in (("partition", config.partition), ("account", config.account), ("qos", qos)):
            if value is not None:
                yield f"--{option}={value}"
        yield from config.options
        yield from spec.part("engines") or ()

    def _gres(self, name: str, spec: Spec) -> str:
        request = spec.request
        config: SlurmConfig = self.policy()
        self.check_gpus(name, request)
        if request.gpu_memory_bytes is not None:
            if config.gpu_memory != "shard":
                why = "it shares a GPU (gpu_memory), which Slurm is not asked for"
                remedy = 'ask for whole GPUs, or write gpu_memory = "shard" in [slurm] if Slurm has shards of 1 GiB'
                self.refuse(name, why, remedy)
            return f"shard:{-(-request.gpu_memory_bytes // _GIBIBYTE) * request.gpus}"
        kinds = [config.gpus.get(each, f"gpu:{each}") for each in request.gpu_types]
        return f"{kinds[0] if kinds else 'gpu'}:{request.gpus}"

    # Looking, and ending.

    def look(self) -> Sequence[Command]:
        """Return the question for all jobs of this user, including ended ones."""
        return (urgent("squeue", "--me", "--states=all", "--array", f"--format={_FIELDS}"),)

    def seen(self, answers: Sequence[CommandEnd]) -> list[Sighting] | None:
        """Return the jobs in squeue's answer; None without its title line, since then it is no answer.

        Unreadable lines are skipped, and so is an incomplete last line.
        """
        (done,) = answers
        found, answered = list[Sighting](), False
        for line in done.out.split("\n")[:-1] if done.status == 0 else ():
            fields = line.split("\t", 4)
            if len(fields) == 5 and fields[0][:1].isdigit() and fields[1].strip():
                found.append(_sighting(fields[0].strip(), *map(one_line, fields[1:])))
            elif len(fields) == 5 and fields[0].strip() == "JOBID":
                answered = True
        return found if answered else None

    def cancel(self, ids: Sequence[str], signal: str | None) -> Command:
        """Return the call of scancel."""
        how = ("--batch", f"--signal={signal}") if signal is not None else ()
        return urgent("scancel", *how, *ids)

    def nodes(self, names: Collection[str]) -> Command:
        """Return the question to sinfo."""
        return urgent("sinfo", "--noheader", "-N", f"--nodes={','.join(names)}", "--format=%N\t%T")

    def nodes_back(self, done: CommandEnd) -> frozenset[str] | None:
        """Return the responding nodes in lines of a name and a state. A final `*`: no response.

        A node that is down does not count: Slurm may not have noticed yet that it does not respond.
        """
        pairs = [line.split("\t") for line in done.out.splitlines()]
        back = (pair[0].strip() for pair in pairs if len(pair) == 2 and not _AWAY.match(pair[1].strip()))
        return frozenset(back) if done.status == 0 else None

    def last_words(self, log: str) -> tuple[EngineWord, str] | None:
        """Return how Slurm ended a job, and in which words: the last line of slurmstepd that says so."""
        for line in reversed(log.splitlines()):
            if "slurm" in line:  # else it is a line of the job
                for words, meaning in _LAST_WORDS:
                    if words in line:
                        return meaning, one_line(line)
        return None


def _sighting(job: str, state: str, reason: str, node: str, comment: str) -> Sighting:
    """Return what a line of squeue says of a job; one with an unknown state is alive."""
    state = state.upper()
    waits, end = _WAITING.fullmatch(state) is not None, _ENDED.get(state)
    return Sighting(
        job,
        comment,
        state if reason in _NO_REASON else f"{state} ({reason})",
        begun=not waits and end is None,
        word=end,
        node=node,
        halted=state in _HALTED,
        blocked=waits and state != "CONFIGURING" and reason not in _FOR_ROOM,
    )
