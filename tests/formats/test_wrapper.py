"""The wrapper, run by real shells."""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from spool.core import layout
from spool.core.errors import InvalidValue
from spool.core.layout import SERVICE
from spool.core.lifecycle import Liveness
from spool.core.model import ArrayTask, Grant, Spec
from spool.executors import compiled
from spool.formats import wrapper
from spool.formats.run_records import parse_usage
from spool.formats.values import OWN_VARIABLES
from spool.formats.wrapper import ALREADY_STARTED, NO_JID, Assignments, job_environment, render, with_references
from spool.machine import identity
from support import PATIENCE_S, wait_for
from wrapper_runs import OTHER_WRAPPERS, SHELL, Runs, constant_of, surroundings

SCRIPT = Path(wrapper.__file__).with_name("wrapper.sh")
HOLE = "# --- assignments ---\n"
LOOPS = "trap 'echo got TERM; exit 7' TERM; trap 'echo got USR1' USR1; trap 'echo got INT; exit 9' INT; echo ready; "
LOOPS += "while :; do sleep 0.01; done"


# --- the text -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck on this machine")
def test_the_constant_is_clean_for_shellcheck() -> None:
    """The constant gives shellcheck nothing to warn of."""
    command = ["shellcheck", "-s", "sh", "-S", "warning", str(SCRIPT)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_a_script_that_contains_the_constant_differs_from_it_by_the_assignments_alone(runs: Runs) -> None:
    """It does the same as one that reads the constant, and only that is short, and carried out without a shell."""
    run, other = runs.make("echo ran"), runs.make("echo ran")
    (other.metadir / "run.sh").write_bytes(render(Assignments(str(other.metadir), "echo ran", surroundings())))
    (_, short), (before, whole) = ((each.text("run.sh") or "").split(HOLE) for each in (run, other))
    assert (before, len(short.splitlines())) == (SCRIPT.read_text().partition(HOLE)[0], len(whole.splitlines()))
    assert (run.run(), run.log, other.run(), other.log) == (0, "ran\n", 0, "ran\n")
    assert len(short) < 1500
    assert ["peak_process" in (each.text("usage") or "") for each in (run, other)] == [run.is_compiled, False]


@pytest.mark.parametrize("command", [(), ("",), "", ("a\0b",), "a\0b", "é" * (64 << 10), ("x", "y" * (128 << 10))])
def test_what_no_process_can_be_given_is_refused(command: str | tuple[str, ...]) -> None:
    """Nothing at all, a NUL byte and more than 128 KiB are errors when the wrapper is rendered, not when it runs."""
    with pytest.raises(InvalidValue, match=r"^cannot run the command: (it is empty|no process can be given .*)$"):
        render(Assignments("/m", command, surroundings()))


@pytest.mark.parametrize("size", [1, 10_000])
def test_more_arguments_than_the_kernel_takes_are_an_error_when_the_wrapper_is_rendered(runs: Runs, size: int) -> None:
    """A size that is accepted can be executed; a larger one is the job's own fault, and no refusal of the machine."""
    fits, too_many = 1, (6 << 20) // (size + 9)  # a byte and a pointer more for each
    while too_many - fits > max(1, 1000 // size):
        count = (fits + too_many) // 2
        try:
            render(Assignments("/metadir", ("/bin/true", *["a" * size] * count), surroundings()))
        except InvalidValue:
            too_many = count
        else:
            fits = count
    with pytest.raises(InvalidValue, match="its arguments and environment"):
        render(Assignments("/metadir", ("/bin/true", *["a" * size] * too_many), surroundings()))
    run = runs.make(("/bin/true", *["a" * size] * fits))
    assert run.run() == 0
    assert runs.make(("/bin/true", "x" * ((128 << 10) - 1))).run() == 0  # the longest that a process can be given
    assert run.text("refused") is None


def test_the_script_names_its_records_as_the_layout_does() -> None:
    """Each record that the script speaks of is one that the layout spells, but for its own mark of a signal."""
    script = SCRIPT.read_text()
    told = set(re.findall(r"\$spool_records/([a-z][a-z.]*)", script))
    named = told | set(re.findall(r"spool_record ([a-z]+)", script))
    assert named - {f"{layout.RC}.aside"} == {
        layout.WRAPPER, layout.JID, layout.STATUS, layout.RC, layout.STOP, layout.FAILURE, layout.REFUSED, "signal",
        layout.SIGNALS, layout.USAGE, layout.ENVIRONMENT, layout.LEFTOVERS, layout.ENDED,
    }  # fmt: skip


# --- how a run ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "rc"), [*((f"exit {n}", n) for n in (0, 75, 127, 255)), ("kill -9 $$", 137)])
def test_the_exit_code_is_the_commands(runs: Runs, command: str, rc: int) -> None:
    """The record rc holds the exit code of the command, 128+n where signal n ended it, and error is not there.

    That of a refused wrapper, 75, says nothing without the record.
    """
    run = runs.make(f"echo mine; {command}")
    assert run.run() == rc
    assert run.text("rc") == f"{rc}\n"
    assert run.log == "mine\n"  # and not a shell's remark on a child that was killed
    assert run.text("status") == ("finished\n" if rc == 0 else "failed\n")
    assert (run.text("error"), run.text("refused")) == (None, None)


TOLD = ["", "\n", "1 77\n", "{pid} \n", "{pid} 77", "{pid} 77 7\n", "{pid} -77\n", "{pid}0 77\n", "{pid} 77\n"]


@pytest.mark.parametrize("said", TOLD)
def test_a_wrapper_that_is_told_who_it_is_believes_what_is_of_its_pid(runs: Runs, tmp_path: Path, said: str) -> None:
    """A whole line with its own pid and a number gives the start ticks; with anything else it reads /proc."""
    run = runs.make("echo ready; exec sleep 60", replace(surroundings(), boot_id=identity.boot_id()))
    line = tmp_path / "said"
    with line.open("w") as file:  # the shell's pid is that of what it replaces
        starter = f"printf %s \"{said.format(pid='$$')}\" > '{line}'; exec \"$@\" told < '{line}'".replace("\n", "\\n")
        starter = starter.replace("printf %s", "printf")
        run.start("/bin/sh", "-c", starter, "sh", stdin=file)
    run.says("ready")
    found = identity.of_process(run.process.pid)
    assert run.jid == (replace(found, start_ticks=77) if said == "{pid} 77\n" else found)


def test_the_jid_proves_the_wrapper(runs: Runs) -> None:
    """While the wrapper lives its jid is alive, and once it has ended the jid is gone."""
    os.mkfifo(runs.root / "fifo")
    run = runs.make("echo ready; read line < fifo", workdir=str(runs.root)).start()
    wait_for(lambda: (run.text("jid") or "").endswith("\n"))
    assert run.jid == identity.of_process(run.process.pid)
    run.says("ready")
    wait_for(lambda: run.text("status") == "running\n")
    assert run.rc is None
    with open(runs.root / "fifo", "w") as fifo:
        fifo.write("go\n")
    run.finish()
    assert run.rc == 0
    assert identity.liveness(run.jid) is Liveness.GONE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT])
