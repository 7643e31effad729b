"""Adapters written by peft pass the check and merge to peft's logits; any other content is refused in one line."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import refusal
from peft import IA3Config, LoraConfig, PeftModel, VeraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from zerolora import bounded
from zerolora.errors import UserError
from zerolora.evaluate.evaluated_models import load as evaluate
from zerolora.export.export import export
from zerolora.export.targets import TARGETS
from zerolora.export.targets.target import RunResult
from zerolora.log import LOGGER
from zerolora.merge.listed import listed_model
from zerolora.merge.user_merge import merge_by_hand
from zerolora.methods.adapter_config import check_expressions
from zerolora.methods.registry import check_published, of_directory
from zerolora.model.architecture import built_on_meta, config_of
from zerolora.tensor_file import read_header

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "vocab_size": 30}
Q = ["q_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "one module": {"target_modules": Q},
    "all-linear": {"target_modules": "all-linear"},
    "a regular expression": {"target_modules": r".*\.(q_proj|down_proj)"},
    "patterns": {
        "target_modules": ["q_proj", "up_proj"],
        "rank_pattern": {"up_proj": 4, r"layers\.1\..*q_proj": 1},
        "alpha_pattern": {"q_proj": 7},
    },
    "rslora": {"target_modules": Q, "use_rslora": True},
    "dora": {"target_modules": Q, "use_dora": True},
    "some layers": {"target_modules": Q, "layers_to_transform": [1]},
    "excluded": {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*layers\.0.*"},
    "norms saved": {"target_modules": Q, "modules_to_save": ["norm"]},
    "a block saved": {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["mlp"]},
    "biases": {"target_modules": Q, "bias": "all"},
    "a bias of the factors": {"target_modules": Q, "lora_bias": True},
    "a parameter": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "embedding, dora": {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding and head": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "embedding, tied": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "head, tied": {"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True},
    "saved embedding": {"target_modules": Q, "modules_to_save": ["embed_tokens"]},
    "saved head": {"target_modules": Q, "modules_to_save": ["lm_head"]},
    "saved embedding and head": {"target_modules": Q, "modules_to_save": ["embed_tokens", "lm_head"]},
    "saved embedding, tied": {"target_modules": Q, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "saved head, tied": {"target_modules": Q, "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "saved embedding, adapted head": {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]},
    "rows": {"target_modules": Q, "trainable_token_indices": [3, 5]},
    "rows of the head": {"target_modules": Q, "trainable_token_indices": {"lm_head": [3, 5]}},
    "rows of both": {"target_modules": Q, "trainable_token_indices": {"lm_head": [3], "embed_tokens": [3]}},
    "other rows of each": {"target_modules": Q, "trainable_token_indices": {"lm_head": [3, 5], "embed_tokens": [4]}},
    "vera": {"peft_type": "VERA", "r": 8, "target_modules": ["q_proj", "k_proj", "down_proj"]},
    "ia3": {"peft_type": "IA3", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
}
STAYING_TIED = {"embedding, tied", "head, tied", "saved embedding, tied", "saved head, tied", "rows", "rows of both"}
"""Kinds that change embedding and head alike."""
SHARED = ("embed", "head", "indices")
"""Words in the options of kinds that change embedding or head."""
Bases = dict[bool, tuple[Path, Any]]
CASES = [(tied, kind) for kind in KINDS for tied in (True, False) if tied or any(word in kind for word in SHARED)]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """Return directory and model of a base, by whether its embedding is tied."""
    result = {}
    for tied in (True, False):
        folder = tmp_path_factory.mktemp("base")
        torch.manual_seed(0)
        config = LlamaConfig(**SIZES, tie_word_embeddings=tied, attention_bias=True, dtype="float32")
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        result[tied] = folder, AutoModelForCausalLM.from_pretrained(folder)
    return result


def write_adapter(model: Any, folder: Path, peft_type: str = "LORA", **options: Any) -> Path:
    torch.manual_seed(1)
    kinds: dict[str, Any] = {"LORA": LoraConfig, "IA3": IA3Config, "VERA": VeraConfig}
    config = kinds[peft_type](**({"r": 2, "lora_alpha": 5} if peft_type == "LORA" else {}), **options)
    wrapped = get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    wrapped.save_pretrained(str(folder))
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(torch.arange(30).view(2, 15)).logits
    return result


def check(adapter: Path, base: Path) -> None:
    """Check an adapter against the modules that config.json implies, if it can, and against a built model."""
    spec = listed_model(base, [read_header(base / "model.safetensors")], [adapter])
    for model in (spec, built_on_meta(config_of(base))):
        if model is not None:
            of_directory(adapter).updates(adapter, model)


def test_vera_adapter_without_r_has_pefts_default_rank(bases: Bases, tmp_path: Path) -> None:
    base, model = bases[True]
    adapter = write_adapter(model, tmp_path / "adapter", peft_type="VERA", target_modules=["q_proj", "down_proj"])
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config.pop("r") == 256
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    check(adapter, base)
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"save_projection": False}))
    with pytest.raises(UserError, match="save_projection is False; expected true, with the projections in the file"):
        check(adapter, base)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("tied", "kind"), CASES)
def test_pefts_adapters_merge_to_its_logits(tied: bool, kind: str, bases: Bases, tmp_path: Path) -> None:
    """A tied base stays tied if embedding and head change alike."""
    base, model = bases[tied]
    adapter = write_adapter(model, tmp_path / "adapter", **KINDS[kind])
    check(adapter, base)
    expected = logits(PeftModel.from_pretrained(copy.deepcopy(model), adapter))
    assert float((expected - logits(model)).abs().max()) > 1e-3
    merge_by_hand(base, [adapter], [], tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert float((logits(merged) - expected).abs().max()) < 1e-6 * max(1, float(expected.abs().max()))  # of fp32 sums
    touched = any(word in str(KINDS[kind]) for word in SHARED)
    assert merged.config.tie_word_embeddings is (tied and (not touched or kind in STAYING_TIED))
    stored = load_file(tmp_path / "merged/model.safetensors")
    assert ("lm_head.weight" in stored) is not merged.config.tie_word_embeddings


Files = tuple[dict[str, torch.Tensor], dict[str, Any]]
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = FIRST.replace("lora_A", "lora_B")


def config(**changed: Any) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files[1].update(changed)

    return change


def without(*keys: str) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        for key in keys:
            files[1].pop(key, None)

    return change


def tensors(**changed: Any) -> Callable[[Files], None]:
    """Change tensors by A and B of the first module: to what a function makes of them, or drop them."""

    def change(files: Files) -> None:
        for part, to in changed.items():
            name = FIRST.replace("lora_A", f"lora_{part}")
            files[0][name] = to(files[0][name]).contiguous()

    return change


def doubled_rank(files: Files) -> None:
    """Tensors beside the config of another adapter."""
    for name, tensor in files[0].items():
        files[0][name] = torch.cat([tensor, tensor], dim=int("lora_B" in name)).contiguous()


def renamed(old: str, new: str) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        for name in [name for name in files[0] if old in name]:
            files[0][name.replace(old, new)] = files[0].pop(name)

    return change


def added(name: str, *shape: int) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files[0][name] = torch.ones(*shape)

    return change


def not_finite(value: str, dtype: torch.dtype) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files[0].update({name: tensor.to(dtype) for name, tensor in files[0].items()})
        files[0][B][1, 1] = float(value)

    return change


MUTATED: dict[str, tuple[Callable[[Files], Any], str]] = {
    "no tensors": (lambda files: files[0].clear(), r"contains no tensors; they were saved before they were gathered"),
    "empty tensors": (tensors(A=lambda a: a[:0, :0]), r"q_proj\.lora_A\.weight is empty, of shape \[0, 0\]; it was"),
    "rank 4, r 2": (doubled_rank, r"lora_A\.weight is \[4, 16\], and should be \[2, 16\]: adapter_config.json has r:"),
    "no r": (without("r"), r"should be \[8, 16\]: adapter_config.json has r: 8 for it, the default where r is missing"),
    "two ranks": (tensors(B=lambda b: b[:, :1]), r"lora_B\.weight is \[16, 1\], and should be \[16, 2\]: adapter_conf"),
    "r 0": (config(r=0), "adapter_config.json: r is 0; expected a whole number, 1 or more"),
    "r true": (config(r=True), "r is True; expected a whole number"),
    "alpha none": (config(lora_alpha=None), "lora_alpha is None; expected a finite number"),
    "alpha infinite": (config(lora_alpha=float("inf")), "'Infinity' is not valid; expected a finite number"),
    "a pattern of rank 0": (config(rank_pattern={"q_proj": 0}), "rank_pattern.q_proj is 0; expected a whole number,"),
    "a broken pattern": (
        config(alpha_pattern={"(": 1}),
        r"alpha_pattern has a key that is '\('; expected a regular expression",
    ),
    "a saved module that is not an expression": (
        config(modules_to_save=["norm("]),
        r"modules_to_save.0 is 'norm\('; expected a name, which peft reads as a regular expression",
    ),
    "another pattern": (config(rank_pattern={"q_proj": 1}), r"should be \[1, 16\]: adapter_config.json has r: 1 for"),
    "a flag as text": (config(use_dora="false"), "use_dora is 'false'; expected true or false"),
    "dora without magnitudes": (config(use_dora=True), r"q_proj\.lora_magnitude_vector is missing \(and 1 more\),"),
    "targets of another type": (config(target_modules=3), "target_modules is 3; expected a regular expression"),
    "more targets": (config(target_modules=["q_proj", "k_proj"]), r"k_proj\.lora_A\.weight is missing \(and 3 more\)"),
    "only some layers": (config(layers_to_transform=[0]), r"layers\.1\S*lora_A\.weight is none of the tensors that"),
    "a module saved": (config(modules_to_save=["norm"]), r"layernorm\.weight is missing"),
    "another start": (config(init_lora_weights="pissa"), "init_lora_weights is 'pissa', with which the factors"),
    "more than a product": (config(use_qalora=True), "use_qalora is True, with which more than B·A is added; use the"),
    "a key of a newer peft": (
        config(use_square=True, peft_version="0.99"),
        r"'use_square' is True, a key that peft 0.21 does not have and that may change .* by peft '0.99'\); remove the",
    ),
    "a layer too many": (
        added(FIRST.replace("layers.0", "layers.9"), 2, 16),
        r"is of model\.layers\.9\.self_attn\.q_proj, which the base lacks: it has 2 layers in model\.layers",
    ),
    "a module of another architecture": (
        added(FIRST.replace("q_proj", "c_attn"), 2, 16),
        r"is of model\.layers\.0\.self_attn\.c_attn, which the base lacks: its modules have other names, as of anoth",
    ),
    "a tensor too many": (
        added(FIRST.replace("q_proj", "v_proj"), 2, 16),
        r"v_proj\.lora_A\.weight is none of the tensors that adapter_config.json implies for this base; save the adapt",
    ),
    "names without the prefix": (renamed("base_model.model.", ""), r"q_proj\.lora_A\.weight is missing \(and 3 more\)"),
    "another width": (tensors(A=lambda a: a[:, 1:]), r"is \[2, 15\], and should be \[2, 16\] in this base: its"),
    "not a number": (not_finite("nan", torch.float32), r"q_proj\.lora_B\.weight contains numbers that are not"),
    "infinite in bf16": (not_finite("-inf", torch.bfloat16), r"q_proj\.lora_B\.weight contains numbers that are not"),
    "integers": (tensors(A=lambda a: a.to(torch.int8)), r"lora_A\.weight is stored as I8, and a trained tensor is"),
    "a prefix of transformers 4": (
        renamed("model.model.layers", "model.language_model.model.layers"),
        "which the base lacks: it has self_attn.q_proj under another name, as in transformers 4 or in another class of",
    ),
    **{
        f"wrapped by {part}": (
            renamed(".self_attn.", f".{part}.self_attn."),
            rf"{part}\.self_attn\S+ has the name of a wrapped module, .* or rename it to base_model\.model\.model",
        )
        for part in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module")
    },
    "fewer tokens": (
        added("base_model.model.model.embed_tokens.weight", 28, 16),
        r"\[28, 16\], and should be \[30, 16\]: the vocabulary has 28 rows in the adapter and 30 in the base, which wa",
    ),
    "added tokens": (
        added("base_model.model.model.embed_tokens.weight", 34, 16),
        r"\[34, 16\], and should be \[30, 16\]: the vocabulary has 34 rows in the adapter and 30 in the base, so token"
        r"s were added before it was trained; resize the base with resize_token_embeddings",
    ),
}


@pytest.fixture(scope="module")
def plain(bases: Bases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(bases[True][1], tmp_path_factory.mktemp("plain"), target_modules=Q)


def changed(plain: Path, folder: Path, change: Callable[[Files], Any]) -> Path:
    files = load_file(plain / "adapter_model.safetensors"), json.loads((plain / "adapter_config.json").read_text())
    change(files)
    folder.mkdir()
    save_file(files[0], folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(files[1]))
    return folder


@pytest.mark.parametrize("case", MUTATED)
def test_invalid_adapter_is_refused_in_one_line(case: str, bases: Bases, plain: Path, tmp_path: Path) -> None:
    change, said = MUTATED[case]
    adapter = changed(plain, tmp_path / "adapter", change)
    with pytest.raises(UserError, match=said) as raised:
        merge_by_hand(bases[True][0], [adapter], [], tmp_path / "merged")
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


NEUTRAL: dict[str, Callable[[Files], Any]] = {
    "keys of a newer peft at nothing": config(use_square=False, cube_config=None, further={}, peft_version="0.99"),
    "only the keys of an older peft": without(
        *("alpha_pattern", "rank_pattern", "use_rslora", "use_dora", "lora_bias", "target_parameters"),
        *("ensure_weight_tying", "trainable_token_indices", "layer_replication", "peft_version", "runtime_config"),
        "exclude_modules",
    ),
    "how it was trained": config(lora_dropout=0.3, task_type="CAUSAL_LM", fan_in_fan_out=True, loftq_config={"a": 1}),
    "a copy of the embedding": added("base_model.model.model.embed_tokens.weight", 30, 16),
}


@pytest.mark.parametrize("case", NEUTRAL)
def test_neutral_config_keys_pass(case: str, bases: Bases, plain: Path, tmp_path: Path) -> None:
    base, model = bases[True]
    adapter = changed(plain, tmp_path / "adapter", NEUTRAL[case])
    check(adapter, base)
    merge_by_hand(base, [adapter], [], tmp_path / "merged")
    expected = logits(PeftModel.from_pretrained(copy.deepcopy(model), changed(adapter, tmp_path / "old", old_keys)))
    assert float((logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")) - expected).abs().max()) < 1e-6


@pytest.fixture
def resized(bases: Bases, tmp_path: Path) -> tuple[Path, Any]:
    """Return a base with added tokens, and peft's model that trains embedding and head whole."""
    model = copy.deepcopy(bases[False][1])
    model.resize_token_embeddings(34, mean_resizing=False)
    model.save_pretrained(tmp_path / "base")
    whole = get_peft_model(model, LoraConfig(r=2, target_modules=Q, modules_to_save=["embed_tokens", "lm_head"]))
    for name, parameter in whole.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    return tmp_path / "base", whole


