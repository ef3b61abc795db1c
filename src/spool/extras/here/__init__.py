"""`spool run --here`: a job whose command runs in the terminal of who submits it.

The job's `terminal` names the process of `spool run` that waits for it (`command.py`). When it is the job's turn, the
dispatcher only tells that (`launching.py`), and that process starts the wrapper, a child in its own terminal, session
and process group. So keys, job control and pipes are those of any program that a shell starts, and what ends, limits
and measures a run is as ever.
"""

from __future__ import annotations

from spool.formats.capabilities import Key, OtherWay, Part

_ONE_RUN = "such a job has one run, in one terminal"
_PRINTS = "it prints there; redirect it as in any shell"

JOB = Part(
    Key(
        "terminal",
        "label",
        "The terminal in which the command runs: the process of the `spool run --here` that writes this key and waits "
        "for the job. Once it is gone, the job fails. Not for arrays, nor with `retry`, `preemptible` or outputs.",
        field="here.terminal",
        default=None,
        internal=True,
    ),
    after="keep_session",
    reader="spool.extras.here.launching:READER",
    excludes={
        **dict.fromkeys(("array", "matrix", "rows", "retry", "preemptible"), _ONE_RUN),
        **dict.fromkeys(("stdout", "stderr"), _PRINTS),
        "container": "start it by its runtime, as in `spool run --here -- podman run -it IMAGE`",
    },
    once="it belongs to the terminal of a `spool run --here`; run its command with that again, "
    "or in the background by `spool rerun`",
)

WAY = OtherWay(
    "--here",
    "Run it in this terminal once it is its turn; without a command, open a shell.",
    """\
With --here the command runs in this terminal, as if the shell had started it: with its input, its colours, your
whole environment, and Ctrl-C and Ctrl-Z. What it prints is in no log. It waits its turn as any job does, and ends
with the terminal. Inside a job, it just runs.

  spool run --here -g 1 -- python train.py
  spool run --here -g 1 -t 2h           a shell with a GPU""",
    "spool.extras.here.command:run_here",
)
