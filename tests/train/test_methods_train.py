"""Every method: trained as peft would train it, by every engine, resumed under another one, and merged."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bench import Bench, metrics
from conftest import TINY_CONFIG, refusal
from safetensors.torch import load_file
from training_plan import training_plan

from zerolora.config.file import load
from zerolora.config.settings import EvaluateRunSettings
from zerolora.conflict import Conflict
from zerolora.data.packing_plan import open_plan
from zerolora.data.prepared_rows import open_split
from zerolora.errors import UserError
from zerolora.evaluate.evaluate import EvaluatedModel, evaluate
from zerolora.merge.merge import merge
from zerolora.methods.registry import TRAINABLE
from zerolora.strategies import STRATEGIES
from zerolora.strategies.strategy import Target
from zerolora.train.base_model import quantization_config
from zerolora.train.feed import Batches

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATTERNS = {"r": 4, "targets": r".*_proj", "rank_pattern": {"q_proj": 8}, "alpha_pattern": {r"layers\.1\..*": 3.0}}
QUANTIZED = {kind: {"method": "qlora", "quantization": {"type": kind}} for kind in ("nf4", "fp4", "int8")}
RUNS: dict[str, dict[str, Any]] = {
    "lora": {},
    "patterns": {"lora": PATTERNS},
    "saved": {"lora": {"r": 4, "modules_to_save": ["norm"]}},
    "plus": {"lora": {"r": 4, "rank_stabilized": True, "plus_ratio": 4.0}},
    "dora": {"method": "dora"},
    "pissa": {"lora": {"r": 4, "init": "pissa", "rank_stabilized": True, "rank_pattern": {"q_proj": 8}}},
    "olora": {"method": "dora", "lora": {"r": 4, "init": "olora", "alpha_pattern": {"q_proj": 8.0}}},
    "ia3": {"method": "ia3"},
    "vera": {"method": "vera", "vera": {"r": 32, "d_initial": 0.5}},
    "full": {"method": "full"},
    **QUANTIZED,
    "qdora": {"method": "qdora", "quantization": {"type": "nf4"}},
    "single": {"method": "qlora", "quantization": {"double": False}},
    "tokens": {"data": "marked", "packing": "marked-packing"},
    "tokens dora": {"data": "marked", "packing": "marked-packing", "method": "dora"},
    "tokens full": {"data": "marked", "packing": "marked-packing", "method": "full"},
    "tokens nf4": {"data": "marked", "packing": "marked-packing", **QUANTIZED["nf4"]},
}
OWN = [name for name in RUNS if name not in ("lora", "nf4", "single", "tokens dora")]
"""Those that no other one is more than: "plus" is lora with a rate of its own, "tokens nf4" is nf4 with more rows."""
NUMBERS = [259, 260, 261]
"""Of the tokens that the data "marked" adds."""
STEPS = 10
FROZEN = {"nf4": "nf4", "qdora": "nf4", "int8": "int8"}


def adapter_of(run: Path) -> dict[str, torch.Tensor]:
    (path,) = (run / "adapter").glob("*.safetensors")
    return load_file(path)


def peft_config(settings: dict[str, Any]) -> Any:
    """Return peft's config for the same training."""
    from peft import IA3Config, LoraConfig, VeraConfig

    lora = {"r": 4} | settings.get("lora", {})
    match settings.get("method", "lora"):
        case "ia3":
            return IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
        case "vera":
            return VeraConfig(r=32, d_initial=0.5, target_modules="all-linear", task_type="CAUSAL_LM")
        case method:
            return LoraConfig(
                r=lora["r"],
                lora_alpha=16,
                target_modules=lora.get("targets", "all-linear"),
                rank_pattern=lora.get("rank_pattern", {}),
                alpha_pattern=lora.get("alpha_pattern", {}),
                modules_to_save=lora.get("modules_to_save"),
                use_rslora=lora.get("rank_stabilized", False),
                use_dora=method in ("dora", "qdora"),
                init_lora_weights=lora.get("init", True),
                trainable_token_indices=NUMBERS if "data" in settings else None,
                task_type="CAUSAL_LM",
            )


