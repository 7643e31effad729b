"""`zerolora import`: public examples of three formats, the translation of every key, and mistakes."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, refusal, served
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(ROOT / "docs"))
import import_table

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.errors import UserError
from zerolora.imports.formats import FORMATS
from zerolora.imports.formats.import_format import CHANGES, FILL_IN, NO_EFFECT, Group
from zerolora.imports.templates import texts
from zerolora.imports.translate import READERS, Translation, import_config, leaves, recognised, translate

FOLDERS = (ROOT / "tests/unit/imported", ROOT / "config/deepspeed")
EXAMPLES = sorted(path for folder in FOLDERS for path in folder.iterdir() if path.suffix != ".md")


def imported(
    file: Path, tmp_path: Path, source: str | None = None, as_sft: bool = False
) -> tuple[Translation, dict[str, Any]]:
    """Return the translation of a file and the written config, which must be valid."""
    output = tmp_path / "config.yaml"
    translation = import_config(file, source, output, force=True, as_sft=as_sft)
    resolve(load(output))
    return translation, yaml.safe_load(output.read_text(encoding="utf-8"))


def paths(value: Any, at: str = "") -> list[str]:
    """Return the path of every value, through sections and lists."""
    if isinstance(value, dict) and value:
        return [path for key, inner in value.items() for path in paths(inner, f"{at}.{key}" if at else str(key))]
    if isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        return [path for number, inner in enumerate(value) for path in paths(inner, f"{at}[{number}]")]
    return [at]


def unnamed(value: Any, translation: Translation) -> list[str]:
    """Return the paths that no line names, alone or inside a list."""
    keys = [line.key for line in translation.lines]
    return [path for path in paths(value) if not any(re.match(rf"{re.escape(key)}($|[.\[])", path) for key in keys)]


def by_key(translation: Translation) -> dict[str, tuple[str, str]]:
    return {line.key: (line.kind, line.text) for line in translation.lines}


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.name)
def test_every_key_of_an_example_is_translated_or_named(file: Path, tmp_path: Path) -> None:
    translation, written = imported(file, tmp_path, as_sft=True)
    values = READERS[".sh" if file.name.startswith("xtuner") else file.suffix](file)
    values.pop("config", None)  # of `xtuner train`, whose keys are those of the config
    lines = by_key(translation)
    assert unnamed(values, translation) == []
    empty = {key for key, (kind, _) in lines.items() if kind == "empty"}
    assert empty <= {key for key, value in leaves(values) if value is None} or file.suffix == ".sh"
    assert not [key for key, (_, text) in lines.items() if re.match("a key of .* (without an|that is not)", text)]
    assert written == translation.config


def test_an_example_of_axolotl(tmp_path: Path) -> None:
    translation, written = imported(ROOT / "tests/unit/imported/axolotl-llama-3-qlora-fsdp-70b.yaml", tmp_path)
    train: dict[str, Any] = {
        "lora": {"r": 8, "alpha": 16.0, "dropout": 0.05, "targets": "all-linear"},
        "method": "qlora",
    }
    train |= {"quantization": {"type": "nf4"}, "ranks_per_node": 1, "global_batch": 4, "micro_batch": 1, "epochs": 4}
    train |= {"learning_rate": 1e-5, "optimizer": "adamw", "schedule": "cosine", "warmup_steps": 10}
    train |= {"weight_decay": 0.0, "gradient_clipping": 1.0, "activation_checkpointing": True, "attention": "flash"}
    train |= {"group_by_length": False}
    train |= {"validation_steps": 0.0625, "checkpoint_steps": 0.25}  # four and one in each of four epochs
    assert written["train"] == train
    assert written["render"] == {"strategy": "fsdp_offload"}
    assert written["pack"] == {"packing": False}
    rows = written["prepare"]["rows"]
    assert (rows["path"], rows["format"], rows["template"]) == ("data/alpaca", "alpaca", "alpaca-newline")
    assert (rows["max_length"], rows["loss"], rows["pad_token"]) == (512, "assistant", "<|end_of_text|>")
    assert written["fetch"]["directory"]["llama-3-70b-fp16"]["path"] == "models/llama-3-70b-fp16"
    lines = by_key(translation)
    assert lines["val_set_size"][0] == "translated" and rows["split"]["validation"] == 0.05
    assert lines["fsdp_config.fsdp_state_dict_type"] == ("no equal", FORMATS["axolotl"].rules["fsdp_config"].remark)


def test_an_example_of_llamafactory(tmp_path: Path) -> None:
    translation, written = imported(ROOT / "tests/unit/imported/llamafactory-llama3-lora-sft-ds3.yaml", tmp_path)
    train = written["train"]
    assert (train["method"], train["lora"]) == ("lora", {"targets": "all-linear", "alpha": 16.0})
    assert (train["micro_batch"], train["global_batch"], train["epochs"]) == (1, 2, 3)
    assert (train["validation_steps"], train["checkpoint_steps"], train["precision"]) == (500, 500, "bf16")
    assert written["render"] == {"strategy": "zero3"}
    rows = written["prepare"]["rows"]
    assert rows["path"] == "data"
    assert rows["sources"] == {"identity.json": {"at_most": 1000}, "alpaca_en_demo.json": {"at_most": 1000}}
    assert (rows["template"], rows["too_long"]) == ("llama-3-verbatim", "truncate_turns")
    said = "examples/deepspeed/ds_z3_config.json is not here; its name says zero3: correct it"
    assert by_key(translation)["deepspeed"] == ("differs", said)


@pytest.mark.parametrize(
    ("kind", "params", "warmup", "by_logarithm"),
    [
        ("WarmupLR", {"warmup_num_steps": 100}, 100, True),
        ("WarmupDecayLR", {"warmup_type": "log", "warmup_num_steps": 100}, 100, True),
        ("WarmupCosineLR", {"warmup_type": "linear"}, 1000, False),
        ("WarmupDecayLR", {"warmup_num_steps": "auto", "warmup_type": "linear"}, None, False),
    ],
)
def test_deepspeed_warm_up_is_logarithmic_unless_linear(
    tmp_path: Path, kind: str, params: dict[str, Any], warmup: int | None, by_logarithm: bool
) -> None:
    scheduler = {"type": kind, "params": params}
    text = json.dumps({"zero_optimization": {"stage": 2}, "scheduler": scheduler})
    translation, written = of(text, tmp_path, name="ds.json")
    assert written.get("train", {}).get("warmup_steps") == warmup
    assert any("logarithm" in line.text for line in translation.of(CHANGES)) == by_logarithm


def test_quantized_gradients_of_a_json_are_named_with_their_strategy(tmp_path: Path) -> None:
    zero = {"stage": 3, "zero_quantized_gradients": True}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": zero}), encoding="utf-8")
    strategy = "on several nodes in fp16, set render.strategy: zero3_qgz"
    alone, written = imported(file, tmp_path)
    assert written["render"] == {"strategy": "zero3"}
    assert strategy in by_key(alone)["zero_optimization.zero_quantized_gradients"][1]
    own = tmp_path / "axolotl.yml"
    own.write_text("base_model: some/model\nadapter: lora\nmicro_batch_size: 1\ndeepspeed: ds.json\n", encoding="utf-8")
    translation, _ = imported(own, tmp_path)
    said = by_key(translation)["deepspeed"][1]
    assert f"but for zero_quantized_gradients; {strategy}" in said
    assert any(line.key == "deepspeed" for line in translation.of(CHANGES))


def test_deepspeeds_one_cycle_has_no_equal(tmp_path: Path) -> None:
    scheduler = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}}
    text = json.dumps({"zero_optimization": {"stage": 2}, "scheduler": scheduler})
    translation, written = of(text, tmp_path, name="ds.json")
    assert "schedule" not in written.get("train", {})
    assert by_key(translation)["scheduler.type"][0] == "no equal"
    assert "train.schedule: one_cycle" in by_key(translation)["scheduler.type"][1]


def test_axolotls_one_cycle_rises_in_the_warm_up_or_by_pct_start(tmp_path: Path) -> None:
    cycle = f"{AXOLOTL}lr_scheduler: one_cycle\n"
    translation, written = of(cycle, tmp_path)
    assert (written["train"]["schedule"], written["train"]["warmup_ratio"]) == ("one_cycle", 0.03)
    beta = "one_cycle also moves Adam's first beta from 0.95 to 0.85 and back there"
    assert any(beta in line.text for line in translation.of(CHANGES))
    kwargs = "lr_scheduler_kwargs: {pct_start: 0.2, cycle_momentum: false}\n"
    translation, written = of(f"{cycle}warmup_steps: 3\n{kwargs}", tmp_path)
    assert written["train"]["schedule_options"] == {"pct_start": 0.2}
    assert not {"warmup_steps", "warmup_ratio"} & written["train"].keys()
    assert not any(beta in line.text for line in translation.lines)
    translation, _ = of(f"{FACTORY}lr_scheduler_type: one_cycle\n", tmp_path)
    assert by_key(translation)["lr_scheduler_type"][0] == "no equal"  # transformers has none


def test_axolotls_default_warm_up(tmp_path: Path) -> None:
    assert of(AXOLOTL, tmp_path)[1]["train"]["warmup_ratio"] == 0.03
    assert "warmup_ratio" not in of(f"{AXOLOTL}warmup_steps: 0\n", tmp_path)[1]["train"]
    assert of(f"{AXOLOTL}warmup_ratio: 0.1\n", tmp_path)[1]["train"]["warmup_ratio"] == 0.1
    assert of(f"{AXOLOTL}warmup_steps: 1\n", tmp_path)[1]["train"]["warmup_steps"] == 2


@pytest.mark.parametrize(
    ("zero", "strategy"),
    [
        ({"stage": 0}, "zero0"),
        ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, "zero1_offload"),
        ({"stage": 2}, "zero2"),
        ({"stage": 3, "zero_hpz_partition_size": 8}, "zero3_hpz"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, "zero3_offload_optimizer"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, "zero3_offload"),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, "zero3_offload"),
        ({"stage": 2, "cpu_offload": True}, "zero2_offload"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "auto"),
        ({"stage": 4}, "auto"),
        ({"stage": 3, "offload_param": {"device": ["cpu"]}}, "auto"),
    ],
)
def test_stage_and_offload_of_a_json_give_a_strategy(tmp_path: Path, zero: dict[str, Any], strategy: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": zero}), encoding="utf-8")
    assert imported(file, tmp_path)[1]["render"] == {"strategy": strategy}
    own = tmp_path / "axolotl.yml"
    own.write_text("base_model: some/model\nadapter: lora\nmicro_batch_size: 1\ndeepspeed: ds.json\n", encoding="utf-8")
    translation, written = imported(own, tmp_path)
    assert written["render"] == {"strategy": strategy}
    assert by_key(translation)["deepspeed"][0] == ("no equal" if strategy == "auto" else "differs")


def test_invalid_value_is_named_and_omitted(tmp_path: Path) -> None:
    text = "adapter: lora\nlora_r: 0\nlora_dropout: 1.5\nlearning_rate: fast\nearly_stopping_patience: 3\nseed: -1\n"
    translation, written = of(f"{AXOLOTL}{text}no_such: {{a: 1}}\n", tmp_path)
    refused = {line.key: line.text for line in translation.lines if line.kind == "no equal"}
    assert refused.keys() == {"lora_r", "lora_dropout", "learning_rate", "early_stopping_patience", "seed", "no_such.a"}
    assert "less than 1" in refused["lora_dropout"] and "validation_steps" in refused["early_stopping_patience"]
    assert "lora" not in written["train"] or "dropout" not in written["train"]["lora"]


def test_schedule_with_invalid_options_is_omitted(tmp_path: Path) -> None:
    translation, written = of(f"{AXOLOTL}cosine_min_lr_ratio: -1.0\n", tmp_path)
    assert not {"schedule", "schedule_options"} & written["train"].keys()
    assert by_key(translation)["cosine_min_lr_ratio"][0] == "no equal"
    translation, written = of(f"{FACTORY}lr_scheduler_type: cosine_with_min_lr\n", tmp_path)
    assert "schedule" not in written["train"]
    assert "needs one of min_lr and min_lr_rate" in by_key(translation)["lr_scheduler_type"][1]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 10**12)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["auto", "cpu", "lora", "full_shard", "2e-5", "a/b", "../x", "/", "zero3.json", "HYBRID_SHARD"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(sorted(FORMATS)))
    config: dict[str, Any] = draw(st.dictionaries(st.text(max_size=6), VALUES, max_size=3))
    for key in draw(st.lists(st.sampled_from(sorted(FORMATS[name].rules)), max_size=12)):
        *above, last = key.replace("[]", "").split(".")
        section: Any = config
        for part in above:
            inner = section.get(part)
            section[part] = inner = inner if isinstance(inner, dict) else {}
            section = inner
        section[last] = draw(VALUES)
    if "[]" in "".join(FORMATS[name].rules) and isinstance(config.get("datasets"), dict):
        config["datasets"] = [config["datasets"]] * draw(st.integers(1, 2))
    return name, config


@given(configs())
@settings(max_examples=120, deadline=None)
def test_every_key_with_any_value_has_a_line(drawn: tuple[str, dict[str, Any]]) -> None:
    name, config = drawn
    translation = translate(config, FORMATS[name], Path("/nowhere"))
    assert not config or unnamed(config, translation) == []
    from zerolora.config.cross_checks import impossible
    from zerolora.config.schema import Config

    assert list(impossible(Config.model_validate(translation.config))) == []
    assert yaml.safe_load(yaml.safe_dump(translation.config)) == translation.config
    assert all("\n" not in str(line) for line in translation.lines)


def test_command_prints_its_lines_and_writes_them_into_the_config(tmp_path: Path) -> None:
    example = (ROOT / "tests/unit/imported/llamafactory-llama3-lora-dpo.yaml").read_text(encoding="utf-8")
    file, output = tmp_path / "rm.yaml", tmp_path / "new/config.yaml"
    file.write_text(example.replace("stage: dpo", "stage: rm"), encoding="utf-8")
    refused = served("zerolora", "import", str(file), "--output", str(output))
    assert refused.returncode == 2 and "stage: 'rm': a reward model" in refused.stderr and "--as-sft" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1 and not output.exists()
    result = served("zerolora", "import", str(file), "--output", str(output), "--as-sft")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    groups = [lines.index(f"{group}:") for group in (CHANGES, FILL_IN, NO_EFFECT)]
    assert groups == sorted(groups) and groups[0] == 0
    assert "  stage: no equal: 'rm': a reward model" in lines[: groups[1]]
    assert "  output_dir: no equal: results are in results/<run>/" in lines[groups[2] :]
    text = output.read_text(encoding="utf-8")
    assert [line[2:] for line in text.splitlines()[2:] if line.startswith("# ")] == lines
    load(output)
    again = served("zerolora", "import", str(file), "--output", str(output), "--as-sft")
    assert again.returncode == 2 and "exists; pass --force" in again.stderr
    assert output.read_text(encoding="utf-8") == text
    assert served("zerolora", "import", str(file), "--output", str(output), "--as-sft", "--force").returncode == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no such file"),
        ("", "is empty where the keys of a training are expected"),
        ("- 1\n", "where the keys of a training are expected"),
        ("a: [\n", "correct the YAML"),
        ("a: " + "[" * 60 + "]" * 60 + "\n", "more than 50 levels"),
        ("lora_r: 8\nlora_r: 9\n", "lora_r appears twice"),
        ("some: key\n", "its keys are 'some', without a tool's own keys beside one of base_model"),
        ("learning_rate: 1\n", "its keys are 'learning_rate', without a tool's own"),
        ("when: 2024-02-30\nbase_model: a\n", "is not of type timestamp"),
        ("base_model: a\n1: 2\n", "the key 1 is read as int"),
    ],
)
def test_unreadable_file_is_one_line(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "config.yml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    assert re.search(said, refusal(import_config, file, None, tmp_path / "out.yaml", force=False))
    assert not (tmp_path / "out.yaml").exists()


def test_format_can_be_given(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'unsloth' is not a format; use one of axolotl, deepspeed, llamafactory, "):
        recognised(tmp_path, {}, "unsloth")
    file = tmp_path / "config.yml"
    file.write_text("learning_rate: 1.0e-3\n", encoding="utf-8")
    assert imported(file, tmp_path, "axolotl")[1]["train"]["learning_rate"] == 1e-3


def of(text: str, tmp_path: Path, name: str = "config.yml", **options: Any) -> tuple[Translation, dict[str, Any]]:
    """Return the translation of a text and the written config."""
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return imported(file, tmp_path, **options)


AXOLOTL = "base_model: some/model\nmicro_batch_size: 1\nsequence_len: 512\nbf16: auto\n"
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
FACTORY = "model_name_or_path: some/model\nstage: sft\nfinetuning_type: lora\ncutoff_len: 512\ndataset: a\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "model_name_or_path: m\ndataset_name: d\nbeta: 0.1\n",
            "as much a config of trl-dpo as of trl-kto as of trl-o",
        ),
        ("model_name_or_path: m\nlearning_rate: 1.0e-4\nlora_alpha: 8\n", r"own keys beside .* use --from axolotl\|"),
        ("distributed_type: FSDP\nfsdp_config: {}\nmixed_precision: bf16\n", "its keys are 'distributed_type'"),
        (
            "_description: x\nfsdp: full_shard auto_wrap\nfsdp_config: {fsdp_version: 2}\n",
            "its keys are '_descript",
        ),
        ("debug: true\n", "its keys are 'debug'"),
        ("identity: {file_name: identity.json}\nb: {hf_hub_url: a/b}\n", "its keys are 'identity', 'b'"),
        ("fetch: {}\nprepare: {}\n", "its keys are 'fetch', 'prepare', without .* start from a config of zerolora"),
        ("base_model: m\nmodels: [{model: m}]\nmerge_method: slerp\n", r"of axolotl, .* \(2 of 3 keys are unknown\)"),
        ("task: llm-sft\nbase_model: m\nproject_name: p\n", r"'task', 'project_name' \(2 of 3 keys are unknown\)"),
        ("base_model: m\nlora_r: 8\nadapter: lora\na: 1\nb: 1\n", r"has no key 'a', 'b' \(2 of 5 keys are unknown\)"),
        ("base_model: m\na: 1\nb: 1\nc: 1\n", r"has no key 'a', 'b', 'c' \(3 of 4 keys are unknown\)"),
    ],
)
def test_another_file_is_not_a_config_of_a_known_tool(tmp_path: Path, text: str, said: str) -> None:
    file, output = tmp_path / "config.yaml", tmp_path / "out.yaml"
    file.write_text(text, encoding="utf-8")
    assert re.search(said, refusal(import_config, file, None, output, force=False, as_sft=True))
    assert not output.exists()


@pytest.mark.parametrize("suffix", [".toml", ".ipynb"])
def test_programs_are_refused_and_not_run(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"config{suffix}"
    file.write_text("base_model: m\nlora_r: 8\n", encoding="utf-8")
    line = refusal(import_config, file, None, tmp_path / "out.yaml", force=False)
    assert "is none of .yaml, .yml, .json, .sh, .py, and no other file is read; write its values as YAML" in line


@pytest.mark.parametrize(("text", "key"), [(AXOLOTL, "val_set_size"), (FACTORY, "val_size")])
def test_another_number_of_validation_rows_changes_the_result(tmp_path: Path, text: str, key: str) -> None:
    translation, written = of(f"{text}{key}: 1.5\n", tmp_path)
    (line,) = (line for line in translation.of(CHANGES) if line.key == key)
    assert "200 is written" in line.text and "1.5" in line.text
    assert written["prepare"]["rows"]["split"]["validation"] == 200


@pytest.mark.parametrize(("text", "key"), [(AXOLOTL, "val_set_size"), (FACTORY, "val_size")])
@pytest.mark.parametrize("line", ["", "{key}: 0\n", "{key}: 0.0\n{key_of_steps}: 5\n"])
def test_no_rows_are_held_out_where_none_are_there(tmp_path: Path, text: str, key: str, line: str) -> None:
    line = line.format(key=key, key_of_steps="eval_steps")
    translation, written = of(f"{text}{line}", tmp_path)
    assert written["prepare"]["rows"]["split"] == {"validation": 0, "test": 0}
    assert not {"validation_steps", "keep", "patience"} & written["train"].keys()
    said = [line.text for line in translation.of(NO_EFFECT)]
    assert "no rows are held out, as there; nothing is evaluated" in said


@pytest.mark.parametrize(("text", "key"), [(AXOLOTL, "val_set_size"), (FACTORY, "val_size")])
@pytest.mark.parametrize("size", [0.05, 300])
def test_a_share_of_validation_rows_stays_one(tmp_path: Path, text: str, key: str, size: float) -> None:
    translation, written = of(f"{text}{key}: {size}\n", tmp_path)
    assert written["prepare"]["rows"]["split"]["validation"] == size
    assert by_key(translation)[key][0] == "translated"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        *(
            (f"{AXOLOTL}{line}\n", line.partition(":")[0])
            for line in (
                "rl: gdpo", "rl: grpo", "reward_model: true", "process_reward_model: true", "num_labels: 2",
                "qat: {activation_dtype: int8}", "processor_type: AutoProcessor", "image_size: 512", "adapter: oft",
                "adapter: llama-adapter", "relora: true", "lisa_n_layers: 4", "unfrozen_parameters: [lm_head]",
                "kd_trainer: true", "plugins: [axolotl.integrations.diffusion.DiffusionPlugin]", "use_eaft: true",
                "model_type: AutoModelForSequenceClassification", "trainer_cls: my.Trainer", "reinit_weights: true",
                "gptq: true", "llmcompressor: {save_compressed: true}",
            )
        ),
        (f"{AXOLOTL}datasets: [{{path: a/b, type: bradley_terry.chat_template}}]\n", "datasets[0].type"),
        *((FACTORY.replace("sft", stage), "stage") for stage in ("rm", "ppo", "nothing")),
        *((FACTORY.replace("lora", method), "finetuning_type") for method in ("freeze", "oft")),
        (FACTORY.replace("dataset: a\n", "export_dir: b\n"), "dataset"),
        *(
            (f"{FACTORY}{line}\n", line.partition(":")[0])
            for line in (
                "do_train: false", "template: qwen2_vl", "image_max_pixels: 9", "video_fps: 3.0", "use_dft_loss: true",
                "freeze_vision_tower: false", "freeze_language_model: true", "mixture_of_depths: convert",
                "use_llama_pro: true", "train_from_scratch: true", "reward_model: a/b",
            )
        ),
        ('{"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}', "zero_optimization.zenflow.topk_ratio"),
        ('{"zero_optimization": {}, "compression_training": {"a": 1}}', "compression_training.a"),
    ],
)  # fmt: skip
def test_another_objective_method_or_modality_stops_the_import(tmp_path: Path, text: str, key: str) -> None:
    name = "ds.json" if text.startswith("{") else "config.yml"
    line = refusal(of, text, tmp_path, name)
    assert f"{key}: " in line and "pass --as-sft to import the rest" in line
    translation, _ = of(text, tmp_path, name, as_sft=True)
    assert any(line.key == key and line.group == CHANGES for line in translation.lines)


@pytest.mark.parametrize(
    "line", ["rl:", "rl: false", "qat: {}", "relora: false", "plugins: []", "unfrozen_parameters:"]
)
def test_disabled_options_stop_nothing(tmp_path: Path, line: str) -> None:
    translation, _ = of(f"{AXOLOTL}{line}\n", tmp_path)
    assert not translation.unlike


def data(entries: str, tmp_path: Path, more: str = "") -> tuple[dict[str, tuple[str, str]], dict[str, Any]]:
    translation, written = of(f"{AXOLOTL}{more}datasets: {entries}\n", tmp_path)
    return {line.key: (line.group or "", line.text) for line in translation.lines}, written["prepare"]["rows"]


def test_data_sets_of_equal_names_are_distinguished(tmp_path: Path) -> None:
    _, rows = data("[{path: a/alpaca, type: alpaca}, {path: b/alpaca, type: alpaca}]", tmp_path)
    assert rows["path"] == "data/imported" and rows["sources"] == {"a-alpaca": {}, "b-alpaca": {}}
    assert "system" in rows["ignore"] and "input" not in rows["ignore"]
    _, rows = data("[{path: a/c, type: alpaca, name: x}, {path: a/c, type: alpaca, name: y}]", tmp_path)
    assert rows["sources"] == {"a-c": {}, "a-c-2": {}}
    _, rows = data("[{path: ./in/x.jsonl, type: alpaca}, {path: ./in/y/x.jsonl, type: completion}]", tmp_path)
    forms = {name: source["format"] for name, source in rows["sources"].items()}
    assert (rows["path"], forms) == ("in", {"x.jsonl": "alpaca", "y/x.jsonl": "text"})


@pytest.mark.parametrize(
    ("kind", "form", "template", "system", "said"),
    [
        ("alpaca", "alpaca", "alpaca-newline", None, ""),
        ("alpaca:chatml", "alpaca", "chatml", "Below is an instruction", "longer system prompt"),
        ("alpaca:chat", "alpaca", "vicuna", "Below is an instruction", "SYSTEM:, USER: and ASSISTANT:"),
        ("alpaca:phi", "alpaca", "chat", "Below is an instruction", "the turns are Phi-3's there"),
        ("alpaca_w_system.load_open_orca_chatml", "alpaca", "chatml", None, ""),
        ("chat_template", "messages", "chat", None, ""),
    ],
)
def test_axolotl_type_selects_prompt(
    tmp_path: Path, kind: str, form: str, template: str, system: str | None, said: str
) -> None:
    lines, rows = data(f"[{{path: a/b, type: '{kind}'}}]", tmp_path)
    assert (rows["format"], rows["template"]) == (form, template)
    assert rows.get("system", "").startswith(system or "") and bool(system) == ("system" in rows)
    group, text = lines.get("prepare.rows.template", ("", ""))
    assert said in text and (group == CHANGES) == bool(said)


def test_chat_template_does_not_apply_to_alpaca_rows(tmp_path: Path) -> None:
    more = "chat_template: llama3\n"
    lines, rows = data("[{path: a/b, type: alpaca}]", tmp_path, more)
    assert rows["template"] == "alpaca-newline"
    said = "not used by the data sets' types, whose prompt is alpaca-newline"
    assert lines["chat_template"] == (NO_EFFECT, said)
    lines, rows = data("[{path: a/b, type: alpaca}, {path: c/d, type: chat_template}]", tmp_path, more)
    group, text = lines["prepare.rows.template"]
    assert group == CHANGES and "(alpaca-newline, llama-3), but one here" in text


ROLES = "[{path: a/b, type: chat_template, roles_to_train: [assistant, user]}%s]"


@pytest.mark.parametrize(
    ("entries", "more", "loss", "said"),
    [
        (ROLES % "", "train_on_inputs: false\n", ["assistant", "user"], ""),
        (ROLES % "", "", ["assistant", "user"], ""),
        (ROLES % "", "train_on_inputs: true\n", "everything", ""),
        (ROLES % ", {path: c/d, type: chat_template}", "", ["assistant", "user"], "datasets[1].roles_to_train"),
        (ROLES % ", {path: c/d, type: alpaca}", "", ["assistant", "user"], "datasets[1].roles_to_train"),
        (ROLES % ", {path: c/d, type: chat_template, roles_to_train: [user, gpt]}", "", ["assistant", "user"], ""),
        ("[{path: a/b, type: alpaca, roles_to_train: [user]}]", "train_on_inputs: false\n", "assistant", ""),
        ("[{path: a/b, type: chat_template, roles_to_train: [bot], roles: {assistant: [bot]}}]", "", None, ""),
        ("[{path: a/b, type: alpaca}]", "train_on_inputs: true\n", "everything", ""),
    ],
)
def test_roles_and_inputs_that_are_supervised(tmp_path: Path, entries: str, more: str, loss: Any, said: str) -> None:
    for text in (f"{AXOLOTL}{more}datasets: {entries}\n", f"{AXOLOTL}datasets: {entries}\n{more}"):
        translation, written = of(text, tmp_path)
        assert written["prepare"]["rows"].get("loss") == loss
        keys = [line.key for line in translation.of(CHANGES) if line.key.endswith("roles_to_train")]
        assert keys == [said] * bool(said)


@pytest.mark.parametrize(
    ("entry", "template", "group", "system"),
    [
        ("type: alpaca", "chatml", NO_EFFECT, None),
        ("type: chat_template", "llama3", NO_EFFECT, None),
        ("type: chat_template", "chatml", CHANGES, "You are X."),
        ("type: chat_template", "qwen_25", NO_EFFECT, QWEN),
    ],
)
def test_default_system_prompt_only_applies_to_chatml(
    tmp_path: Path, entry: str, template: str, group: Group, system: str | None
) -> None:
    more = f"default_system_message: You are X.\nchat_template: {template}\n"
    _, rows = data(f"[{{path: a/b, {entry}}}]", tmp_path, more)
    assert rows.get("system") == system
    translation, _ = of(f"{AXOLOTL}{more}datasets: [{{path: a/b, {entry}}}]\n", tmp_path)
    assert any(line.key == "default_system_message" for line in translation.of(group))


@pytest.mark.parametrize(
    ("name", "ours", "system"),
    [
        ("gemma3n", "gemma", None),
        ("qwen_25", "chatml", QWEN),
        ("tokenizer_default_fallback_qwen_25", "chat", None),
    ],
)
def test_axolotls_template_is_ours_of_the_same_text(tmp_path: Path, name: str, ours: str, system: str | None) -> None:
    """The texts are compared in test_prompt_formats.py."""
    entry = "datasets: [{path: a/b, type: chat_template}]\n"
    translation, written = of(f"{AXOLOTL}chat_template: {name}\n{entry}", tmp_path)
    rows = written["prepare"]["rows"]
    assert (rows["template"], rows.get("system")) == (ours, system)
    assert not [line for line in translation.of(CHANGES) if line.key == "chat_template"]


@pytest.mark.parametrize(
    ("tool", "name"), [("axolotl", name) for name in ("cohere", "gemma4", "phi_3")] + [("llamafactory", "phi4")]
)
def test_a_template_of_the_model_is_compared_by_prepare(tmp_path: Path, tool: str, name: str) -> None:
    """The comparison is in test_prompt_formats.py."""
    key, text = "chat_template", f"{AXOLOTL}chat_template: {name}\ndatasets: [{{path: a/b, type: chat_template}}]\n"
    if tool == "llamafactory":
        key, text = "template", f"{FACTORY}template: {name}\n"
    translation, written = of(text, tmp_path)
    rows = written["prepare"]["rows"]
    assert (rows["template"], rows["template_writes"]) == ("chat", texts(tool)[name])
    assert not [line for line in translation.of(CHANGES) if line.key == key]
    assert [line for line in translation.of(NO_EFFECT) if line.key == key and "`prepare` stops" in line.text]


def test_axolotls_template_without_an_equal_is_a_line(tmp_path: Path) -> None:
    for name, more, said in (
        ("qwen3", "", "the thoughts before the last answer"),
        ("mine", "", "'mine' has no equal"),
    ):
        lines, rows = data("[{path: a/b, type: chat_template}]", tmp_path, f"chat_template: {name}\n{more}")
        assert rows["template"] == "chat" and "system" not in rows
        assert ("template_writes" in rows) == (name == "qwen3")
        assert lines["chat_template"][0] == CHANGES and said in lines["chat_template"][1]
    kwargs = "chat_template: phi_4\nchat_template_kwargs: {x: true}\ndatasets: [{path: a/b, type: chat_template}]\n"
    translation, written = of(f"{AXOLOTL}{kwargs}", tmp_path)
    assert "template_writes" not in written["prepare"]["rows"]
    assert [line for line in translation.of(CHANGES) if "own chat template with these arguments" in line.text]
    _, rows = data("[{path: a/b, type: alpaca}]", tmp_path, "chat_template: qwen_25\n")
    assert rows["template"] == "alpaca-newline" and "system" not in rows


@pytest.mark.parametrize(
    ("model", "tokens", "changed"),
    [
        ("codellama/CodeLlama-7b-hf", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, []),
        ("codellama/CodeLlama-7b-hf", {"bos_token": "<|begin|>"}, ["special_tokens.bos_token"]),
        ("01-ai/Yi-34B-Chat", {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>"}, []),
        ("NousResearch/Meta-Llama-3.1-8B", {"eos_token": "<|eot_id|>", "pad_token": "<|end_of_text|>"}, []),
        ("some/codellama", {"bos_token": "<s>"}, ["special_tokens.bos_token"]),
        ("LOCAL", {"bos_token": "[A]", "unk_token": "[B]"}, []),
        ("LOCAL", {"bos_token": "[B]", "unk_token": "[A]"}, ["special_tokens.bos_token", "special_tokens.unk_token"]),
        ("LOCAL", {"cls_token": "[C]"}, ["special_tokens.cls_token"]),
    ],
)
def test_special_tokens_of_axolotl(tmp_path: Path, model: str, tokens: dict[str, str], changed: list[str]) -> None:
    """Those that the tokenizer has in the same role change nothing; an end of sequence is a stop token."""
    (tmp_path / "local").mkdir()
    own = {"bos_token": "[A]", "unk_token": {"content": "[B]", "special": True}}
    (tmp_path / "local/tokenizer_config.json").write_text(json.dumps(own))
    text = AXOLOTL.replace("some/model", model.replace("LOCAL", str(tmp_path / "local")))
    entry = "datasets: [{path: a/b, type: alpaca}]\n"
    translation, written = of(f"{text}special_tokens: {json.dumps(tokens)}\n{entry}", tmp_path)
    assert [line.key for line in translation.of(CHANGES) if line.key.startswith("special")] == changed
    rows = written["prepare"]["rows"]
    assert rows.get("stop_tokens") == ([tokens["eos_token"]] if "eos_token" in tokens else None)
    assert rows.get("pad_token") == tokens.get("pad_token")


def test_input_output_rows_are_unsupported(tmp_path: Path) -> None:
    lines, rows = data("[{path: a/b, type: input_output}]", tmp_path)
    assert rows["format"] == "auto" and lines["datasets[0].type"][0] == CHANGES


@pytest.mark.parametrize(
    ("entry", "form", "columns"),
    [
        ("type: chat_template, field_messages: conversation", "messages", {"messages": "conversation"}),
        (
            "type: chat_template, field_messages: turns, message_property_mappings: {role: from, content: value}",
            "sharegpt",
            {"conversations": "turns"},
        ),
        (
            "type: chat_template, field_messages: conversations, message_field_role: from, "
            "message_field_content: value",
            "sharegpt",
            None,
        ),
        ("type: completion, field: chapter", "text", {"text": "chapter"}),
        ("type: alpaca_chat.load_qa", "alpaca", {"instruction": "question", "output": "answer"}),
        ("type: {field_instruction: q, field_output: a}", "alpaca", {"instruction": "q", "output": "a"}),
        (
            "type: chat_template, message_property_mappings: {role: who, content: what, tool_calls: calls}",
            "messages",
            {"tool_calls": "calls", "role": "who", "content": "what"},
        ),
        (
            "type: chat_template, field_thinking: why, message_field_training: learn",
            "messages",
            {"reasoning_content": "why", "train": "learn"},
        ),
    ],
)
def test_fields_of_rows_become_columns(tmp_path: Path, entry: str, form: str, columns: dict[str, str] | None) -> None:
    _, rows = data(f"[{{path: a/b, {entry}}}]", tmp_path)
    assert (rows["format"], rows.get("columns")) == (form, columns)


def test_renamed_roles_and_ignored_columns(tmp_path: Path) -> None:
    roles = "{user: [human, customer], assistant: [bot], system: [system]}"
    _, rows = data(f"[{{path: a/b, type: chat_template, roles: {roles}}}]", tmp_path)
    assert rows["roles"] == {"customer": "user", "bot": "assistant"}
    assert rows["ignore"] == ["system", "system_prompt", "functions"]
    _, rows = data("[{path: a/b, type: alpaca}]", tmp_path)
    assert {"system", "context", "history"} <= set(rows["ignore"]) and "input" not in rows["ignore"]
    _, rows = data("[{path: a/b, type: alpaca_w_system.load_instruct}]", tmp_path)
    assert "system" not in rows["ignore"]


def test_files_splits_and_commits_of_a_data_set(tmp_path: Path) -> None:
    _, rows = data("[{path: a/b, type: completion, data_files: [x/one.jsonl]}]", tmp_path)
    assert (rows["path"], rows["too_long"], rows["loss"]) == ("data/b/x/one.jsonl", "split", "everything")
    _, rows = data("[{path: ./in, type: alpaca, data_files: [x.jsonl, y.jsonl]}]", tmp_path)
    assert rows["sources"] == {"in/x.jsonl": {}, "in/y.jsonl": {}}
    lines, rows = data("[{path: a/b, type: alpaca, split: 'train[:1000]'}]", tmp_path)
    assert (rows["at_most"], rows["path"]) == (1000, "data/b") and "datasets[0]" not in lines
    lines, rows = data("[{path: a/b, type: alpaca, split: 'train[:20%]'}]", tmp_path)
    assert rows["at_most"] == 0.2 and "datasets[0]" not in lines
    assert "at_most" not in data("[{path: a/b, type: alpaca, split: 'train[:100%]'}]", tmp_path)[1]
    lines, _ = data("[{path: a/b, type: alpaca, split: 'train[20%:]'}]", tmp_path)
    assert lines["datasets[0]"] == (FILL_IN, "train[20%:] is a slice of a split; bring only those rows")
    commit = "0123456789" * 4
    pinned = f"{{path: a/b, type: alpaca, revision: '{commit}', data_files: [x.jsonl]}}"
    _, written = of(f"{AXOLOTL}datasets: [{pinned}]\n", tmp_path)
    assert written["fetch"]["data"]["b"]["files"] == ["x.jsonl"]
    assert written["prepare"]["rows"]["path"] == "data/hub/b"
    _, rows = data("[{path: a/b, type: alpaca}]", tmp_path, "test_datasets: [{path: c/d, type: alpaca}]\n")
    assert rows["sources"] == {"b": {}, "d": {"split": "validation"}} and rows["split"]["validation"] == 0


@pytest.mark.parametrize(
    ("entries", "path", "said"),
    [
        ("[{path: /workspace/a.jsonl}, {path: /data/b.jsonl}]", "data/imported", "bring /data/b.jsonl to"),
        ("[{path: /home/me/a.jsonl}, {path: /home/me/p/b.jsonl}]", "data/imported", "bring /home/me/a.jsonl to"),
        ("[{path: /a.jsonl}, {path: /b.jsonl}]", "data/imported", "bring /a.jsonl to"),
        ("[{path: ~/a.jsonl}, {path: ~/p/b.jsonl}]", "data/imported", "bring ~/a.jsonl to"),
        ("[{path: /d/a.jsonl}, {path: /d/b.jsonl}]", "/d", ""),
        ("[{path: d/x/a.jsonl}, {path: d/b.jsonl}]", "d", ""),
        ("[{path: 'https://x.y/a.jsonl?download=true', ds_type: json}]", "data/a.jsonl", "bring https://x.y/a.jsonl?"),
        ("[{path: 's3://bucket/a/b', type: alpaca}]", "data/b", "bring s3://bucket/a/b to data/b"),
        ("[{path: json, data_files: /d/a.jsonl}]", "/d/a.jsonl", ""),
        ("[{path: json, data_files: 'https://x.y/a.jsonl'}]", "data/a.jsonl", "bring https://x.y/a.jsonl to"),
        ("[{path: json, data_files: [/d/e/a.jsonl, /d/e/b.jsonl]}]", "/d", ""),
        ("[{path: o/d, data_files: /d/a.jsonl}]", "data/d/a.jsonl", "/d/a.jsonl is outside of o/d"),
        ("[{path: json, data_files: [a.jsonl, '..']}]", "data/imported", ".. is outside of ."),
        ("[{path: o/d, data_files: ../a.jsonl}]", "data/d/a.jsonl", "../a.jsonl is outside of o/d"),
        ("[{path: ./d, split: test}]", "./d", "the split test of ./d is read there"),
        ("[{path: ./d, name: en}, {path: ./e}]", "data/imported", "bring the subset en of ./d to"),
        ("[{path: ./d, split: train}]", "./d", ""),
    ],
)
def test_paths_include_no_other_files(tmp_path: Path, entries: str, path: str, said: str) -> None:
    translation, written = of(f"{AXOLOTL}datasets: {entries}\n", tmp_path)
    assert written["prepare"]["rows"]["path"] == path
    keys = ("prepare.rows.path", "prepare.rows.so", "data")
    lines = [line.text for line in translation.of(FILL_IN) if line.key.startswith(keys)]
    assert bool(lines) == bool(said) and (not said or any(said in line for line in lines))


def test_pinned_data_set_has_one_pattern_to_correct(tmp_path: Path) -> None:
    """Since fetch-data refuses a pattern that no file matches."""
    entry = f"{{path: o/d, revision: '{'0123456789' * 4}', name: en, split: test, type: alpaca}}"
    translation, written = of(f"{AXOLOTL}datasets: [{entry}]\n", tmp_path)
    assert written["fetch"]["data"]["d"]["files"] == ["*.parquet"]
    line = next(line for line in translation.of(FILL_IN) if line.key == "fetch.data.d.files")
    assert "only those of the split test of the subset en of o/d" in line.text


def test_row_limit_over_several_files_is_a_line(tmp_path: Path) -> None:
    lines, rows = data("[{path: a/b, type: alpaca, split: 'train[:9]', data_files: [x.jsonl, y.jsonl]}]", tmp_path)
    assert rows["sources"] == {"b/x.jsonl": {"at_most": 9}, "b/y.jsonl": {"at_most": 9}}
    said = "the first 9 rows of all files there, of each file here; correct at_most of prepare.rows.sources"
    assert lines["datasets[0]"] == (CHANGES, said)


def test_linear_layers_and_a_target_list_are_united(tmp_path: Path) -> None:
    lora = "adapter: lora\nlora_target_linear: true\nlora_target_modules: [q_proj, "
    translation, written = of(f"{AXOLOTL}{lora}v_proj]\n", tmp_path)
    assert written["train"]["lora"]["targets"] == "all-linear" and "lora_target_modules" in by_key(translation)
    translation, written = of(f"{AXOLOTL}{lora}embed_tokens]\n", tmp_path)
    assert written["train"]["lora"]["targets"] == "all-linear"
    assert any(line.key == "lora_target_modules" and line.group == CHANGES for line in translation.lines)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("bf16: false\nfp16: false\n", {"precision": "fp32"}),
        ("bf16: false\nfp16: true\n", {"precision": "fp16"}),
        ("activation_offloading: legacy\n", {"activation_offload": True}),
        ("activation_offloading: true\ngradient_checkpointing: false\n", {"activation_offload": True}),
        ("gradient_checkpointing: false\nactivation_offloading: true\n", {"activation_offload": True}),
        ("cosine_min_lr_ratio: 0.1\n", {"schedule": "cosine_with_min_lr", "schedule_options": {"min_lr_rate": 0.1}}),
        ("save_total_limit: 3\n", {"keep_checkpoints": 3}),
        ("warmup_steps: 0.1\n", {"warmup_ratio": 0.1}),
        ("optimizer: adamw_torch_8bit\n", {"optimizer": "adamw_torch_8bit"}),
        ("optimizer: adamw_torch_4bit\n", {"optimizer": "adamw_torch_4bit"}),
        ("optimizer: ao_adamw_8bit\n", {"optimizer": "adamw_torch_8bit"}),
        ("adapter: lora\nlora_rank_pattern: {q_proj: 4}\n", {"lora": {"rank_pattern": {"q_proj": 4}}}),
        (
            "adapter: lora\nlora_target_parameters: [mlp.experts.down_proj]\nlora_target_modules: [q_proj]\n",
            {"lora": {"targets": ["q_proj", "mlp.experts.down_proj"]}},
        ),
        (
            "adapter: lora\nlora_target_parameters: mlp.experts.down_proj\nlora_target_modules: model.*q_proj\n",
            {"lora": {"targets": r"(model.*q_proj)|(.*\.)?(mlp\.experts\.down_proj)"}},
        ),
        (
            "adapter: lora\nlora_target_modules: 'a.language_model.b.[\\d]+.(_checkpoint_wrapped_module.)?up'\n",
            {"lora": {"targets": r"a.(language_model.)?b.[\d]+.up"}},
        ),
        (
            "adapter: lora\nlora_target_linear: true\nmodel_quantization_config: Mxfp4Config\n",
            {"lora": {"targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}},
        ),
        ("attn_implementation: flash_attention_2\n", {"weights": "bf16"}),
        ("bfloat16: true\nflash_attention: true\n", {"weights": "bf16"}),
        ("adapter: lora\nbfloat16: true\n", {"weights": None}),
        ("flash_attention: true\ndeepspeed: {zero_optimization: {stage: 2}}\n", {"weights": None}),
    ],
)
def test_axolotl_keys_are_translated(tmp_path: Path, more: str, expected: dict[str, Any]) -> None:
    base = AXOLOTL.replace("bf16: auto\n", "") if "bf16" in more else AXOLOTL
    _, written = of(base + more, tmp_path)
    assert {key: written["train"].get(key) for key in expected} == expected
    assert not ("activation_offload" in expected and written["train"].get("activation_checkpointing") is False)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("", "bf16"),
        ("model_quantization_config: Mxfp4Config\n", "model_quantization_config"),
        ("adapter: lora\nlora_target_linear: true\nlora_target_parameters: [a.b]\n", "lora_target_parameters"),
    ],
)
def test_weights_of_another_type_are_lines(tmp_path: Path, more: str, key: str) -> None:
    translation, _ = of(AXOLOTL + more, tmp_path)
    assert key in {line.key for line in translation.of(CHANGES)}
    same = "model_quantization_config: Mxfp4Config\nmodel_quantization_config_kwargs: {dequantize: true}\n"
    translation, _ = of(f"{AXOLOTL}flash_attention: true\nwarmup_steps: 3\n{same}", tmp_path)
    assert not translation.of(CHANGES)


def test_torchaos_other_optimizers_name_their_difference(tmp_path: Path) -> None:
    for name, nearest, said in (
        ("ao_adamw_4bit", "adamw_torch_4bit", "its blocks have 128 elements, here 256"),
        ("ao_adamw_fp8", "adamw_torch_8bit", "its moments are fp8"),
    ):
        translation, written = of(f"{AXOLOTL}optimizer: {name}\n", tmp_path)
        assert written["train"]["optimizer"] == nearest
        (line,) = (line for line in translation.lines if line.key == "optimizer")
        assert line.group == CHANGES and said in str(line)
    plain, _ = of(f"{AXOLOTL}optimizer: adamw_torch_8bit\n", tmp_path)
    assert not [line for line in plain.lines if line.key == "optimizer" and line.group == CHANGES]


def test_half_precision_without_a_strategy_selects_zero0(tmp_path: Path) -> None:
    """fp16 needs DeepSpeed's loss scaling, so the strategy is stage 0, not DDP."""
    translation, written = of(f"{AXOLOTL.replace('bf16: auto', 'fp16: true')}adapter: lora\n", tmp_path)
    assert written["render"] == {"strategy": "zero0"}
    assert (written["train"]["method"], written["train"]["precision"]) == ("lora", "fp16")
    assert by_key(translation)["adapter"][0] == "translated"


