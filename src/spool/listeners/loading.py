"""Loading plugins, which may end the process that does it: after a few such ends they are left out.

A dispatcher that begins has them loaded again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spool.core.layout import CURSORS, Layout
from spool.store.disk import Disk
from spool.store.spool import read_bytes

_MOST_TRIES = 3
_TRIES = f"{CURSORS}/.loading"  # how often it was begun and not come to an end


@contextmanager
def loading(paths: Layout, disk: Disk) -> Iterator[None]:
    """Surround the loading of the plugins. Raises ImportError if it has ended the process too often."""
    path = paths.at(_TRIES)
    text = (read_bytes(path) or b"").strip()
    tries = int(text) if text.isdigit() else 0
    if tries >= _MOST_TRIES:
        raise ImportError(f"loading the plugins has ended the process {tries} times")
    disk.put(path, f"{tries + 1}\n".encode())
    try:
        yield
    finally:
        disk.discard(path)


def load_again(paths: Layout, disk: Disk) -> None:
    """Have the plugins loaded again, whatever they did: who starts the dispatcher anew may have mended them."""
    disk.discard(paths.at(_TRIES))
