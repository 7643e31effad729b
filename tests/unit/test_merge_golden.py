"""Merged weights are bit for bit peft's in fp32, rounded once in bf16; untrained weights are the base's."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import refusal
from safetensors.torch import load_file, save_file

from zerolora.merge import stream
from zerolora.merge.user_merge import merge_by_hand
from zerolora.methods import updates
from zerolora.model.architecture import auto_class
from zerolora.tensor_file import read_header

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 70, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# Names of more than ten experts are in another order than their numbers.
EXPERTS = {"num_experts": 12, "num_local_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": TEXT | {"tie_word_embeddings": True},
    "untied": TEXT | {"attention_bias": True, "tie_word_embeddings": False},
    "gpt2": {"vocab_size": 70, "n_embd": 32, "n_layer": 2, "n_head": 2, "tie_word_embeddings": False},
    "qwen3_moe": TEXT | EXPERTS,
    "mixtral": TEXT | EXPERTS,
    "zamba": TEXT | {"num_hidden_layers": 8, "attn_layer_offset": 1, "attn_layer_period": 2, "n_mamba_heads": 2},
    "gemma3": {"text_config": TEXT, "vision_config": TOWER | {"num_hidden_layers": 2}},
}
ALL = {"target_modules": "all-linear"}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lora": ("llama", "LORA", ALL),
    "rslora": ("llama", "LORA", ALL | {"use_rslora": True}),
    "dora": ("llama", "LORA", ALL | {"use_dora": True}),
    "patterns": ("llama", "LORA", ALL | {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"layers.1.*up_proj": 3}}),
    "saved": ("untied", "LORA", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "biases": ("untied", "LORA", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "embedding": ("untied", "LORA", {"target_modules": ["embed_tokens", "lm_head", "o_proj"]}),
    "rows": ("llama", "LORA", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 69]}),
    "vera": ("untied", "VERA", {"r": 8, "target_modules": ["q_proj", "k_proj", "down_proj"]}),
    "conv1d vera": ("gpt2", "VERA", {"r": 8, "target_modules": ["c_attn", "mlp.c_proj"]}),
    "ia3": ("untied", "IA3", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "conv1d": ("gpt2", "LORA", {"target_modules": ["c_attn", "c_proj", "c_fc", "lm_head"]}),
    "conv1d dora": ("gpt2", "LORA", {"target_modules": ["c_attn", "c_fc", "lm_head"], "use_dora": True}),
    "conv1d ia3": (
        "gpt2",
        "IA3",
        {"target_modules": ["c_attn", "mlp.c_proj", "lm_head"], "feedforward_modules": ["mlp.c_proj"]},
    ),
    "experts": ("qwen3_moe", "LORA", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}),
    "vision": ("gemma3", "LORA", {"target_modules": r".*language_model.*(q_proj|down_proj)"}),
}


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[[str, torch.dtype], Path]:
    """Return a function that writes a sharded tiny model of a family, with tokenizer files."""
    from transformers import CONFIG_MAPPING

    made: dict[tuple[str, torch.dtype], Path] = {}

    def make(family: str, dtype: torch.dtype) -> Path:
        if (family, dtype) not in made:
            folder = made[family, dtype] = tmp_path_factory.mktemp(family)
            torch.manual_seed(0)
            config = CONFIG_MAPPING["llama" if family == "untied" else family](**FAMILIES[family])
            model = auto_class(config).from_config(config).to(dtype)
            model.save_pretrained(folder, max_shard_size="60KB")
            for path in tiny_model.glob("*token*"):
                shutil.copy(path, folder)
        return made[family, dtype]

    return make


def adapter_of(base: Path, kind: str, options: dict[str, Any], folder: Path, seed: int = 1) -> Path:
    """Write a random adapter with peft."""
    import peft

    torch.manual_seed(seed)
    kinds: dict[str, Any] = {"LORA": peft.LoraConfig, "IA3": peft.IA3Config, "VERA": peft.VeraConfig}
    config = kinds[kind](**({"r": 4, "lora_alpha": 12} if kind == "LORA" else {}), **options)
    wrapped = peft.get_peft_model(loaded(base, torch.float32), config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad:
                # Magnitudes and (IA)³'s vectors scale: stay near their values.
                parameter.add_(torch.randn_like(parameter) * (0.02 if "magnitude" in name or "ia3" in name else 0.1))
    wrapped.save_pretrained(str(folder))
    return folder


def loaded(directory: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig

    return auto_class(AutoConfig.from_pretrained(directory)).from_pretrained(directory, dtype=dtype)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("whole", [True, False], ids=["read once", "read in parts"])
def test_stored_factors_give_the_same_product(whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small factors are read once for all blocks of rows, large ones in parts."""
    torch.manual_seed(0)
    factors = {"A": torch.randn(4, 24), "B": torch.randn(48, 4)}
    save_file(factors, tmp_path / "factors.safetensors")
    stored = read_header(tmp_path / "factors.safetensors").tensors
    monkeypatch.setattr(updates, "SMALL", factors["B"].nbytes if whole else factors["B"].nbytes - 1)
    actual, expected = torch.ones(48, 24), torch.ones(48, 24)
    for first in (0, 16, 32):
        rows = slice(first, first + 16)
        updates.Product("weight", dict(stored), 0.3, transposed=False).apply(actual[rows], first)
        updates.Product("weight", dict(factors), 0.3, transposed=False).apply(expected[rows], first)
    assert torch.equal(actual, expected)
    # Absolute tolerance: near zero, rounding of the four terms dominates.
    assert torch.allclose(actual, 1 + 0.3 * factors["B"] @ factors["A"], atol=1e-6)


