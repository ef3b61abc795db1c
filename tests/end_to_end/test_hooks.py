"""Hooks of the real dispatcher: every event, every bad hook, and those that may say no or set keys."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from end_to_end.hooking import LEDGER, RECORD, hook, ledger, listeners, told, wait_told
from plugins.fake_nvml import FakeNvml
from served import GPU_LOOKS, HOUR_NS, LOOKS, Served, alive
from spool.core.model import EventName
from support import ROOT, wait_for

HANG = "sleep 600"


def _hook_all(spool: Served) -> None:
    for name in set(EventName) - {EventName.QUEUEING}:
        hook(spool, name.value)


def _limit(spool: Served, seconds: int = 600) -> None:
    spool.patched("from spool.listeners import hooks", f"hooks.LIMIT_NS = {seconds} * 10**9")


# --- every event --------------------------------------------------------------------------------------------------


def test_a_job_that_runs_is_told_from_its_arrival_to_its_end(served: Served) -> None:
    """In the order in which it happens, whoever is asked; each run that is not the last is followed by a retrying."""
    _limit(served)  # for so long a question waits for what comes before it
    _hook_all(served)
    # Slow: who is asked meanwhile, without waiting for it, is first.
    hook(served, "queued", f"for i in 1 2 3 4 5; do grep -q submitting {LEDGER} && break; sleep 0.05; done; {RECORD}")
    served.drop("good", "sleep 0.05")
    served.drop("bad", ["/bin/false"], retry={"max": 1})
    assert served.run() == 0
    assert told(served, "good") == ["queued", "submitting", "submitted", "started", "finished"]
    run = ["submitting", "submitted", "started"]
    assert told(served, "bad") == ["queued", *run, "retrying", *run, "failed"]
    assert told(served) == ["dispatcher_started", "dispatcher_stopped"]
    assert next(line for line in ledger(served) if line[0] == "failed")[2:5] == ["2", "failed", "exit code 1"]


@pytest.fixture
def gpus(fake_nvml: FakeNvml, tmp_path: Path) -> Iterator[Served]:
    """Give a spool with two GPUs that are looked at often."""
    for at in range(2):
        fake_nvml.gpu(f"GPU-{at}", bus=at + 1)
    with Served(tmp_path / "spool", fake_nvml.variables) as spool:
        (spool.root / "config.toml").write_text("cpus = 8\n")
        spool.changes[GPU_LOOKS] = 200_000_000
        yield spool


def test_a_gpu_that_is_free_again_is_told(gpus: Served, fake_nvml: FakeNvml) -> None:
    """After a job and after somebody else's process, by its UUID; also if the dispatcher was killed in between."""
    hook(gpus, "gpu_free", 'echo "$SPOOL_EVENT|$SPOOL_GPU" >> ledger')
    fake_nvml.process("GPU-1", os.getpid())
    gpus.drop("one", ["sleep", "0.3"], gpus=1)
    gpus.start()
    gpus.until(lambda: ["gpu_free", "GPU-0"] in ledger(gpus), "GPU-0 free after the job")
    assert ["gpu_free", "GPU-1"] not in ledger(gpus)
    gpus.kill()
    fake_nvml.leave()
    gpus.start()
    gpus.until(lambda: ["gpu_free", "GPU-1"] in ledger(gpus), "GPU-1 free after the process")


def test_a_gpu_that_is_taken_is_told_with_by_whom(gpus: Served, fake_nvml: FakeNvml) -> None:
    """By a job, and by somebody else's process; each once, also if the dispatcher is killed in between."""
    hook(gpus, "gpu_taken", 'echo "$SPOOL_EVENT|$SPOOL_GPU|$SPOOL_REASON" >> ledger')
    gpus.drop("one", ["sleep", "30"], gpus=1)
    gpus.start()
    gpus.until(lambda: ["gpu_taken", "GPU-0", "job one"] in ledger(gpus), "GPU-0 taken by the job")
    gpus.restart()
    fake_nvml.process("GPU-1", os.getpid())
    gpus.until(lambda: any(line[:2] == ["gpu_taken", "GPU-1"] for line in ledger(gpus)), "GPU-1 taken by a process")
    assert f"pid {os.getpid()} " in next(line[2] for line in ledger(gpus) if line[1] == "GPU-1")
    assert [line[1] for line in ledger(gpus)] == ["GPU-0", "GPU-1"]


