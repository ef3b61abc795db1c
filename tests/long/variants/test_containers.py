"""The tests of `tests/extras/containers/test_containers.py` under what the core leaves out."""

from extras.containers import test_containers
from long.variants.again import again

again(globals(), test_containers)
