"""`zerolora memory`: output, exit codes, options, and one line for every mistake, damaged model files included."""

import json
import shlex
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, served
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopback_hub import REPOSITORY, REVISION, Hub, asking, serving
from test_shapes import OTHERS

from zerolora.cli import app
from zerolora.errors import UserError
from zerolora.memory.decoder import evaluation
from zerolora.memory.estimate import Capacity, fault_of
from zerolora.memory.inference import cache_bytes, evaluation_json, generation_json
from zerolora.memory.reserve import UNUSED
from zerolora.memory.search import largest, max_micro_batch, max_sequence_length, remedy
from zerolora.memory.training_spec import TrainingSpec
from zerolora.methods.lora import LoraMethod
from zerolora.model import meta_device
from zerolora.model.families import FAMILIES
from zerolora.model.families.keys import ACTIVATIONS
from zerolora.model.projections import NOTHING, ForwardSpec
from zerolora.model.read_spec import from_config, read_model_spec
from zerolora.model.spec import ModelSpec
from zerolora.planner.hardware import GPUS, offered
from zerolora.strategies import STRATEGIES
from zerolora.train.objectives import OBJECTIVES
from zerolora.units import GIB

MODELS = ROOT / "config/recipes/models"
LLAMA, SMALL_LLAMA, MIXTRAL = (str(MODELS / f"{name}.json") for name in ("llama-3-8b", "llama-3.2-1b", "mixtral-8x7b"))
LIMIT = 10
"""Seconds after which a command counts as hanging."""


@pytest.fixture(scope="module", autouse=True)
def _server() -> None:
    """Start the fork server first: it takes longer than any command."""
    run("--help")


def run(*options: str, **keywords: Any) -> subprocess.CompletedProcess[str]:
    return served("zerolora", "memory", *options, **keywords)


def objects(*options: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run(*options, "--json").stdout.splitlines()]


# --- the table ---


def rows_of(output: str) -> dict[str, list[str]]:
    """Return the cells of each strategy's row in the table."""
    lines = [line.split() for line in output.splitlines()]
    start = next(number for number, cells in enumerate(lines) if cells[:1] == ["GiB"])
    end = lines.index([], start)
    return {cells[0]: cells[1:] for cells in lines[start + 1 : end]}


def labelled(output: str, label: str) -> str:
    """Return the text after a label, on one line."""
    lines = output.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"{label} "))
    end = next((number for number in range(start + 1, len(lines)) if not lines[number].startswith(" ")), len(lines))
    return " ".join(" ".join(lines[start:end]).split()).removeprefix(f"{label} ")


def test_output_names_model_assumptions_and_fit() -> None:
    result = run("--model", LLAMA, "--gpus-per-node", "8", "--lora-r", "16", "--micro-batch", "2")
    assert result.returncode == 0
    assert labelled(result.stdout, "model").startswith("llama-3-8b: llama, 8,030,261,248 parameters 32 layers")
    assert labelled(result.stdout, "trained").startswith(
        "41,943,040 parameters, 0.52%, by lora (r 16, targets all-linear)"
    )
    assert labelled(result.stdout, "hardware") == "1 node with 8 GPUs of 80.00 GiB and 512.00 GiB of host memory"
    step = labelled(result.stdout, "step")
    for part in ("2 x 4,096 tokens a GPU", "bf16", "attention sdpa", "checkpointing: off", "logits of all positions"):
        assert part in step
    assert "the reserve stands for" in labelled(result.stdout, "counted")
    assert list(rows_of(result.stdout)) == list(STRATEGIES)
    assert "of 80.00 GiB" in result.stdout and "#" in result.stdout
    entries = objects("--model", LLAMA, "--gpus-per-node", "8", "--lora-r", "16", "--micro-batch", "2")
    fitting = [entry["strategy"] for entry in entries if entry["fits"]]
    assert fitting and len(fitting) < len(STRATEGIES)
    fits = labelled(result.stdout, "fits")
    assert fits.startswith(f"{len(fitting)} of {len(STRATEGIES)} strategies: {', '.join(fitting)}. Activations are")
    assert f"with {fitting[0]}, which of these shards and moves least" in fits


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "sft"])
def test_objectives_are_estimated_by_name(name: str) -> None:
    """A row is a pair, with the tokens of both sequences: each adds 24 bytes, 18 without an SFT term. KTO's add 14.
    Distillation's have those of the teacher too, 404 in all phases."""
    options = [*("--model", SMALL_LLAMA, "--strategy", "zero2", "--loss", "fused", "--activation-checkpointing")]
    options += ["--sequence-length", "8192", "--reserve", "0GiB"]
    step, rows = labelled(run(*options, "--objective", name).stdout, "step"), "of both sequences"
    assert "1 x 8,192 tokens a GPU, 1 times; bf16; adamw; attention sdpa with a mask; " in step
    (plain,), (added,) = objects(*options), objects(*options, "--objective", name)
    more = {phase: added["phases"][phase] - plain["phases"][phase] for phase in ("forward", "loss", "backward")}
    if name == "distill":
        assert step.endswith("; objective distill") and rows not in step
        assert more == {"forward": 404 * 8192, "loss": 422 * 8192, "backward": 422 * 8192}
        return
    if name == "kto":
        assert step.endswith("; objective kto, with a forward pass before the step") and rows not in step
        each = 14
    else:
        each = 24 if name in ("dpo", "orpo") else 18
        assert step.endswith(f"; objective {name}, whose row is a pair, with the tokens {rows}")
    assert more == {"forward": 0, "loss": each * 8192, "backward": each * 8192}
    shared = ("--gpus-per-node", "2", "--attention", "flash", "--sequence-parallel", "2")
    line = refused(*options, *shared, "--objective", name)
    assert line.startswith(f"zerolora: --sequence-parallel 2: --objective {name} has a loss of whole sequences")


