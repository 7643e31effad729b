"""One rank of the probe: python -m zerolora.probe.probe_rank --output FILE --device cpu|cuda, with RANK and so on set.

Every measurement begins at a barrier, so all ranks of all nodes measure the same thing at the same time. A rank takes
the median of its repetitions; the result is that of the slowest rank, for which the others wait in every step.
"""

import argparse
import datetime
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from zerolora.files import write_json
from zerolora.machine import cpu_matmul, devices
from zerolora.machine.devices import on_gpu
from zerolora.machine.identity import processor
from zerolora.optimizers import OPTIMIZERS
from zerolora.train.launch.fork import become_rank
from zerolora.train.launch.rendezvous import rendezvous
from zerolora.train.launch.topology import gpu_of_rank

REPETITIONS = 7
PACKAGES = ("torch", "deepspeed", "transformers", "peft")
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}

# By device: large enough to reach the rates of a real model, small enough to take seconds.
MATRIX = {"cpu": 768, "cuda": 8192}
COPIED_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
SENT_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
PINNED_BYTES = 256 * 2**20
ADAMW_PARAMETERS = 8 * 2**20  # with their states more than a cache
BLOCKS = 20
OPERATIONS_PER_BLOCK = 12  # forward: norm, linear, silu, linear; backward: 1 + 3 + 1 + 3

Measure = Callable[[], None]