def test_reservations_are_told_by_the_clock_and_by_hand(gpus: Served) -> None:
    """One that is made, begins and ends, one that is removed while it is in force; none twice over a restart."""
    for name in ("created", "cancelled", "started", "ended"):
        line = 'echo "$SPOOL_EVENT||||$SPOOL_REASON|$SPOOL_RESERVATION" >> ledger; cat >> facts'
        hook(gpus, f"reservation_{name}", line)
    gpus.start()
    gpus.until((gpus.root / "state.json").exists, "its first pass")
    now = datetime.now(UTC)
    for name, start, end in (("short", 0.5, 4), ("long", -60, 3600)):
        text = f'user = "alice"\ngpus = 1\nstart = {(now + timedelta(seconds=start)).isoformat()}\n'
        staged = gpus.root / ".tmp" / name
        staged.write_text(text + f"end = {(now + timedelta(seconds=end)).isoformat()}\n")
        staged.rename(gpus.root / "reservations" / f"{name}.toml")

    def lines() -> list[tuple[str, str]]:
        return sorted((line[0], line[5]) for line in ledger(gpus))

    gpus.until(lambda: ("reservation_ended", "short") in lines(), "the end of the short one")
    gpus.restart()
    (gpus.root / "reservations" / "long.toml").unlink()
    gpus.until(lambda: ("reservation_cancelled", "long") in lines(), "the cancel of the long one")
    (gpus.root / "reservations" / "short.toml").unlink()  # which is over
    gpus.completes("x", "true")
    assert lines() == [
        ("reservation_cancelled", "long"),
        ("reservation_created", "long"),
        ("reservation_created", "short"),
        ("reservation_ended", "long"),
        ("reservation_ended", "short"),
        ("reservation_started", "long"),
        ("reservation_started", "short"),
    ]
    facts = [json.loads(line) for line in (gpus.root / "facts").read_text().splitlines()]
    (cancelled,) = (each for each in facts if each["event"] == "reservation_cancelled")
    assert (cancelled["user"], cancelled["reserved"]["gpus"]) == ("alice", 1)
    assert cancelled["reserved"]["end"].startswith(f"{now + timedelta(hours=1):%Y-%m-%dT%H:%M}")
    assert "its file was removed" in cancelled["reason"]


def test_a_reservation_that_changes_while_nobody_serves_is_told_of_once(gpus: Served) -> None:
    """The next dispatcher tells the cancel of the old one with what it was, and that the new one was made."""
    for name in ("created", "cancelled"):
        hook(gpus, f"reservation_{name}", "cat >> facts")
    path = gpus.root / "reservations" / "r.toml"
    text = f'gpus = 1\nstart = {(datetime.now(UTC) + timedelta(hours=1)).isoformat()}\nduration = "1h"\n'
    path.write_text(f'user = "alice"\n{text}')

    def facts() -> list[tuple[str, str, str]]:
        found = (gpus.root / "facts").read_text().splitlines() if (gpus.root / "facts").exists() else []
        return [(each["event"], each["user"], each.get("reason", "")) for each in map(json.loads, found)]

    gpus.start()
    gpus.until(lambda: len(facts()) == 1, "the first one")
    gpus.kill()
    path.write_text(f'user = "bob"\n{text}')
    gpus.start()
    gpus.until(lambda: len(facts()) == 3, "both changes")
    gpus.restart()
    gpus.completes("x", "true")
    created, cancelled = "reservation_created", "reservation_cancelled"
    changed = (cancelled, "alice", "its file was changed")
    assert sorted(facts()) == sorted([(created, "alice", ""), changed, (created, "bob", "")])


def test_an_array_is_told_of_with_its_tasks(served: Served) -> None:
    """Each task is queued and ends as a job of its own, and the array's end comes after theirs."""
    _limit(served)  # for so long a question waits for what comes before it
    _hook_all(served)
    hook(served, "finished.d/facts", "cat >> facts")
    served.drop("sweep", ["/bin/true"], array="0-1")
    assert served.run() == 0
    for task in ("sweep_0", "sweep_1"):
        assert told(served, task) == ["queued", "submitting", "submitted", "started", "finished"]
    assert told(served, "sweep") == ["queued", "finished"]
    facts = [json.loads(line) for line in (served.root / "facts").read_text().splitlines()]
    assert {each["job"] for each in facts if each.get("array")} == {"sweep"}
    names = [(line[0], line[1]) for line in ledger(served)]
    assert names.index(("finished", "sweep")) > max(names.index(("finished", f"sweep_{at}")) for at in (0, 1))


