"""Models with modules that no gradient reaches, as the indexers of sparse attention: trained by every kind of engine,
in two to four seconds each."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from bench import Bench, metrics
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from test_gradient_trial import FOUND
from transformers import AutoModelForCausalLM

from zerolora.config.settings import RenderSettings
from zerolora.errors import UserError
from zerolora.merge.merge import merge
from zerolora.methods.registry import check_published
from zerolora.model.architecture import auto_class
from zerolora.model.manifest import located
from zerolora.planner.zero_json import ZeroJson
from zerolora.probe.untrained import untrained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STRATEGIES = ("ddp", "zero2", "zero3", "fsdp")
TRAIN: dict[str, Any] = {"max_steps": 2, "attention": "eager"}


@pytest.fixture(scope="module")
def bench_of(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    """Return what makes a bench with a tiny model of a family."""
    from transformers import CONFIG_MAPPING

    vocabulary = json.loads((tiny_model / "config.json").read_text())["vocab_size"]

    @functools.cache
    def make(family: str) -> Bench:
        folder = tmp_path_factory.mktemp(family)
        config = CONFIG_MAPPING[family](**FOUND[family][0] | {"vocab_size": vocabulary})
        torch.manual_seed(0)
        shutil.copytree(
            tiny_model, folder / "model", ignore=shutil.ignore_patterns("*.safetensors", "config.json", "gen*")
        )
        auto_class(config).from_config(config).save_pretrained(folder / "model")
        (folder / "bench").mkdir()
        return Bench(folder / "bench", folder / "model")

    return make


def trained(bench: Bench, name: str, strategy: str, tried: bool = True, **train: Any) -> CompletedProcess[str]:
    """Train a run, whose modules without a gradient are left out if it is `tried` before, as `render` does."""
    command = bench.command(name, strategy, **TRAIN | train)
    if tried:
        zero = bench.folder / name / "zero.json"
        ZeroJson.read(zero).leaving_out(left_out(bench, strategy, **train)).write(zero)
    return bench.server.run(command, bench.folder, bench.environment)


def left_out(bench: Bench, strategy: str, **train: Any) -> list[str]:
    """Return what the trial of `render` leaves out."""
    settings = bench.resolved(strategy, **TRAIN | train)["runs"]["default"]["render"]
    return untrained(RenderSettings.model_validate(settings), "eager", bench.folder / "m/tiny")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_an_indexed_model_ends_with_an_adapter(family: str, strategy: str, bench_of: Callable[[str], Bench]) -> None:
    bench = bench_of(family)
    done = trained(bench, strategy, strategy)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "never trained" not in done.stderr
    tensors = load_file(bench.folder / strategy / "adapter/adapter_model.safetensors")
    assert tensors and not any("indexer" in name for name in tensors)
    assert all(tensor.any() for tensor in tensors.values())
    first = bench.folder / "ddp" if (bench.folder / "ddp/metrics").exists() else bench.folder / strategy
    assert metrics(bench.folder / strategy)["losses"] == pytest.approx(metrics(first)["losses"], rel=1e-4)
    # The directory is read as any other adapter.
    check_published(bench.folder / strategy / "adapter", located(bench.folder / "w/tiny.json"))


def test_what_was_not_tried_ends_before_the_first_step(bench_of: Callable[[str], Bench]) -> None:
    bench = bench_of("deepseek_v32")
    for strategy in STRATEGIES:
        done = trained(bench, f"untried-{strategy}", strategy, tried=False)
        assert done.returncode == 2, done.stderr[-3000:]
        words = "no gradient reaches 18 trained parameters, such as 'base_model.model.model.layers.0.self_attn.indexer."
        assert words in done.stderr, done.stderr[-3000:]
        assert "leave these modules out of the method's targets" in done.stderr
        assert not (bench.folder / f"untried-{strategy}/metrics/loss.csv").exists()


def test_a_broken_expression_is_one_line(bench_of: Callable[[str], Bench]) -> None:
    bench = bench_of("deepseek_v32")
    command = bench.command("broken", "ddp", **TRAIN)
    zero = bench.folder / "broken/zero.json"
    ZeroJson.read(zero).leaving_out(["indexer.("]).write(zero)
    done = bench.server.run(command, bench.folder, bench.environment)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "zero.json: zerolora.without_gradient.0 is 'indexer.('" in done.stderr
    assert "run `zerolora stage render` again" in done.stderr


def test_a_named_module_without_gradient_is_refused(bench_of: Callable[[str], Bench]) -> None:
    bench = bench_of("deepseek_v32")
    with pytest.raises(UserError, match="train.lora.targets: .indexer.wk. is in no path to the loss of a deepseek_v32"):
        left_out(bench, "zero2", lora={"targets": ["indexer.wk", "o_proj"]})


def test_what_peft_would_not_read_back_is_left_out(bench_of: Callable[[str], Bench]) -> None:
    """The published adapter of Laguna has all that was trained when peft loads it."""
    bench = bench_of("laguna")
    with pytest.raises(UserError, match="peft reads the adapter of .*shared_experts.* of a laguna under other names"):
        left_out(bench, "ddp", lora={"targets": ["shared_experts.up_proj", "o_proj"]})
    done = trained(bench, "ddp", "ddp")
    assert done.returncode == 0, done.stderr[-3000:]
    base, adapter = located(bench.folder / "w/tiny.json"), bench.folder / "ddp/adapter"
    written = load_file(adapter / "adapter_model.safetensors")
    assert written and not any("shared_experts" in name for name in written)
    read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    assert all(torch.equal(written[name], each) for name, each in get_peft_model_state_dict(read).items())


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_weights_without_gradient_stay_with_full_fine_tuning(
    strategy: str, bench_of: Callable[[str], Bench], tmp_path: Path
) -> None:
    bench = bench_of("deepseek_v32")
    done = trained(bench, f"full-{strategy}", strategy, method="full", learning_rate=1e-3)
    assert done.returncode == 0, done.stderr[-3000:]
    weights = load_file(bench.folder / f"full-{strategy}/adapter/model.safetensors")
    assert not any("indexer" in name for name in weights)
    base = located(bench.folder / "w/tiny.json")
    check_published(bench.folder / f"full-{strategy}/adapter", base)
    merge(base, bench.folder / f"full-{strategy}/adapter", tmp_path / "merged", tmp_path / "merged")
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "merged/model.safetensors")
    assert after.keys() == before.keys()
    unchanged = {name for name in after if torch.equal(after[name], before[name])}
    indexers = {name for name in after if "indexer" in name}
    assert indexers and indexers <= unchanged and len(unchanged) < len(after) / 2
