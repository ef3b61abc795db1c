"""The GPUs as the real pynvml sees them, over a library whose GPUs the test makes, breaks and mends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from ctypes import CDLL
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from plugins.fake_nvml import GIB, FakeNvml
from spool.core.model import SECOND_NS, Gpu
from spool.formats.config import GpuConfig
from spool.formats.state import GpuLook
from spool.machine.gpus import LIMIT_NS, MAX_AGE_NS, NO_ANSWER, GpuWatcher, Ours, UseReader
from spool.machine.nvml import Sample
from support import PATIENCE_S, wait_for

LONG_NS = int(PATIENCE_S) * SECOND_NS
NOT_SUPPORTED, FUNCTION_NOT_FOUND, GPU_IS_LOST, MISMATCH, UNKNOWN = 3, 13, 15, 18, 999


class Watch:
    """A watcher with a clock of its own, on which every look is later than the one before by more than MAX_AGE_NS."""

    def __init__(self, watcher: GpuWatcher) -> None:
        self.watcher = watcher
        self.now_ns = 1_000_000 * SECOND_NS

    def __call__(self, ours: Ours | None = None, *, later_ns: int = MAX_AGE_NS, patience_ns: int = LONG_NS) -> GpuLook:
        self.now_ns += later_ns
        return self.watcher.look(self.now_ns, ours, patience_ns=patience_ns)

    @property
    def helper(self) -> int:
        """The process that asks NVML; 0 while there is none."""
        return self.watcher._helper._child.pid or 0

    def until(self, true: Callable[[GpuLook], bool]) -> GpuLook:
        """Look until it is so. No time passes while a question is open: a busy machine is no driver that hangs."""
        for _ in range(200):
            asked = self.watcher.asked > self.watcher.answered
            look = self(later_ns=0 if asked else MAX_AGE_NS, patience_ns=LONG_NS)
            if true(look):
                return look
        raise AssertionError(look)


PEOPLE = {4711: ("python", "alice"), 4712: ("jupyter-lab", "bob"), 4713: ("ollama", None)}


class Nvml(FakeNvml):
    """GPUs that a test makes, and watchers of them in a world where only PEOPLE's processes exist."""

    def __init__(self, library: Path, directory: Path) -> None:
        super().__init__(library, directory)
        self.watchers: list[GpuWatcher] = []

    def watch(self, *, limit_ns: int = LONG_NS, idle_seconds: float = 60, **variables: object) -> Watch:
        """Begin to watch them, with further variables in the environment."""
        environment = {**self.environment, **{name: str(value) for name, value in variables.items()}}
        uses = UseReader(pids_mean_something=True, who=PEOPLE.get)
        watcher = GpuWatcher(uses=uses, environment=environment, limit_ns=limit_ns, idle_seconds=idle_seconds)
        self.watchers.append(watcher)
        return Watch(watcher)


@pytest.fixture
def nvml(fake_nvml_library: Path, tmp_path: Path) -> Iterator[Nvml]:
    """Give GPUs, of which there are none yet."""
    made = Nvml(fake_nvml_library, tmp_path)
    yield made
    for watcher in made.watchers:
        watcher.close()


@pytest.fixture
def watch(nvml: Nvml) -> Watch:
    """Begin to watch one GPU."""
    nvml.gpu("GPU-a")
    return nvml.watch()


def problems(look: GpuLook) -> dict[str, str | None]:
    """Return each GPU's problem."""
    return {gpu.uuid: gpu.problem for gpu in look.gpus}


def only(look: GpuLook) -> Gpu:
    """Return the one GPU."""
    (gpu,) = look.gpus
    return gpu


def several(nvml: Nvml, letters: str) -> tuple[str, ...]:
    """Make GPUs in the order of the bus, and return their UUIDs."""
    uuids = tuple(f"GPU-{letter}" for letter in letters)
    for bus, uuid in enumerate(uuids):
        nvml.gpu(uuid, bus=bus)
    return uuids


