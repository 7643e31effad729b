"""Each export target on a tiny model: its files, its answers in the target's library, its refusals."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import refusal
from tokenizers_of import FAMILIES, TEMPLATES, tokenizer_like

from zerolora.data.prepared_rows import schema
from zerolora.data.prompt_formats import PROMPT_FORMATS
from zerolora.errors import UserError
from zerolora.export import llama_cpp
from zerolora.export.export import export, loaded_check
from zerolora.export.linear_layers import linear_layers
from zerolora.export.opened import answering, model_of
from zerolora.export.targets import TARGETS
from zerolora.export.targets.ollama import GO_TEMPLATES, TRIED, modelfile, prompt_format
from zerolora.export.targets.target import RunResult
from zerolora.merge.merge import write_model
from zerolora.tensor_file import read_header

RANK = 4
VLLM = os.environ.get("ZEROLORA_VLLM_PYTHON")
"""An interpreter with vLLM, which is not in the lock."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, data: Path) -> RunResult:
    """Return a Llama with llama.cpp's tokenizer and vLLM's head size, a random LoRA adapter, and both merged."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("exported")
    tokenizer = tokenizer_like(FAMILIES["zephyr"], PROMPT_FORMATS["zephyr"].jinja)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=tokenizer.eos_token_id,
        head_dim=32, initializer_range=0.3,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder / "base")
    adapted: Any = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(str(folder / "adapter"))
    merged: Any = adapted.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    for name in ("base", "merged"):
        tokenizer.save_pretrained(folder / name)
    return RunResult(folder / "base", folder / "base", folder / "adapter", data, folder / "merged")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import pyarrow

    folder = tmp_path_factory.mktemp("held-out")
    rows = [
        {"input_ids": list(range(5 + n, 17 + n)), "labels": [-100] * 12, "length": 12, "supervised": 0, "source": 0,
         "prompt": 10 if n else 0, "question": "", "expected": ""}
        for n in range(5)
    ]  # fmt: skip
    table = pyarrow.Table.from_pylist(rows, schema=schema(held_out=True))
    with pyarrow.OSFile(str(folder / "test.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (folder / "manifest.json").write_text('{"stop_tokens": ["</s>"], "pad_token": "</s>"}')
    return folder


def exported(target: str, source: RunResult, folder: Path, **settings: Any) -> dict[str, Any]:
    export(target, TARGETS[target].settings(**settings), source, folder / target)
    manifest: dict[str, Any] = json.loads((folder / target / "manifest.json").read_text())
    return manifest


def refused(target: str, source: RunResult, folder: Path, **settings: Any) -> str:
    line = refusal(export, target, TARGETS[target].settings(**settings), source, folder / target)
    assert not (folder / target).exists()
    return line


# Above 5 s: the converter is a process that imports torch.
@pytest.fixture(scope="module")
def gguf(source: RunResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    exported("gguf", source, folder, type="f32")
    return folder / "gguf"


@pytest.fixture
def converted(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the converter by a copy of its output in f32."""
    monkeypatch.setattr(llama_cpp, "convert", lambda _, __, output, *___: shutil.copy(gguf / "model.gguf", output))


def test_gguf_answers_in_llama_cpp_like_the_merged_model(gguf: Path) -> None:
    manifest = json.loads((gguf / "manifest.json").read_text())
    loaded = manifest["loaded"]
    assert loaded["opened_by"] == f"llama.cpp (xllamacpp {version('xllamacpp')})"
    assert (loaded["compared_with"], loaded["equal"], loaded["agreement"]) == ("merged model", 3, 1.0)
    assert len({row["exported"] for row in loaded["rows"]}) == 3
    assert (gguf / "model.gguf").stat().st_size == manifest["files"]["model.gguf"]["bytes"]