# --- what a hook is given ---------------------------------------------------------------------------------------


def test_a_hook_is_given_the_facts(served: Served) -> None:
    """On its standard input a JSON object, in its environment the same."""
    hook(served, "finished", "cat > facts; env > variables; pwd > where")
    served.drop("x", ["/bin/true"], project="p", tags=["t"], cpus=2)
    assert served.run() == 0
    facts = json.loads((served.root / "facts").read_text())
    assert (facts["event"], facts["job"], facts["run"], facts["outcome"]) == ("finished", "x", 1, "finished")
    assert (facts["exit_code"], facts["project"], facts["tags"], facts["grant"]["cpus"]) == (0, "p", ["t"], 2)
    assert facts["id"] == "x:1:finished"
    variables = (served.root / "variables").read_text()
    for line in (f"SPOOL_DIR={served.root}", "SPOOL_JOB=x", "SPOOL_RUN=1", "SPOOL_EXIT_CODE=0", "SPOOL_CPUS=2"):
        assert f"{line}\n" in variables
    assert (served.root / "where").read_text() == f"{served.root}\n"
    assert (served.root / "events.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_hook_finds_the_files_where_they_belong(served: Served) -> None:
    """When it is told of an end the file is in done/ and the run in the history; of a start, in running/."""
    hook(served, "finished", 'ls done/"$SPOOL_JOB".toml >> ledger; grep -c "\\"$SPOOL_JOB\\"" history.jsonl >> ledger')
    hook(served, "submitted", 'ls running/"$SPOOL_JOB".toml >> ledger')
    served.start()
    served.drop("x", "while [ ! -s spool/ledger ]; do sleep 0.01; done")
    served.until(lambda: len(ledger(served)) >= 3, "both hooks")
    assert ledger(served) == [["running/x.toml"], ["done/x.toml"], ["1"]]


def test_several_hooks_of_an_event_run_in_order(served: Served) -> None:
    """hooks/EVENT first, then hooks/EVENT.d/* sorted; what is not executable and what editors leave is passed over."""
    hook(served, "finished.d/20-two", "echo two >> ledger")
    hook(served, "finished.d/10-one", "echo one >> ledger")
    hook(served, "finished.d/15-plain", "echo plain >> ledger", mode=0o644)
    hook(served, "finished.d/12-old~", "echo old >> ledger")
    hook(served, "finished", "echo zero >> ledger")
    hook(served, "finnished", "echo typo >> ledger")
    served.drop("x", ["/bin/true"])
    assert served.run() == 0
    assert ledger(served) == [["zero"], ["one"], ["two"]]
    assert [path in served.said() for path in ("hooks/finished.d/15-plain: ", "hooks/finnished: ")] == [True, True]
    assert "hooks/finished.d/15-plain: " in served.spool("doctor").stdout


def test_a_hook_that_comes_while_the_dispatcher_runs_counts_at_once(served: Served) -> None:
    """Without hooks nobody listens and nothing is written; the first that is put there is run for the next job."""
    served.changes[LOOKS] = HOUR_NS
    served.start()
    served.completes("before", ["/bin/true"])
    assert listeners(served) is None
    assert not (served.root / "events.jsonl").exists()
    hook(served, "finished")
    served.looked()
    served.drop("after", ["/bin/true"])
    wait_told(served, "finished", "after")
    assert told(served, "before") == []


def test_hooks_that_others_can_write_are_not_run(served: Served) -> None:
    """A directory that everybody may write is refused as a whole, and so is such a file; state.json says so."""
    hook(served, "finished").chmod(0o777)
    hook(served, "failed.d/x")
    (served.root / "hooks" / "failed.d").chmod(0o777)
    served.drop("x", ["/bin/true"])
    served.drop("y", ["/bin/false"])
    assert served.run() == 0
    assert ledger(served) == []
    problems = " ".join(served.state()["problems"])
    assert [path in problems for path in ("hooks/finished: ", "hooks/failed.d: ")] == [True, True]


# --- bad hooks ----------------------------------------------------------------------------------------------------

BAD = {
    "fails": ("exit 3", "exit code 3"),
    "dies": ("kill -9 $$", "signal 9"),
    "hangs": ("trap '' TERM; echo before; sleep 600", "it took longer than 3s and was killed"),
    "prints megabytes": ("head -c 5000000 /dev/zero | tr '\\0' 'x'", "the rest of its output was cut off"),
    "reads nothing": ("exec <&-", None),
    "leaves a process behind": ("sleep 600 & sleep 600 <&- & exit 0", "killed 2 processes that it left behind"),
    "leaves a daemon behind": ("setsid sh -c 'sleep 600 & sleep 600' & exit 0", "processes that it left behind"),
    "has no first line": ("#! /no/such/interpreter\n", "it cannot be executed"),
    "kills its parent": ('[ "$SPOOL_JOB" = two ] || kill -9 $PPID', "it has crashed the listeners' process 3 times"),
    "stops its parent": ("kill -STOP $PPID; sleep 0.1; kill -CONT $PPID", None),
}


@pytest.mark.parametrize("how", BAD)
def test_a_bad_hook_is_reported_and_harms_nothing(served: Served, how: str) -> None:
    """Jobs go on starting, the next event is told by its hook, nothing is left behind, and the log says what it was."""
    script, said = BAD[how]
    if how == "hangs":
        _limit(served, 3)
    hook(served, "started", script)
    hook(served, "finished")
    served.start()
    for name in ("one", "two"):
        served.drop(name, ["/bin/true"])
    served.wait_done("one", "two")
    for name in ("one", "two"):
        wait_told(served, "finished", name)
    if said is not None:
        served.until(lambda: said in served.said(), said)
    assert len(served.said()) < 300_000


def test_a_hook_is_no_part_of_the_run_that_it_is_told_of(served: Served) -> None:
    """A run is over and its CPU free while the hook for its start still runs, marks of the run and all."""
    hook(served, "started", "touch runs; sleep 600")
    served.start()
    served.drop("x", "while [ ! -e spool/runs ]; do sleep 0.01; done")
    assert served.wait_outcome("x") == "finished"
    assert listeners(served) is not None
    os.kill(listeners(served) or 0, signal.SIGKILL)


# --- nothing is lost ----------------------------------------------------------------------------------------------


def test_the_listeners_killed_lose_nothing(served: Served) -> None:
    """Another process is started and goes on where the first one was."""
    hook(served, "finished", f"sleep 0.05; {RECORD}")
    served.start()
    names = [f"job-{at}" for at in range(8)]
    for name in names:
        served.drop(name, ["/bin/true"])
    for at in (1, 3):
        served.until(lambda at=at: len({line[1] for line in ledger(served)}) >= at, "some of them")
        os.kill(wait_for(lambda: listeners(served), what="a process"), signal.SIGKILL)
    served.wait_done(*names)
    for name in names:
        wait_told(served, "finished", name)


def test_a_dispatcher_of_one_pass_tells_what_it_has_done(served: Served, tmp_path: Path) -> None:
    """`dispatch --once` returns when its hooks have run; one that is asked about is waited for."""
    _limit(served)  # for so long a question waits for what comes before it
    for name in ("queued", "submitting", "submitted"):
        hook(served, name)
    gate = tmp_path / "gate"  # else a slow first pass would see the end as well
    served.drop("x", ["/bin/sh", "-c", f"until [ -e {gate} ]; do sleep 0.05; done"])
    assert served.run("--once") == 0
    assert told(served, "x") == ["queued", "submitting", "submitted"]
    hook(served, "finished")
    gate.touch()
    served.until(lambda: served.record("x", "rc"), "the end of x")
    # Its wrapper may live for a moment after it has written the exit code; one pass does not wait for that.
    served.until(lambda: served.run("--once") == 0 and "finished" in told(served, "x"), "the hook of its end")


# --- asking -------------------------------------------------------------------------------------------------------

NO = 'cat > /dev/null; [ "$SPOOL_JOB" != x ] || { echo "thinking"; echo "not on a Friday"; exit 1; }'


def test_a_hook_adds_to_the_environment_of_a_run(served: Served) -> None:
    """What hooks append to $SPOOL_ENV before a start is in the environment, the last hook's above the others'."""
    hook(served, "submitting", 'echo "A=it\'s $SPOOL_JOB" >> "$SPOOL_ENV"; env -i sh -c "echo B=1 >> $SPOOL_ENV"')
    hook(served, "submitting.d/2", 'echo B=2 >> "$SPOOL_ENV"; sleep 600 > /dev/null 2>&1 &')
    served.drop(
        "x", ["sh", "-c", 'echo "$A|$B|${SPOOL_ENV-none}"'], env={"A": "own"}, prolog='echo C=1 >> "$SPOOL_ENV"'
    )
    assert served.run() == 0
    assert served.log("x") == "it's x|2|none\n"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo nonsense", "has a line 1 that is not KEY=VALUE"),
        ("echo A=1; echo SPOOL_DIR=/x", "has SPOOL_DIR in line 2, which spool sets itself"),
        ("echo IFS=x", "has IFS in line 1, which the shell keeps for itself"),
        ("printf 'A=\\0'", "has a line 1 that is not KEY=VALUE"),
        ("printf 'A=\\377'", "is not UTF-8"),
        ("head -c 70000 /dev/zero", "has more than 1000 lines, more than 64 KiB, or a line of more than 32 KiB"),
    ],
)
def test_a_line_of_a_hook_that_is_not_good_is_a_veto(served: Served, script: str, why: str) -> None:
    """The job is held with the words, instead of running without what the hook wanted to give."""
    hook(served, "submitting", f'{{ {script}; }} >> "$SPOOL_ENV"')
    served.start()
    served.drop("x", "echo ran")
    served.until(lambda: served.path("held", "x").exists(), "a job that is held")
    reason = served.path("held", "x").with_name("x.toml.reason")
    served.until(lambda: reason.exists() and why in reason.read_text(), f"{why} as the reason")