def test_each_gpu_tells_uuid_index_name_and_memory(nvml: Nvml) -> None:
    """All that a look says of a GPU comes from NVML, sizes in bytes beyond 32 bits.

    The order is that of the bus, as CUDA_DEVICE_ORDER=PCI_BUS_ID has it; the index stays NVML's.
    """
    nvml.gpu("GPU-c", bus=0xC1)
    nvml.gpu("GPU-a", bus=0x01, total=141 * GIB, free=140 * GIB, name="NVIDIA H200")
    nvml.gpu("GPU-b", bus=0x41)
    nvml.add(f"reserved GPU-a {GIB}")
    look = nvml.watch()()
    assert look.gpus[0] == Gpu("GPU-a", 1, "NVIDIA H200", 141 * GIB, 140 * GIB)
    assert [(gpu.uuid, gpu.index) for gpu in look.gpus[1:]] == [("GPU-b", 2), ("GPU-c", 0)]
    assert look.problem is None


def test_an_nvml_that_has_no_gpus_shows_none(nvml: Nvml) -> None:
    """No GPUs and no problem: a driver without cards."""
    assert nvml.watch()() == GpuLook((), None, 1_000_005 * SECOND_NS)


def nvml_of_this_machine() -> bool:
    """Return whether a real library is here."""
    try:
        CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(nvml_of_this_machine(), reason="this machine has an NVML of its own")
def test_a_machine_without_nvml_has_no_gpus_and_no_problem() -> None:
    """No library: there are none, which is not the same as unknown."""
    watcher = GpuWatcher()
    look = watcher.look(1, patience_ns=LONG_NS)
    watcher.close()
    assert (look.gpus, look.problem) == ((), None)


def test_a_library_that_is_broken_is_a_problem_and_not_the_absence_of_gpus(nvml: Nvml, tmp_path: Path) -> None:
    """A stub of no bytes, as container images have, cannot be loaded: unknown, with the loader's own words."""
    (tmp_path / "libnvidia-ml.so.1").touch()
    look = nvml.watch(LD_LIBRARY_PATH=tmp_path)()
    assert look.gpus == ()
    assert "file too short" in (look.problem or "")


def test_an_old_driver_without_the_newer_calls_is_asked_with_the_older(nvml: Nvml) -> None:
    """Before 510 there is no memory call v2 and no process call v3; the earlier versions tell the same."""
    nvml.gpu("GPU-a", free=77 * GIB)
    nvml.process("GPU-a", 4711, 3 * GIB)
    for call in ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMigMode", "nvmlDeviceGetComputeRunningProcesses_v3"):
        nvml.error(call, FUNCTION_NOT_FOUND)
    gpu = only(nvml.watch()())
    assert gpu.memory_free_bytes == 77 * GIB
    assert [(process.pid, process.memory_bytes) for process in gpu.foreign] == [(4711, 3 * GIB)]


def test_mig_instances_are_devices_and_their_parent_is_not_given(nvml: Nvml) -> None:
    """Each instance has its own UUID, memory and processes; its index is (parent + 1) * 100 + place."""
    several(nvml, "ab")
    nvml.mig("MIG-x", "GPU-b", 0, free=9 * GIB)
    nvml.mig("MIG-y", "GPU-b", 3)
    nvml.process("MIG-y", 4711)
    gpus = nvml.watch()().gpus
    assert [(gpu.uuid, gpu.index, gpu.memory_free_bytes) for gpu in gpus] == [
        ("GPU-a", 0, 80 * GIB),
        ("MIG-x", 200, 9 * GIB),
        ("MIG-y", 203, 10 * GIB),
    ]
    assert [len(gpu.foreign) for gpu in gpus] == [0, 1, 1]  # of MIG-x 1 GiB is in use, by whom cannot be seen
    assert [gpu.mig for gpu in gpus] == [False, True, True]
    assert "MIG" in gpus[1].name


