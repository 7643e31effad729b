"""The trained part of a model, an adapter or all weights: applied to the base, gathered from any engine, checked."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from zerolora.compat.bitsandbytes_patches import PACKED
from zerolora.compat.transformers_patches import resizable
from zerolora.config.method_sections import DEFAULT_INIT
from zerolora.config.settings import TrainingPlan, TrainSettings
from zerolora.errors import UserError
from zerolora.files import MANIFEST, describe, staged_directory, write_json
from zerolora.log import LOGGER
from zerolora.methods import lora_init
from zerolora.methods.method import WHOLE_WEIGHTS, TrainableMethod
from zerolora.methods.peft_format import ADAPTER, CONFIG, adapted_module, portable, read_alike
from zerolora.methods.registry import TRAINABLE
from zerolora.methods.without_gradient import leave_out
from zerolora.model import fused_kernels
from zerolora.model.added_tokens import AddedToken, add_rows, write
from zerolora.model.architecture import built_on_meta, config_of
from zerolora.model.manifest import BASE
from zerolora.model.read_spec import read_model_spec
from zerolora.model.weight_files import few
from zerolora.planner.zero_json import ZeroJson
from zerolora.tensor_file import save_tensors
from zerolora.train import base_model, earlier_adapter, kernels
from zerolora.train.activation_offload import offload_inputs
from zerolora.train.engines import engine_class
from zerolora.train.engines.engine import WEIGHT, Engine, Tensors, trained
from zerolora.train.loss import make_chunked
from zerolora.train.module_forwards import add_noise, make_sparse, switch_off_dropout, train_rows
from zerolora.train.objectives import OBJECTIVES


def adapt(
    weights: Path,
    plan: TrainingPlan,
    config: ZeroJson,
    device: torch.device,
    tokens: Sequence[AddedToken] = (),
) -> Any:
    """Return the base model of directory `weights` with the plan's method, whose parameters alone are trainable.

    The engine decides where the weights go (base_model.py); `tokens` are those that the data adds. Raises UserError if
    the model lacks a target module or the plan's attention.
    """
    engine = engine_class(plan.engine)
    model = base_model.load(weights, plan, config, engine, device)
    gathering = base_model.sharded(plan, config, engine)
    with resizable(model):
        rows = add_rows(model, tokens)
    del gathering
    model.config.use_cache = False
    if OBJECTIVES[plan.objective].reference:
        switch_off_dropout(model)  # the reference has none
    make_chunked(model)
    if plan.kernels != "off":
        spec = read_model_spec(weights)
        kernels.use(model, fused_kernels.parts(spec.family, spec.activation))
    if plan.neftune_alpha:
        add_noise(model, plan.neftune_alpha)
    if plan.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": engine.reentrant})
        if engine.reentrant:
            model.enable_input_require_grads()
        if plan.activation_offload:
            offload_inputs(model, device)
    torch.manual_seed(plan.seed)  # the same adapter on every rank, at every stage
    gathering = base_model.sharded(plan, config, engine)
    model = method_of(plan).build(model, plan, rows)
    del gathering
    leave_out(model, plan.without_gradient)
    train_rows(model)
    make_sparse(model)
    if plan.compile:
        from zerolora.train.compiled_layers import compiled_layers  # imports torch's compiler

        compiled_layers.use(base_of(model), device)
    return model


def starts_from_base(settings: TrainSettings) -> bool:
    """Return whether the factors start with a part of the base weights (starting_factors.py)."""
    return "lora" in method_of(settings).sections and settings.lora.init != DEFAULT_INIT


def method_of(settings: TrainSettings) -> type[TrainableMethod]:
    """Return the training method of a run."""
    return TRAINABLE[settings.method]


def base_of(model: Any) -> Any:
    """Return the transformers model, also inside peft's."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def save(
    engine: Engine,
    settings: TrainingPlan,
    directory: Path,
    rank: int,
    expected: dict[str, torch.Size],
    best: Tensors,
    start: Tensors,
    base: dict[str, Any],
    origin: dict[str, Any] | None = None,
    tokens: Sequence[AddedToken] = (),
    carry: Callable[[Path], None] | None = None,
    precision: str | None = None,
) -> None:
    """Write the trained adapter in peft's format, fp32 tensors and a config that names the base model, or with full
    fine-tuning all weights in fp32; and the added tokens.

    `best` replaces the engine's state where rank 0 has one; `start` are the factors taken out of the base weights;
    `base` identifies the base model (model/manifest.py); `origin` is the provenance of train.from_adapter; `carry`
    writes further files into the directory, such as the prompt format; `precision` is that of the base weights before
    they were quantized, if it is not the run's.
    Collective: every rank takes part in the gathering, rank 0 writes. The file is read back and compared with
    `expected` before it appears; raises UserError if it is incomplete, not finite, or untrained as a whole. What it
    holds beside parts that were never trained is saved, and those are named.
    """
    state = engine.part(WEIGHT)
    if rank:
        return
    method = method_of(settings)
    tensors = lora_init.published(method.published(engine.module, best or state), start)
    with staged_directory(directory) as staged:
        path = staged / (ADAPTER if method.peft_type else WHOLE_WEIGHTS)
        save_tensors(tensors, path)
        check_written(path, expected, method, Path(settings.from_adapter) if settings.from_adapter else None)
        if method.peft_type:
            peft_config = portable(read_alike(engine.module), base)
            write_json(staged / CONFIG, lora_init.doubled(peft_config) if start else peft_config)
        write(staged, tokens)
        if carry:
            carry(staged)
        manifest: dict[str, Any] = {BASE: base, "files": describe(staged)}
        if settings.without_gradient and not method.peft_type:
            untrained = re.compile("|".join(settings.without_gradient))
            names = (name for name, _ in engine.module.named_parameters())
            manifest["untrained"] = [name for name in names if untrained.fullmatch(name)]
        if origin:
            manifest["from_adapter"] = origin
        if method.quantizes():  # for `zerolora merge --dequantized`
            quantization = settings.quantization
            manifest["quantization"] = {
                "type": quantization.type,
                "double": quantization.double,
                "precision": precision or settings.precision,
                **({"experts": True} if any(hasattr(each, PACKED) for each in engine.module.modules()) else {}),
            }
        write_json(staged / MANIFEST, manifest)


