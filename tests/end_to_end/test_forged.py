"""A job that forges records, of its own run or of the spool, misleads nothing about another job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from served import Served, marked

VICTIM = "victim"
_GRANT = 'sed -i "s|^{0} = .*|{0} = {1}|" "$SPOOL_METADIR/grant.toml"'
_ENDED = "$(date -u +%Y-%m-%dT%H:%M:%S.%NZ)"


def _jid(words: str) -> str:
    return f'rm "$SPOOL_METADIR/jid"; echo "{words}" > "$SPOOL_METADIR/jid"'


def _jid_of(pid: str) -> str:
    """Return what puts another process into the record, with the words that would prove it."""
    ticks = f"$(sed 's/.*) //' /proc/{pid}/stat | cut -d' ' -f20)"
    return f'set -- $(cat "$SPOOL_METADIR/jid"); {_jid(f"{pid} {ticks} $3 $4 $5")}'


def _result(job: str, run: int = 1) -> str:
    lines = f'job = "{job}"\\nrun = {run}\\nattempt = 1\\noutcome = "finished"\\nreason = "exit code 0"\\n'
    return f'printf \'{lines}\' | sed "s/SELF/$SPOOL_JOB/" > "$SPOOL_METADIR/result.toml"'


def _history(job: str, run: int = 1) -> str:
    fields = f'\\"job\\":\\"{job}\\",\\"run\\":{run},\\"outcome\\":\\"finished\\",\\"ended_at\\":\\"{_ENDED}\\"'
    return f'echo "{{{fields}}}" >> "$SPOOL_DIR/history.jsonl"'


def _linked(path: str, target: str) -> str:
    return f'mv "{path}" "{path}.aside"; ln -s {target} "{path}"'


FORGED = {
    "grant: another's job": _GRANT.format("job", '\\"victim\\"'),
    "grant: a path": _GRANT.format("job", '\\"../../../outside\\"'),
    "grant: another run": _GRANT.format("run", "7"),
    "grant: huge": _GRANT.format("cpus", "9" * 30),
    "grant: negative": _GRANT.format("cpus", "-8"),
    "grant: noise": 'head -c 999 /dev/urandom > "$SPOOL_METADIR/grant.toml"',
    "grant: an engine": f"{_GRANT.format('executor', chr(92) + chr(34) + 'slurm' + chr(92) + chr(34))}; "
    'echo "slurm - 1" > "$SPOOL_METADIR/engine"',
    "grant: no executor": _GRANT.format("executor", '\\"../evil\\"'),
    "grant: another machine": f"{_GRANT.format('host', chr(92) + chr(34) + 'other' + chr(92) + chr(34))}; "
    f"{_GRANT.format('boot_id', chr(92) + chr(34) + 'other' + chr(92) + chr(34))}",
    "jid: another's": 'rm "$SPOOL_METADIR/jid"; cp "$SPOOL_DIR/jobs/victim/1/jid" "$SPOOL_METADIR/jid"',
    "jid: a stranger": _jid_of("STRANGER"),
    "jid: the dispatcher": _jid_of("DISPATCHER"),
    "jid: who started the dispatcher": _jid_of("PARENT"),
    "jid: init": _jid_of("1"),
    "jid: nobody": f'set -- $(cat "$SPOOL_METADIR/jid"); {_jid("0 1 $3 $4 $5")}',
    "jid: huge": f'set -- $(cat "$SPOOL_METADIR/jid"); {_jid("2147483648 9999999999999999999 $3 $4 $5")}',
    "jid: another host": f'set -- $(cat "$SPOOL_METADIR/jid"); {_jid("$1 $2 other $4 other")}',
    "jid: another boot": f'set -- $(cat "$SPOOL_METADIR/jid"); {_jid("$1 $2 other $4 $5")}',
    "jid: an engine": f'set -- $(cat "$SPOOL_METADIR/jid"); {_jid("$1 $2 $3 $4 $5 slurm:1")}',
    "jid: none": 'rm "$SPOOL_METADIR/jid"',
    "jid: void": 'echo void > "$SPOOL_METADIR/jid"',
    "result: another's": _result(VICTIM),
    "result: a path": _result("../../../outside"),
    "result: another run": _result("SELF", 3),
    "result: its own": _result("SELF"),
    "array: its own": 'printf \'job = "forger"\\nrun = 1\\ntasks = 3\\n\' > "$SPOOL_METADIR/array.toml"',
    "stop: huge": f'echo "cancel x {"9" * 40}" > "$SPOOL_METADIR/stop"',
    "suspended: huge": f'echo {"9" * 19} > "$SPOOL_METADIR/suspended"',
    "gpus: huge": f'echo "at_ns = {"9" * 30}" > "$SPOOL_METADIR/gpus.toml"',
    "metadir: another's": _linked("$SPOOL_METADIR", "../victim/1"),
    "metadir: outside": _linked("$SPOOL_METADIR", "OUTSIDE"),
    "metadirs: another's": _linked("$SPOOL_DIR/jobs/$SPOOL_JOB", "victim"),
    "metadirs: outside": f"mkdir OUTSIDE/1; {_linked('$SPOOL_DIR/jobs/$SPOOL_JOB', 'OUTSIDE')}",
    **{
        f"{record}: a link": f'rm -f "$SPOOL_METADIR/{record}"; ln -s ../../victim/1/{record} "$SPOOL_METADIR/{record}"'
        for record in ("jid", "rc", "log", "status", "stop", "result.toml", "suspended", "gpus.toml", "grant.toml")
    },
    "history: another's": _history(VICTIM),
    "history: a path": _history("../../outside"),
    "history: huge": _history(VICTIM, 10**12),
    "journal: a path": 'echo "[\\"started\\",\\"../../outside\\",1,\\"b\\",1,1,1]" >> "$SPOOL_DIR/.journal"',
    "journal: another's end": 'echo "[\\"over\\",\\"victim\\",1,true,\\"finished\\"]" >> "$SPOOL_DIR/.journal"',
}


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """Give a process of this user that has nothing to do with spool."""
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        yield process
        process.kill()


def _elsewhere(spool: Served) -> Path:
    return spool.root.parent / "elsewhere"


def _mend(spool: Served) -> None:
    """Put the directories that links stand for back."""
    for aside in [*spool.root.glob("jobs/*.aside"), *spool.root.glob("jobs/forger*/*.aside")]:
        link = aside.with_suffix("")
        assert link.is_symlink()
        link.unlink()
        while aside.exists():
            with suppress(OSError):  # the dispatcher has made the directory again to write a record
                aside.rename(link)
                break
            shutil.rmtree(link, ignore_errors=True)


def _forge(spool: Served, stranger: int) -> dict[str, str]:
    """Have a victim run, and beside it jobs that forge a record each and live on; return what each forges."""
    ledger, here = spool.root.parent / "ledger", spool.root.parent
    _elsewhere(spool).mkdir()
    spool.drop(VICTIM, f"echo begun >> {ledger}; until [ -e {here}/go ]; do sleep 0.05; done")
    spool.until(ledger.exists, "the victim")
    forgers = {f"forger{number}": kind for number, kind in enumerate(FORGED)}
    for name, kind in forgers.items():
        forged = FORGED[kind]
        forged = forged.replace("OUTSIDE", str(_elsewhere(spool)))
        for word, pid in (("STRANGER", stranger), ("DISPATCHER", spool.process.pid), ("PARENT", os.getpid())):
            forged = forged.replace(word, str(pid))
        spool.drop(name, f"{forged}; touch {here}/{name}; sleep 1000", kill_grace="1s", requeue=False)
    for name, kind in forgers.items():
        spool.until((here / name).exists, f"the forgery of {kind}")
    return forgers


@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", [False, True], ids=["alive", "killed"])
def test_forged_records_harm_no_other_job(tmp_path: Path, stranger: subprocess.Popen[bytes], *, killed: bool) -> None:
    """Another's run goes on, begins once and ends as it does; forgers can be stopped; no other process is harmed."""
    with Served(tmp_path / "deep" / "er" / "spool") as spool:
        spool.patience = 60.0
        spool.serves(f"cpus = {len(FORGED) + 1}\n")
        forgers = _forge(spool, stranger.pid)
        pids = marked(spool.root, VICTIM)
        for _ in range(2 if killed else 0):
            spool.restart()
        for name in forgers:
            spool.path("running", name).unlink(missing_ok=True)
        for name, kind in forgers.items():
            spool.until(lambda name=name: not marked(spool.root, name), f"the end of what forged {kind}")  # type: ignore[misc]
        if killed:
            spool.restart()
        assert stranger.poll() is None
        assert [path.name for path in _elsewhere(spool).rglob("*")] == ["1"], "something was written outside"
        assert marked(spool.root, VICTIM) & pids, "the victim was stopped"
        assert spool.places(VICTIM) == ["running"]
        assert spool.result(VICTIM) is None
        (spool.root.parent / "go").touch()
        spool.wait_done(VICTIM)
        assert (spool.root.parent / "ledger").read_text() == "begun\n"
        assert (spool.outcome(VICTIM), spool.runs(VICTIM)) == ("finished", [1])
        assert not list(tmp_path.rglob("outside*"))
        _mend(spool)
        assert "Traceback" not in spool.said()
        for name, kind in forgers.items():
            spool.until(lambda name=name: spool.places(name) == ["done"], f"the end of {kind}")  # type: ignore[misc]


