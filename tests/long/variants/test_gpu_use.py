"""The tests of `tests/end_to_end/test_gpu_use.py` under what the core leaves out."""

from end_to_end import test_gpu_use
from long.variants.again import again

again(globals(), test_gpu_use)
