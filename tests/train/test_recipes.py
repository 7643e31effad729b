"""Each recipe: its plan on the hardware that it names, and its training with a tiny stand-in of the model's family."""

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import model_matrix
import pytest
import yaml
from bench import Bench, metrics
from conftest import ROOT
from test_models import bench_of, settings_of

sys.path.insert(0, str(ROOT / "docs"))
import recipe_plans

from benchmarks import own_answers, preferences
from benchmarks.evaluate import boolq
from zerolora.config.recipes import summaries
from zerolora.model.meta_device import build_on_meta
from zerolora.model.read_spec import read_model_spec
from zerolora.report.repeats import difference_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

__all__ = ["bench_of"]  # a fixture

RECIPES = ROOT / "config/recipes"
PLANNED: dict[str, dict[str, tuple[str, int, bool]]] = {
    # What is planned for each run: strategy, micro-batch, checkpointing.
    "bloom-176b-lora-8x80gb": {"zero3": ("zero3", 1, True)},
    "falcon-180b-lora-8x80gb": {"zero3": ("zero3", 2, True)},
    "falcon-40b-lora-4x80gb": {"zero3": ("zero3", 1, False)},
    "gemma-3-4b-lora-1x24gb": {"text": ("ddp", 1, False)},
    "gemma-4-31b-qlora-1x48gb": {"qlora": ("ddp", 2, True)},
    "glm-4.5-air-qlora-1x80gb": {"qlora": ("zero3_offload_optimizer", 4, True)},
    "glm-4.7-flash-qlora-1x48gb": {"qlora": ("ddp", 4, True)},
    "gpt-oss-20b-qlora-1x24gb": {"qlora": ("ddp", 1, True)},
    "granite-4.0-h-micro-lora-1x24gb": {"lora": ("ddp", 1, True)},
    "internlm2-chat-7b-qlora-2x24gb": {"qlora": ("zero2", 8, True)},
    "llama-2-70b-lora-2x8xt4": {"lora": ("zero3_offload", 2, True)},
    "llama-3-70b-lora-2x8x80gb": {"hpz": ("zero3_hpz", 4, True), "hybrid": ("fsdp_hybrid", 2, True)},
    "llama-3-70b-qlora-2x24gb": {"qlora": ("fsdp_offload", 2, True)},
    "llama-3-8b-dora-1x80gb": {"dora": ("ddp", 1, False)},
    "llama-3-8b-lora-8x80gb": {"lora": ("ddp", 1, False)},
    "llama-3-8b-orpo-qlora-1x24gb": {"orpo": ("ddp", 1, False)},
    "llama-3.1-8b-distill-70b-8x80gb": {"distilled": ("ddp", 1, False), "sft": ("ddp", 1, False)},
    "llama-3.1-8b-128k-8x80gb": {"long": ("ddp", 1, True)},
    "llama-3.1-8b-rounds-8x80gb": dict.fromkeys(("first", "own-round1", "own-round2"), ("ddp", 1, False)),
    "lfm2-8b-a1b-qlora-1x24gb": {"qlora": ("ddp", 8, True)},
    "llama-3.2-1b-full-2x24gb": {"full": ("zero1", 1, False)},
    "nemotron-3-nano-30b-lora-1x80gb": {"lora": ("ddp", 1, True)},
    "olmo-3-7b-qlora-1x24gb": {"qlora": ("ddp", 1, False)},
    "qwen2.5-14b-2x32gb": {
        "stage0": ("zero0", 16, True),
        "stage1": ("zero1", 16, True),
        "stage2": ("config/deepspeed/reference-stage2.json", 16, True),
        "stage3": ("config/deepspeed/reference-stage3.json", 16, True),
    },
    "qwen2.5-7b-full-8x80gb": {"full": ("zero3", 1, False)},
    "qwen2.5-7b-mixture-8x80gb": {"mixture": ("ddp", 1, False)},
    "qwen2.5-7b-qlora-1x24gb": {"qlora": ("ddp", 1, False)},
    "qwen3-30b-a3b-lora-4x80gb": {"experts": ("zero1", 2, True)},
    "qwen3-next-80b-qlora-1x80gb": {"qlora": ("ddp", 1, True)},
    "qwen3.5-27b-qlora-1x48gb": {"qlora": ("ddp", 1, True)},
    "seed-oss-36b-qlora-1x48gb": {"qlora": ("ddp", 2, True)},
    "zephyr-7b-dpo-qlora-8x80gb": {"dpo": ("zero2", 4, False)},
}
TRACED = (
    *("gemma-4-31b-qlora-1x48gb", "lfm2-8b-a1b-qlora-1x24gb", "olmo-3-7b-qlora-1x24gb", "qwen3.5-27b-qlora-1x48gb"),
    *("glm-4.5-air-qlora-1x80gb", "glm-4.7-flash-qlora-1x48gb", "granite-4.0-h-micro-lora-1x24gb"),
    *("nemotron-3-nano-30b-lora-1x80gb", "qwen3-next-80b-qlora-1x80gb", "seed-oss-36b-qlora-1x48gb"),
)
"""Recipes that `make plans` alone plans: tracing their layers takes ten CPU-seconds each."""
RUN_HERE = {
    *("gemma-3-270m-boolq", "smollm2-135m-benchmarks", "smollm2-135m-own-answers", "smollm2-135m-preferences"),
    "smollm2-135m-strategies",
}
"""Recipes for two CPU cores; the families of their models are trained by other tests."""
ROUNDED = {
    "glm-4.5-air": 106e9,
    "glm-4.7-flash": 30e9,
    "lfm2-8b-a1b": 8.3e9,
    "nemotron-3-nano-30b-a3b": 31.6e9,
    "qwen3-next-80b-a3b": 80e9,
    "seed-oss-36b": 36e9,
}
"""As their publishers round it."""
PARAMETERS = {
    "bloom-176b": 176_247_271_424,
    "falcon-180b": 179_522_565_120,
    "internlm2-chat-7b": 7_737_708_544,
    "llama-2-70b": 68_976_648_192,
}
"""As published."""
FAMILY = {
    "bloom-176b-lora-8x80gb": "bloom",
    "falcon-40b-lora-4x80gb": "falcon",
    "falcon-180b-lora-8x80gb": "falcon",
    "gemma-3-4b-lora-1x24gb": "gemma3",
    "gemma-4-31b-qlora-1x48gb": "gemma4",
    "glm-4.7-flash-qlora-1x48gb": "glm4_moe_lite",
    "gpt-oss-20b-qlora-1x24gb": "gpt_oss",
    "lfm2-8b-a1b-qlora-1x24gb": "lfm2_moe",
    "olmo-3-7b-qlora-1x24gb": "olmo3",
    "qwen3-30b-a3b-lora-4x80gb": "qwen3_moe",
    "qwen3.5-27b-qlora-1x48gb": "qwen3_5",
    "seed-oss-36b-qlora-1x48gb": "seed_oss",
}
"""The tiny stand-in's family, if it is not like Llama."""
IN_MATRIX = {
    "glm-4.5-air-qlora-1x80gb": "glm4_moe",
    "granite-4.0-h-micro-lora-1x24gb": "granitemoehybrid",
    "nemotron-3-nano-30b-lora-1x80gb": "nemotron_h",
    "qwen3-next-80b-qlora-1x80gb": "qwen3_next",
}
"""The family of a stand-in that test_model_matrix.py trains with LoRA; with the recipe's method it was trained once."""
TWO_NODES = {"local": 2, "ranks_per_node": 4}  # four ranks, of which two count as a node
PAIRS = {"data": "pairs", "packing": "pairs-packed", "epochs": 3}
LIKE_IT: dict[tuple[str, str], dict[str, Any]] = {
    ("llama-3-70b-lora-2x8x80gb", "hpz"): TWO_NODES,
    ("llama-3-8b-orpo-qlora-1x24gb", "orpo"): PAIRS,
    ("llama-3.1-8b-distill-70b-8x80gb", "distilled"): {"teacher": "teacher"},
    ("llama-3.1-8b-128k-8x80gb", "long"): {"sequence_parallel": 2, "attention": "flash"},
    ("qwen2.5-7b-mixture-8x80gb", "mixture"): {"data": "mixed", "packing": "mixed-packing", "epochs": 3},
    ("zephyr-7b-dpo-qlora-8x80gb", "dpo"): PAIRS | {"reference": "pairs-reference"},
}
"""What a run has beside strategy and method, for two ranks and tiny rows."""
METHOD = ("method", "lora", "quantization", "objective", "dpo", "orpo", "distill")


