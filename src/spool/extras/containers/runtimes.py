"""Containers: the command line that runs a job's command in an image, and the texts around it.

What spool relies on, whatever the runtime: the container has the marks of its run (FORMAT 6.1) and the user of the
spool, so its processes are found, measured and ended as those of any run, also where a daemon started them; and the
program of the command line stays until the container ends, passes signals on and has its exit code. The records that a
runtime keeps of a container are removed by a text after the command, and by one before the next run of the job.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
import zlib
from contextlib import suppress
from shlex import quote

from msgspec import Struct
from msgspec.structs import replace

from spool.core.layout import ENVIRONMENT, STOP
from spool.core.model import Grant, Spec
from spool.extras.containers import RUNTIMES
from spool.formats import wrapper
from spool.formats.validation import PartReader, Reading
from spool.formats.values import option_name
from spool.formats.wire import one_line
from spool.formats.wrapper import Assignments
from spool.state.run import ActiveRun

# Variables of the host that mean nothing, or harm, in an image. An option of the job can set them.
_OF_THE_HOST = frozenset({"HOME", "USER", "LOGNAME", "SHELL", "PATH", "PWD", "TMPDIR", "VIRTUAL_ENV", "PYTHONHOME"})
_PREFIXES_OF_THE_HOST = ("LD_", "CONDA_", "BASH_FUNC_")
_ALSO_CALLED = {"apptainer": ("apptainer", "singularity")}
_INITS = ("/usr/libexec/podman/catatonit", "/usr/lib/podman/catatonit", "/usr/local/libexec/podman/catatonit")
_OF_AMD = ("/dev/kfd", "/dev/dri")
_REGISTRY = "docker://"
_SHELL = "/bin/sh"  # of the texts around a container
_OURS = frozenset({"--name", "--detach", "--rm", "--entrypoint"})
_NO_DAEMON = re.compile("daemon|connect", re.IGNORECASE)  # in what docker says when it cannot reach one
_MOMENT_S = 1  # to answer
_MOST_READ = 16_384  # of what a command says
_LONGEST_PAUSE_S = 60
_Question = tuple[str, tuple[tuple[str, str], ...]]
_ANSWERS: dict[_Question, tuple[float, str | None]] = {}  # until when
_ASKED: dict[_Question, tuple[float, subprocess.Popen[bytes]]] = {}  # since when
# The containers of runs that are over are removed by a later one: where a run was killed, nothing of it could do that.
_BEFORE = """\
: >> "$SPOOL_ENV"
@runtime@ ps --all --quiet --filter @filter@ | while read -r container; do
    metadir=$(@runtime@ inspect --format '{{index .Config.Labels "spool.metadir"}}' "$container")
    if [ -e "$metadir/run.sh" ] && [ ! -e "$metadir/result.toml" ]; then continue; fi
    @runtime@ rm --force "$container"
done > /dev/null 2>&1
:
"""
_AFTER = """\
if [ "$(@runtime@ inspect --format '{{.State.OOMKilled}}' @title@ 2> /dev/null)" = true ] && [ ! -e @stop@ ]; then
    echo memory > @stop@
