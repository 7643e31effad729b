"""The strategy of a run, from a DeepSpeed JSON or from FSDP."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, shown
from zerolora.imports.formats.import_format import (
    CHANGES,
    FILL_IN,
    NO_EFFECT,
    Draft,
    NoEqual,
    Remark,
    Rule,
    text,
    whole,
)
from zerolora.imports.formats.shared.named_files import LARGEST_FILE, exists
from zerolora.json_file import read_foreign
from zerolora.planner.user_config import layout_of
from zerolora.strategies import STRATEGIES

FSDP = "decided by zerolora's own FSDP strategies (docs/choice.md)"
QUANTIZED_GRADIENTS = "on several nodes in fp16, set render.strategy: zero3_qgz"
DEVICES = ("gpu", "cpu", "nvme")


def set_strategy(draft: Draft, key: str) -> list[str]:
    """Set render.strategy if it is not set yet; `key` is the option for it in the file.

    Without sharding it is DDP, or stage 0 for fp16, which needs DeepSpeed's loss scaling.
    """
    if "strategy" in draft.config.get("render", {}):
        return []
    draft.key = ""
    if draft.facts.get("sharded"):
        draft.set("render.strategy", "auto")
        return [Remark(f"render.strategy: {key} shards the model in a way that has no equal here; auto is written")]
    fp16 = draft.config.get("train", {}).get("precision") == "fp16"
    draft.set("render.strategy", "zero0" if fp16 else "ddp")
    return []


def fsdp(value: Any, draft: Draft) -> str | None:
    """Set the strategy from transformers' option `fsdp`."""
    draft.set("render.strategy", "fsdp_offload" if fsdp_offload(value, draft) else "fsdp")
    return None


def fsdp_offload(value: Any, draft: Draft) -> bool:
    """Return whether the option `fsdp` offloads to the host. Raises NoEqual unless it shards in full."""
    draft.facts["sharded"] = True
    if not isinstance(value, list | str) or "full_shard" not in value:
        raise NoEqual(f"{shown(value)} is not a sharding of zerolora; set render.strategy", FILL_IN)
    return "offload" in value


def sequence_parallel(remark: str = "") -> Rule:
    """Return the rule of the number of ranks that share a row."""

    def translate(value: Any, draft: Draft) -> str | None:
        if (degree := whole(value)) == 1:
            return None
        draft.set("train.sequence_parallel", degree)
        return Remark(remark, NO_EFFECT) if remark else None

    return Rule("train.sequence_parallel", translate)


def strategy(names: Mapping[str, str]) -> Rule:
    """Return the rule of an option for a DeepSpeed JSON that also takes the names of strategies."""

    def translate(value: Any, draft: Draft) -> str | None:
        if not isinstance(value, str) or value not in names:
            return deepspeed(value, draft)
        draft.facts["sharded"] = True
        draft.set("render.strategy", names[value])
        return None

    return Rule("render.strategy", translate, f"{', '.join(names)}, or by a JSON's stage")


def deepspeed(value: Any, draft: Draft) -> str | None:
    """Set the strategy nearest to a DeepSpeed JSON, or to its name if the file is missing."""
    draft.facts["sharded"] = True
    if isinstance(value, dict):
        return _described_by(value, draft)
    path = text(value)
    for folder in (draft.facts["folder"], *Path(draft.facts["folder"]).parents[:3]):
        if exists(file := Path(folder) / path, Path.is_file):
            try:
                return _described_by(read_foreign(file, "correct the file", LARGEST_FILE), draft)
            except UserError as error:
                raise NoEqual(str(error), FILL_IN) from None
    name = Path(path).name.lower()
    stage = re.search(r"(?:zero|z|stage)[_-]?([0-3])", name)
    if not stage:
        raise NoEqual(f"{shown(path)} is not here, and its name names no stage; set render.strategy", FILL_IN)
    offload = ("cpu", "cpu") if "all" in name or (stage[1] == "3" and name.endswith("offload_config.json")) else None
    if offload is None and "param" in name:
        offload = ("gpu", "cpu")
    if offload is None and "offload" in name:
        offload = ("cpu", "gpu")
    strategy, differs = _nearest(int(stage[1]), *(offload or ("gpu", "gpu")))
    draft.set("render.strategy", strategy)
    return Remark(f"{path} is not here; its name says {strategy}{differs}: correct it", FILL_IN)


def _described_by(user: Any, draft: Draft) -> str | None:
    strategy, differs = strategy_of(user)
    draft.set("render.strategy", strategy)
    sizes = "its sizes are computed here (docs/choice.md)"
    return Remark(f"{strategy}, as the JSON describes{differs}; {sizes}", CHANGES if differs else NO_EFFECT)


def strategy_of(user: Any) -> tuple[str, str]:
    """Return the strategy nearest to a DeepSpeed JSON, and the difference. Raises NoEqual if there is none."""
    if not isinstance(user, dict) or not isinstance(user.get("zero_optimization", {}), dict):
        raise NoEqual("is not a DeepSpeed config")
    zero = dict(user.get("zero_optimization", {}))
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if zero.get(old) is True:
            zero[new] = {"device": "cpu"}
    if not isinstance(stage := zero.get("stage", 0), int) or stage not in (0, 1, 2, 3):
        raise NoEqual(f"stage {shown(stage)} is none of 0, 1, 2, 3")
    try:
        layout = layout_of({"zero_optimization": zero}).strategy
    except (AttributeError, TypeError, ValueError, OverflowError, KeyError):
        raise NoEqual("zero_optimization has values that DeepSpeed refuses") from None
    if layout.optimizer not in DEVICES or layout.parameters not in DEVICES:
        raise NoEqual(f"an offload device is none of {', '.join(DEVICES)}")
    name, differs = _nearest(stage, layout.optimizer, layout.parameters, layout.within_node, layout.quantized)
    return (
        name,
        f"{differs} but for zero_quantized_gradients; {QUANTIZED_GRADIENTS}" if layout.quantized_gradients else differs,
    )


def _nearest(
    stage: int, optimizer: str, parameters: str, within_node: bool = False, quantized: bool = False
) -> tuple[str, str]:
    """Return the DeepSpeed strategy with a stage and devices, or one that needs no more GPU memory, and the difference.
    Raises NoEqual if there is none."""
    wanted = [((stage, optimizer, parameters, within_node, quantized), "")]
    if within_node and quantized:
        wanted.append(((stage, optimizer, parameters, False, True), " but for zero_hpz_partition_size"))
    if stage == 3 and parameters != "gpu" and optimizer == "gpu":
        wanted.append(((3, parameters, parameters, False, False), ", with the optimizer's states offloaded as well"))
    if stage == 3 and {optimizer, parameters} == {"cpu", "nvme"}:
        wanted.append(((3, "nvme", "nvme", False, False), ", with both on NVMe"))
    for layout, differs in wanted:
        for name, known in STRATEGIES.items():
            if known.engine == "deepspeed" and layout == (
                known.stage, known.optimizer, known.parameters, known.within_node, known.quantized,
            ):  # fmt: skip
                return name, differs
    raise NoEqual(f"stage {stage} with the optimizer on {optimizer} and weights on {parameters} is no named strategy")
