"""Jobs that damage or forge records: each harms itself alone, is told, and ends as it should once that is mended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from end_to_end.hooking import hook
from served import Served, marked
from support import wait_for

# A dispatcher whose user may not read what nobody may read, whoever runs the tests.
PLAIN_USER = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.getuid() == 0 else []


@dataclass(frozen=True)
class Damage:
    """What a job does to its records, what a person does about it, and whether spool has to tell of it."""

    done: str
    mend: str
    path: str  # a part of what is told


DAMAGES = {
    "read-only": Damage('chmod 500 "$SPOOL_METADIR"', "chmod 700 jobs/NAME/1", "jobs/NAME/1/"),
    "unreadable": Damage('chmod 000 "${SPOOL_METADIR%/*}"', "chmod 700 jobs/NAME", "jobs/NAME/1/"),
    "replaced": Damage('rm -rf "${SPOOL_METADIR%/*}"; echo > "${SPOOL_METADIR%/*}"', "rm jobs/NAME", "jobs/NAME/1/"),
    "metadir-replaced": Damage('rm -rf "$SPOOL_METADIR"; echo > "$SPOOL_METADIR"', "rm jobs/NAME/1", "jobs/NAME/1/"),
    "result-directory": Damage('mkdir "$SPOOL_METADIR/result.toml"', "rmdir jobs/NAME/1/result.toml", "result.toml"),
    "status-directory": Damage(
        'rm "$SPOOL_METADIR/status"; mkdir "$SPOOL_METADIR/status"', "rmdir jobs/NAME/1/status", "status"
    ),
}


@contextmanager
def _plain(directory: Path) -> Iterator[Served]:
    if PLAIN_USER and shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    with Served(directory / "spool") as spool:
        (spool.root / "config.toml").write_text("cpus = 1\n")
        yield spool.start(prefix=PLAIN_USER)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Give a spool with room for one job at a time, whose dispatcher is held to the permissions of files."""
    with _plain(tmp_path_factory.mktemp("plain")) as spool:
        yield spool


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Served]:
    """Give such a spool to one test alone."""
    with _plain(tmp_path) as spool:
        yield spool


def mend(root: Path, command: str, name: str) -> None:
    """Do what a person does about the damage."""
    assert os.system(f"cd '{root}' && {command.replace('NAME', name)}") == 0


def _told(spool: Served, path: str) -> bool:
    return any(path in problem for problem in spool.state().get("problems", ()))


def _outcomes(spool: Served, name: str) -> list[str]:
    return [line["outcome"] for line in spool.history() if line["job"] == name]


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("end", ["limit", "cancel"])
def test_a_job_that_damages_its_records_harms_itself_alone(plain: Served, kind: str, end: str) -> None:
    """It is stopped and frees its room, the next job runs, spool tells which file is wrong; mended, it ends well."""
    _damage(plain, kind, end)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_dispatcher_that_comes_later_meets_the_damage_alike(own: Served, kind: str) -> None:
    """A dispatcher that begins while the records are damaged limits the run all the same, and runs the next job."""
    _damage(own, kind, "anew")


def _damage(plain: Served, kind: str, end: str) -> None:
    assert plain.lives()
    damage, name = DAMAGES[kind], f"{kind}-{end}"
    limit = {"time_limit": "1s"} if end != "cancel" else {}
    # On a slow machine the limit may pass before: the damage is done all the same, within the grace.
    command = f"trap '' TERM; {damage.done}; touch {plain.root.parent}/{name}; trap - TERM; sleep 1000"
    plain.drop(name, command, kill_grace="5s", **limit)
    plain.until((plain.root.parent / name).exists, "the damage")
    if end == "cancel" and kind == "replaced":
        assert plain.spool("cancel", name).returncode == 0
    elif end == "cancel":
        plain.path("running", name).unlink()
    if end == "anew":
        plain.kill()
        plain.start(prefix=PLAIN_USER)
    plain.completes(f"{name}-next", "true")
    assert not marked(plain.root, name)
    plain.until(lambda: _told(plain, damage.path.replace("NAME", name)), "the problem")
    mend(plain.root, damage.mend, name)
    plain.until(lambda: _outcomes(plain, name), "the end")
    assert _outcomes(plain, name) == ["cancelled" if end == "cancel" else "timeout"]
    plain.until(lambda: not _told(plain, name), "the end of the problem")
    assert "Traceback" not in plain.said()


@pytest.mark.parametrize("damage", ["rm", "echo x >"])
def test_a_run_whose_jid_is_no_longer_one_is_said_to_run(own: Served, damage: str) -> None:
    """Nobody stops it, and its command has not ended; the list says what is wrong."""
    own.drop("nameless", f'{damage} "$SPOOL_METADIR/jid"; echo done; sleep 1000')
    own.says("nameless", "done")
    [row] = json.loads(own.spool("ls", "nameless", "--json").stdout)["jobs"]
    assert (row["state"], row["reason"].partition(",")[0]) == ("running", "its jid is missing or unreadable")
    assert "it is running (its jid is missing or unreadable, but" in own.spool("why", "nameless").stdout


def test_a_task_that_damages_its_array_harms_that_alone(plain: Served) -> None:
    """With a metadir that takes no record the array is told of, the next job runs, and mended it finishes."""
    plain.drop("swept", 'chmod 500 "$SPOOL_DIR/jobs/swept/1"', array="0-1")
    plain.until(lambda: _told(plain, "jobs/swept/1/"), "the problem")
    plain.completes("beside-an-array", "true")
    mend(plain.root, "chmod 700 jobs/NAME/1", "swept")
    plain.wait_done("swept")
    assert plain.outcome("swept") == "finished"


def test_a_refusal_that_cannot_be_written_down_holds_nobody_else_up(own: Served) -> None:
    """With a directory in the place of the reason the job waits, the next one runs; without, it is held."""
    hook(own, "submitting", '[ "$SPOOL_JOB" != refused ] || { echo "not this one"; exit 1; }')
    reason = own.root / "held" / "refused.toml.reason"
    reason.mkdir()
    own.drop("refused", "true")
    own.until(lambda: _told(own, "held/refused.toml.reason"), "the problem")
    own.completes("allowed", "true")
    assert own.places("refused") == ["queued"]
    reason.rmdir()
    own.wait_place("refused", "held")
    own.until(lambda: own.reason("refused") == "hook submitting: not this one", "the reason")
    own.until(lambda: not _told(own, "refused"), "the end of the problem")


@pytest.mark.parametrize("name", ["state.json", ".journal", "history.jsonl"])
def test_a_directory_in_the_place_of_a_file_of_the_spool_is_waited_out(tmp_path: Path, name: str) -> None:
    """The dispatcher lives and says what is in the way; without it, it serves by itself."""
    with Served(tmp_path / "spool") as spool:
        (spool.root / name).mkdir()
        spool.drop("patient", "true")
        spool.begin()
        wait_for(lambda: name in spool.said(), what="what is in the way")
        assert spool.lives()
        (spool.root / name).rmdir()
        spool.wait_done("patient")


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
    """Put the directories that links stand for back, at once: the dispatcher sees nothing in between."""
    dispatcher = psutil.Process(spool.process.pid)
    dispatcher.suspend()
    try:
        wait_for(lambda: dispatcher.status() == psutil.STATUS_STOPPED, what="the dispatcher stands still")
        for aside in [*spool.root.glob("jobs/*.aside"), *spool.root.glob("jobs/forger*/*.aside")]:
            link = aside.with_suffix("")
            assert link.is_symlink()
            link.unlink()
            aside.rename(link)
    finally:
        dispatcher.resume()


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
