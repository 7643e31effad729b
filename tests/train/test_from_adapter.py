"""Training continues from an adapter: under every engine, as peft would, or it says in one line why not."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import Bench, metrics
from safetensors.torch import load_file, save_file
from test_methods_train import RUNS, adapter_of, base_of, short_run, train_plainly

from zerolora.files import describe, sha256

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NAMES = ("saved", "dora", "ia3", "full", "nf4")
STEPS = 3


def continued(bench: Bench, name: str, strategy: str) -> Path:
    """Return the directory of a run that continues from one of RUNS, trained by the first who asks."""
    run = bench.folder / f"continued-{name}-{strategy}"
    origin = short_run(bench, name, "zero0") / "adapter"
    return run if run.exists() else bench.run(run.name, strategy, **RUNS[name], from_adapter=str(origin))


@pytest.mark.parametrize("name", NAMES)
def test_it_equals_pefts_training_of_that_adapter(name: str, bench: Bench, tiny_model: Path) -> None:
    """The published adapter, opened by peft and trained on by a loop of one's own, with a fresh optimizer."""
    from peft import PeftModel, get_peft_model_state_dict

    origin, run = short_run(bench, name, "zero0"), continued(bench, name, "zero0")
    model: Any = base_of(tiny_model, RUNS[name])
    if name == "full":
        model.load_state_dict(adapter_of(origin), strict=False)
    else:
        model = PeftModel.from_pretrained(model, str(origin / "adapter"), is_trainable=True)
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    train_plainly(model, [{"params": [*trained.values()], "ratio": 1.0}], bench, run, STEPS)
    theirs = trained if name == "full" else get_peft_model_state_dict(model)
    ours = adapter_of(run)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor.detach(), rtol=1e-4, atol=1e-4, msg=key)


# Each way of reading the base weights with each way of holding what is trained.
@pytest.mark.parametrize(
    ("name", "strategy"),
    [("saved", "zero3"), ("dora", "ddp"), ("ia3", "fsdp"), ("nf4", "zero3")],
)
def test_it_continues_alike_under_every_engine(name: str, strategy: str, bench: Bench) -> None:
    actual, expected = (metrics(continued(bench, name, each)) for each in (strategy, "zero0"))
    assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert actual["loss_validation"] == pytest.approx(expected["loss_validation"], rel=1e-5)


def test_it_is_resumed_only_from_the_same_adapter(bench: Bench) -> None:
    """And its manifest says what it continued from."""
    begun = continued(bench, "saved", "zero0")
    origin = short_run(bench, "saved", "zero0") / "adapter"
    recorded = json.loads((begun / "adapter/manifest.json").read_text())["from_adapter"]
    files = json.loads((origin / "manifest.json").read_text())["files"]
    assert recorded == {"directory": str(origin), "sha256": files["adapter_model.safetensors"]["sha256"]}

    shutil.copytree(bench.folder / "checkpoints" / begun.name, bench.folder / "checkpoints/moved")
    for last in (bench.folder / "checkpoints/moved").glob("*/step-00000003.safetensors"):
        last.unlink()
        (last.parent / "finished").unlink()
    shutil.copytree(origin, bench.folder / "elsewhere")
    settings = RUNS["saved"] | {"from_adapter": str(bench.folder / "elsewhere")}
    assert "resuming at step 2 of 3" in bench.start("moved", "zero0", **settings).stderr
    assert metrics(bench.folder / "moved")["losses"] == metrics(begun)["losses"]

    (bench.folder / "elsewhere/manifest.json").unlink()
    other = {name: tensor + 1e-3 for name, tensor in adapter_of(origin.parent).items()}
    save_file(other, bench.folder / "elsewhere/adapter_model.safetensors")
    for last in (bench.folder / "checkpoints/moved").glob("*/step-00000003.safetensors"):
        last.unlink()
        (last.parent / "finished").unlink()
    assert "the adapter that training continues from is another" in bench.start("moved", "zero0", **settings).stderr


