"""The wrapper of a run: a constant script, `wrapper.sh`, with one hole for quoted assignments.

A spool has the constant once, and the `run.sh` of a run has the assignments: `render`. The script opens the outputs of
a run, so `outputs_of` reads its assignments to find them.

The steps of the script, in order, and its records (docs/FORMAT.md has their grammar):

* The metadir is opened as descriptor 8; the records are written through it, so that they follow a move of the spool.
* `jid`, created exclusively. A second wrapper leaves with `ALREADY_STARTED` and runs nothing; one that can neither
  create it nor find it leaves with `NO_JID`.
* `status`; then the outputs are opened and the workdir is entered. If that fails, or a program cannot be
  executed, `error` holds one line that says why, and the exit code is 125 (workdir, outputs), 126 or 127.
* The prolog, the command and the epilog, each a child of its own (`SHELL -c TEXT`), so that an `exit` in a
  prolog ends the prolog and not the wrapper, and none sees the other's variables. A prolog that fails gives
  the run its exit code and the command is not run. The epilog runs whenever the prolog or the command was
  tried, finds `SPOOL_EXIT_CODE`, and changes nothing about the run's exit code. Texts of capabilities stand around and
  between these three, in the same way: init, prolog, prep, command, end, epilog. Texts before the command find
  `SPOOL_ENV`, the path of the record `env`: what they append to it is in the environment of all that comes later.
* `ended`, the command's exit code, before the epilog.
* HUP, INT, QUIT, TERM, USR1 and USR2 go on to the child that runs at that moment. After one of the first four,
  or once the record `stop` is there, no prolog or command is started any more. `signal` names the last of
  those four that the wrapper was sent.
* In a terminal INT and QUIT are not passed on, because the terminal's keys send them to the child as well. After a HUP
  with which a terminal of its own has gone the wrapper ends at once, without `rc`; a shared one's keys do not stop it.
* On an engine that cannot signal it, the wrapper reads the record `signals`, a name a line, and signals itself.
* `status`, then `usage`: the resource use of the command and the texts around it, as far as it is known here.
* `rc` as the last thing: the command's exit code, 128+n for signal n. While the disk is
  full the wrapper tries again every second, until it succeeds, is signalled or the metadir is gone.
* If the machine refuses it a process before the command has begun, `refused` instead, and the exit code is
  `REFUSED`. A shell ends when it cannot fork; its trap of EXIT writes the record. If a text after the command is
  refused, the command's exit code stands, and the log names the omitted text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache, lru_cache

from msgspec import Struct, field

from spool.core import layout
from spool.core.errors import InvalidValue, cannot
from spool.core.layout import JOB_LOG, LIMITS, UMASK
from spool.core.model import Grant, Spec
from spool.formats.values import SET_BY_SPOOL, resource_variable, takes_setup

ALREADY_STARTED = 17
"""The wrapper's exit code when `jid` was there before it: it has run nothing."""

NO_JID = 73
"""The wrapper's exit code when it could not create `jid`, read its own text or find out who it is: it ran nothing."""

REFUSED = 75
"""The wrapper's exit code when the machine refused a process before the command had begun; `refused` says which."""

TOLD = "told"
"""The argument by which the wrapper learns that a line `PID START_TICKS` may be on its standard input."""

_HOLE = b"# --- assignments ---\n"
# The compiled wrapper has the same text. A shell that cannot read the constant has run nothing.
_READING = b"""\
#!/bin/sh
# The wrapper of one run: what differs from run to run. It may be run by hand.
command . %s || exit 73
"""
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# Variables to which a shell gives a meaning, which it assigns itself or refuses to assign: env sets those. The tests
# compare the list in wrapper.c with this one.
_SPECIAL = re.compile(
    r"IFS|PWD|OLDPWD|OPTIND|OPTARG|OPTERR|PPID|_|LINENO|PS[0-9]|ENV|FUNCNEST|POSIXLY_CORRECT|"
    r"EUID|UID|SHLVL|GROUPS|BASH.*|SHELLOPTS|FUNCNAME|DIRSTACK|RANDOM|SRANDOM|SECONDS|EPOCH.*|PIPESTATUS|HISTCMD|"
    r"COMP_.*|spool_.*"
)
_MEBIBYTE = 1 << 20
_LONGEST_BYTES = (128 << 10) - 1  # MAX_ARG_STRLEN of Linux, less the NUL byte at its end: execve(2)
_MOST_BYTES = 6 << 20  # of all of them together, however large the stack may be
_POINTER_BYTES = 8  # the kernel counts this for each
_SLACK_BYTES = 4 << 10  # for the environment of every job, and for additions by the wrapper and env
_MOST_LINES, _MOST_CHARACTERS, _LONGEST_LINE = 1000, 64 << 10, (32 << 10) - 1  # of what is added to an environment
_BEFORE = ("init", "prolog", "prep")
# After a setup, in the same shell, with the exit code of that.
_AFTER_SETUP = """\
case $? in 0) ;; *) set -- "$?"; echo "spool: cannot run the command: the setup ended with exit code $1" >&2
@record@exit "$1" ;; esac
"""
_RECORD_OF_SETUP = 'echo "cannot run the command: the setup ended with exit code $1" > "$SPOOL_METADIR/error"; '