def test_splitting_a_gpu_and_taking_it_apart_is_no_failure(nvml: Nvml, watch: Watch) -> None:
    """A GPU that goes into MIG mode, and an instance that is destroyed, are forgotten, not reported as lost."""
    watch()
    nvml.add("migmode GPU-a")  # CUDA cannot use the parent, so it is not there
    look = watch()
    assert (look.gpus, look.problem) == ((), None)
    nvml.mig("MIG-x", "GPU-a", 0)
    nvml.mig("MIG-y", "GPU-a", 1)
    assert problems(watch()) == {"MIG-x": None, "MIG-y": None}
    nvml.remove("MIG-x")
    assert problems(watch()) == {"MIG-y": None}


@pytest.mark.parametrize(("code", "said"), [(MISMATCH, "version mismatch"), (77, "error number 77")])
def test_nvml_failing_from_the_start_is_unknown_and_says_why(nvml: Nvml, watch: Watch, code: int, said: str) -> None:
    """A problem, no GPUs, whether pynvml has a name for the error or not; when NVML answers, all is there."""
    nvml.error("nvmlInitWithFlags", code)
    look = watch()
    assert look.gpus == ()
    assert said in (look.problem or "")
    nvml.mend()
    wait_for(lambda: problems(watch()) == {"GPU-a": None}, what="an answer after the failure")


def test_gpus_seen_before_nvml_fails_keep_their_identity_with_a_problem(nvml: Nvml) -> None:
    """Failing NVML: every GPU stays with UUID, index, name and total; what is free and on it is unknown."""
    nvml.gpu("GPU-a", name="H200")
    nvml.process("GPU-a", 4711)
    watch = nvml.watch()
    before = only(watch())
    assert before.foreign != ()
    nvml.error("nvmlDeviceGetCount_v2", UNKNOWN)
    look = watch()
    assert look.problem == "NVML: Unknown Error"
    assert only(look) == Gpu("GPU-a", 0, "H200", 80 * GIB, None, problem="NVML: Unknown Error")
    nvml.mend()
    look = watch()
    assert (only(look), look.problem) == (before, None)


def test_a_hanging_nvml_stops_no_look_and_is_said_after_the_limit(nvml: Nvml) -> None:
    """A look returns with what is known; after the limit, or once it is doubted, each GPU has the problem.

    It goes when NVML answers again.
    """
    nvml.gpu("GPU-a")
    watch = nvml.watch(limit_ns=LIMIT_NS)
    before = watch()
    nvml.hang("nvmlDeviceGetMemoryInfo_v2", "GPU-a")
    assert watch(patience_ns=0) == before
    look = watch(patience_ns=0, later_ns=LIMIT_NS)
    assert "10s" in (look.problem or "")
    assert problems(look) == {"GPU-a": look.problem}
    assert watch(patience_ns=0) == look
    doubted = watch.watcher.doubt()
    assert (doubted.problem, problems(doubted)) == (NO_ANSWER, {"GPU-a": NO_ANSWER})
    nvml.mend()
    assert watch.until(lambda look: look.problem is None).gpus == before.gpus


