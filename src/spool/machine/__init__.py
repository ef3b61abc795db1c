"""What there is and who is alive: processors, memory, GPUs, processes."""
