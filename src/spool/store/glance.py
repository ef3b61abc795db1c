"""What the configuration says and what the machine has, for commands that have to start quickly.

The parser of the configuration, with the libraries that it needs, takes longer to import than a submission takes. So it
is parsed only if it can matter, and what the dispatcher knows of the machine stands in a line of its own.
"""

from __future__ import annotations

import os

from spool.core import layout
from spool.store.disk import read_file

TYPE_CHECKING = False  # that of `typing`, which is slow to import as well
if TYPE_CHECKING:
    from spool.core.model import JobDefaults
    from spool.formats.config import Config

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def read_config(root: str) -> bytes | None:
    """Return the text of the configuration of the spool *root*, None if there is none.

    Raises OSError if it cannot be read, and PermissionError if another user than its owner may have written it.
    """
    path = f"{root}/{layout.CONFIG}"

    def why_not(status: os.stat_result) -> str:
        from spool.store.ownership import why_not_obeyed

        return why_not_obeyed(root, status)

    return read_file(path, check=why_not)


def config_if(root: str, *words: bytes) -> Config | None:
    """Return the configuration of the spool *root* if it contains one of *words*; None also if it is unusable.

    The dispatcher and `doctor` report its mistakes.
    """
    try:
        text = read_file(f"{root}/{layout.CONFIG}") or b""
        if not any(word in text for word in words):
            return None
        text = read_config(root) or b""  # the owner is checked only if it matters
    except OSError:
        return None
    from spool.core.errors import InvalidConfig
    from spool.formats import config

    try:
        return config.parse(text)
    except InvalidConfig:
        return None


def defaults_of(root: str) -> JobDefaults:
    """Return the job defaults of the spool *root*; the built-in ones if its configuration is invalid."""
    said = config_if(root, b"defaults", b"kill_grace")
    if said is not None:
        return said.defaults
    from spool.core.model import JobDefaults

    return JobDefaults()


def machine_line(boot_id: str, cpus: int, memory_bytes: int, gpus: int) -> bytes:
    """Return the text of `.machine`: what the machine has since the boot of that id."""
    return f"{boot_id} {cpus} {memory_bytes} {gpus}\n".encode()


def machine_told(root: str) -> dict[str, int]:
    """Return what the machine has, as the last dispatcher of the spool *root* found: `cpus`, `memory` (bytes), `gpus`.

    Nothing if that was before the machine was booted, or on another one.
    """
    try:
        boot_id, *amounts = (read_file(f"{root}/{layout.MACHINE}") or b"").split()
        if boot_id != (read_file(_BOOT_ID) or b"").strip():
            return {}
        return dict(zip(("cpus", "memory", "gpus"), map(int, amounts), strict=True))
    except (OSError, ValueError):
        return {}
