"""What reads the datagrams of a shared machine: bytes of another account."""

from __future__ import annotations

import pytest
from msgspec import json

from spool.core.model import Request
from spool.extras.machine.protocol import LeaseRequest, NotAMessage, read_replies


@pytest.mark.parametrize("datagram", [b'[["hello",2,"\xff\xfe"]]', b"\xff", b"[" * 60_000, b"", b'[["end",1e400]]'])
def test_what_is_no_message_is_refused(datagram: bytes) -> None:
    """Bytes that are no UTF-8 are refused like any others, so that they cut off their sender and nothing more."""
    with pytest.raises(NotAMessage):
        read_replies(datagram)


def test_a_lease_is_for_the_kinds_of_gpus_that_the_job_names() -> None:
    """Several types and the least memory reach the arbiter; the lines of its older journals have neither."""
    asked = LeaseRequest(1, gpus=1, gpu_type="A100", gpu_min_memory_bytes=40 << 30, other_gpu_types=("H100",))
    assert json.decode(json.encode(asked), type=LeaseRequest) == asked
    assert asked.request() == Request(1, gpus=1, gpu_types=("A100", "H100"), gpu_min_memory_bytes=40 << 30)
    older = json.decode(b'[2,1024,1,0,"A100",[],0,""]', type=LeaseRequest)
    assert older.request() == Request(2, 1024, 1, gpu_types=("A100",))


@pytest.mark.parametrize(
    "said",
    [
        [["grant", 1, 1, 1, [["GPU-" + "0" * 200]]]],
        [["grant", 1, 1, 1, [["GPU-0,GPU-1"], [0]]]],
        [["grant", 1, 1, 1, [[f"GPU-{n}" for n in range(1000)]]]],
        [["grant", 1, 1, 1, [[], list(range(5000))]]],
        [["grant", 1, 1, 1, [[], [], [[f"r{n}", [1]] for n in range(100)]]]],
        [["welcome", 1, 1, [[f"r{n}", 1, []] for n in range(5000)]]],
        [["welcome", 1, 1, [["licence", 3, [1, 2]]]]],
        [["wait", 1, ""]] * 1000,
    ],
)
def test_no_answer_is_larger_than_a_machine(said: object) -> None:
    """What an arbiter says is bounded in each of its parts, and its totals agree with its indices."""
    with pytest.raises(NotAMessage):
        read_replies(json.encode(said))