fi
@runtime@ rm --force @title@ > /dev/null 2>&1
"""


class Container(Struct, frozen=True):
    """The image in which a command runs: the key `container` of a job file."""

    image: str
    runtime: str | None = None  # None: whichever is there
    options: tuple[str, ...] = ()  # passed to the runtime


def _read(reading: Reading) -> Container:
    """Return the container that a job file states, and add the problems of its image and its options."""
    stated, problems = reading.found["container"], reading.problems
    if stated.get("image", "").startswith("-"):
        problems.add(("container",), 'begins with "-", which no image does; options go into "options"')
    for option in stated.get("options", ()):
        if option_name(option) in _OURS or re.fullmatch("-[itPq]*d[itPq]*", option):
            why = f"{option} is not allowed: spool names, follows and removes the container, and says what runs in it"
            problems.add(("container", "options"), why)
    return Container(**{"image": "", **stated})


READER = PartReader(_read)
"""What reads the key `container`."""


def problem(spec: Spec) -> str | None:
    """Return why the container of a job cannot be started on this machine, and what to do; None if it can."""
    container = spec.part("containers")
    environment = tuple((key, value) for key, value in spec.env if key.startswith("DOCKER_"))  # where its daemon is
    found = _found(container)
    if found is not None:
        return _unserved(found[1], environment) if found[0] == "docker" else None
    names = _possible(container)
    remedy = "install it" if len(names) == 1 else "install one of them"
    return f"its container needs {' or '.join(names)}, not found in the dispatcher's PATH; {remedy}"


def _unserved(program: str, environment: tuple[tuple[str, str], ...]) -> str | None:
    """Return why docker cannot reach its daemon; None if it can, or fails for a reason that a run may say better.

    A question that is not answered in a moment stays open, and the next call looks at it: a daemon that hangs does not
    keep a dispatcher from its work. An answer holds for twenty times as long as it took, at most a minute.
    """
    key = program, environment
    until, said = _ANSWERS.get(key, (0.0, None))
    if time.monotonic() < until:
        return said
    try:
        begun, asked = _ASKED.pop(key) if key in _ASKED else (time.monotonic(), _asked(program, environment))
    except OSError as error:  # a shortage, or no program: the start will tell
        return f"its container needs docker, and {program} cannot be run: {error.strerror}"
    try:
        code = asked.wait(max(0.0, begun + _MOMENT_S - time.monotonic()))
    except subprocess.TimeoutExpired:
        _ASKED[key] = begun, asked
        return "its container needs the daemon of docker, which has not answered; if it hangs, restart it"
    text = b""
    assert asked.stderr is not None
    with asked.stderr as stderr, suppress(BlockingIOError):  # a program of its own may hold that open
        os.set_blocking(stderr.fileno(), False)
        text = os.read(stderr.fileno(), _MOST_READ) if code else b""
    line = next((line for line in text.decode(errors="replace").splitlines() if _NO_DAEMON.search(line)), None)
    said = line and f"its container needs the daemon of docker: {one_line(line)}; start it"
    now = time.monotonic()
    _ANSWERS[key] = now + min(20 * (now - begun), _LONGEST_PAUSE_S), said
    return said


def _asked(program: str, environment: tuple[tuple[str, str], ...]) -> subprocess.Popen[bytes]:
    """Ask docker for something that only its daemon knows."""
    words = [program, "ps", "--all", "--quiet", "--filter", "label=spool.dir"]
    null = subprocess.DEVNULL
    variables = {key: value for key, value in os.environ.items() if not key.startswith("DOCKER_")}
    variables.update(environment)
    return subprocess.Popen(words, env=variables, stdin=null, stdout=null, stderr=subprocess.PIPE)


def launched(spec: Spec, written: Assignments, live: ActiveRun) -> Assignments:
    """Return what is written for a run whose command runs in a container; its shell is in the image.

    Paths are the same inside and outside. Without a runtime, the name of the first that it may have is left, and the
    run fails with 127.
    """
    container, grant = spec.part("containers"), live.grant
    name, program = _found(container) or (_possible(container)[0],) * 2
    words = wrapper.words_of(written.command, written.shell)
    if name == "apptainer":
        # It passes on the environment, and stays within the run and its limits.
        gpus = [] if not grant.gpu_uuids else ["--rocm"] if _has_amd(written, grant) else ["--nv"]
        options = (f"--pwd={written.workdir}", *_mounts(written), *gpus, *_options(container), _image(container, name))
        return replace(written, command=(program, "exec", *options, *words), shell=_SHELL)
    spool_dir = written.environment["SPOOL_DIR"]
    title = f"spool-{zlib.crc32(os.fsencode(spool_dir)):08x}-{live.name}-{live.run}"
    labels = (f"--label=spool.dir={spool_dir}", f"--label=spool.metadir={written.metadir}")
    words = (f"--entrypoint={words[0]}", _image(container, name), *words[1:])
    command = (program, "run", f"--name={title}", *labels, *_engine(name, written, grant), *_options(container), *words)
    filled = {"runtime": quote(program), "title": title, "stop": quote(f"{written.metadir}/{STOP}")}
    filled["filter"] = quote(f"label=spool.dir={spool_dir}")
    before, after = (re.sub(r"@(\w+)@", lambda match: filled[match[1]], text) for text in (_BEFORE, _AFTER))
    prep, end = wrapper.both(written.prep, before), wrapper.both(after, written.end)
    return replace(written, command=command, shell=_SHELL, prep=prep, end=end)


def _engine(name: str, written: Assignments, grant: Grant) -> tuple[str, ...]:
    """Return the options of docker and podman, which are the same but for these few."""
    uid, gid, has_amd = os.geteuid(), os.getegid(), _has_amd(written, grant)
    options = [f"--user={uid}:{gid}", f"--workdir={written.workdir}", "--security-opt=label=disable"]
    if name == "docker" or shutil.which("catatonit") or any(map(os.path.exists, _INITS)):
        options.append("--init")  # else a command that does not expect it is a process 1, and hears no TERM
    if name == "podman" and uid:
        options.append("--userns=keep-id")
    if written.surroundings.terminal:
        options.append("--interactive")
    if grant.cpus:
        options.append(f"--cpus={grant.cpus}")
    if grant.memory_bytes is not None:
        options.append(f"--memory={grant.memory_bytes}b")
    if grant.cpu_list and (name == "docker" or not uid):  # else its processes inherit the affinity of the run
        options.append(f"--cpuset-cpus={grant.cpu_list}")
    if has_amd:  # ROCR_VISIBLE_DEVICES, which goes along, says which of these
        options += [*(f"--device={path}" for path in _OF_AMD), f"--group-add={_group_of_amd(name)}"]
    elif grant.gpu_uuids and name == "docker":
        options.append(f'--gpus="device={",".join(grant.gpu_uuids)}"')
    elif grant.gpu_uuids:
        options += [f"--device=nvidia.com/gpu={uuid}" for uuid in grant.gpu_uuids]
    if not grant.gpu_uuids or has_amd:
        options.append("--env=NVIDIA_VISIBLE_DEVICES=void")  # where the runtime gives all GPUs to images that ask
    options += _mounts(written)
    options.append(f"--env-file={written.metadir}/{ENVIRONMENT}")  # what texts before the command have added
    options += [
        f"--env={key}"
        for key in written.environment
        if key not in _OF_THE_HOST and not key.startswith(_PREFIXES_OF_THE_HOST)
    ]
    if written.environment.get("CUDA_VISIBLE_DEVICES", "")[:1].isdecimal():  # it has only these GPUs, and counts them
        options.append(f"--env=CUDA_VISIBLE_DEVICES={','.join(map(str, range(len(grant.gpu_uuids))))}")
    return tuple(options)


def _has_amd(written: Assignments, grant: Grant) -> bool:
    """Whether the granted GPUs are of AMD: their variable names them."""
    uuids = grant.gpu_uuids
    return bool(uuids) and written.environment.get("ROCR_VISIBLE_DEVICES") == ",".join(uuids)


def _group_of_amd(runtime: str) -> str:
    """Return what lets the user of the container open the devices of AMD, which belong to a group."""
    if runtime == "podman":
        return "keep-groups"
    with suppress(OSError):
        return str(os.stat(_OF_AMD[0]).st_gid)
    return "render"


def _mounts(written: Assignments) -> list[str]:
    """Return the options that mount the working directory and the metadir where they are."""
    folders = (written.workdir, written.metadir)
    return [f"--mount=type=bind,{_field('source', path)},{_field('destination', path)}" for path in folders]


def _field(key: str, path: str) -> str:
    """Return a part of such an option, which is a line of CSV."""
    text = f"{key}={path}"
    return '"' + text.replace('"', '""') + '"' if set(text) & set(',"\n') else text


def _options(container: Container) -> list[str]:
    """Return the job's own options; name and value of "-v /data:/data" are two arguments."""
    split = (re.fullmatch(r"(-[^\s=]+)\s+(.+)", option) for option in container.options)
    return [
        word
        for option, parts in zip(container.options, split, strict=True)
        for word in (parts.groups() if parts else (option,))
    ]


def _image(container: Container, runtime: str) -> str:
    image = container.image
    if runtime != "apptainer":
        return image.removeprefix(_REGISTRY)
    if image.startswith("~"):
        return os.path.expanduser(image)
    return image if "://" in image or image.startswith(("/", ".")) or image.endswith(".sif") else _REGISTRY + image


def _possible(container: Container) -> tuple[str, ...]:
    """Return the runtimes that can run the image, the first one first."""
    if container.runtime is not None:
        return (container.runtime,)
    image = container.image
    is_file = image.endswith(".sif") or image.startswith(("/", ".", "~"))
    if is_file or ("://" in image and not image.startswith(_REGISTRY)):
        return ("apptainer",)
    return RUNTIMES


def _found(container: Container) -> tuple[str, str] | None:
    """Return the runtime to use and its path."""
    for name in _possible(container):
        for called in _ALSO_CALLED.get(name, (name,)):
            if (path := shutil.which(called)) is not None:
                return name, path
    return None
