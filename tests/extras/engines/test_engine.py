"""A cluster's runs: handed over once, found again, and nothing concluded from silence, whatever the engine answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from spool.core import layout
from spool.core.errors import StartRefused
from spool.core.lifecycle import EngineWord, Liveness
from spool.core.model import SECOND_NS, Jid, Request, Spec
from spool.executors import Launch
from spool.executors.base import EngineEnd
from spool.extras.commands import Command, CommandEnd
from spool.extras.engines.engine import GRACE_NS, LOG_GRACE_NS, ClusterEngine, ClusterRun
from spool.extras.engines.slurm import SlurmConfig, SlurmLanguage
from spool.formats.config import Config
from spool.formats.run_records import VOID_JID, parse_jid

ID = "0123456789abcdef"
TITLES = "JOBID\tSTATE\tREASON\tNODELIST\tCOMMENT"


class Commands:
    """A runner that runs nothing: the test answers."""

    def __init__(self) -> None:
        self.open: dict[int, Command] = {}
        self.takes: list[Callable[[CommandEnd], object]] = []
        self.ended: list[tuple[int, CommandEnd]] = []
        self.ordered: list[tuple[str, ...]] = []

    def order(self, command: Command, take: Callable[[CommandEnd], object]) -> None:
        words = os.path.basename(command.arguments[0]), *command.arguments[1:]
        self.ordered.append(words)
        self.takes.append(take)
        self.open[len(self.ordered)] = command

    def answer(self, program: str, status: int | None = 0, out: str = "", err: str = "") -> None:
        """Answer the oldest open order of *program*."""
        number = next(number for number in self.open if self.ordered[number - 1][0] == program)
        del self.open[number]
        self.ended.append((number, CommandEnd(status, out, err)))

    def asked(self, program: str) -> list[tuple[str, ...]]:
        return [words for words in self.ordered if words[0] == program]

    def work(self) -> None:
        while self.ended:
            number, end = self.ended.pop(0)
            self.takes[number - 1](end)

    def due_ns(self) -> None:
        """Have nothing to do."""

    def fileno(self) -> int:
        return 0

    def close(self) -> None:
        """Have nothing to let go of."""


class Folder:
    """A spool as an engine sees it."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.full = False
        self.noted: list[tuple[str, int, str]] = []

    def identity(self) -> str:
        if self.full:
            raise OSError(28, "No space left on device")
        return ID

    def path(self, name: str, run: int, record: str) -> Path:
        return Path(self.root) / layout.JOBS / name / str(run) / record

    def record(self, name: str, run: int, record: str) -> bytes | None:
        path = self.path(name, run, record)
        return path.read_bytes() if path.exists() else None

    def record_end(self, name: str, run: int, record: str) -> bytes:
        return self.record(name, run, record) or b""

    def put_record(self, name: str, run: int, record: str, data: bytes) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        path = self.path(name, run, record)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def add_to_record(self, name: str, run: int, record: str, data: bytes) -> None:
        with self.path(name, run, record).open("ab") as file:
            file.write(data)

    def notes(self) -> list[tuple[str, int, str]]:
        notes, self.noted = self.noted, []
        return notes

    def jid(self, name: str, run: int) -> Jid | Liveness:
        data = self.record(name, run, layout.JID)
        return Liveness.VOID if data == VOID_JID else (parse_jid(data) if data else None) or Liveness.ABSENT


class Bench:
    """An engine, its spool, its commands and a clock that stands still."""

    def __init__(self, root: Path) -> None:
        self.now_ns = 1000 * SECOND_NS
        self.commands = Commands()
        self.folder = Folder(root)
        self.config = Config()
        self.settings = "ClusterName = lab\n"
        self.engine = self.dispatcher()

    def dispatcher(self) -> ClusterEngine:
        """Return the engine as another dispatcher has it."""
        commands: Any = self.commands
        self.engine = ClusterEngine(
            SlurmLanguage(lambda: self.config),
            self.folder,
            commands,
            lambda: self.now_ns,
            lambda: self.config.other_hosts_gone,
        )
        return self.engine

    def start(self, name: str = "a", spec: Spec | None = None) -> ClusterRun:
        self.folder.path(name, 1, "").mkdir(parents=True, exist_ok=True)
        metadir = str(self.folder.path(name, 1, "")).rstrip("/")
        launch = Launch(name, 1, self.folder.root, metadir, f"{metadir}/run.sh", spec=spec or Spec("true"))
        return self.engine.start(launch)

    def work(self, later_s: float = 0) -> set[str]:
        """Let time pass and the engine work; return the jobs of which there is news."""
        self.now_ns += int(later_s * 1e9)
        return {run.key[0] for run in self.engine.work()}

    def answer(self, program: str, status: int | None = 0, out: str = "", err: str = "") -> set[str]:
        """Answer the oldest open order of *program*; return the jobs of which there is news."""
        self.commands.answer(program, status, out, err)
        return self.work()

    def list(self, *lines: str) -> set[str]:
        """Answer the open question about all jobs with those lines."""
        return self.answer("squeue", out="".join(f"{line}\n" for line in (TITLES, *lines)))

    def look(self, *lines: str, status: int | None = 0, err: str = "", out: str | None = None) -> set[str]:
        """Have the engine ask about all jobs, and answer with those lines."""
        self.work(100)
        if any(self.commands.ordered[number - 1][0] == "scontrol" for number in self.commands.open):
            self.answer("scontrol", out=self.settings)
        text = "".join(f"{line}\n" for line in (TITLES, *lines))
        return self.answer("squeue", status, text if out is None else out, err)

    def handed(self, status: int | None = 0, out: str = "", err: str = "", name: str = "a") -> ClusterRun:
        """Start a run, and have sbatch answer so."""
        run = self.start(name)
        self.work(1)
        self.answer("sbatch", status, out, err)
        return run

    def submitted(self, name: str = "a", job: str = "7") -> ClusterRun:
        return self.handed(out=f"{job}\n", name=name)

    def running(self) -> ClusterRun:
        run = self.submitted()
        self.look(line("7", "RUNNING"))
        return run

    def stop(self, run: ClusterRun, *, kill: bool = False) -> bool:
        """Have it told to end; return whether nothing is left of it."""
        is_over = run in self.engine.terminate({run: kill})
        self.work()
        return is_over

    def spoke(self, code: int | None = None, log: str = "", name: str = "a") -> None:
        """Leave what a wrapper writes at its begin, and its exit code and Slurm's log if they are given."""
        self.folder.put_record(name, 1, layout.JID, b"1 1 b - n1 slurm:7\n")
        if code is not None:
            self.folder.put_record(name, 1, layout.RC, f"{code}\n".encode())
        if log:
            self.folder.put_record(name, 1, layout.ENGINE_LOG, f"{log}\n".encode())

    def engine_record(self, name: str = "a") -> str:
        return (self.folder.record(name, 1, layout.ENGINE) or b"").decode()

    def cancels(self) -> list[str]:
        """Return what scancel was told."""
        return [" ".join(words[1:]) for words in self.commands.asked("scancel")]

    def sent(self) -> list[tuple[str, ...]]:
        return self.commands.asked("sbatch")


