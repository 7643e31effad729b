"""DeepSpeed: internals that LoRA training with its own optimizer needs.

`engine` is a DeepSpeedEngine, `optimizer` the ZeRO or 16-bit optimizer that deepspeed.initialize returned.
"""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed

from zerolora.compat.versions import is_replaced, patch, replaced

SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of DeepSpeed's loss scalers (runtime/fp16/loss_scaler.py)."""
SHM = "deepspeed_shm_comm"


@patch("deepspeed")
def apply_startup_patches() -> None:
    """Skip steps of DeepSpeed's startup that take seconds to minutes and have no use here.

    - It compiles a shared-memory transport (shm_comm) at its first use, in about 100 s; gloo needs no compiler.
    - Rank 0 broadcasts every weight (`_broadcast_model`). All ranks read the same files and initialize the same
      adapter, and the ranks of a node share the file's pages as long as no one writes to the weights.
    - It imports Muon to check that the optimizer is another, and decorating Muon's kernels loads torch's compiler.
    """
    import deepspeed
    from deepspeed.runtime import compiler

    deepspeed.ops.__compatible_ops__[SHM] = False
    if not is_replaced(deepspeed.DeepSpeedEngine._broadcast_model):
        deepspeed.DeepSpeedEngine._broadcast_model = replaced(lambda engine: None)
    compile_later, compiler.compile = compiler.compile, lambda *_, **__: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = compile_later


@patch("deepspeed")
def keep_clipped_norm(engine: Any) -> None:
    """At stage 0 in fp32, clip as DeepSpeed does and keep the norm, which it discards (engine.py, clip_fp32_gradients),
    so that `get_global_grad_norm` returns it."""
    from deepspeed.runtime.utils import clip_grad_norm_

    def clip() -> None:
        parameters, largest = engine.module.parameters(), engine.gradient_clipping()
        engine._global_grad_norm = clip_grad_norm_(parameters, largest, mpu=engine.mpu)

    engine.clip_fp32_gradients = clip


@patch("deepspeed")
def undo_first_step(optimizer: Any, masters: dict[Any, torch.Tensor], start: Callable[[torch.Tensor], None]) -> None:
    """Undo the step with zero gradients by which stage 0's 16-bit optimizer creates states (unfused_optimizer.py,
    initialize_optimizer_states): it counts for the bias correction and decays weights.

    `masters` maps each trained parameter to its fp32 master; `start` resets a tensor's state to that before a step.
    """
    make_states(optimizer, optimizer.optimizer, start)
    for parameter, master in masters.items():
        master.data.copy_(parameter.data)


@patch("deepspeed", upstream="none known; a cache_clear() in _invalidate_trace would do")
def release_by_current_trace(optimizer: Any) -> None:
    """Make stage 3 update which weights to release when the order of modules changes.

    It caches the decision by module and step (partitioned_param_coordinator.py, __params_to_release) even when it
    invalidates the trace that the decision is based on. After a validation before the first step, in which no module is
    used twice, every weight would be gathered twice in each step.
    """
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    cached = cached_releases(coordinator)
    invalidate = coordinator._invalidate_trace

    def invalidate_and_forget() -> None:
        invalidate()
        cached.cache_clear()

    coordinator._invalidate_trace = invalidate_and_forget


@patch("deepspeed", upstream="none known; reset_step could leave out passes without gradients")
def record_training_alone(optimizer: Any) -> None:
    """Make stage 3 record the order of modules in training's passes alone.

    It records the first pass that it can (partitioned_param_coordinator.py, reset_step), and a backward pass after the
    end of the record invalidates it. An objective with a forward pass before each step, which would always be the one
    that is recorded, would gather weight by weight in each backward pass.
    """
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    reset = coordinator.reset_step

    def reset_step() -> None:
        reset()
        if coordinator.is_record_trace() and not torch.is_grad_enabled():
            coordinator._invalidate_trace()

    coordinator.reset_step = reset_step


def gather_at_once(optimizer: Any, modules: Iterable[Any]) -> None:
    """Make stage 3 gather all weights of each of these modules when it is called, and none when one inside it is:
    those inside may then be called another number of times on each rank.

    DeepSpeed asks for such leaves before it makes its hooks, so they are made again (parameter_offload.py).
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_module

    offload = optimizer.parameter_offload
    offload._remove_module_hooks()
    offload.forward_hooks.clear()
    offload.backward_hooks.clear()
    parameter_offload.FWD_MODULE_STACK.remove(offload.module)
    for module in modules:
        set_z3_leaf_module(module, True)
    offload.setup_zero_stage3_hooks()


def cached_releases(coordinator: Any) -> Any:
    """Return the lru_cache inside stage 3's `__params_to_release`, under a decorator."""
    decide = type(coordinator)._PartitionedParameterCoordinator__params_to_release
    return inspect.getclosurevars(decide).nonlocals["func"]


@patch("deepspeed")
def grow_scale_after_step(optimizer: Any) -> Callable[[], None]:
    """Make fp16's loss scale grow after a step; return the function to call at the end of each step.

    Stages 0 and 3 increase it before they unscale the gradients, which still have the previous scale (stage3.py and
    unfused_optimizer.py, step), so the step after each increase is too small by half.
    """
    update = optimizer._update_scale
    due: list[Callable[[], None]] = []

    def shrink_now_or_grow_later(overflowed: bool) -> None:
        if overflowed:
            update(overflowed)
        else:
            due.append(functools.partial(update, overflowed))

    def grow() -> None:
        while due:
            due.pop()()

    optimizer._update_scale = shrink_now_or_grow_later
    return grow