def test_parameter_offload_selects_zero3_offload(tmp_path: Path) -> None:
    """As in axolotl's bigstral example, without its JSON."""
    translation, written = of(f"{AXOLOTL}deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_params.json\n", tmp_path)
    assert written["render"] == {"strategy": "zero3_offload"}
    assert "optimizer's states offloaded as well" in by_key(translation)["deepspeed"][1]


@pytest.mark.parametrize(
    ("more", "packing", "said"),
    [
        ("packing: true\n", True, "rows in a packed row attend to each other there"),
        ("neat_packing: true\n", True, ""),
        ("packing: true\nneat_packing: true\n", True, ""),
        ("packing: false\n", None, ""),
    ],
)
def test_packing_without_isolation_is_a_line(tmp_path: Path, more: str, packing: bool | None, said: str) -> None:
    translation, written = of(FACTORY + more, tmp_path)
    assert written.get("pack", {}).get("packing") == packing
    lines = [line.text for line in translation.of(CHANGES) if line.key == "packing"]
    assert bool(lines) == bool(said) and all(said in line for line in lines)
    assert written["prepare"]["rows"]["too_long"] == ("drop" if packing else "truncate_turns")


@pytest.mark.parametrize("more", ["bit: 4\nquantization_method: bnb", "bit: 8\nquantization_method: bitsandbytes"])
def test_bnb_is_bitsandbytes(tmp_path: Path, more: str) -> None:
    translation, written = of(f"{FACTORY}quantization_{more}\n", tmp_path)
    assert written["train"]["method"] == "qlora"
    assert by_key(translation)["quantization_method"][0] in ("translated", "default")


