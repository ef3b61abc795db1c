"""The tests of `tests/end_to_end/test_shortage.py` under what the core leaves out."""

from end_to_end import test_shortage
from long.variants.again import again

again(globals(), test_shortage)
