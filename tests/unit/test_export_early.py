"""render refuses an impossible export target in one line, before training."""

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
from conftest import refusal
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
    """Return a folder with the outputs of fetch and prepare, for a model that llama.cpp supports."""
    shutil.copytree(source.weights, tmp_path / "weights")
    shutil.copytree(source.weights, tmp_path / "models", ignore=shutil.ignore_patterns("*.safetensors"))
    write_json(tmp_path / "models/manifest.json", {"source": {"source": "hub"}})
    prepared: dict[str, Any] = {"files": {}, "added_tokens": [], "chat_template": None}
    prepared |= {"stop_tokens": ["</s>"], "pad_token": "</s>"}
    write_json(tmp_path / "data/manifest.json", prepared)
    return tmp_path


def tried(folder: Path, targets: dict[str, dict[str, Any]], **train: Any) -> None:
    settings = run_of(folder, **train)["render"] | {"targets": targets}
    check(RenderSettings.model_validate(settings), "eager", folder / "models", folder / "weights", folder / "data")


def refused(folder: Path, target: str, options: dict[str, Any], **train: Any) -> str:
    before = {*folder.rglob("*")}
    text = refusal(tried, folder, {target: options}, **train)
    assert text.startswith("export.") and f"{tempfile.gettempdir()}{os.sep}tmp" not in text
    assert {path.name for path in {*folder.rglob("*")} ^ before} <= {"config.yaml"}
    return text


def test_possible_targets_pass(folder: Path) -> None:
    """Also with added tokens, and with factors initialised from the base."""
    names = ("gguf_adapter", "torchao", "vllm_adapter")
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
    "a rank above the server's": (
        *("vllm_adapter", {}, {"lora": {"r": 32}}),
        "export.vllm_adapter.max_lora_rank: 16, but the adapter of this run/adapter_config.json has r: 32; use 32",
    ),
    "a rank that is doubled": (
        *("vllm_adapter", {}, {"lora": {"r": 16, "init": "pissa"}}),
        "has r: 32; use 32, or a smaller train.lora.r",
    ),
    "layers of another shape": (
        *("torchao", {"type": "nvfp4"}, {}),
        "has no linear layer whose inputs are a multiple of 16 and outputs a multiple of 16",
    ),
    "a quantizer": ("gguf", {"type": "q4_k_m"}, {}, "export.gguf.type: q4_k_m is made by llama.cpp's llama-quantize"),
    "a system prompt": ("ollama", {"system": 'a """ b'}, {}, 'export.ollama.system: \'a """ b\' contains'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_target_is_refused(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, options, train, said = REFUSED[case]
    monkeypatch.setattr("shutil.which", lambda _: None)
    if case == "layers of another shape":
        narrow(folder)
    assert said in refused(folder, target, options, **train)


def narrow(folder: Path) -> None:
    """Replace the base by one with sizes that are not multiples of 16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 72, "num_attention_heads": 2, "head_dim": 20}
    config = LlamaConfig.from_pretrained(folder / "weights", num_key_value_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "weights")
    shutil.copy(folder / "weights/config.json", folder / "models/config.json")


def unknown_tokenizer(folder: Path) -> None:
    """Give the base a pre-tokenizer that llama.cpp's converter does not know."""
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
        ("gguf_adapter", unknown_class, "llama.cpp's convert_lora_to_gguf.py failed: .*GPTNeoForCausalLM"),
        ("ollama", unknown_tokenizer, "convert_hf_to_gguf.py failed: it does not know this tokenizer"),
    ],
)
def test_model_that_the_converter_does_not_support_is_refused(
    target: str, change: Callable[[Path], None], said: str, folder: Path
) -> None:
    change(folder)
    assert re.search(said, refused(folder, target, {}))


def test_missing_quantizer_is_a_warning_on_a_cluster(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/sbatch" if name == "sbatch" else None)
    monkeypatch.setattr(llama_cpp, "try_conversion", lambda _: None)
    tried(folder, {"gguf": {"type": "q4_k_m"}})
    assert "export checks its own machine" in caplog.text


def test_without_weights_only_adapter_targets_are_tried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "weights/model.safetensors").unlink()
    monkeypatch.setattr(llama_cpp, "try_conversion", lambda _: pytest.fail("there is no merged model"))
    tried(folder, {"gguf": {}})
    assert "use_dora is True" in refused(folder, "gguf_adapter", {}, method="dora")


def test_partially_converted_adapter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like Gemma's output head, which the converter silently omits."""
    done = SimpleNamespace(returncode=0, stderr="INFO:gguf.gguf_writer:none.gguf: n_tensors = 28, total_size = 9.4K\n")
    monkeypatch.setattr(llama_cpp, "subprocess", SimpleNamespace(run=lambda *_, **__: done))
    llama_cpp.try_adapter(Path("a"), Path("b"), 28)
    with pytest.raises(UserError, match=r"^a: llama.cpp's convert_lora_to_gguf.py converts 28 of its 30 factors; "):
        llama_cpp.try_adapter(Path("a"), Path("b"), 30)


def test_render_settings_only_contain_chosen_targets(tmp_path: Path) -> None:
    run_of(tmp_path)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    config["export"] = {"targets": ["vllm_adapter"], "gguf": {"type": "q8_0"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    render = resolve(load(tmp_path / "config.yaml")).runs["default"].render
    assert render.targets == {"vllm_adapter": {"max_lora_rank": 16}}
