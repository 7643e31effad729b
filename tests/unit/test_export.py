"""Each export target on a tiny model: what it writes, who opens it, how it answers, and what it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers_of import FAMILIES, TEMPLATES, tokenizer_like

from zerolora.data.prompt_formats import PROMPT_FORMATS
from zerolora.data.rows import schema
from zerolora.errors import UserError
from zerolora.export import llama_cpp
from zerolora.export.export import export
from zerolora.export.modelfile import GO_TEMPLATES, TRIED, modelfile, prompt_format
from zerolora.export.targets import TARGETS
from zerolora.export.targets.base import RunResult

RANK = 4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Return a Llama with a tokenizer that llama.cpp knows, a LoRA adapter with random factors, and both merged."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("exported")
    tokenizer = tokenizer_like(FAMILIES["zephyr"], PROMPT_FORMATS["zephyr"].jinja)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=tokenizer.eos_token_id,
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
    return RunResult(folder / "base", folder / "base", folder / "adapter", folder / "merged")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a test split of five rows."""
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
    return folder


def exported(target: str, source: RunResult, data: Path, folder: Path, **settings: Any) -> dict[str, Any]:
    export(target, TARGETS[target].settings(**settings), source, data, folder / target)
    manifest: dict[str, Any] = json.loads((folder / target / "manifest.json").read_text())
    return manifest


def refused(target: str, source: RunResult, folder: Path, **settings: Any) -> str:
    with pytest.raises(UserError) as raised:
        export(target, TARGETS[target].settings(**settings), source, folder, folder / target)
    assert not (folder / target).exists()
    (line,) = str(raised.value).splitlines()
    return line


# Above 5 s: the converter is a process of its own, which imports torch.
@pytest.mark.parametrize(("type_", "agreement"), [("f32", 1.0), ("q8_0", 0.3)])
def test_a_gguf_file_answers_as_the_merged_model(
    type_: str, agreement: float, source: RunResult, data: Path, tmp_path: Path
) -> None:
    manifest = exported("gguf", source, data, tmp_path, type=type_)
    loaded = manifest["loaded"]
    assert loaded["opened_by"].startswith("transformers ")
    assert len(loaded["rows"]) == 3
    assert loaded["agreement"] >= agreement
    assert all(row["equal"] for row in loaded["rows"]) == (loaded["equal"] == 3)
    assert (tmp_path / "gguf/model.gguf").stat().st_size == manifest["files"]["model.gguf"]["bytes"]
    if type_ == "f32":
        assert loaded["equal"] == 3


def test_another_model_than_the_merged_one_is_seen(source: RunResult, data: Path, tmp_path: Path) -> None:
    """The check compares: the file of the base model does not answer as the merged one."""
    from zerolora.export.export import loaded_check
    from zerolora.export.opened import answering, model_of

    found = loaded_check(answering(model_of(source.weights), "transformers"), source.merged, data)
    assert found["equal"] == 0
    assert found["agreement"] < 0.5


def test_the_adapter_for_vllm_answers_through_peft(source: RunResult, data: Path, tmp_path: Path) -> None:
    manifest = exported("vllm_adapter", source, data, tmp_path)
    assert manifest["loaded"]["opened_by"].startswith("peft ")
    assert manifest["loaded"]["equal"] == 3
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "vllm_adapter" / name).read_bytes() == (source.adapter / name).read_bytes()


def test_the_adapter_as_gguf_has_every_factor(source: RunResult, data: Path, tmp_path: Path) -> None:
    manifest = exported("gguf_adapter", source, data, tmp_path, type="f32")
    loaded = manifest["loaded"]
    assert (loaded["factors"], loaded["alpha"]) == (2 * 7 * 2, 8.0)
    assert loaded["opened_by"].startswith("gguf ")


