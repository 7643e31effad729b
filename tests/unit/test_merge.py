"""Merging file by file gives what peft gives."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from zerolora.config.method_sections import MethodSections
from zerolora.errors import UserError
from zerolora.merge.merge import merge, restore
from zerolora.methods.registry import TRAINABLE
from zerolora.model.added_tokens import AddedToken, write
from zerolora.model.manifest import located
from zerolora.train import earlier_adapter


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


def test_the_merged_model_is_asked_and_stops_as_its_rows_were(tmp_path: Path, tiny_model: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    adapter, data = make_adapter(tiny_model, tmp_path / "adapter"), tmp_path / "data"
    output, place = tmp_path / "results/merged", tmp_path / "work/merged"
    data.mkdir()
    manifest = data / "manifest.json"
    manifest.write_text(
        json.dumps({"files": {}, "chat_template": "{{ messages[0].content }}!", "stop_tokens": ["<|im_start|>"]})
    )
    merge(tiny_model, adapter, output, place, data)
    tokenizer = AutoTokenizer.from_pretrained(place)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi!"
    assert GenerationConfig.from_pretrained(place).eos_token_id == [2, 1]
    (place / "model.safetensors").unlink()
    restore(tiny_model, adapter, output / "manifest.json", data)
    # What the base does by itself is left as it is.
    manifest.write_text(json.dumps({"files": {}, "chat_template": None, "stop_tokens": ["<|im_end|>"]}))
    merge(tiny_model, adapter, output, place, data)
    for path in tiny_model.iterdir():
        assert path.suffix == ".safetensors" or (place / path.name).read_bytes() == path.read_bytes()


def test_a_sharded_model_gets_rows_tokens_and_a_right_index(tmp_path: Path, tiny_model: Path) -> None:
    """With an older tokenizer's list of added tokens, and none of an adapter for the rows: the mean of the others."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base, adapter = shard(tiny_model, tmp_path / "base"), make_adapter(tiny_model, tmp_path / "adapter")
    for path in tiny_model.glob("tokenizer*"):
        shutil.copyfile(path, base / path.name)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(settings | {"added_tokens_decoder": {}}))
    write(adapter, [AddedToken("<x>", 260, True), AddedToken("<y>", 259, False)])
    with pytest.raises(UserError, match="'<x>' is token 259 there, and was trained as 260: the base's tokenizer has"):
        merge(base, adapter, tmp_path / "merged", tmp_path / "merged")
    write(adapter, [AddedToken("<x>", 259, True), AddedToken("<y>", 260, False)])
    merge(base, adapter, tmp_path / "merged", tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    embedding = model.state_dict()["model.embed_tokens.weight"]
    torch.testing.assert_close(embedding[259:], embedding[:259].mean(0).expand(2, -1))
    index = json.loads((tmp_path / "merged/model.safetensors.index.json").read_text())["metadata"]
    tensors = [tensor for path in (tmp_path / "merged").glob("*.safetensors") for tensor in load_file(path).values()]
    assert index["total_size"] == sum(tensor.nbytes for tensor in tensors)
    assert index["total_parameters"] == sum(tensor.numel() for tensor in tensors)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("<x><y>")["input_ids"] == [259, 260]
    listed = json.loads((tmp_path / "merged/tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert {number: token["special"] for number, token in listed.items()} == {"259": True, "260": False}


def test_an_adapter_of_another_model_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = next(name for name in tensors if "layers.0" in name)
    save_file(
        {**tensors, name.replace("layers.0", "layers.9"): tensors[name].clone()}, adapter / "adapter_model.safetensors"
    )
    with pytest.raises(UserError, match="layers.9.*, which the base lacks: it has 2 layers in model.layers, and"):
        merge(tiny_model, adapter, tmp_path / "merged", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_broken_adapter_config_is_named(tmp_path: Path, tiny_model: Path) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    (adapter / "adapter_config.json").write_text(json.dumps({})[:1])
    with pytest.raises(UserError, match="adapter_config.json:1: not valid JSON"):
        merge(tiny_model, adapter, tmp_path / "merged", tmp_path / "merged")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_codes_of_a_quantized_base_are_left_alone(dtype: torch.dtype, tmp_path: Path, tiny_model: Path) -> None:
    """A sum with the adapter's product would be other codes, of no meaning."""
    base, adapter = tmp_path / "base", make_adapter(tiny_model, tmp_path / "adapter")
    shutil.copytree(tiny_model, base)
    tensors = load_file(base / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(dtype)}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError, match=rf"model.safetensors: {name} is stored as .*8.*; take the base model as it was"
    ):
        merge(base, adapter, tmp_path / "merged", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("second", ["", "model-00001-of-00002.safetensors"], ids=["one file", "a file before it"])
def test_a_shared_weight_that_is_stored_twice_stays_shared(second: str, tmp_path: Path, tiny_model: Path) -> None:
    """With two different tensors transformers would not tie them: another model than was trained."""
    from transformers import AutoModelForCausalLM

    base, trained = tmp_path / "base", tmp_path / "trained"
    shutil.copytree(tiny_model, base)
    tensors = load_file(base / "model.safetensors")
    assert "lm_head.weight" not in tensors
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    if second:
        (base / "model.safetensors").unlink()
        places = dict.fromkeys(tensors, "model-00002-of-00002.safetensors") | {"lm_head.weight": second}
        (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        save_file(tensors, base / "model-00002-of-00002.safetensors", {"format": "pt"})
        save_file(head, base / second, {"format": "pt"})
    else:
        save_file(tensors | head, base / "model.safetensors", {"format": "pt"})
    trained.mkdir()
    after = {name: tensor + torch.randn_like(tensor) for name, tensor in tensors.items()}
    save_file(after, trained / "model.safetensors")
    merge(base, trained, tmp_path / "merged", tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, after["model.embed_tokens.weight"])


ODD: dict[str, tuple[str, str, str]] = {
    "a list as config": ("adapter_config.json", "[]", "adapter_config.json: holds []; expected a JSON object"),
    "a number as config": ("adapter_config.json", "1", "adapter_config.json: holds 1; expected a JSON object"),
    "one token, no list": ("tokens.json", '{"token": "<x>"}', "tokens.json: is {'token': '<x>'}; expected a list"),
    "a list of texts": ("tokens.json", '["<x>"]', "tokens.json: 0 is '<x>'; expected an object"),
    "a token with no number": (
        "tokens.json",
        '[{"token": "<x>", "id": "259", "special": true}]',
        "tokens.json: 0.id is '259'; expected a whole number, 0 or more",
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_an_odd_file_of_an_adapter_is_one_line(case: str, tmp_path: Path, tiny_model: Path) -> None:
    """To merge it, and to continue from it."""
    from transformers import AutoModelForCausalLM

    name, content, said = ODD[case]
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    (adapter / name).write_text(content)
    method = TRAINABLE["lora"]
    settings = MethodSections.model_validate({"lora": {"r": 4, "alpha": 12}})
    model = method.build(AutoModelForCausalLM.from_pretrained(tiny_model), settings)
    with pytest.raises(UserError) as merging:
        merge(tiny_model, adapter, tmp_path / "merged", tmp_path / "merged")
    with pytest.raises(UserError) as loading:
        earlier_adapter.load(model, adapter, method)
    for raised in (merging, loading):
        assert said in str(raised.value)
        assert "\n" not in str(raised.value)


def test_an_odd_manifest_of_an_earlier_adapter_is_one_line(tmp_path: Path, tiny_model: Path) -> None:
    """It is read when what was trained from it is published."""
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    (adapter / "manifest.json").write_text("[]")
    with pytest.raises(UserError, match=r"manifest\.json: holds \[\]; expected a JSON object; remove it if another"):
        earlier_adapter.provenance(adapter, TRAINABLE["lora"])
