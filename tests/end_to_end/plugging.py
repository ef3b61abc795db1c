"""Plugins for tests: real modules with entry points, and a dispatcher that finds them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from served import Served
from support import ROOT

Plugged = Callable[..., Served]
"""Makes a spool whose dispatcher has plugins: the fixture `plugged`."""

MARKER = "from spool.listeners.plugins import hookimpl\n"


def install(site: Path, name: str, source: str, entry: str | None = None) -> None:
    """Put a module there as `pip install` would, with its entry point."""
    site.mkdir(exist_ok=True)
    (site / f"{name}.py").write_text(source)
    about = site / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[spool]\n{entry or name} = {name}\n")


def with_plugins(tmp_path: Path, limit: str = "500ms", **sources: str) -> Served:
    """Return a spool whose dispatcher finds plugins of those names and texts."""
    site = tmp_path / "site"
    for name, source in sources.items():
        install(site, name, MARKER + source)
    path = os.pathsep.join([str(ROOT / "src"), str(site)])
    spool = Served(tmp_path / "spool", {"PYTHONPATH": path})
    (spool.root / "config.toml").write_text(f'cpus = 8\nhook_time_limit = "{limit}"\n')
    return spool
