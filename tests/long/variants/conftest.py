"""Fixtures of the modules that are collected again."""

from end_to_end.conftest import live

__all__ = ["live"]
