"""The disk's promise, kept at every cut: the old text or the new, and never anything replaced by accident."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from faulty import FaultyDisk, PowerCut, cut_off, every_cut
from spool.store import disk
from spool.store.disk import Disk, disk_is_full, open_log

OLD, NEW = b"the old text\n", b"the new text, which is longer\n"


class Bench:
    """A directory to work in with a staging directory beside it; a fresh one for every cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.staging = path / ".tmp"
        self.staging.mkdir(parents=True)
        self.here = path / "here"
        self.here.mkdir()
        self.target = self.here / "x"

    def disk(self, **faults: object) -> FaultyDisk:
        return FaultyDisk(str(self.staging), **faults)  # type: ignore[arg-type]

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self.here.iterdir())

    def staged(self) -> list[str]:
        return sorted(entry.name for entry in self.staging.iterdir())


@pytest.fixture
def benches(tmp_path: Path) -> Callable[[], Bench]:
    """Return a maker of fresh benches."""
    numbers = count()
    return lambda: Bench(tmp_path / str(next(numbers)))


@pytest.fixture
def bench(benches: Callable[[], Bench]) -> Bench:
    """Make one bench."""
    return benches()


def cuts(
    benches: Callable[[], Bench],
    prepare: Callable[[Bench], None],
    act: Callable[[Disk, Bench], object],
    *,
    torn: bool = False,
) -> list[tuple[Bench, bool]]:
    """Perform *act* with the power cut at every change in turn; return each bench, and whether it was cut."""
    seen: list[Bench] = []

    def scenario(number: int) -> FaultyDisk:
        bench = benches()
        seen.append(bench)
        prepare(bench)
        disk = bench.disk(cut_at=number, torn=torn)
        cut_off(lambda: act(disk, bench))
        return disk

    return [(seen[-1], disk.is_cut) for disk in every_cut(scenario)]


ORDER = {"put": ["create", "sync_file", "rename", "sync_directory"]}
ORDER["publish"] = ["create", "sync_file", "link", "unlink", "sync_directory"]


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize(("verb", "old"), [("put", None), ("put", OLD), ("publish", None)])
def test_a_write_cut_anywhere_leaves_the_old_text_or_the_new(
    benches: Callable[[], Bench], verb: str, old: bytes | None, durable: bool, torn: bool
) -> None:
    """Whatever change the power goes before, a file is as it was or whole; the text is on the disk before its name."""

    def prepare(bench: Bench) -> None:
        if old is not None:
            bench.target.write_bytes(old)

    def act(disk: Disk, bench: Bench) -> None:
        getattr(disk, verb)(str(bench.target), NEW, durable=durable)

    outcomes = cuts(benches, prepare, act, torn=torn)
    found = [(b.target.read_bytes() if b.target.exists() else None) for b, _ in outcomes]
    assert set(found) == {old, NEW}
    assert found == sorted(found, key=lambda text: text == NEW)  # once it is new it stays new
    assert outcomes[-1][0].staged() == []
    bench = benches()
    disk = bench.disk()
    act(disk, bench)
    assert disk.names() == [name for name in ORDER[verb] if durable or "sync" not in name]
    assert not durable or disk.recorded[-1].paths == (str(bench.here),)


def test_publish_never_replaces(benches: Callable[[], Bench]) -> None:
    """Where a file of that name exists `publish` and `move` fail at every cut, and leave all as it was."""

    def prepare(bench: Bench) -> None:
        (bench.here / "a").write_bytes(NEW)
        bench.target.write_bytes(OLD)

    for act in (
        lambda disk, b: disk.publish(str(b.target), NEW),
        lambda disk, b: disk.move(str(b.here / "a"), str(b.target)),
    ):
        outcomes = cuts(benches, prepare, lambda disk, b, act=act: refuses(FileExistsError, lambda: act(disk, b)))
        for bench, _ in outcomes:
            assert (bench.target.read_bytes(), (bench.here / "a").read_bytes()) == (OLD, NEW)
        assert outcomes[-1][0].staged() == []


