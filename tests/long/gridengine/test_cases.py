"""What only a real Grid Engine shows: its states, its refusals, its accounting, and its crashes."""

from __future__ import annotations

import pytest

from long.gridengine.cluster import GridEngine
from served import remember
from spool.testing.engine_claims import Site
from support import wait_for


@pytest.fixture
def site(engine_site: Site) -> Site:
    """Give a spool that is served."""
    engine_site.spool.start()
    return engine_site


def test_a_job_waits_while_its_queue_is_disabled(site: Site, sge: GridEngine) -> None:
    """It is in Grid Engine, which accepts it, and begins when the queue is enabled."""
    sge.command("qmod", "-d", "main.q")
    site.spool.drop("x", "true")
    job = site.id("x")
    wait_for(lambda: sge.state(job) == "qw", what="the job in its queue")
    site.spool.looked()
    assert site.spool.places("x") == ["running"]
    sge.command("qmod", "-e", "main.q")
    site.spool.wait_done("x")
    assert site.spool.outcome("x") == "finished"


def test_a_job_that_grid_engine_cannot_start_does_not_stay_there(site: Site, sge: GridEngine) -> None:
    """`Eqw` keeps a job for ever: it is cancelled there, and spool says why."""
    sge.command("qmod", "-d", "main.q")
    site.spool.drop("x", "true")
    job = site.id("x")
    sge.command("qalter", "-o", "/nonexistent/log", job)
    sge.command("qmod", "-e", "main.q")
    site.spool.until(lambda: "running" not in site.spool.places("x") or site.spool.runs("x")[-1] > 1, "the end of it")
    wait_for(lambda: not sge.state(job), what="the end of the job there")


def test_a_hold_keeps_a_job_and_spool_says_so(site: Site, sge: GridEngine) -> None:
    """`hqw` is not room that is lacking."""
    sge.command("qmod", "-d", "main.q")
    site.spool.drop("x", "true")
    job = site.id("x")
    sge.command("qhold", job)
    sge.command("qmod", "-e", "main.q")
    site.spool.wait_reason("x", "hqw")  # type: ignore[attr-defined]
    sge.command("qrls", job)
    site.spool.wait_done("x")
    assert site.spool.outcome("x") == "finished"


def test_jobs_go_on_while_the_master_is_dead_and_their_ends_are_known_afterwards(site: Site, sge: GridEngine) -> None:
    """One ends meanwhile, with its exit code; the other goes on."""
    site.spool.drop("ends", "echo up; until [ -e go ]; do sleep 0.1; done; exit 5")
    site.spool.drop("stays", "echo up; until [ -e later ]; do sleep 0.1; done")
    site.spool.says("ends", "up")
    site.spool.says("stays", "up")
    sge.kill_master()
    (site.spool.root.parent / "go").touch()
    site.spool.until(lambda: site.spool.record("ends", "rc"), "its exit code")
    site.spool.until(lambda: "does not answer" in site.spool.said(), "the silence")
    sge.start_master()
    site.spool.wait_done("ends")
    (site.spool.root.parent / "later").touch()
    site.spool.wait_done("stays")
    assert (site.spool.outcome("ends"), site.spool.outcome("stays")) == ("failed", "finished")
    assert site.spool.runs("ends") == site.spool.runs("stays") == [1]


def test_a_job_that_is_deleted_before_it_begins_is_cancelled(site: Site, sge: GridEngine) -> None:
    """It is in no accounting: spool has seen it wait, and then as a zombie."""
    sge.command("qmod", "-d", "main.q")
    site.spool.drop("x", "true")
    job = site.id("x")
    wait_for(lambda: site.spool.reason("x").endswith("qw"), what="a look that has it waiting")  # type: ignore[attr-defined]
    sge.command("qdel", job)
    site.spool.wait_done("x")
    assert site.spool.outcome("x") == "cancelled"


def test_more_cpus_are_slots_of_the_parallel_environment(site: Site) -> None:
    """The job has all of them on one host."""
    site.spool.drop("x", "echo $NSLOTS $SPOOL_CPUS", cpus=3)
    site.spool.wait_done("x")
    assert site.spool.log("x") == "3 3\n"


def test_without_a_parallel_environment_such_a_job_is_held_with_what_to_write(engine_site: Site) -> None:
    """It is not submitted."""
    engine_site.spool.start()
    config = engine_site.spool.root / "config.toml"
    config.write_text(config.read_text().replace('pe = "smp"\n', ""))
    engine_site.spool.looked()
    engine_site.spool.drop("x", "true", cpus=3)
    engine_site.spool.wait_place("x", "held")
    assert 'write pe = "NAME" in [sge]' in (engine_site.spool.root / "held" / "x.toml.reason").read_text()


def test_resources_are_requested(site: Site, sge: GridEngine) -> None:
    """Memory, GPUs, the safety net of the time limit, and further options."""
    sge.command("qmod", "-d", "main.q")
    site.spool.drop("x", "true", memory="10M", gpus=2, time_limit="10m", executor_options=["-p -5"])
    asked = sge.command("qstat", "-j", site.id("x")).stdout
    (requests,) = [line.split()[-1] for line in asked.splitlines() if line.startswith("hard resource_list")]
    assert set(requests.split(",")) == {"mem_free=10M", "gpu=2", "h_rt=660"}
    assert "priority:                   -5" in asked


def test_memory_that_spool_works_out_is_asked_for(engine_site: Site, sge: GridEngine) -> None:
    """By the peaks of earlier runs, as a number in the file would be."""
    sge.command("qmod", "-d", "main.q")
    remember(engine_site.spool, "x_1", 300)
    engine_site.spool.start()
    engine_site.spool.drop("x_2", "true", memory="auto")
    asked = sge.command("qstat", "-j", engine_site.id("x_2")).stdout
    assert "mem_free=384M" in asked


def test_lines_of_a_script_that_look_like_options_are_not(site: Site) -> None:
    """A command may come from a script for Grid Engine, whose `#$` spool has read or not."""
    site.spool.drop("x", "#$ -q nowhere.q\n#$ -N other\necho hi")
    site.spool.wait_done("x")
    assert (site.spool.outcome("x"), site.spool.log("x")) == ("finished", "hi\n")


def test_a_name_may_have_all_that_names_have(site: Site) -> None:
    """It is part of the name in Grid Engine, by which the job is found again."""
    name = f"a.B_c-{'x' * 90}"
    site.spool.drop(name, "true")
    site.spool.wait_done(name)
    assert site.spool.outcome(name) == "finished"


def test_a_kill_that_no_dispatcher_has_seen_is_known_from_the_accounting(site: Site, sge: GridEngine) -> None:
    """No dispatcher was there when it happened."""
    site.spool.drop("x", "echo up; sleep 600")
    site.spool.says("x", "up")
    job = site.id("x")
    site.spool.kill()
    sge.command("qdel", job)
    wait_for(lambda: not sge.state(job), what="the end of the job")
    site.spool.start()
    site.spool.wait_done("x")
    assert site.spool.outcome("x") == "cancelled"
