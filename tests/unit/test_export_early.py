"""An export target that a run could not be made into is refused by render, before training, in one line."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from test_export import RANK, data, source
from test_tried_on_shapes import run_of

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.config.settings import RenderSettings
from zerolora.errors import UserError
from zerolora.export import llama_cpp
from zerolora.export.targets.target import RunResult
from zerolora.files import write_json
from zerolora.probe.meta_trial import check

__all__ = ["data", "source"]


@pytest.fixture
def folder(source: RunResult, tmp_path: Path) -> Path:
    """Return a folder with a base model that llama.cpp knows, and prepared data, as their stages leave them."""
    shutil.copytree(source.weights, tmp_path / "weights")
    shutil.copytree(source.weights, tmp_path / "models", ignore=shutil.ignore_patterns("*.safetensors"))
    write_json(tmp_path / "models/manifest.json", {"source": {"source": "hub"}})
    prepared: dict[str, Any] = {
        "files": {},
        "added_tokens": [],
        "chat_template": None,
        "stop_tokens": ["</s>"],
        "pad_token": "</s>",
    }
    write_json(tmp_path / "data/manifest.json", prepared)
    return tmp_path


def tried(folder: Path, targets: dict[str, dict[str, Any]], **train: Any) -> None:
    """Try a run with these targets on shapes, as render does."""
    settings = run_of(folder, **train)["render"] | {"targets": targets}
    check(RenderSettings.model_validate(settings), "eager", folder / "models", folder / "weights", folder / "data")


def refused(folder: Path, target: str, options: dict[str, Any], **train: Any) -> str:
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError) as raised:
        tried(folder, {target: options}, **train)
    text = str(raised.value)
    assert text.startswith("export.") and "\n" not in text and f"{tempfile.gettempdir()}{os.sep}tmp" not in text
    assert sorted(path for path in folder.rglob("*") if path.name != "config.yaml") == [
        path for path in before if path.name != "config.yaml"
    ]
    return text


def test_targets_that_can_be_made_are_passed(folder: Path) -> None:
    """With tokens that the data adds, and factors that take a part of the base out."""
    names = ("gguf_adapter", "ollama", "torchao", "vllm_adapter")
    tried(folder, {name: {} for name in names})
    doubled = {"r": RANK, "init": "olora"}
    tried(folder, {"vllm_adapter": {"max_lora_rank": 8}, "torchao": {"type": "nvfp4"}}, lora=doubled)
    added = [{"token": "<note>", "id": 476, "special": False}]
    manifest = json.loads((folder / "data/manifest.json").read_text())
    write_json(folder / "data/manifest.json", manifest | {"added_tokens": added})
    tried(folder, {"gguf": {}, "torchao": {}})


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "DoRA": ("gguf_adapter", {}, {"method": "dora"}, "use_dora is True, which llama.cpp does not support"),
    "all weights": ("vllm_adapter", {}, {"method": "full"}, "the adapter of this run has full weights, not an adapter"),
    "IA3": ("gguf_adapter", {}, {"method": "ia3"}, "peft_type is 'IA3', and llama.cpp supports LoRA only"),
    "a whole copy": (
        *("vllm_adapter", {}, {"lora": {"modules_to_save": ["norm"]}}),
        "modules_to_save is ['norm'], which vLLM does not support",
    ),
    "patterns": ("vllm_adapter", {}, {"lora": {"rank_pattern": {"q_proj": 2}}}, "rank_pattern is {'q_proj': 2}"),
    "scale": ("gguf_adapter", {}, {"lora": {"rank_stabilized": True}}, "use_rslora is True, which llama.cpp does not"),
    "a rank above the server's": (
        *("vllm_adapter", {}, {"lora": {"r": 32}}),
        "export.vllm_adapter.max_lora_rank: 16, but the adapter of this run/adapter_config.json has r: 32; write 32",
    ),
    "a rank that is doubled": (
        *("vllm_adapter", {}, {"lora": {"r": 16, "init": "pissa"}}),
        "has r: 32; write 32, or a smaller train.lora.r",
    ),
    "layers of another shape": (
        *("torchao", {"type": "nvfp4"}, {}),
        "has no linear layer whose inputs are a multiple of 16 and outputs a multiple of 16",
    ),
    "a quantizer": ("gguf", {"type": "q4_k_m"}, {}, "export.gguf.type: q4_k_m is made by llama.cpp's llama-quantize"),
    "a quantizer for Ollama": ("ollama", {"type": "q6_k"}, {}, "export.ollama.type: q6_k is made by llama.cpp's"),
    "a system prompt": ("ollama", {"system": 'a """ b'}, {}, 'export.ollama.system: \'a """ b\' contains'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_target_that_cannot_be_made_is_refused_before_training(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, options, train, said = REFUSED[case]
    monkeypatch.setattr("shutil.which", lambda _: None)
    if case == "layers of another shape":
        narrow(folder)
    assert said in refused(folder, target, options, **train)


def narrow(folder: Path) -> None:
    """Give the base layers whose sides are not multiples of 16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(folder / "weights", hidden_size=40, intermediate_size=72)
    config.num_attention_heads = 2
    config.num_key_value_heads, config.head_dim = 2, 20
    LlamaForCausalLM(config).save_pretrained(folder / "weights")
    shutil.copy(folder / "weights/config.json", folder / "models/config.json")


def unknown_tokenizer(folder: Path) -> None:
    """One that splits text in a way that llama.cpp's converter has no name for."""
    for name in ("models", "weights"):
        path = folder / name / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        tokenizer["model"] = {"type": "BPE", "vocab": tokenizer["model"]["vocab"], "merges": []}
        tokenizer["pre_tokenizer"] = {"type": "Whitespace"}
        tokenizer["decoder"] = None
        path.write_text(json.dumps(tokenizer))


def unknown_class(folder: Path) -> None:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    config = GPTNeoConfig(
        vocab_size=476, hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64,
    )  # fmt: skip
    GPTNeoForCausalLM(config).save_pretrained(folder / "weights")
    shutil.copy(folder / "weights/config.json", folder / "models/config.json")


@pytest.mark.parametrize(
    ("target", "change", "said"),
    [
        ("gguf", unknown_class, "llama.cpp's convert_hf_to_gguf.py failed: .*GPTNeoForCausalLM"),
        ("gguf_adapter", unknown_class, "llama.cpp's convert_lora_to_gguf.py failed: .*GPTNeoForCausalLM"),
        ("ollama", unknown_tokenizer, "convert_hf_to_gguf.py failed: it does not know this tokenizer"),
    ],
)
def test_a_model_that_the_converter_does_not_take_is_refused_before_training(
    target: str, change: Callable[[Path], None], said: str, folder: Path
) -> None:
    change(folder)
    assert re.search(said, refused(folder, target, {}))


def test_programs_of_a_clusters_nodes_are_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/sbatch" if name == "sbatch" else None)
    monkeypatch.setattr(llama_cpp, "try_conversion", lambda _: None)
    tried(folder, {"gguf": {"type": "q4_k_m"}})
    assert "export checks its own machine" in caplog.text


def test_without_weights_targets_of_the_adapter_are_tried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "weights/model.safetensors").unlink()
    monkeypatch.setattr(llama_cpp, "try_conversion", lambda _: pytest.fail("there is no merged model"))
    tried(folder, {"gguf": {}})
    assert "use_dora is True" in refused(folder, "gguf_adapter", {}, method="dora")


def test_an_adapter_of_which_the_converter_takes_a_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of Gemma, whose output head the converter leaves out of an adapter without a word."""
    done = SimpleNamespace(returncode=0, stderr="INFO:gguf.gguf_writer:none.gguf: n_tensors = 28, total_size = 9.4K\n")
    monkeypatch.setattr(llama_cpp, "subprocess", SimpleNamespace(run=lambda *_, **__: done))
    llama_cpp.try_adapter(Path("a"), Path("b"), 28)
    with pytest.raises(UserError, match=r"^a: llama.cpp's convert_lora_to_gguf.py converts 28 of its 30 factors; "):
        llama_cpp.try_adapter(Path("a"), Path("b"), 30)


def test_render_reads_the_settings_of_the_targets_alone(tmp_path: Path) -> None:
    """What another target would be made of does not make it run again."""
    run_of(tmp_path)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    config["export"] = {"targets": ["vllm_adapter"], "gguf": {"type": "q8_0"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    render = resolve(load(tmp_path / "config.yaml")).runs["default"].render
    assert render.targets == {"vllm_adapter": {"max_lora_rank": 16}}