def test_a_signal_to_the_wrapper_ends_the_command_and_is_its_exit_code(runs: Runs, number: signal.Signals) -> None:
    """A wrapper that is sent TERM, HUP, INT or QUIT passes it on, and what it records is never 0."""
    run = runs.make("echo ready; exec sleep 60").start()
    run.says("ready")
    run.kill(number)
    run.finish()
    assert run.rc == 128 + number
    assert run.text("status") == "failed\n"
    assert run.text("signal") == number.name.removeprefix("SIG") + "\n"


@pytest.mark.parametrize(("number", "rc"), [(signal.SIGINT, 9), (signal.SIGTERM, 7)])
def test_a_command_that_handles_signals_has_the_last_word(runs: Runs, number: signal.Signals, rc: int) -> None:
    """USR1 is passed on as often as it comes and ends nothing; the code after another is what the command chose."""
    run = runs.make(LOOPS).start()
    run.says("ready")
    for count in (1, 2, 3):
        run.kill(signal.SIGUSR1)
        wait_for(lambda count=count: (run.log or "").count("got USR1") == count)  # type: ignore[misc]
    assert run.alive()
    run.kill(number)
    run.finish()
    assert run.rc == rc


def test_a_command_that_ignores_signals_is_waited_for(runs: Runs) -> None:
    """However often TERM comes, the wrapper outlives a command that ignores it, and records its exit code."""
    run = runs.make(
        "trap '' TERM HUP; echo ready; while [ ! -e go ]; do sleep 0.01; done; exit 5", workdir=str(runs.root)
    )
    run.start()
    run.says("ready")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM, signal.SIGTERM):
        (run.metadir / "signal").unlink(missing_ok=True)  # each is awaited
        run.kill(number)
        wait_for(lambda number=number: run.text("signal") == number.name.removeprefix("SIG") + "\n")  # type: ignore[misc]
    assert run.alive()
    assert run.rc is None
    (runs.root / "go").touch()
    run.finish()
    assert run.rc == 5


def test_a_killed_wrapper_leaves_no_exit_code(runs: Runs) -> None:
    """After KILL to the wrapper there is a jid that is gone and no rc: the run is lost, not finished."""
    run = runs.make("echo ready; exec sleep 60").start()
    run.says("ready")
    wait_for(lambda: run.text("status") == "running\n")
    run.kill(signal.SIGKILL)
    run.finish()
    assert run.rc is None
    assert run.text("status") == "running\n"
    assert identity.liveness(run.jid) is Liveness.GONE


def test_term_to_the_whole_session_never_reads_as_finished(runs: Runs) -> None:
    """When the wrapper and the command get TERM at the same moment, the exit code is 143."""
    for _ in range(4):
        run = runs.make("echo ready; exec sleep 60").start()
        run.says("ready")
        os.killpg(run.process.pid, signal.SIGTERM)
        run.finish()
        assert run.rc == 143


def test_a_signal_at_any_moment_of_the_start_ends_the_run(runs: Runs) -> None:
    """TERM right after the launch leaves either no jid, or an exit code of 143: never a run that goes on."""
    for step in range(12):
        run = runs.make(("sleep", "60")).start()
        for _ in range(step * 4000):  # moments that differ, from the first instruction to the command
            pass
        run.kill(signal.SIGTERM)
        run.finish()
        assert run.rc == (None if run.text("jid") is None else 143)


