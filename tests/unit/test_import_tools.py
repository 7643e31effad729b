"""Public configs of TRL, alignment-handbook, ms-swift, XTuner and torchtune, from the file to a config that passes."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, refusal, served
from test_check import WORKSTATION

from zerolora.check.needs import needs_of
from zerolora.check.rows import rows
from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.imports.formats.import_format import CHANGES, FILL_IN, NO_EFFECT
from zerolora.imports.python_file import read_sections
from zerolora.imports.shell_file import read_flags
from zerolora.imports.translate import Translation, import_config
from zerolora.machine import this_machine

FOLDER = ROOT / "tests/unit/imported"
NEW = sorted(file for tool in ("trl", "swift", "xtuner", "torchtune") for file in FOLDER.glob(f"{tool}-*"))


def written(
    file: Path, tmp_path: Path, source: str | None = None, as_sft: bool = False
) -> tuple[Translation, dict[str, Any]]:
    output = tmp_path / "config.yaml"
    translation = import_config(file, source, output, force=True, as_sft=as_sft)
    resolve(load(output))
    return translation, yaml.safe_load(output.read_text(encoding="utf-8"))


def of(text: str, tmp_path: Path, name: str, source: str | None = None) -> tuple[Translation, dict[str, Any]]:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return written(tmp_path / name, tmp_path, source)


def keys(translation: Translation, group: str) -> list[str]:
    return [line.key for line in translation.lines if line.group == group]


@pytest.mark.parametrize("file", NEW, ids=lambda file: file.name)
def test_a_public_config_passes_the_check_of_a_machine_with_its_gpus(file: Path, tmp_path: Path) -> None:
    written(file, tmp_path)
    needs = needs_of(load(tmp_path / "config.yaml"))
    assert [row.name for row in rows(WORKSTATION, needs) if row.mark == "missing"] == []


def test_the_command_imports_and_the_check_misses_the_model_alone(tmp_path: Path) -> None:
    output = tmp_path / "config.yaml"
    file = FOLDER / "trl-sft-imdb.yaml"
    result = served("zerolora", "import", str(file), "--output", str(output))
    assert result.returncode == 0 and "changes the result: 0" in result.stdout + result.stderr, result.stderr
    checked = served("zerolora", "check", "--config", str(output))
    assert "models/Qwen2.5-0.5B: there is no such directory" in " ".join(checked.stdout.split())
    assert f"1 thing missing for {output}" in " ".join(checked.stdout.split()), checked.stdout


def test_hardware_is_this_machine_unless_the_file_needs_another(tmp_path: Path) -> None:
    _, config = written(FOLDER / "trl-sft-imdb.yaml", tmp_path)
    assert config["hardware"] == this_machine.hardware()
    assert config["train"]["ranks_per_node"] == config["hardware"].get("gpus_per_node", 1)
    translation, config = written(FOLDER / "trl-dpo-zephyr-7b-beta-qlora.yaml", tmp_path)  # paged_adamw_32bit
    assert config["hardware"]["device"] == "cuda" and config["train"]["optimizer"] == "paged_adamw"
    if this_machine.hardware()["device"] == "cpu":
        (line,) = (line for line in translation.of(FILL_IN) if line.key == "hardware")
        assert "optim of the file needs a GPU, of which this machine has none" in line.text


def test_sft_of_the_handbook(tmp_path: Path) -> None:
    translation, config = written(FOLDER / "trl-sft-zephyr-7b-beta-qlora.yaml", tmp_path)
    train, prepared = config["train"], config["prepare"]["rows"]
    assert (train["method"], train["quantization"], train["lora"]["r"]) == ("qlora", {"type": "nf4"}, 16)
    assert (train["micro_batch"], train["learning_rate"], train["warmup_ratio"]) == (4, 2e-4, 0.1)
    assert train["global_batch"] == 8 * train["ranks_per_node"]
    assert prepared["max_length"] == 2048  # of max_seq_length, which TRL's default must not replace
    assert (prepared["format"], prepared["loss"], prepared["split"]["validation"]) == ("messages", "everything", 1000)
    assert len(prepared["sources"]) == 2 and keys(translation, CHANGES) == []
    assert "chat_template" in keys(translation, FILL_IN)


def test_dpo_of_the_handbook(tmp_path: Path) -> None:
    translation, config = written(FOLDER / "trl-dpo-zephyr-7b-beta-qlora.yaml", tmp_path)
    train, prepared = config["train"], config["prepare"]["rows"]
    assert (train["objective"], train["dpo"]) == ("dpo", {"loss": "sigmoid", "beta": 0.01, "sft_weight": 0.0})
    assert train["lora"]["dropout"] == 0.0 and train["learning_rate"] == 5e-6
    assert [source.get("split") for source in prepared["sources"].values()] == [None, "validation"]
    assert prepared["format"] == "preference" and keys(translation, CHANGES) == []


def test_orpo_of_the_handbook(tmp_path: Path) -> None:
    translation, config = written(FOLDER / "trl-orpo-zephyr-141b.yaml", tmp_path)
    assert config["train"]["orpo"] == {"beta": 0.05, "prompt_loss": True}
    assert (config["train"]["method"], config["train"]["weights"], keys(translation, CHANGES)) == ("full", "bf16", [])


TRL = "model_name_or_path: m\ndataset_name: a/b\n"


@pytest.mark.parametrize(
    ("text", "source", "path", "value"),
    [
        ("", "trl-sft", "train.epochs", 3), ("", "trl-sft", "train.warmup_steps", 0),
        ("", "trl-sft", "train.learning_rate", 2e-5), ("", "trl-dpo", "train.learning_rate", 1e-6),
        ("", "trl-sft", "prepare.rows.max_length", 1024), ("", "trl-sft", "train.method", "full"),
        ("use_peft: true\n", "trl-sft", "train.lora.alpha", 32.0),
        ("use_peft: true\n", "trl-sft", "train.lora.targets", ["q_proj", "v_proj"]),
        ("assistant_only_loss: true\n", "trl-sft", "prepare.rows.loss", "assistant"),
        ("completion_only_loss: true\n", "trl-sft", "prepare.rows.loss", "assistant"),
        ("dataset_text_field: content\n", "trl-sft", "prepare.rows.columns", {"text": "content"}),
        ("truncation_mode: keep_end\n", "trl-sft", "prepare.rows.too_long", "truncate_left"),
        ("packing: true\n", "trl-sft", "pack.packing", True),
        ("packing: true\npacking_strategy: wrapped\n", "trl-sft", "prepare.rows.concatenate", "in_order"),
        ("use_peft: true\nload_in_4bit: true\n", "trl-sft", "train.weights", "bf16"),
        ("use_cpu: true\n", "trl-sft", "hardware.device", "cpu"),
        ("loss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.2]\n", "trl-dpo", "train.dpo.sft_weight", 0.2),
        ("loss_type: ipo\nbeta: 0.2\n", "trl-dpo", "train.ipo.beta", 0.2),
        ("loss_type: robust\nlabel_smoothing: 0.1\n", "trl-dpo", "train.dpo.label_smoothing", 0.1),
        ("desirable_weight: 0.5\n", "trl-kto", "train.kto.desirable_weight", 0.5),
    ],
)  # fmt: skip
def test_keys_and_defaults_of_trl(tmp_path: Path, text: str, source: str, path: str, value: Any) -> None:
    _, config = of(TRL + text, tmp_path, "a.yaml", source)
    for part in path.split("."):
        config = config[part]
    assert config == value


@pytest.mark.parametrize(
    ("text", "source", "key"),
    [
        ("dtype: float16\n", "trl-sft", "dtype"),
        ("max_length: null\n", "trl-sft", "max_length"),
        ("label_smoothing: 0.1\n", "trl-dpo", "label_smoothing"),
        ("use_weighting: true\n", "trl-dpo", "use_weighting"),
        ("", "trl-kto", "train_sampling_strategy"),
        ("use_peft: true\ndisable_dropout: false\n", "trl-dpo", "train.lora.dropout"),
        ("gradient_accumulation_steps: 2\n", "trl-orpo", "beta"),
        ("dataset_kwargs: {append_concat_token: false}\n", "trl-sft", "dataset_kwargs"),
    ],
)
def test_what_trl_does_otherwise_changes_the_result(tmp_path: Path, text: str, source: str, key: str) -> None:
    translation, _ = of(TRL + text, tmp_path, "a.yaml", source)
    assert key in keys(translation, CHANGES)


@pytest.mark.parametrize(
    ("text", "source", "said"),
    [
        ("loss_type: [sigmoid, bco_pair]\n", "trl-dpo", "is not one of sigmoid, hinge"),
        ("loss_type: apo_zero_unpaired\n", "trl-kto", "the objective kto has one loss"),
        ("sync_ref_model: true\n", "trl-dpo", "a reference that follows the model"),
        ("loss_type: dft\n", "trl-sft", "another loss than the cross-entropy"),
        ("load_in_4bit: true\n", "trl-sft", "a quantized base without an adapter"),
    ],
)
def test_another_training_of_trl_stops_the_import(tmp_path: Path, text: str, source: str, said: str) -> None:
    assert said in refusal(of, TRL + text, tmp_path, "a.yaml", source)


def test_the_folder_or_the_file_tells_the_trainer(tmp_path: Path) -> None:
    line = refusal(of, f"{TRL}beta: 0.1\n", tmp_path, "config.yaml")
    assert "is as much a config of trl-dpo as of trl-kto as of trl-orpo; choose one with --from" in line
    assert of(f"{TRL}beta: 0.1\n", tmp_path, "config_kto.yaml")[1]["train"]["objective"] == "kto"
    (tmp_path / "orpo").mkdir()
    assert of(f"{TRL}beta: 0.1\n", tmp_path, "orpo/config.yaml")[1]["train"]["objective"] == "orpo"


def test_a_script_of_swift(tmp_path: Path) -> None:
    translation, config = written(FOLDER / "swift-zero2.sh", tmp_path)
    train, prepared = config["train"], config["prepare"]["rows"]
    assert (config["render"], config["hardware"]["gpus_per_node"]) == ({"strategy": "zero2"}, 2)
    assert (train["global_batch"], train["micro_batch"]) == (16, 1)  # $(expr 16 / $nproc_per_node) on two ranks
    assert (train["weight_decay"], train["betas"], train["schedule"]) == (0.1, [0.9, 0.95], "cosine")
    assert train["lora"] == {"r": 8, "alpha": 32.0, "targets": "all-linear", "dropout": 0.05}
    assert prepared["sources"] == {"self-cognition": {"rows": 1000}} and prepared["system"].startswith("You are")
    todo = {"model_name", "model_author", "prepare.rows.template"}
    assert keys(translation, CHANGES) == [] and todo <= {*keys(translation, FILL_IN)}
    assert [line for line in translation.lines if line.kind == "empty"] == []


def test_preferences_of_swift(tmp_path: Path) -> None:
    translation, config = written(FOLDER / "swift-rlhf-dpo.sh", tmp_path)
    assert config["train"]["dpo"] == {"loss": "sigmoid", "beta": 0.1, "sft_weight": 0.1}
    assert config["prepare"]["rows"]["split"]["validation"] == 0.01 and config["train"]["validation_steps"] == 50
    assert keys(translation, CHANGES) == ["rlhf_type"]


SWIFT = "swift sft --model Qwen/Qwen3-8B --dataset a/b "


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        (SWIFT, "train.learning_rate", 1e-4), (f"{SWIFT}--tuner_type full", "train.learning_rate", 1e-5),
        (SWIFT, "train.global_batch", 16), (f"NPROC_PER_NODE=4 {SWIFT}", "train.global_batch", 16),
        (f"{SWIFT}--loss_scale last_round", "prepare.rows.loss", "last"),
        (f"{SWIFT}--quant_bits 4 --quant_method bnb", "train.quantization", {"type": "nf4", "double": True}),
        (f"{SWIFT}--truncation_strategy left", "prepare.rows.too_long", "truncate_left"),
        (f"{SWIFT}--enable_thinking false", "prepare.rows.template_arguments", {"enable_thinking": False}),
        (f"{SWIFT}--torch_dtype float32", "train.precision", "fp16"),
        (f"{SWIFT}--lr_scheduler_kwargs '{{\"num_cycles\": 2}}' --lr_scheduler_type cosine_with_restarts",
         "train.schedule_options", {"num_cycles": 2}),
        (f"{SWIFT}--adapters old/checkpoint-1/", "continued.imported.train.from_adapter", "old/checkpoint-1/"),
        ("swift pt --model m --dataset a.jsonl", "prepare.rows.loss", "everything"),
        ("swift rlhf --model m --dataset a/b --rlhf_type simpo", "train.simpo.beta", 2.0),
        ("swift rlhf --model m --dataset a/b --rlhf_type orpo", "train.orpo.prompt_loss", False),
        ("swift rlhf --model m --dataset a/b --truncation_strategy right", "prepare.rows.too_long", "fail"),
        ("#!/bin/bash\nMODEL=x/y\nif true; then\nswift sft \\\n  --model $MODEL --dataset a/b\nfi",
         "fetch.directory.y.path", "models/y"),
    ],
)  # fmt: skip
def test_flags_and_defaults_of_swift(tmp_path: Path, text: str, path: str, value: Any) -> None:
    _, config = of(text, tmp_path, "train.sh")
    for part in path.split("."):
        config = config[part]
    assert config == value


def test_what_only_a_shell_could_compute_is_named(tmp_path: Path) -> None:
    text = f"{SWIFT}--learning_rate $(cat rate) --max_length ${{LENGTH:-2048}} --output_dir $OUT"
    translation, config = of(text, tmp_path, "train.sh")
    assert {"learning_rate", "max_length"} <= {*keys(translation, CHANGES)} and "output_dir" in keys(
        translation, NO_EFFECT
    )
    assert config["train"]["learning_rate"] == 1e-4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("python train.py --lr 1", "has 0 commands of swift pt, swift rlhf, swift sft, xtuner train"),
        (f"{SWIFT}\n{SWIFT}", "has 2 commands"),
        ("swift rlhf --rlhf_type grpo --model m --dataset a/b", "'grpo': no objective of zerolora"),
        (f"{SWIFT}--task_type seq_cls", "'seq_cls': training of a classifier"),
        (f"{SWIFT}--tuner_type adalora", "'adalora', which is none of lora, full"),
        ("xtuner train nowhere --deepspeed deepspeed_zero2", "nowhere is not here; put the config beside the script"),
    ],
)
def test_other_scripts_are_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(of, text, tmp_path, "train.sh")


def test_no_script_is_run(tmp_path: Path) -> None:
    text = f"touch {tmp_path}/a\n{SWIFT}--seed $(touch {tmp_path}/b)`touch {tmp_path}/c`"
    assert read_flags_of(text, tmp_path)["seed"] == f"$(touch {tmp_path}/b)`touch {tmp_path}/c`"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["train.sh"]


@pytest.mark.parametrize(
    ("text", "number"),
    [("$(expr 32 / 4 / 2)", 4), ("$((2 + 3 * 4 - 1))", 13), ("$(expr 5 / 0)", "$(expr 5 / 0)"), ("$((9 / 2 - 1))", 3)],
)
def test_sums_and_products_of_a_script_are_computed(tmp_path: Path, text: str, number: Any) -> None:
    assert read_flags_of(f"{SWIFT}--seed {text}", tmp_path)["seed"] == number


@pytest.mark.parametrize(
    ("more", "weights"),
    [("", None), ("--tuner_type full", "bf16"), ("--tuner_type full --torch_dtype bfloat16", "bf16"),
     ("--tuner_type full --deepspeed zero2", None), ("--tuner_type full --torch_dtype float16", None)],
)  # fmt: skip
def test_weights_of_swift_have_the_type_of_the_file(tmp_path: Path, more: str, weights: str | None) -> None:
    _, config = of(f"{SWIFT}{more}", tmp_path, "train.sh")
    assert config["train"].get("weights") == weights


def read_flags_of(text: str, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "train.sh").write_text(text, encoding="utf-8")
    return read_flags(tmp_path / "train.sh")


def test_the_reference_config_of_xtuner_is_our_recipe(tmp_path: Path) -> None:
    translation, config = written(FOLDER / "xtuner-internlm2-zero2.sh", tmp_path)
    recipe = yaml.safe_load((ROOT / "config/recipes/internlm2-chat-7b-qlora-2x24gb/config.yaml").read_text())
    assert config["render"] == recipe["render"] == {"strategy": "zero2"}
    shared = {key: value for key, value in recipe["train"].items() if key != "lora"}
    assert {key: config["train"][key] for key in shared} == shared
    assert config["train"]["lora"] == recipe["train"]["lora"] | {"targets": "all-linear"}
    assert config["train"]["sft"] == {"mean": "row"} and config["hardware"]["gpus_per_node"] == 2
    ours, theirs = config["prepare"]["rows"], recipe["prepare"]["oasst1"]
    assert all(ours[key] == theirs[key] for key in ("model", "format", "max_length", "too_long", "check"))
    assert (ours["template"], ours["concatenate"], "pack" in config) == ("chatml", "shuffled", False)
    assert not keys(translation, CHANGES)


def test_a_python_config_alone_says_that_its_strategy_is_missing(tmp_path: Path) -> None:
    translation, config = written(FOLDER / "internlm2_chat_7b_qlora_oasst1_e3.py", tmp_path)
    assert "render.strategy" in keys(translation, FILL_IN) and config["train"]["precision"] == "fp16"


XTUNER = (FOLDER / "internlm2_chat_7b_qlora_oasst1_e3.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "key", "group"),
    [
        ("use_varlen_attn = False", "use_varlen_attn = True", "train_dataloader.dataset.pack_to_max_length", None),
        ("oasst1_map_fn,\n    temp", "my_map_fn,\n    temp", "train_dataloader.dataset.dataset_map_fn", FILL_IN),
        ("internlm2_chat\n", "moss_sft\n", "train_dataloader.dataset.template_map_fn.template", CHANGES),
        ("batch_size = 1", "batch_size = 2", "optim_wrapper.accumulative_counts", CHANGES),
        ("use_varlen_attn = False", "use_varlen_attn = True", "train_dataloader.dataset.use_varlen_attn", CHANGES),
        ("eta_min=0.0", "eta_min=0.0, gamma=2", "param_scheduler[1].gamma", CHANGES),
        ("max_length = 2048", "max_length = int(2048)", "train_dataloader.dataset.max_length", CHANGES),
        ("resume = False", "resume = True", "resume", CHANGES),
        ("visualizer = None", "surprise = 3", "surprise", CHANGES),
    ],
)
def test_an_edited_config_of_xtuner(tmp_path: Path, old: str, new: str, key: str, group: str | None) -> None:
    assert old in XTUNER
    translation, _ = of(XTUNER.replace(old, new), tmp_path, "config.py")
    groups = [line.group for line in translation.lines if line.key == key and line.group != NO_EFFECT]
    assert (group in groups) if group else (CHANGES not in groups)


def pairs_of(model: str, rows: str = "", build: str = "is_dpo=True") -> str:
    """Return XTuner's reference config with another model section and rows of pairs."""
    before, after = XTUNER.replace("pack_to_max_length = True\n", "").split("train_dataset = ")
    dataset = f"dict(type=build_preference_dataset, {build}, dataset=dict(type=load_dataset, path=data_path), {rows}"
    after = after[after.index("train_dataloader = ") :]
    before = before.replace("type=SupervisedFinetune", f"type={model}")
    return f"{before}train_dataset = {dataset} max_length=max_length)\n{after}"


