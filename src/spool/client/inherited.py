"""What a process inherits from the one that started it: its umask, soft limits and niceness.

A job has those of its submitter, and not of the one that started the dispatcher: a submission writes them into the job
file where they differ from those of a login, and a dispatcher begins with those of a login.
"""

from __future__ import annotations

import os
import resource

from spool.core.layout import LIMITS, SERVICE, UMASK

_NUMBERS = {name: getattr(resource, f"RLIMIT_{name.upper()}") for name in LIMITS}
_ALL = {value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}


def keys_of_caller() -> dict[str, object]:
    """Return the keys of a job file for what this process does not have as after a login."""
    keys: dict[str, object] = {}
    if (umask := _umask()) != UMASK:
        keys["umask"] = f"{umask:03o}"
    if (nice := os.getpriority(os.PRIO_PROCESS, 0)) != 0:
        keys["nice"] = nice
    limits: dict[str, object] = {}
    for name, number in _NUMBERS.items():
        soft = resource.getrlimit(number)[0]
        if soft != _at_login(name):
            limits[name] = "unlimited" if soft == resource.RLIM_INFINITY else soft
    return {**keys, "limits": limits} if limits else keys


def begin_as_after_login() -> list[str]:
    """Give this process, a dispatcher, what it would have after a login. Return what cannot be undone, in words.

    One that a submission has started also leaves the caller's directory and niceness.
    """
    os.umask(UMASK)
    kept = []
    names = {number: name for name, number in _NUMBERS.items()}
    for number in _ALL:
        hard = resource.getrlimit(number)[1]
        wanted = _at_login(names[number]) if number in names else resource.RLIM_INFINITY
        is_lower = hard != resource.RLIM_INFINITY and (wanted == resource.RLIM_INFINITY or wanted > hard)
        if is_lower and number in names:
            kept.append(f"{names[number]} = {hard}")
        resource.setrlimit(number, (hard if is_lower else wanted, hard))
    if SERVICE in os.environ:
        os.chdir("/")
        try:
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        except OSError:
            kept.append(f"nice = {os.getpriority(os.PRIO_PROCESS, 0)}")
    return kept


def _at_login(name: str) -> int:
    soft = LIMITS[name].at_login
    return resource.RLIM_INFINITY if soft is None else soft


def _umask() -> int:
    try:
        with open("/proc/self/status", "rb") as status:
            return int(status.read().partition(b"\nUmask:")[2].split()[0], 8)
    except (OSError, IndexError, ValueError):  # a kernel before 4.7
        return UMASK
