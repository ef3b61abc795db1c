"""Grid Engine, by its own commands: their arguments, and the meaning of their answers.

`qstat` knows the jobs that live, and the accounting file those that have ended: it is read after `qstat`, so that a
job that ends meanwhile is in one of the two. A job that is deleted before it begins is in neither, and is recognised
as a zombie that was seen waiting. The readers are total: what cannot be read is skipped, and an unknown state counts
as alive, because nothing follows from it.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from spool.core.errors import SpoolError, StartRefused, cannot
from spool.core.lifecycle import EngineWord
from spool.core.model import SECOND_NS, Spec
from spool.core.units import show_duration
from spool.executors.base import Launch
from spool.extras.engines.language import Language, Sighting, is_unanswered, printable
from spool.extras.engines.settings import SgeConfig, allowed_in_sge, check_gpus, settings_of
from spool.formats.config import Config
from spool.formats.freetext import one_line
from spool.formats.wrapper import EngineSurroundings
from spool.machine.commands import Command, CommandEnd

_MEBIBYTE = 1 << 20
_MARGIN_S = 60  # Grid Engine ends a job this much later than spool
_PROGRAMS = ("qsub", "qstat", "qdel", "qconf", "qhost")
_WITHIN_S = 60.0
_MASKED = (99, 100)  # Grid Engine starts a job again after 99, and keeps it in an error state after 100
# The commands find the cluster by themselves where Debian's settings say which one it is.
_PLACE = (
    'if [ -z "$SGE_ROOT" ] && [ -r /etc/default/gridengine ]; then . /etc/default/gridengine; fi\n'
    "common=${SGE_ROOT:-/var/lib/gridengine}/${SGE_CELL:-default}/common\n"
)
_ACCOUNTS = f'{_PLACE}tail -c 2000000 "$common/accounting"\n'  # some 8,000 jobs
_IDENTIFY = f"""{_PLACE}qconf -sss > /dev/null || exit
cat "$common/cluster_name" 2> /dev/null || printf '%s\\n' "$common"
"""
_DELETE_NAMED = """name=$1
shift
for job; do
    case $(qstat -j "$job" | sed -n 's/^job_name: *//p') in
    spool-*-"$name") qdel "$job" ;;
    esac
