"""Makes the tables of docs/models.md from benchmarks/results/models.json, which tests/model_matrix.py writes."""

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks/results/models.json"
MARK = re.compile(r"(<!-- (families|types|date) -->\n).*?(<!-- end -->)", re.DOTALL)
FAMILIES: dict[str, tuple[str, str]] = {
    "llama": ("Llama 2 to 3.3, SmolLM2, Yi, TinyLlama", ""),
    "mistral": ("Mistral 7B, Nemo, Small", ""),
    "qwen2": ("Qwen2, Qwen2.5, R1-Distill-Qwen", ""),
    "qwen3": ("Qwen3", ""),
    "gemma2": ("Gemma 2", "caps its scores: eager attention alone"),
    "gemma3_text": ("Gemma 3 1B; the larger ones are gemma3", ""),
    "phi3": ("Phi-3, Phi-4", "LongRoPE: factors by row"),
    "olmo3": ("Olmo 3", ""),
    "granite": ("Granite 3", "scales its logits: unchunked loss"),
    "smollm3": ("SmolLM3", ""),
    "gpt2": ("GPT-2", ""),
    "mixtral": ("Mixtral 8x7B, 8x22B", ""),
    "qwen3_moe": ("Qwen3-30B-A3B, -235B-A22B", ""),
    "deepseek_v3": ("DeepSeek-V3, R1, Kimi K2, Moonlight", "published in fp8, which fetch converts"),
    "gpt_oss": (
        "gpt-oss-20b, -120b",
        "published in MXFP4, which fetch converts; sinks by flash are not measured on a GPU",
    ),
    "glm4_moe": ("GLM-4.5, 4.6, 4.7", ""),
    "llama4_text": ("Llama 4 Scout, Maverick", "chunks: no flash"),
    "deepseek_v32": ("DeepSeek-V3.2", "no gradient reaches its indexers, which stay as they are; no flash"),
    "glm_moe_dsa": ("GLM-5", "as DeepSeek-V3.2"),
    "qwen3_next": ("Qwen3-Next-80B-A3B", "linear attention row by row"),
    "qwen3_5_text": ("Qwen3.5; with images it is qwen3_5", "linear attention row by row"),
    "falcon_h1": ("Falcon-H1", "Mamba row by row; its `out_proj` is not adapted"),
    "nemotron_h": ("Nemotron-H, Nemotron 3 Nano", "Mamba row by row; its `out_proj` is not adapted"),
    "granitemoehybrid": ("Granite 4", "Mamba row by row; its `out_proj` is not adapted"),
    "lfm2": ("LFM2", "short convolutions row by row"),
    "mamba": ("Mamba", "row by row"),
}
"""Published models of a type, and its known limits."""
WORDS = {
    "works": "works",
    "unpacked": "works with `pack.packing: off`",
    "refused": "is refused",
    "failed": "fails",
    "not built": "has no tiny model",
}


def results() -> dict[str, Any]:
    """Return what became of each type."""
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def families() -> str:
    """Return the table of the families that people train."""
    types = results()["types"]
    rows = ["| type | published models | | attention | known limits |", "|---|---|---|---|---|"]
    for kind, (models, limits) in FAMILIES.items():
        found = types[kind]
        rows.append(f"| `{kind}` | {models} | {WORDS[found['result']]} | {found.get('attention', '')} | {limits} |")
    return "\n".join(rows)


def every_type() -> str:
    """Return all types by what became of them."""
    types, lines = results()["types"], []
    for result, words in WORDS.items():
        kinds = [kind for kind, found in types.items() if found["result"] == result]
        if not kinds:
            continue
        lines += [f"**{len(kinds)} {words.replace('is ', 'are ').replace('has ', 'have ')}**", ""]
        if result == "works":
            by_row = [kind for kind in kinds if "by_row" in types[kind]]
            lines += [", ".join(f"`{kind}`" for kind in kinds) + ".", ""]
            lines += [
                "Of these with modules that are computed row by row: " + ", ".join(f"`{kind}`" for kind in by_row)
            ]
            lines += [""]
            if drawing := [kind for kind in kinds if types[kind].get("draws")]:
                names = ", ".join(f"`{kind}`" for kind in drawing)
                lines += [f"Of these compared by the evaluated loss alone, since they draw as they train: {names}", ""]
        else:
            lines += ["| type | |", "|---|---|"]
            lines += [f"| `{kind}` | {_cell(types[kind].get('said', ''))} |" for kind in kinds] + [""]
    return "\n".join(lines)


def date() -> str:
    """Return when and with what the types were run."""
    found = results()
    works = sum(each["result"] == "works" for each in found["types"].values())
    with_what = f"Run on {found['machine']['date']} with transformers {found['machine']['versions']['transformers']}"
    return f"{with_what}: of {len(found['types'])} types, {works} work with packed rows."


def _cell(text: str) -> str:
    return re.sub(r"\S*/config\.json: ", "", text).replace("|", "\\|").replace("<", "&lt;")


def written(text: str) -> str:
    """Return a page with the tables."""
    tables = {"families": families, "types": every_type, "date": date}
    return MARK.sub(lambda match: f"{match[1]}{tables[match[2]]()}\n{match[3]}", text)
