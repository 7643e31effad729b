"""`zerolora import`: public examples of three formats, what becomes of every key, and mistakes of users."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, served
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(ROOT / "docs"))
import import_table

from zerolora.config.file import load
from zerolora.config.resolve import resolve
from zerolora.errors import UserError
from zerolora.imports.formats import FORMATS
from zerolora.imports.translate import Translation, import_config, leaves, recognised, translate

EXAMPLES = sorted(
    path
    for folder in ("tests/unit/imported", "config/deepspeed")
    for path in (ROOT / folder).iterdir()
    if path.suffix != ".md"
)


def imported(file: Path, tmp_path: Path, source: str | None = None) -> tuple[Translation, dict[str, Any]]:
    """Return the translation of a file, and the config as it was written, which must be valid."""
    output = tmp_path / "config.yaml"
    translation = import_config(file, source, output, force=True)
    resolve(load(output))
    return translation, yaml.safe_load(output.read_text(encoding="utf-8"))


def paths(value: Any, at: str = "") -> list[str]:
    """Return the path of every value of a file, through sections and lists."""
    if isinstance(value, dict) and value:
        return [path for key, inner in value.items() for path in paths(inner, f"{at}.{key}" if at else str(key))]
    if isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        return [path for number, inner in enumerate(value) for path in paths(inner, f"{at}[{number}]")]
    return [at]


def unnamed(value: Any, translation: Translation) -> list[str]:
    """Return the paths that no line names, by themselves or with a list that holds them."""
    keys = tuple(line.key for line in translation.lines)
    return [
        path for path in paths(value) if not any(path == key or path.startswith((f"{key}[", f"{key}.")) for key in keys)
    ]


def by_key(translation: Translation) -> dict[str, tuple[str, str]]:
    return {line.key: (line.kind, line.text) for line in translation.lines}


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.name)
def test_every_key_of_an_example_is_translated_or_named(file: Path, tmp_path: Path) -> None:
    translation, written = imported(file, tmp_path)
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    told = by_key(translation)
    assert unnamed(values, translation) == []
    assert {key for key, (kind, _) in told.items() if kind == "empty"} == {
        key for key, value in leaves(values) if value is None
    }
    unknown = [key for key, (kind, text) in told.items() if "knows" in text]
    assert not unknown  # the tables have every key of the examples
    assert written == translation.config


def test_an_example_of_axolotl(tmp_path: Path) -> None:
    translation, written = imported(ROOT / "tests/unit/imported/axolotl-llama-3-qlora-fsdp-70b.yaml", tmp_path)
    assert written["train"] == {
        "lora": {"r": 8, "alpha": 16.0, "dropout": 0.05, "targets": "all-linear"},
        "quantization": {"type": "nf4"},
        "method": "qlora",
        "ranks_per_node": 1,
        "global_batch": 4,
        "epochs": 4,
        "learning_rate": 1e-5,
        "optimizer": "adamw",
        "schedule": "cosine",
        "warmup_steps": 10,
        "weight_decay": 0.0,
        "micro_batch": 1,
        "gradient_clipping": 1.0,
        "activation_checkpointing": True,
        "attention": "flash",
    }
    assert written["render"] == {"strategy": "fsdp_offload"}
    assert written["pack"] == {"packing": False}
    rows = written["prepare"]["rows"]
    assert (rows["path"], rows["format"], rows["template"]) == ("data/alpaca", "alpaca", "alpaca")
    assert (rows["max_length"], rows["loss"], rows["pad_token"]) == (512, "assistant", "<|end_of_text|>")
    assert written["fetch"]["directory"]["llama-3-70b-fp16"]["path"] == "models/llama-3-70b-fp16"
    told = by_key(translation)
    assert told["val_set_size"][0] == "differs"
    assert told["fsdp_config.fsdp_state_dict_type"] == ("no equal", FORMATS["axolotl"].rules["fsdp_config"].remark)


def test_an_example_of_llamafactory(tmp_path: Path) -> None:
    translation, written = imported(ROOT / "tests/unit/imported/llamafactory-llama3-lora-sft-ds3.yaml", tmp_path)
    train = written["train"]
    assert (train["method"], train["lora"]) == ("lora", {"targets": "all-linear", "alpha": 16.0})
    assert (train["micro_batch"], train["global_batch"], train["epochs"]) == (1, 2, 3)
    assert (train["validation_steps"], train["checkpoint_steps"], train["precision"]) == (500, 500, "bf16")
    assert written["render"] == {"strategy": "zero3"}
    rows = written["prepare"]["rows"]
    assert rows["sources"] == {"identity.json": {"rows": 1000}, "alpaca_en_demo.json": {"rows": 1000}}
    assert (rows["template"], rows["too_long"]) == ("llama-3", "truncate_right")
    assert by_key(translation)["deepspeed"] == (
        "differs",
        "examples/deepspeed/ds_z3_config.json is not here; its name says zero3",
    )


def test_a_preference_stage_is_told(tmp_path: Path) -> None:
    translation, _ = imported(ROOT / "tests/unit/imported/llamafactory-llama3-lora-dpo.yaml", tmp_path)
    told = by_key(translation)
    assert [told[key][0] for key in ("stage", "pref_beta", "pref_loss")] == ["no equal"] * 3


@pytest.mark.parametrize(
    ("zero", "strategy"),
    [
        ({"stage": 0}, "zero0"),
        ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, "zero1_offload"),
        ({"stage": 2}, "zero2"),
        ({"stage": 3, "zero_hpz_partition_size": 8}, "zero3_hpz"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, "zero3_offload_optimizer"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, "zero3_offload"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "auto"),
        ({"stage": 4}, "auto"),
        ({"stage": 3, "offload_param": {"device": ["cpu"]}}, "auto"),
    ],
)
def test_stage_and_offload_of_a_json_name_a_strategy(tmp_path: Path, zero: dict[str, Any], strategy: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": zero}), encoding="utf-8")
    assert imported(file, tmp_path)[1]["render"] == {"strategy": strategy}
    own = tmp_path / "axolotl.yml"
    own.write_text("base_model: some/model\nadapter: lora\nmicro_batch_size: 1\ndeepspeed: ds.json\n", encoding="utf-8")
    translation, written = imported(own, tmp_path)
    assert written["render"] == {"strategy": "ddp" if strategy == "auto" else strategy}
    assert by_key(translation)["deepspeed"][0] == ("no equal" if strategy == "auto" else "differs")


def test_a_value_that_the_config_refuses_is_named_and_left_out(tmp_path: Path) -> None:
    file = tmp_path / "axolotl.yml"
    file.write_text(
        "base_model: some/model\nadapter: lora\nlora_r: 0\nlora_dropout: 1.5\nlearning_rate: fast\n"
        "early_stopping_patience: 3\nmicro_batch_size: 2\nseed: -1\nno_such: {a: 1}\n",
        encoding="utf-8",
    )
    translation, written = imported(file, tmp_path)
    refused = {line.key: line.text for line in translation.lines if line.kind == "no equal"}
    assert refused.keys() == {"lora_r", "lora_dropout", "learning_rate", "early_stopping_patience", "seed", "no_such.a"}
    assert "less than 1" in refused["lora_dropout"] and "validation_steps" in refused["early_stopping_patience"]
    assert "lora" not in written["train"] or "dropout" not in written["train"]["lora"]


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
    """Draw a config of a format: some of its keys, some unknown ones, and values of any kind."""
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
@settings(max_examples=250, deadline=None)
def test_no_key_is_lost_whatever_its_value(drawn: tuple[str, dict[str, Any]]) -> None:
    """Every key has a line of its own, and what comes out is valid; or, where a translation stops, it says why."""
    name, config = drawn
    translation = translate(config, FORMATS[name], Path("/nowhere"))
    assert not config or unnamed(config, translation) == []
    from zerolora.config.rules import impossible
    from zerolora.config.schema import Config

    assert list(impossible(Config.model_validate(translation.config))) == []
    assert yaml.safe_load(yaml.safe_dump(translation.config)) == translation.config
    assert all("\n" not in str(line) for line in translation.lines)


def test_the_command_prints_what_needs_a_look_and_writes_it_into_the_config(tmp_path: Path) -> None:
    file, output = ROOT / "tests/unit/imported/llamafactory-llama3-lora-dpo.yaml", tmp_path / "new/config.yaml"
    result = served("zerolora", "import", str(file), "--output", str(output))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "stage: no equal: zerolora does supervised fine-tuning only (stage: sft)" in lines
    text = output.read_text(encoding="utf-8")
    assert [line[2:] for line in text.splitlines()[1:] if line.startswith("# ")] == lines
    load(output)
    again = served("zerolora", "import", str(file), "--output", str(output))
    assert again.returncode == 2 and "exists; write --force" in again.stderr
    assert output.read_text(encoding="utf-8") == text
    assert served("zerolora", "import", str(file), "--output", str(output), "--force").returncode == 0


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"b{n}: &b{n} [{', '.join(['*' + (f'b{n - 1}' if n else 'a')] * 10)}]\n" for n in range(8)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no such file"),
        ("", "is empty where the keys of a training are expected"),
        ("- 1\n", "where the keys of a training are expected"),
        ("a: [\n", "correct the YAML"),
        (BOMB, "more than 1,000,000 values"),
        ("a: " + "[" * 60 + "]" * 60 + "\n", "more than 50 levels"),
        ("lora_r: 8\nlora_r: 9\n", "lora_r is given twice"),
        ("x: !!python/object/apply:os.getcwd []\n", "correct the YAML"),
        ("some: key\n", "none of its keys is known; write --from with one of axolotl, deepspeed, llamafactory"),
        ("learning_rate: 1\n", "as much those of axolotl and llamafactory"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_in_a_line(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "config.yml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=said) as error:
        import_config(file, None, tmp_path / "out.yaml", force=False)
    assert "\n" not in str(error.value) and not (tmp_path / "out.yaml").exists()


def test_a_format_can_be_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'trl' is no format; write one of axolotl, deepspeed, llamafactory"):
        recognised(tmp_path, {}, "trl")
    file = tmp_path / "config.yml"
    file.write_text("learning_rate: 1.0e-3\n", encoding="utf-8")
    assert imported(file, tmp_path, "axolotl")[1]["train"]["learning_rate"] == 1e-3


def test_the_tables_of_the_docs_are_those_of_the_registry() -> None:
    text = import_table.DOCUMENT.read_text(encoding="utf-8")
    assert [match[2] for match in import_table.MARK.finditer(text)] == ["axolotl", "llamafactory", "deepspeed"]
    assert import_table.written(text) == text, "run `python docs/import_table.py`"
