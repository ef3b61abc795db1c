"""A spool for each test, with a dispatcher of its own."""

from served_spool import own_spool

__all__ = ["own_spool"]
