"""What a process runs on: devices, GPUs assigned to it, memory that it held, the process that started it."""
