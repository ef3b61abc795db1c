"""The tests of `tests/crash/test_confinement.py` with more cuts."""

from crash import test_confinement
from long.variants.again import again

again(globals(), test_confinement)
