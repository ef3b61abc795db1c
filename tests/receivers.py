"""Real receivers on the loopback: a mail server and a web server, each of which can refuse, stall and recover."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any, cast

import pytest

HOST = "127.0.0.1"


class MailServer(ThreadingTCPServer):
    """Speaks SMTP. `mode` is "well", "dead" (says so at once) or "stalls" (says nothing)."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Mail)
        self.mode = "well"
        self.tries = 0
        self.mails: list[EmailMessage] = []
        self.to: list[str] = []
        self.over = threading.Event()
        self.port = int(self.server_address[1])


class _Mail(StreamRequestHandler):
    def say(self, text: str) -> None:
        self.wfile.write(f"{text}\r\n".encode())

    def handle(self) -> None:
        server = cast("MailServer", self.server)
        server.tries += 1
        if server.mode == "stalls":
            server.over.wait(60)
            return
        if server.mode == "dead":
            self.say("421 the disk is full")
            return
        self.say("220 here")
        while line := self.rfile.readline():
            word = line.strip().upper().split(b" ")[0]
            if word == b"EHLO":
                self.say("250 here")
            elif word == b"DATA":
                self.say("354 go on")
                text = b""
                while (part := self.rfile.readline()) not in (b".\r\n", b""):
                    text += part
                server.mails.append(cast("EmailMessage", message_from_bytes(text, policy=policy.default)))
                self.say("250 taken")
            elif word == b"QUIT":
                self.say("221 bye")
                return
            else:
                if word == b"RCPT":
                    server.to.append(line.decode().strip().partition(":")[2])
                self.say("250 yes")


class WebServer(ThreadingHTTPServer):
    """Takes what is posted. `answers` are the next status codes, or "stall", "drip"; then it is 204."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Web)
        self.answers: list[int | str] = []
        self.chokes_on = ""  # the id of an event
        self.requests: list[tuple[str, dict[str, str], Any]] = []  # path, headers, document
        self.over = threading.Event()
        self.port = int(self.server_address[1])

    @property
    def documents(self) -> list[Any]:
        return [document for _, _, document in self.requests]


class _Web(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = cast("WebServer", self.server)
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server.requests.append((self.path, dict(self.headers), json.loads(data)))
        answer = server.answers.pop(0) if server.answers else 204
        if server.chokes_on and server.requests[-1][2]["id"] == server.chokes_on:
            answer = 500
        if answer == "stall":
            server.over.wait(60)
            self.close_connection = True
        elif answer == "drip":
            while not server.over.wait(0.05):
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        else:
            self.send_response(int(answer))
            if answer in (301, 302, 307):
                self.send_header("Location", f"http://{HOST}:{server.port}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serving(server: Any) -> Iterator[Any]:
    """Serve in a thread until the block is left."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speak to the loopback itself, whatever proxy this machine has."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def web(no_proxy: None) -> Iterator[WebServer]:
    """Serve HTTP."""
    with serving(WebServer()) as server:
        yield server


@pytest.fixture
def mail(no_proxy: None) -> Iterator[MailServer]:
    """Serve SMTP."""
    with serving(MailServer()) as server:
        yield server
