"""Jobs in containers, by a fake runtime whose containers no run has as descendants."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from served import LOOKS, Served, alive
from support import ROOT

EXECUTORS = ("process", "tmux")


class Machine:
    """A spool, and a machine with a fake runtime."""

    def __init__(self, spool: Served, state: Path, program: Path) -> None:
        self.spool = spool
        self.state = state
        self.program = program

    def install(self) -> None:
        """Install the runtime."""
        staged = self.program.with_name("staged")
        staged.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/extras/containers/fake_runtime.py "$@"\n')
        staged.chmod(0o755)
        staged.rename(self.program)

    def names(self) -> list[str]:
        """Return the containers that the runtime knows."""
        return sorted(path.stem for path in self.state.glob("*.json"))

    def options(self, job: str, run: int = 1) -> list[list[str]]:
        """Return the options with which a container was started."""
        (path,) = self.state.glob(f"*-{job}-{run}.json")
        return json.loads(path.read_text())  # type: ignore[no-any-return]

    def wait_pid(self, job: str, run: int = 1) -> int:
        """Wait until a container runs, and return the pid of its first process."""
        path = self.spool.until(lambda: next(self.state.glob(f"*-{job}-{run}.pid"), None), f"the container of {job}")
        return int(path.read_text())


@pytest.fixture
def machine(tmp_path: Path, executor: str | None) -> Iterator[Machine]:
    """Give a machine where docker can be installed, and has no other runtime."""
    state, programs = tmp_path / "state", tmp_path / "bin"
    state.mkdir()
    programs.mkdir()
    for name in ("tmux", "env", "sh"):
        for folder in os.defpath.split(":"):
            if Path(folder, name).exists():
                (programs / name).symlink_to(Path(folder, name))
                break
    with Served(tmp_path / "spool", {"PATH": str(programs)}, executor) as spool:
        (spool.root / "config.toml").write_text("cpus = 4\n")
        spool.changes[LOOKS] = 200_000_000
        made = Machine(spool, state, programs / "docker")
        yield made


def drop(machine: Machine, name: str, command: object, **keys: object) -> None:
    """Submit a job in a container, with what the fake needs to find its state."""
    env = {"FAKE_RUNTIME": str(machine.state), **keys.pop("env", {})}  # type: ignore[dict-item]
    machine.spool.drop(name, command, **{"container": "an/image:1", "env": env, **keys})


def test_a_job_runs_in_its_container_with_what_it_was_given(machine: Machine, tmp_path: Path) -> None:
    """Its environment, the lines of its prolog, its setup, directory and exit code; nothing of the host's PATH."""
    machine.install()
    machine.spool.start()
    (tmp_path / "it's, here").mkdir()
    drop(
        machine,
        "inside",
        ["sh", "-c", 'echo "$IMAGE|$OWN|$TOKEN|$X|$SPOOL_JOB|$SPOOL_CPUS|$PATH"; pwd; exit 7'],
        env={"OWN": "it's", "PATH": "/usr/bin:/bin:/host", "LD_LIBRARY_PATH": "/host"},
        prolog='echo "TOKEN=a b" >> "$SPOOL_ENV"',
        setup="X=set; export X",
        workdir=str(tmp_path / "it's, here"),
        cpus=2,
        memory="100M",
    )
    result = machine.spool.wait_done("inside")
    assert (result["outcome"], result["exit_code"]) == ("failed", 7)
    assert machine.spool.log("inside") == f"an/image:1|it's|a b|set|inside|2|{os.defpath}\n{tmp_path}/it's, here\n"
    assert machine.names() == []


def test_a_text_a_script_and_a_missing_program(machine: Machine) -> None:
    """A text is for the shell of the image; a script is executed in the metadir, which is there; 127 is as outside."""
    machine.install()
    machine.spool.start()
    drop(machine, "text", 'echo "$0 $SPOOL_RUN"', shell="/bin/bash")
    drop(machine, "script", ["name", "1"], script='#!/bin/sh\necho "$0 $1"\n')
    drop(machine, "missing", ["no-such-program"])
    for name in ("text", "script", "missing"):
        machine.spool.wait_done(name)
    assert machine.spool.log("text") == "/bin/bash 1\n"
    assert machine.spool.log("script") == f"{machine.spool.root}/jobs/script/1/script 1\n"
    assert (machine.spool.result("missing") or {})["exit_code"] == 127


def test_a_cancel_reaches_the_container(machine: Machine) -> None:
    """The program inside hears TERM, none of its processes is left, and the container is removed.

    What removes it may be ended with the run; the next container of the spool removes it then.
    """
    machine.install()
    machine.spool.start()
    drop(machine, "stopped", "trap 'echo stopping; exit 0' TERM; echo up; while :; do sleep 0.05; done")
    pid = machine.wait_pid("stopped")
    machine.spool.until(lambda: "up" in machine.spool.log("stopped"), "the trap")
    machine.spool.path("running", "stopped").unlink()
    machine.spool.wait_done("stopped")
    assert machine.spool.outcome("stopped") == "cancelled"
    assert "stopping" in machine.spool.log("stopped")
    assert not alive(pid)
    drop(machine, "next", "true")
    machine.spool.wait_done("next")
    assert machine.names() == []


