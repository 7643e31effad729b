"""The rerun matrix: for each config key and each kind of input, the stages that each engine reruns, and no others."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Project, make_tiny_model, write_rows
from engines import (
    Asker,
    dvc_changed,
    dvc_ran,
    edges_of,
    edit_config,
    snakemake_ran,
    snakemake_would_run,
    with_followers,
)
from loopback_judge import judging

from zerolora.config.schema import Config, Fetch, HarnessTask, TaskRows
from zerolora.config.selection_sections import Selection

pytestmark = pytest.mark.slow

# Config key: (another value, the stages that read it). What comes after those follows from the DAG.
K, E, R, T, M, P = (f"{stage}@default" for stage in ("pack", "estimate", "render", "train", "merge", "report"))
JUDGE = {"evaluate_base@rows", "evaluate@default"}
SAMPLE = {"sample@own"}
# Settings of a check belong to the one that has them.
TOGETHER: dict[str, dict[str, Any]] = {
    "prepare.rows.check_settings": {"prepare.rows.check": "regex"},
    "evaluate.vllm_python": {"evaluate.engine": "vllm"},
    "samples.own.vllm_python": {"samples.own.engine": "vllm"},
    "samples.own.of": {"samples.own.dataset": "rows"},
    "samples.own.temperature": {"samples.own.n": 1},
    "train.weights": {"render.strategy": "ddp"},
    "train.learning_rate_scaling": {"train.learning_rate_batch": 2},
    "train.learning_rate_batch": {"train.learning_rate_scaling": "sqrt"},
}
KEYS: dict[str, tuple[Any, set[str]]] = {
    "hardware.host_memory": ("25GiB", {E, R}),
    "hardware.nodes": (2, set()),
    "fetch.directory.tiny.license": ("MIT", {"fetch@tiny"}),
    "prepare.rows.template": ("plain", {"prepare@rows"}),
    "prepare.rows.template_arguments": ({"enable_thinking": False}, {"prepare@rows"}),
    "prepare.rows.template_writes": (["Hi"], {"prepare@rows"}),
    "prepare.rows.stop_tokens": (["<|im_end|>"], {"prepare@rows"}),
    "prepare.rows.pad_token": ("<|im_start|>", {"prepare@rows"}),
    "prepare.rows.add_special_tokens": (["<|turn|>"], {"prepare@rows", E, R}),
    "prepare.rows.add_tokens": (["<call>"], {"prepare@rows", E, R}),
    "prepare.rows.system": ("Add.", {"prepare@rows"}),
    "prepare.rows.split.validation": (5, {"prepare@rows"}),
    "prepare.rows.split.test": (5, {"prepare@rows"}),
    "prepare.rows.seed": (2, {"prepare@rows"}),
    "prepare.rows.max_length": (127, {"prepare@rows"}),
    "prepare.rows.max_prompt_length": (126, {"prepare@rows"}),
    "prepare.rows.max_answer_length": (125, {"prepare@rows"}),
    "prepare.rows.format": ("alpaca", {"prepare@rows"}),
    "prepare.rows.columns": ({"input": "instruction"}, {"prepare@rows"}),
    "prepare.rows.roles": ({"customer": "user"}, {"prepare@rows"}),
    "prepare.rows.ignore": (["label"], {"prepare@rows"}),
    "prepare.rows.classes": ({"label": ["no", "yes"]}, {"prepare@rows"}),
    "prepare.rows.where": ({"label": [1]}, {"prepare@rows"}),
    "prepare.rows.loss": ("last", {"prepare@rows"}),
    "prepare.rows.at_most": (19, {"prepare@rows"}),
    "prepare.rows.too_long": ("drop", {"prepare@rows"}),
    "prepare.rows.min_length": (2, {"prepare@rows"}),
    "prepare.rows.drop_system": (True, {"prepare@rows"}),
    "prepare.rows.append_token": ("<|im_end|>", {"prepare@rows"}),
    "prepare.rows.concatenate": ("shuffled", {"prepare@rows"}),
    "prepare.rows.bad_row": ("drop", {"prepare@rows"}),
    "prepare.rows.duplicates": ("drop", {"prepare@rows"}),
    "prepare.rows.leakage": ("drop", {"prepare@rows"}),
    "prepare.rows.check": ("exact", JUDGE),
    "prepare.rows.check_settings": ({"pattern": "a"}, JUDGE),
    "pack.packing": (True, {K}),
    "pack.capacity": (256, set()),
    "estimate.reserve": ("2GiB", {E, R}),
    "render.strategy": ("zero1", {R, P}),
    "train.ranks_per_node": (2, {E, R, T}),
    "train.global_batch": (2, {E, R, T}),
    "train.micro_batch": (1, {E, R}),
    "train.epochs": (2, {R, T}),
    "train.max_steps": (1, {R, T}),
    "train.learning_rate": (2e-2, {T}),
    "train.learning_rate_scaling": ("linear", {T, P}),
    "train.learning_rate_batch": (2, {T, P}),
    "train.optimizer": ("lion", {E, R, T}),
    "train.betas": ([0.8, 0.9], {T}),
    "train.epsilon": (1e-6, {T}),
    "train.schedule": ("linear", {T}),
    "train.schedule_options": ({"num_cycles": 1.5}, {T}),
    "train.warmup_ratio": (0.5, {T}),
    "train.warmup_steps": (1, {T}),
    "train.weight_decay": (0.1, {T}),
    "train.gradient_clipping": (0.5, {R}),
    "train.precision": ("bf16", {E, R}),
    "train.activation_checkpointing": (True, {E, R}),
    "train.activation_offload": (True, {E, R, T}),
    "train.attention": ("eager", {E, R}),
    "train.kernels": ("off", set()),
    "train.compile": (True, {E, R, T}),
    "train.canary": ("off", {R}),
    "train.weights": ("bf16", {R, T, P}),
    "train.neftune_alpha": (5.0, {T}),
    "train.group_by_length": (True, {T}),
    "train.seed": (7, {T}),
    "train.validation_steps": (1, {E, R, T}),
    "train.keep": ("last", {T}),
    "train.checkpoint_steps": (1, {T}),
    "train.checkpoint_minutes": (5.0, {T}),
    "train.keep_checkpoints": (3, {E, R}),
    "train.resume": ("never", {T}),
    "train.tracker": ("tensorboard", {R, T}),
    "train.method": ("dora", {E, R, T, M}),  # merge runs the code of the method
    "train.lora.r": (2, {E, R, T}),
    "train.lora.alpha": (8.0, {R, T}),
    "train.lora.rank_stabilized": (True, {R, T}),
    "train.lora.plus_ratio": (16.0, {R, T}),
    "train.lora.init": ("pissa", {E, R, T}),
    "train.lora.dropout": (0.1, {E, R, T}),
    "train.lora.targets": (["q_proj"], {E, R, T}),
    "train.lora.rank_pattern": ({"q_proj": 2}, {E, R, T}),
    "train.lora.alpha_pattern": ({"q_proj": 2.0}, {E, R, T}),
    "train.lora.modules_to_save": (["norm"], {E, R, T}),
    "train.ia3.targets": (["v_proj"], set()),  # of another method than the run's
    "train.ia3.modules_to_save": (["norm"], set()),
    "train.vera.r": (16, set()),
    "train.vera.d_initial": (0.2, set()),
    "train.vera.dropout": (0.1, set()),
    "train.vera.targets": (["v_proj"], set()),
    "train.vera.projection_seed": (1, set()),
    "train.vera.modules_to_save": (["norm"], set()),
    "train.sft.mean": ("row", {T, P}),
    **{f"train.{objective}.reference": ("default", set()) for objective in ("dpo", "ipo", "kto")},
    "train.dpo.loss": ("hinge", set()),  # of another objective than the run's
    "train.dpo.beta": (0.2, set()),
    "train.dpo.label_smoothing": (0.1, set()),
    "train.dpo.sft_weight": (0.5, set()),
    "train.ipo.beta": (0.2, set()),
    "train.ipo.sft_weight": (0.5, set()),
    "train.simpo.beta": (2.5, set()),
    "train.simpo.gamma": (1.0, set()),
    "train.simpo.sft_weight": (0.5, set()),
    "train.orpo.beta": (0.2, set()),
    "train.orpo.prompt_loss": (True, set()),
    "train.kto.beta": (0.2, set()),
    "train.kto.desirable_weight": (2.0, set()),
    "train.kto.undesirable_weight": (2.0, set()),
    "train.distill.top_k": (8, set()),
    "train.distill.temperature": (2.0, set()),
    "train.distill.alpha": (0.2, set()),
    "merge.enabled": (False, {M}),
    "merge.version": (False, {M}),
    "export.targets": (["torchao"], {R}),  # tried by render, made by request alone
    "export.gguf.type": ("q8_0", set()),
    "export.gguf_adapter.type": ("f32", set()),
    "export.ollama.type": ("f16", set()),
    "export.ollama.system": ("Be brief.", set()),
    "export.torchao.type": ("fp8", set()),
    "export.compressed_tensors.type": ("int8", set()),
    "export.compressed_tensors.group_size": (64, set()),
    "export.vllm_adapter.max_lora_rank": (32, set()),
    "evaluate.enabled": (False, JUDGE),
    "evaluate.unmerged": (True, {"evaluate@default"}),
    "evaluate.ranks": (2, JUDGE),
    "evaluate.engine": ("vllm", JUDGE),
    "evaluate.vllm_python": ("python3", JUDGE),
    "evaluate.fail_if": ("loss > 1000", {P, "accept@default"}),
    "evaluate.split": ("validation", JUDGE | {P}),
    "evaluate.rows": (2, JUDGE),
    "evaluate.batch": (1, JUDGE),
    "evaluate.max_new_tokens": (5, JUDGE),
    # The stage judge runs only on request: no key of it reruns anything else.
    "judge.endpoint": ("https://judge.example/v1", set()),
    "judge.model": ("judge", set()),
    "judge.key_variable": ("JUDGE_KEY", set()),
    "judge.questions": ("config/judge/mine.jsonl", set()),
    "judge.max_new_tokens": (100, set()),
    "judge.judge_tokens": (100, set()),
    "judge.prompt_price": (1.0, set()),
    "judge.completion_price": (1.0, set()),
    "judge.max_price": (1.0, set()),
    "judge.seed": (7, set()),
    "samples.own.of": ({"base": True}, SAMPLE),
    "samples.own.n": (2, SAMPLE),
    "samples.own.temperature": (0.0, SAMPLE),
    "samples.own.top_p": (0.9, SAMPLE),
    "samples.own.seed": (7, SAMPLE),
    "samples.own.max_new_tokens": (5, SAMPLE),
    "samples.own.stop": (["."], SAMPLE),
    "samples.own.batch": (2, SAMPLE),
    "samples.own.ranks": (2, SAMPLE),
    "samples.own.engine": ("vllm", SAMPLE),
    "samples.own.vllm_python": ("python3", SAMPLE),
    "samples.own.dataset": ("rows", set()),  # that of its run
    "report.examples": (1, {P}),
    # What a run overrides is a column of the comparison.
    "runs.default.hardware": ({"host_memory": "25GiB"}, {E, R, "compare"}),
    "runs.default.pack": ({"packing": True}, {K, "compare"}),
    "runs.default.render": ({"strategy": "zero1"}, {R, P, "compare"}),
    "runs.default.train": ({"learning_rate": 2e-2}, {T, "compare"}),
    "runs.default.report": ({"examples": 1}, {P, "compare"}),
}
# Keys that say which things there are, or that only another device has; each has its own test.
ELSEWHERE = {
    "hardware.device": "test_a_whole_section_that_changes",
    "hardware.gpus_per_node": "test_a_whole_section_that_changes",
    "hardware.gpu_memory": "test_a_whole_section_that_changes",
    "hardware.compute_capability": "test_a_whole_section_that_changes",
    **{
        f"hardware.{key}": "test_a_whole_section_that_changes"
        for key in ("probe", "gpu", "node_link", "network", "network_adapters", "host_link", "disk", "nvme")
    },
    **{f"fetch.directory.tiny.{key}": "test_a_whole_section_that_changes" for key in ("path", "dequantize")},
    "prepare.rows.model": "test_a_whole_section_that_changes",
    "prepare.rows.path": "test_a_whole_section_that_changes",
    "prepare.rows.sources": "test_a_whole_section_that_changes",
    **{
        f"prepare.rows.better.{key}": "test_a_whole_section_that_changes"
        for key in ("column", "first", "second", "tie", "scores")
    },
    "prepare.rows.undecided": "unit/test_init_columns.py",  # any value stops
    "train.nodes": "test_a_whole_section_that_changes",
    **{f"train.quantization.{key}": "test_a_whole_section_that_changes" for key in ("type", "double", "storage")},
    "merge.base": "test_a_whole_section_that_changes",
    "train.sequence_parallel": "test_a_whole_section_that_changes",
    "train.patience": "test_a_whole_section_that_changes",
    "train.stop_above": "test_a_whole_section_that_changes",
    "train.objective": "test_extending.py",  # which adds a second one
    **{f"train.distill.{key}": "test_reference_stage.py" for key in ("teacher", "adapter")},
    **{
        f"samples.own.of.{key}": "KEYS, as samples.own.of"
        for key in ("run", "base", "served.address", "served.model", "served.key_variable")
    },
    "train.validation_tasks": "test_tasks_of_runs.py",
    "train.from_adapter": "test_a_whole_section_that_changes",
    **{
        f"tasks.rows.{key}": "test_tasks_of_runs.py"
        for key in (
            *TaskRows.model_fields,
            "check",
            "check_settings",
            "chat_template",
            "max_new_tokens",
            "until",
            "batch",
        )
    },
    **{f"tasks.harness.{key}": "test_tasks_of_runs.py" for key in HarnessTask.model_fields},
    **dict.fromkeys(("model", "data"), "test_first_run.py"),
    "continued": "test_continued.py",
    "grids": "workflow/test_grids.py",
    **{f"prepare.rows.{key}": "workflow/test_rounds.py" for key in ("selections", "held_out")},
    **{f"selections.{key}": "workflow/test_rounds.py" for key in Selection.model_fields},
    "rounds": "workflow/test_rounds.py",
    "searches": "workflow/test_searches.py",
    "runs": "test_each_edit_runs_the_same_stages_in_both_engines",
}


@pytest.fixture(scope="module")
def finished(make_project: Callable[[str], Project]) -> Project:
    """Return a project that snakemake has finished and DVC has recorded."""
    project = make_project("finished")
    project.config["samples"] = {"own": {"of": {"run": "default"}, "n": 1, "max_new_tokens": 4}}
    edit_config(project, **{"prepare.rows.template": OWN})
    (project.directory / OWN).write_text(
        "{% for message in messages %}{{ message.content + eos_token * (message.role == 'assistant') }}{% endfor %}"
    )
    assert snakemake_ran(project) == EVERYTHING
    assert dvc_changed(project) == set()
    return project


OWN = "config/templates/own.jinja"
ONE_RUN = {"pack", "estimate", "render", "train", "merge", "evaluate", "report", "accept"}
EVERYTHING = {
    "resolve",
    "fetch@tiny",
    "prepare@rows",
    "evaluate_base@rows",
    *(f"{stage}@default" for stage in ONE_RUN),
    *SAMPLE,
    "compare",
}


def test_every_key_is_in_the_matrix() -> None:
    named = set(KEYS) | set(ELSEWHERE)
    missing = [key for key in _leaves(Config) if key not in named]
    assert missing == []


def _leaves(model: Any, prefix: str = "") -> list[str]:
    """Return the dotted keys of a config class, with the tiny config's names where a name is free."""
    names = {"fetch": "directory.tiny", "prepare": "rows", "samples": "own"}
    leaves = []
    for name, field in model.model_fields.items():
        if not prefix and name == "data":  # its keys are those of prepare
            leaves.append(name)
            continue
        if name in ("runs", "continued", "grids", "rounds", "searches", "sources", "stop_above"):
            leaves.append(f"{prefix}{name}")
            continue
        inner = _section_of(field.annotation)
        if name == "fetch" and not prefix:
            inner = _section_of(Fetch.model_fields["directory"].annotation)
        path = f"{prefix}{name}." + (f"{names[name]}." if not prefix and name in names else "")
        leaves += _leaves(inner, path) if inner else [f"{prefix}{name}"]
    return leaves


