"""A base whose files do not match the weights of its class is refused in one line before training."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import refusal
from safetensors.torch import load_file, save_file
from test_shapes import CASES, OTHERS, SMALL, T5
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from zerolora.compat.transformers_patches import quantizable_paths
from zerolora.config.settings import FetchDirectory
from zerolora.fetch.models import fetch
from zerolora.fetch.restore import restore
from zerolora.merge.user_merge import merge_by_hand
from zerolora.model.architecture import auto_class, built_on_meta, config_of
from zerolora.model.base_check import check_base, check_weights
from zerolora.model.manifest import count_parameters, located, model_files
from zerolora.model.weight_files import weight_files

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {config["model_type"]: config for config in reversed(CASES + OTHERS)} | {
    name: SMALL | EXPERTS | {"model_type": name} for name in ("qwen3_moe", "olmoe", "phimoe", "granitemoe")
}
INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def saved(config: dict[str, Any], directory: Path) -> dict[str, torch.Tensor]:
    """Write a model with random weights and return the stored tensors."""
    settings = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    torch.manual_seed(0)
    auto_class(settings).from_config(settings).save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def store(directory: Path, weights: dict[str, torch.Tensor], name: str = "model.safetensors") -> None:
    save_file(weights, directory / name, {"format": "pt"})


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(directory: Path, check: Callable[[Path], Any] = check_base) -> str:
    line = refusal(check, directory)
    assert len(line) < 700, line
    return line


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def shards(model: Path) -> Path:
    loaded = AutoModelForCausalLM.from_pretrained(model)
    (model / "model.safetensors").unlink()
    loaded.save_pretrained(model, max_shard_size="50KB")
    assert len(list(model.glob("*.safetensors"))) == 2
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_and_no_kind_of_tensor_may_be_missing(tmp_path: Path, family: str) -> None:
    """Families with many kinds of tensors check every third kind, since each check builds the class."""
    weights = saved(FAMILIES[family], tmp_path)
    check_weights(tmp_path)
    kinds = {re.sub(r"\d+", "{}", name): name for name in weights}
    for name in list(kinds.values())[:: 3 if len(kinds) > 20 else 1]:
        store(tmp_path, {other: tensor for other, tensor in weights.items() if other != name})
        line = refused(tmp_path, check_weights)
        assert "drawn at random" in line or "in the files" in line or "cannot be made of" in line, line
    name = next(iter(kinds.values()))
    tensor = weights[name]
    store(tmp_path, weights | {"model.surplus.weight": torch.ones(3)})
    assert "has no such weights" in refused(tmp_path, check_weights)
    store(tmp_path, weights | {name: torch.zeros(len(tensor) + 1, *tensor.shape[1:])})
    assert "in the files" in refused(tmp_path, check_weights)
    store(tmp_path, weights | {name: tensor.to(torch.float8_e4m3fn)})
    assert "is stored as F8_E4M3" in refused(tmp_path, check_weights)
    store(tmp_path, {other: each.to(torch.bfloat16) for other, each in weights.items()})
    check_weights(tmp_path)


def test_old_tensor_names_pass(tmp_path: Path) -> None:
    config = FAMILIES["gpt2"]
    weights = saved(config, tmp_path)
    old = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(3)}
    store(tmp_path, old | masks)
    check_weights(tmp_path)
    weights = saved(SMALL | {"model_type": "llama"}, tmp_path)
    store(tmp_path, weights | {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(3)})
    check_weights(tmp_path)
    store(tmp_path, weights | {"norm.weight": weights["model.norm.weight"].clone()})
    assert "'model.norm.weight' and 'norm.weight' are both read as model.norm.weight" in refused(
        tmp_path, check_weights
    )


GPT = {"vocab_size": 70, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "n_embd": 32, "n_layer": 2, "n_head": 4}
MASKS: dict[str, dict[str, torch.Tensor]] = {
    "gpt_neo": {"attn.attention.bias": torch.ones(1, 1, 8, 8), "attn.attention.masked_bias": torch.tensor(-1e9)},
    "gptj": {"attn.bias": torch.ones(1, 1, 8, 8), "attn.masked_bias": torch.tensor(-1e9)},
    "gpt2": {"attn.bias": torch.ones(1, 1, 8, 8), "attn.masked_bias": torch.tensor(-1e4)},
    "gpt_bigcode": {"attn.bias": torch.ones(8, 8)},
}


@pytest.mark.parametrize("family", MASKS)
def test_obsolete_mask_buffers_pass(family: str, tmp_path: Path) -> None:
    local = {"attention_types": [[["global", "local"], 1]]} if family == "gpt_neo" else {}
    weights = saved({"model_type": family, **GPT, **({"rotary_dim": 4} if family == "gptj" else {}), **local}, tmp_path)
    masks = {f"transformer.h.{n}.{name}": each.clone() for n in (0, 1) for name, each in MASKS[family].items()}
    store(tmp_path, weights | masks)
    check_weights(tmp_path)
    for shape in ((3,), (8, 7), (2, 8, 8)):
        store(tmp_path, weights | {"transformer.h.0.attn.masked_bias": torch.ones(shape)})
        assert "contain 'transformer.h.0.attn.masked_bias', and a GPT" in refused(tmp_path, check_weights)


def test_tied_model_may_store_head_embedding_or_equal_copies(tmp_path: Path) -> None:
    weights = saved(SMALL | {"model_type": "llama", "tie_word_embeddings": True}, tmp_path)
    embedding = weights.pop("model.embed_tokens.weight")
    store(tmp_path, weights | {"lm_head.weight": embedding})
    check_weights(tmp_path)
    store(tmp_path, weights | {"lm_head.weight": embedding, "model.embed_tokens.weight": embedding.clone()})
    check_weights(tmp_path)
    store(tmp_path, weights | {"lm_head.weight": embedding, "model.embed_tokens.weight": embedding + 1})
    assert "tie_word_embeddings is true, but lm_head.weight and model.embed_tokens.weight differ" in refused(
        tmp_path, check_weights
    )
    store(tmp_path, weights)
    assert "lack 'lm_head.weight', 'model.embed_tokens.weight' of a Llama" in refused(tmp_path, check_weights)


def test_missing_untied_head_is_refused(model: Path) -> None:
    edit(model / "config.json", tie_word_embeddings=False)
    line = refused(model)
    assert line == (
        f"{model}: its files lack 'lm_head.weight' of a LlamaForCausalLM, which would be drawn at random; "
        "correct config.json, or fetch the whole model"
    )


@pytest.mark.parametrize("rows", [200, 400])
def test_vocab_size_must_match_the_embedding_rows(model: Path, rows: int) -> None:
    edit(model / "config.json", vocab_size=rows)
    assert f"config.json: vocab_size is {rows}, but model.embed_tokens.weight has 259 rows" in refused(model)


def test_surplus_layers_are_refused(model: Path) -> None:
    edit(model / "config.json", num_hidden_layers=1)
    assert re.search(
        r"contain 'model.layers.1.*' and 6 more, and a LlamaForCausalLM .* no such weights", refused(model)
    )


def beside(directory: Path, name: str) -> None:
    store(directory, {"a": torch.ones(2)}, name)


CONTRADICTIONS: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a second set": ("shards", lambda path: beside(path, "model.safetensors"), "has two sets of weights"),
    "a shard of another set": ("shards", lambda path: beside(path, "model-00003-of-00003.safetensors"), "not name"),
    "an absent shard": ("shards", lambda path: (path / TWO).unlink(), f"names '{TWO}', and there is no such file"),
    "no index": ("shards", lambda path: (path / INDEX).unlink(), f"has '{ONE}', '{TWO}' without {INDEX}"),
    "an adapter's weights": ("model", lambda path: beside(path, "adapter_model.safetensors"), "beside model.safeten"),
    "other weights": (
        "model",
        lambda path: beside(path, "consolidated.safetensors"),
        "'consolidated.safetensors' besid",
    ),
    "another name": (
        "model",
        lambda path: (path / "model.safetensors").rename(path / "weights.safetensors"),
        "rename a single file to model.safetensors",
    ),
    "an adapter": (
        "model",
        lambda path: (path / "adapter_config.json").write_text("{}"),
        "transformers would apply it",
    ),
    "a file that config.json names": (
        "model",
        lambda path: edit(path / "config.json", transformers_weights="other.safetensors"),
        "transformers_weights is 'other.safetensors'",
    ),
    "an index of other tensors": (
        "shards",
        lambda path: edit(path / INDEX, weight_map={"x": ONE, "model.norm.weight": TWO, "y": TWO}),
        "names 'x', 'y' in files that do not contain it",
    ),
    "an index of nothing": ("shards", lambda path: edit(path / INDEX, weight_map=[]), "weight_map is"),
    "an index that leads out": (
        "shards",
        lambda path: edit(path / INDEX, weight_map={"x": "../model.safetensors"}),
        "expected the name of a file beside it",
    ),
    "one tensor twice": (
        "shards",
        lambda path: store(path, load_file(path / ONE) | {"model.norm.weight": torch.ones(32)}, ONE),
        f"'model.norm.weight' is in {ONE} and in {TWO}",
    ),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_contradicting_files_are_refused(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> None:
    """The same line comes from fetch and from a manual merge, and nothing is written."""
    fixture, spoil, said = CONTRADICTIONS[kind]
    directory: Path = request.getfixturevalue(fixture)
    spoil(directory)
    assert said in refused(directory)
    fetched = FetchDirectory(path=str(directory), license="MIT")
    assert said in refused(directory, lambda path: fetch(fetched, tmp_path / "weights", tmp_path / "out"))
    assert said in refused(directory, lambda path: merge_by_hand(path, [path], [], tmp_path / "merged"))
    assert not (tmp_path / "out").exists() and not (tmp_path / "merged").exists()


def test_unread_weight_file_is_ignored(shards: Path, tiny_model: Path) -> None:
    """As consolidated.safetensors beside the shards of Mistral's models."""
    beside(shards, "consolidated.safetensors")
    check_base(shards)
    assert [path.name for path in weight_files(shards)] == [ONE, TWO]
    assert count_parameters(shards) == count_parameters(tiny_model)
    assert not [path for path in model_files(shards) if path.name == "consolidated.safetensors"]


