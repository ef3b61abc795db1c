"""The check of `spool doctor` of the recipients."""

from __future__ import annotations

from spool.doctor import Check, Findings, Subject, good, warn
from spool.extras.notify.sending import masked, readable_by_others, why_undelivered
from spool.extras.notify.settings import settings_of


def _notify(subject: Subject) -> Findings:
    settings = settings_of(subject.config)
    named = dict.fromkeys([*settings.contacts, *(to for rule in settings.rules for to in rule.to)])
    if not named:
        return
    found = [
        warn(f"{masked(name)}: {why}", "fix `contacts` or `notify` in config.toml")
        for name in named
        if (why := why_undelivered(name, settings, thoroughly=True)) is not None
    ]
    if (path := readable_by_others(subject.root, settings)) is not None:
        found.append(warn(f"{path} holds secrets and is readable by others", f"chmod 600 {path}"))
    yield from found or [good(f"{len(named)} recipients are valid; only a real message shows whether they answer")]


CHECKS = (Check("notify", _notify),)
"""The check, as a row of the doctor's table."""
