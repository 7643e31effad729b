"""A strategy is added to a copy of the project as docs/extending.md says, and the project trains with it."""

import json
import re
from collections.abc import Callable

import pytest
from conftest import ROOT, Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NAME, BEFORE = "zero3_whole_adapters", "zero3"


def test_the_documented_strategy_is_one_file_and_a_line(make_project: Callable[[str], Project]) -> None:
    """It is estimated, rendered and trained for two steps, and passes the tests of every strategy."""
    text = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    code = re.search(r"`(src/zerolora/strategies/\w+\.py)`:\n\n```python\n(.*?)```", text, re.S)
    line = re.search(rf"^\| `{NAME}` \|.*\n", text, re.M)
    assert code and line
    project = make_project("strategy")
    (project.directory / code[1]).write_text(code[2], encoding="utf-8")
    docs = project.directory / "docs/choice.md"
    docs.write_text(re.sub(rf"^\| `{BEFORE}` \|.*\n", rf"\g<0>{line[0]}", docs.read_text(), count=1, flags=re.M))
    project.run(
        "python", "-m", "pytest", "-q", "tests/unit/test_strategies.py", "tests/unit/test_render.py", "-k", NAME
    )
    project.run("python", "-m", "pytest", "-q", "tests/unit/test_docs.py", "-k", "names_of_the_choice")

    project.config["render"]["strategy"] = NAME
    project.config["train"] |= {"ranks_per_node": 2, "micro_batch": 1}
    project.write_config()
    project.snakemake("results/default/adapter/manifest.json")
    results = project.directory / "results/default"
    estimates = json.loads((results / "estimate.json").read_text())["strategies"]
    names = [each["strategy"] for each in estimates]
    assert names.index(NAME) == names.index(BEFORE) + 1
    assert estimates[names.index(NAME)]["fits"]
    zero = json.loads((results / "zero.json").read_text())
    assert zero["zerolora"]["strategy"] == NAME
    assert zero["zero_optimization"]["stage3_param_persistence_threshold"] == 64 * 32  # the tiny model's width
    assert json.loads((results / "metrics/train.json").read_text())["steps"] == 2
