"""What will not fit is refused before training begins, with what fits; what fits asks for what was computed."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Project
from engines import edit_config

from zerolora.memory.reserve import with_headroom

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ZERO = "results/default/zero.json"
ADVICE = "add to config/config.yaml, or to the run:"


@pytest.fixture(scope="module")
def project(make_project: Callable[[str], Project]) -> Project:
    """Return a project in which all that comes before training is done."""
    project = make_project("gate")
    project.snakemake("results/config.json", ZERO)
    return project


def read(project: Project, name: str) -> Any:
    return json.loads((project.directory / "results/default" / name).read_text())


def test_a_model_that_cannot_be_trained_is_refused_by_the_stage(project: Project) -> None:
    """The estimate cannot see this: the regular expression matches a whole block too, which peft does not adapt."""
    before = json.loads(json.dumps(project.config))
    edit_config(project, **{"train.lora.targets": ".*self_attn.*"})
    assert project.snakemake("all", check=False).returncode != 0
    assert "train.lora.targets '.*self_attn.*' does not fit the model (Target module LlamaAttention" in said(project)
    assert not (project.directory / "results/logs/train").exists()
    edit_config(project, **{"train.lora": before["train"]["lora"]})
    project.snakemake(ZERO)


def said(project: Project) -> str:
    return (project.directory / "results/logs/render/default.log").read_text()


def test_training_does_not_begin_where_it_will_not_fit(project: Project) -> None:
    """The host holds stage 0, which has no buffers of ZeRO, not stage 2; the suggested value then fits."""
    needed = {
        entry["strategy"]: with_headroom(entry["host"]["total"])
        for entry in read(project, "estimate.json")["strategies"]
    }
    assert needed["zero0"] < needed["zero2"]
    between = (needed["zero0"] + needed["zero2"]) // 2
    edit_config(project, **{"hardware.host_memory": f"{between}B"})
    assert project.snakemake("all", check=False).returncode != 0
    directory = project.directory
    assert not (directory / "results/default/adapter").exists()
    assert not (directory / "results/logs/train").exists()
    # The base is evaluated meanwhile, for it does not depend on what trains.
    assert not (directory / "work/checkpoints").exists()
    lines = [line.removeprefix("zerolora: ") for line in said(project).splitlines()]
    assert lines[0].startswith("render.strategy is zero2 and nothing fits")
    row = next(line for line in lines if line.startswith("  zero2: "))
    gib = [f"{value / 2**30:.2f} GiB" for value in (needed["zero2"], between)]
    assert row.endswith(f"needs {gib[0]} of a host's {gib[1]}, headroom included")
    # Of the same engine; stage 1 has the same buffers.
    advice = yaml.safe_load("\n".join(lines[lines.index(ADVICE) + 1 :]))
    assert advice["render"]["strategy"] == "zero0"
    edit_config(project, **{f"{name}.{key}": value for name, keys in advice.items() for key, value in keys.items()})
    project.snakemake(ZERO)
    assert read(project, "zero.json")["zerolora"]["strategy"] == advice["render"]["strategy"]


def test_a_refusal_is_one_message_and_exit_code_2(project: Project) -> None:
    settings = json.loads((project.directory / "results/settings/runs/default.json").read_text())["runs"]["default"][
        "render"
    ]
    estimate = "results/default/estimate.json"
    files = ["--estimate", estimate, "--output", "refused.json", "--reasons", "why.json"]
    small = settings | {"host_memory": 1024**2}
    result = project.run("zerolora", "stage", "render", "--settings", json.dumps(small), *files, check=False)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "use more or larger GPUs" in result.stderr
    assert not (project.directory / "refused.json").exists()


def test_a_disk_without_room_is_refused(project: Project, tmp_path: Path) -> None:
    settings = json.loads((project.directory / "results/settings/runs/default.json").read_text())["runs"]["default"][
        "render"
    ]
    estimate = read(project, "estimate.json")
    # A vocabulary whose embedding fits on no disk and in no host; the host's size is pretended.
    estimate["shape"]["modules"][0]["weights"] = [["weight", [10**12, 10**6]]]
    (tmp_path / "estimate.json").write_text(json.dumps(estimate))
    files = ["--estimate", str(tmp_path / "estimate.json"), "--output", "refused.json", "--reasons", "why.json"]
    large = settings | {"host_memory": 10**24}
    result = project.run("zerolora", "stage", "render", "--settings", json.dumps(large), *files, check=False)
    assert result.returncode == 2
    assert re.search(r"the run writes \S+ GiB \(merged \S+ GiB, .*\), but \S+ GiB of the disk are free", result.stderr)


def resources(project: Project) -> dict[str, str]:
    """Return the resources that a dry run of the Slurm profile shows, by rule."""
    text = project.run("snakemake", "--profile", "profiles/slurm", "--dry-run", "--verbose", "all").stdout
    blocks = re.findall(r"^(?:local)?rule (\w+):\n((?:    .*\n)+)", text, re.MULTILINE)
    return {rule: match[1] for rule, block in blocks if (match := re.search(r"^    resources: (.*)$", block, re.M))}


def test_job_requests_the_computed_resources_unless_the_site_overrides(project: Project) -> None:
    actual, wanted = resources(project), read(project, "render.json")["slurm_resources"]
    assert f"mem_mb={wanted['mem_mib']}," in actual["train"]
    assert f"runtime={wanted['minutes']}," in actual["train"]
    assert "runtime=2" in actual["evaluate"] and "gres=," in f"{actual['evaluate']},"
    assert "mem_mb=<TBD>" in actual["merge"]  # there is no adapter yet
    profile = project.directory / "profiles/slurm/config.yaml"
    shipped = profile.read_text()
    own = yaml.safe_load(shipped)
    own["set-resources"]["train"] |= {"runtime": 33, "mem_mb": 5000}
    own["set-resources"]["evaluate"] = {"mem_mb": 6000}
    profile.write_text(yaml.safe_dump(own))
    actual = resources(project)
    profile.write_text(shipped)
    assert "runtime=33" in actual["train"] and "mem_mb=5000" in actual["train"]
    assert "runtime=2" in actual["evaluate"] and "mem_mb=6000" in actual["evaluate"]


def test_requested_resources_are_read_again_and_rerun_nothing(project: Project) -> None:
    """Ten times the steps take longer; the rows, and with them what train reads before it trains, are the same."""
    before = read(project, "render.json")["slurm_resources"]
    zero = (project.directory / ZERO).read_bytes()
    edit_config(project, **{"train.epochs": 10**6, "train.max_steps": 10**6})
    project.snakemake(ZERO)
    after = read(project, "render.json")["slurm_resources"]
    assert (project.directory / ZERO).read_bytes() == zero
    assert after["minutes"] > before["minutes"]
    assert f"runtime={after['minutes']}," in resources(project)["train"]


def test_gpus_are_requested_if_the_config_has_them(project: Project) -> None:
    hardware = {"device": "cuda", "gpus_per_node": 2, "gpu_memory": "80GiB", "compute_capability": 8.0}
    edit_config(project, **{f"hardware.{key}": value for key, value in hardware.items()}, **{"train.ranks_per_node": 2})
    edit_config(project, **{"hardware.host_memory": "24GiB", "train.micro_batch": 1, "evaluate.max_new_tokens": 5})
    project.snakemake(ZERO)
    actual = resources(project)
    assert "gres=gpu:2" in actual["train"]
    assert "gres=gpu:1" in actual["evaluate"] and "gres=gpu:1" in actual["evaluate_base"]
    assert "gres=" not in actual["merge"]
