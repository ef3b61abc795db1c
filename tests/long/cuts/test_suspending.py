"""The tests of `tests/crash/test_suspending.py` with more cuts."""

from crash import test_suspending
from long.variants.again import again

again(globals(), test_suspending)
