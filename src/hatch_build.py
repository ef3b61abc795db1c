"""The build of a wheel: compiles the wrapper, where there is a compiler. The package that it builds is beside it."""

from __future__ import annotations

import os
import runpy
import tempfile
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_IN_WHEEL = "spool/executors"


class CompiledWrapperHook(BuildHookInterface[Any]):
    """Puts the compiled wrapper into the wheel. No installation fails for want of it: `sh` does the same, slower."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; an editable installation finds the program beside its source, where a checkout has it."""
        # Run by its path: its package cannot be imported, since its dependencies are missing.
        compiled = SimpleNamespace(**runpy.run_path(f"{self.root}/src/spool/executors/compiled.py"))
        editable = version == "editable"
        if editable:
            with suppress(FileNotFoundError):
                os.remove(compiled.PROGRAM)
        try:
            if os.environ.get("SPOOL_NO_WRAPPER"):
                raise compiled.NotBuiltError("SPOOL_NO_WRAPPER is set")
            if editable:
                compiled.build()
                return
            self._scratch = tempfile.TemporaryDirectory()
            built = compiled.build(self._scratch.name)
        except compiled.NotBuiltError as error:
            self.app.display_warning(f"spool will start jobs with /bin/sh: its wrapper was not compiled: {error}")
            return
        build_data["force_include"][built.path] = f"{_IN_WHEEL}/{compiled.NAME}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{built.platforms}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the compiled program, which is in the wheel now."""
        if scratch := getattr(self, "_scratch", None):
            scratch.cleanup()
