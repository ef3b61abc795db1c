"""Fakes and builders for tests of spool and of programs that use it."""