def line(job: str, state: str, reason: str = "None", name: str = "a", node: str = "n1", mark: str = "") -> str:
    """Return a line of squeue."""
    return f"{job}\t{state}\t{reason}\t{node}\t{mark or f'spool:{ID}:{name}:1'}"


def with_settings(**settings: Any) -> Config:
    """Return a configuration with that table `[slurm]`."""
    return Config(parts=(("engines", {"slurm": SlurmConfig(**settings)}),))


def word_of(run: ClusterRun) -> EngineWord | None:
    """Return how a run has ended by its engine, once it is gone."""
    return run.ending.word if run.ending is not None and run.liveness() is Liveness.GONE else None


def is_alive(run: ClusterRun) -> bool:
    """Whether nothing has ended the run so far."""
    return run.liveness() is Liveness.ALIVE


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Give an engine that every test answers by hand."""
    made = Bench(tmp_path)
    monkeypatch.setattr("spool.extras.engines.engine.time.monotonic_ns", lambda: made.now_ns)
    monkeypatch.setattr("spool.extras.engines.language.shutil.which", lambda program: f"/bin/{program}")
    earlier = made.engine.adopt("earlier", 1, None)
    made.look()  # it has said which cluster it is
    earlier.close()
    return made


def test_a_run_is_handed_over_with_its_mark_and_remembered_by_its_id(bench: Bench) -> None:
    """Sbatch is asked once, and the record says which job of which cluster the run is."""
    run = bench.start()
    assert run.waits is not None
    bench.look()
    assert bench.answer("sbatch", out="7\n") == {"a"}
    (words,) = bench.sent()
    assert f"--comment=spool:{ID}:a:1" in words
    assert (bench.engine_record(), is_alive(run)) == ("slurm lab 7\n", True)


@pytest.mark.parametrize(
    ("reason", "blocked"),
    [
        *(("Resources", False), ("Priority", False), ("None", False), ("JobHeldUser", True), ("Licenses", True)),
        *(("ReqNodeNotAvail, UnavailableNodes:n1", True), ("QOSMaxJobsPerUserLimit", True), ("BeginTime", True)),
    ],
)
def test_what_waits_in_the_engine_says_why(bench: Bench, reason: str, blocked: bool) -> None:
    """In the engine's words, until it begins; where it waits for something other than room, others may go before it.

    One that waits again, as after a prolog that failed on its node, has not ended.
    """
    run = bench.submitted()
    bench.look(line("7", "PENDING", reason))
    assert (run.waits, run.blocked) == (f"Slurm: PENDING{'' if reason == 'None' else f' ({reason})'}", blocked)
    for state, halted in (("RUNNING", ""), ("SUSPENDED", "Slurm"), ("RUNNING", ""), ("STOPPED", "Slurm")):
        assert bench.look(line("7", state)) == {"a"}  # that it stands still, or goes on, is news
        assert bench.look(line("7", state)) == set()
        assert (run.waits, run.blocked, run.halted, is_alive(run)) == (None, False, halted, True)
    for _ in range(3):
        bench.look(line("7", "PENDING", reason))
    assert (is_alive(run), run.ending) == (True, None)


FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("status", "err"),
    [
        (None, "the process that runs commands has ended"),
        (1, f"{FAILED}Socket timed out on send/recv operation"),
        (1, f"{FAILED}Unable to contact slurm controller (connect failure)"),
        (1, f"sbatch: error: slurm_msg_sendto: Unexpected missing socket\n{FAILED}Unexpected missing socket error"),
        (1, f"{FAILED}Header lengths are longer than data received"),
        (1, f"{FAILED}Communication shutdown failure"),
        (1, f"{FAILED}Incompatible versions of client and server code"),
        (1, f"{FAILED}Protocol authentication error"),
        (1, f"{FAILED}Slurm backup controller in standby mode"),
        (1, "sbatch: error: ClusterName needs to be specified\nsbatch: fatal: Unable to process configuration file"),
        (1, "sbatch: fatal: Could not establish a configuration source"),
        (127, "[Errno 2] No such file or directory: 'sbatch'"),
        (127, "[Errno 12] Cannot allocate memory"),
        (-9, ""),
        (0, "no id"),
    ],
)
def test_a_lost_answer_is_found_again_by_its_mark(bench: Bench, status: int | None, err: str) -> None:
    """Whatever became of sbatch, the job that it has made is the run's, and no other is submitted."""
    run = bench.handed(status, err=err)
    assert (run.refusal, is_alive(run)) == (None, True)
    assert bench.look(line("8", "PENDING")) == {"a"}
    assert (run.engine_id, is_alive(run), bench.engine_record()) == ("8", True, "slurm lab 8\n")
    assert len(bench.sent()) == 1


