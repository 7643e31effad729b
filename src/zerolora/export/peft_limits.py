"""What an adapter may be, for programs that read peft's files but not all that peft writes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zerolora.errors import UserError, shown
from zerolora.model import foreign

REMEDIES = {
    "use_dora": "write train.method: lora",
    "modules_to_save": "write train.lora.modules_to_save: []",
    "trainable_token_indices": "leave out add_special_tokens and add_tokens of the data set",
    "target_parameters": "name no experts in train.lora.targets",
    "rank_pattern": "write train.lora.rank_pattern: {}",
    "alpha_pattern": "write train.lora.alpha_pattern: {}",
    "use_rslora": "write train.lora.rank_stabilized: false",
}
"""What a user writes instead, by key of adapter_config.json."""
MERGED = "export the merged model, as gguf does"
ALWAYS = ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters")


def check_plain_lora(
    adapter: Path, where: str, program: str, instead: str = MERGED, refused: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the config of an adapter that consists of LoRA's factors alone.

    Raises UserError, which begins with the key `where` and ends with `instead`, for another method, for what no
    `program` has a form for (`ALWAYS`), and for keys in `refused`.
    """
    path = adapter / "adapter_config.json"
    if not path.is_file():
        raise UserError(f"{where}: {adapter} holds no adapter but all weights; {instead}")
    config = foreign.adapter_config(adapter)
    if config.get("peft_type") != "LORA":
        raise UserError(
            f"{where}: {path}: peft_type is {shown(config.get('peft_type'))}, and {program} reads LoRA alone; write "
            f"train.method: lora, or {instead}"
        )
    for key in (*ALWAYS, *refused):
        if config.get(key):
            raise UserError(
                f"{where}: {path}: {key} is {shown(config[key])}, for which {program} has no form; "
                f"{REMEDIES[key]}, or {instead}"
            )
    return config
