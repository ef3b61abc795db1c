"""A real Slurm with several nodes on this machine, without systemd and without a database, for the tests.

Debian's packages are enough: `slurm-wlm` and `munge`. Each slurmd calls itself a node of its own; its GPUs are device
files like /dev/null.

A configuration is that of a cluster of real machines. What must differ where all of them are one is put in its place
when the cluster starts: names, ports, paths, users, and hardware that is not there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from long.daemons import Daemons
from served import Served
from support import free_ports, wait_for

NODES = ("n1", "n2", "n3", "n4")
CPUS_OF_A_NODE = 8
GPUS_OF_A_NODE = 2
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "srun")

CONFIGURATION = f"""\
ClusterName=test
SlurmctldTimeout=10
SlurmdTimeout=10
MpiDefault=none
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
KillWait=2
InactiveLimit=0
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
Licenses=solver:1
ReturnToService=2
GresTypes=gpu
NodeName={",".join(NODES)} CPUs={CPUS_OF_A_NODE} RealMemory=4000 Gres=gpu:fake:{GPUS_OF_A_NODE}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PreemptMode=OFF
PartitionName=small Nodes=n1 MaxTime=5 State=UP PreemptMode=OFF
PartitionName=low Nodes=n1 PriorityTier=1 State=UP
PartitionName=high Nodes=n1 PriorityTier=10 State=UP PreemptMode=OFF
"""
GPUS = "".join(
    f"NodeName={node} Name=gpu Type=fake File={','.join(f'/dev/nvidia{index}' for index in range(GPUS_OF_A_NODE))}\n"
    for node in NODES
)


def unavailable() -> str | None:
    """Return why no cluster can be started here, None if one can."""
    if missing := [name for name in PROGRAMS if _program(name) is None]:
        return f"no Slurm: {', '.join(missing)} not found (Debian: slurm-wlm and munge)"
    return None if os.getuid() == 0 else "Slurm's daemons are started by root alone"


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin")))


def _is_newer(path: Path, than_ns: int) -> bool:
    return path.exists() and path.stat().st_mtime_ns > than_ns


class Cluster(Daemons):
    """A running Slurm."""

    def __init__(self, configuration: str = CONFIGURATION, gpus: str = GPUS, *, min_job_age: int = 300) -> None:
        """Start it and wait until every node is idle. *min_job_age*: how many seconds Slurm knows a job that ended.

        *configuration* and *gpus* are the slurm.conf and gres.conf of a cluster of the machines `NODES`.
        """
        super().__init__("slurm")
        self.name = _value(configuration, "ClusterName")
        self._ports = iter(free_ports(len(NODES) + 1))
        self._min_job_age = min_job_age
        for part in ("state", "spool", "dev", "munge"):
            (self.directory / part).mkdir(mode=0o755)
        self.variables = {"SLURM_CONF": str(self.directory / "slurm.conf")}
        self._keep()
        try:
            self._configure(configuration, gpus)
            self._start_munge()
            self.start_controller()
            for node in NODES:
                self.start_node(node)
            wait_for(self.all_idle, what="all nodes to be idle")
        except BaseException:
            self.close()
            raise

    def _configure(self, configuration: str, gpus: str) -> None:
        for key, value in self._own_values().items():
            line = f"{key}={value}"
            configuration, times = re.subn(f"^{key}=.*$", line, configuration, flags=re.MULTILINE)
            if not times:
                configuration = f"{line}\n{configuration}"
        configuration = re.sub("^NodeName=.*$", self._nodes, configuration, flags=re.MULTILINE)
        (self.directory / "slurm.conf").write_text(configuration)
        gpus = re.sub("^NodeName=(.*?) .*$", self._devices, gpus, flags=re.MULTILINE)
        (self.directory / "gres.conf").write_text(gpus)

    def _own_values(self) -> dict[str, str]:
        """Return the keys whose values differ on this machine from those of any cluster."""
        at = str(self.directory)
        return {
            "SlurmctldHost": f"{_host()}(127.0.0.1)",
            "SlurmctldPort": str(next(self._ports)),
            "SlurmUser": "root",
            "AuthInfo": f"socket={at}/munge/socket",
            "StateSaveLocation": f"{at}/state",
            "SlurmdSpoolDir": f"{at}/spool/%n",
            "SlurmctldPidFile": f"{at}/slurmctld.pid",
            "SlurmdPidFile": f"{at}/slurmd.%n.pid",
            "SlurmctldLogFile": f"{at}/log/slurmctld.log",
            "SlurmdLogFile": f"{at}/log/slurmd.%n.log",
            "MailProg": "/bin/true",
            "SlurmdParameters": "config_overrides",  # the nodes have more than this machine
            "TaskPlugin": "task/none",  # likewise: no processor can be bound that is not there
            "MinJobAge": str(self._min_job_age),
        }

    def _nodes(self, line: re.Match[str]) -> str:
        """Return *line* for each node in it, on this machine."""
        names, *rest = line[0].partition("=")[2].split()
        kept = " ".join(word for word in rest if not word.startswith("NodeAddr="))
        return "\n".join(
            f"NodeName={node} NodeHostname={_host()} NodeAddr=127.0.0.1 Port={next(self._ports)} {kept}"
            for node in names.split(",")
        )

    def _devices(self, line: re.Match[str]) -> str:
        """Return *line* with device files of its own for each node, and make them: characters, as /dev/null is."""
        text = line[0].replace("/dev/", f"{self.directory}/dev/{line[1]}-")
        for file in _value(text, "File").split(","):
            os.mknod(file, 0o666 | 0o020000, os.makedev(1, 3))
        return text

    def _start_munge(self) -> None:
        munge = self.directory / "munge"
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        options = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._start("munged", "--foreground", "--force", *(f"--{o}={munge / f}" for o, f in options.items()))
        wait_for((munge / "socket").exists, what="munge's socket")

    # The daemons, one by one.

    def start_controller(self) -> None:
        """Start slurmctld and wait until it answers."""
        self._start("slurmctld", "-D", "-f", self.variables["SLURM_CONF"])
        wait_for(lambda: self.command("scontrol", "ping", check=False).returncode == 0, what="the controller")

    def kill_controller(self) -> None:
        """Kill slurmctld at once, as a crash does, when it has saved what it knows now.

        It saves some seconds after it has answered. What it has not saved it forgets, and what has begun since then it
        cancels: so nothing begins from now on until it is back.
        """
        for name in re.findall("^PartitionName=([^ ]+)", self._file.read_text(), flags=re.MULTILINE):
            self.command("scontrol", "update", f"PartitionName={name}", "State=DOWN")
        saved = self.directory / "state" / "job_state"
        for _ in range(8):  # what changes while it saves may wait for the next change
            asked_ns = time.time_ns()
            self.command("sbatch", "--hold", "--comment=to be saved", "--output=/dev/null", "--wrap=true")
            with contextlib.suppress(AssertionError):
                wait_for(partial(_is_newer, saved, asked_ns), 15)
                break
        else:
            raise AssertionError("the controller does not save its state")
        self._kill("slurmctld")

    def start_node(self, node: str) -> None:
        """Start the slurmd of *node*."""
        self._start(f"slurmd-{node}", "-D", "-N", node, "-f", self.variables["SLURM_CONF"])

    def kill_node(self, node: str) -> None:
        """Kill the slurmd of *node*. What runs there goes on."""
        self._kill(f"slurmd-{node}")

    def _start(self, name: str, *arguments: str) -> None:
        program = _program(name.partition("-")[0])
        assert program is not None
        super()._start(name, program, *arguments)

    def forget_after(self, seconds: int) -> None:
        """Have it forget jobs that many seconds after their end, until :meth:`clear`."""
        before = self._file.read_text()
        text = re.sub("^MinJobAge=.*$", f"MinJobAge={seconds}", before, flags=re.MULTILINE)
        if text != before:
            self._file.write_text(text)
            self.command("scontrol", "reconfigure")

    @property
    def _file(self) -> Path:
        return Path(self.variables["SLURM_CONF"])

    # What Slurm says.

    def set_nodes(self, state: str, *nodes: str) -> None:
        """Drain nodes, or set them down; all of them if none is named."""
        names = ",".join(nodes or NODES)
        self.command("scontrol", "update", f"nodename={names}", f"state={state}", "reason=a test of spool")

    def resume(self, *nodes: str) -> None:
        """Bring nodes back, and wait until they are; all of them if none is named."""
        well = {"idle", "mixed", "allocated", "completing"}
        wait_for(lambda: self._resumed(nodes or NODES) <= well, what=f"{nodes} to be back")

    def all_idle(self) -> bool:
        """Tell whether every node is there and has nothing to do."""
        return self._states(NODES) == {"idle"}

    def _states(self, nodes: Sequence[str]) -> set[str]:
        words = ("sinfo", "-h", "-N", "-p", "main", "-n", ",".join(nodes), "-o", "%T")
        return set(self.command(*words, check=False).stdout.split()) or {"unknown"}

    def _resumed(self, nodes: Sequence[str]) -> set[str]:
        for node in nodes:  # what is well already refuses that, and what has just come back may be set down once more
            self.command("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        return self._states(nodes)

    def jobs(self) -> list[dict[str, str]]:
        """Return all jobs that Slurm knows: id, name, state, reason, node, comment."""
        keys = ("id", "name", "state", "reason", "node", "comment")
        lines = self.command("squeue", "-h", "-r", "-t", "all", "-o", "%i\t%j\t%T\t%r\t%N\t%k").stdout.splitlines()
        return [dict(zip(keys, line.split("\t"), strict=True)) for line in lines]

    def states(self) -> dict[str, str]:
        """Return the states of all jobs that Slurm knows, by their ids."""
        return {job["id"]: job["state"] for job in self.jobs()}

    def clear(self) -> None:
        """Cancel all jobs, bring all daemons and nodes back and wait until nothing is left, for the next test."""
        if "slurmctld" in self._killed:
            self.start_controller()
        for node in NODES:
            if f"slurmd-{node}" in self._killed:
                self.start_node(node)
        self.forget_after(self._min_job_age)
        self.command("scancel", "--user=root", check=False)
        wait_for(lambda: self.all_idle() or self._resumed(NODES) == {"idle"}, what="the cluster to be idle again")


def engine_id(served: Served, name: str, run: int = 1) -> str:
    """Return the id of a run in Slurm, once it is known."""
    return served.until(lambda: (served.record(name, "engine", run) or "").split()[2:], f"the id of {name}")[0]


def path_with(directory: Path, program: str, text: str) -> str:
    """Put a script before one of Slurm's programs, `$real` in it, and return the PATH that finds the script first."""
    directory.mkdir(exist_ok=True)
    path = directory / program
    path.write_text(f"#!/bin/sh\nreal={shutil.which(program)}\n{text}\n")
    path.chmod(0o755)
    return f"{directory}{os.pathsep}{os.environ['PATH']}"


def _value(text: str, key: str) -> str:
    """Return the value of *key* in a configuration."""
    found = re.search(rf"\b{key}=(\S+)", text)
    assert found is not None, key
    return found[1]


def _host() -> str:
    return socket.gethostname().split(".")[0]
