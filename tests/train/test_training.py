"""Real DeepSpeed, real processes: every strategy learns the same, and failures end cleanly."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import BIN, ROOT, TINY_CONFIG, project_environment
from safetensors.torch import load_file

from zerolora.config import Source
from zerolora.config_file import load
from zerolora.data.pack import pack_rows
from zerolora.data.prepare import prepare
from zerolora.data.reference import records
from zerolora.data.rows import open_split
from zerolora.fetch import fetch, restore
from zerolora.files import canonical, write_json
from zerolora.memory.estimate import estimate
from zerolora.memory.states import STRATEGIES
from zerolora.resolve import resolve
from zerolora.zero.render import render

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


# Packing off, packed rows of a row or two, and all rows of the data in one packed row.
PLANS = {"unpacked": None, "packed": 160, "whole": 4096}


class Bench:
    """A prepared data set, and training runs on it through the command line."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.settings = self.resolved()
        fetch({"source": "directory", "path": str(model), "license": "MIT"}, folder / "w/tiny", folder / "m/tiny")
        restore(folder / "m/tiny", folder / "w/tiny")
        write_json(folder / "rows.json", records("tens", 0)[:24])
        rows = self.settings["prepare"]["rows"] | {"path": str(folder / "rows.json")}
        prepare(rows, folder / "m/tiny/manifest.json", folder / "data")
        for packing, capacity in PLANS.items():
            pack_rows({"packing": bool(capacity), "capacity": capacity}, folder / "data", folder / packing)

    def mix(self) -> None:
        """Add a data set of two sources, one with longer answers than the other, and its packing."""
        folder = self.folder
        short = records("tens", 0)[:16]
        long = [row | {"output": row["output"] * 3} for row in records("tens", 1)[:8]]
        for name, rows in {"short.json": short, "long.json": long}.items():
            write_json(folder / "mixture" / name, rows)
        sources = {name: Source().model_dump() for name in ("short.json", "long.json")}
        rows = self.settings["prepare"]["rows"] | {"path": str(folder / "mixture"), "sources": sources}
        prepare(rows | {"max_length": 160}, folder / "m/tiny/manifest.json", folder / "mixed")
        pack_rows({"packing": True, "capacity": 300}, folder / "mixed", folder / "mixed-packing")

    def resolved(self, **train: Any) -> dict[str, Any]:
        config = json.loads(json.dumps(TINY_CONFIG))
        config["train"] |= {"ranks_per_node": 2, "max_steps": 3, "micro_batch": 1} | train
        config["hardware"]["nodes"] = 2
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config))
        return resolve(load(self.folder / "config.yaml"))

    def command(
        self, name: str, strategy: str = "zero2", packing: str = "unpacked", data: str = "data", **train: Any
    ) -> list[str]:
        """Render a run's JSON and return the command that trains it."""
        run = self.resolved(**train)["runs"]["default"]
        write_json(
            self.folder / name / "estimate.json",
            estimate(run["estimate"], self.folder / "m/tiny", self.folder / packing),
        )
        own = json.loads((ROOT / strategy).read_text()) if strategy.endswith(".json") else None
        chosen = run["render"] | {"strategy": strategy, "own_json": own}
        config, _ = render(chosen, self.folder / name / "estimate.json")
        write_json(self.folder / name / "zero.json", config)
        paths = {
            "data": self.folder / data,
            "packing": self.folder / packing,
            "zero": self.folder / name / "zero.json",
            "weights": self.folder / "w/tiny.json",
            "output": self.folder / name,
            "logs": self.folder / name / "logs",
        }
        options = [text for option, path in paths.items() for text in (f"--{option}", str(path))]
        return [str(BIN / "zerolora"), "train", "--settings", canonical(run["train"]), *options]

    def start(self, name: str, strategy: str = "zero2", **train: Any) -> subprocess.CompletedProcess[str]:
        """Train and return how it ended."""
        return subprocess.run(
            self.command(name, strategy, **train),
            env=project_environment(ROOT) | {"TORCH_EXTENSIONS_DIR": str(self.folder / "extensions")},
            capture_output=True,
            text=True,
            check=False,
        )

    def run(self, name: str, strategy: str = "zero2", **train: Any) -> Path:
        """Train and return the run's directory."""
        result = self.start(name, strategy, **train)
        assert result.returncode == 0, result.stderr[-3000:]
        return self.folder / name


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Bench:
    return Bench(tmp_path_factory.mktemp("training"), tiny_model)


