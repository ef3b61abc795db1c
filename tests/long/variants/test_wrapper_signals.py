"""The tests of `tests/extras/engines/test_wrapper_signals.py` under what the core leaves out."""

from extras.engines import test_wrapper_signals
from long.variants.again import again

again(globals(), test_wrapper_signals)