def _section_of(annotation: Any) -> Any:
    if hasattr(annotation, "model_fields"):
        return annotation
    inner = [_section_of(each) for each in getattr(annotation, "__args__", ())]
    return next((each for each in inner if each), None)


def test_each_key_changes_the_stages_that_read_it(finished: Project) -> None:
    """The settings of a stage, which both engines compare, are checked for each key, the engines themselves for the
    first of each section and set of readers. Nothing runs but the resolving of the config.

    Asked in one process, since a start of each engine would take seventy times three CPU-seconds; what that process
    says is compared with the engines' own commands for the first key.
    """
    original = json.loads(json.dumps(finished.config))
    wrong = {}
    edges = edges_of(finished)  # no key of these adds a stage
    seen = set()
    with Asker(finished) as asker:
        before = asker.settings()
        for number, (key, (value, readers)) in enumerate(KEYS.items()):
            finished.config = json.loads(json.dumps(original))
            edit_config(finished, **{key: value} | TOGETHER.get(key, {}))
            expected = {"resolve", *readers}
            changed = {name for name, texts in asker.settings().items() if texts != before[name]}
            actual = {"settings": {"resolve", *changed}}
            if (kind := (key.split(".")[0], frozenset(readers))) not in seen:
                seen.add(kind)
                snakemake = asker.snakemake_would_run()
                assert number or snakemake == snakemake_would_run(finished)
                asker.resolve()
                actual["dvc"] = asker.dvc_changed()
                assert number or actual["dvc"] == dvc_changed(finished)
                if snakemake != with_followers(edges, expected):
                    actual["snakemake"] = snakemake
                restore(finished, original, asker)
            if any(stages != expected for stages in actual.values()):
                wrong[key] = {"expected": expected} | actual
        restore(finished, original, asker)
    assert wrong == {}
    assert dvc_changed(finished) == set()
    assert snakemake_would_run(finished) == set()


