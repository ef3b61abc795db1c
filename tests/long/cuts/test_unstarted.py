"""The tests of `tests/crash/test_unstarted.py` with more cuts."""

from crash import test_unstarted
from long.variants.again import again

again(globals(), test_unstarted)
