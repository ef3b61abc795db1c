"""Answers about a spool from its files alone, for people and tools."""
