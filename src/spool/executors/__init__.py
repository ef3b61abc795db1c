"""How a wrapper is started: one small module for each back end."""