def test_plain_text_of_llamafactory(tmp_path: Path) -> None:
    info = {"a": {"file_name": "a.jsonl", "columns": {"prompt": "content"}}}
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    translation, written = of(FACTORY.replace("sft", "pt"), tmp_path)
    rows = written["prepare"]["rows"]
    assert (rows["format"], rows["columns"], rows["loss"]) == ("text", {"text": "content"}, "everything")
    assert (rows["too_long"], rows["concatenate"], "pack" in written) == ("split", "in_order", False)
    assert any(line.key == "stage" and "BOS" in line.text for line in translation.of(CHANGES))
    translation, _ = of(FACTORY.replace("sft", "pt").replace("some/model", "Qwen/Qwen3-4B"), tmp_path)
    assert not any(line.key == "stage" for line in translation.of(CHANGES))


INFO: dict[str, Any] = {
    "plain": {"file_name": "plain.json"},
    "renamed": {"file_name": "renamed.jsonl", "columns": {"prompt": "q", "response": "a"}},
    "turns": {"file_name": "turns.json", "formatting": "sharegpt", "columns": {"messages": "talk", "tools": "tools"}},
    "openai": {
        "file_name": "openai.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "odd": {"file_name": "odd.json", "formatting": "sharegpt", "tags": {"role_tag": "who", "content_tag": "what"}},
    "named": {
        "file_name": "named.json",
        "formatting": "sharegpt",
        "tags": {"user_tag": "customer", "assistant_tag": "bot", "function_tag": "call", "observation_tag": "result"},
    },
    "hub": {"hf_hub_url": "o/hub", "subset": "en", "split": "train_sft", "num_samples": 500},
    "sampled": {"file_name": "sampled.json", "num_samples": 500},
    "modelscope": {"ms_hub_url": "o/ms"},
    "script": {"script_url": "made"},
    "images": {"file_name": "images.json", "columns": {"prompt": "p", "images": "images"}},
    "preferred": {"file_name": "preferred.json", "ranking": True},
    "tagged": {"file_name": "tagged.json", "columns": {"prompt": "p", "response": "r", "kto_tag": "label"}},
    "broken": {"file_name": 3, "columns": [], "formatting": 7},
    "no section": 3,
}


def described(names: str, tmp_path: Path, more: str = "") -> tuple[Translation, dict[str, Any]]:
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))
    translation, written = of(FACTORY.replace("dataset: a", f"dataset: {names}") + more, tmp_path, as_sft=True)
    return translation, written["prepare"]["rows"]