def test_what_two_answers_do_not_have_was_never_submitted(bench: Bench) -> None:
    """One answer is not enough, and an answer to a question that was put before is none at all."""
    run = bench.start()
    bench.work()
    bench.look()  # put while sbatch is at work
    bench.work(100)
    bench.commands.answer("sbatch", None)
    bench.list()  # was under way
    bench.look()
    assert is_alive(run)
    assert bench.look() == {"a"}
    assert run.liveness() is Liveness.ABSENT


def test_nothing_is_handed_over_while_a_submission_is_in_doubt(bench: Bench) -> None:
    """A controller that does not answer one job is asked about that one before it is given more."""
    bench.handed(1, err="Unable to contact slurm controller")
    bench.start("b")
    bench.work()
    assert len(bench.sent()) == 1
    bench.look()
    bench.work()
    assert len(bench.sent()) == 2


@pytest.mark.parametrize(
    ("err", "for_now"),
    [
        (f"{FAILED}Requested node configuration is not available", False),
        (f"sbatch: error: Socket, core specification\n{FAILED}Requested node configuration is not available", False),
        (f"sbatch: error: the controller wants an account: connection refused\n{FAILED}Unspecified error", False),
        (f"sbatch: error: invalid partition specified: slurmctld\n{FAILED}Invalid partition name specified", False),
        (f"{FAILED}Invalid account or account/partition combination specified", False),
        ("sbatch: unrecognized option '--sockets=2'", False),
        ('sbatch: error: Invalid numeric value "x" for --sockets-per-node.\n', False),
        ("sbatch: fatal: --mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.\n", False),
        ("sbatch: error: Batch script contains DOS line breaks (\\r\\n)\n", False),
        (f"{FAILED}Job violates accounting/QOS policy (AssocMaxSubmitJobLimit)", True),
        (f"{FAILED}I/O error writing script/environment to file", True),
        (f"{FAILED}Unable to create job record, try again", True),
    ],
)
def test_a_refusal_is_told_from_silence_whatever_it_is_about(bench: Bench, err: str, for_now: bool) -> None:
    """A job for which there are too few sockets is refused, in Slurm's words: it would be submitted for ever.

    Nothing is wrong with the job where a limit keeps it out for now, or a controller that cannot store it: it waits.
    Slurm keeps a record of what it refuses, with our mark; that is no job of ours.
    """
    run = bench.handed(1, out="" if for_now else "3\n", err=err)  # nor is a number beside it the id of a job
    assert (run.refusal is None, run.engine_id, len(bench.sent())) == (for_now, None, 1)
    if for_now:
        bench.work(31)
        assert len(bench.sent()) == 2
    else:
        assert err.splitlines()[-1].removeprefix("sbatch: error: ").partition(FAILED)[2] in run.refusal
        assert bench.look(line("9", "FAILED", "BadConstraints")) == set()
        assert run.liveness() is Liveness.ABSENT


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"gpu_memory_bytes": 4 << 30}, "it shares a GPU (gpu_memory)"),
        ({"gpu_min_memory_bytes": 40 << 30}, "it needs GPUs of a least size (gpu_min_memory)"),
        ({"gpu_types": ("A100", "H100")}, "it takes any of several GPU types (A100, H100)"),
    ],
)
def test_what_slurm_cannot_be_asked_is_refused_without_asking(bench: Bench, asked: dict[str, Any], words: str) -> None:
    """The words say what to write instead; one type is handed over, and a share where the configuration says how."""
    run = bench.start(spec=Spec("true", request=Request(gpus=1, **asked)))
    assert bench.work() == {"a"}
    assert words in (run.refusal or "")
    instead = "shard" if "gpu_memory_bytes" in asked else 'write executor_options = ["--constraint=A|B"]'
    assert instead in (run.refusal or "")
    bench.config = with_settings(gpu_memory="shard")
    bench.start("b", Spec("true", request=Request(gpus=1, gpu_memory_bytes=4 << 30)))
    bench.start("c", Spec("true", request=Request(gpus=1, gpu_types=("A100",))))
    bench.work(1)
    bench.answer("sbatch", out="7\n")
    bench.work(1)
    shared, typed = bench.sent()
    assert ("--gres=shard:4" in shared, "--gres=gpu:A100:1" in typed) == (True, True)


