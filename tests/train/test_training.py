"""Real DeepSpeed, real processes: every strategy learns the same, and failures end cleanly."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import Bench, metrics, rank_process
from conftest import ROOT, begun, project_environment
from safetensors.torch import load_file
from training_plan import training_plan

from zerolora.data.packing_plan import open_plan
from zerolora.data.prepared_rows import open_split
from zerolora.files import canonical
from zerolora.strategies import STRATEGIES
from zerolora.train.checkpoint.store import FINISHED
from zerolora.train.feed import Batches

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


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


# Quantizing needs a GPU's kernels; NVMe needs libaio and minutes of compiling, and has test_nvme.py.
ON_GPU = ("zero3_quantized", "zero3_qgz")
ON_CPU = [name for name in STRATEGIES if name not in ("zero0", *ON_GPU, "zero3_nvme")]


def assert_same(bench: Bench, run: Path, reference: dict[str, Any]) -> None:
    """Hold a run against stage 0: the same losses, the same adapter, nothing compiled."""
    actual = metrics(run)
    assert actual["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert actual["loss_validation"] == pytest.approx(reference["loss_validation"], rel=1e-5)
    assert actual["trainable_parameters"] == reference["trainable_parameters"] > 0
    file = "adapter/adapter_model.safetensors"
    adapter, expected = load_file(run / file), load_file(reference["run"] / file)
    assert adapter.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(adapter[name], tensor, rtol=1e-4, atol=1e-4), name
    assert not (bench.home / "extensions").exists(), "C++ was compiled"


@pytest.mark.parametrize("strategy", ON_CPU)
def test_every_strategy_learns_the_same_and_compiles_nothing(
    bench: Bench, reference: dict[str, Any], strategy: str
) -> None:
    assert_same(bench, bench.run(strategy, strategy), reference)


# A strategy for each way to hold weights and optimizer; test_resume.py resumes those without offload, in 16 bits.
@pytest.mark.parametrize("strategy", ["ddp", "zero2_offload", "zero3_offload", "fsdp_hybrid_offload"])
def test_a_resumed_run_is_the_same_bytes(bench: Bench, strategy: str) -> None:
    """The run above, as if it had been killed after its second step."""
    name = f"{strategy}-resumed"
    whole = bench.folder / strategy if (bench.folder / strategy).exists() else bench.run(strategy, strategy)
    shutil.copytree(bench.folder / "checkpoints" / strategy, bench.folder / "checkpoints" / name)
    next((bench.folder / "checkpoints" / name).glob("*/step-00000003.safetensors")).unlink()
    result = bench.start(name, strategy)
    assert "resuming at step 2 of 3" in result.stderr, result.stderr[-2000:]
    for file in ("adapter/adapter_model.safetensors", "metrics/loss.csv", "metrics/train.json"):
        assert (bench.folder / name / file).read_bytes() == (whole / file).read_bytes(), file


def test_a_run_moves_between_zero_and_offloaded_fsdp(bench: Bench, reference: dict[str, Any]) -> None:
    """As if the first had been killed after its second step."""
    first, name, checkpoints = "fsdp_hybrid_offload", "then-zero3", bench.folder / "checkpoints"
    if not (bench.folder / first).exists():
        bench.run(first, first)
    shutil.copytree(checkpoints / first, checkpoints / name)
    for file in ("step-00000003.safetensors", FINISHED):
        next((checkpoints / name).glob(f"*/{file}")).unlink()
    result = bench.start(name, "zero3")
    assert "resuming at step 2 of 3" in result.stderr, result.stderr[-2000:]
    assert_same(bench, bench.folder / name, reference)


# LoRA+ has parameters of two learning rates; NEFTune's noise is drawn again in each micro-batch.
VARIED: dict[str, Any] = {"lora": {"r": 4, "rank_stabilized": True, "plus_ratio": 16.0}, "neftune_alpha": 5.0}


@pytest.fixture(scope="module")
def varied(bench: Bench) -> dict[str, Any]:
    """Return the metrics of a run with variants of LoRA, by torch's own engine."""
    return metrics(bench.run("varied-ddp", "ddp", **VARIED))