done
"""


class SgeLanguage(Language):
    """The commands and answers of Grid Engine."""

    name = "sge"
    title = "Grid Engine"
    surroundings = EngineSurroundings("sge", "HOSTNAME", "JOB_ID", _MASKED, watches=True)
    signals = False

    def __init__(self, config: Callable[[], Config]) -> None:
        self._config = config
        self._waiting: frozenset[str] = frozenset()  # the jobs that the last answer had waiting

    def policy(self) -> SgeConfig:
        """Return the policy from `[sge]`."""
        return settings_of(self._config()).sge

    def check_options(self, options: Sequence[str]) -> None:
        """Refuse options of qsub that spool sets itself."""
        allowed_in_sge(tuple(options))

    def missing(self) -> str | None:
        """Return which of Grid Engine's programs are missing."""
        missing = [program for program in _PROGRAMS if shutil.which(program) is None]
        return f"Grid Engine is not installed here: no {', '.join(missing)} in PATH" if missing else None

    def identify(self) -> Command:
        """Return the question for the name of the cluster, which is in a file once the master has answered."""
        return _urgent("/bin/sh", "-c", _IDENTIFY)

    def cluster(self, done: CommandEnd) -> str | None:
        """Return the cluster's name, or where it is kept."""
        return "_".join(done.out.split()) or None if done.status == 0 else None

    def submit(self, launch: Launch, mark: str) -> Command:
        """Return the submission of the wrapper, in the environment that every job begins with."""
        assert launch.spec is not None
        said = options_of(launch.job, launch.spec, mark=mark, metadir=launch.metadir, config=self.policy())
        environment = {**launch.inherited(), **whereabouts(os.environ)}
        # Found like the other commands, by the PATH of this process: that of the job may lack it.
        return Command((shutil.which("qsub") or "qsub", *said, launch.script), environment, _WITHIN_S)

    def submitted(self, done: CommandEnd) -> str | SpoolError | None:
        """Return the id, or the refusal in Grid Engine's words."""
        known = submitted_id(done.out, done.err)
        if known is not None or done.status == 0:
            return known
        if self.is_silence(done):
            return None
        if has_too_many(done.err):
            return StartRefused(f"Grid Engine takes no more jobs for now: {refusal(done.err)}")
        return SpoolError(f"Grid Engine refuses it: {refusal(done.err)}")

    def look(self) -> Sequence[Command]:
        """Return the questions for the jobs of this user that live, and then for those that have ended."""
        return (
            _urgent("qstat", "-xml", "-s", "prsz", "-u", _user()),
            _urgent("/bin/sh", "-c", _ACCOUNTS),
        )

    def seen(self, answers: Sequence[CommandEnd]) -> list[Sighting] | None:
        """Return the jobs of both answers. Without the accounting file, those that have ended are just not there."""
        listed, ended = answers
        jobs = queue_jobs(listed.out) if listed.status == 0 else None
        if jobs is None:
            return None
        known_ends = accounts(ended.out) if ended.status == 0 else {}
        living = [job for job in jobs if not has_ended(job.state)]
        gone = [job for job in jobs if has_ended(job.state) and job.id not in known_ends]
        deleted = [job for job in gone if job.id in self._waiting]
        known = {job.id for job in living}
        self._waiting = frozenset(job.id for job in [*living, *deleted] if waits(job.state) or job in deleted)
        return [
            *(_ended(each) for each in known_ends.values() if each.id not in known and each.name.startswith("spool-")),
            *(_living(job, known_ends.get(job.id)) for job in living),
            *(
                Sighting(job.id, mark_of(job.name), "it was deleted before it began", word=EngineWord.CANCELLED)
                for job in deleted
            ),
        ]

    def cancel(self, ids: Sequence[str], signal: str | None, *, only_waiting: bool, name: str = "") -> Command:
        """Return the call of qdel. It does not tell jobs that wait from others."""
        assert signal is None, "the wrapper reads signals from a record"
        if name:
            return _urgent("/bin/sh", "-c", _DELETE_NAMED, "sh", name, *ids)
        return _urgent("qdel", *ids)

    def is_silence(self, done: CommandEnd) -> bool:
        """Whether the master has not answered."""
        return is_silence(done.status, f"{done.err}\n{done.out}")

    def nodes(self, names: Collection[str]) -> Command:
        """Return the question to qhost, for all hosts: it refuses to answer if it does not know one of them."""
        return _urgent("qhost", "-xml")

    def nodes_back(self, done: CommandEnd) -> frozenset[str] | None:
        """Return the hosts that report their load."""
        return nodes_back(done.out) if done.status == 0 else None

    def nodes_given_up(self) -> frozenset[str]:
        """Return the nodes in `other_hosts_gone`."""
        return frozenset(self._config().other_hosts_gone)

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return an environment in which its commands speak English."""
        return {**variables, "LC_ALL": "C"}


def _urgent(*arguments: str) -> Command:
    return Command(arguments, None, _WITHIN_S, urgent=True)


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _living(job: QueueJob, account: AccountLine | None) -> Sighting:
    """Return the meaning of a job that qstat lists; *account* is of an earlier start of it."""
    state, stuck = job.state, is_stuck(job.state)
    said = f"{state} ({account.text})" if stuck and account is not None else state
    begun = not waits(state)
    return Sighting(
        job.id,
        mark_of(job.name),
        said,
        begun,
        node=job.node,
        halted=is_halted(state),
        blocked=is_held(state),
        stuck=stuck,
    )


def _ended(account: AccountLine) -> Sighting:
    word = meaning(account)
    return Sighting(account.id, mark_of(account.name), account.text, account.began, word, account.node)


# What jobs request.


def words_of(options: Iterable[str]) -> Iterator[str]:
    """Yield the words of options, each of which has its name and its value in one text: `-l gpu=1`."""
    for option in options:
        name, _, value = option.partition(" ")
        yield name
        if value.strip():
            yield value.strip()


_MARK = re.compile(r"spool-([0-9a-f]+)-([0-9]+)-(.+)", re.ASCII)


def name_of(mark: str) -> str:
    """Return a mark, `spool:SPOOL:JOB:RUN`, as the name of a job: those have no colon."""
    _, spool, job, run = mark.split(":")
    return f"spool-{spool}-{run}-{job}"


def mark_of(name: str) -> str:
    """Return the mark in the name of a job; any other name is its own."""
    match = _MARK.fullmatch(name)
    return f"spool:{match[1]}:{match[3]}:{match[2]}" if match else name


def options_of(name: str, spec: Spec, *, mark: str, metadir: str, config: SgeConfig) -> Iterator[str]:
    """Yield the options of qsub for the job *name*, whose records go to *metadir*.

    Raises SpoolError for a request that Grid Engine cannot be told.
    """
    # Without a prefix, no line of the script is taken for an option.
    yield from ("-terse", "-N", name_of(mark), "-C", "", "-S", "/bin/sh", "-b", "n", "-r", "n", "-V")
    yield from ("-wd", metadir, "-i", "/dev/null", "-j", "y", "-o", f"{metadir}/engine.log".replace("$", "\\$"))
    cpus = max(1, spec.request.cpus)
    if cpus > 1:
        if config.pe is None:
            why = f"it needs {cpus} CPUs, and Grid Engine gives more than one through a parallel environment only"
            remedy = 'write pe = "NAME" in [sge], one whose allocation_rule is $pe_slots (`qconf -spl` lists them)'
            raise SpoolError(cannot("hand", f"job {name} to Grid Engine", why, remedy=remedy))
        yield from ("-pe", config.pe, str(cpus))
    for request in _requests(name, spec, config):
        yield from ("-l", request)
    for option, value in (("-q", config.queue), ("-P", config.project)):
        if value is not None:
            yield from (option, value)
    yield from words_of(config.options)
    yield from words_of(spec.part("engines") or ())


def _requests(name: str, spec: Spec, config: SgeConfig) -> Iterator[str]:
    """Yield the values of `-l`. A parallel environment multiplies some of them by its slots."""
    request, slots = spec.request, max(1, spec.request.cpus)
    if request.memory_bytes is not None:
        parts = slots if config.memory_per_slot else 1
        yield f"{config.memory}={max(1, -(-request.memory_bytes // (_MEBIBYTE * parts)))}M"
    if request.gpus:
        yield from _gpus(name, spec, config)
    if spec.time_limit_ns is not None:
        yield f"h_rt={-(-spec.time_limit_ns // SECOND_NS) + _MARGIN_S}"


def _gpus(name: str, spec: Spec, config: SgeConfig) -> Iterator[str]:
    request, what = spec.request, f"job {name} to Grid Engine"
    if request.gpu_memory_bytes is not None:
        why = "it shares a GPU (gpu_memory), which Grid Engine cannot be asked for"
        raise SpoolError(cannot("hand", what, why, remedy="ask for whole GPUs"))
    if config.gpus is None:
        remedy = 'write gpus = "NAME" in [sge], the resource that counts them (`qconf -sc` lists all)'
        raise SpoolError(cannot("hand", what, "it needs GPUs, and which resource they are is unknown", remedy=remedy))
    yield f"{config.gpus}={request.gpus}"
    check_gpus(name, spec, "sge")
    if request.gpu_types:
        (gpu_type,) = request.gpu_types
        known = config.gpu_types.get(gpu_type)
        if known is None:
            remedy = f'write gpu_types = {{ "{gpu_type}" = "RESOURCE=VALUE" }} in [sge]'
            raise SpoolError(cannot("hand", what, f"what stands for a {gpu_type} is unknown", remedy=remedy))
        yield known


def still_ends(job_id: str, asked_ns: int, limit_ns: int | None) -> str:
    """Return when Grid Engine ends a job that has a later limit now."""
    return f"Grid Engine still ends it after {show_duration(asked_ns + _MARGIN_S * SECOND_NS)}"


# What Grid Engine reports.


class QueueJob(Struct, frozen=True):
    """One job as qstat shows it."""

    id: str
    name: str
    state: str
    node: str


class AccountLine(Struct, frozen=True):
    """One line of the accounting file: a job that has ended, or was put back."""

    id: str
    name: str
    node: str
    began: bool
    failed: int
    code: int

    @property
    def text(self) -> str:
        """How it ended, in Grid Engine's terms."""
        if not self.failed:
            return f"exit status {self.code}"
        return f"failed {self.failed}: {_FAILURES.get(self.failed, 'for an unknown reason')}"