@pytest.mark.parametrize(
    ("name", "form", "columns", "said"),
    [
        ("plain", "alpaca", None, ""),
        ("renamed", "alpaca", {"instruction": "q", "output": "a"}, ""),
        ("turns", "sharegpt", {"conversations": "talk"}, ""),
        ("openai", "messages", None, ""),
        ("odd", "sharegpt", {"from": "who", "value": "what"}, ""),
        ("named", "sharegpt", None, "rename the turns call of named, which call tools, to function_call"),
        ("hub", "alpaca", None, ""),
        ("modelscope", "alpaca", None, "modelscope is on ModelScope"),
        ("script", "alpaca", None, "is created by a script, which is never run"),
        ("no section", "auto", None, "'no section' is not a data set of dataset_info.json"),
        ("unknown", "auto", None, "'unknown' is not a data set of dataset_info.json"),
        ("broken", "alpaca", None, "the entry of broken in dataset_info.json names no file"),
    ],
)
def test_dataset_info_gives_columns(
    tmp_path: Path, name: str, form: str, columns: dict[str, str] | None, said: str
) -> None:
    translation, rows = described(name, tmp_path)
    texts = [line.text for line in translation.lines if line.key == "dataset"]
    assert not said or any(said in text for text in texts)
    if name != "broken":
        own = rows["sources"][next(iter(rows["sources"]))] if "sources" in rows else rows
        assert (own.get("format", rows["format"]), own.get("columns")) == (form, columns)