def restore(project: Project, config: dict[str, Any], asker: Asker) -> None:
    """Write a config, and what resolve makes of it: Snakemake refuses settings that its own resolve did not write."""
    project.config = json.loads(json.dumps(config))
    project.write_config()
    asker.resolve()


def test_judge_runs_only_on_request(finished: Project) -> None:
    """It costs money: no engine starts it unasked, misses its outputs, or repeats its requests."""
    original = json.loads(json.dumps(finished.config))
    output = finished.directory / "results/default/judge/judge.json"
    with judging() as judge:
        edit_config(finished, **{"judge.endpoint": judge.endpoint, "judge.model": "judge", "judge.max_new_tokens": 4})
        assert snakemake_ran(finished) == {"resolve"} and judge.asked == []
        finished.snakemake("judge_all")
        asked = len(judge.asked)
        assert asked == json.loads(output.read_text())["requests"] == 8 * 8
        assert "Nothing to be done" in (again := finished.snakemake("judge_all")).stdout + again.stderr
        assert dvc_changed(finished) == snakemake_would_run(finished) == set()
        output.write_text("damaged")
        assert snakemake_ran(finished) == set()
        output.unlink()
        assert snakemake_ran(finished) == set() and not output.exists()
        finished.snakemake("results/default/judge/judge.json")
        assert len(judge.asked) == asked and output.exists()
    finished.config = original
    finished.write_config()
    assert snakemake_ran(finished) == {"resolve"}
    assert dvc_changed(finished) == set()


