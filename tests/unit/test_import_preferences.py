"""`zerolora import` of preference objectives: each tool's defaults, losses and row types keep their meaning."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, refusal

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.data.formats import FORMS, parse
from zerolora.data.formats.reading import Reading
from zerolora.imports.formats.import_format import CHANGES, FILL_IN, NO_EFFECT
from zerolora.imports.translate import Translation, import_config

AXOLOTL = "base_model: some/model\nmicro_batch_size: 2\nsequence_len: 512\nadapter: lora\nlora_target_linear: true\n"
FACTORY = "model_name_or_path: some/model\nfinetuning_type: lora\ncutoff_len: 512\nbf16: true\n"
USER = {"role": "user", "content": "Add 1 and 4."}
GOOD, BAD = {"role": "assistant", "content": "5"}, {"role": "assistant", "content": "6"}
PAIR = [USER, GOOD], [USER, BAD]


def imported(text: str, tmp_path: Path, as_sft: bool = False) -> tuple[Translation, dict[str, Any]]:
    """Return the translation of a text and the written config, which must be valid."""
    file, output = tmp_path / "config.yml", tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    translation = import_config(file, None, output, force=True, as_sft=as_sft)
    resolve(load(output))
    return translation, yaml.safe_load(output.read_text(encoding="utf-8"))


def objective(text: str, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """Return the objective of the written config and its section."""
    train = imported(text, tmp_path)[1]["train"]
    return train["objective"], train[train["objective"]]


def said(translation: Translation, group: str) -> list[str]:
    return [f"{line.key}: {line.text}" for line in translation.lines if line.group == group]


SIGMOID = {"loss": "sigmoid", "beta": 0.1, "sft_weight": 0.0}
KTO = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}


@pytest.mark.parametrize(
    ("more", "name", "section"),
    [
        ("rl: dpo", "dpo", SIGMOID),
        ("rl: dpo\nrl_beta: 0.3", "dpo", {**SIGMOID, "beta": 0.3}),
        ("rl: dpo\ndpo_beta: 0.3", "dpo", {**SIGMOID, "beta": 0.3}),
        ("rl: dpo\ndpo_beta: 0.3\nrl_beta: 0", "dpo", {**SIGMOID, "beta": 0.3}),
        ("rl: dpo\norpo_alpha: 0.3", "dpo", {**SIGMOID, "beta": 0.3}),
        ("rl: dpo\norpo_alpha: 0.3\nrl_beta: 0.2", "dpo", {**SIGMOID, "beta": 0.2}),
        ("rl: dpo\ntrl: {beta: 0.4}\nrl_beta: 0.2", "dpo", {**SIGMOID, "beta": 0.4}),
        ("rl: dpo\nrpo_alpha: 1.0", "dpo", {**SIGMOID, "sft_weight": 1.0}),
        ("rl: dpo\ndpo_loss_type: [hinge]", "dpo", {**SIGMOID, "loss": "hinge"}),
        ("rl: dpo\ndpo_loss_type: [sigmoid_norm]", "dpo", {**SIGMOID, "loss": "length_normalized"}),
        ("rl: dpo\ndpo_loss_type: [sigmoid, sft]", "dpo", {**SIGMOID, "sft_weight": 1.0}),
        ("rl: dpo\ndpo_loss_type: [sft, hinge]\ndpo_loss_weights: [0.2, 1]", "dpo",
         {**SIGMOID, "loss": "hinge", "sft_weight": 0.2}),
        ("rl: dpo\ndpo_loss_type: [robust]\ndpo_label_smoothing: 0.1", "dpo",
         {**SIGMOID, "loss": "robust", "label_smoothing": 0.1}),
        ("rl: dpo\ndpo_loss_type: [robust]", "dpo", SIGMOID),
        ("rl: dpo\ndpo_loss_type: [ipo, sft]", "ipo", {"beta": 0.1, "sft_weight": 1.0}),
        ("rl: ipo", "ipo", {"beta": 0.1, "sft_weight": 0.0}),
        ("rl: simpo\nsimpo_gamma: 0.8\nrl_beta: 2", "simpo", {"beta": 2.0, "gamma": 0.8, "sft_weight": 1.0}),
        ("rl: simpo\nsimpo_gamma: 0.8\ncpo_alpha: 0", "simpo", {"beta": 0.1, "gamma": 0.8, "sft_weight": 0.0}),
        ("rl: orpo\norpo_alpha: 0.3", "orpo", {"beta": 0.3, "prompt_loss": True}),
        ("rl: orpo", "orpo", {"beta": 0.1, "prompt_loss": True}),
        ("rl: kto", "kto", KTO),
        ("rl: kto\nkto_desirable_weight: 0.2\nkto_undesirable_weight: 0", "kto", {**KTO, "desirable_weight": 0.2}),
    ],
)  # fmt: skip
def test_rl_of_axolotl(tmp_path: Path, more: str, name: str, section: dict[str, Any]) -> None:
    assert objective(f"{AXOLOTL}{more}\n", tmp_path) == (name, section)


@pytest.mark.parametrize(
    ("more", "name", "section"),
    [
        ("stage: dpo", "dpo", SIGMOID),
        ("stage: dpo\npref_beta: 0.3\npref_ftx: 0.5", "dpo", {**SIGMOID, "beta": 0.3, "sft_weight": 0.5}),
        ("stage: dpo\npref_loss: hinge", "dpo", {**SIGMOID, "loss": "hinge"}),
        ("stage: dpo\npref_loss: ipo", "ipo", {"beta": 0.1, "sft_weight": 0.0}),
        ("stage: dpo\npref_loss: orpo", "orpo", {"beta": 0.1, "prompt_loss": False}),
        ("stage: dpo\npref_loss: simpo", "simpo", {"beta": 0.1, "gamma": 0.5, "sft_weight": 0.0}),
        ("stage: dpo\npref_loss: simpo\nsimpo_gamma: 1.2", "simpo", {"beta": 0.1, "gamma": 1.2, "sft_weight": 0.0}),
        ("stage: kto", "kto", KTO),
        ("stage: kto\nkto_chosen_weight: 0.5\nkto_rejected_weight: 2", "kto",
         {**KTO, "desirable_weight": 0.5, "undesirable_weight": 2.0}),
    ],
)  # fmt: skip
def test_stages_of_llamafactory(tmp_path: Path, more: str, name: str, section: dict[str, Any]) -> None:
    assert objective(f"{FACTORY}dataset: a\n{more}\n", tmp_path) == (name, section)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"{AXOLOTL}rl: orpo\ngradient_accumulation_steps: 4", "rl: the mean cross-entropy of the tokens is of each"),
        (f"{AXOLOTL}rl: kto\ngradient_accumulation_steps: 4", "rl: the mean change of other rows' answers, which is"),
        (f"{AXOLOTL}rl: dpo\ndpo_use_weighting: true", "dpo_use_weighting: pairs have no weight here (WPO)"),
        (f"{AXOLOTL}rl: dpo\ndpo_norm_loss: true", "dpo_norm_loss: train.dpo.loss has length_normalized"),
        (f"{AXOLOTL}rl: dpo\ndatasets: [{{path: a/b, type: chatml.argilla_chat}}]", "prepare.rows.template: of a conv"),
        (f"{AXOLOTL}rl: dpo\ndatasets: [{{path: a/b, type: zephyr.nectar}}]", "datasets[0].type: 'zephyr.nectar'"),
        (f"{AXOLOTL}rl: kto\ndatasets: [{{path: a/b, type: chat_template.default}}]", "datasets[0].type: 'chat"),
        (f"{AXOLOTL}rl: dpo\ndatasets: [{{path: a/b}}]", "prepare.rows.template: texts get no template there"),
        (f"{AXOLOTL}rl: dpo\nrl_beta: 0", "rl: train.dpo.beta: 0.0 is not valid; use more than 0.0"),
        (f"{FACTORY}dataset: a\nstage: dpo\npref_ftx: -1", "stage: train.dpo.sft_weight: -1.0 is not valid; use 0.0"),
        (f"{FACTORY}dataset: a\nstage: dpo\npref_loss: orpo", "pref_loss: the cross-entropy is the mean of each"),
        (f"{FACTORY}dataset: a\nstage: dpo\npref_ftx: 0.1", "pref_ftx: the SFT term is the mean of each answer's mean"),
        (f"{FACTORY}dataset: a\nstage: dpo\npref_loss: orpo\npref_ftx: 0.1", "pref_ftx: orpo has its own"),
        (f"{FACTORY}dataset: a\nstage: kto\npref_ftx: 0.1", "pref_ftx: kto has no SFT term"),
        (f"{FACTORY}dataset: a\nstage: kto\ngradient_accumulation_steps: 2", "stage: the mean change of other rows'"),
        (f"{FACTORY}dataset: a\nstage: dpo\ndpo_label_smoothing: 0.1", "dpo_label_smoothing: conservative DPO has no"),
        (f"{FACTORY}dataset: a\nstage: dpo\npref_bco_weight: 0.1", "pref_bco_weight: no objective has a BCO term"),
        (f"{FACTORY}dataset: a\nstage: dpo\nld_alpha: 0.5", "ld_alpha: all tokens of an answer have the same weight"),
        (f"{FACTORY}dataset: a\nstage: dpo\nref_model: o/other", "ref_model: the reference is the model that training"),
        (f"{FACTORY}dataset: a\nstage: kto\nref_model_adapters: b", "ref_model_adapters: the reference is the model"),
    ],
)  # fmt: skip
def test_what_differs_is_a_line(tmp_path: Path, text: str, line: str) -> None:
    assert any(each.startswith(line) for each in said(imported(f"{text}\n", tmp_path)[0], CHANGES))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"{AXOLOTL}rl: dpo\nkto_desirable_weight: 2", "kto_desirable_weight: not used by rl: dpo"),
        (f"{AXOLOTL}rl: dpo\ndpo_label_smoothing: 0.1", "dpo_label_smoothing: not used by rl: dpo"),
        (f"{AXOLOTL}rl: orpo\norpo_alpha: 0.1\nrl_beta: 0.3", "orpo_alpha: not used by rl: orpo"),
        (f"{AXOLOTL}rl_beta: 0.3", "rl_beta: used only with `rl`"),
        (f"{AXOLOTL}rl: dpo\nlora_dropout: 0.05", "lora_dropout: 0.05 is switched off by this trainer there"),
        (f"{AXOLOTL}rl: dpo\nexcess_length_strategy: truncate", "excess_length_strategy: longer rows lose a part"),
        (f"{AXOLOTL}rl: dpo\ntrain_on_inputs: true", "train_on_inputs: answers alone are compared, there too"),
        (
            f"{AXOLOTL}rl: dpo\ndatasets: [{{path: a/b, type: chat_template.default, roles_to_train: [user]}}]",
            "datasets[0].roles_to_train: answers alone are compared",
        ),
        (f"{FACTORY}dataset: a\nstage: dpo", "cutoff_len: longer rows lose a part of the prompt or of an answer there"),
        (f"{FACTORY}dataset: a\nstage: dpo\nkto_chosen_weight: 2", "kto_chosen_weight: not used by stage dpo with dpo"),
        (f"{FACTORY}dataset: a\nstage: dpo\nsimpo_gamma: 2", "simpo_gamma: not used by stage dpo with dpo"),
        (f"{FACTORY}dataset: a\nstage: sft\npref_beta: 0.3", "pref_beta: used only with other stages"),
        (f"{FACTORY}dataset: a\nstage: dpo\ntrain_on_prompt: true", "train_on_prompt or mask_history: answers alone"),
        (f"{FACTORY}dataset: a\nstage: dpo\nlora_dropout: 0.1", "lora_dropout: 0.1 is switched off by this trainer"),
    ],
)  # fmt: skip
def test_what_these_trainers_do_not_use_changes_nothing(tmp_path: Path, text: str, line: str) -> None:
    translation, written = imported(f"{text}\n", tmp_path)
    assert any(each.startswith(line) for each in said(translation, NO_EFFECT))
    assert not [each for each in said(translation, CHANGES) if not each.startswith(("bf16", "train.warmup_ratio"))]
    assert not written["train"].get("lora", {}).get("dropout")
    if "stage: dpo" in text or "truncate" in text:
        assert written["prepare"]["rows"]["too_long"] == "fail"


def test_simpo_without_gamma_is_to_be_completed(tmp_path: Path) -> None:
    translation, written = imported(f"{AXOLOTL}rl: simpo\n", tmp_path)
    assert written["train"]["simpo"]["gamma"] == 0.5
    assert any(each.startswith("train.simpo.gamma: the file has no simpo_gamma") for each in said(translation, FILL_IN))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (f"{AXOLOTL}rl: dpo\ndpo_loss_type: [nca_pair]", "dpo_loss_type"),
        (f"{AXOLOTL}rl: dpo\ndpo_loss_type: [sigmoid, hinge]", "dpo_loss_type"),
        (f"{AXOLOTL}rl: dpo\ndpo_loss_type: [sft]", "dpo_loss_type"),
        (f"{AXOLOTL}rl: dpo\ndpo_loss_type: [sigmoid, sft]\ndpo_loss_weights: [0.5, 1]", "dpo_loss_type"),
        (f"{AXOLOTL}rl: dpo\ndpo_loss_type: [sigmoid, sft]\ndpo_loss_weights: [1]", "dpo_loss_type"),
        (f"{AXOLOTL}rl: dpo\ndpo_loss_type: [robust]\ndpo_label_smoothing: 0.6", "dpo_loss_type"),
        (f"{AXOLOTL}rl: [dpo]", "rl"),
        (f"{AXOLOTL}rl: dpo\nkd_trainer: true", "kd_trainer"),
        (f"{AXOLOTL}datasets: [{{path: a/b, type: chatml.intel}}]", "datasets[0].type"),
        (f"{FACTORY}dataset: a\nstage: dpo\npref_loss: kto_pair", "pref_loss"),
        (f"{FACTORY}dataset: a\nstage: dpo\ntemplate: qwen2_vl", "template"),
    ],
)
def test_what_no_objective_has_stops_the_import(tmp_path: Path, text: str, key: str) -> None:
    line = refusal(imported, f"{text}\n", tmp_path)
    assert f"{key}: " in line and line.count("pass --as-sft to import the rest") == 1
    translation, written = imported(f"{text}\n", tmp_path, as_sft=True)
    assert "objective" not in written["train"] and not {"dpo", "kto"} & written["train"].keys()
    changed = {each.partition(": ")[0] for each in said(translation, CHANGES)}
    assert {key} | ({"rl"} if "rl: " in text else set()) | ({"stage"} if "stage: " in text else set()) <= changed


# Rows

CHATML, LLAMA = "chatml", "llama-3-verbatim"
STOPS = {CHATML: "<|im_end|>", LLAMA: "<|eot_id|>"}
TYPES: list[tuple[str, str, str, str, dict[str, Any]]] = [
    ("dpo", "chat_template.default", "", "chat", {"messages": [USER], "chosen": GOOD, "rejected": BAD}),
    ("simpo", "chat_template", "field_messages: talk, field_chosen: better, field_rejected: worse", "chat",
     {"talk": [USER], "better": GOOD, "worse": BAD, "messages": [BAD], "chosen": "x", "rejected": "x"}),
    ("dpo", "chat_template.argilla_chat", "roles_to_train: [user]", "chat",
     {"chosen": PAIR[0], "rejected": PAIR[1], "prompt": "else"}),
    ("dpo", "chatml.intel", "", CHATML, {"question": USER["content"], "chosen": "5", "rejected": "6", "input": "else"}),
    ("ipo", "llama3.intel", "", LLAMA, {"question": USER["content"], "chosen": "5", "rejected": "6", "tools": "else"}),
    ("dpo", "chatml.icr", "", CHATML, {"input": USER["content"], "chosen": "5", "rejected": "6", "prompt": "else"}),
    ("dpo", "chatml.prompt_pairs", "", CHATML, {"prompt": USER["content"], "chosen": "5", "rejected": "6"}),
    ("dpo", "chatml.ultra", "", CHATML,
     {"prompt": USER["content"], "chosen": PAIR[0], "rejected": PAIR[1], "messages": [BAD], "score_chosen": 8}),
    ("dpo", "chatml", "", CHATML, {"instruction": USER["content"], "chosen_response": "5", "rejected_response": "6"}),
    ("orpo", "chat_template.argilla", "", "chat",
     {"prompt": USER["content"], "chosen": PAIR[0], "rejected": PAIR[1], "messages": [BAD]}),
    ("dpo", "{field_prompt: q, field_chosen: better, field_rejected: worse}", "", "plain",
     {"q": USER["content"], "better": "5", "worse": "6", "system": "else"}),
]  # fmt: skip


@pytest.mark.parametrize(("rl", "kind", "more", "template", "row"), TYPES, ids=[each[1] for each in TYPES])
def test_row_types_of_axolotl(
    tmp_path: Path, rl: str, kind: str, more: str, template: str, row: dict[str, Any]
) -> None:
    """The columns that the type does not read are ignored, and the others are read as there."""
    entry = f"{{path: a/b, type: {kind}{', ' * bool(more)}{more}}}"
    gamma = "simpo_gamma: 0.5\n" * (rl == "simpo")
    ends = f"special_tokens: {{eos_token: '{STOPS[template]}'}}\n" if template in STOPS else ""
    translation, written = imported(f"{AXOLOTL}rl: {rl}\n{gamma}{ends}datasets: [{entry}]\n", tmp_path)
    rows = written["prepare"]["rows"]
    assert rows["template"] == template and rows["format"] == "preference" and "loss" not in rows
    assert not [each for each in said(translation, CHANGES) if not each.startswith(("bf16", "train.warmup_ratio"))]
    reading = Reading(rows.get("columns", {}), {}, frozenset(rows.get("ignore", ())))
    example = parse(row, "preference", reading)
    assert (example.messages, example.rejected, example.prompt) == (*PAIR, 1)


@pytest.mark.parametrize(
    ("kind", "template", "row"),
    [
        ("llama3.ultra", LLAMA, {"prompt": USER["content"], "completion": "5", "label": True}),
        ("chatml.argilla", CHATML, {"instruction": USER["content"], "completion": "5", "label": True, "input": "else"}),
        ("chatml.intel", CHATML, {"question": USER["content"], "completion": "5", "label": True, "messages": [BAD]}),
        ("{field_prompt: q, field_completion: a, field_label: l}", "plain",
         {"q": USER["content"], "a": "5", "l": True, "label": False}),
    ],
)  # fmt: skip
def test_labelled_row_types_of_axolotl(tmp_path: Path, kind: str, template: str, row: dict[str, Any]) -> None:
    _, written = imported(f"{AXOLOTL}rl: kto\ndatasets: [{{path: a/b, type: {kind}}}]\n", tmp_path)
    rows = written["prepare"]["rows"]
    assert rows["template"] == template and rows["format"] == "labelled"
    example = parse(row, "labelled", Reading(rows.get("columns", {}), {}, frozenset(rows.get("ignore", ()))))
    assert (example.messages, example.prompt, example.desirable) == ([USER, GOOD], 1, True)


@pytest.mark.parametrize(
    ("model", "more", "template", "line"),
    [
        ("some/model", "", "chatml", "the tokenizer's end of sequence follows <|im_end|> in an answer there"),
        ("some/model", "special_tokens: {eos_token: <|im_end|>}\n", "chatml", ""),
        ("some/model", "special_tokens: {eos_token: </s>}\n", "chatml", "</s>"),
        ("meta-llama/Llama-3.2-1B", "", "llama3", "<|end_of_text|>"),
        ("Qwen/Qwen2.5-0.5B", "", "chatml", "<|endoftext|>"),
        ("meta-llama/Llama-3.2-1B-Instruct", "", "llama3", ""),
        ("Qwen/Qwen2.5-0.5B-Instruct", "", "qwen_25", ""),
        ("some/model", "", "tokenizer_default", ""),
    ],
)  # fmt: skip
def test_a_second_end_of_an_answer_is_appended_or_a_line(
    tmp_path: Path, model: str, more: str, template: str, line: str
) -> None:
    """TRL's trainers append the tokenizer's end of sequence to an answer that does not end with it."""
    text = f"{AXOLOTL.replace('some/model', model)}rl: dpo\nchat_template: {template}\n{more}"
    translation, written = imported(f"{text}datasets: [{{path: a/b, type: chat_template.default}}]\n", tmp_path)
    lines = [each for each in said(translation, CHANGES) if each.startswith("rl: ")]
    appended = written["prepare"]["rows"].get("append_token")
    found = appended or "".join(lines).removeprefix("rl: ")
    assert found.startswith(line) and bool(found) == bool(line)


TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
INFO: dict[str, Any] = {
    "alpaca": {
        "file_name": "a.json", "ranking": True,
        "columns": {"prompt": "q", "query": "more", "chosen": "yes", "rejected": "no", "history": "before"},
    },
    "sharegpt": {
        "file_name": "s.json", "ranking": True, "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "renamed": {
        "file_name": "s.json", "ranking": True, "formatting": "sharegpt",
        "columns": {"messages": "talk", "chosen": "yes", "rejected": "no"},
        "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "customer", "assistant_tag": "bot"},
    },
    "tagged": {
        "file_name": "k.json", "formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": TAGS,
    },
    "tagged alpaca": {
        "file_name": "k.json", "columns": {"prompt": "q", "response": "a", "kto_tag": "good"},
    },
    "unranked": {"file_name": "a.json", "columns": {"prompt": "q", "chosen": "yes", "rejected": "no"}},
    "untagged": {"file_name": "a.json"},
}  # fmt: skip


def described(name: str, stage: str, tmp_path: Path) -> tuple[Translation, dict[str, Any]]:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))
    translation, written = imported(f"{FACTORY}stage: {stage}\ndataset: {name}\n", tmp_path)
    return translation, written["prepare"]["rows"]


def spoken(message: dict[str, str], role: str = "from", text: str = "value", **names: str) -> dict[str, str]:
    return {role: names.get(message["role"], message["role"]), text: message["content"]}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("alpaca", {"q": "Add", "more": "1 and 4.", "yes": "5", "no": "6", "before": [], "system": "else"}),
        ("sharegpt", {"conversations": [spoken(USER, user="human")], "chosen": spoken(GOOD), "rejected": spoken(BAD)}),
        ("renamed", {
            "talk": [spoken(USER, "who", "what", user="customer")], "yes": spoken(GOOD, "who", "what", assistant="bot"),
            "no": spoken(BAD, "who", "what", assistant="bot"), "system": "else", "conversations": [BAD],
        }),
    ],
)  # fmt: skip
def test_ranked_data_sets_of_llamafactory(tmp_path: Path, name: str, row: dict[str, Any]) -> None:
    translation, rows = described(name, "dpo", tmp_path)
    assert rows["format"] == "preference" and not translation.unlike
    reading = Reading(rows.get("columns", {}), rows.get("roles", {}), frozenset(rows.get("ignore", ())))
    example = parse(row, "preference", reading)
    question = {**USER, "content": "Add\n1 and 4."} if name == "alpaca" else USER
    assert (example.messages, example.rejected) == ([question, GOOD], [question, BAD])


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("tagged", {"messages": [USER, BAD], "label": False, "system": "else"}),
        ("tagged alpaca", {"q": USER["content"], "a": "6", "good": False, "label": True, "input": "else"}),
    ],
)
def test_tagged_data_sets_of_llamafactory(tmp_path: Path, name: str, row: dict[str, Any]) -> None:
    _, rows = described(name, "kto", tmp_path)
    assert rows["format"] == "labelled"
    reading = Reading(rows.get("columns", {}), rows.get("roles", {}), frozenset(rows.get("ignore", ())))
    example = parse(row, "labelled", reading)
    assert (example.messages, example.desirable) == ([USER, BAD], False)


@pytest.mark.parametrize(
    ("name", "stage", "line"),
    [
        ("unranked", "dpo", "dataset: unranked has no ranking: true in dataset_info.json"),
        ("untagged", "kto", "dataset: untagged has no kto_tag in dataset_info.json"),
    ],
)
def test_data_sets_without_answers_to_compare_are_lines(tmp_path: Path, name: str, stage: str, line: str) -> None:
    assert any(each.startswith(line) for each in said(described(name, stage, tmp_path)[0], FILL_IN))


@pytest.mark.parametrize("name", ["sharegpt", "tagged"])
def test_rows_of_preferences_stop_the_import_of_supervised_training(tmp_path: Path, name: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))
    line = refusal(imported, f"{FACTORY}stage: sft\ndataset: {name}\n", tmp_path)
    assert f"dataset: {name}: rows of preferences" in line


def test_the_example_of_llamafactory_is_equal(tmp_path: Path) -> None:
    file = ROOT / "tests/unit/imported/llamafactory-llama3-lora-dpo.yaml"
    translation, written = imported(file.read_text(encoding="utf-8"), tmp_path)
    assert said(translation, CHANGES) == [] and FORMS[written["prepare"]["rows"]["format"]].rows == "pairs"
    assert (written["train"]["objective"], written["train"]["dpo"]) == ("dpo", SIGMOID)
