"""Take some memory, in MiB, and keep it for a moment."""

import sys
import time

taken = bytearray(int(sys.argv[1]) << 20)
taken[::4096] = b"x" * len(taken[::4096])
time.sleep(3)
print(f"took {len(taken) >> 20} MiB")
