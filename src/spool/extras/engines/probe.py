"""Checks of `spool doctor --slurm`: problems that would keep jobs of a spool from running in Slurm, with remedies.

Most of them only a job on a node can find, so one is submitted with the options of every other job. It looks at a
directory of the spool from there, and this module evaluates its findings.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping

from msgspec import Struct

from spool.core import layout
from spool.core.errors import SpoolError
from spool.core.model import SECOND_NS
from spool.core.names import LOCAL_EXECUTORS
from spool.core.units import show_duration, whole_words
from spool.doctor.checks import Check, Finding, Findings, Subject, fail, good, warn
from spool.executors.base import Launch
from spool.extras.engines import slurm
from spool.extras.engines.settings import settings_of
from spool.extras.engines.slurm import SlurmLanguage
from spool.formats import jobfile
from spool.machine.commands import Command, CommandEnd
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


def _run(command: Command) -> CommandEnd:
    """Run one of Slurm's commands, and wait for it."""
    environment = slurm.unaltered(os.environ) if command.environment is None else command.environment
    try:
        done = subprocess.run(
            command.arguments,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=command.within_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return CommandEnd(None, "", f"{command.arguments[0]} did not answer within {command.within_s:.0f}s")
    except OSError as error:
        return CommandEnd(127, "", f"{command.arguments[0]}: {error.strerror}")
    return CommandEnd(done.returncode, done.stdout, done.stderr)


def _settings(text: str) -> dict[str, str]:
    """Return the settings in the output of `scontrol show`, on their own lines or as `KEY=VALUE` on one line."""
    lines = dict(re.findall(r"^(\w+)\s+= (.*)$", text, re.MULTILINE))
    return {key: value.strip() for key, value in (lines or dict(re.findall(r"(\w+)=(\S*)", text))).items()}


def _seconds(text: str) -> int | None:
    match = re.match(r"\d+", text)
    return int(match.group()) if match else None


# The checks that need no job.


def _controller(subject: Subject) -> Findings:
    language = SlurmLanguage(lambda: subject.config)
    if (missing := language.missing()) is not None:
        yield fail(missing, "install Slurm's commands (Debian: slurm-client), or run spool on a login node")
        return
    begun_ns = time.monotonic_ns()
    done = _run(language.identify())
    cluster = language.cluster(done)
    if cluster is None:
        why = " ".join(done.err.split()) or "it said nothing"
        yield fail(f"no answer: {why}", "`scontrol ping` says the same; ask who runs the cluster")
        return
    version = _settings(done.out).get("SLURM_VERSION", "of unknown version")
    took_ms = (time.monotonic_ns() - begun_ns) // 1_000_000
    yield good(f"cluster {cluster} answers in {took_ms} ms, Slurm {version}")
    if (usual := subject.config.executor) in LOCAL_EXECUTORS:
        text = f'{usual}; only jobs with executor = "slurm", or submitted with --slurm, go to Slurm'
        yield good(text, about="default executor")


def _cluster_settings(subject: Subject) -> Findings:
    language = SlurmLanguage(lambda: subject.config)
    done = _run(language.identify())
    if language.cluster(done) is None:
        return
    has, settings = _settings(done.out), settings_of(subject.config).slurm
    fine = True
    age_s, poll_s = _seconds(has.get("MinJobAge", "")), settings.poll_ns / SECOND_NS
    if age_s is not None and age_s < 2 * poll_s + 10:
        fine = False
        text = f"Slurm forgets a job {age_s}s after its end; what it says of that end may be missed"
        yield warn(text, f'`poll = "{max(1, (age_s - 10) // 2)}s"` in [slurm], or a MinJobAge of 300')
    most = _seconds(has.get("MaxJobCount", ""))
    if most is not None and settings.max_in_flight > most // 2:
        fine = False
        text = f"max_in_flight is {settings.max_in_flight}, and Slurm holds {most} jobs of all users"
        yield warn(text, "a smaller max_in_flight in [slurm]")
    if "MEMORY" in has.get("SelectTypeParameters", "").upper() and _unlimited(has):
        fine = False
        text = "a job that states no memory gets all memory of its node, so no other runs beside it"
        yield warn(text, "state `memory` in job files, or in [defaults] of config.toml")
    if has.get("JobSubmitPlugins", "(null)") not in ("(null)", ""):
        fine = False
        yield warn(f"plugins may change what jobs ask for: {has['JobSubmitPlugins']}", "the probe shows what is left")
    if fine:
        yield good(f"ended jobs are known for {age_s}s; jobs without memory share a node")


def _unlimited(settings: Mapping[str, str]) -> bool:
    return all(settings.get(key, "UNLIMITED") in ("UNLIMITED", "0") for key in ("DefMemPerNode", "DefMemPerCPU"))


# The probe.


class _Answer(Struct, frozen=True):
    """The findings of the probe, and Slurm's report of it."""

    said: Mapping[str, str]
    sighting: str  # its state and reason, in Slurm's words
    comment: str
    settings: Mapping[str, str]  # of the job
    late_s: float  # the delay between the end and the visible answer
    between_ns: tuple[int, int]  # the submission and the first sight of the answer


def _probe(subject: Subject) -> Findings:
    """Submit a job and report its findings."""
    language = SlurmLanguage(lambda: subject.config)
    if language.missing() is not None or language.cluster(_run(language.identify())) is None:
        return  # reported already
    disk = Disk(subject.spool.layout.at(layout.STAGING))
    directory = f"{disk.staging}/{os.getpid()}.slurm"
    nonce = secrets.token_hex(8)
    disk.remove_tree(directory)
    disk.mkdir(directory)
    try:
        disk.create(f"{directory}/nonce", nonce.encode() + b"\n")
        disk.create(f"{directory}/taken", b"")
        disk.create(f"{directory}/script", _script(directory), 0o700)
        yield from _probed(subject, directory, nonce)
    finally:
        disk.remove_tree(directory)


def _probed(subject: Subject, directory: str, nonce: str) -> Findings:
    language = SlurmLanguage(lambda: subject.config)
    mark = f"spool:doctor:{_PROBE}:{os.getpid()}"
    spec = jobfile.parse(b'command = "true"\nmemory = "64M"\ntime_limit = "1m"\n', name=_PROBE)
    launch = Launch(_PROBE, 1, subject.root, directory, f"{directory}/script", spec=spec)
    begun_ns = time.time_ns()
    done = _run(language.submit(launch, mark))
    answer = language.submitted(done)
    if isinstance(answer, SpoolError):
        yield fail(
            str(answer), "`partition`, `account`, `qos` and `options` in [slurm] of config.toml", about="submission"
        )
        return
    if answer is None:
        yield fail(f"no answer: {' '.join(done.err.split())}", "look again", about="submission")
        return
    ended = False
    try:
        settings = _settings(_run(Command(("scontrol", "show", "job", answer))).out)
        line, ended = _until_ended(language, answer)
        if line is None or not ended:
            where = "is not known to Slurm any more" if line is None else f"is still {line.text}"
            text = f"the probe, job {answer}, {where} after {show_duration(int(PATIENCE_S * SECOND_NS))}"
            yield warn(text, "`squeue --start` says when; look again when the cluster is less busy", about="probe")
            return
        late_s = _wait_for_answer(directory)
        said = dict(each.split(" ", 1) for each in _lines(directory))
        found = _Answer(said, line.text, line.comment, settings, late_s, (begun_ns, time.time_ns()))
        yield from _judged(found, mark, nonce, directory)
    finally:
        if not ended:
            _run(language.cancel([answer], None, only_waiting=False))


def _script(directory: str) -> bytes:
    return _SCRIPT.replace("DIRECTORY", shlex.quote(directory)).encode()


def _until_ended(language: SlurmLanguage, job: str) -> tuple[slurm.QueueLine | None, bool]:
    """Wait until a job has ended; return Slurm's last report, and whether the job has ended."""
    last, deadline = None, time.monotonic() + PATIENCE_S
    while True:
        done = _run(*language.look())
        last = next((each for each in slurm.queue_lines(done.out) or () if each.id == job), last)
        if last is not None and last.state in slurm.ENDED:
            return last, True
        if time.monotonic() >= deadline:
            return last, False
        time.sleep(0.5)


def _lines(directory: str) -> Iterator[str]:
    data = read_file(f"{directory}/answer") or b""
    return (line for line in data.decode("ascii", "replace").splitlines() if " " in line)


def _wait_for_answer(directory: str) -> float:
    """Wait until the probe's files are visible here, and return how long that took."""
    begun = time.monotonic()
    while "answer" not in os.listdir(directory) and time.monotonic() - begun < _patience_with_caches(directory):
        time.sleep(0.2)
    return time.monotonic() - begun


def _patience_with_caches(directory: str) -> float:
    """Return for how many seconds an answer may stay hidden: few without the job's own log, which Slurm creates."""
    return _CACHES_S if os.path.exists(f"{directory}/{layout.ENGINE_LOG}") else 5.0


def _judged(found: _Answer, mark: str, nonce: str, directory: str) -> Findings:
    node = found.said.get("node", "the node")
    if found.said.get("nonce") != nonce:
        told = " ".join((read_file(f"{directory}/{layout.ENGINE_LOG}") or b"").decode("utf-8", "replace").split())
        seen = ": ".join(filter(None, (found.sighting, whole_words(told, 200))))
        text = f"a job on a node does not see {directory} ({seen})"
        yield fail(
            text, "put the spool on a file system that all nodes share, under the same path", about="shared spool"
        )
        return
    if found.late_s > 1:
        text = f"{node} sees the spool; what it writes is seen here after {found.late_s:.0f}s"
        yield warn(text, "ends are seen that much later; a shorter actimeo of the mount helps", about="shared spool")
    else:
        yield good(f"{node} sees the spool, and this machine what {node} writes there", about="shared spool")
    if "taken" in found.said or "free" not in found.said:
        text = f"{node} can create a file that is there already, so a run could begin twice"
        yield fail(text, "NFS 4, or another file system with exclusive creation", about="exclusive creation")
    else:
        yield good("a file is created once, wherever that is tried", about="exclusive creation")
    if found.said.get("uid") != str(os.getuid()):
        text = f"jobs run as user {found.said.get('uid')} there, and this is user {os.getuid()}"
        yield fail(text, "one user must have one number on all machines", about="user")
    else:
        yield good(f"user {os.getuid()} here and there", about="user")
    yield _clocks(found, node)
    yield from _as_asked(found, mark)


def _clocks(found: _Answer, node: str) -> Finding:
    there_s, (begun_ns, seen_ns) = _seconds(found.said.get("time", "")), found.between_ns
    if there_s is None:
        return warn(f"{node} did not say what time it is", about="clocks")
    off_ns = max(begun_ns - SECOND_NS - there_s * SECOND_NS, there_s * SECOND_NS - seen_ns, 0)
    if off_ns > _CLOCK_NS:
        text = f"{node} and this machine differ by {show_duration(off_ns)} at least"
        return warn(text, "NTP on both; start and end times of runs are told wrong", about="clocks")
    return good(f"{node} has the time of this machine", about="clocks")


def _as_asked(found: _Answer, mark: str) -> Findings:
    """Report how Slurm has applied the options."""
    if found.comment != mark:
        text = f"Slurm has changed the comment of a job to {found.comment!r}"
        remedy = "have its plugin keep --comment: without it, a submission that does not answer cannot be found again"
        yield fail(text, remedy, about="comment")
    else:
        yield good("jobs keep their comment, by which they are found again", about="comment")
    if found.settings.get("Requeue", "0") != "0":
        text = "Slurm starts jobs again by itself, though it is asked not to (--no-requeue)"
        yield warn(
            text,
            "the second start leaves at once, and the run counts as lost; spool's own retry is enough",
            about="requeue",
        )
    else:
        yield good("Slurm starts no job again by itself", about="requeue")
    partition = found.settings.get("Partition", "")
    limits = _settings(_run(Command(("scontrol", "show", "partition", partition))).out) if partition else {}
    limit = next(
        (each for key in ("DefaultTime", "MaxTime") if (each := limits.get(key, "NONE")) not in ("NONE", "UNLIMITED")),
        None,
    )
    if limit is None:
        yield good(f"partition {partition}: a job without time_limit may run for ever", about="limits")
    else:
        text = f"partition {partition}: Slurm ends a job without time_limit after {limit}"
        yield warn(text, "state `time_limit` in job files, or in [defaults] of config.toml", about="limits")


_NEEDS = (layout.QUEUED, layout.STAGING)
OF_SLURM = (
    Check("Slurm", "whether its commands are here, and its controller answers", _controller),
    Check("Slurm's settings", "how long it remembers jobs, what memory they get, what changes them", _cluster_settings),
    Check(
        "probe",
        "what a job on a node finds: the spool, the user, the clock; what became of its options",
        _probe,
        _NEEDS,
    ),
)