def test_columns_missing_in_dataset_info_are_ignored(tmp_path: Path) -> None:
    _, rows = described("plain", tmp_path)
    assert {"system", "history", "tools"} <= set(rows["ignore"]) and "input" not in rows["ignore"]
    _, rows = described("renamed", tmp_path)
    assert "input" in rows["ignore"]
    _, rows = described("turns", tmp_path)
    assert rows["ignore"] == ["system", "system_prompt", "functions"]
    _, rows = described("named", tmp_path)
    assert rows["roles"] == {"customer": "user", "bot": "assistant", "result": "tool"}


def test_max_samples_never_repeats_rows_and_num_samples_does(tmp_path: Path) -> None:
    _, rows = described("plain, sampled", tmp_path, "max_samples: 1000\n")
    assert rows["path"] == str(tmp_path / "data")
    assert rows["sources"] == {"plain.json": {"at_most": 1000}, "sampled.json": {"rows": 500}}
    _, rows = described("sampled", tmp_path, "max_samples: 100\n")
    assert rows["sources"] == {"sampled.json": {"rows": 100}}
    translation, rows = described("hub", tmp_path)
    assert rows["sources"] == {"hub": {"rows": 500}}
    assert any("the split train_sft of the subset en of o/hub" in line.text for line in translation.of(FILL_IN))