def test_active_parameters_count_routed_experts_only() -> None:
    """Mixtral 8x7B: 46.7 B parameters, of which 12.9 B compute a token (arXiv 2401.04088, section 1: 47 B and 13 B)."""
    model = read_model_spec(Path(MIXTRAL))
    assert (round(model.parameters / 1e9, 1), round(model.active_parameters / 1e9, 1)) == (46.7, 12.9)
    assert read_model_spec(Path(LLAMA)).active_parameters == 8_030_261_248
    model_line = labelled(run("--model", MIXTRAL, "--strategy", "zero3").stdout, "model")
    assert "12,879,925,248 of them for a token (2 of 8 experts)" in model_line


EXTREMES: list[list[str]] = [
    ["--model", LLAMA, "--max-micro-batch", "--max-sequence-length"],
    ["--model", MIXTRAL, "--micro-batch", "1000000000", "--sequence-length", "1000000000", "--nodes", "1000000000"],
    ["--model", LLAMA, "--method", "qlora", "--rank-pattern", "q_proj=9", "--modules-to-save", "lm_head,embed_tokens"],
    ["--model", LLAMA, "--host-memory", "10GiB", "--gpus-per-node", "2", "--evaluation-batch", "9"],
]


@pytest.mark.parametrize("options", EXTREMES, ids=lambda options: options[-1])
def test_no_line_is_wider_than_a_terminal(options: list[str]) -> None:
    result = run(*options)
    assert result.returncode in (0, 3), result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 120


def test_long_names_are_wrapped(tmp_path: Path) -> None:
    folder = tmp_path / ("model-" * 30)
    folder.mkdir()
    (folder / "config.json").write_bytes(Path(SMALL_LLAMA).read_bytes())
    user_json = tmp_path / ("x" * 200 + ".json")
    user_json.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    result = run("--model", str(folder), "--deepspeed", str(user_json), "--max-micro-batch", "--max-sequence-length")
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 120
    assert folder.name in "".join(result.stdout.split())


NOTHING_FITS = ["--model", LLAMA, "--gpu-memory", "40GiB"]


def test_exit_code_is_3_if_nothing_fits() -> None:
    assert run(*NOTHING_FITS, "--strategy", "zero2").returncode == 3
    as_json = run(*NOTHING_FITS, "--strategy", "zero2", "--json")
    assert as_json.returncode == 3 and not json.loads(as_json.stdout)["fits"]
    assert run(*NOTHING_FITS, "--strategy", "zero2", "--activation-checkpointing", "--json").returncode == 0


REMEDIES: list[tuple[list[str], str]] = [
    (["--strategy", "zero2"], "with activation checkpointing it fits: "),
    (
        ["--strategy", "zero2", "--gpu-memory", "24GiB"],
        "with activation checkpointing, attention flash and a fused loss it fits: ",
    ),
    (["--strategy", "zero2", "--sequence-length", "300000"], " tokens fit: "),
    (["--strategy", "zero3", "--method", "full", "--gpus-per-node", "2", "--gpu-memory", "24GiB"], " nodes: "),
    (["--strategy", "ddp", "--method", "full", "--gpu-memory", "24GiB"], " it still does not: needs "),
]


@pytest.mark.parametrize(("options", "remedy"), REMEDIES, ids=[text for _, text in REMEDIES])
def test_remedy_for_nearest_strategy(options: list[str], remedy: str) -> None:
    result = run(*NOTHING_FITS, *options)
    fits = labelled(result.stdout, "fits")
    assert result.returncode == 3
    assert fits.startswith(f"none of 1 strategy. {options[1]} comes nearest: needs ")
    assert remedy in fits, fits


def test_suggested_length_is_the_largest_that_fits() -> None:
    options = [*NOTHING_FITS, "--strategy", "zero2", "--attention", "flash"]
    fits = labelled(run(*options, "--sequence-length", "300000").stdout, "fits")
    length = int(fits.split("rows of up to ")[1].split()[0].replace(",", ""))
    changed = [*options, "--activation-checkpointing", "--loss", "fused", "--sequence-length"]
    assert run(*changed, str(length)).returncode == 0
    assert run(*changed, str(length + 1)).returncode == 3


def test_activation_offload_moves_layer_inputs_to_the_host() -> None:
    options = ["--model", LLAMA, "--strategy", "zero2", "--gpus-per-node", "8", "--sequence-length", "32768"]
    (kept,) = objects(*options, "--activation-checkpointing")
    (moved,) = objects(*options, "--activation-offload")
    size = 32768 * 4096 * 2
    assert moved["host"]["layer_inputs"] == 8 * 31 * size
    assert kept["host"]["layer_inputs"] == 0
    # At the peak, the first of 32 inputs and the one that comes back are on the GPU.
    states = ("activations", "logits", "buffers")
    assert sum(kept["gpu"][name] - moved["gpu"][name] for name in states) == 30 * size
    step = labelled(run(*options, "--activation-offload").stdout, "step")
    assert "only each layer's input is saved, on the host" in step


