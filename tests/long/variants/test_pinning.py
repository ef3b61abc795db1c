"""The tests of `tests/end_to_end/test_pinning.py` under what the core leaves out."""

from end_to_end import test_pinning
from long.variants.again import again

again(globals(), test_pinning)
