"""One spool, one owner: no other user's command changes it, and no other user's file runs, however it comes there."""

from __future__ import annotations

import codecs
import importlib
import json
import os
import pkgutil
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

import spool
from served import LOOKS, Served
from spool.cli import group, main
from spool.core import layout
from spool.store.spool import Spool
from support import PATIENCE_S, ROOT, as_user, in_child, wait_for

ALICE, MALLORY = 12345, 12346

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="takes root and setpriv, for files of several users"
)


@cache
def _import_all() -> None:
    for module in pkgutil.walk_packages(spool.__path__, "spool."):
        if not module.name.endswith("__main__"):
            with suppress(ImportError):
                importlib.import_module(module.name)
    for encoding in ("ascii", "idna", "latin_1"):
        codecs.lookup(encoding)


class Shared(Served):
    """A spool of ALICE in a directory where everyone finds it, and commands of other users."""

    def __init__(self, home: Path) -> None:
        super().__init__(home / "spool", environment={"HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"})
        self.home = home
        self.proof = home / "proof"
        self.proof.mkdir()
        self.proof.chmod(0o1777)
        self.own(home, self.root, *self.root.iterdir())
        home.chmod(0o755)

    @staticmethod
    def own(*paths: Path, uid: int = ALICE) -> None:
        """Give *paths* to a user."""
        for path in paths:
            os.chown(path, uid, uid, follow_symlinks=False)

    def serve(self, *arguments: str) -> Shared:
        """Start a dispatcher of ALICE."""
        self.start(*arguments, prefix=as_user(ALICE))
        return self

    def share(self, mode: int = 0o1777, *places: str) -> None:
        """Let others enter the spool, and write to *places*."""
        self.root.chmod(0o755)
        for place in places or ("queued",):
            (self.root / place).chmod(mode)

    def by(self, uid: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the command line as the user *uid*, in a child that need not import it again."""
        _import_all()  # who this becomes may not read what it is made of
        paths = [self.home.parent / f"{self.home.name}.{stream}" for stream in ("out", "err")]

        def become_and_run() -> None:
            for number, path in enumerate(paths, 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
            sys.stdout, sys.stderr = open(1, "w", 1), open(2, "w", 1)  # noqa: SIM115
            os.environ.update(self.environment)
            os.chdir("/")
            signal.alarm(int(PATIENCE_S))
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            code = main.run(arguments)
            sys.stdout.flush()
            os._exit(code)

        code = in_child(become_and_run)
        said = [path.read_text() for path in paths]
        for path in paths:
            path.unlink()
        return subprocess.CompletedProcess(arguments, code, *said)

    def does(self, uid: int, script: str) -> None:
        """Have the user *uid* run a shell script in the spool."""
        subprocess.run([*(as_user(uid) if uid else []), "/bin/sh", "-ec", script], cwd=self.root, check=True)

    def text_of(self, name: str, more: str = "", command: str = "") -> str:
        """Return a job file whose command leaves `proof/NAME`, with who it was."""
        return f"command = '{command or f'id -u > {self.proof}/{name}'}'\nworkdir = \"/\"\n{more}"

    def put(self, uid: int, path: str, name: str, more: str = "", *, command: str = "") -> Path:
        """Put a job file of *uid* at *path* in the spool, old enough to count as whole."""
        target = self.root / path
        staged = self.home / f"{name}.staged"
        staged.write_text(self.text_of(name, more, command))
        old = time.time() - 10
        os.utime(staged, (old, old))
        self.own(staged, uid=uid)
        staged.rename(target)
        return target

    def ran(self) -> dict[str, str]:
        """Return which jobs have run, and as whom."""
        return {path.name: path.read_text().strip() for path in self.proof.iterdir()}

    def told(self, name: str, place: str = "queued") -> str:
        """Return what `.error` says of a job, once it is there."""
        path = self.root / place / f"{name}.toml.error"
        wait_for(path.exists, self.patience, what=f"{path.name}")
        return path.read_text()

    def saw(self, name: str) -> None:
        """Wait until the dispatcher knows a job."""
        wait_for(lambda: name in self.state()["jobs"], self.patience, what=f"{name} in state.json")

    def settled(self) -> None:
        """Wait until a job of ALICE that comes last has run: all that was there before has been seen."""
        name = f"last{time.monotonic_ns()}"
        self.put(ALICE, f"queued/{name}.toml", name)
        wait_for(lambda: (self.root / "done" / f"{name}.toml").exists(), self.patience, what=name)
        (self.proof / name).unlink()


@pytest.fixture
def shared() -> Iterator[Shared]:
    """Give a spool of ALICE below /tmp, which other users can reach if its mode lets them."""
    tried = subprocess.run(
        [*as_user(ALICE), sys.executable, "-c", "import spool"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        check=False,
    )
    if tried.returncode:
        pytest.skip("another user cannot run this Python")
    home = Path(tempfile.mkdtemp(prefix="spool-owners-", dir="/tmp"))
    try:
        with Shared(home) as found:
            yield found
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _state_of(root: Path) -> dict[str, tuple[int, int, int, int]]:
    """Return what lies in a spool: of each file the owner, the mode, the inode and the time of its last change."""
    found = {}
    for path in [root, *root.rglob("*")]:
        status = path.lstat()
        found[str(path)] = status.st_uid, status.st_mode, status.st_ino, status.st_ctime_ns
    return found


CHANGES = [
    "submit -- true", "submit --name new -- true", "submit --name new --hold -c 'true; true'",
    "submit --replace --name waits -- true", "submit --wait -- true", "submit -f {file}",
    "submit --array 0-3 -- true", "run -- true", "cancel waits", "cancel runs", "hold waits", "release held",
    "requeue over", "requeue --set cpus=1 over", "edit waits --priority 3", "edit waits", "edit --first waits",
    "suspend runs", "continue runs", "signal USR1 runs", "pause", "resume",
    "reserve create new --gpus 1 --duration 1h", "reserve cancel mine", "gc --older-than 1s", "init",
    "init {root}", "dispatch", "dispatch --once", "dispatch --until-idle", "dispatch --idle-exit 1s",
    "doctor --fix", "attach runs",
]  # fmt: skip

VIEWS = [
    "ls", "ls --all --json", "show waits", "why waits", "log over", "wait --timeout 0s over", "seff over", "info",
    "gpus", "reserve list", "plan", "stats", "check {file}", "doctor", "gc --help", "completion bash",
    *(verb for verb in ("plot",) if verb in group.VERBS),
]  # fmt: skip


@pytest.fixture
def lived_in(shared: Shared) -> Shared:
    """Give a spool of ALICE in which something waits, is held, has run, and which others may read."""
    shared.put(ALICE, "queued/over.toml", "over")
    subprocess.run(
        [*as_user(ALICE), sys.executable, "-m", "spool", "dispatch", "--until-idle"],
        env=shared.environment,
        check=True,
        capture_output=True,
    )
    (shared.proof / "over").unlink()
    shared.put(ALICE, "queued/waits.toml", "waits")
    shared.put(ALICE, "held/held.toml", "held")
    shared.put(ALICE, "running/runs.toml", "runs")
    reservation = shared.put(ALICE, "reservations/mine.toml", "mine")
    reservation.write_text('user = "alice"\ngpus = 1\nstart = "now"\nduration = "1h"\n')
    shared.own(*shared.root.rglob("*"))
    for path in [shared.root, *shared.root.rglob("*")]:
        path.chmod(0o777 if path.is_dir() else 0o666)
    (shared.home / "file.toml").write_text('command = "true"\n')
    return shared


@pytest.mark.parametrize("uid", [0, MALLORY], ids=["root", "mallory"])
def test_no_other_user_changes_a_spool(lived_in: Shared, uid: int) -> None:
    """Each command that changes a spool exits with 5 where it is another user's, names that one, and writes nothing."""
    before = _state_of(lived_in.root)
    wrong = []
    for words in CHANGES:
        given = shlex.split(words.format(root=lived_in.root, file=lived_in.home / "file.toml"))
        done = lived_in.by(uid, *given)
        told = done.stderr.strip().splitlines()
        if done.returncode != 5 or not told or str(ALICE) not in told[-1] or "sudo -u" not in told[-1]:
            wrong.append((words, done.returncode, done.stdout, done.stderr))
        if _state_of(lived_in.root) != before:
            wrong.append((words, "changed", set(_state_of(lived_in.root).items()) ^ set(before.items())))
            break
    assert wrong == []
    assert lived_in.ran() == {}


@pytest.mark.parametrize("uid", [0, MALLORY], ids=["root", "mallory"])
def test_every_user_may_look(lived_in: Shared, uid: int) -> None:
    """Commands that only read go on in another user's spool that they can read, and make nothing there."""
    before = _state_of(lived_in.root)
    for words in VIEWS:
        given = shlex.split(words.format(root=lived_in.root, file=lived_in.home / "file.toml"))
        done = lived_in.by(uid, *given)
        assert "Traceback" not in done.stderr, words
        assert done.returncode == (1 if words == "doctor" else 0), (words, done.stdout, done.stderr)
        assert _state_of(lived_in.root) == before, words


@pytest.mark.parametrize("uid", [0, MALLORY], ids=["root", "mallory"])
def test_the_python_client_is_the_same_door(lived_in: Shared, uid: int) -> None:
    """`Client` of another user reads, and each method that changes something raises SpoolUnusable, naming the owner."""
    code = """if True:
        import json, spool, sys
        client = spool.Client(sys.argv[1])
        said = []
        for act in (
            lambda: client.submit("true", name="new"),
            lambda: client.submit("true", name="waits", replace=True),
            lambda: client.cancel("waits"), lambda: client.hold("waits"), lambda: client.release("held"),
            lambda: client.requeue("over"), lambda: client.requeue("over", cpus=1), lambda: client.suspend("runs"),
            lambda: client.go_on("runs"), lambda: spool.Client(sys.argv[1], make=True),
        ):
            try:
                act()
                said.append("done")
            except spool.SpoolUnusable as error:
                said.append(str(error))
        print(json.dumps([sorted(row.name for row in client.jobs().rows), said]))
    """
    before = _state_of(lived_in.root)
    done = subprocess.run(
        [*(as_user(uid) if uid else []), sys.executable, "-c", code, str(lived_in.root)],
        env=lived_in.environment, capture_output=True, text=True, check=False, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names, said = json.loads(done.stdout)
    assert {"waits", "held"} <= set(names)
    assert all(f"belongs to {ALICE}" in each for each in said), said
    assert _state_of(lived_in.root) == before


def test_a_dispatcher_of_root_runs_no_file_of_another(shared: Shared) -> None:
    """In a spool of root's own that everyone can write to, a job file of a user does not run, and that is told."""
    shared.own(shared.home, shared.root, *shared.root.iterdir(), uid=0)
    shared.share()
    shared.put(MALLORY, "queued/evil.toml", "evil")
    shared.start()
    assert f"belongs to {MALLORY}" in shared.told("evil")
    shared.put(0, "queued/own.toml", "own")
    wait_for(lambda: shared.ran() == {"own": "0"}, what="root's job")


def test_a_dispatcher_leaves_a_spool_that_is_given_away(shared: Shared) -> None:
    """A dispatcher whose spool becomes another user's exits with 5 and runs nothing that comes then."""
    shared.serve()
    os.chown(shared.root, MALLORY, MALLORY)
    process = shared.process
    assert process.wait(20) == 5
    shared.process = None
    os.chown(shared.root, ALICE, ALICE)
    shared.put(ALICE, "queued/x.toml", "x")
    assert shared.ran() == {}


# What a stranger can put into a spool, and what becomes of it.

PLANT = {
    "dropped": "cp {file} queued/dropped.toml",
    "renamed": "cp {file} queued/.hidden; mv queued/.hidden queued/renamed.toml",
    "linked": "cp {file} queued/.a; ln queued/.a queued/linked.toml",
    "held": "cp {file} held/held.toml",
    "released": "cp {file} held/released.toml; mv held/released.toml queued/released.toml",
    "stray": "cp {file} running/stray.toml",
    "again": "cp {file} done/again.toml; mv done/again.toml queued/again.toml",
    "array": "{{ cat {file}; echo 'array = \"0-2\"'; }} > queued/array.toml",
    "task_0": "{{ cat {file}; printf '[task]\\narray = \"task\"\\nindex = 0\\n'; }} > queued/task_0.toml",
    "readable": "cp {file} queued/readable.toml; chmod 666 queued/readable.toml",
    "future": "cp {file} queued/future.toml; touch -d '+1 day' queued/future.toml",
    "urgent": "{{ cat {file}; echo 'priority = 255'; }} > queued/urgent.toml",
    "broken": "echo 'comand = 1' > queued/broken.toml",
    "secret": "cp {file} queued/secret.toml; chmod 600 queued/secret.toml",
    "symlink": "ln -s {file} queued/symlink.toml",
    "directory": "mkdir queued/directory.toml; cp {file} queued/directory.toml/directory.toml",
    "fifo": "mkfifo queued/fifo.toml",
    "staged": "cp {file} .tmp/1.run.1; cp {file} .tmp/x.toml",
    "unissued_0": "mkdir -p jobs/unissued/1/tasks; cp {file} jobs/unissued/1/tasks/unissued_0.toml",
}
"""Ways to put a job into a spool, all of whose directories are open to all, by the name of the job."""
NO_JOB = {"symlink", "directory", "fifo", "staged", "unissued_0"}  # what is there is no job file in the first place


@pytest.mark.parametrize("uid", [0, MALLORY], ids=["root", "mallory"])
def test_no_file_of_a_stranger_runs(shared: Shared, uid: int) -> None:
    """Dropped, moved, linked, put into running/ or as a task: a file of another user does not run, and that is told.

    It is told with and without a dispatcher; what the owner takes over (`chown`) runs.
    """
    shared.share(0o1777, "queued", "held", "running", "done", ".tmp", "jobs")
    file = shared.home / "evil"
    file.write_text(shared.text_of("evil"))
    old = time.time() - 10
    os.utime(file, (old, old))
    shared.own(file, uid=uid)
    for name, script in PLANT.items():
        if name not in ("stray", "again"):
            shared.does(uid, script.format(file=file))
    whose = "root" if uid == 0 else str(MALLORY)
    listed = {row["name"]: row for row in json.loads(shared.by(ALICE, "ls", "--json").stdout)["jobs"]}
    assert listed["dropped"]["state"] == "invalid"
    assert f"belongs to {whose}" in listed["dropped"]["reason"]
    assert f"belongs to {whose}" in shared.by(ALICE, "plan").stdout
    shared.serve()
    for name in ("stray", "again"):
        shared.does(uid, PLANT[name].format(file=file))
    shared.settled()
    refused = sorted(PLANT.keys() - NO_JOB)
    told = {name: shared.told(name, "held" if name == "held" else "queued") for name in refused}
    for name in refused:
        assert f"belongs to {whose}" in told[name], told[name]
        assert "accept_from" in told[name], told[name]
    rows = {row["name"]: row for row in json.loads(shared.by(ALICE, "ls", "--json").stdout)["jobs"]}
    assert {name: (rows[name]["state"], rows[name]["user"]) for name in refused} == dict.fromkeys(
        refused, ("invalid", whose)
    )
    found = shared.by(ALICE, "doctor").stdout
    assert "does not count" in found
    assert shared.by(ALICE, "wait", "dropped").returncode == 4
    assert f"belongs to {whose}" in shared.by(ALICE, "show", "dropped").stdout
    # What the owner does with it makes it no order either: only a copy of hers is one.
    for words in (("edit", "dropped", "--priority", "9"), ("edit", "dropped", "--first"), ("release", "held")):
        shared.by(ALICE, *words)
    shared.settled()
    assert shared.ran() == {}
    assert {path.lstat().st_uid for path in (shared.root / "queued").glob("*.toml")} <= {uid}
    shared.own(shared.root / "queued" / "renamed.toml")
    wait_for(lambda: (shared.root / "done/renamed.toml").exists(), what="the job that is hers now")
    assert not (shared.root / "queued/renamed.toml.error").exists()


def test_a_link_of_a_stranger_to_a_file_of_the_owner_does_not_run(shared: Shared) -> None:
    """A second name of the owner's own file runs where only the owner can make one, and not where others can."""
    text = shared.put(ALICE, "../old.toml", "old")
    shared.serve()
    shared.does(ALICE, f"ln {text} queued/mine.toml")
    wait_for(lambda: (shared.root / "done/mine.toml").exists(), what="her own link")
    (shared.proof / "old").unlink()
    shared.share()
    os.link(text, shared.root / "queued" / "evil.toml")  # as a stranger could where hard links are not protected
    assert "second name" in shared.told("evil")
    shared.settled()
    assert shared.ran() == {}


@pytest.mark.parametrize("mode", [0o666, 0o662, 0o660])
def test_a_file_that_others_can_write_is_nobodys_order(shared: Shared, mode: int) -> None:
    """A job file that its group or everyone may write runs where they cannot reach it, and does not where they can."""
    shared.serve()
    path = shared.put(ALICE, ".tmp/x", "open")
    os.chown(path, ALICE, MALLORY)
    path.chmod(mode)
    path.rename(shared.root / "queued" / "open.toml")
    wait_for(lambda: (shared.root / "done/open.toml").exists(), what="a job in a private spool")
    (shared.proof / "open").unlink()
    shared.share()
    (shared.root / "done/open.toml").rename(shared.root / "queued/open.toml")
    shared.settled()
    assert shared.ran() == {}
    (shared.root / "queued/open.toml").chmod(0o600)
    wait_for(lambda: (shared.root / "done/open.toml").exists(), what="the job once it is its owner's alone")


# Who is accepted.


def _accept(shared: Shared, *names: str) -> None:
    path = shared.root / "config.toml"
    path.write_text(f"accept_from = {json.dumps(names)}\n")
    path.chmod(0o644)
    shared.own(path)


def test_a_change_of_accept_from_counts_at_once(shared: Shared) -> None:
    """A file that waits is accepted, or is no longer, as soon as the configuration says so."""
    shared.share()
    (shared.root / "paused").touch()
    shared.put(MALLORY, "queued/guest.toml", "guest")
    shared.serve()
    shared.told("guest")
    _accept(shared, str(MALLORY))
    error = shared.root / "queued/guest.toml.error"
    wait_for(lambda: not error.exists(), what="the complaint is withdrawn")
    _accept(shared)
    wait_for(error.exists, what="the complaint is back")
    (shared.root / "paused").unlink()
    shared.settled()
    assert shared.ran() == {}


def test_an_accepted_user_submits_and_starts_nothing(shared: Shared) -> None:
    """`spool submit` of an accepted user writes a file that the owner can read, and leaves the dispatcher to them.

    `accept_from` names whose files run too; the run is the owner's, and its accounting the file's owner's.
    """
    shared.share()
    _accept(shared, str(MALLORY))
    done = shared.by(MALLORY, "submit", "--name", "guest", "--workdir", "/", "-c", f"id -u > {shared.proof}/guest")
    assert (done.returncode, done.stdout) == (0, "guest\n"), done.stderr
    assert str(ALICE) in done.stderr  # who can start a dispatcher
    assert not (shared.root / ".lock").exists()
    assert sorted(path.name for path in (shared.root / "queued").iterdir()) == ["guest.toml"]
    shared.put(MALLORY + 1, "queued/other.toml", "other")
    shared.serve()
    wait_for(lambda: (shared.root / "done/guest.toml").exists(), what="the guest's job")
    assert "belongs to" in shared.told("other")
    assert shared.ran() == {"guest": str(ALICE)}
    assert [(line["job"], line["user"]) for line in shared.history()] == [("guest", str(MALLORY))]
    # What is theirs to put there is all that is theirs.
    assert shared.by(MALLORY, "cancel", "guest").returncode == 5
    shared.put(ALICE, "queued/hers.toml", "hers", "depends_on = ['never']\n")
    assert shared.by(MALLORY, "submit", "--replace", "--name", "hers", "--", "true").returncode == 1
    assert shared.by(MALLORY + 1, "submit", "--", "true").returncode == 5


def test_a_submission_whose_fate_is_unknown_is_refused(shared: Shared) -> None:
    """Where the configuration cannot be read, or nothing can be put into queued/, a guest's submission exits with 5."""
    shared.share()
    _accept(shared, str(MALLORY))
    (shared.root / "config.toml").chmod(0o600)
    done = shared.by(MALLORY, "submit", "--", "true")
    assert done.returncode == 5
    assert "config.toml" in done.stderr
    _accept(shared, str(MALLORY))
    (shared.root / "queued").chmod(0o755)
    assert shared.by(MALLORY, "submit", "--", "true").returncode == 5
    assert list((shared.root / "queued").iterdir()) == []


def test_an_unknown_name_in_accept_from_is_told(shared: Shared) -> None:
    """A user or group that this machine does not have stands in the problems and in doctor, and harms nothing else."""
    _accept(shared, "nobody-of-that-name", "@no-such-group", "12399")
    shared.serve()
    shared.settled()
    found = shared.by(ALICE, "doctor").stdout
    for name in ("'nobody-of-that-name'", "'@no-such-group'"[2:]):
        assert name in found
        assert name in shared.said()
    assert "12399" not in found


# Who has stopped a run.


STOPS = {
    "deleted": "rm running/{name}.toml",
    "filed": "mv running/{name}.toml done/{name}.toml",
    "requeued": "mv running/{name}.toml queued/{name}.toml",
    "parked": "mv running/{name}.toml held/{name}.toml",
}


@pytest.mark.parametrize("private", [True, False], ids=["private", "open"])
@pytest.mark.parametrize("how", STOPS)
def test_a_stop_by_a_file_is_no_users_where_others_could_do_it(shared: Shared, how: str, private: bool) -> None:
    """A run whose file is taken away was stopped by someone who can write there; by the owner, if only they could."""
    _accept(shared, str(MALLORY))
    shared.serve()
    if not private:
        shared.share(0o777, "queued", "held", "running", "done")
    shared.put(MALLORY, "queued/guest.toml", "guest", command="sleep 1000")
    run = shared.root / "jobs" / "guest" / "1"
    wait_for((run / "jid").exists, what="the run")
    shared.does(0 if private else MALLORY, STOPS[how].format(name="guest"))
    [line] = wait_for(lambda: [line for line in shared.history() if line["job"] == "guest"], what="its end")
    who = str(ALICE) if private else "someone who can write to running/"
    reason = tomllib.loads((run / "result.toml").read_text())["reason"]
    assert f"by {who}" in reason
    assert line["reason"] == reason
    assert f"by {who}" in shared.by(ALICE, "show", "guest").stdout


def test_a_cancel_by_a_file_of_what_waits_is_no_users_either(shared: Shared) -> None:
    """A waiting job or array that is moved to done/ was cancelled by someone who can write there."""
    (shared.root / "paused").touch()
    shared.serve()
    for name, who in (("hers", str(ALICE)), ("any", "someone who can write to queued/")):
        if name == "any":
            shared.share(0o777, "queued", "done")
        shared.put(ALICE, f"queued/{name}.toml", name)
        shared.saw(name)
        shared.does(MALLORY if name == "any" else 0, f"mv queued/{name}.toml done/{name}.toml")
        result = shared.root / "jobs" / name / "1" / "result.toml"
        wait_for(result.exists, what="its end")
        assert tomllib.loads(result.read_text())["reason"] == f"cancelled by {who} before it started"


def test_the_tasks_of_an_array_are_stopped_by_who_has_cancelled_it(shared: Shared) -> None:
    """The file of an array is deleted: array and tasks are cancelled by someone who can write to running/."""
    _accept(shared, str(MALLORY))
    shared.serve()
    shared.share(0o777, "queued", "running")
    shared.put(MALLORY, "queued/sweep.toml", "sweep", 'array = "0-1"\n', command="sleep 1000")
    wait_for(lambda: (shared.root / "jobs/sweep_1/1/jid").exists(), what="the tasks")
    shared.does(MALLORY, "rm running/sweep.toml")
    wait_for(lambda: (shared.root / "jobs/sweep/1/result.toml").exists(), what="its end")
    for name in ("sweep", "sweep_0"):
        reason = tomllib.loads((shared.root / f"jobs/{name}/1/result.toml").read_text())["reason"]
        assert " running/: " in reason
        assert str(MALLORY) not in reason


# The other files that a dispatcher reads as orders, and the moments between a look and an act.


def test_what_a_stranger_writes_is_no_configuration(shared: Shared) -> None:
    """A config.toml of another user, or one that others can write, changes nothing, and is told."""
    shared.share(0o777, ".", "queued")
    path = shared.root / "config.toml"
    path.write_text(f'accept_from = ["{MALLORY}"]\nprolog = "id -u > {shared.proof}/prolog"\n')
    shared.own(path, uid=MALLORY)
    shared.put(MALLORY, "queued/evil.toml", "evil")
    shared.serve()
    shared.told("evil")
    shared.put(ALICE, "queued/hers.toml", "hers")
    wait_for(lambda: (shared.root / "done/hers.toml").exists(), what="her job")
    assert shared.ran() == {"hers": str(ALICE)}
    assert f"it belongs to {MALLORY}" in shared.said()
    assert f"it belongs to {MALLORY}" in shared.by(ALICE, "doctor").stdout
    assert shared.by(MALLORY, "submit", "--", "true").returncode == 5
    shared.own(path)
    path.chmod(0o666)
    shared.put(ALICE, "queued/again.toml", "again")
    wait_for(lambda: (shared.root / "done/again.toml").exists(), what="another job")
    wait_for(lambda: "config.toml: everyone can write to it" in shared.said(), what="the complaint")
    assert "prolog" not in shared.ran()
    assert "evil" not in shared.ran()


@pytest.mark.parametrize("how", ["foreign", "in a foreign directory", "in an open directory", "in an open spool"])
def test_no_hook_of_a_stranger_is_executed(shared: Shared, how: str) -> None:
    """A hook that another user has made, or can replace, is not executed, and that is told."""
    hooks = shared.root / "hooks"
    hooks.mkdir()
    hook = hooks / "started"
    hook.write_text(f"#!/bin/sh\nid -u > {shared.proof}/hook\n")
    hook.chmod(0o755)
    shared.own(hooks, hook)
    if how == "foreign":
        shared.own(hook, uid=MALLORY)
    elif how == "in a foreign directory":
        shared.own(hooks, uid=MALLORY)
    elif how == "in an open directory":
        shared.share(0o775, "hooks")
        os.chown(hooks, ALICE, MALLORY)
    else:
        shared.root.chmod(0o777)
    shared.put(ALICE, "queued/hers.toml", "hers")
    shared.serve()
    wait_for(lambda: (shared.root / "done/hers.toml").exists(), what="her job")
    wait_for(lambda: "hooks" in " ".join(shared.state()["problems"]), what="the problem")
    shared.stop()
    assert shared.ran() == {"hers": str(ALICE)}


def test_a_strangers_reservation_has_no_effect(shared: Shared) -> None:
    """A reservation that another user has put into reservations/ reserves nothing, and is told beside it."""
    shared.share(0o777, "reservations")
    path = shared.put(MALLORY, "reservations/mine.toml", "mine")
    path.write_text('user = "mallory"\ngpus = 1\nstart = "now"\nduration = "1h"\n')
    os.utime(path, (1, 1))
    shared.serve()
    error = path.with_suffix(".toml.error")
    wait_for(error.exists, what="the complaint")
    assert f"belongs to {MALLORY}" in error.read_text()
    assert "belongs to" in shared.by(ALICE, "reserve", "list", "--json").stdout


def test_a_file_that_replaces_that_of_a_run_changes_nothing(shared: Shared) -> None:
    """A stranger's file in the place of a run's gives it no other limit, neither for the dispatcher nor in a view."""
    shared.serve()
    shared.put(ALICE, "queued/long.toml", "long", 'time_limit = "1h"\n', command="sleep 1000")
    wait_for(lambda: (shared.root / "jobs/long/1/jid").exists(), what="the run")
    shared.share(0o777, "running")
    shared.put(MALLORY, "running/long.toml", "long", 'time_limit = "1s"\n', command="sleep 1000")
    wait_for(lambda: "its file in running/ was changed, but it belongs to" in shared.said(), what="the warning")
    in_force = Spool(str(shared.root)).spec_in_force("long", 1)
    assert in_force.time_limit_ns == 3600 * 10**9
    shared.kill()
    shared.serve()
    shared.settled()
    assert shared.places("long") == ["running"]


def test_swapping_a_file_between_the_look_and_the_start_gains_nothing(shared: Shared) -> None:
    """While a stranger keeps exchanging a file of the owner's for one of theirs, only the owner's text is ever used."""
    shared.share(0o777, "queued", ".tmp")
    shared.changes[LOOKS] = 100_000_000
    shared.put(MALLORY, ".tmp/evil.toml", "evil", 'array = "0-1"\n')
    there, back = "mv .tmp/evil.toml queued/x.toml", "mv queued/x.toml .tmp/evil.toml"
    script = f"while :; do mv queued/x.toml .tmp/y; {there}; {back}; mv .tmp/y queued/x.toml; done 2> /dev/null"
    shared.serve()
    swapper = subprocess.Popen([*as_user(MALLORY), "/bin/sh", "-c", script], cwd=shared.root)
    try:
        for number in range(20):
            shared.put(ALICE, "queued/x.toml", "x", 'array = "0-1"\n' if number % 2 else "")
            shared.settled()
            assert "evil" not in shared.ran()
    finally:
        swapper.kill()
        swapper.wait()
    copies = [path.read_text() for path in shared.root.glob("jobs/*/*/job.toml")]
    assert not [text for text in copies if "evil" in text]


@pytest.mark.parametrize("how", ["directory", "symlink", "queued"])
def test_a_spool_that_is_replaced_is_no_longer_served(shared: Shared, how: str) -> None:
    """Whoever can write above the spool, or in it, puts another in its place: nothing in that one runs."""
    other = shared.home / "theirs"
    for place in ("", *layout.DIRECTORIES):
        (other / place).mkdir()
    shared.own(other, *other.iterdir(), uid=MALLORY)
    shared.home.chmod(0o777)
    shared.serve()
    assert shared.by(ALICE, "doctor", "-q").stdout
    shared.put(MALLORY, "../theirs/queued/evil.toml", "evil")
    if how == "queued":
        shared.share(0o777, ".")
        (other / "queued").chmod(0o777)
        again = "i=$((i + 1)); mv -T queued .old$i 2> /dev/null || :"  # the dispatcher makes the directory again
        shared.does(MALLORY, f"i=0; until ln -sT {other}/queued queued 2> /dev/null; do {again}; done")
        shared.told("evil")
        os.link(shared.put(ALICE, "../old.toml", "old"), other / "queued" / "linked.toml")
        assert "second name" in shared.told("linked")
        assert shared.lives()
    else:
        move = "mv spool away; mv theirs spool" if how == "directory" else "mv spool away; ln -s theirs spool"
        shared.does(MALLORY, f"cd ..; {move}")
        assert shared.process.wait(20) == 5
        shared.process = None
        assert shared.by(ALICE, "submit", "--", "true").returncode == 5
        assert shared.by(ALICE, "dispatch", "--once").returncode == 5
    assert shared.ran() == {}
