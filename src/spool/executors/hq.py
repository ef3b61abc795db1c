"""HyperQueue, by its own command: its arguments, and the meaning of its answers (`formats/hq.py` reads them)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence

from spool.core.errors import SpoolError
from spool.core.names import ENGINES
from spool.executors.base import Launch
from spool.executors.language import EnginePolicy, Language, Sighting
from spool.executors.policies import policy_of
from spool.formats import hq
from spool.formats.config import Config
from spool.formats.wrapper import EngineSurroundings
from spool.machine.commands import Command, CommandEnd

_WITHIN_S = 60.0
# A job does not find in its environment which host it is on.
_ON_NODE = 'HQ_NODE=$(uname -n) exec /bin/sh "$1"'


class HqLanguage(Language):
    """The commands and answers of HyperQueue."""

    name = "hq"
    title = ENGINES[name]
    surroundings = EngineSurroundings("hq", "HQ_NODE", "HQ_JOB_ID", watches=True)
    signals = False

    def __init__(self, config: Callable[[], Config]) -> None:
        self._config = config

    def policy(self) -> EnginePolicy:
        """Return the policy from `[hq]`."""
        return policy_of(self._config().hq)

    def check_options(self, options: Sequence[str]) -> None:
        """Refuse options of `hq submit` that spool sets itself."""
        hq.allowed(tuple(options))

    def missing(self) -> str | None:
        """Return that its program is missing."""
        return None if shutil.which("hq") is not None else "HyperQueue is not installed here: no hq in PATH"

    def identify(self) -> Command:
        """Return the question for the server."""
        return self._command("server", "info")

    def cluster(self, done: CommandEnd) -> str | None:
        """Return the server's own identity, which another start of it does not have."""
        return hq.cluster_of(done.out) if done.status == 0 else None

    def submit(self, launch: Launch, mark: str) -> Command:
        """Return the submission of the wrapper, with the environment that every job begins with."""
        assert launch.spec is not None
        said = hq.options(launch.job, launch.spec, mark=mark, metadir=launch.metadir, config=self._config().hq)
        passed = (f"--env={key}={value}" for key, value in launch.inherited().items())
        return self._command(
            "submit", *said, *passed, "--", "/bin/sh", "-c", _ON_NODE, "sh", launch.script, urgent=False
        )

    def submitted(self, done: CommandEnd) -> str | SpoolError | None:
        """Return the id, or the refusal in HyperQueue's words."""
        if done.status == 0:
            return hq.submitted_id(done.out)
        if self.is_silence(done):
            return None
        return SpoolError(f"HyperQueue refuses it: {hq.refusal(done.out, done.err)}")

    def look(self) -> Sequence[Command]:
        """Return the question for all jobs, including ended ones."""
        return (self._command("job", "list", "--all"),)

    def seen(self, answers: Sequence[CommandEnd]) -> list[Sighting] | None:
        """Return the listed jobs."""
        (done,) = answers
        lines = hq.job_lines(done.out) if done.status == 0 else None
        return None if lines is None else [_sighting(line) for line in lines]

    def cancel(self, ids: Sequence[str], signal: str | None, *, only_waiting: bool, name: str = "") -> Command:
        """Return the command that cancels jobs. It tells neither their states nor their names apart."""
        assert signal is None, "the wrapper reads signals from a record"
        return self._command("job", "cancel", ",".join(ids))

    def is_silence(self, done: CommandEnd) -> bool:
        """Whether the server has not answered."""
        return hq.is_silence(done.status, f"{done.err}\n{done.out}")

    def nodes(self, names: Collection[str]) -> Command:
        """Return the question for the workers."""
        return self._command("worker", "list")

    def nodes_back(self, done: CommandEnd) -> frozenset[str] | None:
        """Return the hosts of the connected workers."""
        return hq.nodes_back(done.out) if done.status == 0 else None

    def environment(self, variables: Mapping[str, str]) -> Mapping[str, str]:
        """Return an environment in which its command prints what is asked for alone."""
        return {key: value for key, value in variables.items() if key not in ("HQ_OUTPUT_MODE", "HQ_DEBUG", "RUST_LOG")}

    def _command(self, *words: str, urgent: bool = True) -> Command:
        directory = self._config().hq.server_dir
        where = () if directory is None else (f"--server-dir={directory}",)
        program = shutil.which("hq", path=os.environ.get("PATH")) or "hq"
        return Command((program, "--output-mode=json", *where, *words), None, _WITHIN_S, urgent=urgent)


def _sighting(line: hq.JobLine) -> Sighting:
    """Return the meaning of a job. One whose state is unknown is alive."""
    state = line.state
    word = hq.ENDED.get(state)
    return Sighting(str(line.id), line.name, state, state not in hq.WAITING and word is None, word)
