"""Checks of `spool doctor --slurm`: problems that would keep jobs of a spool from running in Slurm, with remedies.

Most of them only a job on a node can find, so one is submitted with the options of every other job. It looks at a
directory of the spool from there, and this module evaluates its findings.
"""

from __future__ import annotations

import os
import secrets
import shlex
import time
from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from spool.core import layout
from spool.core.errors import SpoolError
from spool.core.layout import LOCAL_EXECUTORS
from spool.core.model import SECOND_NS
from spool.core.units import show_duration, whole_words
from spool.doctor import Check, Finding, Findings, Subject, fail, good, warn
from spool.executors.base import Launch
from spool.extras.engines.language import Sighting
from spool.extras.engines.slurm import SlurmLanguage, number_in, settings_in
from spool.formats import jobfile
from spool.machine.commands import Command, CommandEnd, run
from spool.store.disk import Disk, read_file

PATIENCE_S = 120.0
"""The time in seconds that the probe may wait in Slurm and run."""

_CACHES_S = 65.0  # a network file system may hide another host's writes this long
_CLOCK_NS = 5 * SECOND_NS
_PROBE = "spool-doctor"

# `set -C` lets the shell create files as the wrapper creates its `jid`: exclusively.
_SCRIPT = """\
#!/bin/sh
cd -- DIRECTORY || exit 1
{
    echo "nonce $(cat nonce)"
    echo "uid $(id -u)"
    echo "time $(date +%s)"
    echo "node ${SLURMD_NODENAME:-$(hostname)}"
    (set -C; : > taken) 2> /dev/null && echo "taken twice"
    (set -C; : > free) 2> /dev/null && echo "free once"
} > answer.new
mv answer.new answer
"""


class _Slurm:
    """Slurm, which is waited for; what it has said of itself."""

    def __init__(self, subject: Subject) -> None:
        self.language = SlurmLanguage(lambda: subject.config)
        self.missing = self.language.missing()
        begun_ns = time.monotonic_ns()
        self.said = CommandEnd(None) if self.missing is not None else self.run(self.language.identify())
        self.took_ms = (time.monotonic_ns() - begun_ns) // 1_000_000
        self.cluster = self.language.cluster(self.said)
        self.has = settings_in(self.said.out)

    def run(self, command: Command) -> CommandEnd:
        """Run one of its commands, and wait for it."""
        environment = self.language.environment(os.environ) if command.environment is None else command.environment
        return run(replace(command, environment=environment))

    def settings(self, kind: str, name: str) -> dict[str, str]:
        """Return the settings of a job or of a partition."""
        return settings_in(self.run(Command(("scontrol", "show", kind, name))).out) if name else {}


def _judged(about: str, well: str, problem: str, remedy: str, level: Callable[..., Finding] = fail) -> Finding:
    """Return a finding that all is *well*, unless there is a *problem*."""
    return level(problem, remedy, about=about) if problem else good(well, about=about)


def _controller(subject: Subject) -> Findings:
    slurm = _Slurm(subject)
    if slurm.missing is not None:
        yield fail(slurm.missing, "install Slurm's commands (Debian: slurm-client), or run spool on a login node")
    elif slurm.cluster is None:
        why = " ".join(slurm.said.err.split()) or "it said nothing"
        yield fail(f"no answer: {why}", "`scontrol ping` says the same; ask who runs the cluster")
    else:
        version = slurm.has.get("SLURM_VERSION", "of unknown version")
        yield good(f"cluster {slurm.cluster} answers in {slurm.took_ms} ms, Slurm {version}")
        if (usual := subject.config.executor) in LOCAL_EXECUTORS:
            text = f'{usual}; only jobs with executor = "slurm", or submitted with --slurm, go to Slurm'
            yield good(text, about="default executor")


