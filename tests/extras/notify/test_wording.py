"""Who is told of an event, in which words; the keys of both files for that, and what is said where it cannot work."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from calling import Command
from spool.core.errors import InvalidConfig, InvalidJob
from spool.core.model import SECOND_NS, Event, EventName, Grant, Reservation, Result, State
from spool.doctor import Level, examine
from spool.extras.notify.checks import CHECKS
from spool.extras.notify.sending import body, headline
from spool.extras.notify.settings import Notifications, Notify, NotifyRule, addressees, settings_of
from spool.formats import config, jobfile


def event(name: EventName = EventName.FAILED, **facts: Any) -> Event:
    """Return an event of the job `train-1` of bob's."""
    known = {"at_ns": 0, "job": "train-1", "run": 1, "user": "bob", "project": "vision"} | facts
    return Event(id="x", name=name, host="box", version="1", spool_dir="/s", **known)  # type: ignore[arg-type]


FREE = {"name": EventName.GPU_FREE, "job": None, "user": None, "project": None}
BOOKED = {"name": EventName.RESERVATION_STARTED, "job": None, "reservation": "demo"}


@pytest.mark.parametrize(
    ("rule", "facts", "fits"),
    [
        (NotifyRule(("a",)), {}, True),
        (NotifyRule(("a",), on=("finished",)), {}, False),
        (NotifyRule(("a",), users=("alice", "b*")), {}, True),
        (NotifyRule(("a",), users=("Bob",)), {}, False),
        (NotifyRule(("a",), projects=("vis?on",)), {}, True),
        (NotifyRule(("a",), names=("train-*",), projects=("nlp",)), {}, False),
        (NotifyRule(("a",), names=("train",)), {}, False),
        (NotifyRule(("a",), on=("gpu_free",)), FREE, True),
        (NotifyRule(("a",), on=("gpu_free",), users=("*",)), FREE, False),
        (NotifyRule(("a",), on=("reservation_started",), names=("demo",)), BOOKED, True),
    ],
)
def test_a_rule_fits_where_every_filter_does(rule: NotifyRule, facts: dict[str, Any], fits: bool) -> None:
    """One pattern of each filter has to fit; what has no user, as a GPU that is free, fits no filter by user."""
    assert rule.fits(event(**facts)) is fits


def test_a_message_about_a_reservation_says_what_is_reserved_for_whom_and_when() -> None:
    """Also when it is cancelled, and its file is gone."""
    one = Reservation("demo", "alice", None, 0, 3600 * SECOND_NS, gpu_indices=(0, 2))
    about = event(EventName.RESERVATION_CANCELLED, job=None, reservation="demo", reserved=one, reason="by alice")
    assert headline(about) == "reservation demo was cancelled: by alice"
    assert "reserved: GPU 0, 2 for alice, 1970-01-01" in body(about)


def test_each_address_is_told_once() -> None:
    """A job's own wish and the rules come together, with the most lines of log that anybody asked for."""
    wish = Notify(("me", "team"), ("ended",), log_lines=5)
    rules = [NotifyRule(("team", "ops"), on=("failed",), log_lines=9), NotifyRule(("never",), users=("alice",))]
    assert addressees(event(wishes={"notify": wish}), rules) == {"me": 5, "team": 9, "ops": 9}
    assert addressees(event(EventName.STARTED, wishes={"notify": wish}), rules) == {}


MINUTE = 60 * SECOND_NS
RESULT = Result(
    job="train",
    run=3,
    attempt=2,
    outcome=State.FAILED,
    reason="exit code 137",
    submitted_at_ns=0,
    started_at_ns=10 * MINUTE,
    ended_at_ns=95 * MINUTE,
    exit_code=137,
    peak_memory_bytes=3 << 30,
    cpu_time_ns=170 * MINUTE,
    grant=Grant(
        4,
        4 << 30,
        ("GPU-a", "GPU-b"),
        (0, 2),
        resources=(("licence", 1), ("tpu", 2)),
        resource_indices=(("tpu", (0, 3)),),
    ),
)
ABOUT = {"job": "train", "run": 3, "attempt": 2, "result": RESULT, "metadir": "/s/jobs/train/3"}
FAILED = event(at_ns=95 * MINUTE, reason="exit code 137", **ABOUT)


def test_the_headline_says_what_happened_to_what() -> None:
    """One line is enough on a telephone: the job, what became of it, and why."""
    assert headline(FAILED) == "train has failed: exit code 137"
    cancelled = replace(FAILED, name=EventName.CANCELLED, reason="cancelled by bob: no more room")
    assert headline(cancelled) == "train was cancelled by bob: no more room"
    assert headline(replace(FAILED, name=EventName.FINISHED, reason="exit code 0")) == "train has finished"
    there = replace(FAILED, name=EventName.SUBMITTED, reason="", executor="far", result=None)
    assert headline(there) == "train is on its way to far"
    there = replace(there, name=EventName.HANDED_OVER, reason="far has it as job 4711")
    assert headline(there) == "train was handed over: far has it as job 4711"


