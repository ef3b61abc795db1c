"""A small lab's Slurm: what contrib/slurm writes, as its README shows it, and jobs on its four nodes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from long.slurm import cluster
from long.slurm.conftest import spool_on_slurm
from served import Served
from support import ROOT

CONFIGURE, INSTALL = ROOT / "contrib" / "slurm" / "configure.py", ROOT / "contrib" / "slurm" / "install.sh"
PAGE = (ROOT / "contrib" / "slurm" / "README.md").read_text(encoding="utf-8")
# The machines of the page: their processors, MiB of memory, and GPUs in the order of their bus, with minor numbers.
MACHINES: dict[str, tuple[int, int, list[tuple[str, int]]]] = {
    "n1": (16, 64238, []),
    "n2": (32, 128723, [("NVIDIA GeForce RTX 3090", 0), ("NVIDIA GeForce RTX 3090", 1)]),
    "n3": (32, 128723, [("NVIDIA GeForce RTX 3090", 1), ("NVIDIA GeForce RTX 3090", 0)]),
    "n4": (64, 515636, [("NVIDIA A100-SXM4-80GB", index) for index in range(4)]),
}


def _answer(name: str, *, uid: int = 1000, system: str = "debian 12", late_s: int = 0) -> str:
    cpus, memory, gpus = MACHINES[name]
    lines = [f"name={name}", f"cpus={cpus}", f"memory_kib={memory << 10}", f"uid={uid}"]
    lines += [f"time=$(($(date +%s) - {late_s}))", f"system={system}"]
    lines += [f"model={model}\nminor={minor}" for model, minor in gpus]
    return "\n".join(["Welcome to the lab!", *lines])


def _configure(directory: Path, answers: dict[str, str], **options: object) -> subprocess.CompletedProcess[str]:
    """Run the generator over hosts that answer so, instead of ssh."""
    cases = "\n".join(f"{host}) cat <<EOF\n{text}\nEOF\n;;" for host, text in answers.items())
    ssh = directory / "ssh"
    ssh.write_text(f"#!/bin/sh\ncat > /dev/null\ncase $1 in\n{cases}\nesac\n")
    ssh.chmod(0o755)
    command = [sys.executable, str(CONFIGURE), "-o", str(directory / "slurm-lab"), *answers]
    environment = {**os.environ, "SSH": shlex.quote(str(ssh))}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _shown(before: str) -> str:
    """Return the block of the page that follows these words."""
    found = re.search(rf"{re.escape(before)}\n\n```.*\n((?:.*\n)*?)```\n", PAGE)
    assert found is not None, before
    return found[1]


def test_the_page_shows_what_is_written_and_printed(tmp_path: Path) -> None:
    """Its two files and its commands are those for four machines, three of them with GPUs; only we can read the key."""
    done = _configure(tmp_path, {name: _answer(name) for name in MACHINES})
    assert (done.returncode, done.stderr) == (0, "")
    written = tmp_path / "slurm-lab"
    assert (written / "slurm.conf").read_text() == _shown("For four machines, three of them with GPUs, `slurm.conf` is")
    assert (written / "gres.conf").read_text() == _shown("and `gres.conf`")
    assert _shown("`configure.py` has printed:").replace("slurm-lab", str(written)) in done.stdout
    assert _shown("Then look, on any machine:") in done.stdout
    assert sorted(os.listdir(written)) == ["gres.conf", "install.sh", "munge.key", "slurm.conf"]
    key = written / "munge.key"
    assert (stat.S_IMODE(key.stat().st_mode), stat.S_IMODE(written.stat().st_mode)) == (0o600, 0o700)
    before = key.read_bytes()
    assert len(before) == 128
    again = {name: _answer(name) for name in ("n1", "n2")}
    assert _configure(tmp_path, again).returncode == 0
    assert key.read_bytes() == before
    assert "n3" not in (written / "slurm.conf").read_text()


def test_hosts_may_be_addresses_and_doubtful_ones_are_told(tmp_path: Path) -> None:
    """A host under another name gets an address; a name, number, system or clock that will not do is warned of."""
    answers = {
        "me@10.0.0.1": _answer("n1"),
        "n2.lab.example": _answer("n2", uid=1001, system="ubuntu 22.04"),
        "n3": _answer("n3", late_s=3600),
        "other": _answer("n3"),
    }
    done = _configure(tmp_path, answers)
    assert done.returncode == 0
    text = (tmp_path / "slurm-lab" / "slurm.conf").read_text()
    assert "SlurmctldHost=n1(10.0.0.1)\n" in text
    assert "NodeName=n1 NodeAddr=10.0.0.1 CPUs=16 " in text
    assert "NodeName=n2 CPUs=32 " in text
    said = done.stderr.splitlines()
    assert [
        bool(re.search(words, line))
        for words, line in zip(
            ("2 machines .* n3", "user 1000 on n1 and 1001 on n2", "debian 12, n2 is ubuntu 22.04", "clock of n3"),
            said,
            strict=True,
        )
    ] == [True] * 4, said
    done = _configure(tmp_path, {"n1": _answer("n1"), "dead": "ssh: no route"})
    assert done.returncode == 1
    assert "cannot configure dead: it did not say its name" in done.stderr


def test_a_machine_is_asked_for_what_it_has(tmp_path: Path) -> None:
    """Its name, processors, memory and the GPUs of its driver, in the order of their minor numbers."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\ncat <<EOF\n"
        "GPU 00000000:01:00.0\n    Product Name                          : NVIDIA H100 80GB HBM3\n"
        "    Product Brand                         : NVIDIA\n    Minor Number                          : 1\n"
        "GPU 00000000:02:00.0\n    Product Name                          : NVIDIA H100 80GB HBM3\n"
        "    Minor Number                          : 0\nEOF\n"
    )
    smi.chmod(0o755)
    host = socket.gethostname().split(".")[0]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SSH": "false"}
    command = [sys.executable, str(CONFIGURE), "-o", str(tmp_path / "lab"), host]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    text = (tmp_path / "lab" / "slurm.conf").read_text()
    total = int(re.findall(r"^MemTotal: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)[0]) >> 10
    node = f"NodeName={host} CPUs={os.cpu_count()} RealMemory={total - max(total // 20, 512)} Gres=gpu:H100:2\n"
    assert node in text
    assert (tmp_path / "lab" / "gres.conf").read_text() == (
        f"NodeName={host} Name=gpu Type=H100 File=/dev/nvidia0,/dev/nvidia1\n"
    )


@pytest.mark.skipif(os.getuid() != 0, reason="gives a file to the user of munge")
@pytest.mark.skipif(shutil.which("munge") is None, reason="no munge")
@pytest.mark.parametrize(("host", "daemons"), [("n1", "slurmctld slurmd"), ("n2", "slurmd")])
def test_installing_makes_a_controller_of_the_first_machine_alone(tmp_path: Path, host: str, daemons: str) -> None:
    """Each machine gets the files, its packages and its services; the configuration of another cluster stays."""
    assert _configure(tmp_path, {name: _answer(name) for name in ("n1", "n2")}).returncode == 0
    programs, root = tmp_path / "bin", tmp_path / "root"
    programs.mkdir()
    for program, text in {
        "hostname": f"echo {host}",
        "apt-get": f'echo "apt-get $@" >> {tmp_path}/asked',
        "systemctl": f'echo "systemctl $@" >> {tmp_path}/asked',
    }.items():
        (programs / program).write_text(f"#!/bin/sh\n{text}\n")
        (programs / program).chmod(0o755)
    for directory in ("munge", "slurm"):
        (root / "etc" / directory).mkdir(parents=True)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "DESTDIR": str(root)}
    command = ["sh", str(tmp_path / "slurm-lab" / "install.sh")]
    for _ in range(2):  # a second time, too
        done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=True)
        assert done.stdout == f"{host}: ready\n"
    for name in ("slurm.conf", "gres.conf"):
        assert (root / "etc/slurm" / name).read_bytes() == (tmp_path / "slurm-lab" / name).read_bytes()
    key = root / "etc/munge/munge.key"
    assert key.read_bytes() == (tmp_path / "slurm-lab" / "munge.key").read_bytes()
    assert (key.owner(), stat.S_IMODE(key.stat().st_mode)) == ("munge", 0o400)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[1] == f"apt-get -qq install munge slurm-client {daemons}"
    assert [line.split()[-1] for line in asked if "systemctl restart" in line] == ["munge", *daemons.split()] * 2
    (root / "etc/slurm/slurm.conf").write_text("ClusterName=theirs\n")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "of another cluster" in done.stderr
    assert (root / "etc/slurm/slurm.conf").read_text() == "ClusterName=theirs\n"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Give a spool on the cluster of the page, with its own daemons; the test starts the dispatcher."""
    if reason := cluster.unavailable():
        pytest.skip(reason)
    made = cluster.Cluster(
        _shown("For four machines, three of them with GPUs, `slurm.conf` is"), _shown("and `gres.conf`")
    )
    try:
        for name, value in made.variables.items():
            monkeypatch.setenv(name, value)
        with spool_on_slurm(tmp_path / "spool") as spool:
            yield spool
    finally:
        made.close()


@pytest.mark.timeout(300)
def test_jobs_run_on_all_nodes_of_the_page_with_their_gpus(lab: Served) -> None:
    """Each node runs jobs, side by side; GPUs come by type, and memory is limited."""
    lab.start()
    for node in cluster.NODES:
        for which in "ab":  # neither ends before both run, though they state no memory
            there = f"touch {node}{which}; until [ -e {node}a ] && [ -e {node}b ]; do sleep 0.1; done"
            command = f"{there}; echo $SLURMD_NODENAME"
            lab.drop(f"{node}{which}", command, cpus=2, executor_options=[f"--nodelist={node}"])
    gpu = "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"
    lab.drop("any", gpu, gpus=1)
    lab.drop("small", gpu, gpus=2, gpu_type="3090")
    lab.drop("large", gpu, gpus=3, gpu_type="A100")
    lab.drop("none", gpu, gpus=1, gpu_type="H100")
    lab.drop("greedy", "exec tail /dev/zero", memory="50M")
    names = [f"{node}{which}" for node in cluster.NODES for which in "ab"]
    lab.wait_done(*names, "any", "small", "large", "greedy")
    assert {name: lab.log(name) for name in names} == {name: f"{name[:2]}\n" for name in names}
    assert re.fullmatch(r"n[234] \d\n", lab.log("any"))
    assert re.fullmatch(r"n[23] 0,1\n", lab.log("small"))
    assert re.fullmatch(r"n4 \d,\d,\d\n", lab.log("large"))
    assert lab.outcome("greedy") == "out_of_memory"
    lab.wait_place("none", "held")
