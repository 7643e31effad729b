"""The command `zerolora memory`: the memory estimate for any model and hardware, outside the pipeline.

    zerolora memory --model config/recipes/models/llama-3-70b.json --nodes 2 --gpus-per-node 8

Every command imports this module (commands/user_commands.py), so its functions import the estimate, the planner's
datasheets and its reader of DeepSpeed JSONs lazily.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from zerolora.errors import UserError, shown
from zerolora.log import say
from zerolora.types import Attention, Loss, Precision

if TYPE_CHECKING:
    from zerolora.memory.estimate import Capacity
    from zerolora.memory.training_spec import TrainingSpec
    from zerolora.model.fused_kernels import Part
    from zerolora.model.spec import ModelSpec

NOTHING_FITS = 3
"""Exit code if no strategy fits."""
MOST = 10**9
"""Maximum rows, tokens and ranks; beyond, bytes as floating-point numbers are inexact."""


def _option(text: str, default: str | bool = True) -> Any:
    return typer.Option(help=text, show_default=default)


def _count(text: str, default: str | bool = True) -> Any:
    return typer.Option(min=1, max=MOST, help=text, show_default=default)


def memory(
    model: Annotated[
        Path | None, _option("A model's directory, or its config.json under any name ending in .json.")
    ] = None,
    hub: Annotated[
        str | None, typer.Option(metavar="NAME@REVISION", help="Instead: a hub repository, pinned; config.json only.")
    ] = None,
    method: Annotated[str, _option("How it is trained: lora, full, … (docs/memory.md lists them).")] = "lora",
    lora_r: Annotated[int | None, _count("Rank of LoRA, DoRA and QLoRA.", "8")] = None,
    lora_targets: Annotated[str | None, _option("all-linear, or names with commas between.", "all-linear")] = None,
    lora_dropout: Annotated[
        float | None, typer.Option(min=0, max=1, help="Dropout before the first factor.", show_default="0")
    ] = None,
    rank_pattern: Annotated[
        list[str] | None, _option("Another rank for some modules, as in q_proj=16; may be repeated.")
    ] = None,
    modules_to_save: Annotated[str | None, _option("Modules trained whole, with commas between.")] = None,
    added_tokens: Annotated[int | None, _count("Tokens added to the model's, with trained rows.")] = None,
    quantization: Annotated[Literal["nf4", "fp4", "int8"] | None, _option("Type of QLoRA's weights.", "nf4")] = None,
    quantization_block: Annotated[int | None, _count("Weights of one quantization constant.", "64")] = None,
    double_quantization: Annotated[bool | None, _option("Quantize the constants too.", "double-quantization")] = None,
    strategy: Annotated[str | None, _option("A strategy's name (docs/choice.md), or all.", "all")] = None,
    optimizer: Annotated[str, _option("adamw, lion, … (docs/methods.md lists them).")] = "adamw",
    objective: Annotated[str, _option("What is learned from a row (docs/training.md lists them).")] = "sft",
    prepared_by: Annotated[
        Literal["zerolora", "peft"] | None,
        _option("Who prepared QLoRA's base: peft lifts the rest to fp32.", "zerolora"),
    ] = None,
    deepspeed: Annotated[Path | None, _option("Instead: a DeepSpeed JSON of your own.")] = None,
    nodes: Annotated[int, _count("Machines.")] = 1,
    gpus_per_node: Annotated[int, _count("GPUs of each machine, one rank each.")] = 1,
    gpu: Annotated[
        str | None, _option("A GPU by name, as in A100-80GB-SXM, for its memory (docs/choice.md lists them).")
    ] = None,
    gpu_memory: Annotated[str | None, _option("Memory of one GPU.", "80GiB")] = None,
    host_memory: Annotated[str, _option("Memory of one machine.")] = "512GiB",
    micro_batch: Annotated[int, _count("Rows of one forward pass.")] = 1,
    accumulation: Annotated[int, _count("Forward passes of one optimizer step.")] = 1,
    sequence_length: Annotated[int, _count("Tokens of the longest row; of a pair, both sequences.")] = 4096,
    sequence_parallel: Annotated[int, _count("Ranks that share each row (train.sequence_parallel).")] = 1,
    max_micro_batch: Annotated[
        bool, typer.Option("--max-micro-batch", help="Find the largest micro-batch that fits, by strategy.")
    ] = False,
    max_sequence_length: Annotated[
        bool, typer.Option("--max-sequence-length", help="Find the longest row that fits, by strategy.")
    ] = False,
    evaluation_batch: Annotated[int | None, _count("Rows of a forward pass of evaluation, or of generation.")] = None,
    prompt_length: Annotated[int | None, _count("Tokens of a prompt, for the memory of generation.")] = None,
    answer_length: Annotated[int | None, _count("Tokens generated after it; with --prompt-length.")] = None,
    activation_checkpointing: Annotated[bool | None, _option("Keep each layer's input only.", "no")] = None,
    activation_offload: Annotated[
        bool, typer.Option("--activation-offload", help="Keep it on the host (train.activation_offload).")
    ] = False,
    attention: Annotated[
        Attention | None, _option("Implementation of attention.", "sdpa, or what the model has")
    ] = None,
    kernels: Annotated[
        Literal["off", "liger"], _option("liger = fused kernels of norms, rotary embedding and MLP (train.kernels).")
    ] = "off",
    precision: Annotated[Precision, _option("Of weights and activations.")] = "bf16",
    loss: Annotated[Loss, _option("Logits of all positions, supervised ones, or by chunks.")] = "full",
    supervised_span: Annotated[
        int | None, _count("Positions of a row with logits, with --loss supervised or fused.")
    ] = None,
    reserve: Annotated[str | None, _option("Per GPU, for CUDA context, NCCL and fragmentation.", "computed")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a strategy, in bytes.")] = False,
) -> None:
    """Predict the memory of training any model, by strategy, per GPU, host and disk; nothing is loaded.

    Exits with 3 if no strategy fits, and with 2 after a mistake.
    """
    from zerolora.memory.method_options import method_of_options
    from zerolora.memory.training_spec import TrainingSpec
    from zerolora.model.spec import with_rows
    from zerolora.optimizers import OPTIMIZERS
    from zerolora.planner.hardware import GPUS
    from zerolora.train.objectives import OBJECTIVES

    for option, name, registry in (("optimizer", optimizer, OPTIMIZERS), ("objective", objective, OBJECTIVES)):
        if name not in registry:
            raise UserError(f"--{option} {name}: use one of {', '.join(registry)}")
    if activation_offload and activation_checkpointing is False:
        raise UserError(
            "--activation-offload: moves the inputs of checkpointed layers; remove --no-activation-checkpointing"
        )
    _check_lengths(loss, supervised_span, sequence_length, prompt_length, answer_length)
    capacity = _capacity(gpu, gpu_memory, host_memory, precision)
    strategies = _strategies(strategy, deepspeed)
    title, model_spec = _model(model, hub)
    model_spec = with_rows(model_spec, added_tokens or 0)
    spec = TrainingSpec(
        strategy="zero0",
        objective=OBJECTIVES[objective],
        optimizer=OPTIMIZERS[optimizer],
        method=method_of_options(
            method,
            r=lora_r,
            targets=lora_targets,
            dropout=lora_dropout,
            rank_pattern=rank_pattern,
            modules_to_save=modules_to_save,
            quantization=quantization,
            quantization_block=quantization_block,
            double_quantization=double_quantization,
            prepared_by=prepared_by,
            added_tokens=None if method == "full" else added_tokens,  # full trains every row
        ),
        nodes=nodes,
        ranks_per_node=gpus_per_node,
        micro_batch=micro_batch,
        accumulation=accumulation,
        length=sequence_length,
        activation_checkpointing=bool(activation_checkpointing) or activation_offload,
        activation_offload=activation_offload,
        attention=attention or _attention(model_spec, sequence_parallel),
        precision=precision,
        kernels=() if kernels == "off" else OBJECTIVES[objective].kernels(_kernels(model_spec, loss)),
        loss=loss,
        logits=supervised_span or 0,
        sequence_parallel=sequence_parallel,
        reserve=None if reserve is None else _bytes("--reserve", reserve, zero=True),
        capability=None if gpu is None else GPUS[gpu].capability,
    )
    _check_sharing(model_spec, spec)
    specs = _specs(model_spec, spec, strategies, deepspeed)
    generation = (prompt_length, answer_length) if prompt_length and answer_length else None
    searched = max_micro_batch, max_sequence_length
    entries = _entries(model_spec, specs, capacity, *searched, evaluation_batch, generation, changes=as_json)
    if as_json:
        say("\n".join(json.dumps(entry) for entry in entries))
    else:
        say(_text(title, model_spec, specs, capacity, entries, gpu))
    if not any(entry["fits"] for entry in entries):
        raise typer.Exit(NOTHING_FITS)


def _attention(model: "ModelSpec", sequence_parallel: int) -> Attention:
    """Return the default implementation of attention."""
    if sequence_parallel > 1:
        return "flash"
    return "sdpa" if "sdpa" in model.attentions else model.attentions[0]


def _kernels(model: "ModelSpec", loss: Loss) -> "tuple[Part, ...]":
    """Return the parts of a model that liger-kernel computes; losses only by chunks (train/loss.py). Raises UserError
    if there are none."""
    from zerolora.model import fused_kernels

    parts = fused_kernels.parts(model.family, model.activation)
    if not parts:
        raise UserError(
            f"--kernels liger: it has no kernels for a {model.family} here (docs/speed.md lists the families); use off"
        )
    return tuple(part for part in parts if part != "loss" or loss == "fused")


def _check_sharing(model: "ModelSpec", spec: "TrainingSpec") -> None:
    """Raise UserError if ranks cannot share rows under these options."""
    from zerolora.memory.estimate import check_sharing

    shared = spec.sequence_parallel
    if spec.ranks % shared:
        raise UserError(f"--sequence-parallel {shared}: it does not divide the number of GPUs, {spec.ranks:,}; use 1")
    if shared > 1 and not spec.objective.by_token:
        raise UserError(
            f"--sequence-parallel {shared}: --objective {spec.objective.name} has a loss of whole sequences, which "
            "ranks cannot share; use 1"
        )
    if shared > 1 and spec.attention != "flash":
        raise UserError(f"--sequence-parallel {shared}: rows are shared with --attention flash only; use flash")
    check_sharing(model, shared, spec.ranks, "--sequence-parallel")


def _text(
    name: str,
    model: "ModelSpec",
    specs: "list[TrainingSpec]",
    capacity: "Capacity",
    entries: list[dict[str, Any]],
    gpu: str | None,
) -> str:
    from zerolora.memory import summary
    from zerolora.memory.estimate import impossible
    from zerolora.memory.table import rows

    faults = [impossible(spec, model) for spec in specs]
    lines = [
        summary.head(name, model, specs[0], capacity, gpu),
        *summary.notes(entries),
        "",
        rows(entries, capacity),
        "",
    ]
    lines += [*summary.inference_lines(entries), *summary.reasons(entries, faults, capacity)]
    return "\n".join([*lines, summary.verdict(entries, faults, model, specs, capacity)])


def _entries(
    model: "ModelSpec",
    specs: "list[TrainingSpec]",
    capacity: "Capacity",
    max_micro_batch: bool,
    max_sequence_length: bool,
    evaluation_batch: int | None,
    generation: tuple[int, int] | None,
    changes: bool,
) -> list[dict[str, Any]]:
    """Return the estimate of each spec with the requested searches and inferences, null where not requested; with
    `changes`, also what would lower the total, which the table does not show."""
    from zerolora.memory import inference, search
    from zerolora.memory.estimate import estimated
    from zerolora.memory.notes import uncounted

    result = []
    for spec in specs:
        entry = estimated(model, spec, capacity, changes)
        reserve = entry["gpu"]["reserve"]
        more: dict[str, Any] = dict.fromkeys(("max_micro_batch", "max_sequence_length", "evaluation", "generation"))
        if max_micro_batch:
            more["max_micro_batch"] = search.max_micro_batch(model, spec, capacity)
        if max_sequence_length:
            more["max_sequence_length"] = search.max_sequence_length(model, spec, capacity)
        if evaluation_batch:
            more["evaluation"] = inference.evaluation_json(model, spec, capacity, evaluation_batch, reserve)
        if generation:
            rows = evaluation_batch or 1
            more["generation"] = inference.generation_json(model, spec, capacity, rows, generation, reserve)
        result.append({**entry, **more, "notes": [*entry.get("notes", []), *uncounted(model, spec)]})
    return result


def _model(path: Path | None, hub: str | None) -> "tuple[str, ModelSpec]":
    """Return a model's name and spec."""
    from zerolora.model.read_spec import read_model_spec

    if (path is None) == (hub is None):
        raise UserError("pass either --model with a path, or --hub with NAME@REVISION")
    if hub is not None:
        from zerolora.fetch.hub_client import download_config

        return hub, read_model_spec(download_config(hub))
    assert path is not None
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the meta device imports the hub's client
    return path.stem if path.suffix == ".json" else path.resolve().name, read_model_spec(path)


