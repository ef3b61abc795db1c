"""The planner against the same rules written a second time, start by start.

These share no code with the planner: for processors only, everything is worked out anew at each event, nothing kept.
What they lack is speed.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.planning import NOW, S, machine, spec
from spool.core.model import Policy
from spool.extras.simulate.simulation import SimulatedJob, SimulatedPolicy, simulate

HOUR = 3600 * S
WEEK = 7 * 24 * HOUR


@dataclass(frozen=True)
class Job:
    """A job of processors. `limit`: what it states; None: nothing."""

    name: str
    user: str
    cpus: int
    at: int
    runs: int
    limit: int | None = None

    @property
    def like(self) -> tuple[str, str, int]:
        """Return what its run time is learnt by."""
        return self.user, re.sub(r"[-_.:+0-9]*[0-9]$", "", self.name), self.cpus

    @property
    def equal(self) -> tuple[object, ...]:
        """Return what it shares with its equals: a name matters only where the run time is learnt by it."""
        return (*self.like, None) if self.limit is None else (self.user, self.cpus, self.limit)

    @property
    def lasts(self) -> int:
        """Return how long it runs until it ends, or is stopped at its limit."""
        return self.runs if self.limit is None else min(self.runs, self.limit)

    def coming(self) -> SimulatedJob:
        """Return the same for the planner's own simulator."""
        return SimulatedJob(self.name, spec(cpus=self.cpus, time_limit_ns=self.limit), self.at, self.runs, self.user)


