"""Grid Engine, by its own commands: their arguments, and the meaning of their answers (`formats/sge.py` reads them).

`qstat` knows the jobs that live, and the accounting file those that have ended: it is read after `qstat`, so that a
job that ends meanwhile is in one of the two. A job that is deleted before it begins is in neither, and is recognised
as a zombie that was seen waiting.
"""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence

from spool.core.errors import SpoolError, StartRefused
from spool.core.lifecycle import EngineWord
from spool.core.names import ENGINES
from spool.executors.base import Launch
from spool.executors.language import EnginePolicy, Language, Sighting
from spool.executors.policies import policy_of
from spool.formats import sge
from spool.formats.config import Config
from spool.formats.wrapper import EngineSurroundings
from spool.machine.commands import Command, CommandEnd

_PROGRAMS = ("qsub", "qstat", "qdel", "qconf", "qhost")
_WITHIN_S = 60.0
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
    title = ENGINES[name]
    surroundings = EngineSurroundings("sge", "HOSTNAME", "JOB_ID", watches=True)
    signals = False

    def __init__(self, config: Callable[[], Config]) -> None:
        self._config = config
        self._waiting: frozenset[str] = frozenset()  # the jobs that the last answer had waiting

    def policy(self) -> EnginePolicy:
        """Return the policy from `[sge]`."""
        return policy_of(self._config().sge)

    def check_options(self, options: Sequence[str]) -> None:
        """Refuse options of qsub that spool sets itself."""
        sge.allowed(tuple(options))

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
        said = sge.options(launch.job, launch.spec, mark=mark, metadir=launch.metadir, config=self._config().sge)
        environment = {**launch.inherited(), **sge.environment(os.environ)}
        # Found like the other commands, by the PATH of this process: that of the job may lack it.
        return Command((shutil.which("qsub") or "qsub", *said, launch.script), environment, _WITHIN_S)

    def submitted(self, done: CommandEnd) -> str | SpoolError | None:
        """Return the id, or the refusal in Grid Engine's words."""
        known = sge.submitted_id(done.out, done.err)
        if known is not None or done.status == 0:
            return known
        if self.is_silence(done):
            return None
        if sge.has_too_many(done.err):
            return StartRefused(f"Grid Engine takes no more jobs for now: {sge.refusal(done.err)}")
        return SpoolError(f"Grid Engine refuses it: {sge.refusal(done.err)}")

    def look(self) -> Sequence[Command]:
        """Return the questions for the jobs of this user that live, and then for those that have ended."""
        return (
            _urgent("qstat", "-xml", "-s", "prsz", "-u", _user()),
            _urgent("/bin/sh", "-c", _ACCOUNTS),
        )

    def seen(self, answers: Sequence[CommandEnd]) -> list[Sighting] | None:
        """Return the jobs of both answers. Without the accounting file, those that have ended are just not there."""
        listed, ended = answers
        jobs = sge.queue_jobs(listed.out) if listed.status == 0 else None
        if jobs is None:
            return None
        accounts = sge.accounts(ended.out) if ended.status == 0 else {}
        living = [job for job in jobs if not sge.has_ended(job.state)]
        gone = [job for job in jobs if sge.has_ended(job.state) and job.id not in accounts]
        deleted = [job for job in gone if job.id in self._waiting]
        known = {job.id for job in living}
        self._waiting = frozenset(job.id for job in [*living, *deleted] if sge.waits(job.state) or job in deleted)
        return [
            *(_ended(each) for each in accounts.values() if each.id not in known and each.name.startswith("spool-")),
            *(_living(job, accounts.get(job.id)) for job in living),
            *(
                Sighting(job.id, sge.mark_of(job.name), "it was deleted before it began", word=EngineWord.CANCELLED)
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
        return sge.is_silence(done.status, f"{done.err}\n{done.out}")

    def nodes(self, names: Collection[str]) -> Command:
        """Return the question to qhost, for all hosts: it refuses to answer if it does not know one of them."""
        return _urgent("qhost", "-xml")

    def nodes_back(self, done: CommandEnd) -> frozenset[str] | None:
        """Return the hosts that report their load."""
        return sge.nodes_back(done.out) if done.status == 0 else None

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


def _living(job: sge.QueueJob, account: sge.AccountLine | None) -> Sighting:
    """Return the meaning of a job that qstat lists; *account* is of an earlier start of it."""
    state, stuck = job.state, sge.is_stuck(job.state)
    said = f"{state} ({account.text})" if stuck and account is not None else state
    begun = not sge.waits(state)
    return Sighting(
        job.id,
        sge.mark_of(job.name),
        said,
        begun,
        node=job.node,
        halted=sge.is_halted(state),
        blocked=sge.is_held(state),
        stuck=stuck,
    )


def _ended(account: sge.AccountLine) -> Sighting:
    word = sge.meaning(account)
    return Sighting(account.id, sge.mark_of(account.name), account.text, account.began, word, account.node)
