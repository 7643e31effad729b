"""The pipeline's merge: weights, tokenizer, added tokens, restored weights, refusals; and what it lost, by logits."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from zerolora.config.method_sections import MethodSections
from zerolora.data.prepared_rows import IGNORED
from zerolora.errors import UserError
from zerolora.evaluate.evaluated_models import EvaluatedModel, load
from zerolora.evaluate.merged_logits import BOUND, next_tokens, of_base, of_merged
from zerolora.fail_if import OF_MERGED, OF_TRAINED
from zerolora.fetch.ready import nothing_to_restore
from zerolora.merge.merge import merge, restore
from zerolora.merge.user_merge import merge_by_hand
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


def test_merge_matches_peft(tmp_path: Path, tiny_model: Path) -> None:
    """Of a sharded base; test_merge_golden.py has every method and family."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, adapter = shard(tiny_model, tmp_path / "base"), make_adapter(tiny_model, tmp_path / "adapter")
    merge(base, adapter, tmp_path / "merged", tmp_path / "merged")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    before = model.state_dict()["model.layers.0.mlp.up_proj.weight"].clone()
    theirs = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ours[name], tensor)
    assert not torch.equal(ours["model.layers.0.mlp.up_proj.weight"], before)


def test_only_model_files_are_copied(tmp_path: Path, tiny_model: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    for name in ("pytorch_model.bin", "notes.json", "modeling_own.py"):
        (base / name).write_text("not the model's")
    merge(base, make_adapter(tiny_model, tmp_path / "adapter"), tmp_path / "merged", tmp_path / "merged")
    assert {path.name for path in (tmp_path / "merged").iterdir()} == {
        "manifest.json",
        *(path.name for path in tiny_model.iterdir()),
    }
    assert located(tmp_path / "merged/manifest.json") == tmp_path / "merged"


def test_restore_rebuilds_weights_byte_for_byte(tmp_path: Path, tiny_model: Path) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    output, place = tmp_path / "results/merged", tmp_path / "work/merged"
    merge(tiny_model, adapter, output, place)
    assert [path.name for path in output.iterdir()] == ["manifest.json"]
    before = (place / "model.safetensors").read_bytes()
    stamp = tmp_path / "stamp.json"
    stamp.write_text(json.dumps({"path": str(tiny_model), "files": {}}))
    options = {"--weights": stamp, "--adapter": adapter, "--data": tmp_path, "--manifest": output / "manifest.json"}
    line = ["merged-weights", *(str(text) for option in options.items() for text in option)]
    assert nothing_to_restore(line) and not nothing_to_restore(line[:-2])
    (place / "model.safetensors").unlink()
    assert not nothing_to_restore(line)
    restore(tiny_model, adapter, output / "manifest.json")
    assert (place / "model.safetensors").read_bytes() == before
    assert nothing_to_restore(line)
    # As many bytes of another merge, as after the checkout of another commit.
    (place / "model.safetensors").write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    assert not nothing_to_restore(line)
    restore(tiny_model, adapter, output / "manifest.json")
    assert (place / "model.safetensors").read_bytes() == before
    manifest = json.loads((output / "manifest.json").read_text())
    manifest["files"]["model.safetensors"]["sha256"] = "0" * 64
    (output / "manifest.json").write_text(json.dumps(manifest))
    assert not nothing_to_restore(line), "the weights are those of another manifest"
    stamp.unlink()
    assert not nothing_to_restore(line)


def test_restore_refuses_other_weights(tmp_path: Path, tiny_model: Path) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    merge(tiny_model, adapter, tmp_path / "out", tmp_path / "place")
    (tmp_path / "place/model.safetensors").unlink()
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match="merge to other weights"):
        restore(tiny_model, adapter, tmp_path / "out/manifest.json")
    assert not (tmp_path / "place/model.safetensors").exists()


def test_merged_model_has_template_and_stop_tokens_of_the_data(tmp_path: Path, tiny_model: Path) -> None:
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
    # What the base already does changes no file.
    manifest.write_text(json.dumps({"files": {}, "chat_template": None, "stop_tokens": ["<|im_end|>"]}))
    merge(tiny_model, adapter, output, place, data)
    for path in tiny_model.iterdir():
        assert path.suffix == ".safetensors" or (place / path.name).read_bytes() == path.read_bytes()


def test_sharded_merge_adds_token_rows_and_updates_the_index(tmp_path: Path, tiny_model: Path) -> None:
    """With an older tokenizer's added_tokens_decoder. The adapter has no rows for the tokens: they are means."""
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