def test_an_edit_of_a_file_runs_the_stage_that_reads_it(finished: Project) -> None:
    template, rows = finished.directory / OWN, finished.directory / "rows.json"
    weights = finished.directory / "model/model.safetensors"
    text, read = template.read_bytes(), rows.read_bytes()
    prepared = {"resolve", "prepare@rows"}  # a template's text is a setting
    edits: list[tuple[Path, bytes, set[str]]] = [
        (template, b"Now: " + text, prepared),
        (template, text + b"{# a remark #}", prepared),
        (rows, json.dumps(json.loads(read)[:-1]).encode(), {"prepare@rows"}),
        (weights, weights.read_bytes()[:-4] + bytes(4), {"fetch@tiny"}),
    ]
    with Asker(finished) as asker:
        for file, edited, expected in edits:
            before, status = file.read_bytes(), file.stat()
            file.write_bytes(edited)
            snakemake = asker.snakemake_would_run()
            asker.resolve()
            dvc = asker.dvc_changed()
            assert dvc == expected, file
            assert snakemake == with_followers(edges_of(finished), dvc), file
            file.write_bytes(before)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
            asker.resolve()
    assert dvc_changed(finished) == snakemake_would_run(finished) == set()


def test_a_whole_section_that_changes(finished: Project) -> None:
    """Keys that only make sense together: a GPU instead of the CPU, another model, another data file, more nodes."""
    directory = finished.directory
    original = json.loads(json.dumps(finished.config))
    shutil.copytree(directory / "model", directory / "model2")
    shutil.copy(directory / "rows.json", directory / "rows2.json")
    (directory / "folder").mkdir()
    for name in ("a.json", "b.json"):
        shutil.copy(directory / "rows.json", directory / "folder" / name)
    gpu = {
        "hardware.device": "cuda",
        "hardware.gpus_per_node": 1,
        "hardware.gpu_memory": "80GiB",
        "hardware.compute_capability": 8.0,
    }
    # What only the cost model reads: the choice is made again, and comes out the same.
    named = {
        "hardware.gpu": "A100-40GB-PCIe",
        "hardware.node_link": "pcie3",
        "hardware.network": "10gbe",
        "hardware.network_adapters": 2,
        "hardware.host_link": "pcie5",
        "hardware.disk": "sata-ssd",
        "hardware.nvme": "/scratch",
    }
    cases: list[tuple[dict[str, Any], set[str]]] = [
        (named, {R}),
        ({"hardware.probe": "config/hardware/two-cpu-ranks.json"}, {R}),
        (gpu, {E, R, T} | JUDGE | SAMPLE),
        ({"hardware.nodes": 2, "train.nodes": 2}, {E, R, T}),
        ({"train.method": "qlora", "train.quantization": {"type": "fp4", "double": False}}, {E, R, T, M}),
        (
            {"train.method": "qlora", "merge.base": "dequantized", "fetch.directory.tiny.dequantize": "on_load"},
            {"fetch@tiny", E, R, T, M},
        ),
        ({"train.ranks_per_node": 2, "train.sequence_parallel": 2}, {E, R, T}),
        ({"train.validation_steps": 1, "train.patience": 1, "train.keep": "last"}, {R, T}),
        ({"train.validation_steps": 1, "train.patience": 1}, {E, R, T}),
        ({"train.validation_steps": 1, "train.stop_above": [{"step": 1, "loss": 0.1}]}, {E, R, T}),
        ({"fetch.directory.tiny.path": "model2"}, {"fetch@tiny"}),
        ({"prepare.rows.path": "rows2.json"}, {"prepare@rows"}),
        ({"prepare.rows.better": {"column": "label", "first": [1], "second": [2], "tie": [0]}}, {"prepare@rows"}),
        ({"prepare.rows.better": {"scores": ["one", "two"]}}, {"prepare@rows"}),
        ({"prepare.rows.path": "folder", "prepare.rows.sources": {"a.json": {}, "b.json": {}}}, {"prepare@rows"}),
        (
            {
                "fetch.directory": {"other": {"path": "model", "license": "MIT"}},
                "prepare.rows.model": "other",
            },
            {"fetch@other", "prepare@rows"},
        ),
    ]
    with Asker(finished) as asker:
        for edits, readers in cases:
            edit_config(finished, **edits)
            snakemake = asker.snakemake_would_run()
            asker.resolve()
            dvc = asker.dvc_changed()
            expected = {"resolve", *readers}
            assert dvc == expected, edits
            assert snakemake == with_followers(edges_of(finished), expected), edits
            restore(finished, original, asker)
    shutil.rmtree(directory / "model2")
    shutil.rmtree(directory / "folder")
    (directory / "rows2.json").unlink()