def base_of(model: Path, settings: dict[str, Any]) -> Any:
    """Return the base model as transformers reads it, quantized if the training is to be."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if settings.get("method") not in ("qlora", "qdora"):
        return with_rows(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), settings)
    kind = settings["quantization"].get("type", "nf4")
    four = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": settings["quantization"].get("double", True),
        "bnb_4bit_compute_dtype": torch.float32,
    }
    quantization = BitsAndBytesConfig(load_in_8bit=True) if kind == "int8" else BitsAndBytesConfig(**four)
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, quantization_config=quantization, device_map={"": "cpu"}
    )
    return with_rows(loaded, settings)


def with_rows(model: Any, settings: dict[str, Any]) -> Any:
    """Return a model with the rows of the data's tokens, which start as the mean of the others."""
    if "data" in settings:
        model.resize_token_embeddings(max(NUMBERS) + 1, mean_resizing=False)
        weight = model.get_input_embeddings().weight.data
        weight[NUMBERS] = weight[: min(NUMBERS)].double().mean(0).float()
    return model


def answer_of(model: Any) -> torch.Tensor:
    result: torch.Tensor = model.eval()(input_ids=torch.arange(1, 30)[None]).logits
    return result


def long_run(bench: Bench, name: str) -> Path:
    """Return the directory of one of RUNS after 10 steps on one rank at stage 0, trained by the first who asks."""
    run = bench.folder / f"long-{name}"
    # At ten times the rate Adam makes more than 1e-5 of rounding in these steps.
    whole = {"max_steps": STEPS, "epochs": 10, "ranks_per_node": 1, "checkpoint_steps": None, "learning_rate": 1e-3}
    return run if run.exists() else trained(bench, run.name, "zero0", **whole, **RUNS[name])


def short_run(bench: Bench, name: str, strategy: str) -> Path:
    """Return the directory of one of RUNS after three steps on two ranks, trained by the first who asks."""
    run = bench.folder / f"{name}-{strategy}"
    # To gather a checkpoint takes a fifth of such a run, and only those of these strategies are resumed.
    resumed = {} if strategy in ("zero0", *(before for before, _ in PAIRS)) else {"checkpoint_steps": None}
    return run if run.exists() else trained(bench, run.name, strategy, **RUNS[name], **resumed)


def trained(bench: Bench, name: str, strategy: str, **settings: Any) -> Path:
    """Return the directory of a run, on data that is made by the first who asks."""
    if settings.get("data") == "marked" and not (bench.folder / "marked").exists():
        bench.mark()
    return bench.run(name, strategy, **settings)


def train_plainly(
    model: Any, groups: list[dict[str, Any]], bench: Bench, run: Path, steps: int, **settings: Any
) -> None:
    """Train a model on the rows of a run, at its learning rates, and compare each step's loss."""
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    plan = training_plan(global_batch=4, epochs=10, max_steps=steps, accumulation=4)
    data, packing = (bench.folder / settings.get(*each) for each in (("data", "data"), ("packing", "unpacked")))
    batches = Batches(open_split(data, "train"), open_plan(packing / "train.arrow"), plan, 0, 1)
    lines = (run / "metrics/loss.csv").read_text().splitlines()[1:]
    model.train()
    for step in range(steps):
        micro_batches, units = batches.at(step)
        total = 0.0
        for row in (row for micro_batch in micro_batches for packed in micro_batch for row in packed):
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
            labels = torch.tensor(row["labels"][1:]).long()
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            loss = loss / units["supervised token"]
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_([value for group in groups for value in group["params"]], 1.0)
        _, loss_text, rate, *_ = lines[step].split(",")
        assert float(loss_text) == pytest.approx(total, rel=1e-5)
        for group in optimizer.param_groups:
            group["lr"] = group["ratio"] * float(rate)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", OWN)
