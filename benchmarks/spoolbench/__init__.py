"""How fast spool is: figures taken from outside, at depth, and of the planner alone."""