def test_a_hang_at_the_very_start_is_unknown_at_once_and_said_after_the_limit(nvml: Nvml) -> None:
    """Before the first answer nothing is known, and that is not "no GPUs"; one process asks, however long it hangs.

    One patient look, as a command makes it, ends with the limit.
    """
    nvml.gpu("GPU-a")
    nvml.hang("nvmlInitWithFlags")
    patient = nvml.watch(limit_ns=SECOND_NS // 5)(patience_ns=SECOND_NS // 5)
    assert "0.2s" in (patient.problem or "")
    others = set(psutil.Process().children())  # of other tests in this process
    watch = nvml.watch(limit_ns=LIMIT_NS)
    assert watch(patience_ns=0).problem
    for _ in range(8):
        assert "hangs" in (watch(patience_ns=0, later_ns=LIMIT_NS).problem or "")
        mine = set(psutil.Process().children()) - others
        assert len([child for child in mine if child.status() != psutil.STATUS_ZOMBIE]) <= 1
    nvml.mend()
    assert problems(watch.until(lambda look: look.problem is None)) == {"GPU-a": None}


def test_the_descriptor_wakes_a_dispatcher_when_the_answer_comes(nvml: Nvml, watch: Watch) -> None:
    """An answer later than the patience makes fileno() readable, and a look then takes it in without asking again.

    Questions are counted, so that a start can wait for its own; a failure is an answer, too.
    """
    nvml.hang("nvmlInitWithFlags")
    watcher = watch.watcher
    watch(patience_ns=0)
    assert (watcher.asked, watcher.answered) == (1, 0)
    assert select.select([watcher.fileno()], [], [], 0)[0] == []
    nvml.mend()
    assert select.select([watcher.fileno()], [], [], PATIENCE_S)[0] != []
    assert problems(watch(patience_ns=0, later_ns=0)) == {"GPU-a": None}
    assert (watcher.asked, watcher.answered) == (1, 1)
    assert select.select([watcher.fileno()], [], [], 0)[0] == []
    nvml.error("nvmlDeviceGetCount_v2", UNKNOWN)
    watch()
    assert (watcher.asked, watcher.answered) == (2, 2)


def test_the_helper_dying_is_a_problem_and_the_next_look_has_another(nvml: Nvml, watch: Watch) -> None:
    """A library that crashes its process costs one answer, and never the dispatcher.

    A dispatcher reaps all its children; that the helper was among them changes nothing.
    """
    nvml.hang("nvmlDeviceGetCount_v2")
    watch(patience_ns=0)
    os.kill(watch.helper, signal.SIGSEGV)
    look = watch(later_ns=0)  # which asks no new question
    assert "signal 11" in (look.problem or "")
    nvml.mend()
    wait_for(lambda: problems(watch()) == {"GPU-a": None}, what="an answer after the failure")
    pid = watch.helper
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert problems(watch()) == {"GPU-a": None}


def test_a_helper_that_left_because_nobody_asked_is_started_again(nvml: Nvml) -> None:
    """An idle spool keeps no GPU awake: the helper goes by itself, which no later look notices."""
    nvml.gpu("GPU-a")
    watch = nvml.watch(idle_seconds=0.001)
    watch()
    pid = watch.helper
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=PATIENCE_S)
    for _ in range(8):  # some of these meet the helper just as it leaves
        assert watch().problem is None


def test_a_gpu_that_falls_off_stays_with_a_problem_and_comes_back(nvml: Nvml) -> None:
    """The lost GPU keeps its place, UUID and index; its neighbours are as before, also in a newly started NVML."""
    several(nvml, "abc")
    watch = nvml.watch()
    before = watch()
    nvml.remove("GPU-b")
    look = watch()
    assert problems(look) == {"GPU-a": None, "GPU-b": "GPU is lost", "GPU-c": None}
    assert look.problem is None
    look = watch()
    assert [uuid for uuid, problem in problems(look).items() if problem] == ["GPU-b"]
    assert [gpu.index for gpu in look.gpus] == [0, 1, 2]
    nvml.gpu("GPU-n", bus=3)  # NVML counts it as 2
    watch()
    assert {gpu.uuid: gpu.index for gpu in watch().gpus} == {"GPU-a": 0, "GPU-b": 1, "GPU-c": 2, "GPU-n": 3}
    nvml.remove("GPU-n")
    nvml.gpu("GPU-b", bus=1)
    assert [gpu for gpu in watch().gpus if gpu.uuid != "GPU-n"] == [*before.gpus]


PROCESSES, HANDLE = "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetHandleByIndex_v2"


