"""The tests of `tests/end_to_end/test_moved.py` under what the core leaves out."""

from end_to_end import test_moved
from long.variants.again import again

again(globals(), test_moved)
