"""Notifications of a real dispatcher, to real receivers."""

from __future__ import annotations

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
