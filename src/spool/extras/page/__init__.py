"""The status page: a listener that writes a web page. Here is the key of config.toml for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from spool.core.errors import InvalidValue
from spool.formats import toml
from spool.formats.capabilities import Key, Part
from spool.formats.validation import Kind, PartReader
from spool.formats.values import Text, trimmed

if TYPE_CHECKING:
    from spool.formats.config import Config

CONFIG = Part(
    Key(
        "status_page",
        "page file",
        "A web page that shows the spool, updated every few seconds while a dispatcher is running: `status.html` is "
        "in the spool; a file at an absolute path, which may begin with `~`, is readable by everyone. The name ends "
        "with `.html`.",
        default=None,
        field="page.path",
    ),
    after="epilog",
    reader="spool.extras.page:READER",
)


def _path(path: str) -> str:
    if not trimmed(path).startswith(("/", "~")) and "/" in path:
        raise InvalidValue(f"{toml.show(path)} must be a plain name, for a file in the spool, or an absolute path")
    if not path.endswith(".html") or os.path.basename(path).startswith("."):
        raise InvalidValue(f'{toml.show(path)} must name an .html file such as "status.html"')
    return path


READER = PartReader(lambda reading: reading.found["page"].get("path"), {"page file": lambda key: Kind(Text, _path)})
"""What reads the key `status_page`: its value is the path as written."""


def page_path(config: Config, root: str) -> str | None:
    """Return the path of the status page of the spool *root*; None if there is none."""
    stated = config.part("page")
    return os.path.join(root, os.path.expanduser(stated)) if stated is not None else None