def test_kernels_save_no_copy_of_a_norms_input_and_no_activation_of_a_gate() -> None:
    options = ["--model", LLAMA, "--strategy", "zero2", "--attention", "flash", "--loss", "supervised"]
    options += ["--supervised-span", "1"]
    (own,), (fused,) = objects(*options), objects(*options, "--kernels", "liger")
    norms, gates = 65 * 4096 * (4 - 2), 32 * 14336 * 2  # bytes a token: the input in bf16 instead of fp32
    fewer = own["gpu"]["activations"] - fused["gpu"]["activations"]
    assert fewer / 4096 == pytest.approx(norms + gates, rel=0.03)
    step = labelled(run(*options, "--kernels", "liger").stdout, "step")
    assert step.endswith("; kernels of liger-kernel for norm, rotary, mlp")  # its kernel for losses is of chunks


def test_sequence_parallel_raises_the_longest_row() -> None:
    options = ["--model", LLAMA, "--strategy", "zero3", "--gpus-per-node", "8", "--loss", "fused"]
    options += ["--attention", "flash"]
    alone, shared = (
        objects(*options, "--sequence-parallel", ranks, "--max-sequence-length")[0]["max_sequence_length"]
        for ranks in ("1", "8")
    )
    assert 7 * alone < shared < 8.1 * alone
    step = labelled(run(*options[:-2], "--sequence-parallel", "8").stdout, "step")
    assert "1 x 4,096 tokens shared by 8 GPUs" in step
    assert "attention flash" in step


def test_unusable_strategies_are_listed_with_reasons() -> None:
    result = run("--model", SMALL_LLAMA, "--precision", "fp16")
    reasons = " ".join(result.stdout.split())
    assert "train.precision is fp16, which needs DeepSpeed's loss scaling" in reasons
    assert "not zero3_hpz: a node has one rank" in reasons
    assert rows_of(result.stdout)["zero3_hpz"][-1] == "-"
    small_host = run("--model", SMALL_LLAMA, "--host-memory", "1GiB").stdout
    assert "more than a host's 1.00 GiB, headroom included" in " ".join(small_host.split())
    assert rows_of(small_host)["ddp"][-1] == "host"


def test_json_keys_do_not_depend_on_options() -> None:
    more = ["--max-micro-batch", "--max-sequence-length", "--evaluation-batch", "4"]
    more += ["--prompt-length", "100", "--answer-length", "10"]
    plain, every = (objects("--model", SMALL_LLAMA, "--strategy", "zero1", *each)[0] for each in ([], more))
    assert plain.keys() == every.keys()
    searched = ("max_micro_batch", "max_sequence_length", "evaluation", "generation")
    assert [plain[key] for key in searched] == [None] * 4 and plain["notes"] == []
    assert None not in [every[key] for key in searched]


def test_uncounted_adapter_activations_are_noted() -> None:
    options = ["--model", LLAMA, "--strategy", "zero1", "--lora-targets"]
    assert "note" not in run(*options, "q_proj").stdout
    assert labelled(run(*options, "q_proj,lm_head").stdout, "note").startswith("the adapters of lm_head: weights and")


def test_attention_is_limited_to_what_training_supports(tmp_path: Path) -> None:
    """Gemma 2's softcap needs eager attention; Falcon's and GPT-J's attention is built in."""
    gemma, falcon = str(MODELS / "gemma-2-9b.json"), str(MODELS / "falcon-7b.json")
    gptj = tmp_path / "gptj.json"
    gptj.write_text(json.dumps({"model_type": "gptj", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 99}))
    by_default = run("--model", gemma, "--strategy", "zero2")
    assert "attention eager" in labelled(by_default.stdout, "step")
    assert by_default.returncode == 3
    for model, attention, why in (
        (gemma, "flash", "a gemma2 has no flash attention; use eager"),
        (gemma, "sdpa", "a gemma2 has no sdpa attention; use eager"),
        (falcon, "flash", "a falcon has no flash attention; use sdpa or eager"),
        (str(gptj), "flash", "a gptj has no flash attention; use eager"),
    ):
        (entry,) = objects("--model", model, "--strategy", "zero2", "--attention", attention)
        assert (entry["fits"], entry["why"]) == (False, why)


# --- hardware by name ---


def test_named_gpu_has_the_memory_that_torch_reports() -> None:
    result = run("--model", SMALL_LLAMA, "--gpu", "A100-40GB-SXM", "--strategy", "ddp")
    assert "1 GPU (A100-40GB-SXM) of 39.39 GiB" in labelled(result.stdout, "hardware")
    fits = {name: run("--model", LLAMA, "--gpu", name, "--strategy", "zero1").returncode for name in ("L4", "H100-SXM")}
    assert fits == {"L4": 3, "H100-SXM": 0}


# --- the hub ---


@pytest.fixture
def hub() -> Any:
    with serving(Hub({"config.json": Path(SMALL_LLAMA).read_bytes(), "model.py": b"raise SystemExit"})) as server:
        yield server