Edit = Callable[[Project], None]


def _no_value(project: Project) -> None:
    """A remark, another order of keys and another spelling of a number in the config; the profile; all times."""
    text = yaml.safe_dump(project.config, sort_keys=True)
    assert "learning_rate: 0.01" in text
    project.write_config("# a remark\n" + text.replace("learning_rate: 0.01", "learning_rate: 1e-2"))
    path = project.directory / "profiles/local/config.yaml"
    path.write_text(path.read_text() + "keep-going: true\n")
    for path in project.directory.rglob("*"):
        if path.is_file() and not {".git", ".dvc", ".snakemake"} & set(path.relative_to(project.directory).parts):
            os.utime(path)


def _remarks(project: Project) -> None:
    """A comment, a docstring, a reformat; in modules and in a rule."""
    for name, old, new in (
        ("src/zerolora/memory/states.py", "", "# a remark\n"),
        ("src/zerolora/train/schedule.py", '"""The learning rate', '"""Here: the learning rate'),
        ("src/zerolora/data/packing.py", "\nimport ", "\n\n\nimport "),
        ("workflow/rules/prepare.smk", "", "# a remark\n"),
    ):
        path = project.directory / name
        path.write_text(path.read_text().replace(old, new, 1))


def _constant(project: Project) -> None:
    path = project.directory / "src/zerolora/train/schedule.py"
    path.write_text(path.read_text() + "NUMBER = 1\n")