@pytest.fixture
def in_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a file system that cannot move a file without replacing another in one step."""
    monkeypatch.setattr(disk, "renameat2", lambda old, new, flags: False)


@pytest.mark.parametrize(("steps", "names"), [(1, [["a"], ["b"]]), (2, [["a"], ["a"], ["a", "b"], ["b"], ["b"]])])
def test_move_cut_anywhere_loses_nothing(
    benches: Callable[[], Bench], request: pytest.FixtureRequest, steps: int, names: list[list[str]]
) -> None:
    """At every cut of `move` the file has its old name, its new one, or where it takes two steps both; never none."""
    if steps == 2:
        request.getfixturevalue("in_two_steps")
    outcomes = cuts(
        benches,
        lambda b: void((b.here / "a").write_bytes(OLD)),
        lambda disk, b: disk.move(str(b.here / "a"), str(b.here / "b")),
    )
    assert [bench.names() for bench, _ in outcomes] == names
    for bench, _ in outcomes:
        assert {entry.read_bytes() for entry in bench.here.iterdir()} == {OLD}
        assert len({entry.stat().st_ino for entry in bench.here.iterdir()}) == 1


@pytest.mark.parametrize("error", [0, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM])
def test_a_move_in_one_step_that_is_refused_is_made_in_two(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """Whatever the kernel, the file system or a filter of system calls says instead of doing it.

    A lost race is FileNotFoundError; a symbolic link is moved as it is, and what it points to is not touched.
    """

    def refuse(*_: object) -> int:
        ctypes.set_errno(error)
        return -1

    if error:
        monkeypatch.setattr(disk, "_renameat2", lambda: refuse)
    (bench.path / "precious").write_bytes(OLD)
    move = bench.disk().move
    refuses(FileNotFoundError, lambda: move(str(bench.here / "a"), str(bench.here / "b")))
    assert bench.names() == []
    (bench.here / "a").write_bytes(OLD)
    (bench.here / "link").symlink_to(bench.path / "precious")
    move(str(bench.here / "a"), str(bench.here / "b"))
    move(str(bench.here / "link"), str(bench.here / "moved"))
    assert (bench.names(), bench.staged()) == (["b", "moved"], [])
    assert (bench.here / "moved").is_symlink()
    assert (bench.path / "precious").stat().st_nlink == 1


@pytest.mark.usefixtures("in_two_steps")
def test_move_tolerates_a_user_who_removes_the_old_name_meanwhile(bench: Bench) -> None:
    """The old name gone between link and unlink is what was wanted, not an error."""
    (bench.here / "a").write_bytes(OLD)

    class Busy(Disk):
        def rename(self, old: str, new: str) -> None:
            os.unlink(old)
            super().rename(old, new)

    Busy(str(bench.staging)).move(str(bench.here / "a"), str(bench.here / "b"))
    assert bench.names() == ["b"]


@pytest.mark.parametrize("other", ["b", "gone"])
def test_a_name_that_is_no_second_one_stays(bench: Bench, other: str) -> None:
    """`drop` takes a name away only while the file has the other one as well."""
    (bench.here / "a").write_bytes(OLD)
    (bench.here / "b").write_bytes(OLD)
    assert not bench.disk().drop(str(bench.here / "a"), str(bench.here / other))
    assert bench.names() == ["a", "b"]
    assert bench.staged() == []


def test_remove_tree_cut_anywhere_can_be_taken_up_again(benches: Callable[[], Bench]) -> None:
    """At every cut of `remove_tree` a second call removes the rest."""

    def prepare(bench: Bench) -> None:
        (bench.here / "tree" / "deep").mkdir(parents=True)
        for name in ("one", "deep/two", "deep/three"):
            (bench.here / "tree" / name).write_bytes(OLD)

    outcomes = cuts(benches, prepare, lambda disk, b: disk.remove_tree(str(b.here / "tree")))
    assert len(outcomes) == 6
    for bench, was_cut in outcomes:
        assert (bench.here / "tree").exists() is was_cut
        if was_cut:
            bench.disk().remove_tree(str(bench.here / "tree"))
        assert bench.names() == []


@pytest.mark.parametrize("is_link", [False, True])
def test_remove_tree_never_follows_a_link(bench: Bench, is_link: bool) -> None:
    """Links to anything, odd names and what is no file are removed, as the tree or in it; what links lead to stays."""
    outside = bench.path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(OLD)
    tree = bench.here / "tree"
    if is_link:
        tree.symlink_to(outside)
    else:
        tree.mkdir()
        for number, target in enumerate((outside, outside / "precious", "nowhere", "..")):
            (tree / str(number)).symlink_to(target)
        os.mkfifo(tree / "fifo")  # which blocks nobody
        (tree / "-rf").write_bytes(OLD)
        (tree / "a\nb").mkdir()
    bench.disk().remove_tree(str(tree))
    assert bench.names() == []
    assert (outside / "precious").read_bytes() == OLD


def deep(path: Path, levels: int) -> None:
    """Make a directory that is so many levels deep, with a file in each, longer than any path may be."""
    fd = os.open(path, os.O_RDONLY)
    for _ in range(levels):
        os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
        os.mkdir("directory", dir_fd=fd)
        below = os.open("directory", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)


def test_remove_tree_goes_as_deep_as_there_is(bench: Bench) -> None:
    """Neither the interpreter's stack, nor the length of a path, nor the number of descriptors is a limit."""
    (bench.here / "tree").mkdir()
    deep(bench.here / "tree", 1100)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 6, hard))
    try:
        Disk(str(bench.staging)).remove_tree(str(bench.here / "tree"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert bench.names() == []


@pytest.mark.parametrize("primitive", ["unlink", "rmdir"])
@pytest.mark.parametrize("swapped", ["tree", "tree/a", "tree/a/b"])
def test_a_directory_that_is_swapped_for_a_link_leads_nowhere(
    benches: Callable[[], Bench], primitive: str, swapped: str
) -> None:
    """Whenever a directory that is being removed is replaced by a link, what the link points to stays whole."""
    for number in count():
        bench = benches()
        outside = bench.path / "outside"
        for path in (bench.here / "tree" / "a" / "b", outside / "a" / "b"):
            path.mkdir(parents=True)
            for directory in (path, path.parent, path.parent.parent):
                for name in ("one", "two"):
                    (directory / name).write_bytes(OLD)
        calls = count()

        class Swapped(Disk):
            def unlink(self, path: str, at: int | None = None) -> None:
                swap("unlink")
                super().unlink(path, at)

            def rmdir(self, path: str, at: int | None = None) -> None:
                swap("rmdir")
                super().rmdir(path, at)

        def swap(name: str, bench: Bench = bench, calls: Iterator[int] = calls, number: int = number) -> None:
            if name == primitive and next(calls) == number and (bench.here / swapped).is_dir():
                os.rename(bench.here / swapped, bench.path / "aside")
                target = bench.path / "outside" / swapped.partition("/")[2]
                (bench.here / swapped).symlink_to(target)

        with contextlib.suppress(OSError):
            Swapped(str(bench.staging)).remove_tree(str(bench.here / "tree"))
        assert sum(path.is_file() for path in outside.rglob("*")) == 6
        if next(calls) <= number:
            break


def test_what_cannot_be_removed_costs_the_rest_nothing(bench: Bench) -> None:
    """Each thing that stays is told once with its path; all else goes, but for the directories that hold it."""
    for name in ("tree/a/b/stays", "tree/a/goes", "tree/c/goes", "tree/goes"):
        (bench.here / name).parent.mkdir(parents=True, exist_ok=True)
        (bench.here / name).write_bytes(OLD)

    class Refusing(Disk):
        def unlink(self, path: str, at: int | None = None) -> None:
            if path == "stays":
                raise PermissionError(errno.EACCES, "no")
            super().unlink(path, at)

    tree, disk = str(bench.here / "tree"), Refusing(str(bench.staging))
    refuses(PermissionError, lambda: disk.remove_tree(tree))
    assert {str(path.relative_to(tree)) for path in Path(tree).rglob("*")} == {"a", "a/b", "a/b/stays"}
    told = [error for error in disk.removing(tree) if error is not None]
    assert [(error.errno, error.filename) for error in told] == [(errno.EACCES, f"{tree}/a/b/stays")]


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("verb", ["put", "publish"])
def test_a_full_disk_changes_nothing_and_leaves_no_litter(benches: Callable[[], Bench], verb: str, torn: bool) -> None:
    """No room at any change of `put` or `publish` is an OSError; the old text stands and the half file is gone."""
    for number in (1, 2):
        bench = benches()
        if verb == "put":
            bench.target.write_bytes(OLD)
        disk = bench.disk(fail_at=number, torn=torn)
        with pytest.raises(OSError, match="No space left") as caught:
            getattr(disk, verb)(str(bench.target), NEW)
        assert disk_is_full(caught.value)
        assert bench.names() == (["x"] if verb == "put" else [])
        assert verb == "publish" or bench.target.read_bytes() == OLD
        assert bench.staged() == []
        getattr(disk, verb)(str(bench.target), NEW)  # and there is room again
        assert bench.target.read_bytes() == NEW


@pytest.mark.parametrize(("error", "is_full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)])
def test_only_a_full_disk_or_quota_is_called_full(error: int, is_full: bool) -> None:
    """ENOSPC and EDQUOT mean that there is no room; an I/O error does not."""
    assert disk_is_full(OSError(error, "")) is is_full


def test_a_link_leads_no_write_elsewhere(bench: Bench) -> None:
    """`create` refuses a name that is taken, also by a dangling link; `put` replaces the link and not its target."""
    bench.target.write_bytes(OLD)
    link = bench.here / "link"
    link.symlink_to(bench.path / "elsewhere")
    for path in (bench.target, link):
        refuses(FileExistsError, lambda path=path: bench.disk().create(str(path), NEW))  # type: ignore[misc]
    assert not (bench.path / "elsewhere").exists()
    (bench.path / "elsewhere").write_bytes(OLD)
    bench.disk().put(str(link), NEW)
    assert not link.is_symlink()
    assert {bench.target.read_bytes(), (bench.path / "elsewhere").read_bytes()} == {OLD}


def test_files_and_directories_are_the_users_alone(bench: Bench) -> None:
    """What is written is of mode 0600, directories of 0700, whatever the umask allows."""
    before = os.umask(0)
    try:
        disk = bench.disk()
        disk.put(str(bench.target), NEW)
        disk.ensure_directory(str(bench.here / "d"))
        os.close(open_log(str(bench.here / "log")))
    finally:
        os.umask(before)
    assert {entry.name: entry.stat().st_mode & 0o777 for entry in bench.here.iterdir()} == {
        "x": 0o600, "log": 0o600, "d": 0o700,
    }  # fmt: skip


def test_a_staging_directory_that_is_missing_is_made_and_one_that_is_there_costs_nothing(bench: Bench) -> None:
    """The first file that is staged brings it back, for its owner alone; where it cannot be made that is an error.

    A staging name that is taken, as litter of an earlier process of this pid, is not overwritten and stops nobody.
    """
    for number in (1, 2):
        (bench.staging / f"{os.getpid()}.{number}").write_bytes(OLD)
    bench.disk().put(str(bench.target), NEW)
    assert bench.target.read_bytes() == NEW
    assert len(bench.staged()) == 2
    for litter in bench.staging.iterdir():
        litter.unlink()
    bench.staging.rmdir()
    disk = bench.disk()
    for _ in range(2):
        disk.put(str(bench.target), NEW)
    assert disk.names() == ["create", "mkdir", "create", "rename", "create", "rename"]
    assert bench.target.read_bytes() == NEW
    assert bench.staging.stat().st_mode & 0o777 == 0o700
    bench.staging.rmdir()
    bench.staging.symlink_to(bench.path / "gone")
    refuses(FileNotFoundError, lambda: bench.disk().staged(NEW))


def test_discard_and_ensure_directory_tell_whether_they_did_anything(bench: Bench) -> None:
    """Both return True the first time and False the second; to sync a directory that is gone is no error."""
    bench.target.write_bytes(OLD)
    disk = bench.disk()
    assert [disk.discard(str(bench.target)) for _ in range(2)] == [True, False]
    assert [disk.ensure_directory(str(bench.target)) for _ in range(2)] == [True, False]
    before = len(disk.names())
    disk.sync_directories([str(bench.here), str(bench.path / "gone"), str(bench.staging)])
    assert disk.names()[before:] == ["sync_directory"] * 3


def test_a_log_is_appended_to_by_whole_pieces(bench: Bench) -> None:
    """What is appended comes after what was there, also through a second descriptor."""
    disk = bench.disk()
    for piece in (b"a\n", b"b\n"):
        fd = open_log(str(bench.target))
        disk.append(fd, piece)
        disk.sync_log(fd)
        os.close(fd)
    assert bench.target.read_bytes() == b"a\nb\n"
    assert disk.names() == ["append", "sync_log"] * 2


# The faulty disk itself: a fault injector that injects nothing would prove everything.


def test_after_a_cut_nothing_changes_any_more(bench: Bench) -> None:
    """Every primitive after the cut raises PowerCut, too, which no program handles, and the disk stays as it was."""
    assert not issubclass(PowerCut, Exception)
    (bench.here / "a").write_bytes(OLD)
    fd = open_log(str(bench.here / "a"))
    disk = bench.disk(cut_at=1)
    a, b, here = str(bench.here / "a"), str(bench.here / "b"), str(bench.here)
    calls: dict[str, tuple[object, ...]] = {"create": (b, NEW), "append": (fd, NEW), "rename": (a, b), "link": (a, b)}
    calls |= {"unlink": (a,), "mkdir": (b,), "rmdir": (str(bench.staging),)}
    calls |= {"sync_file": (a,), "sync_directory": (here,), "sync_log": (fd,)}
    assert all(cut_off(partial(getattr(disk, name), *arguments)) for name, arguments in calls.items())
    os.close(fd)
    assert (bench.names(), bench.staged(), disk.recorded, disk.count) == (["a"], [], [], len(calls))
    assert (bench.here / "a").read_bytes() == OLD


def test_a_torn_create_leaves_half_and_only_the_one_that_was_hit(bench: Bench) -> None:
    """torn=True writes the first half of the data at the cut, and nothing at later ones."""
    disk = bench.disk(cut_at=2, torn=True)
    for name, is_cut in (("a", False), ("b", True), ("c", True)):
        assert cut_off(lambda name=name: disk.create(str(bench.here / name), b"12345678")) is is_cut
    assert {entry.name: entry.read_bytes() for entry in bench.here.iterdir()} == {"a": b"12345678", "b": b"1234"}


def test_a_failure_happens_once_and_with_the_errno_asked_for(bench: Bench) -> None:
    """fail_at raises its OSError at that change alone; the change itself does not happen, the next one does."""
    disk = bench.disk(fail_at=2, error=errno.EIO)
    disk.mkdir(str(bench.here / "a"))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
        disk.mkdir(str(bench.here / "b"))
    assert caught.value.errno == errno.EIO
    disk.mkdir(str(bench.here / "c"))
    assert (bench.names(), disk.names()) == (["a", "c"], ["mkdir", "mkdir"])


def test_a_file_put_beside_is_old_or_new_and_has_the_mode_that_was_asked_for(bench: Bench) -> None:
    """Whatever cuts it off, and what an earlier cut left in the way; the umask does not count."""
    path = bench.here / "spool.prom"
    path.write_bytes(OLD)
    umask = os.umask(0o077)
    try:
        for cut in range(1, 5):
            disk = bench.disk(cut_at=cut, torn=True)
            if not cut_off(lambda disk=disk: disk.put_beside(str(path), NEW, 0o644)):
                break
            assert path.read_bytes() == OLD
    finally:
        os.umask(umask)
    assert path.read_bytes() == NEW
    assert path.stat().st_mode & 0o777 == 0o644
    assert bench.names() == ["spool.prom"]


def test_every_primitive_of_the_disk_can_fail() -> None:
    """FaultyDisk overrides each primitive: a new one that it does not know would be a change nobody tests."""
    composites = {"staged", "put", "put_beside", "publish", "move", "drop", "discard", "remove_tree", "removing"}
    composites |= {"ensure_directory", "ensure_staging", "ensure_twin", "sync_directories"}
    primitives = {name for name, value in vars(Disk).items() if callable(value) and not name.startswith("_")}
    assert primitives - composites == {name for name in vars(FaultyDisk) if name in primitives}


def test_every_cut_ends_with_the_run_that_was_not_cut_and_refuses_endless_ones(bench: Bench) -> None:
    """One disk for each change and one more; a scenario that never ends is an error, not a hang."""

    def act(number: int) -> FaultyDisk:
        disk = bench.disk(cut_at=number)
        cut_off(lambda: [disk.sync_directory(str(bench.here)) for _ in range(3)])
        return disk

    assert [disk.is_cut for disk in every_cut(act)] == [True, True, True, False]
    with pytest.raises(AssertionError):
        list(every_cut(act, limit=2))


def void(_: object) -> None:
    """Drop a value that a lambda must not return."""


def refuses(error: type[BaseException], action: Callable[[], object]) -> None:
    """Expect *error* of *action*."""
    with pytest.raises(error):  # a PowerCut is another, and passes
        action()
