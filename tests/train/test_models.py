"""Mixtures of experts and vision-language models: trained at stages 0 and 3, resumed, merged and evaluated."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_matrix
import numpy as np
import pytest
import torch
from bench import Bench, metrics
from safetensors.torch import load_file

from zerolora.config.settings import EvaluateRunSettings
from zerolora.data.packing_plan import open_plan
from zerolora.data.prepared_rows import open_split
from zerolora.evaluate.evaluate import EvaluatedModel, evaluate
from zerolora.merge.merge import merge
from zerolora.model.architecture import auto_class, config_of
from zerolora.model.manifest import located

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
TEXT |= {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
GROUPS = {
    "n_routed_experts": 4,
    "head_dim": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": TEXT | EXPERTS,
    "qwen3_moe": TEXT | EXPERTS,
    "deepseek_v3": TEXT | EXPERTS | LATENT | GROUPS,
    "gpt_oss": TEXT | EXPERTS,
    "gemma3": {"text_config": TEXT, "vision_config": TOWER | {"num_hidden_layers": 2}},
    "qwen2_5_vl": {
        "text_config": TEXT | MROPE,
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "out_hidden_size": 32,
        },
    },
}
STAND_INS: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
    },
}
"""Families of which test_recipes.py trains a tiny model; the tests here are of FAMILIES."""
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": TEXT
    | EXPERTS
    | {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16},
}
"""Families with layers that mix the rows of a packed row."""
# The stage that trains each first; another one continues at stage 3.
FIRST = {
    "mixtral": "zero0", "qwen3_moe": "zero1", "deepseek_v3": "zero2", "gpt_oss": "zero1", "gemma3": "zero2",
    "qwen2_5_vl": "zero0",
}  # fmt: skip
OTHER_PARTS = {"gemma3": ("vision_tower", "multi_modal_projector"), "qwen2_5_vl": ("visual",)}
NAMED = [
    ("gpt_oss", ["q_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj"], {"gate_up_proj", "down_proj"}),
    ("deepseek_v3", [f"shared_experts.{name}_proj" for name in ("gate", "up", "down")], {"shared_experts."}),
]


@pytest.fixture(scope="module")
def bench_of(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    """Return what makes a bench with a tiny model of a family and drawn weights."""
    from transformers import CONFIG_MAPPING

    folder, made = tmp_path_factory.mktemp("families"), {}
    vocabulary = json.loads((tiny_model / "config.json").read_text())["vocab_size"]

    def make(family: str) -> Bench:
        if family not in made:
            model, known = folder / family / "model", FAMILIES | STAND_INS | HYBRIDS
            if family not in known:
                model_matrix.write_model(family, tiny_model, model)
                (folder / family / "bench").mkdir()
                made[family] = Bench(folder / family / "bench", model)
                return made[family]
            config = CONFIG_MAPPING[family](**known[family])
            config.get_text_config().vocab_size = vocabulary
            torch.manual_seed(0)
            shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
            shutil.copy(tiny_model / "tokenizer_config.json", model)
            auto_class(config).from_config(config).save_pretrained(model)
            (folder / family / "bench").mkdir()
            made[family] = Bench(folder / family / "bench", model)
        return made[family]

    return make


def settings_of(family: str) -> dict[str, Any]:
    return {"attention": {"bloom": "eager", "gemma4": "flash", "gpt_oss": "eager"}.get(family, "sdpa")}


LOAD = {"router_imbalance", "router_idle_share"}
ROUTED = {"deepseek_v3": LOAD, **dict.fromkeys(("mixtral", "qwen3_moe", "gpt_oss"), LOAD | {"router_aux_loss"})}
"""What training logs of the routers of a family; transformers has no auxiliary loss for DeepSeek-V3."""


def routed_of(run: Path) -> list[dict[str, float]]:
    """Return what each step's line of telemetry says of routers."""
    with (run / "metrics/telemetry.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: float(value) for name, value in row.items() if name.startswith("router_")} for row in rows]


def base_of(bench: Bench) -> Path:
    return located(bench.folder / "w/tiny.json")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_merged(bench: Bench, run: Path, output: Path, dequantized: bool = False) -> dict[str, torch.Tensor]:
    """Merge a run's adapter, see that the merged model has the validation loss that training reports, and return its
    weights."""
    merge(base_of(bench), run / "adapter", output, output, dequantized=dequantized)
    model = auto_class(config_of(output)).from_pretrained(output, dtype=torch.float32)
    total, tokens = 0.0, 0
    with torch.no_grad():
        for row in open_split(bench.folder / "data", "validation"):
            labels = torch.tensor(row["labels"][1:])
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            tokens += int((labels != -100).sum())
    assert total / tokens == pytest.approx(metrics(run)["loss_validation"], rel=1e-5)
    return weights_of(output)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_trained_resumed_merged_and_evaluated(
    family: str, bench_of: Callable[[str], Bench], tmp_path: Path
) -> None:
    bench = bench_of(family)
    first = bench.run("first", FIRST[family], **settings_of(family))
    # As if it had been killed after its second step, and continued at stage 3.
    shutil.copytree(bench.folder / "checkpoints/first", bench.folder / "checkpoints/zero3")
    for last in (bench.folder / "checkpoints/zero3").glob("*/step-00000003.safetensors"):
        last.unlink()
        (last.parent / "finished").unlink()
    result = bench.start("zero3", "zero3", **settings_of(family))
    assert "resuming at step 2 of 3" in result.stderr, result.stderr[-2000:]
    third = bench.folder / "zero3"
    assert metrics(third)["losses"] == pytest.approx(metrics(first)["losses"], rel=1e-5)
    routed = [routed_of(run) for run in (first, third)]
    assert set(routed[0][0]) == ROUTED.get(family, set())
    if family == "mixtral":
        alone = {"ranks_per_node": 1, "activation_checkpointing": True}
        routed.append(routed_of(bench.run("alone", "zero0", **alone, **settings_of(family))))
    for one, *others in zip(*routed, strict=True):
        assert all(other == pytest.approx(one, rel=1e-4) for other in others)
    means = {name: sum(row[name] for row in routed[0]) / len(routed[0]) for name in routed[0][0]}
    assert {name: metrics(first)[name] for name in means} == pytest.approx(means)
    trained = load_file(third / "adapter/adapter_model.safetensors")
    assert not any("router" in name or ".gate." in name for name in trained)
    assert not any(part in name for part in OTHER_PARTS.get(family, ()) for name in trained)

    merged = assert_merged(bench, third, tmp_path / "merged")
    base = weights_of(base_of(bench))
    assert merged.keys() == base.keys()
    changed = {name for name, tensor in base.items() if not torch.equal(tensor, merged[name])}
    assert changed and all("layers." in name for name in changed)
    assert not any(part in name for part in OTHER_PARTS.get(family, ()) for name in changed)

    (tmp_path / "w").mkdir()
    settings = EvaluateRunSettings(check="sum", rows=2, max_new_tokens=3)
    model = EvaluatedModel(base_of(bench), third / "adapter", tmp_path / "merged")
    evaluate(settings, bench.folder / "data", model, tmp_path / "e", tmp_path / "e/answers.json")
    assert json.loads((tmp_path / "e/evaluate.json").read_text())["rows"] == 2


def test_every_engine_computes_mixing_modules_row_by_row(bench_of: Callable[[str], Bench]) -> None:
    """A packed row has five rows or two, so that ranks call them another number of times, and the last step has one
    packed row for two ranks: twenty seconds."""
    bench = bench_of("qwen3_next")
    bench.mix()
    assert np.diff(open_plan(bench.folder / "mixed-packing/train.arrow").starts).tolist() == [5, 5, 2, 2, 2]
    mixed = {"data": "mixed", "packing": "mixed-packing"}
    runs = [bench.run("alone", "zero0", ranks_per_node=1, **mixed)]
    for strategy in ("ddp", "fsdp", "zero2", "zero3"):
        checkpointing = {"activation_checkpointing": strategy == "zero3"}
        runs.append(bench.run(f"by-row-{strategy}", strategy, **mixed, **checkpointing))
    first, *others = [metrics(run)["losses"] for run in runs]
    for other in others:
        assert other == pytest.approx(first, rel=1e-5)


@pytest.mark.parametrize(("family", "targets", "expected"), NAMED)
def test_experts_are_adapted_by_name(
    family: str, targets: list[str], expected: set[str], bench_of: Callable[[str], Bench], tmp_path: Path
) -> None:
    """The others stay as they are."""
    bench = bench_of(family)
    strategy = "zero3" if "shared_experts." in expected else "zero2"
    run = bench.run("named", strategy, lora={"r": 4, "targets": targets}, **settings_of(family))
    base, merged = weights_of(base_of(bench)), assert_merged(bench, run, tmp_path / "merged")
    changed = {name for name, tensor in base.items() if not torch.equal(tensor, merged[name])}
    assert all(any(part in name for name in changed) for part in expected)
    assert expected or not any("expert" in name for name in changed)
    assert any(".experts." in name for name in changed) == any(name.startswith("experts.") for name in targets)


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3"])
def test_all_weights_of_a_family_are_trained(family: str, bench_of: Callable[[str], Bench], tmp_path: Path) -> None:
    """Those of the language model."""
    bench = bench_of(family)
    runs = [bench.run(f"full-{name}", name, method="full", **settings_of(family)) for name in ("zero2", "fsdp")]
    assert metrics(runs[0])["losses"] == pytest.approx(metrics(runs[1])["losses"], rel=1e-5)
    for one, other in zip(*map(routed_of, runs), strict=True):
        assert one.keys() == ROUTED.get(family, set())
        assert other == pytest.approx(one, rel=1e-4)
    merged, base = assert_merged(bench, runs[0], tmp_path / "merged"), weights_of(base_of(bench))
    outside = [name for name in base if any(part in name for part in OTHER_PARTS.get(family, ()))]
    assert bool(outside) == (family in OTHER_PARTS)
    assert all(torch.equal(merged[name], base[name]) for name in outside)
