"""Values and decisions: no clock, no disk, no process, no environment."""
