"""How a job file states the container of its command, how the commands change that, and the command lines of it."""

from __future__ import annotations

import csv
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from calling import Command, put_job
from spool.core.errors import InvalidJob
from spool.core.model import Grant, Spec
from spool.extras.containers import runtimes as container
from spool.extras.containers.runtimes import Container
from spool.formats import jobfile
from spool.formats.wrapper import Assignments, Surroundings

GPUS = Grant(cpus=3, memory_bytes=100 << 20, gpu_uuids=("GPU-a", "GPU-b"), gpu_indices=(0, 1))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the only directory in which programs are looked for."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def install(place: Path, *names: str) -> None:
    """Install programs."""
    for name in names:
        (place / name).write_text("#!/bin/sh\n")
        (place / name).chmod(0o755)


def contained(stated: Container, words: tuple[str, ...], grant: Grant = GPUS, **keys: object) -> Assignments:
    """Return what is written for a run of *words* in a container, with these of its variables and assignments."""
    odd = {"PATH": "/x", "LD_PRELOAD": "x", "BASH_FUNC_f%%": "()", "CONDA_PREFIX": "/c", "SPOOL_JOB": "j"}
    environment = keys.pop("environment", {"A": "1", **odd})
    around = Surroundings("-", "host", terminal=keys.pop("terminal", None))  # type: ignore[arg-type]
    written = Assignments(
        "/s/jobs/j/2",
        words,
        around,
        {**environment, "SPOOL_DIR": "/s"},  # type: ignore[dict-item]
        **{"workdir": "/work", **keys},  # type: ignore[arg-type]
    )
    spec = Spec(command=words, parts=(("containers", stated),))
    return container.launched(spec, written, SimpleNamespace(grant=grant, name="j", run=2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stated", "there", "used"),
    [
        (Container("x"), ["docker", "apptainer"], "docker"),
        (Container("x"), ["docker", "podman"], "podman"),
        (Container("x"), ["singularity"], "singularity"),
        (Container("x", "docker"), ["docker", "podman"], "docker"),
        (Container("x", "docker"), ["podman"], None),
        (Container("/images/x.sif"), ["docker", "podman"], None),
        (Container("library://x"), ["docker", "podman", "apptainer"], "apptainer"),
        (Container("docker://x"), ["podman"], "podman"),
        (Container("x"), [], None),
    ],
)
def test_the_runtime_is_the_first_that_is_there_and_knows_the_image(
    place: Path, stated: Container, there: list[str], used: str | None
) -> None:
    """Without one the reason says what to install."""
    install(place, *there)
    why = container.problem(Spec(command="x", parts=(("containers", stated),)))
    if used is None:
        assert why.startswith("its container needs ")
        assert why.endswith(("install it", "install one of them"))
    else:
        assert why is None
        assert contained(stated, ("true",)).command[0] == str(place / used)


def test_a_daemon_that_hangs_is_waited_for_once(place: Path) -> None:
    """The question stays open, and its answer counts when it comes."""
    install(place, "docker")
    os.mkfifo(place / "go")
    (place / "docker").write_text(f"#!/bin/sh\n: < {place}/go\n")
    spec = Spec(command="x", parts=(("containers", Container("x", "docker")),))
    assert "has not answered" in container.problem(spec)
    begun = time.monotonic()
    assert all("has not answered" in container.problem(spec) for _ in range(9))
    assert time.monotonic() - begun < 1
    (place / "go").write_text("")
    ((_, asked),) = container._ASKED.values()
    asked.wait()
    assert container.problem(spec) is None


@pytest.mark.parametrize("name", ["podman", "docker"])
def test_a_container_gets_what_was_granted(place: Path, name: str) -> None:
    """CPUs, memory and exactly these GPUs; the user; the variables of the job that are not the host's."""
    install(place, name)
    words = contained(Container("docker://x:1", options=("-v /a b:/c", "--cpus=9")), ("a", "-b", "c d")).command
    assert words[1] == "run"
    assert words[-4:] == ("--entrypoint=a", "x:1", "-b", "c d")
    assert words[-7:-4] == ("-v", "/a b:/c", "--cpus=9")  # the last one counts
    assert {"--cpus=3", f"--memory={100 << 20}b", "--workdir=/work", f"--user={os.geteuid()}:{os.getegid()}"} <= {
        *words
    }
    gpus = {word for word in words if "GPU-" in word}
    each = {"--device=nvidia.com/gpu=GPU-a", "--device=nvidia.com/gpu=GPU-b"}
    assert gpus == ({'--gpus="device=GPU-a,GPU-b"'} if name == "docker" else each)
    assert [word for word in words if word.startswith("--env=")] == ["--env=A", "--env=SPOOL_JOB", "--env=SPOOL_DIR"]
    none = contained(Container("x"), ("a",), Grant(cpus=0)).command
    assert "--env=NVIDIA_VISIBLE_DEVICES=void" in none
    assert not [word for word in none if word.startswith(("--cpus", "--memory", "--gpus", "--device", "--interactive"))]
    assert "--interactive" in contained(Container("x"), ("a",), terminal="own").command


@pytest.mark.parametrize("name", ["podman", "docker", "apptainer"])
def test_gpus_by_index_are_counted_in_the_container(place: Path, name: str) -> None:
    """Docker and podman show the run's GPUs alone, so the first is 0; apptainer shows all."""
    install(place, name)
    grant = Grant(cpus=1, gpu_uuids=("GPU-a", "GPU-b"), gpu_indices=(1, 3))
    words = contained(Container("x"), ("a",), grant, environment={"CUDA_VISIBLE_DEVICES": "1,3"}).command
    assert ("--env=CUDA_VISIBLE_DEVICES=0,1" in words) is (name != "apptainer")
    words = contained(Container("x"), ("a",), grant, environment={"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}).command
    assert not [word for word in words if word.startswith("--env=CUDA_VISIBLE_DEVICES=")]


@pytest.mark.parametrize("name", ["podman", "docker", "apptainer"])
def test_gpus_of_amd_are_passed_as_devices(place: Path, name: str) -> None:
    """Which of them is the run's, `ROCR_VISIBLE_DEVICES` says, which goes along; none is asked of NVIDIA's toolkit."""
    install(place, name)
    grant = Grant(cpus=1, gpu_uuids=("GPU-0123456789abcdef",), gpu_indices=(0,))
    words = contained(Container("x"), ("a",), grant, environment={"ROCR_VISIBLE_DEVICES": grant.gpu_uuids[0]}).command
    if name == "apptainer":
        assert ("--rocm" in words, "--nv" in words) == (True, False)
    else:
        assert {"--device=/dev/kfd", "--device=/dev/dri", "--env=ROCR_VISIBLE_DEVICES"} <= {*words}
        assert [word for word in words if word.startswith("--group-add=")]
        assert not [word for word in words if "GPU-" in word]


@pytest.mark.parametrize(
    ("name", "uid", "bound"), [("docker", 1000, True), ("podman", 0, True), ("podman", 1000, False)]
)
def test_pinned_cpus_are_those_of_the_container(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str, uid: int, bound: bool
) -> None:
    """A daemon's container does not inherit the affinity of the run; podman without root may not set any."""
    install(place, name)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    words = contained(Container("x"), ("a",), Grant(cpus=2, cpu_list="0-1")).command
    assert ("--cpuset-cpus=0-1" in words) is bound


@pytest.mark.parametrize("path", ["/a,b", '/a"b', "/a:b c", "/it's"])
def test_odd_paths_are_mounted_as_they_are(place: Path, path: str) -> None:
    """The option is a line of CSV."""
    install(place, "podman")
    words = contained(Container("x"), ("a",), workdir=path).command
    (option,) = [word for word in words if word.startswith("--mount") and "/s/jobs" not in word]
    (fields,) = csv.reader([option.removeprefix("--mount=")])
    assert fields == ["type=bind", f"source={path}", f"destination={path}"]


def test_a_container_of_apptainer_is_within_the_run(place: Path) -> None:
    """It needs no limits of its own and leaves nothing behind; GPUs are there if the run has some."""
    install(place, "apptainer")
    made = contained(Container("x:1", options=("--writable-tmpfs",)), ("a", "b"))
    assert made.command[1] == "exec"
    assert made.command[-5:] == ("--nv", "--writable-tmpfs", "docker://x:1", "a", "b")
    assert (made.prep, made.end) == (None, None)
    assert "--nv" not in contained(Container("/x.sif"), ("a",), Grant(cpus=1)).command
    assert contained(Container("~/x.sif"), ("a",)).command[-2] == os.path.expanduser("~/x.sif")


# The keys.


def stated_in(text: bytes) -> object:
    """Return the container that a job file states."""
    return jobfile.parse(text, name="a").part("containers")


def test_a_golden_job_file_loads_for_ever() -> None:
    """A job that was right once keeps its meaning in every later version."""
    found = stated_in((Path(__file__).parent / "golden" / "job.toml").read_bytes())
    assert found == Container("pytorch/pytorch", "docker", ("--ipc=host",))


def test_a_short_form_becomes_a_table_and_stays_in_it(spool: Command, spool_root: Path) -> None:
    """An option of a container keeps its image, and another image its options."""
    path = put_job(spool_root, "a", 'command = "true"\ncontainer = "x:1"\ncpus = 2\n', "held")
    assert spool("edit", "a", "--set=container.options=--volume=/a:/b").code == 0
    assert stated_in(path.read_bytes()) == Container("x:1", None, ("--volume=/a:/b",))
    assert "cpus = 2" in path.read_text()
    assert spool("edit", "a", "--container", "x:2").code == 0
    assert stated_in(path.read_bytes()) == Container("x:2", None, ("--volume=/a:/b",))
    assert spool("edit", "a", "--unset", "container.options").code == 0
    assert stated_in(path.read_bytes()) == Container("x:2")


@pytest.mark.parametrize(
    "value",
    [
        *("3", '{ runtime = "docker" }', '"--volume=/:/x"', '{ image = "x", runtime = "dokcer" }'),
        *('{ image = "x", options = ["--name=x"] }', '{ image = "x", options = ["-itd"] }'),
        *('{ image = "x", options = ["-v", "/a:/a"] }', '{ image = "x", options = ["/data:/data"] }'),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_with_its_key_and_line(value: str) -> None:
    """One mistake gives one problem, with what was meant if that is known."""
    with pytest.raises(InvalidJob) as error:
        stated_in(f'command = "x"\ncontainer = {value}\n'.encode())
    (problem,) = error.value.problems
    assert problem.message.startswith('"container')
    assert problem.line in (None, 2)
    assert "dokcer" not in value or problem.message.endswith('did you mean "docker"?')


def test_options_of_a_submission_state_it(spool: Command, spool_root: Path) -> None:
    """Image and options come out as a person would have written them; an image without a name is refused."""
    options = ("--set=container.options=--ipc=host", "--set=container.options=-v /a:/a")
    assert spool("submit", "--name", "a", "--container", "an/image", *options, "--", "true").code == 0
    found = stated_in((spool_root / "queued" / "a.toml").read_bytes())
    assert found == Container("an/image", None, ("--ipc=host", "-v /a:/a"))
    said = spool("submit", "--container", "", "--", "true")
    assert (said.code, "--container: " in said.err) == (4, True)
