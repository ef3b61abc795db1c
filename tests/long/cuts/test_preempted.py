"""The tests of `tests/crash/test_preempted.py` with more cuts."""

from crash import test_preempted
from long.variants.again import again

again(globals(), test_preempted)