@pytest.mark.parametrize(
    ("status", "err", "out"),
    [
        (1, "slurm_load_jobs error: Unable to contact slurm controller", None),
        (None, "", None),
        (-15, "", None),
        (0, "", ""),
        (0, "", "slurm_load_jobs error: Unable to contact slurm controller\n"),
        (0, "", "\ufffd\ufffd\x00\n" * 3),
        (0, "", "JOBID\n"),
        (0, "", TITLES),
    ],
)
def test_nothing_is_concluded_from_silence(bench: Bench, status: int | None, err: str, out: str | None) -> None:
    """However long it lasts, runs live, nothing is handed over, and the engine is asked twice a minute.

    A squeue that succeeds and says something else, or nothing, has not said that there are no jobs.
    """
    run, doubtful = bench.submitted("a"), bench.handed(None, name="b")
    bench.look(line("7", "RUNNING"))
    bench.work()
    assert bench.look(status=status, err=err, out=out) == {"b"}  # whose reason is the silence now
    for _ in range(20):
        assert bench.look(status=status, err=err, out=out) == set()
    assert (is_alive(run), is_alive(doubtful), run.ending, bench.engine.silent) == (True, True, None, True)
    assert bench.engine.away.endswith(": it printed nothing") is (out == "")
    assert bench.engine.unavailable()
    asked = len(bench.commands.asked("scontrol"))
    for seconds, more in ((29, 0), (1, 1)):
        bench.work(seconds)
        assert len(bench.commands.asked("scontrol")) == asked + more
    bench.look(line("7", "RUNNING"), line("8", "RUNNING", name="b"))
    assert (bench.engine.unavailable(), doubtful.engine_id) == (None, "8")


def test_a_run_that_was_claimed_says_that_its_engine_is_away(bench: Bench) -> None:
    """What is still to be handed over, and what waits there, have the silence as their reason until it ends."""
    waits = bench.submitted("a")
    bench.look(line("7", "PENDING", "Priority"))
    bench.look(status=1, err="Unable to contact slurm controller (connect failure)")
    queued = bench.start("b")
    bench.work()
    for run in (waits, queued):
        assert run.waits == bench.engine.away
        assert run.waits.endswith(": Unable to contact slurm controller (connect failure)")
    assert bench.look(line("7", "PENDING", "Priority")) == {"a", "b"}
    assert (bench.engine.away, waits.waits) == ("", "Slurm: PENDING (Priority)")


@pytest.mark.parametrize(
    ("before", "state"),
    [
        *(
            (text, "RUNNING")
            for text in ("", "nonsense\n", "\t\t\t\t\n", "7\n", "x\tRUNNING\t\t\tspool:\n", "\x00\xff\n")
        ),
        *(("", state) for state in ("FROBNICATING", "RUNNING*", "-", "completed?")),
    ],
)
def test_what_cannot_be_read_is_passed_over(bench: Bench, before: str, state: str) -> None:
    """Other lines count; a word that we do not know is that of a live job: a later Slurm may have more states."""
    run = bench.submitted()
    bench.look(before + line("7", state))
    assert (run.waits, is_alive(run)) == (None, True)


# How runs end.


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ("CANCELLED", EngineWord.CANCELLED),
        ("TIMEOUT", EngineWord.TIMEOUT),
        ("DEADLINE", EngineWord.TIMEOUT),
        ("OUT_OF_MEMORY", EngineWord.OUT_OF_MEMORY),
        ("PREEMPTED", EngineWord.PREEMPTED),
        ("BOOT_FAIL", EngineWord.NOT_STARTED),
    ],
)
def test_a_word_that_explains_an_end_is_believed_at_once(bench: Bench, state: str, word: EngineWord) -> None:
    """No exit code need follow. If there is one, it counts, unless Slurm's own words are in the log in a while.

    A controller that crashed calls a job cancelled that has ended by itself.
    """
    run = bench.submitted()
    bench.spoke()
    assert bench.look(line("7", state)) == {"a"}
    assert (run.liveness(), run.ending) == (Liveness.GONE, EngineEnd(word, f"Slurm says {state}"))
    if state not in ("OUT_OF_MEMORY", "BOOT_FAIL"):
        run = bench.dispatcher().adopt("a", 1, None)
        bench.look(line("7", "RUNNING"))
        bench.spoke(5)
        bench.look(line("7", state))
        assert is_alive(run)
        bench.now_ns += LOG_GRACE_NS
        assert word_of(run) is EngineWord.FAILED


CUT_SHORT = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (f"{CUT_SHORT} DUE TO TIME LIMIT ***", "timeout"),
        (f"{CUT_SHORT} DUE TO PREEMPTION ***", "preempted"),
        (f"{CUT_SHORT} ***", "cancelled"),
        ("slurmstepd: error: StepId=7.batch exceeded memory limit (2 > 1), being killed", "out_of_memory"),
        ("CANCELLED AT noon, says the job itself", "forgotten"),
        ("Error running slurm prolog: 1", "not_started"),
    ],
)
def test_what_slurm_does_not_say_its_own_log_tells(bench: Bench, text: str, word: str) -> None:
    """The last words of engine.log stand for a job that was purged; what the job wrote counts for nothing.

    A job whose prolog fails, for which Slurm drains the node, has not begun: it is not cancelled, but waits again.
    """
    run, prolog = bench.submitted(), word == "not_started"
    if prolog:
        bench.folder.put_record("a", 1, layout.ENGINE_LOG, f"{text}\n".encode())
    else:
        bench.spoke(143, text)
    for state in ("CANCELLED", "FAILED"):
        bench.look(*[line("7", state)] if prolog else ())
        assert not prolog or run.liveness() is Liveness.GONE
    assert word_of(run) == word
    assert not prolog or run.ending.said == f"Slurm wrote '{text}'"


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", None])
def test_an_exit_code_may_be_late(bench: Bench, state: str | None) -> None:
    """A network file system may be a minute behind: an end without a reason or a code is believed after two.

    It may also list a record whose content it does not have yet.
    """
    run = bench.submitted()
    bench.spoke()
    lines = [line("7", state)] if state else []
    bench.look(*lines)
    bench.look(*lines)
    assert is_alive(run)
    bench.folder.put_record("a", 1, layout.RC, b"")
    assert is_alive(run)
    bench.folder.put_record("a", 1, layout.RC, b"0\n")
    assert run.liveness() is Liveness.GONE
    bench.folder.path("a", 1, layout.RC).unlink()
    bench.now_ns += GRACE_NS
    assert run.liveness() is Liveness.GONE


