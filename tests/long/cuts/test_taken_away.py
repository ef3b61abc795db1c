"""The tests of `tests/crash/test_taken_away.py` with more cuts."""

from crash import test_taken_away
from long.variants.again import again

again(globals(), test_taken_away)
