"""Makes the table of what all-linear adapts in docs/methods.md from tiny models, when the site is built."""

import re
import warnings
from collections.abc import Iterable
from typing import Any

MARK = re.compile(r"(<!-- all-linear by family -->\n).*?(<!-- end -->)", re.DOTALL)

SMALL: dict[str, Any] = {
    **{"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8},
    **{"intermediate_size": 80, "vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
}
LATENT = {
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12},
    **{"num_key_value_heads": 6},
}
DENSE_FIRST = {"first_k_dense_replace": 1, "n_shared_experts": 1}
LINEAR = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"shared_expert_intermediate_size": 40},
}
MAMBA = {"mamba_d_state": 8, "mamba_dt_rank": 4}
HEADS = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_ssm": 96, "mamba_n_groups": 1}
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
MIXED = {"layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1}
LONGCAT = {"num_layers": 2, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 64, "moe_topk": 2, "zero_expert_num": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "afmoe": EXPERTS | {"num_dense_layers": 1, "num_shared_experts": 1},
    "deepseek_v3": EXPERTS | LATENT | DENSE_FIRST,
    "falcon_h1": MAMBA | HEADS,
    "glm4_moe": EXPERTS | DENSE_FIRST,
    "gpt_oss": EXPERTS,
    "granitemoeshared": EXPERTS | {"shared_intermediate_size": 40},
    "hunyuan_v1_moe": EXPERTS | {"moe_topk": 2},
    "jamba": EXPERTS | MAMBA | JAMBA,
    "jetmoe": EXPERTS | {"kv_channels": 8, "num_key_value_heads": 6},
    "lfm2_moe": EXPERTS | MIXED,
    "llama4_text": EXPERTS | {"intermediate_size_mlp": 80, "interleave_moe_layer_step": 2},
    "longcat_flash": EXPERTS | LATENT | LONGCAT,
    "mixtral": EXPERTS,
    "nemotron_h": EXPERTS | {"mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8},
    "phimoe": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    "qwen3_5_moe_text": EXPERTS | LINEAR,
    "qwen3_moe": EXPERTS | {"mlp_only_layers": [1]},
    "qwen3_next": EXPERTS | LINEAR,
}
"""Keys of a tiny config.json, beside those of SMALL, by model_type."""


def built(family: str) -> Any:
    """Return a tiny model of a family on the meta device."""
    from transformers import CONFIG_MAPPING

    from zerolora.model.architecture import built_on_meta

    return built_on_meta(CONFIG_MAPPING[family].from_dict(SMALL | FAMILIES[family]))


def table() -> str:
    """Return what all-linear adapts and leaves out in each family, as the table of docs/methods.md."""
    rows = ["| family | adapted | experts | linear, but left out |", "|---|---|---|---|"]
    for family in FAMILIES:
        modules, parameters, others = adapted(family)
        rows.append(f"| {family} | {_cell(modules)} | {_cell(parameters)} | {_cell(others)} |")
    return "\n".join(rows)


def adapted(family: str) -> tuple[list[str], list[str], list[str]]:
    """Return the linear modules and the parameters that all-linear adapts, and the linear modules that it leaves out
    beside the head, by their paths in a layer."""
    import torch

    from zerolora.compat import bitsandbytes_patches
    from zerolora.config.method_sections import MethodSections
    from zerolora.methods.peft_format import adapted_paths, linear_paths
    from zerolora.methods.registry import TRAINABLE

    bitsandbytes_patches.load()
    model = built(family)
    every, parameters = linear_paths(model), {name for name, _ in model.named_parameters()}
    head = [path for path in every if model.get_submodule(path) is model.get_output_embeddings()]
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft uses deprecated names of transformers
        paths = adapted_paths(TRAINABLE["lora"].build(model, MethodSections()))
    return (
        [path for path in paths if path not in parameters],
        [path for path in paths if path in parameters],
        [path for path in every if path not in (*paths, *head)],
    )


def _cell(paths: Iterable[str]) -> str:
    """Return the paths without their layers, each block of modules once."""
    blocks: dict[str, dict[str, None]] = {}
    for path in paths:
        parts = path.split(".")
        at = max((number for number, part in enumerate(parts) if part.isdigit() and number < 4), default=-1)
        inside = [part for part in parts[at + 1 :] if not part.isdigit()]
        blocks.setdefault(".".join(inside[:-1]), {})[inside[-1]] = None
    return ", ".join(f"`{block}`: {' '.join(names)}" if block else " ".join(names) for block, names in blocks.items())


def written(text: str) -> str:
    """Return a page with the table."""
    return MARK.sub(lambda match: f"{match[1]}{table()}\n{match[2]}", text) if MARK.search(text) else text
