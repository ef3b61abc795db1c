"""The tests of `tests/end_to_end/test_sizes.py` under what the core leaves out."""

from end_to_end import test_sizes
from long.variants.again import again

again(globals(), test_sizes)
