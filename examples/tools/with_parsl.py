"""Each call of an app of parsl is a job. An executor for each size of job; `executors=` at the app names it."""

import parsl
from parsl.executors.base import ParslExecutor

import spool


class SpoolExecutor(ParslExecutor):
    """Each call of an app is a job; *keys* are those of a job file."""

    def __init__(self, label="spool", **keys):
        super().__init__()
        self.label, self._keys = label, keys

    def start(self):
        """Make the executor."""
        self._executor = spool.Executor(name=self.label, **self._keys)

    def submit(self, func, resource_specification, *args, **kwargs):
        """Submit a call."""
        return self._executor.submit(func, *args, **kwargs)

    def shutdown(self):
        """Wait for all calls."""
        self._executor.shutdown()


@parsl.python_app(executors=["small"])
def double(number):
    """Return twice the number."""
    return 2 * number


@parsl.python_app(executors=["small"])
def total(*numbers):
    """Return the sum."""
    return sum(numbers)


small, large = SpoolExecutor("small", cpus=1), SpoolExecutor("large", cpus=8, memory="64G")
with parsl.load(parsl.Config(executors=[small, large])):
    print("total", total(double(1), double(2)).result())  # total 6