def from_hub(name: str, hub: Hub, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return asking(hub, folder, "memory", "--hub", name, "--strategy", "zero2", *options)


def test_hub_model_needs_only_its_config(hub: Hub, tmp_path: Path) -> None:
    result = from_hub(f"{REPOSITORY}@{REVISION}", hub, tmp_path, "--json")
    assert result.returncode == 0, result.stderr
    (expected,) = objects("--model", SMALL_LLAMA, "--strategy", "zero2")
    assert json.loads(result.stdout) == expected
    assert {asked.path for asked in hub.asked} == {f"/{REPOSITORY}/resolve/{REVISION}/config.json"}
    hub.files = {}
    assert from_hub(f"{REPOSITORY}@{REVISION}", hub, tmp_path).returncode == 0  # from the client's cache


HUB_MISTAKES: list[tuple[str, str]] = [
    (f"{REPOSITORY}@{'f' * 40}", "the repository has no such commit"),
    (f"no/where@{REVISION}", "no such model, or a private one"),
    (f"{REPOSITORY}@{REVISION}", "has no config.json; give the repository of a transformers model"),
    (f"{REPOSITORY}@main", "use NAME@REVISION, a repository and the 40 digits"),
    (REPOSITORY, "use NAME@REVISION, a repository and the 40 digits"),
    (f"a--b@{REVISION}", "is not the name of a repository"),
]


@pytest.mark.parametrize(("name", "message"), HUB_MISTAKES, ids=[name for name, _ in HUB_MISTAKES])
def test_missing_hub_models_are_one_line(hub: Hub, tmp_path: Path, name: str, message: str) -> None:
    if "config.json" in message:
        hub.files = {}
    result = from_hub(name, hub, tmp_path)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert message in line


def test_missing_network_is_one_line(tmp_path: Path) -> None:
    with serving(Hub({})) as ended:
        pass
    begun = time.monotonic()
    result = from_hub(f"{REPOSITORY}@{REVISION}", ended, tmp_path)
    assert result.returncode == 2 and time.monotonic() - begun < 2 * LIMIT  # the client's own retries take longer
    (line,) = result.stderr.splitlines()
    assert f"model {REPOSITORY} at {REVISION} cannot be downloaded" in line and "check the network" in line


# --- the largest that fits ---


@given(st.integers(0, 10**12))
def test_search_returns_the_largest_that_fits(limit: int) -> None:
    assert largest(lambda number: number <= limit) == min(limit, 2**31 - 1)


@given(
    st.sampled_from([read_model_spec(Path(each)) for each in (SMALL_LLAMA, MODELS / "gpt2.json")]),
    st.sampled_from(list(STRATEGIES)),
    st.integers(1, 4),
    st.sampled_from(["eager", "sdpa", "flash"]),
    st.booleans(),
    st.sampled_from(["full", "supervised", "fused"]),
    st.integers(1, 64),
)
@settings(max_examples=30)
def test_largest_fits_and_one_more_does_not(
    model: ModelSpec, strategy: str, ranks: int, attention: Any, checkpointing: bool, loss: Any, gpu: int
) -> None:
    spec = TrainingSpec(strategy, LoraMethod(), 1, ranks, 2, 1, 300, checkpointing, attention, "bf16", loss=loss)
    capacity = Capacity(gpu * GIB, 512 * GIB)

    def fits(**changes: Any) -> bool:
        return fault_of(model, replace(spec, **changes), capacity) is None

    rows, length = max_micro_batch(model, spec, capacity), max_sequence_length(model, spec, capacity)
    assert rows == 0 or fits(micro_batch=rows)
    assert not fits(micro_batch=rows + 1)
    assert length == 0 or fits(length=length)
    assert not fits(length=length + 1)


def test_largest_sizes_are_columns() -> None:
    options = ["--model", LLAMA, "--gpus-per-node", "8", "--max-micro-batch", "--max-sequence-length"]
    entries, cells = objects(*options), rows_of(run(*options).stdout)
    for entry in entries:
        actual = [f"{entry[key]:,}" if entry[key] else "none" for key in ("max_micro_batch", "max_sequence_length")]
        assert cells[entry["strategy"]][7:9] == actual
    assert len({entry["max_sequence_length"] for entry in entries}) > 3


# --- evaluation and generation ---

CACHED: list[dict[str, Any]] = [
    {"model_type": "llama", "num_key_value_heads": 2},
    {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    {"model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 6},
    {"model_type": "olmo2", "num_key_value_heads": 3},
]
SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 80}
TOKENS = {"vocab_size": 99, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}


@pytest.mark.parametrize("config", CACHED, ids=lambda config: config["model_type"])
def test_kv_cache_matches_transformers(config: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = config | TOKENS | ({} if config["model_type"] == "gpt2" else SIZES)
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]].from_dict(config))
    rows, prompt, answer = 3, 7, 5
    ids = torch.ones(rows, prompt, dtype=torch.long)
    with torch.no_grad():
        result = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=answer,
            min_new_tokens=answer,
            do_sample=False,
            return_dict_in_generate=True,
        )
    layers = result.past_key_values.layers
    real = sum(each.numel() * each.element_size() for layer in layers for each in (layer.keys, layer.values))
    predicted = cache_bytes(from_config(config, Path("config.json")), rows, prompt + answer - 1, 4)
    assert predicted == real


def test_kv_cache_of_a_token_matches_the_paper() -> None:
    """OPT-13B in fp16: 800 KB a token (arXiv 2309.06180, section 3)."""
    opt = {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "ffn_dim": 20480}
    model = from_config({"model_type": "opt", "vocab_size": 50272, **opt}, Path("config.json"))
    assert cache_bytes(model, 1, 1, 2) == 800 * 1024