def test_eval_dataset_and_interleave_probs(tmp_path: Path) -> None:
    _, rows = described("plain, renamed", tmp_path, "eval_dataset: turns\ninterleave_probs: 0.7, 0.3\n")
    weights = {name: source.get("weight") for name, source in rows["sources"].items()}
    assert weights == {"plain.json": 0.7, "renamed.jsonl": 0.3, "turns.json": None}
    assert rows["sources"]["turns.json"]["split"] == "validation" and rows["split"]["validation"] == 0


UNDER = "mix_strategy: interleave_under\n"


@pytest.mark.parametrize(
    ("more", "key", "plain", "sampled", "said"),
    [
        ("eval_dataset: sampled\n", "eval_dataset", {}, {"at_most": 500}, "the first 500"),
        (
            f"interleave_probs: 0.5,0.5\n{UNDER}",
            *("dataset", {"weight": 0.5}, {"weight": 0.5, "at_most": 500}),
            "num_samples of sampled draws 500 rows there",
        ),
        (
            f"interleave_probs: [0.7, 0.3]\n{UNDER}",
            *("interleave_probs", {"weight": 0.7}, {"weight": 0.3, "at_most": 500}),
            "fractions of the training rows here",
        ),
        (UNDER, "mix_strategy", {}, {"rows": 500}, "alternate there until the shortest set ends"),
        ("interleave_probs: 0.5, 0\n", "interleave_probs", {}, {"rows": 500}, "not above 0"),
    ],
)
def test_shares_and_samples_of_llamafactory_include_every_source(
    tmp_path: Path, more: str, key: str, plain: dict[str, Any], sampled: dict[str, Any], said: str
) -> None:
    translation, rows = described("plain" if "eval" in more else "plain, sampled", tmp_path, more)
    rows["sources"].get("sampled.json", {}).pop("split", None)
    assert rows["sources"] == {"plain.json": plain, "sampled.json": sampled}
    assert any(line.key == key and said in line.text for line in translation.of(CHANGES))