@pytest.fixture(scope="module")
def leaking(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Bench:
    """A bench with OPT, whose attention takes no notice of position_ids."""
    from transformers import OPTConfig, OPTForCausalLM

    model = tmp_path_factory.mktemp("opt") / "model"
    shutil.copytree(tiny_model, model)
    config = OPTConfig(
        vocab_size=json.loads((tiny_model / "config.json").read_text())["vocab_size"],
        hidden_size=32,
        ffn_dim=48,
        word_embed_proj_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    OPTForCausalLM(config).save_pretrained(model)
    return Bench(tmp_path_factory.mktemp("leaking"), model)


@pytest.fixture(scope="module")
def reference(bench: Bench) -> dict[str, Any]:
    return metrics(bench.run("reference", "zero0"))


def metrics(run: Path) -> dict[str, Any]:
    losses = [float(line.split(",")[1]) for line in (run / "metrics/loss.csv").read_text().splitlines()[1:]]
    return json.loads((run / "metrics/train.json").read_text()) | {"losses": losses}


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "zero0"])
def test_every_strategy_learns_the_same_and_compiles_nothing(
    bench: Bench, reference: dict[str, Any], strategy: str
) -> None:
    run = bench.run(strategy, strategy)
    found = metrics(run)
    assert found["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert found["loss_validation"] == pytest.approx(reference["loss_validation"], rel=1e-5)
    assert found["trainable_parameters"] == reference["trainable_parameters"] > 0
    assert not (bench.folder / "extensions").exists(), "C++ was compiled"


@pytest.mark.parametrize("stage", [2, 3])
def test_a_json_of_ones_own_trains_to_the_same_losses(bench: Bench, reference: dict[str, Any], stage: int) -> None:
    """The published experiment's own files, pinned memory and overlapping and all."""
    found = metrics(bench.run(f"own{stage}", f"config/deepspeed/reference-stage{stage}.json"))
    assert found["losses"] == pytest.approx(reference["losses"], rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_number_of_ranks_changes_no_loss(bench: Bench, reference: dict[str, Any], ranks: int) -> None:
    found = metrics(bench.run(f"ranks{ranks}", ranks_per_node=ranks))
    assert found["losses"] == pytest.approx(reference["losses"], rel=1e-5)


@pytest.fixture(scope="module")
def packed(bench: Bench) -> dict[str, Any]:
    return metrics(bench.run("packed-reference", "zero2", packing="packed", ranks_per_node=1))


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("zero2", 2), ("zero2", 4), ("zero3", 1), ("zero3", 2), ("zero3", 4), ("zero3_offload", 2)],
)
def test_packed_rows_give_the_same_losses_on_any_ranks(
    bench: Bench, packed: dict[str, Any], strategy: str, ranks: int
) -> None:
    found = metrics(bench.run(f"packed-{strategy}-{ranks}", strategy, packing="packed", ranks_per_node=ranks))
    assert found["losses"] == pytest.approx(packed["losses"], rel=1e-5)
    assert found["loss_validation"] == pytest.approx(packed["loss_validation"], rel=1e-5)
    spreads = {name: value for name, value in found.items() if name.startswith("rank_")}
    assert len(spreads) == 4
    assert any(spreads.values()) == (ranks > 1)
    assert spreads["rank_attention_spread_mean"] <= spreads["rank_attention_spread_worst"]


def test_all_rows_in_one_packed_row_give_the_loss_of_all_rows(bench: Bench) -> None:
    """One step on the whole data, packed into one row and as sixteen padded ones: the same loss, the same adapter."""
    whole = {"max_steps": 1, "ranks_per_node": 1}
    packed = bench.run("whole-packed", "zero2", packing="whole", global_batch=1, **whole)
    padded = bench.run("whole-padded", "zero2", global_batch=16, micro_batch=4, **whole)
    assert metrics(packed)["losses"] == pytest.approx(metrics(padded)["losses"], rel=1e-5)
    one, other = (load_file(run / "adapter/adapter_model.safetensors") for run in (packed, padded))
    for name, tensor in one.items():
        assert torch.allclose(tensor, other[name], rtol=1e-3, atol=1e-4), name
    assert metrics(packed)["tokens"] == metrics(padded)["tokens"]
    assert metrics(packed)["padding_share"] == 0 <= metrics(padded)["padding_share"]


def test_padded_micro_batches_of_packed_rows_give_the_same_losses(bench: Bench, packed: dict[str, Any]) -> None:
    found = metrics(bench.run("packed-padded", "zero3", packing="packed", ranks_per_node=1, micro_batch=4))
    assert found["losses"] == pytest.approx(packed["losses"], rel=1e-5)
    assert found["loss_validation"] == pytest.approx(packed["loss_validation"], rel=1e-5)
    assert found["padding_share"] > packed["padding_share"] == 0


def test_shares_of_sources_are_those_of_the_data_on_any_ranks(bench: Bench) -> None:
    bench.mix()
    whole: dict[str, Any] = {
        "packing": "mixed-packing",
        "data": "mixed",
        "global_batch": 2,
        "epochs": 2,
        "max_steps": None,
    }
    found = [metrics(bench.run(f"mixed-{ranks}", **whole, ranks_per_node=ranks)) for ranks in (1, 2)]
    columns = open_split(bench.folder / "mixed", "train").to_pandas().groupby("source").sum(numeric_only=True)
    for number, name in enumerate(["short.json", "long.json"]):
        for run in found:
            assert run[f"tokens.{name}"] == 2 * columns["length"][number]
            supervised = columns["supervised"][number] / columns["supervised"].sum()
            assert run[f"supervised_share.{name}"] == pytest.approx(supervised)
        assert found[0][f"loss_share.{name}"] == pytest.approx(found[1][f"loss_share.{name}"], rel=1e-5)
    assert sum(value for name, value in found[0].items() if name.startswith("loss_share.")) == pytest.approx(1)


