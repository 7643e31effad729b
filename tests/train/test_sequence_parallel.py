"""Ranks that share rows: the same losses and gradients as ranks with rows of their own."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import Bench, metrics
from safetensors.torch import load_file

from zerolora.config.settings import FetchDirectory
from zerolora.fetch.models import fetch
from zerolora.fetch.restore import restore
from zerolora.strategies.strategy import StepWork, exchanges
from zerolora.train.checkpoint.store import FINISHED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # real ranks, seconds each


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Bench:
    """A bench with a model whose key-value heads can be divided among four ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = tmp_path_factory.mktemp("four") / "model"
    shutil.copytree(tiny_model, model)
    (model / "model.safetensors").unlink()
    torch.manual_seed(0)
    config = json.loads((model / "config.json").read_text()) | {"num_key_value_heads": 4}
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(model)
    return Bench(tmp_path_factory.mktemp("sequence"), model)


# A micro-batch of two rows of different lengths, so that there is padding; validation at the start, middle and end.
SETTINGS: dict[str, Any] = {"micro_batch": 2, "validation_steps": 2, "epochs": 2}


def column(run: Path, name: str) -> list[float]:
    return [float(row[name]) for row in csv.DictReader((run / "metrics/telemetry.csv").open())]


def assert_same(run: Path, reference: Path) -> None:
    """Hold a run against one whose ranks share no rows. AdamW hides a wrong scale of gradients; their norm does not."""
    actual, expected = metrics(run), metrics(reference)
    assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert actual["loss_validation"] == pytest.approx(expected["loss_validation"], rel=1e-5)
    assert actual["tokens"] == expected["tokens"]
    assert column(run, "gradient_norm") == pytest.approx(column(reference, "gradient_norm"), rel=1e-4)
    file = "adapter/adapter_model.safetensors"
    adapter, other = load_file(run / file), load_file(reference / file)
    for name, tensor in other.items():
        assert torch.allclose(adapter[name], tensor, rtol=1e-4, atol=1e-4), name


@pytest.fixture(scope="module")
def references(four_heads: Bench) -> dict[str, Path]:
    """Return runs of one rank, of padded and of packed rows."""
    return {
        packing: four_heads.run(f"{packing}-alone", "zero2", packing=packing, ranks_per_node=1, **SETTINGS)
        for packing in ("unpacked", "packed")
    }


@pytest.mark.parametrize(
    ("packing", "strategy", "ranks", "shared"),
    [
        ("unpacked", "zero3", 4, 2),
        ("packed", "zero2", 4, 4),
        ("packed", "fsdp", 4, 2),
    ],
)
def test_ranks_that_share_rows_learn_the_same(
    four_heads: Bench, references: dict[str, Path], packing: str, strategy: str, ranks: int, shared: int
) -> None:
    name = f"{packing}-{strategy}-{ranks}-{shared}"
    settings = SETTINGS | {"micro_batch": 1} if ranks // shared > 1 else SETTINGS
    run = four_heads.run(
        name, strategy, packing=packing, ranks_per_node=ranks, sequence_parallel=shared, global_batch=4, **settings
    )
    assert_same(run, references[packing])


def test_run_resumes_with_ranks_that_share_rows(four_heads: Bench, references: dict[str, Path]) -> None:
    """As if the run of one rank had been killed after its second step; with layers that are computed again."""
    checkpoints = four_heads.folder / "checkpoints"
    shutil.copytree(checkpoints / "packed-alone", checkpoints / "handed")
    for file in ("step-00000003.safetensors", FINISHED):
        next((checkpoints / "handed").glob(f"*/{file}")).unlink()
    shared = {"ranks_per_node": 2, "sequence_parallel": 2, "activation_checkpointing": True}
    command = four_heads.command("handed", "zero2", packing="packed", **SETTINGS, **shared)
    result = four_heads.server.run(command, four_heads.folder, four_heads.environment)
    assert result.returncode == 0 and "resuming at step 2 of 3" in result.stderr, result.stderr[-2000:]
    actual, expected = metrics(four_heads.folder / "handed"), metrics(references["packed"])
    assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert actual["loss_validation"] == pytest.approx(expected["loss_validation"], rel=1e-5)


def test_offload_changes_no_bit_of_rows_that_ranks_share(four_heads: Bench) -> None:
    shared = {"packing": "packed", "ranks_per_node": 2, "sequence_parallel": 2, "activation_checkpointing": True}
    plain, offload = (
        four_heads.run(f"offload-{each}", "zero3", activation_offload=each, **SETTINGS, **shared)
        for each in (False, True)
    )
    for file in ("adapter/adapter_model.safetensors", "metrics/loss.csv"):
        assert (offload / file).read_bytes() == (plain / file).read_bytes(), file


def test_ranks_exchange_the_bytes_of_the_cost_model(four_heads: Bench) -> None:
    """Counted in a run of rows of one length, as the cost model takes them to be."""
    run = four_heads.run("counted", "zero2", packing="whole", ranks_per_node=2, sequence_parallel=2, global_batch=1)
    counted = json.loads((run / "metrics/train_resources.json").read_text())
    zero = json.loads((run / "zero.json").read_text())["zerolora"]
    tokens = metrics(run)["tokens"] // metrics(run)["steps"]
    work = StepWork(
        length=tokens, micro_batch=1, accumulation=1, frozen=1, trainable=1, matmul=1, modules=1, layers=2, hidden=32,
        heads=4, head_dim=8, vocabulary=1, attended=1.0, supervised=1.0, checkpointing=zero["activation_checkpointing"],
        attention="flash", width=4, key_heads=4, sequence_parallel=2,
    )  # fmt: skip
    (predicted,) = exchanges(work, 2)
    assert counted["all_to_all_bytes_per_step"] == predicted.size
    assert counted["all_to_all_calls_per_step"] == predicted.calls


def test_a_model_that_mixes_tokens_elsewhere_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    """LFM2's convolution would see the tokens of its own part only. It is estimated as the Llama in its place, since
    the estimate takes all layers to be alike; its weights are so large that each part of it counts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "bench").mkdir()
    bench = Bench(tmp_path / "bench", tmp_path / "model")
    command = bench.command("conv", "zero2", ranks_per_node=2, sequence_parallel=2)
    sizes = json.loads((tiny_model / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept = {name: sizes[name] for name in (*names, "num_key_value_heads")}
    torch.manual_seed(0)
    config = AutoConfig.for_model("lfm2", **kept, layer_types=["conv", "full_attention"])
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    model.save_pretrained(tmp_path / "model")
    for folder in ("w", "m"):
        shutil.rmtree(tmp_path / "bench" / folder)
    fetch(FetchDirectory(path=str(tmp_path / "model"), license="MIT"), bench.folder / "w/tiny", bench.folder / "m/tiny")
    restore(bench.folder / "m/tiny", bench.folder / "w/tiny")
    result = bench.server.run(command, bench.folder, bench.environment)
    assert result.returncode == 2, result.stderr[-2000:]
    said = "train.sequence_parallel is 2, but in the lfm2 model with flash attention a row that ranks share"
    assert said in result.stderr
    assert "Traceback" not in result.stderr
