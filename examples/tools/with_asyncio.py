"""An event loop awaits calls that are jobs."""

import asyncio
import math

import spool


async def main():
    """Await two calls."""
    loop = asyncio.get_running_loop()
    with spool.Executor(name="work") as executor:
        return await asyncio.gather(*(loop.run_in_executor(executor, math.factorial, n) for n in (3, 4)))


print("factorials", asyncio.run(main()))  # factorials [6, 24]
