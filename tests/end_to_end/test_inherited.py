"""What a job inherits is its submitter's, or a login's, and not of the one that started the dispatcher."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from served import Served

SHOW = "umask; ulimit -S -n; ulimit -S -c; ulimit -S -s; nice; echo ${SPOOL_SERVICE-none}"
NICE = os.getpriority(os.PRIO_PROCESS, 0)  # of whoever runs the tests
LOGIN = ["0022", "1024", "0", "8192", str(NICE), "none"]
ODD = ["0002", "300", "16", "4096", str(min(NICE + 5, 19)), "none"]
ODD_SHELL = '''umask 002; ulimit -S -n 300; ulimit -S -c 16; ulimit -S -s 4096; exec nice -n 5 "$@"'''


def _oddly(served: Served, *words: str) -> None:
    """Run a command of the command line from a shell with another umask, other limits and another niceness."""
    program = ["sh", "-c", ODD_SHELL, "sh", sys.executable, "-m", "spool", *words]
    subprocess.run(program, env=served.environment, check=True, capture_output=True)


@pytest.mark.parametrize("wrapper", ["auto", "sh"])
def test_a_job_has_what_its_submitter_had(served: Served, wrapper: str) -> None:
    """Its umask, soft limits and niceness, in both wrappers; a file that is dropped has those of a login."""
    served.serves(f'wrapper = "{wrapper}"\n')
    _oddly(served, "submit", "--name", "odd", "-c", SHOW)
    served.spool("submit", "--name", "usual", "-c", SHOW)
    served.drop("dropped", SHOW)
    served.wait_done("odd", "usual", "dropped")
    assert served.log("odd").split() == ODD
    assert served.log("usual").split() == LOGIN
    assert served.log("dropped").split() == LOGIN
    assert "\nlimits" not in (served.root / "done" / "usual.toml").read_text()


def test_a_dispatcher_keeps_its_starters_from_jobs(served: Served) -> None:
    """One that is started by hand, in an odd shell, gives jobs the umask and the limits of a login."""
    served.start(prefix=("sh", "-c", 'umask 077; ulimit -S -n 200; ulimit -S -c 16; exec "$@"', "sh"))
    served.completes("dropped", SHOW)
    assert served.log("dropped").split() == LOGIN


def test_defaults_can_state_them(served: Served) -> None:
    """The configuration decides for files that state nothing, such as dropped ones."""
    served.serves('[defaults]\numask = "007"\nnice = 1\nlimits = { nofile = 256 }\n')
    served.completes("dropped", SHOW)
    assert served.log("dropped").split() == ["0007", "256", "0", "8192", "1", "none"]