@pytest.mark.usefixtures("converted")
def test_transformers_opens_gguf(source: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "PACKAGE", "no_llama_cpp")
    loaded = exported("gguf", source, tmp_path, type="q8_0")["loaded"]
    assert loaded["opened_by"] == f"transformers {version('transformers')} (GGUF reader)"
    assert len(loaded["rows"]) == 3 and all(row["equal"] for row in loaded["rows"]) == (loaded["equal"] == 3)


def test_invalid_gguf_is_one_line_of_llama_cpp(source: RunResult, tmp_path: Path, capfd: Any) -> None:
    """In a worker process, so that a crash does not end the caller."""
    file = tmp_path / "cut.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    answers = llama_cpp.opened(file).answers
    assert answers is not None
    line = refusal(answers, [[5, 6]], 2, [])
    assert line.startswith(f"{file}: llama.cpp (xllamacpp {version('xllamacpp')}) cannot open it: ")
    assert "gguf" in line.partition("cannot open it")[2]
    assert capfd.readouterr().err == ""


def test_crash_of_llama_cpp_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    monkeypatch.setattr(llama_cpp, "WORKER", worker)
    answers = llama_cpp.opened(tmp_path / "model.gguf").answers
    assert answers is not None
    with pytest.raises(UserError, match="cannot open it: killed by SIGSEGV$"):
        answers([[5]], 2, [])


def test_llama_cpp_uses_at_most_the_allowed_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert llama_cpp._threads() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert llama_cpp._threads() == len(os.sched_getaffinity(0))


def test_loaded_check_detects_another_model(source: RunResult) -> None:
    other = replace(TARGETS["gguf"], opened=lambda *_: answering(model_of(source.weights), "transformers"))
    for result in (source, replace(source, merged=None)):
        actual = loaded_check(other, result, TARGETS["gguf"].settings(), source.weights)
        assert actual["equal"] == 0
        assert actual["agreement"] < 0.5


def test_vllm_adapter_answers_through_peft(source: RunResult, tmp_path: Path) -> None:
    manifest = exported("vllm_adapter", source, tmp_path)
    assert manifest["loaded"]["opened_by"].startswith("peft ")
    assert manifest["loaded"]["equal"] == 3
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "vllm_adapter" / name).read_bytes() == (source.adapter / name).read_bytes()


