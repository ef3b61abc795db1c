"""The expected run time of a job, by its limit or by recent runs of similar jobs, and what is left of a run's.

The rules go by limits: what they promise holds as long as these do. People are told what is likely (`likely`, `left`).
A learnt run time replaces a limit that is not stated. Similar runs have the same user, name (without the numbers at its
end, such as the index of an array's task) and request; if there are too few of them, the user's runs count; if there
are none, the median over all users counts. However many runs a user has, they displace nothing known of another user.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct

from spool.core.model import SECOND_NS, Request, Running, Spec, State, Waiting
from spool.core.units import show_duration

LEAST_NS = SECOND_NS
"""The least guess."""

UNKNOWN_NS = 3600 * SECOND_NS
"""The expected run time of a job without a limit if no run has ended yet."""

TEACHES = frozenset({State.FINISHED, State.TIMEOUT})
"""Outcomes to learn from: the run time of a failed job says little about a successful one."""

_ALIKE = 2  # similar runs needed for an estimate
_RECENT = 5  # … which is the upper median of this many of the last: a single outlier says little about the next
_LASTS = 30  # runs remembered of each kind, for the run times of those that overrun their guess
_BEYOND = 3  # this many must have lasted longer
_KINDS = 5_000  # remembered; beyond that, the user with the most of them loses the one whose last run is the oldest

_DIGITS = "0123456789"
_IN_NUMBERS = _DIGITS + "-_.:+"


class Source(StrEnum):
    """The basis of an expected run time."""

    LIMIT = "limit"  # the job's own time limit
    ALIKE = "alike"  # the last similar runs
    USER = "user"  # the last runs of its user
    ALL = "all"  # the last runs of half of the users took no longer
    NONE = "none"  # no run has ended yet, or learning is off


class Expected(NamedTuple):
    """An expected run time and its basis. `runs` is the number of runs in the median."""

    ns: int
    source: Source
    runs: int = 0

    @property
    def is_guess(self) -> bool:
        """Whether the run time is not stated by the job."""
        return self.source is not Source.LIMIT

    def words(self, name: str, user: str) -> str:
        """Return the expected run time of job *name* of *user*, and its basis: "about 35m, as …"."""
        time, theirs = show_duration(self.ns), f"{user}'s" if user else "its user's"
        match self.source:
            case Source.LIMIT:
                return f"{time}, its time limit"
            case Source.ALIKE:
                return f"about {time}, the median of the last {self.runs} runs of {stem(name) or name}"
            case Source.USER:
                last = (
                    f"the median of {theirs} last {self.runs} jobs" if self.runs > 1 else f"{theirs} last job took that"
                )
                return f"about {time}, a guess: {last}; no two jobs like this one have finished yet"
            case Source.ALL:
                return f"about {time}, a guess: the median of everybody's last jobs; none of {theirs} has finished yet"
            case _:
                return f"{time}, the default: there are no earlier jobs to learn from"


@lru_cache(maxsize=4096)
def stem(name: str) -> str:
    """Return the common part of the names of similar jobs: the name without the numbers at its end.

    For a task this is the array's name; for a name that is a number it is empty.
    """
    return name.rstrip(_IN_NUMBERS) if name.endswith(tuple(_DIGITS)) else name


class _Kind:
    """The last runs of one kind."""

    __slots__ = ("lasts", "median_ns", "recent")

    def __init__(self) -> None:
        self.lasts: deque[int] = deque(maxlen=_LASTS)
        self.recent = 0  # runs in the median
        self.median_ns = 0

    def add(self, ran_ns: int) -> None:
        self.lasts.append(ran_ns)
        self.recent = min(len(self.lasts), _RECENT)
        self.median_ns = _upper_median(sorted([self.lasts[-at] for at in range(1, self.recent + 1)]))

    def beyond(self, ran_ns: int) -> int | None:
        """Return the median of the runs that lasted longer than *ran_ns*; None if there are too few."""
        longer = sorted(last_ns for last_ns in self.lasts if last_ns > ran_ns)
        return longer[len(longer) // 2] if len(longer) >= _BEYOND else None


def _upper_median(ordered: Sequence[int]) -> int:
    """Return the middle of some run times, of an even number the larger of the middle two; at least `LEAST_NS`."""
    return max(LEAST_NS, ordered[len(ordered) // 2])


class RunTimes:
    """The learnt run times. The owner adds each ended run once, in order."""

    def __init__(self) -> None:
        self._alike: dict[str, dict[tuple[str, Request], _Kind]] = {}  # by user
        self._kinds = 0
        self._users: dict[str, _Kind] = {}
        self._of_all: int | None = None  # the median of the users, until one of them has another

    def add(self, user: str, name: str, request: Request, ran_ns: int) -> None:
        """Add the run time of a run whose outcome is in `TEACHES`."""
        kinds, key = self._alike.setdefault(user, {}), (stem(name), request)
        self._kinds += key not in kinds
        alike = kinds.pop(key, None) or _Kind()
        alike.add(ran_ns)
        kinds[key] = alike  # moved to the end, so that the first kind is the one whose last run is the oldest
        if self._kinds > _KINDS:
            kinds = max(self._alike.values(), key=len)
            del kinds[next(iter(kinds))]
            self._kinds -= 1
        self.recall(user, ran_ns)

    def recall(self, user: str, ran_ns: int) -> None:
        """Add the run time of a run of *user* whose name and request are unknown."""
        self._users.setdefault(user, _Kind()).add(ran_ns)
        self._of_all = None

    def lasts_of(self, user: str) -> tuple[int, ...]:
        """Return the last run times of *user*, for `recall`."""
        return tuple(self._users[user].lasts) if user in self._users else ()

    def guess(self, user: str, stem: str, request: Request) -> Expected:
        """Return the expected run time of a job without a limit."""
        alike = self._alike.get(user, {}).get((stem, request))
        if alike is not None and alike.recent >= _ALIKE:
            return Expected(alike.median_ns, Source.ALIKE, alike.recent)
        of_user = self._users.get(user)
        if of_user is not None:
            return Expected(of_user.median_ns, Source.USER, of_user.recent)
        if self._users:
            if self._of_all is None:
                self._of_all = _upper_median(sorted(kind.median_ns for kind in self._users.values()))
            return Expected(self._of_all, Source.ALL, len(self._users))
        return Expected(UNKNOWN_NS, Source.NONE)

    def expected(self, user: str, name: str, spec: Spec) -> Expected:
        """Return the expected run time by which the rules go, of a job of *user* with that *name*."""
        if spec.time_limit_ns is not None:
            return Expected(spec.time_limit_ns, Source.LIMIT)
        return self.guess(user, stem(name), spec.request)

    def likely(self, job: Waiting | Running) -> Expected:
        """Return the run time that people are told: that of similar runs, if it is within the limit of the job."""
        alike, limit_ns = self.guess(job.user, stem(job.name), job.spec.request), job.spec.time_limit_ns
        if limit_ns is None or (alike.source is Source.ALIKE and alike.ns < limit_ns):
            return alike
        return Expected(limit_ns, Source.LIMIT)

    def left(self, run: Running, progress: Progress, now_ns: int) -> TimeLeft | None:
        """Return the time that people are told remains of *run*; None if it does not go on, or nothing tells."""
        if run.submitted or run.suspended or run.stopping:
            return None
        likely, ran_ns = self.likely(run), max(0, now_ns - run.counts_from_ns)
        guess_ns = None if likely.source in (Source.LIMIT, Source.NONE) else likely.ns
        if guess_ns is not None and guess_ns <= ran_ns:
            guess_ns = self.overrun(run, guess_ns, ran_ns)
        return time_left(progress, now_ns - ran_ns, now_ns, run.spec.time_limit_ns, guess_ns)

    def of_job(self, job: Waiting | Running) -> Expected:
        """Return the expected run time of a job, or of its run, by the present knowledge."""
        return self.expected(job.user, job.name, job.spec)

    def overrun(self, run: Running, expected_ns: int, ran_ns: int) -> int:
        """Return the expected run time of a run that has lasted *ran_ns*, longer than the expected *expected_ns*.

        The median of the similar runs, or of the user's runs, that lasted longer; if there are too few, *expected_ns*
        doubled until it is longer.
        """
        for kind in (
            self._alike.get(run.user, {}).get((stem(run.name), run.spec.request)),
            self._users.get(run.user),
        ):
            longer_ns = None if kind is None else kind.beyond(ran_ns)
            if longer_ns is not None:
                return longer_ns + SECOND_NS
        while expected_ns <= ran_ns:
            expected_ns *= 2
        return expected_ns


_NO_MINUS = r"(?<!(?<![A-Za-z])-)"  # "epoch-3/10" has a hyphen
_PERCENT = re.compile(rf"(?<![\d.,]){_NO_MINUS}(100|\d{{1,2}})(?:[.,](\d{{1,3}})\d*)? ?%(?! ?- ?\d)")
_OF_ALL = re.compile(rf"(?<![\d.,/]){_NO_MINUS}(\d{{1,12}}) ?/ ?(\d{{1,12}})(?![\d.,/])")
_BASES = {
    "progress": ("", "by its progress"),
    "limit": ("≤", "by its time limit"),
    "guess": ("~", "a guess from earlier runs"),
}


class Progress(NamedTuple):
    """What a run says of its progress, and since when."""

    text: str = ""
    at_ns: int = 0


class Basis(StrEnum):
    """What a remaining time rests on."""

    PROGRESS = "progress"  # what the run says of itself
    LIMIT = "limit"  # its time limit: it runs no longer
    GUESS = "guess"  # what similar runs took


class TimeLeft(Struct, frozen=True):
    """The time that remains of a run."""

    ns: int
    basis: Basis

    def words(self) -> str:
        """Return it with the mark of its basis: "4m10s" by progress, "≤1h00m" by a limit, "~5m00s" as a guess."""
        return f"{_BASES[self.basis][0]}{show_duration(self.ns)}"

    def told(self) -> str:
        """Return it with its basis in words."""
        return f"{self.words()}, {_BASES[self.basis][1]}"


class ExpectedStart(Struct, frozen=True):
    """When a waiting job is expected to start. `is_guess`: that rests on learnt run times, or on other users."""

    at_ns: int
    is_guess: bool = False

    def words(self, now_ns: int) -> str:
        """Return it as "in 12m00s", "in ~12m00s" for a guess, or "now"."""
        wait_ns = self.at_ns - now_ns
        return f"in {'~' if self.is_guess else ''}{show_duration(wait_ns)}" if wait_ns > 0 else "now"


def part_done(progress: str) -> float | None:
    """Return the part of its work that a run says it has done: "37 %" and "epoch 12/30" say it, "warming up" does not.

    None if it says nothing, or more than all.
    """
    percent = _PERCENT.search(progress)
    if percent is not None:
        return min(1.0, float(f"{percent[1]}.{percent[2] or 0}") / 100)
    counted = _OF_ALL.search(progress)
    if counted is None or not 0 <= int(counted[1]) <= int(counted[2]) or counted[2].strip("0") == "":
        return None
    return int(counted[1]) / int(counted[2])


def time_left(
    progress: Progress, began_ns: int, now_ns: int, limit_ns: int | None, guess_ns: int | None
) -> TimeLeft | None:
    """Return the time that remains of a run that began at *began_ns*; None if nothing tells.

    By its progress it goes on as it had gone when it said that, so that its end stays; where that has passed, the rest
    is as late. Else it lasts *guess_ns*, as similar runs did, and else up to its limit, which also bounds the others.
    """
    ran_ns, done = now_ns - began_ns, part_done(progress.text)
    until_limit_ns = None if limit_ns is None else limit_ns - ran_ns
    if until_limit_ns is not None and until_limit_ns <= 0:
        return None  # only its epilog goes on
    left = None if guess_ns is None else TimeLeft(max(0, guess_ns - ran_ns), Basis.GUESS)
    if done and ran_ns > 0:
        said_ns = progress.at_ns - began_ns
        left_ns = int((said_ns if 0 < said_ns < ran_ns else ran_ns) / done) - ran_ns
        left = TimeLeft(left_ns if left_ns >= 0 else int(-left_ns * (1 - done) / done), Basis.PROGRESS)
    if until_limit_ns is not None and (left is None or left.ns >= until_limit_ns):
        return TimeLeft(until_limit_ns, Basis.LIMIT)
    return left
