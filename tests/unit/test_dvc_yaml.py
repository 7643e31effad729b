"""dvc.yaml: one stage a rule, depending on settings and code fingerprint, without a list of source files."""

import re
from typing import Any

import yaml
from conftest import ROOT

from zerolora.config import dvc_file
from zerolora.config.stages import STAGES

TEXT = (ROOT / "dvc.yaml").read_text(encoding="utf-8")
LINES = 290


def stages() -> dict[str, Any]:
    return {name: entry.get("do", entry) for name, entry in yaml.safe_load(TEXT)["stages"].items()}


def rule_of(entry: dict[str, Any]) -> str:
    return str(entry["cmd"].split()[1])


def test_names_no_source_files_and_stays_short() -> None:
    assert re.findall(r"[\w/]+\.(?:py|smk)\b", str(stages())) == []
    assert len(TEXT.splitlines()) <= LINES


def test_is_current() -> None:
    assert dvc_file.text() == TEXT, "run `make schema`"


def test_every_rule_is_one_stage() -> None:
    assert {name: rule_of(entry) for name, entry in stages().items()} == {name: name for name in STAGES}


def test_every_stage_depends_on_settings_and_code() -> None:
    for name, entry in stages().items():
        rule = rule_of(entry)
        if rule == "resolve":
            assert {"src/zerolora", "workflow/rules"} <= set(entry["deps"])
            continue
        # One file for each run and shared entry, since DVC reads a whole file for each value of each stage.
        group = STAGES[rule].settings.partition(".")[0]
        file = f"results/settings/{group}/${{key}}.json" if group in ("runs", "shared") else "results/config.json"
        (params,) = (each[file] for each in entry["params"] if file in each)
        of = "" if group in ("runs", "shared", "compare") else ".{}"
        plain = [re.sub(r"\$\{[^}]*\}", "{}", each) for each in params[:2]]
        assert plain == [re.sub(r"\{\w+\}", "{}", STAGES[rule].settings), f"code.{rule}{of}"], name
