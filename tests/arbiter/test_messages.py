"""What reads the datagrams of a shared machine: bytes of another account."""

from __future__ import annotations

import pytest

from spool.formats.arbiter_protocol import NotAMessage, read_orders, read_replies


@pytest.mark.parametrize("read", [read_orders, read_replies])
@pytest.mark.parametrize("datagram", [b'[["hello",2,"\xff\xfe"]]', b"\xff", b"[" * 60_000, b"", b'[["end",1e400]]'])
def test_what_is_no_message_is_refused(read: object, datagram: bytes) -> None:
    """Bytes that are no UTF-8 are refused like any others, so that they cut off their sender and nothing more."""
    with pytest.raises(NotAMessage):
        read(datagram)  # type: ignore[operator]
