"""Jobs that leave their memory to spool, or ask for more after a run that had too little."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from served import Served, remember
from spool.store.ownership import this_user

EXECUTORS = ("process", "sh", "tmux")
MIB = 1 << 20
FACTOR = {"max": 1, "memory_factor": 3}
TAKES = f"exec {sys.executable} -c 'import time; x = bytearray(150 << 20); x[::4096] = x[::4096]; time.sleep(600)'"
FIRST = f"[ $SPOOL_ATTEMPT != 1 ] || {TAKES}"
"""Takes 150 MiB, but not when it is tried again."""


def granted(spool: Served, name: str, run: int) -> int:
    """Return the memory that an ended run was granted, in MiB."""
    size: int = (spool.result(name, run) or {})["grant"]["memory_bytes"]
    return size // MIB


def test_a_guess_that_was_too_small_is_followed_by_a_larger_run(served: Served) -> None:
    """Without any `retry`, and under each executor; the history says what was guessed and what was granted."""
    served.start()
    served.drop("eager", FIRST, memory="auto:50M")
    assert served.wait_outcome("eager", 1) == "out_of_memory"
    served.wait_done("eager")
    assert (served.outcome("eager", 2), granted(served, "eager", 1)) == ("finished", 50)
    assert granted(served, "eager", 2) >= 256
    first, second = served.history()
    assert (first["memory_bytes"], first["memory_auto"], first["again"]) == (50 * MIB, True, "retry")
    assert second["granted_memory_bytes"] == granted(served, "eager", 2) * MIB


@pytest.mark.parametrize("keys", [{"memory": "auto:50M"}, {"memory": "50M", "retry": {"max": 1, "memory_factor": 4}}])
def test_what_a_killed_run_had_survives_its_dispatcher(served: Served, keys: dict[str, Any]) -> None:
    """The larger request follows from the record of that run, which another dispatcher reads."""
    served.start()
    served.drop("eager", FIRST, **keys)
    served.pid("eager")
    (served.root / "paused").touch()
    assert served.wait_outcome("eager", 1) == "out_of_memory"
    served.kill()
    said = served.spool("why", "eager").stdout
    assert "with which run 1 ran out of memory" in said
    served.start()
    (served.root / "paused").unlink()
    served.wait_done("eager")
    assert (served.outcome("eager", 2), granted(served, "eager", 2) >= 200) == ("finished", True)


def test_later_runs_of_the_name_keep_what_was_raised_until_the_file_says_another_number(served: Served) -> None:
    """`retry.memory_factor`: a requeue has the larger memory at once; an edited number counts at once."""
    served.start()
    path = served.drop("eager", FIRST.replace("!= 1", "!= 1 ] || [ $SPOOL_RUN != 1"), memory="50M", retry=FACTOR)
    served.wait_done("eager")
    assert [granted(served, "eager", run) for run in (1, 2)] == [50, 150]
    served.move("eager", "done", "queued")
    served.wait_outcome("eager", 3)
    text = (served.root / "done" / path.name).read_text()
    path.write_text(text.replace("50M", "70M"))
    served.wait_outcome("eager", 4)
    assert [granted(served, "eager", run) for run in (3, 4)] == [150, 70]


def test_tasks_of_an_array_learn_from_each_other_and_from_earlier_arrays(served: Served) -> None:
    """A size is that of the name without its number; CPUs, which differ here, make another kind of run."""
    remember(served, "sweep_7", 300)
    served.start()
    served.drop("sweep", "true", array="0-2%1", memory="auto")
    served.drop("sweep-wide", "true", array="0-0", cpus=2, memory="auto:100M")
    served.wait_done("sweep", "sweep-wide")
    assert [granted(served, f"sweep_{index}", 1) for index in range(3)] == [384] * 3
    assert granted(served, "sweep-wide_0", 1) == 100


def test_no_more_is_requested_than_there_is_and_a_number_in_the_file_counts_at_once(served: Served) -> None:
    """All that the spool may give, or its user; after a run with all of it only `retry` tries again."""
    (served.root / "config.toml").write_text('memory = "120M"\n')
    served.start()
    served.drop("large", TAKES, memory="auto")
    assert served.wait_done("large")
    assert (served.runs("large"), served.outcome("large"), granted(served, "large", 1)) == ([1], "out_of_memory", 120)
    (served.root / "config.toml").write_text(
        f'memory = "1G"\n[quotas.users.{this_user()}]\nmax_running_memory = "90M"\n'
    )
    (served.root / "paused").touch()
    path = served.drop("small", "true", memory="auto")
    served.until(lambda: "90 MiB, all that it can have" in served.spool("why", "small").stdout, "its size")
    served.drop("number", "true", memory="auto", place="held")
    path.write_text(path.read_text().replace("auto", "80M"))
    (served.root / "paused").unlink()
    served.wait_done("small")
    assert granted(served, "small", 1) == 80


def test_commands_say_what_would_be_requested_and_why(served: Served) -> None:
    """`submit`, `why` and `show` before the run, `ls` with the plan, `seff` after it."""
    remember(served, "train", 300, runs=3)
    (served.root / "paused").touch()
    served.start()
    words = "memory 384 MiB, 20% above the 300 MiB that the last 3 runs like it used at most"
    told = served.spool("submit", "--name", "train", "-m", "auto", "--retry-max", "1", "--", "true")
    assert f"job train requests {words}\n" in told.stderr
    nameless = served.spool("submit", "--dry-run", "-m", "auto", "--", "true")
    assert "no run like it has ended yet; with --name, it learns from earlier runs of that name" in nameless.stderr
    assert f"requests: {words}" in served.spool("why", "train").stdout
    assert words in " ".join(served.spool("show", "train").stdout.split())
    served.wait_reason("train", "paused")
    (row,) = json.loads(served.spool("ls", "--json").stdout)["jobs"]
    assert row["memory_bytes"] == 384 * MIB
    (served.root / "paused").unlink()
    served.wait_done("train")
    assert "memory 384 MiB" in served.spool("seff", "train").stdout
    assert json.loads(served.spool("show", "--json", "train").stdout)["requests"] == ""
