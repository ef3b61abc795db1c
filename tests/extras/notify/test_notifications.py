"""Notifications, to a real mail server, web server and shell; what waits for one receiver, and what is shown of it."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from email import message_from_string, policy
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from receivers import HOST, MailServer, WebServer
from served import HOUR_NS, LOOKS, Served
from spool import __version__
from spool.core.model import Event, EventName, Result, State
from spool.extras.notify import sending
from spool.extras.notify.sending import (
    Message,
    Notifier,
    Patience,
    SendQueue,
    UndeliveredError,
    by_command,
    last_lines,
    masked,
    scrubbed,
)
from spool.extras.notify.settings import Notifications, Notify, NotifyRule
from spool.formats.config import Config
from support import PATIENCE_S, left_behind, processes, wait_for

SECRET = "s3cr3t-t0ken-of-mine"
QUICK = Patience(first_s=0.01, longest_s=0.05, tries=1_000_000, for_s=PATIENCE_S)
RESULT = Result(
    "train", 3, 1, State.FAILED, "exit code 3", submitted_at_ns=0, started_at_ns=0, ended_at_ns=0, exit_code=3
)
FAILED = Event(
    id="train/3/failed", name=EventName.FAILED, at_ns=1_700_000_000_000_000_000, host="box", version=__version__,
    spool_dir="/s", reason="exit code 3", job="train", run=3, user="bob", project="vision", result=RESULT,
)  # fmt: skip


def configured(**keys: Any) -> Config:
    """Return a configuration with these keys of notifications."""
    return Config(parts=(("notify", Notifications(**keys)),))


class Told:
    """A notifier with its configuration, and how many events are done."""

    def __init__(self, root: Path, config: Config, patience: Patience = QUICK) -> None:
        self.config = config
        self.notifier = Notifier(str(root), lambda: self.config, patience=patience)
        self.done: list[str] = []

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *_: object) -> None:
        self.notifier.close()

    def hear(self, event: Event) -> None:
        self.notifier.hear(event, lambda: self.done.append(event.id))

    def of(self, event: Event, *addresses: str, log_lines: int = 0) -> Event:
        """Have the job of *event* name these addresses, and hear it."""
        event = replace(event, wishes={"notify": Notify(addresses, ("ended",), log_lines)})
        self.hear(event)
        return event


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    """Return a notifier without a configuration."""
    with Told(tmp_path, Config()) as made:
        yield made


@pytest.fixture
def hook(web: WebServer) -> str:
    """Return the address of a web hook."""
    return f"http://{HOST}:{web.port}/hook"


@pytest.fixture
def mailbox(mail: MailServer) -> str:
    """Return the address of a mailbox."""
    return f"mailto://{HOST}:{mail.port}?from=spool@example.org&to=bob@example.org"


def text_of(mail: EmailMessage) -> str:
    """Return the plain text of a mail."""
    body = mail.get_body(("plain",))
    return str(body.get_content()).replace("\r\n", "\n")


def test_a_mail_is_one_that_a_person_likes_to_read(told: Told, mail: MailServer, mailbox: str, tmp_path: Path) -> None:
    """By a real mail server: the subject says it all, the text has the facts and the end of the job's log."""
    (tmp_path / "log").write_text("one\n10%\r20%\rtwo\n\x1b[31mthree\x1b[0m\n")
    told.of(replace(FAILED, metadir=str(tmp_path)), mailbox, log_lines=2)
    wait_for(lambda: told.done)
    (sent,) = mail.mails
    assert sent["Subject"] == "spool: train has failed: exit code 3"
    assert mail.to == ["<bob@example.org>"]
    assert "user: bob, project vision\nhost: box\ntime: 2023-11-14 22:13:20 UTC\nexit code: 3\n" in text_of(sent)
    assert text_of(sent).rstrip().endswith("The end of its log:\n\ntwo\nthree")
    assert sent.get_content_type() == "text/plain"


def test_a_web_hook_gets_the_documented_object(told: Told, web: WebServer) -> None:
    """The body is the event as JSON with a text for people; headers, query and password of the address go along."""
    told.of(FAILED, f"http://me:{SECRET}@{HOST}:{web.port}/hook/a%20b?channel=1&+X-Token=a%20b")
    wait_for(lambda: told.done)
    ((path, headers, document),) = web.requests
    assert path == "/hook/a%20b?channel=1"
    assert headers["Content-Type"] == "application/json"
    assert headers["X-Token"] == "a b"
    assert headers["Authorization"].startswith("Basic ")
    assert document["title"] == "spool: train has failed: exit code 3"
    assert document["message"].startswith("run: 3\nuser: bob")
    wanted = "id event time host spool_version spool_dir reason job run outcome exit_code user project title message"
    assert set(wanted.split()) <= set(document)
    assert {"type", "version", "attachments"}.isdisjoint(document)
    assert SECRET not in json.dumps(document)