@pytest.mark.parametrize("wrapper", [SHELL], indirect=True)  # it costs time
def test_a_signal_between_any_two_steps_before_the_command_ends_the_run(runs: Runs) -> None:
    """TERM that comes while the command is about to be started is the end of the run, never a success."""
    runs.make("echo ran")
    text = (constant := constant_of(runs.root)).read_text()
    begin = text.index("spool_run() {\n") + len("spool_run() {\n")
    steps = text[begin : text.index("    spool_enter", begin)].splitlines(keepends=True)
    places = [number for number, step in enumerate(steps) if re.match(r"    (?!fi|esac|\*|#| )", step)]
    assert len(places) > 3
    for place in places:
        again = runs.make("echo ran")
        at = begin + sum(map(len, steps[:place]))
        constant.write_text(f"{text[:at]}    kill -s TERM $$\n{text[at:]}")
        assert again.run() == 143, steps[place]
        assert (again.rc, again.text("signal")) == (143, "TERM\n")


@pytest.mark.parametrize("wrapper", [SHELL, *OTHER_WRAPPERS], indirect=True)  # the compiled one has no such moment
def test_a_signal_between_the_start_of_the_command_and_the_note_of_its_number_reaches_it(runs: Runs) -> None:
    """A command that was quicker than its wrapper hears what it waits for; nothing is sent twice."""
    run = runs.make("trap 'echo heard; exit 3' USR1; echo up; while :; do sleep 0.01; done")
    text = (constant := constant_of(runs.root)).read_text()
    slow = 'until [ -s "$spool_records/log" ]; do :; done; kill -s USR1 $$\n'
    assert text.count("    spool_child=$! ") == 1
    constant.write_text(text.replace("    spool_child=$! ", f"    {slow}    spool_child=$! "))
    assert (run.run(), run.log) == (3, "up\nheard\n")


# --- signal dispositions --------------------------------------------------------------------------------------


def ignoring(*names: str) -> tuple[str, ...]:
    """Return a prefix by which a program is started with these signals ignored, as from a script's `&`."""
    return ("sh", "-c", f"trap '' {' '.join(names)}; exec \"$@\"", "sh")


def test_a_command_has_every_signal_at_its_default(runs: Runs) -> None:
    """None is ignored, although shells start asynchronous commands without INT and QUIT: `timeout -s INT` works."""
    run = runs.make("grep SigIgn /proc/self/status; timeout -s INT 0.05 sleep 60; echo ended $?")
    run.run()
    ignored, ended = (run.log or "").removeprefix("SigIgn:").splitlines()
    assert not int(ignored, 16) & 0x7FFF_FFFF  # from 32 on they are not a shell's; the C library has its own
    assert ended == "ended 124"


# --- who may run ----------------------------------------------------------------------------------------------


def test_a_second_wrapper_runs_nothing(runs: Runs) -> None:
    """Where a jid is, another wrapper leaves silently with a code of its own and changes nothing."""
    run = runs.make("echo ran")
    (run.metadir / "jid").write_text("settled\n")
    assert run.run() == ALREADY_STARTED
    assert sorted(p.name for p in run.metadir.iterdir()) == ["jid", "run.sh"]
    assert run.text("jid") == "settled\n"


def test_of_many_wrappers_one_runs(runs: Runs) -> None:
    """Wrappers that are started at the same time on one metadir run the command once."""
    run = runs.make("echo ran")
    argv = [*run.shell, str(run.metadir / "run.sh")]
    started = [subprocess.Popen(argv) for _ in range(8)]
    assert sorted(process.wait(PATIENCE_S) for process in started) == [0] + [ALREADY_STARTED] * 7
    assert run.log == "ran\n"


def test_without_a_constant_or_a_metadir_nothing_runs(runs: Runs) -> None:
    """A wrapper that cannot read the constant, or create its jid, leaves with another code."""
    run = runs.make("echo ran > proof", workdir=str(runs.root))
    if not run.is_compiled:  # which has the constant in itself
        constant_of(runs.root).unlink()
        assert run.run() == NO_JID
    script = runs.root / "elsewhere.sh"
    (run.metadir / "run.sh").rename(script)
    run.metadir.rmdir()
    assert subprocess.run([*run.shell, str(script)], check=False).returncode == NO_JID
    assert not (runs.root / "proof").exists()


