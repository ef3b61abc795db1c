"""The tests of `tests/end_to_end/test_cpu_energy.py` under what the core leaves out."""

from end_to_end import test_cpu_energy
from long.variants.again import again

again(globals(), test_cpu_energy)
