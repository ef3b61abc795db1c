"""The claims of `spool.testing.engine_claims` for Grid Engine."""

from __future__ import annotations

from spool.testing.engine_claims import *  # noqa: F403