def test_a_web_hook_that_fails_and_stalls_is_told_once_when_it_recovers(told: Told, web: WebServer, hook: str) -> None:
    """5xx, 4xx, redirects and silence are tried again, with the same id, until one of the tries is taken."""
    web.answers = [500, "stall", 429, 302]
    told.of(FAILED, f"{hook}?rto=0.2")
    wait_for(lambda: told.done)
    assert [document["id"] for document in web.documents] == [FAILED.id] * 5
    assert {path.partition("?")[0] for path, _, _ in web.requests} == {"/hook"}


def test_a_letter_that_a_receiver_chokes_on_delays_others_only_so_long(told: Told, web: WebServer, hook: str) -> None:
    """After three tries those behind it go first; it is tried on, and arrives in the end."""
    web.chokes_on = "poison"
    told.of(replace(FAILED, id="poison"), hook)
    told.of(replace(FAILED, id="other"), hook)
    wait_for(lambda: told.done == ["other"])
    assert [document["id"] for document in web.documents][:4] == ["poison"] * 3 + ["other"]
    web.chokes_on = ""
    wait_for(lambda: told.done == ["other", "poison"])


@pytest.mark.parametrize("patience", [replace(QUICK, tries=3), replace(QUICK, for_s=0.2)])
def test_a_letter_is_given_up_after_so_many_tries_or_so_long(
    tmp_path: Path, web: WebServer, hook: str, caplog: pytest.LogCaptureFixture, patience: Patience
) -> None:
    """The event is done then, with a line in the log: nobody wants yesterday's news of a receiver that was away."""
    web.answers = [500] * 1000
    with Told(tmp_path, Config(), patience) as told:
        told.of(FAILED, hook)
        wait_for(lambda: told.done)
    assert len(web.requests) == 3 or patience.tries > 3
    assert "gave up notifying" in caplog.text


def test_an_event_that_is_told_again_is_sent_once(told: Told, web: WebServer, hook: str) -> None:
    """A repeat is known by its id, also while the first is on its way; each is done."""
    web.answers = [500, 500]
    for _ in range(3):
        told.of(FAILED, hook)
    wait_for(lambda: len(told.done) == 3)
    told.of(FAILED, hook)
    assert len(told.done) == 4
    assert len(web.requests) == 3


def test_the_configured_notifier_sends_to_what_nothing_else_understands(told: Told, tmp_path: Path) -> None:
    """The shell text has the address as $1 and the event as $2, and the message on its standard input."""
    told.config = configured(notifier=f'{{ echo "$1 $2"; cat; }} > {tmp_path}/sent')
    told.of(FAILED, "bob@example.org")
    wait_for(lambda: told.done)
    lines = (tmp_path / "sent").read_text().splitlines()
    assert lines[:4] == ["bob@example.org failed", "spool: train has failed: exit code 3", "", "run: 3"]


def test_contacts_and_rules_of_the_configuration(told: Told, web: WebServer) -> None:
    """Jobs name a contact, contacts may name others, and rules tell of everybody's jobs; each address is told once."""
    hook = f"http://{HOST}:{web.port}"
    told.config = configured(
        contacts={"bob": (f"{hook}/bob",), "team": ("bob", f"{hook}/team"), "loop": ("loop",)},
        rules=(
            NotifyRule(("team",), on=("failed",), users=("bob",)),
            NotifyRule((f"{hook}/never",), projects=("nlp",)),
            NotifyRule((f"{hook}/gpus",), on=("gpu_free",)),
        ),
    )
    told.of(FAILED, "bob", "loop")
    told.hear(replace(FAILED, id="g", name=EventName.GPU_FREE, job=None, user=None, gpu="GPU-a", result=None))
    wait_for(lambda: len(told.done) == 2)
    assert sorted(path for path, _, _ in web.requests) == ["/bob", "/gpus", "/team"]


def test_what_nobody_asked_for_is_done_at_once(told: Told) -> None:
    """An event without an addressee needs not be told again."""
    told.hear(FAILED)
    assert told.done == [FAILED.id]
    assert told.notifier.wants == set(EventName) - {EventName.POLLING}
    assert told.notifier.tick() is None


