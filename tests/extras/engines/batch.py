"""A batch system in forty lines of shell, and its interface for spool: the minimum for another engine.

Its jobs are processes of this machine, in the directory `SPOOL_BATCH`. It has no limits and no queue; a file `away`
there stops its answers, and a file `full` keeps submitted jobs waiting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence

from spool.core.errors import SpoolError
from spool.core.lifecycle import EngineWord
from spool.executors import Launch
from spool.extras.commands import Command, CommandEnd
from spool.extras.engines.language import EngineConfig, Language, Sighting
from spool.formats.config import Config
from spool.formats.wrapper import EngineSurroundings

DIRECTORY = "SPOOL_BATCH"

_BATCH = r"""
cd "$SPOOL_BATCH" && [ ! -e away ] || exit 9
what=$1 && shift
case $what in
who) echo "toy cluster" ;;
submit)
    case $1 in *:refused:*) echo "no such queue" >&2 && exit 1 ;; esac
    n=1
    until mkdir "$n" 2> /dev/null; do n=$((n + 1)); done
    printf '%s\n' "$1" > "$n/new" && mv "$n/new" "$n/mark"
    BATCH_ID=$n BATCH_NODE=toy setsid sh -c '
        echo $$ > "$1/group"
        while [ -e full ]; do sleep 0.05; done
        sh "$2" >> "$3" 2>&1 &
        echo $! > "$1/new" && mv "$1/new" "$1/pid"
        wait $!
        echo $? > "$1/new" && mv "$1/new" "$1/exit"' sh "$n" "$2" "$3" < /dev/null > /dev/null 2>&1 &
    until [ -s "$n/group" ]; do sleep 0.01; done
    echo "$n"
    ;;
look)
    for job in [0-9]*; do
        [ -e "$job/mark" ] || continue
        read -r mark < "$job/mark"
        state=waiting
        [ ! -e "$job/pid" ] || state=running
        [ ! -e "$job/exit" ] || read -r state < "$job/exit"
        [ ! -e "$job/cancelled" ] || state=cancelled
        echo "$job $mark $state"
    done
    ;;
cancel)
    signal=$1 && shift
    for job; do
        if [ "$signal" != KILL ]; then
            kill -s "$signal" "$(cat "$job/pid")"
        else
            touch "$job/cancelled" && kill -s KILL -- "-$(cat "$job/group")"
        fi
    done
    ;;
esac
"""
_WORDS = {"waiting": None, "running": None, "cancelled": EngineWord.CANCELLED, "0": EngineWord.COMPLETED}


def _sighting(job: str, mark: str, state: str) -> Sighting:
    return Sighting(job, mark, state, state == "running", _WORDS.get(state, EngineWord.FAILED))


class BatchLanguage(Language):
    """The commands and answers of the batch system."""

    name = "batch"
    title = "the batch system"
    surroundings = EngineSurroundings("batch", "BATCH_NODE", "BATCH_ID")
    variables = (DIRECTORY,)
    look_ns, submit_ns = 100_000_000, 1_000_000

    def __init__(self, config: Callable[[], Config] = Config) -> None:
        """Use the settings of *config* as they are now."""
        self._config = config

    def policy(self) -> EngineConfig:
        """Return its table in the configuration, or the settings for tests."""
        return self._config().part(self.name) or EngineConfig(max_in_flight=200)

    def missing(self) -> str | None:
        """Return that its directory is unknown."""
        return None if DIRECTORY in os.environ else f"{DIRECTORY} is not set"

    def identify(self) -> Command:
        """Return the command for its name."""
        return self._command("who")

    def cluster(self, done: CommandEnd) -> str | None:
        """Return the first word of its name."""
        return done.out.split()[0] if done.status == 0 else None

    def submit(self, launch: Launch, mark: str) -> Command:
        """Return the command that submits the wrapper."""
        log = f"{launch.metadir}/engine.log"
        return self._command("submit", mark, launch.script, log, environment=launch.inherited())

    def submitted(self, done: CommandEnd) -> str | SpoolError | None:
        """Return the id, or the refusal."""
        if done.status == 1:
            return SpoolError(done.err.strip())
        return done.out.strip() if done.status == 0 else None

    def look(self) -> Sequence[Command]:
        """Return the command that lists all jobs."""
        return (self._command("look"),)

    def seen(self, answers: Sequence[CommandEnd]) -> list[Sighting] | None:
        """Return the listed jobs."""
        (done,) = answers
        return [_sighting(*line.split()) for line in done.out.splitlines()] if done.status == 0 else None

    def cancel(self, ids: Sequence[str], signal: str | None) -> Command:
        """Return the command that cancels jobs, or signals their wrappers."""
        return self._command("cancel", signal or "KILL", *ids)

    def is_silence(self, done: CommandEnd) -> bool:
        """Whether the batch system was away."""
        return done.status in (None, 9)

    def nodes(self, names: Collection[str]) -> Command:
        """Return a command without effect: its node is this machine."""
        return self._command("who")

    def nodes_back(self, done: CommandEnd) -> frozenset[str]:
        """Return that the node is there."""
        return frozenset({"toy"})

    def _command(self, *words: str, environment: dict[str, str] | None = None) -> Command:
        return Command(("/bin/sh", "-c", _BATCH, "batch", *words), environment, urgent=environment is None)


class DeafBatchLanguage(BatchLanguage):
    """A batch system that cannot signal the script of a job: its wrapper reads the signals from a record."""

    surroundings = EngineSurroundings("batch", "BATCH_NODE", "BATCH_ID", watches=True)
    signals = False
