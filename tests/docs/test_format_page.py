"""The format page against the code that it describes."""

from __future__ import annotations

import re

import msgspec

from spool.core import errors, layout
from spool.core.model import OUTCOMES, EventName, State, StopKind
from spool.formats import journal
from spool.formats.run_records import HISTORY
from spool.formats.state import JobView, StateView
from spool.formats.values import OWN_VARIABLES, SET_BY_SPOOL, WARNING_SIGNALS
from spool.listeners import REVIEWED
from spool.machine.host import login_environment
from support import ROOT

PAGE = (ROOT / "docs" / "FORMAT.md").read_text(encoding="utf-8")


def clause(number: str) -> str:
    """Return the text of one clause, "4" with all below it, "4.9" alone."""
    start = re.escape(number)
    if "." in number:
        match = re.search(rf"^\*\*{start} .*?(?=^\*\*\d|^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    else:
        match = re.search(rf"^## {start} .*?(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert match is not None, f"there is no clause {number}"
    return match.group()


def test_history_has_the_fields_of_the_page() -> None:
    """Every field of a line of history is on the page, in its order, with its default, and no other is."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|.*\| *(.*?) *\|$", clause("10"), re.MULTILINE)
    stated = {name: default.strip("`") for names, default in rows for name in re.findall(r"\w+", names)}
    defaults = HISTORY.defaults().items()
    assert stated == {key: "" if each is None else msgspec.json.encode(each).decode() for key, each in defaults}
    assert list(stated) == list(HISTORY.defaults())


def test_state_has_the_fields_of_the_page() -> None:
    """What tools read from state.json is on the page."""
    text = clause("11")
    for view in (StateView, JobView):
        for field in msgspec.structs.fields(view):
            assert f"`{field.encode_name}`" in text, field.name


def test_every_file_of_a_spool_has_a_paragraph() -> None:
    """Each name that the layout spells is explained: those of the root in clause 1, the records in clause 4."""
    root = {layout.CONFIG, layout.PAUSED, layout.HISTORY, layout.STATE, layout.LOCK, layout.JOURNAL, layout.LOG}
    root |= {layout.HOOKS, layout.EVENTS, layout.CURSORS, layout.README, layout.LAST_RUNS, layout.IDENTITY}
    root |= {layout.TERMINALS, *(f"{name}/" for name in layout.DIRECTORIES if name != layout.JOBS)}
    heads = " ".join(re.findall(r"^\*\*1\.\d+ (.*?)\.?\*\*", PAGE, re.MULTILINE))
    for name in root:
        assert f"`{name}" in heads, name
    records = {layout.SPEC_COPY, layout.GRANT, layout.WRAPPER, layout.JID, layout.RC, layout.JOB_LOG, layout.STOP}
    records |= {layout.STATUS, layout.RESULT, layout.FAILURE, layout.ARRAY, layout.KEPT, layout.LAUNCH, layout.REFUSED}
    records |= {layout.DEFAULTS, layout.ENVIRONMENT, layout.PROGRESS, layout.METRICS, layout.SCRIPT, layout.SUSPENDED}
    records |= {layout.GPUS, "capture.toml", layout.USAGE, layout.ENGINE, layout.ENGINE_LOG}
    records |= {layout.SIGNALS, layout.ENDED, layout.LEFTOVERS, f"{layout.TASKS}/"}
    assert records | {"signal"} == set(re.findall(r"^\*\*4\.\d+ `(.*?)`", PAGE, re.MULTILINE))


def test_the_environment_is_the_page_s() -> None:
    """The variables that a job finds are those of clause 7, and every one that it may not set is among them."""
    cells = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", clause("7"), re.MULTILINE)
    rows = set(re.findall(r"\w+", " ".join(cells)))
    first = login_environment().keys()
    assert rows == {*OWN_VARIABLES, "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "ROCR_VISIBLE_DEVICES", *first}
    assert rows >= SET_BY_SPOOL


def test_the_journal_s_lines_are_the_page_s() -> None:
    """Clause 1.10 has each kind of line with as many words as the journal writes."""
    found = {word: rest.count(",") for word, rest in re.findall(r'`\["(\w+)"(.*?)\]`', clause("1.10"))}
    kinds = (
        journal.Waits,
        journal.Left,
        journal.Reviewed,
        journal.Started,
        journal.Stopping,
        journal.Over,
        journal.Told,
    )
    assert found == {str(kind.__struct_config__.tag): len(kind.__struct_fields__) for kind in kinds}


def test_exit_codes_are_the_page_s() -> None:
    """Clause 13 has the code of every class of error, and one for every way in which a job can end."""
    text = clause("13")
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert codes == {int(code) for code in errors.ExitCode}
    words = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert words == {*OUTCOMES, State.INVALID}


def test_words_of_lists_are_on_the_page() -> None:
    """Every kind of stop and every warning signal is named where the page describes them."""
    for kind in StopKind:
        assert f"`{kind}`" in clause("4.9")
    for name in WARNING_SIGNALS:
        assert re.search(rf"\b{name}\b", clause("3.7"))


def test_every_event_has_a_row_and_says_whether_it_is_asked() -> None:
    """Clause 15.1 has each event once, with a "yes" for those that a hook may refuse."""
    rows = re.findall(r"^\| (`\w+`(?: `\w+`)*) \|.*\| ?(yes)? ?\|$", clause("15.1"), re.MULTILINE)
    told = {word: bool(asked) for words, asked in rows for word in re.findall(r"\w+", words)}
    assert told == {name.value: name in REVIEWED for name in EventName}


def test_clauses_that_the_code_cites_exist() -> None:
    """A comment that says FORMAT 2.4 sends its reader to a clause that is there."""
    cited: dict[str, str] = {}
    for path in (ROOT / "src").rglob("*"):
        if path.suffix in (".py", ".sh"):
            for number in re.findall(r"FORMAT(?:\.md)?,? (\d+(?:\.\d+)?)", path.read_text(encoding="utf-8")):
                cited[number] = str(path)
    assert cited
    for number, path in cited.items():
        assert clause(number), path