@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
@pytest.mark.parametrize("case", CASES)
def test_merge_matches_peft_bit_for_bit(
    case: str, blocks: bool, base_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each method, module and family, in one block per tensor and in the smallest blocks."""
    from peft import PeftModel

    if blocks:
        monkeypatch.setattr(stream, "SPAN", 2048)
        monkeypatch.setattr(stream, "BLOCK", 256)
        monkeypatch.setattr(stream, "COPIED", 1000)
    family, kind, options = CASES[case]
    base = base_of(family, torch.float32)
    adapter = adapter_of(base, kind, options, tmp_path / "adapter")
    merge_by_hand(base, [adapter], [], tmp_path / "merged")
    peft_model = PeftModel.from_pretrained(loaded(base, torch.float32), str(adapter))
    peft_model.merge_and_unload().save_pretrained(tmp_path / "theirs")
    ours, theirs, before = weights(tmp_path / "merged"), weights(tmp_path / "theirs"), weights(base)
    assert ours.keys() == before.keys()
    changed = [name for name in before if not torch.equal(theirs[name], before[name])]
    assert changed
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    # Same files, same layout.
    for path in base.iterdir():
        if path.suffix == ".safetensors":
            assert read_header(path).header == read_header(tmp_path / "merged" / path.name).header
        else:
            assert path.read_bytes() == (tmp_path / "merged" / path.name).read_bytes()


def test_layers_that_share_weights_have_their_own_after_a_merge(
    base_of: Callable[[str, torch.dtype], Path], tmp_path: Path
) -> None:
    """Zamba's layers share a transformer, to which each has an adapter of its own; its norms and the head, which no
    adapter changes, are there for each, too."""
    from peft import PeftModel

    base = base_of("zamba", torch.float32)
    targets = {"target_modules": r".*shared_transf.*(q_proj|down_proj)"}
    adapter = adapter_of(base, "LORA", targets, tmp_path / "adapter")
    assert sum(name.endswith("q_proj.lora_A.weight") for name in weights(adapter)) == 3
    merge_by_hand(base, [adapter], [], tmp_path / "merged")
    theirs = PeftModel.from_pretrained(loaded(base, torch.float32), str(adapter))
    merged = loaded(tmp_path / "merged", torch.float32)
    tokens = torch.arange(1, 30)[None]
    torch.testing.assert_close(merged(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["lora", "dora", "saved", "ia3", "experts"])
def test_bf16_weights_are_rounded_once(case: str, base_of: Callable[..., Path], tmp_path: Path) -> None:
    from peft import PeftModel

    family, kind, options = CASES[case]
    base = base_of(family, torch.bfloat16)
    adapter = adapter_of(base, kind, options, tmp_path / "adapter")
    merge_by_hand(base, [adapter], [], tmp_path / "merged")
    exact = PeftModel.from_pretrained(loaded(base, torch.float32), str(adapter)).merge_and_unload()
    exact.save_pretrained(tmp_path / "exact")
    ours, exactly, before = weights(tmp_path / "merged"), weights(tmp_path / "exact"), weights(base)
    for name, tensor in ours.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, exactly[name].to(torch.bfloat16)), name
    assert any(not torch.equal(ours[name], before[name]) for name in ours)


def test_several_adapters_add_their_weighted_updates(base_of: Callable[..., Path], tmp_path: Path) -> None:
    """As add_weighted_adapter with combination_type "cat"; peft's "linear" is not the sum."""
    from peft import PeftModel

    base = base_of("llama", torch.float32)
    one = adapter_of(base, "LORA", ALL, tmp_path / "one")
    other = adapter_of(base, "LORA", ALL | {"use_rslora": True, "rank_pattern": {"q_proj": 6}}, tmp_path / "other", 2)
    merge_by_hand(base, [one, other], [0.7, -0.3], tmp_path / "merged")
    model: Any = PeftModel.from_pretrained(loaded(base, torch.float32), str(one), adapter_name="one")
    model.load_adapter(str(other), adapter_name="other")
    model.add_weighted_adapter(["one", "other"], [0.7, -0.3], "sum", combination_type="cat")
    model.set_adapter("sum")
    model.merge_and_unload().save_pretrained(tmp_path / "theirs")
    ours, theirs = weights(tmp_path / "merged"), weights(tmp_path / "theirs")
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_resized_header_is_valid_safetensors(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(3, 4), "a": torch.zeros(2, dtype=torch.bfloat16), "é": torch.tensor(5)}
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt", "näme": '"'})
    before = read_header(tmp_path / "x.safetensors")
    grown = before.resized(tmp_path / "y.safetensors", {"b": (5, 4)})
    assert len(grown.header) % 8 == 0
    body = {name: each.read().reshape(-1).view(torch.uint8).numpy().tobytes() for name, each in before.tensors.items()}
    body["b"] = torch.full((5, 4), 7.0).numpy().tobytes()
    (tmp_path / "y.safetensors").write_bytes(grown.header + b"".join(body[name] for name in grown.tensors))
    assert (tmp_path / "y.safetensors").stat().st_size == grown.nbytes
    actual = load_file(tmp_path / "y.safetensors")
    assert torch.equal(actual.pop("b"), torch.full((5, 4), 7.0))
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in actual.items())
    assert read_header(tmp_path / "y.safetensors").metadata == before.metadata
    assert before.resized(tmp_path / "z", {}).header == before.header


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33, 100, 4096])
@pytest.mark.parametrize("width", [1, 7, 300, 10**6])
def test_spans_cover_all_rows_without_thin_blocks(rows: int, width: int) -> None:
    actual = stream.spans((rows, width), 4096)
    assert [row for first, last in actual for row in range(first, last)] == list(range(rows))
    assert len(actual) == 1 or min(last - first for first, last in actual) >= stream.THIN
    assert max(last - first for first, last in actual) <= max(2 * stream.THIN, math.ceil(4096 / width) + stream.THIN)


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "a long header": lambda data: (2**40).to_bytes(8, "little") + data[8:],
    "no JSON": lambda data: data[:8] + b"x" + data[9:],
    "a list": lambda data: (2).to_bytes(8, "little") + b"[]",
    "another shape": lambda data: data.replace(b"[3,4]", b"[4,4]"),
    "a hole": lambda data: data.replace(b"[0,48]", b"[1,48]"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_safetensors_is_one_line(case: str, tmp_path: Path) -> None:
    from zerolora.errors import UserError

    path = tmp_path / "x.safetensors"
    save_file({"b": torch.ones(3, 4)}, path)
    before = path.read_bytes()
    path.write_bytes(BROKEN[case](before))
    assert path.read_bytes() != before
    with pytest.raises(UserError, match=r"x\.safetensors:.*; bring the file here again"):
        read_header(path)


def test_index_decides_which_files_are_merged(base_of: Callable[..., Path], tmp_path: Path) -> None:
    """Some repositories store the same weights again in one file."""
    base = tmp_path / "base"
    shutil.copytree(base_of("llama", torch.float32), base)
    save_file({"tok_embeddings.weight": torch.ones(2, 2)}, base / "consolidated.safetensors")
    adapter = adapter_of(base, "LORA", ALL, tmp_path / "adapter")
    merge_by_hand(base, [adapter], [], tmp_path / "merged")
    index = json.loads((base / "model.safetensors.index.json").read_text())
    assert {path.name for path in (tmp_path / "merged").glob("*.safetensors")} == set(index["weight_map"].values())


LISTED = {"mixtral": ["w1", "w2", "w3", "gate"], "qwen3_moe": ["gate_proj", "up_proj", "down_proj", "gate"]}
"""Modules of experts and routers under transformers 4, which the files of the base still name so."""


def listed_adapter(base: Path, targets: list[str], folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Write a random adapter as peft saved it under transformers 4; return its tensors."""
    import peft

    torch.manual_seed(3)
    state = {}
    for name, tensor in weights(base).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            state[f"base_model.model.{module}.lora_A.weight"] = 0.1 * torch.randn(2, tensor.shape[1])
            state[f"base_model.model.{module}.lora_B.weight"] = 0.1 * torch.randn(tensor.shape[0], 2)
    folder.mkdir()
    settings: dict[str, Any] = {"r": 2, "lora_alpha": 6, "target_modules": targets, "task_type": "CAUSAL_LM"} | options
    peft.LoraConfig(**settings).save_pretrained(str(folder))
    save_file(state, folder / "adapter_model.safetensors")
    return state


@pytest.mark.parametrize("family", LISTED)
def test_experts_listed_one_by_one_are_merged_as_peft_reads_them(
    family: str, base_of: Callable[[str, torch.dtype], Path], tmp_path: Path
) -> None:
    from peft import PeftModel

    base = base_of(family, torch.float32)
    state = listed_adapter(base, [*LISTED[family], "q_proj"], tmp_path / "adapter")
    merge_by_hand(base, [tmp_path / "adapter"], [], tmp_path / "merged")
    actual = weights(tmp_path / "merged")
    for name, weight in weights(base).items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        change: Any = 0.0
        if f"{module}.lora_A.weight" in state:
            change = 3 * state[f"{module}.lora_B.weight"] @ state[f"{module}.lora_A.weight"]
        torch.testing.assert_close(actual[name], weight + change, rtol=1e-5, atol=1e-6, msg=name)
    theirs = PeftModel.from_pretrained(loaded(base, torch.float32), str(tmp_path / "adapter"))
    tokens = torch.arange(1, 30)[None]
    merged = loaded(tmp_path / "merged", torch.float32)
    torch.testing.assert_close(merged(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_half_of_a_joined_weight_is_refused_in_one_line(
    base_of: Callable[[str, torch.dtype], Path], tmp_path: Path
) -> None:
    base = base_of("mixtral", torch.float32)
    listed_adapter(base, ["w1"], tmp_path / "adapter")
    said = refusal(merge_by_hand, base, [tmp_path / "adapter"], [], tmp_path / "merged")
    assert "Cannot convert PEFT target(s) w1 without also targeting w3" in said
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    "own", [{"use_rslora": True}, {"alpha_pattern": {"w1": 32}}, {"rank_pattern": {"w3": 2, "w1": 3}}]
)
def test_experts_whose_scale_peft_would_change_are_refused(
    own: dict[str, Any], base_of: Callable[[str, torch.dtype], Path], tmp_path: Path
) -> None:
    base = base_of("mixtral", torch.float32)
    listed_adapter(base, LISTED["mixtral"], tmp_path / "adapter", **own)
    said = refusal(merge_by_hand, base, [tmp_path / "adapter"], [], tmp_path / "merged")
    assert "give it a scale that is lost where peft joins experts" in said


@pytest.mark.parametrize("damage", ["missing", "shape", "another model's"])
def test_experts_that_are_not_whole_are_refused(
    damage: str, base_of: Callable[[str, torch.dtype], Path], tmp_path: Path
) -> None:
    base = base_of("mixtral", torch.float32)
    state = listed_adapter(base, LISTED["mixtral"], tmp_path / "adapter")
    if damage == "missing":
        state = {name: tensor for name, tensor in state.items() if ".layers.1.block_sparse_moe.experts.2." not in name}
    elif damage == "shape":
        name = next(name for name in state if "experts.1.w2.lora_A" in name)
        state[name] = torch.randn(2, 7)
    else:
        state = {name.replace("block_sparse_moe.experts", "feed.parts"): tensor for name, tensor in state.items()}
    save_file(state, tmp_path / "adapter/adapter_model.safetensors")
    refusal(merge_by_hand, base, [tmp_path / "adapter"], [], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