def test_a_start_that_is_refused_is_held_with_the_words(served: Served) -> None:
    """The job is held, other jobs run, and why, ls and show have the hook's last line, also after a restart."""
    hook(served, "submitting", NO)
    hook(served, "held")
    served.start()
    served.drop("x", ["/bin/true"])
    served.drop("other", ["/bin/true"])
    served.wait_place("x", "held")
    served.wait_done("other")
    assert wait_told(served, "held", "x")[4] == "hook submitting: not on a Friday"
    assert served.runs("x") == []
    served.wait_reason("x", "hook submitting: not on a Friday")
    served.kill()
    for verb in ("why", "ls", "show"):
        assert "hook submitting: not on a Friday" in served.spool(verb, "x").stdout, verb
    served.start()
    served.wait_reason("x", "hook submitting: not on a Friday")
    for verb in ("why", "ls", "show"):
        assert "hook submitting: not on a Friday" in served.spool(verb, "x").stdout, verb


@pytest.mark.parametrize("how", ["released", "edited", "edited while none serves", "cancelled"])
def test_the_words_of_a_refusal_go_with_it(served: Served, how: str) -> None:
    """Released, edited or cancelled, the job is a job like any other; one that is released is asked about again."""
    gate = hook(served, "submitting", NO)
    served.start()
    served.drop("x", ["/bin/true"])
    served.wait_place("x", "held")
    reason = served.root / "held" / "x.toml.reason"
    assert reason.read_text() == "hook submitting: not on a Friday\n"
    if how == "released":
        served.move("x", "held", "queued")
        served.looked()
        served.until(lambda: served.places("x") == ["held"] and reason.exists(), "a second no")
        gate.unlink()
        served.looked()
        served.move("x", "held", "queued")
        served.wait_done("x")
    elif how == "edited":
        served.drop("x", ["/bin/echo"], place="held")
        served.looked()
    elif how == "edited while none serves":
        served.kill()
        served.drop("x", ["/bin/echo"], place="held")
        served.start()
    else:
        served.move("x", "held", "done")
        served.looked()
    served.until(lambda: not reason.exists(), "the reason to go")
    served.until(lambda: "Friday" not in served.reason("x"), "another reason")


