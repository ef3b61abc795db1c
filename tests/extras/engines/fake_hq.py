#!/usr/bin/env python3
"""The part of HyperQueue's `hq` that spool uses, for tests: same options, same JSON, same words of failure.

Written after HyperQueue's documentation and its sources (client/output/json.rs, commands/submit/command.rs). Its server
is the directory `--server-dir`, where a job is a directory; a worker is always there, without limits. A file `away`
stands for a server that does not run, and a file `full` keeps jobs waiting.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

NO_SERVER = (
    'No running instance of HQ found at "{}".\nTry to start the server: `hq server start` or use a different server '
    "directory.\n\nCaused by:\n    No such file or directory (os error 2)"
)


def main() -> int:
    """Do what one call asks for."""
    if sys.argv[1] == "--task":
        return run_task(Path(sys.argv[2]))
    arguments = parser().parse_args()
    server = Path(arguments.server_dir or os.environ["HQ_SERVER_DIR"])
    assert arguments.output_mode == "json"
    if (server / "away").exists():
        say({"error": NO_SERVER.format(server)})
        return 1
    say(arguments.do(server, arguments))
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the options that there are: another one is an error, with exit code 2 as clap's."""
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    common.add_argument("--server-dir")
    common.add_argument("--output-mode", choices=["json", "cli", "quiet"])
    verbs = common.add_subparsers(required=True)
    submit = verbs.add_parser("submit", allow_abbrev=False)
    for option in ("name", "cpus", "cwd", "stdout", "stderr", "time-limit", "priority"):
        submit.add_argument(f"--{option}")
    submit.add_argument("--max-fails", type=int)
    submit.add_argument("--crash-limit", type=int, default=5)
    submit.add_argument("--directives", choices=["auto", "file", "stdin", "off"])
    submit.add_argument("--resource", action="append", default=[])
    submit.add_argument("--env", action="append", default=[])
    submit.add_argument("command", nargs="+")
    submit.set_defaults(do=submitted)
    job = verbs.add_parser("job").add_subparsers(required=True)
    listing = job.add_parser("list")
    listing.add_argument("--all", action="store_true")
    listing.set_defaults(do=listed)
    cancel = job.add_parser("cancel")
    cancel.add_argument("selector")
    cancel.set_defaults(do=cancelled)
    worker = verbs.add_parser("worker").add_subparsers(required=True).add_parser("list")
    worker.set_defaults(do=workers)
    info = verbs.add_parser("server").add_subparsers(required=True).add_parser("info")
    info.set_defaults(do=server_info)
    return common


def say(answer: object) -> None:
    """Print one JSON value."""
    print(json.dumps(answer, indent=2))


def server_info(server: Path, _: argparse.Namespace) -> object:
    """Answer `hq server info`."""
    return {"server_dir": str(server), "server_uid": "tEsT42", "client_host": "here", "version": "0.24.0", "pid": 1}


def workers(_: Path, __: argparse.Namespace) -> object:
    """Answer `hq worker list`."""
    return [{"id": 1, "configuration": {"hostname": os.uname().nodename}, "started": "2026-01-01", "ended": None}]


def submitted(server: Path, arguments: argparse.Namespace) -> object:
    """Answer `hq submit`; the job begins."""
    for resource in arguments.resource:
        name, equals, amount = resource.partition("=")
        if not equals or not amount.replace(".", "").isdecimal() or name == "cpus":
            print(f"error: invalid value '{resource}' for '--resource <RESOURCE>'", file=sys.stderr)
            raise SystemExit(2)
    number = 1
    while True:
        try:
            (server / f"{number}").mkdir()
            break
        except FileExistsError:
            number += 1
    job = server / f"{number}"
    description = {**vars(arguments), "do": None, "id": number}
    (job / "new").write_text(json.dumps(description))
    (job / "new").rename(job / "job")
    with open(os.devnull, "r+b") as nothing:
        subprocess.Popen(
            [sys.executable, __file__, "--task", str(job)],
            stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True, env={"PATH": os.environ["PATH"]},
        )  # fmt: skip
    return {"id": number}


def run_task(job: Path) -> int:
    """Be the worker of one task."""
    (job / "group").write_text(f"{os.getpid()}\n")
    described = json.loads((job / "job").read_text())
    while (job.parent / "full").exists():
        time.sleep(0.05)
    if (job / "state").exists():
        return 0
    environment = {"PATH": os.environ["PATH"], "HQ_JOB_ID": job.name, "HQ_TASK_ID": "0", "HQ_INSTANCE_ID": "0"}
    environment |= dict(each.split("=", 1) for each in described["env"])
    output = Path(described["stdout"].replace("%{CWD}", described["cwd"]))
    with output.open("wb") as log:
        task = subprocess.Popen(
            described["command"], cwd=described["cwd"], env=environment, stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.DEVNULL if described["stderr"] == "none" else log,
        )  # fmt: skip
    (job / "running").touch()
    code = task.wait()
    set_state(job, "finished" if code == 0 else "failed")
    return 0


def set_state(job: Path, state: str) -> None:
    """Record how a job has ended; the first word stays."""
    try:
        with (job / "state").open("x") as file:
            file.write(state)
    except FileExistsError:
        pass


def listed(server: Path, arguments: argparse.Namespace) -> object:
    """Answer `hq job list`."""
    answer = []
    for job in sorted((each for each in server.iterdir() if each.name.isdecimal()), key=lambda each: int(each.name)):
        if not (job / "job").exists():
            continue
        state = "running" if (job / "running").exists() else "waiting"
        state = (job / "state").read_text() or state if (job / "state").exists() else state
        if state not in ("running", "waiting") and not arguments.all:
            continue
        stats = dict.fromkeys(("running", "finished", "failed", "canceled", "aborted", "waiting"), 0)
        info = {"id": int(job.name), "name": json.loads((job / "job").read_text())["name"], "task_count": 1}
        answer.append({**info, "is_open": False, "task_stats": {**stats, state: 1}, "cancel_reason": None})
    return answer


def cancelled(server: Path, arguments: argparse.Namespace) -> object:
    """Answer `hq job cancel`."""
    for part in arguments.selector.split(","):
        job = server / str(int(part))
        if job.is_dir():
            set_state(job, "canceled")
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                os.killpg(int((job / "group").read_text()), signal.SIGKILL)
    return {}


if __name__ == "__main__":
    raise SystemExit(main())