def _cluster_settings(subject: Subject) -> Findings:
    slurm = _Slurm(subject)
    if slurm.cluster is None:
        return
    has, settings = slurm.has, slurm.language.policy()
    age_s, most = number_in(has.get("MinJobAge", "")), number_in(has.get("MaxJobCount", ""))
    found: list[Finding] = []
    if age_s is not None and age_s < 2 * settings.poll_ns / SECOND_NS + 10:
        text = f"Slurm forgets a job {age_s}s after its end; what it says of that end may be missed"
        found.append(warn(text, f'`poll = "{max(1, (age_s - 10) // 2)}s"` in [slurm], or a MinJobAge of 300'))
    if most is not None and settings.max_in_flight > most // 2:
        text = f"max_in_flight is {settings.max_in_flight}, and Slurm holds {most} jobs of all users"
        found.append(warn(text, "a smaller max_in_flight in [slurm]"))
    is_unlimited = {has.get(key, "UNLIMITED") for key in ("DefMemPerNode", "DefMemPerCPU")} <= {"UNLIMITED", "0"}
    if "MEMORY" in has.get("SelectTypeParameters", "").upper() and is_unlimited:
        text = "a job that states no memory gets all memory of its node, so no other runs beside it"
        found.append(warn(text, "state `memory` in job files, or in [defaults] of config.toml"))
    if (plugins := has.get("JobSubmitPlugins", "(null)")) not in ("(null)", ""):
        found.append(warn(f"plugins may change what jobs ask for: {plugins}", "the probe shows what is left"))
    yield from found or [good(f"ended jobs are known for {age_s}s; jobs without memory share a node")]


class _Answer(Struct, frozen=True):
    """The findings of the probe, and Slurm's report of it."""

    said: Mapping[str, str]
    sighting: Sighting
    settings: Mapping[str, str]  # of the job
    late_s: float  # the delay between the end and the visible answer
    between_ns: tuple[int, int]  # the submission and the first sight of the answer


def _probe(subject: Subject) -> Findings:
    """Submit a job and report its findings."""
    slurm = _Slurm(subject)
    if slurm.cluster is None:
        return  # reported already
    disk = Disk(subject.spool.layout.at(layout.STAGING))
    directory = f"{disk.staging}/{os.getpid()}.slurm"
    nonce = secrets.token_hex(8)
    disk.remove_tree(directory)
    disk.mkdir(directory)
    try:
        disk.create(f"{directory}/nonce", nonce.encode() + b"\n")
        disk.create(f"{directory}/taken", b"")
        disk.create(f"{directory}/script", _SCRIPT.replace("DIRECTORY", shlex.quote(directory)).encode(), 0o700)
        yield from _probed(slurm, subject.root, directory, nonce)
    finally:
        disk.remove_tree(directory)


def _probed(slurm: _Slurm, root: str, directory: str, nonce: str) -> Findings:
    language = slurm.language
    mark = f"spool:doctor:{_PROBE}:{os.getpid()}"
    spec = jobfile.parse(b'command = "true"\nmemory = "64M"\ntime_limit = "1m"\n', name=_PROBE)
    launch = Launch(_PROBE, 1, root, directory, f"{directory}/script", spec=spec)
    begun_ns = time.time_ns()
    done = slurm.run(language.from_here(language.submit(launch, mark)))
    answer = language.submitted(done)
    if isinstance(answer, SpoolError):
        remedy = "`partition`, `account`, `qos` and `options` in [slurm] of config.toml"
        yield fail(str(answer), remedy, about="submission")
        return
    if answer is None:
        yield fail(f"no answer: {' '.join(done.err.split())}", "look again", about="submission")
        return
    job = None
    try:
        settings = slurm.settings("job", answer)
        job = _last_seen(slurm, answer)
        if job is None or job.word is None:
            where = "is not known to Slurm any more" if job is None else f"is still {job.said}"
            text = f"the probe, job {answer}, {where} after {show_duration(int(PATIENCE_S * SECOND_NS))}"
            yield warn(text, "`squeue --start` says when; look again when the cluster is less busy", about="probe")
            return
        late_s = _wait_for_answer(directory)
        lines = (read_file(f"{directory}/answer") or b"").decode("ascii", "replace").splitlines()
        said = dict(line.split(" ", 1) for line in lines if " " in line)
        found = _Answer(said, job, settings, late_s, (begun_ns, time.time_ns()))
        yield from _as_found(found, nonce, directory)
        if said.get("nonce") == nonce:
            yield from _as_asked(slurm, found, mark)
    finally:
        if job is None or job.word is None:
            slurm.run(language.cancel([answer], None, only_waiting=False))


def _last_seen(slurm: _Slurm, job: str) -> Sighting | None:
    """Wait until a job has ended; return Slurm's last report of it."""
    last, deadline = None, time.monotonic() + PATIENCE_S
    while True:
        seen = slurm.language.seen([slurm.run(*slurm.language.look())])
        last = next((each for each in seen or () if each.id == job), last)
        if (last is not None and last.word is not None) or time.monotonic() >= deadline:
            return last
        time.sleep(0.5)