def test_a_jid_that_cannot_be_written_is_taken_back(runs: Runs) -> None:
    """Where the disk has no room for the jid, none is left behind, and nothing has run."""
    run = runs.make("echo ran > proof", workdir=str(runs.root))
    limited = [*ignoring("XFSZ"), *run.shell, str(run.metadir / "run.sh")]
    done = subprocess.run(["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *limited], check=False)
    assert done.returncode == NO_JID
    assert sorted(p.name for p in run.metadir.iterdir()) == ["run.sh"]


@pytest.mark.parametrize("wrapper", [SHELL], indirect=True)  # it costs time
def test_an_exit_code_that_cannot_be_written_is_tried_again(runs: Runs) -> None:
    """While the disk is full the wrapper stays and tries; once there is room, the exit code is on record."""
    run = runs.make("while [ ! -e go ]; do sleep 0.01; done; exit 4", workdir=str(runs.root))
    run.start(*ignoring("XFSZ"))
    wait_for(lambda: run.text("status") == "running\n")
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    (runs.root / "go").touch()
    wait_for(lambda: run.text("rc") == "")
    assert run.alive()
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.finish()
    assert run.rc == 4


@pytest.mark.parametrize("record", ["stop", "signal"])
def test_a_run_that_was_stopped_before_it_began_runs_nothing(runs: Runs, record: str) -> None:
    """When a stop is on record before the command has begun, the command is not run."""
    run = runs.make("echo ran", prolog="echo prolog")
    (run.metadir / record).write_text("cancel user 1 because\n")
    assert run.run() == 143
    assert run.log == ""


# --- what cannot be started -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("workdir", "ROOT/not there", "cannot enter the workdir: VALUE: no such directory"),
        ("workdir", "ROOT/file", "cannot enter the workdir: VALUE: it is not a directory"),
        ("workdir", "relative", "cannot enter the workdir: VALUE: it is not absolute"),
        ("stdout", "ROOT/dir", "cannot open stdout: VALUE: it is a directory"),
        ("stderr", "ROOT/file/x", "cannot open stderr: VALUE: its directory is not there and cannot be made"),
    ],
)
def test_a_place_that_cannot_be_used_is_an_error(runs: Runs, key: str, value: str, why: str) -> None:
    """Without its workdir, or a place for an output, a command runs nowhere: exit code 125, and error says why."""
    (runs.root / "file").touch()
    (runs.root / "dir").mkdir()
    value = value.replace("ROOT", str(runs.root))
    run = runs.make("echo ran", prolog="echo prolog", epilog="echo epilog", **{key: value})
    assert run.run() == run.rc == 125
    assert run.text("error") == why.replace("VALUE", value) + "\n"
    assert key != "workdir" or run.log == f"spool: {run.text('error')}"
    assert "ran" not in (run.log or "").splitlines()


@pytest.mark.parametrize(
    "program", ["no-such-program", "/no/such/shell", "/no/such/program", "echo-but-not-for-all", "./dir", "dir", "if"]
)
def test_a_program_that_cannot_be_executed_is_an_error(runs: Runs, program: str) -> None:
    """126 for what may not be executed, 127 for what is not there, and error says which it was."""
    (runs.root / "echo-but-not-for-all").touch(mode=0o644)
    (runs.root / "dir").mkdir()
    values = {"workdir": str(runs.root), "environment": {"PATH": f"/nowhere:{runs.root}"}}
    run = runs.make("echo ran", shell=program, **values) if "shell" in program else runs.make((program, "x"), **values)
    code = 126 if "dir" in program or "echo" in program else 127
    assert run.run() == code
    assert run.rc == code
    assert f": {program}: " in (run.text("error") or "")
    assert run.log == f"spool: {run.text('error')}"


def test_a_program_is_found_on_the_jobs_own_path(runs: Runs) -> None:
    """PATH of the job's environment decides which program runs, also with empty elements."""
    (runs.root / "mine").write_text('#!/bin/sh\necho mine "$0"\n')
    (runs.root / "mine").chmod(0o755)
    for path in (str(runs.root), "/nowhere:", ":/nowhere", "/nowhere::/nowhere"):
        run = runs.make(("mine",), workdir=str(runs.root), environment={"PATH": path + ""})
        run.run()
        assert (run.log or "").startswith("mine "), path


def test_a_program_with_an_equals_sign_or_a_dash_is_run_as_any_other(runs: Runs) -> None:
    """A program's name is never taken for a variable or an option."""
    for name in ("a=b", "-i"):
        (runs.root / name).write_text("#!/bin/sh\necho ran\n")
        (runs.root / name).chmod(0o755)
        path = f"{runs.root}:{os.environ['PATH']}"
        run = runs.make((name, "x"), workdir=str(runs.root), environment={"PATH": path, "x.y": "1"})
        run.run()
        assert run.log == "ran\n"


# --- outputs and stdin ----------------------------------------------------------------------------------------


def test_both_outputs_go_to_one_log(runs: Runs) -> None:
    """By default log holds what the command wrote to either, in its order, after what was there; its stdin is empty."""
    run = runs.make("echo a; echo b >&2; cat; echo c")
    (run.metadir / "log").write_text("before\n")
    run.start(stdin=subprocess.PIPE)
    run.process.communicate(b"hello\n", PATIENCE_S)
    assert run.log == "before\na\nb\nc\n"


def test_outputs_can_lie_elsewhere(runs: Runs) -> None:
    """Each output has its own file if asked for, whose directory is made if it is not there."""
    out, err = runs.root / "new dir" / "$x" / "out", runs.root / "err dir" / "err"
    run = runs.make("echo a; echo b >&2", stdout=str(out), stderr=str(err))
    run.run()
    assert (out.read_text(), err.read_text(), run.log) == ("a\n", "b\n", None)
    run = runs.make("echo a; echo b >&2", stderr=str(err))
    run.run()
    assert (err.read_text(), run.log) == ("b\nb\n", "a\n")


