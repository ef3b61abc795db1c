"""The compiled wrapper beside a shell, on the same script: nothing that they leave behind may tell which one it was."""

from __future__ import annotations

import os
import random
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from spool.executors import compiled
from spool.executors.process import ProcessExecutor
from spool.formats.wrapper import Assignments
from support import PATIENCE_S
from wrapper_runs import COMPILED, NOBODY, SHELL, compiled_wrapper, kill_session, poor_directory, rendered, words_of

HOME = {"HOME": "/tmp", "USER": "me", "LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin"}
# Of the programs that it names none is looked for: the PATH is one of the cases.
SHOW = "umask; /usr/bin/tr '\\0' '\\n' < /proc/$$/environ | /usr/bin/sort; pwd; ulimit -n; "
SHOW += "/bin/ls -l /proc/self/fd | /bin/sed 's/.* //; s/[0-9]//g'; /bin/grep 'Sig[^Q]' /proc/self/status; "
SHOW += "/usr/bin/cut -d ' ' -f 19,41 /proc/self/stat; /bin/cat /proc/self/limits /proc/self/oom_score_adj; "
SHOW += "echo err >&2; /bin/cat"


ENDLESS_S = 3.0  # such as a shell whose exit code has no place to go
CUTS = 1 if "EVERY_CUT" in os.environ else 61


