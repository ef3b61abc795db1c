"""What may be wrong with notifications and metrics, as far as it can be found out without sending anything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

from spool.dispatcher.doctor import Finding, Level, configuration, good
from spool.formats.config import Config
from spool.listeners.addresses import expanded, way_to
from spool.listeners.apprising import Service
from spool.listeners.letters import UndeliveredError, has_secret, masked
from spool.listeners.metrics import NOT_INSTALLED
from spool.listeners.secrecy import who_else_reads


def examine_messengers(root: str) -> Iterator[Finding]:
    """Check whom the configuration of the spool at *root* names, and where metrics go. Nothing, if it names nobody."""
    config = configuration(root)
    if config.contacts or config.notify:
        yield from _addresses(root, config)
    if config.metrics is not None:
        yield _metrics(os.path.expanduser(config.metrics))


def _addresses(root: str, config: Config) -> Iterator[Finding]:
    named = dict.fromkeys([*config.contacts, *(to for rule in config.notify for to in rule.to)])
    fine = True
    found: list[str] = []
    for name in named:
        try:
            for address in expanded(name, config.contacts):
                found.append(address)
                way = way_to(address, config.notifier)
                if isinstance(way, Service):
                    way.check()
        except UndeliveredError as error:
            fine = False
            yield Finding("notify", Level.WARN, f"{masked(name)}: {error}", "`contacts` and `notify` in config.toml")
    if any(map(has_secret, found)):
        for path in who_else_reads(root, in_config=True, job=None):
            fine = False
            yield Finding("notify", Level.WARN, f"{path} holds secrets, and others can read it", f"chmod 600 {path}")
    if fine:
        yield good("notify", f"{len(named)} receivers are understood; whether they answer, only a message can tell")


def _metrics(path: str) -> Finding:
    if find_spec("prometheus_client") is None:
        why, _, remedy = NOT_INSTALLED.partition("; ")
        return Finding("metrics", Level.WARN, why, remedy)
    directory = os.path.dirname(path)
    if not os.access(directory, os.W_OK | os.X_OK):
        return Finding(
            "metrics", Level.WARN, f"{directory} is not there or cannot be written to", "`metrics` in config.toml"
        )
    return good("metrics", f"they are written to {path}")
