"""The tests of `tests/crash/test_power_cut.py` with more cuts."""

from crash import test_power_cut
from long.variants.again import again

again(globals(), test_power_cut)