def test_a_run_on_a_node_that_is_lost_is_over_when_the_node_is_back(bench: Bench) -> None:
    """Its processes may live on as long as nobody has spoken to the node; people may also give it up."""
    run = bench.running()
    bench.spoke()
    for state in ("down*", "unknown*"):
        bench.look(line("7", "NODE_FAIL", node="n1"))
        bench.answer("sinfo", out=f"n1\t{state}\nn2\tidle\n")
        bench.now_ns += 10 * GRACE_NS
        assert is_alive(run)
    bench.config = Config(other_hosts_gone=("n1",))
    assert run.liveness() is Liveness.GONE
    bench.config = Config()
    bench.look(line("7", "NODE_FAIL", node="n1"))
    assert bench.answer("sinfo", out="n1\tidle\n") == {"a"}
    assert is_alive(run)
    bench.now_ns += GRACE_NS
    assert run.liveness() is Liveness.GONE


# How they are stopped.


def test_a_stop_tells_the_wrapper_once_and_then_ends_the_job(bench: Bench) -> None:
    """The batch script alone is told to end, however often it is pressed; the force comes after the grace."""
    run = bench.running()
    for _ in range(3):
        assert not bench.stop(run)
    assert bench.cancels() == ["--batch --signal=TERM 7"]
    bench.stop(run, kill=True)
    bench.stop(run, kill=True)
    assert bench.cancels()[1:] == ["7"]
    bench.now_ns += 40 * SECOND_NS
    bench.stop(run, kill=True)
    assert len(bench.cancels()) == 3
    bench.look(line("7", "CANCELLED"))
    assert bench.stop(run, kill=True)


@pytest.mark.parametrize(
    ("states", "told"),
    [
        (["SUSPENDED", "", ""], ["7"]),  # it hears no signal, and spool may not let it go on
        (["PENDING", "RUNNING"], ["7", "--batch --signal=TERM 7"]),  # if it has begun, it is asked like any other
    ],
)
def test_a_stop_of_what_does_not_run_there_is_a_cancel(bench: Bench, states: list[str], told: list[str]) -> None:
    """The engine's own cancel, once, takes out what waits, and ends what stands still."""
    run = bench.submitted()
    for state in states:
        if state:
            bench.look(line("7", state))
        assert not bench.stop(run)
    assert bench.cancels() == told


def test_a_stop_of_what_is_not_handed_over_ends_it_here(bench: Bench) -> None:
    """It leaves the line, and Slurm never hears of it; one that is on its way is awaited."""
    first, second = bench.start("a"), bench.start("b")
    bench.work()
    assert list(bench.engine.terminate({first: False, second: False})) == [second]
    assert second.liveness() is Liveness.ABSENT
    bench.answer("sbatch", out="7\n")
    bench.stop(first)
    assert bench.cancels() == ["7"]
    bench.work(1)
    assert len(bench.sent()) == 1


def test_an_order_that_nobody_heard_is_given_again(bench: Bench) -> None:
    """A cancel that falls into the absence of the controller is sent once that is back."""
    bench.stop(bench.running())
    bench.answer("scancel", 1, err="scancel: error: Unable to contact slurm controller")
    bench.work()
    assert len(bench.cancels()) == 1
    assert (bench.engine.due_ns() or 0) > bench.now_ns  # it does not spin until then
    bench.look(line("7", "RUNNING"))
    bench.work()
    assert len(bench.cancels()) == 2


@pytest.mark.parametrize("name", ["ALRM", "WINCH"])
def test_a_signal_that_the_wrapper_does_not_pass_on_is_not_sent(bench: Bench, name: str) -> None:
    """It would end the wrapper."""
    run = bench.running()
    assert (run.signal(name, None), run.signal("USR1", None)) == (0, 1)
    bench.work()
    assert bench.cancels() == ["--batch --signal=USR1 7"]


# What an earlier dispatcher has left.


def test_the_next_dispatcher_knows_a_run_by_its_record_by_its_jid_or_by_its_mark(bench: Bench) -> None:
    """Each of the three is enough."""
    bench.folder.put_record("a", 1, layout.ENGINE, b"slurm lab 7\n")
    bench.dispatcher()
    by_record, by_jid, by_mark = runs = [bench.engine.adopt(name, 1, None) for name in ("a", "b", "c")]
    by_jid.identified(Jid(1, 1, "b", "-", "n1", "slurm:8"))
    bench.look(
        line("7", "RUNNING", mark="changed by a plugin"),
        line("8", "RUNNING", mark="(null)"),
        line("9", "RUNNING", name="c"),
    )
    assert [(run.engine_id, is_alive(run)) for run in runs] == [("7", True), ("8", True), ("9", True)]
    assert bench.engine.adopt("a", 1, None) is by_record
    assert by_mark in runs