class Naive:
    """A machine of so many processors, under `fifo`, `easy` or `spool`."""

    def __init__(self, jobs: list[Job], cpus: int, rule: str, *, fair: bool = False) -> None:
        self.jobs = {job.name: job for job in jobs}
        self.cpus, self.rule, self.fair = cpus, rule, fair
        self.start: dict[str, int] = {}
        self.guessed: dict[str, int] = {}  # of each run without a limit, when it began
        self.held: dict[str, float] = {}
        self.now = 0

    def run(self) -> dict[str, int]:
        """Return when each job starts."""
        self.now = min(job.at for job in self.jobs.values())
        while True:
            protected, rate, wake = self.decide()
            times = [job.at for job in self.jobs.values()]
            times += [began + self.jobs[name].lasts for name, began in self.start.items()]
            times += [] if wake is None else [wake]
            later = [at for at in times if at > self.now]
            if not later:
                return self.start
            before, self.now = self.now, min(later)
            if protected is not None:
                self.held[protected] = self.held.get(protected, 0.0) + rate * (self.now - before) / S

    def decide(self) -> tuple[str | None, float, int | None]:
        """Start what may start now; return for whom how much is held back because of a guess, and until when."""
        free = self.cpus - sum(run.cpus for run in self.running())
        protected: tuple[Job, bool] | None = None
        shadow = extra = refused = 0
        tried = False
        for job in self.in_order():
            if job.cpus <= free:
                in_time = protected is None or self.now + self.expected(job) <= shadow
                if not in_time and job.cpus > extra:
                    refused += job.cpus
                    continue
                if not in_time:
                    extra -= job.cpus
                free -= job.cpus
                self.start[job.name] = self.now
                self.guessed[job.name] = self.guess(job)
            elif self.rule == "fifo":
                break
            elif not tried:
                tried = True
                at, room, guessed = self.foretell(job, free)
                if not guessed or free / self.cpus * ((at - self.now) / S) <= self.budget(job):
                    protected, shadow, extra = (job, guessed), at, room - job.cpus
        if protected is None or not protected[1]:
            return None, 0.0, None
        rate = min(free, refused) / self.cpus
        wake = None
        if rate > 0.1:
            wake = self.now + max(1, math.ceil(self.budget(protected[0]) / (rate - 0.1)) + 1) * S
        return protected[0].name, rate, wake

    def budget(self, job: Job) -> float:
        """Return for how many seconds of the whole machine guesses may still hold back room for *job*."""
        return 0.1 * (self.now - job.at) / S - self.held.get(job.name, 0.0)

    def running(self) -> list[Job]:
        """Return what runs."""
        return [self.jobs[name] for name, began in self.start.items() if began + self.jobs[name].lasts > self.now]

    def ended(self) -> list[Job]:
        """Return what has ended, in order."""
        over = [(began + self.jobs[name].lasts, name) for name, began in self.start.items()]
        return [self.jobs[name] for at, name in sorted(over) if at <= self.now]

    def in_order(self) -> list[Job]:
        """Return what waits, the first first."""
        waiting = [job for job in self.jobs.values() if job.at <= self.now and job.name not in self.start]
        if self.rule != "spool":
            return sorted(waiting, key=lambda job: (job.at, job.name))
        factors = self.factors(waiting)
        competing = self.fair and len({job.user for job in waiting}) > 1

        def score(job: Job) -> tuple[float, int, str]:
            size = max(self.expected(job), 60 * S) + (self.served(job) // self.cpus if competing else 0)
            return -((self.now - job.at + size) / size * factors[job.user]), job.at, job.name

        order: list[Job] = []
        place: dict[object, tuple[float, int, str]] = {}
        for job in sorted(waiting, key=lambda job: (job.at, job.name)):  # none goes before its equal that came first
            place[job.name] = place[job.equal] = max(score(job), place.get(job.equal, score(job)))
            order.append(job)
        order.sort(key=lambda job: place[job.name])
        alike: dict[object, list[Job]] = {}
        for job in sorted(waiting, key=lambda job: (job.at, job.name)):
            alike.setdefault(job.equal, []).append(job)
        passed = []
        for jobs in alike.values():  # of its equals the first to arrive goes first, also where one behind it was passed
            for job in jobs:
                if self.is_passed(job, competing=competing):
                    passed.append((job.at, jobs[0].name))
                if passed[-1:] == [(job.at, jobs[0].name)] or 0.15 * (self.now - job.at) <= 8 * HOUR:
                    break
        if passed:
            order.sort(key=lambda job: job.name != min(passed)[1])
        return order

    def is_passed(self, job: Job, *, competing: bool) -> bool:
        """Tell whether later arrivals have finished so much work that *job* goes first."""
        later = sum(each.lasts * each.cpus for each in self.ended() if each.at > job.at)
        enough = max(8 * HOUR, 0.15 * (self.now - job.at)) * self.cpus
        return later > enough + (2 * max(0, self.served(job) - enough) if competing else 0)

    def served(self, job: Job) -> int:
        """Return what the user of *job* was served since it arrived, in time of one processor."""
        served = 0
        for name, began in self.start.items():
            run = self.jobs[name]
            if run.user == job.user:
                served += max(0, min(began + run.lasts, self.now) - max(began, job.at)) * run.cpus
        return served

    def factors(self, waiting: list[Job]) -> dict[str, float]:
        """Return the factor of fair share of each user: the integral of what it used, decayed, over all."""
        users = {job.user for job in waiting}
        used = dict.fromkeys([job.user for job in self.jobs.values()], 0.0)
        for name, began in self.start.items():
            job = self.jobs[name]
            ends = min(began + job.lasts, self.now)
            used[job.user] += job.cpus * (2.0 ** ((ends - self.now) / WEEK) - 2.0 ** ((began - self.now) / WEEK))
        total = sum(used.values())
        if not self.fair or not total:
            return dict.fromkeys(users, 1.0)
        counted = users | {run.user for run in self.running()}
        counted |= {user for user, amount in used.items() if amount > total / 1000}
        return {user: max(2 ** (0.5 * (1 - used[user] / total * len(counted))), 1 / 1.5) for user in users}

    def expected(self, job: Job) -> int:
        """Return how long *job* is expected to run."""
        return self.guess(job) if job.limit is None else job.limit

    def guess(self, job: Job) -> int:
        """Return how long its like has run: the upper median of the last five, else its user's, else of all users."""
        ended = self.ended()
        alike = [each.lasts for each in ended if each.like == job.like]
        users = [each.lasts for each in ended if each.user == job.user]
        last = alike if len(alike) >= 2 else users
        if last:
            return max(S, sorted(last[-5:])[len(last[-5:]) // 2])
        by_user: dict[str, list[int]] = {}
        for each in ended:
            by_user.setdefault(each.user, []).append(each.lasts)
        middle = sorted(sorted(lasts[-5:])[len(lasts[-5:]) // 2] for lasts in by_user.values())
        return max(S, middle[len(middle) // 2]) if middle else HOUR

    def end(self, run: Job) -> int:
        """Return when *run* is expected to end."""
        began = self.start[run.name]
        if run.limit is not None:
            return began + run.limit
        expected, ran = self.guessed[run.name], self.now - began
        if expected > ran:
            return began + expected
        ended = self.ended()
        for like in ([e for e in ended if e.like == run.like], [e for e in ended if e.user == run.user]):
            longer = sorted(each.lasts for each in like[-30:] if each.lasts > ran)
            if len(longer) >= 3:
                return began + longer[len(longer) // 2] + S
        while expected <= ran:
            expected *= 2
        return began + expected

    def foretell(self, job: Job, free: int) -> tuple[int, int, bool]:
        """Return when *job* could start, what is free then, and whether that rests on a guess."""
        ends = sorted((self.end(run), run.cpus, run.limit is None) for run in self.running())
        guessed = False
        for (at, cpus, is_guess), (following, *_) in pairwise([*ends, (math.inf, 0, False)]):
            free += cpus
            guessed = guessed or is_guess
            if free >= job.cpus and following > at:
                return at, free, guessed
        raise AssertionError("it never fits")


JOBS = st.lists(
    st.builds(
        Job,
        name=st.just(""),
        user=st.sampled_from(["alice", "bob"]),
        cpus=st.sampled_from([1, 1, 1, 2, 3, 7, 8]),
        at=st.integers(0, 40).map(lambda n: NOW + n * 600 * S),
        runs=st.sampled_from([1, 59, 60, 600, 900, 3600, 7000, 40_000, 400_000]).map(lambda n: n * S),
        limit=st.sampled_from([None, None, 60 * S, HOUR, 5 * HOUR, 100 * HOUR]),
    ),
    min_size=2,
    max_size=14,
)


def named(jobs: list[Job], stems: str = "abc") -> list[Job]:
    """Return the jobs with names, some of them alike."""
    return [Job(f"{stems[n % len(stems)]}{n:03}", j.user, j.cpus, j.at, j.runs, j.limit) for n, j in enumerate(jobs)]


def planned(jobs: list[Job], cpus: int, rule: str, *, fair: bool = False) -> dict[str, int | None]:
    """Return when the planner starts each."""
    policy = Policy(fair_share=fair)
    found = simulate([job.coming() for job in jobs], machine(cpus), policy, SimulatedPolicy(rule))
    return {each.job.name: each.started_at_ns for each in found}


@pytest.mark.parametrize("rule", ["fifo", "easy", "spool"])
@given(JOBS, st.sampled_from(["abc", "a"]), st.booleans())
def test_every_start_is_that_of_the_rules(rule, drawn, stems, fair):
    """On small traces, limits stated or not, each job starts when the rules written plainly have it start."""
    jobs = named(drawn, stems)
    fair = fair and rule == "spool"
    assert planned(jobs, 8, rule, fair=fair) == Naive(jobs, 8, rule, fair=fair).run()


def test_the_first_that_does_not_fit_is_protected_or_nobody():
    """Where a guess would hold back too much for the first that does not fit, none behind it is tried."""
    jobs = [
        Job("guessed", "alice", 1, NOW, HOUR),
        Job("short", "alice", 1, NOW, 100 * S, 100 * S),
        Job("wide", "alice", 8, NOW + S, S, 60 * S),
        Job("next", "alice", 7, NOW + 2 * S, S, 600 * S),  # it could start when the short one ends, which is no guess
        Job("late", "alice", 1, NOW + 3 * S, HOUR, HOUR),
    ]
    starts = planned(jobs, 8, "spool")
    assert starts["late"] == NOW + 3 * S
    assert starts == Naive(jobs, 8, "spool").run()


def trace(seed: int, part: float, number: int) -> list[Job]:
    """Return jobs of four users that keep 16 CPUs more than busy for days; *part* of them state a limit."""
    dice = random.Random(seed)
    jobs, at = [], NOW
    for n in range(number):
        user = dice.choices("uvwx", [8, 3, 2, 1])[0]
        runs = int(10 ** dice.uniform(1.5, 5) * S) + dice.randrange(S)
        limit = int(runs * dice.choice([0.9, 1, 1.5, 10])) if dice.random() < part else None
        jobs.append(Job(f"{dice.choice('pqr')}{n}", user, dice.choice([1, 1, 1, 2, 4, 8, 16]), at, runs, limit))
        at += int(dice.expovariate(1 / 4000) * S) + dice.randrange(S)
    return jobs


@pytest.mark.parametrize(("part", "fair"), [(1.0, True), (0.5, True), (0.0, False)])
def test_every_start_of_days_under_load_is_that_of_the_rules(part, fair):
    """On long traces with promotions, fair share and guesses that fail the same."""
    jobs = trace(7, part, 220)
    assert planned(jobs, 16, "spool", fair=fair) == Naive(jobs, 16, "spool", fair=fair).run()