def test_a_container_ends_with_a_run_whose_wrapper_and_dispatcher_are_killed(machine: Machine) -> None:
    """The next dispatcher ends the container that a daemon has started, and the next container removes its records."""
    machine.install()
    machine.spool.start()
    drop(machine, "orphan", ["sh", "-c", "trap '' HUP TERM; sleep 600 & wait"], requeue=False, kill_grace="100ms")
    pid = machine.wait_pid("orphan")
    machine.spool.kill()
    os.kill(machine.spool.pid("orphan"), signal.SIGKILL)
    assert alive(pid)
    machine.spool.start()
    machine.spool.wait_done("orphan")
    assert machine.spool.outcome("orphan") == "lost"
    assert not alive(pid)
    assert [name.rpartition("-")[0].rpartition("-")[2] for name in machine.names()] == ["orphan"]
    drop(machine, "next", ["true"])
    machine.spool.wait_done("next")
    assert machine.names() == []


def test_a_container_that_goes_on_is_not_removed_by_another(machine: Machine) -> None:
    """Only those of runs that are over are."""
    machine.install()
    machine.spool.start()
    drop(machine, "long", ["sleep", "600"])
    pid = machine.wait_pid("long")
    drop(machine, "short", ["true"])
    machine.spool.wait_done("short")
    assert alive(pid)
    assert len(machine.names()) == 1


def test_a_container_that_is_out_of_memory_is_a_run_out_of_memory(machine: Machine) -> None:
    """The runtime's own word counts, since its limit is one that spool does not see."""
    machine.install()
    machine.spool.start()
    drop(machine, "large", 'touch "$STATE.oom"; kill -9 $$', memory="200M", env={"STATE": str(machine.state / "x")})
    machine.spool.wait_done("large")
    assert machine.spool.outcome("large") == "failed"
    title = machine.state / (machine.state / "removed").read_text().splitlines()[-1].replace("large-1", "larger-1")
    drop(machine, "larger", 'touch "$STATE.oom"; kill -9 $$', memory="200M", env={"STATE": str(title)})
    machine.spool.wait_done("larger")
    assert machine.spool.outcome("larger") == "out_of_memory"


def test_a_job_waits_for_a_runtime(machine: Machine) -> None:
    """While none is installed, its reason says what to install; then it starts. Other jobs do not wait."""
    machine.spool.start()
    drop(machine, "patient", ["echo", "ran"])
    machine.spool.wait_reason("patient", "its container needs podman or docker or apptainer")
    machine.spool.completes("other", "true")
    machine.install()
    machine.spool.wait_done("patient")
    assert machine.spool.log("patient") == "ran\n"


def test_a_job_waits_for_the_daemon_of_its_runtime(machine: Machine) -> None:
    """Docker without its daemon is as good as no docker: the job waits with what docker says, and does not fail."""
    machine.install()
    daemon = machine.state / "daemon"
    said = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
    text = machine.program.read_text().replace("exec", f"[ -e {daemon} ] || {{ echo '{said}' >&2; exit 1; }}\nexec")
    machine.program.write_text(text)
    machine.spool.start()
    drop(machine, "patient", ["echo", "ran"])
    machine.spool.wait_reason("patient", "Cannot connect to the Docker daemon")
    daemon.touch()
    machine.spool.wait_done("patient")
    assert machine.spool.log("patient") == "ran\n"
    assert machine.spool.result("patient", 1) is not None


def test_the_example_runs(machine: Machine) -> None:
    """As it is, in the folder to which it is copied."""
    machine.install()
    machine.spool.start()
    text = (ROOT / "examples" / "container" / "python.toml").read_text()
    folder = machine.spool.root.parent / "folder"
    folder.mkdir()
    text = text.replace("~/spool-examples/container", str(folder))
    text += f'\n[env]\nFAKE_RUNTIME = "{machine.state}"\n'
    staged = machine.spool.root / ".tmp" / "python"
    staged.write_text(text)
    staged.rename(machine.spool.path("queued", "python"))
    machine.spool.wait_done("python")
    assert machine.spool.outcome("python") == "finished"


def test_a_run_in_a_container_has_no_python_of_the_machine_in_its_record(machine: Machine) -> None:
    """Its commit is captured; the packages of the host, which it does not see, are not."""
    machine.install()
    machine.spool.root.joinpath("config.toml").write_text("capture = true\n")
    machine.spool.start()
    machine.spool.completes("inside", ["python3", "-c", "0"], container="ml/image")
    record = machine.spool.record("inside", "capture.toml") or ""
    assert "kernel" in record
    assert "[python]" not in record