def test_a_start_waits_for_its_answer_and_nobody_else_does(served: Served) -> None:
    """The job whose hook takes its time says that it is asked about, then why not; the others start meanwhile."""
    _limit(served)
    hook(served, "submitting", '[ "$SPOOL_JOB" != x ] || { until [ -e go ]; do sleep 0.05; done; echo no; exit 1; }')
    served.start()
    served.drop("x", ["/bin/true"])
    served.wait_reason("x", "hook submitting: asked")
    assert "hook submitting: asked" in served.spool("why", "x").stdout
    names = [f"job-{at}" for at in range(20)]
    for name in names:
        served.drop(name, ["/bin/true"])
    served.wait_done(*names)
    assert served.places("x") == ["queued"]
    (served.root / "go").touch()
    served.wait_place("x", "held")
    served.wait_reason("x", "hook submitting: no")


def test_a_gate_that_kills_its_process_is_a_no_in_the_end(served: Served) -> None:
    """The job is held with that as the reason, and others that were asked about at the same time are not blamed."""
    hook(served, "submitting", '[ "$SPOOL_JOB" != x ] || kill -9 $PPID')
    served.start()
    served.drop("x", ["/bin/true"])
    served.drop("y", ["/bin/true"])
    served.wait_place("x", "held")
    served.wait_reason("x", "hook submitting: ")
    served.wait_done("y")


