"""Merging file by file gives what peft gives."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from zerolora.errors import UserError
from zerolora.manifest import located
from zerolora.merge.merge import merge, restore


def make_adapter(model: Path, folder: Path, **options: Any) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    wrapped = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model),
        LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM", **options),
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    wrapped.save_pretrained(str(folder))
    return folder


def shard(model: Path, folder: Path) -> Path:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(model).save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=["lora", "rslora"])
def test_it_is_what_peft_merges(tmp_path: Path, tiny_model: Path, sharded: bool, options: dict[str, Any]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = shard(tiny_model, tmp_path / "base") if sharded else tiny_model
    adapter = make_adapter(tiny_model, tmp_path / "adapter", **options)
    merge(base, adapter, tmp_path / "merged", tmp_path / "merged")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), adapter).merge_and_unload()
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ours[name], tensor)
    assert not torch.equal(
        ours["model.layers.0.mlp.up_proj.weight"],
        AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()["model.layers.0.mlp.up_proj.weight"],
    )


def test_only_the_files_of_a_model_are_copied(tmp_path: Path, tiny_model: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    for name in ("pytorch_model.bin", "notes.json", "modeling_own.py"):
        (base / name).write_text("not the model's")
    merge(base, make_adapter(tiny_model, tmp_path / "adapter"), tmp_path / "merged", tmp_path / "merged")
    assert {path.name for path in (tmp_path / "merged").iterdir()} == {
        "manifest.json",
        *(path.name for path in tiny_model.iterdir()),
    }


def test_the_merged_directory_loads_with_its_tokenizer(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    merge(tiny_model, make_adapter(tiny_model, tmp_path / "adapter"), tmp_path / "merged", tmp_path / "merged")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    assert located(tmp_path / "merged/manifest.json") == tmp_path / "merged"


def test_unversioned_weights_come_back_byte_for_byte(tmp_path: Path, tiny_model: Path) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    output, place = tmp_path / "results/merged", tmp_path / "work/merged"
    merge(tiny_model, adapter, output, place)
    assert [path.name for path in output.iterdir()] == ["manifest.json"]
    before = (place / "model.safetensors").read_bytes()
    (place / "model.safetensors").unlink()
    restore(tiny_model, adapter, output / "manifest.json")
    assert (place / "model.safetensors").read_bytes() == before


def test_weights_that_merge_to_something_else_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    merge(tiny_model, adapter, tmp_path / "out", tmp_path / "place")
    (tmp_path / "place/model.safetensors").unlink()
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match="merge to other weights"):
        restore(tiny_model, adapter, tmp_path / "out/manifest.json")
    assert not (tmp_path / "place/model.safetensors").exists()


def test_an_adapter_of_another_model_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = next(name for name in tensors if "layers.0" in name)
    save_file(
        {**tensors, name.replace("layers.0", "layers.9"): tensors[name].clone()}, adapter / "adapter_model.safetensors"
    )
    with pytest.raises(UserError, match="layers.9.*trained on another model"):
        merge(tiny_model, adapter, tmp_path / "merged", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_broken_adapter_config_is_named(tmp_path: Path, tiny_model: Path) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    (adapter / "adapter_config.json").write_text(json.dumps({})[:1])
    with pytest.raises(UserError, match="adapter_config.json: not valid JSON"):
        merge(tiny_model, adapter, tmp_path / "merged", tmp_path / "merged")
