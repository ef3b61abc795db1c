"""The tests of `tests/crash/test_arrays.py` with more cuts."""

from crash import test_arrays
from long.variants.again import again

again(globals(), test_arrays)