def test_every_recipe_is_here_and_has_a_readme() -> None:
    shipped = {path.parent.name for path in RECIPES.glob("*/config.yaml")}
    assert shipped == PLANNED.keys() | RUN_HERE
    assert PLANNED.keys() == recipe_plans.ASSUMED.keys()
    for name in shipped:
        readme = (RECIPES / name / "README.md").read_text(encoding="utf-8")
        assert readme.startswith(f"# {name}\n") and f"zerolora init --recipe {name}" in readme
        assert "## Expected result" in readme and "## Hardware and cost" in readme
    assert set(summaries(RECIPES)) == shipped


def test_the_matrix_trains_the_other_stand_ins() -> None:
    for name, kind in IN_MATRIX.items():
        assert kind in model_matrix.FAMILIES
        assert json.loads(recipe_plans.ASSUMED[name].model.read_text(encoding="utf-8"))["model_type"] == kind


def test_boolq_recipe_gives_the_measured_result() -> None:
    text = (RECIPES / "gemma-3-270m-boolq/README.md").read_text(encoding="utf-8")
    measured = json.loads((ROOT / "benchmarks/results/boolq.json").read_text(encoding="utf-8"))
    assert boolq.markdown(measured) in text


def test_preference_recipe_gives_the_measured_result() -> None:
    text = (RECIPES / "smollm2-135m-preferences/README.md").read_text(encoding="utf-8")
    measured = json.loads((ROOT / "benchmarks/results/preferences.json").read_text(encoding="utf-8"))
    assert preferences.markdown(measured).strip() in text
    runs = {name: f"{run['accuracy']:.2f}" for name, run in measured["runs"].items()}
    training = " ".join((ROOT / "docs/training.md").read_text(encoding="utf-8").split())
    alone, both, sft = (runs[f"digits_{name}"] for name in ("dpo_alone", "dpo", "sft"))
    assert f"fell from {measured['first']:.2f} to {alone} right answers" in training
    assert f"with the SFT term it stayed at {both}, and SFT on the chosen answers alone reached {sft}" in training