def test_evaluation_and_generation_have_their_own_lines() -> None:
    options = ["--model", LLAMA, "--gpus-per-node", "2", "--evaluation-batch", "14"]
    options += ["--prompt-length", "1000", "--answer-length", "500"]
    result, entries = run(*options), objects(*options)
    model = read_model_spec(Path(LLAMA))
    for entry in entries:
        actual, made = entry["evaluation"], entry["generation"]
        assert actual["weights"] == made["weights"] == 2 * model.parameters
        assert made["cache"] == 2 * 32 * 14 * 1499 * 8 * 128 * 2
        for each in (actual, made):
            assert each["total"] == each["weights"] + each["cache"] + each["working"] + each["reserve"]
            assert each["fits"] == (each["total"] <= 80 * GIB)
        assert actual["fits_in_training"] == (actual["in_training"] <= 80 * GIB) or entry["strategy"].endswith("hybrid")
    fitting = [entry["strategy"] for entry in entries if entry["evaluation"]["fits_in_training"]]
    assert 0 < len(fitting) < len(entries)
    assert labelled(result.stdout, "evaluation").startswith("14 x 4,096 tokens: forward pass ")
    assert labelled(result.stdout, "evaluation").endswith(f"while training it fits with {', '.join(fitting)}")
    assert labelled(result.stdout, "generation").startswith("14 x (1,000 + 500) tokens: key-value cache 2.56 GiB, at")


@given(st.integers(1, 32), st.integers(1, 4096), st.integers(1, 4096))
@settings(max_examples=30)
def test_generation_needs_cache_and_prompt_pass(rows: int, prompt: int, answer: int) -> None:
    model = read_model_spec(Path(SMALL_LLAMA))
    spec = TrainingSpec("ddp", LoraMethod(), 1, 1, 1, 1, prompt, False, "sdpa", "bf16")
    unlimited = Capacity(None, 0)

    def total(rows: int, answer: int) -> int:
        return int(generation_json(model, spec, unlimited, rows, (prompt, answer), 0)["total"])

    actual = generation_json(model, spec, unlimited, rows, (prompt, answer), 0)
    assert actual["total"] >= actual["weights"] + actual["cache"]
    first = ForwardSpec(rows, prompt, 2, "sdpa", True, False, "supervised", 1)
    assert actual["total"] >= actual["weights"] + actual["cache"] + evaluation(model, first, NOTHING)
    assert total(rows + 1, answer) > actual["total"]
    assert total(rows, answer + 1) >= actual["total"]
    assert evaluation_json(model, spec, unlimited, rows, 0)["cache"] == 0


# --- user JSON of DeepSpeed ---


def test_json_of_a_rendered_strategy_has_the_same_estimate(tmp_path: Path) -> None:
    (named,) = objects("--model", LLAMA, "--gpus-per-node", "8", "--strategy", "zero2_offload")
    path = tmp_path / "own.json"
    sizes = {"reduce_bucket_size": 20_971_520, "allgather_bucket_size": 20_971_520, "overlap_comm": False}
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, **sizes}
    path.write_text(json.dumps({"zero_optimization": zero}))
    (own,) = objects("--model", LLAMA, "--gpus-per-node", "8", "--deepspeed", str(path))
    assert own["strategy"] == str(path)
    assert {**own, "strategy": ""} == {**named, "strategy": ""}
    path.write_text(json.dumps({"zero_optimization": {**zero, "reduce_bucket_size": 200_971_520}}))
    (larger,) = objects("--model", LLAMA, "--gpus-per-node", "8", "--deepspeed", str(path))
    assert max(larger["phases"][name] - own["phases"][name] for name in own["phases"]) == pytest.approx(
        2 * 180_000_000 * (1 + UNUSED), rel=1e-6
    )


OWN_MISTAKES: list[tuple[str, str]] = [
    ("[1]", "holds [1]; expected a JSON object"),
    ('{"zero_optimization": {"stage": 4}}', "zero_optimization.stage is 4; use 0, 1, 2 or 3"),
    ('{"zero_optimisation": {}}', "is not a key of DeepSpeed, which ignores it; use zero_optimization"),
    ('{"zero_optimization": {"allgather_bucket_size": "auto"}}', "allgather_bucket_size is 'auto'; set its value"),
    ("{", "not valid JSON"),
    ("[" * 100_000, "nested too deep"),
]


@pytest.mark.parametrize(("text", "message"), OWN_MISTAKES, ids=[message for _, message in OWN_MISTAKES])
def test_mistake_in_user_json_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.json"
    path.write_text(text)
    line = refused("--model", SMALL_LLAMA, "--deepspeed", str(path))
    assert str(path) in line and message in line


# --- mistakes ---


def refused(*options: str, **keywords: Any) -> str:
    """Return the one line with which a command is refused."""
    begun = time.monotonic()
    result = run(*options, **keywords)
    assert time.monotonic() - begun < LIMIT
    assert result.returncode == 2, (result.stdout, result.stderr)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("zerolora: ")
    return line


def changed(model: str = "llama-3.2-1b", **values: Any) -> str:
    config = json.loads((MODELS / f"{model}.json").read_text()) | values
    return json.dumps({key: value for key, value in config.items() if value is not ...})