def test_weights_added_after_fetch_are_refused(model: Path, shards: Path, tmp_path: Path) -> None:
    fetch(FetchDirectory(path=str(model), license="MIT"), tmp_path / "weights", tmp_path / "models/tiny")
    restore(tmp_path / "models/tiny", tmp_path / "weights/tiny")
    stamp = tmp_path / "weights/tiny.json"
    assert located(stamp) == model
    beside(model, "model.safetensors")
    assert "has two sets of weights" in refused(stamp, located)
    (model / "model.safetensors").unlink()
    (model / "adapter_config.json").write_text("{}")
    assert "transformers would apply it" in refused(stamp, located)


def remove_tokenizer(directory: Path) -> None:
    for path in directory.glob("tokenizer*"):
        path.unlink()


SETTINGS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "unknown rope": (
        lambda path: edit(path / "config.json", rope_parameters={"rope_type": "nope", "rope_theta": 1e4}),
        "config.json: a llama cannot be built from it",
    ),
    "unknown activation": (
        lambda path: edit(path / "config.json", hidden_act="nope"),
        "config.json: a llama cannot be built from it",
    ),
    "unknown model": (lambda path: edit(path / "config.json", model_type="nope"), "no class for"),
    "an encoder-decoder": (
        lambda path: (path / "config.json").write_text(json.dumps(T5)),
        "which transformers has no decoder for",
    ),
    "a BOM": (
        lambda path: (path / "config.json").write_text("\ufeff" + (path / "config.json").read_text()),
        "begins with a byte order mark",
    ),
    "no tokenizer": (remove_tokenizer, "has no tokenizer files"),
    "no tokenizer.json": (lambda path: (path / "tokenizer.json").unlink(), "is not a tokenizer that transformers read"),
    "a broken tokenizer": (lambda path: (path / "tokenizer.json").write_text("{"), "tokenizer.json:"),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_config_or_tokenizer_that_cannot_be_built_is_refused(model: Path, kind: str) -> None:
    spoil, said = SETTINGS[kind]
    spoil(model)
    assert said in refused(model)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "falcon", "mixtral", "phimoe", "llama4_text"])