# Stages 0 and 1 have the optimizer of stage 2; offloaded or not, a stage divides parameters of two rates alike.
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp"])
def test_variants_of_lora_learn_the_same_by_every_engine(
    bench: Bench, reference: dict[str, Any], varied: dict[str, Any], strategy: str
) -> None:
    actual = metrics(bench.run(f"varied-{strategy}", strategy, **VARIED))
    assert actual["losses"] == pytest.approx(varied["losses"], rel=1e-5)
    assert actual["losses"] != pytest.approx(reference["losses"], rel=3e-4)


def test_a_variant_resumes_to_the_same_bytes(bench: Bench) -> None:
    whole = bench.folder / "varied-zero3"
    if not whole.exists():
        bench.run(whole.name, "zero3", **VARIED)
    shutil.copytree(bench.folder / "checkpoints" / whole.name, bench.folder / "checkpoints/varied-resumed")
    next((bench.folder / "checkpoints/varied-resumed").glob("*/step-00000003.safetensors")).unlink()
    resumed = bench.run("varied-resumed", "zero3", **VARIED)
    for file in ("adapter/adapter_model.safetensors", "metrics/loss.csv", "metrics/train.json"):
        assert (resumed / file).read_bytes() == (whole / file).read_bytes(), file


# Under a plain engine a layer that is computed again gathers nothing.
@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_checkpointed_and_offloaded_activations_change_no_loss(
    bench: Bench, reference: dict[str, Any], strategy: str
) -> None:
    """Checkpointing learns the same; offload then changes no bit."""
    checkpointing = bench.run(f"{strategy}-recomputed", strategy, activation_checkpointing=True)
    assert metrics(checkpointing)["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    run = bench.run(f"{checkpointing.name}-offload", strategy, activation_checkpointing="auto", activation_offload=True)
    assert json.loads((run / "zero.json").read_text())["zerolora"]["activation_checkpointing"] is True
    for file in ("adapter/adapter_model.safetensors", "metrics/loss.csv"):
        assert (run / file).read_bytes() == (checkpointing / file).read_bytes(), file


# Offload is within a rank, and so the same on one node.
@pytest.mark.parametrize("strategy", ["zero3_hpz", "fsdp_hybrid"])
def test_two_nodes_of_two_ranks_learn_the_same(bench: Bench, reference: dict[str, Any], strategy: str) -> None:
    """Both nodes are this machine; what is sharded inside a node is repeated on the other."""
    assert_same(bench, bench.run(f"{strategy}-nodes", strategy, ranks_per_node=4, local=2), reference)


def test_a_json_of_ones_own_trains_to_the_same_losses(bench: Bench, reference: dict[str, Any]) -> None:
    """One of the published experiment's own files, pinned memory and overlapping and all."""
    actual = metrics(bench.run("own", "config/deepspeed/reference-stage3.json"))
    assert actual["losses"] == pytest.approx(reference["losses"], rel=1e-5)


def test_the_number_of_ranks_changes_no_loss(bench: Bench, reference: dict[str, Any]) -> None:
    """Two nodes have four (above)."""
    actual = metrics(bench.run("alone", ranks_per_node=1))
    assert actual["losses"] == pytest.approx(reference["losses"], rel=1e-5)


def test_the_last_step_takes_the_rows_that_are_left(bench: Bench) -> None:
    """16 rows in steps of 6, 6 and 4; of two ranks with a row at a time, neither has one for its last micro-batch."""
    left: dict[str, Any] = {"global_batch": 6, "epochs": 1, "max_steps": 4}
    alone = metrics(bench.run("left-ddp", "ddp", ranks_per_node=1, **left | {"micro_batch": 6}))
    assert alone["steps"] == 3
    for strategy in ("ddp", "zero2", "zero3", "fsdp"):
        name = f"left-{strategy}-2"
        actual = metrics(bench.run(name, strategy, **left))
        assert actual["losses"] == pytest.approx(alone["losses"], rel=1e-5), strategy
        assert actual["tokens"] == alone["tokens"]
        one, other = (load_file(bench.folder / run / "adapter/adapter_model.safetensors") for run in ("left-ddp", name))
        for each, tensor in one.items():
            assert torch.allclose(tensor, other[each], rtol=1e-4, atol=1e-4), each


@pytest.fixture(scope="module")
def packed(bench: Bench) -> dict[str, Any]:
    return metrics(bench.run("packed-reference", "zero2", packing="packed", ranks_per_node=1))


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("zero3", 4), ("fsdp", 2)],
)
def test_packed_rows_give_the_same_losses_on_any_ranks(
    bench: Bench, packed: dict[str, Any], strategy: str, ranks: int
) -> None:
    actual = metrics(bench.run(f"packed-{strategy}-{ranks}", strategy, packing="packed", ranks_per_node=ranks))
    assert actual["losses"] == pytest.approx(packed["losses"], rel=1e-5)
    assert actual["loss_validation"] == pytest.approx(packed["loss_validation"], rel=1e-5)
    spreads = {name: value for name, value in actual.items() if name.startswith("rank_")}
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
    actual = metrics(bench.run("packed-padded", "zero3", packing="packed", ranks_per_node=1, micro_batch=4))
    assert actual["losses"] == pytest.approx(packed["losses"], rel=1e-5)
    assert actual["loss_validation"] == pytest.approx(packed["loss_validation"], rel=1e-5)
    assert actual["padding_share"] > packed["padding_share"] == 0