def test_every_event_has_its_words() -> None:
    """No event is told by its bare name, whatever it is about."""
    for name in EventName:
        for about in ({"job": "j"}, {"reservation": "r"}, {"gpu": "GPU-a"}, {}):
            told = event(name, **{"job": None, "run": None, "user": None, "project": None} | about)
            assert len(headline(told).split()) >= 2
            assert "None" not in headline(told) + body(told)


def test_the_body_has_the_facts_a_line_each() -> None:
    """What a person would look up next: which run, how long, with how much, where, and the end of its log."""
    assert body(FAILED, "Killed") == (
        "run: 3 (attempt 2)\n"
        "user: bob, project vision\n"
        "host: box\n"
        "time: 1970-01-01 01:35:00 UTC\n"
        "exit code: 137 (signal 9)\n"
        "ran: 1h25m\n"
        "waited: 10m00s\n"
        "memory: 3 GiB of 4 GiB\n"
        "CPU time: 2h50m\n"
        "GPUs: 0, 2\n"
        "resources: licence 1, tpu 2 (0, 3)\n"
        "metadir: /s/jobs/train/3\n"
        "\nThe end of its log:\n\nKilled\n"
    )


CONFIG = """
notifier = "mail -s \\"$2\\" \\"$1\\""
[contacts]
alice = "mailto://alice:secret@mail.example.org"
team = ["https://hooks.example.org/team", "alice"]
[[notify]]
to = "team"
[[notify]]
to = ["ops@example.org"]
on = ["failed", "dispatcher_stopped", "gpu_free"]
users = "bob"
projects = ["vision", "nlp-*"]
names = ["train-*"]
log_lines = 20
"""


def wish(text: str, defaults: str = "") -> Notify:
    """Return what a job file asks for."""
    given = config.parse(f"[defaults]\n{defaults}".encode()).defaults
    found: Notify = jobfile.parse(f'command = "x"\n{text}'.encode(), name="a", defaults=given).part("notify")
    return found


def test_the_keys_of_the_configuration() -> None:
    """The command, the contacts and the rules, each with its filters."""
    on, projects = ("failed", "dispatcher_stopped", "gpu_free"), ("vision", "nlp-*")
    ops = NotifyRule(("ops@example.org",), on, 20, ("bob",), projects, ("train-*",))
    assert settings_of(config.parse(CONFIG.encode())) == Notifications(
        'mail -s "$2" "$1"',
        {"alice": ("mailto://alice:secret@mail.example.org",), "team": ("https://hooks.example.org/team", "alice")},
        (NotifyRule(("team",)), ops),
    )
    assert settings_of(config.parse(b"")) == Notifications()


def test_the_key_of_a_job_file() -> None:
    """A name stands for the table, whose defaults are those of the pages, and `[defaults]` may have it too."""
    assert wish('notify = "me"') == wish('notify = { to = ["me"], on = "ended", log_lines = 0 }') == Notify(("me",))
    assert wish('notify = { to = "me", on = ["started"], log_lines = 5 }') == Notify(("me",), ("started",), 5)
    assert wish("", 'notify = "me"') == Notify(("me",))


@pytest.mark.parametrize("tasks", ["", ", tasks = false", ", tasks = true"])
def test_an_array_can_send_its_messages_alone(tasks: str) -> None:
    """Of a thousand tasks one mail may be meant; a job that is no task says what it says."""
    key = f'notify = {{ to = "me"{tasks} }}\n'
    assert wish(f"{key}array = '0-9'") == wish(key) == Notify(("me",))
    of_task = wish(f'{key}[task]\narray = "sweep"\nindex = 3\n')
    assert addressees(event(wishes={"notify": of_task}), ()) == ({} if "false" in tasks else {"me": 0})


@pytest.mark.parametrize(
    "stated",
    [
        "['a ']", "['a', 'a']", "{ to = 'a', on = [] }", "[]", "{ to = 'a', on = ['end'] }", "{ on = 'failed' }",
        "{ to = 'a', on = 'gpu_free' }", "{ to = 'a', log_lines = 201 }",
    ],
)  # fmt: skip
def test_what_a_job_file_cannot_ask_for(stated: str) -> None:
    """Nobody, somebody twice, no event, one that is no job's, and more of the log than fits; what was meant is told."""
    with pytest.raises(InvalidJob, match='did you mean "ended"' if "end'" in stated else "notify"):
        wish(f"notify = {stated}")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        *(
            (line, "")
            for line in (
                'contacts = { me = "x " }', 'contacts = { "json://x" = "y" }', "contacts = { me = [] }",
                "contacts.me = 1", 'notify = [{ to = ["me", "me"] }]', "notify = 'me'", "notify = ['me']",
                'notify = [{ on = "failed" }]', 'notify = [{ to = "me", log_lines = -1 }]',
                'notify = [{ to = "me", on = "polling" }]',
                'defaults.notify = { to = "x@y.example", on = ["gpu_free"] }',
            )
        ),
        ('notify = [{ to = "me", on = "fialed" }]', "failed"),
        ('notify = [{ to = "me", user = "bob" }]', "notify[0].users"),
    ],
)  # fmt: skip
def test_what_a_configuration_cannot_say(line: str, meant: str) -> None:
    """Contacts that nobody could name or reach, rules without recipients or for no event; what was meant is told."""
    with pytest.raises(InvalidConfig, match=re.escape(f'did you mean "{meant}"?') if meant else None):
        config.parse(line.encode())