def test_stdin_and_outputs_can_be_the_wrappers(runs: Runs) -> None:
    """Where the executor gives a terminal, the command has it: its stdin, its stdout and its stderr."""
    run = runs.inherit("cat; echo err >&2")
    run.start(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.process.communicate(b"hello\n", PATIENCE_S) == (b"hello\n", b"err\n")
    assert (run.rc, run.log) == (0, None)


# --- prolog and epilog ----------------------------------------------------------------------------------------


def test_texts_stand_around_the_command(runs: Runs) -> None:
    """In order: init, prolog, prep, command, end, epilog, in the workdir; the last two find the exit code."""
    say = 'echo WHAT "$X" "${SPOOL_EXIT_CODE-none}" "$PWD"'
    texts = {name: f"{say.replace('WHAT', name)}; exit 0" for name in ("init", "prolog", "prep", "end", "epilog")}
    texts["epilog"] = texts["epilog"].replace("exit 0", "exit 9")
    values = {"workdir": str(runs.root), "environment": {"X": "x"}, **texts}
    run = runs.make(say.replace("WHAT", "command") + "; exit 3", **values)
    assert run.run() == run.rc == 3
    told = dict.fromkeys(("init", "prolog", "prep", "command"), "none") | {"end": "3", "epilog": "3"}
    assert run.log == "".join(f"{name} x {code} {runs.root}\n" for name, code in told.items())


@pytest.mark.parametrize("failing", ["init", "prolog", "prep"])
def test_a_text_that_fails_stands_for_the_command(runs: Runs, failing: str) -> None:
    """Nothing that comes after it and before the command is run; what comes after that is, with all that was added."""
    names = "init", "prolog", "prep", "end", "epilog"
    texts = {name: f"echo {name} $SPOOL_EXIT_CODE $PLACE" for name in names}
    texts[failing] = f'-x 2>/dev/null; echo {failing}; echo PLACE=here >> "$SPOOL_ENV"; exit 9'
    run = runs.make("echo ran", **texts)
    assert run.run() == 9
    before = "".join(f"{name}\n" for name in names[: names.index(failing) + 1])
    why = f"cannot run the command: the {failing} ended with exit code 9\n"
    assert (run.log or "").replace(" \n", "\n") == f"{before}spool: {why}end 9 here\nepilog 9 here\n"
    assert run.text("error") == why


def test_lines_of_a_prolog_are_in_the_environment_of_all_that_comes_later(runs: Runs) -> None:
    """Values are taken as they are; the last line of a key counts; what comes after the command has them too."""
    lines = ("# a comment", "", 'A=it\'s $HOME `x` "q" = ', "B=1", "EMPTY=", "B=2")
    text = f'printf \'%s\\n\' {shlex.join(lines)} >> "$SPOOL_ENV"; printf X=end >> "$SPOOL_ENV"'
    say = 'echo WHAT "$A|$B|${EMPTY-none}|$X|${SPOOL_ENV-none}"'
    texts = {name: say.replace("WHAT", name) for name in ("prep", "end", "epilog")}
    run = runs.make(("sh", "-c", say.replace("WHAT", "command")), prolog=text, environment={"B": "own"}, **texts)
    assert run.run() == 0
    told = 'it\'s $HOME `x` "q" = |2||end|'
    path = f"{run.metadir}/env"
    assert run.log == f"prep {told}{path}\ncommand {told}none\nend {told}none\nepilog {told}none\n"


def test_a_program_is_found_in_the_path_of_a_prolog(runs: Runs) -> None:
    """PATH, LC_ALL and the libraries that a prolog states are those with which the command is looked for and begins."""
    tool = runs.root / "bin" / "own-tool"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "$LC_ALL $LD_LIBRARY_PATH"\n')
    tool.chmod(0o755)
    lines = f"PATH={tool.parent}:$PATH", "LC_ALL=C", "LD_LIBRARY_PATH=/x"
    text = "".join(f'echo "{line}" >> "$SPOOL_ENV"; ' for line in lines)
    run = runs.make(("own-tool",), init=text)
    assert (run.run(), run.log) == (0, "C /x\n")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("echo A=1; echo nonsense", "has a line 2 that is not KEY=VALUE"),
        ("echo =1", "has a line 1 that is not KEY=VALUE"),
        ("echo 1A=1", "has a line 1 that is not KEY=VALUE"),
        ("echo SPOOL_JOB=other", "has SPOOL_JOB in line 1, which spool sets itself"),
        ("echo CUDA_VISIBLE_DEVICES=0", "has CUDA_VISIBLE_DEVICES in line 1, which spool sets itself"),
        ("echo UID=0", "has UID in line 1, which the shell keeps for itself"),
        ("echo IFS=x", "has IFS in line 1, which the shell keeps for itself"),
        ("yes A=1 | head -n 1001", MUCH := "has more than 1000 lines, more than 64 KiB, or a line of more than 32 KiB"),
        ("head -c 40000 /dev/zero | tr '\\0' x", MUCH),
        ("for i in 1 2 3; do printf A=; head -c 30000 /dev/zero | tr '\\0' x; echo; done", MUCH),
    ],
)
def test_a_line_of_a_prolog_that_is_not_good_stands_for_the_command(runs: Runs, lines: str, why: str) -> None:
    """The command is not run; the epilog is, with the lines that are good."""
    text = f'{{ {lines}; }} >> "$SPOOL_ENV"; echo B=b >> "$SPOOL_ENV"'
    run = runs.make("echo ran", prolog=text, prep="echo prepared", epilog="echo epilog $B")
    assert run.run() == 125
    said = f"cannot run the command: $SPOOL_ENV {why}\n"
    assert run.text("error") == said
    assert run.log == f"spool: {said}epilog {'' if why == MUCH else 'b'}".rstrip() + "\n"


