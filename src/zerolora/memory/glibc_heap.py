"""Constants fitted to resident memory of real processes, apart from the formulas because other systems differ.

Measured on a 2-core AMD EPYC VM with glibc 2.36, Python 3.11 and torch 2.13 (CPU build): PROCESS by
benchmarks/process_memory.py, the rest fitted to benchmarks/results/memory_cpu.json, which benchmarks/memory/measure.py
wrote. The fit says how well these constants describe that machine, not how well they hold on another.
"""

PROCESS = 431 * 1024**2
"""Bytes of a rank that has imported torch, deepspeed, transformers, peft and datasets and loaded nothing."""
CPU_PROCESS = 487 * 1024**2
"""Bytes of a CPU rank beside its tensors, after steps of many lengths."""
CPU_GROUP = 74 * 1024**2
"""Bytes more of a CPU rank that exchanges data with others."""
CPU_ZERO = 46 * 1024**2
"""Bytes more of a CPU rank from ZeRO stage 1 on."""
SMALL_BLOCKS_SHARE = 0.15
"""Of the small blocks at their peak (tracer.py, SMALL): free in the heap, and not given back to the system."""
STAGE_3_HEAP = {True: (48 * 1024**2, 0.09), False: (0, 0.4)}
"""Free in the heap of a CPU rank under stage 3, where gathered weights were: bytes, and share of the model's bytes,
with and without activation checkpointing."""
