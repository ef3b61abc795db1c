"""What anyone may do with a spool without the lock."""
