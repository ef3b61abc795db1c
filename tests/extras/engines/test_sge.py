"""What qsub is told, and what is read in the answers of Grid Engine."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.planning import GIB, spec
from spool.core.errors import InvalidValue, SpoolError, StartRefused
from spool.core.lifecycle import EngineWord
from spool.extras.commands import CommandEnd
from spool.extras.engines import sge
from spool.extras.engines.sge import SgeConfig
from spool.formats.config import Config

MARK = "spool:0a1b:a.B_c-1:7"
LINE = "main.q:vm:root:root:{name}:{id}:sge:0:1795644762:{began}:1795644781:{failed}:{code}:2:0.01:0.00:4632.0"


def language(config: SgeConfig | None = None) -> sge.SgeLanguage:
    """Return the language with those settings."""
    return sge.SgeLanguage(lambda: Config(parts=(("engines", {"sge": config or SgeConfig()}),)))


def options(config: SgeConfig, **keys: Any) -> list[str]:
    """Return the options for a job that requests *keys*."""
    return [*language(config).options_of("x", spec(**keys))]


def after(words: list[str], option: str) -> list[str]:
    """Return the values of an option."""
    return [value for name, value in pairwise(words) if name == option]


def test_a_mark_is_the_name_of_a_job_and_comes_back() -> None:
    """A name has no colon there, and what is not ours stays what it is."""
    assert sge.name_of(MARK) == "spool-0a1b-7-a.B_c-1"
    assert sge.mark_of(sge.name_of(MARK)) == MARK
    assert sge.mark_of("spool") == "spool"


def test_memory_is_for_the_job_or_for_each_slot() -> None:
    """A consumable is multiplied by the slots of a parallel environment."""
    job = SgeConfig(pe="smp")
    slot = SgeConfig(pe="smp", memory="h_vmem", memory_per_slot=True)
    assert after(options(job, cpus=3, memory_bytes=10 << 20), "-l") == ["mem_free=10M"]
    assert after(options(slot, cpus=3, memory_bytes=10 << 20), "-l") == ["h_vmem=4M"]
    assert after(options(slot, cpus=3), "-pe") == ["smp"]


@pytest.mark.parametrize(
    ("keys", "config", "words"),
    [
        ({"cpus": 2}, SgeConfig(), r'write pe = "NAME" in \[sge\]'),
        ({"gpus": 1}, SgeConfig(), r'write gpus = "NAME" in \[sge\]'),
        ({"gpus": 1, "gpu_type": "A100"}, SgeConfig(gpus="gpu"), r"write gpu_types = "),
        ({"gpus": 1, "gpu_memory_bytes": GIB}, SgeConfig(gpus="gpu"), "it shares a GPU"),
        ({"gpus": 1, "gpu_min_memory_bytes": 40 * GIB}, SgeConfig(gpus="gpu"), r"a least size .*-l RESOURCE=A\|B"),
        ({"gpus": 1, "gpu_type": ("A", "B")}, SgeConfig(gpus="gpu"), r"several GPU types .*name one gpu_type"),
    ],
)
def test_what_grid_engine_cannot_be_asked_for_is_refused_with_what_to_write(
    keys: dict[str, Any], config: SgeConfig, words: str
) -> None:
    """The job is held until the configuration says how."""
    with pytest.raises(SpoolError, match=words):
        options(config, **keys)


@pytest.mark.parametrize(
    "option",
    [
        *("-N x", "-o /x", "-e /x", "-i /x", "-j n", "-wd /", "-cwd", "-S /bin/csh", "-V", "-v A=1", "-r y", "-t 1-3"),
        *("-hold_jid 3", "-terse", "-sync y", "-b y", "-C x", "-clear", "-pe smp 3", "-l h_rt=3", "-l gpu=1,h_rt=3"),
        *("--name=x", "-q=x", "x", "", "-q\nx"),
    ],
)
def test_an_option_that_spool_sets_itself_is_refused(option: str) -> None:
    """So is what is no option of qsub."""
    with pytest.raises(InvalidValue):
        language().check_options((option,))


def test_other_options_are_two_words() -> None:
    """An option and its value are one text in the file."""
    stated = ("-q long.q", "-notify", "-l scratch=10G,arch=lx*", "-p -5")
    language().check_options(stated)
    assert [*sge.words_of(stated)] == ["-q", "long.q", "-notify", "-l", "scratch=10G,arch=lx*", "-p", "-5"]


@pytest.mark.parametrize(
    ("state", "waits", "stuck", "held", "halted"),
    [
        ("qw", True, False, False, False),
        ("hqw", True, False, True, False),
        ("Eqw", True, True, False, False),
        ("r", False, False, False, False),
        ("hr", False, False, False, False),
        ("s", False, False, False, True),
        ("T", False, False, False, True),
        ("new", False, False, False, False),
    ],
)
def test_each_state_has_its_meaning(state: str, *, waits: bool, stuck: bool, held: bool, halted: bool) -> None:
    """An unknown one is of a job that lives."""
    job = f"<job_info><job_list><JB_job_number>3</JB_job_number><state>{state}</state></job_list></job_info>"
    (found,) = sge.queue_jobs(job) or ()
    assert (not found.begun, found.stuck, found.blocked, found.halted) == (waits, stuck, held, halted)


@pytest.mark.parametrize(
    ("failed", "code", "began", "word"),
    [
        (0, 0, 1, EngineWord.COMPLETED),
        (0, 7, 1, EngineWord.FAILED),
        (37, 137, 1, EngineWord.TIMEOUT),
        (100, 137, 1, EngineWord.CANCELLED),
        (100, 139, 1, EngineWord.FAILED),
        (26, 0, 0, EngineWord.NOT_STARTED),
        (25, 99, 1, EngineWord.PREEMPTED),
        (77, 0, 0, EngineWord.NOT_STARTED),
    ],
)
def test_each_end_has_its_meaning(failed: int, code: int, began: int, word: EngineWord) -> None:
    """As the accounting file has it."""
    (account,) = sge.accounts(LINE.format(name="x", id=3, began=began, failed=failed, code=code) + "\n").values()
    assert (account.word, account.begun) == (word, bool(began))
    assert account.said


def test_the_last_line_about_a_job_counts_and_what_is_cut_off_does_not() -> None:
    """A job that was put back has a line for each start."""
    one = LINE.format(name="x", id=3, began=1, failed=25, code=99)
    two = LINE.format(name="x", id=3, began=2, failed=0, code=0)
    found = sge.accounts(f"{one[30:]}\n# Version\n{one}\n{two}\n{one}")
    assert [each.said for each in found.values()] == ["exit status 0"]


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    """Nothing that the commands print is an error here."""
    sge.queue_jobs(text)
    sge.accounts(text)
    done = CommandEnd(1, text, text)
    language().submitted(done)
    language().nodes_back(CommandEnd(0, text))
    assert language().refusal(done)


def test_an_answer_that_is_cut_off_is_none() -> None:
    """No job is missing because of it."""
    whole = "<job_info><job_list><JB_job_number>3</JB_job_number></job_list></job_info>"
    assert [job.id for job in sge.queue_jobs(whole) or ()] == ["3"]
    assert all(sge.queue_jobs(whole[:at]) is None for at in range(len(whole)))


def test_a_job_that_was_submitted_with_a_warning_is_submitted() -> None:
    """Then qsub says that it could not run the job, exits with 1, and prints no id on a line of its own."""
    err = 'Unable to run job: warning: root is not allowed to run in any queue\nYour job 12 ("x") has been submitted\n'
    assert language().submitted(CommandEnd(1, "", f"{err}Exiting.\n")) == "12"
    assert language().submitted(CommandEnd(0, "12\n", "")) == "12"


def test_silence_is_told_from_refusals() -> None:
    """In the words of 8.1.9."""
    silent = "error: commlib error: got select error (Connection refused)\nunable to send message to qmaster on port 1"
    for done in (CommandEnd(1, "", silent), CommandEnd(None), CommandEnd(0)):
        assert language().submitted(done) is None
    unsuitable = language().submitted(CommandEnd(1, "", "Unable to run job: error: no suitable queues\nExiting.\n"))
    assert str(unsuitable).endswith("no suitable queues")
    unknown = 'Unable to run job: Job was rejected because job requests unknown queue "x"\nExiting.'
    assert isinstance(language().submitted(CommandEnd(1, "", unknown)), SpoolError)
    assert not language().is_silence(CommandEnd(1, "", 'denied: job "99999" does not exist'))
    too_many = "job rejected: Only 5 jobs are allowed per user (current job count: 5)"
    assert isinstance(language().submitted(CommandEnd(1, "", too_many)), StartRefused)
