"""Take memory of a GPU and compute on it: `burn.py MEBIBYTES SECONDS PERCENT`, through the driver's own interface.

It needs the NVIDIA driver (`libcuda.so.1`) and Python, no CUDA toolkit and no package. It uses the first GPU that
CUDA_VISIBLE_DEVICES leaves visible, and prints `ready PID MILLISECONDS` when it has its memory.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any

PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry burn(.param .u64 to, .param .u32 rounds)
{
    .reg .pred %go;
    .reg .f32 %x;
    .reg .b32 %n;
    .reg .b64 %at;
    ld.param.u64 %at, [to];
    cvta.to.global.u64 %at, %at;
    ld.param.u32 %n, [rounds];
    mov.f32 %x, 0f3F800000;
again:
    fma.rn.f32 %x, %x, 0f3F000000, 0f3F000000;
    sub.u32 %n, %n, 1;
    setp.ne.u32 %go, %n, 0;
    @%go bra again;
    st.global.f32 [%at], %x;
    ret;
}
\0"""
_ROUNDS, _BLOCKS, _THREADS = 20_000, 2048, 256  # some milliseconds on any card
_PERIOD_S = 0.2


class Burner:
    """A context on the first visible GPU, with that much memory in it."""

    def __init__(self, size_bytes: int) -> None:
        self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        self._do("cuInit", 0)
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._do("cuDeviceGet", ctypes.byref(device), 0)
        self._do("cuCtxCreate_v2", ctypes.byref(self._context), 0, device)
        self._memory = ctypes.c_uint64()
        words = max(size_bytes // 4, 1)
        self._do("cuMemAlloc_v2", ctypes.byref(self._memory), ctypes.c_size_t(4 * words))
        self._do("cuMemsetD32_v2", self._memory, 0, ctypes.c_size_t(words))  # the memory is really there only then
        module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._do("cuModuleLoadData", ctypes.byref(module), PTX)
        self._do("cuModuleGetFunction", ctypes.byref(self._kernel), module, b"burn")
        self._do("cuCtxSynchronize")

    def step(self) -> None:
        """Compute for some milliseconds, and wait for the end of it."""
        to, rounds = ctypes.c_uint64(self._memory.value), ctypes.c_uint32(_ROUNDS)
        given = (ctypes.c_void_p * 2)(ctypes.addressof(to), ctypes.addressof(rounds))
        self._do("cuLaunchKernel", self._kernel, _BLOCKS, 1, 1, _THREADS, 1, 1, 0, None, given, None)
        self._do("cuCtxSynchronize")

    def _do(self, call: str, *arguments: object) -> None:
        error = getattr(self._cuda, call)(*arguments)
        if error:
            raise SystemExit(f"{call}: CUDA error {error}")


def main(mebibytes: int, seconds: float, percent: int) -> None:
    """Hold the memory for that long, and compute for that part of the time."""
    began = time.monotonic()
    burner = Burner(mebibytes << 20)
    print("ready", os.getpid(), round((time.monotonic() - began) * 1000), flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.monotonic()
        while time.monotonic() < min(start + _PERIOD_S * percent / 100, end):
            burner.step()
        time.sleep(max(0.0, start + _PERIOD_S - time.monotonic()) if percent < 100 else 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