def test_own_answers_recipe_gives_the_measured_result() -> None:
    """What the page says of them beside the table: which groups seeds tell apart, and the first digits of the means."""
    text = " ".join((RECIPES / "smollm2-135m-own-answers/README.md").read_text(encoding="utf-8").split())
    measured = json.loads((ROOT / "benchmarks/results/own_answers.json").read_text(encoding="utf-8"))
    for part in (own_answers.markdown(measured), own_answers.answers(measured)):
        assert " ".join(part.split()) in text
    groups = own_answers.groups_of(measured)
    assert f"from {measured['before']:.2f} to {groups['right'].mean:.2f}, unselected ones nowhere" in text
    assert abs(groups["unselected"].mean - measured["before"]) < 0.1
    ends = {name: difference_of([*groups.values()], groups["given"], group)[1:] for name, group in groups.items()}
    assert {name for name, (low, high) in ends.items() if low <= 0 <= high} == {"given", "right", "distilled"}


@pytest.mark.parametrize(("model", "parameters"), PARAMETERS.items())
def test_a_model_has_the_parameters_that_are_published(model: str, parameters: int) -> None:
    assert read_model_spec(recipe_plans.MODELS / f"{model}.json").parameters == parameters


@pytest.mark.parametrize(("model", "parameters"), ROUNDED.items())
def test_a_model_has_the_rounded_parameters_that_are_published(model: str, parameters: float) -> None:
    """As its class has them; to read its spec would also try its attention."""
    path = recipe_plans.MODELS / f"{model}.json"
    built = build_on_meta(json.loads(path.read_text(encoding="utf-8")), path)
    assert sum(each.numel() for each in built.parameters()) == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize("name", TRACED)
def test_the_table_of_a_traced_model_has_its_plan(name: str) -> None:
    readme = (RECIPES / name / "README.md").read_text(encoding="utf-8")
    for run, (strategy, micro_batch, checkpointing) in PLANNED[name].items():
        row = rf"\| `{run}` \| `{strategy}` \| {micro_batch} x \d+ \| {'yes' if checkpointing else 'no'} \| [\d.]+ \|"
        assert re.search(row, readme), "run `python docs/recipe_plans.py`"


@pytest.mark.parametrize("name", [name for name in PLANNED if name not in TRACED])
def test_its_plan_fits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of each run, and the table of the README, which is made of it."""
    monkeypatch.chdir(ROOT)
    planned = recipe_plans.plans(name)
    actual = {
        run: best
        if isinstance(best, str)
        else (best.choice.strategy, best.choice.micro_batch, best.choice.activation_checkpointing)
        for run, best in planned.items()
    }
    assert actual == PLANNED[name]
    readme = (RECIPES / name / "README.md").read_text(encoding="utf-8")
    assert recipe_plans.written(name, readme, planned) == readme, "run `python docs/recipe_plans.py`"


@pytest.mark.parametrize(
    ("name", "chosen"),
    # Those of the tiny Llama's family with one source of rows are trained so in the other files of this folder, and
    # rounds in workflow/test_rounds.py.
    [(name, next(iter(runs))) for name, runs in PLANNED.items() if name in FAMILY] + [*LIKE_IT],
)
def test_it_trains_a_tiny_stand_in(name: str, chosen: str, bench: Bench, bench_of: Callable[[str], Bench]) -> None:
    family, strategy = FAMILY.get(name), PLANNED[name][chosen][0]
    recipe: dict[str, Any] = yaml.safe_load((RECIPES / name / "config.yaml").read_text(encoding="utf-8"))["train"]
    ranks = {"ranks_per_node": 1} if recipe.get("ranks_per_node", 1) == 1 else {}
    own = {key: recipe[key] for key in METHOD if key in recipe} | ranks | LIKE_IT.get((name, chosen), {})
    place = bench_of(family) if family else bench
    if own.get("data") == "mixed":
        place.mix()
    if own.get("data") == "pairs":
        place.prefer()
        place.refer("pairs", quantization=recipe["quantization"])
    if "teacher" in own:
        place.teach()
        own["distill"] |= {"teacher": "tiny"}
    settings = settings_of(family) if family else {}
    run = place.run(f"recipe-{name}-{chosen}", strategy, **settings, **own, learning_rate=1e-2)
    assert metrics(run)["losses"][-1] < metrics(run)["losses"][0]