def test_shares_of_sources_are_those_of_the_data_on_any_ranks(bench: Bench) -> None:
    bench.mix()
    whole: dict[str, Any] = {
        "packing": "mixed-packing",
        "data": "mixed",
        "global_batch": 2,
        "epochs": 2,
        "max_steps": None,
    }
    actual = [metrics(bench.run(f"mixed-{ranks}", **whole, ranks_per_node=ranks)) for ranks in (1, 2)]
    columns = open_split(bench.folder / "mixed", "train").to_pandas().groupby("source").sum(numeric_only=True)
    for number, name in enumerate(["short.json", "long.json"]):
        for run in actual:
            assert run[f"tokens.{name}"] == 2 * columns["length"][number]
            supervised = columns["supervised"][number] / columns["supervised"].sum()
            assert run[f"supervised_share.{name}"] == pytest.approx(supervised)
        assert actual[0][f"loss_share.{name}"] == pytest.approx(actual[1][f"loss_share.{name}"], rel=1e-5)
    assert sum(value for name, value in actual[0].items() if name.startswith("loss_share.")) == pytest.approx(1)


def test_each_source_has_a_loss_in_each_step(bench: Bench) -> None:
    """Its mean over its own tokens, whatever the ranks and interruptions; empty in a step without the source. And in
    each validation."""
    bench.mix()
    whole: dict[str, Any] = {"packing": "mixed-packing", "data": "mixed", "global_batch": 2, "epochs": 2}
    whole |= {"max_steps": None, "validation_steps": 4}
    tables = []
    for ranks in (1, 2, 2):
        run = bench.run(f"sources-{ranks}", "zero1", **whole, ranks_per_node=ranks, checkpoint_steps=1)
        with (run / "metrics/loss.csv").open(newline="") as file:
            tables.append(list(csv.DictReader(file)))
        last = max((bench.folder / "checkpoints" / run.name).glob("*/step-*.safetensors"))
        last.unlink()  # the next run of this name resumes before its last step
    assert json.loads((run / "metrics/train_resources.json").read_text())["resumes"] == 1
    assert tables[1] == tables[2]
    packing = open_plan(bench.folder / "mixed-packing/train.arrow")
    plan = training_plan(global_batch=2, epochs=2)
    batches = Batches(open_split(bench.folder / "mixed", "train"), packing, plan, 0, 1)
    sums: dict[str, float] = {"short.json": 0.0, "long.json": 0.0}
    for step, (one, two) in enumerate(zip(*tables[:2], strict=True)):
        items = dict(zip(sums, batches.items_at(step, 2), strict=True))
        for name, count in items.items():
            assert bool(one[f"loss.{name}"]) == bool(two[f"loss.{name}"]) == (count > 0)
            sums[name] += count
        means = {name: float(one[f"loss.{name}"]) for name, count in items.items() if count}
        total = sum(means[name] * items[name] for name in means) / sum(items.values())
        assert total == pytest.approx(float(one["loss"]), rel=1e-6)
        assert all(float(two[f"loss.{name}"]) == pytest.approx(mean, rel=1e-4) for name, mean in means.items())
    assert [*sums.values()] == batches.supervised_by_source(2)
    held_out = open_split(bench.folder / "mixed", "validation").to_pandas().groupby("source")["supervised"].sum()
    weights = dict(zip(sums, held_out, strict=True))
    validated = [row for row in tables[1] if row["loss_validation"]]
    assert len(validated) > 1
    for row in validated:
        total = sum(float(row[f"loss_validation.{name}"]) * weight for name, weight in weights.items())
        assert total / sum(weights.values()) == pytest.approx(float(row["loss_validation"]), rel=1e-6)
    trained = metrics(run)
    best = min(validated, key=lambda row: float(row["loss_validation"]))
    assert all(trained[f"loss_validation.{name}"] == float(best[f"loss_validation.{name}"]) for name in sums)


