"""The machine: processors, memory, GPUs, processes."""