@patch("deepspeed")
def stage0_scale(engine: Any, optimizer: Any) -> float:
    """Return the factor for the loss before `engine.backward`: in fp16, DeepSpeed scales the loss only for its ZeRO
    optimizers (engine.py, backward), but stage 0's optimizer unscales gradients too."""
    scaler = scaler_of(engine, optimizer)
    return float(scaler.cur_scale) if scaler else 1.0


@patch("deepspeed")
def scaler_of(engine: Any, optimizer: Any) -> Any:
    """Return the object with fp16's loss scale (attributes: SCALE), None in other precisions. Stage 0's optimizer has
    it under another name."""
    if not engine.fp16_enabled():
        return None
    return getattr(optimizer, "loss_scale_config", None) or optimizer.loss_scaler


@patch("deepspeed")
def set_scale(engine: Any, optimizer: Any, state: dict[str, float]) -> None:
    """Set the attributes SCALE of the loss scaler (`scaler_of`), which has no load_state_dict."""
    for name, value in state.items():
        setattr(scaler_of(engine, optimizer), name, value)


@patch("deepspeed", upstream="none known; deepspeed.utils.safe_get_full_fp32_param covers stages 1 to 3")
def stage0_masters(optimizer: Any) -> dict[Any, torch.Tensor]:
    """Return the fp32 master of each trained parameter of stage 0's 16-bit optimizer, by parameter."""
    groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {low: high for lows, highs in groups for low, high in zip(lows, highs, strict=True)}


@patch("deepspeed", upstream="none known; deepspeed.utils.safe_set_full_optimizer_state needs the state")
def make_states(optimizer: Any, inner: torch.optim.Optimizer, start: Callable[[torch.Tensor], None]) -> None:
    """Call `start`, which creates a tensor's state, for all tensors that `inner`, under DeepSpeed's optimizer, updates,
    and link the states at stages 1 and 2, which do so only once, after a step of the first group."""
    tensors = getattr(optimizer, "fp32_partitioned_groups_flat", None)  # stage 3
    if tensors is None:
        tensors = [parameter for group in inner.param_groups for parameter in group["params"]]
    for number, tensor in enumerate(tensors):
        # Existing states stay in the memory that DeepSpeed has linked.
        with contextlib.nullcontext() if inner.state.get(tensor) else on_host(optimizer, number):
            start(tensor)
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._lazy_init_hp_params_optimizer_state()


@contextlib.contextmanager
def on_host(optimizer: Any, group: int) -> Iterator[None]:
    """Load the states of a group, which stage 3 may keep on NVMe, to the host, and write them back at the end."""
    swapped = getattr(optimizer, "swap_optimizer", False) and optimizer._swappable_optimizer_subgroup(group)
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_in(group)
    yield
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_out(group)


@patch("deepspeed", upstream="none known; safe_get_full_optimizer_state reads a whole group for each parameter")
@contextlib.contextmanager
def read_from_nvme_once(optimizer: Any, write: bool = False) -> Iterator[None]:
    """Read a group's states from NVMe once for all its parameters, not once for each, during calls of
    safe_get_full_fp32_param and its like; with `write`, write each group back when the next is read."""
    if not getattr(optimizer, "swap_optimizer", False):
        yield
        return
    names = (
        "_optimizer_states_and_gradient_swap_in",
        "_optimizer_states_and_gradient_swap_out",
        "_release_swap_buffers",
    )
    swap_in, swap_out, release = (getattr(optimizer, name) for name in names)
    loaded: list[int] = []

    def leave() -> None:
        while loaded:
            (swap_out if write else release)(loaded.pop())

    def enter(group: int, _: Any = None) -> None:
        if group not in loaded:
            leave()
            swap_in(group)
            loaded.append(group)

    for name, function in zip(names, (enter, lambda *_: None, lambda *_: None), strict=True):
        setattr(optimizer, name, function)
    try:
        yield
    finally:
        leave()
        for name in names:
            delattr(optimizer, name)


@patch("deepspeed")
def link_states(optimizer: Any) -> None:
    """Make safe_get_full_optimizer_state and its like see the optimizer's current states: stages 1 and 2 look them up
    only once. A no-op at other stages, which look them up at each call."""
    if getattr(optimizer, "_hp_optimizer_states_linked", False):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


@patch("deepspeed", upstream="none known; zero.Init shards the parameters of modules that are built within it")
def sharder(options: dict[str, Any]) -> Callable[[Any], None]:
    """Return a function that shards a parameter, in place, as stage 3 would. `options`: those of deepspeed.initialize.

    Each rank passes the same values, which are not sent.
    """
    import deepspeed

    owner = deepspeed.zero.Init(config_dict_or_path=options)  # not entered, which would change torch's functions

    def shard(parameter: Any) -> None:
        owner._convert_to_deepspeed_param(parameter)
        parameter.partition()

    return shard


@patch("deepspeed")
def own_shard(value: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return this rank's shard of a tensor as stage 3 shards it: flat, of equal sizes, the last padded with zeros.
    safe_set_local_fp32_param and its like require it, and there is no public function for it."""
    group = parameter.ds_process_group
    size = parameter.ds_tensor.ds_numel
    flat = value.flatten()
    padded = torch.nn.functional.pad(flat, (0, size * torch.distributed.get_world_size(group) - flat.numel()))
    return padded.narrow(0, size * torch.distributed.get_rank(group), size)
