"""Draw the pictures of the documentation anew: `python tests/pictures.py docs/pictures [WHICH]...`.

WHICH are `screens`, what the commands print about a prepared spool with two users, whose clock stands still; `session`,
the first minute with a real spool; and `page`, the status page, which needs Chromium. Without any it is all of them.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import itertools
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from unittest import mock

from rich.segment import Segment
from rich.style import Style

from long.test_browser import Browser
from prepared import JOBS, NOW_NS, prepared
from spool.cli import main
from spool.extras.page.document import render
from spool.extras.top.app import Top
from spool.formats.state import parse_state
from spool.query.overview import OverviewReader
from spool.store.ownership import this_user
from spool.store.spool import Spool
from support import ROOT, printed_on
from terminal import Line, lines_of, session, still

_HOME = "/home/alice"  # in the pictures
THEMES = ("dark", "light")
TOP = {40: 30, 80: 24, 100: 30, 200: 40}  # the lines of the screen by its columns
_SAYS = {"distill_vit": ("waited 55m00s", "in ~")}  # what of a job is only there once all of it was asked for


class _Terminal(io.StringIO):
    """A terminal that keeps what is printed."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def _printed(words: Sequence[str], columns: int) -> list[Line]:
    """Return what a command prints on a terminal of that width, below its own line."""
    out = _Terminal()
    with mock.patch.object(sys, "stdout", out), mock.patch.dict(os.environ, {"COLUMNS": str(columns), "LINES": "50"}):
        main.run(list(words))
    return [_prompt(" ".join(("spool", *words))), *lines_of(out.getvalue())]


def _prompt(command: str) -> Line:
    return [Segment("$ ", Style(dim=True)), Segment(command, Style(bold=True))]


async def _tops(root: Path, wanted: Sequence[tuple[str, int, str]]) -> list[str]:
    """Return the pictures of `spool top` for each theme, number of columns and job under the cursor, all at once."""
    screens = await asyncio.gather(*(_top(root, *each) for each in wanted))
    return [still(lines, columns, theme) for lines, (theme, columns, _) in zip(screens, wanted, strict=True)]


async def _top(root: Path, theme: str, columns: int, at: str) -> list[Line]:
    app = Top(str(root))
    async with app.run_test(size=(columns, TOP.get(columns, 30))) as pilot:
        app.theme = f"textual-{theme}"
        while app._seen is None or len(app._seen.active) < len(JOBS):
            await pilot.pause(0.1)
        while app._row is None or app._row.name != at:
            await pilot.press("down")
        pauses, lines = 0, list[Line]()
        while pauses < 20 or not all(word in _text(lines) for word in _SAYS.get(at, ())):
            await pilot.pause(0.1)
            pauses, lines = pauses + 1, [list(strip) for strip in app.screen._compositor.render_strips()]
        return lines


def _text(lines: Sequence[Line]) -> str:
    return "\n".join("".join(segment.text for segment in line) for line in lines)


def _screens(into: Path) -> None:
    with prepared() as root:
        for columns in TOP:
            printed = {"ls": _printed(["ls"], columns), "why": _printed(["why", "distill_vit"], columns)}
            for (name, lines), theme in itertools.product(printed.items(), THEMES):
                (into / f"{name}-{columns}-{theme}.svg").write_text(still(lines, columns, theme), encoding="utf-8")
        wanted = [(theme, columns, "train_vit_base") for columns in TOP for theme in THEMES]
        *drawn, one = asyncio.run(_tops(root, [*wanted, ("dark", 140, "distill_vit")]))
        for (theme, columns, _), text in zip(wanted, drawn, strict=True):
            (into / f"top-{columns}-{theme}.svg").write_text(text, encoding="utf-8")
        (into / "top.svg").write_text(one, encoding="utf-8")


