"""Notifications and metrics of a real dispatcher, to real receivers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from receivers import HOST, MailServer, WebServer
from served import Served
from support import wait_for

pytestmark = pytest.mark.usefixtures("no_proxy")


def configure(served: Served, text: str) -> None:
    """Write the configuration as its owner would."""
    path = served.root / "config.toml"
    path.write_text(f'cpus = 4\nlook_every = "1h"\n{text}')
    path.chmod(0o600)


def events(web: WebServer, job: str) -> list[str]:
    """Return what was told of a job."""
    return [document["event"] for document in web.documents if document.get("job") == job]


def test_a_job_tells_a_contact_of_the_configuration(served: Served, web: WebServer) -> None:
    """`notify = "me"` in the job file is enough; the receiver has the run, its outcome and its reason."""
    configure(served, f'[contacts]\nme = "http://{HOST}:{web.port}/me?+X-Token=s3cr3t-t0ken"\n')
    served.start()
    served.drop("train", "echo bye; exit 3", notify={"to": ["me"], "on": ["started", "ended"], "log_lines": 5})
    served.drop("quiet", "true")
    wait_for(lambda: "failed" in events(web, "train"))
    (document,) = [one for one in web.documents if one["event"] == "failed"]
    assert (document["job"], document["run"], document["outcome"], document["exit_code"]) == ("train", 1, "failed", 3)
    assert "bye" in document["message"]
    assert web.requests[0][1]["X-Token"] == "s3cr3t-t0ken"
    assert set(events(web, "train")) == {"started", "failed"}
    assert events(web, "quiet") == []
    assert "s3cr3t" not in served.said()
    assert served.stop() == 0
    for path in served.root.rglob("*"):
        if path.is_file() and path.name != "config.toml" and b"s3cr3t" in path.read_bytes():
            pytest.fail(f"{path} has the secret")


def test_a_dead_mail_server_delays_no_job_and_hears_of_all_when_it_is_back(
    served: Served, mail: MailServer, web: WebServer
) -> None:
    """Jobs run and web hooks are told while mails wait; a new dispatcher sends what the old one could not."""
    mail.mode = "stalls"
    configure(
        served,
        f'[[notify]]\nto = "mailto://{HOST}:{mail.port}?from=spool@example.org&to=bob@example.org"\n'
        f'on = "failed"\n[[notify]]\nto = "http://{HOST}:{web.port}/"\n',
    )
    served.start()
    for number in range(5):
        served.drop(f"bad-{number}", "exit 1")
    wait_for(lambda: len(web.documents) == 5 and mail.tries)
    assert not mail.mails
    served.kill()
    mail.mode = "well"
    mail.over.set()
    served.start()
    wait_for(lambda: all(f"bad-{number}" in _text(mail) for number in range(5)))
    assert {document["job"] for document in web.documents} == {f"bad-{number}" for number in range(5)}
    assert len({document["id"] for document in web.documents}) == 5


def _text(mail: MailServer) -> str:
    return "\n".join(f"{one['Subject']}\n{one.get_content()}" for one in mail.mails)


def test_metrics_follow_the_spool(served: Served, tmp_path: Path) -> None:
    """The file is there soon after the dispatcher, and says at its end what has happened, and that nobody serves."""
    out = tmp_path / "spool.prom"
    configure(served, f'metrics = "{out}"\n')
    served.start()
    wait_for(lambda: out.exists() and "spool_dispatcher_up" in out.read_text())
    assert out.stat().st_mode & 0o777 == 0o644
    served.drop("good", "true")
    served.drop("bad", "exit 1", retry={"max": 1})
    wait_for(lambda: served.places("good") == ["done"] and served.places("bad") == ["done"])
    assert served.stop() == 0
    wait_for(lambda: f'spool_dispatcher_up{{spool="{served.root}"}} 0.0' in out.read_text())
    text = out.read_text()
    spool = f'spool="{served.root}"'
    for line in (
        f"spool_submissions_total{{{spool}}} 2.0",
        f'spool_job_outcomes_total{{outcome="finished",{spool}}} 1.0',
        f'spool_job_outcomes_total{{outcome="failed",{spool}}} 1.0',
        f'spool_retries_total{{kind="retry",{spool}}} 1.0',
        f'spool_run_duration_seconds_count{{outcome="failed",{spool}}} 2.0',
        f"spool_job_wait_seconds_count{{{spool}}} 2.0",
        f"spool_errors_total{{{spool}}} 0.0",
    ):
        assert line in _sorted_labels(text), line
    passes = json.loads((served.root / "state.json").read_text())["passes"]
    assert passes["count"] == sum(passes["counts"]) > 0


def _sorted_labels(text: str) -> str:
    """Return the series with their labels in the order of the alphabet."""
    lines = []
    for line in text.splitlines():
        name, brace, rest = line.partition("{")
        labels, _, value = rest.rpartition("}")
        lines.append(f"{name}{{{','.join(sorted(labels.split(',')))}}}{value}" if brace else line)
    return "\n".join(lines)