def test_copies_beside_embedding_and_head_are_left_out(resized: tuple[Path, Any], tmp_path: Path) -> None:
    """As peft saves them where the vocabulary has another size than the base's recorded config."""
    base, model = resized
    model.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=True)
    names = load_file(tmp_path / "adapter/adapter_model.safetensors").keys()
    assert sum(".modules_to_save." in name or ".original_module." in name for name in names) == 4
    merge_by_hand(base, [tmp_path / "adapter"], [], tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-4)


def test_two_versions_of_a_head_are_refused(resized: tuple[Path, Any], tmp_path: Path) -> None:
    base, model = resized
    model.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=True)
    path = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(path)
    tensors["base_model.model.lm_head.modules_to_save.weight"][0, 0] += 1
    save_file(tensors, path, {"format": "pt"})
    line = refusal(merge_by_hand, base, [tmp_path / "adapter"], [], tmp_path / "merged")
    assert "lm_head.modules_to_save.weight and base_model.model.lm_head.weight differ" in line
    assert not (tmp_path / "merged").exists()


def test_the_folders_of_named_adapters_are_named(plain: Path, bases: Bases, tmp_path: Path) -> None:
    """As peft saves adapters with other names than its default."""
    for name in ("train", "reference"):
        shutil.copytree(plain, tmp_path / "adapter" / name)
    line = refusal(merge_by_hand, bases[True][0], [tmp_path / "adapter"], [], tmp_path / "merged")
    assert "has no adapter_config.json, but an adapter in reference, train; give one of these folders" in line