def queue_jobs(text: str) -> list[QueueJob] | None:
    """Return the jobs in an answer of `qstat -xml`; None if it is no answer, or is cut off."""
    from xml.etree import ElementTree  # imported here, because only few spools need it

    try:
        root = ElementTree.fromstring(text)  # noqa: S314  (it is of the cluster that runs our jobs)
    except ElementTree.ParseError:
        return None
    if root.tag != "job_info":
        return None
    return [_queue_job(each) for each in root.iter("job_list") if (each.findtext("JB_job_number") or "").isdecimal()]


def _queue_job(job: object) -> QueueJob:
    get = job.findtext  # type: ignore[attr-defined]
    node = (get("queue_name") or "").partition("@")[2]
    return QueueJob(get("JB_job_number"), get("JB_name") or "", printable(get("state") or ""), printable(node))


def accounts(text: str) -> dict[str, AccountLine]:
    """Return the last line about each job in the end of the accounting file; its first line may be cut off."""
    found = {}
    for line in text.split("\n")[:-1]:
        fields = line.split(":")
        if len(fields) > 12 and all(fields[at].isascii() and fields[at].isdecimal() for at in (5, 9, 11, 12)):
            id_, began, failed, code = fields[5], fields[9], fields[11], fields[12]
            if len(failed) < 4 and len(code) < 4:
                found[id_] = AccountLine(
                    id_, fields[4], printable(fields[1]), began.strip("0") != "", int(failed), int(code)
                )
    return found


