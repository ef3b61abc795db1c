"""The tests of `tests/crash/test_every_cut.py` with more cuts."""

from crash import test_every_cut
from long.variants.again import again

again(globals(), test_every_cut)
