"""A config from a model, rows and this machine: `zerolora init --model … --data …`."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, refusal, served, write_rows
from loopback_hub import REPOSITORY, REVISION, Hub, asking, serving
from pretended_driver import PretendedDriver

from zerolora.config.file import load
from zerolora.config.recipes import SCHEMA_FILE
from zerolora.config.resolve import resolve
from zerolora.config.settings import FetchDirectory
from zerolora.errors import CONTROLS
from zerolora.fetch.models import fetch
from zerolora.files import read_json, write_json
from zerolora.first_config import first_config as module
from zerolora.first_config.first_config import first_config
from zerolora.first_config.given_data import given_data
from zerolora.first_config.given_model import given_model
from zerolora.machine import devices

LICENSED = "---\nlicense: apache-2.0\n---\n# A model\n"


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a model and 40 rows, in which the test runs."""
    shutil.copytree(tiny_model, tmp_path / "My Model")
    (tmp_path / "My Model/README.md").write_text(LICENSED)
    write_rows(tmp_path / "rows.json", 40)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(folder: Path, *options: str, model: str = "My Model", data: str = "rows.json") -> Any:
    command = ("zerolora", "init", "--model", model, "--data", data, "--output", "config.yaml", *options)
    return served(*command, directory=folder)


def test_config_is_short_and_its_plan_is_printed(folder: Path) -> None:
    result = init(folder)
    assert result.returncode == 0, result.stderr
    text = (folder / "config.yaml").read_text()
    assert len(text.splitlines()) <= 13
    schema, command = text.splitlines()[:2]
    file = Path(schema.removeprefix("# yaml-language-server: $schema="))
    assert file.is_absolute() and file.read_bytes() == (ROOT / SCHEMA_FILE).read_bytes()
    assert command == "# zerolora init --model 'My Model' --data rows.json"
    config = load(folder / "config.yaml")
    assert config.fetch.directory["my-model"].model_dump(exclude_defaults=True) == {
        "path": "My Model",
        "license": "apache-2.0",
    }
    assert config.prepare["rows"].split.model_dump() == {"validation": 2, "test": 2}
    run = resolve(config).runs["rows"]
    assert (run.dataset, run.render.strategy, config.hardware.device) == ("rows", "auto", "cpu")
    instruction, output, data, row, trains, few, fits, takes = result.stdout.splitlines()
    assert instruction.startswith("column  instruction: read as instruction, as in ") and "output: read" in output
    longest = resolve(config).prepare["rows"].max_length
    assert "36 rows of alpaca, the longest of " in data and "2 more for validation and 2 for the test" in data
    assert longest % 64 == 0 and longest - 64 < int(data.partition("longest of ")[2].split()[0]) <= longest
    assert "user⏎" in row and row.partition("「")[2].partition("」")[0].startswith("王大丫丫的回答是")
    assert "lora, " in trains and " 23 steps" in trains  # of 36 rows in batches of 8, five times
    assert few == "few     23 steps may teach little; use more rows, or raise train.epochs"
    written = yaml.safe_load(text)["train"]
    assert (written["learning_rate"], written["epochs"]) == (9e-3, 5)  # for a hidden size of 32
    assert " of the machine" in fits and "minutes, predicted" in takes
    assert "config.yaml is written; train with `zerolora run`" in result.stderr


@pytest.mark.parametrize("kind", ["models", "weights"])
def test_a_model_that_fetch_wrote_is_fetched_by_the_same_pin(folder: Path, kind: str) -> None:
    """Neither engine tracks its weights, which may be in the store alone."""
    pin = {"repository": REPOSITORY, "revision": REVISION}
    fetch(FetchDirectory(path="My Model"), Path("resources/weights/mine"), Path("resources/models/mine"))
    path = Path("resources/models/mine/manifest.json")
    write_json(path, read_json(path, "tests") | {"source": {"source": "hub", **pin}, "license": "MIT"})
    Path("resources/weights/mine").mkdir(parents=True)
    result = init(folder, model=f"resources/{kind}/mine")
    assert result.returncode == 0, result.stderr
    config = load(folder / "config.yaml")
    written = {name: model.model_dump(exclude_defaults=True) for name, model in config.fetch.hub.items()}
    assert written == {"mine": {**pin, "license": "MIT"}}
    assert "column  instruction" in result.stdout and "trains  lora" in result.stdout


