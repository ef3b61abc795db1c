"""Metrics for Prometheus: a listener that writes a file for node_exporter. Here is the key of config.toml for it."""

from __future__ import annotations

from spool.core.errors import InvalidValue
from spool.formats import toml
from spool.formats.capabilities import Key, Part
from spool.formats.validation import Kind, PartReader
from spool.formats.values import Text, trimmed

CONFIG = Part(
    Key(
        "metrics",
        "metrics file",
        "A file for Prometheus metrics, as read by node_exporter's textfile collector: an absolute path that ends "
        "with `.prom`; it may begin with `~`.",
        default=None,
        field="metrics.path",
    ),
    after="epilog",
    reader="spool.extras.metrics:READER",
)


def _path(path: str) -> str:
    if not trimmed(path).startswith(("/", "~")):
        raise InvalidValue(f"{toml.show(path)} must be an absolute path")
    if not path.endswith(".prom"):
        raise InvalidValue(f"{toml.show(path)} must end with .prom, or node_exporter ignores it")
    return path


READER = PartReader(
    lambda reading: reading.found["metrics"].get("path"), {"metrics file": lambda key: Kind(Text, _path)}
)
"""What reads the key `metrics`: its value is the path as written."""