def meaning(account: AccountLine) -> EngineWord:
    """Return how Grid Engine has ended a job."""
    if account.failed == 0:
        return EngineWord.COMPLETED if account.code == 0 else EngineWord.FAILED
    if account.failed == _TOO_LONG:
        return EngineWord.TIMEOUT
    if account.failed in _PUT_BACK:
        return EngineWord.PREEMPTED
    if account.failed == _SIGNALLED:
        return EngineWord.CANCELLED if account.code == _KILLED else EngineWord.FAILED
    return EngineWord.FAILED if account.began else EngineWord.NOT_STARTED


_TOO_LONG, _SIGNALLED, _KILLED = 37, 100, 128 + 9
_PUT_BACK = frozenset({24, 25})
# man sge_status
_FAILURES = {
    **dict.fromkeys(range(1, 8), "its shepherd could not begin"),
    8: "in the prolog",
    10: "in the start of the parallel environment",
    11: "before the job",
    15: "in the epilog",
    17: "ended by a signal",
    19: "before its exit status was written",
    21: "recognising the job",
    24: "migrated",
    25: "started again",
    26: "opening the input or output file",
    27: "searching the shell",
    28: "changing into the working directory",
    29: "error in a file of the job",
    30: "the job reported an error",
    37: "a limit of time or memory was exceeded",
    38: "adding a supplementary group",
    100: "ended by a signal",
}


def waits(state: str) -> bool:
    """Whether a job waits: `qw`, `hqw`, and `Rq` of one that was put back."""
    return "q" in state or state in ("h", "w", "E")


def is_stuck(state: str) -> bool:
    """Whether Grid Engine keeps a job that it could not start: `Eqw`."""
    return "E" in state


def is_held(state: str) -> bool:
    """Whether a hold keeps a job: `hqw`."""
    return "h" in state and waits(state)


def is_halted(state: str) -> bool:
    """Whether a job that has begun is suspended: by a user, by its queue, or by a threshold."""
    return not waits(state) and any(letter in state for letter in "sST")


def has_ended(state: str) -> bool:
    """Whether a job is listed as one that has ended."""
    return state == "z"


_SUBMITTED = re.compile(r"^Your job ([1-9][0-9]{0,18}) \(", re.MULTILINE)
_ID = re.compile(r"^[ \t]*([1-9][0-9]{0,18})[ \t\r]*$", re.MULTILINE | re.ASCII)


def submitted_id(out: str, err: str) -> str | None:
    """Return the id that `qsub -terse` has printed on a line of its own; None if there is none, or more than one.

    With a warning, qsub prints a sentence instead, and says that it could not run the job, which it has submitted.
    """
    found = _ID.findall(out) or _SUBMITTED.findall(f"{out}\n{err}")
    return found[0] if len(found) == 1 else None


_UNREACHABLE = re.compile(
    r"unable to (?:contact|send|receive|connect)|commlib|can't connect|got (?:read|send|select|write) error|"
    r"failed receiving|no answer|not responding|timeout|timed out|unable to initialize environment|"
    r"can't resolve (?:host|service)|shut ?down|abort(?:ed|ing) qmaster",
    re.IGNORECASE,
)


def is_silence(status: int | None, said: str) -> bool:
    """Whether a command failed because it got no answer, and not because of its request."""
    return is_unanswered(status, said, _UNREACHABLE)


_TOO_MANY = re.compile(r"jobs? (?:are|is) allowed per (?:user|cluster)|max_(?:u_)?jobs", re.IGNORECASE)


def has_too_many(err: str) -> bool:
    """Whether qsub refused a job because of too many jobs, so that it may accept it later."""
    return _TOO_MANY.search(err) is not None


def refusal(err: str) -> str:
    """Return why qsub has refused a job, in Grid Engine's words."""
    lines = [re.sub(r"^(?:Unable to run job|qsub|error|warning): *", "", each.strip()) for each in err.splitlines()]
    said = [each for each in lines if each and each not in ("Exiting.", "error:")]
    return one_line("; ".join(dict.fromkeys(said))) or "qsub failed and did not say why"


def nodes_back(text: str) -> frozenset[str] | None:
    """Return the hosts with a load in an answer of `qhost -xml`: the others do not report. None: no answer."""
    from xml.etree import ElementTree  # imported here, because only few spools need it

    try:
        root = ElementTree.fromstring(text)  # noqa: S314  (it is of the cluster that runs our jobs)
    except ElementTree.ParseError:
        return None
    return frozenset(
        host.get("name", "")
        for host in root.iter("host")
        for value in host.iter("hostvalue")
        if value.get("name") == "load_avg" and (value.text or "-").strip() != "-"
    )


def whereabouts(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which Grid Engine's commands find their cluster."""
    return {key: variables[key] for key in NEEDED if key in variables}


NEEDED = ("SGE_ROOT", "SGE_CELL", "SGE_CLUSTER_NAME", "SGE_QMASTER_PORT", "SGE_EXECD_PORT", "SGE_ARCH")