def test_its_origin_is_needed_at_the_start_alone(bench: Bench) -> None:
    origin = bench.folder / "moved-origin"
    shutil.copytree(short_run(bench, "lora", "zero0") / "adapter", origin)
    held = sha256(origin / "adapter_model.safetensors")
    process = bench.begin("orphan", "zero0", **RUNS["lora"], from_adapter=str(origin))
    while not list((bench.folder / "checkpoints/orphan").glob("*/step-00000001.safetensors")):
        assert process.runs(), process.errors()
        time.sleep(0.02)
    shutil.rmtree(origin)
    assert process.wait() == 0, process.errors()
    manifest = json.loads((bench.folder / "orphan/adapter/manifest.json").read_text())
    assert manifest["from_adapter"]["sha256"] == held


def spoiled(origin: Path, folder: Path, what: str) -> None:
    shutil.copytree(origin, folder)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, values = load_file(weights), json.loads(config.read_text())
    name = next(key for key in tensors if "lora_A" in key)
    match what:
        case "shape":
            tensors[name] = tensors[name][:, 1:].contiguous()
        case "other":
            tensors[name] = tensors[name] + 1
        case "missing":
            del tensors[name]
        case "scale":
            values |= {"lora_alpha": 99, "use_rslora": True}
        case "tokens":
            (folder / "tokens.json").write_text(json.dumps([{"token": "<note>", "id": 258, "special": False}]))
        case "gone":
            weights.unlink()
        case "base":
            manifest = json.loads((folder / "manifest.json").read_text())
            manifest["base_model"] |= {"name": "some/model", "revision": "1" * 40, "weights": "2" * 64}
            (folder / "manifest.json").write_text(json.dumps(manifest))
    if what == "truncated":
        weights.write_bytes(weights.read_bytes()[:-9])
    elif what != "gone":
        save_file(tensors, weights)
    if what == "scale":
        config.write_text(json.dumps(values))
    if what not in ("gone", "other"):
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").unlink()
        (folder / "manifest.json").write_text(json.dumps(manifest | {"files": describe(folder)}))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("shape", "lora_A.weight is [4, 47], and this run's is [4, 48]; use the method, r and targets"),
        ("other", "adapter_model.safetensors: is not the file that"),
        ("missing", "lora_A.weight is missing; use the method, r and targets of that adapter"),
        (
            "scale",
            "lora_alpha is 99, and this run's is 16.0; use_rslora is True, and this run's is False; "
            "set train.lora.alpha and train.lora.rank_stabilized as that adapter has them",
        ),
        ("gone", "adapter_model.safetensors: there is not the file that"),
        ("tokens", "was trained with other tokens than the data adds; list '<note>' in add_special_tokens and"),
        ("truncated", "not a whole safetensors file"),
        ("base", f"base_model is some/model at {'1' * 12} (weights {'2' * 12}), and this base is /"),
    ],
)
def test_another_adapter_is_one_line(what: str, said: str, bench: Bench) -> None:
    folder = bench.folder / f"spoiled-{what}"
    spoiled(short_run(bench, "lora", "zero0") / "adapter", folder, what)
    result = bench.start(f"refused-{what}", "zero0", **RUNS["lora"], from_adapter=str(folder))
    assert result.returncode == 2
    (line,) = {line for line in result.stderr.splitlines() if "train.from_adapter" in line}  # of one rank or of both
    assert said in line
    assert "Traceback" not in result.stderr


def test_a_scale_that_an_older_peft_did_not_write_is_the_plain_one(bench: Bench) -> None:
    folder = bench.folder / "spoiled-older"
    shutil.copytree(short_run(bench, "lora", "zero0") / "adapter", folder)
    values = json.loads((folder / "adapter_config.json").read_text())
    del values["use_rslora"]
    (folder / "adapter_config.json").write_text(json.dumps(values))
    (folder / "manifest.json").unlink()
    stabilized = {"lora": {"r": 4, "rank_stabilized": True}}
    result = bench.start("refused-older", "zero0", **stabilized, from_adapter=str(folder))
    assert result.returncode == 2
    assert "use_rslora is False, and this run's is True; set train.lora.rank_stabilized" in result.stderr
