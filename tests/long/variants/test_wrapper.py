"""The tests of `tests/formats/test_wrapper.py` under what the core leaves out."""

from formats import test_wrapper
from long.variants.again import again

again(globals(), test_wrapper)