ORCA = "dataset_map_fn=intel_orca_dpo_map_fn,"


@pytest.mark.parametrize(
    ("model", "rows", "section", "changed"),
    [
        ("DPO", "", ("dpo", {"beta": 0.1, "loss": "sigmoid", "sft_weight": 0.0}), []),
        ("DPO, beta=0.2, loss_type='hinge'", ORCA, ("dpo", {"beta": 0.2, "loss": "hinge", "sft_weight": 0.0}), []),
        ("DPO, loss_type='ipo'", "", ("ipo", {"beta": 0.1, "sft_weight": 0.0}), []),
        (
            "DPO, loss_type='robust', label_smoothing=0.1",
            "",
            ("dpo", {"beta": 0.1, "loss": "robust", "sft_weight": 0.0, "label_smoothing": 0.1}),
            [],
        ),
        (
            "DPO, label_smoothing=0.1",
            "",
            ("dpo", {"beta": 0.1, "loss": "sigmoid", "sft_weight": 0.0}),
            ["model.label_smoothing"],
        ),
        ("ORPO, beta=0.3", "", ("orpo", {"beta": 0.3}), ["optim_wrapper.accumulative_counts"]),
    ],
)
def test_preferences_of_xtuner(
    tmp_path: Path, model: str, rows: str, section: tuple[str, dict[str, Any]], changed: list[str]
) -> None:
    translation, config = of(pairs_of(model, rows), tmp_path, "config.py")
    train, prepared = config["train"], config["prepare"]["rows"]
    assert (train["objective"], train[train["objective"]]) == section
    assert (prepared["format"], prepared["too_long"], prepared["template"]) == ("preference", "fail", "chat")
    assert ("question" in prepared["ignore"], "prompt" in prepared["ignore"]) == (not rows, bool(rows))
    without_dropout = ["model.lora.lora_dropout"] if train["objective"] in ("dpo", "ipo") else []
    assert keys(translation, CHANGES) == changed + without_dropout
    assert not {"loss", "concatenate"} & prepared.keys()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (pairs_of("DPO, loss_type='sppo_hard'"), "model.loss_type: 'sppo_hard': a preference loss that"),
        (pairs_of("DPO, ref_llm=dict(type=x)"), "another reference than the model that training starts from"),
        (pairs_of("RewardModel", build="is_reward=True"), "RewardModel: a reward model"),
        ("a = (", "is no Python that can be parsed"),
        (
            "from mmengine.config import read_base\nwith read_base():\n    from .a import *\n",
            "is based on another config",
        ),
        (XTUNER.replace("type=SupervisedFinetune", "type=LLaVAModel"), "LLaVAModel: rows with images"),
        ("import os\nos.system('false')\n", "without a tool's own keys"),
    ],
)
def test_other_python_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(of, text, tmp_path, "config.py")


