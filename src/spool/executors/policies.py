"""The policy of an engine, from the settings that every engine has."""

from __future__ import annotations

from collections.abc import Mapping

from spool.executors.language import EnginePolicy
from spool.formats import engines
from spool.formats.engines import EngineConfig


def policy_of(settings: EngineConfig | Mapping[str, object]) -> EnginePolicy:
    """Return the policy in the settings of an engine: a built-in one's, or the table `[engines.NAME]` as written."""
    config = settings if isinstance(settings, EngineConfig) else engines.generic(settings)
    return EnginePolicy(config.poll_ns, config.submit_per_second, config.max_in_flight, config.max_pending)
