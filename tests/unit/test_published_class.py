"""Types of which a language model and a larger model can be built: what is trained is the class that config.json names,
so that an adapter means the same wherever the published model is loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from transformers.models.auto import modeling_auto

from zerolora.config.method_sections import Lora, MethodSections
from zerolora.files import write_json
from zerolora.merge.merge import merge
from zerolora.methods.peft_format import ADAPTER, CONFIG, PREFIX, portable
from zerolora.methods.registry import TRAINABLE
from zerolora.model.architecture import auto_class, built_on_meta, config_of, larger_class, model_class
from zerolora.tensor_file import read_header
from zerolora.train.engines.engine import trained

TEXT: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
INDEXER = {"n_heads": 2, "kv_heads": 1, "head_dim": 8, "budget": 8, "compress_ratio": 2}
HYBRID = EXPERTS | LINEAR | {"shared_expert_intermediate_size": 16}
NGRAMS = {"ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 4, "split_ngram_parts": 2}
NGRAMS |= {"heads_per_ngram": 2, "hc_count": 2, "hc_lowrank": 8}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
LATENT |= {"head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "index_n_heads": 2, "index_head_dim": 16}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
VISION = TOWER | {"depth": 2, "num_heads": 4, "out_hidden_size": 32, "image_size": 28, "patch_size": 14}
QUANTIZER: dict[str, Any] = {"base_channels": 32, "codebook_size": 16, "embed_dim": 8, "hidden_size": 32}
QUANTIZER |= {"latent_channels": 8, "channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": []}
ADAPTED = {"adapter_in_dim": 32, "adapter_out_dim": 32, "per_layer_config": {}}
AUDIO = TOWER | {"adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "dots3_note": {
        "text_config": TEXT | EXPERTS | LATENT,
        "vision_config": TOWER | ADAPTED,
        "audio_config": AUDIO,
    },
    "emu3": {"text_config": TEXT, "vq_config": QUANTIZER, "vocabulary_map": {"<image>": 60}},
    "llama4": {"text_config": TEXT | EXPERTS, "vision_config": VISION},
    "mllama": {"text_config": TEXT, "vision_config": VISION},
    "qwen3_5": {"text_config": TEXT | LINEAR, "vision_config": VISION},
    "qwen3_5_moe": {"text_config": TEXT | HYBRID, "vision_config": VISION},
    "qwen4_exp": {
        "text_config": TEXT | HYBRID | NGRAMS | {f"indexer_{name}": value for name, value in INDEXER.items()},
        "vision_config": VISION,
    },
}

BY_STORED_NAME = ("qwen3_5", "qwen3_5_moe", "qwen4_exp")
"""Types whose files have the names of the class's modules, by which servers such as vLLM find an adapter's module."""


def test_these_are_all_types_with_two_classes() -> None:
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    larger = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    assert sorted(CONFIGS) == sorted(name for name in causal if name in larger and causal[name] != larger[name])


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Any], Path]:
    """Return a function that saves a tiny model of a type in one of its two classes."""

    def save(family: str, auto: Any) -> Path:
        folder = tmp_path_factory.mktemp(family)
        torch.manual_seed(0)
        auto.from_config(CONFIG_MAPPING[family](**CONFIGS[family])).save_pretrained(folder)
        return folder

    return save


@pytest.mark.parametrize("family", CONFIGS)
def test_an_adapter_changes_the_published_class_as_the_merged_model(
    family: str, published: Callable[[str, Any], Path], tmp_path: Path
) -> None:
    base = published(family, AutoModelForImageTextToText)
    config, method = config_of(base), TRAINABLE["lora"]
    assert model_class(config).__name__ == config.architectures[0] == larger_class(config)
    names = sorted({path.rpartition(".")[2] for path in _linears(base) if ".layers." in path and "attn" in path})
    settings = MethodSections(lora=Lora(targets=names))
    built = method.build(auto_class(config).from_pretrained(base), settings)
    for name, parameter in trained(built).items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    tensors = method.published(built, trained(built))
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter" / ADAPTER)
    write_json(
        tmp_path / "adapter" / CONFIG, portable(built.peft_config["default"], {"name": "base", "revision": None})
    )
    if family in BY_STORED_NAME:
        stored = {name for path in base.glob("*.safetensors") for name in read_header(path).tensors}
        modules = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensors}
        assert modules <= {name.removesuffix(".weight") for name in stored}

    merge(base, tmp_path / "adapter", tmp_path / "merged", tmp_path / "merged")
    tokens = torch.arange(3, 40)[None]

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = model.eval()(input_ids=tokens).logits
        return result

    load = AutoModelForImageTextToText.from_pretrained
    plain, adapted = logits(load(base)), logits(PeftModel.from_pretrained(load(base), tmp_path / "adapter"))
    assert (adapted - plain).abs().max() > 0.01
    torch.testing.assert_close(adapted, logits(load(tmp_path / "merged")), rtol=0, atol=1e-4)


def _linears(base: Path) -> list[str]:
    model = built_on_meta(config_of(base))
    decoder = model.get_decoder()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and any(module is each for each in decoder.modules())
    ]


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_saved_as_a_language_model_stays_one(family: str, published: Callable[[str, Any], Path]) -> None:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**CONFIGS[family])
    config.architectures = [modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    assert model_class(config).__name__ == config.architectures[0]
    assert larger_class(config) is None