def test_it_is_pefts_own_after_10_steps(name: str, bench: Bench, tiny_model: Path) -> None:
    """A loop of one's own over the same rows, with transformers, peft and torch alone: the same adapter in fp32."""
    from peft import get_peft_model, get_peft_model_state_dict

    settings, run = RUNS[name], long_run(bench, name)
    model = base_of(tiny_model, settings)
    torch.manual_seed(42)
    full = settings.get("method") == "full"
    model = model if full else get_peft_model(model, peft_config(settings), autocast_adapter_dtype=False)
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad}
    taken = "init" in settings.get("lora", {})
    start = {key: tensor.clone() for key, tensor in get_peft_model_state_dict(model).items()} if taken else {}
    ratio = settings.get("lora", {}).get("plus_ratio", 1.0)
    groups = [{"params": [value], "ratio": ratio if "lora_B" in key else 1.0} for key, value in trained.items()]
    train_plainly(model, groups, bench, run, STEPS, **settings)
    theirs = dict(trained) if full else get_peft_model_state_dict(model, save_embedding_layers=False)
    for key, before in start.items():  # as peft converts it to an adapter of the original base (subtract_mutated_init)
        if "lora_A" in key or "lora_B" in key:
            both = (theirs[key].detach(), before) if "lora_A" in key else (theirs[key].detach(), -before)
            theirs[key] = torch.cat(both, dim=int("lora_B" in key))
    ours = adapter_of(run)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        # Adam's first step of a gradient near 0 is as long as any other, whatever its rounding.
        torch.testing.assert_close(ours[key], tensor.detach(), rtol=1e-5, atol=3e-5, msg=key)
    if taken:  # and plain peft puts it on the original base
        from peft import PeftModel

        published = PeftModel.from_pretrained(base_of(tiny_model, settings), str(run / "adapter"))
        torch.testing.assert_close(answer_of(published), answer_of(model), rtol=1e-4, atol=1e-4)


def conflict_of(name: str, strategy: str) -> Conflict | None:
    """Return why one of RUNS is refused under a strategy, if it is."""
    target = Target(
        device="cpu", precision="fp32", nodes=1, ranks_per_node=2, nvme=None, frozen_type=FROZEN.get(name),
        unpacks=name == "qdora",
    )  # fmt: skip
    return STRATEGIES[strategy].conflict(target)


# Quantizing gradients needs a GPU's kernels; tests/train/test_nvme.py is about NVMe.
ON_GPU = ("zero3_quantized", "zero3_qgz")
ON_CPU = [name for name in STRATEGIES if name not in ("zero0", *ON_GPU, "zero3_nvme")]
# How engines divide base weights and what is trained: whole, one of the two, both, on the host. The other strategies
# divide them as they do lora's. The last ones are resumed under another engine.
TRAINED = {
    "dora": ("zero3_hpz", "fsdp_hybrid_offload", "ddp"),  # whose magnitudes need the norms of whole base weights
    "ia3": ("zero3_offload", "ddp", "zero2"),
    "full": ("zero3_offload", "fsdp_hybrid_offload", "ddp", "zero2"),
    "nf4": ("zero3_offload", "fsdp_hybrid_offload", "ddp", "zero2"),
    "int8": ("ddp",),
    "qdora": ("ddp", "zero2"),
    "vera": ("zero3_offload", "fsdp", "ddp"),
    "pissa": ("zero3", "fsdp", "ddp"),  # what is taken out of the base weights depends on how they are read
    "tokens": ("zero3", "zero2"),
    "tokens full": ("zero3",),
}
CELLS = [(name, strategy) for name, strategies in TRAINED.items() for strategy in strategies]
REFUSED = [
    (name, each) for name in ("ia3", "full", "nf4", "int8", "qdora") for each in ON_CPU if conflict_of(name, each)
]


RESUMED = ("saved", "pissa", "tokens", "vera", "qdora", "dora", "ia3", "full", "nf4")
# Each method continues in one of these ways; all weights, which engines divide in other ways than an adapter, in both.
PAIRS = (("zero2", "fsdp"), ("ddp", "zero3"))
# What is published of the others is an adapter of the base before it was quantized, with another loss.
MERGED = [name for name in OWN if RUNS[name].get("method") not in ("qlora", "qdora")]


RESUMES = [
    (name, *pair) for number, name in enumerate(RESUMED) for pair in (PAIRS if name == "full" else [PAIRS[number % 2]])
]


def test_every_method_trains_on_every_engine_resumes_and_is_merged() -> None:
    """A method that is added to the registry is in the tests of this file, by name."""
    method = {name: run.get("method", "lora") for name, run in RUNS.items()}
    assert set(method.values()) == set(TRAINABLE)
    resumed = [(name, after) for name, _, after in RESUMES]
    engines = {(method[name], STRATEGIES[strategy].engine) for name, strategy in CELLS + resumed}
    # tests/train/test_training.py trains lora under every strategy.
    assert {engine for each, engine in engines if each != "lora"} == {each.engine for each in STRATEGIES.values()}
    for each in set(TRAINABLE) - {"lora"}:
        assert {engine for other, engine in engines if other == each} >= {"ddp", "fsdp", "deepspeed"}, each
    assert {method[name] for name in RESUMED} == set(TRAINABLE)
    assert {method[name] for name in MERGED} == {name for name, each in TRAINABLE.items() if not each.quantizes()}