def test_attention_whose_mask_knows_no_rows_is_computed_row_by_row(leaking: Bench) -> None:
    """As by the one that takes a row at a time."""
    result = leaking.start("packed-zero3", "zero3", packing="packed", attention="sdpa")
    assert result.returncode == 0, result.stderr[-2000:]
    said = "'model.decoder.layers.0.self_attn', 'model.decoder.layers.1.self_attn' would mix the rows of a packed row"
    assert said in result.stderr
    expected = metrics(leaking.run("packed-flash", "zero2", packing="packed", attention="flash"))["losses"]
    assert metrics(leaking.folder / "packed-zero3")["losses"] == pytest.approx(expected, rel=1e-5)


def test_the_same_model_is_trained_on_rows_by_themselves(leaking: Bench) -> None:
    assert metrics(leaking.run("unpacked-run"))["padding_share"] >= 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_any_attention_gives_the_same_losses(bench: Bench, packed: dict[str, Any], attention: str) -> None:
    """As the one that takes a row at a time."""
    actual = metrics(bench.run(f"packed-{attention}", packing="packed", ranks_per_node=2, attention=attention))
    assert actual["losses"] == pytest.approx(packed["losses"], rel=1e-5)


@pytest.fixture(scope="module")
def whole_rows(bench: Bench) -> dict[str, Path]:
    """Return runs on rows that begin alike, single and packed, with an attention that computes whole rows."""
    bench.alike()
    how: dict[str, Any] = {"data": "alike", "micro_batch": 2, "attention": "sdpa"}
    return {each: bench.run(f"whole-{each}", packing=f"alike-{each}", **how) for each in ("single", "packed")}


@pytest.mark.parametrize(
    ("strategy", "packing", "checkpointing"),
    [("zero3", "packed", True), ("ddp", "single", False)],
)
def test_prefix_computed_once_gives_the_losses_of_whole_rows(
    bench: Bench, whole_rows: dict[str, Path], strategy: str, packing: str, checkpointing: bool
) -> None:
    """Of training and validation, and the same adapter, on two ranks."""
    name = f"prefix-{strategy}-{packing}"
    how: dict[str, Any] = {"data": "alike", "micro_batch": 2, "activation_checkpointing": checkpointing}
    result = bench.start(name, strategy, packing=f"alike-{packing}", **how)
    assert re.search(r"the \d+ tokens that all rows begin with are computed once in a micro-batch", result.stderr)
    actual, expected = metrics(bench.folder / name), metrics(whole_rows[packing])
    assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert actual["loss_validation"] == pytest.approx(expected["loss_validation"], rel=1e-5)
    one, other = (
        load_file(run / "adapter/adapter_model.safetensors") for run in (bench.folder / name, whole_rows[packing])
    )
    for weight, tensor in one.items():
        assert torch.allclose(tensor, other[weight], rtol=1e-4, atol=1e-4), weight