def _page(into: Path) -> None:
    """Have Chromium draw the status page."""
    with prepared() as root:
        page = root.parent / "status.html"
        seen = OverviewReader(str(root)).look(NOW_NS)
        assert seen is not None
        text = render(seen, str(root), 3600).decode()
        text = text.replace(str(root.parent), _HOME).replace(str(NOW_NS // 10**6), str(int(time.time() * 1000)))
        page.write_text(text, encoding="utf-8")
        with Browser() as browser:
            browser.screen(1000, 1250)
            browser.open(page)
            browser.picture(into / "page.png", whole=False)


SESSION = (
    ("spool submit --name hello -c 'echo \"hello from $SPOOL_JOB\"'", 2.0),
    ("spool wait hello && spool log hello", 2.5),
    ("spool submit --name train --cpus 2 --time-limit 1m -- ./train.sh", 2.0),
    ("spool submit --name evaluate --depends-on train -- ./evaluate.sh", 2.0),
    ("spool ls", 5.0),
    ("spool why evaluate", 5.0),
    ("spool wait evaluate && spool log evaluate", 4.0),
)
_TRAIN = "#!/bin/sh\necho epoch 3/8 > $SPOOL_METADIR/progress\nuntil [ -e ~/seen ]; do sleep 0.02; done\n"
_TYPED = 6  # letters at once


def _session(into: Path) -> None:
    """Play the first minute with spool, in a home of its own, and draw it."""
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        (home / "bin").mkdir()
        (home / "bin/spool").write_text(f'#!/bin/sh\nexec {sys.executable} -m spool "$@"\n')
        (home / "train.sh").write_text(_TRAIN)
        (home / "evaluate.sh").write_text("#!/bin/sh\necho accuracy 0.93\n")
        for path in (home / "bin/spool", home / "train.sh", home / "evaluate.sh"):
            path.chmod(0o755)
        environment = {
            "HOME": directory, "PATH": f"{home}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"),
            "TERM": "xterm-256color", "LANG": "C.UTF-8", "TZ": "UTC",
        }  # fmt: skip
        try:
            frames = list(_played(home, environment))
        finally:
            subprocess.run([home / "bin/spool", "cancel", "--all"], env=environment, capture_output=True, check=False)
            _end_dispatcher(home)
    for theme in THEMES:
        (into / f"session-{theme}.svg").write_text(session(frames, 80, theme), encoding="utf-8")


def _played(home: Path, environment: dict[str, str]) -> Iterator[tuple[float, Sequence[Line]]]:
    screen: list[Line] = []
    for command, seconds in SESSION:
        for at in range(0, len(command), _TYPED):
            yield 0.12, [*screen, _prompt(command[:at])]
        yield 0.5, [*screen, _prompt(command)]
        if "wait evaluate" in command:
            (home / "seen").touch()  # `train` runs until here, however fast this machine is
        screen += [_prompt(command), *lines_of(_in_terminal(command, home, environment))]
        yield seconds, [*screen, _prompt("")]
    yield 3.0, screen


def _in_terminal(command: str, home: Path, environment: dict[str, str]) -> str:
    """Return what a command of the shell prints on a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    process = subprocess.Popen(
        ["sh", "-c", command],
        cwd=home,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    printed = printed_on(ours)
    process.wait()
    text = printed.decode().replace("\r\n", "\n")
    text = re.sub(r"[^\n]*\r\x1b\[K", "", text)  # what was drawn over
    return text.replace(str(home), _HOME).replace(f"{this_user()}'s", "alice's")


def _end_dispatcher(home: Path) -> None:
    state = home / ".spool/state.json"
    if state.exists() and (view := parse_state(state.read_bytes())) is not None:
        with suppress(ProcessLookupError):
            os.kill(view.pid, signal.SIGTERM)
        while Spool(str(home / ".spool")).dispatcher_lives():
            time.sleep(0.1)


WHICH = {"screens": _screens, "session": _session, "page": _page}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    for which in sys.argv[2:] or WHICH:
        WHICH[which](folder)
