"""The keys of engines in job files, in config.toml and as options: their values, and what is said of each mistake."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from calling import Command, asked, put_job
from cli.records import serve
from crash.world import Session, world_at
from formats.wrong_values import texts_of
from spool.core import layout
from spool.core.errors import InvalidConfig, InvalidJob
from spool.core.model import Request, Spec
from spool.extras.engines import CONFIG, slurm
from spool.extras.engines.language import settings_of
from spool.extras.engines.sge import SgeConfig
from spool.extras.engines.slurm import SlurmConfig
from spool.formats import config, jobfile, toml
from spool.formats.capabilities import KeyTable
from spool.formats.state import JobView

GOLDEN = Path(__file__).parent / "golden"


def parsed(text: str) -> Spec:
    """Return the spec of a job file with that text after its command."""
    return jobfile.parse(f'command = "x"\n{text}'.encode(), name="x")


def problems(text: str) -> list[str]:
    """Return what is wrong with a job file."""
    with pytest.raises(InvalidJob) as error:
        jobfile.parse(text.encode(), name="x")
    return [problem.message for problem in error.value.problems]


def test_a_golden_job_file_loads_for_ever() -> None:
    """A job that was right once keeps its meaning in every later version."""
    assert jobfile.parse((GOLDEN / "job.toml").read_bytes(), name="x") == Spec(
        command="python train.py",
        request=Request(gpus=2, gpu_types=("A100",)),
        executor="slurm",
        parts=(("engines", ("--constraint=ib", "-x node7", "--exclusive")),),
    )


def test_a_golden_configuration_loads_for_ever() -> None:
    """So does a configuration; what it says no more is told, with what to write instead."""
    found = config.parse((GOLDEN / "config.toml").read_bytes())
    assert found.executor == "slurm"
    assert settings_of(found)["slurm"] == SlurmConfig(
        max_in_flight=50,
        gpus={"A100": "gpu:a100", "H100": "gpu:h100"},
        gpu_memory="shard",
        partition="gpu",
        account="vision",
        qos="long",
        options=("--constraint=ib", "--mail-type=FAIL"),
    )
    gone = [each.partition(" ")[0] for each in found.advice]
    assert gone == ["slurm.poll", "slurm.submit_per_second"]
    assert all(each.endswith("; remove it") for each in found.advice)
    found = config.parse(b'[slurm]\nqos = "normal"\npreemptible_qos = "scavenger"\n')
    assert settings_of(found)["slurm"] == SlurmConfig(qos="normal", preemptible_qos="scavenger")


@pytest.mark.parametrize(("name", "kind"), [("slurm", SlurmConfig), ("sge", SgeConfig)])
def test_each_key_of_a_table_is_a_field_and_each_field_is_a_key(name: str, kind: type[SlurmConfig | SgeConfig]) -> None:
    """What a row fills is there, and nothing else."""
    (table,) = (key.table for key in CONFIG.keys if key.name == name)
    assert isinstance(table, KeyTable)
    assert {key.target for key in table.keys} == {*kind.__struct_fields__}


REFUSED = texts_of(r"""
gpus = 1 & executor = "slurm" & gpu_memory: "auto"
executor = "slurm" & keep_session: true
executor = "slurm" & container: "x"
executor = "sge" & container: "x"
executor = "slurm" & gpus = 1 & gpu_idle: "30m"
executor = "slurm" & resources: { licence = 1 }
executor_options: "--constraint=ib" | ["--constraint", "ib"] | ["--comment=\u001b[2J"]
executor = "tmux" & executor_options: ["--constraint=ib"]
executor: "slum"
""")


@pytest.mark.parametrize(("key", "texts"), REFUSED)
def test_a_value_that_cannot_be_meant_is_refused_with_its_key(key: str, texts: list[str]) -> None:
    """Keys of this machine alone are refused for an engine, and those of an engine for this machine."""
    for text in texts:
        (problem,) = problems(f'command = "x"\n{text}')
        assert f'"{key}' in problem, text


WRONG = texts_of(r"""
slurm.max_in_flight: 0
slurm.gpu_memory: "share"
slurm.options: ["--time=1"]
sge.options: ["-N x"]
""")


def test_a_setting_that_cannot_be_meant_is_refused_with_its_key_and_line() -> None:
    """One mistake gives one problem."""
    for key, line in ((key, line) for key, lines in WRONG for line in lines):
        with pytest.raises(InvalidConfig) as error:
            config.parse(f"\n{line}".encode())
        (problem,) = error.value.problems
        assert key.rpartition(".")[2] in problem.message, line
        assert problem.line == 2, line


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ('executor = "slum"', "slurm"),
        ('slurm.gpu_memory = "share"', "shard"),
        ("slurm.max_in_flght = 1", "slurm.max_in_flight"),
    ],
)
def test_what_was_meant_is_told(line: str, meant: str) -> None:
    """Of a key and of a word alike."""
    with pytest.raises(InvalidConfig, match=re.escape(f'did you mean "{meant}"?')):
        config.parse(line.encode())


OPTIONS_OF_SPOOL = """
-J|-Jx|-J x|--job-name|--job-name=x|--job-name x|--job=x|--j|-kJx|-Hkx|-D/tmp|--comment=x|--comm=x|--output=x|-o x|-e
--chdir=/|--requeue|--no-requeue|--array=1-2|-a1|--wrap=id|--export=NONE|--parsable|--time=1|-t1|--mem=1|--mem-per-cpu=1
-c4|--cpus-per-task=4|--gres=gpu:1|-G1|--gpus=1|--gpus-per-node=1|--input=x|-i x|-d x|--dependency=afterok:1|--begin=now
-b now|-H|--hold|-W|--wait|--test-only|-Mx|-N2|--nodes=2|-n2|--ntasks=2|--uid=0|--signal=USR1|--open-mode=truncate
--quiet|--tres-per-task=gres/gpu:1
"""
OTHER_OPTIONS = """
--constraint=ib|-C ib|-Cib|--nodelist=n1|-w n1|--exclude=n1|-x n1|--exclusive|--nice=5|-p gpu|--partition=gpu|-A acct
-q long|--reservation=r|--mail-user=a@b|--licenses=x:2|-s|--wckey=x|--mem-bind=local|--cpu-freq=high|--tmp=10G
--switches=1|--deadline=now+1hour
"""


@pytest.mark.parametrize(("options", "passed_on"), [(OPTIONS_OF_SPOOL, False), (OTHER_OPTIONS, True)])
def test_no_option_for_slurm_sets_what_spool_sets_itself(options: str, passed_on: bool) -> None:
    """However it is spelled: short, in a bundle, cut short, with its value or without; every other is passed on."""
    for option in options.strip().replace("\n", "|").split("|"):
        text = f'executor = "slurm"\nexecutor_options = [{toml.quote(option)}]'
        if passed_on:
            assert parsed(text).part("engines") == (option,)
        else:
            (problem,) = problems(f'command = "x"\n{text}')
            assert '"executor_options' in problem, option
            assert ("start_after" in problem) == (option.lstrip("-").startswith("b")), option


def test_the_default_idle_time_of_gpus_is_for_jobs_on_this_machine() -> None:
    """A job of an engine does not have it; its own idle time, or its container, has a reason to be refused there."""
    defaults, _ = jobfile.defaults_of({"gpu_idle": "30m", "gpu_idle_action": "stop", "cpus": 2})
    there = jobfile.parse(b'command = "x"\nexecutor = "slurm"\n', name="x", defaults=defaults)
    assert (there.gpu_idle_ns, there.gpu_idle_action, there.request.cpus) == (None, "warn", 2)
    assert "gpu_idle" not in jobfile.from_defaults(defaults, b'command = "x"\nexecutor = "slurm"\n')
    with pytest.raises(InvalidJob, match="executor"):
        jobfile.parse(b'command = "x"\nexecutor = ["slurm"]\n', name="x", defaults=defaults)
    usual = jobfile.parse(b'command = "x"\n', name="x", defaults=defaults)
    assert usual.gpu_idle_ns is not None
    assert jobfile.why_not_there(usual, "slurm") is None
    own = jobfile.parse(b'command = "x"\ngpu_idle = "20m"\n', name="x", defaults=defaults)
    assert "gpu_idle" in (jobfile.why_not_there(own, "slurm") or "")
    why = jobfile.why_not_there(parsed('container = "x"'), "slurm") or ""
    assert "container" in why


@pytest.mark.parametrize("key", ['gpu_idle = "0s"', "keep_session = false", "resources = {}"])
def test_a_key_that_says_nothing_is_no_problem_on_an_engine(key: str) -> None:
    """No idle time, no session and no resource are what a job of an engine has."""
    assert parsed(f'executor = "slurm"\n{key}').executor == "slurm"


@pytest.mark.parametrize("engine", ["slurm", "sge"])
@pytest.mark.parametrize(
    ("asked", "key"), [('gpu_min_memory = "40G"', "gpu_min_memory"), ('gpu_type = ["A100", "H100"]', "gpu_type")]
)
def test_what_an_engine_cannot_be_asked_of_gpus_is_refused_at_submission(engine: str, asked: str, key: str) -> None:
    """The same is fine on this machine, and one type is fine everywhere."""
    text = f'command = "true"\ngpus = 1\n{asked}\nexecutor = "{engine}"\n'
    with pytest.raises(InvalidJob, match=f"{key}.*name one gpu_type"):
        jobfile.parse(text.encode(), name="x")
    jobfile.parse(text.replace(engine, "process").encode(), name="x")
    jobfile.parse(text.replace(asked, 'gpu_type = "A100"').encode(), name="x")


def test_what_a_hook_sets_for_gpus_of_this_machine_is_left_out() -> None:
    """A job on a cluster has no `gpu_idle`."""
    said = [("p", {"gpu_idle": "1h", "preemptible": True})]
    there = b'command = "true"\nexecutor = "slurm"\n'
    spec = jobfile.parse(there, name="x", defaults=jobfile.with_set(jobfile.NO_DEFAULTS, said))
    assert (spec.gpu_idle_ns, spec.preemptible) == (None, True)


# On the command line, and in a spool whose engine is not there.


_FOR_SLURM = "--slurm --set executor_options=--constraint=ib --set=executor_options=--exclude=n1,n2"


@pytest.mark.parametrize("way", ["quick", "full", "line"])
def test_an_option_is_short_for_its_executor(spool: Command, spool_root: Path, way: str) -> None:
    """On the command line as in a `#SPOOL` line; what sbatch is told besides goes along, option by option."""
    script = Path("script.sh")
    script.write_text(f"#!/bin/sh\n#SPOOL {_FOR_SLURM}\ntrue\n")
    full = ("--executor", "process", *_FOR_SLURM.split(), "--set", "prolog=true", "--", "true")
    words = {"quick": (*_FOR_SLURM.split(), "--", "true"), "full": full, "line": (script,)}
    spool("submit", "--name", "t", *words[way])
    spec = jobfile.parse((spool_root / "queued" / "t.toml").read_bytes(), name="t")
    assert (spec.executor, spec.part("engines")) == ("slurm", ("--constraint=ib", "--exclude=n1,n2"))


def test_options_for_slurm_that_the_default_executor_would_pass_over_keep_a_job_waiting(
    spool: Command, spool_root: Path
) -> None:
    """They are told of when it is submitted, and it starts nowhere without them."""
    submitted = spool("submit", "--name", "t", "--set=executor_options=--constraint=ib", "--", "true")
    assert (submitted.code, "executor_options" in submitted.err) == (0, True)
    assert [each["code"] for each in asked(spool, "why", "t")["reasons"]] == ["executor"]


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--set=gpu_idle=30m", "gpu_idle"),
        ("--set=keep_session=true", "keep_session"),
        ("--set=resources=x", "resources"),
    ],
)
def test_a_job_with_a_key_that_has_no_effect_in_slurm_does_not_start_there(
    spool: Command, spool_root: Path, tmp_path: Path, option: str, key: str
) -> None:
    """One that is configured to go there is told of at its submission, by `why` and by `check`."""
    (spool_root / "config.toml").write_text('autostart = false\nexecutor = "slurm"\n[resources]\nx = 1\n')
    submitted = spool("submit", "--name", "t", option, "--", "true")
    assert submitted.code == 0
    assert f"cannot start: its {key} " in submitted.err
    assert f"executor: its {key} " in spool("why", "t").out
    path = tmp_path / "t.toml"
    path.write_bytes((spool_root / "queued" / "t.toml").read_bytes())
    assert f"cannot start: its {key} " in spool("check", str(path)).err


def test_a_job_for_slurm_is_told_at_submission_that_slurm_is_missing(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning comes on stderr, and the job is submitted all the same; `--strict` submits nothing."""
    monkeypatch.setattr(slurm.SlurmLanguage, "programs", ("no-such-sbatch",))
    why = "job a cannot start: Slurm is not installed here: no no-such-sbatch in PATH"
    for strict, code, out in ((("--strict",), 1, ""), ((), 0, "a\n")):
        said = spool("submit", *strict, "--name", "a", "--slurm", "--", "true")
        assert (said.code, said.out, why in said.err) == (code, out, True)
        assert (spool_root / "queued" / "a.toml").exists() is not bool(strict)