def test_wrong_number_of_shares_is_a_line(tmp_path: Path) -> None:
    translation, rows = described("plain, renamed", tmp_path, "interleave_probs: 1, 2, 3\n")
    assert rows["sources"].keys() == {"plain.json", "renamed.jsonl"} and "weight" not in str(rows["sources"])
    assert any("3 probabilities for 2 data sets" in line.text for line in translation.of(FILL_IN))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("warmup_steps: 0\nwarmup_ratio: 0.1\n", (None, 0.1)),
        ("warmup_ratio: 0.1\nwarmup_steps: 0\n", (None, 0.1)),
        ("warmup_steps: 10\nwarmup_ratio: 0.1\n", (10, None)),
        ("warmup_steps: 0\n", (0, None)),
        ("warmup_steps: 0.1\n", (None, 0.1)),
        ("", (None, 0.0)),
    ],
)
def test_llamafactory_warm_up_precedence(tmp_path: Path, more: str, expected: tuple[int | None, float | None]) -> None:
    translation, written = of(FACTORY + more, tmp_path)
    assert (written["train"].get("warmup_steps"), written["train"].get("warmup_ratio")) == expected
    lines = [line.text for line in translation.of(NO_EFFECT) if "left out, since" in line.text]
    by_ratio = ["0 left out, since warmup_ratio overrides it there"] * ("steps: 0\n" in more and "ratio" in more)
    assert lines == by_ratio + ["left out, since warmup_steps overrides it there"] * (expected[0] is not None)


@pytest.mark.parametrize(
    ("name", "ours", "said"),
    [
        ("alpaca", "alpaca", "no line break after ### Response:"),
        ("chatml", "chatml", ""),
        ("deepseek3", "deepseek-3", ""),
        ("empty", "plain", "the end-of-sequence token after an answer is supervised here"),
        ("gemma", "gemma", "surrounding whitespace is stripped here"),
        ("llama2", "llama-2", "answers have a space before and after them here"),
        ("llama3", "llama-3-verbatim", ""),
        ("mistral", "mistral", ""),
        ("vicuna", "vicuna", "a space follows the system prompt"),
        ("zephyr", "zephyr", "each turn ends with a line break here"),
    ],
)
def test_llamafactory_template_that_differs_is_a_line(tmp_path: Path, name: str, ours: str, said: str) -> None:
    translation, written = of(f"{FACTORY}template: {name}\n", tmp_path)
    rows, lines = written["prepare"]["rows"], [line.text for line in translation.of(CHANGES) if line.key == "template"]
    assert rows["template"] == ours and len(lines) == bool(said) and all(said in line for line in lines)
    assert rows.get("system") == ("You are Zephyr, a helpful assistant." if name == "zephyr" else None)
    _, written = of(f"{FACTORY}default_system: You are X.\ntemplate: {name}\n", tmp_path)
    assert written["prepare"]["rows"]["system"] == "You are X."


@pytest.mark.parametrize("name", ["images", "preferred", "tagged"])
def test_rows_of_images_or_preferences_stop_the_import(tmp_path: Path, name: str) -> None:
    translation, _ = described(name, tmp_path)
    assert [key for key, _ in translation.unlike] == ["dataset"]


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("REMOTE:o/described", "described by dataset_info.json of the repository o/described"),
        ("elsewhere", "elsewhere/dataset_info.json, which describes paths and columns of the rows, is not here"),
    ],
)
def test_missing_dataset_info_is_a_line(tmp_path: Path, folder: str, said: str) -> None:
    translation, written = of(f"{FACTORY}dataset_dir: {folder}\n", tmp_path)
    assert any(line.key == "dataset_dir" and said in line.text for line in translation.of(FILL_IN))
    assert "REMOTE" not in written["prepare"]["rows"]["path"]


@pytest.mark.parametrize("size", [".inf", "-.inf", ".nan", "-1", "1.0e+300", "x", "[1]"])
def test_invalid_val_size_is_a_line(tmp_path: Path, size: str) -> None:
    translation, written = of(f"{FACTORY}val_size: {size}\n", tmp_path)
    assert written["prepare"]["rows"]["split"]["validation"] == 200
    assert by_key(translation)["val_size"][0] == "no equal"


def test_options_without_effect_are_not_changes(tmp_path: Path) -> None:
    quiet = (
        "output_dir: x\ntf32: true\nlogging_steps: 1\nwandb_project: p\nstrict: false\n"
        "flash_attn_cross_entropy: true\nplugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rope: true\n"
        "lora_mlp_kernel: true\nsave_strategy: steps\ntorch_compile: true\nddp_timeout: 9\ndebug:\n"
    )
    before, _ = of(AXOLOTL, tmp_path)
    translation, _ = of(AXOLOTL + quiet, tmp_path)
    assert [line.key for line in translation.of(CHANGES)] == [line.key for line in before.of(CHANGES)]
    assert len(translation.of(NO_EFFECT)) >= len(before.of(NO_EFFECT)) + 10


ODD = st.sampled_from(
    [
        ".inf", "-.inf", ".nan", "1.0e+400", "9" * 5000, "-1", "0", "true", "null", "[]", "{}", "[{}]", "[[1]]",
        "[1, a]", "{a: {b: [1]}}", "2024-01-01", "2024-01-01 10:00:00", "!!binary aGk=", "!!set {a}", "!!timestamp x",
        "!!bool x", "!!float ''", "!!int ''", "!!python/name:os.system", "*nowhere", "'\\0'", '"\\ud800"', "&a [*a]",
        "|\n  two\n  lines", "../../../etc/passwd", "/", "~", "a/b/c/d", "REMOTE:", "REMOTE:a/b", "x" * 300,
    ]
)  # fmt: skip
"""Values that are invalid for some key."""


ENTRY_KEYS = [
    "file_name",
    "hf_hub_url",
    "script_url",
    "formatting",
    "ranking",
    "subset",
    "split",
    "num_samples",
    "folder",
]
ENTRIES = st.dictionaries(st.sampled_from(ENTRY_KEYS), VALUES) | st.fixed_dictionaries(
    {"file_name": st.just("a.json"), "formatting": st.sampled_from(["alpaca", "sharegpt", "openai"])},
    optional={
        "columns": st.dictionaries(st.sampled_from(["prompt", "query", "messages", "tools", "images"]), VALUES),
        "tags": st.dictionaries(st.sampled_from(["role_tag", "content_tag", "user_tag", "function_tag"]), VALUES),
    },
)
"""Entries of dataset_info.json with values of any kind."""


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_mutated_file_is_imported_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("mutated")
    source_file = data.draw(st.sampled_from(EXAMPLES))
    lines = source_file.read_text(encoding="utf-8").splitlines()
    name = f"config{source_file.suffix}"
    for _ in range(data.draw(st.integers(1, 4))):
        number = data.draw(st.integers(0, len(lines) - 1))
        key, colon, _ = lines[number].partition(":")
        lines[number] = f"{key}: {data.draw(ODD)}" if colon and data.draw(st.booleans()) else data.draw(ODD)
    (folder / name).write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    (folder / "data").mkdir()
    info = data.draw(st.dictionaries(st.sampled_from(["identity", "alpaca_en_demo"]), VALUES | ENTRIES, max_size=2))
    (folder / "data/dataset_info.json").write_text(json.dumps(info))
    source = data.draw(st.sampled_from([None, *FORMATS]))
    try:
        translation = import_config(folder / name, source, folder / "out.yaml", force=False, as_sft=True)
    except UserError as error:
        assert "\n" not in str(error) and not (folder / "out.yaml").exists()
    else:
        assert all("\n" not in line for line in translation.text)
        load(folder / "out.yaml")


