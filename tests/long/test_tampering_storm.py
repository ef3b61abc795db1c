"""Jobs that damage their own records among many that do not, while dispatcher after dispatcher is killed."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from end_to_end.test_tampering import DAMAGES, PLAIN_USER, mend
from served import Served, marked

ORDINARY = int(os.environ.get("STORM_ORDINARY", "200"))
KILLS = int(os.environ.get("STORM_KILLS", "8"))
SEED = int(os.environ.get("STORM_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)


def _submit(spool: Served, ledger: Path, chosen: random.Random) -> dict[str, str]:
    """Drop every job, in no order; return the tampering ones and what each does."""
    tampering = {f"bad-{kind}": kind for kind in DAMAGES}
    names = [*(f"good-{number}" for number in range(ORDINARY)), *tampering]
    chosen.shuffle(names)
    for name in names:
        if name in tampering:
            command = f"{DAMAGES[tampering[name]].done}; sleep 1000"
            spool.drop(name, command, time_limit="1s", kill_grace="1s", requeue=False)
        else:
            spool.drop(name, f"echo {name} >> {ledger}", requeue=False)
    return tampering


@pytest.mark.timeout(600)
def test_a_storm_with_jobs_that_tamper_harms_no_ordinary_one(tmp_path: Path) -> None:
    """Every ordinary job runs once and finishes; every tampering one is told of, and ends as it should once mended."""
    if PLAIN_USER and shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    chosen = random.Random(SEED)
    ledger = tmp_path / "ledger"
    with Served(tmp_path / "spool") as spool:
        (spool.root / "config.toml").write_text("cpus = 4\n")
        tampering = _submit(spool, ledger, chosen)
        for _ in range(KILLS):
            spool.start(prefix=PLAIN_USER)
            ended = len(spool.history()) + chosen.randrange(1, 1 + ORDINARY // KILLS)
            spool.until(lambda ended=ended: len(spool.history()) >= min(ended, ORDINARY), f"ends, seed {SEED}")
            spool.kill()
        spool.start(prefix=PLAIN_USER)
        spool.wait_done(*(f"good-{number}" for number in range(ORDINARY)))
        outcomes = {line["job"]: line["outcome"] for line in spool.history()}
        assert all(outcomes[f"good-{number}"] == "finished" for number in range(ORDINARY)), f"seed {SEED}"
        ran = Counter(ledger.read_text().splitlines())
        assert ran == Counter(f"good-{number}" for number in range(ORDINARY)), f"seed {SEED}"
        spool.until(lambda: not marked(spool.root), f"the stops, seed {SEED}")
        for name in tampering:
            spool.until(
                lambda name=name: any(name in problem for problem in spool.state()["problems"]), f"{name} is told of"
            )
        for name, kind in tampering.items():
            mend(spool.root, DAMAGES[kind].mend, name)
        spool.until(lambda: len(spool.history()) == ORDINARY + len(tampering), f"the last ends, seed {SEED}")
        outcomes = {line["job"]: line["outcome"] for line in spool.history()}
        assert {outcomes[name] for name in tampering} == {"timeout"}, f"seed {SEED}"
        assert "Traceback" not in spool.said()