def test_a_run_that_was_given_up_is_not_taken_up_again(bench: Bench) -> None:
    """A dispatcher was killed after it took the jid: the next one has the job wait again, and looks for nothing."""
    bench.folder.put_record("a", 1, layout.JID, VOID_JID)
    bench.folder.put_record("a", 1, layout.ENGINE, b"slurm lab 7\n")
    run = bench.engine.adopt("a", 1, None)
    assert run.liveness() is Liveness.ABSENT
    run.close()
    assert bench.engine.due_ns() is None


def test_a_full_disk_costs_the_record_and_not_the_run(bench: Bench) -> None:
    """The id is known, and written once there is room; a spool that cannot have a name starts nothing."""
    run = bench.start()
    bench.work()
    bench.folder.full = True
    bench.answer("sbatch", out="7\n")
    assert run.engine_id == "7"
    with pytest.raises(StartRefused):
        bench.start("b")
    bench.folder.full = False
    bench.look(line("7", "RUNNING"))
    assert bench.engine_record() == "slurm lab 7\n"


def test_without_news_the_engine_is_asked_twice_a_minute(bench: Bench) -> None:
    """However many runs it has; the first look after news comes sooner, and without runs there is nothing to learn."""
    run = bench.submitted()
    times = [bench.now_ns // SECOND_NS]
    for _ in range(600):
        before = len(bench.commands.asked("squeue"))
        bench.work(1)
        if len(bench.commands.asked("squeue")) > before:
            times.append(bench.now_ns // SECOND_NS)
            bench.list(line("7", "RUNNING"))
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps[0] <= 5
    assert set(gaps[1:]) <= {30, 31}
    assert bench.engine.due_ns() is not None
    run.close()
    assert bench.engine.due_ns() is None


def test_inherited_variables_do_not_change_what_slurm_is_asked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatcher that was started from within a Slurm job hands nothing of that on."""
    for variable in ("SBATCH_PARTITION", "SLURM_JOB_ID", "SLURM_CONF"):
        monkeypatch.setenv(variable, "x")
    bench.start()
    bench.work()
    (command,) = (each for each in bench.commands.open.values() if each.arguments[0].endswith("sbatch"))
    assert {key for key in command.environment if key.startswith(("SLURM", "SBATCH"))} == {"SLURM_CONF"}
    assert command.environment["SPOOL_DIR"] == bench.folder.root
    assert os.environ["SLURM_JOB_ID"] == "x"


# Answers that are none.


def test_a_line_that_breaks_off_is_not_another_job(bench: Bench) -> None:
    """The mark of a:12 begins with that of a:1."""
    run = bench.running()
    bench.work(100)
    bench.answer("squeue", out=f"{TITLES}\n{line('9', 'CANCELLED')}")
    assert run.engine_id == "7"
    assert run.ending is None


@pytest.mark.parametrize(
    ("out", "job"),
    [
        ("7;lab\n", "7"),
        ("warning: 3 partitions are full\n\n 7 \r\n", "7"),
        ("7\nqueued at 14\n", "7"),
        ("7\n8\n", None),
        ("Submitted batch job 7\n", None),
        ("error 5\n", None),
        ("0\n", None),
        ("", None),
    ],
)
def test_only_a_line_that_is_an_id_is_one(bench: Bench, out: str, job: str | None) -> None:
    """Where nobody can tell, the job is found by its mark; it is never taken for another."""
    run = bench.handed(out=out)
    assert run.engine_id == job
    bench.look(line("7", "PENDING"))
    assert run.engine_id == "7"


def test_a_wrong_id_is_corrected_by_the_mark_and_an_id_of_another_spool_is_not_ours(bench: Bench) -> None:
    """A controller that has lost its memory gives the same ids again, to others."""
    run = bench.submitted(job="5")
    bench.look(line("5", "RUNNING", mark=f"spool:{'f' * 16}:x:1"), line("7", "PENDING"))
    assert (run.engine_id, run.waits) == ("7", "Slurm: PENDING")
    bench.look(line("7", "RUNNING", mark=f"spool:{'f' * 16}:x:1"))
    bench.look(line("7", "RUNNING", mark=f"spool:{'f' * 16}:x:1"))
    assert word_of(run) is EngineWord.FORGOTTEN


def test_a_submission_that_arrived_twice_is_the_job_whose_wrapper_has_spoken(bench: Bench) -> None:
    """Sbatch repeats what was not answered: the later job leaves with 17, and its end is not that of the run."""
    run = bench.submitted(job="8")
    bench.spoke()
    bench.look(line("8", "FAILED", "NonZeroExitCode"))
    assert is_alive(run)
    assert run.engine_id == "7"
    assert bench.engine_record() == "slurm lab 7\n"
    bench.look(line("7", "RUNNING"), line("8", "FAILED", "NonZeroExitCode"))
    bench.now_ns += 10 * GRACE_NS
    assert is_alive(run)
    bench.stop(run)
    assert bench.cancels() == ["--batch --signal=TERM 7"]


def test_a_silence_does_not_bring_an_old_record_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk was full when the wrapper had spoken: its record still names the job that came too late."""
    run = bench.submitted(job="8")
    bench.spoke()
    with monkeypatch.context() as context:
        context.setattr(bench.folder, "put_record", _full)
        bench.look(line("7", "RUNNING"), line("8", "PENDING"))
    bench.look(status=1, err="Unable to contact slurm controller")
    bench.look(line("7", "RUNNING"), line("8", "PENDING"))
    assert run.engine_id == "7"
    assert bench.engine_record() == "slurm lab 7\n"


def test_the_first_of_two_ends_the_run_though_the_second_still_waits(bench: Bench) -> None:
    """The second can wait for days, and never begins."""
    run = bench.submitted(job="8")
    bench.spoke(0)
    bench.look(line("7", "COMPLETED"), line("8", "PENDING"))
    assert run.liveness() is Liveness.GONE


def test_a_wrapper_that_speaks_before_sbatch_answers_is_believed(bench: Bench) -> None:
    """It can be cancelled at once, and neither a late refusal nor a late id makes it another job."""
    for name, answer in (("a", {"out": "9\n"}), ("b", {"status": 1, "err": "Invalid partition"})):
        run = bench.start(name)
        bench.work(1)
        bench.folder.put_record(name, 1, layout.JID, b"1 1 b - n1 slurm:7\n")
        bench.stop(run)
        assert bench.cancels()[-1] == "--batch --signal=TERM 7"
        bench.commands.answer("sbatch", **answer)  # type: ignore[arg-type]
        bench.work()
        assert (run.engine_id, run.liveness(), run.refusal) == ("7", Liveness.ALIVE, None)
        run.close()


def test_a_run_of_another_cluster_is_not_taken_for_a_job_of_this_one(bench: Bench) -> None:
    """Its id is another job's here, which says nothing of the run, and is neither cancelled nor told anything."""
    bench.folder.put_record("a", 1, layout.ENGINE, b"slurm elsewhere 7\n")
    bench.spoke()
    run = bench.engine.adopt("a", 1, None)
    bench.look(line("7", "CANCELLED", mark="mine"))
    bench.engine.terminate({run: True})
    assert run.signal("USR1", None) == 0
    bench.work()
    assert (run.liveness(), run.ending) == (Liveness.ALIVE, None)
    assert bench.cancels() == []
    bench.look(line("7", "RUNNING"))  # it is the same cluster under another name
    bench.stop(run, kill=True)
    assert bench.cancels() == ["7"]


def test_an_error_with_one_answer_costs_no_other(bench: Bench) -> None:
    """An answer that cannot be taken in is no reason for submissions and looks to stop for ever."""
    there, first = bench.submitted("b", "8"), bench.start("a")
    bench.work(10)
    broken: Any = lambda *_: 1 / 0  # noqa: E731
    first.submitted = broken  # type: ignore[method-assign]
    bench.commands.answer("sbatch", out="7\n")
    bench.commands.answer("squeue", out=f"{TITLES}\n{line('8', 'RUNNING', name='b')}\n")
    with pytest.raises(ZeroDivisionError):
        bench.work()
    assert bench.engine.due_ns() == bench.now_ns
    assert "b" in bench.work()
    assert there.waits is None


def test_a_job_that_is_remembered_again_has_its_whole_grace_at_its_end(bench: Bench) -> None:
    """A standby controller with an old state forgets a job for a while: that is not when it ended."""
    run = bench.submitted()
    bench.spoke()
    for _ in range(3):
        bench.look()
    bench.look(line("7", "RUNNING"))
    bench.now_ns += 10 * GRACE_NS
    bench.look(line("7", "COMPLETED"))
    assert is_alive(run)
    bench.now_ns += GRACE_NS
    assert run.liveness() is Liveness.GONE


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


# What is kept back, and the engine's words.


# What wrappers report.


def _left(bench: Bench, code: int) -> None:
    """Leave what a wrapper leaves at its end; a network file system may show the record later than the note."""
    bench.folder.noted = [("a", 1, layout.JID), ("a", 1, layout.RC)]
    bench.work(2)
    bench.spoke(code)


def test_an_exit_code_of_0_ends_a_run_whatever_the_engine_says(bench: Bench) -> None:
    """No answer to a look is needed."""
    run = bench.running()
    _left(bench, 0)
    assert bench.work(2) == {"a"}
    assert run.liveness() is Liveness.GONE


def test_another_exit_code_waits_for_the_engine_s_word_and_asks_for_it(bench: Bench) -> None:
    """It may be due to a signal of the engine."""
    run = bench.running()
    for _ in range(20):
        bench.work(100)
        bench.list(line("7", "RUNNING"))
    _left(bench, 143)
    assert bench.work(2) == {"a"}
    assert is_alive(run)
    bench.work(5)
    bench.commands.answer("squeue", out=f"{TITLES}\n{line('7', 'PREEMPTED')}\n")
    bench.folder.put_record(
        "a", 1, layout.ENGINE_LOG, b"slurmstepd: error: *** JOB 7 CANCELLED AT 1 DUE TO PREEMPTION\n"
    )
    bench.work()
    assert word_of(run) is EngineWord.PREEMPTED


@pytest.mark.parametrize("code", [0, 143])
def test_a_run_that_was_asked_to_end_is_over_when_the_engine_says_so(bench: Bench, code: int) -> None:
    """What it has started may still be ended there; the engine is asked soon."""
    run = bench.running()
    bench.engine.terminate({run: False})
    _left(bench, code)
    bench.work(2)
    assert not bench.stop(run)
    bench.work(5)
    bench.list(line("7", "COMPLETED"))
    assert bench.stop(run)


@pytest.mark.parametrize("note", [("b", 1, "rc"), ("a", 2, "rc"), ("a", 1, "nonsense"), ("a", 1, ""), None])
def test_without_its_own_note_an_exit_code_ends_nothing(bench: Bench, note: tuple[str, int, str] | None) -> None:
    """Anything may have written a note, or to the metadir; what lives is not called ended by that."""
    run = bench.submitted()
    bench.spoke(0)
    bench.folder.noted = [note] if note is not None else []
    bench.work(2)
    bench.look(line("7", "RUNNING"))
    assert is_alive(run)


def test_steady_news_do_not_flood_the_engine_with_questions(bench: Bench) -> None:
    """A submission each second for ten minutes makes at most a dozen looks a minute."""
    for number in range(600):
        bench.start(f"j{number}")
        bench.work(1)
        bench.answer("sbatch", out=f"{number + 10}\n")
        if any(bench.commands.ordered[each - 1][0] == "squeue" for each in bench.commands.open):
            bench.commands.answer(
                "squeue",
                out="\n".join([TITLES, *(line(str(n + 10), "RUNNING", name=f"j{n}") for n in range(number + 1)), ""]),
            )
            bench.work()
    assert len(bench.commands.asked("squeue")) <= 12 * 10 + 6


# The engine's mistakes.


def test_the_highest_priority_goes_first_and_each_at_its_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One submission is under way at a time, and no more are made than the rate allows."""
    monkeypatch.setattr(SlurmLanguage, "submit_ns", 2 * SECOND_NS)
    for name, priority in (("a", 10), ("b", 10), ("c", 20)):
        bench.start(name, Spec("true", priority=priority))
    for later_s, answered in ((0, False), (5, True), (0, False), (1, False), (1, True), (2, True)):
        bench.work(later_s)
        if answered:
            bench.answer("sbatch", out=f"{len(bench.sent())}\n")
    assert [words[1] for words in bench.sent()] == ["--job-name=c", "--job-name=a", "--job-name=b"]


def test_a_limit_on_the_number_of_jobs_keeps_jobs_waiting_and_holds_none(bench: Bench) -> None:
    """A user may have 100 jobs in Slurm: the next wait, in their order, with Slurm's words, and are tried again.

    That is each half minute, and soon after the end of a run.
    """
    full = (
        "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates "
        "accounting/QOS policy (job submit limit, user's size and/or time limits)\n"
    )
    there = bench.submitted("there")
    run, second = bench.start("a"), bench.start("a2")
    bench.work(1)
    assert bench.answer("sbatch", 1, err=full) == {"a"}
    assert (run.refusal, run.liveness()) == (None, Liveness.ALIVE)
    assert (run.waits or "").startswith("Slurm takes no more jobs for now: QOSMaxSubmitJobPerUserLimit; ")
    assert second.waits == run.waits
    bench.work(20)
    assert len(bench.sent()) == 2
    bench.list(line("7", "RUNNING", name="there"))
    assert (bench.engine.due_ns() or 0) > bench.now_ns
    bench.work(11)
    assert [words[1] for words in bench.sent()[2:]] == ["--job-name=a"]
    bench.answer("sbatch", 1, err=full)
    there.close()
    bench.work(3)
    assert [words[1] for words in bench.sent()[3:]] == ["--job-name=a"]
    bench.answer("sbatch", out="8\n")
    bench.work(1)
    bench.answer("sbatch", 1, err=full)
    assert (run.engine_id, second.engine_id, second.waits) == ("8", None, bench.engine.full)
    assert list(bench.engine.terminate({second: False})) == [second]


def test_every_order_of_answers_leaves_one_submission_for_each_run(bench: Bench) -> None:
    """Two runs, three kinds of answers to each: no more than one sbatch for a run, whatever comes in between."""
    kinds: list[Callable[[str], object]] = [
        lambda job: bench.commands.answer("sbatch", out=f"{job}\n"),
        lambda job: bench.commands.answer("sbatch", None),
        lambda job: bench.commands.answer("sbatch", 1, err="Socket timed out"),
    ]
    there: list[str] = []
    for number, answers in enumerate(product(kinds, kinds), 1):
        runs = [bench.start(f"{letter}{number}") for letter in "xy"]
        for answer, run in zip(answers, runs, strict=True):
            bench.work(1)
            job = str(len(there) + 10)
            there.append(line(job, "RUNNING", name=run.key[0]))
            answer(job)
            bench.work()
            bench.look(*there)
            assert run.engine_id == job
        for run in runs:
            run.close()
    assert len(bench.sent()) == len({words[1] for words in bench.sent()}) == 2 * len(kinds) ** 2


@pytest.mark.parametrize("mark", ["changed", f"spool:{ID}:a:1:", f"spool:{ID}:a:1:0", f"spool:{ID}:a:x", "spool:::"])
def test_an_id_that_only_a_record_gives_ends_no_job_without_the_mark_of_the_run(bench: Bench, mark: str) -> None:
    """The run is taken to live, and the view says why it does not end; a mark that a plugin has lengthened is one."""
    bench.folder.put_record("a", 1, layout.ENGINE, b"slurm lab 7\n")
    bench.dispatcher()
    run = bench.engine.adopt("a", 1, None)
    bench.look(line("7", "RUNNING", mark=mark))
    assert not bench.stop(run, kill=True)
    assert (bench.cancels(), run.resists) == ([], "Slurm does not show that job 7 is this run")
    bench.look(line("7", "RUNNING", mark=f"spool:{ID}:a:1 and more"))
    assert not bench.stop(run, kill=True)
    assert (bench.cancels(), run.resists) == (["7"], "")