def test_given_format_reports_unknown_keys(tmp_path: Path) -> None:
    text = "model_name_or_path: m\nlora_r: 16\nlora_alpha: 16\nlearning_rate: 1.0e-4\nbf16: true\n"
    translation, _ = of(text, tmp_path, source="llamafactory", as_sft=True)
    assert ("lora_r", "a key of LLaMA-Factory that is not known") in [
        (line.key, line.text) for line in translation.of(CHANGES)
    ]
    with pytest.raises(UserError, match=r"which has no key 'learning_rate', .* \(3 of 3 keys are unknown\)"):
        of("learning_rate: 1\nlora_r: 2\nmax_length: 3\n", tmp_path, source="deepspeed")


def test_the_page_has_a_table_for_each_format() -> None:
    text = (ROOT / "docs/import.md").read_text(encoding="utf-8")
    assert {match[2] for match in import_table.MARK.finditer(text)} == set(FORMATS)
    filled = import_table.written(text)
    for source in FORMATS.values():
        assert [key for key in source.rules if f"| `{key}` |" not in filled] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{AXOLOTL}num_epochs: 2\nevals_per_epoch: 4\n", (0.125, "last")),
        (f"{AXOLOTL}num_epochs: 2\nevals_per_epoch: 4\nsaves_per_epoch: 1\n", (0.125, None)),
        (f"{AXOLOTL}num_epochs: 3\nevals_per_epoch: 2\n", (0.166666, "last")),  # 100 of 600 steps: 0.166667 is 101
        (f"{AXOLOTL}eval_steps: 5\nsave_steps: 10\n", (5, None)),
        (f"{AXOLOTL}num_epochs: 1\nevals_per_epoch: 1\n", (None, None)),  # as at the end of each training
        (f"{AXOLOTL}evals_per_epoch: 2\nload_best_model_at_end: false\n", (0.5, "last")),
        (f"{FACTORY}eval_strategy: epoch\nnum_train_epochs: 4.0\n", (0.25, "last")),
        (f"{FACTORY}eval_strategy: steps\neval_steps: 0.1\n", (0.1, "last")),
        (f"{FACTORY}eval_strategy: steps\neval_steps: 50\nload_best_model_at_end: true\n", (50, None)),
        (f"{FACTORY}eval_strategy: no\neval_steps: 50\n", (None, None)),
    ],
)
def test_validation_is_as_often_as_there(tmp_path: Path, text: str, expected: tuple[float | None, str | None]) -> None:
    _, written = of(f"{text}{'val_set_size' if text.startswith(AXOLOTL) else 'val_size'}: 0.1\n", tmp_path)
    assert (written["train"].get("validation_steps"), written["train"].get("keep")) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{AXOLOTL}num_epochs: 2\nsaves_per_epoch: 4\n", 0.125),
        (f"{AXOLOTL}num_epochs: 3\nsaves_per_epoch: 2\n", 0.166666),
        (f"{AXOLOTL}num_epochs: 2\nsave_strategy: epoch\n", 0.5),
        (f"{AXOLOTL}num_epochs: 1\nsaves_per_epoch: 1\n", None),  # as at the end of each training
        (f"{AXOLOTL}save_strategy: steps\nsave_steps: 20\n", 20),
        (f"{FACTORY}save_strategy: epoch\nsave_steps: 500\nnum_train_epochs: 4.0\n", 0.25),
        (f"{FACTORY}save_strategy: best\nsave_steps: 500\n", 500),
    ],
)
def test_checkpoints_are_as_often_as_there(tmp_path: Path, text: str, expected: float | None) -> None:
    _, written = of(text, tmp_path)
    assert written["train"].get("checkpoint_steps") == expected


def test_epochs_may_be_fractions(tmp_path: Path) -> None:
    translation, written = of(f"{FACTORY}num_train_epochs: 0.5\n", tmp_path)
    assert written["train"]["epochs"] == 0.5 and by_key(translation)["num_train_epochs"][0] == "translated"


def test_arguments_of_the_chat_template_are_translated(tmp_path: Path) -> None:
    translation, written = of(f"{AXOLOTL}chat_template_kwargs: {{enable_thinking: false}}\n", tmp_path)
    assert written["prepare"]["rows"]["template_arguments"] == {"enable_thinking": False}
    assert by_key(translation)["chat_template_kwargs"][0] == "translated"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (f"{AXOLOTL}shuffle_merged_datasets: false\n", "shuffle_merged_datasets"),
        (f"{AXOLOTL}tokenizer_legacy: false\n", "tokenizer_legacy"),
        (
            f"{AXOLOTL}datasets: [{{path: a/b, type: chat_template, split_thinking: false}}]\n",
            "datasets[0].split_thinking",
        ),
        (f"{FACTORY}enable_thinking: false\n", "enable_thinking"),
        (f"{FACTORY}ignore_pad_token_for_loss: false\n", "ignore_pad_token_for_loss"),
    ],
)
def test_false_where_it_is_not_the_default_changes_the_result(tmp_path: Path, text: str, key: str) -> None:
    translation, _ = of(text, tmp_path)
    assert key in [line.key for line in translation.of(CHANGES)]


def test_loss_of_another_stage_stops_nothing(tmp_path: Path) -> None:
    kto = FACTORY.replace("stage: sft", "stage: kto") + "pref_loss: kto_pair\n"
    translation, written = of(kto, tmp_path)
    assert written["train"]["objective"] == "kto" and "pref_loss" in [line.key for line in translation.of(NO_EFFECT)]
    assert "kto_pair" in refusal(of, kto.replace("stage: kto", "stage: dpo"), tmp_path)


@pytest.mark.parametrize(
    ("entries", "template", "said"),
    [
        ("[{path: a/b, type: chat_template, chat_template: llama3}]", "llama-3", []),
        ("[{path: a/b, type: chat_template, chat_template: chatml}, "
         "{path: c/d, type: chat_template, chat_template: chatml}]", "chatml", []),
        ("[{path: a/b, type: chat_template, chat_template: llama3}, {path: c/d, type: chat_template}]", "chatml",
         ["datasets[0].chat_template"]),
        ("[{path: a/b, type: chat_template, chat_template: jamba}]", "chat", []),
    ],
)  # fmt: skip
def test_a_template_of_all_data_sets_is_that_of_the_rows(
    tmp_path: Path, entries: str, template: str, said: list[str]
) -> None:
    translation, written = of(f"{AXOLOTL}chat_template: chatml\ndatasets: {entries}\n", tmp_path)
    assert written["prepare"]["rows"]["template"] == template
    assert [line.key for line in translation.of(CHANGES) if line.key.endswith("chat_template")] == said


@pytest.mark.parametrize(
    ("text", "adapter"),
    [
        (f"{FACTORY}adapter_name_or_path: saves/first\n", "saves/first"),
        (f"{FACTORY}adapter_name_or_path: ./first\n", "./first"),
        (f"{FACTORY}adapter_name_or_path: results/old/first\n", "results/old/first"),
        (f"{AXOLOTL}adapter: lora\nlora_model_dir: /out/first\n", "/out/first"),
    ],
)
def test_an_adapter_is_continued(tmp_path: Path, text: str, adapter: str) -> None:
    translation, written = of(text, tmp_path)
    name = "adapters/first" if "s/" in adapter else adapter
    assert written["continued"]["imported"] == {"dataset": "rows", "train": {"from_adapter": name}}
    assert "runs" not in written and "must have the rank" in str(translation.of(FILL_IN))
    assert load(tmp_path / "config.yaml").is_continued("imported")


def test_several_adapters_and_another_reference_are_named(tmp_path: Path) -> None:
    translation, written = of(f"{FACTORY}adapter_name_or_path: a/b, ./c\n", tmp_path)
    assert "continued" not in written and "adapter_name_or_path" in [line.key for line in translation.of(CHANGES)]
    text = FACTORY.replace("stage: sft", "stage: dpo") + "adapter_name_or_path: ./c\n"
    translation, written = of(text, tmp_path)
    (line,) = (line for line in translation.of(CHANGES) if line.key == "adapter_name_or_path")
    assert "the reference is the model without its adapter there" in line.text


def test_a_type_of_rl_alone_is_no_preference_data(tmp_path: Path) -> None:
    translation, written = of(f"{AXOLOTL}datasets: [{{path: a/b, type: chatml}}]\n", tmp_path)
    assert written["prepare"]["rows"]["format"] == "auto" and not translation.unlike
    (line,) = (line for line in translation.of(CHANGES) if line.key == "datasets[0].type")
    assert "'chatml' is a type of rl only" in line.text