OLMO: dict[str, Any] = {"model_type": "olmo2", "num_key_value_heads": 8}
FILES: list[tuple[str, str, str]] = [
    ("weights.safetensors", "\0" * 100, "is not a config.json; give the path of a model's directory"),
    ("weights.json", "\0" * 100, "not valid JSON"),
    ("large.json", " " * (17 * 1024**2), "bytes, too many for such a file"),
    ("nested.json", "[" * 100_000, "is nested too deep"),
    ("digits.json", f'{{"model_type": "llama", "hidden_size": {"9" * 5000}}}', "a number of at most 400 digits"),
    ("layers0.json", changed(num_hidden_layers=0), "num_hidden_layers is 0; use a whole number of at least 1"),
    ("layers9.json", changed(num_hidden_layers=10**9), "num_hidden_layers is 1000000000; use a whole number of at"),
    ("olmo0.json", changed(**OLMO, num_hidden_layers=0), "num_hidden_layers is 0; use a whole number of at least 1"),
    ("olmo5.json", changed(**OLMO, num_hidden_layers=10**5), "num_hidden_layers is 100000; use a whole number of at"),
    ("olmo.json", changed(**OLMO, hidden_size=...), "has no hidden_size, which the architecture olmo2 needs"),
    ("olmo_heads.json", changed(**OLMO, num_attention_heads=...), "has no num_attention_heads, which the architecture"),
    ("width.json", changed(hidden_size=10**30), "hidden_size is 1000000000000000000000000000000; use a whole number"),
    (
        "activation.json",
        changed(hidden_act="siluu"),
        "hidden_act is 'siluu'; use an activation that transformers has",
    ),
    ("heads.json", changed(num_key_value_heads=5), "5 key-value heads for 32 attention heads; use"),
    ("olmo_kv.json", changed(**OLMO | {"num_key_value_heads": 5}), "5 key-value heads for 32 attention heads; use"),
    ("gemma.json", changed("gemma-2-9b", final_logit_softcapping=float("nan")), "expected a finite number"),
]


@pytest.mark.parametrize(("name", "text", "message"), FILES, ids=[name for name, _, _ in FILES])
def test_broken_model_file_is_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    line = refused("--model", str(path), "--gpus-per-node", "8")
    assert line.startswith((f"zerolora: {path}: ", f"zerolora: {path}:1: ")) and message in line, line


SETTINGS: dict[str, Any] = {
    **{"device": "cuda", "gpu_memory": 80 * GIB, "host_memory": 512 * GIB, "reserve": GIB, "nodes": 1},
    **{"ranks_per_node": 8, "global_batch": 16, "micro_batch": 1, "precision": "bf16", "keeps_best": False},
    **{"activation_checkpointing": True, "attention": None, "method": {"name": "lora", "settings": {"r": 8}}},
}


def estimate_stage(folder: Path, settings: Any) -> subprocess.CompletedProcess[str]:
    paths = ["--model", str(folder), "--packing", str(folder), "--output", str(folder / "estimate.json")]
    return served("zerolora", "stage", "estimate", "--settings", json.dumps(settings), *paths)


@pytest.mark.parametrize("stats", ["[]", "7", '{"most_supervised": 1}', "null"])
def test_damaged_packing_stats_are_one_line(tmp_path: Path, stats: str) -> None:
    (tmp_path / "config.json").write_bytes(Path(SMALL_LLAMA).read_bytes())
    (tmp_path / "stats.json").write_text(stats)
    result = estimate_stage(tmp_path, SETTINGS)
    said = "was written by another version; run `zerolora stage pack` again"
    assert result.stderr == f"zerolora: {tmp_path}/stats.json: {said}\n"


def test_settings_of_another_stage_are_one_line(tmp_path: Path) -> None:
    for stage in (estimate_stage(tmp_path, {"r": 1}), render_stage(tmp_path, {"r": 1})):
        assert stage.returncode == 2
        (line,) = stage.stderr.splitlines()
        assert line.endswith("pass the stage's entry of results/config.json")


def render_stage(folder: Path, settings: Any) -> subprocess.CompletedProcess[str]:
    paths = ["--estimate", str(folder / "estimate.json"), "--output", str(folder / "zero.json")]
    return served(
        "zerolora", "stage", "render", "--settings", json.dumps(settings), *paths, "--reasons", str(folder / "r.json")
    )


