"""A real headless Chromium, driven over its DevTools pipe: what a page looks like and does, seen from within."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from base64 import b64decode
from pathlib import Path
from typing import Any, Self

import pytest

from support import PATIENCE_S

_QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """One Chromium with one tab; a context manager, for a test must not leave it behind."""

    def __init__(self) -> None:
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if program is None:
            pytest.skip("no Chromium is installed (Debian's package chromium)")
        self._home = tempfile.mkdtemp(prefix="browser-")
        to_it, self._to = os.pipe()
        self._from, from_it = os.pipe()
        # It reads commands from descriptor 3 and answers on 4.
        shell = f'exec 3<&{to_it} 4>&{from_it} && exec "$0" "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, program, *_QUIET, f"--user-data-dir={self._home}", "about:blank"],
            pass_fds=(to_it, from_it),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._home},
            start_new_session=True,
        )
        os.close(to_it)
        os.close(from_it)
        self._serial = 0
        self._text = b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def __enter__(self) -> Self:
        """Serve a test."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it and all that it has started."""
        os.close(self._to)
        os.close(self._from)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)
        for _ in range(50):  # its helpers may still write
            shutil.rmtree(self._home, ignore_errors=True)
            if not os.path.exists(self._home):
                return
            time.sleep(0.1)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Carry out a command of the protocol and return its result; what else is said meanwhile is passed over."""
        self._serial += 1
        message = {"id": self._serial, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            while b"\0" in self._text:
                line, _, self._text = self._text.partition(b"\0")
                answer = json.loads(line)
                if answer.get("id") == self._serial:
                    assert "error" not in answer, answer
                    result: dict[str, Any] = answer["result"]
                    return result
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no answer to {method}"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._text += data

    def open(self, url: str | Path) -> None:
        """Go to a page, or a file, and wait until it is there."""
        self.call("Page.navigate", url=url.as_uri() if isinstance(url, Path) else url)
        deadline = time.monotonic() + PATIENCE_S
        while self.ask("document.readyState") != "complete":
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def ask(self, expression: str) -> Any:
        """Return the value of an expression, put as nobody's policy can forbid it."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screen(self, width: int, height: int, *, dark: bool = False) -> None:
        """Have a screen of that size, of a phone if it is narrow, and of a reader who likes it light or dark."""
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write what is seen, the *whole* page or the screen, as PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(b64decode(found["data"]))