# Above 5 s: two converters, and llama.cpp twice.
def test_gguf_adapter_answers_with_its_base(source: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = exported("gguf_adapter", replace(source, merged=None), tmp_path, type="f32")
    loaded = manifest["loaded"]
    assert (loaded["factors"], loaded["alpha"]) == (2 * 7 * 2, 8.0)
    assert loaded["opened_by"].startswith("llama.cpp ")
    assert (loaded["compared_with"], loaded["equal"]) == ("base and adapter", 3)
    assert [*manifest["files"]] == ["adapter.gguf"]
    assert sorted(path.name for path in (tmp_path / "gguf_adapter").iterdir()) == ["adapter.gguf", "manifest.json"]
    monkeypatch.setattr(llama_cpp, "PACKAGE", "no_llama_cpp")
    actual = TARGETS["gguf_adapter"].opened(source, TARGETS["gguf_adapter"].settings(), tmp_path / "gguf_adapter")
    assert actual.library.startswith("gguf ") and actual.answers is None


@pytest.mark.parametrize("target", [name for name, target in TARGETS.items() if target.of_merged])
def test_merged_target_without_a_merge_is_one_line(target: str, source: RunResult, tmp_path: Path) -> None:
    line = refused(target, replace(source, merged=None), tmp_path)
    assert line == (
        f"export.targets: {target} is made of the merged model, and merge.enabled is false; set merge.enabled: true, "
        "or choose targets from gguf_adapter, vllm_adapter"
    )


@pytest.mark.parametrize(("type_", "size"), [("int8", 1), ("fp8", 1), ("nvfp4", 0.5)])
def test_torchao_writes_a_smaller_checkpoint(type_: str, size: float, source: RunResult, tmp_path: Path) -> None:
    manifest = exported("torchao", source, tmp_path, type=type_)
    loaded = manifest["loaded"]
    assert loaded["opened_by"] == f"transformers {version('transformers')} with torchao {version('torchao')}"
    assert len(loaded["rows"]) == 3 and (manifest["quantized"], manifest["type"]) == (2 * 7, type_)
    assert manifest["unquantized"] == ["lm_head.weight", "model.embed_tokens.weight"]
    assert {Path(name).suffix for name in manifest["files"]} <= {".json", ".safetensors", ".jinja"}
    stored = read_header(tmp_path / "torchao/model.safetensors").tensors
    weight = stored["model.layers.1.mlp.down_proj._weight_qdata"]
    assert weight.nbytes == 64 * 96 * size
    wanted = model_of(source.merged_model).model.layers[1].mlp.down_proj.weight
    actual = model_of(tmp_path / "torchao").model.layers[1].mlp.down_proj.weight.dequantize()
    error = (actual - wanted).norm() / wanted.norm()
    assert 0.001 < error < {"int8": 0.01, "fp8": 0.04, "nvfp4": 0.15}[type_]


def test_torchao_preserves_shards(source: RunResult, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    shutil.copytree(source.merged_model, sharded, ignore=shutil.ignore_patterns("*.safetensors"))
    model_of(source.merged_model).save_pretrained(sharded, max_shard_size="150KB")
    names = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(names) > 2
    (tmp_path / "whole").mkdir()
    whole = exported("torchao", source, tmp_path / "whole")
    parted = exported("torchao", replace(source, merged=sharded), tmp_path)
    assert sorted(path.name for path in (tmp_path / "torchao").glob("*.safetensors")) == names
    assert [row["exported"] for row in parted["loaded"]["rows"]] == [row["exported"] for row in whole["loaded"]["rows"]]
    index = json.loads((tmp_path / "torchao/model.safetensors.index.json").read_text())["weight_map"]
    assert {name for file in names for name in read_header(tmp_path / "torchao" / file).tensors} == set(index)


def test_torchao_lists_unquantized_weights(source: RunResult, tmp_path: Path) -> None:
    """Experts and routers of a mixture, and layers without whole nvfp4 blocks, stay unquantized."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=476, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=24, max_position_embeddings=256, eos_token_id=475,
    )  # fmt: skip
    mixture = tmp_path / "mixture"
    shutil.copytree(source.merged_model, mixture, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
    Qwen2MoeForCausalLM(config).save_pretrained(mixture)
    manifest = exported("torchao", replace(source, merged=mixture), tmp_path, type="nvfp4")
    left = {name.rpartition("layers.*.")[2] for name in manifest["unquantized"]}
    assert {"mlp.gate.weight", "mlp.experts.*.up_proj.weight", "mlp.shared_expert.down_proj.weight"} <= left
    assert "self_attn.q_proj.weight" not in left
    assert manifest["quantized"] > 0 and len(manifest["loaded"]["rows"]) == 3


def test_tied_head_is_not_quantized(source: RunResult, tmp_path: Path) -> None:
    """A tied head has no stored weight, and libraries would take it for a quantized layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(source.merged_model, tmp_path / "tied", ignore=shutil.ignore_patterns("*.safetensors"))
    config = LlamaConfig.from_pretrained(source.merged_model, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tied")
    layers = linear_layers(tmp_path / "tied", "k")
    assert "lm_head.weight" not in layers.files[0].tensors
    assert "lm_head" in layers.left_modules and not any("self_attn" in name for name in layers.left_modules)


# Above 5 s: a process that imports torch.
def test_every_converter_module_imports() -> None:
    """The locked gguf package alone does not suffice for the converters of Qwen, Gemma and Mistral."""
    directory = llama_cpp._vendored(llama_cpp.CONVERTER).parent
    code = f"""
import importlib, pathlib, sys
sys.path.insert(0, {str(directory)!r})
names = sorted(path.stem for path in pathlib.Path({str(directory)!r}, "conversion").glob("[a-z]*.py"))
for name in names:
    importlib.import_module(f"conversion.{{name}}")
print(len(names))
"""
    environment = llama_cpp._environment(os.environ | {"NO_LOCAL_GGUF": "1"})
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


@pytest.fixture(scope="module")
def untied(source: RunResult, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunResult]:
    """Return a function that merges an adapter of the head into a tied model of a family, which unties it."""
    from peft import LoraConfig, get_peft_model
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    def make(family: str) -> RunResult:
        folder = tmp_path_factory.mktemp(f"untied-{family}")
        shutil.copytree(source.weights, folder / "base", ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
        sizes: dict[str, Any] = {"vocab_size": 476, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
        sizes |= {"bos_token_id": 1, "eos_token_id": 475, "pad_token_id": 0}
        config = CONFIG_MAPPING[family](**(sizes | {"tie_word_embeddings": True, "initializer_range": 0.3}))
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder / "base")
        shutil.copy(source.weights / "tokenizer_config.json", folder / "base")
        adapted: Any = get_peft_model(model, LoraConfig(r=RANK, target_modules=["lm_head"], task_type="CAUSAL_LM"))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.5)
        adapted.save_pretrained(str(folder / "adapter"))
        (folder / "merged").mkdir()
        write_model(folder / "base", [(folder / "adapter", 1.0)], folder / "merged", folder / "merged")
        return RunResult(folder / "base", folder / "base", folder / "adapter", source.data, folder / "merged")

    return make


def sentencepiece_file(path: Path) -> None:
    """Write a tokenizer in the form that llama.cpp's converter requires for Gemma."""
    import sentencepiece

    text = path.with_suffix(".txt")
    text.write_text("\n".join(f"{chr(97 + n % 26)} {n} of {3 * n}" for n in range(200)))
    options: dict[str, Any] = {"vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2, "model_type": "bpe"}
    sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=str(path.with_suffix("")), **options)


# Above 5 s: a converter.
def test_head_that_the_converter_omits_is_one_line(untied: Callable[[str], RunResult], tmp_path: Path) -> None:
    """For Gemma, the file would use the embedding instead."""
    result = untied("gemma2")
    sentencepiece_file(result.merged_model / "tokenizer.model")
    line = refused("gguf", result, tmp_path)
    assert line.startswith(f"{result.merged}: the output head has other weights than the embedding, and llama.cpp's")
    assert "omits it for gemma2" in line


# Above 5 s: a converter.
def test_untied_head_is_exported(untied: Callable[[str], RunResult], tmp_path: Path) -> None:
    result = untied("llama")
    manifest = exported("gguf", result, tmp_path, type="f32")
    assert manifest["loaded"]["opened_by"].startswith("llama.cpp ") and manifest["loaded"]["equal"] == 3
    base = replace(TARGETS["gguf"], opened=lambda *_: answering(model_of(result.weights), "transformers"))
    assert loaded_check(base, result, TARGETS["gguf"].settings(), result.weights)["equal"] < 3  # the head matters


def test_torchao_exports_an_untied_head(untied: Callable[[str], RunResult], tmp_path: Path) -> None:
    result = untied("gemma2")
    assert "lm_head.weight" in exported("torchao", result, tmp_path)["unquantized"]
    whole, actual = model_of(result.merged_model), model_of(tmp_path / "torchao")
    assert torch.equal(actual.lm_head.weight, whole.lm_head.weight)
    assert torch.equal(actual.get_input_embeddings().weight, whole.get_input_embeddings().weight)
    assert not torch.equal(whole.lm_head.weight, whole.get_input_embeddings().weight)


def test_adapter_of_an_omitted_head_is_one_line(untied: Callable[[str], RunResult], tmp_path: Path) -> None:
    assert "converts 0 of its 2 factors" in refused("gguf_adapter", untied("gemma2"), tmp_path)


def test_model_without_a_quantizable_layer_is_one_line(source: RunResult, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="k: .* has no linear layer whose inputs are a multiple of 1024 and out"):
        linear_layers(source.merged_model, "k", inputs=1024)


def test_layers_stored_under_old_names_are_one_line(tmp_path: Path) -> None:
    """As save_pretrained stores most vision-language models."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = Gemma3Config(
        text_config=text | {"num_key_value_heads": 2, "vocab_size": 70}, vision_config=tower | {"image_size": 28}
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    said = r"k: .*model\.safetensors stores model\.language_model\.\S+ as language_model\.model\.layers\.0\.\S+, and"
    with pytest.raises(UserError, match=said):
        linear_layers(tmp_path, "k")


@pytest.mark.skipif(find_spec("llmcompressor") is None, reason="llm-compressor is not in the lock")
@pytest.mark.parametrize("type_", ["fp8", "int8", "int4"])
def test_llm_compressor_writes_a_checkpoint_that_answers(type_: str, source: RunResult, tmp_path: Path) -> None:
    manifest = exported("compressed_tensors", source, tmp_path, type=type_, group_size=32)
    assert manifest["loaded"]["opened_by"].endswith(f"with compressed-tensors {version('compressed-tensors')}")
    assert len(manifest["loaded"]["rows"]) == 3 and manifest["quantized"] == 2 * 7
    stored = read_header(tmp_path / "compressed_tensors/model.safetensors").tensors
    name, size = "weight" if type_ == "fp8" else "weight_packed", 0.5 if type_ == "int4" else 1
    assert stored[f"model.layers.1.mlp.down_proj.{name}"].nbytes == 64 * 96 * size


@pytest.mark.skipif(find_spec("llmcompressor") is not None, reason="llm-compressor is installed")
def test_missing_llm_compressor_is_one_line(source: RunResult, tmp_path: Path) -> None:
    line = refused("compressed_tensors", source, tmp_path)
    assert "which is not installed; pip install --no-deps llmcompressor==" in line and "or export torchao" in line


@pytest.mark.skipif(not VLLM, reason="no ZEROLORA_VLLM_PYTHON, an interpreter with vLLM")
@pytest.mark.parametrize(("target", "equal"), [("vllm_adapter", 3), ("torchao", 0)])
def test_vllm_opens_its_targets(target: str, equal: int, source: RunResult, tmp_path: Path) -> None:
    loaded = exported(target, replace(source, vllm_python=VLLM), tmp_path)["loaded"]
    assert loaded["opened_by"].startswith("vllm") and loaded["equal"] >= equal
    own = exported(target, source, tmp_path)["loaded"]
    assert [row["exported"] for row in loaded["rows"]] == [row["exported"] for row in own["rows"]]


def test_an_interpreter_without_vllm_is_one_line(source: RunResult, tmp_path: Path) -> None:
    line = refused("vllm_adapter", replace(source, vllm_python=sys.executable), tmp_path)
    assert f"{sys.executable} has no vLLM" in line


@pytest.mark.usefixtures("converted")
def test_ollama_gets_template_stops_and_system_prompt(source: RunResult, tmp_path: Path) -> None:
    manifest = exported("ollama", source, tmp_path, system="Be brief.", type="f32")
    text = (tmp_path / "ollama/Modelfile").read_text()
    assert text == (
        'FROM ./model.gguf\nTEMPLATE """{{ range .Messages }}<|{{ .Role }}|>\n{{ .Content }}</s>\n{{ end }}'
        '<|assistant|>\n"""\nPARAMETER stop "</s>"\nSYSTEM """Be brief."""\n'
    )
    assert manifest["prompt_format"] == "zephyr"
    assert manifest["loaded"]["equal"] == 3


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("r", 32, "export.vllm_adapter.max_lora_rank: 16, but"),
        ("use_dora", True, "use_dora is True, which vLLM does not support; set train.method: lora, or export"),
        ("modules_to_save", ["lm_head"], "modules_to_save is ['lm_head'], which vLLM does not support"),
        ("rank_pattern", {"q_proj": 2}, "rank_pattern is {'q_proj': 2}, which vLLM does not support"),
        ("alpha_pattern", {"q_proj": 2}, "alpha_pattern is {'q_proj': 2}, which vLLM does not support"),
        ("trainable_token_indices", {"embed_tokens": [5]}, "leave out add_special_tokens and add_tokens"),
        ("target_parameters", ["experts.gate_up_proj"], "name no experts in train.lora.targets"),
        ("bias", "all", "has a trained bias"),
        ("peft_type", "IA3", "peft_type is 'IA3', and vLLM supports LoRA only"),
    ],
)
def test_unsupported_vllm_adapter_is_one_line(
    key: str, value: Any, said: str, source: RunResult, tmp_path: Path
) -> None:
    assert said in refused("vllm_adapter", changed(source, tmp_path, key, value), tmp_path)