def test_python_is_parsed_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(
        f"open({str(tmp_path / 'made')!r}, 'w')\na = 2\nb = [a * 3, -a, a / 0, 'x' + 'y']\nb += [dict(c=a)]\n"
        "d = f() if a > 1 else 0\nif a == 3:\n    e = 1\nelif b:\n    e = 2\nfor x in b:\n    g = x\n",
        encoding="utf-8",
    )
    found = read_sections(tmp_path / "config.py")
    assert found["b" if "b" in found else "d"] == "f()" and not (tmp_path / "made").exists()
    assert found["for x in b:"].startswith("for x in b")  # named, as any other code


def test_a_recipe_of_torchtune(tmp_path: Path) -> None:
    translation, config = written(FOLDER / "torchtune-llama3_1-8B_lora.yaml", tmp_path)
    train, prepared = config["train"], config["prepare"]["rows"]
    assert train["lora"]["targets"] == ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert (train["gradient_clipping"], train["weight_decay"], train["warmup_steps"]) == (0.0, 0.01, 100)
    assert (prepared["format"], prepared["loss"], prepared["at_most"]) == ("alpaca", "everything", 0.95)
    assert keys(translation, CHANGES) == ["dataset._component_", "tokenizer._component_"]
    assert train["weights"] == "bf16"
    _, config = written(FOLDER / "torchtune-llama3_1-8B_lora_dpo.yaml", tmp_path)
    assert config["train"]["dpo"]["beta"] == 0.1 and config["train"]["max_steps"] == 1000
    assert config["prepare"]["rows"]["columns"] == {
        "prompt": "question", "chosen": "response_j", "rejected": "response_k"
    }  # fmt: skip
    _, config = written(FOLDER / "torchtune-llama3_1-8B_qlora_single_device.yaml", tmp_path)
    assert (config["train"]["method"], config["train"]["quantization"]["type"]) == ("qlora", "nf4")


TORCHTUNE = (FOLDER / "torchtune-llama3_1-8B_lora.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("LinearCrossEntropyLoss", "ForwardKLWithChunkedOutputLoss", "another loss"),
        ("lora_llama3_1_8b", "lora_llama3_2_vision_11b", "a model of images, or a classifier"),
        ("epochs: 1", "epochs: 1\nquantizer: {_component_: a.b}", "quantization-aware training"),
    ],
)
def test_another_recipe_of_torchtune_stops_the_import(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in refusal(of, TORCHTUNE.replace(old, new), tmp_path, "a.yaml")
