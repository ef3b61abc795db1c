"""The tests of `tests/formats/test_wrapper_moved.py` under what the core leaves out."""

from formats import test_wrapper_moved
from long.variants.again import again

again(globals(), test_wrapper_moved)