def test_quantizable_modules_are_those_of_bitsandbytes(tmp_path: Path, family: str) -> None:
    """The routers of phimoe and llama4, subclasses of Linear, are skipped; Falcon's subclass is not."""
    import torch
    from transformers import BitsAndBytesConfig

    from zerolora.compat import bitsandbytes_patches
    from zerolora.train.base_model import read

    bitsandbytes_patches.load()
    from bitsandbytes.nn.modules import Linear4bit

    llama4 = SMALL | EXPERTS | {"model_type": "llama4_text", "head_dim": 8, "intermediate_size_mlp": 48}
    config = (FAMILIES | {"llama4_text": llama4})[family]
    saved(config, tmp_path)
    loaded = read(tmp_path, torch.float32, "eager", torch.device("cpu"), BitsAndBytesConfig(load_in_4bit=True))
    quantized = sorted(path for path, module in loaded.named_modules() if isinstance(module, Linear4bit))
    assert sorted(quantizable_paths(built_on_meta(config_of(tmp_path)))) == quantized
    assert sorted(quantizable_paths(loaded)) == quantized
    routers = [path for path in quantized if path.endswith(("router", "gate"))]
    assert not routers
    if family == "falcon":
        linear = [path for path, module in loaded.named_modules() if isinstance(module, torch.nn.Linear)]
        assert sorted([*quantized, "lm_head"]) == sorted(linear)