def _strategies(name: str | None, deepspeed: Path | None) -> list[str]:
    """Return the strategies to estimate; none with a DeepSpeed JSON."""
    from zerolora.strategies import STRATEGIES

    if deepspeed is not None:
        if name is not None:
            raise UserError(f"--strategy {name} and --deepspeed {deepspeed}: keep one of the two")
        return []
    if name not in (None, "all", *STRATEGIES):
        raise UserError(f"--strategy {name}: use all or one of {', '.join(STRATEGIES)}")
    return list(STRATEGIES) if name in (None, "all") else [str(name)]


def _specs(
    model: "ModelSpec", spec: "TrainingSpec", strategies: list[str], deepspeed: Path | None
) -> "list[TrainingSpec]":
    """Return a spec for each strategy, or the one of a DeepSpeed JSON."""
    if deepspeed is None:
        return [replace(spec, strategy=name) for name in strategies]
    from zerolora.config.resolve import json_object
    from zerolora.memory.estimate import target_of
    from zerolora.planner.user_config import check_user_config, filled, layout_of

    user = json_object(deepspeed, "a DeepSpeed config")
    check_user_config(str(deepspeed), user, target_of(spec, nvme=None), "--deepspeed")
    layout = layout_of(filled(user, model.hidden))
    return [replace(spec, strategy=str(deepspeed), own=layout.strategy, buckets=layout.buckets)]