@pytest.mark.parametrize("instead", ["mkfifo", "mkdir", "ln -s /etc/passwd"])
def test_what_is_no_file_is_not_read_for_an_environment(runs: Runs, instead: str) -> None:
    """Nothing waits for a writer, and nothing is read through a link."""
    run = runs.make("echo ran", prolog=f'{instead} "$SPOOL_ENV"')
    assert run.run() == 125
    assert "$SPOOL_ENV" in (run.text("error") or "")


def test_the_most_that_a_prolog_may_add_is_not_taken_for_a_refusal_of_the_machine(runs: Runs) -> None:
    """Characters of four bytes up to the limits reach the command, or are too much where the shell counts bytes."""
    line = "printf A$i=; head -c 32700 /dev/zero | tr '\\0' x | sed 's/x/\U0001f600/g'; echo"
    text = f'for i in 1 2; do {line}; done >> "$SPOOL_ENV"'
    run = runs.make(("sh", "-c", 'printf %s "$A1$A2" | wc -c'), prolog=text, environment={"LC_ALL": "C.UTF-8"})
    code = run.run()
    assert (run.rc, run.text("refused")) == (code, None)
    assert code == 125 or run.log.strip() == str(2 * 4 * 32700)


@pytest.mark.parametrize(
    ("setup", "command", "code", "log"),
    [
        ("A=a; f() { echo f $A; }", "f; exit 3", 3, "f a\n"),
        ("export A=it\\'s", ("printf", "%s|", "x y", "$A", "", "it's"), 0, "x y|$A||it's|"),
        ("ulimit -S -n 77 # comment", "ulimit -n", 0, "77\n"),
        ("cd /", ("pwd",), 0, "/\n"),
        ('echo "$#"; set -- a b', ("printf", "%s|", "x"), 0, "0\nx|"),  # as `. conda/bin/activate` takes parameters
        (":", ("sh", "-c", 'echo "${#1}"', "sh", "x" * 100_000), 0, "100000\n"),
        (":", ("-odd", "a"), 127, None),
        ("-x 2> /dev/null || :", "echo ran", 0, "ran\n"),
        ("echo a \\", "echo ran", 0, "a\nran\n"),
        ("exit 5", "echo ran", 5, ""),
        ("false", "echo ran", 1, "spool: cannot run the command: the setup ended with exit code 1\n"),
        ("(exit 7)", ("echo", "ran"), 7, "spool: cannot run the command: the setup ended with exit code 7\n"),
    ],
)
def test_a_setup_runs_in_the_shell_of_the_command(
    runs: Runs, setup: str, command: str | tuple[str, ...], code: int, log: str | None
) -> None:
    """A list is executed as it is, and the setup does not see it. A setup that fails stands for the command."""
    run = runs.make(wrapper.with_setup(setup, command, "/bin/sh"), environment={"SPOOL_METADIR": str(runs.root)})
    assert (run.run(), run.log if log is not None else None) == (code, log)
    error = runs.root / "error"
    log = log or ""
    assert ("spool: " + error.read_text() if error.exists() else "") == (log if "spool" in log else "")


def test_a_signal_during_the_prolog_is_the_end_of_the_run(runs: Runs) -> None:
    """A prolog that survives TERM and ends well does not let the command begin."""
    run = runs.make(
        "echo ran", prolog="trap 'exit 0' TERM; echo ready; while :; do sleep 0.01; done", epilog="echo epilog"
    )
    run.start()
    run.says("ready")
    run.kill(signal.SIGTERM)
    run.finish()
    assert run.rc == 143
    assert run.log == "ready\nepilog\n"


def test_the_epilog_is_over_before_the_exit_code_is_there(runs: Runs) -> None:
    """The exit code is the last thing: while the epilog runs there is only that of the command."""
    run = runs.make("exit 3", workdir=str(runs.root), epilog="cd run*; ls; cat status ended")
    assert run.run() == run.rc == 3
    assert "rc" not in (run.log or "").splitlines()
    assert (run.log or "").endswith("\nrunning\n3\n")


# --- the environment, and hostile values ----------------------------------------------------------------------


def given_environment(run_log: bytes) -> dict[str, str]:
    """Return the environment that `cat /proc/self/environ` wrote down."""
    pairs = (entry.split(b"=", 1) for entry in run_log.split(b"\0") if entry)
    return {os.fsdecode(pair[0]): os.fsdecode(pair[1]) for pair in pairs}


HOSTILE = [
    "", " ", "a b", "it's", "''", '"', "$HOME `id` $(id) ${x}", "*", "?[a]", "a\nb\n", "\n", "-n", "--", "\\", "\\n",
    "#", ";&|<>", "~", "!", "ā\u0081\u0088€😀", "\t\r\x01\x7f", "\udc81\udc88\udcff", "%s%d", "x" * 100_000,
    "'" * 20_000,
]  # fmt: skip
SPECIAL_KEYS = ["a.b", "a-b", "1x", "é", "IFS", "UID", "PPID", "OPTIND", "spool_metadir", "spool_code", "LINENO", "-u"]


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        (
            "-x 2>/dev/null\ncat /proc/self/environ # it's \"$(id)\n",
            {f"V{i}": value for i, value in enumerate(HOSTILE)},
        ),
        (("cat", "/proc/self/environ"), dict.fromkeys(SPECIAL_KEYS, "a 'b'\n$c")),
    ],
)
def test_hostile_texts_and_variables_arrive_unchanged(
    runs: Runs, command: str | tuple[str, ...], environment: dict[str, str]
) -> None:
    """A text reaches its shell as it is; any value, and keys that no shell exports or that mean something to one."""
    run = runs.make(command, environment=environment)
    assert run.run() == 0
    found = given_environment((run.metadir / "log").read_bytes())
    assert {key: found.get(key) for key in environment} == environment


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
keys = st.text(st.characters(exclude_characters="\0=", exclude_categories=["Cs"]), min_size=1, max_size=10)


