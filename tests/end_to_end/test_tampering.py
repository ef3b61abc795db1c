"""Jobs that damage their own records: each harms itself alone, is told, and ends as it should once that is mended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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


def test_a_task_that_damages_its_array_harms_that_alone(plain: Served) -> None:
    """With a metadir that takes no record the array is told of, the next job runs, and mended it finishes."""
    plain.drop("swept", 'chmod 500 "$SPOOL_DIR/jobs/swept/1"', array="0-1")
    plain.until(lambda: _told(plain, "jobs/swept/1/"), "the problem")
    plain.completes("beside-an-array", "true")
    mend(plain.root, "chmod 700 jobs/NAME/1", "swept")
    plain.wait_done("swept")
    assert plain.outcome("swept") == "finished"


def test_a_reservation_that_takes_no_complaint_is_told_of_and_stops_nothing(own: Served) -> None:
    """With a directory in the place of its `.error` file it is a problem of `state.json`; without, the file appears."""
    reservations = own.root / "reservations"
    (reservations / "bad.toml.error").mkdir()
    (reservations / "bad.toml").write_text("nonsense = 1\n")
    own.until(lambda: _told(own, "reservations/bad.toml.error"), "the problem")
    own.completes("beside-a-reservation", "true")
    (reservations / "bad.toml.error").rmdir()
    own.until((reservations / "bad.toml.error").is_file, "the complaint")
    (reservations / "bad.toml").unlink()
    own.until(lambda: not (reservations / "bad.toml.error").exists(), "its end")


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


def test_a_directory_of_somebody_else_in_jobs_costs_its_name_alone(plain: Served) -> None:
    """What may not be entered in `jobs/` keeps a job of its name waiting, with the reason, and no other."""
    foreign = plain.root / "jobs" / "foreign"
    foreign.mkdir()
    foreign.chmod(0)
    plain.drop("foreign", "true")
    plain.wait_reason("foreign", "jobs/foreign")
    plain.completes("beside-foreign", "true")
    foreign.chmod(0o700)
    plain.wait_done("foreign")


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
