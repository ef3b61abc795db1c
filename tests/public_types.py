"""A program that uses the public face, for the type checker: `mypy tests/public_types.py`. Nobody runs it."""

from typing import assert_type

import spool

client = spool.Client("spool", make=True)
assert_type(client.root, str)
assert_type(client.submit(["sleep", "1"], name="a", cpus=2, memory="1G", env={"KEY": "value"}), str)
assert_type(client.cancel("a"), tuple[spool.Change, ...])
assert_type(client.hold("a").place, str)
assert_type(client.release("a"), spool.Change)
assert_type(client.requeue("a"), spool.Change)
assert_type(client.output("a", run=1), bytes)
assert_type(client.jobs(spool.JobFilter(names=("a*",), user="me"), everything=True), spool.JobList)
assert_type([row.state for row in client.jobs().rows], list[spool.State])
assert_type(client.why("a").start_at_ns, int | None)
end = client.wait("a", timeout_s=0.5)
assert_type(end, spool.End | None)
if end is not None:
    assert_type(end.outcome, spool.State)
    assert_type(end.exit_code, int | None)
assert_type(spool.__version__, str)
failures: list[type[spool.SpoolError]] = [spool.NoSuchJob, spool.InvalidJob, spool.SpoolUnusable]
