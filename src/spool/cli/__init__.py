"""The `spool` command: one file for each verb."""
