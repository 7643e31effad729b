"""Print the behaviour of unpatched DeepSpeed and torch on one rank, as JSON for test_compat.py.

    python tests/unit/unpatched.py FOLDER

A separate process, since it patches torch and DeepSpeed to observe them.
"""

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.optim import AdamW

Seen = dict[str, Any]
SIZE = 6


def main() -> None:
    """Observe and print each behaviour."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    store = torch.distributed.FileStore(str(Path(sys.argv[1]) / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    seen = {**of_torch(), **of_deepspeed()}
    print(json.dumps(seen))
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's exit handlers wait


def of_torch() -> Seen:
    """Return the behaviour of torch."""
    calls: list[str] = []
    real = torch.distributed.all_reduce

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append("all_reduce")
        return real(*arguments, **named)

    torch.distributed.all_reduce = counted
    torch.distributed.distributed_c10d.all_reduce = counted
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(SIZE, SIZE))
    times = []
    for _ in range(40):
        model(torch.ones(2, SIZE)).sum().backward()
        assert model.logger is not None
        model.logger.set_runtime_stats_and_log()
        times.append(model._get_ddp_logging_data().get("backward_comm_time"))
    torch.distributed.all_reduce = real
    torch.distributed.distributed_c10d.all_reduce = real
    parameter = torch.nn.Parameter(torch.ones(SIZE))
    return {
        "all-reduces of DDP that go through torch.distributed": len(calls),
        "times of DDP's last ten steps": len(set(times[-10:])),
        "states of AdamW before its first step": len(AdamW([parameter]).state),
    }


def of_deepspeed() -> Seen:
    """Return the behaviour of DeepSpeed at stages 0 to 3."""
    import deepspeed
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    from zerolora.compat.deepspeed_patches import SHM

    seen: Seen = {"shm_comm counts as buildable": deepspeed.ops.__compatible_ops__[SHM]}
    deepspeed.ops.__compatible_ops__[SHM] = False  # would be compiled for minutes
    CPU_Accelerator.is_fp16_supported = lambda self: True
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for observe in (start_of_a_stage, stage1_after_a_step, stage0_in_fp32, stage0_in_bf16, stage0_in_fp16, stage3):
        seen |= observe()
    return seen


def engine_of(stage: int, precision: str = "fp32", **options: Any) -> Any:
    """Return a DeepSpeed engine of a small model."""
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, 1))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **({} if precision == "fp32" else {precision: {"enabled": True, **options}}),
    }
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def start_of_a_stage() -> Seen:
    """Return the needless work of a start."""
    from deepspeed.runtime import engine as module

    sent: list[int] = []
    comm = module.dist
    real = comm.broadcast
    comm.broadcast = lambda *arguments, **named: sent.append(1)
    try:
        engine = engine_of(1)
    finally:
        comm.broadcast = real
    return {
        "weights that rank 0 sends at the start": len(sent),
        "torch's compiler is loaded": "torch._inductor.compile_fx" in sys.modules,
        "states before the first step": len(engine.optimizer.optimizer.state),
    }


def stage1_after_a_step() -> Seen:
    """Return whether DeepSpeed links a state that was added after a step."""
    from deepspeed.utils import safe_get_full_optimizer_state

    engine = engine_of(1)
    engine.backward(engine(torch.ones(1, SIZE)).sum())
    engine.step()
    for state in engine.optimizer.optimizer.state.values():
        state["added"] = state["exp_avg"]
    try:
        safe_get_full_optimizer_state(next(engine.module.parameters()), "added")
    except ValueError:
        return {"states added after a step are linked": False}
    return {"states added after a step are linked": True}


def stage0_in_fp32() -> Seen:
    """Return the gradient norm after a clipped step."""
    engine = engine_of(0)
    engine.backward(engine(torch.ones(1, SIZE)).sum())
    engine.step()
    return {"norm after clipping": engine.get_global_grad_norm()}


def stage0_in_bf16() -> Seen:
    """Return the state of stage 0's 16-bit optimizer before the first step."""
    from deepspeed.utils import safe_get_full_fp32_param

    engine = engine_of(0, "bf16")
    optimizer = engine.optimizer
    masters = [master for group in optimizer.fp32_groups for master in group]
    try:
        whole = safe_get_full_fp32_param(next(engine.module.parameters()))
    except (AttributeError, KeyError, AssertionError):
        whole = None
    return {
        "updates before the first step": [int(optimizer.optimizer.state[master]["step"]) for master in masters],
        "master by DeepSpeed's own function": whole is not None,
    }


def stage0_in_fp16() -> Seen:
    """Return the loss scaling of stage 0 in fp16."""
    engine = engine_of(0, "fp16", initial_scale_power=4, loss_scale_window=1)
    optimizer = engine.optimizer
    plain = copy.deepcopy(engine.module)
    loss = engine(torch.ones(1, SIZE).half()).sum()
    plain(torch.ones(1, SIZE).half()).sum().backward()
    order: list[str] = []
    for name in ("_update_scale", "unscale_and_clip_grads"):
        setattr(optimizer, name, recorded(getattr(optimizer, name), name, order))
    engine.backward(loss)
    ratio = next(engine.module.parameters()).grad.norm() / next(plain.parameters()).grad.norm()
    engine.step()
    scaler = optimizer.loss_scale_config
    return {
        "scale of stage 0's gradients": float(ratio),
        "order of stage 0's step": order,
        "stage 0 has a loss_scaler": hasattr(optimizer, "loss_scaler"),
        "loss scalers can load a state": hasattr(scaler, "load_state_dict"),
    }


def recorded(function: Callable[..., Any], name: str, order: list[str]) -> Callable[..., Any]:
    """Return a function that adds its name to `order` when it is called."""

    def call(*values: Any) -> Any:
        order.append(name)
        return function(*values)

    return call


def stage3() -> Seen:
    """Return the cached decisions of stage 3 before and after its trace is invalidated, and whether it records a pass
    without gradients."""
    from zerolora.compat.deepspeed_patches import cached_releases

    engine = engine_of(3)
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    with torch.no_grad():
        engine(torch.ones(1, SIZE))
    recorded = coordinator.is_record_trace()
    for _ in range(4):
        engine.backward(engine(torch.ones(1, SIZE)).sum())
        engine.step()
    before = cached_releases(coordinator).cache_info().currsize
    coordinator._invalidate_trace()
    return {
        "a pass without gradients is recorded": recorded,
        "decisions of a trace": before,
        "decisions of an invalidated trace": cached_releases(coordinator).cache_info().currsize,
    }


if __name__ == "__main__":
    main()