@pytest.mark.parametrize("how", ["rm", "mv", "command"])
def test_a_cancel_that_is_refused_is_dropped(served: Served, how: str) -> None:
    """The run goes on, its file is back in running/ as it was, and why and show have the words, after a restart too."""
    gate = hook(served, "cancelling", 'echo "nearly done"; exit 1')
    served.start()
    file = served.drop("x", "sleep 600  # goes on")
    served.pid("x")
    served.wait_place("x", "running")
    text = served.path("running", "x").read_bytes()
    if how == "rm":
        served.path("running", "x").unlink()
    elif how == "mv":
        served.move("x", "running", "done")
    else:
        assert served.spool("cancel", "x").returncode == 0
    served.until(lambda: served.record("x", "kept") and served.places("x") == ["running"], "the cancel dropped")
    assert not file.exists()
    assert served.path("running", "x").read_bytes() == text
    assert served.record("x", "stop") is None
    assert alive(served.pid("x"))
    served.wait_reason("x", "nearly done")
    assert ": nearly done" in served.spool("why", "x").stdout
    served.restart()
    served.wait_reason("x", "hook cancelling: nearly done")
    assert ": nearly done" in served.spool("show", "x").stdout
    gate.unlink()
    served.looked()
    served.cancels("x")
    served.wait_done("x")


def test_a_cancel_is_asked_about_across_a_restart(served: Served) -> None:
    """Killed while a cancel is asked about, the next dispatcher asks again; the yes then cancels, once."""
    _limit(served, 20)
    hook(served, "cancelling", "echo asked >> ledger; while [ ! -e go ]; do sleep 0.02; done")
    served.start()
    served.begun("x", HANG)
    assert served.spool("cancel", "x").returncode == 0
    served.until(lambda: ledger(served) == [["asked"]], "the question")
    served.restart()
    served.until(lambda: ledger(served) == [["asked"]] * 2, "the question again")
    assert alive(served.pid("x"))
    (served.root / "go").touch()
    assert served.wait_outcome("x") == "cancelled"
    served.wait_done("x")


_NOTE = 'echo "$SPOOL_JOB" >> asked\n'


def setting(spool: Served, lines: str, before: str = "", *, name: str = "queueing") -> None:
    """Put a hook there that notes each question, and sets the keys in *lines* of TOML."""
    hook(spool, name, f"{_NOTE}{before}cat > \"$SPOOL_KEYS\" <<'END'\n{lines}\nEND\n")


def asked(spool: Served) -> list[str]:
    """Return the jobs about which the hook was asked, in the order of the questions."""
    path = spool.root / "asked"
    return path.read_text().split() if path.exists() else []


def defaults(spool: Served, name: str, run: int = 1) -> dict[str, Any]:
    """Return the defaults in the metadir of a run."""
    return tomllib.loads((spool.root / "jobs" / name / str(run) / "defaults.toml").read_text())