@pytest.mark.usefixtures("no_proxy")
@pytest.mark.parametrize(
    "address",
    [
        f"nosuch://{SECRET}",
        f"mailto://{SECRET}",
        f"discord://{SECRET}",
        f"http://[{SECRET}",
        f"http://:{SECRET}@",
        f"mailto:bob:{SECRET}@example.org",
        f"http://{HOST}:1/{SECRET}?+X-Token={SECRET}",
        f"slack://{SECRET}/{SECRET}/{SECRET}",
    ],
)
def test_no_secret_of_an_address_is_logged(
    tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever is wrong with an address, the log says what, names it by its scheme, and has no part of its secret."""
    caplog.set_level(logging.DEBUG)
    with Told(tmp_path, Config(), replace(QUICK, tries=2)) as told:
        told.of(FAILED, address)
        wait_for(lambda: told.done)
    said = caplog.text + "".join(capfd.readouterr())
    assert "cannot notify" in said or "gave up notifying" in said
    assert SECRET not in said
    assert address.partition(":")[0][:3] in said


def test_without_apprise_mail_works_and_the_rest_says_what_to_install(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Apprise is an extra: a plain mail address needs none of it, only the system's `sendmail`."""
    monkeypatch.setitem(sys.modules, "apprise", None)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "sendmail").write_text(f'#!/bin/sh\n{{ echo "$@"; cat; }} > {tmp_path}/sent\n')
    (tmp_path / "sendmail").chmod(0o700)
    told.of(FAILED, "bob@example.org", "mailto://example.org")
    wait_for(lambda: told.done)
    arguments, _, mail = (tmp_path / "sent").read_text().partition("\n")
    assert arguments == "-i -- bob@example.org"
    parsed = message_from_string(mail, policy=policy.default)
    assert (parsed["To"], parsed["Subject"]) == ("bob@example.org", "spool: train has failed: exit code 3")
    assert text_of(parsed).startswith("run: 3\nuser: bob")
    assert "pip install 'spool-scheduler[notify]'" in caplog.text