def _capacity(gpu: str | None, gpu_memory: str | None, host_memory: str, precision: Precision) -> "Capacity":
    from zerolora.memory.estimate import Capacity
    from zerolora.planner.hardware import GPUS, offered

    host = _bytes("--host-memory", host_memory)
    if gpu is None:
        return Capacity(_bytes("--gpu-memory", gpu_memory or "80GiB"), host)
    if gpu_memory is not None:
        raise UserError(f"--gpu {gpu} and --gpu-memory {gpu_memory}: keep one of the two")
    if gpu not in GPUS:
        raise UserError(f"--gpu {shown(gpu)}: use one of {', '.join(offered(GPUS))}")
    if precision == "bf16" and not GPUS[gpu].supports_bf16:
        raise UserError(f"--precision bf16: a {gpu} does not support it; use fp16 or fp32")
    return Capacity(GPUS[gpu].memory, host)


def _check_lengths(loss: Loss, span: int | None, length: int, prompt: int | None, answer: int | None) -> None:
    if span and loss == "full":
        raise UserError(f"--supervised-span {span}: --loss full computes all logits; pass --loss supervised or fused")
    if span and span > length:
        raise UserError(f"--supervised-span {span}: a row has {length} tokens; use fewer, or a --sequence-length")
    if (prompt is None) != (answer is None):
        raise UserError("--prompt-length and --answer-length: pass both, or none")


def _bytes(option: str, text: str, zero: bool = False) -> int:
    from zerolora.units import parse_bytes

    try:
        return parse_bytes(text, zero)
    except (ValueError, OverflowError) as error:
        raise UserError(f"{option} {text:.60}: {error}") from None