def test_another_default_executor_that_is_not_there_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for it, with the reason, and do not fail; with the old one back they start."""
    monkeypatch.setattr(slurm.SlurmLanguage, "programs", ("sbatch-that-is-not-there",))
    with world_at(tmp_path / "spool", monkeypatch) as world:
        world.cpus, config = 1, world.root / layout.CONFIG
        config.write_text("cpus = 1\n")
        session = Session(world)
        for name, command in (("first", "hang until 2"), ("next", "hang # as submitted")):
            session.users.submit(name, command)
            session.settle()
        config.write_text('cpus = 1\nexecutor = "slurm"\n')
        session.now.wakeup.reload = True
        world.exit(world.pids("first")[0], 0)
        session.settle()
        assert not session.errors
        assert not world.pids("next")
        assert "sbatch-that-is-not-there" in str(session.now.planner.plan.reason("next"))
        config.write_text("cpus = 1\n")
        session.now.wakeup.reload = True
        session.settle()
        assert world.pids("next")
        session.end()


TEXT = 'command = "true"\nexecutor = "slurm"\n'
AWAY = "Slurm has not answered since 14:03: slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


def test_a_job_bound_for_slurm_says_everywhere_that_slurm_is_away(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the dispatcher has found, `why` and `plan` find too, in the words of `ls`, and promise no start."""
    put_job(spool_root, "bound", TEXT)
    put_job(spool_root, "here", 'command = "true"\nexecutor = "process"\n')
    monkeypatch.setattr(slurm.SlurmLanguage, "missing", lambda self: None)
    jobs = {"bound": JobView(state="queued", reason=f"executor: {AWAY}"), "here": JobView(state="queued")}
    serve(monkeypatch, spool_root, jobs, problems=(AWAY,), executors={"slurm": AWAY})
    rows = {row["name"]: row["reason"] for row in json.loads(spool("ls", "--json").out)["jobs"]}
    found = json.loads(spool("why", "--json", "bound").out)
    assert [reason["text"] for reason in found["reasons"]] == [f"executor: {AWAY}"] == [rows["bound"]]
    assert found["start_at"] is None
    assert "nothing blocks it" not in spool("why", "bound").out
    plan = json.loads(spool("plan", "--json").out)
    assert [each["name"] for each in plan["starts"]] == ["here"]
    assert [(each["name"], each["reason"]) for each in plan["waits"]] == [("bound", f"executor: {AWAY}")]
    assert AWAY in json.loads(spool("info", "--json").out)["problems"]
    old = time.time() - 3600
    os.utime(spool_root / "state.json", (old, old))
    assert AWAY not in spool("why", "bound").out.splitlines()[0]  # what was said an hour ago