def _shell(project: Project) -> None:
    path = project.directory / "workflow/rules/pack.smk"
    path.write_text(path.read_text().replace(" stage pack ", "  stage pack "))


def _row(project: Project) -> None:
    write_rows(project.directory / "rows.json", 21)


def _base_model(project: Project) -> None:
    shutil.rmtree(project.directory / "model")
    make_tiny_model(project.directory / "model", seed=1)


def _second_run(project: Project) -> None:
    edit_config(project, **{"runs.second": {"dataset": "rows", "train": {"learning_rate": 2e-2}}})


def _set(**values: Any) -> Edit:
    return lambda project: edit_config(project, **values)


AFTER_TRAIN = {"compare", *(f"{stage}@default" for stage in ("train", "merge", "evaluate", "report", "accept"))}
# What is edited, how, and all that then runs: a stage whose inputs turn out the same does not. resolve runs after any
# edit of the source: it finds that no fingerprint has changed. Edits whose stages do not overlap are made at once; each
# by itself: test_each_key_changes_the_stages_that_read_it and test_upgrades.py.
EDITS: list[tuple[str, tuple[Edit, ...], set[str]]] = [
    (
        "no value of the config, the profile, every time, remarks in modules and a rule",
        (_no_value, _remarks),
        {"resolve"},
    ),
    (
        # The times of training differ, its adapter does not.
        "a default written out, the host's memory, a rule's command and a constant of training",
        (_set(**{"train.weight_decay": 0.0, "hardware.host_memory": "25GiB"}), _shell, _constant),
        {"resolve", K, E, R, T, P, "compare"},
    ),
    (
        "a data row, packing and the base model's file",
        (_row, _set(**{"pack.packing": True}), _base_model),
        {"resolve", "fetch@tiny", "prepare@rows", "evaluate_base@rows", K, E, R, *AFTER_TRAIN, *SAMPLE},
    ),
    (
        "a second run, nothing merged and nothing evaluated",
        (_second_run, _set(**{"merge.enabled": False, "evaluate.enabled": False})),
        {
            *("resolve", "evaluate_base@rows", "compare", *SAMPLE),
            *(f"{stage}@default" for stage in ("merge", "evaluate", "report", "accept")),
            *(f"{stage}@second" for stage in ONE_RUN),
        },
    ),
]


