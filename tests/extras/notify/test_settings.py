"""The keys of both files: what they mean, and what is wrong in them."""

from __future__ import annotations

import re

import pytest

from spool.core.errors import InvalidConfig, InvalidJob
from spool.extras.notify.settings import Notifications, Notify, NotifyRule, settings_of
from spool.formats import config, jobfile

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
        {
            "alice": ("mailto://alice:secret@mail.example.org",),
            "team": ("https://hooks.example.org/team", "alice"),
        },
        (NotifyRule(("team",)), ops),
    )
    assert settings_of(config.parse(b"")) == Notifications()


def test_the_key_of_a_job_file() -> None:
    """A name stands for the table, whose defaults are those of the pages, and `[defaults]` may have it too."""
    assert wish('notify = "me"') == wish('notify = { to = ["me"], on = "ended", log_lines = 0 }') == Notify(("me",))
    assert wish('notify = { to = "me", on = ["started"], log_lines = 5 }') == Notify(("me",), ("started",), 5)
    assert wish("", 'notify = "me"') == Notify(("me",))


@pytest.mark.parametrize(
    "stated",
    [
        "['a ']", "['a', 'a']", "{ to = 'a', on = [] }", "[]", "{ to = 'a', on = ['end'] }", "{ on = 'failed' }",
        "{ to = 'a', on = 'gpu_free' }", "{ to = 'a', log_lines = 201 }",
    ],
)  # fmt: skip
def test_what_a_job_file_cannot_ask_for(stated: str) -> None:
    """Nobody, somebody twice, no event, one that is no job's, and more of the log than fits."""
    with pytest.raises(InvalidJob, match="notify"):
        wish(f"notify = {stated}")


@pytest.mark.parametrize(
    "line",
    [
        'contacts = { me = "x " }', 'contacts = { "json://x" = "y" }', "contacts = { me = [] }", "contacts.me = 1",
        'notify = [{ to = ["me", "me"] }]', "notify = 'me'", "notify = ['me']", 'notify = [{ on = "failed" }]',
        'notify = [{ to = "me", log_lines = -1 }]', 'notify = [{ to = "me", on = "polling" }]',
        'defaults.notify = { to = "x@y.example", on = ["gpu_free"] }',
    ],
)  # fmt: skip
def test_what_a_configuration_cannot_say(line: str) -> None:
    """Contacts that nobody could name or reach, and rules without recipients or for no event."""
    with pytest.raises(InvalidConfig):
        config.parse(line.encode())


def test_what_was_meant_is_told() -> None:
    """Of an event and of a filter alike."""
    for line, meant in (('on = "fialed"', "failed"), ('user = "bob"', "notify[0].users")):
        with pytest.raises(InvalidConfig, match=re.escape(f'did you mean "{meant}"?')):
            config.parse(f'notify = [{{ to = "me", {line} }}]'.encode())
    with pytest.raises(InvalidJob, match='did you mean "ended"'):
        wish('notify = { to = "a", on = ["end"] }')


def test_an_option_adds_to_a_name_that_stands_alone() -> None:
    """`spool edit --notify-on` keeps the recipient."""
    after = jobfile.edited(b'command = "x"\nnotify = "me"\n', {"notify": {"on": "failed"}}, name="a")
    assert jobfile.parse(after, name="a").part("notify") == Notify(("me",), ("failed",))