@dataclass(frozen=True)
class Left:
    """What a wrapper has left behind: its exit code, and each file below its directory with its mode and its text."""

    code: int
    files: dict[str, tuple[int, bytes]]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Give a directory where another user can write, and nowhere else: what a damaged script does stays there."""
    if compiled_wrapper() is None:
        pytest.skip("no C compiler on this machine")
    if os.getuid() != 0:
        pytest.skip("only root can become somebody who can break nothing")
    with poor_directory() as directory:
        yield directory


def left_by(
    place: Path, wrapper: str, furnish: Callable[[Path], bytes], environment: dict[str, str], patience_s: float
) -> Left | None:
    """Carry out the script that *furnish* writes, in a directory that has the same name each time; None: no end."""
    root = place / "it's $HOME"
    shutil.rmtree(root, ignore_errors=True)
    (root / "run").mkdir(parents=True)
    text = furnish(root)
    (root / "run" / "run.sh").write_bytes(text)
    for path in [root, *root.rglob("*")]:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    words = [*words_of(wrapper), str(root / "run" / "run.sh")]
    null: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(
        words, env=environment, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", start_new_session=True, **null
    ) as process:
        try:
            code = process.wait(patience_s)
        except subprocess.TimeoutExpired:
            kill_session(process.pid)
            return None
    found = {}
    for path in sorted(root.rglob("*")):
        mode = path.lstat().st_mode
        content = path.read_bytes() if stat.S_ISREG(mode) and path.name != "run.sh" else b""
        if path.name == "jid":
            content = re.sub(rb"^\d+ \d+ ", b"PID TICKS ", content)
        if path.name == "usage":  # a shell does not know the memory
            content = re.sub(rb"^(peak_process_bytes = \d+\n|(cpu_time_ns = )\d+)", rb"\2", content, flags=re.MULTILINE)
        found[str(path.relative_to(root))] = (mode, content)
    return Left(code, found)


def same_by_both(place: Path, furnish: Callable[[Path], bytes], environment: dict[str, str] = HOME) -> Left:
    """Return what both leave behind."""
    by_shell, by_program = (left_by(place, each, furnish, environment, PATIENCE_S) for each in (SHELL, COMPILED))
    assert by_shell is not None
    assert by_program == by_shell
    return by_shell


def same_if_it_ends(place: Path, furnish: Callable[[Path], bytes], environment: dict[str, str] = HOME) -> None:
    """See that both leave the same behind where the shell ends: a script that was damaged may go on for ever."""
    by_shell = left_by(place, SHELL, furnish, environment, ENDLESS_S)
    if by_shell is not None:
        assert left_by(place, COMPILED, furnish, environment, PATIENCE_S) == by_shell


commands = st.sampled_from([
    ("sh", "-c", SHOW), SHOW, "echo $0; exit 7", "kill -TERM $$", "kill -9 $$", "exit 75",
    'echo no > "$SPOOL_METADIR/refused"; exit 75', "kill -TERM $PPID; /bin/sleep 10",
    "trap 'exit 3' INT; kill -INT $PPID; while :; do /bin/sleep 0.01; done", "kill -USR1 $PPID; /bin/sleep 10",
    '/bin/rm -f "$SPOOL_METADIR/status"', '/bin/ln -sf /etc/passwd "$SPOOL_METADIR/status"', ("tool", "a", "b c"),
    ("./tool",), ("./no-interpreter",), ("no-interpreter",), ("plain",), ("./plain",), ("bare", "1", "", "'"),
    ("sub",), ("./sub",), ("missing",), ("/no/such",), ("-x",), ("a=b",),
    ("printf", "%s|", "it's", "\\", "\n", "", "$x", "-n"),
])  # fmt: skip
names = st.sampled_from(["A", "PATH", "LC_ALL", "HOME", "a.b", "IFS", "PS1", "spool_x", "BASH_X", "_", "PWD"])
values = st.sampled_from(
    ["", "x", "it's", "'", "''", "\\'", "a\nb", "'\\''", "ROOT", ":ROOT", "/nowhere:ROOT:", "$(x)"]
)
places = "out", "new/er/out", "new/er", "new/", "sub", "plain/x", "fifo:", "ro"
outputs = st.sampled_from([None, "/proc/x", *(f"ROOT/{end}" for end in places)])
workdirs = ["", "", "", "/", "/sub/..", "/sub//", "/.", "/no", "/plain", "/shut"]
inherited = ["X", "SPOOL_JOB", "SPOOL_X", "PWD", "OLDPWD", "a.b", "IFS", "_", "LC_ALL"]
cases = st.fixed_dictionaries(
    {
        "command": commands,
        "workdir": st.sampled_from([f"ROOT{end}" for end in workdirs] + ["/", "relative"]),
        "stdout": outputs,
        "stderr": outputs,
        "environment": st.dictionaries(names, values, max_size=3),
        "umask": st.sampled_from([0o022, 0o077, 0, 0o007, 0o277]),
        "limits": st.sampled_from(
            [(), (), (("nofile", 50), ("core", None)), (("fsize", 1 << 30), ("stack", 1000_000))]
        ),
        "nicer": st.sampled_from([0, 0, 3, -1]),
        "before": st.sampled_from(
            [None] * 3 + ["stop", "signal", "jid", "status", "status!", "log", "error", "error!", "refused"]
        ),
        "open_files": st.sampled_from([None, 100]),
        "given": st.dictionaries(st.sampled_from(inherited), st.sampled_from(["", "/", "/tmp", "v"]), max_size=3),
        "epilog": st.sampled_from([None] * 4 + ["echo epilog"]),
    }
)

PROGRAMS = {
    "tool": "#!/bin/sh\nprintf '%s|' \"$@\"\n",
    "bare": 'printf \'%s|\' "$0" "$@"\n',
    "no-interpreter": "#!/no\n",
    "-x": "#!/bin/sh\necho dash\n",
    "a=b": "#!/bin/sh\necho equals\n",
}


def furnished(root: Path, case: dict[str, Any]) -> bytes:
    """Make the surroundings of a case, and return its script."""

    def here(text: str | None) -> str | None:
        return None if text is None else text.replace("ROOT", str(root))

    (root / "sub").mkdir()
    (root / "shut").mkdir(mode=0)
    (root / "plain").write_text("no program\n")
    os.mkfifo(root / "fifo")
    (root / "ro").write_text("before\n")
    (root / "ro").chmod(0o444)
    for name, text in PROGRAMS.items():
        (root / name).write_text(text)
        (root / name).chmod(0o755)
    if case["before"]:
        record = root / "run" / case["before"].rstrip("!")
        record.write_text("before\n")
        if case["before"].endswith("!"):  # nobody may write it
            record.chmod(0o444)
    metadir = str(root / "run")
    environment = {name: here(value) or "" for name, value in case["environment"].items()}
    environment = {"PATH": f"{root}:{HOME['PATH']}", **environment, "SPOOL_METADIR": metadir}
    around = replace(ProcessExecutor().surroundings(), become=compiled_wrapper() or "", open_files=case["open_files"])
    return rendered(
        root,
        Assignments(
            metadir,
            case["command"],
            around,
            environment,
            workdir=here(case["workdir"]) or "/",
            stdout=here(case["stdout"]),
            stderr=here(case["stderr"]),
            umask=case["umask"],
            limits=case["limits"],
            nicer=case["nicer"],
            epilog=case["epilog"],
        ),
    )


PLAIN: dict[str, Any] = dict.fromkeys(["stdout", "stderr", "before", "open_files", "epilog"], None)
PLAIN |= {"command": SHOW, "workdir": "ROOT", "environment": {}, "umask": 0o022, "given": {}, "limits": (), "nicer": 0}


few = settings(
    max_examples=max(1, settings.default.max_examples // 4), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@few
@given(case=cases)
@example(case=PLAIN)
@example(case=PLAIN | {"stdout": "ROOT/new/er/out", "stderr": "ROOT/also/err", "umask": 0})
@example(case=PLAIN | {"limits": (("nofile", 50), ("cpu", None), ("as", 1 << 46)), "nicer": 5, "umask": 0o002})
@example(case=PLAIN | {"stdout": "ROOT/sub", "stderr": "ROOT/also/err"})
@example(case=PLAIN | {"before": "stop"})
@example(case=PLAIN | {"stdout": "ROOT/new/"})
@example(case=PLAIN | {"stdout": "ROOT/new/er", "stderr": "ROOT/new/er/out"})
@example(case=PLAIN | {"before": "error!", "command": ("missing",)})
@example(case=PLAIN | {"given": {"PWD": "/", "OLDPWD": "/x", "SPOOL_JOB": "outer", "_": "x"}})
@example(case=PLAIN | {"command": ("missing",), "umask": 0})
@example(case=PLAIN | {"umask": 0o277})
@example(case=PLAIN | {"command": ("bare", "x"), "environment": {"PATH": ""}})
def test_both_leave_the_same_behind(place: Path, case: dict[str, Any]) -> None:
    """Exit code, records, outputs, their modes, and all that the command can see of its own beginning."""
    same_if_it_ends(place, lambda root: furnished(root, case), HOME | case["given"])


def test_both_give_what_a_prolog_adds_to_the_command(place: Path) -> None:
    """The program leaves such a script to the shell, with the same environment."""

    def script(root: Path) -> bytes:
        text = furnished(root, PLAIN | {"command": ("sh", "-c", 'echo "$A|$B|$PATH|${SPOOL_ENV-none}"')})
        lines = "A=a b", "PATH=/usr/bin:/bin", "B=it'\\''s"
        prolog = 'printf "%s\\n" ' + " ".join(f'"{line}"' for line in lines) + ' >> "$SPOOL_ENV"'
        assert b"spool_prolog=''\n" in text
        return text.replace(b"spool_prolog=''\n", f"spool_prolog='{prolog}'\n".encode())

    left = same_by_both(place, script)
    assert left.code == 0
    assert left.files["run/log"][1] == b"a b|it's|/usr/bin:/bin|none\n"


# The assignments that no case above varies.
AS_AN_EPILOG = {"shell", "init", "prolog", "prep", "end"}  # the program leaves a script with one of them to a shell
OF_EACH_CASE = {"metadir", "surroundings"}
NOT_HERE = {"cgroup"}  # only root may enter one


def test_every_assignment_is_known_to_both_and_is_compared() -> None:
    """A line that one of them does not know would send each run the slow way, and nothing would tell."""
    preset, _, _ = Path(compiled.SCRIPT).read_text(encoding="utf-8").partition("spool_environment() {")
    by_shell = set(re.findall(r"\bspool_([a-z_]+)='", preset))
    source = Path(compiled.SOURCE).read_text(encoding="utf-8").partition("static int assign(")[2].partition("\n}\n")[0]
    by_program = set(re.findall(r'(?:[{]|same[(]name, )"(\w+)"', source))
    assert by_program == by_shell - {"odd"}  # a name that not every shell can export is a shell's business
    known = {*PLAIN, *AS_AN_EPILOG, *OF_EACH_CASE, *NOT_HERE}
    assert set(Assignments.__struct_fields__) <= known


def script_of(root: Path) -> bytes:
    """Return a script with something of everything that the program itself takes."""
    return furnished(root, PLAIN | {"environment": {"A": "it's", "B": "2"}, "command": ("printf", "%s|", "x'y", "")})


def test_a_script_that_was_cut_off_anywhere_does_what_a_shell_makes_of_it(place: Path) -> None:
    """The program never takes a part for the whole."""
    # All places would take minutes. Each run tries others.
    for step in range(random.randrange(CUTS), 1600, CUTS):
        same_if_it_ends(place, lambda root, step=step: script_of(root)[:step])


@few
@given(
    at=st.floats(0, 1, exclude_max=True),
    removed=st.integers(0, 2),
    added=st.sampled_from(b"|'|''|\\|\n| |\t|\0|$x|#|;|=|export |spool_x='y'\n|\xff".split(b"|")),
)
def test_a_script_that_was_edited_does_what_a_shell_makes_of_it(
    place: Path, at: float, removed: int, added: bytes
) -> None:
    """Whatever stands in the block of assignments."""

    def edited(root: Path) -> bytes:
        text = script_of(root)
        hole = text.index(b"command . ")  # which begins with the line before the assignments
        where = hole + int(at * (len(text) - hole))
        return text[:where] + added + text[where + removed :]

    same_if_it_ends(place, edited)


def _replaced(old: bytes, new: bytes) -> Callable[[Path], bytes]:
    """Return what writes the script with *old* replaced by *new*, and the constant before its assignments as it is."""

    def written(root: Path) -> bytes:
        before, hole, text = script_of(root).partition(b"# --- assignments ---\n")
        assert old in text
        return before + hole + text.replace(old, new)

    return written


QUOTE = b"'\\''"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (QUOTE, QUOTE[:3]),
        (QUOTE, QUOTE[1:]),
        (QUOTE, b"''"),
        (b'spool_exec "$@"\n', b'spool_exec "$@" more\n'),
        (b"set -- 'printf'", b"set -- printf"),
        (b"set -- 'printf'", b"set --  'printf'"),
        (b"set -- 'printf'", b"set 'printf'"),
        (b"set -- 'printf'", b"set --"),
        (b"export A=", b"A="),
        (b"export A=", b"export A=1 A="),
        (b"spool_stdin='/dev/null'", b"spool_stdin='/etc/hostname'"),
        (b"spool_stdin='/dev/null'\n", b"spool_stdin='/dev/null'\n\n# mine\n"),
        (b"spool_stdin='/dev/null'\n", b"spool_stdin='/dev/null'\r\n"),
        (b"spool_stdin='/dev/null'", b"spool_stdin=/dev/null"),
        (b"spool_workdir=", b"spool_epilog='echo mine'\nspool_workdir="),
        (b"spool_workdir=", b"spool_umask='8'\nspool_workdir="),
        (b"spool_workdir=", b"spool_files='many'\nspool_workdir="),
        (b"spool_workdir=", b"spool_files='3'\nspool_workdir="),
        (b"spool_host=", b"spool_other='x' spool_host="),
        (b"spool_terminal=", b"spool_become='/bin/echo'\nspool_terminal="),
        (b"spool_terminal=", b"spool_become=''\nspool_env='/bin/echo'\nspool_terminal="),
        (b"spool_terminal=", b"spool_become=''\nspool_reset='-i'\nspool_terminal="),
        (b"spool_terminal=", b"spool_become='/no/such/spool-wrapper'\nspool_terminal="),
        (b"spool_terminal=", b"spool_shell='/bin/echo'\nspool_terminal="),
    ],
)
def test_an_edit_of_the_assignments_means_what_it_means_to_a_shell(place: Path, old: bytes, new: bytes) -> None:
    """The grammar has no room for anything that is only almost right."""
    same_by_both(place, _replaced(old, new))


def test_a_line_of_somebody_s_own_in_the_constant_counts(place: Path) -> None:
    """Who edits the script below the assignments is obeyed too."""
    left = same_by_both(place, _replaced(b"\nspool_start ", b"\nspool_code=9\nspool_start "))
    assert left.code == 9
    assert left.files["run/rc"][1] == b"9\n"
