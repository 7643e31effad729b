"""A training method is added to a copy of the project as docs/extending.md says, and is estimated."""

import json
import re
from collections.abc import Callable

import pytest
from conftest import ROOT, Project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LINE = "| `lora_fa` | the second factor of LoRA | estimated only |"


def test_the_documented_method_is_one_file_and_a_line(make_project: Callable[[str], Project]) -> None:
    text = (ROOT / "docs/extending.md").read_text()
    found = re.search(r"`(src/zerolora/methods/\w+\.py)`:\n\n```python\n(.*?)```", text, re.S)
    assert found
    project = make_project("method")
    (project.directory / found[1]).write_text(found[2])
    docs = project.directory / "docs/memory.md"
    docs.write_text(docs.read_text().replace("| `dora` |", f"{LINE}\n| `dora` |", 1))
    project.run("python", "-m", "pytest", "-q", "tests/unit/test_methods.py", "-k", "file_is or estimated or lists")
    model = "config/recipes/models/llama-3-8b.json"
    bytes_of = {}
    for method in ("lora", "lora_fa"):
        options = ("--method", method, "--strategy", "zero2", "--json")
        printed = project.run("zerolora", "memory", "--model", model, *options).stdout
        bytes_of[method] = json.loads(printed)["gpu"]
    # Trained is the second factor only, and what is saved for the first one's gradient is gone.
    for term in ("moments", "activations"):
        assert bytes_of["lora_fa"][term] < bytes_of["lora"][term]
