"""`capture.toml`, text to value and back (FORMAT 4.27)."""

from __future__ import annotations

from typing import Any

from spool.core.capture import CUT, MOST_PACKAGES, MOST_UNTRACKED, NONE, WHOLE, Capture, Code, Interpreter, LockFile
from spool.formats import toml
from spool.formats.freetext import one_line
from spool.formats.run_records import number_lines, optional, read_keys, said, several, text_lines
from spool.formats.timestamps import at_lines, read_at

_RECORD = "capture"


def render_capture(capture: Capture) -> bytes:
    """Return the text of `capture.toml`."""
    lines = [
        at_lines("captured_at", capture.captured_at_ns),
        text_lines(
            ("problem", capture.problem or None),
            ("host", capture.host),
            ("kernel", capture.kernel),
            ("driver", capture.driver),
        ),
        _code_lines(capture.code) if capture.code is not None else "",
        _interpreter_lines(capture.interpreter) if capture.interpreter is not None else "",
    ]
    if (lock := capture.lock_file) is not None:
        lines += [
            "\n[lock_file]\n",
            text_lines(("path", lock.path), ("sha256", lock.hash)),
            number_lines(("size_bytes", lock.size_bytes)),
            f"kept = {toml.show(lock.kept)}\n",
        ]
    return "".join(lines).encode()


def _code_lines(code: Code) -> str:
    return "".join(
        [
            "\n[git]\n",
            text_lines(
                ("top", code.top), ("prefix", code.prefix or None), ("commit", code.commit), ("branch", code.branch)
            ),
            number_lines(("changed", code.changed)),
            text_lines(("diff", code.diff)),
            number_lines(("diff_bytes", code.diff_bytes or None)),
            text_lines(("diff_sha256", code.diff_hash)),
            number_lines(("untracked_count", code.untracked_count or None)),
            _list("untracked", code.untracked),
            f"submodules = {toml.show(code.submodules)}\n",
        ]
    )


def _interpreter_lines(python: Interpreter) -> str:
    return "".join(
        [
            "\n[python]\n",
            text_lines(("path", python.path), ("prefix", python.prefix or None), ("version", python.version)),
            text_lines(("found_by", python.found_by or None)),
            _list("packages", python.packages),
        ]
    )


def _list(key: str, texts: tuple[str, ...]) -> str:
    return f"{key} = [\n{''.join(f'  {toml.quote(text)},{chr(10)}' for text in texts)}]\n" if texts else ""


def parse_capture(data: bytes) -> Capture:
    """Return what `capture.toml` says. Raises InvalidRecord."""
    keys = read_keys(data, _RECORD)
    git, python, lock = (optional(keys, table, dict) for table in ("git", "python", "lock_file"))
    return Capture(
        captured_at_ns=read_at(keys, "captured_at"),
        problem=said(keys, "problem") or "",
        host=said(keys, "host"),
        kernel=said(keys, "kernel"),
        driver=said(keys, "driver"),
        code=_code(git) if git is not None else None,
        interpreter=_interpreter(python) if python is not None else None,
        lock_file=_lock_file(lock) if lock is not None else None,
    )


def _code(keys: dict[str, Any]) -> Code:
    diff = said(keys, "diff")
    return Code(
        top=said(keys, "top") or "",
        prefix=said(keys, "prefix") or "",
        commit=said(keys, "commit"),
        branch=said(keys, "branch"),
        changed=optional(keys, "changed", int) or 0,
        diff=diff if diff in (WHOLE, CUT, NONE) else None,
        diff_bytes=optional(keys, "diff_bytes", int) or 0,
        diff_hash=said(keys, "diff_sha256"),
        untracked=tuple(map(one_line, several(keys, "untracked", str)))[:MOST_UNTRACKED],
        untracked_count=optional(keys, "untracked_count", int) or 0,
        submodules=optional(keys, "submodules", bool) or False,
    )


def _interpreter(keys: dict[str, Any]) -> Interpreter:
    return Interpreter(
        path=said(keys, "path") or "",
        prefix=said(keys, "prefix") or "",
        version=said(keys, "version"),
        found_by=said(keys, "found_by") or "",
        packages=tuple(map(one_line, several(keys, "packages", str)))[:MOST_PACKAGES],
    )


def _lock_file(keys: dict[str, Any]) -> LockFile:
    return LockFile(
        path=said(keys, "path") or "",
        hash=said(keys, "sha256"),
        size_bytes=optional(keys, "size_bytes", int) or 0,
        kept=optional(keys, "kept", bool) or False,
    )
