"""The screen of `spool top`: what it reads in the background, what it is made of, and what its keys do."""
