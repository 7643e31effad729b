"""The machine of a process: devices, assigned GPUs, peak memory, parent processes."""