@pytest.mark.parametrize("kind", ["jid: none", "jid: void", "jid: nobody", "jid: another's"])
def test_a_run_without_its_jid_is_over_when_its_processes_are(served: Served, kind: str) -> None:
    """A dispatcher that has just come waits for a wrapper to register; a run that it stops meanwhile may be alive."""
    here = served.root.parent
    served.start()
    served.drop(VICTIM, f"touch {here}/begun; sleep 1000")
    served.until((here / "begun").exists, "the victim")
    command = f"trap '' TERM; {FORGED[kind]}; touch {here}/forged; while :; do sleep 0.1; done"
    served.drop("forger", command, kill_grace="3s", requeue=False)
    served.until((here / "forged").exists, "the forgery")
    served.restart()
    served.path("running", "forger").unlink()
    served.until(lambda: served.path("done", "forger").exists(), "the end of the job")
    assert not marked(served.root, "forger")
    assert served.outcome("forger") == "cancelled"


@pytest.mark.parametrize("killed", [False, True], ids=["alive", "killed"])
def test_a_result_that_a_running_job_writes_does_not_end_it(live: Served, *, killed: bool) -> None:
    """Beside a living wrapper it counts for nothing: every view says that the job runs."""
    live.drop("forger", f"{_result('SELF')}; echo forged; sleep 1000")
    live.until(lambda: "forged" in live.log("forger"), "the forgery")
    if killed:
        live.kill()
    listed = json.loads(live.spool("ls", "--json").stdout)["jobs"]
    shown = json.loads(live.spool("show", "forger", "--json").stdout)
    assert [job["state"] for job in listed] == ["running"]
    assert [(run["state"], run["ended_at"]) for run in shown["runs"]] == [("running", None)]
    assert json.loads(live.spool("seff", "forger", "--json").stdout)["state"] == "running"
