"""The optimizers of bitsandbytes. Their kernels take plain tensors of one device, on CUDA and on CPU.

Sources: bitsandbytes/optim/optimizer.py; backends/cpu/ops.py and backends/cuda/ops.py.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerolora.conflict import Conflict
from zerolora.optimizers.optimizer import FP32_BYTES, Optimizer

if TYPE_CHECKING:
    import torch

    from zerolora.methods.method import TrainedParameters
    from zerolora.strategies.strategy import Strategy, Target

BLOCK = 256  # elements that share an fp32 scale (Optimizer2State.init_state)
SMALLEST = 4096
"""Elements of the smallest tensor with 8-bit states, min_8bit_size; in ZeRO stages 1 to 3, a rank's partition."""
LOWEST = 0.99296875  # of the signed map, whose highest code is 1 (functional.py, create_dynamic_map)


@dataclass(frozen=True, kw_only=True)
class Bitsandbytes(Optimizer):
    """An optimizer of bitsandbytes, which names its states state1 and state2."""

    bits: int = 32
    """Bits of a state."""
    paged: bool = False
    """States are in CUDA's unified memory, which moves to the host when the GPU is full."""
    on_cpu: int = field(default=3, compare=False)
    """fp32 copies of a tensor that a step on a CPU allocates (backends/cpu/ops.py); CUDA's kernels allocate none."""

    def conflict(self, strategy: "Strategy", target: "Target") -> Conflict | None:
        if self.paged and target.device == "cpu":
            # get_state_buffer warns, and continues without paging.
            return Conflict(
                "hardware.device is cpu, where bitsandbytes pages nothing", f"use {self.name.removeprefix('paged_')}"
            )
        if self.paged and strategy.optimizer != "gpu":
            return Conflict(
                f"render.strategy is {strategy.name}, which keeps the optimizer off the GPU, so nothing is paged",
                f"use {self.name.removeprefix('paged_')}, or a strategy without optimizer offload",
            )
        if strategy.optimizer == "nvme":
            return Conflict(
                f"render.strategy is {strategy.name}, which swaps torch's AdamW only",
                "use adamw, or strategy zero3_offload",
            )
        return None

    def state_bytes(self, parameters: "TrainedParameters") -> float:
        return self._bytes_per_parameter * parameters.trained

    def step_bytes(self, elements: float, largest: float, on_cpu: bool) -> float:
        # Tensors are updated one after the other.
        return self.on_cpu * FP32_BYTES * largest if on_cpu else 0.0

    def traffic(self) -> float:
        # CUDA's one kernel reads weight, gradient and states, and writes weight and states (csrc/kernels.cu).
        return 3 * FP32_BYTES + 2 * self._bytes_per_parameter

    @property
    def _bytes_per_parameter(self) -> float:
        """Bytes of all states of a parameter, the scales of 8-bit ones included."""
        return len(self.states) * (FP32_BYTES if self.bits == 32 else 1 + FP32_BYTES / BLOCK)

    def unpacked_bytes(self, elements: float) -> float:
        return FP32_BYTES * elements if self.bits == 8 else 0.0

    def create(self, groups: list[dict[str, Any]], on_host: bool, **options: Any) -> "torch.optim.Optimizer":
        import bitsandbytes

        kind = getattr(bitsandbytes.optim, self.built.rpartition(".")[2])
        optimizer: torch.optim.Optimizer = kind(groups, **options, optim_bits=self.bits, is_paged=self.paged)
        return optimizer

    def start(self, inner: "torch.optim.Optimizer", tensor: "torch.Tensor", updates: int) -> None:
        state = inner.state[tensor]
        if not state:
            # It looks settings up by the tensor's position in its group, and DeepSpeed's stage 3 empties the groups.
            group: Any = inner.param_groups[0]
            kept, group["params"] = group["params"], [tensor]
            try:
                inner.init_state(group, tensor, 0, 0)  # type: ignore[attr-defined]
            finally:
                group["params"] = kept
        for number in range(1, len(self.states) + 1):
            # With 8 bits a scale of zero makes every code zero.
            state.get(f"absmax{number}", state[f"state{number}"]).zero_()
        state["step"] = updates

    @contextlib.contextmanager
    def unpacked(self, inner: "torch.optim.Optimizer", parts: Sequence[str], write: bool = False) -> Iterator[None]:
        numbers = {name: number for number, name in enumerate(self.states, 1) if name in parts}
        for state in inner.state.values():
            for name, number in numbers.items():
                state[name] = decoded(state, number)
        try:
            yield
        finally:
            for state in inner.state.values():
                for name, number in numbers.items():
                    value = state.pop(name)
                    if write and f"absmax{number}" in state:
                        encode(state, number, value)


def decoded(state: dict[str, Any], number: int) -> "torch.Tensor":
    """Return state1 or state2 in fp32; a copy of an 8-bit one."""
    import torch
    from bitsandbytes.functional import dequantize_blockwise

    codes: torch.Tensor = state[f"state{number}"]
    if codes.dtype == torch.float32:
        return codes
    scales, codebook = state[f"absmax{number}"], state[f"qmap{number}"]
    # torch takes paged codes for the host's, so the kernel would write its result there.
    on_device = codes.to(scales.device)
    value: torch.Tensor = dequantize_blockwise(on_device, absmax=scales, code=codebook, blocksize=BLOCK)
    return value.reshape(codes.shape)


def encode(state: dict[str, Any], number: int, value: "torch.Tensor") -> None:
    """Write fp32 values to an 8-bit state, so that values from `decoded` get their old codes back.

    bitsandbytes scales a block by its largest magnitude. As the signed map has no code for -1, a block whose largest
    value is negative would get other codes each time.
    """
    import torch

    codes, scales, codebook = (state[f"{name}{number}"] for name in ("state", "absmax", "qmap"))
    blocks = torch.nn.functional.pad(value.flatten(), (0, len(scales) * BLOCK - value.numel())).view(-1, BLOCK)
    largest = blocks.amax(1)
    if float(codebook.min()) < 0:
        largest = torch.maximum(largest, -blocks.amin(1) / LOWEST)
    scales.copy_(largest)
    relative = blocks / torch.where(largest > 0, largest, 1.0).unsqueeze(1)
    ordered, places = codebook.sort()
    nearest = places[torch.bucketize(relative, (ordered[1:] + ordered[:-1]) / 2)]
    codes.copy_(nearest.flatten()[: value.numel()].view(codes.shape).to(codes.dtype))
