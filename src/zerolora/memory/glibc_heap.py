"""Constants fitted to the resident memory of real processes, separate from the formulas because other systems differ.

Measured on a 2-core AMD EPYC VM with glibc 2.36, Python 3.11 and torch 2.13 (CPU build): PROCESS by
benchmarks/process_memory.py, the others fitted to benchmarks/results/memory_cpu.json, which
benchmarks/memory/measure.py wrote. They describe that machine; their accuracy on others is unknown.
"""

PROCESS = 431 * 1024**2
"""Bytes of a rank that has imported torch, deepspeed, transformers, peft and datasets and loaded nothing."""
CPU_PROCESS = 508 * 1024**2
"""Bytes of a CPU rank beside its tensors, after steps with rows of many lengths."""
CPU_GROUP = 67 * 1024**2
"""Additional bytes of a CPU rank that communicates with others."""
CPU_ZERO = 46 * 1024**2
"""Additional bytes of a CPU rank from ZeRO stage 1 on."""
SMALL_BLOCKS_SHARE = 0.15
"""Share of the peak of small blocks (tracer.py, SMALL) that stays in the heap after it is freed."""
STAGE_3_HEAP = {True: (48 * 1024**2, 0.09), False: (0, 0.4)}
"""Freed memory of gathered weights that stays in the heap of a CPU rank under stage 3: bytes, and share of the model's
bytes, with and without activation checkpointing."""
