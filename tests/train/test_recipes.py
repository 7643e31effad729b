"""Each recipe: its plan on the hardware that it names, and its training with a tiny stand-in of the model's family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench import Bench, metrics
from conftest import ROOT
from test_models import bench_of, settings_of

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.memory.read_spec import read_model_spec
from zerolora.memory.row_statistics import RowStatistics
from zerolora.planner.candidates import Planning
from zerolora.planner.choice import choose
from zerolora.planner.run_hardware import hardware_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

__all__ = ["bench_of"]  # a fixture

PUBLISHED = ROOT / "config/recipes/models"
MIXTURES = ROOT / "benchmarks/memory/models"
RECIPES: dict[str, tuple[Path, str | None, str, int, bool]] = {
    # The config of the model, the tiny stand-in's family, and what is planned: strategy, micro-batch, checkpointing.
    "qwen2.5-7b-qlora-1x24gb": (PUBLISHED / "qwen2.5-7b.json", None, "ddp", 1, False),
    "llama-3-8b-dora-1x80gb": (PUBLISHED / "llama-3-8b.json", None, "ddp", 1, False),
    "llama-3.2-1b-full-2x24gb": (PUBLISHED / "llama-3.2-1b.json", None, "fsdp", 1, False),
    "qwen3-30b-a3b-lora-4x80gb": (MIXTURES / "qwen3-30b-a3b.json", "qwen3_moe", "fsdp", 2, True),
    "gemma-3-4b-lora-1x24gb": (MIXTURES / "gemma-3-4b.json", "gemma3", "ddp", 1, False),
}
METHOD = ("method", "lora", "quantization")


def test_every_recipe_of_a_method_is_here() -> None:
    shipped = {path.stem for path in (ROOT / "config/recipes").glob("*.yaml")}
    assert shipped == {*RECIPES, "qwen2.5-14b-2x32gb", "smollm2-135m-benchmarks", "smollm2-135m-strategies"}


@pytest.mark.parametrize("name", RECIPES)
def test_its_plan_fits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows as long as the recipe allows, half of their tokens supervised."""
    model, _, strategy, micro_batch, checkpointing = RECIPES[name]
    monkeypatch.chdir(ROOT)
    (run,) = resolve(load(ROOT / f"config/recipes/{name}.yaml")).runs.values()
    longest = run.pack.capacity
    assert longest
    rows = RowStatistics(
        packing=True,
        longest_packed_row=longest,
        most_supervised=longest,
        packed_rows=1000,
        tokens=1000 * longest,
        supervised_tokens=500 * longest,
        mean_row_of_a_token=300.0,
        validation_rows=10,
    )
    hardware, _ = hardware_of(run.render)
    best = choose(Planning(read_model_spec(model), run.render, rows, hardware))[0].choice
    assert (best.strategy, best.micro_batch, best.activation_checkpointing) == (strategy, micro_batch, checkpointing)


@pytest.mark.parametrize("name", RECIPES)
def test_it_trains_a_tiny_stand_in(name: str, bench: Bench, bench_of: Callable[[str], Bench]) -> None:
    _, family, strategy, _, _ = RECIPES[name]
    recipe: dict[str, Any] = yaml.safe_load((ROOT / f"config/recipes/{name}.yaml").read_text())["train"]
    own = {key: recipe[key] for key in METHOD if key in recipe}
    place = bench_of(family) if family else bench
    run = place.run(f"recipe-{name}", strategy, **(settings_of(family) if family else {}), **own, learning_rate=1e-2)
    assert metrics(run)["losses"][-1] < metrics(run)["losses"][0]