@pytest.mark.parametrize(("strategy", "ranks"), [("zero2", 1), ("zero3", 2)])
def test_a_model_whose_packed_rows_see_each_other_is_not_trained(leaking: Bench, strategy: str, ranks: int) -> None:
    result = leaking.start(f"packed-{strategy}", strategy, packing="packed", ranks_per_node=ranks)
    assert result.returncode == 2
    assert "in the opt model with sdpa attention the second row of a packed row sees the first" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (leaking.folder / f"packed-{strategy}/adapter").exists()


def test_the_same_model_is_trained_on_rows_by_themselves(leaking: Bench) -> None:
    assert metrics(leaking.run("unpacked-run"))["padding_share"] >= 0


def test_eager_attention_gives_the_same_losses(bench: Bench, packed: dict[str, Any]) -> None:
    found = metrics(bench.run("packed-eager", "zero2", packing="packed", ranks_per_node=2, attention="eager"))
    assert found["losses"] == pytest.approx(packed["losses"], rel=1e-5)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_activation_checkpointing_changes_no_loss(bench: Bench, reference: dict[str, Any], strategy: str) -> None:
    found = metrics(bench.run(f"{strategy}-checkpointing", strategy, activation_checkpointing=True))
    assert found["losses"] == pytest.approx(reference["losses"], rel=1e-5)


def test_bf16_trains(bench: Bench, reference: dict[str, Any]) -> None:
    found = metrics(bench.run("bf16", precision="bf16"))
    assert found["losses"] == pytest.approx(reference["losses"], rel=2e-2)


def test_two_runs_are_the_same_bytes(bench: Bench) -> None:
    first, second = (bench.run(name, lora={"r": 4, "dropout": 0.1}) for name in ("first", "second"))
    for file in (
        "adapter/adapter_model.safetensors",
        "adapter/adapter_config.json",
        "metrics/train.json",
        "metrics/loss.csv",
    ):
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


def test_peft_loads_the_adapter(bench: Bench, tiny_model: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = bench.run("loaded", "zero3")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), run / "adapter")
    factors = [parameter for name, parameter in model.named_parameters() if "lora_B" in name]
    assert len(factors) == 14
    assert all(factor.any() for factor in factors)


def test_tasks_of_a_slurm_step_find_each_other(bench: Bench, reference: dict[str, Any]) -> None:
    """Two tasks with the environment that srun gives them on two nodes; here both nodes are this machine."""
    command = bench.command("slurm", nodes=2, ranks_per_node=1)
    tasks = []
    for task in range(2):
        slurm = {
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_PROCID": str(task),
            "SLURM_STEP_NODELIST": "localhost",
        }
        tasks.append(
            subprocess.Popen(command, env=project_environment(ROOT) | slurm, stderr=subprocess.PIPE, text=True)
        )
    errors = [task.communicate()[1] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], errors
    assert metrics(bench.folder / "slurm")["losses"] == pytest.approx(reference["losses"], rel=1e-5)


def test_a_rank_that_dies_takes_the_others_down_and_leaves_nothing(bench: Bench) -> None:
    process = subprocess.Popen(
        bench.command("killed", max_steps=None, epochs=10000),
        env=project_environment(ROOT),
        stderr=subprocess.PIPE,
        text=True,
    )
    victim = _rank(process.pid, 1)
    time.sleep(3)
    os.kill(victim, signal.SIGKILL)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert "rank 1 failed with signal SIGKILL" in errors
    assert "Traceback" not in errors.split("zerolora: rank 1 failed")[1]
    assert not (bench.folder / "killed/adapter").exists()
    assert not (bench.folder / "killed/metrics").exists()


def test_an_adapter_that_learned_nothing_is_not_published(bench: Bench) -> None:
    """A learning rate below what fp32 can add leaves every B at zero."""
    result = bench.start("untrained", learning_rate=1e-60, ranks_per_node=1)
    assert result.returncode == 2
    assert "is all zero, so it was never trained" in result.stderr
    assert not (bench.folder / "untrained/adapter").exists()
    assert not (bench.folder / "untrained/metrics").exists()


def test_a_users_mistake_in_training_is_one_line(bench: Bench) -> None:
    result = bench.start("mistake", ranks_per_node=1, global_batch=1000, micro_batch=1000)
    assert result.returncode == 2
    assert "zerolora train: train.global_batch is 1000, but 1 epochs have only 16 rows; lower it" in result.stderr
    assert "Traceback" not in result.stderr


def _rank(launcher: int, rank: int) -> int:
    """Return the process id of a rank of a launcher, once it runs."""
    import psutil

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in psutil.Process(launcher).children(recursive=True):
            try:
                if child.environ().get("RANK") == str(rank) and sys.executable.split("/")[-1][:6] in child.name():
                    return child.pid
            except psutil.Error:
                continue
        time.sleep(0.2)
    raise AssertionError("no such rank")
