"""The tests of `tests/formats/test_wrapper_shortage.py` under what the core leaves out."""

from formats import test_wrapper_shortage
from long.variants.again import again

again(globals(), test_wrapper_shortage)
