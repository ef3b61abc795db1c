"""Answers about a spool from its files alone, for users and tools."""
