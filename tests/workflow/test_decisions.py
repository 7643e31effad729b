"""Snakemake's decisions, against an oracle, on random edits of a toy pipeline with our stages' shape."""

import json
import random
from pathlib import Path

import pytest
from conftest import ROOT, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NEEDS: dict[str, list[str]] = {
    "fetch": [],
    "prepare": ["fetch"],
    "pack": ["prepare"],
    "estimate": ["pack"],
    "render": ["estimate"],
    "train": ["prepare", "pack", "render"],
    "merge": ["train"],
    "evaluate": ["prepare", "merge"],
    "report": ["estimate", "train", "evaluate"],
}
HEAD = """
import json, sys
sys.path.insert(0, {scripts!r})
from zerolora.compat.snakemake_patches import replan_after_same_outputs
replan_after_same_outputs()
SETTINGS = json.load(open("settings.json"))
rule all:
    input: "report"
"""
# Only the tens of a setting reach the output: half of all edits change nothing that others read.
RULE = """
rule {name}:
    input: {inputs}
    output: "{name}"
    params: setting=SETTINGS["{name}"], written=SETTINGS["{name}"] // 10
    shell: "echo {name} >> ran; cat {{input}} /dev/null > {{output}}; echo {name} {{params.written}} >> {{output}}"
"""


def test_stage_runs_if_and_only_if_its_inputs_changed(tmp_path: Path) -> None:
    rules = [
        RULE.format(
            name=name,
            inputs=", ".join(f'"{need}"' for need in needs) or "[]",
        )
        for name, needs in NEEDS.items()
    ]
    (tmp_path / "Snakefile").write_text(HEAD.format(scripts=str(ROOT / "workflow/scripts")) + "".join(rules))
    settings = dict.fromkeys(NEEDS, 10)
    assert run(tmp_path, settings) == list(NEEDS)
    draw = random.Random(1)  # noqa: S311 - a test's dice
    before = outputs(tmp_path)
    for round_ in range(12):
        edited = set(draw.sample(list(NEEDS), draw.choice([1, 1, 2, 3])))
        for name in sorted(edited):
            settings[name] += draw.choice([1, 10])
        deleted = {draw.choice(list(NEEDS))} if draw.random() < 0.25 else set()
        for name in deleted:
            (tmp_path / name).unlink(missing_ok=True)
        # Also those that were deleted before and that nobody has needed since.
        missing = {name for name in NEEDS if not (tmp_path / name).exists()}
        ran = run(tmp_path, settings)
        after = before | outputs(tmp_path)
        expected = oracle(edited, before, after)
        before = after
        # A missing file comes back only where a stage that runs reads it, so it may run or not.
        assert expected <= set(ran) <= expected | missing, (round_, edited, missing)
        assert len(ran) == len(set(ran))
        assert run(tmp_path, settings) == []


def oracle(edited: set[str], before: dict[str, str], after: dict[str, str]) -> set[str]:
    """Return the stages that have to run, given what really changed."""
    must: set[str] = set()
    changed: set[str] = set()
    for name, needs in NEEDS.items():
        if name in edited or changed & set(needs):
            must.add(name)
            if before[name] != after[name]:
                changed.add(name)
    return must


def outputs(folder: Path) -> dict[str, str]:
    """Return what is there; a deleted file that nobody needed again is not."""
    return {name: (folder / name).read_text() for name in NEEDS if (folder / name).exists()}


def run(folder: Path, settings: dict[str, int]) -> list[str]:
    """Run the pipeline and return the stages that ran, in order."""
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "ran").write_text("")
    result = served("snakemake", "--cores", "1", "all", directory=folder)
    assert result.returncode == 0, result.stderr
    return (folder / "ran").read_text().split()
