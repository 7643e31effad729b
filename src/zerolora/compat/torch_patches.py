"""torch: measurements of its collectives and DDP, and the initial state of its AdamW."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from zerolora.compat.versions import patch

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The tensors of AdamW's state, as torch/optim/adam.py names them."""

Function = Callable[..., Any]

COLLECTIVES = {
    "all_reduce": ("all_reduce", 0, "tensor"),
    "all_gather": ("all_gather", 0, "tensor_list"),
    "all_gather_into_tensor": ("all_gather", 0, "output_tensor"),
    "all_gather_single": ("all_gather", 0, "output_tensor"),
    "reduce_scatter": ("reduce_scatter", 1, "input_list"),
    "reduce_scatter_tensor": ("reduce_scatter", 1, "input"),
    "reduce_scatter_single": ("reduce_scatter", 1, "input"),
    "all_to_all_single": ("all_to_all", 1, "input"),
    "broadcast": ("broadcast", 0, "tensor"),
    "reduce": ("reduce", 0, "tensor"),
}
"""Functions of torch.distributed: (collective, position and name of the argument that is the full buffer)."""


@patch(
    "torch",
    upstream="DeepSpeed's comms_logger and torch's CommDebugMode count calls in part, and no waiting",
    features=("torch.distributed:all_reduce", "torch.distributed.distributed_c10d:all_reduce"),
)
def wrap_collectives(wrapped: Callable[[Function, str, int, str], Function]) -> None:
    """Replace each function of COLLECTIVES by wrapped(function, collective, position, keyword) for this process.

    Call it before deepspeed.init_distributed, which keeps references to some (deepspeed/comm/torch.py,
    TorchBackend.__init__).
    """
    for name, (collective, position, keyword) in COLLECTIVES.items():
        if not hasattr(torch.distributed, name):
            continue  # torch 2.11 has no *_single functions
        function = wrapped(getattr(torch.distributed, name), collective, position, keyword)
        # In both modules: torch's functions for several tensors compare with the second.
        for module in (torch.distributed, torch.distributed.distributed_c10d):
            setattr(module, name, function)


@patch("torch", features=("torch.distributed:Work.wait", "torch.cuda:Stream.wait_event"))
def wrap_waits(wrapped: Callable[[Function], Function], gpu: bool) -> None:
    """Replace the functions that wait for a collective by wrapped(function) for this process: `Work.wait`, and on a GPU
    `Stream.wait_event`, since a collective on another stream is exposed where the computing stream waits."""
    work: Any = torch.distributed.Work
    work.wait = wrapped(work.wait)
    if gpu:
        stream: Any = torch.cuda.Stream
        stream.wait_event = wrapped(stream.wait_event)


@patch(
    "torch",
    features=(
        "torch.nn.parallel:DistributedDataParallel._set_ddp_runtime_logging_sample_rate",
        "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data",
    ),
)
def time_every_reduction(model: torch.nn.parallel.DistributedDataParallel) -> None:
    """Let DDP record the times of every step's all-reduces (`ddp_reductions`), not only of one step in a hundred."""
    model._set_ddp_runtime_logging_sample_rate(1)


@patch("torch", features=("torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data",))
def ddp_reductions(model: torch.nn.parallel.DistributedDataParallel) -> tuple[int, int, float]:
    """Return calls, bytes and exposed seconds of the last step's all-reduces. DDP calls them from C++, so functions of
    torch.distributed cannot be wrapped."""
    assert model.logger is not None
    model.logger.set_runtime_stats_and_log()  # otherwise done in the next forward pass
    data = model._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    # Nanoseconds from the first bucket's start to the last one's end (torch/csrc/distributed/c10d/logger.cpp).
    exposed = (data.get("backward_comm_time", 0) - data.get("backward_compute_comm_overlap_time", 0)) / 1e9
    return data["num_buckets_reduced"], sum(map(int, sizes.split(","))), exposed


@patch("torch", features=("torch.optim:AdamW._init_group",))
def fresh_state(tensor: torch.Tensor, updates: int, fused: bool) -> dict[str, torch.Tensor]:
    """Return AdamW's initial state of a tensor (torch/optim/adam.py, _init_group) with this number of updates. There is
    no public way to create it without a step. The fused kernels read the updates on the tensor's device."""
    moments = {name: torch.zeros_like(tensor, memory_format=torch.preserve_format).detach() for name in MOMENTS}
    step = torch.tensor(float(updates), dtype=torch.float32, device=tensor.device if fused else "cpu")
    return {"step": step, **moments}
