"""What is done to a spool while its dispatcher is cut off: everything that a user can do, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from crash.world import Session, World
from spool.core.layout import DONE, HELD, QUEUED, RUNNING
from spool.store.disk import Disk

Step = Callable[[Session], object]


def _submit_some(session: Session) -> None:
    users = session.users
    users.submit("plain", "ok")
    users.submit("tried", "fail until 3", "retry = { max = 2 }")
    users.submit("tired", "fail", "retry = { max = 1 }")
    users.submit("parked", "ok", place=HELD)
    users.submit("huge", "ok", "cpus = 99")
    users.submit("after", "ok", "depends_on = ['plain']")
    users.submit("never", "ok", "depends_on = ['tired']")


STEPS: list[Step] = [
    _submit_some,
    lambda s: s.users.submit("long", "hang"),
    lambda s: s.users.submit("long", "ok # second"),
    lambda s: s.users.cancel("long"),
    lambda s: s.users.submit("twice", "hang until 2"),
    lambda s: s.users.move("twice", RUNNING, QUEUED),
    lambda s: s.users.submit("stopped", "hang until 2"),
    lambda s: s.users.move("stopped", RUNNING, HELD),
    lambda s: s.users.move("stopped", HELD, QUEUED),
    lambda s: s.users.move("parked", HELD, QUEUED),
    lambda s: s.users.move("huge", QUEUED, DONE),
    lambda s: s.users.submit("killed", "hang until 2"),
    lambda s: s.world.kill("killed"),
    lambda s: s.users.submit("gone", "hang", "requeue = false"),
    lambda s: s.world.kill("gone"),
    lambda s: s.users.move("plain", DONE, QUEUED),
    lambda s: s.users.submit("wrong", "ok", "nonsense = 1"),
    lambda s: s.users.submit("wrong", "ok"),
    lambda s: s.users.submit("refused", "refused until 3"),
    lambda s: s.users.submit("denied", "denied until 2"),
]
# How often the steps have each job begun, where nothing is cut off.
STARTS = dict.fromkeys(("after", "denied", "gone", "parked", "refused", "wrong"), 1)
STARTS |= dict.fromkeys(("killed", "long", "plain", "stopped", "tired", "twice"), 2) | {"tried": 3}
JOBS = frozenset({*STARTS, "huge", "never"})  # those two end without having begun


def play(world: World, disks: Iterator[Disk], *, survives: bool = False) -> Session:
    """Perform the steps, each once the last one has come to its end, and leave without a dispatcher.

    *disks*: of the first dispatchers, one each; those after them have a sound one. *survives*: whether a dispatcher
    goes on after an OSError, or another one does. One that goes on leaves nothing for another to mend.
    """
    session = Session(world, disks)
    session.survives_errors = survives
    try:
        for step in STEPS:
            step(session)
            session.settle()
        if survives:
            session.sweep()
        else:
            session.end()
            session.settle()  # a last dispatcher: it has nothing to do but to clean up
    finally:
        session.end()
    return session