def test_an_adapter_says_how_its_base_was_quantized(bench: Bench) -> None:
    """What `zerolora merge --dequantized` reads."""
    actual = json.loads((short_run(bench, "nf4", "ddp") / "adapter/manifest.json").read_text())
    assert actual["quantization"] == {"type": "nf4", "double": True, "precision": "fp32"}
    plain = json.loads((short_run(bench, "dora", "ddp") / "adapter/manifest.json").read_text())
    assert "quantization" not in plain


@pytest.mark.parametrize(("name", "strategy"), REFUSED)
def test_a_strategy_that_cannot_is_one_line(name: str, strategy: str, tmp_path: Path) -> None:
    config = json.loads(json.dumps(TINY_CONFIG)) | {"render": {"strategy": strategy}}
    config["train"] |= RUNS[name] | {"ranks_per_node": 2, "micro_batch": 1}
    (tmp_path / "refused.yaml").write_text(yaml.safe_dump(config))
    conflict = conflict_of(name, strategy)
    assert conflict and conflict.problem in refusal(load, tmp_path / "refused.yaml")


@pytest.mark.parametrize(("name", "strategy"), CELLS)
def test_every_strategy_trains_it_alike(name: str, strategy: str, bench: Bench) -> None:
    """Cells of the table in docs/methods.md that a CPU can run."""
    run, reference = short_run(bench, name, strategy), short_run(bench, name, "zero0")
    actual, expected = metrics(run), metrics(reference)
    assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert actual["loss_validation"] == pytest.approx(expected["loss_validation"], rel=1e-5)
    ours, theirs = adapter_of(run), adapter_of(reference)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.parametrize(("name", "before", "after"), RESUMES)
def test_it_resumes_under_another_engine(name: str, before: str, after: str, bench: Bench) -> None:
    """What one engine had trained two steps of, another one finishes."""
    begun, resumed = short_run(bench, name, before).name, f"{name}-{before}-{after}"
    shutil.copytree(bench.folder / "checkpoints" / begun, bench.folder / "checkpoints" / resumed)
    for last in (bench.folder / "checkpoints" / resumed).glob("*/step-00000003.safetensors"):
        last.unlink()
        (last.parent / "finished").unlink(missing_ok=True)
    result = bench.start(resumed, after, **RUNS[name])
    assert "resuming at step 2 of 3" in result.stderr, result.stderr[-2000:]
    expected = metrics(short_run(bench, name, "zero0"))["losses"]
    assert metrics(bench.folder / resumed)["losses"] == pytest.approx(expected, rel=1e-5)


def test_bf16_run_with_saved_modules_and_pissa_is_published_and_resumed(
    bench: Bench, tiny_model: Path, tmp_path: Path
) -> None:
    """Where ddp keeps a saved module's weight under another name, and the first factors have the model's own type."""
    settings = {"precision": "bf16", "lora": {"r": 4, "init": "pissa", "modules_to_save": ["norm"]}}
    run = bench.run("bf16-ddp", "ddp", **settings)
    shutil.copytree(bench.folder / "checkpoints/bf16-ddp", bench.folder / "checkpoints/bf16-zero3")
    (last,) = (bench.folder / "checkpoints/bf16-zero3").glob("*/step-00000003.safetensors")
    last.unlink()
    (last.parent / "finished").unlink(missing_ok=True)
    result = bench.start("bf16-zero3", "zero3", **settings)
    assert "resuming at step 2 of 3" in result.stderr, result.stderr[-2000:]
    actual = metrics(run)
    for name in (run, bench.folder / "bf16-zero3"):
        assert metrics(name)["losses"] == pytest.approx(actual["losses"], rel=2e-4)
        merge(tiny_model, name / "adapter", tmp_path / name.name, tmp_path / name.name)
        assert validation_loss(bench, tmp_path / name.name) == pytest.approx(actual["loss_validation"], rel=3e-4)
    saved = adapter_of(run)["base_model.model.model.norm.weight"]
    assert saved.dtype == torch.float32
    assert not torch.equal(saved, load_file(tiny_model / "model.safetensors")["model.norm.weight"])


