"""A /proc that shows any machine one likes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


class FakeProc:
    """A directory with the files of /proc that spool reads."""

    def __init__(self, root: Path, boot_id: str = "boot-1", pid_namespace: str = "pid:[1]") -> None:
        self.root = root
        (root / "sys/kernel/random").mkdir(parents=True)
        (root / "sys/kernel/random/boot_id").write_text(boot_id + "\n")
        (root / "self/ns").mkdir(parents=True)
        os.symlink(pid_namespace, root / "self/ns/pid")

    def __str__(self) -> str:
        return str(self.root)

    def process(
        self,
        pid: int,
        *,
        parent: int = 1,
        session: int | None = None,
        start: int = 1000,
        state: str = "S",
        name: str = "sh",
        threads: int = 1,
        times: tuple[int, int, int, int] = (0, 0, 0, 0),
        rss_pages: int = 0,
        size: int = 4096,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Show a process; one that was shown before with that pid is gone."""
        at = self.root / str(pid)
        at.mkdir(exist_ok=True)
        session = pid if session is None else session
        user, system, children_user, children_system = times
        fields = [state, parent, pid, session, 0, -1, 0, 0, 0, 0, 0, user, system, children_user, children_system]
        fields += [20, 0, threads, 0, start, size, rss_pages, *([0] * 28)]
        (at / "stat").write_text(f"{pid} ({name}) {' '.join(map(str, fields))}\n")
        pairs = (f"{key}={value}" for key, value in (environment or {}).items())
        (at / "environ").write_bytes(b"".join(os.fsencode(pair) + b"\0" for pair in pairs))

    def end(self, pid: int) -> None:
        """Show that process no longer."""
        for file in (self.root / str(pid)).iterdir():
            file.unlink()
        (self.root / str(pid)).rmdir()
