"""`zerolora init`: listing and writing recipes, and mistakes."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, project_environment, served

from zerolora.config.file import load
from zerolora.config.recipes import SCHEMA_FILE, find, write_recipe
from zerolora.errors import UserError

RECIPES = ROOT / "config/recipes"
NAME = "llama-3-8b-lora-8x80gb"


def test_init_lists_the_recipes(tmp_path: Path) -> None:
    """In any directory, in a fresh process: the recipes of the installed project."""
    command = [sys.executable, "-m", "zerolora", "init"]
    environment = project_environment(ROOT)
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    assert [name for name, _ in lines] == sorted(path.parent.name for path in RECIPES.glob("*/config.yaml"))
    assert dict(lines)[NAME].strip() == "LoRA of Llama-3-8B-Instruct on one machine with eight GPUs of 80 GB"


def test_recipe_is_only_overwritten_with_force(tmp_path: Path) -> None:
    output = tmp_path / "config/config.yaml"
    output.parent.mkdir()
    (output.parent / "recipes").symlink_to(RECIPES)
    result = served("zerolora", "init", "--recipe", NAME, directory=tmp_path)
    assert result.returncode == 0, result.stderr
    recipe, written = (path.read_text(encoding="utf-8") for path in (RECIPES / NAME / "config.yaml", output))
    assert written.splitlines()[1:] == recipe.splitlines()[1:]
    schema = Path(written.splitlines()[0].partition("$schema=")[2])
    assert schema.is_absolute() and schema.read_bytes() == (ROOT / SCHEMA_FILE).read_bytes()
    output.write_text("mine: 1\n", encoding="utf-8")
    again = served("zerolora", "init", "--recipe", NAME, directory=tmp_path)
    assert again.returncode == 2 and "config/config.yaml: exists; pass --force to replace it" in again.stderr
    assert output.read_text(encoding="utf-8") == "mine: 1\n"
    assert served("zerolora", "init", "--recipe", NAME, "--force", directory=tmp_path).returncode == 0
    assert output.read_text(encoding="utf-8") == written


def test_rows_of_a_recipe_come_with_its_config(tmp_path: Path) -> None:
    name = "smollm2-135m-preferences"
    command = [sys.executable, "-m", "zerolora", "init", "--recipe", name]
    environment = project_environment(ROOT)
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    shipped = {path.name: path.read_bytes() for path in (RECIPES / name).glob("*.jsonl")}
    folder = tmp_path / "config/recipes" / name
    assert len(shipped) == 4 and {path.name: path.read_bytes() for path in folder.iterdir()} == shipped
    config = load(tmp_path / "config/config.yaml")
    assert {data.path for data in config.prepare.values()} == {str(folder.relative_to(tmp_path)), "data/reference.json"}


def test_unknown_recipe_lists_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'../models' is not a recipe; use one of\n") as error:
        write_recipe("../models", RECIPES, tmp_path / "config.yaml", force=False)
    assert NAME in str(error.value) and not (tmp_path / "config.yaml").exists()


def test_recipes_of_the_surrounding_project_come_first(tmp_path: Path) -> None:
    mine = tmp_path / "config/recipes/mine"
    mine.mkdir(parents=True)
    (mine / "config.yaml").write_text("runs: {}\n", encoding="utf-8")
    (tmp_path / "deep/er").mkdir(parents=True)
    assert find(tmp_path / "deep/er") == tmp_path / "config/recipes"
