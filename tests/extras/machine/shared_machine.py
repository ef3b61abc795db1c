"""A machine that three users share: its arbiter, their dispatchers, and a ledger in which every job says when it runs.

With root the users are three accounts of their own and the arbiter is a fourth; else they are three spools of one user.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from extras.machine.talk import journal_of
from served import Served, marked
from spool.extras.machine import protocol
from spool.extras.machine.protocol import MachineShares
from support import ROOT, as_user, wait_for

USERS = {"alina": 23451, "bob": 23452, "carol": 23453}
SERVER = 23450
_LINE = re.compile(r"([BE]) (\S+) ([0-9]+) ([0-9]*)")

# It says when it begins and ends; each line is one write, so their order is that of the events.
JOB = """\
command = '''
echo "B $SPOOL_JOB $SPOOL_CPUS {device}" >> {ledger}
{deed}
echo "E $SPOOL_JOB $SPOOL_CPUS {device}" >> {ledger}
'''
workdir = "/"
cpus = {cpus}
resources = {{ {resources} }}
"""


# Where there is no compiled wrapper, a start is a Python of the user's, who must be able to execute it.
_TRIED = """
import subprocess, sys
from spool.executors import compiled
compiled.find().path or subprocess.run([sys.executable, "-c", ""], check=True)
"""


@cache
def are_accounts() -> bool:
    """Whether the users are accounts of their own: that takes root, and a Python that they can run."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        return False
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    tried = [*as_user(SERVER), sys.executable, "-c", _TRIED]
    return subprocess.run(tried, env=environment, capture_output=True, check=False).returncode == 0


class User(Served):
    """The spool of one user, and the dispatcher that serves it (or does not at the moment)."""

    def __init__(self, machine: SharedMachine, name: str, uid: int | None) -> None:
        home = machine.home / name
        home.mkdir()
        variables = {"HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1", **machine.variables}
        super().__init__(home / "spool", environment=variables)
        self.uid = uid
        self.machine = machine
        self.jobs: list[str] = []
        owner = f'machine_owner = "{SERVER}"\n' if uid is not None else ""
        (self.root / "config.toml").write_text(f'machine = "{machine.directory}"\n{owner}disk_floor = "0M"\n')
        if uid is not None:
            for path in (home, self.root, *self.root.rglob("*")):
                os.chown(path, uid, uid)

    def give(self, job: str, cpus: int = 1, *, device: bool = False, deed: str = "") -> None:
        """Put a job file into `queued/`."""
        text = JOB.format(
            ledger=self.machine.ledger,
            deed=deed,
            cpus=cpus,
            device="${SPOOL_RESOURCE_DEVICE:-7}" if device else "",
            resources="device = 1" if device else "",
        )
        staged = self.root / ".tmp" / "given"
        staged.write_text(text)
        if self.uid is not None:
            os.chown(staged, self.uid, self.uid)
        staged.rename(self.path("queued", job))
        self.jobs.append(job)

    def serve(self) -> None:
        """Start a dispatcher and do not wait for it."""
        self.begin(prefix=self.prefix)

    @property
    def prefix(self) -> list[str]:
        """Return what runs a command as this user."""
        return as_user(self.uid) if self.uid is not None else []

    @property
    def is_done(self) -> bool:
        """Whether all its jobs lie in `done/`."""
        return len(os.listdir(self.root / "done")) >= len(self.jobs)