OPTIONS: list[tuple[str, str]] = [
    ("--lora-targets lm_head", "lm_head shares its weight with another module"),
    ("--lora-targets q_proj,nothing", "'nothing' is not in the model"),
    ("--lora-targets ''", "--lora-targets '': a name is empty; give names with one comma"),
    ("--lora-dropout 1", "--lora-dropout 1: leaves nothing to train; use less"),
    ("--activation-offload --no-activation-checkpointing", "remove --no-activation"),
    (
        "--rank-pattern q_proj=4 --rank-pattern q_proj=8",
        "--rank-pattern q_proj=8: q_proj has rank 4 already; give it once",
    ),
    (
        "--method qlora --quantization int8 --double-quantization",
        "--double-quantization: weights of int8 have one constant",
    ),
    (
        "--method qlora --quantization int8 --quantization-block 64",
        "--quantization-block: weights of int8 have one const",
    ),
    ("--method qlora --quantization int8 --method qdora", "--quantization int8: qdora needs the norms of unpacked"),
    ("--method qlora --quantization-block 1", "--quantization-block 1: use one of 32, 64, 128"),
    ("--modules-to-save nothing", "modules_to_save: 'nothing' is not in the model"),
    ("--rank-pattern 'q_(=4'", "train.lora.rank_pattern: 'q_(' is not a valid regular expression (missing )"),
    ("--rank-pattern nothing=4", "train.lora.rank_pattern: 'nothing' matches no adapted module; give"),
    ("--lora-targets v_proj --rank-pattern q_proj=4", "matches no adapted module"),
    ("--rank-pattern q_proj=0", "--rank-pattern q_proj=0: give a module and its rank"),
    ("--method full --lora-r 4", "--lora-r: full has no such setting; remove it"),
    ("--method lora --quantization fp4", "--quantization: lora has no such setting"),
    ("--method nothing", "--method nothing: use one of dora, full"),
    ("--gpu A100", f"--gpu 'A100': use one of {', '.join(offered(GPUS))}"),
    ("--gpu L4 --gpu-memory 24GiB", "--gpu L4 and --gpu-memory 24GiB: keep one of"),
    ("--gpu T4", "--precision bf16: a T4 does not support it; use fp16"),
    ("--reserve -1GiB", "--reserve -1GiB: give a size with its unit"),
    ("--host-memory " + "9" * 400 + "TiB", "--host-memory 9999"),
    ("--supervised-span 9", "--supervised-span 9: --loss full computes all logits; pass"),
    ("--supervised-span 9 --sequence-length 8 --loss fused", "a row has 8"),
    ("--prompt-length 9", "--prompt-length and --answer-length: pass both, or none"),
    ("--strategy zero9", "--strategy zero9: use all or one of ddp, zero0"),
    ("--optimizer sgd", "--optimizer sgd: use one of adamw, adamw_8bit"),
    ("--gpu-memory 80", "--gpu-memory 80: give a size with its unit, as in 80GiB"),
    ("--strategy zero2 --deepspeed x.json", "--deepspeed x.json: keep one of the"),
    ("--deepspeed nowhere.json", "nowhere.json: there is no such file"),
    ("--sequence-parallel 2", "--sequence-parallel 2: it does not divide the number of GPUs, 1"),
    (
        "--sequence-parallel 2 --gpus-per-node 2 --attention sdpa",
        "--sequence-parallel 2: rows are shared with --attention flash only",
    ),
    (
        "--sequence-parallel 16 --gpus-per-node 16",
        "--sequence-parallel is 16, but the model has 32 heads and 8 key-value heads",
    ),
]
"""Options after `--model` of a small Llama."""
PARSED: list[tuple[str, str]] = [
    ("--nodes 0", "Invalid value for '--nodes'"),
    ("--sequence-length 1000000000000000000000000000000", "Invalid value for '--sequence-length'"),
    ("--lora-dropout nan", "Invalid value for '--lora-dropout'"),
    ("--what", "No such option: --what"),
]
"""Options that typer refuses."""
MODELS_REFUSED: list[tuple[list[str], str]] = [
    (["--model", "/dev/null"], "/dev/null: is not a config.json; give the path of a model's directory"),
    (["--model", "nowhere"], "nowhere/config.json: there is no such file"),
    ([], "pass either --model with a path, or --hub with NAME@REVISION"),
    (["--model", LLAMA, "--hub", "a@b"], "pass either --model with a path, or --hub"),
    (["--model", f"{MODELS}/gpt2.json", "--kernels", "liger"], "--kernels liger: it has no kernels for a gpt2 here"),
    (["--model", LLAMA, "--lora-targets", "lm_head"], "lora adapts lm_head, none of which is in the attention"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[options[-60:] for options, _ in OPTIONS])
def test_mistake_in_option_is_one_line(options: str, message: str) -> None:
    """In this process: a command of its own for each would show the exit code again, for seconds."""
    with pytest.raises(UserError) as raised:
        app(["memory", "--model", SMALL_LLAMA, *shlex.split(options)], standalone_mode=False)
    told = str(raised.value)
    assert message in told and len(told.splitlines()) == 1 and told.isprintable()


@pytest.mark.parametrize(("options", "message"), [*PARSED, OPTIONS[0]])
def test_refused_option_ends_the_command(options: str, message: str) -> None:
    assert message in refused("--model", SMALL_LLAMA, *shlex.split(options))


@pytest.mark.parametrize(("options", "message"), MODELS_REFUSED, ids=[" ".join(each) for each, _ in MODELS_REFUSED])
def test_mistake_in_model_is_one_line(tmp_path: Path, options: list[str], message: str) -> None:
    assert message in refused(*options, directory=tmp_path)


def test_directory_named_config_json_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "config.json"
    folder.mkdir()
    assert f"{folder}: is a directory; give the path" in refused("--model", str(tmp_path))
    assert f"{folder}/config.json: there is no such file" in refused("--model", str(folder))


def test_reserve_may_be_zero() -> None:
    with_reserve, without = (
        objects("--model", SMALL_LLAMA, "--strategy", "zero2", "--reserve", size)[0]["gpu"] for size in ("1GiB", "0GiB")
    )
    assert with_reserve["total"] - without["total"] == GIB


def test_missing_sizes_of_composite_model_are_noted(tmp_path: Path) -> None:
    """save_pretrained omits the defaults of a part's class, also in published files."""
    text = {"model_type": "gemma3_text", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 40}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": vision | {"num_attention_heads": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("--model", str(tmp_path), "--strategy", "ddp", "--lora-targets", "q_proj")
    assert result.returncode == 0, result.stderr
    assert "text_config lacks sizes, for which transformers' defaults are taken" in result.stderr
    assert "num_attention_heads 8" in result.stderr
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "vision_config": vision}))
    assert "has no vocab_size, which the architecture gemma3 needs" in refused("--model", str(tmp_path))