_TEXTS = ("init", "prolog", "prep", "end", "epilog")
_ASSIGNMENT = re.compile(r"(export |spool_)([A-Za-z_][A-Za-z0-9_]*)='((?:[^']|'\\'')*)'\n")


class EngineSurroundings(Struct, frozen=True):
    """Variables in the environment of a wrapper on a cluster by which it finds its identity."""

    engine: str
    node_variable: str
    id_variable: str
    masked: tuple[int, ...] = ()  # exit codes that mean more than an end to it, such as to start the job again
    watches: bool = False  # whether the wrapper reads signals from a record, because the engine cannot send them


_HERE = EngineSurroundings("", "", "")


class Surroundings(Struct, frozen=True):
    """Facts about the machine and the executor that the wrapper needs."""

    pid_namespace: str
    host: str
    boot_id: str = ""  # for a wrapper that is told who it is; one that is not finds it out as well
    stdin: str | None = "/dev/null"  # None: inherited from the executor
    inherit_outputs: bool = False  # True: stdout and stderr are the executor's, despite the job file
    env_program: str = "env"
    reset: str | None = None  # the option of env that undoes ignored SIGINT and SIGQUIT
    become: str = ""  # the program of ours to use instead of env while it exists; it needs a boot_id
    terminal: str = ""  # "own": stdin is a terminal of the run's own; "shared": it runs in that of its submitter
    open_files: int | None = None  # the run's limit of open files; None: that of the wrapper
    engine: EngineSurroundings | None = None  # of a run on a cluster


class Assignments(Struct, frozen=True):
    """The parts of the script that differ from run to run. All paths are absolute; nothing is expanded any more."""

    metadir: str
    command: str | tuple[str, ...]  # a text for the shell, or arguments
    surroundings: Surroundings
    environment: Mapping[str, str] = field(default_factory=dict)  # exported, overriding inherited variables
    shell: str = "/bin/sh"
    workdir: str = "/"
    stdout: str | None = None  # None: the log in the metadir
    stderr: str | None = None  # None: same as stdout
    init: str | None = None  # from capabilities: before all else, just before the command, just after it
    prep: str | None = None
    end: str | None = None
    prolog: str | None = None
    epilog: str | None = None
    umask: int = UMASK  # of the command; that of the records never lets other users write them
    limits: tuple[tuple[str, int | None], ...] = ()  # of the command
    nicer: int = 0  # its niceness, less that of the dispatcher
    cgroup: str | None = None  # the cgroup.procs file that the wrapper enters first


