"""One tree of errors with an exit code for each branch."""

from __future__ import annotations

import inspect

from spool.core import errors
from spool.core.model import Problem


def test_every_error_of_the_tree_has_a_documented_exit_code() -> None:
    """The table in the module names each class that the module defines, beside its own code."""
    assert errors.__doc__ is not None
    rows = {row.split("|")[1].strip(): row for row in errors.__doc__.splitlines() if row.startswith("| ")}
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.SpoolError) and not issubclass(kind, errors.InvalidFile):
            assert f"`{name}`" in rows[str(int(kind.exit_code))]
    for kind in (errors.InvalidJob, errors.InvalidConfig, errors.InvalidReservation):
        assert kind.exit_code == 4


def test_an_invalid_file_says_its_first_problem_and_how_many_more() -> None:
    """The one-line form of an error with many problems stays one line."""
    problems = [Problem("a", 1, "first"), Problem("b", 2, "second")]
    assert str(errors.InvalidJob("job x", problems)) == "cannot use job x: first (and 1 more)"
    assert str(errors.InvalidJob("job x", [])) == "cannot use job x: it is not valid"


def test_messages_have_one_grammar() -> None:
    """*cannot VERB THING: where: why; what to do*, the parts that are absent left out."""
    assert errors.cannot("open", "the spool", "not a directory", where="/x", remedy="remove it") == (
        "cannot open the spool: /x: not a directory; remove it"
    )
    assert errors.cannot("open", "the spool", "gone") == "cannot open the spool: gone"
