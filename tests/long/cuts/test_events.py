"""The tests of `tests/crash/test_events.py` with more cuts."""

from crash import test_events
from long.variants.again import again

again(globals(), test_events)
