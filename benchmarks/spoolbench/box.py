"""A generated box of eight GPUs with four users: as it is, with a flood, and with a liar."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from random import Random

from spool.core.model import SECOND_NS, Machine, Policy, Request, Spec
from spool.extras.simulate.simulation import Outcome, SimulatedJob, SimulatedPolicy, simulate
from spool.extras.simulate.workload import imagined_gpus

GPUS, CPUS, LOAD = 8, 64, 0.85
DAYS = 60
FLOOD, FLOOD_AT_S, FLOOD_RUN_S, LASTS_S = 10_000, 10 * 86_400, 300, 5 * 86_400
DUMMIES, DUMMY_S = 3, 5  # what the liar runs before each real job, so that its guess is that of the dummies
POLICIES = (SimulatedPolicy.FIFO, SimulatedPolicy.SKIP, SimulatedPolicy.EASY, SimulatedPolicy.MULTIFACTOR)

# For each user: GPUs to choose from, the median of the run time in hours, its spread, and jobs that come at once.
USERS = {
    "interactive": ((1,), 0.3, 0.8, 1),
    "sweeper": ((1,), 0.75, 0.6, 24),
    "trainer": ((1, 2, 4), 6.0, 0.8, 1),
    "wide": ((8,), 1.5, 0.7, 1),
}
LIAR = "trainer"


def jobs_of(seed: int, *, limits: bool) -> list[SimulatedJob]:
    """Return the jobs of the four users: each has a quarter of the work, and together they use LOAD of the GPUs."""
    random = Random(seed)
    found = []
    share = LOAD * GPUS * DAYS * 86_400 / len(USERS)  # GPU-seconds
    for user, (sizes, median_h, spread, together) in USERS.items():
        drawn: list[list[tuple[int, int]]] = []  # jobs that come together: GPUs, seconds
        work = 0.0
        while work < share:
            gpus = random.choice(sizes)
            batch = [(gpus, max(30, int(median_h * 3600 * math.exp(random.gauss(0, spread))))) for _ in range(together)]
            drawn.append(batch)
            work += sum(gpus * runs for gpus, runs in batch)
        for number, batch in enumerate(drawn):
            at = random.uniform(0, DAYS * 86_400)
            if user == "interactive":  # by day
                at = at // 86_400 * 86_400 + random.uniform(9, 18) * 3600
            for index, (gpus, runs) in enumerate(batch):
                limit = math.ceil(runs * random.choice((1.2, 2, 4)) / 900) * 900 if limits else None
                found.append(_job(f"{user}{gpus}-{number}.{index}", user, at, runs, gpus, limit))
    return found


def _job(name: str, user: str, at_s: float, runs_s: int, gpus: int, limit_s: int | None = None) -> SimulatedJob:
    limit_ns = None if limit_s is None else limit_s * SECOND_NS
    spec = Spec(command="true", request=Request(cpus=gpus, gpus=gpus), time_limit_ns=limit_ns)
    return SimulatedJob(name, spec, int(at_s) * SECOND_NS, runs_s * SECOND_NS, user)


def flooded(jobs: Iterable[SimulatedJob], *, limits: bool) -> list[SimulatedJob]:
    """Add a user who submits FLOOD jobs of five minutes at once."""
    limit = FLOOD_RUN_S if limits else None
    flood = (_job(f"flood-{n}", "flood", FLOOD_AT_S, FLOOD_RUN_S, 1, limit) for n in range(FLOOD))
    return [*jobs, *flood]


def lying(jobs: Iterable[SimulatedJob]) -> list[SimulatedJob]:
    """Let one user run dummies of the same name and request an hour before each job, which has no limit then."""
    found = []
    for each in jobs:
        if each.user != LIAR:
            found.append(each)
            continue
        gpus, at_s = each.spec.request.gpus, each.submit_at_ns // SECOND_NS
        found.append(_job(each.name, LIAR, at_s, each.duration_ns // SECOND_NS, gpus))
        found += [_job(f"{each.name}.{n}", LIAR, max(0, at_s - 3600), DUMMY_S, gpus) for n in range(DUMMIES)]
    return found


def markdown(seed: int) -> Iterator[str]:
    """Yield the lines of the table: each policy with the box as it is, with a flood and with a liar.

    The figures are those of all users but the flood or the liar; in a flood, of jobs that came within five days of it.
    """
    yield ("| box | limits | policy | slowdown | mean wait | longest | Jain | worst user | the flood's, liar's |")
    yield "|---|---|---|---|---|---|---|---|---|"
    for limits in (False, True):
        plain = jobs_of(seed, limits=limits)
        for title, jobs, marked in (
            ("as it is", plain, ""),
            ("a flood", flooded(plain, limits=limits), "flood"),
            ("a liar", lying(plain), LIAR),
        ):
            for policy in (*POLICIES, SimulatedPolicy.SPOOL):
                found = Told(list(simulate(jobs, _machine(jobs), Policy(), policy)), marked)
                cells = " | ".join(found.cells())
                yield f"| {title} | {'all' if limits else 'none'} | {policy} | {cells} |"


def _machine(jobs: Sequence[SimulatedJob]) -> Machine:
    return Machine(CPUS, 1 << 60, gpus=imagined_gpus(str(GPUS), tuple(jobs)))


class Told:
    """The figures of one schedule: of the *marked* user, and of all others, in a flood of the days after it."""

    def __init__(self, outcomes: list[Outcome], marked: str) -> None:
        self.waits: dict[str, list[float]] = {}
        self.slowdowns: dict[str, list[float]] = {}
        first, last = 0, DAYS * 86_400
        if marked == "flood":
            first, last = FLOOD_AT_S, FLOOD_AT_S + LASTS_S
        self.marked = marked
        for each in outcomes:
            wait_ns, ran_s = each.waited_ns, each.job.duration_ns / SECOND_NS
            if wait_ns is None or ran_s == DUMMY_S or not first <= each.job.submit_at_ns / SECOND_NS < last:
                continue
            self.waits.setdefault(each.job.user, []).append(wait_ns / SECOND_NS)
            self.slowdowns.setdefault(each.job.user, []).append(max(1, (wait_ns / SECOND_NS + ran_s) / max(ran_s, 10)))

    def cells(self) -> Iterator[str]:
        """Yield the cells of a row after its title."""
        others = [user for user in self.waits if user != self.marked]
        waits = [wait for user in others for wait in self.waits[user]]
        slowdowns = [each for user in others for each in self.slowdowns[user]]
        means = {user: _mean(self.slowdowns[user]) for user in others}
        worst = max(others, key=lambda user: _mean(self.waits[user]))
        yield f"{_mean(slowdowns):.1f}"
        yield f"{_mean(waits) / 3600:.1f} h"
        yield f"{max(waits) / 3600:.0f} h"
        yield f"{jain(list(means.values())):.2f}"
        yield f"{worst}, {_mean(self.waits[worst]) / 3600:.1f} h"
        yield f"{_mean(self.waits[self.marked]) / 3600:.1f} h" if self.marked else ""


def jain(values: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 if all are equal, 1/n if one has everything."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
