"""The transports: which one an address has, and how long each may take."""

from __future__ import annotations

from pathlib import Path

import pytest

from receivers import HOST, WebServer
from spool.listeners.message import Message, UndeliveredError
from spool.listeners.transports import AppriseService, NotifierCommand, WebHook, transport_for
from support import left_behind, processes, wait_for


def test_each_kind_of_address_has_its_way() -> None:
    """A web hook of a chat service is that service; any other is ours; what is no URL is the notifier's."""
    for address, kind in (
        ("https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ", AppriseService),
        ("https://example.org/lab", WebHook),
        ("json://example.org/lab", WebHook),
        ("mailto://example.org", AppriseService),
        ("bob@example.org", NotifierCommand),
    ):
        assert isinstance(transport_for(address, "mail $1"), kind)


def test_a_receiver_that_drips_is_cut_off(web: WebServer) -> None:
    """The limit holds for the whole exchange, not only between two bytes of it."""
    web.answers = ["drip"]
    with pytest.raises(UndeliveredError):
        WebHook(f"http://{HOST}:{web.port}/", limit_s=0.3).send(Message("failed", "t", "b", {}))


def test_a_notifier_that_fails_or_hangs_is_cut_off_and_tried_again(tmp_path: Path) -> None:
    """Its exit code and its last words are the reason; what it left behind is gone."""
    message, before = Message("failed", "t", "b", {}), processes()
    with pytest.raises(UndeliveredError, match="exit code is 3: no such user"):
        NotifierCommand("yes | head -c 3000000 >&2; echo no such user >&2; exit 3", "bob").send(message)
    mark = f"SPOOL_TEST={tmp_path}"
    with pytest.raises(UndeliveredError, match=r"within 1s"):
        NotifierCommand(f"{mark} sleep 600; :", "bob", limit_s=1).send(message)
    wait_for(lambda: not left_behind(processes() - before, mark.encode()))
