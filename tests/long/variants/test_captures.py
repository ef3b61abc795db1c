"""The tests of `tests/extras/capture/test_captures.py` under what the core leaves out."""

from extras.capture import test_captures
from long.variants.again import again

again(globals(), test_captures)