def test_each_edit_runs_the_same_stages_in_both_engines(
    finished: Project, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Snakemake updates one project and DVC its twin, through the same edits in turn."""
    twin = Project(tmp_path_factory.mktemp("twin") / "project")
    shutil.copytree(finished.directory, twin.directory, symlinks=True)
    twin.config = json.loads(json.dumps(finished.config))
    wrong = {}
    for name, edits, expected in EDITS:
        for edit in edits:
            edit(finished)
            edit(twin)
        by_snakemake, by_dvc = snakemake_ran(finished), dvc_ran(twin)
        left = {"dvc": dvc_changed(finished), "snakemake": snakemake_would_run(twin)}
        if by_snakemake != expected or by_dvc != expected or any(left.values()):
            wrong[name] = {"expected": expected, "snakemake": by_snakemake, "dvc": by_dvc, "left over": left}
    assert wrong == {}
    assert _adapters(finished.directory) == _adapters(twin.directory)
    # Now that rows are packed, their capacity is read too.
    edit_config(finished, **{"pack.capacity": 192})
    read = {"resolve", K, "pack@second"}
    assert snakemake_would_run(finished) == with_followers(edges_of(finished), read)
    finished.snakemake("results/config.json")
    assert dvc_changed(finished) == read - {"resolve"}


def _adapters(directory: Path) -> dict[str, bytes]:
    paths = sorted(directory.glob("results/*/adapter/adapter_model.safetensors"))
    assert len(paths) == 2
    return {path.parts[-3]: path.read_bytes() for path in paths}