def expected_tensors(
    weights: Path, settings: TrainSettings, tokens: Sequence[AddedToken] = (), left_out: Sequence[str] = ()
) -> dict[str, torch.Size]:
    """Return name and shape of every tensor that training on this base must publish.

    They follow from the base model's config.json, the method's settings, the added tokens and what is `left_out`
    (TrainingChoice.without_gradient) alone, not from the engine: under ZeRO-3 the engine's own view can be empty
    (trl#4416, peft#2892).
    """
    method, model = method_of(settings), built_on_meta(config_of(weights))
    rows = add_rows(model, tokens)
    with torch.device("meta"):
        model = method.build(model, settings, rows)
    leave_out(model, left_out)
    tensors = method.published(model, trained(model))
    if starts_from_base(settings):
        factors = {name: tensor for name, tensor in tensors.items() if ".lora_A." in name or ".lora_B." in name}
        tensors = lora_init.published(tensors, factors)
    return {name: tensor.shape for name, tensor in tensors.items()}


def faults_of(
    published: dict[str, torch.Tensor], expected: dict[str, torch.Size], method: type[TrainableMethod]
) -> list[str]:
    """Return the faults of published tensors, one text each."""
    faults = [f"{name} is missing" for name in expected if name not in published]
    faults += [f"{name} does not belong there" for name in published if name not in expected]
    for name, tensor in published.items():
        if name in expected and tensor.shape != expected[name]:
            faults.append(f"{name} has shape {list(tensor.shape)}, not {list(expected[name])}")
        elif not bool(torch.isfinite(tensor).all()):
            faults.append(f"{name} is not finite")
    return faults


def check_written(
    path: Path, expected: dict[str, torch.Size], method: type[TrainableMethod], origin: Path | None
) -> None:
    """Raise UserError if the written tensors are faulty, or all as training started; name those that are."""
    tensors = load_file(path)
    faults = faults_of(tensors, expected, method)
    start = {adapted_module(name) for name, tensor in tensors.items() if method.is_untrained(name, tensor)}
    if start and start == {adapted_module(name) for name in tensors}:
        faults = faults or ["it is as training starts with it, so it was never trained"]
    elif start and not faults:
        LOGGER.warning(f"the adapter of {few(sorted(start))} is as training starts with it, so it was never trained")
    if origin and not faults and earlier_adapter.is_unchanged(tensors, origin, method):
        faults = [f"it equals {origin}, from which training started"]
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise UserError(f"the trained adapter is faulty: {'; '.join(faults[:5])}{more}; it was not saved")
