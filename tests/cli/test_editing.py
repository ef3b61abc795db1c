"""`spool edit`: a file changes only into a valid one, if it is still the same; and who comes before whom."""

from __future__ import annotations

import io
import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calling import Command, put_job
from spool.client.requests import Requests
from spool.core.errors import SpoolError
from spool.formats import jobfile
from spool.formats.jobfile import edited
from spool.store.disk import Disk
from spool.store.spool import Spool

TEXT = '# mine\ncommand = "true"  # nothing\npriority = 10 # low\n\n[env]\n# one\nA = "1"\n'


def test_single_keys_change_and_comments_stay(spool: Command, spool_root: Path) -> None:
    """Options replace single keys; every comment and the order of the rest stay."""
    path = put_job(spool_root, "a", TEXT)
    said = spool("edit", "a", "--priority", 50, "--memory", "8G", "-e", "B=2", "--retry-max", 3)
    assert said.code == 0, said.err
    text = path.read_text()
    assert "priority = 50 # low" in text
    assert all(comment in text for comment in ("# mine", "# nothing", "# one"))
    spec = jobfile.parse(text.encode(), name="a")
    assert (spec.request.memory_bytes, spec.env, spec.retry.max) == (8 << 30, (("A", "1"), ("B", "2")), 3)


def test_a_table_of_dotted_keys_keeps_them(spool: Command, spool_root: Path) -> None:
    """What `env.A` and `retry.max` say stays where options add to it."""
    path = put_job(spool_root, "a", 'command = "true"\nenv.A = "1"\nretry.max = 2\nenv.B = "2"\n')
    assert spool("edit", "a", "-e", "C=3", "--set", "retry.delay=5s").code == 0
    spec = jobfile.parse(path.read_bytes(), name="a")
    assert (dict(spec.env), spec.retry.max) == ({"A": "1", "B": "2", "C": "3"}, 2)
    assert spec.retry.delay_ns == 5_000_000_000


def test_resources_are_changed_one_by_one(spool: Command, spool_root: Path) -> None:
    """`--set resources.NAME=N` lays over what is there, and `--unset resources.NAME` takes one out."""
    path = put_job(spool_root, "a", 'command = "true"\nresources = { licence = 1, tpu = 2 } # mine\n')
    assert spool("edit", "a", "--set", "resources=licence=2", "--unset", "resources.tpu").code == 0
    assert "# mine" in path.read_text()
    assert jobfile.parse(path.read_bytes(), name="a").request.resources == (("licence", 2),)
    assert 'not "x"' in spool("edit", "a", "--set", "resources=licence=x").err


def test_keys_can_be_taken_out(spool: Command, spool_root: Path) -> None:
    """`--unset` removes a key, dotted in a table; one that is not set is an error; a wrong value changes nothing."""
    path = put_job(spool_root, "a", TEXT, "held")
    assert spool("edit", "a", "--unset", "priority", "--unset", "env.A").code == 0
    assert jobfile.parse(path.read_bytes(), name="a").env == ()
    assert spool("edit", "a", "--unset", "memory").code == 2
    before = path.read_text()
    assert (spool("edit", "a", "--priority", 500).code, path.read_text()) == (4, before)


def test_new_dependencies_replace_the_old_ones(spool: Command, spool_root: Path) -> None:
    """`-d` states what the job depends on from now on, all of it."""
    path = put_job(spool_root, "a", 'command = "true"\n[depends_on]\nany = ["x"]\n')
    assert spool("edit", "a", "-d", "y").code == 0
    depends_on = jobfile.parse(path.read_bytes(), name="a").depends_on
    assert depends_on is not None
    assert (depends_on.all, depends_on.any) == (("y",), ())


