"""A real Grid Engine on this machine, without systemd, for the tests: Debian's gridengine-master, -exec and -client.

It has its own root, cell and ports; the packaged programs are linked into the root.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from long.daemons import Daemons
from support import free_ports, wait_for

SLOTS = 16
QUEUE = "main.q"
PE = "smp"
_PROGRAMS = Path("/usr/lib/gridengine")
_SHARED = Path("/usr/share/gridengine")
_NEEDED = ("sge_qmaster", "sge_execd", "qsub", "qstat", "qdel", "qconf", "qmod", "spoolinit", "spooldefaults")

_BOOTSTRAP = """\
admin_user              none
default_domain          none
ignore_fqdn             true
spooling_method         berkeleydb
spooling_lib            libspoolb
spooling_params         {root}/db
binary_path             {root}/bin
qmaster_spool_dir       {root}/qmaster
security_mode           none
listener_threads        2
worker_threads          2
scheduler_threads       1
"""
_SETTINGS = {
    "execd_spool_dir": "{root}/execd",
    "mailer": "/bin/true",
    "min_uid": "0",
    "min_gid": "0",
    "load_report_time": "00:00:01",
    "max_unheard": "00:00:10",
    "reporting_params": "accounting=true reporting=false flush_time=00:00:01 accounting_flush_time=00:00:00",
}
_SCHEDULER = {
    "schedule_interval": "0:0:1",
    "flush_submit_sec": "1",
    "flush_finish_sec": "1",
    "job_load_adjustments": "NONE",
    "load_adjustment_decay_time": "0:0:0",
}
_PE_TEXT = """\
pe_name            smp
slots              999
user_lists         NONE
xuser_lists        NONE
start_proc_args    NONE
stop_proc_args     NONE
allocation_rule    $pe_slots
control_slaves     FALSE
job_is_first_task  TRUE
urgency_slots      min
accounting_summary FALSE
qsort_args         NONE
"""


def unavailable() -> str | None:
    """Return why no cluster can be started here, None if one can."""
    if missing := [name for name in _NEEDED if not (_PROGRAMS / name).exists()]:
        return f"no Grid Engine: {', '.join(missing)} not found (Debian: gridengine-master, -exec, -client)"
    return None if os.getuid() == 0 else "Grid Engine's daemons start jobs of others as root alone"


class GridEngine(Daemons):
    """A running Grid Engine."""

    def __init__(self) -> None:
        """Start it and wait until its host reports."""
        super().__init__("sge")
        self.root = self.directory / "root"
        self._common = self.root / "default" / "common"
        self._host = socket.gethostname()
        master, execd = free_ports(2)
        self.variables = {
            "SGE_ROOT": str(self.root),
            "SGE_CELL": "default",
            "SGE_QMASTER_PORT": str(master),
            "SGE_EXECD_PORT": str(execd),
            "SGE_ARCH": subprocess.check_output([_SHARED / "util" / "arch"], text=True).strip(),
        }
        self._keep(SGE_ND="1")
        try:
            self._lay_out()
            self.start_master()
            self._configure()
            self.start_execd()
            wait_for(self._reports, what="the host's report")
        except BaseException:
            self.close()
            raise

    # Setting up.

    def _lay_out(self) -> None:
        for place in (self._common, self.root / "qmaster" / "job_scripts", self.root / "execd", self.root / "db"):
            place.mkdir(parents=True)
        (self.root / "util").symlink_to(_SHARED / "util")
        for place in ("bin", "lib", "utilbin"):
            (self.root / place).mkdir()
            (self.root / place / self.variables["SGE_ARCH"]).symlink_to(_PROGRAMS)
        (self._common / "bootstrap").write_text(_BOOTSTRAP.format(root=self.root))
        (self._common / "act_qmaster").write_text(f"{self._host}\n")
        (self._common / "host_aliases").write_text(f"{self._host} localhost\n")
        (self._common / "cluster_name").write_text("test\n")
        self.command(_PROGRAMS / "spoolinit", "berkeleydb", "libspoolb", self.root / "db", "init")
        settings = {key: value.format(root=self.root) for key, value in _SETTINGS.items()}
        text = _changed((_SHARED / "default-configuration").read_text(), settings)
        self.command(_PROGRAMS / "spooldefaults", "configuration", self._file("global", text))
        resources = _SHARED / "util" / "resources"
        self.command(_PROGRAMS / "spooldefaults", "complexes", resources / "centry")
        self.command(_PROGRAMS / "spooldefaults", "usersets", resources / "usersets")
        self.command(_PROGRAMS / "spooldefaults", "managers", "root")

    def _configure(self) -> None:
        self.command("qconf", "-as", self._host)
        self.command("qconf", "-ah", self._host, check=False)
        self.command("qconf", "-Msconf", self._file("sched", _changed(self._shown("-ssconf"), _SCHEDULER)))
        self.command("qconf", "-Ap", self._file("pe", _PE_TEXT))
        complexes = f"{self._shown('-sc')}gpu gpu INT <= YES YES 0 0\n"
        self.command("qconf", "-Mc", self._file("complexes", complexes))
        shown = self.command("qconf", "-aq", QUEUE, check=False, EDITOR="cat").stdout
        queue = {"hostlist": self._host, "slots": str(SLOTS), "load_thresholds": "NONE", "pe_list": PE}
        self.command("qconf", "-Aq", self._file("queue", _changed(shown, {**queue, "complex_values": "gpu=4"})))

    def _shown(self, option: str) -> str:
        return self.command("qconf", option).stdout

    def _file(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.write_text(text if text.endswith("\n") else f"{text}\n")
        return path

    # The daemons.

    def start_master(self) -> None:
        """Start sge_qmaster and wait until it answers; its queue takes jobs."""
        self._start("sge_qmaster", str(_PROGRAMS / "sge_qmaster"))
        wait_for(lambda: self.command("qconf", "-sh", check=False).returncode == 0, what="the master")
        self.command("qmod", "-e", QUEUE, check=False)
        if "sge_execd" in self._running:  # a new one speaks to the new master half a minute before the old one would
            self._kill("sge_execd", signal.SIGTERM)
            self.start_execd()

    def start_execd(self) -> None:
        """Start sge_execd; jobs that run on its host it finds there."""
        self._start("sge_execd", str(_PROGRAMS / "sge_execd"))

    def kill_master(self) -> None:
        """Kill sge_qmaster at once, as a crash does, when no job is on its way to a host.

        Those that were would stay in the state `t`: it believes that the host has them.
        """
        self.command("qmod", "-d", QUEUE)
        wait_for(lambda: "t" not in self._states(), what="no job on its way")
        self._kill("sge_qmaster")

    # What Grid Engine says.

    def state(self, job: str) -> str:
        """Return the state of a job that lives, "" for another."""
        return self._all_states().get(job, "")

    def _states(self) -> set[str]:
        return set(self._all_states().values())

    def _all_states(self) -> dict[str, str]:
        lines = map(str.split, self.command("qstat", "-u", "*").stdout.splitlines())
        return {words[0]: words[4] for words in lines if len(words) > 4}

    def _reports(self) -> bool:
        lines = self.command("qhost", check=False).stdout.splitlines()
        return any(line.split()[:1] == [self._host] and line.split()[6] != "-" for line in lines)

    def clear(self) -> None:
        """Delete all jobs, bring the daemons back and wait until nothing is left, for the next test."""
        if "sge_qmaster" in self._killed:
            self.start_master()
        self.command("qmod", "-e", QUEUE, check=False)
        self.command("qdel", "-f", "-u", "root", check=False)
        wait_for(lambda: not self.command("qstat", "-u", "*").stdout.strip(), what="the end of all jobs")


def _changed(text: str, settings: Mapping[str, str]) -> str:
    """Return a list of settings with other values; a value may go on in further lines."""
    lines = [line.split(None, 1) for line in re.sub(r"\\\n\s*", " ", text).splitlines() if line and line[0] != "#"]
    found = {key: " ".join(rest) for key, *rest in lines}
    assert settings.keys() <= found.keys(), settings.keys() - found.keys()
    return "".join(f"{key} {value}\n" for key, value in {**found, **settings}.items())
