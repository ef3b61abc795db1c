"""The public face for Python programs, beside the command line and over the same layers."""