def test_the_editor_gets_a_copy_and_a_bad_text_is_kept(
    spool: Command, spool_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the editor leaves takes the place of the file if it is valid; else it is kept elsewhere and told."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = put_job(spool_root, "a", TEXT)
    monkeypatch.setenv("EDITOR", "sed -i 's/= 10/= 50/'")
    assert spool("edit", "a").code == 0
    assert "priority = 50 # low" in path.read_text()
    monkeypatch.setenv("EDITOR", "sed -i 's/= 50/= 500/'")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    said = spool("edit", "a")
    assert said.code == 4
    [kept] = tmp_path.glob("a.*.toml")
    assert str(kept) in said.err
    assert "500" in kept.read_text()
    assert "priority = 50 # low" in path.read_text()
    monkeypatch.setenv("EDITOR", "false")
    assert spool("edit", "a").code == 2
    monkeypatch.setenv("EDITOR", "true")
    assert "is unchanged" in spool("edit", "a").out


def test_an_editor_that_leaves_no_file_changes_nothing(
    spool: Command, spool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is told in one line, and the job is as it was."""
    path = put_job(spool_root, "a", TEXT)
    monkeypatch.setenv("EDITOR", "rm")
    said = spool("edit", "a")
    assert (said.code, "'rm'" in said.err, said.err.count("\n"), path.read_text()) == (2, True, 0, TEXT)


def test_of_a_job_that_runs_the_limit_and_the_priority_can_be_changed(spool: Command, spool_root: Path) -> None:
    """Any other key is refused, and the file stays as it was; comments stay, and nothing is left in the staging."""
    path = put_job(spool_root, "a", '# mine\ncommand = "true"\ncpus = 2\n', "running")
    assert spool("edit", "a", "--cpus", 3, "--time-limit", "2h").code == 1
    assert "2h" not in path.read_text()
    assert spool("edit", "a", "--priority", 9, "--time-limit", "2h").out == "a changed\n"
    assert path.read_text() == '# mine\ncommand = "true"\ncpus = 2\ntime_limit = "2h"\npriority = 9\n'
    assert spool("edit", "a", "--unset", "time_limit").code == 0
    assert "time_limit" not in path.read_text()
    array = put_job(spool_root, "sweep", 'command = "true"\narray = "0-3"\n', "running")
    assert [spool("edit", "sweep", *words).code for words in (("--priority", 9), ("--array", "0-9"))] == [1, 1]
    assert spool("edit", "sweep", "--set", "max_running=2").code == 0
    assert "max_running = 2" in array.read_text()
    assert list((spool_root / ".tmp").iterdir()) == []


class _Ending(Disk):
    """A disk on which the job ends just before the new text takes the place of the old."""

    def exchange(self, one: str, other: str) -> bool:
        os.rename(other, other.replace("/running/", "/done/"))
        return super().exchange(one, other)


class _Competing(Disk):
    """A disk on which somebody else changes the file just before."""

    changed = False

    def exchange(self, one: str, other: str) -> bool:
        if not self.changed:
            Path(other).write_text('command = "false"\n')
            self.changed = True
        return super().exchange(one, other)


@pytest.mark.parametrize(
    ("disk", "why", "left"), [(_Ending, "ended meanwhile", "done"), (_Competing, "changed meanwhile", "running")]
)
def test_an_edit_of_a_job_that_runs_never_puts_a_second_file_into_running(
    spool_root: Path, disk: type[Disk], why: str, left: str
) -> None:
    """A job that ends at that moment is not started again by the edit, and what somebody else wrote stays."""
    old = put_job(spool_root, "a", 'command = "true"\n', "running").read_bytes()
    racing = Requests(Spool(str(spool_root)), "me", disk(str(spool_root / ".tmp")))
    with pytest.raises(SpoolError, match=why):
        racing.replace("a", "running", old, b'command = "true"\npriority = 3\n')
    assert [place for place in ("queued", "running", "done") if (spool_root / place / "a.toml").exists()] == [left]
    assert "priority" not in (spool_root / left / "a.toml").read_text()
    assert list((spool_root / ".tmp").iterdir()) == []


class _Claiming(Disk):
    """A disk on which a dispatcher claims the job just before the new text takes its place."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root / ".tmp"))
        self._root = root

    def rename(self, old: str, new: str) -> None:
        """Do the two halves of a claim first."""
        os.link(new, self._root / "running" / "a.toml")
        os.unlink(new)
        super().rename(old, new)


def test_a_job_that_starts_while_it_is_edited_is_not_queued_a_second_time(spool_root: Path) -> None:
    """The race for the file lost, the new text is taken away again, and the run goes on."""
    put_job(spool_root, "a", TEXT)
    requests = Requests(Spool(str(spool_root)), "me", _Claiming(spool_root))
    with pytest.raises(SpoolError, match="started meanwhile"):
        requests.replace("a", "queued", TEXT.encode(), b'command = "false"\n')
    assert os.listdir(spool_root / "queued") == []
    assert (spool_root / "running" / "a.toml").read_text() == TEXT


def test_a_file_that_was_changed_meanwhile_is_not_overwritten(spool_root: Path) -> None:
    """Somebody else's edit is never lost to ours."""
    path = put_job(spool_root, "a", TEXT)
    requests = Requests(Spool(str(spool_root)), "me")
    with pytest.raises(SpoolError, match="meanwhile"):
        requests.replace("a", "queued", b"other", b'command = "false"\n')
    assert path.read_text() == TEXT


@given(st.integers(0, 255), st.sampled_from(["", "\n", "\r\n"]), st.booleans())
def test_a_file_stays_readable_whatever_its_ends(priority: int, end: str, commented: bool) -> None:
    """A text without a last newline, with DOS ends or with a comment last takes a new key."""
    text = f'command = "true"{"  # c" if commented else ""}{end}'
    new = edited(text.encode(), {"priority": priority, "env": {"A": "1"}}, name="a")
    spec = jobfile.parse(new, name="a")
    assert (spec.priority, spec.env) == (priority, (("A", "1"),))


def _jobs(root: Path, **priorities: int | None) -> None:
    for name, priority in priorities.items():
        put_job(root, name, 'command = "true"\n' + (f"priority = {priority}\n" if priority is not None else ""))


def _priority(root: Path, name: str) -> object:
    return tomllib.loads((root / "queued" / f"{name}.toml").read_text()).get("priority")


@pytest.mark.parametrize(
    ("name", "where", "priority"),
    [
        ("low", ("--first",), 41),
        ("none", ("--first",), 41),
        ("high", ("--first",), 40),
        ("high", ("--last",), 4),
        ("low", ("--last",), 5),
        ("low", ("--before", "none"), 11),
        ("high", ("--before", "none"), 40),
        ("high", ("--before", "high"), None),
    ],
)
def test_a_job_goes_before_or_after_others(
    spool: Command, spool_root: Path, name: str, where: tuple[str, ...], priority: int | None
) -> None:
    """By one step of priority, of which one that stands there already has enough; never before itself."""
    _jobs(spool_root, high=40, none=None, low=5)
    for _ in range(2):
        said = spool("edit", name, *where)
        assert said.code == (0 if priority is not None else 1), said.err
        assert _priority(spool_root, name) == (priority or 40)
        assert ("a job cannot be placed before itself" in said.err) is (priority is None)


def test_what_is_held_or_runs_is_no_rival_and_comments_stay(spool: Command, spool_root: Path) -> None:
    """Only waiting jobs count, and of the file nothing but the priority changes."""
    _jobs(spool_root, a=None)
    put_job(spool_root, "parked", 'command = "true"\npriority = 200\n', "held")
    put_job(spool_root, "b", '# why\ncommand = "true"  # what\n')
    assert spool("edit", "b", "--first").code == 0
    text = (spool_root / "queued" / "b.toml").read_text()
    assert text.startswith('# why\ncommand = "true"  # what\n')
    assert (_priority(spool_root, "b"), _priority(spool_root, "a")) == (11, None)


@pytest.mark.parametrize("where", ["--first", "--last"])
def test_a_job_that_is_alone_is_first_and_last(spool: Command, spool_root: Path, where: str) -> None:
    """It keeps its priority."""
    _jobs(spool_root, a=7)
    assert (spool("edit", "a", where).code, _priority(spool_root, "a")) == (0, 7)