def test_a_run_has_the_keys_that_a_hook_sets_and_the_records_say_so(served: Served) -> None:
    """They win over the file, which stays as it is; `[defaults]` fill what is left; `env` is merged."""
    (served.root / "config.toml").write_text('cpus = 4\n[defaults]\ntime_limit = "2h"\nmemory = "10M"\n')
    lines = 'command = "echo $A $B $SPOOL_CPUS"\ncpus = 2\ntime_limit = "1h"\n[env]\nA = "hook"\nB = "hook"'
    setting(served, lines, "cat > told\n")
    served.start()
    file = served.text("echo no", env={"A": "own"}, cpus=1, project="p")
    served.drop("x", file)
    served.wait_done("x")
    assert served.log("x") == "hook hook 2\n"
    assert served.path("done", "x").read_bytes() == file
    assert json.loads((served.root / "told").read_bytes())["keys"] == tomllib.loads(file.decode())
    record = (served.root / "jobs" / "x" / "1" / "defaults.toml").read_text()
    assert '# set by hooks/queueing: time_limit = "1h"\n# set by hooks/queueing: env.A = "hook"\n' in record
    found = defaults(served, "x")
    assert found.pop("set_by_hooks") == tomllib.loads(lines)
    assert found == {"time_limit": "2h", "memory": "10M"}
    text = served.spool("show", "x").stdout
    assert '  hooks/queueing: env.A = "hook"' in text.replace("set by ", "")
    assert "2h" not in text


def test_the_example_does_what_it_says(served: Served) -> None:
    """A job has a time limit, GPUs need a project, and each end is in the ledger, once."""
    shutil.copytree(ROOT / "examples" / "hooks", served.root / "hooks")
    (served.root / "hooks").chmod(0o700)
    served.start()
    served.completes("x", "true")
    served.completes("y", "true", time_limit="1h")
    assert defaults(served, "x")["set_by_hooks"] == {"time_limit": "24h"}
    assert not (served.root / "jobs" / "y" / "1" / "defaults.toml").exists()
    ledger = served.root / "ledger"
    served.until(lambda: ledger.exists() and len(ledger.read_text().split()) == 6, "the ledger")
    line = ledger.read_text().splitlines()[0].split()
    again = {**os.environ, "SPOOL_EVENT_ID": line[0], "SPOOL_USER": line[1], "SPOOL_OUTCOME": line[2]}
    subprocess.run([served.root / "hooks" / "finished"], cwd=served.root, env=again, check=True)
    assert len(ledger.read_text().splitlines()) == 2
    for project, code in (("", 1), ("p", 0)):
        asking = {**os.environ, "SPOOL_GPUS": "1", "SPOOL_PROJECT": project}
        done = subprocess.run(
            [served.root / "hooks" / "submitting"], env=asking, check=False, stdout=subprocess.DEVNULL
        )
        assert done.returncode == code


def test_a_hook_may_put_a_script_around_a_command(served: Served) -> None:
    """The script gets the arguments that the hook states; a dispatcher that stops when idle waits for the answer."""
    only = "[ $SPOOL_JOB = x ] || exit 0\nsleep 0.2\n"
    setting(served, "command = ['around', 'it']\nscript = '''\n#!/bin/sh\necho script $1\n'''", only)
    served.drop("x", "echo no")
    assert served.run() == 0
    assert served.log("x") == "script it\n"


def test_each_hook_sees_the_keys_of_those_before_it_and_the_last_one_counts(served: Served) -> None:
    """Those in `hooks/queueing.d/` are asked in the order of their names."""
    setting(served, "priority = 1\nproject = 'p'\nenv.A = 'first'\nretry.delay = '1s'", name="queueing.d/1")
    setting(served, "priority = 2\nenv.B = 'second'\nretry.max = 2", "cat > told\n", name="queueing.d/2")
    served.start()
    served.completes("x", "echo $A $B $C $SPOOL_RETRIES", env={"A": "own", "C": "own"}, retry={"backoff": 1, "max": 9})
    retry, env = {"delay": "1s", "max": 2}, {"A": "first", "B": "second"}
    assert defaults(served, "x")["set_by_hooks"] == {"priority": 2, "project": "p", "retry": retry, "env": env}
    keys = json.loads((served.root / "told").read_bytes())["keys"]
    assert (keys["priority"], keys["env"]) == (1, {"A": "first", "C": "own"})
    assert keys["retry"] == {"backoff": 1, "max": 9, "delay": "1s"}
    assert served.log("x") == "first second own\n"


def test_what_a_waiting_job_was_given_outlives_the_dispatcher(served: Served) -> None:
    """After a kill nobody is asked again, `show`, `ls` and `why` know the keys without a dispatcher; an edit asks."""
    only = "[ $SPOOL_JOB = x ] || exit 0\n"
    setting(served, "priority = 77\ncpus = 9", only)
    (served.root / "config.toml").write_text("cpus = 8\n")
    served.start()
    served.drop("x", "true")
    served.until(lambda: served.state()["jobs"].get("x", {}).get("priority") == 77, "the priority")
    served.kill()
    assert "priority = 77" in served.spool("show", "x").stdout
    assert " 77 " in served.spool("ls").stdout
    assert "9 CPUs" in served.spool("why", "x").stdout
    served.start()
    served.looked()
    assert asked(served).count("x") == 1
    assert served.state()["jobs"]["x"]["priority"] == 77
    setting(served, "priority = 78", only)
    served.drop("x", "true", cpus=1)
    served.wait_done("x")
    assert asked(served).count("x") == 2
    assert defaults(served, "x")["set_by_hooks"] == {"priority": 78}


