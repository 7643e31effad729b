"""render refuses, on shapes alone, what could not be trained or merged hours later."""

import json
import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import TINY_CONFIG, served
from safetensors.torch import load_file, save_file
from training_plan import training_plan, zero_json
from transformers import CONFIG_MAPPING, AutoConfig

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.config.settings import RenderSettings
from zerolora.errors import UserError
from zerolora.files import write_json
from zerolora.methods.registry import TRAINABLE
from zerolora.model.architecture import auto_class
from zerolora.probe.meta_trial import check
from zerolora.train.base_model import load as load_base
from zerolora.train.engines.ddp import DDP

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TOWER = TEXT | {"image_size": 28, "patch_size": 14}
STATS = {"longest_packed_row": 100, "most_supervised": 50, "train_packed_rows": 9, "train_tokens": 700}
STATS |= {"train_supervised_tokens": 300, "train_mean_row_of_a_token": 80, "validation_packed_rows": 3}
STATS |= {"validation_supervised_tokens": 30}
STATS |= {"train_rows": 9, "train_common_prefix": 0}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a tiny model as fetch does: settings in models/, weights in weights/."""

    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        torch.manual_seed(0)
        sizes: dict[str, Any] = TEXT | EXPERTS
        config = CONFIG_MAPPING[family](
            **(sizes if family != "gemma3" else {"text_config": sizes, "vision_config": TOWER})
        )
        model = auto_class(config).from_config(config)
        model.save_pretrained(folder / "weights")
        (folder / "models").mkdir()
        (folder / "models/config.json").write_bytes((folder / "weights/config.json").read_bytes())
        write_json(folder / "models/manifest.json", {"source": {"source": "hub"}})
        return folder

    return make


def run_of(folder: Path, **train: Any) -> dict[str, Any]:
    """Return the resolved settings of a run."""
    config = json.loads(json.dumps(TINY_CONFIG))
    config["train"] |= train
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    run: dict[str, Any] = resolve(load(folder / "config.yaml")).model_dump(mode="json")["runs"]["default"]
    return run


def rendered(folder: Path, *options: str, **train: Any) -> subprocess.CompletedProcess[str]:
    """Estimate a run, and render it with these options."""
    run = run_of(folder, **train)
    write_json(folder / "packing/stats.json", {"packing": False, **STATS})
    estimate = ["--model", str(folder / "models"), "--packing", str(folder / "packing")]
    estimate += ["--output", str(folder / "e.json"), "--settings", json.dumps(run["estimate"])]
    estimated = served("zerolora", "stage", "estimate", *estimate)
    assert estimated.returncode == 0, estimated.stderr
    paths = ["--estimate", str(folder / "e.json"), "--output", str(folder / "z.json"), "--reasons", str(folder / "r")]
    return served("zerolora", "stage", "render", "--settings", json.dumps(run["render"]), *paths, *options)


def gate(folder: Path) -> list[str]:
    return ["--model", str(folder / "models"), "--weights", str(folder / "weights")]


def configured(folder: Path, **changed: Any) -> None:
    config = folder / "models/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changed))


def with_one_layer_more(folder: Path) -> None:
    """As if a file of weights were missing."""
    configured(folder, num_hidden_layers=3, layer_types=None)


def in_four_bits(folder: Path) -> None:
    """As in gpt-oss: experts as mxfp4 blocks and scales."""
    path = folder / "weights/model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.zeros(experts, outputs, inputs // 32, 16, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.zeros(experts, outputs, inputs // 32, dtype=torch.uint8)
    save_file(tensors, path, {"format": "pt"})


def quantized(folder: Path) -> None:
    """As bitsandbytes stores nf4: two numbers a byte, and scales."""
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    configured(folder, quantization_config=quantization)
    path = folder / "weights/model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        tensors[name] = torch.zeros(tensors[name].numel() // 2, 1, dtype=torch.uint8)
        tensors[f"{name}.absmax"] = torch.ones(4)
    save_file(tensors, path, {"format": "pt"})


def in_eight_bits(folder: Path) -> None:
    """As fp8 is stored, without a word in the config."""
    path = folder / "weights/model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, path, {"format": "pt"})


def with_another_head(folder: Path) -> None:
    """As if the head had been trained separately."""
    configured(folder, tie_word_embeddings=True)


def untouched(folder: Path) -> None:
    """The model as it was saved."""


REFUSED: dict[str, tuple[str, Callable[[Path], None], dict[str, Any], str]] = {
    "a regular expression of whole blocks": (
        "llama",
        untouched,
        {"lora": {"targets": r".*self_attn.*"}},
        "train.lora.targets '.*self_attn.*' does not fit the model (Target module LlamaAttention(",
    ),
    "a regular expression of norms": (
        "qwen3",
        untouched,
        {"lora": {"targets": r".*(q_proj|q_norm)"}},
        "train.lora.targets '.*(q_proj|q_norm)' does not fit the model (Target module Qwen3RMSNorm(",
    ),
    "missing weights": (
        "llama",
        with_one_layer_more,
        {},
        "its files hold no model.layers.2.mlp.down_proj.weight, which would be trained and could not be merged",
    ),
    "experts in mxfp4": (
        "gpt_oss",
        in_four_bits,
        {"attention": "eager", "lora": {"targets": ["experts.gate_up_proj"]}},
        "its files hold no model.layers.0.mlp.experts.gate_up_proj, which would be trained and could not be merged",
    ),
    "weights in nf4": (
        "llama",
        quantized,
        {},
        "train.method is lora, and the base model is stored in 4 bits (nf4); set method: qlora, or fetch",
    ),
    "a merge into weights in nf4": (
        "llama",
        quantized,
        {"method": "qlora", "quantization": {"double": False}},
        "merge.enabled: the base model is stored in 4 bits (nf4), to which nothing can be added; set merge.enabled:",
    ),
    "two different weights in the place of a shared one": (
        "llama",
        with_another_head,
        {},
        "tie_word_embeddings is true, but lm_head.weight and model.embed_tokens.weight differ in the files; set",
    ),
    "weights in fp8": (
        "llama",
        in_eight_bits,
        {},
        "model.layers.0.self_attn.q_proj.weight is stored as F8_E4M3, codes of a quantized weight, to which nothing",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unmergeable_model_is_refused(case: str, model_of: Callable[[str], Path]) -> None:
    """Without weights, the same run is rendered."""
    family, change, train, said = REFUSED[case]
    folder = model_of(family)
    change(folder)
    assert rendered(folder, **train).returncode == 0
    (folder / "z.json").unlink()
    refused = rendered(folder, *gate(folder), **train)
    assert refused.returncode == 2, refused.stderr
    (line,) = refused.stderr.splitlines()
    assert line.startswith("zerolora: ")
    assert said in line
    assert not (folder / "z.json").exists()


@pytest.mark.parametrize(
    ("family", "refused", "message"),
    [
        (
            "vaultgemma",
            "a vaultgemma has no flash attention; use eager",
            "flash, which does not support the softcap",
        ),
        (
            "gptj",
            "a gptj has no flash attention; use eager",
            "flash, but transformers' GPTJForCausalLM has its attention built in; set attention: eager",
        ),
        (
            "llama4_text",
            "a llama4_text has no flash attention; use sdpa or eager",
            "flash, but transformers' Llama4ForCausalLM needs a mask for its attention; set attention: sdpa or eager",
        ),
    ],
)
def test_unsupported_attention_is_refused(
    family: str, refused: str, message: str, model_of: Callable[[str], Path]
) -> None:
    """By render without weights, by its trial on shapes, and by training before it reads a weight."""
    folder = model_of(family)
    rejected = rendered(folder, attention="flash")
    assert rejected.returncode == 2
    assert refused in rejected.stderr
    settings = RenderSettings.model_validate(run_of(folder, attention="flash")["render"])
    with pytest.raises(UserError, match=re.escape(message)):
        check(settings, "flash", folder / "models", folder / "weights")
    if family == "vaultgemma":  # which training refuses only when it tests rows
        return
    for path in (folder / "weights").glob("*.safetensors"):
        path.unlink()
    with pytest.raises(UserError, match=re.escape(message)):
        plan = training_plan(attention="flash")
        load_base(folder / "weights", plan, zero_json(plan, stage=0), DDP, torch.device("cpu"))


PASSED = [
    *((family, "lora") for family in ("llama", "mixtral", "qwen3_moe", "gpt_oss", "gemma3")),
    *(("llama", method) for method in TRAINABLE if method != "lora"),
    ("qwen3_moe", "full"),
]


@pytest.mark.parametrize(("family", "method"), PASSED)
def test_trainable_model_is_rendered(family: str, method: str, model_of: Callable[[str], Path]) -> None:
    folder = model_of(family)
    passed = rendered(folder, *gate(folder), method=method)
    assert passed.returncode == 0, passed.stderr
    assert "Traceback" not in passed.stderr


def test_tied_weight_stored_twice_is_rendered(model_of: Callable[[str], Path]) -> None:
    folder = model_of("llama")
    with_another_head(folder)
    path = folder / "weights/model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path, {"format": "pt"})
    passed = rendered(folder, *gate(folder), method="full")
    assert passed.returncode == 0, passed.stderr


def test_missing_weights_skip_the_check_of_names(model_of: Callable[[str], Path]) -> None:
    """As on a machine with only the files that DVC tracks."""
    folder = model_of("llama")
    (folder / "weights/model.safetensors").unlink()
    passed = rendered(folder, *gate(folder))
    assert passed.returncode == 0, passed.stderr
    assert "no weights here, so the names that merge updates are not checked" in passed.stderr


def starting_adapter(folder: Path, **changed: Any) -> Path:
    """Write an adapter that a run of `run_of` can start from, except for `changed` in its LoraConfig."""
    from peft import LoraConfig, get_peft_model

    source = {"source": "directory", "path": str(folder / "weights"), "license": "MIT"}
    write_json(folder / "models/manifest.json", {"source": source, "files": {}})
    write_json(folder / "data/manifest.json", {"added_tokens": [], "files": {}})
    base = auto_class(AutoConfig.from_pretrained(folder / "weights")).from_pretrained(folder / "weights")
    options: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "init_lora_weights": False}
    options |= changed
    get_peft_model(base, LoraConfig(**options)).save_pretrained(str(folder / "start"))
    return folder / "start"


STARTS: dict[str, tuple[dict[str, Any], Callable[[Path], Any], str]] = {
    "another rank": ({"r": 2}, untouched, "adapter_config.json: r is 2, and this run's is 4; set train.lora.r as"),
    "other targets": (
        {"target_modules": ["q_proj"]},
        untouched,
        "k_proj.lora_A.weight is missing (and 23 more such); use the method, r and targets of that adapter",
    ),
    "saved over by peft": (
        {},
        lambda start: write_json(
            start / "manifest.json", {"files": {"adapter_model.safetensors": {"sha256": "0" * 64, "bytes": 1}}}
        ),
        "adapter_model.safetensors: is not the file that",
    ),
    "not a number": (
        {},
        lambda start: save_file(
            {
                name: tensor * (math.nan if "layers.1.mlp.up_proj.lora_B" in name else 1)
                for name, tensor in load_file(start / "adapter_model.safetensors").items()
            },
            start / "adapter_model.safetensors",
        ),
        "layers.1.mlp.up_proj.lora_B.weight contains numbers that are not finite",
    ),
    "another base": (
        {},
        lambda start: write_json(
            start / "manifest.json",
            {"base_model": {"name": "some/model", "revision": None, "weights": "2" * 64}, "files": {}},
        ),
        "base_model is some/model (weights 222222222222), and this base is",
    ),
    "added tokens": (
        {},
        lambda start: write_json(start / "tokens.json", [{"token": "<note>", "id": 64, "special": False}]),
        "was trained with other tokens than the data adds; list '<note>' in add_special_tokens and add_tokens",
    ),
}


@pytest.mark.parametrize("case", [None, *STARTS])
def test_unsuitable_starting_adapter_is_refused(case: str | None, model_of: Callable[[str], Path]) -> None:
    changed, change, said = STARTS[case] if case else ({}, untouched, "")
    folder = model_of("llama")
    start = starting_adapter(folder, **changed)
    change(start)
    if case is None:
        begin(folder)
        return
    with pytest.raises(UserError, match=re.escape(said)) as raised:
        begin(folder)
    assert str(raised.value).startswith("train.from_adapter: ")
    assert "\n" not in str(raised.value)


def begin(folder: Path, **train: Any) -> None:
    """Check a run that starts from the adapter of `starting_adapter`."""
    settings = run_of(folder, **train)["render"] | {"from_adapter": str(folder / "start")}
    check(RenderSettings.model_validate(settings), "flash", folder / "models", folder / "weights", folder / "data")


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_base_copy_in_starting_adapter_must_match(name: str, model_of: Callable[[str], Path]) -> None:
    """peft saves copies of adapted embeddings and heads."""
    folder = model_of("llama")
    path = starting_adapter(folder, target_modules=["q_proj", name]) / "adapter_model.safetensors"
    tensors = load_file(path)
    (copy,) = (each for each in tensors if each.endswith(f"{name}.base_layer.weight"))
    lora = {"lora": {"r": 4, "alpha": 16, "targets": ["q_proj", name]}}
    begin(folder, **lora)
    for kind in (torch.bfloat16, torch.float32):
        save_file(tensors | {copy: tensors[copy].to(kind)}, path)
        begin(folder, **lora)
    save_file(tensors | {copy: tensors[copy] + 1}, path)
    said = rf"train.from_adapter: .*{name}.base_layer.weight differs from .*{name}.weight of the base, from which train"
    with pytest.raises(UserError, match=said):
        begin(folder, **lora)