def old_keys(files: Files) -> None:
    """Remove keys that this peft would warn about."""
    for key in files[1].keys() - LoraConfig.__dataclass_fields__.keys():
        del files[1][key]


def test_missing_alpha_and_r_take_pefts_defaults(bases: Bases, tmp_path: Path) -> None:
    base, model = bases[True]
    wide = get_peft_model(
        copy.deepcopy(model), LoraConfig(r=8, lora_alpha=8, target_modules=Q, init_lora_weights=False)
    )
    wide.save_pretrained(str(tmp_path / "wide"))
    adapter = changed(tmp_path / "wide", tmp_path / "adapter", without("r", "lora_alpha"))
    merge_by_hand(base, [adapter], [], tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert float((logits(merged) - logits(wide)).abs().max()) < 1e-6


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weighted_merge_refuses_a_copy_of_the_base(plain: Path, bases: Bases, tmp_path: Path) -> None:
    base, model = bases[True]
    adapter = write_adapter(model, tmp_path / "adapter", **KINDS["embedding, tied"])
    with pytest.raises(UserError, match=r"adapter: has a copy of the base's \S+\.weight beside its factors, and a"):
        merge_by_hand(base, [plain, adapter], [0.5, 0.5], tmp_path / "merged")


def test_merge_refuses_a_bias_that_the_base_lacks(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    adapter = write_adapter(model, tmp_path / "adapter", target_modules=Q, lora_bias=True)
    check_published(adapter, tiny_model)  # beside the base it can be used
    with pytest.raises(
        UserError, match=r"its config\.json has no model\.layers\.0\.self_attn\.q_proj\.bias, which the adapter"
    ):
        merge_by_hand(tiny_model, [adapter], [], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_merge_refuses_a_vocabulary_beyond_the_stored_rows(bases: Bases, plain: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(bases[True][0], base)
    values = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(values | {"vocab_size": 40}))
    with pytest.raises(UserError, match=r"vocab_size is 40, but model.embed_tokens.weight has 30 rows"):
        merge_by_hand(base, [plain], [], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def exported(base: Path, adapter: Path, output: Path) -> None:
    target = TARGETS["vllm_adapter"]
    source = RunResult(model=base, weights=base, adapter=adapter, data=base, merged=None)
    export("vllm_adapter", target.settings(), source, output)


USES: dict[str, Callable[[Path, Path, Path], Any]] = {
    "evaluate": lambda base, adapter, _: evaluate(base, torch.device("cpu"), [], adapter),
    "export": exported,
    "push": lambda base, adapter, _: check_published(adapter, base),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_checks_the_adapter_first(use: str, bases: Bases, plain: Path, tmp_path: Path) -> None:
    adapter = changed(plain, tmp_path / "adapter", not_finite("nan", torch.float32))
    with pytest.raises(UserError, match=r"lora_B\.weight contains numbers that are not finite"):
        USES[use](bases[True][0], adapter, tmp_path / "output")
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("case", ["B is zero", "alpha is zero", "trained"])
def test_untrained_adapter_is_logged(
    case: str,
    bases: Bases,
    plain: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(LOGGER, "propagate", True)

    def nothing(files: Files) -> None:
        for name in files[0]:
            files[0][name] = files[0][name] * ("lora_A" in name)

    changes = {"B is zero": nothing, "alpha is zero": config(lora_alpha=0), "trained": config()}
    check(changed(plain, tmp_path / "adapter", changes[case]), bases[True][0])
    said = "adds zero everywhere, so it was not trained: the model with it equals the base"
    assert (said in caplog.text) is (case != "trained")


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("model.norm.weight", None, r"model\.norm\.weight is missing; use the base that these weights were"),
        ("more", lambda _: torch.ones(1), "more is not a trained weight of the base; use the base that these"),
        ("model.norm.weight", lambda _: torch.ones(3), r"model\.norm\.weight is \[3\], and \[16\] in the base"),
        (Q_PROJ, lambda old: old * float("nan"), r"q_proj\.weight contains numbers that are not finite, so the"),
        (Q_PROJ, lambda old: old.to(torch.int8), r"q_proj\.weight is stored as I8, and a trained tensor is F64, F32,"),
        (Q_PROJ, lambda old: old.to(torch.float8_e4m3fn), r"q_proj\.weight is stored as F8_E4M3, and a trained"),
        ("lm_head.weight", lambda _: torch.ones(30, 16), r"lm_head\.weight and model\.embed_tokens\.weight differ,"),
    ],
)
def test_full_weights_of_another_model_are_refused(
    name: str,
    change: Callable[[torch.Tensor | None], torch.Tensor] | None,
    said: str,
    bases: Bases,
    tmp_path: Path,
) -> None:
    base = bases[True][0]
    tensors = load_file(base / "model.safetensors")
    (tmp_path / "trained").mkdir()
    save_file(tensors, tmp_path / "trained/model.safetensors")
    check_published(tmp_path / "trained", base)
    both = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(both, tmp_path / "trained/model.safetensors")  # a second one of the shared weight
    check_published(tmp_path / "trained", base)
    old = tensors.pop(name, None)
    if change:
        tensors[name] = change(old)
    save_file(tensors, tmp_path / "trained/model.safetensors")
    with pytest.raises(UserError, match=said):
        merge_by_hand(base, [tmp_path / "trained"], [], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"rank_pattern": {r"(\w+)+!": 4}},
        {"alpha_pattern": {r"(\w+)+!": 4}},
        {"target_modules": r"(.*\.)?(\w+)+!"},
        {"exclude_modules": r"(.*\.)?(\w+)+!"},
        {"modules_to_save": [r"(\w+)+!"]},
        {"feedforward_modules": r"(.*\.)?(\w+)+!", "peft_type": "IA3"},
    ],
    ids=str,
)
def test_expressions_are_bounded_in_time(
    changes: dict[str, Any], bases: Bases, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An adapter's config may come from anyone, and Python takes years for such an expression."""
    monkeypatch.setattr(bounded, "SECONDS", 0.2)
    modules = [f"model.layers.{number}.self_attn.q_projection_of_the_first_kind" for number in range(2)]
    check_expressions({"target_modules": r".*\.(q|k)_\w+"} | {"modules_to_save": ["norm"]}, modules, tmp_path)
    with pytest.raises(UserError, match=r"takes more than 0\.2 s to match the model's modules; use expressions w"):
        check_expressions({"target_modules": r".*"} | changes, modules, tmp_path / "adapter_config.json")