def test_adapter_of_another_model_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = next(name for name in tensors if "layers.0" in name)
    save_file(
        {**tensors, name.replace("layers.0", "layers.9"): tensors[name].clone()}, adapter / "adapter_model.safetensors"
    )
    with pytest.raises(UserError, match="layers.9.*, which the base lacks: it has 2 layers in model.layers, and"):
        merge(tiny_model, adapter, tmp_path / "merged", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_quantized_base_is_refused(dtype: torch.dtype, tmp_path: Path, tiny_model: Path) -> None:
    """Adding an update to codes would be meaningless."""
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
def test_tied_weight_stored_twice_stays_tied(second: str, tmp_path: Path, tiny_model: Path) -> None:
    """With two different tensors transformers would not tie them: not the trained model."""
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
    "no JSON as config": ("adapter_config.json", "{", "adapter_config.json:1: not valid JSON"),
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
def test_malformed_adapter_file_is_one_line(case: str, tmp_path: Path, tiny_model: Path) -> None:
    """When merged, and when training continues from it."""
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


def test_malformed_manifest_of_earlier_adapter_is_one_line(tmp_path: Path, tiny_model: Path) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    (adapter / "manifest.json").write_text("[]")
    with pytest.raises(UserError, match=r"manifest\.json: holds \[\]; expected a JSON object; remove it if another"):
        earlier_adapter.provenance(adapter, TRAINABLE["lora"])


# --- logits of the merged model ---


CPU = torch.device("cpu")


def row(tokens: list[int], prompt: int) -> dict[str, Any]:
    labels = [IGNORED] * prompt + tokens[prompt:]
    return {"input_ids": tokens, "labels": labels, "prompt": prompt, "length": len(tokens)}


ROWS = [row([5, 9, 40, 77, 2], 2), row([8, 100, 30, 31, 32, 33, 2], 3), row([60, 61, 62], 0)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return prepared data without added tokens."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/manifest.json").write_text(json.dumps({"added_tokens": [], "files": {}}))
    return tmp_path / "data"


def figures(base: Path, adapter: Path, merged: Path, data: Path) -> dict[str, float]:
    logits = next_tokens(load(merged, CPU, [])[0], ROWS)
    assert logits.shape[0] == 3 + 4 + 2  # supervised tokens with a token before them
    model = EvaluatedModel(base, adapter, merged)
    return of_merged(logits, *of_base(model, data, ROWS)[:2], model, data, ROWS)


def test_merge_loses_nothing(tiny_model: Path, tmp_path: Path, data: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    merge_by_hand(tiny_model, [adapter], [], tmp_path / "merged")
    actual = figures(tiny_model, adapter, tmp_path / "merged", data)
    assert tuple(actual) == OF_MERGED
    assert actual["merged_kl"] < 1e-6 and actual["merged_kl_share"] < 1e-3
    assert actual["merged_argmax"] == 1 and 0 < actual["merged_logits"] < 1e-4
    assert "is not what was trained" not in caplog.text


def test_lost_adapter_is_reported(
    tiny_model: Path, tmp_path: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As when rounding swallows the update: the merged model is the base model."""
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    shutil.copytree(tiny_model, tmp_path / "merged")
    with caplog.at_level(logging.WARNING):
        actual = figures(tiny_model, adapter, tmp_path / "merged", data)
    assert actual["merged_kl_share"] == pytest.approx(1) and actual["merged_kl_share"] > BOUND
    assert actual["merged_kl"] > 1e-5
    assert "100 % of what fine-tuning changed is lost" in caplog.text


def test_divergence_matches_torch(tiny_model: Path, tmp_path: Path, data: Path) -> None:
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    other = next_tokens(load(tiny_model, CPU, [])[0], ROWS)
    tuned = next_tokens(load(tiny_model, CPU, [], adapter)[0], ROWS)
    model = EvaluatedModel(tiny_model, adapter, tiny_model)
    actual = of_merged(other, *of_base(model, data, ROWS)[:2], model, data, ROWS)
    theirs = torch.nn.functional.kl_div(other, tuned, log_target=True, reduction="batchmean")
    assert actual["merged_kl"] == pytest.approx(theirs.item(), rel=1e-4)
    assert actual["merged_logits"] == pytest.approx((other - tuned).abs().max().item())


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_qlora_adapter_belongs_to_the_dequantized_base(kind: str, tiny_model: Path, tmp_path: Path, data: Path) -> None:
    """Only the merge into the dequantized base is the trained model."""
    adapter = make_adapter(tiny_model, tmp_path / "adapter")
    quantization = {"type": kind, "double": True, "precision": "fp32"}
    (adapter / "manifest.json").write_text(json.dumps({"files": {}, "quantization": quantization}))
    actual = {}
    for dequantized in (True, False):
        output = tmp_path / f"merged-{dequantized}"
        merge_by_hand(tiny_model, [adapter], [], output, dequantized=dequantized)
        actual[dequantized] = figures(tiny_model, adapter, output, data)
        assert tuple(actual[dequantized]) == OF_MERGED + OF_TRAINED
    assert actual[True]["trained_logits"] < 1e-4 < actual[True]["merged_logits"]
    assert actual[False]["merged_logits"] < 1e-4 < actual[False]["trained_logits"]
    # int8 is so close to the original that both divergences may be fp32 rounding, about 1e-7.
    assert actual[True]["trained_kl"] <= actual[False]["trained_kl"] + 1e-6
