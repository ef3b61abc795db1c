"""A plugin of mypy: the names and types of what `msgspec.structs.replace` changes are checked as those of a class."""

from __future__ import annotations

from collections.abc import Callable

from mypy.plugin import FunctionSigContext, Plugin
from mypy.plugins.dataclasses import replace_function_sig_callback
from mypy.types import FunctionLike


class StructReplace(Plugin):
    """Has mypy read `replace` of a Struct as it reads that of a data class."""

    def get_function_signature_hook(self, fullname: str) -> Callable[[FunctionSigContext], FunctionLike] | None:
        """Return what makes the signature of a call of *fullname*, None if it is what it says."""
        return replace_function_sig_callback if fullname == "msgspec.structs.replace" else None


def plugin(version: str) -> type[Plugin]:
    """Return the class of the plugin, as mypy asks for it."""
    return StructReplace