@pytest.mark.parametrize("name", MERGED)
def test_merged_model_has_the_validation_loss_of_training(
    name: str, bench: Bench, tiny_model: Path, tmp_path: Path
) -> None:
    """The merged model has the validation loss that training reports."""
    run = long_run(bench, name)
    merge(tiny_model, run / "adapter", tmp_path / "merged", tmp_path / "merged")
    actual = validation_loss(bench, tmp_path / "merged", RUNS[name].get("data", "data"))
    assert actual == pytest.approx(metrics(run)["loss_validation"], rel=1e-5)


def validation_loss(bench: Bench, model: Path, data: str = "data") -> float:
    """Return the loss of a model's directory, read by transformers alone, on the validation rows."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total, tokens = 0.0, 0
    with torch.no_grad():
        for row in open_split(bench.folder / data, "validation"):
            logits = loaded(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
            labels = torch.tensor(row["labels"][1:])
            total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            tokens += int((labels != -100).sum())
    return total / tokens


def test_run_resumes_only_with_its_starting_factors(bench: Bench) -> None:
    """Its checkpoints hold what was trained of them; without what was taken out of the base they mean another model."""
    begun, lost = short_run(bench, "pissa", "zero0").name, "pissa-lost"
    shutil.copytree(bench.folder / "checkpoints" / begun, bench.folder / "checkpoints" / lost)
    (start,) = (bench.folder / "checkpoints" / lost).glob("*/start/step-00000000.safetensors")
    start.write_bytes(start.read_bytes()[:-1])
    for step in start.parent.parent.glob("step-00000003*"):
        step.unlink()
    result = bench.start(lost, "zero0", **RUNS["pissa"])
    assert result.returncode == 2
    assert f"{start}: not a whole" in result.stderr
    assert "restore the file, or set train.resume: never to start over" in result.stderr
    assert "Traceback" not in result.stderr
    bench.run(lost, "zero0", **RUNS["pissa"], resume="never")
    assert metrics(bench.folder / lost)["losses"] == metrics(bench.folder / begun)["losses"]


def test_added_tokens_are_in_the_merged_model_as_in_plain_pefts(bench: Bench, tiny_model: Path, tmp_path: Path) -> None:
    """Its tokenizer has them, its logits equal those of peft on a resized base, and the base can be evaluated."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, data = long_run(bench, "tokens"), bench.folder / "marked"
    merge(tiny_model, run / "adapter", tmp_path / "merged", tmp_path / "merged", data)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    row = open_split(data, "test")[0]
    ids = torch.tensor([row["input_ids"]])
    assert set(NUMBERS) <= set(row["input_ids"])
    assert tokenizer(tokenizer.decode(row["input_ids"]))["input_ids"] == row["input_ids"]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.vocab_size == merged.get_input_embeddings().num_embeddings == max(NUMBERS) + 1
    assert merged.generation_config.eos_token_id == [2, 260]
    base = with_rows(AutoModelForCausalLM.from_pretrained(tiny_model), RUNS["tokens"])
    theirs = PeftModel.from_pretrained(base, run / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-5)
    adapter = run / "adapter"
    models = {
        "base": EvaluatedModel(tiny_model),
        "both": EvaluatedModel(tiny_model, adapter),
        "merged": EvaluatedModel(tiny_model, adapter, tmp_path / "merged"),
    }
    for name, weights in models.items():
        settings = EvaluateRunSettings(split="test", rows=2, batch=2, max_new_tokens=4, check="sum")
        evaluate(settings, data, weights, tmp_path / name, tmp_path / name / "answers.json")
    before, both, after = (json.loads((tmp_path / name / "evaluate.json").read_text())["loss"] for name in models)
    assert after < before
    assert both == pytest.approx(after, rel=1e-4)
    # The adapter's own tokenizer has the tokens, and its config the stop token that training taught.
    own = AutoTokenizer.from_pretrained(adapter)
    assert own(own.decode(row["input_ids"]))["input_ids"] == row["input_ids"]
    assert json.loads((adapter / "generation_config.json").read_text())["eos_token_id"] == [2, 260]
    assert (adapter / "chat_template.jinja").is_file()


def test_qlora_without_bitsandbytes_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="which needs the package bitsandbytes; install it, or use lora"):
        quantization_config(training_plan(method="qlora"), False)
    assert quantization_config(training_plan(), False) is None
