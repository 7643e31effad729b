"""The command `zerolora memory`: the memory estimate for any model and hardware, outside the pipeline.

    zerolora memory --model config/recipes/models/llama-3-70b.json --nodes 2 --gpus-per-node 8

cli.py imports this module for every command, so the functions here import the estimate themselves.
"""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from zerolora.errors import UserError
from zerolora.log import LOGGER
from zerolora.types import Attention, Loss, Precision


def memory(
    model: Annotated[Path, typer.Option(help="A model's directory, or its config.json under any name.")],
    method: Annotated[str, typer.Option(help="How it is trained: lora, full, … (docs/memory.md lists them).")] = "lora",
    lora_r: Annotated[int, typer.Option(min=1, help="Rank of LoRA, DoRA and QLoRA.")] = 8,
    lora_targets: Annotated[str, typer.Option(help="all-linear, or names with commas between.")] = "all-linear",
    lora_dropout: Annotated[float, typer.Option(min=0, max=1, help="Dropout before the first factor.")] = 0.0,
    rank_pattern: Annotated[
        list[str] | None, typer.Option(help="Another rank for some modules, as in q_proj=16; may be repeated.")
    ] = None,
    modules_to_save: Annotated[str, typer.Option(help="Modules trained whole, with commas between.")] = "",
    quantization: Annotated[Literal["nf4", "fp4"], typer.Option(help="QLoRA's 4-bit type.")] = "nf4",
    quantization_block: Annotated[int, typer.Option(min=1, help="Weights of one quantization constant.")] = 64,
    double_quantization: Annotated[bool, typer.Option(help="Quantize the constants too.")] = True,
    strategy: Annotated[str, typer.Option(help="A strategy's name, or all.")] = "all",
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of each machine, one rank each.")] = 1,
    gpu_memory: Annotated[str, typer.Option(help="Memory of one GPU.")] = "80GiB",
    host_memory: Annotated[str, typer.Option(help="Memory of one machine.")] = "512GiB",
    micro_batch: Annotated[int, typer.Option(min=1, help="Rows of one forward pass.")] = 1,
    accumulation: Annotated[int, typer.Option(min=1, help="Forward passes of one optimizer step.")] = 1,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens of the longest row.")] = 4096,
    activation_checkpointing: Annotated[bool, typer.Option(help="Keep each layer's input only.")] = False,
    attention: Annotated[Attention, typer.Option(help="Implementation of attention.")] = "sdpa",
    precision: Annotated[Precision, typer.Option(help="Of weights and activations.")] = "bf16",
    loss: Annotated[Loss, typer.Option(help="Logits of all positions, supervised ones, or by chunks.")] = "full",
    supervised_span: Annotated[
        int | None, typer.Option(min=1, help="Positions of a row with logits, with --loss supervised or fused.")
    ] = None,
    reserve: Annotated[str, typer.Option(help="Per GPU, for CUDA context, NCCL and fragmentation.")] = "1.5GiB",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a strategy, in bytes.")] = False,
) -> None:
    """Predict the memory of training any model, by strategy, per GPU, host and disk; nothing is loaded."""
    from zerolora.memory.estimate import Capacity, estimates
    from zerolora.memory.read_spec import read_model_spec
    from zerolora.memory.table import rows
    from zerolora.memory.training_spec import TrainingSpec
    from zerolora.methods.registry import create
    from zerolora.strategies import STRATEGIES

    if strategy not in ("all", *STRATEGIES):
        raise UserError(f"--strategy {strategy}: write all or one of {', '.join(STRATEGIES)}")
    spec = TrainingSpec(
        strategy="zero0",
        method=create(
            method,
            r=lora_r,
            targets=lora_targets if lora_targets == "all-linear" else tuple(lora_targets.split(",")),
            dropout=lora_dropout,
            rank_pattern=tuple(_rank(text) for text in rank_pattern or []),
            modules_to_save=tuple(name for name in modules_to_save.split(",") if name),
            quantization=quantization,
            double_quantization=double_quantization,
            quantization_block=quantization_block,
        ),
        nodes=nodes,
        ranks_per_node=gpus_per_node,
        micro_batch=micro_batch,
        accumulation=accumulation,
        length=sequence_length,
        activation_checkpointing=activation_checkpointing,
        attention=attention,
        precision=precision,
        loss=loss,
        logits=supervised_span or 0,
        reserve=_bytes("--reserve", reserve),
    )
    capacity = Capacity(_bytes("--gpu-memory", gpu_memory), _bytes("--host-memory", host_memory))
    model_spec = read_model_spec(model)
    entries = estimates(model_spec, spec, capacity, list(STRATEGIES) if strategy == "all" else [strategy])
    if model_spec.counted != "config.json":
        LOGGER.info("the model's family is not in the table: counted on the meta device, activations as of any decoder")
    typer.echo("\n".join(json.dumps(entry) for entry in entries) if as_json else rows(entries, capacity))


def _bytes(option: str, text: str) -> int:
    from zerolora.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}") from None


def _rank(text: str) -> tuple[str, int]:
    name, _, r = text.partition("=")
    if not r.isdigit() or not int(r):
        raise UserError(f"--rank-pattern {text}: write a module and its rank, as in q_proj=16")
    return name, int(r)