@pytest.mark.parametrize(
    ("call", "code", "problem"),
    [
        (PROCESSES, UNKNOWN, {"GPU-b": f"{PROCESSES}: Unknown Error"}),
        (HANDLE, GPU_IS_LOST, {}),  # without a UUID there is nothing to give
        (HANDLE, 4, {}),  # one that a container or an administrator keeps from us is not there
    ],
)
def test_an_error_of_one_gpu_is_that_gpus_problem_alone(
    nvml: Nvml, call: str, code: int, problem: dict[str, str]
) -> None:
    """What one card refuses is said with the call and the error; the other card can be given."""
    several(nvml, "ab")
    nvml.error(call, code, "GPU-b")
    watch = nvml.watch()
    look = watch()
    assert (problems(look), look.problem) == ({"GPU-a": None, **problem}, None)
    assert look.unused == (("GPU 1 is not used: GPU is lost",) if code == GPU_IS_LOST else ())
    nvml.mend()
    assert problems(watch()) == {"GPU-a": None, "GPU-b": None}


def test_compute_processes_count_and_graphics_processes_do_not(nvml: Nvml, watch: Watch) -> None:
    """The display server holds no card; a client of the MPS server does.

    Memory that is not available is unknown, not 16 EiB; it is not below any limit, so it cannot be ignored as small.
    """
    nvml.process("GPU-a", 4711, None)
    nvml.process("GPU-a", 4713, 2 * GIB, kind="mps")
    nvml.process("GPU-a", 4712, GIB, kind="graphics")
    ours = Ours(ignores=GpuConfig(ignore_below_bytes=GIB).ignores)
    assert [(p.pid, p.name, p.user, p.memory_bytes) for p in only(watch(ours)).foreign] == [
        (4711, "python", "alice", None),
        (4713, "ollama", None, 2 * GIB),
    ]


def test_our_processes_are_ours_and_their_memory_is_told_by_job(nvml: Nvml) -> None:
    """However many; those of one job count together; a process of a run that is just ending is not foreign."""
    nvml.gpu("GPU-a")
    for pid in range(100, 160):
        nvml.process("GPU-a", pid, GIB)
    jobs = {pid: "ending" if pid == 100 else "train" for pid in range(100, 160)}
    gpu = only(nvml.watch()(Ours(job_of=jobs.get, on={"GPU-a": {"train": None, "ending": None}})))
    assert gpu.foreign == ()
    assert gpu.taken_bytes == (("ending", GIB), ("train", 59 * GIB))


def test_memory_in_use_that_nobody_accounts_for_is_somebodys(nvml: Nvml) -> None:
    """NVML lists no process and 12 GiB are in use: not idle. What a display server has, or the driver, is no such."""
    nvml.gpu("GPU-a", free=68 * GIB)
    watch = nvml.watch()
    assert [(process.pid, process.memory_bytes) for process in only(watch()).foreign] == [(0, 12 * GIB)]
    nvml.process("GPU-a", 4712, 12 * GIB, kind="graphics")
    assert only(watch()).foreign == ()
    nvml.leave()
    nvml.add(f"reserved GPU-a {12 * GIB}")
    assert only(watch()).foreign == ()


def test_what_nvml_does_not_tell_is_unknown_and_no_problem(nvml: Nvml) -> None:
    """A card that cannot, a MIG instance, an error: None, never 0, and the GPU can be given; 0 where it tells 0.

    GPUs that share the host's memory say of that, too, that it is not supported.
    """
    for uuid in several(nvml, "abcde"):
        nvml.busy(uuid, 87, 34)
    nvml.busy("GPU-e", 0, 0)
    for call in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetUtilizationRates"):
        nvml.error(call, NOT_SUPPORTED, "GPU-a")
    nvml.error("nvmlDeviceGetUtilizationRates", UNKNOWN, "GPU-b")
    nvml.mig("MIG-x", "GPU-c", 0)
    look = nvml.watch()()
    told = [(gpu.utilisation_percent, gpu.memory_utilisation_percent) for gpu in look.gpus]
    assert told == [(None, None)] * 3 + [(87, 34), (0, 0)]
    assert (look.gpus[0].memory_total_bytes, look.gpus[0].memory_free_bytes) == (None, None)
    assert problems(look) == dict.fromkeys(("GPU-a", "GPU-b", "MIG-x", "GPU-d", "GPU-e"))


