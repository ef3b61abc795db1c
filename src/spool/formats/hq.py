"""The interface to HyperQueue: the options of `hq submit`, and the JSON that its commands print. Values and text only.

The parsers are total: what cannot be read is skipped, and an unknown state counts as alive.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from spool.core.errors import InvalidValue, SpoolError, cannot
from spool.core.lifecycle import EngineWord
from spool.core.model import SECOND_NS, Spec
from spool.formats import engines
from spool.formats.engines import HqConfig, check_gpu_kind, option_name
from spool.formats.freetext import one_line

_MEBIBYTE = 1 << 20
_MARGIN_S = 60  # HyperQueue ends a job this much later than spool
_OURS = frozenset(
    (
        *("name", "max-fails", "cpus", "resource", "nodes", "time-limit", "cwd", "stdout", "stderr", "env", "stream"),
        *("each-line", "from-json", "array", "task-dir", "crash-limit", "job", "wait", "progress", "on-notify"),
        *("stdin", "directives", "server-dir", "output-mode", "colors", "debug", "help", "version"),
    )
)


def allowed(options: tuple[str, ...]) -> tuple[str, ...]:
    """Return further options of `hq submit` unchanged. Raises InvalidValue if one sets what spool sets itself."""
    for option in options:
        name = option_name(option)
        if not name.startswith("--"):
            raise InvalidValue(f'{option!a} is no option of hq submit; write it out, as in "--priority=3"')
        resource = option[len(name) + 1 :].partition("=")[0]
        if name == "--resource" and resource not in ("", "cpus"):
            continue
        if name[2:] in _OURS:
            raise InvalidValue(f"{option!a} sets what spool sets itself for HyperQueue")
    return options


def options(name: str, spec: Spec, *, mark: str, metadir: str, config: HqConfig) -> Iterator[str]:
    """Yield the options of `hq submit` for the job *name*, whose records go to *metadir*.

    Raises SpoolError for a request that HyperQueue cannot be told.
    """
    yield from (f"--name={mark}", "--max-fails=0", "--crash-limit=1", "--directives=off", f"--cwd={metadir}")
    yield from ("--stdout=%{CWD}/engine.log", "--stderr=none", f"--cpus={max(1, spec.request.cpus)}")
    request = spec.request
    if request.memory_bytes is not None and config.memory is not None:
        yield f"--resource={config.memory}={max(1, -(-request.memory_bytes // _MEBIBYTE))}"
    if request.gpus:
        yield f"--resource={_gpus(name, spec, config)}={request.gpus}"
    if spec.time_limit_ns is not None:
        yield f"--time-limit={-(-spec.time_limit_ns // SECOND_NS) + _MARGIN_S}s"
    yield from config.options
    yield from spec.executor_options


def _gpus(name: str, spec: Spec, config: HqConfig) -> str:
    request, what = spec.request, f"job {name} to HyperQueue"
    if request.gpu_memory_bytes is not None:
        why = "it shares a GPU (gpu_memory), which HyperQueue is not asked for"
        raise SpoolError(cannot("hand", what, why, remedy="ask for whole GPUs"))
    check_gpu_kind(name, spec, "hq")
    if not request.gpu_types:
        return config.gpus
    (gpu_type,) = request.gpu_types
    known = config.gpu_types.get(gpu_type)
    if known is None:
        remedy = f'write gpu_types = {{ "{gpu_type}" = "RESOURCE" }} in [hq]'
        raise SpoolError(cannot("hand", what, f"which resource is a {gpu_type} is unknown", remedy=remedy))
    return known


class JobLine(Struct, frozen=True):
    """One job as `hq job list` shows it: the number of its tasks, one at most, in each state."""

    id: int
    name: str
    task_stats: dict[str, int] = {}

    @property
    def state(self) -> str:
        """The state of its task."""
        return next((state for state, count in self.task_stats.items() if count), "unknown")


ENDED = {
    "finished": EngineWord.COMPLETED,
    "failed": EngineWord.FAILED,
    "canceled": EngineWord.CANCELLED,
    "aborted": EngineWord.CANCELLED,
}
WAITING = frozenset({"waiting"})


def job_lines(text: str) -> list[JobLine] | None:
    """Return the jobs in an answer of `hq job list`; None if it is no answer, or is cut off."""
    listed = _json(text)
    if not isinstance(listed, list):
        return None
    found = []
    for each in listed:
        try:
            found.append(msgspec.convert(each, JobLine))
        except msgspec.ValidationError:
            continue
    return found


def submitted_id(text: str) -> str | None:
    """Return the id in the answer to a submission."""
    answer = _json(text)
    known = answer.get("id") if isinstance(answer, dict) else None
    return str(known) if isinstance(known, int) and not isinstance(known, bool) else None


def cluster_of(text: str) -> str | None:
    """Return the identity of the server in an answer of `hq server info`."""
    answer = _json(text)
    known = answer.get("server_uid") if isinstance(answer, dict) else None
    return known if isinstance(known, str) and re.fullmatch(r"[\w.-]+", known, re.ASCII) else None


def nodes_back(text: str) -> frozenset[str] | None:
    """Return the hosts of the workers that are connected; None: no answer."""
    listed = _json(text)
    if not isinstance(listed, list):
        return None
    alive = (each for each in listed if isinstance(each, dict) and each.get("ended") is None)
    names = (each["configuration"].get("hostname") for each in alive if isinstance(each.get("configuration"), dict))
    return frozenset(name for name in names if isinstance(name, str))


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        return None


_UNREACHABLE = re.compile(
    r"no running instance|unreachable|could not connect|connection|timeout|timed out|broken pipe|"
    r"end of (?:file|stream)|access (?:token|file)|deserializ|authenticat|version",
    re.IGNORECASE,
)
_WRONG_USE = 2


def is_silence(status: int | None, said: str) -> bool:
    """Whether a command failed because it got no answer, and not because of its request."""
    return status != _WRONG_USE and engines.is_silence(status, said, _UNREACHABLE)


def refusal(out: str, err: str) -> str:
    """Return why `hq submit` has failed, in HyperQueue's words."""
    answer = _json(out)
    said = str(answer.get("error", "")) if isinstance(answer, dict) else ""
    lines = [re.sub(r"^error: *", "", line.strip()) for line in (said or err).splitlines()]
    return one_line("; ".join(filter(None, lines))) or "hq failed and did not say why"