def _wait_for_answer(directory: str) -> float:
    """Wait until the probe's files are visible here, and return how long that took."""
    begun = time.monotonic()
    while "answer" not in os.listdir(directory):
        # An answer may stay hidden for long, but not without the job's own log, which Slurm creates.
        patience_s = _CACHES_S if os.path.exists(f"{directory}/{layout.ENGINE_LOG}") else 5.0
        if time.monotonic() - begun >= patience_s:
            break
        time.sleep(0.2)
    return time.monotonic() - begun


def _as_found(found: _Answer, nonce: str, directory: str) -> Findings:
    """Report what the job has found on its node."""
    said, node = found.said, found.said.get("node", "the node")
    if said.get("nonce") != nonce:
        told = " ".join((read_file(f"{directory}/{layout.ENGINE_LOG}") or b"").decode("utf-8", "replace").split())
        seen = ": ".join(filter(None, (found.sighting.said, whole_words(told, 200))))
        text = f"a job on a node does not see {directory} ({seen})"
        remedy = "put the spool on a file system that all nodes share, under the same path"
        yield fail(text, remedy, about="shared spool")
        return
    text = f"{node} sees the spool; what it writes is seen here after {found.late_s:.0f}s" if found.late_s > 1 else ""
    remedy = "ends are seen that much later; a shorter actimeo of the mount helps"
    yield _judged(
        "shared spool", f"{node} sees the spool, and this machine what {node} writes there", text, remedy, warn
    )
    is_shared = "taken" in said or "free" not in said
    text = f"{node} can create a file that is there already, so a run could begin twice" if is_shared else ""
    remedy = "NFS 4, or another file system with exclusive creation"
    yield _judged("exclusive creation", "a file is created once, wherever that is tried", text, remedy)
    uid, own = said.get("uid"), os.getuid()
    text = f"jobs run as user {uid} there, and this is user {own}" if uid != str(own) else ""
    yield _judged("user", f"user {own} here and there", text, "one user must have one number on all machines")
    there_s, (begun_ns, seen_ns) = number_in(said.get("time", "")), found.between_ns
    if there_s is None:
        yield warn(f"{node} did not say what time it is", about="clocks")
        return
    off_ns = max(begun_ns - SECOND_NS - there_s * SECOND_NS, there_s * SECOND_NS - seen_ns, 0)
    text = f"{node} and this machine differ by {show_duration(off_ns)} at least" if off_ns > _CLOCK_NS else ""
    remedy = "NTP on both; start and end times of runs are told wrong"
    yield _judged("clocks", f"{node} has the time of this machine", text, remedy, warn)


def _as_asked(slurm: _Slurm, found: _Answer, mark: str) -> Findings:
    """Report how Slurm has applied the options."""
    comment = found.sighting.mark
    text = f"Slurm has changed the comment of a job to {comment!r}" if comment != mark else ""
    remedy = "have its plugin keep --comment: without it, a submission that does not answer cannot be found again"
    yield _judged("comment", "jobs keep their comment, by which they are found again", text, remedy)
    is_requeued = found.settings.get("Requeue", "0") != "0"
    text = "Slurm starts jobs again by itself, though it is asked not to (--no-requeue)" if is_requeued else ""
    remedy = "the second start leaves at once, and the run counts as lost; spool's own retry is enough"
    yield _judged("requeue", "Slurm starts no job again by itself", text, remedy, warn)
    partition = found.settings.get("Partition", "")
    limits = slurm.settings("partition", partition)
    stated = (limits.get(key, "NONE") for key in ("DefaultTime", "MaxTime"))
    limit = next((each for each in stated if each not in ("NONE", "UNLIMITED")), None)
    where = f"partition {partition}: "
    text = f"{where}Slurm ends a job without time_limit after {limit}" if limit is not None else ""
    remedy = "state `time_limit` in job files, or in [defaults] of config.toml"
    yield _judged("limits", f"{where}a job without time_limit may run for ever", text, remedy, warn)


OF_SLURM = (
    Check("Slurm", _controller),
    Check("Slurm's settings", _cluster_settings),
    Check(
        "probe",
        _probe,
        (layout.QUEUED, layout.STAGING),
    ),
)