def test_the_work_of_single_processes_is_asked_for_where_several_may_share_it(nvml: Nvml) -> None:
    """One process does all of it, on an idle GPU none does any; where the card does not tell it is unknown."""
    for uuid in several(nvml, "abcde"):
        nvml.busy(uuid, 0 if uuid == "GPU-b" else 70, 0)
        for pid in (4711,) if uuid == "GPU-a" else (4711, 4712):
            nvml.process(uuid, pid)
    nvml.computes("GPU-c", 4711, 30)
    nvml.computes("GPU-c", 4712, 130)
    nvml.error("nvmlDeviceGetProcessUtilization", UNKNOWN, "GPU-e")
    command = [sys.executable, "-m", "spool.machine.nvml"]
    said = subprocess.run(command, input="\n", env=nvml.environment, capture_output=True, text=True, check=True)
    sample = Sample.from_json(said.stdout)
    assert [device.computing for device in sample.devices] == [((4711, 70),), (), ((4711, 30), (4712, 100)), None, None]
    assert [device.problem for device in sample.devices] == [None] * 5
    asked = [call.split()[1] for call in nvml.calls() if call.startswith("nvmlDeviceGetProcessUtilization")]
    assert set(asked) == {"GPU-c", "GPU-d", "GPU-e"}


def test_what_the_configuration_ignores_does_not_count(nvml: Nvml, watch: Watch) -> None:
    """A name, a user or little memory: one of them is enough for a process not to count."""
    for pid, used in ((4711, 30 * GIB), (4712, 642 << 20), (4713, GIB)):
        nvml.process("GPU-a", pid, used)
    for ignore, left in (
        (GpuConfig(), [4711, 4712, 4713]),
        (GpuConfig(ignore_names=frozenset({"jupyter-lab"})), [4711, 4713]),
        (GpuConfig(ignore_users=frozenset({"alice"})), [4712, 4713]),
        (GpuConfig(ignore_below_bytes=700 << 20), [4711, 4713]),
        (GpuConfig(frozenset({"ollama"}), frozenset({"alice"}), 700 << 20), []),
    ):
        assert [process.pid for process in only(watch(Ours(ignores=ignore.ignores))).foreign] == left


def test_the_real_process_table_names_a_process_and_its_user(nvml: Nvml) -> None:
    """Outside of a test's world, names and users come from this machine's process table."""
    nvml.gpu("GPU-a")
    nvml.process("GPU-a", os.getpid())
    watcher = GpuWatcher(environment=nvml.environment, uses=UseReader())
    (process,) = only(watcher.look(1, patience_ns=LONG_NS)).foreign
    watcher.close()
    me = psutil.Process()
    assert (process.name, process.user) == (me.name(), me.username())


def test_nvml_is_asked_by_looks_alone_and_not_more_often_than_needed(nvml: Nvml, watch: Watch) -> None:
    """No look, no call; a look soon after another uses its answer, but none from the future: the clock was set back.

    A shared GPU that a run has left is measured anew; one that a run had alone is free by our own evidence.
    """
    assert not watch.helper
    for later_ns, asks in ((1, True), (MAX_AGE_NS - 1, False), (1, True), (-3600 * SECOND_NS, True)):
        calls = len(nvml.calls())
        watch(later_ns=later_ns)
        assert (len(nvml.calls()) > calls) is asks
    nvml.gpu("GPU-a", free=50 * GIB)
    watch(Ours(on={"GPU-a": {"alone": None}}))
    calls = len(nvml.calls())
    watch(Ours(), later_ns=1)
    assert len(nvml.calls()) == calls
    watch(Ours(on={"GPU-a": {"one": 30 * GIB, "two": 10 * GIB}}))
    nvml.gpu("GPU-a", free=80 * GIB)
    assert only(watch(Ours(on={"GPU-a": {"two": 10 * GIB}}), later_ns=1)).memory_free_bytes == 80 * GIB