@pytest.mark.parametrize(
    ("row", "objective"),
    [({"chosen": "5", "rejected": "6"}, "dpo"), ({"completion": "5", "label": True}, "kto")],
)
def test_preference_rows_choose_the_objective(folder: Path, row: dict[str, Any], objective: str) -> None:
    rows = [{"prompt": f"{number} + 0 = ", **row} for number in range(40)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = init(folder, data="rows.jsonl")
    assert result.returncode == 0, result.stderr
    assert f"trains  {objective} with lora, " in result.stdout
    run = resolve(load(folder / "config.yaml")).runs["rows"]
    assert run.train.objective == objective and run.referenced == "rows"
    other = init(folder, "--force", data="rows.json")
    assert other.returncode == 0 and load(folder / "config.yaml").train.objective == "sft"


def test_rows_beyond_the_models_positions_are_counted(folder: Path) -> None:
    rows = [{"instruction": f"{number}", "output": "a" * (600 if number < 3 else 9)} for number in range(40)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = init(folder, data="rows.jsonl")
    assert "3 rows are longer than the model's 512 tokens and left out" in result.stdout
    assert load(folder / "config.yaml").prepare["rows"].too_long == "drop"


def test_an_existing_config_stays(folder: Path) -> None:
    (folder / "config.yaml").write_text("mine")
    result = init(folder)
    assert result.returncode == 2 and (folder / "config.yaml").read_text() == "mine"
    assert result.stderr.endswith("config.yaml: exists; pass --force to replace it, or another --output\n")
    assert init(folder, "--force").returncode == 0


MISTAKES: list[tuple[dict[str, str], str]] = [
    ({"model": "nowhere"}, "--model 'nowhere': no such directory, and no repository; give a directory"),
    ({"model": "empty"}, "empty: has no .safetensors weights"),
    ({"data": "none.json"}, "--data 'none.json': there is no such file or directory"),
    ({"data": "x\ny"}, "--data 'x\\ny': there is no such file or directory"),
    ({"data": "{x}.json"}, "Snakemake takes {...} in a file's name for a wildcard; rename the file"),
    ({"model": "code"}, "auto_map names Python code"),
]


@pytest.mark.parametrize(("given", "said"), MISTAKES)
def test_mistake_is_one_line_and_writes_nothing(folder: Path, given: dict[str, str], said: str) -> None:
    (folder / "empty").mkdir()
    write_rows(folder / "{x}.json", 40)
    shutil.copytree(folder / "My Model", folder / "code")
    config = json.loads((folder / "code/config.json").read_text())
    config |= {"model_type": "other", "auto_map": {"AutoConfig": "m.C"}}
    (folder / "code/config.json").write_text(json.dumps(config))
    result = init(folder, **given)
    assert result.returncode == 2 and not (folder / "config.yaml").exists()
    assert tempfile.gettempdir() not in result.stderr.replace(str(folder), "")
    assert said in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr


def test_model_and_data_come_together(folder: Path) -> None:
    for options in (["--model", "My Model"], ["--model", "My Model", "--recipe", "llama-3-8b-lora-8x80gb"]):
        result = served("zerolora", "init", *options, directory=folder)
        assert result.returncode == 2
        assert "pass --model and --data, both, or --recipe alone" in result.stderr


RECIPES = Path(__file__).parents[2] / "config/recipes"


@pytest.fixture
def recipes(folder: Path) -> Path:
    (folder / "config").mkdir()
    (folder / "config/recipes").symlink_to(RECIPES)
    return folder


def test_a_recipes_training_settings_are_written_for_another_model(recipes: Path) -> None:
    """Its hardware, ranks and strategy are not: they follow from this machine."""
    folder = recipes
    write_rows(folder / "rows.json", 80)
    result = init(folder, "--recipe", "llama-3-8b-lora-8x80gb")
    assert result.returncode == 0, result.stderr
    text = (folder / "config.yaml").read_text()
    command = "# zerolora init --model 'My Model' --data rows.json --recipe llama-3-8b-lora-8x80gb\n"
    assert text.split("\n", 1)[1].startswith(command) and len(text.splitlines()) <= 14
    run = resolve(load(folder / "config.yaml")).runs["rows"]
    theirs = yaml.safe_load((RECIPES / "llama-3-8b-lora-8x80gb/config.yaml").read_text())
    written = yaml.safe_load(text)
    assert written["train"] == theirs["train"] | {"ranks_per_node": 1} and written["pack"] == theirs["pack"]
    assert (written["hardware"]["device"], run.render.strategy) == ("cpu", "auto")


HOLDS_NOT = [
    ("llama-3-8b-lora-8x80gb", "train.global_batch is 64"),
    ("llama-3.1-8b-128k-8x80gb", "train.sequence_parallel: 1 ranks are not a multiple of 8"),
    ("falcon-180b-lora-8x80", "--recipe: 'falcon-180b-lora-8x80' is not a recipe; use one of"),
]


@pytest.mark.parametrize(("recipe", "said"), HOLDS_NOT)
def test_a_recipe_that_does_not_hold_is_refused_by_its_key(recipes: Path, recipe: str, said: str) -> None:
    folder = recipes
    result = init(folder, "--recipe", recipe)
    assert result.returncode == 2 and not (folder / "config.yaml").exists()
    assert said in result.stderr, result.stderr
    assert "Traceback" not in result.stderr and tempfile.gettempdir() not in result.stderr.replace(str(folder), "")


def test_targets_that_the_model_lacks_are_refused_by_their_key(folder: Path) -> None:
    """A recipe of the project names modules of its model."""
    recipe = folder / "config/recipes/mine"
    recipe.mkdir(parents=True)
    text = "runs: {a: {dataset: rows}}\ntrain: {lora: {targets: [query_key_value]}}\n"
    (recipe / "config.yaml").write_text(text)
    result = init(folder, "--recipe", "mine")
    assert result.returncode == 2 and not (folder / "config.yaml").exists()
    said = "--recipe mine: does not hold for this model and machine: train.lora.targets"
    assert said in result.stderr.splitlines()[-1]
    (recipe / "config.yaml").write_text("runs: {a: {dataset: rows, train: {seed: 1}}}\n")
    assert "--recipe mine: its run a has its own train" in init(folder, "--recipe", "mine").stderr


@pytest.fixture
def hub(tiny_model: Path) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in tiny_model.iterdir()}
    with serving(Hub(files | {"README.md": LICENSED.encode()})) as server:
        server.card = {"license": "apache-2.0"}
        yield server


@pytest.mark.parametrize("revision", ["", "@main", f"@{REVISION}"])
def test_commit_and_licence_of_a_repository_are_looked_up(folder: Path, hub: Hub, revision: str) -> None:
    options = ["--model", f"{REPOSITORY}{revision}", "--data", "rows.json", "--output", "config.yaml"]
    result = asking(hub, folder, "init", *options)
    assert result.returncode == 0, result.stderr
    entry = yaml.safe_load((folder / "config.yaml").read_text())["fetch"]["hub"]["data"]
    assert entry == {"repository": REPOSITORY, "revision": REVISION, "license": "apache-2.0"}
    assert not [name for name in hub.downloads() if name.endswith(".safetensors")]


def test_gpus_of_this_machine_are_planned_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0+cu130", "13.0"))
    monkeypatch.setattr(devices, "driver_library", lambda: PretendedDriver(9.0, 8.0))
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    lines = [*first_config("My Model", "rows.json", Path("config.yaml"), force=False)]
    config = load(folder / "config.yaml")
    hardware = config.hardware
    assert (hardware.device, hardware.gpus_per_node, hardware.gpu_memory) == ("cuda", 2, "81920MiB")
    assert hardware.compute_capability == 8.0 and config.train.ranks_per_node == 2
    assert " of a GPU's 81920MiB, " in lines[-2]


def test_what_fits_only_offloaded_is_planned_in_4_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 7B on a GPU of 12 GiB, from its config alone."""
    source = Path(__file__).parents[2] / "config/recipes/models/qwen2.5-7b.json"
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0+cu130", "13.0"))
    monkeypatch.setattr(devices, "driver_library", lambda: PretendedDriver(8.6, memory=12 * 2**30))
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"total": 64 * 2**30}))
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    shutil.copyfile(source, folder / "My Model/config.json")
    monkeypatch.setattr("zerolora.first_config.first_config.try_model", lambda *_: [])  # the weights are of a tiny one
    lines = [*first_config("My Model", "rows.json", Path("config.yaml"), force=False)]
    assert load(folder / "config.yaml").train.method == "qlora"
    assert lines[-4].startswith("trains  qlora, ")


def test_what_render_would_refuse_is_refused(folder: Path) -> None:
    """Its trial on shapes runs here too: the weights of another config would be trained, and could not be merged."""
    config = folder / "My Model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 56}))
    done = init(folder)
    assert done.returncode == 2
    assert "training would end in what its files cannot take" in done.stderr
    assert not (folder / "config.yaml").exists()


def test_what_does_not_fit_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"total": 2**30}))
    source = Path(__file__).parents[2] / "config/recipes/models/qwen2.5-7b.json"
    shutil.copyfile(source, folder / "My Model/config.json")
    with pytest.raises(Exception, match="nothing fits"):
        [*first_config("My Model", "rows.json", Path("config.yaml"), force=False)]
    assert not (folder / "config.yaml").exists()


def test_a_readme_without_metadata_leaves_the_licence_open(folder: Path) -> None:
    (folder / "My Model/README.md").write_text("---\n- [broken\n---\n")
    assert init(folder).returncode == 0
    assert "license: unknown}  # its README.md states no licence" in (folder / "config.yaml").read_text()


EVIL = "\x1b]0;pwned\x07\x1b[2J\x9b\u202e"


def test_texts_of_rows_reach_neither_the_terminal_nor_the_config_as_they_are(folder: Path) -> None:
    row = {"instruction": f"1{EVIL}", "output": f"2{EVIL}", f"note{EVIL}": f"3{EVIL}"}
    (folder / "rows.json").write_text(json.dumps([row | {"output": f"{n}{EVIL}"} for n in range(40)]))
    done = init(folder)
    assert done.returncode == 0, done.stderr
    said = (done.stdout + done.stderr).replace("\n", "") + (folder / "config.yaml").read_text().replace("\n", "")
    assert "\\x1b]0;pwned\\x07" in said and not CONTROLS.search(said), said


@pytest.mark.parametrize("kind", ["data", "model", "output"])
def test_a_name_with_a_line_end_becomes_no_key(folder: Path, kind: str) -> None:
    """Of the rows it is refused; in a comment it would be a line of the config."""
    evil = folder / "h/x\nevaluate: {engine: vllm, vllm_python: /x/evil}\n#"
    evil.mkdir(parents=True)
    given = {"data": "rows.json", "model": "My Model"}
    if kind != "output":
        given[kind] = str(shutil.move(folder / given[kind], evil))
    output = evil / "config.yaml" if kind == "output" else folder / "config.yaml"
    done = init(folder, *(["--output", str(output)] if kind == "output" else []), **given)
    if done.returncode:
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and not output.exists(), done.stderr
    else:
        assert "evaluate" not in yaml.safe_load(output.read_text()), output.read_text()


def test_refusals_are_one_line(folder: Path) -> None:
    said = refusal(lambda: [*first_config("a b", "rows.json", Path("config.yaml"), force=False)])
    assert said.startswith("--model 'a b': no such directory")


def test_a_file_may_have_the_name_of_a_stages_folder(folder: Path) -> None:
    (folder / "rows.json").rename(folder / "data.json")
    assert init(folder, data="data.json").returncode == 0
    assert list(load(folder / "config.yaml").runs) == ["rows"]


def test_limit_is_that_of_the_text_model(folder: Path) -> None:
    """Its key is inside text_config, or has the name of GPT-2."""
    inside = json.loads((folder / "My Model/config.json").read_text())
    for config in (
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": {
            "model_type": "gemma3_text", "max_position_embeddings": 96, "vocab_size": inside["vocab_size"],
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "intermediate_size": 48}},
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 96, "n_embd": 32, "n_layer": 2,
         "n_head": 4, "vocab_size": inside["vocab_size"]},
    ):  # fmt: skip
        (folder / "My Model/config.json").write_text(json.dumps(config))
        into = _empty(folder / str(config["model_type"]))
        values = module._values(given_model("My Model", into), given_data("rows.json", into), {})
        assert values["prepare"]["rows"]["max_length"] == 96


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder
