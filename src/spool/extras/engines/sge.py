"""Grid Engine, by its own commands: their arguments, and the meaning of their answers.

`qstat` knows the jobs that live, and the accounting file those that have ended: it is read after `qstat`, so that a
job that ends meanwhile is in one of the two. A job that is deleted before it begins is in neither, and is recognised
as a zombie that was seen waiting. The readers are total: what cannot be read is skipped, and an unknown state counts
as alive, because nothing follows from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from spool.core import layout
from spool.core.errors import InvalidValue, SpoolError
from spool.core.lifecycle import EngineWord
from spool.core.model import SECOND_NS, Spec
from spool.executors.base import Launch
from spool.extras.commands import Command, CommandEnd
from spool.extras.engines.language import BuiltInLanguage, EngineConfig, Sighting, table_of, urgent
from spool.formats.values import option_name
from spool.formats.wire import one_line
from spool.formats.wrapper import EngineSurroundings
from spool.store.ownership import this_user

_MEBIBYTE = 1 << 20
_MARGIN_S = 60  # Grid Engine ends a job this much later than spool
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
# The field `failed` of the accounting file (man sge_status): its meaning where that is not plain.
_SIGNALLED, _KILLED = 100, 128 + 9
_MEANINGS = {37: EngineWord.TIMEOUT, 24: EngineWord.PREEMPTED, 25: EngineWord.PREEMPTED}
_DELETED = "z"  # the state of a job that has ended, or was deleted


# The options that spool sets itself, each with the key of a job file that stands for it, if there is one.
_OURS = table_of("""
    N o=stdout e=stderr i j wd=workdir cwd=workdir S=shell V v=env r=requeue t=array tc=max_running
    hold_jid=depends_on hold_jid_ad=depends_on terse sync b C clear shell h a=start_after now verify pe=cpus ckpt
    c @ help masterq dc ac sc inherit pty
""")
_OUR_REQUESTS = {"h_rt": "time_limit", "s_rt": "time_limit"}


class SgeConfig(EngineConfig, frozen=True):
    """The table `[sge]` of the configuration: how jobs are handed to Grid Engine."""

    queue: str | None = None
    project: str | None = None
    pe: str | None = None  # the parallel environment of jobs with more than one processor
    memory: str = "mem_free"  # the resource that stands for it
    memory_per_slot: bool = False
    gpus: str | None = None  # likewise; None: jobs with GPUs are refused
    gpu_types: Mapping[str, str] = {}  # GPU type in job files -> a further request


class SgeLanguage(BuiltInLanguage):
    """The commands and answers of Grid Engine."""

    name = "sge"
    title = "Grid Engine"
    surroundings = EngineSurroundings("sge", "HOSTNAME", "JOB_ID", _MASKED, watches=True)
    signals = False
    settings = SgeConfig
    choose = 'executor_options = ["-l RESOURCE=A|B"] with a resource of your site'
    adds: ClassVar = {"LC_ALL": "C"}  # its commands speak English
    programs = ("qsub", "qstat", "qdel", "qconf")
    variables = ("SGE_ROOT", "SGE_CELL", "SGE_CLUSTER_NAME", "SGE_QMASTER_PORT", "SGE_EXECD_PORT", "SGE_ARCH")
    unheard = re.compile(
        r"unable to (?:contact|send|receive|connect)|commlib|can't connect|got (?:read|send|select|write) error|"
        r"failed receiving|no answer|not responding|timeout|timed out|unable to initialize environment|"
        r"can't resolve (?:host|service)|shut ?down|abort(?:ed|ing) qmaster",
        re.IGNORECASE,
    )
    full = re.compile(r"jobs? (?:are|is) allowed per (?:user|cluster)|max_(?:u_)?jobs", re.IGNORECASE)
    noise = re.compile(r"^(?:Unable to run job|qsub|error|warning): *|^Exiting\.$")

    _waiting: frozenset[str] = frozenset()  # the jobs that the last answer had waiting

    def ours(self, option: str) -> Iterator[str]:
        """Yield the key for each option and request of qsub that spool sets itself. Raises InvalidValue."""
        name = option_name(option)
        if name.startswith("--") or "=" in option[: len(name) + 1]:
            raise InvalidValue(f'{option!a} is no option of qsub; write name and value as one, as in "-l scratch=10G"')
        if name[1:] in _OURS:
            yield _OURS[name[1:]]
        if name == "-l":
            requests = (part.partition("=")[0].strip() for part in option[len(name) :].split(","))
            yield from (_OUR_REQUESTS[each] for each in requests if each in _OUR_REQUESTS)

    def identify(self) -> Command:
        """Return the question for the name of the cluster, which is in a file once the master has answered."""
        return urgent("/bin/sh", "-c", _IDENTIFY)

    def cluster(self, done: CommandEnd) -> str | None:
        """Return the cluster's name, or where it is kept."""
        return "_".join(done.out.split()) or None if done.status == 0 else None

    # Handing over.

    def submit(self, launch: Launch, mark: str) -> Command:
        """Return the submission of the wrapper, in the environment that every job begins with."""
        assert launch.spec is not None
        log = f"{launch.metadir}/{layout.ENGINE_LOG}".replace("$", "\\$")
        words = (
            # Without a prefix, no line of the script is taken for an option.
            *("qsub", "-terse", "-N", name_of(mark), "-C", "", "-S", "/bin/sh", "-b", "n", "-r", "n", "-V"),
            *("-wd", launch.metadir, "-i", "/dev/null", "-j", "y", "-o", log),
            *self.options_of(launch.job, launch.spec),
        )
        return Command((*words, launch.script), launch.inherited())

    def options_of(self, name: str, spec: Spec) -> Iterator[str]:
        """Yield the options for what the job *name* requests. Raises SpoolError for what cannot be asked for."""
        request = spec.request
        config: SgeConfig = self.policy()
        cpus = max(1, request.cpus)
        if cpus > 1:
            if config.pe is None:
                why = f"it needs {cpus} CPUs, and Grid Engine gives more than one through a parallel environment only"
                remedy = 'write pe = "NAME" in [sge], one whose allocation_rule is $pe_slots (`qconf -spl` lists them)'
                self.refuse(name, why, remedy)
            yield from ("-pe", config.pe, str(cpus))
        requests = []
        if request.memory_bytes is not None:
            parts = cpus if config.memory_per_slot else 1  # a parallel environment multiplies it by its slots
            requests.append(f"{config.memory}={max(1, -(-request.memory_bytes // (_MEBIBYTE * parts)))}M")
        if request.gpus:
            requests += self._gpus(name, spec)
        if spec.time_limit_ns is not None:
            requests.append(f"h_rt={-(-spec.time_limit_ns // SECOND_NS) + _MARGIN_S}")
        for each in requests:
            yield from ("-l", each)
        for option, value in (("-q", config.queue), ("-P", config.project)):
            if value is not None:
                yield from (option, value)
        yield from words_of((*config.options, *(spec.part("engines") or ())))

    def _gpus(self, name: str, spec: Spec) -> Iterator[str]:
        request = spec.request
        config: SgeConfig = self.policy()
        if request.gpu_memory_bytes is not None:
            self.refuse(
                name, "it shares a GPU (gpu_memory), which Grid Engine cannot be asked for", "ask for whole GPUs"
            )
        if config.gpus is None:
            remedy = 'write gpus = "NAME" in [sge], the resource that counts them (`qconf -sc` lists all)'
            self.refuse(name, "it needs GPUs, and which resource they are is unknown", remedy)
        self.check_gpus(name, request)
        yield f"{config.gpus}={request.gpus}"
        for each in request.gpu_types:
            if each not in config.gpu_types:
                remedy = f'write gpu_types = {{ "{each}" = "RESOURCE=VALUE" }} in [sge]'
                self.refuse(name, f"what stands for a {each} is unknown", remedy)
            yield config.gpu_types[each]

    def submitted(self, done: CommandEnd) -> str | SpoolError | None:
        """Return the id, or the refusal.

        With a warning, qsub prints a sentence, and says that it could not run the job, which it has submitted.
        """
        found = _SUBMITTED.findall(f"{done.out}\n{done.err}")
        known = self.submitted_id(done) or (found[0] if len(found) == 1 else None)
        return known or super().submitted(done)

    # Looking, and ending.

    def look(self) -> Sequence[Command]:
        """Return the questions for the jobs of this user that live, and then for those that have ended."""
        return urgent("qstat", "-xml", "-s", "prsz", "-u", this_user()), urgent("/bin/sh", "-c", _ACCOUNTS)

    def seen(self, answers: Sequence[CommandEnd]) -> list[Sighting] | None:
        """Return the jobs of both answers. Without the accounting file, those that have ended are just not there."""
        listed, ended = answers
        jobs = queue_jobs(listed.out) if listed.status == 0 else None
        if jobs is None:
            return None
        ends = accounts(ended.out) if ended.status == 0 else {}
        living = {job.id: job for job in jobs if job.said != _DELETED}
        gone = [job for job in jobs if job.said == _DELETED and job.id not in ends]
        deleted = [job for job in gone if job.id in self._waiting]
        self._waiting = frozenset(job.id for job in living.values() if not job.begun) | {job.id for job in deleted}
        ended_waiting = "it was deleted before it began"
        return [
            *(end for end in ends.values() if end.id not in living and end.mark.startswith("spool:")),
            *living.values(),
            *(Sighting(job.id, job.mark, ended_waiting, word=EngineWord.CANCELLED) for job in deleted),
        ]

    def cancel(self, ids: Sequence[str], signal: str | None) -> Command:
        """Return the call of qdel."""
        assert signal is None, "the wrapper reads signals from a record"
        return urgent("qdel", *ids)


_SUBMITTED = re.compile(r"^Your job ([1-9][0-9]{0,18}) \(", re.MULTILINE)
_MARK = re.compile(r"spool-([0-9a-f]+)-([0-9]+)-(.+)", re.ASCII)


def words_of(options: Iterable[str]) -> Iterator[str]:
    """Yield the words of options, each of which has its name and its value in one text: `-l gpu=1`."""
    for option in options:
        name, _, value = option.partition(" ")
        yield name
        if value.strip():
            yield value.strip()


def name_of(mark: str) -> str:
    """Return a mark, `spool:SPOOL:JOB:RUN`, as the name of a job: those have no colon."""
    _, spool, job, run = mark.split(":")
    return f"spool-{spool}-{run}-{job}"


def mark_of(name: str) -> str:
    """Return the mark in the name of a job; any other name is its own."""
    match = _MARK.fullmatch(name)
    return f"spool:{match[1]}:{match[3]}:{match[2]}" if match else name


def queue_jobs(text: str) -> list[Sighting] | None:
    """Return the jobs in an answer of `qstat -xml`; None if it is no answer."""
    from xml.etree import ElementTree  # imported here, because only few spools need it

    try:
        tree = ElementTree.fromstring(text)  # noqa: S314  (it is of the cluster that runs our jobs)
    except ElementTree.ParseError:  # it is cut off
        return None
    if tree.tag != "job_info":
        return None
    jobs = (each for each in tree.iter("job_list") if (each.findtext("JB_job_number") or "").isdecimal())
    return [_queue_job(each.findtext) for each in jobs]


def _queue_job(field: Callable[[str], str | None]) -> Sighting:
    """Return what qstat says of a job. It waits in `qw`, `hqw`, `Eqw`, and `Rq` if it was put back."""
    state = one_line(field("state") or "")
    waits = "q" in state or state in ("h", "w", "E")
    return Sighting(
        field("JB_job_number") or "",
        mark_of(field("JB_name") or ""),
        state,
        begun=not waits,
        node=one_line((field("queue_name") or "").partition("@")[2]),
        halted=not waits and not set(state).isdisjoint("sST"),  # by a user, by its queue, or by a threshold
        blocked=waits and "h" in state,
        stuck="E" in state,
    )


def accounts(text: str) -> dict[str, Sighting]:
    """Return the last line about each job in the end of the accounting file; its first line may be cut off."""
    found = {}
    for line in text.split("\n")[:-1]:
        fields = line.split(":")
        if len(fields) > 12 and all(fields[at].isascii() and fields[at].isdecimal() for at in (5, 9, 11, 12)):
            job, begun, failed, code = fields[5], fields[9].strip("0") != "", fields[11], fields[12]
            if len(failed) < 4 and len(code) < 4:
                said, word = _end(int(failed), int(code), begun=begun)
                found[job] = Sighting(job, mark_of(fields[4]), said, begun, word, one_line(fields[1]))
    return found


def _end(failed: int, code: int, *, begun: bool) -> tuple[str, EngineWord]:
    """Return how Grid Engine has ended a job, in its words and in ours."""
    if not failed:
        return f"exit status {code}", EngineWord.COMPLETED if code == 0 else EngineWord.FAILED
    word = EngineWord.FAILED if begun else EngineWord.NOT_STARTED
    if failed == _SIGNALLED:
        word = EngineWord.CANCELLED if code == _KILLED else EngineWord.FAILED
    return f"failed {failed} (man sge_status)", _MEANINGS.get(failed, word)
