"""A spool for all tests."""

from served_spool import _served, root

__all__ = ["_served", "root"]
