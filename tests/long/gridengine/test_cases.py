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


def test_what_happens_to_jobs_that_wait_is_known(site: Site, sge: GridEngine) -> None:
    """`hqw` is told, and no room that is lacking; `Eqw`, which keeps a job for ever, is cancelled there.

    One that is deleted is in no accounting: spool has seen it wait, and then as a zombie.
    """
    spool = site.spool
    sge.command("qmod", "-d", "main.q")
    for name in ("held", "broken", "deleted"):
        spool.drop(name, "true")
    ids = {name: site.id(name) for name in ("held", "broken", "deleted")}
    assert sge.state(ids["deleted"]) == "qw"
    sge.command("qhold", ids["held"])
    sge.command("qalter", "-o", "/nonexistent/log", ids["broken"])
    wait_for(lambda: spool.reason("deleted").endswith("qw"), what="a look that has it waiting")  # type: ignore[attr-defined]
    assert spool.places("deleted") == ["running"]
    sge.command("qdel", ids["deleted"])
    sge.command("qmod", "-e", "main.q")
    spool.wait_reason("held", "hqw")  # type: ignore[attr-defined]
    sge.command("qrls", ids["held"])
    spool.wait_done("held", "deleted")
    assert (spool.outcome("held"), spool.outcome("deleted")) == ("finished", "cancelled")
    spool.until(lambda: "running" not in spool.places("broken") or spool.runs("broken")[-1] > 1, "the end of it")
    wait_for(lambda: not sge.state(ids["broken"]), what="the end of the job there")


def test_without_a_parallel_environment_such_a_job_is_held_with_what_to_write(engine_site: Site) -> None:
    """It is not submitted."""
    engine_site.spool.start()
    config = engine_site.spool.root / "config.toml"
    config.write_text(config.read_text().replace('pe = "smp"\n', ""))
    engine_site.spool.looked()
    engine_site.spool.drop("x", "true", cpus=3)
    engine_site.spool.wait_place("x", "held")
    assert 'write pe = "NAME" in [sge]' in (engine_site.spool.root / "held" / "x.toml.reason").read_text()


def test_resources_are_requested(engine_site: Site, sge: GridEngine) -> None:
    """Memory, GPUs, the safety net of the time limit, and further options; also memory by the peaks of earlier runs."""
    sge.command("qmod", "-d", "main.q")
    remember(engine_site.spool, "y_1", 300)
    engine_site.spool.start()
    engine_site.spool.drop("x", "true", memory="10M", gpus=2, time_limit="10m", executor_options=["-p -5"])
    engine_site.spool.drop("y_2", "true", memory="auto")
    asked = sge.command("qstat", "-j", engine_site.id("x")).stdout
    (requests,) = [line.split()[-1] for line in asked.splitlines() if line.startswith("hard resource_list")]
    assert set(requests.split(",")) == {"mem_free=10M", "gpu=2", "h_rt=660"}
    assert "priority:                   -5" in asked
    assert "mem_free=384M" in sge.command("qstat", "-j", engine_site.id("y_2")).stdout


def test_what_a_job_is_like_reaches_it(site: Site) -> None:
    """More CPUs are slots on one host; lines that look like options are none; a name may have all that names have."""
    name = f"a.B_c-{'x' * 90}"
    site.spool.drop("wide", "echo $NSLOTS $SPOOL_CPUS", cpus=3)
    site.spool.drop("script", "#$ -q nowhere.q\n#$ -N other\necho hi")
    site.spool.drop(name, "true")
    site.spool.wait_done("wide", "script", name)
    assert (site.spool.log("wide"), site.spool.log("script")) == ("3 3\n", "hi\n")
    assert site.spool.outcome("script") == site.spool.outcome(name) == "finished"


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
