"""A served spool and the claims that hold for every engine, for tests of programs that use spool."""