class Rank:
    """The device and groups of this rank."""

    def __init__(self, device: str) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        self.kind, self.device = device, torch.device(device)
        if device == "cuda":
            self.device = torch.device(devices.GPU, gpu_of_rank(os.environ, torch.cuda.device_count()))
            torch.cuda.set_device(self.device)
        else:
            cpu_matmul.choose()  # as training does
        rendezvous("nccl" if device == "cuda" else "gloo")
        # Barriers and results have a group of their own, so that they do not disturb the measurement.
        self.control = dist.new_group(backend="gloo")
        nodes, locals_ = range(self.world // self.per_node), range(self.per_node)
        self.node = self._mine([[node * self.per_node + each for each in locals_] for node in nodes])
        self.across = self._mine([[node * self.per_node + each for node in nodes] for each in locals_])

    def _mine(self, groups: list[list[int]]) -> Any:
        # new_group is a collective: every rank must create every group.
        made = [dist.new_group(members) for members in groups]
        return next(group for group, members in zip(made, groups, strict=True) if self.rank in members)

    def seconds(self, measure: Measure) -> float:
        """Return the slowest rank's median seconds of `measure`, which all ranks run at the same time."""
        measure()  # warm-up: allocates memory, selects kernels, opens connections
        taken = []
        for _ in range(REPETITIONS):
            self._settle()
            dist.barrier(self.control)
            started = time.perf_counter()
            measure()
            self._settle()
            taken.append(time.perf_counter() - started)
        slowest = torch.tensor(statistics.median(taken), dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self.control)
        return float(slowest)

    def _settle(self) -> None:
        if on_gpu(self.device):
            torch.cuda.synchronize(self.device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    arguments = parser.parse_args()
    become_rank()
    rank = Rank(arguments.device)
    no_bf16 = on_gpu(rank.device) and not torch.cuda.is_bf16_supported(including_emulation=False)
    half = torch.float16 if no_bf16 else torch.bfloat16
    measured = {
        "matmul_fp32_flops_per_second": _matmul(rank, torch.float32),
        "matmul_16bit_flops_per_second": _matmul(rank, half),
        "host_adamw_parameters_per_second_per_thread": _adamw(rank),
        "kernel_seconds": _issuing(rank),
        **_copying(rank),
        **_sending(rank),
    }
    if rank.rank == 0:
        write_json(arguments.output, {**_machine(rank), "precision_16bit": NAMES[half], "measured": measured})
    dist.barrier(rank.control)
    dist.destroy_process_group()


def _matmul(rank: Rank, dtype: torch.dtype) -> float:
    size = MATRIX[rank.kind]
    one, other = (torch.randn(size, size, device=rank.device, dtype=dtype) for _ in range(2))
    result = torch.empty_like(one)
    return 2 * size**3 / rank.seconds(lambda: _done(torch.mm(one, other, out=result)))


def _adamw(rank: Rank) -> float:
    """Return the parameters/s of the optimizer that updates offloaded weights, for each of the rank's threads."""
    parameter = torch.nn.Parameter(torch.randn(ADAMW_PARAMETERS))
    parameter.grad = torch.randn(ADAMW_PARAMETERS)
    recipe = OPTIMIZERS["adamw"]
    optimizer = recipe.build([{"params": [parameter]}], 1e-3, 0.0, recipe.betas, recipe.epsilon, on_host=True)
    return ADAMW_PARAMETERS / rank.seconds(lambda: _done(optimizer.step())) / torch.get_num_threads()


def _issuing(rank: Rank) -> float:
    """Return the seconds to issue one operation, from a model so small that only their number counts."""
    blocks = [
        [torch.nn.LayerNorm(16), torch.nn.Linear(16, 16), torch.nn.SiLU(), torch.nn.Linear(16, 16)]
        for _ in range(BLOCKS)
    ]
    model = torch.nn.Sequential(*(module for block in blocks for module in block)).to(rank.device)
    rows = torch.randn(4, 16, device=rank.device, requires_grad=True)
    return rank.seconds(lambda: _done(model(rows).sum().backward())) / (BLOCKS * OPERATIONS_PER_BLOCK)


def _copying(rank: Rank) -> dict[str, float | None]:
    """Measure bytes/s of memory, reads and writes, and of pinned copies between host and device (None on CPU)."""
    count = COPIED_BYTES[rank.kind]
    source, target = (torch.zeros(count // 4, device=rank.device) for _ in range(2))
    memory = 2 * count / rank.seconds(lambda: _done(target.copy_(source)))
    up = down = None
    if on_gpu(rank.device):
        pinned = torch.zeros(PINNED_BYTES // 4, pin_memory=True)
        there = torch.zeros(PINNED_BYTES // 4, device=rank.device)
        up = PINNED_BYTES / rank.seconds(lambda: _done(there.copy_(pinned, non_blocking=True)))
        down = PINNED_BYTES / rank.seconds(lambda: _done(pinned.copy_(there, non_blocking=True)))
    return {
        "memory_bytes_per_second": memory,
        "host_to_device_bytes_per_second": up,
        "device_to_host_bytes_per_second": down,
    }


def _sending(rank: Rank) -> dict[str, float | None]:
    """Measure the bandwidth of collectives inside a node, per rank, and between nodes, per node.

    Bandwidth is the bytes/s that a ring sends: (n-1)/n of the buffer, twice that for an all-reduce. Between nodes, each
    rank of a node is in a group with its local rank on the other nodes, all at once. Latency is the seconds of one hop.
    """
    nodes = rank.world // rank.per_node
    return {
        **_collectives(rank, "node", rank.node, rank.per_node, 1),
        **_collectives(rank, "network", rank.across, nodes, rank.per_node),
    }


def _collectives(rank: Rank, where: str, group: Any, members: int, lanes: int) -> dict[str, float | None]:
    names = [f"{where}_all_reduce_bytes_per_second", f"{where}_all_gather_bytes_per_second", f"{where}_latency_seconds"]
    if members == 1:
        return dict.fromkeys(names)
    # all_gather needs a size divisible by the number of members.
    share = SENT_BYTES[rank.kind] // 4 // members
    whole, part = (torch.zeros(count, device=rank.device) for count in (share * members, share))
    sent = lanes * part.nbytes * (members - 1)
    small, one = torch.zeros(members, device=rank.device), torch.zeros(1, device=rank.device)
    values = [
        2 * sent / rank.seconds(lambda: _done(dist.all_reduce(whole, group=group))),
        sent / rank.seconds(lambda: _done(dist.all_gather_into_tensor(whole, part, group=group))),
        rank.seconds(lambda: _done(dist.all_gather_into_tensor(small, one, group=group))) / (members - 1),
    ]
    return dict(zip(names, values, strict=True))


def _done(_: object) -> None:
    """Discard a result, so that a lambda returns None."""


def _machine(rank: Rank) -> dict[str, Any]:
    """Return the hardware and versions of rank 0's node."""
    name = torch.cuda.get_device_name(rank.device) if on_gpu(rank.device) else processor()
    return {
        "device": rank.kind,
        "nodes": rank.world // rank.per_node,
        "ranks_per_node": rank.per_node,
        "threads_per_rank": torch.get_num_threads(),
        "repetitions": REPETITIONS,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": {
            "name": name,
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "versions": {
            "python": platform.python_version(),
            **{each: importlib.metadata.version(each) for each in PACKAGES},
        },
    }


if __name__ == "__main__":
    main()
