"""A few long tasks of dask, each a job: `dask.compute` takes an executor as its scheduler."""

import dask

import spool


@dask.delayed
def load(part):
    """Return a part of the data."""
    return list(range(part, part + 3))


@dask.delayed
def total(parts):
    """Return the sum."""
    return sum(map(sum, parts))


with spool.Executor(cpus=1, memory="500M", name="dask") as executor:
    [found] = dask.compute(total([load(1), load(10)]), scheduler=executor)
print("total", found)  # total 39