def job_environment(
    spec: Spec,
    grant: Grant,
    *,
    spool_dir: str,
    job: str,
    run: int,
    attempt: int,
    metadir: str,
    gpu_names: str = "uuid",
) -> dict[str, str]:
    """Return the variables that a run gets on top of the common ones: docs/FORMAT.md, "Environment".

    The `env` table comes first and cannot override the variables for the run's identity and its GPUs. `SPOOL_GPUS` is
    the number of GPUs, `SPOOL_MEMORY_MB` the memory in whole MiB; it is absent if no memory was requested.
    *gpu_names*: "index" for the indices of GPUs instead of their UUIDs.
    """
    environment = {"OMP_NUM_THREADS": str(grant.cpus)} if grant.cpus else {}
    environment |= dict(spec.env)
    environment |= {
        "SPOOL_DIR": spool_dir,
        "SPOOL_JOB": job,
        "SPOOL_RUN": str(run),
        "SPOOL_ATTEMPT": str(attempt),
        "SPOOL_METADIR": metadir,
        "SPOOL_CPUS": str(grant.cpus),
        "SPOOL_GPUS": str(len(grant.gpu_uuids)),
        "CUDA_VISIBLE_DEVICES": ",".join(grant.gpu_uuids),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    if grant.gpu_indices:
        indices = ",".join(map(str, grant.gpu_indices))
        environment["SPOOL_GPU_INDICES"] = indices
        if gpu_names == "index" and not any(uuid.startswith("MIG-") for uuid in grant.gpu_uuids):
            environment["CUDA_VISIBLE_DEVICES"] = indices
    if grant.memory_bytes is not None:
        environment["SPOOL_MEMORY_MB"] = str(grant.memory_bytes // _MEBIBYTE)
    if grant.cpu_list:
        environment["SPOOL_CPU_LIST"] = grant.cpu_list
    if spec.task is not None:
        environment["SPOOL_ARRAY_INDEX"] = str(spec.task.index)
    return environment | resource_variables(grant)


def with_references(environment: Mapping[str, str], own: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return *environment* with the references in a job's *own* variables replaced.

    A value that is `$` and one of spool's variables, and nothing else, is a reference: `WORKERS =
    "$SPOOL_CPUS"`. If that is absent, so is the variable.
    """
    found = dict(environment)
    for key, value in own:
        if value.startswith("$SPOOL_") and _IDENTIFIER.fullmatch(value, 1) and found.get(key) == value:
            if value[1:] in environment:
                found[key] = environment[value[1:]]
            else:
                del found[key]
    return found


def added_variables(text: bytes) -> tuple[tuple[str, str], ...]:
    """Return the variables in what a hook has appended to `$SPOOL_ENV`: lines `KEY=VALUE`, as `wrapper.sh` reads them.

    Raises InvalidValue, whose text follows the name of the file.
    """
    try:
        lines = text.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise InvalidValue("is not UTF-8") from None
    if len(text) > _MOST_CHARACTERS or len(lines) > _MOST_LINES or max(map(len, lines)) > _LONGEST_LINE:
        raise InvalidValue("has more than 1000 lines, more than 64 KiB, or a line of more than 32 KiB")
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        key, equals, value = line.partition("=")
        if not line or line.startswith("#"):
            continue
        if not equals or _IDENTIFIER.fullmatch(key) is None or "\0" in value:
            raise InvalidValue(f"has a line {number} that is not KEY=VALUE")
        if key.startswith("SPOOL_") or key in SET_BY_SPOOL:
            raise InvalidValue(f"has {key} in line {number}, which spool sets itself")
        if _SPECIAL.fullmatch(key) is not None:
            raise InvalidValue(f"has {key} in line {number}, which the shell keeps for itself")
        found[key] = value
    return tuple(found.items())


def with_setup(
    setup: str | None, command: str | tuple[str, ...], shell: str, *, is_whole_run: bool = True
) -> str | tuple[str, ...]:
    """Return *command*, preceded by *setup* in the same shell; if that fails, the command is not run.

    A shell of another kind than Bourne's is not asked whether the setup failed. *is_whole_run*: whether its failure is
    that of the run, whose record `error` then says so.
    """
    if not setup:
        return command
    after = _AFTER_SETUP.replace("@record@", _RECORD_OF_SETUP if is_whole_run else "")
    end = "\n\n" if setup.endswith("\\") else "\n"  # it would join its last line to what follows
    before = f"{setup}{end}{after}" if takes_setup(shell) else f"{setup}{end}"
    if isinstance(command, str):
        return before + command
    # Not as parameters of the shell if possible: a file that the setup reads with `.` would take them for its own.
    words = " ".join("'" + word.replace("'", "'\\''") + "'" for word in command)
    if 4 * len(before + words) < _LONGEST_BYTES:
        return (shell, "-c", _not_an_option(f"{before}exec {words}"))
    return (shell, "-c", _not_an_option(f'{before}exec "$@"'), shell, *command)


def resource_variables(grant: Grant) -> dict[str, str]:
    """Return the variables of the named resources of *grant*: the indices, or the count of those without."""
    indices = dict(grant.resource_indices)
    return {resource_variable(name): ",".join(map(str, indices.get(name, (count,)))) for name, count in grant.resources}


def render(assignments: Assignments, constant: str | None = None) -> bytes:
    """Return the text of `run.sh`, which reads the constant from the file *constant*; None: which contains it.

    Raises InvalidValue for anything that cannot be passed to a process: an empty command, a NUL byte, more than 128 KiB
    in one argument or variable, or more of them than the kernel takes.
    """
    script = load()
    before = script.constant if constant is None else _READING % os.fsencode(_quote(constant))
    return before + _HOLE + _hole(assignments).encode("utf-8", "surrogateescape") + script.end


class WrapperText(Struct, frozen=True):
    """The constant, which is what stands before its hole, the name of its file in a spool, and the end of `run.sh`."""

    constant: bytes
    name: str
    end: bytes


@cache
def load() -> WrapperText:
    """Read the constant, once: later, a shortage of descriptors or memory cannot prevent a start."""
    from hashlib import sha256  # imported here, because most commands start nothing
    from importlib import resources

    text = resources.files(__package__).joinpath("wrapper.sh").read_bytes()
    constant, _, end = text.partition(_HOLE)
    return WrapperText(constant, f"{sha256(constant).hexdigest()[:16]}.sh", end)


def _hole(a: Assignments) -> str:
    around = a.surroundings
    words = words_of(a.command, a.shell)
    if not words or not words[0] or a.command == "":
        raise InvalidValue(cannot("run", "the command", "it is empty"))
    _check_size(a, words)
    log = f"{a.metadir}/{JOB_LOG}"
    values = {
        "metadir": a.metadir,
        "boot": around.boot_id,
        "pid_namespace": around.pid_namespace,
        "host": around.host,
        "workdir": a.workdir,
        "stdin": around.stdin or "",
        "stdout": "" if around.inherit_outputs else a.stdout or log,
        "stderr": "" if around.inherit_outputs or a.stderr == (a.stdout or log) else a.stderr or "",
        "shell": a.shell,
        "prolog": _not_an_option(a.prolog or ""),
        "epilog": _not_an_option(a.epilog or ""),
        "cgroup": a.cgroup or "",
        "env": around.env_program,
        "reset": around.reset or "",
        "become": around.become,
        "terminal": around.terminal,
        "files": "" if around.open_files is None else str(around.open_files),
    }
    on = around.engine if around.engine is not None else _HERE
    seldom = {
        **{name: _not_an_option(text or "") for name, text in (("init", a.init), ("prep", a.prep), ("end", a.end))},
        "engine": on.engine,
        "node_in": on.node_variable,
        "id_in": on.id_variable,
        "masked": " ".join(map(str, on.masked)),
        "watch": "yes" if on.watches else "",
        "umask": "" if a.umask == UMASK else f"{a.umask:04o}",
        "limits": " ".join(_limit(name, value) for name, value in a.limits),
        "nicer": str(a.nicer or ""),
    }
    values |= {name: text for name, text in seldom.items() if text}
    exported = {key: value for key, value in a.environment.items() if _exportable(key)}
    odd = {key: value for key, value in a.environment.items() if key not in exported}
    lines = [f"spool_{name}={value}" for name, value in zip(values, _quoted(values.values()), strict=True)]
    if odd:
        lines.append("spool_odd=yes")
    lines.append("spool_environment() {")
    lines += [f"export {key}={value}" for key, value in zip(exported, _quoted(exported.values()), strict=True)]
    lines.append(" ".join(["spool_exec", *(_quote(f"{key}={value}") for key, value in odd.items()), '"$@"']))
    lines.append("}")
    lines.append(" ".join(["set --", *map(_quote, words)]))
    return "\n".join(lines) + "\n"


def _limit(name: str, value: int | None) -> str:
    """Return a soft limit as `LETTER=NUMBER`, as `ulimit` takes them."""
    limit = LIMITS[name]
    return f"{limit.letter}={'unlimited' if value is None else -(-value // limit.unit)}"


def words_of(command: str | tuple[str, ...], shell: str) -> tuple[str, ...]:
    """Return the arguments that carry out a job's *command*: those of *shell* for a text."""
    return (shell, "-c", _not_an_option(command)) if isinstance(command, str) else command


def _check_size(a: Assignments, words: tuple[str, ...]) -> None:
    """Raise InvalidValue if arguments and environment are too large for any program of the run to be executed."""
    texts = (("command", words), *((name, (a.shell, "-c", getattr(a, name) or "")) for name in _TEXTS))
    own_words = [f"{key}={value}" for key, value in a.environment.items()]
    everything = [*own_words, *(word for _, words in texts for word in words)]
    if 4 * len("".join(everything)) + len(everything) * (1 + _POINTER_BYTES) <= _SLACK_BYTES:
        return  # even at the most bytes per character, and with all of the texts together
    name, longest = max(((name, _bytes_of(words)) for name, words in texts), key=lambda pair: pair[1])
    own = _bytes_of(own_words)
    if longest + own <= _SLACK_BYTES:
        return
    most = min(os.sysconf("SC_ARG_MAX"), _MOST_BYTES)
    if any(getattr(a, name) for name in _BEFORE):
        most -= 4 * _MOST_CHARACTERS  # they may add that much
    if longest + own + _SLACK_BYTES > most:
        why = f"its arguments and environment take {longest + own} bytes, and the kernel takes {most} at most"
        raise InvalidValue(cannot("run", f"the {name}", why, remedy="put them into a file"))


def _bytes_of(words: Iterable[str]) -> int:
    """Return the size of *words* as the kernel counts it."""
    return sum(len(word.encode("utf-8", "surrogateescape")) + 1 + _POINTER_BYTES for word in words)


@lru_cache(maxsize=1024)
def _exportable(key: str) -> bool:
    """Whether every shell exports a variable of that name unchanged."""
    return _IDENTIFIER.fullmatch(key) is not None and _SPECIAL.fullmatch(key) is None


def _not_an_option(text: str) -> str:
    """Return *text* so that a shell's `-c` cannot take it for another option; a leading line break is harmless."""
    return "\n" + text if text.startswith(("-", "+")) else text


def _quoted(values: Collection[str]) -> list[str]:
    """Return each of *values* as one word of the shell."""
    whole = "".join(values)
    if len(whole) <= _LONGEST_BYTES // 4 and "'" not in whole and "\0" not in whole:
        return [f"'{value}'" for value in values]  # the common case
    return [_quote(value) for value in values]


def _quote(value: str) -> str:
    """Return *value* as one word of the shell, in single quotes."""
    if "\0" in value:
        raise InvalidValue(cannot("run", "the command", "no process can be given a NUL byte"))
    if len(value) > _LONGEST_BYTES // 4 and len(value.encode("utf-8", "surrogateescape")) > _LONGEST_BYTES:
        remedy = "put it into a file"
        why = f"no process can be given more than {_LONGEST_BYTES} bytes in one argument or variable"
        raise InvalidValue(cannot("run", "the command", why, remedy=remedy))
    return "'" + value.replace("'", "'\\''") + "'"


class Outputs(Struct, frozen=True):
    """The output files as absolute paths. None as stdout: the executor's own; None as stderr: same as stdout."""

    stdout: str | None
    stderr: str | None


def variables_of(script: bytes) -> dict[str, str]:
    """Return the variables that the wrapper *script* exports by name; those of other names are left out."""
    _, _, rest = script.partition(_HOLE)
    return _assigned(rest.partition(b"spool_environment() {\n")[2])


def _assigned(lines: bytes) -> dict[str, str]:
    """Return the variables that the first *lines* of a script assign."""
    text, found, at = lines.decode("utf-8", "surrogateescape"), dict[str, str](), 0
    while match := _ASSIGNMENT.match(text, at):
        found[match[2]] = match[3].replace("'\\''", "'")
        at = match.end()
    return found


def outputs_of(script: bytes, metadir: str) -> Outputs | None:
    """Return the outputs of the wrapper *script*, which lies in *metadir*; None if it is not one of our wrappers.

    A log in the metadir is the one beside the script, because the spool may have been moved since.
    """
    values = _assigned(script.partition(_HOLE)[2])
    if "stdout" not in values:
        return None
    stdout, stderr = values["stdout"] or None, values.get("stderr") or None
    before = values.get("metadir")
    if stdout == f"{before}/{layout.JOB_LOG}":
        stdout = f"{metadir}/{layout.JOB_LOG}"
    if stderr == f"{before}/{layout.JOB_STDERR}":
        stderr = f"{metadir}/{layout.JOB_STDERR}"
    return Outputs(stdout, stderr)


def both(first: str | None, second: str | None) -> str | None:
    """Return two shell texts as one, the first one first; None if there is neither."""
    return "\n".join(text for text in (first, second) if text) or None
