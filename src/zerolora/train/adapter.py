"""What is trained, an adapter or all weights: built into the base model, gathered whole from any engine, checked."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from zerolora.config.method_sections import DEFAULT_INIT
from zerolora.config.settings import TrainSettings
from zerolora.errors import UserError, wording
from zerolora.files import MANIFEST, describe, staged_directory, write_json
from zerolora.methods import lora_init
from zerolora.methods.method import WHOLE_WEIGHTS, TrainableMethod
from zerolora.methods.peft_format import ADAPTER, CONFIG, portable
from zerolora.methods.registry import TRAINABLE
from zerolora.model.added_tokens import AddedToken, add_rows, write
from zerolora.model.architecture import built_on_meta, config_of
from zerolora.model.manifest import BASE
from zerolora.planner.zero_json import ZeroJson
from zerolora.tensor_file import save_tensors
from zerolora.train import base_model, earlier_adapter
from zerolora.train.activation_offload import offload_inputs
from zerolora.train.dropout import make_sparse
from zerolora.train.engines import engine_class
from zerolora.train.engines.engine import WEIGHT, Engine, Tensors, trained
from zerolora.train.loss import make_chunked
from zerolora.train.neftune import add_noise
from zerolora.train.token_row_forward import train_rows
from zerolora.train.training_plan import TrainingPlan


def adapt(
    weights: Path,
    plan: TrainingPlan,
    config: ZeroJson,
    device: torch.device,
    tokens: Sequence[AddedToken] = (),
) -> Any:
    """Return the base model of directory `weights` with what the method adds; only what the method trains is trainable.

    `config` holds the engine's options, `tokens` are those that the data adds. Raises UserError if the model lacks a
    target module or the attention that the plan names.
    """
    model, rows = prepared(weights, plan, config, device, tokens)
    torch.manual_seed(plan.seed)  # the same adapter on every rank, at every stage
    gathering = base_model.sharded(plan, config, engine_class(plan.engine))
    model = method_of(plan).build(model, plan, rows)
    del gathering
    train_rows(model)
    make_sparse(model)
    return model


def takes_out(settings: TrainSettings) -> bool:
    """Tell whether factors start with a part of the base weights."""
    return "lora" in method_of(settings).sections and settings.lora.init != DEFAULT_INIT


def method_of(settings: TrainSettings) -> type[TrainableMethod]:
    """Return the training method of a run."""
    return TRAINABLE[settings.method]


def base_of(model: Any) -> Any:
    """Return the transformers model in what was built: peft's wraps it, full fine-tuning is of the model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def prepared(
    weights: Path, plan: TrainingPlan, config: ZeroJson, device: torch.device, tokens: Sequence[AddedToken]
) -> tuple[Any, list[int]]:
    """Return the base model ready for training, and the numbers of the rows that `tokens` add to it.

    Its loss, noise and activation checkpointing are as the plan says. Where the weights go is the engine's choice
    (base_model.py).
    """
    engine = engine_class(plan.engine)
    model = base_model.load(weights, plan, config, engine, device)
    gathering = base_model.sharded(plan, config, engine)
    rows = add_rows(model, tokens)
    del gathering
    model.config.use_cache = False
    make_chunked(model)
    if plan.neftune_alpha:
        add_noise(model, plan.neftune_alpha)
    if plan.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": engine.reentrant})
        if engine.reentrant:
            model.enable_input_require_grads()
        if plan.activation_offload:
            offload_inputs(model, device)
    return model, rows


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
) -> None:
    """Write what was trained: an adapter in peft's file format, fp32 tensors and a config that names the base model,
    or with full fine-tuning all weights in fp32; and the tokens that were added, if any.

    That is `best`, if rank 0 has one, else what the engine holds; `start` was taken out of the base weights before;
    `base` says what the base model is (model/manifest.py), `origin` what training continued from, if it did
    (earlier_adapter.py, provenance); `carry` writes further files into the directory, such as the prompt format.
    Collective: every rank takes part in the gathering, rank 0 writes. What was written is read back and compared with
    `expected` before it appears; raises UserError if it is not whole, finite and trained.
    """
    state = engine.part(WEIGHT)
    if rank == 0:
        method = method_of(settings)
        tensors = lora_init.published(method.published(engine.module, best or state), start)
        with staged_directory(directory) as staged:
            path = staged / (ADAPTER if method.peft_type else WHOLE_WEIGHTS)
            save_tensors(tensors, path)
            _check(path, expected, method, Path(settings.from_adapter) if settings.from_adapter else None)
            if method.peft_type:
                peft_config = portable(engine.module.peft_config["default"], base)
                write_json(staged / CONFIG, lora_init.doubled(peft_config) if start else peft_config)
            write(staged, tokens)
            if carry:
                carry(staged)
            manifest: dict[str, Any] = {BASE: base, "files": describe(staged)}
            if origin:
                manifest["from_adapter"] = origin
            if method.quantizes():  # what `zerolora merge --dequantized` reads
                quantization = settings.quantization
                manifest["quantization"] = {
                    "type": quantization.type,
                    "double": quantization.double,
                    "precision": settings.precision,
                }
            write_json(staged / MANIFEST, manifest)


def expected_tensors(
    weights: Path, settings: TrainSettings, tokens: Sequence[AddedToken] = ()
) -> dict[str, torch.Size]:
    """Return name and shape of every tensor that training on this base must publish.

    Computed from the base model's config.json, the method's settings and the added tokens alone, not from the engine
    that trained it: under ZeRO-3 the engine's own view can be empty (trl#4416, peft#2892).
    """
    method, model = method_of(settings), built_on_meta(config_of(weights))
    rows = add_rows(model, tokens)
    with torch.device("meta"):
        model = method.build(model, settings, rows)
    tensors = method.published(model, trained(model))
    if takes_out(settings):
        factors = {name: tensor for name, tensor in tensors.items() if ".lora_A." in name or ".lora_B." in name}
        tensors = lora_init.published(tensors, factors)
    return {name: tensor.shape for name, tensor in tensors.items()}


def faults_of(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Size], method: type[TrainableMethod]
) -> list[str]:
    """Return what is wrong with published tensors, one text a fault; empty if nothing is."""
    faults = [wording(f"{name} is missing") for name in expected if name not in found]
    faults += [wording(f"{name} does not belong there") for name in found if name not in expected]
    for name, tensor in found.items():
        if name in expected and tensor.shape != expected[name]:
            faults.append(wording(f"{name} has shape {list(tensor.shape)}, not {list(expected[name])}"))
        elif not bool(torch.isfinite(tensor).all()):
            faults.append(wording(f"{name} is not finite"))
        elif method.is_untrained(name, tensor):
            faults.append(wording(f"{name} is as training starts with it, so it was never trained"))
    return faults


def _check(path: Path, expected: dict[str, torch.Size], method: type[TrainableMethod], origin: Path | None) -> None:
    tensors = load_file(path)
    faults = faults_of(tensors, expected, method)
    if origin and not faults and earlier_adapter.is_unchanged(tensors, origin, method):
        faults = [wording(f"it is {origin} as training began with it")]
    if faults:
        more = wording(f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise UserError(f"the trained adapter is faulty: {'; '.join(faults[:5])}{more}; it was not saved")