def test_ollama_gets_template_stops_and_system_prompt(source: RunResult, data: Path, tmp_path: Path) -> None:
    manifest = exported("ollama", source, data, tmp_path, system="Be brief.", type="f32")
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
        (
            "use_dora",
            True,
            "use_dora is True, for which vLLM has no form; write train.method: lora, or export",
        ),
        ("modules_to_save", ["lm_head"], "modules_to_save is ['lm_head'], for which vLLM has no form"),
        ("rank_pattern", {"q_proj": 2}, "rank_pattern is {'q_proj': 2}, for which vLLM has no form"),
        ("alpha_pattern", {"q_proj": 2}, "alpha_pattern is {'q_proj': 2}, for which vLLM has no form"),
        ("trainable_token_indices", {"embed_tokens": [5]}, "leave out add_special_tokens and add_tokens"),
        ("target_parameters", ["experts.gate_up_proj"], "name no experts in train.lora.targets"),
        ("bias", "all", "has a trained bias"),
        ("peft_type", "IA3", "peft_type is 'IA3', and vLLM reads LoRA alone"),
    ],
)
def test_what_vllm_does_not_serve_is_one_line(
    key: str, value: Any, said: str, source: RunResult, tmp_path: Path
) -> None:
    assert said in refused("vllm_adapter", changed(source, tmp_path, key, value), tmp_path)


def changed(source: RunResult, folder: Path, key: str, value: Any) -> RunResult:
    shutil.copytree(source.adapter, folder / "adapter")
    config = json.loads((folder / "adapter/adapter_config.json").read_text()) | {key: value}
    (folder / "adapter/adapter_config.json").write_text(json.dumps(config))
    return RunResult(source.model, source.weights, folder / "adapter", source.merged)


def test_other_refusals_are_one_line(source: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "llama-quantize, which is not on the PATH" in refused("gguf", source, tmp_path, type="q4_k_m")
    line = refused("ollama", source, tmp_path, system='end """ SYSTEM')
    assert 'export.ollama.system: \'end """ SYSTEM\' holds' in line
    assert "use_rslora is True" in refused("gguf_adapter", changed(source, tmp_path, "use_rslora", True), tmp_path)
    whole = RunResult(source.model, source.weights, tmp_path / "none", source.merged)
    assert "holds no adapter but all weights; export the merged model, as gguf does" in refused(
        "vllm_adapter", whole, tmp_path
    )


def test_a_tokenizer_that_llama_cpp_does_not_know_is_one_line(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not know this tokenizer"):
        llama_cpp.write_gguf(tiny_model, tmp_path / "model.gguf", "f16")


def test_quantize_is_called_where_it_is_installed(
    source: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a program in its place that writes what it was asked: llama.cpp itself is not here."""
    program = tmp_path / "bin/llama-quantize"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$3" > "$2"\ntest -s "$1"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    llama_cpp.check_types("q4_k_m", "export.gguf.type")
    llama_cpp.write_gguf(source.merged, tmp_path / "model.gguf", "q4_k_m")
    assert (tmp_path / "model.gguf").read_text() == "Q4_K_M\n"
    assert list(tmp_path.glob("*.gguf")) == [tmp_path / "model.gguf"]


def rendered(template: str, messages: list[dict[str, str]], eos: str) -> str:
    """Return what the part of Go's templates that is used here writes: one range over messages, and two fields."""
    head, _, rest = template.partition("{{ range .Messages }}")
    body, _, tail = rest.partition("{{ end }}")
    turns = (body.replace("{{ .Role }}", each["role"]).replace("{{ .Content }}", each["content"]) for each in messages)
    return (head + "".join(turns) + tail).replace("{EOS}", eos)


@pytest.mark.parametrize("name", GO_TEMPLATES)
def test_a_go_template_writes_what_the_prompt_format_does(name: str) -> None:
    tokenizer = tokenizer_like(FAMILIES["zephyr"], PROMPT_FORMATS[name].jinja)
    for chat in TRIED:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert rendered(GO_TEMPLATES[name], chat, "</s>") == text.removeprefix("<s>")
    assert prompt_format(tokenizer) == name


def test_a_models_own_template_is_known_by_what_it_writes() -> None:
    def of(family: str) -> str | None:
        return prompt_format(tokenizer_like(FAMILIES[family], (TEMPLATES / f"{family}.jinja").read_text()))

    assert (of("zephyr"), of("llama-3"), of("mistral-v0.3"), of("llama-2")) == ("zephyr", "llama-3", None, None)


def test_a_stop_token_cannot_write_into_the_modelfile() -> None:
    tokenizer = tokenizer_like(FAMILIES["zephyr"], None)
    tokenizer.add_tokens(['x"\nSYSTEM evil'])
    with pytest.raises(UserError, match="which a Modelfile cannot write"):
        modelfile(tokenizer, [len(tokenizer) - 1], None, "model.gguf")