def changed(source: RunResult, folder: Path, key: str, value: Any) -> RunResult:
    shutil.copytree(source.adapter, folder / "adapter")
    config = json.loads((folder / "adapter/adapter_config.json").read_text()) | {key: value}
    (folder / "adapter/adapter_config.json").write_text(json.dumps(config))
    return replace(source, adapter=folder / "adapter")


def test_other_refusals_are_one_line(source: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "llama-quantize, which is not on the PATH" in refused("gguf", source, tmp_path, type="q4_k_m")
    line = refused("ollama", source, tmp_path, system='end """ SYSTEM')
    assert 'export.ollama.system: \'end """ SYSTEM\' contains' in line
    assert "use_rslora is True" in refused("gguf_adapter", changed(source, tmp_path, "use_rslora", True), tmp_path)
    line = refused("vllm_adapter", replace(source, adapter=tmp_path / "none"), tmp_path)
    assert "has full weights, not an adapter; export the merged model, as gguf does" in line


@pytest.mark.usefixtures("converted")
def test_installed_llama_quantize_is_called(source: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin/llama-quantize"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$3" > "$2"\ntest -s "$1"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    llama_cpp.check_types("q4_k_m", "export.gguf.type")
    llama_cpp.write_gguf(source.merged_model, tmp_path / "model.gguf", "q4_k_m")
    assert (tmp_path / "model.gguf").read_text() == "Q4_K_M\n"
    assert list(tmp_path.glob("*.gguf")) == [tmp_path / "model.gguf"]


def rendered(template: str, messages: list[dict[str, str]], eos: str) -> str:
    """Render the subset of Go templates in use: one range over messages, two fields."""
    head, _, rest = template.partition("{{ range .Messages }}")
    body, _, tail = rest.partition("{{ end }}")
    turns = (body.replace("{{ .Role }}", each["role"]).replace("{{ .Content }}", each["content"]) for each in messages)
    return (head + "".join(turns) + tail).replace("{EOS}", eos)


@pytest.mark.parametrize("name", GO_TEMPLATES)
def test_go_templates_render_like_published_templates(name: str) -> None:
    tokenizer = tokenizer_like(FAMILIES["zephyr"], (TEMPLATES / f"{name}.jinja").read_text())
    for chat in TRIED:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert rendered(GO_TEMPLATES[name], chat, "</s>") == text.removeprefix("<s>")
    assert prompt_format(tokenizer) == name


def test_prompt_format_is_recognized_by_its_output() -> None:
    def of(family: str) -> str | None:
        return prompt_format(tokenizer_like(FAMILIES[family], (TEMPLATES / f"{family}.jinja").read_text()))

    assert (of("zephyr"), of("llama-3"), of("mistral-v0.3"), of("llama-2")) == ("zephyr", "llama-3", None, None)


def test_stop_token_cannot_inject_into_the_modelfile() -> None:
    tokenizer = tokenizer_like(FAMILIES["zephyr"], None)
    tokenizer.add_tokens(['x"\nSYSTEM evil'])
    with pytest.raises(UserError, match="which a Modelfile cannot express"):
        modelfile(tokenizer, [len(tokenizer) - 1], None, "model.gguf")