@settings(
    max_examples=max(1, settings.default.max_examples // 4), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(arguments=st.lists(texts, max_size=5), environment=st.dictionaries(keys, texts, max_size=4))
@example(arguments=HOSTILE, environment={})
def test_any_argument_and_any_variable_arrive_unchanged(
    runs: Runs, arguments: list[str], environment: dict[str, str]
) -> None:
    """Whatever can be passed to a process at all passes through the wrapper."""
    environment.pop("PATH", None)
    program = 'printf "%s\\0" "$@"; exec cat /proc/self/environ'
    run = runs.make(("/bin/sh", "-c", program, "sh", *arguments), environment=environment)
    assert run.run() == 0
    found = (run.metadir / "log").read_bytes().split(b"\0")
    count = len(arguments) or 1  # printf runs its format once even without arguments
    assert found[:count] == [os.fsencode(a) for a in arguments] or not arguments
    exported = set(found[count:])
    shells_own = {"PWD", "OLDPWD", "_", "IFS", "OPTIND", "PPID", "LINENO", "PS1", "PS2", "PS4"}
    for key, value in environment.items():
        if key.isascii() and key.isidentifier() and key not in shells_own:
            assert f"{key}={value}".encode() in exported


# --- what a run finds -----------------------------------------------------------------------------------------


def test_a_run_finds_who_it_is_and_what_it_was_given() -> None:
    """The environment names the job, the run, the grant and the GPUs, by UUID."""
    spec = Spec("x", env=(("A", "1"), ("SPOOL_JOB", "no"), ("CUDA_VISIBLE_DEVICES", "3")), task=ArrayTask("t", 4))
    named = (("scratch-bw", 30), ("tpu", 2))
    grant = Grant(3, (5 << 20) + 1, ("GPU-a", "GPU-b"), resources=named, resource_indices=(("tpu", (0, 3)),))
    assert job_environment(spec, grant, spool_dir="/s", job="t_4", run=2, attempt=1, metadir="/s/jobs/t_4/2") == {
        "A": "1",
        "OMP_NUM_THREADS": "3",
        "SPOOL_DIR": "/s",
        "SPOOL_JOB": "t_4",
        "SPOOL_RUN": "2",
        "SPOOL_ATTEMPT": "1",
        "SPOOL_METADIR": "/s/jobs/t_4/2",
        "SPOOL_CPUS": "3",
        "SPOOL_MEMORY_MB": "5",
        "SPOOL_GPUS": "2",
        "SPOOL_ARRAY_INDEX": "4",
        "SPOOL_RESOURCE_SCRATCH_BW": "30",
        "SPOOL_RESOURCE_TPU": "0,3",
        "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


@pytest.mark.parametrize(
    ("uuids", "names", "visible"),
    [
        (("GPU-a-1", "GPU-b-1"), "uuid", "GPU-a-1,GPU-b-1"),
        (("GPU-a-1", "GPU-b-1"), "index", "0,3"),
        (("MIG-a",), "index", "MIG-a"),
    ],
)
def test_the_indices_of_gpus_are_there_for_programs_that_take_no_uuids(
    uuids: tuple[str, ...], names: str, visible: str
) -> None:
    """SPOOL_GPU_INDICES always; in CUDA_VISIBLE_DEVICES if so configured, and never for what CUDA cannot count so."""
    grant = Grant(1, None, uuids, (0, 3)[: len(uuids)])
    facts = {"spool_dir": "/s", "job": "j", "run": 1, "attempt": 1, "metadir": "/m"}
    found = job_environment(Spec("x"), grant, **facts, gpu_names=names)  # type: ignore[arg-type]
    assert found["CUDA_VISIBLE_DEVICES"] == visible
    assert found["SPOOL_GPU_INDICES"] == ",".join(map(str, grant.gpu_indices))
    spec = Spec("x", env=(("SLURM_JOB_GPUS", "$SPOOL_GPU_INDICES"),))
    assert "SLURM_JOB_GPUS" not in with_references(job_environment(spec, Grant(1), **facts), spec.env)  # type: ignore[arg-type]


def test_a_run_without_gpus_sees_none_and_keeps_its_own_thread_count() -> None:
    """CUDA_VISIBLE_DEVICES is empty on purpose, and OMP_NUM_THREADS is the job's where it set one."""
    spec = Spec("x", env=(("OMP_NUM_THREADS", "1"),))
    found = job_environment(spec, Grant(cpus=8), spool_dir="/s", job="j", run=1, attempt=1, metadir="/m")
    assert (found["CUDA_VISIBLE_DEVICES"], found["SPOOL_GPUS"], found["OMP_NUM_THREADS"]) == ("", "0", "1")
    assert "SPOOL_MEMORY_MB" not in found
    assert set(found) - {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"} <= set(OWN_VARIABLES)


def test_both_wrappers_forget_every_variable_of_spool() -> None:
    """The lists of the script and of the compiled wrapper are those of the module."""
    forgotten = [
        word for line in SCRIPT.read_text().splitlines() if line.startswith("unset SPOOL") for word in line.split()[1:]
    ]
    assert tuple(forgotten) == (*OWN_VARIABLES, SERVICE)
    assert tuple(_array_in_c("own")) == tuple(f"{name}=" for name in (*OWN_VARIABLES, SERVICE))


def test_both_wrappers_know_the_same_special_variables() -> None:
    """The list of the compiled wrapper is that of the module; prompts, which it tells by their digit, stand apart."""
    patterns = {name.removesuffix("=") if name.endswith("=") else f"{name}.*" for name in _array_in_c("names")}
    assert patterns | {"PS[0-9]"} == set(wrapper._SPECIAL.pattern.split("|"))
    kept = re.search(r"\n    (IFS \|.*?)\)\n", SCRIPT.read_text(), re.DOTALL)
    assert set(re.sub(r"[\s\\]", "", kept[1]).replace("*", ".*").split("|")) == set(wrapper._SPECIAL.pattern.split("|"))


def _array_in_c(name: str) -> list[str]:
    """Return the strings of an array in the source of the compiled wrapper."""
    found = re.search(rf"\*const {name}\[\] = \{{([^}}]*)\}};", Path(compiled.SOURCE).read_text())
    assert found is not None, name
    return re.findall(r'"([^"]*)"', found[1])


@pytest.mark.parametrize("wrapper", [SHELL], indirect=True)  # it is not about the shell
def test_the_wrapper_enters_its_cgroup_before_anything_runs(runs: Runs) -> None:
    """The wrapper writes its own pid where it is told to; if it cannot, the command runs all the same."""
    procs = runs.root / "cgroup.procs"
    run = runs.make("true", cgroup=str(procs))
    run.run()
    assert procs.read_text() == f"{run.jid.pid}\n"
    run = runs.make("true", cgroup="/no/such/cgroup.procs")
    assert (run.run(), run.rc, run.log) == (0, 0, "")


def test_a_wrapper_without_any_reset_still_runs(runs: Runs) -> None:
    """Where env cannot undo ignored signals, commands run all the same."""
    run = runs.make("echo ran", replace(surroundings(), reset=None))
    assert (run.run(), run.log) == (0, "ran\n")


OUTER = {"SPOOL_JOB": "outer", "SPOOL_ARRAY_INDEX": "7", "SPOOL_EXIT_CODE": "1", "OLDPWD": "/secret", "SHLVL": "7"}
OUTER |= {"_": "/bin/starter"}


@pytest.mark.parametrize("command", [("cat", "/proc/self/environ"), "cat /proc/self/environ"])
def test_nothing_of_the_starter_is_in_the_environment(runs: Runs, command: str | tuple[str, ...]) -> None:
    """A job finds what it was given and its working directory: nothing of where and how the wrapper was started."""
    given = {"HOME": "/root", "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "SPOOL_JOB": "inner"}
    run = runs.make(command, workdir=str(runs.root), environment={"SPOOL_JOB": "inner", "MINE": "1"})
    place = runs.root / "elsewhere"
    place.mkdir()
    run.start(
        env={**given, "PWD": str(place), "OLDPWD": "/secret", "SHLVL": "7", "_": "/bin/starter", **OUTER}, cwd=place
    )
    assert run.finish() == 0
    found = given_environment((run.metadir / "log").read_bytes())
    if isinstance(command, str):  # whose shell has its own
        found = {key: value for key, value in found.items() if key not in ("SHLVL", "_")}
    assert found == given | {"MINE": "1", "PWD": str(runs.root)}


def test_what_the_command_has_used_is_on_record_before_its_end(runs: Runs) -> None:
    """`usage` has the CPU time of the command and its children, and from the compiled wrapper their largest memory."""
    code = "x = bytearray(60 << 20); import time; t = time.process_time()\nwhile time.process_time() - t < 0.1: pass"
    run = runs.make(("sh", "-c", f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}; exit 3"))
    run.start()
    assert run.finish() == 3
    used = parse_usage((run.metadir / "usage").read_bytes())
    assert 80_000_000 <= used.cpu_time_ns < 20_000_000_000
    if run.is_compiled:
        assert 60 << 20 <= used.peak_memory_bytes < 1 << 30
    assert (run.metadir / "usage").stat().st_mtime_ns <= (run.metadir / "rc").stat().st_mtime_ns


def test_a_variable_can_be_a_reference_to_one_of_ours() -> None:
    """A value that is a name of ours and nothing else stands for its value; without that the variable is absent."""
    ours = {"SPOOL_CPUS": "4", "PATH": "/bin"}
    own = {
        "A": "$SPOOL_CPUS",
        "B": "$SPOOL_MEMORY_MB",
        "C": "$PATH",
        "D": "$SPOOL_CPUS!",
        "E": "${SPOOL_CPUS}",
        "F": "$SPOOL_CPUS\n",
    }
    kept = {key: own[key] for key in "CDEF"}
    assert with_references({**own, **ours}, own.items()) == {**ours, **kept, "A": "4"}
