"""No import calls CUDA, and each stage initialises it at its first use, with torch's build for CUDA and a pretended GPU
(first_use.py)."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_build
import pyarrow
import pytest
from conftest import ROOT, Project

from zerolora.files import MANIFEST, canonical, describe, read_json, write_json
from zerolora.train.launch.launcher import environment_of

pytestmark = [pytest.mark.cuda, pytest.mark.slow]

SOURCE = ("--data", "results/data/rows", "--weights", "resources/weights/tiny.json")
TUNED = ("--base", "resources/weights/tiny.json", "--adapter", "results/default/adapter")
MERGED = ("--weights", "results/default/merged/manifest.json", *TUNED)
LOADED = "evaluated_models.placement"
FIRST = {
    "imports": None,
    "forked_rank": None,
    "rank": "rank.claim_device",
    "probe_rank": "probe_rank.__init__",
    "evaluate_base": LOADED,
    "evaluate": LOADED,
    "evaluate_rank": LOADED,
    "task_base": LOADED,
    "task": LOADED,
    "judge": LOADED,
    "reference": LOADED,
    "merge": None,
    "render": None,
}
"""The function of zerolora in which each stage initialises CUDA; None if it never does."""


def stages(project: Project) -> list[tuple[str, str, list[str]]]:
    """Return each stage's name, kind and arguments; its settings are the finished run's, on a GPU."""

    def read(name: str) -> Any:
        return json.loads((project.directory / "results" / name).read_text())

    run, judge = read("settings/runs/default.json")["runs"]["default"], read("config.json")["judge"]
    question: dict[str, Any] = {"place": "a", "question": "1 + 1", "prompt": "1 + 1", "choices": [], "expected": "2"}
    question |= {"messages": [{"role": "user", "content": "1 + 1"}]}
    (project.directory / "asked.jsonl").write_text(json.dumps(question) + "\n")
    evaluated = run["evaluate"] | {"device": "cuda"}
    asked: dict[str, Any] = {
        "kind": "rows",
        "check": "sum",
        "check_settings": {},
        "check_source": None,
        "chat_template": True,
    }
    asked |= {"max_new_tokens": 4, "batch": 2, "seed": 1}
    judge |= {"endpoint": "http://127.0.0.1:9/v1", "model": "none"}
    trained = [
        "--settings",
        canonical(run["train"] | {"device": "cuda"}),
        *SOURCE,
        "--zero",
        f"results/{run['rendered']}/zero.json",
    ]
    trained += ["--packing", f"results/{run['packed']}/packing", "--checkpoints", "c", "--output", "o"]
    reference = {"device": "cuda", "precision": "bf16"}
    pairs = as_pairs(project.directory / SOURCE[1], project.directory / "pairs")
    referred = ["--data", pairs, *SOURCE[2:], "--output", "o/r"]
    merge = ["stage", "merge", "--settings", "{}", *SOURCE[2:], "--adapter", TUNED[3], "--output", "o/merged"]
    answered = ["--output", "o", "--answers", "o/a"]
    task = ["stage", "task", "--settings", canonical(asked), "--rows", "asked.jsonl", "--output", "o/t", *answered[2:]]
    evaluation = ["stage", "evaluate", "--settings", canonical(evaluated), *answered]
    commands = {
        "evaluate_base": [*evaluation, *SOURCE],
        "evaluate": [*evaluation, *SOURCE[:2], *MERGED],
        "task_base": [*task, *SOURCE, "--device", "cuda"],
        "task": [*task, *MERGED, "--device", "cuda"],
        "judge": [
            *("stage", "judge", "--settings", canonical(judge), *SOURCE[:2], "--base", SOURCE[3], "--tuned", MERGED[1]),
            *("--adapter", TUNED[3], "--work", "o/w", "--output", "o/j", "--device", "cuda"),
        ],
        "merge": merge,
        "reference": ["stage", "reference", "--settings", canonical(reference), *referred],
        "render": [
            *("stage", "render", "--settings", canonical(run["render"])),
            *("--estimate", f"results/{run['estimated']}/estimate.json"),
            *("--output", "o/z", "--reasons", "o/r", "--model", "resources/models/tiny", "--weights"),
            *("resources/weights/tiny", "--data", SOURCE[1]),
        ],
    }
    rank = {
        "settings": evaluated | {"ranks": 2},
        "data": SOURCE[1],
        "model": ["resources/weights/tiny", TUNED[3], "results/default/merged"],
        **{"device": "cuda", "folder": "o", "share": [0], "rank": 0, "ranks": 2},
    }
    (project.directory / "rank0.json").write_text(canonical(rank))
    return [
        ("forked_rank", "forked_rank", trained),
        ("evaluate_rank", "evaluate_rank", ["rank0.json"]),
        ("rank", "rank", trained),
        ("probe_rank", "probe_rank", ["--output", "o/p", "--device", "cuda"]),
        *((name, "command", arguments) for name, arguments in commands.items()),
    ]


def as_pairs(rows: Path, pairs: Path) -> str:
    """Write prepared rows again as pairs with two equal answers; return their directory."""
    shutil.copytree(rows, pairs)
    for file in (pairs / "train.arrow", pairs / "validation.arrow"):
        table = pyarrow.ipc.open_stream(file.read_bytes()).read_all()
        for name in ("input_ids", "labels"):
            table = table.append_column(f"rejected_{name}", table[name])
        with pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    manifest = read_json(pairs / MANIFEST, "")
    write_json(pairs / MANIFEST, manifest | {"files": describe(pairs)})
    return str(pairs)


@pytest.fixture(scope="module")
def traced(copy_finished: Callable[[str], Project]) -> dict[str, dict[str, Any]]:
    """Return what each stage did, by name."""
    if reason := cuda_build.lacking():
        pytest.skip(reason)
    project = copy_finished("first_use")
    path = [*cuda_build.path(), str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests/cuda")]
    variables = environment_of("cuda") | {"PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": "0,1"}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("first_use.py"))]
    result = subprocess.run(
        [*command, json.dumps(stages(project))],
        cwd=project.directory,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    print(result.stderr)  # where each stage initialised CUDA
    assert result.returncode == 0
    return dict(json.loads(line) for line in result.stdout.splitlines() if line.startswith('["'))


@pytest.mark.parametrize("stage", FIRST)
def test_cuda_is_initialised_where_it_is_first_used(stage: str, traced: dict[str, dict[str, Any]]) -> None:
    """By a call that initialises it, none before; stages that compute on the CPU never call it."""
    used = traced[stage]
    assert used["initialised"] == FIRST[stage] and not used["bare"], used
    assert used["result"] == "initialises CUDA" if FIRST[stage] else "rror" not in str(used["result"])


def test_ranks_are_forked_beside_gpus(traced: dict[str, dict[str, Any]]) -> None:
    """After their imports, of which bitsandbytes' finds its library for CUDA."""
    expected = {"hindrance": None, "called": False, "library": "CudaBNBNativeLibrary"}
    assert traced["forked_rank"]["result"] == expected
