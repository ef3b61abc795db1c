"""Notifications: messages about jobs by mail, chat or web hook. Here are the keys of both files for them."""

from __future__ import annotations

from spool.formats.capabilities import Key, KeyTable, Part

_MOST_LOG_LINES = 200  # in a message

# A row stays a row of a table.
# fmt: off

_NOTIFY = KeyTable(
    "NotifyTable",
    "Where to send notifications about the job, and for which events.",
    addresses := Key("to", "addresses",
        "Recipients: mail addresses, URLs of services, names from `contacts` in the configuration, or "
        "whatever its `notifier` understands.", default=(), option="--notify ADDRESS,…",
        help="Where to send a message when it has ended."),
    Key("on", "events",
        '"ended" (any outcome), an outcome such as "failed" or "timeout", or another job event such as "started", '
        '"retrying" or "held".', default=("ended",)),
    Key("log_lines", "count", "Number of lines to include from the end of the job's log.",
        default=0, most=_MOST_LOG_LINES),
    Key("tasks", "flag", "Whether each task of an array sends its own messages, in addition to those of the array.",
        default=True),
    short=addresses,
)

JOB = Part(
    Key("notify", _NOTIFY,
        "Where to send notifications about the job, and for which events. A string or a list gives the recipients; "
        "the event is then `ended`.", in_defaults=True),
    after="comment",
    reader="spool.extras.notify.settings:JOB_READER",
)

_RULE = KeyTable(
    "NotifyRuleTable",
    'Notifications about all jobs. Filters are lists of patterns such as "train-*"; one of them must match.',
    Key("to", "addresses", "Recipients, as in a job file.", default=()),
    Key("on", "events", 'Events, as in a job file; or GPU events such as "gpu_free".', default=("ended",)),
    Key("users", "patterns", "Only for jobs of these users.", default=()),
    Key("projects", "patterns", "Only for jobs of these projects.", default=()),
    Key("names", "patterns", "Only for jobs with these names.", default=()),
    Key("log_lines", "count", "Number of lines to include from the end of the job's log.",
        default=0, most=_MOST_LOG_LINES),
)

CONFIG = Part(
    Key("notifier", "script",
        "Shell code that sends a message to an address that is neither a URL nor a name in `contacts`, instead of "
        "`sendmail`: `$1` is the address, `$2` the event, and standard input has the text.",
        default=None, field="notify.notifier"),
    Key("contacts", "contacts", "Names for addresses, so that jobs use the names and secrets stay in this file.",
        default=None, field="notify.contacts"),
    Key("notify", _RULE, "Notifications about all jobs: `[[notify]]`.", many="list", default=None,
        field="notify.rules"),
    after="epilog",
    reader="spool.extras.notify.settings:CONFIG_READER",
)