def test_peft_loads_the_adapter_and_the_base_that_it_names(bench: Bench, tiny_model: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    run = bench.run("loaded", "zero3")
    assert json.loads((run / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny_model)
    model = AutoPeftModelForCausalLM.from_pretrained(run / "adapter")
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
        tasks.append(begun(*command, **slurm))
    assert [task.wait() for task in tasks] == [0, 0], [task.errors() for task in tasks]
    assert metrics(bench.folder / "slurm")["losses"] == pytest.approx(reference["losses"], rel=1e-5)


def test_ranks_share_the_pages_of_the_weights_file(bench: Bench) -> None:
    """A node reads the base weights once: no rank has a page of its own, even after steps."""
    name = "mapped"
    process = bench.begin(name, "zero2", max_steps=None, epochs=10000)
    try:
        deadline = time.monotonic() + 600
        while not list((bench.folder / "checkpoints" / name).glob("*/step-*.safetensors")):
            assert time.monotonic() < deadline and process.runs()
            time.sleep(0.1)
        for rank in (0, 1):
            text = Path(f"/proc/{rank_process(process.pid, rank)}/smaps").read_text()
            parts = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text)
            (weights,) = (part for part in parts if "/model.safetensors" in part)
            size = {line.split(":")[0]: int(line.split()[1]) for line in weights.splitlines()[1:] if "kB" in line}
            assert size["Rss"] > 0 and size["Private_Dirty"] == 0, weights
    finally:
        process.signal(signal.SIGTERM)
        process.wait()


# Of a rank, which leaves by os._exit.
AT_EXIT = """
import gc, os
def leave(code, leave=os._exit):
    if "RANK" in os.environ:
        open(os.environ["NOTES"], "w").write(f"{gc.isenabled()} {gc.get_freeze_count()}")
    leave(code)
os._exit = leave
"""


def test_a_rank_collects_garbage_again_once_it_has_loaded(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    environment = project_environment(ROOT) | {"NOTES": str(tmp_path / "notes")}
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    subprocess.run(bench.command("collecting", ranks_per_node=1), env=environment, check=True, capture_output=True)
    enabled, frozen = (tmp_path / "notes").read_text().split()
    assert enabled == "True"
    assert int(frozen) > 100_000  # the libraries, which need not be looked at again


def test_a_rank_that_dies_takes_the_others_down_and_leaves_nothing(bench: Bench) -> None:
    process = bench.begin("killed", max_steps=None, epochs=10000)
    while not list((bench.folder / "checkpoints/killed").glob("*/step-*.safetensors")):
        assert process.runs(), process.errors()
        time.sleep(0.1)
    os.kill(rank_process(process.pid, 1), signal.SIGKILL)
    assert process.wait() == 2
    errors = process.errors()
    assert "rank 1 failed with signal SIGKILL" in errors
    assert "Traceback" not in errors.split("zerolora: rank 1 failed")[1]
    assert not (bench.folder / "killed/adapter").exists()
    assert not (bench.folder / "killed/metrics").exists()


def test_untrained_adapter_is_not_published(bench: Bench) -> None:
    """A learning rate below what fp32 can add leaves every B at zero."""
    result = bench.start("untrained", learning_rate=1e-60, ranks_per_node=1)
    assert result.returncode == 2
    assert "is as training starts with it, so it was never trained" in result.stderr
    assert not (bench.folder / "untrained/adapter").exists()
    assert not (bench.folder / "untrained/metrics").exists()


def test_adapter_of_a_diverged_last_step_is_not_published(bench: Bench) -> None:
    """The loss of that step was computed before its update."""
    result = bench.start("diverged", "ddp", learning_rate=1e30, warmup_ratio=0.0, max_steps=1, ranks_per_node=1)
    assert result.returncode == 2
    assert "zerolora: validation loss is nan at step 1; lower train.learning_rate" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (bench.folder / "diverged/adapter").exists()


def test_an_error_of_the_system_in_a_rank_is_one_line(bench: Bench) -> None:
    """The lock of the run, the first file that a rank writes, is a device that takes nothing."""
    lock = bench.folder / "checkpoints/full/lock"
    lock.parent.mkdir(parents=True)
    lock.symlink_to("/dev/full")
    result = bench.start("full")
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    said = [line for line in result.stderr.splitlines() if line.startswith("zerolora: ")]
    assert said == [
        "zerolora: Invalid argument; see the log for what was done last, and run it again",
        "zerolora: rank 0 failed with exit code 2",
    ]


def test_users_mistake_in_training_is_one_line(bench: Bench) -> None:
    """Of settings that no render has seen, which would have said so."""
    command = bench.command("mistake", ranks_per_node=1, global_batch=4, micro_batch=4)
    at = command.index("--settings") + 1
    command[at] = canonical(json.loads(command[at]) | {"global_batch": 1000})
    result = bench.server.run(command, bench.folder, bench.environment)
    assert result.returncode == 2
    assert "zerolora: train.global_batch is 1000, but 1 epochs have only 16 rows; lower it" in result.stderr
    assert "Traceback" not in result.stderr