def test_too_many_modules_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads(changed(**OLMO, num_hidden_layers=4))
    built = len(from_config(config, Path("config.json")).modules)
    monkeypatch.setattr(meta_device, "MOST_MODULES", built)
    with pytest.raises(
        UserError, match=f"^config.json: describes a model of more than {built} modules; correct its sizes$"
    ):
        from_config(config, Path("config.json"))


def test_activations_match_transformers() -> None:
    from transformers.activations import ACT2FN

    assert set(ACTIVATIONS) == set(ACT2FN)


def test_remedy_gives_reason_if_strategy_cannot_run() -> None:
    spec = TrainingSpec("zero3_hpz", LoraMethod(), 1, 1, 1, 1, 512, False, "sdpa", "bf16")
    text = remedy(read_model_spec(Path(SMALL_LLAMA)), spec, Capacity(80 * GIB, 512 * GIB))
    assert text == "it cannot run here: a node has one rank: there is nothing to shard inside it"


# --- damaged model files ---

PUBLISHED = [json.loads(path.read_text()) for path in sorted(MODELS.glob("*.json"))]
KNOWN = [config for config in PUBLISHED if config["model_type"] in FAMILIES]
DROPPED = object()
VALUES = st.one_of(
    st.just(DROPPED),
    st.integers(-1, 9),
    st.sampled_from([10**5, 10**9, 2**31, 2**63, 10**30, -(10**12)]),
    st.floats(),
    st.text(max_size=8),
    st.booleans(),
    st.none(),
    st.builds(lambda: [1, 1, 1]),
    st.builds(lambda: {"a": {}}),
)
SECONDS = 8
"""CPU seconds, for an estimate or a refusal of a damaged file."""


@st.composite
def damaged(draw: st.DrawFn, configs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a config with up to three keys, at any depth, changed or removed."""
    config: dict[str, Any] = json.loads(json.dumps(configs[draw(st.integers(0, len(configs) - 1))]))
    for _ in range(draw(st.integers(1, 3))):
        part = config
        while True:
            key = draw(st.sampled_from(sorted(part)))
            if not isinstance(part[key], dict) or not part[key] or draw(st.booleans()):
                break
            part = part[key]
        value = draw(VALUES)
        if value is DROPPED:
            del part[key]
        else:
            part[key] = value
        if not part:
            break
    return config


def estimated(path: Path, config: Any, *options: str) -> None:
    """Run the command on a config: it must print an estimate or raise one line."""
    path.write_text(json.dumps(config))
    begun = time.process_time()
    try:
        app(["memory", "--model", str(path), *options], standalone_mode=False)
    except UserError as error:
        message = str(error)
        assert message.startswith(f"{path}: ") or "adapts" in message, message
        assert len(message.splitlines()) == 1 and message.isprintable()
    assert time.process_time() - begun < SECONDS


FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)


@given(
    config=damaged(KNOWN), strategy=st.sampled_from(list(STRATEGIES)), method=st.sampled_from(["lora", "ia3", "full"])
)
@settings(FUZZ, max_examples=60)
def test_damaged_config_of_a_known_family_is_estimated_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], strategy: str, method: str
) -> None:
    estimated(tmp_path / "config.json", config, "--strategy", strategy, "--method", method)
    assert max(map(len, capsys.readouterr().out.splitlines()), default=0) <= 120


@given(config=damaged(OTHERS))
@settings(FUZZ, max_examples=15)
def test_damaged_config_of_another_architecture_is_estimated_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any]
) -> None:
    estimated(tmp_path / "config.json", config, "--strategy", "zero2")
    assert max(map(len, capsys.readouterr().out.splitlines()), default=0) <= 120


# --- what published runs fit on ---


@pytest.mark.parametrize(
    "options",
    [
        # Published with 107 GB of host memory (Answer.AI, FSDP and QLoRA, 2024).
        ("llama-3-70b", "--gpus-per-node", "2", "--gpu", "RTX-4090", "--host-memory", "128GiB", "--sequence-length",
         "1024", "--attention", "flash", "--strategy", "fsdp_offload"),
        ("llama-3-8b", "--gpu", "T4", "--host-memory", "20GiB", "--sequence-length", "512", "--precision", "fp16",
         "--strategy", "zero2"),
    ],
)  # fmt: skip
def test_pages_of_the_weights_file_refuse_no_run(options: tuple[str, ...]) -> None:
    model, *rest = options
    common = ("--method", "qlora", "--micro-batch", "1", "--activation-checkpointing")
    done = run("--model", str(MODELS / f"{model}.json"), *common, *rest)
    assert done.returncode == 0, done.stdout + done.stderr
    (entry,) = objects("--model", str(MODELS / f"{model}.json"), *common, *rest)
    host = entry["host"]
    assert host["page_cache"] > 10 * GIB
    assert host["total"] > host["needed"] >= host["total"] - host["page_cache"]
