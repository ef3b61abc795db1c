"""Functions that tests call as jobs: in a module, as those of most programs are."""

from __future__ import annotations

import atexit
import os
import signal
import time
from pathlib import Path
from typing import NoReturn


def double(number: int) -> int:
    """Return twice the number."""
    return 2 * number


def add(*numbers: int) -> int:
    """Return the sum."""
    return sum(numbers)


def fail(text: str) -> NoReturn:
    """Say something, and raise an exception."""
    print("said before")
    raise LookupError(text)


class OddError(Exception):
    """An exception that cannot be made from its text alone."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} is not {other}")


def raise_odd() -> NoReturn:
    """Raise it."""
    raise OddError(1, 2)


def die(number: int = signal.SIGKILL) -> None:
    """End the worker in the middle of the call."""
    os.kill(os.getpid(), number)
    time.sleep(60)


def until(path: str, value: int = 0) -> int:
    """Return a value once there is a file, and say before that it waits."""
    Path(f"{path}.waits").touch()
    while not os.path.exists(path):
        time.sleep(0.01)
    return value


def note(path: str, value: int) -> int:
    """Add a line to a file for each time it is called."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{value}\n")
    return value


def size(data: bytes, number: int) -> int:
    """Return the size of the data and a number together."""
    return len(data) + number


def return_and_die(value: int) -> int:
    """Return a value, and be killed while the interpreter ends."""
    atexit.register(os.kill, os.getpid(), signal.SIGKILL)
    return value


def fail_once(path: str) -> int:
    """Raise an exception the first time; return 2 then."""
    if not os.path.exists(path):
        Path(path).touch()
        raise LookupError("not yet")
    return 2


class Thing:
    """Something that a weak reference can be made to."""


def make_thing(_: object) -> Thing:
    """Return a new one."""
    return Thing()


def fail_once_there(path: str) -> NoReturn:
    """Raise an exception once there is such a file."""
    while not os.path.exists(path):
        time.sleep(0.01)
    raise LookupError(path)
