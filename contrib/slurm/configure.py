#!/usr/bin/env python3
"""Write the configuration of a Slurm cluster of a few machines, from what each of them says it has.

Usage: configure.py [-o DIRECTORY] HOST...

It asks each HOST over ssh for its name, processors, memory and NVIDIA GPUs, and changes nothing there. Into DIRECTORY
(by default `slurm-lab`) it writes slurm.conf, gres.conf, the key of munge and install.sh, and then prints the commands
that install them. The first HOST runs the controller. Run it again after a change of the machines: the key stays.

The variable SSH has another command for `ssh`. Python 3.8 is enough. docs/CLUSTER.md of spool says more.
"""

import argparse
import collections
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

PROBE = r"""
echo "name=$(hostname -s)"
echo "cpus=$(nproc --all)"
sed -n 's/^MemTotal: *\([0-9]*\) kB$/memory_kib=\1/p' /proc/meminfo
echo "uid=$(id -u)"
echo "time=$(date +%s)"
echo "system=$(. /etc/os-release; echo "$ID $VERSION_ID")"
nvidia-smi -q 2> /dev/null | sed -n 's/^ *Product Name *: */model=/p; s/^ *Minor Number *: */minor=/p'
"""

SLURM_CONF = """\
# Written by configure.py of spool. The same file on every machine; `man slurm.conf` explains each line.
ClusterName=lab
SlurmctldHost={controller}
SlurmUser=slurm
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU={memory_of_a_cpu}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=10
JobAcctGatherParams=UsePss,OverMemoryKill
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

NEXT = """\
Look at {directory}/slurm.conf. Then install it, here, as a user who may use sudo on every machine:

for host in {hosts}; do
    there=$(ssh "$host" mktemp -d)
    scp -q {directory}/* "$host:$there/" && ssh -t "$host" sudo sh "$there/install.sh"
    ssh "$host" rm -r "$there"
done

Afterwards, on any of them:

sinfo
srun --nodes={count} hostname
"""


class Machine:
    """What a host has said of itself."""

    def __init__(self, host, text):
        """Read the answer of the probe; ValueError if something is missing."""
        self.host = host.rpartition("@")[2]
        said = re.findall(r"^(\w+)=(.+)$", text, re.MULTILINE)  # a login may print other lines
        one = dict(said)
        try:
            self.name, self.system = one["name"], one["system"]
            self.cpus, self.uid, self.time = int(one["cpus"]), int(one["uid"]), int(one["time"])
            total = int(one["memory_kib"]) >> 10
        except KeyError as error:
            raise ValueError(f"it did not say its {error.args[0]}") from None
        # A new kernel may count a little less than before, and Slurm refuses a node that has less than is written.
        self.memory = total - max(total // 20, 512)
        models = [kind(value) for key, value in said if key == "model"]
        minors = [int(value) for key, value in said if key == "minor" and value.isdigit()]
        self.gpus = collections.defaultdict(list)
        for model, minor in zip(models, minors):  # noqa: B905 - Python 3.8
            self.gpus[model].append(minor)

    def address(self):
        """Return how others reach it, if that is not its name."""
        return "" if self.host.partition(".")[0] == self.name else self.host

    def node(self):
        """Return its line of slurm.conf."""
        words = [f"NodeName={self.name}", f"CPUs={self.cpus}", f"RealMemory={self.memory}"]
        if self.address():
            words.insert(1, f"NodeAddr={self.address()}")
        if self.gpus:
            words.append("Gres=" + ",".join(f"gpu:{model}:{len(minors)}" for model, minors in self.gpus.items()))
        return " ".join(words)

    def gres(self):
        """Return its lines of gres.conf."""
        for model, minors in self.gpus.items():
            files = ",".join(f"/dev/nvidia{minor}" for minor in sorted(minors))
            yield f"NodeName={self.name} Name=gpu Type={model} File={files}\n"


def kind(model):
    """Return the word of a GPU's name that a job file names it by: "A100" of "NVIDIA A100-SXM4-80GB"."""
    words = re.findall(r"[A-Za-z]*[0-9]+[A-Za-z]*", model) or re.findall(r"\w+", model)
    return words[0] if words else "gpu"


def ask(host):
    """Return what *host* says of itself. This machine is asked without ssh."""
    here = host.partition(".")[0] == socket.gethostname().partition(".")[0]
    command = ["sh"] if here else [*shlex.split(os.environ.get("SSH", "ssh")), host, "sh"]
    done = subprocess.run(command, input=PROBE, stdout=subprocess.PIPE, text=True, check=False)
    try:
        return Machine(host, done.stdout)
    except ValueError as error:
        sys.exit(f"cannot configure {host}: {error}; does `{' '.join(command[:-1])} true` work?")


def doubts(machines):
    """Yield what will not work with these machines."""
    first = machines[0]
    names = collections.Counter(machine.name for machine in machines)
    for name in [name for name, times in names.items() if times > 1]:
        yield f"{names[name]} machines call themselves {name}: give each a name of its own"
    for other in machines[1:]:
        if other.uid != first.uid:
            yield f"you are user {first.uid} on {first.name} and {other.uid} on {other.name}: use one number everywhere"
        if other.system != first.system:
            remedy = "run the controller on the newest one, and nodes at most two versions of Slurm behind it"
            yield f"{first.name} is {first.system}, {other.name} is {other.system}: {remedy}"
    for machine in machines:
        if abs(machine.late_s) > 60:
            yield f"the clock of {machine.name} differs by {abs(machine.late_s)} s from here: set up NTP"


def configuration(machines):
    """Return the texts of slurm.conf and gres.conf."""
    first = machines[0]
    slurm = SLURM_CONF.format(
        controller=first.name + (f"({first.address()})" if first.address() else ""),
        memory_of_a_cpu=min(machine.memory // machine.cpus for machine in machines),
        nodes="\n".join(machine.node() for machine in machines),
    )
    return slurm, "".join(line for machine in machines for line in machine.gres())


def main():
    """Ask, write and say what to do next."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", dest="directory", type=Path, default=Path("slurm-lab"), help="default: slurm-lab")
    parser.add_argument("hosts", nargs="+", metavar="HOST", help="the first one runs the controller")
    given = parser.parse_args()
    machines = []
    for host in given.hosts:
        machine = ask(host)
        machine.late_s = int(time.time()) - machine.time
        machines.append(machine)
    for doubt in doubts(machines):
        print(f"warning: {doubt}", file=sys.stderr)
    given.directory.mkdir(mode=0o700, exist_ok=True)
    for name, text in zip(("slurm.conf", "gres.conf"), configuration(machines)):  # noqa: B905 - Python 3.8
        (given.directory / name).write_text(text)
    shutil.copy(Path(__file__).with_name("install.sh"), given.directory)
    key = given.directory / "munge.key"
    if not key.exists():
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
    print(*(machine.node() for machine in machines), sep="\n", end="\n\n")
    hosts, directory = " ".join(map(shlex.quote, given.hosts)), shlex.quote(str(given.directory))
    print(NEXT.format(directory=directory, hosts=hosts, count=len(machines)), end="")


if __name__ == "__main__":
    main()