def test_closing_leaves_no_process(nvml: Nvml, tmp_path: Path) -> None:
    """The helper is gone when close() returns, also from within a call that hangs, and has inherited no descriptor.

    A lock that the dispatcher holds must be free when the dispatcher is dead, whatever NVML does to the helper.
    """
    nvml.hang("nvmlInitWithFlags")
    watch = nvml.watch()
    with (tmp_path / "lock").open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        watch(patience_ns=0)
        pid = watch.helper
        wait_for(nvml.calls, what="the library in the helper")
        held = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    assert held
    assert str(tmp_path / "lock") not in held
    watch.watcher.close()
    assert not psutil.pid_exists(pid)


def test_the_helper_leaves_when_its_asker_is_killed(nvml: Nvml) -> None:
    """No process stays behind after kill -9 of the dispatcher."""
    script = (
        "from spool.machine.gpus import GpuWatcher; w = GpuWatcher(); w.look(1, patience_ns=30_000_000_000);"
        "print(w._helper._child.pid, flush=True); input()"
    )
    asker = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**nvml.environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with asker:
        helper = psutil.Process(int(asker.stdout.readline()))
        asker.kill()
    with suppress(psutil.NoSuchProcess):
        while helper.status() != psutil.STATUS_ZOMBIE:  # the test's own time limit ends this
            time.sleep(0.01)


_PLACES = ("MemoryAffinity", "NvLinkState", "NvLinkRemotePciInfo_v2", "P2PStatus", "HandleByUUID")
PLACES = {f"nvmlDeviceGet{name}" for name in _PLACES}


def test_nodes_and_links_are_asked_for_only_where_they_decide(nvml: Nvml) -> None:
    """A direct link counts, a way by a switch is one; what a card does not tell is unknown, and no problem."""
    several(nvml, "abcd")
    nvml.mig("MIG-1", "GPU-d", 0)
    for letter, node in (("a", 0), ("b", 65), ("d", 1)):
        nvml.near(f"GPU-{letter}", node)
    nvml.links("GPU-a", "GPU-b", 4)
    nvml.links("GPU-b", "GPU-c", 0)
    nvml.error("nvmlDeviceGetMemoryAffinity", UNKNOWN, "GPU-c")
    watch = nvml.watch()
    assert {(gpu.node, gpu.links) for gpu in watch().gpus} == {(None, ())}
    assert not PLACES & {call.split()[0] for call in nvml.calls()}
    look = watch(Ours(where=True))
    assert {gpu.uuid: (gpu.node, gpu.links) for gpu in look.gpus} == {
        "GPU-a": (0, (("GPU-b", 4),)),
        "GPU-b": (65, (("GPU-a", 4), ("GPU-c", 1))),
        "GPU-c": (None, (("GPU-b", 1),)),
        "MIG-1": (1, ()),
    }
    assert set(problems(look).values()) == {None}
    asked = len(nvml.calls())
    assert watch(Ours(where=True)).gpus == look.gpus
    assert not PLACES & {call.split()[0] for call in nvml.calls()[asked:]}  # once is enough
    nvml.error("nvmlDeviceGetMemoryInfo_v2", GPU_IS_LOST, "GPU-a")
    nvml.remove("GPU-a")
    lost = watch.until(lambda look: problems(look)["GPU-a"] is not None)
    assert {gpu.node for gpu in lost.gpus if gpu.uuid == "GPU-a"} == {0}