def test_an_option_adds_to_a_name_that_stands_alone() -> None:
    """`spool edit --set notify.on=…` keeps the recipient."""
    after = jobfile.edited(b'command = "x"\nnotify = "me"\n', {"notify": {"on": "failed"}}, name="a")
    assert jobfile.parse(after, name="a").part("notify") == Notify(("me",), ("failed",))


# What doctor and a submission say.

SECRET = "s3cr3t-t0ken-of-mine"


def found(root: Path, text: str, mode: int = 0o600) -> list[tuple[str, Level, str]]:
    """Return the findings for a configuration."""
    path = root / "config.toml"
    path.write_text(text)
    path.chmod(mode)
    return [(finding.check, finding.level, finding.text) for finding in examine(str(root), checks=CHECKS)]


def test_receivers_that_are_understood_are_fine(spool_root: Path) -> None:
    """Web hooks, services and what the notifier takes; nothing is sent, and nothing said where there is no receiver."""
    assert found(spool_root, "cpus = 1") == []
    text = f"""notifier = "mail"
[contacts]
me = "me@example.org"
chat = "discord://4174216298/{SECRET}"
all = ["me", "chat", "https://hooks.example.org/"]
[[notify]]
to = "all"
"""
    ((check, level, said),) = found(spool_root, text)
    assert (check, level) == ("notify", Level.OK)
    assert said.startswith("3 recipients")


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("nobody", "no `notifier`"),
        ("me@example.org", "there is no `sendmail`"),
        (f"nosuch://{SECRET}", "does not understand"),
        (f"discord://{SECRET}", "does not understand"),
        ("me", "circle"),
        ("http://", "does not understand"),
    ],
)
def test_a_receiver_that_cannot_be_reached_is_named_without_a_secret(
    spool_root: Path, address: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name of the contact, with the reason."""
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    ((check, level, said),) = found(spool_root, f'contacts = {{ me = "{address}" }}')
    assert (check, level) == ("notify", Level.WARN)
    assert said.startswith("me: ")
    assert why in said
    assert SECRET not in said


def test_secrets_that_others_read_are_a_finding(spool_root: Path) -> None:
    """Where the spool's directory is open as well."""
    text = f'contacts = {{ me = "discord://4174216298/{SECRET}" }}'
    assert [level for _, level, _ in found(spool_root, text, 0o644)] == [Level.OK]
    spool_root.chmod(0o755)
    ((_, level, said),) = found(spool_root, text, 0o644)
    assert level is Level.WARN
    assert "readable by others" in said


def test_apprise_is_asked_for_where_an_address_needs_it(spool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finding says how to install it."""
    monkeypatch.setitem(sys.modules, "apprise", None)
    assert "not installed" in found(spool_root, 'contacts = { me = "mailto://example.org" }')[0][2]


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("someone", "cannot send anything to someone: it is no URL"),
        ("me@example.org", "there is no `sendmail`"),
        ("mailto://me:secret@example.org", "cannot send anything to mailto://...: Apprise is not installed"),
    ],
)
def test_an_address_that_nothing_reaches_is_told_at_submission(
    spool: Command, spool_root: Path, address: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning without secrets, and the job is submitted all the same; `--strict` submits nothing."""
    monkeypatch.setattr("spool.extras.notify.sending.find_spec", lambda name: None)
    monkeypatch.setattr("spool.extras.notify.sending.shutil.which", lambda *_, **__: None)
    for strict, code in (("--strict", 1), ("--no-capture", 0)):
        said = spool("submit", strict, "--name", "a", "--notify", address, "--", "true")
        assert (said.code, why in said.err, "secret" in said.err) == (code, True, False)


def test_the_options_fill_the_key(spool: Command, spool_root: Path) -> None:
    """`notify.on` alone is an error with the name of the option that it lacks."""
    words = ("--notify", "me", "--set", "notify.on=started", "--set", "notify.log_lines=5")
    assert spool("submit", "--hold", "--name", "a", *words, "--", "true").code == 0
    text = (spool_root / "held" / "a.toml").read_bytes()
    assert jobfile.parse(text, name="a").part("notify") == Notify(("me",), ("started",), 5)
    assert "--notify: " in spool("submit", "--set", "notify.on=failed", "--", "true").err
