"""The tests of `tests/extras/here/test_here.py` under what the core leaves out."""

from extras.here import test_here
from long.variants.again import again

again(globals(), test_here)
