"""The GPUs of the machine as NVML shows them, watched over time.

Nothing that NVML does stops the asker: a process of its own asks (`nvml_helper`), a look waits a moment for the
answer and then goes on with what is known. What is known is never taken for more than it is:

* no NVML on the machine: there are no GPUs;
* NVML fails or hangs: the GPUs that were seen stay, each with its `problem`, and the look has one too;
* a GPU that falls off stays, with its `problem`, its index and its UUID, until it is back;
* a GPU in MIG mode is not there; its instances are, and one that is taken apart is forgotten.

`python -m spool.machine.gpus` prints what one look sees, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from spool.core.model import SECOND_NS, Gpu
from spool.machine.gpu_roster import Roster
from spool.machine.gpu_use import Ignore, Ours, UseReader, in_pid_namespace
from spool.machine.nvml import IDLE_SECONDS, Sample
from spool.machine.nvml_helper import NvmlHelper

MAX_AGE_NS = 5 * SECOND_NS
"""How old an answer may be before a look asks again."""

PATIENCE_NS = SECOND_NS // 4
"""How long looks wait, all together, for one answer, and a start for its own. A driver that is well needs some ms."""

LIMIT_NS = 10 * SECOND_NS
"""After so long without an answer NVML is said to hang. Starting up eight idle GPUs may take some seconds."""

NO_ANSWER = "NVML has not answered yet"


@dataclass(frozen=True, slots=True)
class GpuLook:
    """The GPUs at one moment, in PCI bus order.

    A GPU whose own `problem` is None can be given; `problem` here says why nothing at all is known of them now.
    """

    gpus: tuple[Gpu, ...] = ()
    problem: str | None = None
    notes: tuple[str, ...] = ()  # for people: GPUs that never told who they are
    seen_at_ns: int | None = None  # when NVML was asked for this; None: it has not answered yet
    driver: str | None = None


class GpuWatcher:
    """Looks at the GPUs when asked to, and never otherwise.

    A dispatcher may poll `fileno()`; when it is readable, an answer is there and the next look will take it in.
    """

    def __init__(
        self,
        *,
        ignore: Ignore | None = None,
        uses: UseReader | None = None,
        environment: Mapping[str, str] | None = None,
        limit_ns: int = LIMIT_NS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """Ask nothing yet. *environment* is that of the process that asks NVML; None is this process's own."""
        self._helper = NvmlHelper(environment, idle_seconds)
        self._uses = uses or UseReader(pids_mean_something=not in_pid_namespace())
        if ignore is not None:
            self._uses.ignore = ignore
        self._limit_ns = limit_ns
        self._roster = Roster()
        self._look = GpuLook(problem=NO_ANSWER)
        self._asked_at_ns: int | None = None  # the last question, answered or not
        self._asked_for = self._answered_for = Ours()
        self.asked = 0  # so many questions
        self.answered = 0  # the number of the last question that was answered, or failed
        self._waited_ns = 0  # for the open question

    @property
    def ignore(self) -> Ignore:
        """Which processes of others do not count; a change holds from the next answer on."""
        return self._uses.ignore

    @ignore.setter
    def ignore(self, ignore: Ignore) -> None:
        self._uses.ignore = ignore

    @property
    def helper_pid(self) -> int | None:
        """The pid of the process that asks NVML, or None while there is none: it is no run's."""
        return self._helper.pid

    def fileno(self) -> int:
        """Return a descriptor to poll, the same for life. When it is readable, call `look`."""
        return self._helper.fileno()

    def look(
        self,
        now_ns: int,
        ours: Ours | None = None,
        *,
        max_age_ns: int = MAX_AGE_NS,
        patience_ns: int = PATIENCE_NS,
    ) -> GpuLook:
        """Return the GPUs, asking NVML if the last answer is older than *max_age_ns* or a shared GPU was left since.

        Waits for an answer no longer than *patience_ns*, looks at the same question taken together; without one it
        returns what was known before, and once the limit is over, that NVML hangs.
        """
        ours = ours or Ours()
        if self._helper.asking:
            self._receive(now_ns, ours, 0)
        if not self._helper.asking and self._outdated(now_ns, ours, max_age_ns):
            self._ask(now_ns, ours)
        if self._helper.asking:
            self._receive(now_ns, ours, max(0, patience_ns - self._waited_ns))
        return self._look

    def was_ours(self, uuid: str) -> bool:
        """Return whether a run of ours had that GPU when the last answer was asked for, which then cannot clear it."""
        return uuid in self._answered_for.on

    def doubt(self) -> GpuLook:
        """Take what is known for unknown, until the open question is answered."""
        self._say(NO_ANSWER)
        return self._look

    def close(self) -> None:
        """End the process that asks. The watcher cannot be used any more."""
        self._helper.close()

    def _outdated(self, now_ns: int, ours: Ours, max_age_ns: int) -> bool:
        # A clock that was set back makes an answer old, not young for ever.
        if self._asked_at_ns is None or not 0 <= now_ns - self._asked_at_ns < max_age_ns:
            return True
        return any(
            granted is not None and job not in ours.on.get(uuid, {})  # one that had it alone leaves nothing to measure
            for uuid, jobs in self._asked_for.on.items()
            for job, granted in jobs.items()
        )

    def _ask(self, now_ns: int, ours: Ours) -> None:
        self._asked_at_ns, self._asked_for, self._waited_ns = now_ns, ours, 0
        self.asked += 1
        trouble = self._helper.ask()
        if trouble is not None:
            self._fail(trouble)

    def _receive(self, now_ns: int, ours: Ours, wait_ns: int) -> None:
        began_ns = time.monotonic_ns()
        sample = self._helper.receive(wait_ns)
        self._waited_ns += time.monotonic_ns() - began_ns
        if sample is not None:
            self._take_in(sample, ours)
        elif max(now_ns - (self._asked_at_ns or now_ns), self._waited_ns) >= self._limit_ns:
            self._helper.stop()
            self._fail(f"NVML hangs: no answer within {self._limit_ns / SECOND_NS:g} s")

    def _take_in(self, sample: Sample, ours: Ours) -> None:
        self.answered, self._answered_for = self.asked, self._asked_for
        if sample.failure is not None:
            self._fail(f"NVML: {sample.failure}")
        elif not sample.missing:
            notes = self._roster.update(sample, lambda device: self._uses.read(device, ours, self._asked_for))
            self._look = GpuLook(self._roster.gpus(), None, notes, self._asked_at_ns, sample.driver)
            if self._roster.absent():
                self._helper.stop()  # a GPU that comes back is listed only by an NVML that starts after that
        elif self._roster.gpus():
            self._fail("NVML: its library is gone")
        else:
            self._look = GpuLook(seen_at_ns=self._asked_at_ns)

    def _fail(self, problem: str) -> None:
        self.answered = self.asked
        self._say(problem)

    def _say(self, problem: str) -> None:
        self._roster.blind(problem)
        self._look = GpuLook(self._roster.gpus(), problem, seen_at_ns=self._asked_at_ns)


def main() -> int:
    """Print what is seen as JSON: once with the start of NVML, and once more with NVML awake."""
    watcher = GpuWatcher()
    took_ms = []
    try:
        for _ in range(2):
            began_ns = time.monotonic_ns()
            look = watcher.look(time.time_ns(), max_age_ns=0, patience_ns=LIMIT_NS)
            took_ms.append((time.monotonic_ns() - began_ns) / 1e6)
    finally:
        watcher.close()
    print(json.dumps({**asdict(look), "in_pid_namespace": in_pid_namespace(), "took_ms": took_ms}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
