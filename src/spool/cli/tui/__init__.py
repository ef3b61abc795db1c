"""The screen of `spool top`: its background reading, its widgets, and its keys."""