class SharedMachine:
    """An arbiter of some CPUs and one device, and the users' spools.

    With further variables for all of them, which name files of the tests' own user, the spools are of that one.
    """

    def __init__(self, home: Path, cpus: int, variables: Mapping[str, str] | None = None) -> None:
        self.home = home
        self.cpus = cpus
        self.variables = variables or {}
        self.accounts = not variables and are_accounts()
        self.directory = home / "machine"
        self.ledger = home / "ledger"
        self.log = home / "arbiter.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.directory.mkdir(mode=0o755)
        self.ledger.touch()
        self.ledger.chmod(0o666)
        self.users = [User(self, name, uid if self.accounts else None) for name, uid in USERS.items()]
        uids = sorted({os.getuid() if user.uid is None else user.uid for user in self.users})
        (self.directory / "machine.toml").write_text(
            f"users = {uids}\ncpus = {cpus}\n[resources]\ndevice = {{ indices = [7] }}\n"
        )
        if self.accounts:
            for path in (self.directory, *self.directory.iterdir()):
                os.chown(path, SERVER, SERVER)

    # The arbiter.

    def serve(self) -> None:
        """Start the arbiter and do not wait for it."""
        assert self.process is None
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*(as_user(SERVER) if self.accounts else []), sys.executable, "-m", "spool", "machine", "serve",
                 str(self.directory)],
                env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1", **self.variables},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def open(self) -> None:
        """Start the arbiter, and wait until it serves."""
        self.serve()
        wait_for(lambda: (shares := self.shares()) and shares.pid == self.process.pid, what="the arbiter")

    def kill(self) -> None:
        """Kill the arbiter."""
        assert self.process is not None
        process, self.process = self.process, None
        process.kill()
        process.wait()

    def shares(self) -> MachineShares | None:
        """Return what the arbiter says of the machine."""
        with contextlib.suppress(FileNotFoundError):
            return protocol.parse_status((self.directory / "machine.json").read_bytes())
        return None

    @property
    def is_free(self) -> bool:
        """Whether the arbiter that runs now says that no lease is left."""
        shares = self.shares()
        # Its pid is that of the arbiter itself, as setpriv becomes what it runs.
        return shares is not None and self.process is not None and shares.pid == self.process.pid and not shares.users

    # What must hold.

    def replay(self) -> Counter[str]:
        """Return how often each job began; fail if they ever used too much at once."""
        running: dict[str, int] = {}
        begun: Counter[str] = Counter()
        has_device = ""
        for number, line in enumerate(self.ledger.read_text().splitlines(), 1):
            found = _LINE.fullmatch(line)
            assert found is not None, f"line {number} is no line: {line!r}"
            word, job, cpus, device = found.groups()
            if word == "B":
                assert job not in running, f"{job} runs twice at once (line {number})"
                running[job] = int(cpus)
                begun[job] += 1
                assert not (device and has_device), f"{job} has the device of {has_device} (line {number})"
                has_device = job if device else has_device
            else:
                del running[job]
                has_device = "" if device else has_device
            used = sum(running.values())
            assert used <= self.cpus, f"{used} of {self.cpus} CPUs are in use (line {number}): {running}"
        assert not running, f"{running} never ended"
        return begun

    def check(self) -> None:
        """Fail unless every job has run once and finished, and nothing is left of all of it."""
        wait_for(lambda: all(user.is_done for user in self.users), what="the end of all jobs")
        wait_for(lambda: self.is_free, what="a machine without leases")
        assert journal_of(self.directory) == {}
        begun = self.replay()
        for user in self.users:
            assert {job: begun[job] for job in user.jobs} == dict.fromkeys(user.jobs, 1), logs(self)
            wait_for(lambda user=user: not marked(user.root), what="the end of all processes")  # type: ignore[misc]
            outcomes = {job: [user.outcome(job, run) for run in user.runs(job)] for job in user.jobs}
            assert {job: ended for job, ended in outcomes.items() if ended[-1:] != ["finished"]} == {}


@contextmanager
def shared_machine(cpus: int, variables: Mapping[str, str] | None = None) -> Iterator[SharedMachine]:
    """Give a machine whose arbiter and dispatchers do not run yet, and end all that runs afterwards."""
    home = Path(tempfile.mkdtemp(prefix="spool-turns-", dir="/tmp"))
    home.chmod(0o755)
    machine = SharedMachine(home, cpus, variables)
    try:
        yield machine
        for said in (*(user.said() for user in machine.users), machine.log.read_text()):
            assert "Traceback" not in said, said[-3000:]
    finally:
        for user in machine.users:
            if user.process is not None:
                user.process.kill()
                user.process.wait()
            user.end_runs()
        if machine.process is not None:
            machine.process.send_signal(signal.SIGTERM)
            machine.process.wait()
        shutil.rmtree(home, ignore_errors=True)


def logs(machine: SharedMachine, lines: int = 40) -> str:
    """Return the last words of all processes, for people."""
    texts: Sequence[tuple[str, str]] = [(user.root.parent.name, user.said()) for user in machine.users]
    texts = [("arbiter", machine.log.read_text(errors="replace") if machine.log.exists() else ""), *texts]
    return "\n".join(f"--- {name}\n" + "\n".join(text.splitlines()[-lines:]) for name, text in texts)