def test_a_question_that_is_cut_off_is_asked_again(served: Served) -> None:
    """A kill between question and answer: the job waits, and the next dispatcher asks and sets the keys."""
    setting(served, "project = 'p'", "until [ -e go ]; do sleep 0.01; done\n")
    served.start()
    served.drop("x", "true")
    served.until(lambda: asked(served) == ["x"], "the question")
    served.wait_reason("x", "hook queueing: asked")
    served.kill()
    (served.root / "go").touch()
    served.start()
    served.wait_done("x")
    assert asked(served) == ["x", "x"]
    assert served.history()[0]["project"] == "p"


def test_an_array_is_asked_about_once_and_its_tasks_have_the_keys(served: Served) -> None:
    """The files of the tasks have the keys and say who set them; `{i}` in one of them is each task's."""
    setting(served, "comment = 'of a hook'\ncommand = 'echo $N'\n[env]\nN = 'task {i}'")
    served.start()
    served.drop("many", "echo no", matrix={"i": [1, 2]})
    served.wait_done("many_0", "many_1", "many")
    assert [served.log("many_0"), served.log("many_1")] == ["task 1\n", "task 2\n"]
    text = served.path("done", "many_1").read_text()
    assert text.startswith('# set by hooks/queueing: comment = "of a hook"\n')
    assert asked(served) == ["many"]


def test_a_retry_keeps_the_keys_and_nobody_is_asked_again(served: Served) -> None:
    """A job that runs again is the same submission."""
    setting(served, "project = 'p'\nretry = { max = 1, delay = '0s' }")
    served.start()
    served.completes("x", "exit 3")
    assert [line["project"] for line in served.history()] == ["p", "p"]
    assert asked(served) == ["x"]


def test_a_running_job_keeps_the_keys_when_its_file_is_edited(served: Served) -> None:
    """An edit of a run changes what can be changed, and not what a hook has set."""
    setting(served, 'time_limit = "5h"')
    served.start()
    served.begun("x", "sleep 600", time_limit="1h")
    served.spool("edit", "x", "--priority", "3")
    served.looked()
    assert "5h" in served.spool("show", "x").stdout
    served.cancels("x")


WRONG = {
    "priority = 'high'": 'hooks/queueing: "priority"',
    "depends_on = ['y']": 'hooks/queueing: cannot set "depends_on"',
    "signal = 'USR1@2h'\ntime_limit = '1h'": "hooks/queueing: ",
    "priority = ": "hook queueing: ",
    "project = 'p'\n# " + "x" * (64 << 10): "its $SPOOL_KEYS has more than 64 KiB",
    "END\necho not today; exit 1; true <<'END'": "hook queueing: not today",
    "END\nexec sleep 600; true <<'END'": "hook queueing: it took longer than 3s",
}


@pytest.mark.parametrize("lines", WRONG)
def test_a_hook_that_fails_or_says_no_holds_the_job_and_says_why(served: Served, lines: str) -> None:
    """A wrong key or value, no TOML, a veto and a hang: the reason names the hook; a release asks again."""
    if "exec sleep" in lines:
        _limit(served, 3)
    setting(served, lines)
    served.start()
    served.drop("x", "true")
    served.wait_place("x", "held")
    served.wait_reason("x", WRONG[lines])
    served.move("x", "held", "queued")
    served.until(lambda: len(asked(served)) == 2, "another question")
    served.wait_place("x", "held")


def test_a_job_that_cannot_be_held_waits_and_says_why(served: Served) -> None:
    """Another file of its name is held: the one in `queued/` stays there with the words of the hook."""
    hook(served, "queueing", "echo no; exit 1")
    served.start()
    served.drop("x", "true", place="held")
    served.drop("x", "true")
    served.wait_reason("x", "hook queueing: no")
    assert served.path("queued", "x").exists()