def test_close_sends_what_was_never_tried_and_ends(tmp_path: Path, hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the dispatcher has stopped is told, although there is nobody to tell it after that."""
    monkeypatch.setattr(sending, "_CLOSE_S", PATIENCE_S)
    with Told(tmp_path, Config()) as told:
        told.of(FAILED, hook)
    assert told.done
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("to ")]


def test_the_end_of_a_log_is_plain_text(tmp_path: Path) -> None:
    """No escapes, no control characters, of a progress bar its last state, and no line without an end.

    A job may put a pipe or a link in its place, and that hangs nobody.
    """
    assert last_lines(str(tmp_path), 5) == ""
    (tmp_path / "log").write_bytes(b"a\nb\n\x1b]0;title\x07\x1b[1mbold\x1b[0m\x00\n10%\r99%\r\nx\xff" + b"y" * 1000)
    lines = last_lines(str(tmp_path), 3).split("\n")
    assert lines[:2] == ["bold", "99%"]
    assert lines[2].startswith("x\ufffdyyy")
    assert len(lines[2]) < 400
    assert last_lines(str(tmp_path), 0) == ""
    (tmp_path / "log").unlink()
    os.mkfifo(tmp_path / "log")
    assert last_lines(str(tmp_path), 5) == ""
    (tmp_path / "log").unlink()
    (tmp_path / "log").symlink_to("/etc/passwd")
    assert last_lines(str(tmp_path), 5) == ""


def configure(served: Served, text: str) -> None:
    """Write the configuration as its owner would."""
    path = served.root / "config.toml"
    path.write_text(f"cpus = 4\n{text}")
    path.chmod(0o600)
    served.changes[LOOKS] = HOUR_NS


def told_of(web: WebServer, job: str) -> list[str]:
    """Return what was told of a job."""
    return [document["event"] for document in web.documents if document.get("job") == job]


@pytest.mark.usefixtures("no_proxy")
def test_a_job_tells_a_contact_of_the_configuration(served: Served, web: WebServer) -> None:
    """`notify = "me"` in the job file is enough; the receiver has the run, its outcome and its reason."""
    configure(served, f'[contacts]\nme = "http://{HOST}:{web.port}/me?+X-Token=s3cr3t-t0ken"\n')
    served.start()
    served.drop("train", "echo bye; exit 3", notify={"to": ["me"], "on": ["started", "ended"], "log_lines": 5})
    served.drop("quiet", "true")
    wait_for(lambda: "failed" in told_of(web, "train"))
    (document,) = [one for one in web.documents if one["event"] == "failed"]
    assert (document["job"], document["run"], document["outcome"], document["exit_code"]) == ("train", 1, "failed", 3)
    assert "bye" in document["message"]
    assert web.requests[0][1]["X-Token"] == "s3cr3t-t0ken"
    assert set(told_of(web, "train")) == {"started", "failed"}
    assert told_of(web, "quiet") == []
    assert "s3cr3t" not in served.said()
    assert served.stop() == 0
    for path in served.root.rglob("*"):
        if path.is_file() and path.name != "config.toml" and b"s3cr3t" in path.read_bytes():
            pytest.fail(f"{path} has the secret")


@pytest.mark.usefixtures("no_proxy")
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
    wait_for(lambda: all(f"bad-{number}" in texts_of(mail) for number in range(5)))
    assert {document["job"] for document in web.documents} == {f"bad-{number}" for number in range(5)}
    assert len({document["id"] for document in web.documents}) == 5


def texts_of(mail: MailServer) -> str:
    """Return all that was mailed."""
    return "\n".join(f"{one['Subject']}\n{one.get_content()}" for one in mail.mails)


# One receiver.

MOST = 100
HASTY = Patience(first_s=0.001, longest_s=0.001, tries=1_000_000, for_s=PATIENCE_S)


class Receiver:
    """Takes a message once it is `awake`, and refuses it while it is `broken`."""

    def __init__(self) -> None:
        self.awake = threading.Event()
        self.broken = False
        self.tries = 0
        self.taken: list[str] = []
        self.done: list[str] = []
        self.queue = SendQueue("receiver", self.send, HASTY)

    def send(self, message: Message) -> None:
        self.awake.wait(PATIENCE_S)
        self.tries += 1
        if self.broken:
            raise UndeliveredError("it is broken")
        self.taken.append(message.title)

    def put(self, *numbers: int) -> None:
        for title in map(str, numbers):
            self.queue.put(Message("finished", title, "", {}), lambda title=title: self.done.append(title))  # type: ignore[misc]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Give a receiver that is asleep, and wakes up in the end."""
    made = Receiver()
    yield made
    made.broken = False
    made.awake.set()
    made.queue.close()


def test_a_slow_receiver_gets_everything(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    """However many wait, none is given up while none has failed, and each is sent by itself and in order."""
    receiver.put(*range(5 * MOST))
    assert receiver.done == []
    receiver.awake.set()
    wait_for(lambda: len(receiver.done) == 5 * MOST)
    assert receiver.taken == [str(number) for number in range(5 * MOST)]
    assert caplog.text == ""


def test_a_failure_or_two_cost_nothing(receiver: Receiver) -> None:
    """A receiver that is started anew has missed nothing, however much came meanwhile."""
    receiver.queue = SendQueue("receiver", receiver.send, Patience(first_s=60.0))
    receiver.broken = True
    receiver.awake.set()
    receiver.put(0)
    wait_for(lambda: receiver.tries)
    receiver.put(*range(1, 5 * MOST))
    assert receiver.done == []


def test_a_command_that_fails_or_hangs_is_cut_off_and_tried_again(tmp_path: Path) -> None:
    """Its exit code and its last words are the reason; a command that hangs is killed with all its group."""
    message, before = Message("failed", "t", "b", {}), processes()
    with pytest.raises(UndeliveredError, match="is 3: no such user"):
        by_command("bob", "yes | head -c 3000000 >&2; echo no such user >&2; exit 3", message)
    mark = f"SPOOL_TEST={tmp_path}"
    with pytest.raises(UndeliveredError, match=r"within 1s"):
        by_command("bob", f"{mark} sleep 600; :", message, limit_s=1)
    wait_for(lambda: not left_behind(processes() - before, mark.encode()))


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("me", "me"),
        ("bob@example.org", "bob@example.org"),
        ("mailto:bob:pw@example.org", "mai..."),
        ("mailto://bob:pw@example.org", "mailto://..."),
        ("tgram://token/chat", "tgram://..."),
        ("https://bob:pw@example.org:8443/x?y=1", "https://example.org:8443/..."),
        ("https://bob:p/w@example.org", "https://..."),
        ("http://[bad", "http://..."),
    ],
)
def test_an_address_is_shown_without_what_could_be_a_secret(address: str, shown: str) -> None:
    """Its scheme, and of a web hook the host."""
    assert masked(address) == shown


def test_what_others_say_is_scrubbed_of_the_address() -> None:
    """Each of its parts, as it is and decoded, and control characters."""
    address = "https://bob:p%40ssword@example.org/secretpath?key=secretkey"
    said = "refused\n p@ssword, p%40ssword, secretpath and secretkey of https://bob:p%40ssword@example.org/"
    words = scrubbed(said, address)
    assert words.startswith("refused  ***, ***, *** and ***")
    assert not any(secret in words for secret in ("ssword", "secret"))
